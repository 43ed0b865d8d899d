"""
The page that gpu/gpu_report.py writes, and what its figures say about records/HARDWARE.md.

Results are {stage: {"status", "seconds", "figures", "error"}}.
"""

from lib.text import markdown_table

# Measured without a GPU, in MiB: the table of records/HARDWARE.md
# (head, tokens, training, validation)
PEAKS = [
    ("FP8", 49152, 29_580, 11_069),
    ("FP8", 24576, 16_362, 11_069),
    ("FP8", 12288, 9_753, 11_069),
    ("bf16", 49152, 24_893, 11_060),
    ("bf16", 24576, 14_051, 11_060),
    ("bf16", 12288, 8_582, 11_060),
]
NEAR = 0.03  # a peak that differs by less confirms the table

# -----------------------------------------------------------------------------
# Claims of records/HARDWARE.md. Each is judged by a function of the figures of its stage and of the
# machine: whether they confirm it (None: they can't say), and what was measured.

VERDICTS = {True: "confirmed", False: "refuted", None: "not checked"}


def judge_fp8(f):
    if f["head"] == "bf16":
        return None, f"this GPU has compute capability {f['compute capability']}"
    failed = [check for check in f["checks"] if not check["ok"]]
    return not failed, f"{len(failed)} of {len(f['checks'])} checks of stage head failed"


def judge_fit(f):
    used, free = f["reserved MiB"], f["free MiB"]
    return used <= free, f"train_seq_len {f['train_seq_len']}: {used:,} MiB reserved of {free:,} free"


def judge_waits(f):
    return f["waits"] == 0, f"{f['waits']} waits of {number(f['waiting ms'])} ms in {f['steps']} steps"


CLAIMS = [
    ("the language-model head runs in FP8", "head", judge_fp8),
    ("halves `train_seq_len` until a step fits into the free memory of the card", "speed", judge_fit),
    ("The host doesn't wait for the GPU between validations", "waits", judge_waits),
]


def check_claim(results, stage, function):
    result = results.get(stage, {"status": "not run"})
    if result["status"] == "done":
        return function(results["machine"]["figures"] | result["figures"])
    return None, f"stage {stage}: {result['status']}"


def judge_peaks(results, head, tokens, *peaks):
    for result in results.values():
        f = result["figures"]
        if "training MiB" in f and (f["head"], f["train_seq_len"]) == (head, tokens):
            got = (f["training MiB"], f["validation MiB"])
            near = all(abs(value / want - 1) < NEAR for value, want in zip(got, peaks))
            return near, f"{got[0]:,} and {got[1]:,} MiB"
    return None, "no result"


def claims(results):
    """What this GPU says of each claim: [(claim, verdict, measured)]."""
    found = [(claim, *check_claim(results, stage, function)) for claim, stage, function in CLAIMS]
    for head, tokens, training, validation in PEAKS:
        claim = (
            f"{tokens} tokens, {head} head: {training:,} MiB in training, {validation:,} in validation"
        )
        found.append((claim, *judge_peaks(results, head, tokens, training, validation)))
    return [(claim, VERDICTS[confirmed], measured) for claim, confirmed, measured in found]


# -----------------------------------------------------------------------------
# Markdown


def number(value):
    """A figure as text. None and "" become a dash."""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value or "-"


def table_lines(header, rows):
    """A table in Markdown, below an empty line."""
    return ["", markdown_table([dict(zip(header, map(number, row))) for row in rows])]


def stage_lines(name, result):
    """The section of a stage: its figures, checks and kernels, or why it failed."""
    lines = ["", f"## {name}"]
    if result["status"] != "done":
        return lines + ["", f"This stage {result['status']}:", "", "```", result["error"], "```"]
    figures = dict(result["figures"])
    checks = figures.pop("checks", [])
    kernels = figures.pop("kernels", [])
    figures.pop("losses", None)  # only for the JSON
    if figures:
        lines += table_lines(["quantity", "value"], figures.items())
    if checks:
        words = {True: "ok", False: "**too large**"}
        rows = [(check["name"], check["value"], check["limit"], words[check["ok"]]) for check in checks]
        lines += table_lines(["error", "value", "limit", ""], rows)
    if kernels:
        lines += table_lines(["slowest kernels of a step", "calls", "ms", "%"], kernels)
    return lines


def page(conditions, results):
    """The whole report as Markdown."""
    rows = []
    for stage, result in results.items():
        passed = [check["ok"] for check in result["figures"].get("checks", [])]
        checks = f"{sum(passed)} of {len(passed)}" if passed else ""
        rows.append((stage, result["status"], checks, f"{result['seconds']:.0f}"))
    lines = [
        f"# {conditions['GPU']}, PyTorch {conditions['PyTorch']}",
        "",
        f"Measured on {conditions['date']} with `./run.sh gpu-report`, which explains the stages. Times are "
        "medians in milliseconds.",
        *table_lines(["stage", "status", "checks passed", "seconds"], rows),
        "",
        "## Claims of records/HARDWARE.md",
        *table_lines(["claim", "on this GPU", "measured"], claims(results)),
    ]
    for stage, result in results.items():
        lines += stage_lines(stage, result)
    return "\n".join(lines) + "\n"
