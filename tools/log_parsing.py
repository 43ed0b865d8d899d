"""
Reads the logs of training runs: ours, and any in the format of the NanoGPT speedruns.

A log is the source of the script that made it, a line of `=`, the machine, and the run's lines
(`step:S/N val_loss:L train_time:Tms step_avg:Ams`, and more that is skipped here). Logs of the field also come
with a line of `=` above the source, with a second source below the first, with times in seconds, with
`step_avg:nan`, or without a peak-memory line.

Only this module knows the format. What it cannot read is a LogError whose text is one line.
"""

import ast
import hashlib
import itertools
import json
import math
import os
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from machine import readable, show_any_text

DEFAULT_TARGET = 3.28  # of logs that do not say theirs: the field's, on FineWeb

NUMBER = r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?|nan|inf)"
VALIDATION = re.compile(
    rf"step:(\d{{1,12}})/\d{{1,12}} val_loss:{NUMBER} (?:.* )?"
    rf"train_time:{NUMBER}(ms|s) step_avg:{NUMBER}ms"
)
STEP = re.compile(r"step:(\d{1,12})/(\d{1,12}) ")
PEAK_MEMORY = re.compile(r"^peak memory (?:allocated|consumption): (\d{1,12}) MiB", re.MULTILINE)
TORCH = re.compile(r"\bpytorch (\d[\w.+]*)", re.IGNORECASE)
CPU = re.compile(r"^CPU: *(.*?),? *\b(\d+) cores?\b", re.MULTILINE)
PROCESSES = re.compile(r"^(\d+) process(?:es)? on cuda", re.MULTILINE)
GPU_ROW = re.compile(
    r"^\|? *\d+ +((?:NVIDIA|Tesla|GeForce|Quadro)\b\S*(?: \S+)*?)(?: {2,}| +(?:On|Off)\b)",
    re.MULTILINE,
)
GPU_LINE = re.compile(r"\b(NVIDIA [\w -]+?) with world[ _]size[ =](\d+)")
COMPILER = re.compile(r"\nCompiler: [^\n]*; flags: ([^\n]*); model compiled: (?:yes|no)")
UNCOMPILED = "model compiled: no"  # in the line of the compiler, or in one that a resume adds
HEADER = re.compile(
    rb"Running py(?:thon|torch) ", re.IGNORECASE
)  # the machine's first line, below the sources
NEXT_SOURCE = re.compile(
    rb"\n\n-{20,}\n# [\w./-]+\n-{20,}\n\n"
)  # the name of a file that the script appended

# What sources call the tokens of a step, and the factor to them: sequences a step times tokens a sequence, or the
# sequence of one of 8 processes. A schedule or its stages give several numbers.
STEP_TOKENS = [
    (("batch_tokens",), 1),
    (("train_bs_schedule",), 1),
    (("train_batch_size",), 1),
    (("batch_size", "sequence_length"), 1),
    (("batch_size",), 1),
    (("train_seq_len",), 8),
    (("seq_len",), 8),
]
FEWEST_TOKENS = (
    65_536  # of a step of the field; smaller numbers count sequences, or the tokens of one
)


class LogError(Exception):
    """A file that is no log; the message is one line that says why."""


@dataclass
class Validation:
    step: int
    val_loss: float  # nats per token
    train_time_ms: float
    step_avg_ms: float  # nan in the first steps of old logs


