"""The routers' decisions, recorded per layer, and replayed.

Shapes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from ..base.distributed import each_of_all
from .routing import Routing
from .stack import routed_stack, routings_of, state_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class RouteRecord:
    """Decisions of one layer in one forward pass.

    With target experts, decisions are about pairs: mask, scores and probs are `[B, T, K]`, K the
    experts per token. A decision about a sequence stands at all of its positions; where it was made
    on an earlier call and is only remembered by the KV cache, scores and extras are NaN.

    Attributes:
        mask: Bool `[B, T]`, true where the token ran the full path; with target memory at every
            real token, times `p`.
        scores: Float32 `[B, T]`, `u`.
        probs: Float32 `[B, T]`, `p = sigmoid(u / tau)`; 1 at the last tokens that
            `phases="prefill"` runs in full.
        token_mask: Bool `[B, T]`, true at real tokens; None when the model was called without a 2D
            attention mask.
        budget: The budget in force; NaN with target memory, which has none.
        extras: What the gate adds, each `[B, T, ...]`; also reachable as attributes
            (`record.q_full`).
        temperature: `tau`; the default is that of `DepthRouteConfig`.
        threshold: What the scores were compared with, a float or `[]`; None if something else
            decided, such as top-k, a causal predictor or a replay.
        static: Whether the layer has no gate; its scores are 0.
    """

    mask: torch.Tensor
    scores: torch.Tensor
    probs: torch.Tensor
    token_mask: torch.Tensor | None
    budget: float
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    temperature: float = 2.0
    threshold: torch.Tensor | float | None = None
    static: bool = False

    def __getattr__(self, name: str) -> torch.Tensor:
        extras = self.__dict__.get("extras", {})
        if name in extras:
            return extras[name]
        raise AttributeError(
            f"this record has no {name!r}; it has mask, scores, probs, {', '.join(extras)}"
        )

    @property
    def real(self) -> torch.Tensor:
        """Bool, in the shape of `mask`: the real tokens."""
        if self.token_mask is None:
            return torch.ones_like(self.mask)
        if self.mask.ndim == 2:
            return self.token_mask
        return self.token_mask[..., None].expand_as(self.mask)


class RouteTrace(Mapping[int, RouteRecord]):
    """Layer index -> `RouteRecord`, of the last forward pass inside the `record_routes` block.

    A forward pass assigns by layer index, so a checkpoint's recomputation leaves the same trace. In
    generation each decoding step overwrites the one before; record the steps one by one and join
    them with `RouteTrace.cat`.

    Attributes:
        routings: The layers that are being recorded, in order; none of a trace that was made
            otherwise, or copied.
        with_graph: Whether forward passes without gradients are passed over, such as those of a
            reference.
        make_view: What `show` calls. A trace knows nothing of pages; `hf_depthroute.registration`
            sets it.
    """

    make_view: ClassVar[Callable[..., Any]]

    def __init__(
        self, records: Mapping[int, RouteRecord] | None = None, routings: Sequence[Routing] = ()
    ) -> None:
        self._records: dict[int, RouteRecord] = dict(records or {})
        self.routings = tuple(routings)
        self.with_graph = False

    def __reduce__(self) -> tuple[type[RouteTrace], tuple[dict[int, RouteRecord]]]:
        return RouteTrace, (self._records,)  # a copy, or a pickle, does not take the model with it

    def __getitem__(self, layer_index: int) -> RouteRecord:
        return self._records[layer_index]

    def __setitem__(self, layer_index: int, record: RouteRecord) -> None:
        if not self.with_graph or torch.is_grad_enabled():
            self._records[layer_index] = record

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._records))

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"RouteTrace(layers={list(self)})"

    def full_ratio(self) -> dict[int, float]:
        """`{layer_index: share of real tokens that ran full}`; 0 where there are none."""
        ratios = {}
        for index, record in self.items():
            real = record.real.sum()
            ratios[index] = float((record.mask & record.real).sum() / real.clamp(min=1))
        return ratios

    def gated(self) -> RouteTrace:
        """The trace of the layers that have a gate; of an adapter without gates, of all."""
        kept = {index: record for index, record in self.items() if not record.static}
        return RouteTrace(kept or self, self.routings)

    def positions(self, start: int, stop: int) -> RouteTrace:
        """The trace at positions `start:stop`, to replay a longer run piece by piece."""

        def cut(parts: list[torch.Tensor]) -> torch.Tensor:
            return parts[0][:, start:stop]

        return RouteTrace({index: _combined([record], cut) for index, record in self.items()})

    def show(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        input_ids: torch.Tensor | None = None,
        *,
        logits: torch.Tensor | None = None,
        prompt_length: int | None = None,
    ) -> Any:
        """The decisions as coloured text, with every layer's score and threshold;
        a notebook displays the result.

            trace.show(tokenizer, batch["input_ids"])

        Args:
            tokenizer: Makes text of `input_ids`; without it the ids are shown.
            input_ids: `[B, T]`, what the model was called with; without it the positions are shown.
            logits: `[B, T, V]`, the model's output; adds the loss of every token.
            prompt_length: Tokens before the generated ones, if text was generated.

        Returns:
            A `report.tokens.TokenView`: `_repr_html_` for notebooks, `save("page.html")` for
            everything else.

        Raises:
            ValueError: The trace is empty, or `input_ids` or `logits` do not have its shape.
        """
        return self.make_view(tokenizer, input_ids, logits=logits, prompt_length=prompt_length)

    @staticmethod
    def cat(traces: list[RouteTrace]) -> RouteTrace:
        """Join traces of consecutive positions, such as the steps of a generation."""
        join = partial(torch.cat, dim=1)
        return RouteTrace({i: _combined([trace[i] for trace in traces], join) for i in traces[0]})


class RouteCounter:
    """Tokens run full and tokens seen, per layer, summed over forward passes;
    the sums stay on the device."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[torch.Tensor | int, torch.Tensor | int]] = {}

    def __setitem__(self, layer_index: int, record: RouteRecord) -> None:
        full, seen = self._counts.get(layer_index, (0, 0))
        full = full + (record.mask & record.real).sum()
        self._counts[layer_index] = (full, seen + record.real.sum())

    def full_ratio(self) -> dict[int, float]:
        """`{layer_index: fraction of real tokens that ran full}`, over everything counted."""
        sums: dict[int, tuple[int, int]] = {}
        own = {index: (int(full), int(seen)) for index, (full, seen) in self._counts.items()}
        for counts in each_of_all(own):
            for index, (full, seen) in counts.items():
                others = sums.get(index, (0, 0))
                sums[index] = full + others[0], seen + others[1]
        return {index: full / max(seen, 1) for index, (full, seen) in sorted(sums.items())}


