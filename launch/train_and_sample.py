"""
Trains as `python -m SCRIPT OPTIONS...` does. Then rank 0 lets the model write a short text, in the same
process: importing PyTorch once more would take seconds.

    python -m launch.train_and_sample SCRIPT [OPTIONS...]
"""

import contextlib
import importlib
import os
import sys
import warnings
from pathlib import Path

from launch import terminal
from lib.processes import checkpoints


def write_sample(script, options):
    """Lets the model of the newest checkpoint write. The training has succeeded, whatever happens here."""
    args, _ = script.parse_arguments(options)
    folder = Path(args.resume).parent if args.resume else Path(args.log_dir)
    _, newest = checkpoints(folder)[-1]
    try:
        from evals import sample

        sys.stdout.reconfigure(errors="replace")  # for characters that the terminal can't show
        sample.sample_after_training(newest)
    except Exception as e:  # an idea may change the model in ways that evals/ doesn't know
        print(f"can't print a sample: {e}", file=sys.stderr)


def main(argv):
    warnings.simplefilter("ignore", FutureWarning)  # of PyTorch, about names that will change
    name, *options = argv
    watched = sys.stdout.isatty() and int(os.getenv("RANK") or 0) == 0
    with terminal.watched() if watched else contextlib.nullcontext() as screen:
        script = importlib.import_module(name)
        status = script.main(options)
    if watched and status == 0:
        terminal.draw(screen.log)
    if status == 0 and script.RANK == 0:
        write_sample(script, options)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
