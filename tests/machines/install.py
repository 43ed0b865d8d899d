"""Machines on which run.sh has to find its way: Pythons, packages, networks, disks, interruptions."""
CASES = []
