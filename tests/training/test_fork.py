"""
What people change first in a copy of train_gpt.py. Each change is made by replacing text, then the copy trains
the tiny model for two steps. It must do what was meant, or end with one line.
"""

import re

import pytest
import torch

from tests.util import (
    INITIAL_LOSS,
    ROOT,
    SCRIPT,
    Job,
    assert_one_line,
    assert_same_state,
    checkpoint_of,
    read_checkpoint,
    read_log,
    run_script,
    succeeds,
    tiny_run,
    val_losses,
)

QK_NORM = "q = self.rotary(norm(q))\n"
MLP_UP = "self.c_fc = CastedLinear(hp.model_dim, 4 * hp.model_dim)"
MUON = "return [adam, muon]"


def fork(folder, *changes, options=(), **variables):
    """Runs a copy with changes (old, new). Returns its Job."""
    argv = tiny_run(folder, "--save_checkpoint", *options, num_iterations=2, warmup_steps=2)
    source = SCRIPT.read_text()
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (folder / "fork.py").write_text(source)
    return Job(argv, folder, script=folder / "fork.py", **variables)


def trained(folder, *changes, options=()):
    """The log of a run that must succeed, and its checkpoint."""
    job = fork(folder, *changes, options=options)
    assert (job.wait(), job.err) == (0, "")
    log = read_log(folder)
    losses = val_losses(log)
    assert losses[2] < INITIAL_LOSS - 0.1
    return log, read_checkpoint(folder)


def row(log, name):
    """What the log's table says of a parameter: its shape and optimizer."""
    (text,) = re.findall(rf"^{re.escape(name)} +(.*)$", log, re.M)
    return text


def test_a_third_optimizer(tmp_path):
    """Its learning rate has the schedule, and its momentum stays."""
    mlps = 'mlps = [p for n, p in model.named_parameters() if ".mlp." in n]'
    sgd = "torch.optim.SGD(mlps, lr=0.01, momentum=0.6)"
    changes = [
        (MUON, f"{mlps}\n    return [adam, muon, {sgd}]"),
        ("if p.requires_grad:\n            params[", 'if ".mlp." not in name:\n            params['),
    ]
    log, checkpoint = trained(tmp_path, *changes)
    assert row(log, "blocks.*.mlp.c_fc.weight") == "[128, 32] SGD, lr 0.01"
    (group,) = checkpoint["optimizers"][2]["param_groups"]
    assert (group["lr"], group["momentum"]) == (0.005, 0.6)


def test_new_parameters(tmp_path):
    """A small matrix, a vector with "embed" in its name, another MLP (SwiGLU), a frozen table."""
    up = MLP_UP.replace("c_fc", "c_gate")
    log, checkpoint = trained(
        tmp_path,
        ("# Q, K and V in one matmul", "\n        self.gate = nn.Parameter(torch.empty(2, 32))"),
        (
            "        y = attention(q, k, v, mask)\n",
            "        y = attention(q, k, v, mask) * 2 * F.linear(x, self.gate.type_as(x)).sigmoid()[..., None]\n",
        ),
        (MLP_UP, f"{up}\n        {MLP_UP}\n        self.embed_scale = nn.Parameter(torch.ones(128))"),
        (
            "        x = self.c_fc(x)\n",
            "        x = self.c_fc(x) * F.silu(self.c_gate(x)) * self.embed_scale.type_as(x)\n",
        ),
        ("        x = F.leaky_relu(x, self.relu_slope).square()\n", ""),
        (
            "        self.init_weights(hp.seed)\n",
            "        self.init_weights(hp.seed)\n        self.embed.requires_grad_(False)\n",
        ),
    )
    assert row(log, "blocks.*.attn.gate") == "[2, 32] Muon, lr 0.07"
    assert row(log, "blocks.*.mlp.c_gate.weight") == "[128, 32] Muon, lr 0.07"
    assert row(log, "blocks.*.mlp.embed_scale") == "[128] Adam, lr 0.056"
    assert row(log, "embed.weight") == "[1024, 32] no optimizer"
    assert checkpoint["model"]["blocks.0.mlp.embed_scale"].mean() == pytest.approx(1, abs=0.1)


def test_settings(tmp_path):
    """New settings, one with an integer as its default and one without a text; a third track that sets only
    what differs."""
    log, checkpoint = trained(
        tmp_path,
        (
            "    # the run\n",
            '    mlp_lr: float = setting(1, "a new one")\n    plain: int = 3\n    # the run\n',
        ),
        ('TRACKS = {"fineweb"', 'TRACKS = {"my": replace(MINI, track="my", muon_lr=0.02), "fineweb"'),
        ("lr=hp.scalar_lr)", "lr=hp.scalar_lr * hp.mlp_lr)"),
        options=["--track=my", "--mlp_lr", "0.5"],
    )
    assert checkpoint["settings"]["mlp_lr"] == 0.5
    assert row(log, "blocks.*.attn.qkv_w").endswith("Muon, lr 0.02")
    assert row(log, "skip_weights").endswith("Adam, lr 0.028")


# Learned positions. Validation sequences are twice as long as those of training
POSITIONS = (
    (
        "        if hp.smear:\n            self.smear_gate",
        "        self.positions = nn.Parameter(torch.empty(hp.val_seq_len, hp.model_dim))\n"
        "        if hp.smear:\n            self.smear_gate",
    ),
    (
        "        x = self.embed(input_seq)  # (B, S, C)\n",
        "        x = self.embed(input_seq)\n        x = x + self.positions[: x.size(1)].type_as(x)\n",
    ),
)


