"""One progress bar over all phases of a fit, in tokens times layers."""

from __future__ import annotations

import time
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from tqdm.auto import tqdm
from transformers.utils.logging import is_progress_bar_enabled

from ..base.contexts import of_this_thread
from ..base.sublayers import Kwargs, stream_given


class FitBar:
    """A bar that moves with every layer that a text has gone through, in any phase.

    Args:
        layers: The decoder layers.
        passes: Positions that go through all layers, in all phases together.
        text: Positions that `layer_done` stands for.
        shown: Whether it is drawn; None: where the output is a terminal and transformers' bars are
            on.

    Attributes:
        seconds: Seconds that each finished phase took, by its label.
    """

    def __init__(self, layers: nn.ModuleList, passes: int, text: int, shown: bool | None) -> None:
        self._handles: list[RemovableHandle] = []
        self._text = text
        disable = None if is_progress_bar_enabled() else True  # None: where it is no terminal
        if shown is not None:
            disable = not shown
        self.seconds: dict[str, float] = {}
        self._phase: tuple[str, float] | None = None  # and when it began
        self.total = passes * len(layers)
        self.done = 0
        self._bar = tqdm(
            total=self.total, disable=disable, unit="", unit_scale=True, bar_format=_FORMAT
        )
        if not self._bar.disable:
            called = of_this_thread(self._called)
            self._handles = [
                layer.register_forward_pre_hook(called, with_kwargs=True) for layer in layers
            ]

    def __enter__(self) -> FitBar:
        return self

    def __exit__(self, *error: object) -> None:
        self._end_phase()
        for handle in self._handles:
            handle.remove()
        if error[0] is None:
            self._move(self.total)  # phases that were not needed
        self._bar.close()

    def phase(self, name: str) -> None:
        """Label what comes, and end the phase before."""
        self._end_phase()
        self._phase = name, time.monotonic()
        self._bar.set_description(f"fit: {name}")

    def _end_phase(self) -> None:
        if self._phase is not None:
            name, began = self._phase
            self.seconds[name] = round(time.monotonic() - began, 1)
            self._phase = None

    def layer_done(self) -> None:
        """A routed layer of a walk, which calls its parts alone."""
        self._move(self._text)

    def _called(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> None:
        h = stream_given(args, kwargs)
        self._move(h.shape[0] * h.shape[1])

    def _move(self, positions: int) -> None:
        moved = min(positions, self.total - self.done)
        self.done += moved
        self._bar.update(moved)


_FORMAT = "{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
