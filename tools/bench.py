"""
What a training step costs on this machine: each part of it against what the machine can multiply, memory,
compilation, kernels; and what it costs beside other work.

    python tools/bench.py                                the default track and device
    python tools/bench.py --track fineweb                on a CPU in steps of 1,024 tokens, not 393,216
    python tools/bench.py --fp8 false --num_layers 4     any option of train_gpt.py
    python tools/bench.py --kernels 25                   and the 25 kernels that take longest
    python tools/bench.py --busy 2                       a step alone, next to one busy process, next to two
    python tools/bench.py --busy 2 --openmp "GOMP_SPINCOUNT=10000" --openmp "GOMP_SPINCOUNT=1000"
    python tools/bench.py --report "what changed" --shards DIR
                                                         the GPU tests, 200 steps on DIR's shards with FP8 on and
                                                         off, the figures: a row more in records/fineweb/HOPPER.md
    python tools/bench.py --report "what changed" --shards DIR --stage fp8
                                                         one of the four alone: the last to end adds the row

Times are medians of --repeats, in ms, each until the device is done. A pass, or micro-step, is --sequences_per_pass
sequences of train_seq_len tokens, through forward and backward; a step is as many as make batch_tokens, and the
optimizers once. The tokens are random, the documents about 1,000 long, the window is the last and longest. Learning
goes on meanwhile, for GPUs multiply zeros faster than numbers, and at the start many weights are zero. The first
step has compilation in it, or what is left of it when its results are cached. Memory is the peak: on CUDA of
PyTorch's tensors and of its allocator, on a CPU of the process, twice.

Model FLOPs are what the mathematics asks for: two for each multiplication in a matrix product, and twice the
forward pass's for backward; no recomputation, no optimizer, no element-wise work. With T tokens, C = model_dim,
H heads of D, V = padded vocabulary, L layers, A of them with attention, and P(l) the pairs of query and key that
layer l's mask leaves visible: 6 T (4 A C H D + 8 L C C + C V) + 12 H D (P(1) + ... + P(L)). MFU, their utilization,
divides by the dense bf16 peak of the GPU's datasheet, also where the head runs in FP8. (The convention is that of
PaLM, arXiv:2204.02311, appendix B, but for P, which counts the mask's pairs.)

The matmul peak is measured, before and after the steps: the best of several large square products in the type of
the activations. The tables divide by the higher of the two. Their GFLOP are the model's, and for the optimizers the
products of Newton-Schulz, which the whole step includes. What is missing to the peak is element-wise work, masked
pairs, memory and small products. The second table has one pass's products with the weights, as forward computes them, and
where the head runs in FP8 the gradient of its weight, as train_gpt.py computes it and with the operands the other way round.

--report keeps each stage's part in logs/report/ until all are there, so that one that was killed goes on where it was
and none is repeated. Parts belong together when source, machine, PyTorch and options are the same.

--busy N times steps beside 0, 1, ... N processes that loop in Python. What becomes of a step there depends on how
OpenMP's threads wait for each other, which torch reads from the environment when it is loaded: each setting has a
process of its own, stopped while others are timed. The settings are train_gpt.py's own; OpenMP's default, for which
torch is loaded before train_gpt.py can choose; and those of --openmp. OMP_WAIT_POLICY and GOMP_SPINCOUNT of your
environment are left out. Each of --rounds has every number of busy processes and every setting once, so that a
machine that slows down favours none. Shown are the median, lowest and highest of the rounds' medians.
"""
import argparse
import contextlib
import datetime
import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOPPER = ROOT / "records" / "fineweb" / "HOPPER.md"
PARTS = ROOT / "logs" / "report"
STAGES = ("tests", "fp8", "bf16", "figures")


def check_packages(*names):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"error: missing packages: {', '.join(missing)}; install them with pip, or without a network "
                 f"bring their wheels: pip download --no-deps {' '.join(missing)}")


check_packages("torch", "numpy", "safetensors", "tqdm")
sys.path.insert(0, str(ROOT))
import train_gpt  # first: it sets what torch reads when it is loaded
import torch
from machine import readable, show_any_text
from train_gpt import InputError

