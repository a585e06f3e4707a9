"""Every `transformers.Trainer` that trains routers trains them with the routing losses.

A Trainer hands itself to none of its callbacks, so `Trainer.train` is wrapped. Its module takes a
second to import, and most programs never train: it is wrapped when an adapter is injected that can
train, or that finds it imported.
"""

from __future__ import annotations

import sys
from typing import Any

from ..adapter.peft_hooks import wrap
from ..config.adapter import DepthRouteConfig


def install_for(config: DepthRouteConfig) -> None:
    """Done after an injection: wrap `Trainer.train`, unless nothing trains;
    a second call does nothing."""
    if config.inference_mode and "transformers.trainer" not in sys.modules:
        return
    from transformers import Trainer

    wrap(Trainer, "train", _train)


def _train(train: Any, self: Any, *args: object, **kwargs: object) -> Any:
    from .callbacks import provided

    with provided(self):
        return train(self, *args, **kwargs)
