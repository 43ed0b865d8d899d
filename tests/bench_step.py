"""
What a training step costs on this machine, against what the machine can multiply.

    python tests/bench_step.py                              the default track and device
    python tests/bench_step.py --track fineweb              on a CPU in steps of 1,024 tokens, not 393,216
    python tests/bench_step.py --num_layers 4 --repeats 50  any option of train_gpt.py

The peak is measured, before and after the step: the best of several large square products in the type of the
activations. Times are medians on random tokens with the last, longest window. GFLOP are what the mathematics asks for
(tests/gpu/bench.py has the formula): backward twice what forward does, attention only the visible pairs, and for the
optimizers the products of Newton-Schulz alone. What is missing to the peak is element-wise work, masked pairs, memory
and small products. The second table has the weights' products of one pass alone, as forward computes them.
"""
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import argparse

import torch

import bench
import train_gpt


def seconds_of(run, device, repeats):
    """-> the times of `repeats` calls, sorted, after one that is not timed."""
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times[1:])


def matmul_peak(device):
    """-> FLOP/s of the best of eight large square products."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, device=device).to(train_gpt.activation_dtype(device)) for _ in range(2))
    return 2 * n**3 / seconds_of(lambda: a @ b, device, 8)[0]


def newton_schulz_flops(optimizer):
    """Of one step of Muon: `ns_steps` times A = X X^T, A A and B X for X (m, n) with m <= n."""
    flops = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            m, n = sorted(p.shape[-2:])
            flops += p.numel() // (m * n) * group["ns_steps"] * 2 * (2 * m * m * n + m**3)
    return flops


def products(hp):
    """-> [(name, inputs, outputs)] of the weights' products."""
    dim, hdim = hp.model_dim, hp.num_heads * hp.head_dim
    return [("attention in", dim, 3 * hdim), ("attention out", hdim, dim), ("MLP in", dim, 4 * dim),
            ("MLP out", 4 * dim, dim), ("head", dim, hp.padded_vocab_size)]


def print_table(header, rows):
    """Columns as wide as what is in them; the first one to the left, the others to the right."""
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        print("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]))


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n\n")[0], allow_abbrev=False,
                                     epilog="All other options go to train_gpt.py.")
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="timed steps (default: 30)")
    args, rest = parser.parse_known_args(argv)
    try:
        if args.repeats < 1:
            raise train_gpt.InputError(f"--repeats {args.repeats}: must be at least 1")
        options, hp = train_gpt.parse_arguments(rest)
        if options.device == "cpu" and options.track == "fineweb":  # the track's own step would take an hour
            options, hp = train_gpt.parse_arguments(
                ["--batch_tokens", "1024", "--train_seq_len", "1024", "--val_seq_len", "1024", *rest])
        train_gpt.check_hyperparameters(hp, 1)
        world = train_gpt.start_world(options.device)
    except train_gpt.InputError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2

    peak = matmul_peak(world.device)
    figures, _ = bench.measure(hp, world, warmup=3, repeats=args.repeats, kernels=None, peak_flops=peak)
    after = matmul_peak(world.device)

    on_cuda = world.device.type == "cuda"
    name = torch.cuda.get_device_name() if on_cuda else f"{train_gpt.CPU_MODEL}, {torch.get_num_threads()} threads"
    print(f"{name}, PyTorch {torch.__version__}")
    passes = hp.batch_tokens // figures["micro-step tokens"]
    print(f"{options.track}: {hp.num_layers} layer{'s' * (hp.num_layers > 1)}, width {hp.model_dim}; "
          f"{hp.batch_tokens:,} tokens a step, in {passes} pass{'es' * (passes > 1)} of {figures['micro-step tokens']:,}")
    print(f"matmul peak: {peak / 1e9:,.0f} GFLOP/s before, {after / 1e9:,.0f} after the step was timed\n")
    peak = max(peak, after)

    muon = train_gpt.build_optimizers(train_gpt.build_model(hp, world), hp)[1]
    one_pass = 1e12 * figures["step model TFLOP"] / passes
    rows = []
    for part, ms, flops in [("forward", figures["forward ms"], one_pass / 3),
                            ("backward", figures["backward ms"], one_pass * 2 / 3),
                            ("optimizers", figures["optimizer ms"], newton_schulz_flops(muon)),
                            ("whole step", figures["step ms"], passes * one_pass + newton_schulz_flops(muon))]:
        rate = flops / (ms / 1000)
        rows.append([part, f"{ms:,.2f}", f"{flops / 1e9:,.2f}", f"{rate / 1e9:,.0f}", f"{100 * rate / peak:.0f}"])
    print_table(["part", "ms", "GFLOP", "GFLOP/s", "% of peak"], rows)
    print(f"\n{figures['tokens/s']:,.0f} tokens/s; first step, with compilation: {figures['first step s']:.1f} s\n")

    tokens, rows = figures["micro-step tokens"], []
    for product, inputs, outputs in products(hp):
        x, w = (torch.randn(shape, device=world.device).to(train_gpt.activation_dtype(world.device))
                for shape in ((tokens, inputs), (outputs, inputs)))
        times = seconds_of(lambda: torch.nn.functional.linear(x, w), world.device, args.repeats)
        flops, median = 2 * tokens * inputs * outputs, times[len(times) // 2]
        rows.append([product, f"{tokens:,} x {inputs:,} x {outputs:,}", f"{1000 * median:,.3f}",
                     f"{flops / 1e9:,.3f}", f"{flops / median / 1e9:,.0f}", f"{100 * flops / median / peak:.0f}"])
    print_table(["product", "shape", "ms", "GFLOP", "GFLOP/s", "% of peak"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
