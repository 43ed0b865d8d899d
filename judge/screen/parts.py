"""
The parts of an idea, and the base with any combination of them.

Parts are the commits between base and idea, the hunks of their whole difference, or patches and
options. Patches are applied in the order of the parts.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from judge.runs.sources import Variant, changed, copy_commit, git, scratch_of, split_source
from judge.screen.design import MOST_PARTS, Design, factorial, leave_one_out
from judge.commands import UserError
from judge.files import write_file

Group = tuple[int, ...]  # numbers of parts that are tried together
Works = Callable[[Group], bool]  # whether the base with these parts works


@dataclass
class Part:
    name: str
    patch: Path | None = None
    options: tuple[str, ...] = ()


# -----------------------------------------------------------------------------
# From commits, or from hunks


def patch_between(old: Path, new: Path, store: Path) -> bytes:
    """The patch from one folder to another. git stores both in a repository of its own."""
    git("init", "-q", "--bare", str(store), cwd=old)
    trees = []
    for folder in (old, new):
        where = dict(GIT_DIR=str(store), GIT_WORK_TREE=str(folder))
        where |= dict(GIT_INDEX_FILE=f"{store}/{folder.name}")
        git("-c", "core.autocrlf=false", "add", "-A", "-f", ".", cwd=folder, **where)
        trees.append(git("write-tree", cwd=folder, **where).decode().strip())
    options = ["--binary", "--full-index", "--no-renames", "--no-color", "--no-ext-diff"]
    return git("diff", *options, *trees, cwd=old, GIT_DIR=str(store))


def split_hunks(patch: bytes) -> list[tuple[str, bytes]]:
    """A name and a patch for each hunk, those of a file from the last one up: so each begins at the old line,
    whatever is left out above it. New, deleted and binary files stay whole."""
    found = []
    for section in re.split(rb"(?m)^(?=diff --git )", patch)[1:]:
        header, *hunks = re.split(rb"(?m)^(?=@@ )", section)
        name = header.split(b"\n")[0].decode("utf-8", "replace").rpartition(" b/")[2]
        if len(hunks) < 2:
            found.append((name, section))
            continue
        for hunk in hunks[::-1]:
            line = re.match(rb"@@ -(\d+)", hunk)[1]
            hunk = re.sub(rb"\+\d+", b"+" + line, hunk, count=1)
            found.append((f"{name}:{line.decode()}", header + hunk))
    return found


def last_commit(text: str) -> str:
    """The revision that a source names."""
    kind = split_source(text)[1]
    path, at, revision = kind.partition("@")
    if kind in ("", ".") or Path(kind).is_dir():
        return "HEAD"
    return revision if at and Path(path).is_dir() else kind


def commits_between(
    sides: tuple[Variant, Variant], texts: tuple[str, str], scratch: Path
) -> list[tuple[str, Path]]:
    """A name and the files of the base's commit, and of each one after it up to idea. Raises UserError."""
    base, idea = texts
    old, new = map(last_commit, texts)
    repository, other = [side.origin for side in sides]
    if other != repository:
        raise UserError(f"{base} and {idea} are in different repositories; use --by hunk")
    if git("rev-list", "--max-count=1", old, "--not", new, cwd=repository):
        raise UserError(f"{idea} doesn't contain all commits of {base}; use --by hunk")
    listing = ["log", "--reverse", "--first-parent", "--format=%H %h %s", f"{old}..{new}"]
    log = git(*listing, cwd=repository)
    found = [("edits of the base, undone", copy_commit(old, scratch, repository))]
    for line in log.decode("utf-8", "replace").splitlines():
        commit, name = line.split(" ", 1)
        found.append((name, copy_commit(commit, scratch, repository)))
    return found


def read_parts(base: Variant, idea: Variant, texts: tuple[str, str], by: str) -> list[Part]:
    """The parts of the difference of two variants, which these texts name. Raises UserError."""
    scratch = scratch_of(base, base.origin)
    commits = commits_between((base, idea), texts, scratch) if by == "commit" else []
    patches = []
    old = base.folder
    for name, new in [*commits, ("edits without a commit", idea.folder)]:
        patch = patch_between(old, new, scratch / "store")
        patches += split_hunks(patch) if by == "hunk" else [(name, patch)]
        old = new
    parts = []
    for name, patch in patches:
        if patch:
            file = scratch / f"part{len(parts)}.patch"
            write_file(file, patch)
            parts.append(Part(name, file))
    options = tuple(idea.options[len(base.options) :])
    if idea.options != [*base.options, *options]:
        raise UserError(f"{texts[1]} must begin with the options of {texts[0]}, and end with others")
    if options:
        parts.append(Part(" ".join(options), options=options))
    return parts


def given_part(text: str) -> Part:
    """A patch with or without options, or options. Raises UserError."""
    name, kind, options = split_source(text)
    patch = Path(kind) if kind else None
    if patch and not (patch.is_file() and patch.suffix in (".patch", ".diff")):
        raise UserError(f"{text}: a part is a .patch or .diff file that exists, or options in quotes")
    return Part(name or text, patch and patch.resolve(), tuple(options))


# -----------------------------------------------------------------------------
# Combinations


def combine(base: Variant, parts: list[Part], chosen: tuple[int, ...]) -> Variant:
    """The base with these parts. Raises UserError if their patches don't apply."""
    some = [parts[i] for i in sorted(chosen)]
    folder = changed(base.folder, base.script(), [part.patch for part in some if part.patch])
    options = [*base.options, *(word for part in some for word in part.options)]
    name = "+".join(str(i + 1) for i in sorted(chosen))
    name = f"parts {name}" if name else "no part"
    return replace(base, name=name, folder=folder, options=options, settings={})


def members(groups: list[Group], row: Iterable[bool]) -> Group:
    """The parts of the groups that a row of a design has."""
    return tuple(part for group, has in zip(groups, row) if has for part in group)


def needed_by(groups: list[Group], left_out: int, works: Works) -> int:
    """The first group that doesn't work without the one that is left out, after the groups before it."""
    rest = [i for i in range(len(groups)) if i != left_out]
    for count, needs in enumerate(rest, start=1):
        if not works(members(groups, [i in rest[:count] for i in range(len(groups))])):
            return needs
    return rest[0]


def choose_design(groups: list[Group], works: Works) -> tuple[list[Group], Design]:
    """Joins groups that only work together. The design is factorial if all its combinations work, and
    otherwise leaves out one group at a time."""
    while len(groups) > 1:
        rows = leave_one_out(len(groups)).rows[1:-1]
        broken = [i for i, row in enumerate(rows) if not works(members(groups, row))]
        if not broken:
            break
        first = broken[0]
        second = needed_by(groups, first, works)
        joined = tuple(sorted(groups[first] + groups[second]))
        groups = sorted([g for i, g in enumerate(groups) if i not in (first, second)] + [joined])
    if len(groups) > MOST_PARTS:
        raise UserError(
            f"{len(groups)} parts; a screen has at most {MOST_PARTS}, so give fewer or larger ones"
        )
    design = factorial(len(groups))
    if all(works(members(groups, row)) for row in design.rows):
        return groups, design
    return groups, leave_one_out(len(groups))
