"""Dropped (token, expert) pairs of a mixture-of-experts block are not computed,
whatever runs the experts.

Legend: N tokens, K experts of a token, P pairs that are left, d model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from ..base.contexts import hooked, of_this_thread


@dataclass
class Pairs:
    """The decisions of one call of the experts.

    Attributes:
        index: Int64 `[N, K]`, the experts that the block's own router chose.
        weights: `[N, K]`, its weights.
        factor: Float `[N, K]`, what the weights of the pairs were multiplied by; 1 or 0 at
            inference.
    """

    index: Tensor
    weights: Tensor
    factor: Tensor


@contextmanager
def routed_pairs(
    experts: nn.Module, decide: Callable[[Tensor], tuple[Tensor, Tensor]], compact: bool
) -> Iterator[list[Pairs]]:
    """While the block's forward runs inside, its experts see the chosen pairs only.

    `experts` are called with `(x [N, d], index [N, K], weights [N, K])`; `decide` makes the mask
    and the factor of `index`, both `[N, K]`. `compact` leaves dropped pairs out (inference);
    otherwise every pair is computed, its weight times the factor. The list that is yielded holds
    the one `Pairs` after the call.
    """
    seen: list[Pairs] = []
    kept: list[Tensor] = []

    def choose(
        module: nn.Module, args: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        x, index, weights = args
        mask, factor = decide(index)
        seen[:] = [Pairs(index, weights, factor)]
        if not compact:
            return x, index, weights * factor.to(weights.dtype)
        token_P, slot_P = mask.nonzero(as_tuple=True)
        if token_P.numel() == mask.numel():
            return None  # nothing is dropped: bit for bit what the base computes
        # One row per pair: all implementations of the experts take it, and none computes more.
        kept[:] = [token_P]
        return x[token_P], index[token_P, slot_P][:, None], weights[token_P, slot_P][:, None]

    def gather(module: nn.Module, args: object, out: Tensor) -> Tensor | None:
        if not kept:
            return None
        (token_P,) = kept
        return out.new_zeros(len(seen[0].index), out.shape[-1]).index_add(0, token_P, out)

    handles = [
        experts.register_forward_pre_hook(of_this_thread(choose)),
        experts.register_forward_hook(of_this_thread(gather)),
    ]
    with hooked(handles):
        yield seen
