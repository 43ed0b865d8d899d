"""
Reads logs of training runs: ours, and those of other programs.

A log may contain the sources that made the run, a line of `=`, a description of the machine, and lines
about the run, such as `step:S/N val_loss:L train_time:Tms step_avg:Ams` (lines.py reads these). Logs
vary: several runs below one source, losses printed twice, a line of `=` above the source or between two,
times in seconds or no times, `step_avg:nan`, no line with the peak memory, Windows line ends.

Nothing here judges a run, or guesses: what can be read in two ways is an error.
"""

import functools
import itertools
import json
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from judge.logs.lines import NUMBER, Line, find_lines, joined, named_numbers, plain
from judge.commands import UserError
from judge.files import without_windows
from judge.text import short

SUFFIXES = (".txt", ".log", ".out")  # of the logs in a folder

TIMES = re.compile(rf" train_time:({NUMBER})(ms|s)\b(?: step_avg:({NUMBER})ms)?")
TORCH = re.compile(r"\bpytorch (\d[\w.+]*)", re.IGNORECASE)
CPU = re.compile(r"^CPU: *(.*?),? *\b(\d+) cores?\b(?:.*instruction sets: (.*))?", re.MULTILINE)
# The model that a cloud shows is often just "AMD EPYC". The first of these that a CPU has tells more.
CPU_KINDS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 and bf16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "bf16": "bf16",  # ARM
}
PROCESSES = re.compile(r"^(?:resume: .*\bon )?(\d+) process", re.MULTILINE)
RESUME = re.compile(r"^(resume: .*)", re.MULTILINE)
GPU_ROW = re.compile(
    r"^\|? *(\d+) +((?:NVIDIA|Tesla|GeForce|Quadro)\b\S*(?: \S+)*?)(?: {2,}| +(?:On|Off)\b)",
    re.MULTILINE,
)
GPU_LINE = re.compile(r"\b(NVIDIA [\w -]+?) with world[ _]size[ =](\d+)")
DRIVER = re.compile(r"Driver Version: *([\d.]+)")
POWER = re.compile(r"\d+W */ *(\d+W)")  # what a GPU takes, and its limit
COMPILER = re.compile(r"\nCompiler: [^\n]*; flags: ([^\n]*); model compiled: (?:yes|no)")
UNCOMPILED = "model compiled: no"  # in the line about the compiler
SEPARATOR = re.compile(rb"^={100,} *(?:\n|\Z)", re.MULTILINE)  # below each source
# The first line below the sources
HEADER = re.compile(rb"Running py(?:thon|torch) ", re.IGNORECASE)
# The heading of a source with its name. A log of a single script has none.
NEXT_SOURCE = re.compile(rb"\n\n-{20,}\n# ([\w./-]+)\n-{20,}\n\n")


def signed(metric: str, higher_is_better: bool) -> str:
    """What parse_log reads, whose lower numbers are better: "-NAME" is the negative of a metric. Raises
    UserError."""
    if higher_is_better and not metric:
        raise UserError("--higher_is_better needs --metric NAME")
    return f"-{metric}" if higher_is_better else metric


class NoLog(UserError):
    """A file has nothing that a log has."""


@dataclass
class Validation:
    """One line of a log with a validation loss, or another metric."""

    step: int  # 1 in a log that has no steps, only a loss at the end
    val_loss: float  # nats per token
    train_time_ms: float  # nan in a log without times
    step_avg_ms: float  # nan in the first steps of old logs, too


