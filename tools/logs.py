"""
Reads logs of training runs: ours, and any other in the format of the NanoGPT speedrun.

A log contains the sources that made the run, a line of `=`, a description of the machine, and lines
about the run (`step:S/N val_loss:L train_time:Tms step_avg:Ams`, and others that are ignored here).
Other people's logs vary: a line of `=` above the source or between two, times in seconds,
`step_avg:nan`, no line with the peak memory.

Only this module knows the format.
"""

import hashlib
import itertools
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from tools.common import LogError, readable

DEFAULT_TARGET = 3.28  # for logs that don't name their target: that of the competition, on FineWeb
HIGHEST_LOSS = 1_000_000  # nats per token; runs that diverged are below it, too

NUMBER = r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?|nan|inf)"
VALIDATION = re.compile(
    rf"step:(\d{{1,12}})/\d{{1,12}} val_loss:{NUMBER} (?:.* )?"
    rf"train_time:{NUMBER}(ms|s) step_avg:{NUMBER}ms"
)
STEP = re.compile(r"step:(\d{1,12})/(\d{1,12}) ")
# All that parse_final_loss needs: no time
LOSS = re.compile(r"^step:(\d{1,12})/(\d{1,12}) val_loss:(\S+)", re.MULTILINE)
PEAK_MEMORY = re.compile(r"^peak memory (?:allocated|consumption): (\d{1,12}) MiB", re.MULTILINE)
TORCH = re.compile(r"\bpytorch (\d[\w.+]*)", re.IGNORECASE)
CPU = re.compile(r"^CPU: *(.*?),? *\b(\d+) cores?\b(?:.*instruction sets: (.*))?", re.MULTILINE)
# The model that a cloud shows is often just "AMD EPYC". The first of these that a CPU has tells more.
CPU_KINDS = (
    ("amx_bf16", "AMX"),
    ("avx512_bf16", "AVX-512 and bf16"),
    ("avx512f", "AVX-512"),
    ("avx2", "AVX2"),
    ("bf16", "bf16"),  # ARM
)
PROCESSES = re.compile(r"^(\d+) process(?:es)? on cuda", re.MULTILINE)
RESUME = re.compile(r"^resume: .*\bon (\d+) process", re.MULTILINE)
GPU_ROW = re.compile(
    r"^\|? *(\d+) +((?:NVIDIA|Tesla|GeForce|Quadro)\b\S*(?: \S+)*?)(?: {2,}| +(?:On|Off)\b)",
    re.MULTILINE,
)
GPU_LINE = re.compile(r"\b(NVIDIA [\w -]+?) with world[ _]size[ =](\d+)")
COMPILER = re.compile(r"\nCompiler: [^\n]*; flags: ([^\n]*); model compiled: (?:yes|no)")
UNCOMPILED = "model compiled: no"  # in the line about the compiler, or in a line that a resume adds
# The first line below the sources
HEADER = re.compile(rb"Running py(?:thon|torch) ", re.IGNORECASE)
# The heading of a source with its name. A log of a single script has none.
NEXT_SOURCE = re.compile(rb"\n\n-{20,}\n# ([\w./-]+)\n-{20,}\n\n")

# How scripts name the number of tokens in a step. Where there are two names, it is their product.
# Some scripts only name the sequence length of one of their 8 processes, so the factor is 8.
STEP_TOKENS = [
    (("batch_tokens",), 1),
    (("train_bs_schedule",), 1),
    (("train_batch_size",), 1),
    (("batch_size", "sequence_length"), 1),
    (("batch_size",), 1),
    (("train_seq_len",), 8),
    (("seq_len",), 8),
]
FEWEST_TOKENS = 65_536  # a smaller number counts sequences, or the tokens of one sequence


def short_name(path: Path) -> str:
    """The file's name, for tables. A UUID is shortened to its first 8 digits."""
    uuid = r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
    return re.sub(uuid, r"\1", readable(path.stem))


