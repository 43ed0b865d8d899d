"""
Does an idea help? Trains a base and your ideas until the answer is clear.

    judge init          two short runs; writes judge.toml
    judge compare       an idea against a base, or finished logs
    judge screen        which parts of an idea matter?
    judge plot          loss curves

--help after a command lists its options.
"""

import importlib

from judge.commands import UserError, run_command, stop_on_signals

COMMANDS = {
    "init": "judge.init",
    "compare": "judge.compare.compare",
    "screen": "judge.screen.screen",
    "plot": "judge.plot.plot",
}


def run(argv: list[str]) -> int:
    """Runs a command with its options. Returns its exit status. Raises UserError."""
    name, *words = argv or ["--help"]
    if name in ("--help", "-h"):
        print(__doc__.strip())
        return 0
    if name not in COMMANDS:
        raise UserError(f"there is no command {name}; judge --help lists them")
    return importlib.import_module(COMMANDS[name]).main(words)


def main() -> None:
    stop_on_signals()
    run_command(run)


if __name__ == "__main__":
    main()
