"""A stand-in for train_gpt.py, which trains nothing: losses and times of known distribution, in a log of its format."""

with open(__file__, newline="", encoding="utf-8") as f:
    SOURCE = f.read()

import argparse, dataclasses, json, math, os, random, sys, time


class InputError(Exception):
    pass


@dataclasses.dataclass
class Hyperparameters:
    num_iterations: int = 100
    val_loss_every: int = 0
    effect: float = 0.0  # on the loss
    noise: float = 0.002
    slower: float = 1.0  # factor of a step's time
    takes: float = 0.0  # seconds
    crash: int = -1  # the seed that fails
    seed: int = 0


def parse_arguments(argv):
    def fail(message):
        raise InputError(message)

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.error = fail
    parser.add_argument("--track", choices=["shakespeare"], default="shakespeare")
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--log_dir", default="logs")
    parser.add_argument("--checkpoint_dir", default="checkpoints")
    for field in dataclasses.fields(Hyperparameters):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default)
    args = parser.parse_args(argv)
    return args, Hyperparameters(
        **{f.name: getattr(args, f.name) for f in dataclasses.fields(Hyperparameters)}
    )


def check_hyperparameters(hp, world_size):
    if hp.num_iterations < 1:
        raise InputError(f"--num_iterations {hp.num_iterations}: must be more than zero")


def main(argv):
    args, hp = parse_arguments(argv)
    check_hyperparameters(hp, 1)
    n, draw = hp.num_iterations, random.Random(repr(hp))
    print("the console", flush=True)
    time.sleep(hp.takes)
    if hp.seed == hp.crash:
        sys.exit("step 7: the loss is not finite")
    loss = 1.5 + hp.effect - 0.3 * math.log(n / 100) + draw.gauss(0, hp.noise)
    ms = 40 * hp.slower * math.exp(draw.gauss(0, 0.01))
    os.makedirs(args.log_dir)
    with open(
        os.path.join(args.log_dir, f"{draw.getrandbits(64):x}.txt"),
        "w",
        newline="",
        encoding="utf-8",
    ) as f:
        print(
            SOURCE,
            "=" * 100,
            "Running PyTorch 2.13.0",
            "CPU: none, 2 cores",
            f"Compiler: none; flags: -; model compiled: {os.environ.get('STANDIN_COMPILED', 'yes')}",
            f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}",
            "=" * 100,
            f"hyperparameters: {json.dumps(dict(dataclasses.asdict(hp), track='shakespeare'))}",
            f"step:0/{n} val_loss:5.9000 train_time:0ms step_avg:0.00ms",
            f"step:{n}/{n} val_loss:{loss:.4f} train_time:{n * ms:.0f}ms step_avg:{ms:.2f}ms",
            sep="\n",
            file=f,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