# Dense bf16, FLOP/s, by the name that the driver gives: NVIDIA's H100 and H200 datasheets, whose 1,979 TFLOP/s
# of the SXM boards are with sparsity. Other boards of these names have other peaks: --peak_tflops
PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}

# The 200 steps: so short a step that they fit into 50 MB of tokens, each read once
SHORT_RUN = dict(track="fineweb", num_iterations=200, batch_tokens=98_304, val_tokens=524_288, val_loss_every=25)
FIRST_LOSS = 10.8258   # ln(50304): the head is zero at the start
MAX_DIFFERENCE = 0.05  # between the validation losses with FP8 on and off

# -----------------------------------------------------------------------------
# FLOPs

def visible_pairs(docs, window_blocks):
    """docs (T,), the documents' running numbers -> how many pairs of query and key the mask leaves visible."""
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


def newton_schulz_flops(optimizer):
    """Of one step of Muon: `ns_steps` times A = X X^T, A A and B X for X (m, n) with m <= n."""
    def flops(p):
        m, n = sorted(p.shape[-2:])
        return p.numel() // (m * n) * 2 * (2 * m * m * n + m**3)

    return sum(group["ns_steps"] * flops(p) for group in optimizer.param_groups for p in group["params"])

# -----------------------------------------------------------------------------
# Times

