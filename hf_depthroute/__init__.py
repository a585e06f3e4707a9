"""Depth routing for pretrained language models: easy tokens skip work, as a PEFT adapter."""

from .calibration import calibrate, set_budget
from .config import DepthRouteConfig
from .trace import record_routes, replay_routes
from .trainer import DepthRouteCallback, DepthRouteTrainer, DepthRouteTrainingArguments
from .tuner import get_depth_routed_model

__version__ = "0.1.0"
