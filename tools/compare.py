"""
Does an idea help? Runs it and a base in turn, and says what it does to the loss, to a step's time, and to both.

    ./run.sh compare                                   the working tree's train_gpt.py against the last commit's
    ./run.sh compare --idea "--muon_lr 0.03"           a setting against the track's own
    ./run.sh compare --idea wide="--model_dim 160" --idea gelu=gelu.patch --runs 8
    ./run.sh compare --base v1.0 --idea my-branch --json out.json --plot out.png

--base and --idea take [NAME=]KIND: quoted options (on the base's source), a .patch or .diff to it, another .py
script, a git revision, or . for the working tree; options may follow the others too ("gelu.patch --muon_lr 0.03").
What this command does not know goes to all of them: --track, --device, --num_iterations 60.

Sources are frozen first. Then come rounds of one run each, all with the round's seed, in an order that turns from
round to round. All is kept in logs/compare/NAME/: the same command goes on where it stopped, and --runs 10 after
--runs 5 adds five. The base also runs with a tenth fewer and a tenth more steps, to tell what a loss is worth in steps.
These runs are taken over from comparisons that made them on this machine with the same source, settings, seed,
threads and PyTorch; so is the base's own loss if --no_times says that times do not matter. compare_stats.py has the
statistics. Exit status: 0 the comparison was made, 1 a run failed, 2 bad input, 130 interrupted.
"""

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from compare_stats import Effect, analyse, in_words, plot_effects, short, table
from log_parsing import Log, LogError, UsageError, parse_log, run_command, write_file
from machine import usable_cores
from compare_sources import (
    COPY_SEEDS,
    ROOT,
    Variant,
    check_settings,
    digest,
    environment,
    other_steps,
    read_variant,
    run_key,
    tell_apart,
)

COMPARISONS = ROOT / "logs" / "compare"
CORES = usable_cores()


class RunError(Exception):
    """A run that failed; the message has its last lines."""


@dataclass(frozen=True)
class Run:
    variant: str
    seed: int | None  # None: the untimed one, which compiles

    @property
    def name(self) -> str:
        return f"{self.variant}_seed{self.seed}"

    def __str__(self) -> str:
        return f"{short(self.variant)}, {'to compile, untimed' if self.seed is None else f'seed {self.seed}'}"


