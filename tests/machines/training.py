"""Machines on which train_gpt.py itself has to find its way: compilers, caches, cores, signals."""

CASES = []
