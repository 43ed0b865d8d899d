"""
What happens on other people's machines: imitates each, and prints a table of how it went.

    python tests/machines                  all cases: about twenty minutes on two cores
    python tests/machines --only network   those whose situation has this word
    python tests/machines --list           the situations, without running them

Cases that are not about installation use the Python that runs this command, with its packages.
Exit status: 0 all that could run were right, 1 one failed.
"""

import argparse
import signal
import sys

import install
import training
from table import print_table


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Imitate other machines, and print how the program does there."
    )
    parser.add_argument(
        "--only", default="", metavar="WORD", help="only situations that contain this word"
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
    # a shell's background job ignores Ctrl-C, and so would all that the cases start and interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return 1 if print_table(cases) else 0


if __name__ == "__main__":
    sys.exit(main())
