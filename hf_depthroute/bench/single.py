"""One model timed in prefill and in decode: `bench`, and `bench_shape` for random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..calibration import active_routings
from ..config import DepthRouteConfig
from ..families import find_decoder, find_family
from ..tuner import get_depth_routed_model
from .inference import Workload, measure_inference
from .memory import measure_memory
from .results import measurements
from .shapes import dense_view, random_model, random_tokens
from .timing import describe_machine, measure_peaks, relative_load
from .variants import Variants, adapter_dtype, hold_adapter_in, wants_base_dtype

PARTS = ("prefill", "decode", "memory")


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
    masked: bool = False,
    tune: bool = False,
    baselines: Sequence[str] | None = None,
    parts: Sequence[str] = ("prefill", "decode"),
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure an adapter on its base: untouched base, adapter disabled, budget 1, and every budget.

    Args:
        model: A model with an active depth-routed adapter; its budget is restored.
        base: The untouched base, from `dense_view` before the adapter was injected; not timed when None.
        budgets: Budgets to time.
        input_ids: Prompts `[batch, length]`; random tokens when None.
        batch: Sequences in prefill.
        length: Prompt length, in tokens.
        decode_batch: Sequences in decode.
        decode_steps: Timed decoding steps after the prompt, of random tokens; 0 leaves decode out.
        repeats: Rounds; each times every variant once, in random order.
        recalibrate: Calibrate each budget on the tokens, so that random routers select the share asked for. Leave it
            off for an adapter whose own thresholds are to be measured.
        masked: Time a mask-after-compute router at the same budgets too.
        tune: Time the executors that `tune_execution` chooses too.
        baselines: Modes to run in, of `modes.MODES`; default: eager on CPUs, all of them on GPUs.
        parts: Some of `PARTS`.
        progress: Called with one line per finished part.

    Returns:
        A JSON-ready dict: per part what `measure_inference` or `measure_memory` returns, `setting`, `machine`
        and its `peaks`.

    Raises:
        ValueError: No routed adapter is active, or a name is unknown.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ValueError(f"part {unknown[0]!r} is unknown; use some of: {', '.join(PARTS)}")
    holders = active_routings(model)
    first = next(model.parameters())
    device, dtype = first.device, first.dtype
    peaks = measure_peaks(device, dtype)
    model.eval()
    prompts = random_tokens(model, batch, length) if input_ids is None else input_ids.to(device)
    batch, length = prompts.shape
    result: dict[str, Any] = {
        "setting": {
            "model_type": model.config.model_type,
            "parameters": sum(p.numel() for p in model.parameters()),
            "dtype": str(dtype).removeprefix("torch."),
            "routed_layers": [holder.layer_index for holder in holders],
            "adapter_dtype": adapter_dtype(model),
            "target": holders[0].active_config().target,
            "batch": batch,
            "length": length,
            "decode_batch": decode_batch,
            "decode_steps": decode_steps,
            "repeats": repeats,
        },
        "machine": describe_machine(device) | {"load_before": relative_load()},
        "peaks": {str(dtype).removeprefix("torch."): peaks.to_dict()},
    }
    following = random_tokens(model, decode_batch, max(1, decode_steps), seed=1)
    chosen = prompts[torch.arange(decode_batch, device=device) % batch]
    decoded = torch.cat([chosen, following], dim=1)
    for part in parts:
        if part == "decode" and decode_steps == 0:
            continue
        ids = decoded if part == "decode" else prompts
        tuned_on = ids[:, :length] if tune and part != "memory" else None
        variants = Variants(model, base, budgets, masked, ids if recalibrate else None, tuned_on, part == "decode")
        try:
            if part == "memory":
                tail = random_tokens(model, batch, 1, seed=1)
                result[part] = measure_memory(variants, Workload(torch.cat([ids, tail], dim=1), steps=1))
            else:
                # All logits of a prompt: taking the last ones of several sequences makes PyTorch copy the head's
                # weights on CPUs, a cost that would dilute every ratio.
                workload = Workload(ids, decode_steps if part == "decode" else 0)
                result[part] = measure_inference(variants, workload, modes=baselines, rounds=repeats, peaks=peaks)
        finally:
            variants.restore()
        if progress is not None:
            progress(f"{part} done")
    return result


def bench_sizes(
    model: Any,
    *,
    batch: Sequence[int] = (4,),
    length: Sequence[int] = (256,),
    decode_batch: Sequence[int] = (1,),
    parts: Sequence[str] = ("prefill", "decode"),
    **kwargs: Any,
) -> dict[str, Any]:
    """`bench` at every combination of sizes; takes its other keyword arguments.

    Returns:
        A JSON-ready dict with `machine` and `measurements`, as from `run_cases`.
    """
    found: list[dict[str, Any]] = []
    machine: dict[str, Any] = {}
    peaks: dict[str, Any] = {}
    for tokens in length:
        for part in parts:
            for size in decode_batch if part == "decode" else batch:
                result = bench(model, parts=[part], batch=size, decode_batch=size, length=tokens, **kwargs)
                found += measurements(result)
                machine = result["machine"]
                peaks |= result["peaks"]
    return {"name": "bench", "machine": machine, "peaks": peaks, "measurements": found}


def bench_shape(
    shape: str,
    *,
    layers: str | list[int] = "last:12",
    target: str = "ffn",
    gate: str = "mlp",
    budgets: Sequence[float] = (0.5, 0.25),
    dtype: torch.dtype = torch.bfloat16,
    depth: int | None = None,
    vocabulary: int | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> dict[str, Any]:
    """`bench` on a random model of one of `SHAPES`, with a random adapter; takes `bench`'s keyword arguments."""
    model = random_model(shape, dtype, depth=depth, vocabulary=vocabulary, device=device)
    base = dense_view(model)
    routed = get_depth_routed_model(model, DepthRouteConfig(layers=layers, target=target, gate=gate))
    if wants_base_dtype(torch.device(device), kwargs.get("baselines")):
        hold_adapter_in(routed, dtype)
    result = bench(routed, base=base, budgets=budgets, **kwargs)
    family = find_family(base)
    result["setting"] |= {
        "shape": shape,
        "gate": gate,
        "depth": len(getattr(find_decoder(base, family), family.layers)),
    }
    return result
