"""
Trains with train_gpt.py, then prints a short text that the trained model writes.

    python evals/train_and_sample.py [train_gpt.py's arguments]

./run.sh calls this script. It trains, exits and handles signals as train_gpt.py does. The text is
printed after a successful run. The script downloads nothing. A model of the fineweb track prints no
text if GPT-2's vocabulary isn't in data/.cache.
"""
import os
import signal
import sys
import tempfile
import time
from pathlib import Path


def stop_before_training(number, frame):
    """Until train_gpt.py is imported. Then its own handler takes over."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"stopped; there is nothing to save\n")
    os._exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop_before_training)
    signal.signal(signal.SIGTERM, stop_before_training)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train_gpt  # before torch: it sets environment variables that torch reads

PROMPTS = {"mini": "**MACBETH**  \n", "fineweb": "The most important thing about science is"}
MAX_TOKENS = 300
MAX_SECONDS = 4


def within(seconds, steps):
    """Yields from steps until the time is over."""
    end = time.monotonic() + seconds
    for tokens in steps:
        if time.monotonic() > end:
            return
        yield tokens


def print_sample(model):
    """Prints a text, always with the same prompt and seed."""
    import torch

    import models
    import sample

    device = next(model.parameters()).device
    with tempfile.TemporaryDirectory() as folder:
        train_gpt.save_model(Path(folder) / "model.safetensors", model, model.hp)
        checkpoint = models.load(folder, device.type, offline=True)
    prompt = PROMPTS[model.hp.track]
    tokens = torch.tensor([[checkpoint.eot, *checkpoint.encode(prompt)]], device=device)
    generator = torch.Generator(device).manual_seed(42)
    steps = models.generate(checkpoint, tokens, MAX_TOKENS, 0.8, 50, generator)
    print("\nA sample of what the model writes:\n", flush=True)
    sample.print_texts([sample.Text(prompt)], checkpoint, within(MAX_SECONDS, steps))


def after_training(model):
    """Training has succeeded. Whatever happens here doesn't change the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        print_sample(model)
    except Exception as e:  # an idea may change the model in ways that evals/ doesn't know
        if model.hp.track == "mini":
            print(f"can't print a sample: {e}", file=sys.stderr)


if __name__ == "__main__":
    train_gpt.handle_signals()
    status = train_gpt.main(sys.argv[1:], after_training)
    if status != 0:
        sys.stdout = None  # as in train_gpt.py
    sys.exit(status)
