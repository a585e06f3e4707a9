"""How many rows ran in full, layer by layer: a line in vLLM's log,
and counters of its Prometheus endpoint.

The counters are made in the process that runs the model. Its endpoint is another process's: it sees
them where both were started with `PROMETHEUS_MULTIPROC_DIR`, as `hf-depthroute serve --engine vllm`
does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

EVERY_SECONDS = 10.0
# Prometheus adds `_total`.
FULL = "depthroute:rows_full"
ALL = "depthroute:rows"


@dataclass(eq=False)
class RowCount:
    """The rows of one layer since the start. Adding waits for no device."""

    layer_index: int
    log: RowLog
    rows: int = 0  # tokens of requests that it was given, prompts and generated ones
    full: Tensor | int = 0  # int64 []; those that ran in full

    def add(self, full: Tensor | int, rows: int) -> None:
        """The rows of one forward pass, and how many of them ran in full, int64 `[]`."""
        self.rows += rows
        self.full = self.full + full
        # At the last layer, all have seen the same passes.
        if self is self.log.counts[-1] and time.monotonic() >= self.log.due:
            self.log.write()


class RowLog:
    """Writes the counts of all routed layers, whose indices ascend, every ten seconds in which
    there were new ones."""

    def __init__(self, layers: Sequence[int]) -> None:
        from prometheus_client import REGISTRY, Counter
        from vllm.logger import init_logger

        self.counts = [RowCount(index, self) for index in layers]
        self._logger = init_logger("vllm.depthroute")  # vLLM shows what is below its own name
        self.due = time.monotonic() + EVERY_SECONDS
        self._written: list[tuple[int, int]] = [(0, 0)] * len(layers)
        for name in (FULL, ALL):  # of an engine before this one in the same process
            if name in REGISTRY._names_to_collectors:
                REGISTRY.unregister(REGISTRY._names_to_collectors[name])
        self._full = Counter(FULL, "Rows that ran a routed layer in full.", ["layer"])
        self._all = Counter(ALL, "Rows that a routed layer was given.", ["layer"])

    def write(self) -> None:
        """Log and export what is new; waits for the device."""
        self.due = time.monotonic() + EVERY_SECONDS
        now = [(int(count.full), count.rows) for count in self.counts]
        new = [(a - b, c - d) for (a, c), (b, d) in zip(now, self._written)]
        self._written = now
        if not any(rows for _, rows in new):
            return
        for count, (full, rows) in zip(self.counts, new):
            self._full.labels(str(count.layer_index)).inc(full)
            self._all.labels(str(count.layer_index)).inc(rows)
        shares = ", ".join(
            f"{c.layer_index}: {full / rows:.0%}" for c, (full, rows) in zip(self.counts, new)
        )
        ran, given = (sum(part) for part in zip(*new))
        self._logger.info(
            "Depth routing: %.1f %% of rows in full (layer %s)", 100 * ran / given, shares
        )