def ms_of(run, device):
    """How long run() takes, until the device is done with it."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    started = time.perf_counter()
    run()
    synchronize()
    return 1000 * (time.perf_counter() - started)


def median_ms(run, device, repeats):
    return statistics.median([ms_of(run, device) for _ in range(repeats)])


def random_product(rows, inputs, outputs, device):
    """-> a function that multiplies x (rows, inputs) by w (outputs, inputs), as a linear layer does."""
    x, w = (torch.randn(n, inputs, device=device).to(train_gpt.activation_dtype(device)) for n in (rows, outputs))
    return lambda: torch.nn.functional.linear(x, w)


def head_gradients(tokens, dim, out, device):
    """-> two functions that multiply grad_f8 (T, out) and x_f8 (T, in) to the gradient of the head's weight (out, in), with
    that in the first operand's place and in the second's: cuBLAS has other kernels for the two."""
    grad = torch.randn(tokens, out, device=device).to(torch.float8_e5m2).T.contiguous()  # (out, T)
    x = torch.randn(tokens, dim, device=device).to(torch.float8_e4m3fn).T.contiguous()   # (in, T)
    one = torch.ones((), device=device)
    product = lambda a, b: torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.float32)
    return lambda: product(grad, x), lambda: product(x, grad).T


def matmul_peak(device):
    """-> GFLOP/s of the best of eight large square products, after one that is not counted."""
    n = 8192 if device.type == "cuda" else 2048
    run = random_product(n, n, n, device)
    return 2 * n**3 / 1e6 / min([ms_of(run, device) for _ in range(9)][1:])


def training(hp, world):
    """-> step(), which makes one training step, and what it is made of."""
    model = train_gpt.build_model(hp, world)
    optimizers = train_gpt.build_optimizers(model, hp)
    buckets = train_gpt.GradientBuckets(model.parameters())
    compiled = torch.compile(model, dynamic=False)
    rng = torch.Generator(world.device).manual_seed(0)
    tokens = torch.randint(hp.vocab_size, (hp.batch_tokens + 1,), dtype=torch.int32, device=world.device, generator=rng)
    tokens[torch.rand(len(tokens), device=world.device, generator=rng) < 1e-3] = hp.eot_token
    inputs, targets = tokens[:-1], tokens[1:].long()
    window_blocks = train_gpt.get_window_blocks(hp.num_iterations, hp)

    def step():
        train_gpt.train_step(compiled, optimizers, buckets, inputs, targets, window_blocks, hp, world)

    return step, (compiled, optimizers, buckets, inputs, targets, window_blocks)


def ms_of_parts(parts, tokens, hp, device):
    """-> the ms of forward and backward over the first `tokens`, and of the optimizers."""
    compiled, optimizers, buckets, inputs, targets, window_blocks = parts
    x, y = (t[:tokens].view(-1, hp.train_seq_len) for t in (inputs, targets))
    window = torch.tensor(window_blocks, dtype=torch.int32, device=device)
    losses, buckets.last_micro_step, share = [], True, torch.full((), 1 / hp.num_sequences, device=device)

    def update():
        buckets.wait()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return [ms_of(part, device) for part in (lambda: losses.append(compiled(x, y, window)),
                                             lambda: losses.pop().backward(share), update)]


def measure(hp, world, warmup, repeats, peak_flops):
    """-> {figure: number}, with units in the names, and step(), which makes one more step."""
    device, peak_before = world.device, matmul_peak(world.device)
    step, parts = training(hp, world)
    first_ms = ms_of(step, device)
    for _ in range(warmup):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step_ms = median_ms(step, device, repeats)
    allocated, reserved = map(int, re.findall(r"(\d+) MiB", train_gpt.peak_memory(world)))

    per_pass = max(n for n in range(1, min(hp.num_sequences, hp.sequences_per_pass) + 1) if hp.num_sequences % n == 0)
    tokens = per_pass * hp.train_seq_len
    times = [ms_of_parts(parts, tokens, hp, device) for _ in range(repeats)]
    forward, backward, optimizer = map(statistics.median, zip(*times))

    compiled, (_, muon), _, inputs, _, window_blocks = parts
    flops = sum(model_flops(hp, train_gpt.document_ids(x.clone(), hp.eot_token), window_blocks)
                for x in inputs.view(-1, per_pass, hp.train_seq_len))
    return {
        "micro-step tokens": tokens, "step tokens": hp.batch_tokens,
        "forward ms": forward, "backward ms": backward, "forward+backward ms": forward + backward,
        "optimizer ms": optimizer, "step ms": step_ms, "tokens/s": hp.batch_tokens / (step_ms / 1000),
        "step model TFLOP": flops / 1e12, "optimizer TFLOP": newton_schulz_flops(muon) / 1e12,
        "model TFLOP/s": flops / step_ms / 1e9,
        "MFU %": 100 * flops / (step_ms / 1000) / peak_flops if peak_flops else None,
        "allocated MiB": allocated, "reserved MiB": reserved, "first step s": first_ms / 1000, "FP8 head": compiled.use_fp8,
        "matmul peak before GFLOP/s": peak_before, "matmul peak after GFLOP/s": matmul_peak(device)}, step

# -----------------------------------------------------------------------------
# Tables

def print_table(header, rows):
    """Columns as wide as what is in them; the first one to the left, the others to the right."""
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    print()
    for row in cells:
        print("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]))


def rate_cells(ms, flops, peak):
    """-> the cells ms, GFLOP, GFLOP/s and % of the peak, which is in GFLOP/s."""
    rate = flops / 1e6 / ms
    return [f"{ms:,.3f}", f"{flops / 1e9:,.3f}", f"{rate:,.0f}", f"{100 * rate / peak:.0f}"]


def print_figures(track, hp, figures, repeats, device):
    """The facts, the table of the step's parts, and that of the products, which it measures."""
    tokens, passes = figures["micro-step tokens"], hp.batch_tokens // figures["micro-step tokens"]
    model, muon = 1e12 * figures["step model TFLOP"], 1e12 * figures["optimizer TFLOP"]
    before, after = figures["matmul peak before GFLOP/s"], figures["matmul peak after GFLOP/s"]
    mfu = "- (give --peak_tflops)" if figures["MFU %"] is None else f"{figures['MFU %']:.2f} %"
    print(f"{track}: {hp.num_layers} layer{'s' * (hp.num_layers > 1)}, width {hp.model_dim}; "
          f"{hp.batch_tokens:,} tokens a step, in {passes} pass{'es' * (passes > 1)} of {tokens:,}")
    print(f"speed: {figures['tokens/s']:,.0f} tokens/s; first step, with compilation: {figures['first step s']:.1f} s")
    print(f"memory: {figures['allocated MiB']:,} MiB allocated, {figures['reserved MiB']:,} MiB reserved")
    print(f"model: {model / 1e9:,.3f} GFLOP a step, {1000 * figures['model TFLOP/s']:,.0f} GFLOP/s, MFU {mfu}")
    print(f"matmul peak: {before:,.0f} GFLOP/s before, {after:,.0f} after the steps")

    print_table(["part", "ms", "GFLOP", "GFLOP/s", "% of peak"], [
        [part, *rate_cells(figures[figure], flops, max(before, after))] for part, figure, flops in [
            ("forward", "forward ms", model / passes / 3), ("backward", "backward ms", model / passes * 2 / 3),
            ("forward+backward", "forward+backward ms", model / passes), ("optimizers", "optimizer ms", muon),
            ("whole step", "step ms", model + muon)]])

    def products():  # one at a time: the operands of all would fill a small card
        for name, inputs, outputs in [("attention in", dim, 3 * hdim), ("attention out", hdim, dim),
                                      ("MLP in", dim, 4 * dim), ("MLP out", 4 * dim, dim),
                                      ("head", dim, hp.padded_vocab_size)]:
            yield name, (tokens, inputs, outputs), random_product(tokens, inputs, outputs, device)
        if figures["FP8 head"]:
            runs = head_gradients(tokens, dim, hp.padded_vocab_size, device)
            for order, run in zip(("gradient first", "input first"), runs):
                yield f"head's gradient in FP8, {order}", (dim, tokens, hp.padded_vocab_size), run

    rows, dim, hdim = [], hp.model_dim, hp.num_heads * hp.head_dim
    for name, shape, run in products():
        run()
        rows.append([name, " x ".join(f"{n:,}" for n in shape),
                     *rate_cells(median_ms(run, device, repeats), 2 * math.prod(shape), max(before, after))])
    print_table(["product", "shape", "ms", "GFLOP", "GFLOP/s", "% of peak"], rows)


