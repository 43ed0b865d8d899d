"""
Tests of the ideas: every patch must apply to the commit that it was made for. That is the one that its
idea.json names, or the one that last changed the patch. So the default tests of a fork, which changes
train_gpt.py, don't depend on them.
"""

from pathlib import Path

import pytest

from lib.commands import UserError
from judge.compare import sources as compare_sources
from tests.util import ROOT, random_tokens, read_log, run_forked, val_losses, write_shard

RECORDS = ROOT / "records"
IDEAS = {
    folder.name: compare_sources.read_idea(folder)
    for folder in sorted((RECORDS / "mini/ideas").iterdir())
}


@pytest.mark.parametrize("content", ['["part"]', '{"options": ["--a"]}', "{"])
def test_an_idea_that_is_not_described_is_refused(tmp_path, content):
    (tmp_path / "idea.json").write_text(content)
    with pytest.raises(UserError, match="idea.json: (it must be a JSON object, whose|not JSON)"):
        compare_sources.read_idea(tmp_path)


def sources(name: str, scratch: Path) -> tuple[bytes, bytes]:
    """The script that an idea's patch was made for, and the patched one."""
    patch = RECORDS / "mini/ideas" / name / "idea.patch"
    last_change = compare_sources.git("log", "-1", "--format=%H", "--", str(patch)).decode().strip()
    commit = compare_sources.copy_commit(IDEAS[name].get("commit", last_change), scratch)
    patched = compare_sources.changed(commit, "train_gpt.py", [patch])
    return (commit / "train_gpt.py").read_bytes(), (patched / "train_gpt.py").read_bytes()


@pytest.mark.slow
def test_patches_apply_to_their_commits(tmp_path):
    """This needs the whole history: a shallow clone fails with a line that says so."""
    for name in IDEAS:
        script, patched = sources(name, tmp_path)
        assert script != patched, name


# The data are small, but the model is that of mini: patches depend on its layers and heads.
THREE_STEPS = dict(
    train_files="train.bin",
    val_files="val.bin",
    val_tokens=256,
    val_seq_len=256,
    batch_tokens=256,
    train_seq_len=256,
    num_iterations=3,
    warmup_steps=0,
)


def final_loss(source: bytes, folder: Path) -> float:
    """The loss after three steps of mini, with sequences of two blocks."""
    folder.mkdir()
    script = folder / "train_gpt.py"
    script.write_bytes(source)
    for part, size in (("train", 2400), ("val", 300)):
        write_shard(folder / f"{part}.bin", random_tokens(size, seed=0))
    words = [f"--{k}={v}" for k, v in THREE_STEPS.items()]
    ran = run_forked(["--track", "mini", *words], folder, script=script)
    assert ran.returncode == 0, ran.stderr
    return val_losses(read_log(folder))[3]


@pytest.mark.slow
def test_ideas_that_name_no_commit_train(tmp_path):
    """They train in another way than the script itself, and than each other."""
    current = [name for name, idea in IDEAS.items() if "commit" not in idea]
    assert current == ["gelu", "no-nesterov", "tied-head"]
    losses = set()
    for name in current:
        script, patched = sources(name, tmp_path)
        losses.add(final_loss(script, tmp_path / f"before {name}"))
        losses.add(final_loss(patched, tmp_path / name))
    assert len(losses) == 4
