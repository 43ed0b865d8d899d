"""
What compare.py compares: a source with its options. It is read from options, an idea's folder, a
patch, a file, a revision or the working tree, and checked before anything runs.

An idea's folder has idea.patch and idea.json, whose fields idea_pages.py explains.
"""

import hashlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from log_parsing import UsageError

ROOT = Path(__file__).resolve().parent.parent
# Options that compare.py gives to the runs itself
OURS = ("--seed", "--log_dir", "--num_runs", "--resume")
# Settings that don't change the final loss
NO_EFFECT_ON_LOSS = ("seed", "val_loss_every", "target_val_loss", "save_checkpoint")
# Settings that the final loss is measured with
VALIDATION = ("track", "val_files", "val_tokens", "val_seq_len")
# A script with these functions can be asked for its settings
CHECKS = (b"parse_arguments", b"check_hyperparameters")
LOAD = """
import dataclasses, importlib.util, json, sys
spec = importlib.util.spec_from_file_location("script", sys.argv[1])
script = sys.modules["script"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
"""
ASK = """
for options in json.loads(sys.argv[2]):
    try:
        args, hp = script.parse_arguments(options)
        script.check_hyperparameters(hp, int(sys.argv[3]))
        answer = dataclasses.asdict(hp)
        answer["device"] = script.DEVICE.type if hasattr(script, "DEVICE") else args.device
    except (Exception, SystemExit) as e:
        answer = (str(e) or type(e).__name__).splitlines()[0]
    print(json.dumps(answer))
"""
# Prints for each list of options what is wrong with their data, or ""
ASK_DATA = """
for options in json.loads(sys.argv[2]):
    answer = ""
    try:
        script.check_inputs(*script.parse_arguments(options))
    except Exception as e:
        if type(e).__name__ != "InputError":
            raise
        answer = str(e).splitlines()[0]
    print(json.dumps(answer))
"""


@dataclass
class Variant:
    """The base, an idea, or the base with another number of steps."""

    name: str
    source: bytes
    options: list[str]
    settings: dict | None = None  # the hyperparameters; None for scripts that can't be asked

    def digest(self) -> str:
        """Equal for variants with the same losses on the same machine."""
        if self.settings is None:
            settings = self.options
        else:
            settings = {k: v for k, v in self.settings.items() if k not in NO_EFFECT_ON_LOSS}
        facts = [hashlib.sha256(self.source).hexdigest(), settings, 1]  # 1: as in finished screens
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def num_iterations(self) -> int | None:
        if self.settings is not None:
            return self.settings.get("num_iterations")
        found = re.findall(r"--num_iterations[ =](\d+)", " ".join(self.options))
        return int(found[-1]) if found else None


def environment(**more: str) -> dict[str, str]:
    """The environment of runs. Python doesn't import modules from the folder of the script."""
    return {**os.environ, "PYTHONSAFEPATH": "1", **more}


# -----------------------------------------------------------------------------
# Sources


def git(*arguments: str, cwd: Path | None = None, **variables: str) -> bytes:
    """Returns what git prints. Raises UsageError with the first line of its error."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=cwd or ROOT, capture_output=True, env={**os.environ, **variables}
        )
    except FileNotFoundError:
        raise UsageError("git isn't installed; install it") from None
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").splitlines() or ["git failed"]
        raise UsageError(re.sub("^(error|fatal): ", "", lines[0]))
    return done.stdout


def patched(patch: Path, source: bytes) -> bytes:
    """Applies a patch to train_gpt.py or to a recipe. Raises UsageError if it doesn't apply, or changes
    other files."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        # Inside a repository, git would look for the patch's paths from the repository's root
        options = {"cwd": folder, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
        try:
            listing = git("apply", "--numstat", str(patch), **options).decode("utf-8", "replace")
            touched = [line.split("\t")[-1] for line in listing.splitlines()]
            name = touched[0] if len(touched) == 1 else ""
            if name == "train_gpt.py" or re.fullmatch(r"recipes/\w+\.py", name):
                script = folder / name
                script.parent.mkdir(exist_ok=True)
                script.write_bytes(source)
                git("apply", str(patch), **options)
                return script.read_bytes()
        except UsageError as e:
            raise UsageError(f"the patch doesn't apply ({e})") from None
    raise UsageError(
        f"the patch changes {', '.join(touched)}; it may only change train_gpt.py or one file of recipes/"
    )


def find_commit(revision: str) -> str:
    """The hash of a commit; "" if the repository doesn't have it. Raises UsageError."""
    git("rev-parse", "--git-dir")  # says why, if git can't read this repository
    name = f"{revision}^{{commit}}"
    try:
        return git("rev-parse", "--verify", "--quiet", "--end-of-options", name).decode().strip()
    except UsageError:
        return ""


def need_commit(revision: str, where: str) -> None:
    """Raises UsageError if the repository doesn't have this commit."""
    if not find_commit(revision):
        raise UsageError(
            f"{where}: this clone doesn't have commit {revision}; in a shallow clone, run git fetch "
            "--unshallow"
        )


def is_idea(kind: str) -> bool:
    """Whether a source is an idea's folder."""
    return kind not in ("", ".") and os.path.isfile(os.path.join(kind, "idea.patch"))


def read_idea(folder: Path) -> dict:
    """The idea.json of an idea's folder. Raises UsageError."""
    file = folder / "idea.json"
    try:
        idea = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"{file}: {e.strerror.lower()}") from None
    except ValueError as e:
        raise UsageError(f"{file}: not JSON ({e})") from None
    if not isinstance(idea, dict):
        raise UsageError(f"{file}: not a JSON object")
    return idea


