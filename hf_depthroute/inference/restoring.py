"""Snapshots of the router state that calibration, evaluation and fits change;
it is restored however they end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..base.contexts import kept_modes
from ..routing.stack import one_change, routings_of


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Put what `snapshot` keeps back at the end of the block."""
    with one_change(model):
        undo = snapshot(model)
        try:
            yield
        finally:
            undo()


@contextmanager
def restored_on_error(model: nn.Module) -> Iterator[None]:
    """The same only where the block raises; executors and modules' modes, too."""
    undo = snapshot(model)
    tuned = [(routing, routing.tuned) for routing in routings_of(model)]
    restore_modes = kept_modes(model)
    try:
        yield
    except BaseException:
        undo()
        for routing, chosen in tuned:
            routing.tuned = chosen
        restore_modes()
        raise


@contextmanager
def weights_restored_on_error(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put all tensors of `modules` back where the block raises."""
    tensors = [value for module in modules for value in (*module.parameters(), *module.buffers())]
    held = [(value, value.detach().clone()) for value in tensors]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for value, before in held:
                value.copy_(before)
        raise


def snapshot(model: nn.Module) -> Callable[[], None]:
    """A function that puts the active adapter's budget, shares, tables and controllers back."""
    routings = [routing for routing in routings_of(model) if routing.adapter() is not None]
    configs = [routing.active_config() for routing in routings]
    settings = [(config, config.budget, config.share_shifts) for config in configs]
    tables = [routing.active_quantiles() for routing in routings]
    measured = [(table, table.measured) for table in tables]
    controllers = [routing.active_controller() for routing in routings]
    parts: list[nn.Module] = [*tables, *(part for part in controllers if part is not None)]
    states = [{name: value.clone() for name, value in part.state_dict().items()} for part in parts]

    def undo() -> None:
        for config, budget, shifts in settings:
            config.budget = budget
            config.share_shifts = shifts
        for part, state in zip(parts, states):
            part.load_state_dict(state)
        for table, found in measured:
            table.measured = found

    return undo
