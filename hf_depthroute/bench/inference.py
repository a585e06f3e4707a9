"""Measured time of a routed model against its dense base, in prefill and in decode.

    eta = (T_dense - T_routed) / (T_dense - T_ideal)
    T_ideal = T_dense * FLOPs_routed / FLOPs_dense

`eta` is 1 when every skipped FLOP shows on the clock. `T_dense` is the fastest of the modes
measured, and so is `T_routed`. All variants share one set of weights, one process and the same
tokens; their runs are interleaved in random order; times are medians over rounds, and ratios are
medians of each round's own ratio.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import Cache

from ..evaluation.flops import count_flops
from .cases import Case
from .modes import as_run, check_modes, fill_cache, new_cache, new_step, rewind_cache
from .timing import Estimate, Samples, interleave, seconds_of
from .variants import BASE, DISABLED, FULL, Variants, budget_name, count_passes

Key = tuple[str, str]  # variant, mode
Shares = Mapping[float, Mapping[int, tuple[float, float]]]  # by budget, `PassCounter.shares`
_LONG = 2.0  # seconds
_TELLING = 0.005  # an ideal saving below this share of the dense time gives no meaningful eta


def measure_inference(
    variants: Variants,
    case: Case,
    input_ids: torch.Tensor,
    also: Callable[[dict[str, object], Times, Shares], None] | None = None,
) -> dict[str, Any]:
    """Time every variant in every mode on prompts `[B, T]`, in decode with the tokens of its
    steps after them. `also` adds more to the result, by the shares that ran.

    Returns:
        A JSON-ready dict. `dense_ms` (per decoding step), `dense_mode`, `dense_modes`,
        `dense_error` (relative), `dense_tokens_per_s`; `follows_budget`; `disabled_over_base`;
        `overheads` of the adapter when disabled and at budget 1; `budgets` with for each
        `routed_ms`, `mode`, `ratio`, `ratio_error`, `speedup`, `eta`, `full_ratio`, `full_passes`,
        `flops_routed_over_dense` and `tokens_per_s`. Errors are standard errors of medians; an eta
        is None if the ideal saves nothing.
    """
    modes = check_modes(case.baselines, input_ids.device)
    runs = _Runs(variants, case, input_ids)
    keys = [(name, mode) for mode in modes for name in variants.names]
    with torch.no_grad():
        samples = interleave({key: runs.timer(*key) for key in keys}, case.rounds)
        shares = {budget: runs.shares(budget) for budget in variants.budgets}
    times = Times(variants, case, modes, samples)
    measured = _report(times, shares)
    if also is not None:
        also(measured, times, shares)
    return measured


@dataclass
class _Runs:
    """Runs a case as any variant in any mode; caches are filled once, and rewound after a run."""

    variants: Variants
    case: Case
    input_ids: torch.Tensor
    _caches: dict[tuple[str | None, str], Cache] = field(default_factory=dict)

    def timer(self, name: str, mode: str) -> Callable[[], float]:
        last = 0.0

        def seconds() -> float:
            nonlocal last
            with self._ready(name, mode) as (run, rewind):
                # What ran before leaves its mark on caches and on the allocator: run once untimed,
                # as in steady use. In a run of seconds the mark is lost.
                if last < _LONG:
                    run()
                    rewind()
                last = seconds_of(run, self.input_ids.device)
                rewind()
                return last

        return seconds

    def shares(self, budget: float) -> Mapping[int, tuple[float, float]]:
        with (
            self._ready(budget_name(budget), "eager") as (run, rewind),
            count_passes(self.variants.model) as counter,
        ):
            run()
            rewind()
        return counter.shares()

    @contextmanager
    def _ready(
        self, name: str, mode: str
    ) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
        """A function that runs the case, and one that brings the cache back to where it started."""
        with self.variants.using(name) as model:
            call = as_run(model, mode)
            cache = self._cache(name, mode, model)
            start = 0
            if self.case.decoded:
                start = self.case.length
            sizes = self.case.pass_sizes()
            tokens = self.input_ids[:, start:].split(sizes["length"], dim=1)
            how = {"past_key_values": cache, "use_cache": True, "logits_to_keep": sizes["logits"]}

            def run() -> None:
                for part in tokens:
                    new_step(mode)
                    logits = call(part, **how).logits
                    if self.case.decoded:
                        logits.argmax(-1)  # decoding looks at them, whatever is fed next

            def rewind() -> None:
                if cache is not None:
                    rewind_cache(cache, start)

            yield run, rewind

    def _cache(self, name: str, mode: str, model: nn.Module) -> Cache | None:
        """The cache that this variant starts from; None if each run makes its own."""
        if not self.case.decoded and mode == "eager":
            return None
        # Every variant decodes from the same keys and values, unless the cache holds decisions of
        # one variant.
        kind = "eager" if mode == "eager" else "static"
        key = (name if self.variants.keeps_sequences() else None, kind)
        if key not in self._caches:
            cache = new_cache(model, mode, self.input_ids.shape[1])
            fill_cache(model, cache, self.input_ids[:, : self.case.length])
            if not self.case.decoded:
                rewind_cache(cache, 0)
            self._caches[key] = cache
        return self._caches[key]


class Times:
    """The times of a case, by variant and mode, in the terms of a result.

    `dense` is the key of the dense model in its fastest mode.
    """

    def __init__(
        self, variants: Variants, case: Case, modes: Sequence[str], samples: Samples[Key]
    ) -> None:
        self.variants = variants
        self.case = case
        self.samples = samples
        self._modes = modes
        self._calls = case.decoded or 1
        self._tokens = case.batch * (case.decoded or case.length)
        self.dense = self._fastest(variants.reference)

    def _fastest(self, name: str) -> Key:
        return min(((name, mode) for mode in self._modes), key=self.samples.median)

    def ms(self, key: Key) -> float:
        """Milliseconds of a prompt, or of a decoding step."""
        return round(self.samples.median(key) * 1e3 / self._calls, 3)

    def tokens_per_s(self, key: Key) -> float:
        return round(self._tokens / self.samples.median(key), 1)

    def over_dense(self, name: str) -> Estimate:
        """The time of a variant in its fastest mode over that of the dense model."""
        return self.samples.ratio(self._fastest(name), self.dense)

    def row(self, name: str, label: str) -> dict[str, object]:
        """A variant's row of a result; its milliseconds are called after `label`."""
        key = self._fastest(name)
        ratio = self.over_dense(name)
        value, error = ratio.rounded()
        row = {
            f"{label}_ms": self.ms(key),
            "mode": key[1],
            "ratio": value,
            "ratio_error": error,
            "speedup": round(1 / ratio.value, 4),
            "tokens_per_s": self.tokens_per_s(key),
        }
        if len(self._modes) > 1:
            ratios = {mode: self.samples.ratio((name, mode), self.dense) for mode in self._modes}
            row["modes"] = {mode: round(found.value, 4) for mode, found in ratios.items()}
        return row

    def of_dense(self) -> dict[str, object]:
        """The part of a result about the dense model, and the adapter where nothing is skipped."""
        case = self.case
        dense = self.dense
        samples = self.samples
        error = samples.estimate(dense).error
        found: dict[str, Any] = {
            "batch": case.batch,
            "length": case.length,
            **({"steps": case.steps} if case.decoded else {"logits": case.logits}),
            "rounds": len(samples.seconds[dense]),
            "dense_ms": self.ms(dense),
            "dense_error": None if error is None else round(error / samples.median(dense), 4),
            "dense_mode": dense[1],
            "dense_modes": {mode: self.ms((dense[0], mode)) for mode in self._modes},
            "dense_tokens_per_s": self.tokens_per_s(dense),
            "follows_budget": self.variants.follows_budget,
            "overheads": {},
            "disabled_over_base": None,
        }
        if dense[0] == BASE:
            # In the mode that the dense model is fastest in, for like with like.
            for name in (DISABLED, FULL):
                if name not in self.variants.names:
                    continue
                value, error = samples.ratio((name, dense[1]), dense).rounded()
                found["overheads"][name] = {"ratio": value, "ratio_error": error, "mode": dense[1]}
            found["disabled_over_base"] = found["overheads"][DISABLED]["ratio"]
        return found


def _report(times: Times, shares: Shares) -> dict[str, Any]:
    variants = times.variants
    sizes = times.case.pass_sizes()
    dense_flops = sum(count_flops(variants.model, **sizes).values())
    budgets = {}
    for budget, layers in shares.items():
        name = budget_name(budget)
        ran = {index: rows for index, (rows, _) in layers.items()}
        with variants.using(name):
            ideal = sum(count_flops(variants.model, **sizes, shares=ran).values()) / dense_flops
        budgets[str(budget)] = times.row(name, "routed") | {
            "eta": eta_of(times.over_dense(name).value, ideal),
            "full_ratio": round(statistics.mean(ran.values()), 4),
            "full_passes": round(statistics.mean(passes for _, passes in layers.values()), 4),
            "flops_routed_over_dense": round(ideal, 4),
        }
    return times.of_dense() | {"budgets": budgets}


def eta_of(ratio: float, ideal: float) -> float | None:
    """`eta` of a time over dense time and its ideal; None if the ideal saves nothing."""
    if 1 - ideal >= _TELLING:
        return round((1 - ratio) / (1 - ideal), 4)
    return None