# ----------------------------------------------------------------------------------------------------------
# Runs
@dataclass
class Place:
    """A comparison's folder: sources/, runs/VARIANT/ and taken_over/VARIANT/ with logs, working/ while a run is on."""

    folder: Path
    facts: dict
    launcher: list[str]  # what stands before the script on the command line
    lock: int  # runs hold it too: one that outlives us lets no other comparison begin beside it

    def path(self, run: Run, kind: str = "runs") -> Path:
        return self.folder / kind / run.variant / f"{run.name}.txt"

    def log(self, run: Run, taken_over: bool) -> Log | None:
        return complete_log(self.path(run)) or (
            complete_log(self.path(run, "taken_over")) if taken_over else None
        )

    def start(self, run: Run, variant: Variant) -> subprocess.Popen:
        here = self.folder / "working" / run.name
        here.mkdir(parents=True)
        options = [*variant.options, "--log_dir", str(here / "logs")]
        options += (
            ["--num_iterations", "1", "--val_loss_every", "0"]
            if run.seed is None
            else ["--seed", str(run.seed)]
        )
        if isinstance(
            variant.settings, dict
        ):  # train_gpt.py writes a checkpoint when torchrun is stopped
            options += ["--checkpoint_dir", str(here / "checkpoints")]
        with open(here / "console.txt", "wb") as console:
            return subprocess.Popen(
                [*self.launcher, self.folder / "sources" / f"{run.variant}.py", *options],
                cwd=ROOT,
                env=environment(OMP_NUM_THREADS=str(self.facts["threads"])),
                pass_fds=[self.lock],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )

    def finish(self, run: Run, status: int) -> str:
        """Files the log. -> what it says. Raises RunError if there is no whole one."""
        here = self.folder / "working" / run.name
        log = (
            complete_log(next((here / "logs").glob("*.txt"), here))
            if run.seed is not None
            else None
        )
        if status or (run.seed is not None and not log):
            text = (here / "console.txt").read_text(encoding="utf-8", errors="replace").strip()
            lines = re.split(r"\n.* failed \(exitcode", text)[0].splitlines()[
                -12:
            ]  # torchrun's own words come after
            what = f"exit status {status}" if status else "no log of a whole run"
            raise RunError(
                "\n".join(
                    [
                        *lines,
                        f"error: this run failed: {run} ({what}); above are the last lines of "
                        f"{here / 'console.txt'}",
                    ]
                )
            )
        if log:
            self.path(run).parent.mkdir(parents=True, exist_ok=True)
            log.path.replace(self.path(run))
        shutil.rmtree(here)
        return (
            f"val_loss {log.final.val_loss:.4f}, {log.final.step_avg_ms:.2f} ms a step"
            if log
            else "done"
        )

    def stop(self, child: subprocess.Popen) -> None:
        """At once; but torchrun's workers lead sessions of their own, and only SIGTERM makes it end them."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if len(self.launcher) > 1:
                child.terminate()
                child.wait(40)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()

    def carry_out(self, todo: list[Run], variants: dict[str, Variant], jobs: int, check) -> None:
        """In this order, `jobs` at a time, with check() after each. Raises RunError, and what check() raises. However
        it ends, no run goes on."""
        waiting, running, began, shown = list(todo), {}, time.monotonic(), 0
        bar = tqdm(
            total=len(todo), unit="run", dynamic_ncols=True, leave=False, disable=None
        )  # on terminals
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    run = waiting.pop(0)
                    running[run] = self.start(run, variants[run.variant])
                    bar.set_description("; ".join(map(str, running)))
                time.sleep(0.02)
                if time.monotonic() - shown > 1:
                    bar.refresh()
                    shown = time.monotonic()
                for run in [run for run, child in running.items() if child.poll() is not None]:
                    text = self.finish(run, running.pop(run).returncode)
                    bar.update()
                    done = len(todo) - len(waiting) - len(running)
                    left = tqdm.format_interval(
                        (time.monotonic() - began) / done * (len(todo) - done)
                    )
                    if bar.disable:
                        print(
                            f"{done}/{len(todo)} {run}: {text}; {left} left",
                            file=sys.stderr,
                            flush=True,
                        )
                    check()
        finally:
            bar.close()
            for child in running.values():
                self.stop(child)

    def freeze(self, variants: list[Variant], jobs: int) -> None:
        """Writes sources and comparison.json. Raises LogError if those that are there are of another comparison."""
        made = {
            v.name: dict(
                source=hashlib.sha256(v.source).hexdigest(),
                settings=v.settings,
                first_seed=v.first_seed,
                extra=v.extra,
                key=run_key(v, self.facts),
            )
            for v in variants
        }
        file, conditions = self.folder / "comparison.json", dict(self.facts, jobs=jobs)
        if file.exists():
            before = json.loads(file.read_text(encoding="utf-8"))
            for k, value in conditions.items():
                if before[k] != value:
                    raise LogError(
                        f"{self.folder}: begun with {k} {before[k]}, not {value}; give another --name"
                    )
            kept = before["variants"]
            if any(
                kept.get(name) != v for name, v in made.items() if name in kept or not v["extra"]
            ) or any(name not in made for name, v in kept.items() if not v["extra"]):
                raise LogError(
                    f"{self.folder}: of other sources, settings or seeds; give another --name"
                )
            made = kept | made
        (self.folder / "sources").mkdir(exist_ok=True)
        for v in variants:
            write_file(self.folder / "sources" / f"{v.name}.py", v.source)
        write_file(file, json.dumps(dict(conditions, variants=made), indent=1).encode())

    def take_over(self, run: Run, key: str) -> None:
        """Copies the log of the same run from another comparison, if one has it: compiled or not, as the runs are that
        were made here."""
        logs = [complete_log(path) for path in (self.folder / "runs").glob("*/*.txt")]
        made = {log.uncompiled for log in logs if log}
        for file in sorted(COMPARISONS.glob("*/comparison.json")):
            with contextlib.suppress(
                OSError, ValueError, KeyError, TypeError
            ):  # a damaged one has nothing
                others = json.loads(file.read_text(encoding="utf-8"))["variants"]
                for name, other in others.items():
                    path = file.parent / "runs" / name / f"{name}_seed{run.seed}.txt"
                    log = complete_log(path) if other["key"] == key else None
                    if log and (not made or log.uncompiled in made):
                        self.path(run, "taken_over").parent.mkdir(parents=True, exist_ok=True)
                        return write_file(self.path(run, "taken_over"), path.read_bytes())


def check_compiled(logs: dict[str, Log], folder: Path) -> None:
    """Raises LogError where some runs, by their names, were compiled and others were not."""
    compiled = [name for name, log in logs.items() if not log.uncompiled]
    uncompiled = [name for name, log in logs.items() if log.uncompiled]
    if compiled and uncompiled:
        raise LogError(
            f"{folder}: some runs were compiled and others were not, so they cannot be compared; "
            f"compiled: {some(compiled)}; not compiled: {some(uncompiled)} (their logs say why); "
            "delete the logs of one kind, and give the same command again"
        )


def some(names: list[str]) -> str:
    """The first five of them."""
    more = len(names) - 5
    return ", ".join(names[:5]) + (f" and {more} more" if more > 0 else "")


def complete_log(path: Path) -> Log | None:
    try:
        log = parse_log(path)
    except LogError:
        return None
    return None if log.incomplete else log


def machine(on_gpu: bool) -> str:
    if on_gpu and shutil.which("nvidia-smi"):
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, encoding="utf-8", errors="replace"
        )
        return done.stdout.strip()
    info = ""
    if os.path.exists("/proc/cpuinfo"):
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    model = re.search(r"^model name\s*: (.*)", info, re.MULTILINE)
    return f"{model[1] if model else platform.machine()}, {CORES} cores" + ", a GPU" * on_gpu


# ----------------------------------------------------------------------------------------------------------
def fail(message: str):
    raise UsageError(f"{message}; --help lists all options")


def small_number(text: str) -> int:
    if not 1 <= int(text) <= COPY_SEEDS:
        raise ValueError
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compare.py",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = fail
    add = parser.add_argument
    kind = "[NAME=]KIND"
    add("--base", metavar=kind, help="default: the working tree; without --idea, HEAD")
    add("--idea", metavar=kind, action="append", help="any number; default: the working tree")
    add("--runs", type=small_number, default=5, metavar="N", help="of each, 2 or more; default: 5")
    add("--seed", type=int, default=0, metavar="N", help="of the first round; default: 0")
    add("--jobs", type=small_number, default=1, metavar="N", help="runs at a time; default: 1")
    add("--nproc_per_node", type=small_number, default=1, metavar="N", help="processes per run")
    add("--aa", action="store_true", help="allow an idea that equals the base; it gets other seeds")
    add("--no_steps", action="store_true", help="don't run the base with fewer and more steps")
    add("--no_times", action="store_true", help="compare losses only")
    add("--name", help="folder in logs/compare/; default: made of what is compared")
    add("--json", type=Path, metavar="FILE", help="write all figures and the paths of the logs")
    add("--plot", type=Path, metavar="FILE.png", help="draw the differences with their intervals")
    return parser


def join_values(argv: list[str]) -> list[str]:
    """Makes "--idea --x" one word, because argparse takes a value that starts with -- for an option."""
    joined = []
    for word in argv:
        if joined and joined[-1] in ("--base", "--idea"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def check_output_file(file: Path, ending: str) -> None:
    if not file.absolute().parent.is_dir() or file.is_dir() or not file.name.endswith(ending):
        fail(f"{file}: must be a file in a folder that exists; a plot's name ends in .png")


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns our options, and those for all runs. Raises UsageError."""
    args, common = make_parser().parse_known_args(join_values(argv))
    for before, word in zip(["", *common], common):
        if not before.startswith("--") and not word.startswith("--"):
            fail(
                f"{word}: not the value of an option; give a source with --idea or --base, and several words "
                'in quotes: --idea "--muon_lr 0.03"'
            )
    if args.runs < 2 or args.seed < 0:
        fail("--runs must be 2 or more, and --seed must not be negative")
    if args.name is not None and not re.fullmatch(r"\w[\w.+%-]*", args.name):
        fail(f"--name {args.name}: letters, digits and ._+- only")
    if args.json:
        check_output_file(args.json, "")
    if args.plot:
        check_output_file(args.plot, ".png")
    return args, common