@dataclass
class Log:
    path: Path
    sources: list[bytes]  # the script, byte for byte, and files that follow it
    run: str  # everything below the sources
    hyperparameters: dict = field(default_factory=dict)  # ours only; with "track" and "seed"
    hardware: str = (
        ""  # "8x NVIDIA H100 80GB HBM3", "AMD EPYC, 2 cores"; "" where the log is silent
    )
    torch: str = ""
    peak_memory_mib: int | None = None
    compiler_flags: list[str] = field(
        default_factory=list
    )  # of a CPU; [] where the log does not say
    uncompiled: bool = False  # trained without torch.compile, from the start or from a resume on
    validations: list[Validation] = field(default_factory=list)  # by rising step
    last_step: int = 0
    num_steps: int = 0
    forced: bool = False  # resumed with --resume_force
    repeated: bool = False  # the steps start again: several runs in one file

    @property
    def source(self) -> bytes | None:
        """The script."""
        return self.sources[0] if self.sources else None

    @property
    def name(self) -> str:
        """The file's name, as short as a table wants it: a uuid's first 8 digits."""
        return re.sub(
            r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
            r"\1",
            readable(self.path.stem),
        )

    @property
    def final(self) -> Validation | None:
        """The validation after the last step."""
        return (
            self.validations[-1]
            if self.validations and self.validations[-1].step == self.num_steps
            else None
        )

    @property
    def incomplete(self) -> str:
        """Why this is not the log of one whole run; "" if it is."""
        if self.repeated:
            return "several runs in one file"
        if self.last_step < self.num_steps:
            return f"stopped at step {self.last_step} of {self.num_steps}"
        if self.final is None:
            return "no final validation"
        if not (math.isfinite(self.final.val_loss) and math.isfinite(self.final.train_time_ms)):
            return (
                f"final val_loss {self.final.val_loss}, training time {self.final.train_time_ms} ms"
            )
        if self.final.train_time_ms == 0:
            return "no training time"
        return "" if self.source else "no source above the run"

    @property
    def track(self) -> str:
        return self.hyperparameters.get("track", "")

    @property
    def target(self) -> float:
        return self.hyperparameters.get("target_val_loss", DEFAULT_TARGET)

    @property
    def val_tokens(self) -> int | None:
        """How many tokens each validation reads; None where the log does not say."""
        written = self.constants("val_tokens")
        return self.hyperparameters.get("val_tokens", written[0] if len(written) == 1 else None)

    @property
    def step_tokens(self) -> list[int]:
        """How many tokens a step trains on: several numbers where it varies, [] where the log does not say."""
        if "batch_tokens" in self.hyperparameters:
            return [self.hyperparameters["batch_tokens"]]
        for names, factor in STEP_TOKENS:
            products = {
                factor * math.prod(values)
                for values in itertools.product(*map(self.constants, names))
            }
            if found := sorted(n for n in products if n >= FEWEST_TOKENS):
                return found
        return []

    def constants(self, name: str) -> list[int]:
        """The different numbers, products of numbers or tuples of them that the source gives to `name`."""
        text = (self.source or b"").decode("utf-8", "replace")
        number = r"\d[\d_]{0,18}"
        numbers = rf"{number}(?:\s*[*,]\s*{number})*"
        found = re.findall(
            rf"\b{name}\s*(?::\s*\w+\s*)?=\s*[(\[]?\s*({numbers})\s*(?=[],)#]|$)",
            text,
            re.MULTILINE,
        )
        products = {product for values in found for product in values.split(",")}
        return sorted(
            {math.prod(int(n.replace("_", "")) for n in product.split("*")) for product in products}
        )

    def digest(self) -> str:
        """Of the run's lines: equal for copies of one log."""
        return hashlib.sha256(self.run.encode()).hexdigest()


# ----------------------------------------------------------------------------------------------------------
# Parsing
def separator(data: bytes, start: int) -> tuple[int, int] | None:
    """(begin, end) of the first line of `=` from `start` on: 100 of them, or else at least 20."""
    for length in (
        100,
        20,
    ):  # a heading underlined in a docstring is no separator while a full line follows
        line = re.compile(b"={%d,}[ \r]*(?:\n|\\Z)" % length)
        at = start
        while (at := data.find(b"=" * length, at)) >= 0:
            if (at == 0 or data[at - 1 : at] == b"\n") and (found := line.match(data, at)):
                return found.span()
            at = data.find(b"\n", at)
            if at < 0:
                break
    return None


