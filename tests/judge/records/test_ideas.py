"""
Every idea's patch must apply to the commit that last changed it. So a fork, which changes train_gpt.py,
doesn't have to mend them.
"""

from judge.compare.sources import changed, copy_commit, git
from tests.util import ROOT


def test_ideas_apply(tmp_path):
    """To different scripts. This needs the whole history: a shallow clone fails with a line that says so."""
    scripts = set()
    patches = sorted((ROOT / "records/mini/ideas").glob("*/idea.patch"))
    for patch in patches:
        commit = git("log", "-1", "--format=%H", "--", str(patch)).decode().strip()
        after = changed(copy_commit(commit, tmp_path), "train_gpt.py", [patch])
        scripts.add((after / "train_gpt.py").read_bytes())
    assert len(scripts) == len(patches) > 10
