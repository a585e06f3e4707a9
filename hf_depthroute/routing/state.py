"""`RunState`: how forward passes of a model run at this moment, beyond what its adapters say;
never saved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from .trace import RouteRecord, RouteTrace

# From the stream before the routed part, after the full path and after the cheap one, each
# `[B, T, d]`, to `[B, T]`.
PathMetric = Callable[[Tensor, Tensor, Tensor], Tensor]


class Recorder(Protocol):
    """Wants to know what a forward pass decides, such as a `RouteTrace`."""

    def __setitem__(self, layer_index: int, record: RouteRecord) -> None: ...


@dataclass(frozen=True)
class RunSettings:
    """Settings of the forward passes of one thread.

    Attributes:
        layers: Indices of the layers that may be routed, the others run as the base does; None for
            all. Empty: the whole model runs at full depth.
        recorders: Traces and counters that want to know what is decided.
        replay: Decisions to use instead of the model's own.
        selection: Overrides the rule in training and inference: `"topk"` or `"threshold"`.
        executor: How inference runs the routed part: `"auto"`, or a row of
            `execution.executors.EXECUTORS`.
        observed: What losses want to know of both paths in training, by the name that a record has
            it under.
        budget: Overrides the adapter's budget and a training schedule's.
        in_full: Bool `[B, T]`, the tokens of an input that run in full with `phases="prefill"`, in
            training too: the end of a prompt, and the text that stands behind it. None: the last
            ones of every sequence, in inference.
    """

    layers: frozenset[int] | None = None
    recorders: tuple[Recorder, ...] = ()
    replay: RouteTrace | None = None
    selection: str | None = None
    executor: str = "auto"
    observed: Mapping[str, PathMetric] = field(default_factory=dict)
    budget: float | None = None
    in_full: Tensor | None = None


class RunState:
    """The settings of one model, shared by its routed layers.

    An override belongs to the thread that made it, as `torch.no_grad` does: other threads that run
    the model at the same time neither see nor end it, and a thread that is started inside the block
    begins without it. A copy of a model, or a pickle, starts without any.

    The budget in force is that of the calling thread's override, else, in a step of training, the
    schedule's, else the adapter's own, which is a field of its configuration; the temperature has
    no override. `budget` and `temperature` say so for everybody.

    Attributes:
        scheduled_budget: The budget in training, while a schedule runs; of all threads.
        scheduled_temperature: The same for `tau`.
        changing: Held by the thread that changes the model (`stack.one_change`).
        switching: Held by the thread that goes from layer to layer to switch adapters, and by one
            that asks the layers for theirs (`stack.adapters_now`); never during a forward pass.
        turned_off: PEFT's `disable_adapter()` blocks that are open, in all threads.
        gather_costs: `execution.costs.GatherCosts` that `tune_execution` measured; None before.
        told_of_steps: Whether it was said that decoding steps run in full
            (`execution.costs.unrouted_steps`).
    """

    def __init__(self) -> None:
        self.scheduled_budget: float | None = None
        self.scheduled_temperature: float | None = None
        self.changing = threading.RLock()
        self.switching = threading.RLock()
        self.turned_off: list[AbstractContextManager[None]] = []
        self.gather_costs: Any = None
        self.told_of_steps = False
        self._thread = _OfThread()

    def budget(self, own: float, training: bool = False) -> float:
        """The budget in force, in training or in any other pass, where the adapter's is `own`."""
        if self.settings.budget is not None:
            return self.settings.budget
        scheduled = self.scheduled_budget if training else None  # read once: schedules end
        return own if scheduled is None else scheduled

    def temperature(self, own: float, training: bool = False) -> float:
        """The same for `tau`."""
        scheduled = self.scheduled_temperature if training else None
        return own if scheduled is None else scheduled

    def end_schedule(self) -> None:
        """The adapter's own budget and temperature are in force in training, too."""
        self.scheduled_budget = self.scheduled_temperature = None

    @property
    def settings(self) -> RunSettings:
        """The calling thread's."""
        return self._thread.settings

    @contextmanager
    def override(self, **changes: Any) -> Iterator[None]:
        """Change the calling thread's `RunSettings` inside the block; `recorders` add up.

        Blocks may end in another order than they began.

        Raises:
            TypeError: There is no such field.
        """
        self._thread.change((*self._thread.changes, changes))
        try:
            yield
        finally:
            others = [other for other in self._thread.changes if other is not changes]
            self._thread.change(tuple(others))

    def __reduce__(self) -> tuple[type[RunState], tuple[()]]:
        return RunState, ()


class _OfThread(threading.local):
    """Attributes of each thread, made when it first asks; a compiler guards on them."""

    def __init__(self) -> None:
        self.changes: tuple[dict[str, Any], ...] = ()
        self.settings = RunSettings()

    def change(self, changes: tuple[dict[str, Any], ...]) -> None:
        settings = RunSettings()
        for each in changes:
            recorders = (*settings.recorders, *each.get("recorders", ()))
            settings = replace(settings, **each | {"recorders": recorders})
        self.changes = changes
        self.settings = settings
