"""Where the parts of a decoder layer are and how they are put together,
one table row per model family.

A layer adds the updates of two sublayers, attention and FFN, to the residual stream `h`. With `n1`,
`n2` the norms before them, `o1`, `o2` the norms after them, and `c` a constant, the layouts
are:

    sequential   a = h + attention(n1(h));       out = a + ffn(n2(a))
    scaled       a = h + c attention(n1(h));     out = a + c ffn(n2(a))
    sandwich     a = h + o1(attention(n1(h)));   out = a + o2(ffn(n2(a)))
    post-norm    a = h + o1(attention(h));       out = a + o2(ffn(a))
    parallel     out = h + attention(n1(h)) + ffn(n2(h))          (n1 and n2 may be one module)

A skipped sublayer adds what the cheap branch makes of the stream before it, or nothing; its norms
and `c` are part of it and are skipped with it. A skipped block adds the branch's update of `h`
alone.

The stream before a sublayer is what its gate and its branch read: `h` for the attention and the
block, `a` for the FFN. In a parallel layer it is `h` for the FFN too: the FFN does not see what the
attention of its layer finds, and neither does the decision about it, so it is known before either
of them runs. `gate_input="normed"` is what the sublayer reads; in a post-norm layer that is the
stream itself.

Adding a family with one of these layouts is one row, and no other change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..files.shown import OneLine


class UnsupportedModelError(OneLine, ValueError):
    """The model's architecture has no row in `FAMILIES`, or its variant cannot be routed."""


@dataclass(frozen=True)
class Family:
    """Attribute names inside a model family, and the layout of its layers.

    Args:
        layers: Name of the list of decoder layers inside the decoder stack.
        attention_norm: Norm before the attention; None: the attention reads the stream as it is.
        attention: The attention module; its first result is the attention output.
        ffn_norm: Norm before the FFN; None: the FFN reads the stream as it is.
        ffn: The FFN, or the whole MoE block. Called with `[B, T, d]`.
        final_norm: The decoder stack's norm after its last layer.
        queries: How the attention projects, a key of `base.projections.STYLES`. None: not known, so
            attention that is skipped per token is computed and masked, and nothing is saved.
        experts: The fused experts inside the MoE block, called with
            `(x [N, d], index [N, K], weights [N, K])`.
        attention_post_norm: Norm of the attention's output, before it is added to the stream.
        ffn_post_norm: Norm of the FFN's output.
        attention_dropout: Dropout module of the layer for the attention's output; None if it has
            none of its own.
        ffn_dropout: The same for the FFN's output.
        residual_scale: Attribute of the layer that both updates are multiplied by.
        parallel: Whether the FFN reads the layer's input, not the stream after the attention.
        logits: What the model does to its LM head's output, and the field of its configuration that
            it does it with: `("multiply" | "divide" | "softcap", field)`.
        passes_keywords: Whether the decoder stack hands its own keyword arguments down to the
            layers.
        returns_weights: Whether a layer returns `(out, attention weights)` instead of `out`.
    """

    layers: str = "layers"
    attention_norm: str | None = "input_layernorm"
    attention: str = "self_attn"
    ffn_norm: str | None = "post_attention_layernorm"
    ffn: str = "mlp"
    final_norm: str = "norm"
    queries: str | None = None
    experts: str = "experts"
    attention_post_norm: str | None = None
    ffn_post_norm: str | None = None
    attention_dropout: str | None = None
    ffn_dropout: str | None = None
    residual_scale: str | None = None
    parallel: bool = False
    logits: tuple[str, str] | None = None
    passes_keywords: bool = True
    returns_weights: bool = False

    @property
    def layout(self) -> str:
        """`"sequential"`, `"scaled"`, `"sandwich"`, `"post-norm"` or `"parallel"`;
        see this module's docstring."""
        if self.parallel:
            return "parallel"
        if self.ffn_post_norm is not None:
            if self.ffn_norm is None:
                return "post-norm"
            return "sandwich"
        if self.residual_scale is None:
            return "sequential"
        return "scaled"

    @property
    def dropouts(self) -> tuple[str, ...]:
        """The dropout modules of a layer; in eval mode they do nothing, unless watched."""
        names = (self.attention_dropout, self.ffn_dropout)
        return tuple(name for name in names if name is not None)

    @property
    def plain(self) -> bool:
        """Whether at inference a sublayer's output is added as it is, one after the other."""
        return self.layout == "sequential" and not self.returns_weights


