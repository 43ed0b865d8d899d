"""
The number of floating-point operations (FLOPs) in a training step.

Only the matrix products that the model needs are counted: two FLOPs for each multiply-add, and twice
as many for the backward pass as for the forward pass. Recomputation, the optimizer and element-wise
operations don't count. This is the convention of PaLM (arXiv:2204.02311, appendix B), except that
attention counts only the pairs of query and key that the mask leaves visible. In total:

    6 T (4 A C H D + 8 L C C + C V) + 12 H D (P(1) + ... + P(L))

T tokens; C = model_dim; H heads of size D; V padded vocabulary; L layers, A of them with attention;
P(l) visible pairs in layer l, which is 0 in a layer without attention.
"""
import torch

from train_gpt import pad_vocab


def visible_pairs(docs, window_blocks):
    """How many (query, key) pairs the attention mask leaves visible.

    docs: (T,) integers, the number of each token's document, never falling.
    window_blocks: the window's length in blocks of 128 tokens.
    """
    position = torch.arange(len(docs), device=docs.device)
    document_start = torch.searchsorted(docs, docs)  # the first position with the same number
    window_start = (position // 128 - window_blocks + 1) * 128
    first_visible = torch.maximum(document_start, window_start)
    visible = position - first_visible + 1  # (T,) the keys that each query sees
    return int(visible.sum())


def model_flops(hp, docs, window_blocks):
    """FLOPs of the forward and backward pass over one batch.

    docs: (T,) integers, as for `visible_pairs`.
    window_blocks: the long window in blocks of 128 tokens; the short window is half of it.
    """
    dim = hp.model_dim
    attention_dim = hp.num_heads * hp.head_dim
    attention_layers = [i for i in range(hp.num_layers) if i not in hp.attn_free_layers]

    weights = len(attention_layers) * 4 * dim * attention_dim
    weights += hp.num_layers * 8 * dim * dim
    weights += dim * pad_vocab(hp.vocab_size)

    long_pairs = visible_pairs(docs, window_blocks)
    short_pairs = visible_pairs(docs, max(1, window_blocks // 2))
    pairs = 0
    for layer in attention_layers:
        if layer in hp.long_window_layers:
            pairs += long_pairs
        else:
            pairs += short_pairs
    return 6 * len(docs) * weights + 12 * attention_dim * pairs


def newton_schulz_flops(muon):
    """FLOPs of the Newton-Schulz iterations in one step of the Muon optimizer.

    Each iteration on an m x n matrix X (m <= n) computes A = X X^T, A A and B X.
    """
    total = 0
    for group in muon.param_groups:
        for p in group["params"]:
            m, n = sorted(p.shape[-2:])
            matrices = p.numel() // (m * n)
            one_iteration = 2 * (2 * m * m * n + m**3)
            total += group["ns_steps"] * matrices * one_iteration
    return total
