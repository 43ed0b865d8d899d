"""
Trains 50 steps of mini on a CPU, and keeps the losses for tools/gpu_report.py to compare a GPU with.

    python tools/gpu_reference.py --seeds 5

Each seed trains in float32, which is the reference, in bf16, and in bf16 with the FP8 head: the
arithmetic of a GPU. How far the losses of the last two are from those of the first says how far a
GPU that computes rightly may be. The result is tools/gpu_reference.json, the losses by step in nats.
"""
import argparse
import hashlib
import json
import statistics
import sys

from bench import ROOT, InputError, positive, run_benchmark, write_json
import train_gpt
import torch

REFERENCE = ROOT / "tools" / "gpu_reference.json"
STEPS = 50
LAST = 10  # steps at the end whose mean loss is compared
VARIANTS = ("float32", "bf16", "fp8")


def settings():
    """The hyperparameters of the 50 steps: mini with a shorter schedule."""
    _, hp = train_gpt.parse_arguments(["--track", "mini", "--num_iterations", str(STEPS)])
    return hp


def tokens_digest(hp):
    """SHA-256 of the tokens of the 50 steps: losses on other tokens can't be compared."""
    digest = hashlib.sha256()
    batches = train_gpt.global_batches(hp.train_files, hp.batch_tokens)
    for _ in range(hp.num_iterations):
        file, start = next(batches)
        tokens = train_gpt.read_tokens(file, start, hp.batch_tokens + 1, hp.vocab_size)
        digest.update(tokens.tobytes())
    return digest.hexdigest()


def losses_of_seeds(hp, world, seeds, dtype, fp8):
    """Trains once per seed. Returns the training losses: {seed: [loss of each step]}."""
    model = train_gpt.GPT(hp, dtype, fp8).to(world.device)
    compiled = torch.compile(model, dynamic=False)
    buckets = train_gpt.GradientBuckets(model.parameters())
    losses = {}
    for seed in map(str, seeds):  # JSON's keys are strings
        model.load_state_dict(train_gpt.GPT(with_seed(hp, int(seed)), dtype, fp8).state_dict())
        optimizers = train_gpt.build_optimizers(model, hp)
        batches = train_gpt.distributed_data_generator(
            hp.train_files, hp.batch_tokens, 0, 1, hp.vocab_size, world.device)
        steps = []
        for step in range(hp.num_iterations):
            train_gpt.set_schedules(optimizers, step, hp)
            inputs, targets = next(batches)
            window = train_gpt.get_window_blocks(step, hp)
            steps.append(train_gpt.train_step(compiled, optimizers, buckets, inputs, targets, window,
                                              hp, world))
        losses[seed] = [round(loss, 6) for loss in torch.stack(steps).tolist()]
        print(f"{dtype}, fp8={fp8}, seed {seed}: {losses[seed][-1]:.4f}", flush=True)
    return losses


def with_seed(hp, seed):
    return train_gpt.dataclasses.replace(hp, seed=seed)


def difference(losses, reference):
    """The mean over the last steps of a run's loss minus the reference's loss of the same seed."""
    pairs = zip(losses[-LAST:], reference[-LAST:])
    return statistics.mean(loss - expected for loss, expected in pairs)


def largest_difference(variant, reference):
    """The largest difference of all seeds, without its sign. Both arguments: {seed: losses}."""
    return max(abs(difference(losses, reference[seed])) for seed, losses in variant.items())


def read_reference():
    return json.loads(REFERENCE.read_text(encoding="utf-8"))


def tolerance(reference):
    """Twice as far as any seed is from float32 with the FP8 head or in bf16 on the CPU, in nats."""
    far = [largest_difference(reference[variant], reference["float32"]) for variant in VARIANTS[1:]]
    return 2 * max(far)


def make_reference(argv):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=positive, default=5, metavar="N",
                        help="seeds 0 to N - 1 (default: 5)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    world = train_gpt.start_world("cpu")
    hp = settings()
    content = {
        "command": " ".join(["python tools/gpu_reference.py", *argv]),
        "machine": train_gpt.CPU_MODEL,
        "PyTorch": torch.__version__,
        "tokens_sha256": tokens_digest(hp),
        "steps": STEPS,
    }
    cpu_flags = train_gpt.CPU_FLAGS
    for variant in VARIANTS:
        # activation_dtype looks at these flags
        train_gpt.CPU_FLAGS = set() if variant == "float32" else cpu_flags | {"avx512_bf16"}
        dtype = train_gpt.activation_dtype(world.device)
        losses = losses_of_seeds(hp, world, range(args.seeds), dtype, fp8=variant == "fp8")
        content[variant] = losses
        torch._dynamo.reset()
    for variant in VARIANTS[1:]:
        far = largest_difference(content[variant], content["float32"])
        print(f"{variant}: at most {far:.4f} from float32")
    write_json(REFERENCE, content)


if __name__ == "__main__":
    sys.exit(run_benchmark(make_reference, sys.argv[1:]))
