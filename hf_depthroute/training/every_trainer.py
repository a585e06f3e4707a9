"""Every `transformers.Trainer` that trains routers trains them with the routing losses,
and every one that takes a loss of labels takes that of what is served.

A Trainer hands itself to none of its callbacks, so `train`, `evaluation_loop` and
`_load_best_model` are wrapped. Its module takes a second to import, and most programs never train:
it is wrapped when an adapter is injected that finds it imported, else when the first Trainer is
made, which makes a `CallbackHandler`.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from ..adapter.labels import as_served
from ..adapter.peft_hooks import wrap
from ..routing.stack import routed_now


def install() -> None:
    """After an injection: wrap the Trainer, or let the first one that is made do it; done once."""
    if "transformers.trainer" in sys.modules:
        _wrap_trainer()
        return
    from transformers.trainer_callback import CallbackHandler

    wrap(CallbackHandler, "__init__", _wrap_trainer_first)


def _wrap_trainer_first(start: Any, *args: object, **kwargs: object) -> None:
    _wrap_trainer()
    start(*args, **kwargs)


def _wrap_trainer() -> None:
    from transformers import Trainer

    wrap(Trainer, "train", _train)
    wrap(Trainer, "evaluation_loop", _evaluate)
    if hasattr(Trainer, "_load_best_model"):
        wrap(Trainer, "_load_best_model", _load_best)


def _train(train: Any, self: Any, *args: object, **kwargs: object) -> Any:
    from .callbacks import provided

    _serve_losses(type(self))
    with provided(self):
        return train(self, *args, **kwargs)


def _evaluate(evaluate: Any, self: Any, *args: object, **kwargs: object) -> Any:
    from .answers import check_answers

    _serve_losses(type(self))
    check_answers(self)
    return evaluate(self, *args, **kwargs)


def _load_best(load: Any, self: Any) -> None:
    from .checkpoints import load_best

    if routed_now(self.model):
        load_best(self, partial(load, self))
    else:
        load(self)


def _serve_losses(kind: type) -> None:
    """Wrap the `compute_loss` that trainers of class `kind` have, in the class that defines it."""
    owner = next(base for base in kind.__mro__ if "compute_loss" in vars(base))
    wrap(owner, "compute_loss", _served_loss)


def _served_loss(
    compute_loss: Any, self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """`compute_loss` as the labels of `inputs` say, also where it takes them away (smoothing)."""
    with as_served(self.model, inputs):
        return compute_loss(self, model, inputs, *args, **kwargs)
