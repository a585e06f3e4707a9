"""Limits of an adapter on vLLM: what would give other tokens than `generate` is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from .. import registration as registration
from ..base.families import row_of, text_config
from ..config.adapter import DepthRouteConfig
from ..config.rules import ConfigError
from ..parts.gates import GATES
from ..parts.targets import TARGETS
from .settings import settings_of

_PARTS = {  # that a target may skip
    "attention": (
        "vLLM's attention reads and writes its paged cache in one call for all rows of a batch, so "
        "none can be left out, and nothing else is"
    ),
    "experts": "vLLM runs the experts of a layer in one fused call of its own",
    "memory": (
        "vLLM hands no token ids to its layers, and none of the tokens before those of a step"
    ),
}
_BASES = {
    "falcon": (
        "its attention does not go through the interface that vLLM's Transformers backend needs"
    ),
    "gpt2": "vLLM's Transformers backend does not load its transposed projections",
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_OPTIONS = {  # of vLLM
    "--pipeline-parallel-size": (
        "the adapter's layers would have to follow the base's over processes"
    ),
    "--enable-expert-parallel": "there are no experts in a routed FFN",
    "--prefill-context-parallel-size": "a process holds a part of the rows only",
    "--enable-dbo": "half batches have no forward context of their own here",
    "--speculative-config": (
        "the rows of rejected tokens would be routed and counted; hf_depthroute.lossless_generate "
        "drafts itself"
    ),
    "--fully-sharded-loras": (
        "gathered rows get their LoRA from code of this library, which needs its whole rank"
    ),
    "--kv-transfer-config": (
        "keys and values of other engines are those of another budget, or of none"
    ),
    "--quantization": "a quantised base is not the one that was routed",
    "--enable-sleep-mode": "waking up would leave the adapter's weights out",
    "--trust-remote-code": "a base with code of its own may be served by it, unrouted",
    "--runner": "only text generation is routed",
    "--load-format": "the base is read from safetensors; use one of: auto, safetensors",
    "--compilation-config": "with enable_sp a process holds a part of the rows only",
    "--compilation-config cudagraph_mode": (
        "{graphs} records one decision and repeats it; use PIECEWISE or NONE"
    ),
}


def check_all(vllm_config: Any) -> None:
    """Everything that can be known before a process starts and a weight is read."""
    check_engine(vllm_config)
    hf_config = vllm_config.model_config.hf_config
    check_base_config(hf_config)
    settings = settings_of(hf_config)
    config = read_adapter(settings.adapter)
    check_adapter(config)
    if vllm_config.lora_config is not None:
        check_lora(config, vllm_config.parallel_config.tensor_parallel_size)
    if settings.request_budgets:
        check_request_budgets(config, getattr(vllm_config, "use_v2_model_runner", False))


def check_request_budgets(config: DepthRouteConfig, v2_runner: bool = False) -> None:
    """Refuse budgets of requests where an adapter, or vLLM's model runner, has no use for them.

    Raises:
        ConfigError: Which of the two, and why.
    """
    if not config.takes_budget():
        raise ConfigError(
            "request_budgets=True: this adapter's threshold is fixed, whatever the budget; leave "
            "it out"
        )
    if v2_runner:
        raise ConfigError(
            "request_budgets=True: vLLM's second model runner tells nobody which request a row is "
            "of; set VLLM_USE_V2_MODEL_RUNNER=0"
        )


def check_lora(config: DepthRouteConfig, processes: int) -> None:
    """Refuse LoRAs where a process holds a part of the neurons that they may change.

    Raises:
        ConfigError: A branch is made of the FFN's own neurons, and `processes` share the FFN.
    """
    branches = {config.branch, *(config.branch_pattern or {}).values()}
    if processes > 1 and "neurons" in branches:
        raise ConfigError(
            "--enable-lora with --tensor-parallel-size is not supported with branch='neurons': its "
            "neurons, which a LoRA may change, are spread over the processes"
        )


def read_adapter(folder: str) -> DepthRouteConfig:
    """The configuration of the adapter in `folder`; `ConfigError` where there is none."""
    if not Path(folder, "adapter_config.json").is_file():
        raise ConfigError(
            f"adapter {folder}: there is no adapter_config.json in it, on this machine"
        )
    return cast(DepthRouteConfig, DepthRouteConfig.from_pretrained(folder))


def check_adapter(config: DepthRouteConfig) -> None:
    """Refuse an adapter that vLLM cannot serve exactly.

    Raises:
        ConfigError: What it is that cannot be served, and why.
    """
    gate = GATES[config.gate]
    names = {config.target, *(config.target_pattern or {}).values()}
    skipped = {part for name in names for part in TARGETS[name].skips}
    reasons = [_PARTS[part] for part in sorted(skipped) if part in _PARTS]
    unserved = {
        # Where attention is skipped besides, it is computed for all rows all the same.
        "target": (
            skipped == {"attention"} or not skipped <= {"attention", "ffn"},
            next(iter(reasons), "only the FFN's rows can be left out there"),
        ),
        "branch": (config.branch == "memory", _PARTS["memory"]),
        "granularity": (
            config.granularity != "token",
            "a batch there is one row that holds tokens of many requests",
        ),
        "gate": (
            gate.static or gate.exits or gate.reads_logits,
            "only gates that score a token by its own stream, against a threshold, are",
        ),
        "causal_rule": (config.causal_rule != "quantile", "only thresholds are"),
        "modules_to_save": (
            config.modules_to_save,
            "the base's weights are loaded by vLLM, not from an adapter",
        ),
    }
    for field, (given, why) in unserved.items():
        if given:
            raise ConfigError(f"{field}={getattr(config, field)!r} is not served by vLLM: {why}")


def check_base_config(config: Any) -> None:
    """Refuse a base whose FFNs vLLM runs in another way than row by row.

    Raises:
        UnsupportedModelError: The family is not supported by this library either, or the model has
            more than text.
        ConfigError: It is a mixture of experts, its logits are not those of vLLM, or vLLM cannot
            build it.
    """
    family = row_of(config)
    why = _BASES.get(config.model_type)
    if text_config(config) is not config:
        why = "a model that reads images too was not tried"
    elif any(getattr(config, name, None) for name in _EXPERTS):
        why = "the experts of a mixture of experts are vLLM's own fused call"
    elif family.logits is not None and family.logits[0] == "divide":
        why = "vLLM's Transformers backend leaves out the division of its logits"
    if why is not None:
        raise ConfigError(f"base={config.model_type!r} is not served by vLLM: {why}")


def check_engine(vllm_config: Any) -> None:
    """Refuse what of vLLM's `VllmConfig` is not exact with routing, or was not tried.

    Raises:
        ConfigError: Which option, and why.
    """
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    compilation = vllm_config.compilation_config
    # Not chosen yet: `model.prepare` chooses.
    graphs = getattr(compilation.cudagraph_mode, "name", None) or ""
    given = {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--enable-expert-parallel": parallel.enable_expert_parallel,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size > 1,
        "--enable-dbo": parallel.enable_dbo,
        "--speculative-config": vllm_config.speculative_config is not None,
        "--fully-sharded-loras": getattr(vllm_config.lora_config, "fully_sharded_loras", False),
        "--kv-transfer-config": vllm_config.kv_transfer_config is not None,
        "--quantization": model.quantization is not None,
        "--enable-sleep-mode": model.enable_sleep_mode,
        "--trust-remote-code": model.trust_remote_code,
        "--runner": model.runner_type != "generate",
        "--load-format": str(vllm_config.load_config.load_format) not in ("auto", "safetensors"),
        "--compilation-config": getattr(compilation.pass_config, "enable_sp", None),
        "--compilation-config cudagraph_mode": "FULL" in graphs,
    }
    for option in (option for option, value in given.items() if value):
        why = _OPTIONS[option].format(graphs=graphs)
        raise ConfigError(f"{option} is not supported with a depth-routed adapter: {why}")
