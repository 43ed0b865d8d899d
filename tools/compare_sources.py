"""
What compare.py can compare: a source with its options, read from options, a patch, a file, a revision or the working
tree, and checked before anything runs.
"""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from log_parsing import LogError

ROOT = Path(__file__).resolve().parent.parent
COPY_SEEDS = (
    1000  # from the seeds of a thing to those of its copy (--aa), so the most runs there can be
)
OURS = {
    "--seed",
    "--log_dir",
    "--num_runs",
    "--resume",
    "--checkpoint_dir",
}  # what this command gives to the runs
CHECKS = (b"parse_arguments", b"check_hyperparameters")
CHECK = """
import dataclasses, importlib.util, json, sys
spec = importlib.util.spec_from_file_location("script", sys.argv[1])
script = sys.modules["script"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
for options in json.loads(sys.argv[2]):
    try:
        args, hp = script.parse_arguments(options)
        script.check_hyperparameters(hp, int(sys.argv[3]))
        print(json.dumps(dict(dataclasses.asdict(hp), track=args.track, device=args.device, seed=None)))
    except (Exception, SystemExit) as e:
        print(json.dumps((str(e) or type(e).__name__).splitlines()[0]))
"""


@dataclass
class Variant:
    name: str
    source: bytes
    options: list[str]  # those that all have, and its own
    settings: dict | list | None = (
        None  # what the source makes of them; of scripts that do not tell, the options
    )
    first_seed: int = 0
    extra: bool = False  # the base with other steps


def environment(**extra: str) -> dict:
    """Of a frozen source: its folder is not searched for modules, or one called torch.py would be torch."""
    return os.environ | dict(PYTHONSAFEPATH="1") | extra


def git(*arguments: str, cwd: Path | None = None, **environment: str) -> bytes:
    """What git prints. Raises LogError with the first line of its error."""
    done = subprocess.run(
        ["git", *arguments], cwd=cwd or ROOT, capture_output=True, env=os.environ | environment
    )
    if done.returncode:
        line = (done.stderr.decode("utf-8", "replace").splitlines() or ["git failed"])[0]
        raise LogError(re.sub("^(error|fatal): ", "", line))
    return done.stdout


