"""
What a training step costs on this machine: forward, backward, optimizers, memory, compilation, kernels.

    python tests/gpu/bench.py                            one line a figure, on the GPU if there is one
    python tests/gpu/bench.py --kernels 25               and the 25 kernels that take longest
    python tests/gpu/bench.py --fp8 false --seed 1       any option of train_gpt.py
    python tests/gpu/bench.py --device cpu --repeats 3   the CPU's track, to try the script itself
    python tests/gpu/bench.py --report "what changed" --shards DIR
                                                         the GPU tests, 200 steps on DIR's shards with FP8 on and
                                                         off, the figures: a row more in records/fineweb/HOPPER.md

Times are medians of --repeats, in ms of the device's own clock. A micro-step is one pass of --sequences_per_pass
sequences of train_seq_len tokens; a step is as many as make batch_tokens, and the optimizers once. The tokens are
random, the documents about 1,000 long, the window is the last and longest. Learning goes on meanwhile, for GPUs
multiply zeros faster than numbers, and at the start many weights are zero.

Model FLOPs are what the mathematics asks for: two for each multiplication in a matrix product, and twice the
forward pass's for backward; no recomputation, no optimizer, no element-wise work. With T tokens, C = model_dim,
H heads of D, V = padded vocabulary, L layers, A of them with attention, and P(l) the pairs of query and key that
layer l's mask leaves visible: 6 T (4 A C H D + 8 L C C + C V) + 12 H D (P(1) + ... + P(L)). Utilization divides
by the GPU's dense bf16 peak, also where the head runs in FP8. (The convention is that of PaLM, arXiv:2204.02311,
appendix B, but for P, which counts the mask's pairs.)
"""
import argparse
import datetime
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HOPPER = ROOT / "records" / "fineweb" / "HOPPER.md"
PACKAGES = ["torch", "numpy", "safetensors", "tqdm"]  # what train_gpt.py imports; --report needs pytest too

# Dense bf16, FLOP/s, by the name that the driver gives: NVIDIA's H100 and H200 datasheets, whose 1,979 TFLOP/s
# of the SXM boards are with sparsity. Other boards of these names have other peaks: --peak_tflops
PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}

# The 200 steps: so short a step that they fit into 50 MB of tokens, each read once
SHORT_RUN = dict(track="fineweb", num_iterations=200, batch_tokens=98_304, val_tokens=524_288, val_loss_every=25)
FIRST_LOSS = 10.8258   # ln(50304): the head is zero at the start
MAX_DIFFERENCE = 0.05  # between the validation losses with FP8 on and off


class BenchError(Exception):
    """Something the user can mend; its message is the one line that is shown."""

# -----------------------------------------------------------------------------
# Model FLOPs

