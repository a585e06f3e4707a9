"""`RoutingFields`: what a user may ask of an adapter. Plain fields,
which `--help` reads without torch and PEFT."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TypeVar

from ..parts.targets import TARGETS

Owner = TypeVar("Owner", bound=type)
MAX_SEED = 2**32 - 1  # of a run: `transformers.set_seed` seeds NumPy too
# Of a layer what the other field says of all.
PATTERNS = ("target_pattern", "branch_pattern", "rank_pattern")
MEMORY_FIELDS = ("memory_slots", "memory_width", "memory_heads", "ngram_order")
# The values of fields that have few; what else is allowed is in `rules` and `conflicts`.
CHOICES: dict[str, Collection[str]] = {
    "target": TARGETS,
    "granularity": ("token", "sequence"),
    "gate_input": ("residual", "normed"),
    "branch": ("lowrank", "swiglu", "neurons", "memory", "none"),
    "budget_scope": ("layer", "global"),
    "phases": ("all", "prefill"),
    "causal_rule": ("quantile", "running", "predictor"),
    "expert_gates": ("per_expert", "per_layer"),
}


def with_help(owner: Owner) -> Owner:
    """Class decorator: `metadata["help"]` of a field is the first sentence of its `Args:` entry.

    So the docstring is the only text about a field, also for the command line and
    `transformers.HfArgumentParser`.
    """
    names = "|".join(field.name for field in fields(owner))
    parts = re.split(rf"^ +({names}): ", owner.__doc__ or "", flags=re.MULTILINE)
    entries = dict(zip(parts[1::2], parts[2::2]))
    for field in fields(owner):
        if field.name in entries:
            sentence = re.split(r"\.\s", " ".join(entries[field.name].split()) + " ")[0]
            said = re.sub('`"|"`|`', "", sentence) + "."
            field.metadata = MappingProxyType({**field.metadata, "help": said})
    return owner


@with_help
@dataclass
class RoutingFields:
    """The fields of a `DepthRouteConfig` that its user sets.

    Args:
        layers: Which decoder layers are routed: `"last:N"`, `"every:N"` (layers N-1, 2N-1, ...),
            `"before_last:N"` (the deepest but the last), `"last:half"` and `"before_last:half"`
            (half of all), `"all"`, or indices such as 2,3,5; by default the last third (halting:
            all but the first). Injection replaces it with the list of indices, which is saved.
        static_layers: Routed layers without a gate, such as 2,3: every token takes the cheap path
            there. The budget is that of the other routed layers. For the targets ffn, attention and
            block, per token.
        target: What an easy token skips: `"ffn"`, `"attention"`, `"block"` (both) or `"experts"`.
            Of the attention it skips its query, its softmax and the output projection; keys and
            values are written all the same, but for static layers. The experts are those of a
            mixture-of-experts layer, one (token, expert) pair at a time. `"memory"` skips nothing
            of the base: what a table of hashed n-grams holds for a token is added before the
            attention, times the gate's `p`; it has a gate and a rule of its own, no branch and no
            budget.
        granularity: What one decision covers: a `"token"`, or a `"sequence"`. A sequence is decided
            on its prompt, and the decision is kept with the KV cache; where it skips the attention,
            no keys and values are written.
        gate: What scores a token: `"mlp"`, `"jepa"`, `"linear"`, `"affine"`, `"halting"`,
            `"bottleneck"`, `"random"`, `"exit"`, `"sinks"` or `"none"`. G1, `"mlp"`:
            `u = W2 SiLU(W1 a + b1) + b2`; G3, `"jepa"`: predicts both outcomes, then compares them;
            `"linear"` (Router-Tuning): one row, starts dense; `"affine"`: one row and a bias;
            `"halting"` (TSA): reads the stream between two blocks, scales both updates of the
            block; `"bottleneck"` (FlexiDepth): scales the block's FFN by `p`, the branch by
            `1 - p`; and to compare with: `"random"`: a frozen random projection; `"exit"`: the LM
            head's confidence, and a token that has left stays out; `"none"`: static, the routed
            layers are skipped by every token, or, with `"sinks"`, by all but attention sinks.
            Target memory has a gate of its own, `"memory"`. Any other row of `gates.GATES` is a
            value too.
        gate_hidden: Width of the MLP gate's hidden layer, by default a quarter of the model's
            width; of the bottleneck gate's, a sixteenth.
        gate_input: What the gate reads: `"normed"` (what the sublayer sees) or `"residual"` (the
            stream before its norm, as in arXiv:2604.17228). On the pretrained base of
            `recipes/stories260k` `"normed"` ended at a lower loss with the MLP and with the JEPA
            gate. The halting gate always reads the stream, the bottleneck gate its norm.
        gate_temperature: The gate's `tau` in `p = sigmoid(u / tau)`; by default 2, for linear,
            halting and bottleneck
            1. It scales the gradient and the losses, never the decision.
        context_dim: JEPA gate: width of the compressed context.
        summary_dim: JEPA gate: width of the predicted outcomes `q`.
        action_dim: JEPA gate: width of the two action embeddings.
        branch: What easy tokens take: `"lowrank"` (`W_down SiLU(W_up LN(a))`), `"swiglu"` (a small
            FFN: `W_down (SiLU(W_gate LN(a)) * W_up LN(a))`, which a fit begins as neurons of a
            SwiGLU FFN), `"neurons"` (some of the FFN's own, with an output of their own; targets
            ffn and block), `"memory"` (the low-rank branch, and what a table holds for the n-grams
            of token ids that end at the token) or `"none"` (they keep the residual stream).
            `"memory"` is for the targets ffn, attention and block per token, and needs the token
            ids.
        branch_rank: Rank of the low-rank branch; by default an eighth of the model's width. Of the
            branch swiglu, its width; by default a sixteenth of the FFN's. Of the branch neurons,
            how many it has; by default a quarter of the FFN's.
        target_pattern: Another target in some of the routed layers, by layer index, such as
            `{28: "block"}`, on the command line 28=block; ffn, attention and block, per token.
        branch_pattern: Another branch in some of the routed layers, the same way:
            `{28: "lowrank"}`.
        rank_pattern: Another `branch_rank` in some of the routed layers, the same way: `{28: 192}`.
        budget: Fraction of tokens (of pairs, of sequences) that run in full, in (0, 1].
        budget_scope: Who holds the budget: every `"layer"`, or `"global"`: all routed layers share
            one threshold, and their mean holds it.
        selection: The training rule: `"topk"`, `"threshold"`, `"soft"`, `"gumbel"` or
            `"controller"`; by default top-k where it can be, threshold for the gates linear,
            bottleneck and exit, for sequences and for a global budget, and soft for halting.
            `"topk"`: the `ceil(budget * n)` highest scores of each sequence. `"threshold"`: the
            inference rule, in training too. `"soft"`: both paths weighted by `p`. `"gumbel"`: the
            threshold on scores with logistic noise. `"controller"`: a threshold that moves by a
            fixed step against the sign of the layer's load error; it needs no budget loss
            (`budget_weight=0`). Inference is always causal: a token runs in full iff its score
            reaches the layer's threshold.
        threshold: What scores are compared with: a number, whatever the budget, or `"budget"`; by
            default the budget, for linear, halting and bottleneck, where `selection` is left out
            too, 0 (`p >= 0.5`; bottleneck: 1e-7, `p > 0.5`). With `"budget"` every layer compares
            with the quantile of its scores that the budget asks for, from a table that training
            tracks and `calibrate` sets.
        scale_by_gate: Multiply the full path's update by `p`, in training and in inference
            (Mixture-of-Depths).
        phases: What inference routes: `"all"` tokens, or those of the `"prefill"` only. Then, of
            every forward pass, the last tokens of each sequence run in full, and so does everything
            that is generated. In a pass with `labels` that is what has one, behind a prompt without
            (-100); without such a prompt, all tokens are routed.
        prompt_tail: With phases prefill, how many of a sequence's last tokens run in full; by
            default one. The text behind a prompt reads most from them. `fit_router` of prompts
            takes 64 where none are asked for.
        causal_rule: What decides at inference: `"quantile"` (the score against the threshold),
            `"running"` (the score's rank among those of its own sequence so far: a long text of
            another kind is nearer to the budget) or `"predictor"` (Mixture-of-Depths: a second gate
            that is trained to foresee the top-k choice).
        expert_gates: Target experts: `"per_expert"` (one row per expert, as in Router-Tuning) or
            `"per_layer"`.
        dropped_experts: Target experts, gate `"none"`: the experts that are dropped, a list per
            routed layer; on the command line such as 0,3/1,2.
        memory_slots: Target or branch memory: slots of a layer's table, shared out evenly over the
            hashes.
        memory_width: Target or branch memory: width of a slot.
        memory_heads: Target or branch memory: hash heads, that is, hashes of every order.
        ngram_order: Target or branch memory: the longest n-gram that is hashed; the shortest has
            two tokens, in a branch one.
        seed: Seed of the adapter's initial weights, independent of the global generator, and of the
            memory's hashes.
        modules_to_save: Names of base modules that train and are saved in full, as in PEFT; on the
            command line comma-separated.
    """

    layers: str | list[int] | None = None
    static_layers: list[int] | None = None
    target: str = "ffn"
    granularity: str = "token"
    gate: str = "mlp"
    gate_hidden: int | None = None
    gate_input: str = "normed"
    gate_temperature: float | None = None
    context_dim: int = 128
    summary_dim: int = 64
    action_dim: int = 16
    branch: str = "lowrank"
    branch_rank: int | None = None
    target_pattern: dict[int, str] | None = None
    branch_pattern: dict[int, str] | None = None
    rank_pattern: dict[int, int] | None = None
    budget: float = 0.5
    budget_scope: str = "layer"
    selection: str | None = None
    threshold: float | str | None = None
    scale_by_gate: bool = False
    phases: str = "all"
    prompt_tail: int | None = None
    causal_rule: str = "quantile"
    expert_gates: str = "per_expert"
    dropped_experts: list[list[int]] | None = None
    memory_slots: int = 500_000
    memory_width: int = 32
    memory_heads: int = 4
    ngram_order: int = 3
    seed: int = 0
    modules_to_save: list[str] | None = None
