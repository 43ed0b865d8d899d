"""
The pages. The parser of each command in them must take its words, each file that they name must exist, and each link
must lead to a file and to a heading.
"""

import argparse
import importlib
import re
import shlex
import subprocess

import pytest

import judge.__main__ as judge
from launch import launch
from tests.util import ROOT

FILES = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
PAGES = [path for path in FILES if path.endswith(".md")]
FOLDERS = {path.split("/")[0] for path in FILES if "/" in path} - {"data"}  # commands write into data/
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.M | re.S)
pytestmark = pytest.mark.parametrize("page", PAGES)
REAL_PARSE = argparse.ArgumentParser.parse_known_args


def read(page):
    """Returns the text of a page, and its code: the lines of blocks, and what stands in a line of text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = "".join(BLOCK.findall(text)).replace("\\\n", " ").splitlines()
    text = BLOCK.sub("", text)
    return text, blocks + [" ".join(code.split()) for code in re.findall("`([^`]+)`", text)]


def check_training(words, recipe=None):
    script = importlib.import_module(f"recipes.{recipe}" if recipe else "train_gpt")
    _, hp = script.parse_arguments(words)
    script.check_hyperparameters(hp, 1)


def check_command(words):
    name, words = launch.split_command(words)
    args, words = launch.parse(name, words)
    if name in ("train", "prepare"):
        return check_training(words, args.recipe)
    module, *words = [*launch.COMMANDS[name].split(), *words]
    main = judge.run if module == "judge" else importlib.import_module(module).main
    left = []  # words that the parser leaves: options of the runs

    def parse_and_stop(parser, args=None, namespace=None):
        left.extend(REAL_PARSE(parser, args, namespace)[1])
        raise SystemExit(0)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match="0"):
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_stop)
        main(words)
    quoted = [word for word in words if re.match("--.* ", word)]  # the options of an idea
    check_training([*left, *" ".join(quoted).split()])


def test_code(page):
    for code in read(page)[1]:
        words = [code]
        if re.match(r" *(if )?(\./run\.sh\b|torchrun -)", code):
            words = shlex.split(code, comments=True)
            script = "train_gpt.py" if words[0] == "torchrun" else "./run.sh"
            arguments = words[words.index(script) + 1 :]
            if arguments[:1] != ["test"] and "--help" not in arguments:
                check_command(arguments)
        for path in words:
            if re.fullmatch(r"[\w.-]+/[\w./-]+", path) and path.split("/")[0] in FOLDERS:
                assert (ROOT / path).exists(), path


def anchors(page):
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall("^#+ (.*)", read(page)[0], re.M)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_links(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", read(page)[0]):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
