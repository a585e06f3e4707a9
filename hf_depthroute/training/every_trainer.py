"""Every `transformers.Trainer` that trains routers trains them with the routing losses.

A Trainer hands itself to none of its callbacks, so `Trainer.train` is wrapped, or will be when it is imported: that
takes a second, and most programs never train.
"""

from __future__ import annotations

import functools
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any, cast

_MODULE = "transformers.trainer"
_MARK = "_depth_route_wrapped"


def install() -> None:
    """Wrap `Trainer.train`, now or when its module is imported; a second call does nothing."""
    if _MODULE in sys.modules:
        _wrap(sys.modules[_MODULE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds the module as the next finders do, and wraps its Trainer once it has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            loader, run = cast(Any, spec.loader), spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                _wrap(module)

            loader.exec_module = exec_module
        return spec


def _wrap(module: Any) -> None:
    train = module.Trainer.train
    if hasattr(train, _MARK):
        return

    @functools.wraps(train)
    def trains(self: Any, *args: Any, **kwargs: Any) -> Any:
        from .callbacks import provided

        with provided(self):
            return train(self, *args, **kwargs)

    setattr(trains, _MARK, True)
    module.Trainer.train = trains
