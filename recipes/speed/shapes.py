"""Models to time: random weights at the shapes of released models, and of the embedded bases."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

# Speed does not depend on the values of the weights. The small released shapes have a vocabulary of
# 32,000, so that the head, which no routing touches, does not hide the layers;
# `random_model(vocabulary=...)` sets another one. The last two are the bases of
# `recipes/embedded_base`.
_FIELDS = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
           "num_key_value_heads", "vocab_size", "tie_word_embeddings")  # fmt: skip
_ROWS: dict[str, tuple[Any, ...]] = {
    "smollm2-135m": ("llama", 576, 1536, 30, 9, 3, 32000, True),
    "qwen2.5-0.5b": ("qwen2", 896, 4864, 24, 14, 2, 32000, True),
    "llama-3.2-1b": ("llama", 2048, 8192, 16, 32, 8, 32000, True),
    "llama-3-8b": ("llama", 4096, 14336, 32, 32, 8, 128256, False),
    "olmoe-1b-7b": ("olmoe", 2048, 1024, 16, 16, 16, 50304, False),
    "embedded": ("llama", 256, 768, 6, 4, 2, 2048, True),
    "embedded-wide": ("llama", 512, 2048, 4, 8, 4, 4096, True),
}
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(_FIELDS, row)) | {"max_position_embeddings": 8192} for name, row in _ROWS.items()
}
SHAPES["olmoe-1b-7b"] |= {"num_experts": 64, "num_experts_per_tok": 8}


def random_model(
    shape: str,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    *,
    depth: int | None = None,
    vocabulary: int | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """A model with random weights at one of `SHAPES`, in eval mode.

    Args:
        shape: A key of `SHAPES`.
        dtype: The dtype of the weights.
        seed: The seed of the weights.
        depth: Decoder layers; fewer than the shape's own where the machine does not hold them all.
        vocabulary: Rows of the embedding and the head; default: the shape's.
        device: Where the weights are made.

    Raises:
        ValueError: `shape` is unknown, `depth` or `vocabulary` is out of range.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape {shape!r} is unknown; use one of: {', '.join(SHAPES)}")
    sizes = dict(SHAPES[shape])
    if depth is not None:
        if not 1 <= depth <= sizes["num_hidden_layers"]:
            raise ValueError(
                f"depth={depth}: {shape} has {sizes['num_hidden_layers']} layers; use 1 to that "
                "many"
            )
        sizes["num_hidden_layers"] = depth
    if vocabulary is not None:
        if vocabulary < 2:
            raise ValueError(f"vocabulary={vocabulary} must be at least 2")
        sizes["vocab_size"] = vocabulary
    config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    torch.manual_seed(seed)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
