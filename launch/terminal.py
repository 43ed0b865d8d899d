"""
What a terminal shows of a training: the seconds until the first step, then a bar, after each validation that
is the best so far a line that the model writes, and in the end a picture beside the log.

The training script prints a validation while its clock is stopped, so these lines don't count as training
time. The log and the checkpoint are the same as without a terminal.
"""

import contextlib
import io
import math
import re
import sys
import threading
from pathlib import Path

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

WIDTH = 76  # characters of the line that the model writes


def written_line(checkpoint):
    """Returns a line that the model of a RUN.pt writes. Leaves PyTorch's random numbers as they were."""
    import torch

    from evals import models, sample

    with torch.random.fork_rng(devices=[]):  # a new model begins with random weights
        model = models.load(checkpoint, offline=True)
    prompt = [model.eot, *model.encode(sample.PROMPTS[model.vocab_size])]
    ids = torch.tensor([prompt], device=models.DEVICE)
    generator = torch.Generator(models.DEVICE).manual_seed(0)
    content = b""
    for token in models.generate(model, ids, WIDTH, 0.8, 50, generator):
        if token == model.eot or len(content) > WIDTH:
            break
        content += model.token_bytes(token.item())
    text = sample.printable(content.decode(errors="replace"))
    return " ".join(text.split())[:WIDTH]


class Screen(io.TextIOBase):
    """Takes the place of stdout. Lines about steps move the bar; the others are shown above it."""

    def __init__(self, terminal):
        self.terminal = terminal
        self.begun = ""  # a line without its end
        self.log = None  # its path, when the script has printed it
        self.best = math.inf
        self.wait()

    def wait(self):
        """Shows the seconds that pass, until there are steps."""
        self.has_steps = threading.Event()
        text = "getting ready for the first step"
        self.bar = tqdm(bar_format=text + ": {elapsed}", file=self.terminal, leave=False)
        threading.Thread(target=self.show_seconds, daemon=True).start()

    def show_seconds(self):
        while not self.has_steps.wait(1):
            self.bar.refresh()

    def isatty(self):
        return True

    def write(self, text):
        self.begun += text
        if text.endswith(("\n", "\r")):  # a script may replace the line of a step
            line, self.begun = self.begun.rstrip(), ""
            self.show(line)

    def show(self, line):
        step = re.match(r"step:(\d+)/(\d+)(?: val_loss:(\S+))?", line)
        if step:
            self.show_step(line, int(step[1]), int(step[2]), step[3])
            return
        if line.startswith("track "):  # a run begins
            self.log = Path(line.rpartition("log: ")[2])
            self.best = math.inf
            if self.has_steps.is_set():  # after another one
                self.wait()
        if line.startswith("target "):  # it has ended
            self.bar.close()
        tqdm.write(line, self.terminal)

    def show_step(self, line, step, total, val_loss):
        if not self.has_steps.is_set():
            self.has_steps.set()
            self.bar.close()
            # smoothing 0: the time left follows from all steps so far, and from their validations
            how = dict(unit="step", smoothing=0, dynamic_ncols=True, file=self.terminal)
            self.bar = tqdm(initial=step, total=total, **how)
        self.bar.update(step - self.bar.n)
        if not val_loss:
            return
        losses = [word for word in line.split() if not word.startswith(("train_time", "step_avg"))]
        tqdm.write(" ".join(losses), self.terminal)
        self.bar.set_postfix_str(f"val_loss {val_loss}")
        if step and float(val_loss) < self.best:
            self.best = float(val_loss)
            with contextlib.suppress(Exception):  # of a model that evals/ doesn't know
                tqdm.write(f"    {written_line(self.log.with_suffix('.pt'))}", self.terminal)

    def end(self):
        self.has_steps.set()
        self.bar.close()


@contextlib.contextmanager
def watched():
    """Gives the Screen that shows what is printed in the `with` block."""
    screen = Screen(sys.stdout)
    # warnings and errors, too, are shown above the bar
    errors = DummyTqdmFile(screen.terminal) if sys.stderr.isatty() else sys.stderr
    try:
        with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(errors):
            yield screen
    finally:
        screen.end()


def draw(log):
    """Writes a picture of the losses in a log."""
    from judge.plot import plot

    print("picture:", end=" ")
    try:
        plot.main([str(log)])
    except Exception as e:  # the training has succeeded, whatever happens here
        print(f"can't draw the losses: {e}")
