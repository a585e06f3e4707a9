"""An offloaded base stays as it is when an adapter is loaded onto it.

PEFT takes accelerate's hooks off a base that is spread over devices, CPU and disk, and distributes it anew, as if all
memory were free; it fails where weights are on disk. Routers change no base weight and go where their layer runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from peft import PeftConfig

from .config import DepthRouteConfig

_HUB = ("subfolder", "revision", "cache_dir", "token")


@contextmanager
def kept_where_it_is(model: Any, source: Any, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Around PEFT's loading of an adapter: hide how `model` is distributed if the adapter is a routed one."""
    if "hf_device_map" not in vars(model) or not _is_routed(source, kwargs):
        yield
        return
    device_map = vars(model).pop("hf_device_map")
    try:
        yield
    finally:
        model.hf_device_map = device_map


def _is_routed(source: Any, kwargs: Mapping[str, Any]) -> bool:
    if kwargs.get("config") is not None:
        return isinstance(kwargs["config"], DepthRouteConfig)
    try:
        found: str = PeftConfig._get_peft_type(source, **{name: kwargs[name] for name in _HUB if name in kwargs})
    except Exception:  # PEFT looks again, and says what is wrong
        return False
    return found == "DEPTH_ROUTE"