def print_kernels(step, device, count):
    """The kernels (operators, on the CPU) that take longest in a step."""
    on_cuda, kinds, activity = device.type == "cuda", torch.autograd.DeviceType, torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU] + [activity.CUDA] * on_cuda) as profiler:
        ms_of(step, device)
    cost = lambda event: event.self_device_time_total if on_cuda else event.self_cpu_time_total
    kind = kinds.CUDA if on_cuda else kinds.CPU
    events = sorted((e for e in profiler.key_averages() if e.device_type == kind), key=cost, reverse=True)
    total = sum(map(cost, events)) or 1
    print("\n      ms      %  calls  kernel")
    for e in events[:count]:
        print(f"{cost(e) / 1000:8.3f} {100 * cost(e) / total:6.1f} {e.count:6}  {e.key[:55]}")

# -----------------------------------------------------------------------------
# Beside other work

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # how a thread waits: whether, and how long, it holds its core
OWN, DEFAULT = "train_gpt.py's own", "OpenMP's default"


@contextlib.contextmanager
def child(code, env=None):
    """Runs Python code, in a process group of its own: Ctrl-C reaches us alone, and we end it, whatever happens."""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          encoding="utf-8", errors="replace", process_group=0, env=env) as process:
        try:
            yield process
        finally:
            process.kill()  # one that is stopped would not heed less


def busy_process():
    """Loops until we end it, or are gone ourselves."""
    return child(f"import os\nprint(flush=True)\nwhile os.getppid() == {os.getpid()}:\n    for _ in range(10**6): pass")


def stepping_process(setting, argv):
    """Makes steps with this setting of OpenMP's, whenever told to. Our environment has what train_gpt.py set when it was
    imported, TORCHINDUCTOR_CPP_MARCH too: where torch is loaded first, only the environment can pass it on."""
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    if setting not in (OWN, DEFAULT):
        environment |= dict(pair.split("=", 1) for pair in setting.split())
    imports = "torch, bench" if setting == DEFAULT else "bench"  # torch first: what train_gpt.py then sets is too late
    return child(f"import sys\nsys.path[:0] = [{str(ROOT / 'tools')!r}]\nimport {imports}\nbench.serve_steps({argv!r})",
                 env=environment)