@dataclass
class Log:
    """What a log says about one run. A value that it doesn't say is None, or empty."""

    path: Path
    trial: int | None  # 1, 2, ... if the file has several runs
    # (name, text byte for byte) of each source, first the script. A name is only what the log says.
    sources: list[tuple[str, bytes]]
    run: str  # everything below the sources, but for the file's other runs
    metric: str  # the full name of the loss, such as "val_loss"; "" if there is none
    hyperparameters: dict  # includes track and seed; {} if not ours
    hardware: str  # like "8x NVIDIA H100 80GB HBM3" or "AMD EPYC with AVX2, 2 cores"
    limits: str  # of GPUs, like "driver 570.86.15, 700W, MIG"
    resumed_on: list[str]  # other hardware, or another PyTorch, of later parts of the run
    torch: str
    compiler_flags: list[str]  # on a CPU
    uncompiled: bool  # trained without torch.compile, at least after a resume
    validations: list[Validation]
    last_step: int
    num_steps: int
    scheduled: bool  # the log says how many steps are planned
    units: dict[str, float] = field(default_factory=dict)  # see find_units

    @property
    def source(self) -> bytes | None:
        """The script."""
        return self.sources[0][1] if self.sources else None

    @property
    def name(self) -> str:
        """For tables: that of the file, like "abc" or "abc#3". A UUID is shortened to 8 digits."""
        uuid = r"([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
        return re.sub(uuid, r"\1", self.path.stem) + self.number

    @property
    def number(self) -> str:
        """Of the run in its file: "#3", or "" if it is the only one."""
        return f"#{self.trial}" if self.trial else ""

    @property
    def machine(self) -> str:
        """In words."""
        limits = f" ({self.limits})" if self.limits else ""
        return f"{self.hardware or 'an unknown machine'}{limits}, PyTorch {self.torch or 'unknown'}"

    @property
    def end(self) -> Validation | None:
        """The validation after the last step in the log, where the run may have been stopped."""
        if self.validations and self.validations[-1].step == self.last_step:
            return self.validations[-1]
        return None

    @property
    def final(self) -> Validation | None:
        """The validation after the last step of the schedule."""
        return self.end if self.last_step == self.num_steps else None

    @property
    def unfinished(self) -> str:
        """Why there is no final loss; "" if there is one."""
        if self.last_step < self.num_steps:
            return f"stopped at step {self.last_step} of {self.num_steps}"
        if self.final is None:
            return "no final validation"
        if not math.isfinite(self.final.val_loss):
            return f"final val_loss {self.final.val_loss}"
        return ""

    @property
    def incomplete(self) -> str:
        """Why this can't be a run of a record; "" if it can."""
        if self.unfinished:
            return self.unfinished
        if not 0 < self.final.train_time_ms < math.inf:
            return "no training time"
        times = [v.train_time_ms for v in self.validations]
        if any(later < earlier for earlier, later in itertools.pairwise(times)):
            return "its clock goes back"
        if contradicts_itself(self.final):
            return "its train_time isn't that of its steps: they took step_avg each"
        if not self.source:
            return "no source above the run"
        return ""

    @functools.cached_property
    def steps_made(self) -> int:
        """Also if the loss stands below all steps: then that of the last line that counts them."""
        steps = []
        if self.last_step == 1:
            count = r"^\W*(?:num_)?steps?[\W_]+(\d+)"
            steps = re.findall(count, self.run, re.MULTILINE | re.IGNORECASE)
        return int(steps[-1]) if steps else self.last_step

    @property
    def track(self) -> str:
        return self.hyperparameters.get("track", "")

    @property
    def target(self) -> float | None:
        """None if the log names none."""
        return self.hyperparameters.get("target_val_loss")


def contradicts_itself(v: Validation) -> bool:
    """Whether the time isn't that of the steps, by far. In 1,700 runs of modded-nanogpt it is 0.9 to 1.4
    times step_avg times the steps. Its old logs leave out the first ten steps."""
    fastest = v.train_time_ms / max(1, v.step) / 2
    slowest = v.train_time_ms / max(1, v.step - 10) * 2
    return v.step_avg_ms < fastest or v.step_avg_ms > slowest


# -----------------------------------------------------------------------------
# Sources


def named_sources(text: bytes, name: str) -> list[tuple[str, bytes]]:
    """Splits text at its headings into (name, text). `name` is that of the text above the first."""
    parts = [name.encode(), *NEXT_SOURCE.split(text)]  # name, text, name, text, ...
    names = [part.decode() for part in parts[::2]]
    sources = list(zip(names, parts[1::2]))
    if NEXT_SOURCE.match(text):
        del sources[0]  # it is empty
    return sources


