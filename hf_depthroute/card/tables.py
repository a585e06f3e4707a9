"""The tables of a card: facts and results as lines of Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from ..config.adapter import DepthRouteConfig
from ..parts.gates import GATES
from ..parts.memory import shortest_order
from ..routing.description import budget_words, patterns_words
from .escaping import Safe, clean, code, row, shown_path
from .facts import Facts, is_number
from .measured import Losses, Score, Speed

_RULES = {
    "dense": "dense base",
    "topk": "top-k (training only)",
    "threshold": "causal threshold",
    "fixed": "the adapter's own rule",
}
_MACHINE = ("device", "threads", "cores", "load_before", "torch", "transformers", "python")
_NOT_SHOWN = ("config", "debug", "out", "overwrite", "model", "dataset", "dataset_name")


def _table(head: Sequence[str], body: Iterable[Sequence[object]]) -> list[Safe]:
    return [row(head), row(map(Safe, ["---"] + ["---:"] * (len(head) - 1))), *(row(cells) for cells in body)]


def routed_rows(facts: Facts) -> list[Safe]:
    """Table of the routing, one property per line."""
    c = facts.config
    layers = c.layers if isinstance(c.layers, list) else [code(c.layers)]
    depth = "" if facts.depth is None else f" of 0-{facts.depth - 1}"
    told = GATES[c.gate]
    reads = "" if told.static or told.reads_logits or told.reads else f", reads {code(c.gate_input)}"
    budget = Safe(f"{c.budget:.3g}")
    if facts.depth is not None and isinstance(c.layers, list):
        budget = Safe(budget_words(c, facts.depth))
    if told.soft:
        budget = Safe("none")
    elif not c.takes_budget():
        budget = Safe(f"{c.budget:g} in training; inference follows another rule")
    width = {"neurons": "neurons:", "swiglu": "width"}.get(c.branch, "rank")
    rows: list[tuple[str, object]] = [
        ("layers", Safe(", ".join(map(str, layers)) + depth)),
        *([("static, without a gate", Safe(", ".join(map(str, c.static_layers))))] if c.static_layers else []),
        ("target", code(c.target)),
        ("one decision for each", code(c.granularity)),
        *_memory(c),
        ("gate", Safe(f"{code(c.gate)}{reads}")),
        ("branch", Safe(f"{code(c.branch)}, {width} {c.branch_rank}") if c.branch != "none" else code(c.branch)),
        *([("in some layers", Safe("; ".join(patterns_words(c))))] if patterns_words(c) else []),
        ("budget", budget),
        ("rule in training", code(c.selection)),
        ("rule at inference", _inference(facts)),
        *([] if c.phases == "all" else [("phases at inference", code(c.phases))]),
        ("trained parameters", "not known" if facts.parameters is None else f"{facts.parameters:,}"),
    ]
    return [row(["", ""]), row(["---", "---"]), *(row(cells) for cells in rows)]


def _memory(c: DepthRouteConfig) -> list[tuple[str, object]]:
    if not c.has_memory:
        return []
    hashes = f"{c.memory_heads} hashes of every order, {shortest_order(c)} to {c.ngram_order}"
    return [("table of a layer", Safe(f"{c.memory_slots:,} slots of {c.memory_width}")), ("n-grams", Safe(hashes))]


def _inference(facts: Facts) -> str:
    c = facts.config
    if GATES[c.gate].static:
        return "every token skips the routed layers"
    if GATES[c.gate].soft:
        return "the gate weighs the memory of every token, as in training"
    if c.fixed_threshold is not None:
        return f"score at or above {c.fixed_threshold:g}"
    rule = "the causal predictor" if c.causal_rule == "predictor" else "score at or above the layer's threshold"
    return f"{rule}; without a gate in the static layers" if c.static_layers else rule


def threshold_rows(facts: Facts) -> list[Safe]:
    """Layer by layer; the share on the text that they were fitted to, where it was recorded."""
    shares = facts.training.get("calibrated_full_ratio") or {}
    where = "training" if facts.training.get("calibrated_in") == "training" else "calibration"
    body = [
        (layer, _figure(value), _share(shares[str(layer)]) if str(layer) in shares else "not recorded")
        for layer, value in facts.thresholds.items()
    ]
    return _table(("layer", "threshold", f"share full in {where}"), body)


def loss_table(losses: Losses) -> tuple[Safe, list[Safe]]:
    """Table of losses: the text, then the base and every budget by both rules."""
    config = f", {code(losses.config)}" if losses.config else ""
    split = f", split {code(losses.split)}" if losses.split else ""
    size = f", {losses.blocks:,} blocks" if losses.blocks is not None else ""
    size += f" of {losses.length:,} tokens" if size and losses.length is not None else ""
    dense = losses.rows[0].loss
    body = [
        (
            _RULES.get(r.rule, clean(r.rule)), "-" if r.rule in ("dense", "fixed") else f"{r.budget:g}",
            f"{r.loss:.4f}", "" if r.rule == "dense" else f"{r.loss - dense:+.4f}",
            "-" if math.isinf(r.perplexity) else f"{r.perplexity:.3f}",
            _share(r.full_ratio), "" if r.gap is None else f"{r.gap:+.4f}",
        )
        for r in losses.rows
    ]  # fmt: skip
    head = ("rule", "budget", "loss", "against dense", "perplexity", "share full", "against top-k")
    return (Safe(f"On {code(shown_path(losses.dataset))}{config}{split}{size}."), _table(head, body))


def score_table(scores: Sequence[Score]) -> list[Safe]:
    """Task by task, dense first."""
    body = [
        (
            code(s.task) if first else "", code(s.metric) if first else "", code(s.condition), _figure(s.value),
            "" if s.stderr is None else _figure(s.stderr), "" if s.run == "dense" else f"{s.value - s.dense:+.4f}",
            _share(s.full_ratio), "" if s.documents is None else f"{s.documents:,}",
        )
        for _, group in groupby(scores, key=lambda s: (s.task, s.metric))
        for first, s in ((number == 0, s) for number, s in enumerate(group))
    ]  # fmt: skip
    head = ("task", "metric", "run", "value", "standard error", "against dense", "share full", "documents")
    return _table(head, body)


def bench_table(bench: tuple[Mapping[str, Any], Sequence[Speed]]) -> tuple[Safe, list[Safe]]:
    """The machine, then case by case and budget by budget."""
    machine, rows = bench
    known = {name: machine[name] for name in _MACHINE if machine.get(name) is not None}
    said = ", ".join(f"{'' if name == 'device' else f'{name} '}{code(value)}" for name, value in known.items())
    body = [
        (
            clean(r.case), f"{r.budget:g}", _share(r.full_ratio), f"{r.dense_ms:.2f}", f"{r.routed_ms:.2f}",
            f"{r.speedup:.3f}", "-" if r.eta is None else f"{r.eta:.2f}",
        )
        for r in rows
    ]  # fmt: skip
    head = ("case", "budget", "share full", "dense ms", "routed ms", "speed-up", "eta")
    return (Safe(f"Machine: {said}." if said else "The machine was not recorded."), _table(head, body))


def training(record: Mapping[str, Any], datasets: Sequence[str]) -> dict[str, Any]:
    """Template values about the training; None for values that were not recorded."""
    arguments = record.get("arguments") or {}
    command = record.get("command")
    shown = record.get("hyperparameters") or ({} if command else arguments)
    log = record.get("log_history") or ()
    return {
        "recorded": bool(record),
        "datasets": [code(shown_path(name)) for name in datasets],
        "config": arguments.get("dataset_name"),
        "split": arguments.get("split"),
        "examples": record.get("examples"),
        "command": command,
        "arguments": [
            Safe(f"{code(name)} {code(shown_path(str(value)))}")
            for name, value in shown.items()
            if value is not None and name not in _NOT_SHOWN
        ],
        "seconds": record.get("seconds"),
        "fit": _fitted(record.get("fit"), trained=bool(log)),
        "fit_layers": _fitted_layers(record.get("fit")),
        "last": _last(log, "loss"),
        "last_eval": _last(log, "eval_loss"),
        "versions": [Safe(f"{code(name)} {code(value)}") for name, value in (record.get("versions") or {}).items()],
    }


def _fitted(fit: Mapping[str, Any] | None, trained: bool) -> Safe | None:
    """Table of `fit_router`'s results on its held-out text, before any training."""
    if fit is None:
        return None
    loss = fit["loss"] if "loss" in fit else min(fit["loss_of_rounds"])  # older records have those alone
    prompts = fit.get("phases") == "prefill"
    kept = f"of a prompt's {_kept_of(fit)}, behind it" if prompts else "of all calls run in full"
    spread = ""
    if "share_of_rows" in fit:
        fewest, most = map(_share, fit["share_of_rows"])
        spread = f" ({fewest} to {most} in nine rows of ten)"
    said, verb = ("training started from a fit to", "was") if trained else ("fitted without training on", "is")
    return Safe(
        f"{said} {int(fit['tokens']):,} tokens; on text held out of it, the loss {verb} "
        f"{_figure(fit['loss_dense'])} dense and {_figure(loss)} with {_share(fit['keep'])} {kept}{spread}"
    )