@dataclass
class Validation:
    """One line of a log with a validation loss."""

    step: int
    val_loss: float  # nats per token
    train_time_ms: float
    step_avg_ms: float  # nan in the first steps of old logs


@dataclass
class Log:
    """What a log says. A value that it doesn't say is None, or empty."""

    path: Path
    # (name, text byte for byte) of each source, first the script. A name is only what the log says.
    sources: list[tuple[str, bytes]]
    run: str  # everything below the sources
    hyperparameters: dict = field(default_factory=dict)  # includes track and seed; {} if not ours
    # like "8x NVIDIA H100 80GB HBM3" or "AMD EPYC with AVX2, 2 cores"; "" if unknown
    hardware: str = ""
    resumed_on: list[str] = field(default_factory=list)  # other hardware of later parts of the run
    torch: str = ""
    peak_memory_mib: int | None = None
    compiler_flags: list[str] = field(default_factory=list)  # on a CPU; [] if unknown
    uncompiled: bool = False  # trained without torch.compile, at least after a resume
    validations: list[Validation] = field(default_factory=list)  # sorted by step
    last_step: int = 0
    num_steps: int = 0
    forced: bool = False  # resumed with --resume_force
    repeated: bool = False  # the steps start again, so the file contains several runs

    @property
    def source(self) -> bytes | None:
        """The script."""
        return self.sources[0][1] if self.sources else None

    @property
    def name(self) -> str:
        return short_name(self.path)

    @property
    def final(self) -> Validation | None:
        """The validation after the last step."""
        if self.validations and self.validations[-1].step == self.num_steps:
            return self.validations[-1]
        return None

    @property
    def incomplete(self) -> str:
        """Why this is not the log of one whole run; "" if it is."""
        if self.repeated:
            return "several runs in one file"
        if self.last_step < self.num_steps:
            return f"stopped at step {self.last_step} of {self.num_steps}"
        if self.final is None:
            return "no final validation"
        loss = self.final.val_loss
        milliseconds = self.final.train_time_ms
        if not (math.isfinite(loss) and math.isfinite(milliseconds)):
            return f"final val_loss {loss}, training time {milliseconds} ms"
        if milliseconds == 0:
            return "no training time"
        if not self.source:
            return "no source above the run"
        return ""

    @property
    def track(self) -> str:
        return self.hyperparameters.get("track", "")

    @property
    def target(self) -> float:
        return self.hyperparameters.get("target_val_loss", DEFAULT_TARGET)

    @property
    def val_tokens(self) -> int | None:
        """Tokens in a validation, or None if the log doesn't say."""
        if "val_tokens" in self.hyperparameters:
            return self.hyperparameters["val_tokens"]
        found = self.constants("val_tokens")
        return found[0] if len(found) == 1 else None

    @property
    def step_tokens(self) -> list[int]:
        """Tokens in a step: several numbers if they vary, [] if the log doesn't say."""
        if "batch_tokens" in self.hyperparameters:
            return [self.hyperparameters["batch_tokens"]]
        if "seq_lens" in self.hyperparameters:  # recipes/january2026.py
            lengths = sorted(set(self.hyperparameters["seq_lens"]))
            return [self.hyperparameters["num_sequences"] * length for length in lengths]
        for names, factor in STEP_TOKENS:
            values = [self.constants(name) for name in names]
            products = {factor * math.prod(choice) for choice in itertools.product(*values)}
            found = sorted(n for n in products if n >= FEWEST_TOKENS)
            if found:
                return found
        return []

    def constants(self, name: str) -> list[int]:
        """The numbers that the source assigns to `name`, sorted.

        Products like 8 * 1024 are computed. A tuple or a list gives several numbers.
        """
        text = (self.source or b"").decode("utf-8", "replace")
        number = r"\d[\d_]{0,18}"
        numbers = rf"{number}(?:\s*[*,]\s*{number})*"
        assignment = rf"\b{name}\s*(?::\s*\w+\s*)?=\s*[(\[]?\s*({numbers})\s*(?=[],)#]|$)"
        found = set()
        for values in re.findall(assignment, text, re.MULTILINE):
            for product in values.split(","):
                factors = [int(n.replace("_", "")) for n in product.split("*")]
                found.add(math.prod(factors))
        return sorted(found)

    def digest(self) -> str:
        """A hash of the run's lines, to recognize copies of a log."""
        return hashlib.sha256(self.run.encode()).hexdigest()


