"""A stand-in for train_gpt.py that trains nothing: its losses and times have known distributions."""

with open(__file__, newline="", encoding="utf-8") as f:
    SOURCE = f.read()

import argparse
import dataclasses
import json
import math
import os
import random
import sys
import time


@dataclasses.dataclass
class Hyperparameters:
    track: str = "mini"
    num_iterations: int = 100
    val_loss_every: int = 0
    val_tokens: int = 512
    effect: float = 0.0  # on the loss
    factor: float = 1.0  # of the effect, at this size
    noise: float = 0.002  # standard deviation that is shared by all variants with a seed
    own_noise: float = 0.001
    slower: float = 1.0  # factor of a step's time
    takes: float = 0.0  # seconds of a run, apart from its steps
    crash: int = -1  # the seed that fails
    seed: int = 0


def parse_arguments(argv):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.error = fail
    parser.add_argument("--log_dir", default="logs")
    parser.add_argument("--num_runs", type=int, default=1)
    parser.add_argument("--print_settings", action="store_true")
    for field in dataclasses.fields(Hyperparameters):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default)
    args = parser.parse_args(argv)
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(Hyperparameters)}
    return args, Hyperparameters(**values)


def fail(message):
    sys.exit(f"error: {message}")


def check_hyperparameters(hp):
    if hp.num_iterations > 1000:
        fail("too few data")


def final_loss(hp):
    common = random.Random(f"seed {hp.seed}").gauss(0, hp.noise)
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    settings = (hp.seed, hp.num_iterations, hp.effect, hp.slower, threads)
    own = random.Random(repr(settings)).gauss(0, hp.own_noise)
    return 1.5 + hp.effect * hp.factor - 0.123 * math.log(hp.num_iterations / 100) + common + own


def header(hp):
    return [
        SOURCE,
        "=" * 100,
        "Running PyTorch 2.13.0",
        "CPU: none, 2 cores",
        "Compiler: none; flags: -; model compiled: no (why not)",
        f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}",
        "=" * 100,
        f"hyperparameters: {json.dumps(dataclasses.asdict(hp))}",
        f"step:0/{hp.num_iterations} val_loss:5.9000 train_time:0ms step_avg:0.00ms",
    ]


def run(hp, log_dir):
    if hp.seed == hp.crash:
        sys.exit("step 7: the loss is not finite")
    time.sleep(hp.takes)
    n = hp.num_iterations
    started = time.perf_counter()
    for step in range(1, n + 1):
        time.sleep(0.001 * hp.slower)
        ms = 1000 * (time.perf_counter() - started)
        print(f"step:{step}/{n} train_time:{ms:.3f}ms step_avg:{ms / step:.2f}ms", flush=True)
    last = f"step:{n}/{n} val_loss:{final_loss(hp):.4f} train_time:{ms:.0f}ms step_avg:{ms / n:.2f}ms"
    name = f"{random.Random(repr(hp)).getrandbits(64):x}.txt"
    with open(os.path.join(log_dir, name), "w", newline="", encoding="utf-8") as file:
        file.write("\n".join([*header(hp), last]) + "\n")


def main(argv):
    args, hp = parse_arguments(argv)
    check_hyperparameters(hp)
    if args.print_settings:
        return print(json.dumps(dataclasses.asdict(hp)))
    print("the console", file=sys.stderr, flush=True)
    os.makedirs(args.log_dir, exist_ok=True)
    for i in range(args.num_runs):
        run(dataclasses.replace(hp, seed=hp.seed + i), args.log_dir)


if __name__ == "__main__":
    main(sys.argv[1:])
