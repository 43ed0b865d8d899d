"""
Continuations from a checkpoint, streamed as they come.

    python evals/sample.py CHECKPOINT --prompt "To be, or not to be" --n 3 --max_tokens 200
    python evals/sample.py gpt2-xl        # OpenAI's weights, from the hub

CHECKPOINT is the model.safetensors of train_gpt.py or of the baseline. All n continuations are decoded together, as
one batch; the first is shown token by token, the others when they are complete. Each begins after an end-of-text
token and ends at the next one, or after max_tokens.
"""
import argparse
import codecs
import sys

from models import InputError, generate, load  # before torch: it sets OpenMP
from machine import readable, show_any_text

import torch


def printable(text: str) -> str:
    """Control characters, which a byte-level model may emit, must not reach the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def main():
    show_any_text()
    parser = argparse.ArgumentParser(description="Continuations from a checkpoint.", allow_abbrev=False)
    parser.add_argument("checkpoint", help="a model.safetensors, its folder, or gpt2, gpt2-medium, ...")
    parser.add_argument("--prompt", type=readable, default="Hello, I'm a language model,", help="default: %(default)r")
    parser.add_argument("--n", type=int, default=5, help="continuations; default: %(default)s")
    parser.add_argument("--max_tokens", type=int, default=100, help="of each; default: %(default)s")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy; default: %(default)s")
    parser.add_argument("--top_k", type=int, default=50, help="0: all tokens; default: %(default)s")
    parser.add_argument("--seed", type=int, default=42, help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    for name, least in (("n", 1), ("max_tokens", 1), ("temperature", 0), ("top_k", 0)):
        if not least <= getattr(args, name) < float("inf"):
            raise InputError(f"--{name} must be at least {least}, not {getattr(args, name)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch finds no CUDA GPU here; use --device cpu")

    checkpoint = load(args.checkpoint, args.device)
    prompt = torch.tensor([[checkpoint.eot, *checkpoint.encode(args.prompt)]] * args.n, device=args.device)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    # a character may be spread over several tokens: it is shown when its last byte is there
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(args.n)]
    texts, going = [args.prompt] * args.n, [True] * args.n
    print(f"[1/{args.n}] {args.prompt}", end="", flush=True)
    for tokens in generate(checkpoint, prompt, args.max_tokens, args.temperature, args.top_k, generator):
        for i, token in enumerate(tokens.tolist()):
            going[i] = going[i] and token != checkpoint.eot
            if going[i]:
                piece = printable(decoders[i].decode(checkpoint.token_bytes(token)))
                texts[i] += piece
                if i == 0:
                    print(piece, end="", flush=True)
        if not any(going):
            break
    tails = [decoder.decode(b"", final=True) for decoder in decoders]  # a character cut off by max_tokens
    print(tails[0])
    for i in range(1, args.n):
        print(f"\n[{i + 1}/{args.n}] {texts[i]}{tails[i]}")


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
