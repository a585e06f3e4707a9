"""The language-model loss from hidden states: logits exist for a few rows at a time,
never as `[B, T, V]`.

Loss and gradient of a chunk are computed together while its logits are there, so the forward pass
leaves one gradient `[N, d]` instead of logits, log-probabilities and their gradient, each `[N, V]`.
Where the LM head is frozen, as it is when only routers train, no gradient of its weight is
computed. On CUDA, where the package `liger-kernel` is installed, its kernel is used.

Shapes: B batch, T positions, N predicted tokens, d model width, V vocabulary.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from ..adapter.labels import has_other_hooks
from ..base.families import FAMILIES
from ..base.lm_head import logit_change
from ..base.readable import is_watched, is_whole

# Float32 logits that exist at one time, in elements. The head's weight is read twice a chunk; with
# fewer, that shows.
_LOGITS = {"cpu": 2**24, "cuda": 2**27}


class FusedLoss:
    """In the block, `model(..., labels=labels).loss` is computed without logits, to the same value.

        with FusedLoss(model):
            loss = model(**batch).loss

    The LM head hands the hidden states on, and the model's loss function applies it chunk by chunk.
    What the output calls `logits` then are the hidden states. A call without labels has no place in
    the block. One object serves many blocks: a compiled model is compiled for its functions. Other
    threads that run the model meanwhile have logits.

    Raises:
        ValueError: `model` is none that this works for; `fused_loss_obstacle` says why.
        RuntimeError: In the forward pass: the model changes its logits between the head and the
            loss.
    """

    def __init__(self, model: nn.Module) -> None:
        obstacle = fused_loss_obstacle(model)
        if obstacle is not None:
            raise ValueError(f"no fused loss: {obstacle}")
        self._base = _base_of(model)
        self._head = cast(nn.Linear, self._base.get_output_embeddings())
        self._passed: torch.Tensor | None = None
        self._thread: int | None = None
        # Bound once.
        self._forward = self._pass_through
        self._loss = self._causal_lm_loss

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._head.__dict__["forward"] = self._forward
        self._base.__dict__["_loss_function"] = self._loss

    def __exit__(self, *exception: object) -> None:
        self._head.__dict__.pop("forward", None)
        self._base.__dict__.pop("_loss_function", None)
        self._passed = None

    def _is_other_thread(self) -> bool:
        return not torch.compiler.is_compiling() and threading.get_ident() != self._thread

    def _pass_through(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self._is_other_thread():
            return nn.Linear.forward(self._head, hidden_states)
        self._passed = hidden_states
        return hidden_states

    def _causal_lm_loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """transformers' `ForCausalLMLoss`, of hidden states `[B, T, d]` instead of logits."""
        if self._is_other_thread():
            items = cast(torch.Tensor | None, num_items_in_batch)  # transformers takes numbers too
            return ForCausalLMLoss(
                logits, labels, vocab_size, items, ignore_index, shift_labels, **kwargs
            )
        if logits is not self._passed:
            raise RuntimeError(
                f"{type(self._base).__name__} changes its logits between the LM head and the loss, "
                "which a fused loss cannot follow; set fused_loss=False"
            )
        self._passed = None
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        head = self._head
        total, count = fused_cross_entropy(
            logits, shift_labels.to(logits.device), head.weight, head.bias, ignore_index
        )
        # The mean over no target is NaN, as it is there, and its gradient zero.
        if num_items_in_batch is None:
            return torch.where(count > 0, total / count.clamp(min=1), torch.nan)
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch


def fused_loss_obstacle(model: nn.Module) -> str | None:
    """Why `FusedLoss` does not work for `model`; None if it does.

    The model's forward has to be `loss_function(lm_head(hidden_states), labels)` of a known family,
    with the standard loss, a plain linear head whose weight is whole and on one device, and no hook
    that reads the logits.
    """
    base = _base_of(model)
    head = getattr(base, "get_output_embeddings", lambda: None)()
    config = getattr(base, "config", None)
    if getattr(config, "model_type", None) not in FAMILIES:
        return f"the forward pass of {type(base).__name__} is not known"
    change = logit_change(base)
    if change is not None:
        return f"the model changes its logits after the LM head ({change[0]} {change[1]:g})"
    loss = getattr(base, "loss_function", None)
    if "_loss_function" in base.__dict__ or loss is not ForCausalLMLoss:
        return "the model has a loss function of its own"
    if type(head) is not nn.Linear or "forward" in head.__dict__:
        return "the LM head is not a plain linear layer"
    if head.out_features != getattr(config, "vocab_size", None):
        return "the LM head and the vocabulary differ in size"
    if not is_whole(head.weight):
        return "the weight of the LM head is quantised, split or not loaded"
    if is_watched(head) or any(has_other_hooks(m) or hasattr(m, "_hf_hook") for m in (model, base)):
        return "the model or its LM head has forward hooks"
    return None


