"""
Tests of the ideas: every patch must apply to the commit that last changed it. So a fork, which changes
train_gpt.py, doesn't have to mend them.
"""

from pathlib import Path

import pytest

from data.datasets import MINI_VOCAB
from judge.compare.changed_evaluation import changed_measure
from judge.runs.copies import changed, copy_commit, git
from tests.util import EOT, ROOT, Job, random_tokens, read_checkpoint, succeeds, write_shard

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
    vocab_size=MINI_VOCAB,  # of the data; older commits read bytes
    eot_token=EOT,
)


def final_head(script: Path, folder: Path) -> bytes:
    """The weights of the head after three steps of mini, with sequences of two blocks."""
    folder.mkdir()
    for part, size in (("train", 2400), ("val", 300)):
        write_shard(folder / f"{part}.bin", random_tokens(size, seed=0))
    words = [f"--{k}={v}" for k, v in THREE_STEPS.items()]
    succeeds(Job(["--track", "mini", "--save_checkpoint", *words], folder, script=script))
    return read_checkpoint(folder)["model"]["lm_head.weight"].float().numpy().tobytes()


@pytest.mark.slow
def test_ideas_train(tmp_path):
    """In another way than the script itself, and than each other. They leave alone what measures. This needs the
    whole history: a shallow clone fails with a line that says so."""
    without = {}  # commit -> the head of its script
    heads = []
    for patch in sorted((ROOT / "records/mini/ideas").glob("*/idea.patch")):
        last_change = git("log", "-1", "--format=%H", "--", str(patch), cwd=ROOT).decode().strip()
        before = copy_commit(last_change, tmp_path, ROOT)
        after = changed(before, "train_gpt.py", [patch])
        texts = [(folder / "train_gpt.py").read_text() for folder in (before, after)]
        assert changed_measure(*texts, "") == ""
        heads.append(final_head(after / "train_gpt.py", tmp_path / patch.parent.name))
        if last_change not in without:
            folder = tmp_path / f"at {last_change}"
            without[last_change] = final_head(before / "train_gpt.py", folder)
    assert len({*heads, *without.values()}) == len(heads) + len(set(without.values())) > 10
