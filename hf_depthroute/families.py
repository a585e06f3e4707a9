"""Where the parts of a decoder layer are, one table row per model family.

Every row describes a sequential pre-norm layer:

    a   = h + attention(attention_norm(h))
    out = a + ffn(ffn_norm(a))

Adding a family with this layout is one row, and no other change.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


class UnsupportedModelError(ValueError):
    """The model's architecture has no row in `FAMILIES`, or a variant of it that cannot be routed."""


@dataclass(frozen=True)
class Family:
    """Attribute names inside a model family.

    Args:
        layers: Name of the list of decoder layers inside the decoder stack.
        attention_norm: Norm in front of the attention.
        attention: The attention module; its first result is the attention output.
        ffn_norm: Norm in front of the FFN.
        ffn: The FFN, or the whole MoE block. Called with `[B, T, d]`.
        final_norm: The decoder stack's norm after its last layer.
        queries: How the attention projects, a key of `execution.attention.STYLES`. None: not known, so attention
            that is skipped per token is computed and masked, and nothing is saved.
        experts: The fused experts inside the MoE block, called with `(x [N, d], index [N, K], weights [N, K])`.
    """

    layers: str = "layers"
    attention_norm: str = "input_layernorm"
    attention: str = "self_attn"
    ffn_norm: str = "post_attention_layernorm"
    ffn: str = "mlp"
    final_norm: str = "norm"
    queries: str | None = None
    experts: str = "experts"


FAMILIES: dict[str, Family] = {
    "llama": Family(queries="rotary"),
    "qwen2": Family(queries="rotary"),
    "qwen3": Family(queries="rotary_head_norm"),
    "mistral": Family(queries="rotary"),
    "olmoe": Family(queries="rotary_flat_norm"),
    "mixtral": Family(queries="rotary"),
    "qwen2_moe": Family(queries="rotary"),
    "qwen3_moe": Family(queries="rotary_head_norm"),
    "gpt2": Family(
        layers="h", attention_norm="ln_1", attention="attn", ffn_norm="ln_2", final_norm="ln_f", queries="fused"
    ),
}


def find_family(model: nn.Module) -> Family:
    """The family of a transformers model, by `config.model_type`.

    Raises:
        UnsupportedModelError: The model has no config, an unknown type, or cross-attention.
    """
    config = getattr(model, "config", None)
    model_type = config.get("model_type") if isinstance(config, dict) else getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(f"model type {model_type!r} is not supported; supported families: {supported}")
    if getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError(f"{model_type} with cross-attention is not supported; use a decoder-only model")
    return FAMILIES[model_type]


def find_decoder(model: nn.Module, family: Family) -> nn.Module:
    """The decoder stack: the one module that holds the list of decoder layers.

    Raises:
        UnsupportedModelError: There is none, or more than one.
    """
    found = []
    for module in model.modules():
        layers = getattr(module, family.layers, None)
        if isinstance(layers, nn.ModuleList) and len(layers) and hasattr(layers[0], family.ffn):
            found.append(module)
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__}: expected one stack of decoder layers named {family.layers!r}, found {len(found)}"
        )
    return found[0]
