"""The LoRAs of requests, next to a routed adapter.

vLLM finds the LoRA of a row by its place in the batch, and gathered rows have another. So a routed
FFN runs once for each LoRA that changes it, with the rows of that LoRA alone; the rows of other
LoRAs, and of none, run together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from torch import Tensor, nn
from vllm.platforms import current_platform

NONE = -1  # the slot of rows without a LoRA


class LoraRows:
    """Adds LoRAs to the outputs of vLLM's linear layers, in the place of its `PunicaWrapperBase`.

    It serves the FFNs that run in the operator. On a CPU it serves all layers: there vLLM's own
    gives rows without a LoRA the one in the last slot. `enabled` is whether vLLM serves LoRAs.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._manager: Any = None
        self._vllms: Any = None
        self._names: dict[nn.Module, set[str]] = {}  # of an FFN's layers that may have LoRAs
        self._runs: list[tuple[int, int]] = []  # of rows with one LoRA: its id or 0, their number
        self._slots: dict[int, int] = {}  # of LoRAs by id
        self._slot: int | None = None  # of all rows, in `of`

    def adopt(self, manager: Any, ffns: Iterable[nn.Module]) -> None:
        """Serve the layers of `ffns`; `manager`, vLLM's `LoRAModelManager`, tells this object of
        every batch then."""
        self._manager = manager
        ((key, self._vllms),) = manager.punica_wrapper_mapping.items()
        manager.punica_wrapper_mapping[key] = self
        names = {module: name for name, module in manager.modules.items()}
        for ffn in ffns:
            self._names[ffn] = {names[module] for module in ffn.modules() if module in names}
        served = set(names.values()) if current_platform.is_cpu() else set()
        for name in served.union(*self._names.values()):
            manager.modules[name].set_mapping(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vllms, name)

    def update_metadata(
        self, mapping: Any, lora_index_to_id: Sequence[int | None], *args: Any, **kwargs: Any
    ) -> None:
        """Called by vLLM before a forward pass whose rows have other LoRAs or other slots."""
        self._vllms.update_metadata(mapping, lora_index_to_id, *args, **kwargs)
        self._runs = [(lora, len(list(rows))) for lora, rows in groupby(mapping.index_mapping)]
        self._slots = {lora: slot for slot, lora in enumerate(lora_index_to_id) if lora is not None}

    def groups(self, ffn: nn.Module, rows: int) -> dict[int, list[range]]:
        """The rows whose LoRA changes `ffn`, by its slot, and the others by `NONE`."""
        if not self._enabled:
            return {NONE: [range(rows)]}
        names = self._names.get(ffn, set())
        held = self._manager.list_adapters()
        found: dict[int, list[range]] = {}
        for lora, slot, span in self._spans(rows):
            if slot != NONE and held[lora].loras.keys().isdisjoint(names):
                slot = NONE
            found.setdefault(slot, []).append(span)
        return found

    def _spans(self, rows: int) -> Iterator[tuple[int, int, range]]:
        """Id, slot and places of the rows of one LoRA; the last ones may only fill up a graph."""
        start = 0
        for lora, count in (*self._runs, (0, rows)):
            span = range(start, min(start + count, rows))
            start += count
            if span:
                yield lora, self._slots[lora] if lora else NONE, span

    @contextmanager
    def of(self, slot: int) -> Iterator[None]:
        """Whatever rows a layer is given here, their LoRA is in this slot."""
        self._slot = slot
        try:
            yield
        finally:
            self._slot = None

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Sequence[Tensor],
        lora_b_stacked: Sequence[Tensor],
        scale: float,
        output_slices: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Add `scale * B A x` of each row's LoRA to the slices of `y`, `[n, out]`; `x`: `[n, in]`.

        `A` and `B` of a slice are stacked as `[slots, 1, r, in]` and `[slots, 1, out, r]`.
        """
        parts = [(self._slot, slice(None))]
        if self._slot is None:
            parts = [(slot, slice(s.start, s.stop)) for _, slot, s in self._spans(len(x))]
        for slot, rows in parts:
            start = 0
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices):
                if slot != NONE:
                    low = x[rows].to(a.dtype) @ a[slot, 0].T
                    y[rows, start : start + width] += scale * (low @ b[slot, 0].T).to(y.dtype)
                start += width
