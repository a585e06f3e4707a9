"""From the residual stream to logits and losses: final norm, LM head, what comes after the head,
cross-entropy.

Shapes: B batch, T positions, N rows, d model width, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .families import text_config
from .stack import stack_of, unwrapped

_LOGITS = 2**25  # elements of the logits that exist at one time: 128 MiB in float32


class LMHead:
    """`logits = f(head(norm(stream)))`: `[..., d] -> [..., V]`,
    `f` a scale or a soft cap where the family has one.

    Args:
        model: A transformers model of a supported family with an LM head, or a `PeftModel` around
            one.

    The head and the norm are the model's of the moment: resizing its embeddings gives it another
    head.

    Raises:
        ValueError: The model has no LM head.
    """

    def __init__(self, model: nn.Module) -> None:
        check_head(model, "a loss of text")
        self._model: Any = model
        self._stack = stack_of(model)
        self.change = logit_change(model)

    @property
    def norm(self) -> nn.Module:
        """The decoder stack's final norm."""
        return cast(nn.Module, getattr(self._stack.decoder, self._stack.family.final_norm))

    @property
    def head(self) -> nn.Module:
        """The LM head."""
        return cast(nn.Module, self._model.get_output_embeddings())

    def __call__(self, stream: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(stream))
        if self.change is None:
            return logits
        kind, value = self.change
        if kind == "softcap":
            return torch.tanh(logits / value) * value
        if kind == "multiply":
            return logits * value
        return logits / value

    def chunks(self, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Tensors of N rows in pieces whose logits have at most `_LOGITS` elements."""
        size = max(1, _LOGITS // int(text_config(self._model.config).vocab_size))
        return zip(*(part.split(size) for part in rows))

    def token_losses(self, rows_Nd: Tensor, targets_N: Tensor) -> Tensor:
        """`token_losses` of the logits of `rows_Nd`, which never exist all at one time."""
        pieces = self.chunks(rows_Nd, targets_N)
        return torch.cat([token_losses(self(rows), targets) for rows, targets in pieces])


def logits_at(model: Any, batch: Mapping[str, Any], wanted_BT: Tensor) -> Tensor:
    """The logits of some positions, `[N, V]`, of a pass without a KV cache.

    A position that no row wants does not go through the head, where the model takes
    `logits_to_keep`. `batch` has `input_ids` `[B, T]`; `wanted_BT` is true at `N` positions.
    """
    if not keeps_logits(model):
        return cast(Tensor, model(**batch, use_cache=False).logits[wanted_BT])
    places = wanted_BT.any(0).nonzero().squeeze(1)
    logits: Tensor = model(**batch, use_cache=False, logits_to_keep=places).logits
    return logits[wanted_BT[:, places]]


def keeps_logits(model: nn.Module) -> bool:
    """Whether the model takes `logits_to_keep`; a classifier has no choice of logits."""
    return "logits_to_keep" in inspect.signature(unwrapped(model).forward).parameters


def has_head(model: Any) -> bool:
    """Whether `model` has an LM head."""
    read = getattr(model, "get_output_embeddings", None)
    return read is not None and read() is not None


def check_head(model: nn.Module, wanted: str) -> None:
    """Raise `ValueError` where `model` has no LM head, which `wanted` needs."""
    if not has_head(model):
        name = type(unwrapped(model)).__name__
        raise ValueError(
            f"{wanted} needs a model with an LM head, and {name} has none; use it on a causal "
            "language model"
        )


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats of each position's logits `[..., V]`, float32 `[...]`;
    0 where the target is -100."""
    targets = targets.to(logits.device)
    losses = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


def predicting(labels_BT: Tensor, token_mask_BT: Tensor | None) -> Tensor:
    """Bool `[B, T - 1]`: the positions whose next token is to be predicted.

    Args:
        labels_BT: As in transformers: position `t` predicts `labels[:, t + 1]`; -100 is not
            predicted.
        token_mask_BT: Nonzero at real tokens; both the position and the next one have to be. None:
            all are.
    """
    counted = labels_BT[:, 1:] != -100
    if token_mask_BT is None:
        return counted
    real_BT = token_mask_BT.bool().to(labels_BT.device)
    return counted & real_BT[:, 1:] & real_BT[:, :-1]


def logit_change(model: nn.Module) -> tuple[str, float] | None:
    """The model's change to its logits, `("multiply" | "divide" | "softcap", value)`, or None."""
    row = stack_of(model).family.logits
    if row is None:
        return None
    kind, field = row
    value = getattr(text_config(model.config), field, None)
    if value is None:
        return None
    return kind, float(value)
