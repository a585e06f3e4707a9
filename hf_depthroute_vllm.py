"""What vLLM loads in each of its processes, by the entry point group `vllm.general_plugins`.

It stands beside the package, because importing that loads PEFT and changes transformers' Trainer; a
process of vLLM that serves another model has no use for either.
"""

from __future__ import annotations

from typing import Any

ARCHITECTURE = "DepthRoutedForCausalLM"
BUDGETS = "hf_depthroute.vllm.budgets:RequestBudgets"  # as vLLM names a logits processor


def register() -> None:
    """Tell vLLM of the architecture, and what to check before it starts a process.

    A second call changes nothing.
    """
    from vllm import ModelRegistry
    from vllm.config import CUDAGraphMode
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    class DepthRoutedConfig(VerifyAndUpdateConfig):  # type: ignore[misc,unused-ignore]
        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            from hf_depthroute.vllm.limits import check_all
            from hf_depthroute.vllm.settings import settings_of

            check_all(vllm_config)
            if settings_of(vllm_config.model_config.hf_config).request_budgets:
                model = vllm_config.model_config
                model.logits_processors = [*(model.logits_processors or []), BUDGETS]
                vllm_config.cache_config.enable_prefix_caching = False  # a prefix is one budget's
            compilation = vllm_config.compilation_config
            # By default, whole forward passes would be recorded.
            if compilation.cudagraph_mode is None:
                compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE

    MODELS_CONFIG_MAP[ARCHITECTURE] = DepthRoutedConfig
    ModelRegistry.register_model(ARCHITECTURE, "hf_depthroute.vllm.model:DepthRoutedForCausalLM")
