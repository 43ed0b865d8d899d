"""
Times a training step next to 0, 1, ... N busy processes, to see what other programs cost.

    python tools/bench_busy.py                         next to none, one and two processes
    python tools/bench_busy.py --busy 1 --track mini   next to none and one; any option of train_gpt.py
    python tools/bench_busy.py --openmp "GOMP_SPINCOUNT=10000" --openmp "GOMP_SPINCOUNT=1000"

A busy process loops in Python. How much it slows a step down depends on how OpenMP's threads wait for
each other, which PyTorch reads from environment variables when it is loaded. So each setting of these
variables has a process of its own, which is stopped while others are timed. The settings are:

- train_gpt.py's own
- OpenMP's default: PyTorch is loaded before train_gpt.py can set anything
- those of --openmp

OMP_WAIT_POLICY and GOMP_SPINCOUNT of your own environment are ignored. A round times every setting
once next to every number of busy processes. There are --rounds rounds, so a machine that slows down
with time favors no setting. The table shows the median, the lowest and the highest of the rounds'
medians in milliseconds.
"""
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys

from bench import (InputError, ROOT, describe_run, make_parser, median_ms, positive, print_table,
                   read_options, run_benchmark, set_up_training, start, write_json)
import train_gpt

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # whether and how long a waiting thread keeps its core
OWN = "train_gpt.py's own"
DEFAULT = "OpenMP's default"

BUSY_LOOP = """
import os
print(flush=True)
while os.getppid() == {parent}:
    for _ in range(10**6):
        pass
"""
SERVE_STEPS = """
import sys
sys.path.insert(0, {tools!r})
import {modules}
bench_busy.serve_steps({argv!r})
"""


@contextlib.contextmanager
def child(code, env=None):
    """Runs Python code in another process, which ends with the `with` block.

    The process has its own process group, so that Ctrl-C reaches only this program.
    """
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, encoding="utf-8", errors="replace",
                          process_group=0, env=env) as process:
        try:
            yield process
        finally:
            process.kill()  # SIGTERM would not reach a stopped process


def busy_process():
    """A process that loops until the `with` block ends, or until this process is gone."""
    return child(BUSY_LOOP.format(parent=os.getpid()))


def stepping_process(setting, argv):
    """A process that runs training steps with this OpenMP setting when it is told to.

    It inherits the environment, with what train_gpt.py has set in it for the compiler. If PyTorch is
    loaded first, this is the only way that these variables can reach it.
    """
    environment = dict(os.environ)
    for name in WAITING:
        environment.pop(name, None)
    modules = "bench_busy"
    if setting == DEFAULT:
        modules = "torch, bench_busy"  # loaded first, torch doesn't see what train_gpt.py sets
    elif setting != OWN:
        for pair in setting.split():
            name, value = pair.split("=", 1)
            environment[name] = value
    code = SERVE_STEPS.format(tools=str(ROOT / "tools"), modules=modules, argv=argv)
    return child(code, env=environment)


def serve_steps(argv):
    """Runs in a stepping process. Prints JSON, one value a line.

    First the waiting variables that are set, as text. Then, for each line of input, the median of
    some steps in milliseconds.
    """
    args, options, hp = read_busy_options(argv)
    world, hp = start(options, hp)
    training = set_up_training(hp, world)
    for _ in range(1 + args.warmup):
        training.step()
    variables = [f"{name}={os.environ[name]}" for name in WAITING if name in os.environ]
    print(json.dumps(" ".join(variables)), flush=True)
    for _ in sys.stdin:
        training.step()  # fills the processor's caches again
        print(json.dumps(median_ms(training.step, world.device, args.repeats)), flush=True)


def answer(process, setting):
    """Reads the next value from a stepping process, then stops it: even waiting threads use a core."""
    line = process.stdout.readline()
    if not line:
        raise InputError(f"--busy: the process for {setting} ended with exit code {process.wait()}; "
                         "its error is above")
    process.send_signal(signal.SIGSTOP)
    return json.loads(line)


def time_settings(processes, busy):
    """Returns {setting: median in ms}, each next to `busy` busy processes."""
    medians = {}
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(busy_process()) for _ in range(busy)]
        for other in others:
            other.stdout.readline()  # it has started its loop
        for setting, process in processes.items():
            process.send_signal(signal.SIGCONT)
            print(file=process.stdin, flush=True)
            medians[setting] = answer(process, setting)
    return medians


def time_beside_others(args, argv):
    """Returns {setting: medians}, where medians[n] has a value in ms for each round, next to n busy
    processes. Prints what train_gpt.py has set."""
    def end(number, frame):
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)  # leaves the `with` blocks, which end the other processes
    settings = [OWN, DEFAULT, *args.openmp]
    medians = {}
    for setting in settings:
        medians[setting] = [[] for _ in range(args.busy + 1)]
    processes = {}
    chosen = {}
    with contextlib.ExitStack() as stack:
        for setting in settings:  # one after the other, because compiling uses all cores
            processes[setting] = stack.enter_context(stepping_process(setting, argv))
            chosen[setting] = answer(processes[setting], setting)
        print(f"{OWN}: {chosen[OWN] or DEFAULT}", flush=True)
        for number, busy in itertools.product(range(args.rounds), range(args.busy + 1)):
            print(f"round {number + 1} of {args.rounds}, next to {busy}", file=sys.stderr)
            for setting, ms in time_settings(processes, busy).items():
                medians[setting][busy].append(ms)
    return medians


def print_medians(medians):
    rows = []
    for setting, by_busy in medians.items():
        alone = statistics.median(by_busy[0])
        for busy, rounds in enumerate(by_busy):
            ms = statistics.median(rounds)
            name = setting if busy == 0 else ""
            next_to = "alone" if busy == 0 else f"{busy} busy"
            spread = f"{min(rounds):,.1f} to {max(rounds):,.1f}"
            rows.append([name, next_to, f"{ms:,.1f}", f"{ms / alone:.2f}", spread])
    print_table(["setting", "next to", "ms", "x alone", "lowest to highest"], rows)


def check_openmp(setting):
    pairs = setting.split()
    names_openmp = [re.fullmatch(r"(OMP|GOMP|KMP)_\w+=.+", pair) for pair in pairs]
    if not pairs or not all(names_openmp):
        raise InputError(f'--openmp "{setting}": give OpenMP variables, as in '
                         '"OMP_WAIT_POLICY=PASSIVE"')


def read_busy_options(argv):
    parser = make_parser(__doc__)
    parser.add_argument("--busy", type=positive, default=2, metavar="N",
                        help="measure with 0 to N busy processes (default: 2)")
    parser.add_argument("--openmp", action="append", default=[], metavar="NAME=VALUE",
                        help="also time this setting; several variables are separated by spaces")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N",
                        help="number of rounds, 3 or more (default: 3)")
    args, options, hp = read_options(parser, argv)
    for setting in args.openmp:
        check_openmp(setting)
    if args.rounds < 3:
        raise InputError(f"--rounds {args.rounds}: must be at least 3, to show how much they vary")
    return args, options, hp


def bench_busy(argv):
    args, options, _ = read_busy_options(argv)
    world = train_gpt.start_world(options.device)
    facts = describe_run(world.device, " ".join(["python tools/bench_busy.py", *argv]))
    medians = time_beside_others(args, argv)
    print_medians(medians)
    if args.json:
        write_json(args.json, facts | {"busy ms": medians})


if __name__ == "__main__":
    sys.exit(run_benchmark(bench_busy, sys.argv[1:]))
