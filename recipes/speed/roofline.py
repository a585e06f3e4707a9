"""Roofline: the FLOPs and bytes of a forward pass, and the least time that a
machine needs for them.

Every part of a pass takes at least `max(bytes / bandwidth, FLOPs / matmul rate)`, and parts run one
after the other. FLOPs are those of `hf_depthroute.evaluation.flops`. Bytes are every weight that is
needed once per pass, the input and the output of every matrix product, the KV cache, and the
logits. What can be fused (norms, activations, residual adds, the rotation) counts nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from hf_depthroute.base.families import text_config
from hf_depthroute.base.stack import stack_of
from hf_depthroute.bench.inference import Shares, Times, eta_of
from hf_depthroute.bench.measurements import short_label
from hf_depthroute.bench.result_tables import Row
from hf_depthroute.bench.timing import seconds_of
from hf_depthroute.bench.variants import budget_name
from hf_depthroute.evaluation.flops import (
    PARTS,
    Matrix,
    attention_sizes,
    branch_share,
    matrices,
    query_key_pairs,
    runs_full,
    skips_attention,
    skips_sequences,
    windows_of,
)
from hf_depthroute.inference.calibration import active_routings
from hf_depthroute.parts.gate import Gate
from hf_depthroute.parts.memory import NgramMemory
from hf_depthroute.parts.neurons import NeuronBranch
from hf_depthroute.routing.routing import ROUTING, Routing

_ROUNDS = 15
_BUFFER_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}  # far beyond any cache
_MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True)
class Peaks:
    """A machine's peak rates in one dtype.

    Attributes:
        bytes_per_s: The higher rate of a copy (bytes read and written) and of a matrix-vector
            product (bytes read).
        flops_per_s: What a linear map of as many rows as features reaches, 1,024 on CPUs and 8,192
            on GPUs.
    """

    bytes_per_s: float
    flops_per_s: float

    def to_dict(self) -> dict[str, float]:
        return {
            "gb_per_s": round(self.bytes_per_s / 1e9, 2),
            "gflop_per_s": round(self.flops_per_s / 1e9, 2),
        }


@dataclass
class Work:
    """FLOPs and bytes of each of `PARTS`."""

    flops: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    bytes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add(self, part: str, flops: float, moved: float) -> None:
        self.flops[part] += flops
        self.bytes[part] += moved

    @property
    def total_flops(self) -> float:
        return sum(self.flops.values())

    def seconds(self, peaks: Peaks) -> float:
        return sum(max(self._times(part, peaks)) for part in self.flops)

    def summary(self, peaks: Peaks) -> dict[str, Any]:
        """JSON-ready: totals, the least time, and which of the two binds for the
        larger part of it."""
        times = [self._times(part, peaks) for part in self.flops]
        by_bytes = sum(moving for computing, moving in times if moving >= computing)
        seconds = self.seconds(peaks)
        return {
            "gflop": round(self.total_flops / 1e9, 4),
            "gb": round(sum(self.bytes.values()) / 1e9, 4),
            "ideal_ms": round(seconds * 1e3, 4),
            "bound": "bandwidth" if by_bytes > seconds / 2 else "compute",
        }

    def _times(self, part: str, peaks: Peaks) -> tuple[float, float]:
        return self.flops[part] / peaks.flops_per_s, self.bytes[part] / peaks.bytes_per_s


def measure_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """The machine's peaks, the best of a few runs each; measured once per process,
    dtype and number of threads."""
    return _measure_peaks(device, dtype, torch.get_num_threads())


@functools.cache
def _measure_peaks(device: torch.device, dtype: torch.dtype, threads: int) -> Peaks:
    kind = device.type if device.type in _MATMUL_SIZE else "cpu"
    width = 4096
    matrix = torch.ones(
        _BUFFER_BYTES[kind] // dtype.itemsize // width, width, dtype=dtype, device=device
    )
    target, vector = torch.empty_like(matrix), matrix[0].clone()
    copied = 2 * matrix.nbytes / _best(target.copy_, (matrix,), device)
    read = matrix.nbytes / _best(torch.mv, (matrix, vector), device)
    del matrix, target
    size = _MATMUL_SIZE[kind]
    # A GPU multiplies equal numbers faster.
    square = torch.randn(size, size, dtype=dtype, device=device)
    flops = 2 * size**3 / _best(torch.nn.functional.linear, (square, square), device)
    return Peaks(max(copied, read), flops)


def _best(
    run: Callable[..., Any], arguments: tuple[torch.Tensor, ...], device: torch.device
) -> float:
    """Seconds of the fastest run: a peak is what the machine can do when nothing disturbs it."""
    return min(seconds_of(lambda: run(*arguments), device) for _ in range(_ROUNDS))


def count_work(
    model: nn.Module,
    *,
    batch: int,
    length: int,
    cached: int = 0,
    logits: int = 1,
    shares: Mapping[int, tuple[float, float]] | None = None,
    trained_from: int | None = None,
) -> Work:
    """The work of one forward pass.

    Args:
        model: A `PeftModel` with an active depth-routed adapter, or any base model of a known
            family.
        batch: Sequences.
        length: New tokens per sequence.
        cached: Tokens per sequence already in the KV cache.
        logits: Positions per sequence that go through the LM head.
        shares: Per routed layer, the share of rows that run full and the share of passes in which
            any does, as from `PassCounter.shares`. None: the dense model, without an adapter.
        trained_from: Index of the first layer that trains. Then the work is that of a training
            step: one more time the matrix products of this layer, of those after it and of the head
            (gradients of their inputs), and twice the attention core; the gradients of the few
            trained weights count nothing.
    """
    stack = stack_of(model)
    family, layers = stack.family, stack.layers
    routings = (
        {}
        if shares is None
        else {h.layer_index: h for h in active_routings(model) if not runs_full(h, length)}
    )
    work = Work()
    config = text_config(model.config)
    size = next(p for n, p in layers[0].named_parameters() if f"{ROUTING}." not in n).element_size()
    tokens, trains = batch * length, trained_from is not None
    per_pair, cached_values = attention_sizes(config)
    windows = windows_of(config, cached + length)
    for index, layer in enumerate(layers):
        again = 2.0 if trained_from is not None and index >= trained_from else 1.0
        routing = routings.get(index)
        rows, passes = (1.0, 1.0) if routing is None or shares is None else shares[index]
        for matrix in matrices(layer, config, family, routing):
            flops, moved = _product(matrix, tokens, rows, passes)
            work.add(matrix.part, again * flops, again * size * moved)
        skips = routing is not None and skips_attention(routing, config)
        whole = routing is not None and skips_sequences(routing, config)
        share = rows if skips else 1.0
        read = share if length == 1 or whole or not skips else passes
        held = min(cached, windows[index]) + length
        moved = batch * cached_values * (held * read + length * (share if whole else 1.0))
        moved += tokens * share * per_pair / 2  # queries in, outputs out
        twice = 2 * again - 1
        pairs = batch * query_key_pairs(length, cached, windows[index])
        work.add("attention core", twice * share * pairs * per_pair, twice * size * moved)
        if routing is not None:
            cheap = 1.0 if trains else branch_share(routing, config, rows, length)
            _count_router(work, routing, config, tokens, length, cheap, again)
    again = 2.0 if trains else 1.0
    kept, width, vocabulary = batch * logits, config.hidden_size, config.vocab_size
    moved = size * (width * vocabulary + kept * (width + vocabulary))
    work.add("head", again * 2.0 * kept * width * vocabulary, again * moved)
    return work


def _product(matrix: Matrix, tokens: int, rows: float, passes: float) -> tuple[float, float]:
    """FLOPs of one matrix, and the values it moves; `rows` and `passes` as in `count_work`."""
    *experts, given, read = matrix.shape
    ran = tokens * (1 - matrix.left_out * (1 - rows))
    met = given * read * (1 - matrix.left_out * (1 - passes))
    for count in experts:  # fused: those that any token is sent to
        ran *= matrix.chosen
        met = given * read * count * (1 - (1 - 1 / count) ** ran)
    return 2.0 * ran * given * read, met + ran * (given + read)


def _count_router(
    work: Work, routing: Routing, config: Any, tokens: int, length: int, cheap: float, again: float
) -> None:
    """The gate and target memory on every token, the branch on the share `cheap`;
    weights are read on every pass."""
    name = routing.active_name()
    for group in (
        routing.depth_route_gate,
        routing.depth_route_predictor,
        routing.depth_route_branch,
    ):
        if name not in group:
            continue
        module = group[name]
        held = sum(p.numel() * p.element_size() for p in module.parameters())
        if group is routing.depth_route_branch:
            borrowed = module.borrowed_weights() if isinstance(module, NeuronBranch) else 0
            met, seen = (
                sum(matrix.per_token for matrix in matrices(module, config)) + borrowed,
                tokens * cheap,
            )
            held += borrowed * next(p.element_size() for p in module.parameters())
        else:
            met = float(cast(Gate, module).weights_per_token())
            seen = tokens / length if routing.active_config().granularity == "sequence" else tokens
        width = next(p.element_size() for p in module.parameters()) if held else 4
        work.add(
            "router", again * 2.0 * seen * met, again * (held + 2 * width * seen * routing.width)
        )
    if name in routing.depth_route_memory:
        memory = cast(NgramMemory, routing.depth_route_memory[name])
        met, size = memory.weights_per_token(), memory.table.element_size()
        seen = tokens * cheap if routing.active_config().branch == "memory" else tokens
        # Of the table, the rows looked up.
        moved = size * (met + seen * (memory.value.in_features + routing.width))
        work.add("router", again * 2.0 * seen * met, again * moved)


def add_roofline(measured: dict[str, Any], times: Times, shares: Shares, peaks: Peaks) -> None:
    """Add to times of `measure_inference` what the machine needs at least,
    dense and at every budget.

    `roofline` of the dense model; of each budget `roofline`, `roofline_routed_over_dense`, and
    `eta_roofline`: as `eta`, with the ratio of the two least times instead of FLOPs.
    """
    variants, sizes = times.variants, times.case.pass_sizes()
    dense = count_work(variants.model, **sizes)
    measured["roofline"] = dense.summary(peaks)
    for budget, layers in shares.items():
        row = measured["budgets"][str(budget)]
        with variants.using(budget_name(budget)):
            routed = count_work(variants.model, **sizes, shares=layers)
        ideal = routed.seconds(peaks) / dense.seconds(peaks)
        row |= {
            "eta_roofline": eta_of(row["ratio"], ideal),
            "roofline_routed_over_dense": round(ideal, 4),
            "roofline": routed.summary(peaks),
        }


def roofline_rows(m: Mapping[str, Any]) -> Iterator[Row]:
    """The row of the dense model's table, and one for every budget."""
    if "roofline" not in m:
        return
    timed: dict[str, tuple[float, Any, dict[str, Any]]] = {
        "dense": (m["dense_ms"], m["roofline"], {})
    }
    timed |= {
        f"routed {name}": (row["routed_ms"], row["roofline"], row)
        for name, row in m["budgets"].items()
    }
    for variant, (taken, roof, row) in timed.items():
        etas = {name: row.get(name.replace(" ", "_")) for name in ("eta roofline", "eta free")}
        yield {
            "case": short_label(m), "variant": variant, "GFLOP": f"{roof['gflop']:.1f}",
            "GB": f"{roof['gb']:.2f}", "roofline ms": f"{roof['ideal_ms']:.2f}",
            "bound by": roof["bound"], "roofline / time": f"{roof['ideal_ms'] / taken:.2f}",
            **{name: "-" if eta is None else f"{eta:.2f}" for name, eta in etas.items()},
        }  # fmt: skip