def serve_steps(argv):
    """The stepping process. As JSON: the variables it runs with, then for each line of input a median of steps' ms."""
    args, options, hp = read_options(argv)
    world = train_gpt.start_world(options.device)
    hp = train_gpt.fit_to_memory(options, hp, world, {})
    step, _ = training(hp, world)
    for _ in range(1 + args.warmup):
        step()
    print(json.dumps(" ".join(f"{name}={os.environ[name]}" for name in WAITING if name in os.environ)), flush=True)
    for _ in sys.stdin:
        step()  # finds the caches cold
        print(json.dumps(median_ms(step, world.device, args.repeats)), flush=True)


def answer(process, setting):
    """What the process has to say next; then it is stopped, for threads that only wait may hold a core too."""
    line = process.stdout.readline()
    if not line:
        raise InputError(f"--busy: the process for {setting} ended with exit code {process.wait()}; its error is above")
    process.send_signal(signal.SIGSTOP)
    return json.loads(line)


def time_beside_others(args, argv):
    """-> {setting: for 0, 1, ... --busy processes, the rounds' medians in ms}; prints what train_gpt.py chose."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what we started is ended
    settings, chosen, processes = [OWN, DEFAULT, *args.openmp], {}, {}
    medians = {setting: [[] for _ in range(args.busy + 1)] for setting in settings}
    with contextlib.ExitStack() as stack:
        for setting in settings:  # one after the other: compiling takes all cores
            processes[setting] = stack.enter_context(stepping_process(setting, argv))
            chosen[setting] = answer(processes[setting], setting)
        print(f"{OWN}: {chosen[OWN] or DEFAULT}", flush=True)
        for number, busy in itertools.product(range(args.rounds), range(args.busy + 1)):
            print(f"round {number + 1} of {args.rounds}, next to {busy}", file=sys.stderr)
            with contextlib.ExitStack() as others:
                for other in [others.enter_context(busy_process()) for _ in range(busy)]:
                    other.stdout.readline()  # now it loops
                for setting, process in processes.items():
                    process.send_signal(signal.SIGCONT)
                    print(file=process.stdin, flush=True)
                    medians[setting][busy].append(answer(process, setting))
    return medians


def print_beside_others(medians):
    rows = []
    for setting, by_busy in medians.items():
        for busy, rounds in enumerate(by_busy):
            ms, alone = statistics.median(rounds), statistics.median(by_busy[0])
            rows.append(["" if busy else setting, f"{busy} busy" if busy else "alone", f"{ms:,.1f}",
                         f"{ms / alone:.2f}", f"{min(rounds):,.1f} to {max(rounds):,.1f}"])
    print_table(["setting", "next to", "ms", "x alone", "lowest to highest"], rows)

# -----------------------------------------------------------------------------
# The report: tests, 200 steps with FP8 on and off, figures; one row of HOPPER.md

COLUMNS = ["date", "machine", "PyTorch", "change", "forward ms", "backward ms", "forward+backward ms", "optimizer ms",
           "step ms", "tokens/s", "MFU %", "allocated MiB", "first step s", "GPU tests", "val_loss FP8",
           "val_loss bf16", "run", "command"]


def table_row(cells):
    """{column: value} -> a line of the table; what is not there was not measured."""
    def text(value):
        shown = "" if value is None else f"{value:,.2f}" if isinstance(value, float) else str(value)
        return shown.replace("|", "\\|").replace("\n", " ") or "-"

    return "| " + " | ".join(text(cells.get(column)) for column in COLUMNS) + " |"


def append_row(path, cells):
    """Append to the table that ends the file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if table_row(dict(zip(COLUMNS, COLUMNS))) not in text:
        raise InputError(f"{path}: its last table does not have the columns of this script")
    write_whole(path, text.rstrip("\n") + "\n" + table_row(cells))


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