def visible_pairs(docs, window_blocks):
    """docs (T,), the documents' running numbers -> how many pairs of query and key the mask leaves visible."""
    import torch
    position = torch.arange(len(docs), device=docs.device)
    document_start = torch.searchsorted(docs, docs)  # the first position of the same number
    window_start = (position // 128 - window_blocks + 1) * 128
    return int((position - torch.maximum(document_start, window_start) + 1).sum())


def model_flops(hp, docs, window_blocks):
    """FLOPs of forward and backward over docs (T,), with the long window of `window_blocks`."""
    hdim, dim = hp.num_heads * hp.head_dim, hp.model_dim
    attention_layers = [i for i in range(hp.num_layers) if i not in hp.attn_free_layers]
    weights = len(attention_layers) * 4 * dim * hdim + hp.num_layers * 8 * dim * dim + dim * hp.padded_vocab_size
    long, short = visible_pairs(docs, window_blocks), visible_pairs(docs, max(1, window_blocks // 2))
    pairs = sum(long if i in hp.long_window_layers else short for i in attention_layers)
    return 6 * len(docs) * weights + 12 * hdim * pairs

# -----------------------------------------------------------------------------
# Times

class Stopwatch:
    """Marks in the device's stream of work; ms() waits for the last one and returns the times between them."""

    def __init__(self, device):
        self.device, self.marks = device, []

    def mark(self):
        import torch
        if self.device.type == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def ms(self):
        pairs = zip(self.marks, self.marks[1:])
        if self.device.type == "cuda":
            self.marks[-1].synchronize()
            return [a.elapsed_time(b) for a, b in pairs]
        return [1000 * (b - a) for a, b in pairs]


def kernel_table(run, device, rows):
    """The lines of a table of the kernels (operators, on the CPU) that take longest in run()."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    kind = torch.autograd.DeviceType.CUDA if device.type == "cuda" else torch.autograd.DeviceType.CPU
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as profiler:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
    cost = lambda event: event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
    events = sorted((e for e in profiler.key_averages() if e.device_type == kind), key=cost, reverse=True)
    total = sum(map(cost, events)) or 1
    return ["      ms      %  calls  kernel"] + [
        f"{cost(e) / 1000:8.3f} {100 * cost(e) / total:6.1f} {e.count:6}  {e.key[:55]}" for e in events[:rows]]


def measure(hp, world, warmup, repeats, kernels, peak_flops):
    """-> ({figure: number}, the lines of the kernel table). Figures carry their units in their names."""
    import torch
    import train_gpt
    device, on_cuda = world.device, world.device.type == "cuda"
    model = train_gpt.build_model(hp, world)
    optimizers = train_gpt.build_optimizers(model, hp)
    buckets = train_gpt.GradientBuckets(model.parameters(), hp.num_sequences)
    compiled = torch.compile(model, dynamic=False)
    rng = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(hp.vocab_size, (hp.batch_tokens + 1,), dtype=torch.int32, device=device, generator=rng)
    tokens[torch.rand(len(tokens), device=device, generator=rng) < 1e-3] = hp.eot_token
    inputs, targets = tokens[:-1], tokens[1:].long()
    window_blocks = train_gpt.get_window_blocks(hp.num_iterations, hp)

    def step():
        train_gpt.train_step(compiled, optimizers, buckets, inputs, targets, window_blocks, hp, world)

    def synchronize():
        if on_cuda:
            torch.cuda.synchronize()

    def timed_step():
        synchronize()
        started = time.perf_counter()
        step()
        synchronize()
        return 1000 * (time.perf_counter() - started)

    first_ms = timed_step()
    for _ in range(warmup):
        step()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    step_ms = statistics.median(timed_step() for _ in range(repeats))
    allocated, reserved = map(int, re.findall(r"(\d+) MiB", train_gpt.peak_memory(world)))

    per_pass = max(n for n in range(1, min(hp.num_sequences, hp.sequences_per_pass) + 1) if hp.num_sequences % n == 0)
    x, y = (t[:per_pass * hp.train_seq_len].view(per_pass, -1) for t in (inputs, targets))
    window = torch.tensor(window_blocks, dtype=torch.int32, device=device)
    parts = []
    for _ in range(repeats):
        watch = Stopwatch(device)
        buckets.last_micro_step = True
        watch.mark()
        loss = compiled(x, y, window)
        watch.mark()
        loss.backward()
        watch.mark()
        buckets.wait()
        for optimizer in optimizers:
            optimizer.step()
        buckets.zero()
        watch.mark()
        parts.append(watch.ms())
    forward, backward, optimizer = (statistics.median(times) for times in zip(*parts))

    passes = inputs.view(-1, per_pass, hp.train_seq_len)
    flops = sum(model_flops(hp, train_gpt.document_ids(p.clone(), hp.eot_token), window_blocks) for p in passes)
    figures = {
        "micro-step tokens": x.numel(), "step tokens": hp.batch_tokens,
        "forward ms": forward, "backward ms": backward, "forward+backward ms": forward + backward,
        "optimizer ms": optimizer, "step ms": step_ms, "tokens/s": hp.batch_tokens / (step_ms / 1000),
        "step model TFLOP": flops / 1e12, "model TFLOP/s": flops / step_ms / 1e9,
        "MFU %": 100 * flops / (step_ms / 1000) / peak_flops if peak_flops else None,
        "allocated MiB": allocated, "reserved MiB": reserved,
        "first step s": first_ms / 1000}  # compilation and all; shorter where its results were cached
    return figures, kernel_table(step, device, kernels) if kernels else []

# -----------------------------------------------------------------------------
# The report: tests, 200 steps with FP8 on and off, figures; one row of HOPPER.md

COLUMNS = ["date", "machine", "PyTorch", "change", "forward ms", "backward ms", "forward+backward ms", "optimizer ms",
           "step ms", "tokens/s", "MFU %", "allocated MiB", "first step s", "GPU tests", "val_loss FP8", "val_loss bf16",
           "run", "command"]


def table_row(cells):
    """{column: value} -> a line of the table; what is not there was not measured."""
    def text(value):
        shown = "" if value is None else f"{value:,.2f}" if isinstance(value, float) else str(value)
        return shown.replace("|", "\\|").replace("\n", " ") or "-"

    return "| " + " | ".join(text(cells.get(column)) for column in COLUMNS) + " |"


def append_row(path, cells):
    """Append to the table that ends the file: all of it or nothing."""
    text = path.read_text() if path.exists() else ""
    if table_row(dict(zip(COLUMNS, COLUMNS))) not in text:
        raise BenchError(f"{path}: its last table does not have the columns of this script")
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as f:
        f.write(text.rstrip("\n") + "\n" + table_row(cells) + "\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def val_losses(output):
    """{step: validation loss} of a run's output."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step:(\d+)/\d+ val_loss:(\S+) ", output, re.M)}


def judge(fp8, bf16):
    """What is wrong with two runs' {step: validation loss}, or "ok"."""
    steps = range(0, SHORT_RUN["num_iterations"] + 1, SHORT_RUN["val_loss_every"])
    problems = []
    for name, losses in (("FP8", fp8), ("bf16", bf16)):
        if sorted(losses) != list(steps):
            problems.append(f"{name}: ended early")
            continue
        if abs(losses[0] - FIRST_LOSS) > 1e-4:
            problems.append(f"{name}: starts at {losses[0]}")
        rises = [step for step, before in zip(steps[1:], steps) if not losses[step] < losses[before]]
        if rises:
            problems.append(f"{name}: no fall to step {rises[0]}")
    apart = max((abs(fp8[step] - bf16[step]) for step in steps if step in fp8 and step in bf16), default=0)
    if apart > MAX_DIFFERENCE:
        problems.append(f"FP8 and bf16 are {apart:.4f} apart")
    return "; ".join(problems) or f"ok, FP8 and bf16 at most {apart:.4f} apart"


def run_child(arguments):
    """Runs Python in the repository; its output is shown as it comes. -> (exit code, output)."""
    print("$ python " + " ".join(arguments), flush=True)
    lines = []
    with subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, env=os.environ | dict(TORCH_COMPILE_DISABLE="0")) as child:
        for line in child.stdout:
            lines.append(line)
            if not line.startswith("step:") or "val_loss" in line:  # every other step would fill the screen
                print("  " + line, end="", flush=True)
    return child.returncode, "".join(lines)


def correctness(shards):
    """The GPU tests and the 200 steps -> cells of the row."""
    _, output = run_child(["-m", "pytest", "-q", "tests/gpu"])
    cells = {"GPU tests": output.strip().splitlines()[-1].strip("= ")}
    losses = {}
    for name, fp8 in (("FP8", "true"), ("bf16", "false")):
        options = SHORT_RUN | dict(train_files=shards / "*_train_*.bin", val_files=shards / "*_val_*.bin", fp8=fp8)
        _, output = run_child(["train_gpt.py", *(f"--{key}={value}" for key, value in options.items())])
        losses[name] = val_losses(output)
        cells[f"val_loss {name}"] = ", ".join(f"{step}: {loss}" for step, loss in losses[name].items())
    return cells | {"run": judge(losses["FP8"], losses["bf16"])}

# -----------------------------------------------------------------------------

def positive(text):
    if (n := int(text)) < 1:
        raise ValueError
    return n


def parse_arguments(argv):
    """-> our options, and train_gpt.py's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n\n")[0], allow_abbrev=False,
                                     epilog="All other options go to train_gpt.py.")
    parser.add_argument("--repeats", type=positive, default=20, metavar="N", help="timed repetitions (default: 20)")
    parser.add_argument("--warmup", type=positive, default=10, metavar="N", help="untimed steps before (default: 10)")
    parser.add_argument("--kernels", type=positive, metavar="N", help="list the N kernels that take longest in a step")
    parser.add_argument("--peak_tflops", type=float, metavar="X", help="the GPU's dense bf16 peak, where it is not known")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--report", metavar="CHANGE", help="run everything, and add a row with this remark to HOPPER.md")
    parser.add_argument("--shards", type=Path, metavar="DIR", help="for --report: the folder of the GPT-2 shards")

    def fail(message):
        raise BenchError(f"{message}; --help lists what there is")

    parser.error = fail
    args, rest = parser.parse_known_args(argv)
    if args.report is not None and args.shards is None:
        raise BenchError("--report needs --shards DIR, a folder made by data/fineweb.py")
    if args.report is not None and not all(list(args.shards.glob(f"*_{kind}_*.bin")) for kind in ("train", "val")):
        raise BenchError(f"--shards {args.shards}: no *_train_*.bin and *_val_*.bin there; make them with data/fineweb.py")
    if args.peak_tflops is not None and not args.peak_tflops > 0:
        raise BenchError(f"--peak_tflops {args.peak_tflops}: must be more than zero")
    return args, rest


def check_packages(names):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise BenchError(f"missing packages: {', '.join(missing)}; install them with pip, or without a network "
                         f"bring their wheels: pip download --no-deps {' '.join(missing)}")


def bench(argv):
    args, rest = parse_arguments(argv)
    check_packages(PACKAGES + ["pytest"] * (args.report is not None))
    sys.path.insert(0, str(ROOT))
    import torch
    import train_gpt
    try:
        train_args, hp = train_gpt.parse_arguments(rest)
        train_gpt.check_hyperparameters(hp, 1)
        if args.report is not None and not (torch.cuda.is_available() and train_args.device == "cuda"):
            raise BenchError("--report records what a GPU does, and this machine has no usable CUDA GPU")
        cells = correctness(args.shards.resolve()) if args.report is not None else {}
        world = train_gpt.start_world(train_args.device)
        name = torch.cuda.get_device_name() if world.device.type == "cuda" else train_gpt.CPU_MODEL
        peak = args.peak_tflops * 1e12 if args.peak_tflops else PEAKS.get(name)
        figures, kernels = measure(hp, world, args.warmup, args.repeats, args.kernels, peak)
    except train_gpt.InputError as e:
        raise BenchError(str(e)) from None

    command = " ".join(["python tests/gpu/bench.py", *argv])
    if args.shards:  # the folder's name is nobody's business
        command = command.replace(str(args.shards), "DIR")
    facts = {"date": datetime.date.today().isoformat(), "machine": name, "PyTorch": torch.__version__,
             "change": args.report, "command": f"`{command}`"}
    print(f"{name}, PyTorch {torch.__version__}, {world.device.type}")
    for figure, value in figures.items():
        shown = "- (give --peak_tflops)" if value is None else f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
        print(f"{figure:20} {shown}")
    print(*kernels, sep="\n", end="\n" if kernels else "")
    if args.json:
        args.json.write_text(json.dumps(facts | figures | cells, indent=1) + "\n")
    if args.report is not None:
        append_row(HOPPER, facts | figures | cells)
        print(f"a row was added to {HOPPER.relative_to(ROOT)}")


def main(argv):
    try:
        bench(argv)
    except BenchError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
