"""Depth routing for pretrained language models: easy tokens skip work, as a PEFT adapter.

Importing this package registers the method with PEFT. Its names are looked up in their modules on first use.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .arguments import RoutingArguments
    from .autotune import tune_execution
    from .base_fingerprint import allow_base_mismatch
    from .calibration import calibrate, set_budget
    from .config import DepthRouteConfig
    from .cost import route_cost
    from .draft_search import search_draft
    from .drafting import draft_view, lossless_generate
    from .presets import PRESETS, preset
    from .trace import record_routes, replay_routes
    from .trainer import DepthRouteCallback, DepthRouteTrainer, DepthRouteTrainingArguments
    from .tuner import get_depth_routed_model

__all__ = [
    "PRESETS",
    "DepthRouteCallback",
    "DepthRouteConfig",
    "DepthRouteTrainer",
    "DepthRouteTrainingArguments",
    "RoutingArguments",
    "__version__",
    "allow_base_mismatch",
    "calibrate",
    "draft_view",
    "get_depth_routed_model",
    "lossless_generate",
    "preset",
    "record_routes",
    "replay_routes",
    "route_cost",
    "search_draft",
    "set_budget",
    "tune_execution",
]
_MODULES = {
    "arguments": ("RoutingArguments",),
    "autotune": ("tune_execution",),
    "base_fingerprint": ("allow_base_mismatch",),
    "calibration": ("calibrate", "set_budget"),
    "config": ("DepthRouteConfig",),
    "cost": ("route_cost",),
    "draft_search": ("search_draft",),
    "drafting": ("draft_view", "lossless_generate"),
    "presets": ("PRESETS", "preset"),
    "trace": ("record_routes", "replay_routes"),
    "trainer": ("DepthRouteCallback", "DepthRouteTrainer", "DepthRouteTrainingArguments"),
    "tuner": ("get_depth_routed_model",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

if "hf_depthroute_console" not in sys.modules:  # the program `hf-depthroute` registers when a command runs
    import_module(".tuner", __name__)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
