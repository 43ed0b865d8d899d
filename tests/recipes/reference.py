"""
The recipe of January 2026 by its definition, in float64, one sequence and one layer at a time. Nothing here
calls the script.
"""

import math
from ctypes import c_int32

import torch
import torch.nn.functional as F

from tests.training.test_attention import dense_attention
from tests.training.test_model import reference_smear, rms_norm, rotate


# --------------------------------------------------------------- model
def rotate_half(x, positions, freqs):
    """Rotates the first half of the channels of x (S, H, D)."""
    turning, still = x.chunk(2, dim=-1)
    return torch.cat([rotate(turning, positions, freqs), still], dim=-1)


def visible(docs, window):
    """(N, N): True where the query at i sees the key at j."""
    position = torch.arange(len(docs))
    back = position[:, None] - position
    return (docs[:, None] == docs) & (back >= 0) & (back <= window)


def bigram_row(seq, t, rows):
    """Row of the bigram that ends at t, in int32 arithmetic that overflows."""
    if t == 0:
        return rows - 1
    before = rows - 1 if t == 1 else int(seq[t - 1])
    now = c_int32(36313 * int(seq[t])).value
    earlier = c_int32(27191 * before).value
    return (now ^ earlier) % (rows - 1)


def sigmoid_gate(x, weight):
    return torch.sigmoid(x[:, :12] @ weight.T)


def attention(p, hp, layer, x, seq, masks, freqs, scale):
    """The attention of one layer, x (S, C) after the norm."""
    s = len(seq)
    i = layer if layer < 6 else layer - 1
    paired = layer in (0, 2, 5, 9)
    long = layer in (3, 10)
    w = p["attn_bank"][i]
    l0 = p["qkv_lambdas"][i]
    shape = (s, hp.num_heads, -1)
    q, k, v = [(l0 * x @ w[n].T).view(shape) for n in range(3)]
    table = {0: 1, 1: 2, 8: 0, 9: 1, 10: 2}.get(layer)
    if table is not None:
        n = (0, 1, 8, 9, 10).index(layer)
        ve = p[f"value_embeds.{table}"][seq].view(shape)
        amount = 2 * sigmoid_gate(x, p["value_gates"][n])
        v = v + amount[..., None] * ve
    positions = torch.arange(s)[:, None, None]
    if paired:
        positions = 2 * positions + torch.arange(hp.num_heads)[:, None] % 2
    q = rotate_half(rms_norm(q), positions, freqs)
    k = rotate_half(rms_norm(k), positions, freqs)
    if long:
        turning, still = k.chunk(2, dim=-1)
        k = torch.cat([turning, still[[0, *range(s - 1)]]], dim=-1)
    if paired:
        # two heads are one of twice the length: even slots hold the first one's tokens, odd ones the other's
        q, k, v = [torch.stack(x.chunk(2, dim=1), dim=1).flatten(0, 1) for x in (q, k, v)]
        y = dense_attention(q[None], k[None], v[None], masks["paired"], scale)[0]
        y = torch.cat([y[0::2], y[1::2]], dim=1)
    else:
        mask = masks["long" if long else "short"]
        y = dense_attention(q[None], k[None], v[None], mask, scale)[0]
    y = y * sigmoid_gate(x, p["attn_gates"][i])[..., None]
    return p["o_lambdas"][i] * y.flatten(1) @ w[3].T


def capped_logits(p, hp, seq, long, short, freqs, scale):
    """The forward pass of one sequence (S,). Windows are in tokens. Returns (S, V)."""
    seq = seq.long()
    docs = (seq == hp.eot_token).cumsum(0)
    masks = {
        "long": visible(docs, long),
        "short": visible(docs, short),
        "paired": visible(docs.repeat_interleave(2), short),
    }
    embeds = p["embed"][seq]
    smear = dict(smear_gate=p["smear_gate"][0], smear_scale=p["smear_lambda"])
    x = x0 = rms_norm(reference_smear(smear, embeds))
    if hp.bigram_factor:
        rows = [bigram_row(seq, t, len(p["bigram_embed"])) for t in range(len(seq))]
        b = p["bigram_embed"][rows]
    outputs = []
    for i in range(11):
        if i == 6:
            amount = 2 * sigmoid_gate(x0, p["skip_gate"])
            x = x + torch.sigmoid(p["skip_lambda"]) * amount * outputs[3]
        x = p["resid_lambdas"][i] * x + p["x0_lambdas"][i] * x0
        if hp.bigram_factor:
            x = x + p["bigram_lambdas"][i] * b
        if i != 6:
            x = x + attention(p, hp, i, rms_norm(x), seq, masks, freqs, scale)
        hidden = (rms_norm(x) @ p["mlp_in_bank"][i].T).relu() ** 2
        x = x + hidden @ p["mlp_out_bank"][i]
        outputs.append(x)
    x = rms_norm(x - p["backout_lambda"] * outputs[7])
    return 23 * torch.sigmoid((x @ p["lm_head"].T + 5) / 7.5)