def split_sources(data: bytes) -> tuple[list[bytes], bytes]:
    """A log -> (the sources byte for byte, the rest). No source where no line of `=` ends one."""
    start, newline = 0, 1  # logs print the source: one newline is print's
    end = separator(data, 0)
    if (
        end is not None and end[0] == 0
    ):  # the oldest open with a separator, and write the source as it is
        start, newline = end[1], 0
        end = separator(data, start)
    if end is None:
        return [], data
    ends, head = [end], data[: data.find(b"\nstep:", end[1]) + 1]
    while ends and not HEADER.match(
        head, ends[-1][1]
    ):  # a further source, if the machine's first line is found below
        ends = [*ends, following] if (following := separator(head, ends[-1][1])) else []
    sources = []
    for end in ends or [end]:
        sources += NEXT_SOURCE.split(data[start : end[0] - newline])
        start = end[1]
    return sources, data[start:]


def find_hardware(run: str) -> str:
    """The GPUs that took part, or the CPU; "" if the header names neither."""
    if gpus := GPU_ROW.findall(run):
        used = PROCESSES.search(
            run
        )  # our runs say it: a process a GPU, while nvidia-smi lists the idle ones too
        count = int(used[1]) if used else len(gpus)
        return f"{count}x {' + '.join(sorted(set(gpus)))}"
    if line := GPU_LINE.search(run):
        return f"{line[2]}x {line[1].strip()}"
    if cpu := CPU.search(run):
        return f"{cpu[1]}, {cpu[2]} core{'s' if cpu[2] != '1' else ''}"
    return ""


def find_hyperparameters(run: str) -> dict:
    """Of our logs; {} for others. A damaged line counts as none."""
    line = re.search(r"^hyperparameters: (\{.*\})\r?$", run, re.MULTILINE)
    try:
        found = json.loads(line[1]) if line else {}
    except (ValueError, RecursionError):
        return {}
    kinds = dict(track=str, val_tokens=int, batch_tokens=int, target_val_loss=(int, float))
    return (
        found
        if all(
            isinstance(found.get(k, kind() if isinstance(kind, type) else 0.0), kind)
            for k, kind in kinds.items()
        )
        else {}
    )


def parse_log(path: str | Path) -> Log:
    """Raises LogError for what is no log. A log of a run that did not finish is a log: see Log.incomplete."""
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise LogError(f"{path}: not a file")
        data = Path(path).read_bytes()
    except OSError as e:
        raise LogError(f"{path}: {(e.strerror or 'cannot be read').lower()}") from None
    if not data.strip():
        raise LogError(f"{path}: empty file")
    if b"\0" in data:
        raise LogError(f"{path}: binary file, or a log damaged by a crash (it holds zero bytes)")
    sources, rest = split_sources(data)
    run = rest.decode("utf-8", "replace")
    at = run.rfind("\nstep:")
    while (last := STEP.match(run, at + 1)) is None and at >= 0:  # the last line may be cut
        at = run.rfind("\nstep:", 0, at)
    if last is None:
        raise LogError(
            f"{path}: no line that begins with step:S/N; not a log, or one of a run that never started"
        )

    header = run[: run.find("\nstep:") + 1]
    log = Log(
        Path(path),
        sources,
        run,
        find_hyperparameters(header),
        last_step=int(last[1]),
        num_steps=int(last[2]),
    )
    resumed_at = None
    for line in run.split("\n"):  # of a million lines, regular expressions see only these
        log.forced |= "resume_force" in line and not line.startswith("hyperparameters:")
        if line.startswith("resume"):
            match = re.search(r"step (\d{1,12})", line)
            resumed_at = (
                int(match[1]) if match else 0
            )  # what the interrupted run did beyond it was done again
            log.validations = [v for v in log.validations if v.step <= resumed_at]
        elif " val_loss:" in line and (match := VALIDATION.match(line)):
            step, val_loss, train_time, unit, step_avg = match.groups()
            if log.validations and log.validations[-1].step == resumed_at == int(step):
                log.validations.pop()
            log.repeated |= bool(log.validations) and int(step) <= log.validations[-1].step
            train_time_ms = float(train_time) * (1000 if unit == "s" else 1)
            log.validations.append(
                Validation(int(step), float(val_loss), train_time_ms, float(step_avg))
            )
    log.hardware = find_hardware(header)
    log.torch = match[1] if (match := TORCH.search(header)) else ""
    log.compiler_flags = list(dict.fromkeys(COMPILER.findall(run)))
    log.uncompiled = UNCOMPILED in run
    log.peak_memory_mib = (
        int(match[1]) if (match := PEAK_MEMORY.search(run, run.rfind("\npeak memory "))) else None
    )
    return log


