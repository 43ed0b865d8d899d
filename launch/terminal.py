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

    from evals import sample

    args = sample.parse_arguments([str(checkpoint), f"--max_tokens={WIDTH}"])
    with (
        torch.random.fork_rng(devices=[]),  # a new model begins with random weights
        contextlib.redirect_stdout(io.StringIO()) as written,
    ):
        sample.sample(args, heading="")
    return " ".join(written.getvalue().split())[:WIDTH]


@contextlib.contextmanager
def seconds_shown(text, terminal):
    """Shows the seconds that pass in the `with` block."""
    ended = threading.Event()
    bar = tqdm(bar_format=text + ": {elapsed}", file=terminal, leave=False)

    def refresh():
        while not ended.wait(1):
            bar.refresh()

    threading.Thread(target=refresh, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        bar.close()


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
        self.bar = None
        self.shown = contextlib.ExitStack()
        self.shown.enter_context(seconds_shown("getting ready for the first step", self.terminal))

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
            if self.bar is not None:  # after another one
                self.wait()
        if line.startswith("target "):  # it has ended
            self.shown.close()
        tqdm.write(line, self.terminal)

    def show_step(self, line, step, total, val_loss):
        if self.bar is None:
            self.shown.close()
            # smoothing 0: the time left follows from all steps so far, and from their validations
            how = dict(unit="step", smoothing=0, dynamic_ncols=True, file=self.terminal)
            self.bar = self.shown.enter_context(tqdm(initial=step, total=total, **how))
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
        self.shown.close()


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
