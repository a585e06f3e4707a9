"""Reading a call of the decoder stack: which of its tokens are real, last, or start a document.

Shapes: B batch, T positions, S positions of a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from ..base.cache import cache_of, is_paged
from ..config.adapter import ConfigError, DepthRouteConfig
from ..data.batches import breaks_of, document_starts
from ..parts.rules import tail_mask, where_real


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `module`, by the names that its `forward` gives them."""
    return dict(zip(inspect.signature(module.forward).parameters, args)) | kwargs


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The ids or embeddings that the stack is called with."""
    given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
    return next((x for x in given if x is not None), None)


def token_mask_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Which new tokens of a decoder's call are real, bool `[B, T]`; None if no mask says so.

    Layers see a 4D mask, a boolean mask, none, or a block mask, depending on the attention
    implementation.
    """
    inputs = inputs_of(args, kwargs)
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict):  # one per kind of attention, made by `generate` for static caches
        mask = next(iter(mask.values()), None)
    # Its keys are in no order of time.
    if inputs is None or not isinstance(mask, torch.Tensor) or is_paged(kwargs):
        return None
    batch, length = inputs.shape[:2]
    if mask.ndim == 2 and mask.shape[1] >= length:
        return _of_new_tokens(mask, length, kwargs)
    if mask.ndim == 4 and length > 1:
        cache = kwargs.get("past_key_values")
        past = 0 if cache is None else int(cache.get_seq_length())
        allowed = mask if mask.dtype == torch.bool else mask == 0
        # In a mask of a sliding window that has moved on, the new positions come last.
        start = min(past, max(0, mask.shape[-1] - length))
        # A position that no query may look at is padding.
        real = allowed[:, 0, :, start : start + length].any(dim=1).expand(batch, -1)
        if real.shape[1] == length:
            return real
    return None


def _of_new_tokens(mask: torch.Tensor, length: int, kwargs: dict[str, Any]) -> torch.Tensor:
    """The new tokens' columns of a mask `[B, S]`, bool `[B, T]`: those after the cache's.

    A mask may be longer, as one that was made for a whole static cache. In one that is shorter,
    they come last.
    """
    spare = mask.shape[1] - length
    cache = cache_of(kwargs)
    past = 0 if cache is None else cache.get_seq_length()
    if not isinstance(past, torch.Tensor):
        start = min(past, spare)
        return mask[:, start : start + length].bool()
    # Waits for no device.
    columns = past.to(mask.device).clamp(max=spare) + torch.arange(length, device=mask.device)
    return mask[:, columns].bool()


def splits_a_packed_row(
    configs: Iterable[DepthRouteConfig], inputs: torch.Tensor, kwargs: dict[str, Any]
) -> bool:
    """Whether a layer would decide about a row as one sequence that holds several."""
    told = is_paged(kwargs) or kwargs.get("cu_seq_lens_q") is not None
    positions = kwargs.get("position_ids")
    masked = kwargs.get("attention_mask") is not None
    if not told and (positions is None or masked or inputs.shape[1] == 1):
        return False
    if not any(c.granularity == "sequence" or c.causal_rule == "running" for c in configs):
        return False
    return told or positions is None or bool(breaks_of(positions).any())


def last_in_full(
    decoder: nn.Module,
    configs: Collection[DepthRouteConfig],
    in_full: torch.Tensor | None,
    inputs: torch.Tensor,
    real: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """The tokens that `phases="prefill"` runs in full, bool `[B, T]`; None: no or all tokens.

    `in_full` are those that a caller names, of the input's shape.
    """
    tails = {config.last_in_full for config in configs if config.phases == "prefill"}
    if len(tails) > 1:
        raise ConfigError(
            f"adapters that are active together need one prompt_tail, not {sorted(tails)}"
        )
    tail = max(tails, default=0)
    if tail > 0 and in_full is not None:
        if in_full.shape != inputs.shape[:2]:
            raise ValueError(
                f"in_full has shape {tuple(in_full.shape)}, the input {tuple(inputs.shape[:2])}"
            )
        return where_real(in_full.to(inputs.device), real)
    if inputs.shape[1] > tail > 0:
        seen = seen_by_head(decoder, configs, inputs, real)
        return last_tokens_of(inputs, seen, kwargs, tail)
    return None


def seen_by_head(
    decoder: nn.Module,
    configs: Iterable[DepthRouteConfig],
    inputs: torch.Tensor,
    real: torch.Tensor | None,
) -> torch.Tensor | None:
    """Among which tokens the model's head takes the last one, bool `[B, T]`; None: among all.

    A sequence classifier passes over every token that has the id of padding, with a mask or
    without; of embeddings it takes the last, whatever the mask says.
    """
    if not any(config.task_type == "SEQ_CLS" for config in configs):
        return real
    if inputs.is_floating_point():
        return None
    padding = getattr(getattr(decoder, "config", None), "pad_token_id", None)
    if padding is None:
        return real
    return where_real(inputs != padding, real)


def last_tokens_of(
    inputs: torch.Tensor, token_mask: torch.Tensor | None, kwargs: dict[str, Any], count: int
) -> torch.Tensor:
    """The last `count` real tokens of every sequence of a call of the decoder stack, bool `[B, T]`.

    Packed rows hold several sequences; of a shorter one it is all of its tokens.
    """
    ends = _ends_of(inputs, token_mask, kwargs)
    if count == 1:
        return ends
    return tail_mask(ends, count, token_mask)


def _ends_of(
    inputs: torch.Tensor, token_mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> torch.Tensor:
    """The last real token of every sequence, bool `[B, T]`."""
    last = torch.zeros(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    ends = kwargs.get("cu_seq_lens_q")
    positions = kwargs.get("position_ids")
    if ends is not None:
        last.view(-1)[ends[1:].long() - 1] = True
        return last
    if token_mask is not None:
        last = token_mask & (token_mask.flip(1).cumsum(1).flip(1) == 1)
    else:
        last[:, -1] = True
    mask = kwargs.get("attention_mask")
    one_a_row = isinstance(mask, torch.Tensor) and mask.ndim == 2
    if positions is not None and positions.ndim == 2 and not one_a_row:
        ends = breaks_of(positions)[:, 1:]
        last[:, :-1] |= ends if token_mask is None else ends & token_mask[:, :-1]
    return last


def token_ids_of(
    inputs: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The token ids of a decoder's call, `[B, T]`, and where a document starts, bool `[B, T]`.

    `document_starts` or `cu_seq_lens_q` says so; None if neither says anything.

    Raises:
        ConfigError: The call has no token ids, or is one of continuous batching.
    """
    if inputs.is_floating_point():
        raise ConfigError(
            "the adapter's memory looks token ids up, and inputs_embeds holds none; pass input_ids"
        )
    if is_paged(kwargs):
        raise ConfigError(
            "the adapter's memory does not know a request's earlier tokens in continuous batching; "
            "generate without it"
        )
    starts = None
    ends = kwargs.get("cu_seq_lens_q")
    positions = kwargs.get("position_ids")
    if ends is not None:
        starts = torch.zeros_like(inputs, dtype=torch.bool)
        starts.view(-1)[ends[:-1].long()] = True
    elif positions is not None and positions.ndim == 2 and inputs.shape[1] > 1:
        starts = document_starts({**kwargs, "input_ids": inputs})
    return inputs, starts
