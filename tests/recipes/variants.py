"""The script with one change, for controls: a test that passes on the script must fail on these."""

import importlib.util
import itertools
import sys

import january2026
from util import ROOT

SCRIPT = ROOT / "recipes" / "january2026.py"
numbers = itertools.count()


def variant(*changes):
    """The module with each text `old` replaced by `new`. `old` must occur exactly once. Otherwise
    raises LookupError, because controls expect an AssertionError, from the test itself."""
    source = january2026.SOURCE
    for old, new in changes:
        if source.count(old) != 1:
            raise LookupError(f"{source.count(old)} times in the script: {old}")
        source = source.replace(old, new)
    number = next(numbers)
    # an operator's name can be registered only once
    source = source.replace("nanogpt2026", f"nanogpt2026_{number}")
    name = f"january2026_{number}"
    spec = importlib.util.spec_from_loader(name, loader=None)
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(SCRIPT)
    sys.modules[name] = module  # dataclasses look their module up
    exec(compile(source, name, "exec"), module.__dict__)
    return module
