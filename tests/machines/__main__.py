"""
Imitates other people's machines, and prints a table of what ./run.sh does on each.

    ./run.sh test machines                  runs all: ten minutes on two cores
    ./run.sh test machines --only network   runs the machines whose name contains this word
    ./run.sh test machines --list           lists the machines without running them

The exit status is 0 if no case failed, and 1 otherwise.
"""

import argparse
import signal
import sys

from tests.machines.cases import CASES
from tests.machines.table import print_table


def main():
    parser = argparse.ArgumentParser(
        description="Imitate other machines, and print what ./run.sh does on each."
    )
    parser.add_argument(
        "--only", default="", metavar="WORD", help="only machines whose name contains this word"
    )
    parser.add_argument("--list", action="store_true", help="list the machines and exit")
    args = parser.parse_args()
    cases = {name: case for name, case in CASES.items() if args.only.lower() in name.lower()}
    if args.list:
        print(*cases, sep="\n")
        return 0
    if not cases:
        parser.error(f"no machine's name contains {args.only!r}; --list shows them")
    # Background jobs of a shell ignore Ctrl-C, and so would the processes that the cases interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return 1 if print_table(cases) else 0


if __name__ == "__main__":
    sys.exit(main())
