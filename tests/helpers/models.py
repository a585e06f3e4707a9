"""Tiny random models of every supported family, with and without an adapter whose
decisions matter."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.initialization import no_init_weights

from hf_depthroute import DepthRouteConfig, get_depth_routed_model
from hf_depthroute.base.families import find_decoder, find_family
from hf_depthroute.routing.routing import Routing
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.thresholds import quantile_table
from hf_depthroute.routing.trace import record_routes

DEVICE = os.environ.get("TEST_DEVICE", "cpu")  # where models and tokens are; `make gpu` sets it
VOCABULARY = 64
WIDTH = 32
DEPTH = 4
GATES = ("mlp", "jepa")
# The families of the full tables; those of `EXTENDED` have a table of their own,
# test_family_table.py.
FAMILY_NAMES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "olmoe",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt2",
)
ATTENTIONS = ("sdpa", "eager")
MOE_FAMILIES = ("olmoe", "mixtral", "qwen2_moe", "qwen3_moe")

# Ways to route a model, by name: fields of its configuration.
KINDS: dict[str, dict[str, Any]] = {
    "mlp": {"gate": "mlp"},
    "jepa": {"gate": "jepa"},
    "attention": {"gate": "mlp", "target": "attention"},
    "block": {"gate": "mlp", "target": "block"},
    "experts": {"gate": "mlp", "target": "experts"},
    "memory": {"target": "memory", "memory_slots": 4096, "memory_width": 4},
}
# Every family with every kind; the gates differ in the score only, so the last three families take
# one of them.
MODELS = [
    (family, kind)
    for family in FAMILY_NAMES
    for kind in KINDS
    if kind != "memory"  # it skips nothing: `MEMORIES`
    if not (kind == "experts" and family not in MOE_FAMILIES)
    and not (kind == "jepa" and family in ("mixtral", "qwen2_moe", "qwen3_moe"))
]
MEMORIES = [(family, "memory") for family in FAMILY_NAMES]
# Every family, and every kind on the families that differ most: for what does not depend on the two
# together.
COVERING = [
    (family, kind)
    for family, kind in MODELS
    if kind == "mlp"
    or family in ("llama", "gpt2", "olmoe")
    or (family, kind) == ("qwen2_moe", "experts")
]

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": DEPTH,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CONFIGS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, lambda: LlamaConfig(**_SIZES)),
    "qwen2": (Qwen2ForCausalLM, lambda: Qwen2Config(**_SIZES)),
    "qwen3": (Qwen3ForCausalLM, lambda: Qwen3Config(**_SIZES, head_dim=8)),
    "mistral": (MistralForCausalLM, lambda: MistralConfig(**_SIZES, sliding_window=None)),
    "olmoe": (
        OlmoeForCausalLM,
        lambda: OlmoeConfig(**_SIZES, num_experts=4, num_experts_per_tok=2),
    ),
    "mixtral": (
        MixtralForCausalLM,
        lambda: MixtralConfig(
            **_SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
        ),
    ),
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        lambda: Qwen2MoeConfig(
            **_SIZES,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=32,
        ),
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        lambda: Qwen3MoeConfig(
            **_SIZES,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            head_dim=8,
            norm_topk_prob=True,
        ),
    ),
    "gpt2": (GPT2LMHeadModel, lambda: GPT2Config(**_GPT2_SIZES)),
}

_WINDOWS: dict[str, Any] = {"sliding_window": 4}
_LAYER_TYPES = ["full_attention", "sliding_attention", "full_attention"]
_FALCON: dict[str, Any] = {
    "alibi": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "ffn_hidden_size": 64,
}

# Every other row of the family table, and the variants of a family that differ: the model type and
# what is special.
EXTENDED: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "arcee": ("arcee", {}),
    "cohere": ("cohere", {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": ("cohere2", _WINDOWS | {"logit_scale": 0.5, "layer_types": _LAYER_TYPES}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 8}),
    "exaone4": ("exaone4", _WINDOWS | {"layer_types": _LAYER_TYPES}),
    "falcon": ("falcon", _FALCON),
    "falcon_new": ("falcon", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_sequential": ("falcon", _FALCON | {"parallel_attn": False, "multi_query": False}),
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma2": (
        "gemma2",
        _WINDOWS
        | {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": _LAYER_TYPES,
            "final_logit_softcapping": 5.0,
        }
        | {"attn_logit_softcapping": 1.0},
    ),
    "gemma3": (
        "gemma3_text",
        _WINDOWS
        | {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": _LAYER_TYPES,
            "final_logit_softcapping": 5.0,
        },
    ),
    "glm": ("glm", {"head_dim": 8}),
    "glm4": ("glm4", {"head_dim": 8}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox_sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "granite": (
        "granite",
        {"residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.5},
    ),
    "helium": ("helium", {"head_dim": 8}),
    "nemotron": ("nemotron", {}),
    "olmo": ("olmo", {"clip_qkv": 0.5}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _WINDOWS | {"layer_types": _LAYER_TYPES}),
    "phi": ("phi", {"qk_layernorm": True}),
    "phi3": ("phi3", {"pad_token_id": 0}),
    "seed_oss": ("seed_oss", {"head_dim": 8}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "stablelm": ("stablelm", {"qk_layernorm": True}),
    "stablelm_parallel": ("stablelm", {"use_parallel_residual": True}),
    "starcoder2": ("starcoder2", {}),
}


def build_base(
    family: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    """A random model of `family` in eval mode, with weights large enough that every sublayer
    changes the logits."""
    known = _weights(family, seed)
    with no_init_weights():
        model = _untrained(family)
    model.tie_weights()
    with torch.no_grad():
        for name, value in _tensors(model):
            value.copy_(known[name])
    model.set_attn_implementation(attention if model._supports_sdpa else "eager")
    return model.to(DEVICE, dtype).eval()


def _untrained(family: str) -> PreTrainedModel:
    if family in CONFIGS:
        cls, config = CONFIGS[family]
        return cls(config())
    model_type, fields = EXTENDED[family]
    sizes = _SIZES | {"num_hidden_layers": 3} | fields
    if model_type in ("falcon", "gpt_neox"):  # they do not know it
        sizes.pop("num_key_value_heads")
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))


@functools.cache
def _weights(family: str, seed: int) -> dict[str, torch.Tensor]:
    """What `build_base` fills a model with: drawing it takes as long as all else."""
    with torch.random.fork_rng():
        model = _untrained(family)
    return dict(_tensors(randomised(model, "eager", torch.float32, seed)))


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(model.named_parameters(), model.named_buffers())


def randomised(model: Any, attention: str, dtype: torch.dtype, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 and bool((parameter == 1).all()):  # norm weights stay around one
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(noise * 0.1)
    model.set_attn_implementation(attention)
    return model.to(DEVICE, dtype).eval()


def routed(
    base: Any,
    kind: str = "mlp",
    budget: float = 0.5,
    adapter_name: str = "default",
    seed: int = 0,
    **fields: Any,
) -> PeftModel:
    """`base` with an adapter in eval mode: random branches, spread scores,
    thresholds of a real batch.

    A fresh adapter's branch adds nothing; here it adds noise, so that a wrong decision shows in the
    logits.
    """
    model = _injected(base, kind, budget, adapter_name, seed, fields)
    make_consequential(model, adapter_name, seed)
    return model.eval()


def _injected(
    base: Any, kind: str, budget: float, adapter_name: str, seed: int, fields: dict[str, Any]
) -> PeftModel:
    defaults: dict[str, Any] = {
        "layers": [1, 2, 3],
        "context_dim": 16,
        "summary_dim": 8,
        "action_dim": 4,
    }
    fields = defaults | KINDS.get(kind, {}) | fields
    config = DepthRouteConfig(budget=budget, seed=seed, **fields)
    return get_depth_routed_model(base, config, adapter_name)


def make_consequential(model: nn.Module, adapter_name: str = "default", seed: int = 0) -> None:
    """Give the active adapter random branches, scores with a standard deviation of one,
    and fitting thresholds."""
    generator = torch.Generator().manual_seed(1000 + seed)
    routings = [routing for routing in routings_of(model) if routing.adapter() == adapter_name]
    training = model.training
    model.eval()
    with torch.no_grad():
        for routing in routings:
            if adapter_name in routing.depth_route_memory:
                table = routing.depth_route_memory[adapter_name].table
                table.copy_(torch.randn(table.shape, generator=generator))
            if adapter_name in routing.depth_route_branch:
                down = routing.depth_route_branch[adapter_name].down.weight
                down.copy_(0.5 * torch.randn(down.shape, generator=generator))
            # They start with every token alike.
            if routing.config(adapter_name).gate in ("linear", "halting"):
                weight = routing.depth_route_gate[adapter_name].score.weight
                weight.copy_(torch.randn(weight.shape, generator=generator))
        # In layer order: a layer's scores depend on the decisions before it.
        for fitted in routings:
            scores = _scores(model, fitted)
            spread = scores.std()
            head = getattr(fitted.depth_route_gate[adapter_name], "score", None)
            if head is not None:
                for parameter in head.parameters():
                    parameter.div_(spread)
                scores = scores / spread
                # Half of the tokens on either side of its threshold, 0.
                if fitted.active_config().gate == "halting":
                    head.bias += scores.median()
                    scores = scores - scores.median()
            fitted.depth_route_quantiles[adapter_name].set(quantile_table(scores))
            if adapter_name in fitted.depth_route_controller:
                budget = fitted.config(adapter_name).budget
                fitted.depth_route_controller[adapter_name].set(
                    fitted.depth_route_quantiles[adapter_name](budget)
                )
    model.train(training)


def _scores(model: nn.Module, routing: Routing) -> torch.Tensor:
    """Scores of one layer on a batch of random tokens."""
    with record_routes(model) as trace:
        model(tokens(8, 16, seed=99))
    scores = trace[routing.layer_index].scores
    return scores[:, :1] if routing.active_config().granularity == "sequence" else scores


# What `build_routed` made consequential, which takes as long as all else, by what it depends on;
# conftest.py empties it before each file.
ADAPTERS: dict[tuple[Any, ...], list[dict[str, torch.Tensor]]] = {}


def build_routed(
    family: str,
    kind: str = "mlp",
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    budget: float = 0.5,
    adapter_name: str = "default",
    seed: int = 0,
    **fields: Any,
) -> PeftModel:
    """`routed` of a random model of `family`; both depend on nothing but the arguments."""
    base = build_base(family, attention, dtype)
    model = _injected(base, kind, budget, adapter_name, seed, fields)
    routings = list(routings_of(model))
    given = repr((family, kind, attention, dtype, budget, adapter_name, seed, fields))
    classes = tuple(type(module) for routing in routings for module in routing.modules())
    if (given, classes) not in ADAPTERS:
        make_consequential(model, adapter_name, seed)
        ADAPTERS[given, classes] = [
            {name: value.clone() for name, value in routing.state_dict().items()}
            for routing in routings
        ]
    for routing, known in zip(routings, ADAPTERS[given, classes], strict=True):
        routing.load_state_dict(known)
    return model.eval()


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids `[batch, length]`, none of them a special token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator).to(DEVICE)


@torch.no_grad()
def logits(model: Any, seed: int = 0) -> torch.Tensor:
    """The model's logits `[3, 12, vocabulary]` on fixed random tokens."""
    return model(tokens(3, 12, seed)).logits


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    family = find_family(base)
    return getattr(find_decoder(base, family), family.layers)


def adapter_parts(routing: Routing) -> set[str]:
    """Names of the adapters that own anything in `routing`."""
    names: set[str] = set()
    for group in (*routing.adapter_layer_names, *routing.other_param_names):
        names |= set(getattr(routing, group))
    return names
