"""
Trains 50 steps of an older mini on a CPU. tools/gpu/report.py compares the losses of a GPU with
these losses.

    python -m tools.gpu.reference --seeds 5

Each seed trains three times: in float32, in bf16, and in bf16 with the FP8 head. The float32 losses
are the reference. The other two runs use the arithmetic of a GPU, so their distance from the
reference says how far a correct GPU may be from it, on the mean over the seeds.

The result is tools/gpu_reference.json: the losses of each step, in nats per token.
"""
import argparse
import dataclasses
import hashlib
import itertools
import json
import statistics
import sys

from tools.common import ROOT
from tools.gpu.bench import InputError, positive, run_benchmark, write_json
import train_gpt
import torch

REFERENCE = ROOT / "tools" / "gpu" / "reference.json"
STEPS = 50
# The mean losses of these steps are compared: before roundings have made two runs differ, and at the end
WINDOWS = {"steps 11 to 20": slice(10, 20), "steps 41 to 50": slice(40, 50)}
VARIANTS = ("float32", "bf16", "fp8")


# mini as it was when the losses were kept: without smear, XSA and leaky ReLU, with 384 logits
OPTIONS = [
    "--track", "mini",
    "--num_iterations", str(STEPS),
    "--smear", "false",
    "--xsa", "false",
    "--relu_slope", "0",
    "--muon_momentum", "0.9",
    "--vocab_size", "384",
]


def settings():
    """The hyperparameters of the 50 steps: an older mini with a shorter schedule."""
    _, hp = train_gpt.parse_arguments(OPTIONS)
    return hp


def first_batches(hp):
    batches = train_gpt.distributed_data_generator(hp.train_files, hp.batch_tokens, hp.vocab_size, 0, 1)
    return itertools.islice(batches, hp.num_iterations)


def tokens_digest(hp):
    """SHA-256 of the tokens of the 50 steps: losses on other tokens can't be compared."""
    digest = hashlib.sha256()
    for tokens in first_batches(hp):
        digest.update(tokens.numpy().astype("<u2").tobytes())
    return digest.hexdigest()


def losses_of_seeds(hp, seeds):
    """Trains once per seed. Returns the training losses: {seed: [loss of each step]}."""
    model = train_gpt.build_model(hp)
    model.compile(dynamic=False)
    buckets = train_gpt.GradientBuckets(model.parameters())
    losses = {}
    for seed in map(str, seeds):  # JSON's keys are strings
        initial = train_gpt.build_model(dataclasses.replace(hp, seed=int(seed)))
        model.load_state_dict(initial.state_dict())
        optimizers = train_gpt.build_optimizers(model, hp)
        steps = []
        for step, tokens in enumerate(first_batches(hp)):
            steps.append(train_gpt.train_step(model, optimizers, buckets, tokens, step, hp))
        losses[seed] = [round(loss, 6) for loss in torch.stack(steps).tolist()]
        print(f"seed {seed}: {losses[seed][-1]:.4f}", flush=True)
    return losses


def differences(variant, reference, window):
    """For each seed, the mean loss of a window's steps minus the reference's. Arguments: {seed: losses}."""
    found = []
    for seed, losses in variant.items():
        steps = WINDOWS[window]
        found.append(statistics.mean(losses[steps]) - statistics.mean(reference[seed][steps]))
    return found


def tolerance(reference, window):
    """How far the mean over the seeds may be from float32, in nats.

    This is the distance of the CPU in bf16, or with the FP8 head if that is larger, plus four
    standard errors.
    """
    tolerances = []
    for variant in VARIANTS[1:]:
        found = differences(reference[variant], reference["float32"], window)
        standard_error = statistics.stdev(found) / len(found)**0.5
        tolerances.append(abs(statistics.mean(found)) + 4 * standard_error)
    return max(tolerances)


def read_reference():
    return json.loads(REFERENCE.read_text(encoding="utf-8"))


def make_reference(argv):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=positive, default=5, metavar="N",
                        help="train with the seeds 0 to N - 1 (default: 5)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    train_gpt.init_processes()
    hp = settings()
    content = {
        "command": " ".join(["python -m tools.gpu.reference", *argv]),
        "machine": train_gpt.CPU_MODEL,
        "PyTorch": torch.__version__,
        "tokens_sha256": tokens_digest(hp),
        "steps": STEPS,
    }
    for variant in VARIANTS:
        train_gpt.DTYPE = torch.float32 if variant == "float32" else torch.bfloat16
        train_gpt.uses_fp8 = lambda hp: variant == "fp8"
        content[variant] = losses_of_seeds(hp, range(args.seeds))
        torch._dynamo.reset()
    for window in WINDOWS:
        print(f"{window}: tolerance {tolerance(content, window):.4f}")
    write_json(REFERENCE, content)


if __name__ == "__main__":
    sys.exit(run_benchmark(make_reference, sys.argv[1:]))