def compare(argv: list[str]) -> int:
    args, common = read_arguments(argv)
    tree = (ROOT / "train_gpt.py").read_bytes()
    base = read_variant(args.base or ("." if args.idea else "HEAD"), tree, common)
    base.first_seed = args.seed
    variants = [base, *(read_variant(text, base.source, common) for text in args.idea or ["."])]
    check_settings(variants, args.nproc_per_node)
    tell_apart(variants, args.aa)
    ideas, extras = variants[1:], [] if args.no_steps else other_steps(base)
    on_gpu = any(isinstance(v.settings, dict) and v.settings["device"] == "cuda" for v in variants)
    if on_gpu and args.jobs > 1:
        raise LogError("--jobs: on GPUs one run at a time, as all would use the same")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    threads = (
        int(threads) if threads.isdigit() else max(1, CORES // (args.jobs * args.nproc_per_node))
    )
    facts = dict(
        machine=machine(on_gpu),
        torch=importlib.metadata.version("torch"),
        threads=threads,
        processes=args.nproc_per_node,
    )
    what = digest([(v.name, run_key(v, {}), v.first_seed) for v in variants])[:8]
    folder = COMPARISONS / (args.name or f"{'_'.join(v.name for v in ideas)[:50]}_{what}")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LogError(
                f"{folder}: a comparison is at work here; wait for it, or give another --name"
            ) from None
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={args.nproc_per_node}",
        ]
        place = Place(
            folder,
            facts,
            [sys.executable, *(launcher if args.nproc_per_node > 1 else [])],
            lock.fileno(),
        )
        place.freeze([*variants, *extras], args.jobs)
        shutil.rmtree(folder / "working", ignore_errors=True)
        groups = run_rounds(place, [base, *extras, *ideas], args)
    effects = analyse(
        groups[base.name],
        {v.name: groups[v.name] for v in ideas},
        [groups[v.name] for v in extras],
        timed=not args.no_times,
    )
    report(base, variants, effects, groups, facts, folder, args)
    return 0


