"""`TARGETS`: what of a decoder layer an easy token can skip, and what a target declares of it.

The rows are the classes in `execution.targets`, which run a target; here is what is known of one
without a model. Adding a target is one class, `execution.target.Target`, and one row, from this
package or from another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar


class TargetTraits:
    """The declarations of a target.

    Attributes:
        skips: What an easy token skips, in the order that it runs: `"attention"`, `"ffn"`, or
            `"experts"` (those of the FFN, whose own router runs for every token). Costs are counted
            from it. `"memory"` is no part of the base.
        called: How a message names what one decision is about, in the plural.
        decides: By granularity, what one decision settles, as a model card says it. A target that
            cannot be decided per `"token"` or per `"sequence"` leaves it out.
        norm_of: The sublayer whose norm the cheap branch copies, `"attention"` or `"ffn"`.
        per_pair: Whether a decision is about a token and one of its experts, and not about a token.
        reads_ids: Whether it needs the token ids, which the `ForwardContext` then has.
        row_wise: Whether a token's paths read its own row of the stream alone, and no decision is
            about a pair: only such a target runs where the rows of many requests share a batch
            (vLLM).
        fixed: Fields of `DepthRouteConfig` that have one value with this target: it stands in for
            the field's default, and any other value is refused.
    """

    skips: ClassVar[tuple[str, ...]]
    called: ClassVar[str]
    decides: ClassVar[Mapping[str, str]]
    norm_of: ClassVar[str]
    per_pair: ClassVar[bool] = False
    reads_ids: ClassVar[bool] = False
    row_wise: ClassVar[bool] = False
    fixed: ClassVar[Mapping[str, object]] = MappingProxyType({})

    @property
    def skips_attention(self) -> bool:
        return "attention" in self.skips

    @property
    def skips_ffn(self) -> bool:
        """Whether the whole FFN is skipped; of the target `"experts"` its router stays."""
        return "ffn" in self.skips


TARGETS: dict[str, TargetTraits] = {}  # every target by its name; `execution.targets` adds ours
