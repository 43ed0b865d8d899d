"""Reads OpenAI's GPT-2 weights from the Hugging Face hub, into the model of recipes/gpt2.py."""

import torch
from train_gpt import InputError, require

# layers, heads and width (Radford et al. 2019, table 2)
SIZES = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}
# These layers store (in, out); nn.Linear stores (out, in)
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
UNUSED = (".attn.bias", ".attn.masked_bias")  # the causal mask, not a parameter


def download(name):
    """Returns the path of a model's weights, which are downloaded unless they are in the hub's cache."""
    from data.shards import from_hub  # here, so that a replayed run needs only its sources
    from huggingface_hub import hf_hub_download

    with from_hub(name):
        return hf_hub_download(f"openai-community/{name}", "model.safetensors")


def load_weights(model, path):
    """Copies the weights into the model. Names and shapes must be the same."""
    from safetensors.torch import load_file

    weights = {}
    for key, weight in load_file(path).items():
        name = key.removeprefix("transformer.")
        if not name.endswith(UNUSED):
            weights[name] = weight.T if name.endswith(TRANSPOSED) else weight
    head = weights.pop("lm_head.weight", None)
    shared = head is None or torch.equal(head, weights["wte.weight"])
    require(shared, f"{path}: lm_head.weight isn't wte.weight, but in GPT-2 they are the same")
    try:
        model.load_state_dict(weights)
    except RuntimeError as e:  # its message names the keys, over several lines
        raise InputError(f"{path} isn't this GPT-2: {' '.join(str(e).split())}")