def run_rounds(
    place: Place, variants: list[Variant], args: argparse.Namespace
) -> dict[str, list[Log]]:
    """Makes the runs that are missing. -> each variant's logs, in the order of the rounds; the base is the first."""
    by_name = {v.name: v for v in variants}
    untimed = {v.name for v in variants if v.extra or (args.no_times and v is variants[0])}
    rounds = [[Run(v.name, v.first_seed + i) for v in variants] for i in range(args.runs)]
    turned = [
        run
        for i, runs in enumerate(rounds)
        for run in runs[i % len(runs) :] + runs[: i % len(runs)]
    ]
    for run in turned:
        if run.variant in untimed and not place.log(run, taken_over=True):
            place.take_over(run, run_key(by_name[run.variant], place.facts))

    def check():
        found = {run.name: place.log(run, run.variant in untimed) for run in turned}
        check_compiled({name: log for name, log in found.items() if log}, place.folder)

    check()
    todo = [run for run in turned if not place.log(run, run.variant in untimed)]
    compiled = [Run(v.name, None) for v in variants if todo and not v.extra]
    place.carry_out(compiled + todo, by_name, args.jobs, check)
    return {
        runs[0].variant: [place.log(run, run.variant in untimed) for run in runs]
        for runs in zip(*rounds)
    }


