"""`DepthRoutedForCausalLM`: a base on vLLM's Transformers backend,
with this library's adapter state in its layers.

vLLM builds and loads the base as ever. The layers' class is then switched, as in a transformers
model, to one whose `forward` runs the routed part in an operator; no hook and no wrapper is put
around anything, and no weight is renamed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.platforms import current_platform

from ..adapter.injection import swap
from ..base.families import find_decoder, row_of
from ..routing.routing import ROUTING
from .budgets import KEY
from .counts import RowLog
from .limits import check_engine
from .lora import LoraRows
from .neurons import OwnNeurons
from .routings import load_routings
from .settings import Settings, settings_of, tell_apart
from .step import NAME, OPERATOR, RoutedStep, served_forward


class DepthRoutedForCausalLM(TransformersForCausalLM):
    """The architecture that vLLM is told to build (`hf_depthroute_vllm.ARCHITECTURE`), with the
    `Settings` in the model's configuration."""

    supports_pp = False
    embedding_modules: ClassVar[dict[str, str]] = {}  # vLLM refuses LoRAs of the embeddings

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        check_engine(vllm_config)
        settings = settings_of(vllm_config.model_config.hf_config)
        config = vllm_config.model_config.hf_config
        given = config.architectures
        # The base's own decides how names in a checkpoint are read.
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        try:
            routings = load_routings(settings, config, _files_of(vllm_config))
            tell_apart(config, settings)
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        finally:
            config.architectures = given
        self._attach(settings, routings, prefix)

    def _attach(self, settings: Settings, routings: dict[int, Any], prefix: str) -> None:
        """Put the routings next to the FFNs, and each layer's operator into vLLM's table."""
        family = row_of(self.config)
        counts = {}
        if self.tp_group.rank_in_group == 0:
            counts = {count.layer_index: count for count in RowLog(sorted(routings)).counts}
        compilation = self.vllm_config.compilation_config
        self._loras = LoraRows(self.vllm_config.lora_config is not None)
        for index, layer in enumerate(getattr(find_decoder(self.model, family), family.layers)):
            swap(layer, served_forward)
            if index not in routings:
                continue
            setattr(layer, ROUTING, routings[index].to(self.device_config.device))
            _uncompiled(getattr(layer, family.ffn))
            name = f"{prefix}depth_route.{index}"
            setattr(layer, NAME, name)
            budgets = compilation.static_forward_context.get(KEY)
            step = RoutedStep(layer, counts.get(index), budgets, self._loras)
            compilation.static_forward_context[name] = step
        if compilation.splitting_ops and OPERATOR not in compilation.splitting_ops:
            # Its shapes depend on data: no graph may hold it.
            compilation.splitting_ops.append(OPERATOR)

    @property
    def lora_manager(self) -> Any:
        """vLLM's `LoRAModelManager`, which it puts here after it has wrapped the linear layers."""
        return self._manager

    @lora_manager.setter
    def lora_manager(self, manager: Any) -> None:
        self._manager = manager
        family = row_of(self.config)
        ffns = []
        for layer in getattr(find_decoder(self.model, family), family.layers):
            routing = layer._modules.get(ROUTING)
            if routing is None or not routing.active_target().skips_ffn:
                continue
            ffn = getattr(layer, family.ffn)
            ffns.append(ffn)
            for branch in routing.depth_route_branch.values():
                if isinstance(branch, OwnNeurons):
                    branch.reads_loras_of(ffn, self._loras)
        self._loras.adopt(manager, ffns)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The base's weights; the adapter's are there already, and vLLM asks for all names."""
        loaded: set[str] = super().load_weights(weights)
        return loaded | {name for name, _ in self.named_parameters() if f".{ROUTING}." in name}


def _uncompiled(ffn: nn.Module) -> None:
    """On a CPU, run vLLM's activations as they are: looking up compiled ones is slower."""
    for module in ffn.modules():
        if isinstance(module, CustomOp) and current_platform.is_cpu():
            module._forward_method = module.forward_cpu


def _files_of(vllm_config: Any) -> list[Path]:
    """The safetensors files of the base; from the Hub, where vLLM will look for them too."""
    model = vllm_config.model_config
    folder = Path(model.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        where = {"revision": model.revision, "cache_dir": vllm_config.load_config.download_dir}
        folder = Path(snapshot_download(model.model, allow_patterns=["*.safetensors"], **where))
    return sorted(folder.glob("*.safetensors"))
