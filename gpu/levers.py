"""
Measures what each speedup of recipes/gpt2.py gives on this machine.

    ./run.sh levers [--track mini] [--steps 20] [--sequences 16]

Each row of the table adds one speedup to the row above it: the median time of whole training steps on
random tokens, after a few untimed ones. What the hardware doesn't have, such as TF32 on a CPU, changes
nothing. On one A100, others have reduced GPT-2 124M from 1000 ms a step to 90 ms.
"""

from dataclasses import replace

from recipes import gpt2  # before torch: it sets variables that torch reads
from judge.commands import command_parser, run_command, whole_number
from gpu.measure import device_name, median_ms
from train_gpt import ON_GPU

import torch

# name in the table -> setting; the first row has none of them
LEVERS = {
    "float32": None,
    "TF32 matmuls": "tf32",
    "bf16 autocast": "bf16",
    "torch.compile": "compile",
    "flash attention": "flash",
    "padded vocabulary": "pad_vocab",
    "fused AdamW": "fused",
}


def median_step(hp, steps):
    """Returns the median time of a training step in milliseconds."""
    torch._dynamo.reset()
    model = gpt2.build_model(hp)
    optimizer = gpt2.build_optimizer(model, hp)
    tokens = torch.randint(hp.vocab_size, (hp.batch_tokens + 1,), dtype=torch.int32)

    def step():
        gpt2.train_step(model, optimizer, tokens, 0, hp)

    for _ in range(3):
        step()
    return median_ms(step, steps)


def main(argv):
    parser = command_parser("levers", __doc__)
    add = parser.add_argument
    track = "fineweb" if ON_GPU else "mini"
    add("--track", choices=gpt2.TRACKS, default=track, help="the model; default here: %(default)s")
    add("--steps", type=whole_number, default=20, help="timed steps per row; default: 20")
    add("--sequences", type=whole_number, default=16, help="sequences per step; default: 16")
    args = parser.parse_args(argv)
    hp = gpt2.TRACKS[args.track]
    tokens = args.sequences * hp.block_size
    off = {lever: False for lever in LEVERS.values() if lever}
    hp = replace(hp, batch_tokens=tokens, sequences_per_pass=args.sequences, **off)

    print(f"{device_name()}, PyTorch {torch.__version__}")
    print(f"{args.track}: {tokens} tokens per step, median of {args.steps} steps\n")
    print(f"{'each row adds':<18} {'ms/step':>9} {'tokens/s':>10} {'x previous':>11} {'x first':>8}")
    first = previous = None
    for name, lever in LEVERS.items():
        if lever:
            hp = replace(hp, **{lever: True})
        ms = median_step(hp, args.steps)
        first = first or ms
        previous = previous or ms
        row = f"{name:<18} {ms:>9.1f} {1000 * tokens / ms:>10,.0f}"
        print(f"{row} {previous / ms:>11.2f} {first / ms:>8.2f}", flush=True)
        previous = ms


if __name__ == "__main__":
    run_command(main)