@contextmanager
def record_routes(model: nn.Module) -> Iterator[RouteTrace]:
    """Record what every routed layer of `model` decides.

    Works in training and in inference, on a `PeftModel`, its base model or any module around them.
    The output stays what it is, but for decoding on a CPU: there the general forward pass stands in
    for its fused steps, which round differently. In bfloat16 a decision close to its threshold may
    flip.

        with record_routes(model) as trace:
            model(**batch)
        trace[11].mask, trace.full_ratio()

    Raises:
        ValueError: `model` has no routed layer.
    """
    trace = RouteTrace(routings=routings_of(model))
    with state_of(model).override(recorders=(trace,)):
        yield trace


@contextmanager
def count_routes(model: nn.Module) -> Iterator[RouteCounter]:
    """Count what every routed layer of `model` decides in the block, over all forward passes.

    Raises:
        ValueError: `model` has no routed layer.
    """
    counter = RouteCounter()
    with state_of(model).override(recorders=(counter,)):
        yield counter


@contextmanager
def replay_routes(model: nn.Module, trace: RouteTrace) -> Iterator[None]:
    """Run `model` with the decisions of `trace` instead of its own; scores are still computed.

    With target memory these are the `probs`: a trace whose `probs` are all 0 forces the memory off.
    A layer that `trace` does not hold decides for itself.

    Raises:
        ValueError: `model` has no routed layer. A forward pass raises it when a mask does not have
            the input's shape.
    """
    with state_of(model).override(replay=trace):
        yield


def run_in_full(model: nn.Module, tokens: torch.Tensor) -> AbstractContextManager[None]:
    """Inside the block these tokens run in full with `phases="prefill"`, not the last ones.

    So a prompt and the text behind it are read in one forward pass, as they are served in several;
    in training, too. `tokens`, bool `[B, T]`, in the shape of the input, are the end of the prompt
    and all that stands behind it.

    Raises:
        ValueError: `model` has no routed layer. A forward pass raises it when `tokens` does not
            have its shape.
    """
    return state_of(model).override(in_full=tokens)


def full_depth(model: nn.Module) -> AbstractContextManager[None]:
    """Inside the block every layer of `model` runs in full; adapters of other methods stay on.

    Not its draft views.

    For the calling thread only: others that run the model meanwhile are routed as ever.
    """
    stack = routed_stack(model)
    if stack is None:
        return nullcontext()
    return stack.state.override(layers=frozenset())


def _combined(
    records: Sequence[RouteRecord], combine: Callable[[list[torch.Tensor]], torch.Tensor]
) -> RouteRecord:
    """One record whose tensors are those of `records`, put together by `combine`."""
    known = any(record.token_mask is not None for record in records)
    masks = [
        r.mask.new_ones(r.mask.shape[:2]) if r.token_mask is None else r.token_mask for r in records
    ]
    names = records[0].extras
    return replace(
        records[0],
        mask=combine([record.mask for record in records]),
        scores=combine([record.scores for record in records]),
        probs=combine([record.probs for record in records]),
        token_mask=combine(masks) if known else None,
        extras={name: combine([record.extras[name] for record in records]) for name in names},
    )
