"""What each command does in the same way: a user's error, signals, and options."""

import argparse
import difflib
import math
import os
import signal
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path


PROGRAM = os.environ.get("JUDGE_PROGRAM", "judge")  # what the user has typed


class UserError(OSError):
    """What the user can mend, in one line that says what to do. Lines above it are the output of a program
    that failed. It is an OSError, because every command prints those in the same way."""


def stop_on_signals() -> None:
    """Makes SIGTERM and SIGHUP (the terminal was closed) raise KeyboardInterrupt, like Ctrl-C.

    SIGHUP may come twice: from the terminal and from the shell. The second one must not interrupt the
    cleanup, so it is ignored. So is the first one under nohup."""

    def hang_up(number, frame):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)


def run_command(main, *more_errors: type[Exception]) -> None:
    """Runs main(argv) and exits with its status.

    After a UserError, another OSError or one of `more_errors`, it prints the message and exits with status
    2. After Ctrl-C, the status is 130.
    """
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has closed the pipe, so Python's last flush would fail, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except (OSError, *more_errors) as e:
        *above, line = str(e).split("\n")
        print(*above, f"error: {line}", sep="\n", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)


def did_you_mean(word: str, names: Collection[str]) -> str:
    """Names what the user may have meant, such as "; did you mean sample?". "" if no name is like it."""
    word = word.strip("-")
    longer = [name for name in names if word in name]
    close = (longer or difflib.get_close_matches(word, names))[:6]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def wrap_paragraphs(text: str) -> str:
    """Paragraphs for 80 columns. Those that begin with a space stay as they are."""
    paragraphs = text.strip("\n").split("\n\n")
    filled = [
        text if text.startswith(" ") else textwrap.fill(text, 79, break_on_hyphens=False)
        for text in paragraphs
    ]
    return "\n\n".join(filled)


def command_parser(command: str, description: str, refuse=None) -> argparse.ArgumentParser:
    """The parser of a command. Its --help shows the description, with the program's name. It calls refuse(message)
    instead of argparse's own way to end with an error."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} {command}",
        description=wrap_paragraphs(description).replace("    judge ", f"    {PROGRAM} "),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    refuse = refuse or parser.error

    def error(message):
        _, _, unknown = message.partition("unrecognized arguments: ")
        if unknown.startswith("--"):
            message += did_you_mean(unknown.split("=")[0].split()[0], parser._option_string_actions)
        refuse(message)

    parser.error = error
    return parser


def join_values(argv: list[str], names: Collection[str]) -> list[str]:
    """Joins these options with their values, because argparse takes a value like "--lr 2" for an option."""
    joined = []
    for word in argv:
        if joined and joined[-1] in names:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def whole_number(text: str) -> int:
    """An option's value that must be at least 1. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, at least 1")
    return int(text)


def positive(text: str) -> float:
    """An option's value above zero. Raises ArgumentTypeError."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be more than zero")
    return value


def fraction(text: str) -> float:
    """A percentage as an option's value: "2%" or "2" as 0.02. Raises ArgumentTypeError."""
    value = float(text.removesuffix("%")) / 100
    if not 0 < value <= 0.5:
        raise argparse.ArgumentTypeError(f"{text}: must be a percentage of at most 50%, like 2%")
    return value


def output_file(text: str) -> Path:
    """A file that is written in the end, so its folder must be there. Raises ArgumentTypeError."""
    if not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: its folder doesn't exist; make it first")
    return Path(text)
