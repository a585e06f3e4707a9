"""Measured time of a routed model against its dense base, in prefill and in decode.

    eta = (T_dense - T_routed) / (T_dense - T_ideal),   T_ideal = T_dense * FLOPs_routed / FLOPs_dense

`eta` is 1 when every skipped FLOP shows on the clock. All variants share one set of weights and one process; their
runs are interleaved in random order; times are medians over rounds, and ratios are medians of each round's own ratio.
"""

from __future__ import annotations

import copy
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import nn

from .calibration import active_routings, calibrate
from .config import DepthRouteConfig
from .cost import route_cost
from .trace import count_routes, overridden
from .tuner import get_depth_routed_model

# Random weights at the shape of a released model. Speed does not depend on the values.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}


def random_model(shape: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Module:
    """A model with random weights at one of `SHAPES`.

    Raises:
        ValueError: `shape` is unknown.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape {shape!r} is unknown; use one of: {', '.join(SHAPES)}")
    sizes = dict(SHAPES[shape])
    config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def dense_view(model: nn.Module) -> nn.Module:
    """A copy of a model's modules around the very same tensors: the untouched base to compare with."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


@torch.no_grad()
def bench(
    model: Any,
    *,
    base: nn.Module | None = None,
    budgets: Sequence[float] = (0.5, 0.25),
    input_ids: torch.Tensor | None = None,
    batch: int = 4,
    length: int = 256,
    decode_batch: int = 1,
    decode_steps: int = 16,
    repeats: int = 15,
    recalibrate: bool = True,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Time prefill and decode: untouched base, adapter disabled, and every budget.

    Args:
        model: A model with an active depth-routed adapter; its budget is restored.
        base: The untouched base, from `dense_view` before the adapter was injected; not timed when None.
        budgets: Budgets to time.
        input_ids: Prompts `[batch, length]`; random tokens when None.
        batch: Sequences in prefill.
        length: Prompt length, in tokens.
        decode_batch: Sequences in decode.
        decode_steps: Timed decoding steps after the prompt; 0 leaves decode out.
        repeats: Rounds; each times every variant once, in random order.
        recalibrate: Calibrate each budget on the prompts, so that random routers select the share asked for. Leave it
            off for an adapter whose own thresholds are to be measured.
        progress: Called with one line per finished part.

    Returns:
        A JSON-ready dict: `prefill` and `decode` (each `dense_ms`, `disabled_over_base`, and per budget `routed_ms`,
        `ratio`, `eta`, `full_ratio`, FLOPs and tokens per second), `setting` and `machine`.

    Raises:
        ValueError: No routed adapter is active.
    """
    config = active_routings(model)[0].active_config()
    original = config.budget
    device = next(model.parameters()).device
    if input_ids is None:
        generator = torch.Generator().manual_seed(0)
        input_ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=generator)
    input_ids = input_ids.to(device)
    model.eval()
    # The thresholds of all budgets are found first: calibration must not run between timed rounds.
    saved = _quantiles(model)
    tables = {}
    for budget in budgets:
        if recalibrate:
            calibrate(model, [{"input_ids": input_ids}], budget=budget)
        tables[budget] = _quantiles(model)

    def use(budget: float) -> None:
        config.budget = budget
        _set_quantiles(model, tables[budget])

    result: dict[str, Any] = {
        "setting": {
            "model_type": model.config.model_type,
            "parameters": sum(p.numel() for p in model.parameters()),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "routed_layers": [holder.layer_index for holder in active_routings(model)],
            "batch": input_ids.shape[0],
            "length": input_ids.shape[1],
            "decode_batch": decode_batch,
            "decode_steps": decode_steps,
            "repeats": repeats,
        },
        "machine": describe_machine(device),
    }
    try:
        # All logits: taking the last ones of several sequences makes PyTorch copy the head's weights on CPUs, a cost
        # that would dilute every ratio.
        prefill = _Case(lambda m: m(input_ids, use_cache=True))
        rows, length = input_ids.shape
        cost_args = {"batch_size": rows, "length": length, "logits_to_keep": length}
        result["prefill"] = _measure(model, base, prefill, budgets, use, repeats, cost_args, input_ids.numel())
        _say(progress, f"prefill {rows} x {length} done")
        if decode_steps:
            prompt = input_ids[:1].expand(decode_batch, -1).contiguous()
            if decode_batch <= input_ids.shape[0]:
                prompt = input_ids[:decode_batch]
            decode = _Case(_decoder(decode_steps), setup=_prefilled(prompt))
            cost_args = {"batch_size": decode_batch, "length": 1, "cached": prompt.shape[1] + decode_steps // 2}
            tokens = decode_batch * decode_steps
            result["decode"] = _measure(model, base, decode, budgets, use, repeats, cost_args, tokens, decode_steps)
            _say(progress, f"decode batch {decode_batch} x {decode_steps} steps done")
    finally:
        config.budget = original
        _set_quantiles(model, saved)
    return result


def bench_shape(
    shape: str,
    *,
    layers: str = "last:12",
    gate: str = "mlp",
    budgets: Sequence[float] = (0.5, 0.25),
    dtype: torch.dtype = torch.bfloat16,
    **kwargs: Any,
) -> dict[str, Any]:
    """`bench` on a random model of one of `SHAPES`, with a random adapter; takes `bench`'s keyword arguments."""
    model = random_model(shape, dtype)
    base = dense_view(model)
    routed = get_depth_routed_model(model, DepthRouteConfig(layers=layers, gate=gate))
    result = bench(routed, base=base, budgets=budgets, **kwargs)
    result["setting"] |= {"shape": shape, "gate": gate}
    return result


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


class _Case:
    """Something to time: `run` on a model, or on what `setup` made from the model (not timed)."""

    def __init__(self, run: Callable[[Any], Any], setup: Callable[[nn.Module], Any] = lambda model: model) -> None:
        self.run, self.setup = run, setup

    def seconds(self, model: nn.Module) -> float:
        # What ran before leaves its mark on caches and on the allocator: run once untimed, as in steady use.
        self.run(self.setup(model))
        state = self.setup(model)
        _synchronise(model)
        start = time.perf_counter()
        self.run(state)
        _synchronise(model)
        return time.perf_counter() - start


def _measure(
    model: nn.Module,
    base: nn.Module | None,
    case: _Case,
    budgets: Sequence[float],
    use: Callable[[float], None],
    repeats: int,
    cost_args: dict[str, int],
    tokens: int,
    steps: int = 1,
) -> dict[str, Any]:
    times: dict[Any, list[float]] = {}
    variants: list[Any] = [*(["base"] if base is not None else []), "disabled", *budgets]
    for round_ in range(repeats + 2):  # two rounds to warm up
        for variant in random.Random(round_).sample(variants, len(variants)):
            if variant == "base" and base is not None:
                seconds = case.seconds(base)
            elif variant == "disabled":
                with overridden(model, "_disable_adapters", True):
                    seconds = case.seconds(model)
            else:
                use(float(variant))
                seconds = case.seconds(model)
            if round_ >= 2:
                times.setdefault(variant, []).append(seconds)
    reference = "base" if base is not None else "disabled"
    median = {variant: statistics.median(values) for variant, values in times.items()}
    # Ratios are taken within a round, where the machine's drift is the same for both sides.
    ratios = {
        variant: statistics.median(t / d for t, d in zip(values, times[reference])) for variant, values in times.items()
    }
    dense = median[reference]
    part: dict[str, Any] = {
        "dense_ms": round(dense * 1e3 / steps, 3),
        "dense_tokens_per_s": round(tokens / dense, 1),
        "disabled_over_base": round(ratios["disabled"], 4) if base is not None else None,
        "budgets": {},
    }
    for budget in budgets:
        use(budget)
        shares = _full_ratio(model, case)
        cost = route_cost(model, full_ratio=shares, **cost_args)
        ideal = cost.flops_routed / cost.flops_dense
        part["budgets"][str(budget)] = {
            "routed_ms": round(median[budget] * 1e3 / steps, 3),
            "ratio": round(ratios[budget], 4),
            "speedup": round(1 / ratios[budget], 4),
            "eta": round((1 - ratios[budget]) / (1 - ideal), 4),
            "full_ratio": round(statistics.mean(shares.values()), 4),
            "flops_routed_over_dense": round(ideal, 4),
            "tokens_per_s": round(tokens / median[budget], 1),
        }
    return part


def _full_ratio(model: nn.Module, case: _Case) -> dict[int, float]:
    state = case.setup(model)
    with count_routes(model) as counter:
        case.run(state)
    return counter.full_ratio()


def _prefilled(prompt: torch.Tensor) -> Callable[[nn.Module], tuple[nn.Module, Any, torch.Tensor]]:
    def setup(model: nn.Module) -> tuple[nn.Module, Any, torch.Tensor]:
        out = model(prompt, use_cache=True, logits_to_keep=1)
        return model, out.past_key_values, out.logits.argmax(-1)

    return setup


def _decoder(steps: int) -> Callable[[tuple[nn.Module, Any, torch.Tensor]], None]:
    def run(state: tuple[nn.Module, Any, torch.Tensor]) -> None:
        model, cache, token = state
        for _ in range(steps):
            token = model(token, past_key_values=cache, use_cache=True).logits.argmax(-1)

    return run


def _quantiles(model: nn.Module) -> list[torch.Tensor]:
    return [h.active_quantiles().values.clone() for h in active_routings(model)]


def _set_quantiles(model: nn.Module, tables: list[torch.Tensor]) -> None:
    for holder, table in zip(active_routings(model), tables):
        holder.active_quantiles().values.copy_(table)


def _synchronise(model: nn.Module) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize(next(model.parameters()).device)


def _say(progress: Callable[[str], None] | None, line: str) -> None:
    if progress is not None:
        progress(line)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = {line.split(":", 1)[1].strip() for line in file if line.startswith("model name")}
        return ", ".join(sorted(names)) or platform.processor()
    except OSError:
        return platform.processor()