def find_logs(paths: list[str | Path]) -> tuple[list[Path], list[str]]:
    """Files as they are, folders as the .txt and .log files in them. -> (the files, a line for each folder without)"""
    files, errors = [], []
    for path in map(Path, paths):
        try:
            found = (
                sorted(p for p in path.iterdir() if p.suffix in (".txt", ".log"))
                if path.is_dir()
                else [path]
            )
        except OSError as e:
            errors.append(f"{path}: {(e.strerror or 'cannot be read').lower()}")
            continue
        files += found
        if not found:
            errors.append(f"{path}: no .txt or .log file in this folder")
    return files, errors


def read_logs(paths: list[str | Path]) -> tuple[list[Log], list[str]]:
    """-> (the logs, one line for each file that is none)"""
    files, errors = find_logs(paths)
    logs = []
    for file in files:
        try:
            logs.append(parse_log(file))
        except LogError as e:
            errors.append(str(e))
    return logs, errors


# ----------------------------------------------------------------------------------------------------------
# What the source does to the compiler
ALLOWED_FLAGS = {
    ("dynamic", "False"),
    ("fullgraph", "True"),
}  # the latter makes a graph break an error, that is all
# Environment variables set torch._inductor.config too. One call is allowed, as some versions of GCC are wrong without
# it, and one name, which says where compiled code is kept
ALLOWED_CALL = 'os.environ.setdefault("TORCHINDUCTOR_CPP_MARCH", "native -mtune=icelake-server")'
ALLOWED_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
VARIABLE = re.compile(r"(?:TORCHINDUCTOR|TORCH_COMPILE)_\w*")


