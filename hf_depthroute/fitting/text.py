"""The text that a router is fitted on: what is held out, and each process's share.

Shapes: R rows.
"""

from __future__ import annotations

import warnings

import torch

from ..base.distributed import own_share
from ..data.batches import token_mask

Batches = list[dict[str, torch.Tensor]]
_FEWEST = 512  # tokens to fit on, at least
_ENOUGH = 10_000  # tokens to fit on; with fewer, a line says so


class FitWarning(UserWarning):
    """A fit that may be worse than it could be."""


def warn_if_few(tokens: int, stacklevel: int, seen: str = "") -> None:
    """Warn where `tokens` are few to fit on; `seen` says what was seen with few."""
    if tokens < _ENOUGH:
        warnings.warn(
            f"fit_router: {tokens:,} tokens to fit on are few{seen}; give it more than {_ENOUGH:,}",
            FitWarning,
            stacklevel=stacklevel + 1,
        )


def tokens_of(batches: Batches) -> int:
    """Real tokens of all rows."""
    return sum(int(token_mask(batch).sum()) for batch in batches)


def tokens_to_fit(text: Batches, caller: str) -> int:
    """`tokens_of` the text to fit on; `ValueError` where that is too little for `caller`."""
    tokens = tokens_of(text)
    if tokens < _FEWEST:
        raise ValueError(
            f"{caller}: batches holds {tokens} tokens to fit on; {_FEWEST} is the least"
        )
    return tokens


def split(batches: Batches) -> tuple[Batches, Batches]:
    """`(to fit on, held out)`: every fifth row, of fewer the last; one row alone is both."""
    sizes = [len(batch["input_ids"]) for batch in batches]
    if sum(sizes) < 2:
        return batches, batches
    held = torch.arange(sum(sizes)) % min(5, sum(sizes)) == min(5, sum(sizes)) - 1
    return _taken(batches, ~held), _taken(batches, held)


def _taken(batches: Batches, rows_R: torch.Tensor) -> Batches:
    """The rows in a bool mask over those of all batches, in batches as they were."""
    parts = zip(batches, rows_R.split([len(batch["input_ids"]) for batch in batches]))
    return [
        {n: v[part.to(v.device)] for n, v in batch.items()} for batch, part in parts if part.any()
    ]


def own_part(batches: Batches) -> Batches:
    """This process's share of the rows."""
    own_R = torch.zeros(sum(len(batch["input_ids"]) for batch in batches), dtype=torch.bool)
    own_R[own_share(len(own_R))] = True
    return _taken(batches, own_R)


def first_tokens(batches: Batches, count: int) -> Batches:
    """The first rows, in batches as they were, with about `count` positions."""
    found: Batches = []
    for batch in batches:
        rows, length = batch["input_ids"].shape
        taken = min(rows, -(-count // length))
        if taken > 0:
            found += [{name: value[:taken] for name, value in batch.items()}]
        count -= taken * length
    return found


def positions(batches: Batches) -> int:
    return sum(batch["input_ids"].numel() for batch in batches)
