"""
Tests of the ideas: every patch must apply to the commit that it was made for, or to the current training
script.
"""

from pathlib import Path

import pytest

from tools.common import UsageError
from tools.compare import sources as compare_sources
from tests.util import ROOT, SCRIPT, random_tokens, read_log, run_forked, val_losses, write_shard

RECORDS = ROOT / "records"
IDEAS = {folder.name: compare_sources.read_idea(folder) for folder in sorted((RECORDS / "mini/ideas").iterdir())}


@pytest.mark.parametrize("content", ['["part"]', '{"options": ["--a"]}', "{"])
def test_an_idea_that_is_not_described_is_refused(tmp_path, content):
    (tmp_path / "idea.json").write_text(content)
    with pytest.raises(UsageError, match="idea.json: (it must be a JSON object, whose|not JSON)"):
        compare_sources.read_idea(tmp_path)


@pytest.mark.slow
def test_patches_apply_to_their_commits(tmp_path):
    """This needs the whole history: a shallow clone fails with a line that says so."""
    for name, idea in IDEAS.items():
        if "commit" not in idea:
            continue
        commit = compare_sources.copy_commit(idea["commit"], tmp_path)
        file = RECORDS / "mini/ideas" / name / "idea.patch"
        patched = compare_sources.changed(commit, "train_gpt.py", [file])
        assert (patched / "train_gpt.py").read_bytes() != (commit / "train_gpt.py").read_bytes(), name


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


def test_ideas_for_the_current_script_apply_and_train(tmp_path):
    """They train in another way than the script itself, and than each other."""
    current = [name for name, idea in IDEAS.items() if "commit" not in idea]
    assert current == ["gelu", "no-nesterov", "tied-head"]
    losses = {final_loss(SCRIPT.read_bytes(), tmp_path / "base")}
    tree = compare_sources.copy_tree(tmp_path / "scratch")
    for name in current:
        file = RECORDS / "mini/ideas" / name / "idea.patch"
        patched = compare_sources.changed(tree, "train_gpt.py", [file])
        losses.add(final_loss((patched / "train_gpt.py").read_bytes(), tmp_path / name))
    assert len(losses) == 4
