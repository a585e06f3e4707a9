"""Depth routing for pretrained language models: easy tokens skip work, as a PEFT adapter.

Importing this package registers the method with PEFT. Its names are looked up in their modules on
first use.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .adapter.base_check import allow_base_mismatch as allow_base_mismatch
    from .adapter.convert import convert_flexidepth as convert_flexidepth
    from .adapter.tuner import get_depth_routed_model as get_depth_routed_model
    from .config.adapter import DepthRouteConfig as DepthRouteConfig
    from .evaluation.cost import route_cost as route_cost
    from .fitting.router import fit_router as fit_router
    from .inference.autotune import tune_execution as tune_execution
    from .inference.calibration import calibrate as calibrate
    from .inference.calibration import calibrate_budgets as calibrate_budgets
    from .inference.calibration import set_budget as set_budget
    from .inference.calibration import use_budget as use_budget
    from .inference.drafting import draft_view as draft_view
    from .inference.drafting import lossless_generate as lossless_generate
    from .inference.phases import set_causal_rule as set_causal_rule
    from .inference.phases import set_phases as set_phases
    from .routing.trace import record_routes as record_routes
    from .routing.trace import replay_routes as replay_routes
    from .training.arguments import RoutingArguments as RoutingArguments
    from .training.presets import PRESETS as PRESETS
    from .training.presets import preset as preset
    from .training.trainer import DepthRouteCallback as DepthRouteCallback
    from .training.trainer import DepthRouteTrainer as DepthRouteTrainer
    from .training.trainer import DepthRouteTrainingArguments as DepthRouteTrainingArguments

_NAMES = {
    "adapter.base_check": ["allow_base_mismatch"],
    "adapter.convert": ["convert_flexidepth"],
    "adapter.tuner": ["get_depth_routed_model"],
    "config.adapter": ["DepthRouteConfig"],
    "evaluation.cost": ["route_cost"],
    "fitting.router": ["fit_router"],
    "inference.autotune": ["tune_execution"],
    "inference.calibration": ["calibrate", "calibrate_budgets", "set_budget", "use_budget"],
    "inference.drafting": ["draft_view", "lossless_generate"],
    "inference.phases": ["set_causal_rule", "set_phases"],
    "routing.trace": ["record_routes", "replay_routes"],
    "training.arguments": ["RoutingArguments"],
    "training.presets": ["PRESETS", "preset"],
    "training.trainer": ["DepthRouteCallback", "DepthRouteTrainer", "DepthRouteTrainingArguments"],
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = ["__version__", *_MODULES]

# The program `hf-depthroute` registers when a command runs.
if "hf_depthroute_console" not in sys.modules:
    import_module(".registration", __name__)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
