"""Depth routing for pretrained language models: easy tokens skip work, as a PEFT adapter."""

from .calibration import calibrate, set_budget
from .config import DepthRouteConfig
from .cost import route_cost
from .trace import record_routes, replay_routes
from .trainer import DepthRouteCallback, DepthRouteTrainer, DepthRouteTrainingArguments
from .tuner import get_depth_routed_model

__version__ = "0.1.0"

__all__ = [
    "DepthRouteCallback",
    "DepthRouteConfig",
    "DepthRouteTrainer",
    "DepthRouteTrainingArguments",
    "calibrate",
    "get_depth_routed_model",
    "record_routes",
    "replay_routes",
    "route_cost",
    "set_budget",
]
