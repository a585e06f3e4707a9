"""A measurement of a routed model: `Case`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..config.adapter import check_budget
from .modes import check_modes


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement.

    `logits` are those of a prompt that are computed: `"all"`, or the `"last"` position's. On CPUs
    PyTorch copies the head's weights to take the last ones of several sequences, a cost that
    dilutes every ratio.

    Raises:
        ValueError: A value cannot be used. The message is one line.
    """

    KINDS: ClassVar[tuple[str, ...]] = ("prefill", "decode")

    case: str  # one of `KINDS`
    budgets: tuple[float, ...] = (0.5, 0.25)  # in (0, 1)
    baselines: tuple[str, ...] | None = None  # some of `MODES`; None: eager on CPUs, all on GPUs
    batch: int = 4  # sequences
    length: int = 256  # tokens of the prompt
    steps: int = 16  # of decoding
    logits: str = "all"
    rounds: int = 15  # each times every variant once, in random order

    def __post_init__(self) -> None:
        self.check_choice("case", self.KINDS)
        self.check_choice("logits", ("all", "last"))
        for name in ("batch", "length", "steps", "rounds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        if any(check_budget(budget) == 1.0 for budget in self.budgets):
            raise ValueError(
                f"budgets={list(self.budgets)}: give numbers in (0, 1); budget 1 is always measured"
            )
        if self.baselines is not None:
            check_modes(self.baselines, torch.device("cpu"))

    def check_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise ValueError(f"{name}={getattr(self, name)!r}: use one of: {', '.join(allowed)}")

    @property
    def decoded(self) -> int:
        """The timed decoding steps, of tokens that are given one by one; 0 in prefill."""
        return self.steps if self.case == "decode" else 0

    def pass_sizes(self) -> dict[str, Any]:
        """The sizes of one timed pass, for `count_flops`; in decode the middle one's."""
        if self.decoded:
            middle = self.length + self.steps // 2
            return {"batch": self.batch, "length": 1, "cached": middle, "logits": 1}
        kept = self.length if self.logits == "all" else 1
        return {"batch": self.batch, "length": self.length, "cached": 0, "logits": kept}

    def sizes(self) -> str:
        """The part of a label before the model: the run."""
        if self.case == "decode":
            return f"decode {self.batch} x {self.steps} steps after {self.length}"
        return f"{self.case} {self.batch} x {self.length}"
