"""
Samples text from a saved model and prints it as it is generated.

    python evals/sample.py logs/RUN.pt --prompt "To be, or not to be" --n 3
    python evals/sample.py gpt2-xl        # OpenAI's weights, from the Hugging Face hub
    python evals/sample.py logs/RUN.pt --export model.safetensors

`./run.sh` writes RUN.pt. --export writes its weights and settings as safetensors, to share a model:
this script and hellaswag.py can load that file, too.

All n texts are generated together, as one batch. The first one is printed token by token, the
others when they are complete. A text starts after an end-of-text token. It ends at the next
end-of-text token or after max_tokens.
"""
import argparse
import codecs
import sys
import time

import models  # before torch: see there
from models import require

import torch

# by the size of the vocabulary
PROMPTS = {257: "**MACBETH**  \n", 50257: "The most important thing about science is"}
BRIEF_SECONDS = 4


def printable(text: str) -> str:
    """Replaces control characters, which a byte-level model may generate, for the terminal."""
    shown = []
    for character in text:
        if character.isprintable() or character in "\n\t":
            shown.append(character)
        else:
            shown.append("\N{REPLACEMENT CHARACTER}")
    return "".join(shown)


class Text:
    """A text that grows token by token."""

    def __init__(self, prompt: str):
        self.text = prompt
        self.ended = False
        # A character may consist of several tokens. It is decoded when its last byte has come.
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, content: bytes) -> str:
        """Adds the bytes of a token. Returns the new characters."""
        piece = printable(self.decoder.decode(content))
        self.text += piece
        return piece

    def finish(self) -> str:
        """Ends the text. Returns a replacement character if the last character is incomplete."""
        piece = self.decoder.decode(b"", final=True)
        self.text += piece
        return piece


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Sample text from a saved model.", allow_abbrev=False
    )
    add = parser.add_argument
    add("model", help=models.MODEL_HELP)
    add("--prompt", metavar="TEXT", help="beginning of each text; default: by vocabulary")
    add("--n", type=int, default=1, metavar="N", help="number of texts; default: %(default)s")
    add("--max_tokens", type=int, default=300, metavar="N",
        help="maximum new tokens per text; default: %(default)s")
    add("--temperature", type=float, default=0.8, metavar="T",
        help="lower is less random; 0 always takes the most likely token; default: %(default)s")
    add("--top_k", type=int, default=50, metavar="K",
        help="sample from the K most likely tokens, or 0 for all; default: %(default)s")
    add("--seed", type=int, default=42, metavar="N", help="random seed; default: %(default)s")
    add("--offline", action="store_true",
        help="don't download anything; stop with an error if a file is missing")
    add("--export", metavar="FILE", help="write the model as safetensors instead of sampling")
    add("--brief", action="store_true",
        help="what ./run.sh prints after training: offline, for at most 4 seconds")
    args = parser.parse_args()
    require(args.n > 0 and args.max_tokens > 0, "--n and --max_tokens must be at least 1")
    require(args.temperature >= 0, "--temperature must be at least 0")
    require(args.top_k >= 0, "--top_k must be at least 0")
    return args


def within(seconds, steps):
    """Yields from steps until the time is over."""
    end = time.monotonic() + seconds
    for tokens in steps:
        if time.monotonic() > end:
            return
        yield tokens


def print_texts(texts: list[Text], model, steps):
    """Prints the texts while they are generated.

    steps: yields the next token of each text, (n,) int64.
    """
    n = len(texts)
    first = texts[0]
    if n > 1:
        print(f"[1/{n}] ", end="")
    print(first.text, end="", flush=True)
    for tokens in steps:
        for text, token in zip(texts, tokens.tolist()):
            if token == model.eot:
                text.ended = True
            if text.ended:
                continue
            piece = text.add(model.token_bytes(token))
            if text is first:
                print(piece, end="", flush=True)
        if all(text.ended for text in texts):
            break
    print(first.finish())
    for i, text in enumerate(texts[1:], start=2):
        text.finish()
        print(f"\n[{i}/{n}] {text.text}")


def sample(args):
    model = models.load(args.model, args.offline or args.brief)
    prompt = PROMPTS[model.vocab_size] if args.prompt is None else args.prompt
    tokens = [model.eot, *model.encode(prompt)]
    generator = torch.Generator(models.DEVICE).manual_seed(args.seed)
    steps = models.generate(
        model,
        torch.tensor([tokens] * args.n, device=models.DEVICE),
        args.max_tokens,
        args.temperature,
        args.top_k,
        generator,
    )
    if args.brief:
        steps = within(BRIEF_SECONDS, steps)
        print("\nA sample of what the model writes:\n")
    print_texts([Text(prompt) for _ in range(args.n)], model, steps)


def sample_after_training(args):
    """The training has succeeded. Whatever happens here doesn't change the exit status."""
    try:
        if models.can_print(args.model):
            sample(args)
    except Exception as e:  # an idea may change the model in ways that evals/ doesn't know
        print(f"can't print a sample: {e}", file=sys.stderr)


def main():
    sys.stdout.reconfigure(errors="replace")  # for characters that the terminal can't show
    args = parse_arguments()
    if args.export:
        models.export(args.model, args.export)
    elif args.brief:
        sample_after_training(args)
    else:
        sample(args)


if __name__ == "__main__":
    try:
        main()
    except models.USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print()
        sys.exit(130)