def split_sources(data: bytes) -> tuple[list[tuple[str, bytes]], bytes]:
    """Splits a log into its sources, as in Log.sources, and the rest: the sources stand above lines of `=`, and
    the header below the last one."""
    first = SEPARATOR.match(data)  # the oldest logs begin with one
    data = data[first.end() :] if first else data
    parts = SEPARATOR.split(data)
    headers = [i for i, part in enumerate(parts) if HEADER.match(part)]
    count = [*headers, min(1, len(parts) - 1)][0]
    if count == 0:
        return [], data
    *texts, rest = SEPARATOR.split(data, count)
    sources = []
    for text in texts:
        # Without a heading, all that is known of a name is the order
        name = f"source_{len(sources) + 1}.py" if sources else "train_gpt.py"
        # logs print the source, and print adds a newline, but in the oldest ones
        sources += named_sources(text if first else text[:-1], name)
    return sources, rest


# -----------------------------------------------------------------------------
# The machine and the settings


def find_hardware(header: str) -> str:
    """The GPUs that were used, or the CPU; "" if the header names neither."""
    gpus = set(GPU_ROW.findall(header))  # a set, because nvidia-smi may be in the log twice
    if gpus:
        # nvidia-smi also lists idle GPUs. Our logs say how many processes there are, one per GPU.
        used = PROCESSES.search(header)
        count = used[1] if used else len(gpus)
        names = sorted({name for _, name in gpus})
        return f"{count}x {' + '.join(names)}"
    line = GPU_LINE.search(header)
    if line:
        return f"{line[2]}x {line[1].strip()}"
    cpu = CPU.search(header)
    if cpu is None:
        return ""
    model, count, instruction_sets = cpu.groups(default="")
    kinds = [name for flag, name in CPU_KINDS.items() if flag in instruction_sets.split()]
    if kinds:
        model += f" with {kinds[0]}"
    return f"{model}, {count} {'core' if count == '1' else 'cores'}"


def find_limits(header: str) -> str:
    """What decides the speed of GPUs beside their name, from the table of nvidia-smi."""
    words = [f"driver {version}" for version in DRIVER.findall(header)]
    mig = ["MIG"] * bool(re.search(r"\| +Enabled \|$", header, re.MULTILINE))
    return ", ".join(dict.fromkeys([*words, *POWER.findall(header), *mig]))


def find_later_machines(run: str, first: str, torch: list[str]) -> list[str]:
    """The hardware on which a run was resumed, and versions of PyTorch, if they aren't the first ones.

    `run` begins with the first step. A resumed run describes its machine again, above the line about
    the resume. That line has the number of processes: on GPUs, one per GPU.
    """
    later = []
    parts = RESUME.split(run)
    for part, resume in zip(parts[::2], parts[1::2]):
        hardware = find_hardware(part + resume) or first
        versions = [version for version in TORCH.findall(part + resume) if version not in torch]
        later += [hardware] * (hardware != first) + [f"PyTorch {version}" for version in versions]
    return list(dict.fromkeys(later))


def find_hyperparameters(header: str) -> dict:
    """The settings in our logs. {} for other people's logs, and if the line is damaged."""
    line = re.search(r"^hyperparameters: (\{.*\})$", header, re.MULTILINE)
    try:
        found = json.loads(line[1]) if line else {}
    except (ValueError, RecursionError):
        return {}
    kinds = {"track": str, "seed": int, "target_val_loss": (int, float), "windows": list}
    kinds |= {"val_tokens": int, "window_block": int}
    for name, kind in kinds.items():
        if name in found and not isinstance(found[name], kind):
            return {}
    return found


# -----------------------------------------------------------------------------
# The run


def read_log_file(path: Path) -> bytes:
    """Raises UserError and OSError."""
    data = without_windows(path.read_bytes())
    if b"\0" in data:
        raise UserError(
            f"{path}: a binary file, or a log damaged by a crash (contains zero bytes); leave it out"
        )
    return data


def same(a: str, b: str) -> bool:
    """Whether two numbers are equal, or one is the other one rounded."""
    digits = min(len(number.partition(".")[2]) for number in (a, b))
    rounded = "e" not in (a + b).lower() and round(float(a), digits) == round(float(b), digits)
    return a == b or float(a) == float(b) or rounded


