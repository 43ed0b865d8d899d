"""
Samples text from a saved model and prints it as it is generated.

    ./run.sh sample --prompt "To be, or not to be" --n 3    # the model of the newest run
    ./run.sh sample logs/RUN.pt
    ./run.sh sample gpt2-xl        # OpenAI's weights, from the Hugging Face hub

All n texts are generated together, as one batch. The first one is printed token by token, the others
when they are complete. A text starts after an end-of-text token. It ends at the next end-of-text token
or after max_tokens.
"""

import codecs
import itertools
import sys
import time

from evals import models, speed
from judge.commands import command_parser, run_command, whole_number
from train_gpt import (
    BLOCK_SIZE,
    DEVICE,
    InputError,
    require,
)  # before torch: it sets variables that torch reads

import torch

BRIEF_SECONDS = 1.5


def printable(text):
    """Replaces control characters, which are tokens like all bytes, for the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def parse_arguments(argv):
    parser = command_parser("sample", __doc__)
    add = parser.add_argument
    add("model", nargs="?", default="latest", help=f"{models.MODEL_HELP}; default: the newest in logs")
    add("--prompt", metavar="TEXT", help="beginning of each text; default: by the training text")
    add("--n", type=whole_number, default=1, help="number of texts; default: 1")
    add(
        "--max_tokens", type=whole_number, default=300, help="maximum new tokens per text; default: 300"
    )
    add(
        "--temperature",
        type=float,
        default=0.8,
        help="lower is less random; 0 always takes the most likely token; default: 0.8",
    )
    add(
        "--top_k",
        type=int,
        default=50,
        help="sample from this many most likely tokens, or from all with 0; default: 50",
    )
    add("--seed", type=int, default=42, help="random seed; default: 42")
    args = parser.parse_args(argv)
    valid = args.temperature >= 0 and args.top_k >= 0
    require(valid, "--temperature and --top_k must be at least 0")
    return args


def print_texts(prompt, model, steps, n):
    """Prints n texts while they are generated. steps yields the next token of each, (n,) int64."""
    # A character may consist of several tokens. It is decoded when its last byte has come.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    contents = [b""] * n
    ended = [False] * n
    print(f"[1/{n}] {prompt}" if n > 1 else prompt, end="", flush=True)
    for tokens in steps:
        for i, token in enumerate(tokens.tolist()):
            ended[i] = ended[i] or token == model.eot
            if ended[i]:
                continue
            content = model.token_bytes(token)
            contents[i] += content
            if i == 0:
                print(printable(decoder.decode(content)), end="", flush=True)
        if all(ended):
            break
    print(decoder.decode(b"", final=True))
    for i, content in enumerate(contents[1:], start=2):
        print(f"\n[{i}/{n}] {prompt}{printable(content.decode(errors='replace'))}")


def sample(args, heading=None):
    """With a heading, if only "", nothing is downloaded, and the text ends after BRIEF_SECONDS."""
    brief = heading is not None
    model = models.load(args.model, offline=brief)
    prompt = model.prompt if args.prompt is None else args.prompt
    tokens = [model.eot, *model.encode(prompt)]
    texts = torch.tensor([tokens] * args.n, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(args.seed)
    steps = models.generate(model, texts, args.max_tokens, args.temperature, args.top_k, generator)
    if brief:
        model.context = BLOCK_SIZE  # a pass over fewer tokens is faster
        end = time.monotonic() + BRIEF_SECONDS
        steps = itertools.takewhile(lambda _: time.monotonic() < end, steps)
        print(heading, end="")
    print_texts(prompt, model, steps, args.n)


def sample_after_training(path):
    """What ./run.sh prints after a training."""
    sample(parse_arguments([str(path)]), "\nA sample of what the model writes:\n\n")
    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if "run" in checkpoint and "num_value_embeds" in checkpoint["settings"]:  # of train_gpt.py
        print(f"\n{speed.describe(checkpoint)}")


def main(argv):
    sys.stdout.reconfigure(errors="replace")  # for characters that the terminal can't show
    sample(parse_arguments(argv))


if __name__ == "__main__":
    run_command(main, InputError, torch.OutOfMemoryError)
