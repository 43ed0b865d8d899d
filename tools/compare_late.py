"""
Late ideas: --from 70% starts an idea's runs at the base's checkpoint after 70% of the steps.

An idea that only changes the end of training has the same losses then as in a whole run. Its
final losses also differ much less from the base's at the same seed, so it needs far fewer runs. To
make sure that it changes nothing earlier, the idea trains once from step 0 to the checkpoint, and
must arrive at the same weights and optimizer state, bit for bit.
"""

import time
from dataclasses import replace

import compare_runs
from compare_runs import RunError, Setup, Task
from compare_sources import Variant
from log_parsing import UsageError, write_file


def late_start(start: float, base: Variant, ideas: list[Variant]) -> int:
    """The step that `start`, a fraction of the steps, means. Raises UsageError."""
    for variant in [base, *ideas]:
        if variant.settings is None:
            raise UsageError(
                f"--from works only with train_gpt.py or a recipe, changed or not; {variant.name} is "
                "another script, so leave out --from"
            )
        if variant.num_iterations() != base.num_iterations():
            raise UsageError(
                f"--from: {variant.name} must train as many steps as the base; leave out --from"
            )
    # recipes/january2026.py can be saved after even steps only
    step = 2 * round(start * base.num_iterations() / 2)
    while step >= base.num_iterations():
        step -= 2
    return step


def make_checkpoint(setup: Setup, variant: Variant, seed: int, step: int) -> dict:
    """Trains from step 0 to `step`. Returns the checkpoint's contents. Raises RunError."""
    import torch  # slow to import, and only needed here

    worker = compare_runs.start(setup, Task(variant, range(seed, seed + 1), save_at=step))
    try:
        while True:
            ended = worker.child.poll() is not None
            found = list(worker.folder.glob(f"checkpoints/*/step{step:06d}.pt"))
            if found:
                return torch.load(found[0], map_location="cpu", weights_only=True)
            if ended:
                lines = compare_runs.last_lines(worker)
                message = f"error: {variant.name}: a run ended without its checkpoint of step {step}"
                message += "; above are the last lines that it printed"
                raise RunError("\n".join([*lines, message]))
            time.sleep(0.1)
    finally:
        compare_runs.stop(setup, worker)


def equal(a, b) -> bool:
    """Whether two values of a checkpoint are equal, bit for bit."""
    import torch

    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b))
    return a == b


def moments(state: dict) -> list:
    """The optimizers' state without settings such as learning rates, which an idea may change."""
    return [optimizer["state"] for optimizer in state["optimizers"]]


def check_late_idea(setup: Setup, base: Variant, idea: Variant, seed: int) -> None:
    """Raises UsageError if the idea changes anything before its first step. Raises RunError."""
    step = idea.from_step
    home = setup.folder(idea)
    marker = home / f"same_until_step{step}"  # the folder depends on the base, too
    if marker.exists():
        return
    states = []
    for variant in (base, replace(idea, from_step=0)):
        states.append(make_checkpoint(setup, variant, seed, step))
    for name, weight in states[0]["model"].items():
        if not equal(weight, states[1]["model"].get(name)):
            raise UsageError(
                f"--from: {idea.name} changes training before step {step} ({name} differs from the "
                "base's), so only whole runs can be compared; leave out --from"
            )
    same = len(states[0]["model"]) == len(states[1]["model"])
    if not same or not equal(moments(states[0]), moments(states[1])):
        raise UsageError(
            f"--from: at step {step}, the parameters or the optimizer state of {idea.name} differ from "
            "the base's, so only whole runs can be compared; leave out --from"
        )
    home.mkdir(parents=True, exist_ok=True)
    write_file(marker, b"")