def find_name(path: Path, lines: list[Line], metric: str) -> str:
    """The full name of the loss that counts: of those in lines about steps, or else of the others. If the
    metric is a full name, other losses whose names end with it are dropped. Raises UserError if there are
    several."""
    steps = any(line.losses for line in lines if line.step is not None)
    found = {}
    for line in lines:
        if (line.step is not None) == steps:
            found |= line.losses
    if metric in found:
        for line in lines:
            line.losses = [loss for loss in line.losses if loss[0] == metric]
        return metric
    check_rivals(path, found)
    return next(iter(found), "")


def check_rivals(path: Path, numbers: dict[str, str]) -> None:
    """Raises UserError if these losses of a run, by name, aren't all the same."""
    first = next(iter(numbers.values()), "")
    if not all(same(first, number) for number in numbers.values()):
        listed = ", ".join(f"{name} ({number})" for name, number in numbers.items())
        raise UserError(f"{path}: which loss counts? {listed}; choose one with --metric NAME")


def find_starts(path: Path, lines: list[Line], name: str) -> list[int]:
    """Where each run begins: at a step before the last one, or with another loss at step 0, where all
    runs have about the same loss.

    A loss may be printed twice, at once or again below the run. Raises UserError if it is another one.
    """
    starts = []
    first = math.inf  # step of the current run
    last = math.inf
    losses = {}  # of the current run, by step
    for line in lines:
        loss = dict(line.losses).get(name)
        earlier = losses.get(line.step)
        again = loss and earlier and same(earlier, loss)
        if line.step is None or again and line.step:
            continue
        if line.step < last or earlier and loss and not again:
            if line.step > first:
                raise UserError(
                    f"{path}: step {line.step} comes again, with another loss: {short(line.text, 60)!r}; keep "
                    "what counts"
                )
            first = line.step
            starts.append(line.start)
            losses = {}
        if loss:
            losses[line.step] = loss
        last = line.step
    return starts


def find_validations(path: Path, lines: list[Line], name: str) -> list[Validation]:
    """In the order of the log, each once. Without a loss at any step, the last one in the log counts.
    Raises UserError if there are others below the last step."""
    found = {}
    below = {}  # the last loss, and those below it
    for line in lines:
        losses = dict(line.losses)
        if line.step is None:
            below |= losses
        elif name in losses:
            below = {name: losses[name]}
            times = TIMES.search(line.text)
            time, unit, step_avg = times.groups("nan") if times else ("nan", "ms", "nan")
            milliseconds = float(time) * (1000 if unit == "s" else 1)
            validation = Validation(line.step, float(losses[name]), milliseconds, float(step_avg))
            found.setdefault(line.step, validation)
        elif not found:
            below = {}
    check_rivals(path, below)
    if not found and below:
        found[1] = Validation(1, float(below[name]), math.nan, math.nan)
    return list(found.values())


def find_units(lines: list[Line], name: str) -> dict[str, float]:
    """The loss divided by other numbers in its lines, where that is the same at the first and at the last
    loss: nats per token divided by bits per byte, for example."""
    losses = [(float(dict(line.losses)[name]), line) for line in lines if name in dict(line.losses)]
    if not losses or losses[0][0] == losses[-1][0]:
        return {}
    found = []
    for loss, line in (losses[0], losses[-1]):
        numbers = {other: float(first) for other, (first, *_) in named_numbers(line.text).items()}
        found.append({other: loss / number for other, number in numbers.items() if number})
    first, last = found
    common = first.keys() & last.keys()
    return {other: first[other] for other in common if math.isclose(first[other], last[other], rel_tol=0.005)}