@dataclass
class FinalLoss:
    """The loss after the last step of a run."""

    path: Path
    steps: int
    val_loss: float  # nats per token
    digest: str  # of the whole file, to recognize copies


# -----------------------------------------------------------------------------
# Parsing

def separator(data: bytes, start: int) -> tuple[int, int] | None:
    """Finds the first line of 100 `=` or more after `start`. Returns its (begin, end), or None.

    If there is none, a line of at least 20 counts. It is the second choice because the source may
    contain a heading that is underlined with `=`.
    """
    for length in (100, 20):
        line = re.compile(b"={%d,}[ \r]*(?:\n|\\Z)" % length)
        at = data.find(b"=" * length, start)
        while at >= 0:
            found = line.match(data, at)
            starts_line = at == 0 or data[at - 1 : at] == b"\n"
            if found and starts_line:
                return found.span()
            at = data.find(b"\n", at)
            if at < 0:
                break
            at = data.find(b"=" * length, at)
    return None


def named_sources(text: bytes, name: str) -> list[tuple[str, bytes]]:
    """Splits text at its headings into (name, text). `name` is that of the text above the first."""
    parts = [name.encode(), *NEXT_SOURCE.split(text)]  # name, text, name, text, ...
    names = [part.decode() for part in parts[::2]]
    sources = list(zip(names, parts[1::2]))
    if NEXT_SOURCE.match(text):
        del sources[0]  # it is empty
    return sources


def split_sources(data: bytes) -> tuple[list[tuple[str, bytes]], bytes]:
    """Splits a log into its sources, as in Log.sources, and the rest.

    Without a line of `=` there is no source.
    """
    start = 0
    newline = 1  # logs print the source, and print adds a newline
    end = separator(data, 0)
    if end is not None and end[0] == 0:
        # The oldest logs start with a separator and write the source without a newline
        start = end[1]
        newline = 0
        end = separator(data, start)
    if end is None:
        return [], data
    # If another separator comes before the header, there is another source above it
    before_steps = data[: data.find(b"\nstep:", end[1]) + 1]
    ends = [end]
    while not HEADER.match(before_steps, ends[-1][1]):
        following = separator(before_steps, ends[-1][1])
        if following is None:
            ends = [end]
            break
        ends.append(following)
    sources = []
    for begin, after in ends:
        # Without a heading, all that is known of a name is the order
        name = f"source_{len(sources) + 1}.py" if sources else "train_gpt.py"
        sources += named_sources(data[start : begin - newline], name)
        start = after
    return sources, data[start:]


def find_hardware(header: str) -> str:
    """The GPUs that were used, or the CPU; "" if the header names neither."""
    gpus = set(GPU_ROW.findall(header))  # a set, because nvidia-smi may be in the log twice
    if gpus:
        count = len(gpus)
        # nvidia-smi also lists idle GPUs. Our logs say how many processes there are, one per GPU.
        used = PROCESSES.search(header)
        if used:
            count = int(used[1])
        names = sorted({name for _, name in gpus})
        return f"{count}x {' + '.join(names)}"
    line = GPU_LINE.search(header)
    if line:
        return f"{line[2]}x {line[1].strip()}"
    cpu = CPU.search(header)
    if cpu:
        model, count, instruction_sets = cpu.groups(default="")
        cores = "core" if count == "1" else "cores"
        return f"{model}{cpu_kind(instruction_sets)}, {count} {cores}"
    return ""


