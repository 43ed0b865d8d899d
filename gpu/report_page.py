"""
The page that gpu/gpu_report.py writes. Results are {stage: {"seconds", "figures", "error"}}.
"""

from judge.text import markdown_table


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
    if result["error"]:
        return lines + ["", "This stage failed:", "", "```", result["error"], "```"]
    figures = dict(result["figures"])
    checks = figures.pop("checks", [])
    kernels = figures.pop("kernels", [])
    if figures:
        lines += table_lines(["quantity", "value"], figures.items())
    if checks:
        words = {True: "ok", False: "**too large**"}
        rows = [(check["name"], check["value"], check["limit"], words[check["ok"]]) for check in checks]
        lines += table_lines(["error", "value", "limit", ""], rows)
    if kernels:
        lines += table_lines(["slowest kernels of a step", "calls", "ms", "%"], kernels)
    return lines


def page(machine, results):
    """The whole report as Markdown."""
    rows = []
    for stage, result in results.items():
        passed = [check["ok"] for check in result["figures"].get("checks", [])]
        checks = f"{sum(passed)} of {len(passed)}" if passed else ""
        status = "failed" if result["error"] else "done"
        rows.append((stage, status, checks, f"{result['seconds']:.0f}"))
    lines = [
        f"# {machine['GPU']}, PyTorch {machine['PyTorch']}",
        "",
        f"Measured on {machine['date']} with `./run.sh gpu-report`, which explains the stages. Times are "
        "medians in milliseconds.",
        *table_lines(["machine", ""], machine.items()),
        *table_lines(["stage", "status", "checks passed", "seconds"], rows),
    ]
    for stage, result in results.items():
        lines += stage_lines(stage, result)
    return "\n".join(lines) + "\n"