def parse_trials(path: Path, metric: str = "") -> list[Log]:
    """Reads the runs in a file, also if they did not finish (see Log.incomplete). Without a metric, the
    validation loss counts. "-NAME" is the negative of a metric. Raises UserError.
    """
    sources, rest = split_sources(read_log_file(path))
    text = plain(rest.decode("utf-8", "replace"))
    full_name = joined(metric.removeprefix("-").split())
    lines = find_lines(text, full_name)
    name = find_name(path, lines, full_name)
    starts = find_starts(path, lines, name) or [line.start for line in lines[:1]]
    if not starts:
        what = metric or "val_loss"
        raise NoLog(f"{path}: no line has a number for {what}, or step:S/N; {what_is_there(text)}")
    header = text[: starts[0]]
    logs = []
    for start, end in itertools.pairwise([*starts, len(text)]):
        own = [line for line in lines if start <= line.start < end]
        logs.append(make_log(path, sources, header, text[start:end], own, name))
        if not metric:
            logs[-1].units = find_units(own, name)
        if len(starts) > 1:
            logs[-1].trial = len(logs)
        if metric.startswith("-"):
            logs[-1].metric = metric[0] + logs[-1].metric
            for validation in logs[-1].validations:
                validation.val_loss *= -1
    return logs


def what_is_there(text: str) -> str:
    """The last line that looks like a loss, or else the first line."""
    lines = [line for line in text.splitlines() if line.strip()]
    losses = [line for line in lines if re.search(r"(loss|bpb).*\d", line, re.IGNORECASE)]
    like = short((losses[-1:] or lines or [""])[0], 60)
    return f"it has lines like {like!r}; give --metric NAME for another number"


def make_log(
    path: Path,
    sources: list[tuple[str, bytes]],
    header: str,
    steps: str,
    lines: list[Line],
    name: str,
) -> Log:
    """Of the run that begins with `steps`, which has these lines. The header stands below the sources."""
    run = header + steps
    hardware = find_hardware(header)
    torch = TORCH.findall(header)
    validations = find_validations(path, lines, name)
    counts = [line for line in lines if line.step is not None]
    if validations and not any(name in dict(line.losses) for line in counts):
        counts = []  # the loss stands below the last step: it says itself that the run is over
    last_step = max((line.step for line in counts), default=1)
    num_steps = [line.num_steps for line in counts if line.num_steps]
    return Log(
        path=path,
        trial=None,
        sources=sources,
        run=run,
        metric=name.removeprefix("step_"),
        hyperparameters=find_hyperparameters(header),
        hardware=hardware,
        limits=find_limits(header),
        resumed_on=find_later_machines(steps, hardware, torch),
        torch=torch[0] if torch else "",
        compiler_flags=list(dict.fromkeys(COMPILER.findall(run))),
        uncompiled=UNCOMPILED in run,
        validations=validations,
        last_step=last_step,
        num_steps=(num_steps or [last_step])[-1],
        scheduled=bool(num_steps),
    )


def parse_log(path: str | Path, metric: str = "") -> Log:
    """Reads a log of one run. Raises UserError."""
    logs = parse_trials(Path(path), metric)
    if len(logs) > 1:
        raise UserError(f"{path}: {len(logs)} runs in one file; this needs a log of one run")
    return logs[0]


def find_logs(files: list[Path], metric: str = "") -> tuple[list[Log], list[Path]]:
    """A log for each run in these files, and the files that are no logs. Raises UserError."""
    logs = []
    others = []
    for file in files:
        try:
            logs += parse_trials(file, metric)
        except (NoLog, IsADirectoryError):
            others.append(file)
    return logs, others


def read_logs(paths: list[Path], metric: str = "") -> list[Log]:
    """Reads files, and the .txt, .log and .out files of folders. Returns a log for each run.

    Prints what it ignores in a folder. Raises UserError.
    """
    logs = []
    for path in paths:
        if not path.is_dir():
            logs += parse_trials(path, metric)
            continue
        files = [file for file in sorted(path.iterdir()) if file.suffix in SUFFIXES]
        found, others = find_logs(files, metric)
        if others and not found:
            parse_trials(others[0], metric)  # its error shows what is there
        if others:
            names = short(", ".join(file.name for file in others), 200)
            print(f"{path}: ignored, because no losses are in them: {names}", file=sys.stderr)
        if not found:
            raise UserError(f"{path}: no log in this folder (.txt, .log or .out)")
        logs += found
    return logs
