"""Depth routing for pretrained language models: easy tokens skip work, as a PEFT adapter."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .autotune import tune_execution
from .calibration import calibrate, set_budget
from .config import DepthRouteConfig
from .cost import route_cost
from .draft_search import search_draft
from .drafting import draft_view, lossless_generate
from .trace import record_routes, replay_routes
from .tuner import get_depth_routed_model

if TYPE_CHECKING:
    from .trainer import DepthRouteCallback, DepthRouteTrainer, DepthRouteTrainingArguments

__version__ = "0.1.0"

__all__ = [
    "DepthRouteCallback",
    "DepthRouteConfig",
    "DepthRouteTrainer",
    "DepthRouteTrainingArguments",
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
    if name in ("DepthRouteCallback", "DepthRouteTrainer", "DepthRouteTrainingArguments"):
        return getattr(import_module(".trainer", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
