"""One input in pieces, with a cache that lives on between them, and in one pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from peft import PeftModel
from protocol import gap, take
from transformers import DynamicCache, StaticCache

from hf_depthroute.routing.trace import RouteTrace, record_routes, replay_routes

LENGTH = 12
Run = tuple[torch.Tensor, RouteTrace]


@torch.no_grad()
def run(model: PeftModel, pinned: RouteTrace | None = None, **inputs: object) -> Run:
    """One forward pass, free or with the decisions of `pinned`.

    Inside `disable_adapter`, the trace is empty.
    """
    with record_routes(model) as trace:
        if pinned is None:
            logits = model(**inputs).logits
        else:
            with replay_routes(model, pinned):
                logits = model(**inputs).logits
    return logits, trace


class Session:
    """A generation in progress: pieces of one input, run with a cache that lives
    on between them."""

    def __init__(
        self,
        model: PeftModel,
        ids: torch.Tensor,
        cache: DynamicCache | StaticCache,
        pinned: RouteTrace | None,
    ):
        self.model, self.ids, self.cache, self.pinned = model, ids, cache, pinned
        self.logits: list[torch.Tensor] = []
        self.traces: list[RouteTrace] = []

    def step(
        self, start: int, stop: int, rows: torch.Tensor | None = None, keep: bool = True
    ) -> None:
        """Run positions `start:stop`; row `i` of the cache holds sequence `rows[i]`."""
        batch = len(self.ids)
        rows = torch.arange(batch) if rows is None else rows
        pinned = None if self.pinned is None else take(self.pinned.positions(start, stop), rows)
        ids = self.ids[rows, start:stop]
        logits, trace = run(
            self.model, pinned, input_ids=ids, past_key_values=self.cache, use_cache=True
        )
        if keep:
            back = torch.stack([(rows == row).nonzero()[0, 0] for row in range(batch)])
            self.logits.append(logits[back])
            self.traces.append(take(trace, back))


def in_one_piece(session: Session) -> None:
    session.step(0, LENGTH)


def token_by_token(session: Session) -> None:
    for position in range(LENGTH):
        session.step(position, position + 1)


def in_chunks(session: Session) -> None:
    for start, stop in ((0, 5), (5, 6), (6, 10), (10, LENGTH)):
        session.step(start, stop)


def after_crop(session: Session) -> None:
    session.step(0, 6)
    session.step(6, 10, keep=False)
    session.cache.crop(-4)
    session.step(6, LENGTH)


def after_beam_reorder(session: Session) -> None:
    session.step(0, 6)
    rows = torch.tensor([2, 0, 1])
    session.cache.reorder_cache(rows)
    session.step(6, 8, rows)
    session.cache.reorder_cache(rows)
    session.step(8, LENGTH, rows[rows])


def after_batch_repeat_and_select(session: Session) -> None:
    session.step(0, 7)
    session.cache.batch_repeat_interleave(2)
    session.cache.batch_select_indices(torch.tensor([1, 3, 4]))
    session.step(7, LENGTH)


CONTINUATIONS: dict[str, tuple[Callable[[Session], None], str]] = {
    "dynamic cache, one piece": (in_one_piece, "dynamic"),
    "dynamic cache, token by token": (token_by_token, "dynamic"),
    "dynamic cache, chunks": (in_chunks, "dynamic"),
    "static cache, token by token": (token_by_token, "static"),
    "static cache, chunks": (in_chunks, "static"),
    "crop": (after_crop, "dynamic"),
    "beam reorder": (after_beam_reorder, "dynamic"),
    "batch repeat and select": (after_batch_repeat_and_select, "dynamic"),
}


def new_cache(model: PeftModel, kind: str) -> DynamicCache | StaticCache:
    return (
        StaticCache(config=model.config, max_cache_len=16)
        if kind == "static"
        else DynamicCache(config=model.config)
    )


def continued(
    model: PeftModel, ids: torch.Tensor, name: str, pinned: RouteTrace | None = None
) -> Run:
    walk, kind = CONTINUATIONS[name]
    session = Session(model, ids, new_cache(model, kind), pinned)
    walk(session)
    return torch.cat(session.logits, dim=1), RouteTrace.cat(session.traces)


def base_gap(model: PeftModel, ids: torch.Tensor, name: str) -> float:
    """The gap that the base model has in the same comparison."""
    walk, kind = CONTINUATIONS[name]
    with torch.no_grad(), model.disable_adapter():
        whole = model(ids).logits
        session = Session(model, ids, new_cache(model, kind), None)
        walk(session)
        return gap(torch.cat(session.logits, dim=1), whole)