def training_loss(z, targets, weights):
    """The loss of one sequence. `targets` are the next tokens (S,)."""
    total = 0.0
    for k, weight in enumerate(weights):
        n = len(targets) - k
        ahead = F.cross_entropy(z[:n], targets[k:], reduction="sum")
        total = total + weight * ahead
    return total


# --------------------------------------------------------------- packing
def packed_steps(shards, eot, seq_lens, max_document, num_sequences=8):
    """Yields the sequences of each step, as lists of S + 1 tokens, until the shards are used up.

    `shards` are lists of tokens; seq_lens gives S of each step.
    """
    step = 0
    for tokens in shards:
        begins = [i for i, token in enumerate(tokens) if token == eot]
        documents = []
        for begin, end in zip(begins, [*begins[1:], len(tokens)]):
            documents.append(tokens[begin:end])
        left = documents
        while True:
            sequences = []
            for _ in range(num_sequences):
                sequence = []
                while len(sequence) < seq_lens(step) + 1 and left:
                    document, *left = left
                    room = seq_lens(step) + 1 - len(sequence)
                    sequence += document[:max_document][:room]
                if len(sequence) == seq_lens(step) + 1:
                    sequences.append(sequence)
            if len(sequences) < num_sequences:
                break  # the next shard begins this step anew
            yield sequences
            step += 1


# --------------------------------------------------------------- schedules (1,560 steps and 40)
def tokens_per_sequence(step):
    return (16384, 32768, 49152, 49152)[step // 520]


def windows(step):
    """The long and the short window, in tokens. The last validation has a longer one."""
    n = (3, 7, 11, 13)[step // 520]
    return 128 * (20 if step == 1600 else n), 128 * (n // 2)


def loss_weights(step):
    x = step / 1560
    if x < 1 / 3:
        return 1.0, 0.5, 0.25 * (1 - 3 * x)
    if x < 2 / 3:
        return 1.0, 0.5 * (2 - 3 * x), 0.0
    return 1.0, 0.0, 0.0


def learning_rate(step):
    x = step / 1560
    if step >= 1560:
        return 0.1
    top = 1.0
    if step > 520:
        top = 1.52
    if step > 1040:
        top = 1.73
    if x < 0.45:
        return top
    w = (1 - x) / 0.55
    return top * w + 0.1 * (1 - w)


def momentum(step):
    if step < 300:
        return 0.85 + 0.10 * step / 300
    if step > 1550:
        return 0.95 - 0.10 * (step - 1550) / 50
    return 0.95


def rotary_and_scale(windows):
    """Frequencies of heads with 16 channels, and the attention scale, after the windows (in blocks of 16 tokens)
    of the list."""
    freqs = (1 / 1024) ** torch.linspace(0, 1, 4, dtype=torch.float64)
    scale = 0.1
    for old, new in zip(windows, windows[1:]):
        turns = 16 * old * freqs / (2 * math.pi)
        often = ((turns - 1) / 31).clamp(0, 1)
        freqs = freqs * (often + (1 - often) * old / new)
        scale *= 1 + 0.2 * math.log(new / old)
    return freqs, scale


# --------------------------------------------------------------- optimizers
POLAR = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def muon_step(matrix, gradient, lr, scale, momentum):
    """The step of one matrix, a PlainMuon."""
    update = matrix.update(gradient, momentum)
    p = matrix.weight
    decay = torch.where(update * p >= 0, p, 0.0)
    matrix.weight = p - lr * scale * (update + 1.2 * lr * decay)


class Adam:
    """PyTorch's in float64, then cautious weight decay."""

    def __init__(self, weight, mul, betas, wd):
        self.weight = weight.detach().double()
        self.wd = wd
        self.mul = mul
        self.adam = torch.optim.Adam([self.weight], betas=betas)
        self.t = 0

    def step(self, gradient, schedule):
        before = self.weight.clone()
        (group,) = self.adam.param_groups
        self.t += 1
        lr = 0.008 * self.mul * schedule
        eps = 1e-10 / (1 - group["betas"][1] ** self.t) ** 0.5  # PyTorch adds it after this division
        group.update(lr=lr, eps=eps)
        self.weight.grad = gradient.double()
        self.adam.step()
        towards_zero = (before - self.weight) * before > 0
        self.weight -= lr**2 * 0.005 * self.wd * before * towards_zero
