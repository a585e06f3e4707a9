"""Combinations of fields of `DepthRouteConfig` that are refused, each with what to use instead."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..parts.gates import GATES
from ..parts.memory import LEAST_SLOTS, hash_count
from ..parts.targets import TARGETS
from .fields import CHOICES, MEMORY_FIELDS, PATTERNS, RoutingFields

if TYPE_CHECKING:
    from .adapter import DepthRouteConfig


def conflicts_of(c: DepthRouteConfig) -> Iterator[str]:
    """Conflicts between the fields of a configuration with its defaults, one line each."""
    yield from _conflicts_of_target(c)
    yield from _conflicts_of_experts(c)
    yield from _conflicts_of_static(c)
    yield from _conflicts_of_layers(c)
    yield from _conflicts_of_branch(c)
    yield from _conflicts_of_memory(c)
    yield from _conflicts_of_rules(c)


def _by_token(c: DepthRouteConfig) -> bool:
    """Whether a decision is about one token, and not about a pair or a table."""
    target = TARGETS[c.target]
    return c.granularity == "token" and not (target.per_pair or target.reads_ids)


def _conflicts_of_target(c: DepthRouteConfig) -> Iterator[str]:
    """Conflicts between what is decided about, and the gate."""
    gate = GATES[c.gate]
    target = TARGETS[c.target]
    for name, value in target.fixed.items():
        if getattr(c, name) != value:
            yield (
                f"{name}={getattr(c, name)!r}: with target={c.target!r} it is always {value!r}; "
                "leave it out"
            )
    targets = gate.targets or tuple(TARGETS)
    granularities = gate.granularities or tuple(CHOICES["granularity"])
    if c.target not in targets or c.granularity not in granularities:
        things = " or ".join(TARGETS[name].called for name in targets)
        yield (
            f"gate={c.gate!r} decides on {things}, per {' or '.join(granularities)}; "
            f"use target={_any_of(targets)} and granularity={_any_of(granularities)}"
        )
    if c.granularity not in target.decides:
        known = _any_of(target.decides)
        yield (
            f"granularity={c.granularity!r} is not supported with target={c.target!r}; use {known}"
        )


def _conflicts_of_experts(c: DepthRouteConfig) -> Iterator[str]:
    gate = GATES[c.gate]
    if TARGETS[c.target].per_pair:
        if not gate.scores_experts:
            scoring = ", ".join(name for name in GATES if GATES[name].scores_experts)
            yield f"gate={c.gate!r} cannot score experts; use one of: {scoring}"
        if gate.static != (c.dropped_experts is not None):
            yield "dropped_experts goes with target='experts' and gate='none', and they need it"
        if c.scale_by_gate or c.causal_rule == "predictor":
            yield (
                "scale_by_gate and causal_rule='predictor' are not supported with "
                f"target={c.target!r}"
            )
        listed = c.dropped_experts is not None and isinstance(c.layers, (list, tuple))
        if listed and list(c.layers or ()) != sorted(c.layers or ()):
            yield (
                f"layers={reprlib.repr(c.layers)} must ascend, because dropped_experts has one "
                "list for each of them"
            )
    elif c.dropped_experts is not None:
        yield "dropped_experts goes with target='experts' and gate='none'"


def _conflicts_of_static(c: DepthRouteConfig) -> Iterator[str]:
    gate = GATES[c.gate]
    if c.static_layers is None:
        return
    if not _by_token(c):
        yield (
            f"static_layers is not supported with target={c.target!r} per {c.granularity}; "
            "use ffn, attention or block per token"
        )
    if gate.static:
        instead = "all routed layers are static"
        yield f"static_layers is not supported with gate={c.gate!r}: {instead}"
    if gate.exits:
        instead = "who has left stays out of all later layers"
        yield f"static_layers is not supported with gate={c.gate!r}: {instead}"
    if not c.takes_budget():
        yield (
            "static_layers needs thresholds that follow the budget: threshold='budget', "
            "causal_rule='quantile'"
        )


def _conflicts_of_branch(c: DepthRouteConfig) -> Iterator[str]:
    gate = GATES[c.gate]
    target = TARGETS[c.target]
    if c.branch == "memory" and not _by_token(c):
        yield (
            "branch='memory' looks up what ends at a token; it is not supported with "
            f"target={c.target!r} per {c.granularity}; use ffn, attention or block per token"
        )
    if gate.scales_ffn and not (target.skips_attention and target.skips_ffn):
        yield (
            f"gate={c.gate!r} scales the FFN of a block; it is not supported with "
            f"target={c.target!r}; use 'block'"
        )
    if gate.scales_ffn and c.branch == "memory":
        yield f"branch='memory' is not scaled by gate={c.gate!r}; use 'swiglu', 'lowrank' or 'none'"
    if gate.scales_ffn and c.scale_by_gate:
        yield (
            f"scale_by_gate is not supported with gate={c.gate!r}, which scales FFN and branch "
            "itself; leave it out"
        )


def _conflicts_of_memory(c: DepthRouteConfig) -> Iterator[str]:
    if c.has_memory:
        hashes = hash_count(c)
        if c.memory_slots < LEAST_SLOTS * hashes:
            least = f"{LEAST_SLOTS * hashes}, {LEAST_SLOTS} for each of {hashes} hashes"
            yield f"memory_slots={c.memory_slots} must be at least {least}"
    else:
        reading = _any_of(name for name, row in TARGETS.items() if row.reads_ids)
        for name in MEMORY_FIELDS:
            if getattr(c, name) != getattr(RoutingFields, name):
                yield f"{name}={getattr(c, name)!r} goes with target={reading} or branch='memory'"


def _conflicts_of_rules(c: DepthRouteConfig) -> Iterator[str]:
    gate = GATES[c.gate]
    if c.selection == "topk" and (c.granularity == "sequence" or c.budget_scope == "global"):
        yield (
            "selection='topk' ranks the tokens of one sequence in one layer; use 'threshold' or "
            "'controller' here"
        )
    if gate.selections and c.selection not in gate.selections:
        yield f"selection={c.selection!r}: {gate.called} trains with {_any_of(gate.selections)}"
    ranked = c.takes_budget() and _by_token(c) and not (gate.exits or gate.soft)
    if c.causal_rule == "running" and not ranked:
        yield (
            "causal_rule='running' ranks the scores of single tokens by a budget; it goes with a "
            "gate that takes one, threshold='budget', granularity='token' and target='ffn', "
            "'attention' or 'block'"
        )
    if c.causal_rule == "running" and c.selection == "controller":
        yield "causal_rule='running' asks no threshold, which selection='controller' moves"
    if c.causal_rule == "predictor" and c.selection != "topk":
        yield "causal_rule='predictor' foresees the top-k choice; use it with selection='topk'"
    if c.selection == "controller" and c.fixed_threshold is not None:
        yield (
            "threshold is fixed, so there is nothing for selection='controller' to move; use "
            "threshold='budget'"
        )
    if c.scale_by_gate and c.selection in ("soft", "gumbel"):
        yield (
            f"scale_by_gate is not supported with selection={c.selection!r}; use topk, threshold "
            "or controller"
        )


def _conflicts_of_layers(c: DepthRouteConfig) -> Iterator[str]:
    """Conflicts between a layer's target and branch, and of the patterns with other fields."""
    plain = ("ffn", "attention", "block")
    if c.target_pattern and (not set(c.targets()) <= set(plain) or c.granularity != "token"):
        yield f"target_pattern={c.target_pattern!r} is for the targets {_any_of(plain)} per token"
    allowed = GATES[c.gate].targets or tuple(TARGETS)
    if not set((c.target_pattern or {}).values()) <= set(allowed):
        yield (
            f"target_pattern={c.target_pattern!r}: gate={c.gate!r} is for target={_any_of(allowed)}"
        )
    memory = c.branch == "memory" or "memory" in (c.branch_pattern or {}).values()
    if c.branch_pattern and (memory or c.branch == "none"):
        known = "branch='lowrank', 'swiglu' and 'neurons'"
        yield f"branch_pattern={c.branch_pattern!r} is for {known}, not with branch={c.branch!r}"
    named = {index for name in PATTERNS for index in getattr(c, name) or ()}
    for index in (-1, *sorted(named)):  # -1: any other layer
        target = c.target_of(index)
        branch = c.branch_of(index)
        if branch == "neurons" and not TARGETS[target].skips_ffn:
            where = "" if index < 0 else f"layer {index}: "
            yield (
                f"{where}branch='neurons' is made of the FFN; it is not supported with "
                f"target={target!r}"
            )


def _any_of(names: Iterable[str]) -> str:
    return " or ".join(map(repr, names))
