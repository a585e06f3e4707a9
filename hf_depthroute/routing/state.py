"""`RunState`: how forward passes of a model run at this moment, beyond what its adapters say; never saved."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trace import RouteCounter, RouteTrace


@dataclass(frozen=True)
class RunSettings:
    """Settings of the forward passes of one thread.

    Attributes:
        layers: Indices of the layers that may be routed, the others run as the base does; None for all. Empty: the
            whole model runs at full depth.
        recorders: Traces and counters that want to know what is decided.
        replay: Decisions to use instead of the model's own.
        selection: Overrides the rule in training and inference: `"topk"` or `"threshold"`.
        executor: How inference runs the routed part: `"auto"`, or a row of `execution.executors.EXECUTORS`.
        observed: What losses want to know of the paths, in training: `"similarity"`, `"missed"`.
        budget: Overrides the adapter's budget and a training schedule's.
    """

    layers: frozenset[int] | None = None
    recorders: tuple[RouteTrace | RouteCounter, ...] = ()
    replay: RouteTrace | None = None
    selection: str | None = None
    executor: str = "auto"
    observed: tuple[str, ...] = ()
    budget: float | None = None


class RunState:
    """The settings of one model, shared by its routed layers.

    An override belongs to the thread that made it, as `torch.no_grad` does: other threads that run the model at the
    same time neither see nor end it, and a thread that is started inside the block begins without it. A copy of a
    model, or a pickle, starts without any.

    Attributes:
        scheduled_budget: The budget in training, while a schedule runs; of all threads.
        scheduled_temperature: The same for `tau`.
        changing: Held by the thread that changes the model (`trace.one_change`).
        gather_costs: `execution.costs.GatherCosts` that `tune_execution` measured; None before.
        told_of_steps: Whether it was said that decoding steps run in full (`execution.costs.unrouted_steps`).
    """

    def __init__(self) -> None:
        self.scheduled_budget: float | None = None
        self.scheduled_temperature: float | None = None
        self.changing = threading.RLock()
        self.gather_costs: Any = None
        self.told_of_steps = False
        self._thread = _OfThread()

    @property
    def settings(self) -> RunSettings:
        """The calling thread's."""
        return self._thread.settings

    @contextmanager
    def override(self, **changes: Any) -> Iterator[None]:
        """Change fields of the calling thread's `RunSettings` inside the block; `recorders` are added to those there.

        Blocks may end in another order than they began.

        Raises:
            TypeError: There is no such field.
        """
        self._thread.change((*self._thread.changes, changes))
        try:
            yield
        finally:
            self._thread.change(tuple(other for other in self._thread.changes if other is not changes))

    def __reduce__(self) -> tuple[type[RunState], tuple[()]]:
        return RunState, ()


class _OfThread(threading.local):
    """Every thread has its own attributes, made when it first asks; a compiler sees them, and guards on them."""

    def __init__(self) -> None:
        self.changes: tuple[dict[str, Any], ...] = ()
        self.settings = RunSettings()

    def change(self, changes: tuple[dict[str, Any], ...]) -> None:
        settings = RunSettings()
        for each in changes:
            recorders = (*settings.recorders, *each.get("recorders", ()))
            settings = replace(settings, **{**each, "recorders": recorders})
        self.changes, self.settings = changes, settings
