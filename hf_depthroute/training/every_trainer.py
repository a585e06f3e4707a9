"""Every `transformers.Trainer` that trains routers trains them with the routing losses.

A Trainer hands itself to none of its callbacks, so `Trainer.train` is wrapped. Its module takes a second to import, and
most programs never train: it is wrapped when an adapter is injected that can train, or that finds it imported.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from ..config.adapter import DepthRouteConfig

_MARK = "_depth_route_wrapped"


def install_for(config: DepthRouteConfig) -> None:
    """Done after an injection: wrap `Trainer.train`, unless nothing trains; a second call does nothing."""
    if config.inference_mode and "transformers.trainer" not in sys.modules:
        return
    from transformers import Trainer

    from .callbacks import provided

    train = Trainer.train
    if hasattr(train, _MARK):
        return

    @functools.wraps(train)
    def trains(self: Any, *args: Any, **kwargs: Any) -> Any:
        with provided(self):
            return train(self, *args, **kwargs)

    setattr(trains, _MARK, True)
    Trainer.train = trains  # type: ignore[method-assign]
