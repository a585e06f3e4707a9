"""Data of a routed model's page, measured on text: scores and decisions per layer, counted cost,
token views.

Shapes: B batch, T positions.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..data.batches import model_inputs, prompts_of
from ..data.prompts import pad_id_of
from ..evaluation.cost import route_cost
from ..evaluation.served import as_base, read_behind_prompts, read_generated
from ..inference.calibration import active_routings, set_budget
from ..inference.restoring import restored
from ..routing.trace import RouteRecord, RouteTrace, record_routes
from .tokens import losses_by_position, run_data

BINS = 40
PARTS = ("prefill", "decode")


@dataclass(frozen=True)
class LayerScores:
    """Decisions of one layer at one budget, with a histogram of their scores."""

    threshold: float | None  # that scores were compared with; None if something else decided
    full_ratio: float  # share of real tokens that ran full
    edges: list[float]  # borders of the `BINS` bins, the same at every budget; NaN is in none
    full: list[int]  # decisions per bin that ran full
    skipped: list[int]  # and those that did not
    static: bool = False  # has no gate, unlike others

    def quartiles(self) -> list[float | None]:
        """Quartiles of the scores, from the histogram: each bin's middle, weighted by its count."""
        bins = zip(self.edges, self.edges[1:], self.full, self.skipped)
        values = [(a + b) / 2 for a, b, full, skipped in bins for _ in range(full + skipped)]
        if len(values) < 2:
            return [None] * 3
        return [*statistics.quantiles(values, n=4)]


@dataclass(frozen=True)
class BudgetCost:
    """Counted cost of one forward pass at the shares that ran full, in FLOPs.

    `rest + full + overhead + saved` is `dense`, the base model's; `charts.COST_PARTS` says what
    each is. `saved` is negative where routers and branches cost more than they save.
    """

    dense: float
    rest: float
    full: float
    overhead: float
    saved: float

    @property
    def computed(self) -> float:
        """The share of the dense model's arithmetic."""
        return 1 - self.saved / self.dense


@dataclass
class RunReport:
    """The data of a routed model's page. All lists about budgets are in the order of `budgets`."""

    title: str
    facts: list[tuple[str, str]]  # what was measured on what
    rows: Sequence[Mapping[str, Any]]  # those of `hf-depthroute eval --out`
    budgets: list[float]  # ascending; the single one of an adapter that follows no budget
    follows_budget: bool
    scores: list[dict[int, LayerScores]]  # per budget, by layer
    costs: list[BudgetCost]
    cost_shape: tuple[int, int]  # sequences and tokens per sequence that `costs` are of
    tokens: dict[str, Any]  # as `TokenView.data`; each text has a run per budget
    bench: Mapping[str, Any] | None = None  # as `hf-depthroute bench --out`; None: not measured
    notes: list[str] = field(default_factory=list)  # for the reader
    weighs: bool = False  # every token runs in full, and gates weigh what is added (a memory)
    # the decision of the routers, in words
    decides: str = "for every token whether it runs the full layer."
    undecided: str = ""  # the tokens that skip without a decision, in words

    @property
    def names(self) -> list[str]:
        """Labels of the budgets."""
        if self.follows_budget:
            return [f"{budget:g}" for budget in self.budgets]
        return ["fixed"]

    def labels(self, start: str) -> list[str]:
        """The labels, each after `start`."""
        return [start + name for name in self.names]

    @property
    def start(self) -> int:
        """Position of the budget that the page starts with: the one nearest to one half."""
        return min(range(len(self.budgets)), key=lambda number: abs(self.budgets[number] - 0.5))

    @property
    def dense(self) -> Mapping[str, Any]:
        return next(row for row in self.rows if row["rule"] == "dense")

    def gated(self, number: int) -> dict[int, LayerScores]:
        """Those of `scores` at one budget that have a gate, or all where none has one."""
        return {index: layer for index, layer in self.scores[number].items() if not layer.static}

    def share_full(self, number: int) -> float:
        """The share of decisions for full at one budget, mean over the layers with a gate."""
        return statistics.fmean(layer.full_ratio for layer in self.gated(number).values())

    @property
    def has_thresholds(self) -> bool:
        """Whether scores were compared with thresholds."""
        return any(layer.threshold is not None for layer in self.scores[0].values())

    @property
    def routed(self) -> list[Mapping[str, Any]]:
        """The rows of the inference rule, one per budget."""
        followed = [row for row in self.rows if row["rule"] in ("threshold", "fixed")]
        return [next(r for r in followed if r["budget"] == budget) for budget in self.budgets]

    def timed(self, part: str) -> Mapping[str, Mapping[str, Any]]:
        """Measured rows of prefill or decode, by the budget's number as text."""
        measured: Mapping[str, Any] = (self.bench or {}).get(part, {})
        return measured.get("budgets", {})

    @property
    def is_timed(self) -> bool:
        return any(map(self.timed, PARTS))


@dataclass(frozen=True)
class Sample:
    """A text for the token view."""

    label: str  # that the reader can choose it by
    input_ids: torch.Tensor  # [T]
    new_tokens: int = 0  # to generate after it, at every budget by itself