def idea_commit(text: str) -> str:
    """The commit that an idea's folder names; "" for other sources, and for ideas for the current
    train_gpt.py. Raises UsageError."""
    kind = split_source(text)[1]
    if not is_idea(kind):
        return ""
    commit = str(read_idea(Path(kind)).get("commit", ""))
    if commit:
        need_commit(commit, kind)
    return commit


def read_source(kind: str, base: bytes) -> bytes:
    """The script that a file, a revision, a revision's file (REVISION:PATH) or "." names. Patches are
    applied to `base`.

    Raises UsageError and OSError.
    """
    file = Path(kind)
    if kind in (".", "worktree"):
        return (ROOT / "train_gpt.py").read_bytes()
    if ":" in kind and not file.exists():
        return git("show", "--end-of-options", kind)
    if file.suffix == ".py":
        return file.read_bytes()
    if file.suffix in (".patch", ".diff"):
        file.read_bytes()  # raises OSError if it isn't there
        return patched(file.resolve(), base)
    commit = find_commit(kind)
    if not commit:
        raise UsageError(
            "no git revision has this name; give a revision, an idea's folder, a .py, .patch or .diff "
            "file, or options that begin with --"
        )
    return git("show", f"{commit}:train_gpt.py")


def default_name(kind: str, options: list[str]) -> str:
    if kind == ".":
        kind = "worktree"
    elif is_idea(kind):
        kind = Path(kind).name
    elif Path(kind).suffix in (".py", ".patch", ".diff"):
        kind = Path(kind).stem
    words = [kind] + [word.lstrip("-") for word in options]
    return "_".join(words)


def split_source(text: str) -> tuple[str, str, list[str]]:
    """The parts of [NAME=][KIND] [OPTIONS]. Raises UsageError."""
    name = ""
    what = text
    named = re.fullmatch(r"(\w[\w.+-]*)=(.*)", text, re.DOTALL)
    if named and not os.path.exists(text):
        name, what = named.groups()
    try:
        words = shlex.split(what)
    except ValueError as e:  # quotes that don't close
        raise UsageError(f"{text}: {e}") from None
    if not words:
        return name, ".", []
    if words[0].startswith("--"):
        return name, "", words
    return name, words[0], words[1:]


def read_variant(text: str, base: bytes, common: list[str]) -> Variant:
    """Reads [NAME=][KIND] [OPTIONS]. `common` are options of all variants. Raises UsageError."""
    name, kind, options = split_source(text)
    name = name or default_name(kind, options)
    if is_idea(kind):
        options = read_idea(Path(kind)).get("options", "").split() + options
        kind = os.path.join(kind, "idea.patch")
    source = base
    try:
        if kind:
            source = read_source(kind, base)
    except OSError as e:
        raise UsageError(f"{e.filename}: {e.strerror.lower()}") from None
    except UsageError as e:
        raise UsageError(f"{text}: {e}") from None
    for word in common + options:
        if word.split("=")[0] in OURS:
            option = word.split("=")[0]
            raise UsageError(f"{option}: compare sets this option for each run; remove it")
    name = re.sub(r"[^\w.+-]+", "_", name).strip("_.")
    return Variant(name[:60] or "idea", source, common + options)


# -----------------------------------------------------------------------------
# Checks