_SANDWICH = Family(
    ffn_norm="pre_feedforward_layernorm",
    attention_post_norm="post_attention_layernorm",
    ffn_post_norm="post_feedforward_layernorm",
    logits=("softcap", "final_logit_softcapping"),
)
_POST_NORM = Family(
    attention_norm=None,
    ffn_norm=None,
    attention_post_norm="post_attention_layernorm",
    ffn_post_norm="post_feedforward_layernorm",
)
_PARALLEL = Family(ffn_norm="input_layernorm", parallel=True)

_PLAIN = (
    "arcee",
    "gemma",
    "llama",
    "mistral",
    "mixtral",
    "nemotron",
    "qwen2",
    "qwen2_moe",
    "seed_oss",
    "starcoder2",
)

FAMILIES: dict[str, Family] = {
    # Sequential and scaled.
    **dict.fromkeys(_PLAIN, Family(queries="rotary")),
    "qwen3": Family(queries="rotary_head_norm"),
    "olmoe": Family(queries="rotary_flat_norm"),
    "qwen3_moe": Family(queries="rotary_head_norm"),
    "gpt2": Family(
        layers="h",
        attention_norm="ln_1",
        attention="attn",
        ffn_norm="ln_2",
        final_norm="ln_f",
        queries="fused",
    ),
    "apertus": Family(
        attention_norm="attention_layernorm",
        ffn_norm="feedforward_layernorm",
        queries="rotary_head_norm",
    ),
    "deepseek_v3": Family(),
    "ernie4_5": Family(queries="rotary_pairs"),
    "glm": Family(queries="rotary_pairs"),
    "granite": Family(
        queries="rotary", residual_scale="residual_multiplier", logits=("divide", "logits_scaling")
    ),
    "helium": Family(queries="rotary_pairs"),
    "olmo": Family(queries="rotary_clipped"),
    "phi3": Family(
        queries="rotary_fused",
        attention_dropout="resid_attn_dropout",
        ffn_dropout="resid_mlp_dropout",
    ),
    "smollm3": Family(queries="rotary_some"),
    "stablelm": Family(queries="rotary_layernorm", ffn_dropout="dropout"),
    # Sandwich.
    "gemma2": replace(_SANDWICH, queries="rotary_softcap"),
    "gemma3_text": replace(_SANDWICH, queries="rotary_head_norm"),
    "glm4": Family(
        attention_post_norm="post_self_attn_layernorm",
        ffn_post_norm="post_mlp_layernorm",
        queries="rotary_pairs",
    ),
    # Post-norm.
    "exaone4": replace(_POST_NORM, queries="rotary_head_norm_some"),
    "olmo2": replace(_POST_NORM, queries="rotary_flat_norm"),
    "olmo3": replace(_POST_NORM, queries="rotary_flat_norm"),
    # Parallel.
    "cohere": replace(_PARALLEL, queries="rotary_pairs_norm", logits=("multiply", "logit_scale")),
    "cohere2": replace(_PARALLEL, queries="rotary_pairs_some", logits=("multiply", "logit_scale")),
    "falcon": replace(
        _PARALLEL,
        layers="h",
        attention="self_attention",
        final_norm="ln_f",
        passes_keywords=False,
        returns_weights=True,
    ),
    "gpt_neox": Family(
        parallel=True,
        attention="attention",
        final_norm="final_layer_norm",
        queries="rotary_fused_heads",
        attention_dropout="post_attention_dropout",
        ffn_dropout="post_mlp_dropout",
    ),
    "phi": replace(
        _PARALLEL,
        final_norm="final_layernorm",
        queries="rotary_layernorm_dense",
        attention_dropout="resid_dropout",
        ffn_dropout="resid_dropout",
    ),
}

