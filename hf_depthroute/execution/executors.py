"""The ways to run the routed part of a layer, one row per executor.

`"auto"` takes the first row that supports a call. A row is chosen by its name in `RunSettings.executor`, or by
`tune_execution`; a call that it does not support runs as `"auto"` says. Adding an executor is one class and one row,
from this package or from another one; after `"masked"`, which supports every call, it is only taken by name.

On a CPU, `decode.DecodeStep` stands in for `"gathered"` and `"auto"` where one token per sequence is decoded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.contexts import is_exporting
from ..base.sublayers import hidden_of
from .call import Executor, RoutedCall
from .costs import prefers_gathering
from .sequences import skip_sequences, skips_sequences


class Sequences:
    """Whole sequences are left out of the batch: those that skip their attention write no keys and values."""

    def supports(self, call: RoutedCall) -> bool:
        return skips_sequences(call)

    def run(self, call: RoutedCall) -> Tensor:
        return call.finish(skip_sequences(call))


class Full:
    """No token is skipped, and the host knows it. Bit for bit what the base computes.

    Chosen by its name, it turns the layer's routing off: the gate does not run either.
    """

    def supports(self, call: RoutedCall) -> bool:
        return call.plan.everything and not call.plan.target.per_pair

    def run(self, call: RoutedCall) -> Tensor:
        if call.family.parallel:  # nothing has run yet, and three terms are to be added in the base's own order
            return hidden_of(call.layer._base_forward(call.stream, **call.kwargs))
        return call.finish(call.full())


class Rows:
    """Row operators, whose shapes do not depend on the mask: on CUDA, under a compiler, and where it is asked for.

    On CUDA, eager, `"auto"` takes them where few rows run, and gathers many (`costs.prefers_gathering`).

    An exported program has none of them: it is to run where this library is not installed.
    """

    def supports(self, call: RoutedCall) -> bool:
        executor, compiles = call.plan.executor, torch.compiler.is_compiling()
        if is_exporting() or (executor != "rows" and not (executor == "auto" and (call.stream.is_cuda or compiles))):
            return False
        if executor == "auto" and prefers_gathering(call):
            return False
        return not call.needs_both_paths and not skips_sequences(call) and call.site.supports_rows(call)

    def run(self, call: RoutedCall) -> Tensor:
        return call.finish(call.site.by_rows(call))


class Gathered:
    """The chosen rows are gathered and run, and no others."""

    def supports(self, call: RoutedCall) -> bool:
        if call.needs_both_paths or torch.compiler.is_compiling() or call.site.hides(call):
            return False
        return not skips_sequences(call)

    def run(self, call: RoutedCall) -> Tensor:
        if call.plan.target.skips_attention and call.plan.mix == "hard" and bool(call.mask.all()):
            return EXECUTORS["full"].run(call)
        return call.finish(call.site.gathered(call))


class Masked:
    """Both paths of every token: what training needs, and what runs anywhere."""

    def supports(self, call: RoutedCall) -> bool:
        return True

    def run(self, call: RoutedCall) -> Tensor:
        return call.finish(call.site.masked(call))


EXECUTORS: dict[str, Executor] = {
    "sequences": Sequences(),
    "full": Full(),
    "rows": Rows(),
    "gathered": Gathered(),
    "masked": Masked(),
}


def executor_of(call: RoutedCall) -> Executor:
    """The executor of the call: the row that its plan names, or else the first row that supports it.

    Raises:
        ValueError: There is no such row.
    """
    name = call.plan.executor
    if name != "auto":
        check_executor(name)
        if EXECUTORS[name].supports(call):
            return EXECUTORS[name]
    for executor in EXECUTORS.values():
        if executor.supports(call):
            return executor
    raise ValueError(f"no executor supports a layer of {type(call.layer).__name__}")


def check_executor(name: str) -> None:
    """Raise `ValueError` for a name that is neither `"auto"` nor in the table."""
    if name != "auto" and name not in EXECUTORS:
        raise ValueError(f"executor={name!r} must be one of: {', '.join(('auto', *EXECUTORS))}")