def fused_cross_entropy(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the cross-entropies of `softmax(hidden @ weight.T + bias)`, and the number of targets.

    As a linear layer, in the dtype of `hidden` or of autocast, and `F.cross_entropy` of its result
    in float32.

    Args:
        hidden: `[..., d]`; its gradient is computed in the forward pass.
        targets: Int64 `[...]`.
        weight: `[V, d]`; gets a gradient if it wants one.
        bias: `[V]`.
        ignore_index: Positions with this target do not count.

    Returns:
        The sum, float32 `[]`, and the count, int64 `[]`. The sum cannot be differentiated twice.
    """
    device = hidden.device.type
    dtype = hidden.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    targets_N = targets.reshape(-1)
    with torch.autocast(device, enabled=False):
        operands = [
            None if x is None else x.to(dtype)
            for x in (hidden.reshape(-1, hidden.shape[-1]), weight, bias)
        ]
        usable = device == "cuda" and not torch.compiler.is_compiling()
        kernel = _liger_sum() if usable else None
        if kernel is not None:
            total = kernel(*operands, targets_N, ignore_index)
        else:
            graph = torch.is_grad_enabled()
            wanted = [x is not None and x.requires_grad and graph for x in operands]
            total, *_ = _chunked_cross_entropy(*operands, targets_N, ignore_index, wanted)
    return total, (targets_N != ignore_index).sum()


# An operator of its own, so that a compiler takes it as one piece.
@torch.library.custom_op(
    "hf_depthroute::chunked_cross_entropy",
    mutates_args=(),
    schema=(
        "(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, int ignore_index, bool[] "
        "wanted) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _chunked_cross_entropy(
    hidden_Nd: torch.Tensor,
    weight_Vd: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    ignore_index: int,
    wanted: list[bool],
) -> tuple[torch.Tensor, ...]:
    """The sum of the cross-entropies, and its gradients where `wanted`, else empty tensors."""
    results = _results(hidden_Nd, weight_Vd, bias_V, wanted)
    total, grad_hidden_Nd, grad_weight_Vd, grad_bias_V = results
    counted_N = targets_N != ignore_index
    rows_N = torch.arange(len(targets_N), device=targets_N.device)
    # Elsewhere, to know how many there are would be to wait for the device.
    if hidden_Nd.device.type == "cpu":
        rows_N = counted_N.nonzero().squeeze(-1)
    for rows_n in rows_N.split(max(1, _LOGITS.get(hidden_Nd.device.type, 2**24) // len(weight_Vd))):
        rows_nd, targets_n, counted_n = (
            x.index_select(0, rows_n) for x in (hidden_Nd, targets_N, counted_N)
        )
        # In place on one buffer: logits, exponentials, probabilities, the gradient of the sum by
        # the logits.
        buffer_nV = F.linear(rows_nd, weight_Vd, bias_V).float()
        at = targets_n.clamp(min=0)[:, None]  # what is ignored may be negative
        reached_n1 = buffer_nV.gather(1, at)
        largest_n1 = buffer_nV.amax(-1, keepdim=True)
        sums_n1 = buffer_nV.sub_(largest_n1).exp_().sum(-1, keepdim=True)
        losses_n = (largest_n1 + sums_n1.log() - reached_n1).squeeze(1)
        total += losses_n.masked_fill(~counted_n, 0.0).sum()
        if any(wanted):
            buffer_nV.mul_(counted_n[:, None] / sums_n1)
            buffer_nV.scatter_add_(1, at, -counted_n[:, None].float())
        if wanted[0]:
            grad_hidden_Nd.index_copy_(0, rows_n, buffer_nV.to(rows_nd.dtype) @ weight_Vd)
        if wanted[1]:
            grad_weight_Vd += buffer_nV.to(rows_nd.dtype).T @ rows_nd
        if wanted[2]:
            grad_bias_V += buffer_nV.sum(0)
        del buffer_nV  # before the next chunk's exists
    return total, grad_hidden_Nd, grad_weight_Vd, grad_bias_V


@_chunked_cross_entropy.register_fake
def _results(
    hidden_Nd: torch.Tensor, weight_Vd: torch.Tensor, bias_V: torch.Tensor | None, *rest: Any
) -> tuple[torch.Tensor, ...]:
    """Zeros of the results' shapes; sums over all chunks are in float32, whatever is summed."""
    rows, weight, bias = rest[-1]
    return (
        hidden_Nd.new_zeros((), dtype=torch.float32),
        torch.zeros_like(hidden_Nd) if rows else hidden_Nd.new_zeros(0),
        weight_Vd.new_zeros(weight_Vd.shape if weight else 0, dtype=torch.float32),
        weight_Vd.new_zeros(len(weight_Vd) if bias else 0, dtype=torch.float32),
    )


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.wanted = inputs[-1]
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:3]]


def _scale_gradients(
    ctx: Any, grad: torch.Tensor, *unused: object
) -> tuple[torch.Tensor | None, ...]:
    # The scale of the loss comes last, so that float16 gradients do not underflow before a loss
    # scaler is applied.
    kept = zip(ctx.saved_tensors, ctx.dtypes, ctx.wanted)
    scaled = [(part * grad).to(dtype) if wants else None for part, dtype, wants in kept]
    return (*scaled, None, None, None)


_chunked_cross_entropy.register_autograd(_scale_gradients, setup_context=_keep_gradients)


@functools.cache
def _liger_sum() -> Callable[..., torch.Tensor] | None:
    """`liger-kernel`'s `(hidden, weight, bias, targets, ignore_index) -> sum`; None without it."""
    try:
        from liger_kernel.transformers.fused_linear_cross_entropy import (
            LigerFusedLinearCrossEntropyLoss,
        )
    except ImportError:
        return None

    def total(hidden: Any, weight: Any, bias: Any, targets: Any, ignore_index: int) -> Any:
        loss: Any = LigerFusedLinearCrossEntropyLoss(ignore_index=ignore_index, reduction="sum")
        return loss(weight, hidden, targets, bias)

    return total


def _base_of(model: Any) -> Any:
    """The transformers model inside PEFT's wrappers."""
    while hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model
