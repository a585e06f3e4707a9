"""Measured time of a routed model against its dense base, in prefill and in decode.

    eta = (T_dense - T_routed) / (T_dense - T_ideal),   T_ideal = T_dense * FLOPs_routed / FLOPs_dense

`eta` is 1 when every skipped FLOP shows on the clock. `T_dense` is the fastest of the modes measured, and so is
`T_routed`. All variants share one set of weights, one process and the same tokens; their runs are interleaved in random
order; times are medians over rounds, and ratios are medians of each round's own ratio.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..evaluation.flops import count_flops
from .modes import as_run, check_modes, fill_cache, new_cache, new_step, rewind_cache
from .timing import Estimate, Samples, interleave, seconds_of
from .variants import BASE, DISABLED, FULL, LEFT_OUT, Variants, budget_name, count_passes, masked_name, tuned_name

Key = tuple[str, str]  # variant, mode
Shares = Mapping[float, Mapping[int, tuple[float, float]]]  # by budget, what `PassCounter.shares` says
_LONG = 2.0  # seconds
_TELLING = 0.005  # an ideal saving below this share of the dense time gives no meaningful eta


@dataclass(frozen=True)
class Workload:
    """The work to time: a prompt, or given tokens one by one after a prompt.

    Attributes:
        input_ids: `[B, T]`; in decode the prompt, then the tokens.
        steps: Decoding steps; 0 for prefill.
        logits: `"all"` positions of a prompt go through the LM head, or the `"last"`.
    """

    input_ids: torch.Tensor
    steps: int = 0
    logits: str = "all"

    @property
    def batch(self) -> int:
        return len(self.input_ids)

    @property
    def prompt(self) -> int:
        """Tokens per sequence before the decoding steps."""
        return self.input_ids.shape[1] - self.steps

    def sizes(self) -> dict[str, Any]:
        """The sizes of one timed forward pass, as `count_flops` takes them; in decode the middle one's."""
        if self.steps:
            return {"batch": self.batch, "length": 1, "cached": self.prompt + self.steps // 2, "logits": 1}
        kept = self.prompt if self.logits == "all" else 1
        return {"batch": self.batch, "length": self.prompt, "cached": 0, "logits": kept}


def measure_inference(
    variants: Variants,
    workload: Workload,
    *,
    modes: Sequence[str] | None = None,
    rounds: int = 15,
    also: Callable[[dict[str, Any], Variants, Workload, Shares], None] | None = None,
) -> dict[str, Any]:
    """Time every variant in every mode.

    Args:
        variants: The variants of one model.
        workload: Prefill or decode.
        modes: Some of `MODES`. Default: eager on CPUs, all on GPUs.
        rounds: Each times every variant and mode once.
        also: Adds more to the result, by the shares that ran.

    Returns:
        A JSON-ready dict. `dense_ms` (per decoding step), `dense_mode`, `dense_modes`, `dense_error` (relative),
        `dense_tokens_per_s`; `disabled_over_base`; `overheads` of the adapter when disabled and at budget
        1; `without_ffns`, the dense time's ratio when the routed FFNs are left out; `budgets` with for each
        `routed_ms`, `mode`, `ratio`, `ratio_error`, `speedup`, `eta`, `eta_free` (of a router that
        costs nothing and saves each skipped token's share of the FFNs' time), `full_ratio`, `full_passes`,
        `flops_routed_over_dense` and `tokens_per_s`; `masked` and `tuned` with the same times for the
        mask-after-compute router and the chosen executors. Errors are standard errors of medians; an eta is None if
        the ideal saves nothing or it was not measured.

    Raises:
        ValueError: A mode is unknown.
    """
    device = workload.input_ids.device
    modes = check_modes(modes, device)
    runs = _Runs(variants, workload)
    # Without its FFNs the base would be one more model to compile, for a bound only.
    keys = [(name, mode) for mode in modes for name in variants.names]
    keys += [(LEFT_OUT, mode) for mode in modes if variants.leaves_out and mode != "compiled"]
    with torch.no_grad():
        samples = interleave({key: runs.timer(*key) for key in keys}, rounds)
        shares = {budget: runs.shares(budget) for budget in variants.budgets}
    measured = _report(variants, workload, modes, samples, shares)
    if also is not None:
        also(measured, variants, workload, shares)
    return measured


class _Runs:
    """Runs a workload as any variant in any mode. Caches are filled once, and rewound after each run."""

    def __init__(self, variants: Variants, workload: Workload) -> None:
        self.variants, self.workload = variants, workload
        self._caches: dict[Any, Any] = {}

    def timer(self, name: str, mode: str) -> Callable[[], float]:
        last = 0.0

        def seconds() -> float:
            nonlocal last
            device = self.workload.input_ids.device
            with self._ready(name, mode) as (run, rewind):
                # What ran before leaves its mark on caches and on the allocator: run once untimed, as in steady use.
                # In a run of seconds the mark is lost.
                if last < _LONG:
                    run()
                    rewind()
                last = seconds_of(run, device)
                rewind()
                return last

        return seconds

    def shares(self, budget: float) -> Mapping[int, tuple[float, float]]:
        """The shares that ran, from `PassCounter.shares`."""
        with self._ready(budget_name(budget), "eager") as (run, rewind), count_passes(self.variants.model) as counter:
            run()
            rewind()
        return counter.shares()

    @contextmanager
    def _ready(self, name: str, mode: str) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
        """A function that runs the workload, and one that brings the cache back to where it started."""
        work = self.workload
        with self.variants.using(name) as model:
            call = as_run(model, mode)
            cache = self._cache(name, mode, model)
            tokens = work.input_ids[:, work.prompt :].split(1, dim=1) if work.steps else (work.input_ids,)
            start = work.prompt if work.steps else 0
            kept = work.sizes()["logits"]

            def run() -> None:
                kwargs = {"past_key_values": cache} if cache is not None else {}
                for part in tokens:
                    new_step(mode)
                    logits = call(part, use_cache=True, logits_to_keep=kept, **kwargs).logits
                    if work.steps:
                        logits.argmax(-1)  # decoding looks at them, whatever is fed next

            def rewind() -> None:
                if cache is not None:
                    rewind_cache(cache, start)

            yield run, rewind

    def _cache(self, name: str, mode: str, model: nn.Module) -> Any:
        """The cache that this variant starts from; None if each run makes its own."""
        work = self.workload
        if not work.steps and mode == "eager":
            return None
        # Every variant decodes from the same keys and values, unless the cache holds decisions of one variant.
        key = (name if self.variants.keeps_sequences() else None, "eager" if mode == "eager" else "static")
        if key not in self._caches:
            cache = new_cache(model, mode, work.input_ids.shape[1])
            fill_cache(model, cache, work.input_ids[:, : work.prompt])
            if not work.steps:
                rewind_cache(cache, 0)
            self._caches[key] = cache
        return self._caches[key]


def _report(
    variants: Variants,
    work: Workload,
    modes: Sequence[str],
    samples: Samples[Key],
    shares: Shares,
) -> dict[str, Any]:
    per, tokens = max(1, work.steps), work.batch * (work.steps or work.prompt)
    reference = variants.reference

    def fastest(name: str) -> Key:
        return min(((name, mode) for mode in modes), key=samples.median)

    dense = fastest(reference)
    seconds = samples.median(dense)
    sizes = work.sizes()
    dense_flops = sum(count_flops(variants.model, **sizes).values())

    def timed(name: str, label: str) -> tuple[dict[str, Any], Estimate]:
        key = fastest(name)
        ratio = samples.ratio(key, dense)
        value, error = ratio.rounded()
        part = {
            f"{label}_ms": round(samples.median(key) * 1e3 / per, 3),
            "mode": key[1],
            "ratio": value,
            "ratio_error": error,
            "speedup": round(1 / ratio.value, 4),
            "tokens_per_s": round(tokens / samples.median(key), 1),
        }
        if len(modes) > 1:
            part["modes"] = {mode: round(samples.ratio((name, mode), dense).value, 4) for mode in modes}
        return part, ratio

    dense_error = samples.estimate(dense).error
    part: dict[str, Any] = {
        "batch": work.batch,
        "length": work.prompt,
        **({"steps": work.steps} if work.steps else {"logits": work.logits}),
        "rounds": len(samples.seconds[dense]),
        "dense_ms": round(seconds * 1e3 / per, 3),
        "dense_error": None if dense_error is None else round(dense_error / seconds, 4),
        "dense_mode": dense[1],
        "dense_modes": {mode: round(samples.median((reference, mode)) * 1e3 / per, 3) for mode in modes},
        "dense_tokens_per_s": round(tokens / seconds, 1),
        "overheads": {},
        "disabled_over_base": None,
        "without_ffns": None,
        "budgets": {},
        "masked": {},
        "tuned": {},
    }
    if reference == BASE:
        for name in (DISABLED, FULL):  # in the mode that the dense model is fastest in, for like with like
            if name not in variants.names:
                continue
            value, error = samples.ratio((name, dense[1]), dense).rounded()
            part["overheads"][name] = {"ratio": value, "ratio_error": error, "mode": dense[1]}
        part["disabled_over_base"] = part["overheads"][DISABLED]["ratio"]
    left_out = None
    if (LEFT_OUT, dense[1]) in samples.seconds:
        left_out = samples.ratio((LEFT_OUT, dense[1]), dense).value
        part["without_ffns"] = round(left_out, 4)
    for budget, layers in shares.items():
        row, ratio = timed(budget_name(budget), "routed")
        ran = {index: rows for index, (rows, _) in layers.items()}
        with variants.using(budget_name(budget)):
            routed_flops = sum(count_flops(variants.model, **sizes, shares=ran).values())
        ideal = routed_flops / dense_flops
        share = statistics.mean(ran.values())
        row |= {
            "eta": eta_of(ratio.value, ideal),
            "eta_free": None if left_out is None else eta_of(share + (1 - share) * left_out, ideal),
            "full_ratio": round(share, 4),
            "full_passes": round(statistics.mean(passes for _, passes in layers.values()), 4),
            "flops_routed_over_dense": round(ideal, 4),
        }
        part["budgets"][str(budget)] = row
        if masked_name(budget) in variants.names:
            part["masked"][str(budget)], masked = timed(masked_name(budget), "masked")
            part["masked"][str(budget)]["eta"] = eta_of(masked.value, ideal)
        if budget in variants.chosen:  # layers may have turned routing off, so there is no eta
            part["tuned"][str(budget)], _ = timed(tuned_name(budget), "tuned")
            part["tuned"][str(budget)]["executors"] = variants.chosen[budget]
    return part


def eta_of(ratio: float, ideal: float) -> float | None:
    """`eta` of a time over dense time and its ideal, 4 digits; None if the ideal saves nothing to speak of."""
    return round((1 - ratio) / (1 - ideal), 4) if 1 - ideal >= _TELLING else None