def run_python(arguments):
    """Runs Python in the repository, shows its output as it comes, and returns it."""
    print("$ python " + " ".join(arguments), flush=True)
    lines = []
    with subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          encoding="utf-8", errors="replace",
                          env=os.environ | dict(TORCH_COMPILE_DISABLE="0")) as process:
        for line in process.stdout:
            lines.append(line)
            if not line.startswith("step:") or "val_loss" in line:  # every other step would fill the screen
                print("  " + line, end="", flush=True)
    return "".join(lines)


def gpu_tests():
    """-> the last line of the GPU tests."""
    return run_python(["-m", "pytest", "-q", "tests/gpu"]).strip().splitlines()[-1].strip("= ")


def short_run(shards, fp8):
    """-> {step: validation loss} of the 200 steps."""
    options = SHORT_RUN | dict(train_files=shards / "*_train_*.bin", val_files=shards / "*_val_*.bin", fp8=fp8)
    output = run_python(["train_gpt.py", *(f"--{key}={value}" for key, value in options.items())])
    return {int(step): float(loss) for step, loss in re.findall(r"^step:(\d+)/\d+ val_loss:(\S+) ", output, re.M)}


def row_of_parts(parts):
    """The parts of all stages -> cells of the row."""
    tests, fp8, bf16, figures = (parts[stage] for stage in STAGES)
    shown = [", ".join(f"{step}: {loss}" for step, loss in losses) for losses in (fp8, bf16)]
    return figures | {"GPU tests": tests, "val_loss FP8": shown[0], "val_loss bf16": shown[1],
                      "run": judge(dict(fp8), dict(bf16))}


def report(stages, shards, folder, figures):
    """Runs the stages that have no part yet. -> what is known then, as a row that joins HOPPER.md when all have one."""
    makes = {"tests": gpu_tests, "fp8": lambda: sorted(short_run(shards, True).items()),
             "bf16": lambda: sorted(short_run(shards, False).items()), "figures": figures}
    files = {stage: folder / f"{stage}.json" for stage in STAGES}
    for stage in stages:
        if files[stage].exists():
            print(f"{stage}: kept from before ({files[stage].relative_to(ROOT)})")
            continue
        made = makes[stage]()  # before the folder: a stage that fails leaves nothing
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(files[stage], json.dumps(made, indent=1))
    parts = {}
    for stage, file in files.items():
        if file.exists():
            parts[stage] = json.loads(file.read_text(encoding="utf-8"))
    missing = [stage for stage in STAGES if stage not in parts]
    if missing:
        print(f"no row yet; still to run: --stage {', --stage '.join(missing)}")
        return parts
    row = row_of_parts(parts)
    append_row(HOPPER, row)
    for file in files.values():
        file.unlink()  # the row has them: the next report measures anew
    print(f"a row was added to {HOPPER.relative_to(ROOT)}")
    return row

# -----------------------------------------------------------------------------