def find_later_hardware(run: str, first: str) -> list[str]:
    """The hardware on which a run was resumed, if it isn't the first one.

    `run` begins with the first step. If a run is resumed on another machine, its log describes the
    machine again, above the line about the resume. That line has the number of processes: on GPUs,
    one per GPU.
    """
    parts = [[]]  # each but the last ends with a resume
    for line in run.split("\n"):
        if line.startswith("step:"):
            continue
        parts[-1].append(line)
        if line.startswith("resume"):
            parts.append([])
    later = []
    for lines in parts:
        part = "\n".join(lines)
        hardware = find_hardware(part) or first
        resume = RESUME.search(part)
        if resume:
            hardware = re.sub(r"^\d+x ", f"{resume[1]}x ", hardware)
        if hardware != first and hardware not in later:
            later.append(hardware)
    return later


def cpu_kind(instruction_sets: str) -> str:
    """What to add to a CPU's model, such as " with AVX2"."""
    flags = instruction_sets.split()
    for flag, name in CPU_KINDS:
        if flag in flags:
            return f" with {name}"
    return ""


def find_hyperparameters(header: str) -> dict:
    """The settings in our logs. {} for other people's logs, and if the line is damaged."""
    line = re.search(r"^hyperparameters: (\{.*\})\r?$", header, re.MULTILINE)
    if line is None:
        return {}
    try:
        found = json.loads(line[1])
    except (ValueError, RecursionError):
        return {}
    kinds = {"track": str, "val_tokens": int, "batch_tokens": int, "target_val_loss": (int, float)}
    for name, kind in kinds.items():
        if name in found and not isinstance(found[name], kind):
            return {}
    return found


def read_log_file(path: str | Path) -> bytes:
    """Raises LogError if the file can't be read or can't be a log."""
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise LogError(f"{path}: not a file")
        data = Path(path).read_bytes()
    except OSError as e:
        raise LogError(f"{path}: {(e.strerror or 'cannot be read').lower()}") from None
    if not data.strip():
        raise LogError(f"{path}: empty file; leave it out")
    if b"\0" in data:
        raise LogError(
            f"{path}: a binary file, or a log damaged by a crash (contains zero bytes); leave it out"
        )
    return data


def find_last_step(run: str) -> re.Match | None:
    """The last line that starts with a whole step:S/N."""
    at = run.rfind("\nstep:")
    while at >= 0:
        match = STEP.match(run, at + 1)
        if match:
            return match
        at = run.rfind("\nstep:", 0, at)
    return STEP.match(run)


def read_validation(log: Log, line: str, resumed_at: int | None) -> None:
    """Adds the validation in this line, if there is one, to the log.

    After a resume, the validation at the step of the checkpoint may be printed again. It then
    replaces the earlier one.
    """
    match = VALIDATION.match(line)
    if match is None:
        return
    step, val_loss, train_time, unit, step_avg = match.groups()
    milliseconds = float(train_time)
    if unit == "s":
        milliseconds *= 1000
    validation = Validation(int(step), float(val_loss), milliseconds, float(step_avg))
    if log.validations:
        previous_step = log.validations[-1].step
        if validation.step == previous_step and validation.step == resumed_at:
            log.validations.pop()
        elif validation.step <= previous_step:
            log.repeated = True
    log.validations.append(validation)


def read_run(log: Log) -> None:
    """Reads the validations and resumes of a run into the log."""
    resumed_at = None
    for line in log.run.split("\n"):
        if "resume_force" in line and not line.startswith("hyperparameters:"):
            log.forced = True
        if line.startswith("resume"):
            match = re.search(r"step (\d{1,12})", line)
            resumed_at = int(match[1]) if match else 0
            # Later steps of the interrupted run are repeated
            log.validations = [v for v in log.validations if v.step <= resumed_at]
        elif " val_loss:" in line:
            read_validation(log, line, resumed_at)