def _fitted_layers(fit: Mapping[str, Any] | None) -> list[Safe]:
    """Layer by layer; the last column is the divergence that a layer's cheap tokens alone cause."""
    if fit is not None and fit.get("phases") == "prefill":
        saved = f"{_kept_of(fit)} saved"
        skipped = ("layer", "prompts skip", "width of the branch", saved, "branch R2", "nats, predicted")
        rows = (
            (code(index), code(layer["target"]), f"{layer['rank']:.0f}", _share(layer["saved"]),
             f"{layer['branch_r2']:.2f}", _figure(layer["nats"]))
            for index, layer in fit["layers"].items()
        )  # fmt: skip
        return _table(skipped, rows)
    head = ("layer", "share full when fitted", "branch R2", "gate R2", "nats alone")
    body = (
        (code(index), _share(layer["share"]), f"{layer['branch_r2']:.2f}", f"{layer['gate_r2']:.2f}",
         _figure(layer["nats"]))
        for index, layer in (fit or {}).get("layers", {}).items()
    )  # fmt: skip
    return _table(head, body)


def _kept_of(fit: Mapping[str, Any]) -> str:
    """The quantity that a fit for prompts keeps a share of."""
    return "time" if fit.get("keep_of") == "time" else "FLOPs"


def _last(log: Sequence[Mapping[str, Any]], name: str) -> Safe | None:
    """The last log entry with this loss, as `step 50: loss 1.2, ...`."""
    entry = next((entry for entry in reversed(log) if is_number(entry.get(name))), None)
    if entry is None:
        return None
    terms = [n for n in entry if n == name or str(n).startswith("loss_")]
    said = ", ".join(f"{code(n)} {_figure(entry[n])}" for n in terms if is_number(entry[n]))
    step = entry.get("step")
    return Safe(f"step {int(step):,}: {said}" if is_number(step) else said)


def _figure(value: float) -> str:
    return f"{value:.4f}"


def _share(value: float) -> str:
    return f"{float(value):.1%}"
