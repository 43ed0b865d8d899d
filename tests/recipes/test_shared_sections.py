"""
Functions that recipes/january2026.py shares with train_gpt.py have the same text in both files, so that
a mend goes into both.
"""

import ast

import pytest

from util import ROOT

OFFICIAL = (ROOT / "train_gpt.py").read_text(encoding="utf-8")
RECIPE = (ROOT / "recipes" / "january2026.py").read_text(encoding="utf-8")

SHARED = """
env_int on_signal handle_signals InputError RankError as_scale
norm document_ids block_lists split_blocks with_previous_blocks portable_attention attention
shard_length read_tokens check_shards to_device distributed_data_generator
setting require parse_bool parse_layers
read_text cpu_quota cpu_cores activation_dtype unusable_gpu weakest_gpu check_gpus uses_fp8
start_world set_up_cpu describe_machine log_header build_model
print_dots compiler_version randomize losses_and_gradients relative_error wrong_results first_error compile_problem compile_model
writing write_file read_checkpoint
sequences_per_pass evaluate validate peak_memory synchronized_ms read_vote start_vote finish_vote vote first_bad
""".split()
# methods of classes that differ elsewhere
SHARED_METHODS = {
    "Logbook": "__init__ start_clock stop_clock write step validation".split(),
}
# from the line that begins with the first text to the one that begins with the second
SHARED_LINES = [
    ("# 1. Preamble", "import argparse"),
    ("import contextlib", "class InputError"),
    ("World =", "def read_text"),
    ("cpuinfo =", "def activation_dtype"),
    ("CXX =", "def print_dots"),
    ("if __name__ == \"__main__\":\n    status", None),
]


def definitions(source):
    """{name: text} of functions, classes and methods, with decorators."""
    lines = source.splitlines()
    found = {}

    def add(node, prefix=""):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        found[prefix + node.name] = "\n".join(lines[first - 1 : node.end_lineno])
        if isinstance(node, ast.ClassDef):
            for child in node.body:
                add(child, node.name + ".")

    for node in ast.parse(source).body:
        add(node)
    return found


def section(source, first, after):
    assert source.count("\n" + first) == 1
    start = source.index("\n" + first)
    if after is None:
        return source[start:]
    return source[start : source.index("\n" + after, start)]


def differences(official, recipe):
    """The names of shared definitions and lines whose texts differ."""
    theirs, ours = definitions(official), definitions(recipe)
    names = list(SHARED)
    for cls, methods in SHARED_METHODS.items():
        names += [f"{cls}.{method}" for method in methods]
    found = [name for name in names if theirs[name] != ours[name]]
    for first, after in SHARED_LINES:
        if section(official, first, after) != section(recipe, first, after):
            found.append(first)
    return found


def test_shared_text():
    assert differences(OFFICIAL, RECIPE) == []


def test_everything_with_the_same_text_is_listed():
    theirs, ours = definitions(OFFICIAL), definitions(RECIPE)
    same = [name for name in ours if "." not in name and theirs.get(name) == ours[name]]
    assert sorted(set(same) - {"_"}) == sorted(SHARED)


@pytest.mark.parametrize(
    "old,new",
    [
        ("os.fsync(file.fileno())", "pass"),
        ("    mean = torch.stack(losses).double().mean()", "    mean = torch.stack(losses).mean()"),
        ('os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")', "pass"),
        ("    def stop_clock(self):", "    def stop_clock(self):  # now"),
    ],
)
def test_control(old, new):
    assert RECIPE.count(old) == 1
    assert len(differences(OFFICIAL, RECIPE.replace(old, new))) == 1