def describe_run(log: Log, seed: int) -> dict:
    return {
        "path": str(log.path),
        "seed": seed,
        "val_loss": log.final.val_loss,
        "step_avg_ms": log.final.step_avg_ms,
    }


def notes_on(
    base: Variant,
    variants: list[Variant],
    effects: list[Effect],
    groups: dict[str, list[Log]],
    args: argparse.Namespace,
) -> list[str]:
    """What a reader of the table has to know."""
    test = "±: half of a 99% interval; p: Welch's t-test, two-sided"
    if len(effects) > 1:
        test += f", corrected by Holm over {len(effects)} ideas"
    notes = [test]
    if not args.no_times:
        notes.append("step time: as a fraction of the base's")
    if effects[0].steps is not None:
        notes.append("steps, time: how much more or less is needed for the base's loss")
    elif not args.no_steps:
        notes.append("steps: unknown, because the base's loss doesn't clearly fall with more of them")
    for v in variants:
        if v.first_seed != base.first_seed:
            notes.append(f"{v.name}: the base or a copy, with seeds from {v.first_seed} on")
    if any(log.uncompiled for logs in groups.values() for log in logs):  # then all are
        notes.append(
            "no run was compiled (the logs say why): a compiled step is faster, and not by the same factor for "
            "each idea"
        )
    if args.jobs > 1:
        notes.append(f"step times are of {args.jobs} runs at a time, which disturb each other")
    return notes


def report(
    base: Variant,
    variants: list[Variant],
    effects: list[Effect],
    groups: dict[str, list[Log]],
    facts: dict,
    folder: Path,
    args: argparse.Namespace,
) -> None:
    """Prints the answer, and writes it where it is asked for. Raises LogError."""
    sentences = [in_words(e) for e in effects]
    notes = notes_on(base, variants, effects, groups, args)
    threads = f"{facts['threads']} thread{'s' * (facts['threads'] > 1)}"
    print(
        textwrap.fill(
            f"base {base.name}; {args.runs} rounds, seeds from {args.seed} on; {facts['machine']}, "
            f"{threads} a process, PyTorch {facts['torch']}",
            80,
        )
    )
    print(
        "", *table(groups, effects), "", *(textwrap.fill(note, 80) for note in notes), "", sep="\n"
    )
    print(
        *(textwrap.fill(sentence, 80) for sentence in sentences),
        f"\nlogs: {folder / 'runs'}",
        sep="\n",
    )
    if args.json:
        first_seeds = {v.name: v.first_seed for v in variants}
        logs = {}
        for name, group in groups.items():
            first_seed = first_seeds.get(name, base.first_seed)
            logs[name] = [describe_run(log, first_seed + i) for i, log in enumerate(group)]
        ideas = []
        for effect, words in zip(effects, sentences):
            ideas.append(asdict(effect) | {"verdict": effect.verdict, "words": words})
        answer = {
            **facts,
            "jobs": args.jobs,
            "folder": str(folder),
            "base": base.name,
            "ideas": ideas,
            "runs": logs,
        }
        write_file(args.json, json.dumps(answer, indent=1, allow_nan=False).encode())
    if args.plot:
        plot_effects(effects, args.plot)


def main(argv: list[str]) -> int:
    try:
        return compare(argv)
    except RunError as e:
        print(e, file=sys.stderr)
        return 1
    except OSError as e:  # a full disk, a folder that cannot be written
        print(
            f"error: {e.filename or 'logs/compare'}: {(e.strerror or str(e)).lower()}",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print(
            "interrupted; runs that were finished are kept, and the same command goes on from there",
            file=sys.stderr,
        )
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_command(main)
