"""Outputs that the caller of a model asked for and that hooks below its decoder record: what they see has to be whole.

`output_attentions=True` and `output_router_logits=True` are served by hooks of transformers on the attention and on the
router of every layer. A part that is given some of the tokens only records those, or nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import output_capturing

RECORDER = output_capturing.__name__  # the module of those hooks
ATTENTIONS, ROUTER_LOGITS = "attentions", "router_logits"


def is_recorded(*names: str) -> bool:
    """Whether one of `names` is recorded in the forward pass that is running."""
    recorded = output_capturing._active_collector.get()
    return bool(recorded) and any(name in recorded for name in names)


@contextmanager
def unrecorded(name: str) -> Iterator[None]:
    """In this block `name` is not recorded, everything else is."""
    recorded = output_capturing._active_collector.get() or {}
    token = output_capturing._active_collector.set({key: kept for key, kept in recorded.items() if key != name})
    try:
        yield
    finally:
        output_capturing._active_collector.reset(token)
