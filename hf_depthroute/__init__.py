"""Depth routing for pretrained language models: easy tokens skip work, as a PEFT adapter."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .autotune import tune_execution
from .base_fingerprint import allow_base_mismatch
from .calibration import calibrate, set_budget
from .config import DepthRouteConfig
from .cost import route_cost
from .draft_search import search_draft
from .drafting import draft_view, lossless_generate
from .trace import record_routes, replay_routes
from .tuner import get_depth_routed_model
from .version import __version__

if TYPE_CHECKING:
    from .arguments import RoutingArguments
    from .trainer import DepthRouteCallback, DepthRouteTrainer, DepthRouteTrainingArguments

__all__ = [
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
    "record_routes",
    "replay_routes",
    "route_cost",
    "search_draft",
    "set_budget",
    "tune_execution",
]


def __getattr__(name: str) -> Any:
    """Import the training names on first use: transformers' Trainer takes longer to import than the rest together."""
    if name == "RoutingArguments":
        return getattr(import_module(".arguments", __name__), name)
    if name in ("DepthRouteCallback", "DepthRouteTrainer", "DepthRouteTrainingArguments"):
        return getattr(import_module(".trainer", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