def test_rows_that_nothing_trains(tmp_path):
    log, _ = trained(tmp_path / "a", *POSITIONS, options=["--val_seq_len=256", "--val_tokens=1792"])
    warning = "warning: positions: 50% of its rows are as they were at first"
    assert re.findall("^warning: .*$", log, re.M) == [warning]
    log, _ = trained(tmp_path / "b", *POSITIONS)
    assert not re.findall("^warning: ", log, re.M)


STATE = (
    (
        "        return self.c_proj(x)\n",
        "        return self.c_proj(F.dropout(x, 0.1, self.training))\n",
    ),
    (
        "    train_losses = []",
        "    weights = dict(model.named_parameters())\n"
        '    ema = run.extra.setdefault("ema", {k: p.detach().clone() for k, p in weights.items()})\n'
        "    train_losses = []",
    ),
    (
        "        run.step += 1\n",
        "        run.step += 1\n"
        "        for k, p in weights.items():\n"
        "            ema[k].lerp_(p.detach(), 0.1)\n"
        '        if run.step == int(os.getenv("STOP_AT", 0)):\n'
        "            os._exit(9)\n",
    ),
)


def test_dropout_and_a_moving_average_in_a_resumed_run(tmp_path):
    """The same random numbers, and the same average, as in a run without interruption."""
    options = ["--num_iterations=4", "--val_loss_every=2"]
    whole = tmp_path / "whole"
    _, expected = trained(whole, *STATE, options=options)
    cut = tmp_path / "cut"
    assert fork(cut, *STATE, options=options, STOP_AT="3").wait() == 9
    checkpoint = checkpoint_of(cut)
    assert read_checkpoint(cut)["run"]["step"] == 2
    words = [f"--resume={checkpoint}", "--save_checkpoint"]
    succeeds(Job(words, cut, script=cut / "fork.py"))
    found = read_checkpoint(cut)
    assert_same_state(found, expected)
    torch.testing.assert_close(found["run"]["extra"], expected["run"]["extra"], rtol=0, atol=0)


def test_a_linear_layer_of_pytorch(tmp_path):
    """It takes float32 activations only."""
    linear = (MLP_UP, "self.c_fc = nn.Linear(hp.model_dim, 4 * hp.model_dim)")
    in_dtype = "DTYPE = {} if True else torch.bfloat16 if"
    job = fork(tmp_path / "a", linear, ("DTYPE = torch.bfloat16 if", in_dtype.format("torch.bfloat16")))
    words = "blocks.0.mlp.c_fc: nn.Linear doesn't take activations in torch.bfloat16; use CastedLinear"
    assert_one_line(job.wait(), job.err, words)
    trained(tmp_path / "b", linear, ("DTYPE = torch.bfloat16 if", in_dtype.format("torch.float32")))


def test_without_qk_norm(tmp_path):
    """It trains. Scores that overflow end it with a line: on a CPU, no maximum is subtracted."""
    trained(tmp_path / "plain", (QK_NORM, "q = self.rotary(q)\n"))
    job = fork(tmp_path / "large", (QK_NORM, "q = self.rotary(1000 * q)\n"))
    assert_one_line(job.wait(), job.err, "the loss is not finite")


# {what is changed: (old, new, words of the error line)}
REFUSED = {
    "an unused parameter": (
        MLP_UP,
        f"{MLP_UP}\n        self.spare = CastedLinear(8, 8)",
        "no gradient for blocks.0.mlp.spare.weight: use it, or call",
    ),
    "a parameter in two optimizers": (
        MUON,
        "return [adam, muon, torch.optim.SGD([model.lm_head.weight], lr=0.1)]",
        "lm_head.weight has Adam, lr 0.28 and SGD, lr 0.1; it needs one",
    ),
    "a kind without initial values": (
        'return "matrix" if p.ndim >= 2',
        'return "mlp" if ".mlp." in name else "matrix" if p.ndim >= 2',
        "blocks.0.mlp.c_fc.weight: init_weights has no initial values for the kind mlp",
    ),
    "an optimizer that is in no list": (
        MUON,
        "return torch.optim.AdamW(model.parameters(), lr=0.001)",
        "build_optimizers must return a list, also of one optimizer",
    ),
    "a parameter in no optimizer": (MUON, "return [muon]", "smear_gate has no optimizer; it needs one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_changes(name, tmp_path):
    old, new, words = REFUSED[name]
    job = fork(tmp_path, (old, new))
    assert_one_line(job.wait(), job.err, words)


def test_a_missing_package(tmp_path):
    """The launcher's check doesn't hide Python's own line."""
    (tmp_path / "train_gpt.py").write_text("import nosuch_package\n" + SCRIPT.read_text())
    paths = dict(PYTHONPATH=f"{tmp_path}:{ROOT}", PYTHONSAFEPATH="1")
    words = ["answer", "train", "train_gpt"]
    done = run_script(words, tmp_path, script="launch.checks", **paths)
    assert done.returncode
    line = "error: train_gpt.py: ModuleNotFoundError: No module named 'nosuch_package'\n"
    assert done.stderr == line
