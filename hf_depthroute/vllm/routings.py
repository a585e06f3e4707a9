"""The adapter state of every routed layer, loaded strictly and without the base."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..adapter.base_check import check_base
from ..config.rules import ConfigError
from ..inference.calibration import is_calibrated, set_budget
from ..inference.phases import set_phases
from ..routing.routing import Routing
from ..routing.stack import routings_of
from ..routing.thresholds import NOT_FITTED
from .limits import check_adapter, check_base_config, read_adapter
from .neurons import own_neurons
from .settings import Settings


# Weights that are made in it have no version, and nothing derived from them is kept.
@torch.inference_mode(False)
def load_routings(
    settings: Settings, base_config: PreTrainedConfig, base_files: Sequence[Path]
) -> dict[int, Routing]:
    """The routings of the routed layers by their index, on the CPU, in eval mode, frozen.

    They are injected and loaded as ever, into a base without weights (on the meta device). So they
    start with an adapter's own checks, and are what `PeftModel.from_pretrained` makes.

    Raises:
        ConfigError: The adapter or the base is none that vLLM can serve exactly.
        AdapterMismatchError: The adapter's files are not those of a save, or its base is another.
    """
    check_base_config(base_config)
    config = read_adapter(settings.adapter)
    check_adapter(config)
    dtype = torch.get_default_dtype()  # that vLLM builds the base in
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):  # vLLM builds a model under another device and dtype
            with torch.device("meta"):
                base = AutoModelForCausalLM.from_config(copy.deepcopy(base_config))
            check_base(base, config.base_architecture or {}, base_files)
            model = PeftModel.from_pretrained(base, settings.adapter).eval().requires_grad_(False)
            own_neurons(model.get_base_model(), routings_of(model), base_files, dtype)
    finally:
        torch.set_default_dtype(dtype)
    if settings.budget is not None:
        set_budget(model, settings.budget)
    if settings.request_budgets and not is_calibrated(model):
        raise ConfigError(f"request_budgets=True: {NOT_FITTED}")
    if settings.phases is not None:
        set_phases(model, settings.phases)
    return {routing.layer_index: routing for routing in routings_of(model)}
