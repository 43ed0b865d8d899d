"""
Samples text from a saved model and prints it as it is generated.

    python evals/sample.py MODEL --prompt "To be, or not to be" --n 3 --max_tokens 200
    python evals/sample.py gpt2-xl        # OpenAI's weights, from the Hugging Face hub

MODEL is a model.safetensors of train_gpt.py or of the baseline, the folder of one, or OpenAI's
gpt2, gpt2-medium, gpt2-large or gpt2-xl. `./run.sh --save_checkpoint` saves a model.safetensors.

All n texts are generated together, as one batch. The first one is printed token by token, the
others when they are complete. A text starts after an end-of-text token. It ends at the next
end-of-text token or after max_tokens.
"""
import argparse
import codecs
import math
import sys

# before torch, because models sets OpenMP's variables and the path to tools/
from models import DEVICE_HELP, MODEL_HELP, InputError, check_device, generate, load
from machine import readable, show_any_text

import torch


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


# option, least value, greatest value
LIMITS = (
    ("n", 1, 10_000),
    ("max_tokens", 1, 100_000),
    ("temperature", 0, 1e6),
    ("top_k", 0, math.inf),
    ("seed", -2**63, 2**64 - 1),  # PyTorch's range
)


def parse_arguments():
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description="Sample text from a saved model.", allow_abbrev=False
    )
    add = parser.add_argument
    add("model", help=MODEL_HELP)
    add("--prompt", type=readable, default="Hello, I'm a language model,", metavar="TEXT",
        help="beginning of each text; default: %(default)r")
    add("--n", type=int, default=5, metavar="N", help="number of texts; default: %(default)s")
    add("--max_tokens", type=int, default=100, metavar="N",
        help="maximum new tokens per text; default: %(default)s")
    add("--temperature", type=float, default=1.0, metavar="T",
        help="lower is less random; 0 always takes the most likely token; default: %(default)s")
    add("--top_k", type=int, default=50, metavar="K",
        help="sample from the K most likely tokens, or 0 for all; default: %(default)s")
    add("--seed", type=int, default=42, metavar="N", help="random seed; default: %(default)s")
    add("--device", default=default_device, choices=["cpu", "cuda"], help=DEVICE_HELP)
    add("--offline", action="store_true",
        help="don't download anything; stop with an error if a file is missing")
    args = parser.parse_args()
    for name, least, most in LIMITS:
        value = getattr(args, name)
        if not value >= least:
            raise InputError(f"--{name} must be at least {least}, not {value}")
        if value > most:
            raise InputError(f"--{name} must be at most {most}, not {value}")
    if 0 < args.temperature < 1e-6:  # logits divided by it might be infinite
        raise InputError(f"--temperature must be 0 or at least 1e-06, not {args.temperature}")
    check_device(args.device)
    return args


def print_texts(texts: list[Text], checkpoint, steps):
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
            if token == checkpoint.eot:
                text.ended = True
            if text.ended:
                continue
            piece = text.add(checkpoint.token_bytes(token))
            if text is first:
                print(piece, end="", flush=True)
        if all(text.ended for text in texts):
            break
    print(first.finish())
    for i, text in enumerate(texts[1:], start=2):
        text.finish()
        print(f"\n[{i}/{n}] {text.text}")


def main():
    show_any_text()
    args = parse_arguments()
    checkpoint = load(args.model, args.device, args.offline)
    prompt = [checkpoint.eot, *checkpoint.encode(args.prompt)]
    prompts = torch.tensor([prompt] * args.n, device=args.device)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    steps = generate(
        checkpoint, prompts, args.max_tokens, args.temperature, args.top_k, generator
    )
    texts = [Text(args.prompt) for _ in range(args.n)]
    print_texts(texts, checkpoint, steps)


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print()
        sys.exit(130)