def ask_script(name: str, *command) -> str:
    """What a script prints. Raises UsageError with the last line of its error."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env=environment(),
    )
    if done.returncode != 0:
        lines = done.stderr.splitlines() or ["the source doesn't run"]
        raise UsageError(f"{name}: {lines[-1]}")
    return done.stdout


def ask_settings(variants: list[Variant], script: Path, processes: int) -> None:
    """Fills in the settings of variants with this source. Raises UsageError."""
    options = json.dumps([variant.options for variant in variants])
    printed = ask_script(variants[0].name, "-c", LOAD + ASK, script, options, str(processes))
    answers = printed.splitlines()[-len(variants) :]
    for variant, line in zip(variants, answers):
        answer = json.loads(line)
        if isinstance(answer, str):
            raise UsageError(f"{variant.name}: {answer}")
        variant.settings = answer


def check_other_script(variant: Variant, script: Path, many_runs: bool) -> None:
    """Raises UsageError if a script that isn't ours lacks an option that the runs need."""
    needed = ["--log_dir", "--seed", "--num_iterations"]
    if many_runs:
        needed.append("--num_runs")
    text = ""
    if b"--log_dir" in variant.source:  # don't run a script that may not know --help
        text = ask_script(variant.name, script, *variant.options, "--help")
    for option in needed:
        if option not in text:
            raise UsageError(f"{variant.name}: this script has no option {option}, which compare needs")


def check_settings(variants: list[Variant], processes: int, many_runs: bool = True) -> None:
    """Lets each source check its options, and fills in the settings. Raises UsageError.

    Without `many_runs`, other scripts need no option --num_runs."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        for source in dict.fromkeys(variant.source for variant in variants):
            script.write_bytes(source)
            group = [variant for variant in variants if variant.source == source]
            ours = all(re.search(rb"^def %s\(" % name, source, re.MULTILINE) for name in CHECKS)
            if ours:
                ask_settings(group, script, processes)
                continue
            for variant in group:
                check_other_script(variant, script, many_runs)


def check_validation(base: Variant, others: list[Variant]) -> None:
    """Raises UsageError if a variant measures its loss in another way than the base."""
    for variant in others:
        if base.settings is None or variant.settings is None:
            continue
        for option in VALIDATION:
            value = variant.settings.get(option)
            expected = base.settings.get(option)
            if value != expected:
                raise UsageError(
                    f"{variant.name}: --{option} is {value}, but {expected} in the base; losses can only "
                    "be compared on the same validation tokens and sequence length, so give both the same"
                )


def check_data(variants: list[Variant]) -> None:
    """Lets each script check that there are enough data for its runs. Raises UsageError.

    Scripts without a function check_inputs aren't asked."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        for source in dict.fromkeys(variant.source for variant in variants):
            group = [variant for variant in variants if variant.source == source]
            if group[0].settings is None or b"def check_inputs(" not in source:
                continue
            script.write_bytes(source)
            options = json.dumps([[*variant.options, "--log_dir", folder] for variant in group])
            printed = ask_script(group[0].name, "-c", LOAD + ASK_DATA, script, options)
            for variant, line in zip(group, printed.splitlines()[-len(group) :]):
                message = json.loads(line)
                if message:
                    raise UsageError(f"{variant.name}: {message}")


def tell_apart(variants: list[Variant]) -> None:
    """Makes names unique. Raises UsageError if two variants are equal."""
    for i, variant in enumerate(variants):
        earlier = variants[:i]
        for other in earlier:
            if variant.digest() == other.digest():
                raise UsageError(
                    f"{variant.name} has the same source and settings as {other.name}, so there is "
                    "nothing to compare; edit train_gpt.py, or pass an --idea that changes the training"
                )
        while variant.name in [other.name for other in earlier]:
            variant.name += "_2"


def log_ratio_of_steps(fewer: Variant, more: Variant) -> float:
    """The logarithm of the ratio of their numbers of steps. Rounding makes it differ a little from
    2 log(SLOPE_FACTOR)."""
    return math.log(more.num_iterations() / fewer.num_iterations())


def set_steps(variant: Variant, steps: int) -> Variant:
    """The variant with this number of steps."""
    settings = None
    if variant.settings is not None:
        settings = {**variant.settings, "num_iterations": steps}
    return replace(
        variant,
        name=f"{variant.name} with {steps} steps",
        options=[*variant.options, "--num_iterations", str(steps)],
        settings=settings,
    )


def with_steps(base: Variant, factor: float, others: list[Variant] | None = None) -> Variant:
    """The base with another number of steps. If one of the others is the same, returns that one, so
    that both have the same runs. Raises UsageError if the number of steps isn't possible."""
    steps = base.num_iterations()
    if steps is None or round(steps * factor) in (0, steps):
        raise UsageError(
            f"{base.name}: compare also trains the base with more and with fewer steps, so it needs to know "
            "--num_iterations; give --num_iterations 10 or more"
        )
    variant = set_steps(base, round(steps * factor))
    for other in others or []:
        if other.digest() == variant.digest():
            return other
    return variant
