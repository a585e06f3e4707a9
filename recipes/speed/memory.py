"""Measured memory: weights, KV cache, and the peak of everything else that a run holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_depthroute.base.cache import kv_cache_bytes
from hf_depthroute.bench.cases import Case
from hf_depthroute.bench.measurements import short_label
from hf_depthroute.bench.modes import fill_cache, new_cache
from hf_depthroute.bench.result_tables import Row
from hf_depthroute.bench.variants import Variants, budget_name
from hf_depthroute.inference.calibration import active_routings

from .variants import LEFT_OUT


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """The most memory that exists at one time during `run`, above what there was before it.

    On CPUs from the profiler's record of every allocation and release, which slows `run` down; on
    GPUs from the allocator's own statistics.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - before)
    # The profiler reports its start and its end on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    recorded: Any = profiler.profiler
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def module_bytes(modules: Sequence[nn.Module]) -> int:
    """Bytes of the parameters and buffers of some modules, each tensor once."""
    tensors = {id(t): t for m in modules for t in (*m.parameters(), *m.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


@torch.no_grad()
def measure_memory(variants: Variants, case: Case, input_ids: torch.Tensor) -> dict[str, Any]:
    """Bytes of the weights, and per variant of the KV cache after the prompt,
    and the peaks of prefill and decode.

    Args:
        variants: The variants of one model.
        case: The sizes.
        input_ids: `[B, T + 1]`, the prompts, and the token that is decoded after each.

    Returns:
        A JSON-ready dict: `base_bytes`, `adapter_bytes`, and per variant `kv_bytes`,
        `prefill_bytes` and `decode_bytes`. The last two are peaks above the weights; prefill's
        includes the KV cache that it makes, and decode's is above the cache that was there.
    """
    routings = active_routings(variants.model)
    adapter = module_bytes(routings)
    rows = {}
    prompt, following = input_ids[:, : case.length], input_ids[:, case.length :]
    for name in (name for name in variants.names if name != LEFT_OUT):
        with variants.using(name) as model:
            filled: Any = new_cache(model, "eager", input_ids.shape[1])
            fill_cache(model, filled, prompt)
            row = {"kv_bytes": kv_cache_bytes(filled)}

            def prefill(model: Any = model) -> None:
                model(prompt, use_cache=True, logits_to_keep=1)

            def decode(model: Any = model, cache: Any = filled) -> None:
                model(following, past_key_values=cache, use_cache=True, logits_to_keep=1)

            row["prefill_bytes"] = peak_bytes(prefill, input_ids.device)
            row["decode_bytes"] = peak_bytes(decode, input_ids.device)
            rows[name] = row
    total = module_bytes([variants.model])
    return {
        "batch": case.batch,
        "length": case.length,
        "logits": case.logits,
        "base_bytes": total - adapter,
        "adapter_bytes": adapter,
        "variants": rows,
        "kv_over_dense": {
            str(budget): round(
                rows[budget_name(budget)]["kv_bytes"] / rows[variants.reference]["kv_bytes"], 4
            )
            for budget in variants.budgets
        },
    }


def memory_rows(m: Mapping[str, Any]) -> Iterator[Row]:
    columns = {
        "KV cache MB": "kv_bytes",
        "prefill peak MB": "prefill_bytes",
        "decode peak MB": "decode_bytes",
    }
    for name, row in m["variants"].items():
        sizes = {"weights MB": m["base_bytes"] + (0 if name == "base" else m["adapter_bytes"])}
        sizes |= {column: row.get(key) for column, key in columns.items()}
        shown = {
            column: "-" if size is None else f"{size / 1e6:.2f}" for column, size in sizes.items()
        }
        yield {"case": short_label(m), "variant": name, **shown}