def compiler_settings(source: bytes) -> list[str]:
    """What a source may not do: a line for each touch of torch._inductor.config, for each flag of torch.compile that
    is not in ALLOWED_FLAGS, and for each environment variable of the compiler. Reads the syntax tree, runs nothing."""
    text = source.decode("utf-8", "replace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        found = settings_by_text(text) + variables_by_text(text)
    else:
        found = settings_by_tree(tree) + variables_by_tree(tree)
    lines = {}  # one message for all lines that do the same
    for what, line in sorted(set(found), key=lambda f: f[1]):
        lines.setdefault(what, []).append(str(line))
    return [
        f"{what} in source line{'s' if len(n) > 1 else ''} {', '.join(n[:5])}"
        f"{f' and {len(n) - 5} more' if len(n) > 5 else ''}"
        for what, n in lines.items()
    ]


def settings_by_tree(tree: ast.AST) -> list[tuple[str, int]]:
    """-> (what, line)"""
    flags = ("fullgraph", "dynamic", "backend", "mode", "options", "disable")
    names = {
        "torch": "torch",
        "re": "re",
    }  # what each name of the source stands for, aliases resolved
    found = []

    def dotted(node):
        """torch.compile -> "torch.compile"; "" for what is no chain of names."""
        if isinstance(node, ast.Name):
            return names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{dotted(node.value)}.{node.attr}"
        return ""

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname: a.name for a in node.names if a.asname}
            imported = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            imported = [f"{node.module}.{a.name}" for a in node.names]
        else:
            continue
        found += [
            ("torch._inductor.config", node.lineno)
            for name in imported
            if name.startswith("torch._inductor.config") or name == "torch._inductor.*"
        ]
    for node in ast.walk(tree):  # compile_it = torch.compile
        if isinstance(node, ast.Assign) and dotted(node.value) in (
            "torch.compile",
            "torch._inductor",
        ):
            names |= {t.id: dotted(node.value) for t in node.targets if isinstance(t, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node) == "torch._inductor.config":
            found.append(("torch._inductor.config", node.lineno))
        if not isinstance(node, ast.Call):
            continue
        callee = dotted(node.func)
        # torch.compile(f, ...), partial(torch.compile, ...), model.compile(...); not re.compile
        ours = callee == "torch.compile" or any(dotted(a) == "torch.compile" for a in node.args)
        method = isinstance(node.func, ast.Attribute) and node.func.attr == "compile"
        for keyword in node.keywords:
            if not (ours or method and keyword.arg in flags):
                continue
            value = ast.unparse(keyword.value)
            if (keyword.arg, value) not in ALLOWED_FLAGS:
                found.append(
                    (f"torch.compile({keyword.arg or '**'}={value})", keyword.value.lineno)
                )
    return found


def nodes_that_set_nothing(tree: ast.AST) -> set[ast.AST]:
    """What the allowed call holds, docstrings, and the names of variables that are only read."""
    allowed = ast.dump(ast.parse(ALLOWED_CALL, mode="eval").body)
    nodes = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.dump(node) == allowed:
            nodes |= set(ast.walk(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "os.environ.get",
            "os.getenv",
        ):
            nodes |= set(node.args[:1])
        elif isinstance(node, ast.Subscript) and isinstance(
            node.ctx, ast.Load
        ):  # os.environ["NAME"]
            nodes.add(node.slice)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            nodes.add(node.left)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            nodes.add(node.value)
    return nodes


def variables_by_tree(tree: ast.AST) -> list[tuple[str, int]]:
    """-> (the name of a variable of the compiler that the source may set outside of ALLOWED_CALL, line)"""
    harmless = nodes_that_set_nothing(tree)
    found = []
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Constant):
            name = node.value
        elif isinstance(node, ast.keyword):  # os.environ.update(TORCHINDUCTOR_MAX_AUTOTUNE="1")
            name = node.arg
        if isinstance(name, bytes):  # os.environb
            name = name.decode("utf-8", "replace")
        if node in harmless or not isinstance(name, str):
            continue
        match = VARIABLE.match(name)
        if match and match[0] != ALLOWED_VARIABLE:
            found.append((match[0], node.lineno))
    return found


def variables_by_text(text: str) -> list[tuple[str, int]]:
    """The same for a source that this Python cannot parse."""
    text = re.sub(r"#.*", "", text)
    for call in (ALLOWED_CALL, ALLOWED_CALL.replace('"', "'")):
        text = text.replace(call, "")
    name = rf"""["'](?:{VARIABLE.pattern})["']"""
    reads = (
        rf"(?:environ\.get|getenv)\({name}",
        rf"(?<!del os\.)environ\[{name}\](?!\s*[+|]?=[^=])",
        rf"{name} (?:not )?in\b",
    )
    text = re.sub("|".join(reads), "", text)
    found = []
    for match in re.finditer(
        rf"""["']({VARIABLE.pattern})|[(,]\s*({VARIABLE.pattern})\s*=""", text
    ):
        name = match[1] or match[2]
        if name != ALLOWED_VARIABLE:
            found.append((name, text.count("\n", 0, match.start()) + 1))
    return found


def settings_by_text(text: str) -> list[tuple[str, int]]:
    """The same for a source that this Python cannot parse (another version's syntax)."""
    text = re.sub(r"#.*", "", text)
    line = lambda at: text.count("\n", 0, at) + 1
    found = [
        ("torch._inductor.config", line(m.start()))
        for m in re.finditer(r"torch\._inductor(?:\.|\s+import\s+)config", text)
    ]
    for call in re.finditer(r"torch\.compile\(([^()]*)", text):
        flags = [(m[1], m[2].strip()) for m in re.finditer(r"(\w+)\s*=\s*([^,]*)", call[1])]
        found += [
            (f"torch.compile({flag}={value})", line(call.start()))
            for flag, value in flags
            if (flag, value) not in ALLOWED_FLAGS
        ]
    return found


# ----------------------------------------------------------------------------------------------------------
# For the commands
def write_file(path: str | Path, data: bytes) -> None:
    """Whole or not at all. Raises LogError."""
    path = Path(path)
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as f:
            temporary = f.name
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as e:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise LogError(f"cannot write {path}: {(e.strerror or str(e)).lower()}") from None


def run_command(main) -> None:
    """Ends the process with main's exit status; bad input is one line and status 2."""
    show_any_text()
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except LogError as e:
        print(f"error: {e}", file=sys.stderr)
        status = 2
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