# Model type -> a name for the variant, what the configuration then says, and how the row differs.
# The first that fits counts.
VARIANTS: dict[str, tuple[tuple[str, dict[str, Any], dict[str, Any]], ...]] = {
    "stablelm": (
        (
            "parallel",
            {"use_parallel_residual": True},
            {"parallel": True, "ffn_norm": "input_layernorm"},
        ),
    ),
    "gpt_neox": (("sequential", {"use_parallel_residual": False}, {"parallel": False}),),
    "falcon": (
        (
            "two norms",
            {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2},
            {"attention_norm": "ln_attn", "ffn_norm": "ln_mlp"},
        ),
        (
            "sequential",
            {"new_decoder_architecture": False, "parallel_attn": False},
            {"parallel": False, "ffn_norm": "post_attention_layernorm"},
        ),
    ),
}

# Fields of a configuration that may not be set, for all model types or for one: "with ...".
REFUSED: tuple[tuple[str | None, str, str], ...] = (
    (None, "add_cross_attention", "cross-attention is not supported; use a decoder-only model"),
    (
        None,
        "use_bidirectional_attention",
        "bidirectional attention is not supported; routing is causal",
    ),
    (
        "falcon",
        "alibi",
        "alibi=True is not supported: its position biases are not handed down by sequence",
    ),
    ("falcon", "hidden_dropout", "hidden_dropout above 0 is not supported; set it to 0"),
    ("falcon", "attention_dropout", "attention_dropout above 0 is not supported; set it to 0"),
)


def row_of(config: object) -> Family:
    """The row of the family table for a transformers configuration, as its variant has it.

    Raises:
        UnsupportedModelError: There is none for its model type, or a field of it is not supported.
    """
    model_type = field_of(config, "model_type")
    if model_type not in FAMILIES:
        text = field_of(config, "text_config")
        # A model of images and text: its language model is routed.
        if getattr(text, "model_type", None) in FAMILIES:
            return row_of(text)
        supported = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported; supported families: {supported}"
        )
    for only, field, reason in REFUSED:
        if only in (None, model_type) and field_of(config, field):
            raise UnsupportedModelError(f"{model_type} with {reason}")
    row = FAMILIES[model_type]
    for _, fields, changes in VARIANTS.get(model_type, ()):
        if all(field_of(config, name) == value for name, value in fields.items()):
            return replace(row, **changes)
    return row


def field_of(config: object, name: str) -> Any:
    """A field of a configuration, which may be a dictionary; None if it has none of that name."""
    if isinstance(config, dict):
        return config.get(name)
    return getattr(config, name, None)


def text_config(config: object) -> Any:
    """The language model's part of a configuration; of a model of text alone, all of it."""
    if isinstance(config, dict):
        return config
    return getattr(config, "text_config", None) or config


def find_family(model: nn.Module) -> Family:
    """The family of a transformers model: `row_of` its configuration.

    Raises:
        UnsupportedModelError: As `row_of`; or the model has no configuration.
    """
    return row_of(getattr(model, "config", None))


def find_decoder(model: nn.Module, family: Family) -> nn.Module:
    """The decoder stack: the one module that holds the list of decoder layers.

    Raises:
        UnsupportedModelError: There is none, or more than one.
    """
    lists = [(m, getattr(m, family.layers, None)) for m in model.modules()]
    found = [
        m
        for m, each in lists
        if isinstance(each, nn.ModuleList) and each and hasattr(each[0], family.ffn)
    ]
    if len(found) > 1:  # of a model of images and text: not the encoder's
        found = [m for m in found if field_of(getattr(m, "config", None), "model_type") in FAMILIES]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__}: expected one stack of decoder layers named "
            f"{family.layers!r}, found {len(found)}"
        )
    return found[0]
