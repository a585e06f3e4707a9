"""The row operators, and gathering, alone, against the dense operation and against what
the machine can do.

    python recipes/speed/row_ops.py --json recipes/speed/row_ops.json

Sizes are those of Llama-3-8B. `bandwidth` and `matmul` are shares of the machine's own measured
peaks: bytes that have to be read and written, and FLOPs of the chosen rows, over the time taken.
`--small` tries the script out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `speed` is there

import torch
import torch.nn.functional as F
from speed.roofline import Peaks, measure_peaks

from hf_depthroute.base.contexts import synchronise
from hf_depthroute.bench.timing import describe_machine, interleave
from hf_depthroute.execution.gathered import gathered_update
from hf_depthroute.execution.kernels import attend_rows, linear_rows, swiglu_rows

SHARES = (0.0, 0.25, 0.5, 1.0)


def shares(rows: int) -> list[float]:
    """Those of `SHARES` that choose different numbers of rows."""
    return [share for share in SHARES if share in (0.0, 1.0) or rows * share >= 1]


@dataclass(frozen=True)
class Sizes:
    """Width, FFN width, query heads, key-value heads, head width, rows of the linear maps, (B, T,
    S) of attention."""

    width: int = 4096
    ffn: int = 14336
    heads: int = 32
    groups: int = 8
    head: int = 128
    rows: tuple[int, ...] = (1, 8, 64, 8192)
    attention: tuple[tuple[int, int, int], ...] = ((1, 1, 4096), (64, 1, 4096), (4, 2048, 2048))


SMALL = Sizes(64, 128, 4, 2, 16, (1, 8), ((2, 1, 32), (1, 16, 16)))


@dataclass(frozen=True)
class Work:
    """An operation at one share of chosen rows: how to run it, the dense one beside it,
    and what it costs at least."""

    label: str
    share: float
    run: Callable[[], Any]
    dense: Callable[[], Any]
    bytes: int
    flops: int


def chosen(rows: int, share: float, device: torch.device) -> torch.Tensor:
    """Bool `[rows]`, evenly spread."""
    mask = torch.zeros(rows, dtype=torch.bool, device=device)
    mask[torch.linspace(0, rows - 1, round(rows * share)).long()] = True
    return mask


def linear_maps(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> list[Work]:
    d, f, item = sizes.width, sizes.ffn, dtype.itemsize
    gate, up = (torch.randn(f, d, device=device, dtype=dtype) * d**-0.5 for _ in range(2))
    down = torch.randn(d, f, device=device, dtype=dtype) * f**-0.5
    square = torch.randn(d, d, device=device, dtype=dtype) * d**-0.5

    def ffn(x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    works = []
    for rows in sizes.rows:
        x = torch.randn(rows, d, device=device, dtype=dtype)
        for share in shares(rows):
            mask = chosen(rows, share, device)
            n, some = int(mask.sum()), int(bool(mask.any()))
            works += [
                Work(
                    f"swiglu_rows, {rows} rows", share,
                    lambda x=x, mask=mask: swiglu_rows(x, x, mask, None, gate, up, down),
                    lambda x=x: x + ffn(x),
                    # The stream is copied whole; a hidden value is written and read.
                    item * (2 * rows * d + some * 3 * d * f + n * (d + 2 * f)), 6 * n * d * f,
                ),
                Work(
                    f"gathered, {rows} rows", share, lambda x=x,
                    mask=mask: gathered_update(x.clone()[None], x[None], mask[None], ffn, None),
                    lambda x=x: x + ffn(x),
                    item * (2 * rows * d + some * 3 * d * f + n * (5 * d + 2 * f)), 6 * n * d * f,
                ),
                Work(
                    f"linear_rows, {rows} rows", share,
                    lambda x=x, mask=mask: linear_rows(x, mask, square, None),
                    lambda x=x: F.linear(x, square),
                    item * (rows * d + some * d * d + n * d), 2 * n * d * d,
                ),
            ]  # fmt: skip
    return works


def attention(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> list[Work]:
    works, item, scaling = [], dtype.itemsize, sizes.head**-0.5
    for batch, length, keys in sizes.attention:
        q = torch.randn(batch, length, sizes.heads, sizes.head, device=device, dtype=dtype)
        k, v = (
            torch.randn(batch, sizes.groups, keys, sizes.head, device=device, dtype=dtype)
            for _ in range(2)
        )
        past = keys - length

        def dense(
            q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, causal: bool = length > 1
        ) -> Any:
            return F.scaled_dot_product_attention(
                q.transpose(1, 2), k, v, is_causal=causal, enable_gqa=True
            )

        for share in shares(batch * length):
            mask = chosen(batch * length, share, device).view(batch, length)
            n = int(mask.sum())
            # Keys, over all queries.
            seen = int(((torch.arange(length, device=device) + past + 1) * mask).sum())
            read = int(mask.any(1).sum()) * keys  # keys of the sequences in which somebody asks
            works.append(
                Work(
                    f"attend_rows, {batch} x {length} queries, {keys} keys", share, lambda q=q, k=k,
                    v=v, mask=mask, past=past: attend_rows(q, k, v, mask, None, past, scaling),
                    dense,
                    item * sizes.head * ((n + batch * length) * sizes.heads + 2 * read * sizes.groups),
                    4 * seen * sizes.heads * sizes.head,
                )
            )  # fmt: skip
    return works


def measure(work: Work, peaks: Peaks, device: torch.device, rounds: int) -> dict[str, Any]:
    """Medians of interleaved rounds; a sample is as many calls as take some milliseconds."""

    def timer(run: Callable[[], Any]) -> Callable[[], float]:
        run()
        synchronise(device)
        start = time.perf_counter()
        run()
        synchronise(device)
        calls = max(1, min(50, int(5e-3 / (time.perf_counter() - start))))

        def seconds() -> float:
            start = time.perf_counter()
            for _ in range(calls):
                run()
            synchronise(device)
            return (time.perf_counter() - start) / calls

        return seconds

    samples = interleave({"rows": timer(work.run), "dense": timer(work.dense)}, rounds)
    taken, (ratio, error) = samples.median("rows"), samples.ratio("rows", "dense").rounded()
    return {
        "operation": work.label,
        "share": work.share,
        "ms": round(taken * 1e3, 4),
        "dense_ms": round(samples.median("dense") * 1e3, 4),
        "ratio": ratio,
        "ratio_error": error,
        "bandwidth": round(work.bytes / taken / peaks.bytes_per_s, 4),
        "matmul": round(work.flops / taken / peaks.flops_per_s, 4),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--small", action="store_true", help="sizes for trying it out")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, sizes = getattr(torch, args.dtype), SMALL if args.small else Sizes()
    peaks = measure_peaks(device, dtype)
    result: dict[str, Any] = {
        "machine": describe_machine(device),
        "dtype": args.dtype,
        "peaks": peaks.to_dict(),
    }
    result["operations"] = []
    for kind in (linear_maps, attention):
        for work in kind(sizes, device, dtype):
            row = measure(work, peaks, device, args.rounds)
            result["operations"].append(row)
            print(
                f"{row['operation']:<46} share {row['share']:<5} {row['ms']:9.4f} ms, dense x "
                f"{row['ratio']:<7} bandwidth {row['bandwidth']:.2f}, matmul {row['matmul']:.2f}",
                flush=True,
            )
    args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