@torch.no_grad()
def collect_scores(
    model: torch.nn.Module, batches: Sequence[Mapping[str, torch.Tensor]], budgets: Sequence[float]
) -> list[dict[int, LayerScores]]:
    """Scores and decisions of every routed layer over `batches`, as `model_inputs` takes them, per
    budget, by the causal rule. The model, a `PeftModel` in eval mode, is left as it was."""
    found = []
    with restored(model):
        for budget in budgets:
            _set_budget(model, budget)
            traces = []
            for inputs in model_inputs(model, batches):
                with record_routes(model) as trace:
                    model(**inputs, use_cache=False)
                traces.append(trace)
            found.append({i: _joined([trace[i] for trace in traces]) for i in traces[0]})
    edges = {index: _edges(torch.cat([layers[index][1] for layers in found])) for index in found[0]}
    gated = traces[0].gated()
    return [
        {i: _layer_scores(*layers[i], edges[i], static=i not in gated) for i in layers}
        for layers in found
    ]


def _joined(records: Sequence[RouteRecord]) -> tuple[RouteRecord, torch.Tensor, torch.Tensor]:
    """The first record, and the scores and decisions of all, without padding."""
    scores = torch.cat([record.scores[record.real].float().cpu() for record in records])
    return records[0], scores, torch.cat([record.mask[record.real].cpu() for record in records])


def count_costs(
    model: torch.nn.Module,
    scores: Sequence[Mapping[int, LayerScores]],
    batch_size: int,
    length: int,
) -> list[BudgetCost]:
    """The cost of one prompt pass at the measured shares, all logits computed."""
    size: dict[str, int] = {"batch_size": batch_size, "length": length, "logits_to_keep": length}
    costs = []
    for layers in scores:
        shares = {index: layer.full_ratio for index, layer in layers.items()}
        at = route_cost(model, full_ratio=shares, **size)
        none = route_cost(model, full_ratio=dict.fromkeys(layers, 0.0), **size)
        costs.append(
            BudgetCost(
                dense=at.flops_dense,
                rest=none.flops_ideal,
                full=at.flops_ideal - none.flops_ideal,
                overhead=at.flops_routed - at.flops_ideal,
                saved=at.flops_dense - at.flops_routed,
            )
        )
    return costs


@torch.no_grad()
def collect_tokens(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sample],
    budgets: Sequence[float],
) -> dict[str, Any]:
    """The token view's data: every sample at every budget, with routed and dense losses.

    A sample with new tokens is continued greedily. Then its decisions are recorded in passes that
    decide as decoding did. Where prompts alone are routed, the first two thirds of any other sample
    are a prompt.
    """
    follows = active_routings(model)[0].active_config().takes_budget()
    texts: list[dict[str, Any]] = [{"label": sample.label, "runs": []} for sample in samples]
    last: RouteTrace | None = None
    with restored(model):
        for budget in budgets:
            _set_budget(model, budget)
            for sample, text in zip(samples, texts):
                prompt = sample.input_ids[None].to(model.device)
                ids = _continued(model, tokenizer, prompt, sample.new_tokens)
                read = prompt.shape[1] if sample.new_tokens else None
                if read is None and active_routings(model)[0].active_config().phases == "prefill":
                    last, logits = read_behind_prompts(model, {"input_ids": ids})
                    read = int(prompts_of({"input_ids": ids})[0].sum())
                else:
                    last, logits = _decided(model, ids, prompt.shape[1])
                with as_base(model):
                    dense = model(ids, use_cache=False).logits
                run = run_data(
                    last,
                    0,
                    tokenizer,
                    ids[0].tolist(),
                    loss=losses_by_position(logits, ids)[0],
                    dense_loss=losses_by_position(dense, ids)[0],
                    prompt_length=read,
                )
                text["runs"].append(run | {"budget": float(budget) if follows else None})
    if last is None:
        raise ValueError("collect_tokens: there is no sample, or no budget")
    return {"layers": list(last), "texts": texts}


def _continued(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompt: torch.Tensor, new_tokens: int
) -> torch.Tensor:
    if not new_tokens:
        return prompt
    ids: torch.Tensor = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=pad_id_of(tokenizer),
    )
    return ids


def _decided(
    model: torch.nn.Module, ids: torch.Tensor, prompt: int
) -> tuple[RouteTrace, torch.Tensor]:
    """The decisions about `ids` `[1, T]` and the logits, as generated behind the prompt."""
    traces = []
    logits = []
    with record_routes(model) as trace:
        for out in read_generated(model, ids, prompt):
            traces.append(RouteTrace(trace))
            logits.append(out.logits)
    return RouteTrace.cat(traces), torch.cat(logits, dim=1)


def _set_budget(model: torch.nn.Module, budget: float) -> None:
    """An adapter that follows no budget runs as it is."""
    if active_routings(model)[0].active_config().takes_budget():
        set_budget(model, budget)


def _edges(scores: torch.Tensor) -> torch.Tensor:
    """Borders of the bins; the outer ones take in the outermost 0.1 % on either side."""
    known = scores[scores.isfinite()]
    if not len(known):
        return torch.linspace(0, 1, BINS + 1)

    def quantile(share: float) -> float:
        place = max(1, min(len(known), round(share * len(known))))
        return float(known.kthvalue(place).values)

    low = quantile(0.001)
    return torch.linspace(low, max(quantile(0.999), low + 1e-3), BINS + 1)


def _layer_scores(
    record: RouteRecord, scores: torch.Tensor, mask: torch.Tensor, edges: torch.Tensor, static: bool
) -> LayerScores:
    known = ~scores.isnan()
    place = (torch.bucketize(scores, edges, right=True) - 1).clamp(0, BINS - 1)
    full, skipped = (
        torch.bincount(place[known & chosen], minlength=BINS).tolist() for chosen in (mask, ~mask)
    )
    threshold = None
    if record.threshold is not None:
        threshold = float(record.threshold)
    return LayerScores(threshold, float(mask.float().mean()), edges.tolist(), full, skipped, static)
