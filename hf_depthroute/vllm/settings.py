"""Settings of an adapter for vLLM, in the configuration that each of its processes gets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_depthroute_vllm import ARCHITECTURE

from ..adapter.files import CONFIG_NAME
from ..config.rules import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FIELD = "depth_route"  # of the model's configuration
# A request's own, among `SamplingParams.extra_args`; over HTTP in `vllm_xargs`.
BUDGET = "depth_route_budget"


@dataclass(frozen=True)
class Settings:
    """Which adapter routes, and how.

    With `request_budgets` a request may ask for a budget of its own, see `BUDGET`. Keys and values
    depend on the budget, so vLLM then keeps no cache of prefixes.
    """

    adapter: str  # its folder, the same for all processes
    budget: float | None = None  # share of tokens that runs in full; None: the adapter's own
    phases: str | None = None  # "all" or "prefill"; None: the adapter's own
    request_budgets: bool | None = None

    @property
    def hf_overrides(self) -> dict[str, Any]:
        """vLLM's option of this name.

        The architecture is this package's, so that vLLM fails without it.
        """
        given = {name: value for name, value in asdict(self).items() if value is not None}
        # A base with code of its own would otherwise be served by that code, without routing, where
        # the plugin is not.
        return {"architectures": [ARCHITECTURE], "auto_map": {}, FIELD: given}

    def serve_words(self, base: str, name: str, options: Sequence[str] = ()) -> list[str]:
        """The command line `vllm serve ...` of this adapter on `base`, as model `name`."""
        own = ["--served-model-name", name, "--hf-overrides", json.dumps(self.hf_overrides)]
        return ["vllm", "serve", base, *own, *options]


def tell_apart(hf_config: PreTrainedConfig, settings: Settings) -> None:
    """Put into a model's configuration what the adapter's own says now.

    vLLM finds a compiled model in its cache by the model's configuration. There an adapter is a
    folder, and another save into that folder may route other layers. What a graph is made of is in
    `adapter_config.json`.
    """
    text = Path(settings.adapter, CONFIG_NAME).read_bytes()
    setattr(hf_config, f"{FIELD}_version", hashlib.sha256(text).hexdigest())


def settings_of(hf_config: PreTrainedConfig) -> Settings:
    """The settings in a model's configuration, as `Settings.hf_overrides` puts them there.

    Raises:
        ConfigError: There are none, or they are not such.
    """
    given: Any = getattr(hf_config, FIELD, None)
    known = {field.name for field in fields(Settings)}
    is_known = isinstance(given, dict) and set(given) <= known
    if not is_known or not isinstance(given.get("adapter"), str):
        raise ConfigError(
            f"--hf-overrides: {FIELD}={given!r} must hold 'adapter', the adapter's folder, and may "
            "hold 'budget', 'phases' and 'request_budgets'; hf-depthroute vllm-config ADAPTER "
            "prints the whole line"
        )
    return Settings(**given)