def parse_log(path: str | Path) -> Log:
    """Reads a log, also one of a run that did not finish (see Log.incomplete). Raises LogError."""
    sources, rest = split_sources(read_log_file(path))
    run = rest.decode("utf-8", "replace")
    last = find_last_step(run)
    if last is None:
        raise LogError(
            f"{path}: it isn't a log, or the run never got to step 0; leave it out (no line starts "
            "with step:S/N)"
        )
    header = run[: run.find("\nstep:") + 1]
    log = Log(Path(path), sources, run)
    log.hyperparameters = find_hyperparameters(header)
    log.last_step = int(last[1])
    log.num_steps = int(last[2])
    log.hardware = find_hardware(header)
    log.resumed_on = find_later_hardware(run[len(header) :], log.hardware)
    torch = TORCH.search(header)
    if torch:
        log.torch = torch[1]
    log.compiler_flags = list(dict.fromkeys(COMPILER.findall(run)))
    log.uncompiled = UNCOMPILED in run
    peak = PEAK_MEMORY.search(run, run.rfind("\npeak memory "))
    if peak:
        log.peak_memory_mib = int(peak[1])
    read_run(log)
    return log


SUFFIXES = (".txt", ".log")  # of the logs in a folder


def files_of(path: Path) -> list[Path]:
    """The .txt and .log files of a folder, or the file itself. Raises OSError."""
    if not path.is_dir():
        return [path]
    return sorted(p for p in path.iterdir() if p.suffix in SUFFIXES)


def find_logs(paths: list[str | Path]) -> tuple[list[Path], list[str]]:
    """The log files of files and folders, and one line for each folder without logs."""
    files = []
    errors = []
    for path in map(Path, paths):
        try:
            found = files_of(path)
        except OSError as e:
            errors.append(f"{path}: {(e.strerror or 'cannot be read').lower()}")
            continue
        if not found:
            errors.append(f"{path}: no .txt or .log file in this folder")
        files += found
    return files, errors


def read_logs(paths: list[str | Path]) -> tuple[list[Log], list[str]]:
    """Returns the logs, and one line for each file that can't be read as a log."""
    files, errors = find_logs(paths)
    logs = []
    for file in files:
        try:
            logs.append(parse_log(file))
        except LogError as e:
            errors.append(str(e))
    return logs, errors


def parse_final_loss(path: str | Path) -> FinalLoss:
    """Reads the loss after the last step, and nothing else, from a log with or without times.

    If the run's lines have several validations after the last step, the last one counts. Raises
    LogError if the run is unfinished, or if its loss isn't a number from 0 to HIGHEST_LOSS.
    """
    data = read_log_file(path)
    _, run = split_sources(data)
    found = LOSS.findall(run.decode("utf-8", "replace"))
    if not found:
        raise LogError(
            f"{path}: the run wrote no validation loss; leave this log out (no line of the run starts "
            "with step:S/N val_loss:L)"
        )
    step, steps, text = found[-1]
    if int(step) != int(steps):
        raise LogError(
            f"{path}: unfinished, because the last validation is at step {step} of {steps}; let the run "
            "finish, or leave this log out"
        )
    try:
        val_loss = float(text)
    except ValueError:
        val_loss = math.nan
    if not 0 <= val_loss <= HIGHEST_LOSS:
        raise LogError(
            f"{path}: the final val_loss is {text[:40]}, not a number from 0 to {HIGHEST_LOSS:,}"
        )
    return FinalLoss(Path(path), int(steps), val_loss, hashlib.sha256(data).hexdigest())


def read_final_losses(paths: list[str | Path]) -> list[FinalLoss]:
    """The final losses of runs of one recipe, at least one.

    Raises LogError if there is no log, if one can't be used, if two are copies of the same log, or
    if they have different numbers of steps.
    """
    files, errors = find_logs(paths)
    if errors:
        raise LogError(errors[0])
    losses = [parse_final_loss(file) for file in files]
    first = losses[0]
    seen = {}
    for loss in losses:
        if loss.steps != first.steps:
            raise LogError(
                f"{loss.path}: a run of {loss.steps} steps, but {first.path} has {first.steps}; "
                "all runs must have the same number"
            )
        if loss.digest in seen:
            raise LogError(
                f"{loss.path}: a copy of {seen[loss.digest]}; each run counts once, so leave one out"
            )
        seen[loss.digest] = loss.path
    return losses
