"""
The page that tools/gpu/report.py writes, and what its figures say about records/HARDWARE.md.

All functions take the results: {stage: {"status", "seconds", "figures", "error"}}.
"""

CONFIRMED = "confirmed"
REFUTED = "refuted"
UNKNOWN = "not checked"

# Measured without a GPU, in MiB: the table of records/HARDWARE.md. (head, tokens, training, validation)
PEAKS = [
    ("FP8", 49152, 29_580, 11_069),
    ("FP8", 24576, 16_362, 11_069),
    ("FP8", 12288, 9_753, 11_069),
    ("bf16", 49152, 24_893, 11_060),
    ("bf16", 24576, 14_051, 11_060),
    ("bf16", 12288, 8_582, 11_060),
]
NEAR = 0.03  # a peak that differs by less confirms the table


def figures_of(results, stage):
    """The stage's figures, or {} if it has none."""
    return results.get(stage, {}).get("figures") or {}


def failed_checks(results, stage):
    """The checks of a stage that failed, or None if the stage has no result."""
    checks = figures_of(results, stage).get("checks")
    if checks is None:
        return None
    return [check for check in checks if not check["ok"]]

# -----------------------------------------------------------------------------
# Claims of records/HARDWARE.md: each function returns a verdict and what was measured


def judge_stage(results, stage):
    """Confirmed if all checks of the stage passed."""
    failed = failed_checks(results, stage)
    if failed is None:
        return UNKNOWN, f"stage {stage} has no result"
    if failed:
        total = len(figures_of(results, stage)["checks"])
        first = failed[0]
        return REFUTED, (f"{len(failed)} of {total} checks failed; {first['name']}: "
                         f"{number(first['value'])}, limit {number(first['limit'])}")
    return CONFIRMED, f"all checks of stage {stage}"


def judge_fp8(results):
    capability = figures_of(results, "machine").get("compute capability")
    if capability is None:
        return UNKNOWN, "stage machine has no result"
    if tuple(map(int, capability.split("."))) < (8, 9):
        return UNKNOWN, f"this GPU has compute capability {capability}"
    return judge_stage(results, "head")


def judge_micro_steps(results):
    speed = figures_of(results, "speed")
    if not speed:
        return UNKNOWN, "stage speed has no result"
    micro_steps = speed["step tokens"] // speed["micro-step tokens"]
    return CONFIRMED, f"{micro_steps} micro-steps, {number(speed['step ms'])} ms a step"


def judge_fit(results):
    speed = figures_of(results, "speed")
    free = figures_of(results, "machine").get("free MiB")
    if not speed or free is None:
        status = results.get("speed", {}).get("status", "not run")
        return UNKNOWN, f"stage speed: {status}"
    text = (f"train_seq_len {speed['train_seq_len']}: {speed['reserved MiB']:,} MiB reserved of "
            f"{free:,} free")
    return (CONFIRMED if speed["reserved MiB"] <= free else REFUTED), text


def judge_tiles(results):
    """Triton raises an error if a kernel needs more shared memory than there is."""
    attention = results.get("attention", {"status": "not run"})
    if attention["status"] == "done":
        return CONFIRMED, "the kernels ran, forward and backward"
    if attention["status"] == "failed":
        return REFUTED, attention["error"].splitlines()[-1]
    return UNKNOWN, f"stage attention: {attention['status']}"


def judge_peaks(results, head, tokens, training, validation):
    for stage in results:
        figures = figures_of(results, stage)
        if "training MiB" in figures and (figures["head"], figures["train_seq_len"]) == (head, tokens):
            break
    else:
        return UNKNOWN, "no result"
    got = (figures["training MiB"], figures["validation MiB"])
    near = all(abs(value / want - 1) < NEAR for value, want in zip(got, (training, validation)))
    return (CONFIRMED if near else REFUTED), f"{got[0]:,} and {got[1]:,} MiB"


def judge_waits(results):
    waits = figures_of(results, "waits")
    if not waits:
        return UNKNOWN, "stage waits has no result"
    text = f"{waits['waits']} waits of {number(waits['waiting ms'])} ms in {waits['steps']} steps"
    return (REFUTED if waits["waits"] else CONFIRMED), text


def claims(results):
    """What this GPU says of each claim of records/HARDWARE.md: [(claim, verdict, measured)]."""
    lines = [
        ("the same steps in several micro-steps", *judge_micro_steps(results)),
        ("the language-model head runs in FP8", *judge_fp8(results)),
        ("halves `train_seq_len` until a step fits into the free memory of the card",
         *judge_fit(results)),
        ("FlexAttention's tiles fit into the shared memory", *judge_tiles(results)),
        ("The host doesn't wait for the GPU between validations", *judge_waits(results)),
    ]
    for head, tokens, training, validation in PEAKS:
        claim = f"{tokens} tokens, {head} head: {training:,} MiB in training, {validation:,} in validation"
        lines.append((claim, *judge_peaks(results, head, tokens, training, validation)))
    return lines

# -----------------------------------------------------------------------------
# Markdown


def number(value):
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def cell(value):
    text = "-" if value is None or value == "" else number(value)
    return text.replace("|", "\\|").replace("\n", " ")


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    for row in rows:
        lines.append("| " + " | ".join(map(cell, row)) + " |")
    return lines


def stage_lines(name, result):
    """The section of a stage: its figures, checks and kernels, or why it failed."""
    lines = ["", f"## {name}", ""]
    if result["status"] != "done":
        return lines + [f"This stage {result['status']}:", "", "```", result["error"], "```"]
    figures = dict(result["figures"])
    checks = figures.pop("checks", [])
    kernels = figures.pop("kernels", [])
    losses = figures.pop("losses", {})
    if figures:
        lines += table(["quantity", "value"], figures.items())
    if checks:
        rows = []
        for check in checks:
            verdict = "ok" if check["ok"] else "**too large**"
            rows.append((check["name"], check["value"], check["limit"], verdict))
        lines += ["", *table(["error", "value", "limit", ""], rows)]
    if kernels:
        lines += ["", *table(["slowest kernels of a step", "calls", "ms", "%"], kernels)]
    if losses:
        steps = (1, 10, 20, 30, 40, 50)
        rows = []
        for seed, run in losses.items():
            rows.append((seed, *[run[step - 1] for step in steps]))
        lines += ["", *table(["seed", *[f"loss of step {step}" for step in steps]], rows)]
    return lines


def page(conditions, results):
    """The whole report as Markdown."""
    lines = [
        f"# {conditions['GPU']}, PyTorch {conditions['PyTorch']}",
        "",
        f"Measured on {conditions['date']} with `./run.sh gpu-report`, which explains the "
        "stages. Times are medians in milliseconds.",
        "",
    ]
    rows = []
    for stage, result in results.items():
        failed = failed_checks(results, stage)
        checks = ""
        if failed is not None:
            count = len(figures_of(results, stage)["checks"])
            checks = f"{count - len(failed)} of {count}"
        rows.append((stage, result["status"], checks, f"{result['seconds']:.0f}"))
    lines += table(["stage", "status", "checks passed", "seconds"], rows)
    lines += ["", "## Claims of records/HARDWARE.md", ""]
    lines += table(["claim", "on this GPU", "measured"], claims(results))
    for stage, result in results.items():
        lines += stage_lines(stage, result)
    return "\n".join(lines) + "\n"