def patched(patch: Path, source: bytes) -> bytes:
    """Raises LogError for a patch that does not apply, or that touches anything but train_gpt.py."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder).resolve() / "train_gpt.py"
        script.write_bytes(source)
        # within a repository, git would take the patch's paths from its root and apply nothing
        at = dict(cwd=script.parent, GIT_CEILING_DIRECTORIES=str(script.parent.parent))
        try:
            lines = (
                git("apply", "--numstat", str(patch), **at).decode("utf-8", "replace").splitlines()
            )
            touched = [line.split("\t")[-1] for line in lines]
            if touched == ["train_gpt.py"]:
                git("apply", str(patch), **at)
                return script.read_bytes()
        except LogError as e:
            raise LogError(f"does not apply ({e})") from None
        raise LogError(f"changes {', '.join(touched)}; it may change train_gpt.py alone")


def read_source(kind: str, base: bytes) -> bytes:
    """The script that a file, a revision or "." stands for; base: what patches are for. Raises LogError, OSError."""
    file = Path(kind)
    if kind in (".", "worktree"):
        return (ROOT / "train_gpt.py").read_bytes()
    if file.suffix == ".py":
        return file.read_bytes()
    if file.suffix in (".patch", ".diff"):
        with open(file, "rb"):  # for an error in our own words
            return patched(file.resolve(), base)
    try:
        commit = (
            git("rev-parse", "--verify", "--quiet", "--end-of-options", kind + "^{commit}")
            .decode()
            .strip()
        )
    except LogError:
        raise LogError(
            "no revision here, no .py, .patch or .diff file, and no options, which begin with --"
        ) from None
    return git("show", f"{commit}:train_gpt.py")


def read_variant(text: str, base: bytes, common: list[str]) -> Variant:
    """[NAME=][KIND] [OPTIONS]. Raises LogError."""
    named = None if os.path.exists(text) else re.fullmatch(r"(\w[\w.+-]*)=(.*)", text, re.DOTALL)
    name, what = named.groups() if named else ("", text)
    try:
        options = shlex.split(what)
        kind = "" if options and options[0].startswith("--") else options.pop(0) if options else "."
        source = read_source(kind, base) if kind else base
    except (LogError, OSError, ValueError) as e:
        raise LogError(
            f"{e.filename}: {e.strerror.lower()}" if isinstance(e, OSError) else f"{text}: {e}"
        ) from None
    if given := OURS & {word.split("=")[0] for word in common + options}:
        raise LogError(
            f"{min(given)}: this command gives it to the runs itself (the first round's seed: --seed)"
        )
    kind = (
        "worktree"
        if kind == "."
        else Path(kind).stem
        if Path(kind).suffix in (".py", ".patch", ".diff")
        else kind
    )
    name = name or "_".join([kind, *(word.lstrip("-") for word in options)])
    return Variant(
        re.sub(r"[^\w.+-]+", "_", name).strip("_.")[:60] or "idea", source, common + options
    )


def check_settings(variants: list[Variant], processes: int) -> None:
    """Fills in their settings, by each source's own check of its options. Raises LogError for what it refuses."""

    def ask(name, *command):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environment(),
        )
        if done.returncode:
            raise LogError(
                f"{name}: {(done.stderr.splitlines() or ['its source does not run'])[-1]}"
            )
        return done.stdout

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        for source in dict.fromkeys(v.source for v in variants):
            script.write_bytes(source)
            group = [v for v in variants if v.source == source]
            if all(re.search(rb"^def %s\(" % name, source, re.MULTILINE) for name in CHECKS):
                options = json.dumps([v.options for v in group])
                answers = ask(
                    group[0].name, "-c", CHECK, script, options, str(processes)
                ).splitlines()
                for variant, answer in zip(group, answers[-len(group) :]):
                    variant.settings = json.loads(answer)
                    if isinstance(variant.settings, str):
                        raise LogError(f"{variant.name}: {variant.settings}")
                continue
            for (
                variant
            ) in group:  # a script of another make: its --help reads what stands before it
                text = (
                    ask(variant.name, script, *variant.options, "--help")
                    if b"--log_dir" in source
                    else ""
                )
                if missing := [
                    o for o in ("--log_dir", "--seed", "--num_iterations") if o not in text
                ]:
                    raise LogError(
                        f"{variant.name}: a script without {missing[0]}, which a comparison has to give"
                    )
                variant.settings = variant.options


def tell_apart(variants: list[Variant], copies: bool) -> None:
    """Makes names unique, and gives a copy (--aa) seeds of its own. Raises LogError for a copy that is not wanted."""
    for i, variant in enumerate(variants):
        same = [
            v for v in variants[:i] if (v.source, v.settings) == (variant.source, variant.settings)
        ]
        if same and not copies:
            raise LogError(
                f"{variant.name}: the same source and settings as {same[0].name}, so there is nothing to "
                "compare (--aa compares a thing with itself)"
            )
        variant.first_seed = variants[0].first_seed + COPY_SEEDS * len(same)
        while variant.name in {v.name for v in variants[:i]}:
            variant.name += "_2"


def other_steps(base: Variant) -> list[Variant]:
    """The base with a tenth fewer and a tenth more steps. Raises LogError."""
    known = isinstance(base.settings, dict)
    found = re.findall(r"--num_iterations[ =](\d+)", " ".join(base.options))
    found = [base.settings["num_iterations"]] if known else found
    if not found or int(found[-1]) < 2:
        raise LogError(
            f"{base.name}: its steps can be neither a tenth more nor fewer; --num_iterations, or --no_steps"
        )
    made = []
    for sign in (-1, 1):
        steps = int(found[-1]) + sign * max(1, round(int(found[-1]) / 10))
        options = ["--num_iterations", str(steps)]
        settings = base.settings | dict(num_iterations=steps) if known else base.settings + options
        made.append(
            replace(
                base,
                name=f"{base.name}{10 * sign:+}%",
                options=base.options + options,
                settings=settings,
                extra=True,
            )
        )
    return made


def digest(facts) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def run_key(variant: Variant, facts: dict) -> str:
    """Equal for variants whose runs with equal seeds are the same."""
    return digest([hashlib.sha256(variant.source).hexdigest(), variant.settings, facts])