def write_whole(path, text):
    """All of it, with a newline, or nothing."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", encoding="utf-8") as f:
        f.write(text + "\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def positive(text):
    if (n := int(text)) < 1:
        raise ValueError
    return n


def read_options(argv):
    """-> our options, train_gpt.py's, and the hyperparameters. Raises InputError."""
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n\n")[0], allow_abbrev=False,
                                     epilog="All other options go to train_gpt.py.")
    parser.add_argument("--repeats", type=positive, default=20, metavar="N", help="timed repetitions (default: 20)")
    parser.add_argument("--warmup", type=positive, default=10, metavar="N", help="untimed steps before (default: 10)")
    parser.add_argument("--kernels", type=positive, metavar="N", help="list the N kernels that take longest in a step")
    parser.add_argument("--peak_tflops", type=float, metavar="X", help="the GPU's dense bf16 peak, where it is unknown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--busy", type=positive, metavar="N", help="time a step beside 0, 1, ... N busy processes")
    parser.add_argument("--openmp", action="append", default=[], metavar="NAME=VALUE",
                        help="for --busy: one more setting to time, several variables with spaces between them")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="for --busy: at least 3 (default: 3)")
    parser.add_argument("--report", type=readable, metavar="CHANGE", help="run everything; a row with this remark joins HOPPER.md")
    parser.add_argument("--stage", choices=STAGES, help="for --report: this one alone")
    parser.add_argument("--shards", type=Path, metavar="DIR", help="for --report: the folder of the GPT-2 shards")

    def fail(message):
        raise InputError(f"{message}; --help lists what there is")

    def require(ok, message):
        if not ok:
            raise InputError(message)

    parser.error = fail
    args, rest = parser.parse_known_args(argv)
    require(args.peak_tflops is None or args.peak_tflops > 0, f"--peak_tflops {args.peak_tflops}: must be above zero")
    require(not args.json or args.json.parent.is_dir(), f"--json {args.json}: its folder is not there")
    require(not args.busy or args.report is None and not args.kernels, "--busy goes without --report and --kernels")
    require(args.busy or not args.openmp, "--openmp needs --busy N, whose settings it adds to")
    for setting in args.openmp:
        require(setting.split() and all(re.fullmatch(r"(OMP|GOMP|KMP)_\w+=.+", pair) for pair in setting.split()),
                f'--openmp "{setting}": must be variables of OpenMP, as in "OMP_WAIT_POLICY=PASSIVE"')
    require(args.rounds >= 3, f"--rounds {args.rounds}: must be at least 3, as fewer say nothing of chance")
    require(args.report is not None or not args.stage, "--stage is for --report CHANGE")
    if args.report is not None:
        require(args.shards is not None, "--report needs --shards DIR, a folder made by data/fineweb.py")
        require(all(list(args.shards.glob(f"*_{kind}_*.bin")) for kind in ("train", "val")), f"--shards {args.shards}: "
                "no *_train_*.bin and *_val_*.bin there; make them with data/fineweb.py")

    options, hp = train_gpt.parse_arguments(rest)
    if options.device == "cpu" and options.track == "fineweb":  # the track's own step would take an hour
        options, hp = train_gpt.parse_arguments(
            ["--batch_tokens", "1024", "--train_seq_len", "1024", "--val_seq_len", "1024", *rest])
    require(args.report is None or options.device == "cuda" and torch.cuda.is_available(),
            "--report records what a GPU does, and this machine has no usable CUDA GPU")
    if options.device == "cuda":
        train_gpt.check_gpus()
    train_gpt.check_hyperparameters(hp, 1, options.device)
    return args, options, hp


def bench(argv):
    args, options, hp = read_options(argv)
    if args.report is not None:
        check_packages("pytest")
    world = train_gpt.start_world(options.device)
    hp = train_gpt.fit_to_memory(options, hp, world, {})
    on_cuda = world.device.type == "cuda"
    name = torch.cuda.get_device_name() if on_cuda else f"{train_gpt.CPU_MODEL}, {torch.get_num_threads()} threads"
    command = re.sub(r" --stage[ =]\w+", "", " ".join(["python tools/bench.py", *argv]))  # the row is of all
    if args.shards:  # the folder's name is nobody's business
        command = command.replace(str(args.shards), "DIR")
    facts = {"date": datetime.date.today().isoformat(), "machine": name, "PyTorch": torch.__version__,
             "change": args.report, "command": f"`{command}`"}
    print(f"{name}, PyTorch {torch.__version__}", flush=True)

    def step_figures():
        peak = args.peak_tflops * 1e12 if args.peak_tflops else PEAKS.get(name)
        figures, step = measure(hp, world, args.warmup, args.repeats, peak)
        print_figures(options.track, hp, figures, args.repeats, world.device)
        if args.kernels:
            print_kernels(step, world.device, args.kernels)
        return facts | figures

    if args.report is not None:
        same = hashlib.sha256(repr((train_gpt.SOURCE, name, torch.__version__, options.track, hp)).encode()).hexdigest()[:12]
        figures = report([args.stage] if args.stage else STAGES, args.shards.resolve(), PARTS / same, step_figures)
    elif args.busy:
        figures = facts | {"busy ms": time_beside_others(args, argv)}
        print_beside_others(figures["busy ms"])
    else:
        figures = step_figures()
    if args.json:
        write_whole(args.json, json.dumps(figures, indent=1))


def main(argv):
    show_any_text()
    try:
        bench(argv)
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
