"""Which draft is fastest: a short search over its budget, the blocks it leaves out,
and how far it runs ahead."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_depthroute.config.adapter import DepthRouteConfig
from hf_depthroute.inference.drafting import DraftCounter, draft_view, lossless_generate
from hf_depthroute.inference.importance import layer_importance, least_important
from hf_depthroute.routing.routing import Routing
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.trace import full_depth

BUDGETS = (0.25, 0.5, 1.0)
SHARES = (0.0, 0.25, 0.5)  # of the decoder layers, left out of the draft
LENGTHS = (2, 4, 8)
CONFIDENCES = (0.0, 0.5)


@dataclass
class DraftResult:
    """One draft and what it achieved. The first four are arguments of `draft_view`.

    Attributes:
        budget: None: the adapter's own, or no adapter.
        drop: Decoder layers left out.
        num_tokens: Tokens drafted at most before the full model looks.
        confidence: Probability below which a draft ends.
        acceptance_rate: Accepted share of the drafted tokens.
        tokens_per_pass: Tokens per forward pass of the full model.
        tokens_per_second: Over all prompts, prefill included; the median of the rounds.
        speedup: Against plain generation with the full model; the median of each round's own ratio.
        identical: Whether every output was that of plain generation, token for token.
    """

    budget: float | None
    drop: list[int]
    num_tokens: int
    confidence: float
    acceptance_rate: float = 0.0
    tokens_per_pass: float = 0.0
    tokens_per_second: float = 0.0
    speedup: float = 0.0
    identical: bool = True

    def arguments(self) -> dict[str, Any]:
        """For `draft_view`."""
        return {
            name: getattr(self, name) for name in ("budget", "drop", "num_tokens", "confidence")
        }


@dataclass
class DraftSearch:
    """The result of `search_draft`.

    Attributes:
        best: The fastest draft. Its `speedup` may be below 1: then plain generation is faster than
            every draft tried.
        table: The drafts of the last stage, fastest first, then those that did not come so far,
            fastest first. Times of different stages were not taken in the same rounds.
        plain_tokens_per_second: The speed of generation with the full model, in the same rounds.
    """

    best: DraftResult
    table: list[DraftResult]
    plain_tokens_per_second: float


@torch.no_grad()
def search_draft(
    model: Any,
    prompts: Iterable[torch.Tensor],
    *,
    max_new_tokens: int = 48,
    budgets: Sequence[float | None] | None = None,
    drops: Sequence[Sequence[int]] | None = None,
    lengths: Sequence[int] = LENGTHS,
    confidences: Sequence[float] = CONFIDENCES,
    rounds: int = 3,
    **kwargs: Any,
) -> DraftSearch:
    """Time drafts on a few prompts and return the fastest, greedily decoded.

    Two stages: every budget with every set of dropped blocks at the middle length; then the two
    best of these at all lengths and confidences. A round runs plain generation and each draft once,
    and every ratio is taken within its round. Nothing of the model is changed.

    Args:
        model: A routed model, or a plain one of a supported family, whose drafts then only leave
            blocks out.
        prompts: Token ids, `[1, T]` each. Two or three that look like what will be generated from.
        max_new_tokens: Per prompt.
        budgets: Draft budgets to try. Default: 0.25, 0.5 and 1, or the adapter's own rule where it
            takes no budget.
        drops: Sets of decoder layers to leave out. Default: none, and the quarter and the half that
            change the stream least on the full model's own continuations (`layer_importance`).
        lengths: Tokens drafted at most before the full model looks.
        confidences: Probabilities below which a draft ends.
        rounds: Timed rounds of each stage, after one that is not timed.
        **kwargs: For `generate`, such as `pad_token_id`.

    Raises:
        ValueError: There is no prompt, or nothing to try.
        ConfigError: A budget is not in (0, 1].
    """
    prompts = list(prompts)
    if not prompts:
        raise ValueError("search_draft: prompts is empty")
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False} | kwargs

    def generate_plainly() -> list[torch.Tensor]:
        with full_depth(model):
            return [model.generate(ids, **settings) for ids in prompts]

    texts = generate_plainly()
    if drops is None:
        importance = layer_importance(model, [{"input_ids": ids} for ids in texts], "block")
        counts = sorted({int(share * len(importance)) for share in SHARES})
        drops = [least_important(importance, count) for count in counts]
    adapters: list[DepthRouteConfig] = []  # by which a draft view of the model routes
    if any(isinstance(module, Routing) for module in model.modules()):
        chosen = [(routing, routing.chosen()) for routing in routings_of(model)]
        adapters = [routing.config(name) for routing, name in chosen if name is not None]
    if budgets is None:
        budgets = (
            BUDGETS if adapters and all(config.takes_budget() for config in adapters) else (None,)
        )
    shapes = [
        DraftResult(budget, sorted(drop), lengths[len(lengths) // 2], 0.0)
        for budget, drop in itertools.product(budgets, drops)
        # Else the draft is the full model.
        if drop or (adapters and (budget != 1.0 or adapters[0].static_layers))
    ]
    if not shapes:
        raise ValueError(
            "search_draft: nothing to try; the model has no depth-routed adapter and no block is "
            "dropped"
        )
    tried, _ = _measured(model, prompts, generate_plainly, shapes, rounds, settings)
    best_shapes = sorted(tried, key=lambda result: -result.speedup)[:2]
    finer = [
        DraftResult(shape.budget, shape.drop, length, confidence)
        for shape in best_shapes
        for length, confidence in itertools.product(lengths, confidences)
        if (length, confidence) != (shape.num_tokens, 0.0)
    ]
    # The best shapes run again, so that what is compared was measured in the same rounds.
    again = [DraftResult(**shape.arguments()) for shape in best_shapes]
    final, plain_speed = _measured(
        model, prompts, generate_plainly, again + finer, rounds, settings
    )
    final.sort(key=lambda result: -result.speedup)
    others = sorted(
        (result for result in tried if result not in best_shapes),
        key=lambda result: -result.speedup,
    )
    return DraftSearch(final[0], final + others, plain_speed)


def _measured(
    model: nn.Module,
    prompts: list[torch.Tensor],
    generate_plainly: Callable[[], list[torch.Tensor]],
    results: list[DraftResult],
    rounds: int,
    settings: dict[str, Any],
) -> tuple[list[DraftResult], float]:
    """`results` with their measurements filled in, and plain generation's tokens per second."""
    counters = [DraftCounter() for _ in results]
    drafts = [draft_view(model, **result.arguments()) for result in results]

    def generate_drafting(draft: Any, counter: DraftCounter) -> list[torch.Tensor]:
        return [
            lossless_generate(model, ids, draft=draft, counter=counter, **settings)
            for ids in prompts
        ]

    def clocked(generate: Any) -> tuple[float, list[torch.Tensor]]:
        start = time.perf_counter()
        outputs = generate()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start, outputs

    drafting = [functools.partial(generate_drafting, *pair) for pair in zip(drafts, counters)]
    timed = [
        [clocked(generate) for generate in (generate_plainly, *drafting)] for _ in range(rounds + 1)
    ]
    plain, *drafted = [outputs for _, outputs in timed[-1]]
    plain_seconds, *draft_seconds = zip(*([seconds for seconds, _ in row] for row in timed[1:]))
    new = sum(out.shape[1] - ids.shape[1] for out, ids in zip(plain, prompts))
    for result, counter, outputs, seconds in zip(results, counters, drafted, draft_seconds):
        made = sum(out.shape[1] - ids.shape[1] for out, ids in zip(outputs, prompts))
        result.acceptance_rate = counter.acceptance_rate
        result.tokens_per_pass = counter.tokens_per_pass
        result.tokens_per_second = made / statistics.median(seconds)
        result.speedup = (
            statistics.median(base / own for base, own in zip(plain_seconds, seconds)) * made / new
        )
        result.identical = all(torch.equal(one, two) for one, two in zip(plain, outputs))
    return results, new / statistics.median(plain_seconds)
