"""How a variant is run, with the KV cache that goes with it.

`eager` fills a `DynamicCache`, `static` a `StaticCache` of the length that is needed, and
`compiled` the same under `torch.compile`, with CUDA graphs where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, StaticCache

MODES = ("eager", "static", "compiled")
_CHUNK = 8192  # tokens of one call that fills a cache: what a call holds in between stays small

_compiled: dict[int, tuple[nn.Module, Callable[..., object]]] = {}


def check_modes(names: Sequence[str] | None, device: torch.device) -> tuple[str, ...]:
    """The modes to measure, by default eager on CPUs and all on GPUs; `ValueError` for others."""
    if names is None:
        if device.type == "cuda":
            return MODES
        return ("eager",)
    unknown = [name for name in names if name not in MODES]
    if unknown or not names:
        raise ValueError(
            f"baseline {', '.join(unknown) or 'missing'}: use some of: {', '.join(MODES)}"
        )
    return tuple(name for name in MODES if name in names)


def as_run(model: nn.Module, mode: str) -> Callable[..., Any]:
    """The callable for this mode; a model is compiled once, and guards tell its variants apart."""
    if mode != "compiled":
        return model
    if id(model) not in _compiled:
        _raise_recompile_limit()
        on_gpu = next(model.parameters()).device.type == "cuda"
        kind = "reduce-overhead" if on_gpu else None
        _compiled[id(model)] = model, torch.compile(model, dynamic=False, fullgraph=True, mode=kind)
    return _compiled[id(model)][1]


def forget_compiled() -> None:
    """Drop what was compiled, so that its models can be freed."""
    if _compiled:  # a reset loads the compiler, which takes seconds
        _compiled.clear()
        torch.compiler.reset()


def first_sequences(input_ids: torch.Tensor) -> torch.Tensor:
    """The first sequences of `[B, T]` that hold at most 16,384 tokens, and at least one of them."""
    return input_ids[: max(1, 16384 // input_ids.shape[1])]


def random_tokens(model: Any, batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids `[batch, length]` on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=generator)
    return ids.to(next(model.parameters()).device)


def new_step(mode: str) -> None:
    """Between calls of a compiled model: outputs of the last one may be overwritten."""
    if mode == "compiled":
        torch.compiler.cudagraph_mark_step_begin()


def new_cache(model: Any, mode: str, length: int) -> Cache:
    """An empty cache for `length` tokens per sequence."""
    if mode == "eager":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=length)


@torch.no_grad()
def fill_cache(model: nn.Module, cache: Cache | None, input_ids: torch.Tensor) -> None:
    """Run the prompt `[B, T]` into `cache`, some tokens at a time."""
    for part in input_ids.split(max(1, _CHUNK // len(input_ids)), dim=1):
        model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)


def rewind_cache(cache: Any, length: int) -> None:
    """Forget all positions of `cache` from `length` on."""
    surplus = int(cache.get_seq_length()) - length
    for layer in cache.layers:
        position = getattr(layer, "cumulative_length", None)
        if isinstance(position, torch.Tensor):
            position.fill_(length)  # in place: a captured graph holds its address
        elif surplus:
            layer.crop(-surplus)


def _raise_recompile_limit() -> None:
    # Every budget and executor is a graph of its own; the default limit of 8 would send the rest to
    # eager mode.
    config: Any = torch._dynamo.config
    name = "cache_size_limit"
    if hasattr(config, "recompile_limit"):
        name = "recompile_limit"
    setattr(config, name, max(64, getattr(config, name)))
