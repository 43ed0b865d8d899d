"""
Imitates other people's machines, and prints a table of what happens on each.

    python tests/machines                  runs all cases: 20 to 30 minutes on two cores
    python tests/machines --only network   runs the situations that contain this word
    python tests/machines --list           lists the situations without running them

Cases that are not about installation use the Python that runs this command, with its packages.
The exit status is 0 if no case failed, and 1 otherwise.
"""

import argparse
import signal
import sys

import install
import training
from table import print_table


def main() -> int:
    description = "Imitate other machines, and print what happens on each."
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--only",
        default="",
        metavar="WORD",
        help="only situations that contain this word",
    )
    parser.add_argument("--list", action="store_true", help="list the situations and exit")
    args = parser.parse_args()
    cases = [
        case
        for case in install.CASES + training.CASES
        if args.only.lower() in case.situation.lower()
    ]
    if args.list:
        for case in cases:
            print(f"{case.situation} ({case.wanted})")
        return 0
    if not cases:
        print(f"error: no situation contains {args.only!r}; --list shows them", file=sys.stderr)
        return 2
    # Background jobs of a shell ignore Ctrl-C, and so would the processes that the cases interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failed = print_table(cases)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
