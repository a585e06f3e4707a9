"""`hf-depthroute bench`: measured time of a routed model against its dense base."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from . import options as o
from .errors import CliError


def bench(
    model: o.BaseModel = None,
    adapter: Annotated[str | None, typer.Option(help="Hub id or folder of the adapter.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="Random weights of this shape instead: qwen2.5-0.5b or llama-3.2-1b.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="With --shape: routed layers. Default: last:12.")] = None,
    gate: Annotated[str | None, typer.Option(help="With --shape: mlp or jepa. Default: mlp.")] = None,
    config: o.ConfigFile = None,
    budgets: o.Budgets = "0.5,0.25",
    batch: Annotated[int, typer.Option(min=1, help="Sequences in prefill.")] = 4,
    length: o.Length = 256,
    decode_batch: Annotated[int, typer.Option(min=1, help="Sequences in decode.")] = 1,
    decode_steps: Annotated[int, typer.Option(min=0, help="Timed decoding steps; 0 leaves decode out.")] = 16,
    dtype: Annotated[str, typer.Option(help="auto (as stored; bfloat16 with --shape), float32, ...")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians are reported.")] = 15,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all cores.")] = None,
    json_file: o.JsonFile = None,
    debug: o.Debug = False,
) -> None:
    """Time prefill and decode, dense against routed, in one process.

    Prompts are random tokens, on which every budget is calibrated first, so that the share asked for really runs
    full. eta is the part of the skipped arithmetic that shows on the clock.

    \b
    Example:
      hf-depthroute bench --shape qwen2.5-0.5b --budgets 0.5,0.25 --threads 2
      hf-depthroute bench --adapter routed --json bench.json
    """
    if (adapter is None) == (shape is None):
        raise CliError("bench: give either --adapter (with or without --model) or --shape")
    if shape is not None and model is not None:
        raise CliError("bench: --model does not go with --shape; a shape has random weights")
    if shape is None and (layers is not None or gate is not None):
        raise CliError("bench: --layers and --gate go with --shape; an adapter has its own")
    from . import loading

    loading.quiet(debug)
    import torch

    from ..bench import SHAPES, bench_shape, dense_view
    from ..bench import bench as measure

    loading.check_dtype(dtype, loading.DTYPES)
    if threads is not None:
        torch.set_num_threads(threads)
    arguments: dict[str, Any] = {
        "budgets": o.parse_budgets(budgets),
        "batch": batch,
        "length": length,
        "decode_batch": decode_batch,
        "decode_steps": decode_steps,
        "repeats": repeats,
        "progress": lambda line: print(line, file=sys.stderr),
    }
    if shape is not None:
        if shape not in SHAPES:
            raise CliError(f"--shape {shape}: use one of: {', '.join(SHAPES)}")
        result = bench_shape(
            shape,
            layers=o.parse_layers(layers) or "last:12",  # type: ignore[arg-type]
            gate=gate or "mlp",
            dtype=torch.bfloat16 if dtype == "auto" else getattr(torch, dtype),
            **arguments,
        )
    else:
        assert adapter is not None
        adapter_config = loading.load_adapter_config(adapter)
        model = loading.base_of(adapter, adapter_config, model)
        loading.check_length(length + decode_steps, loading.load_config(model), "--length + --decode-steps")
        base = loading.load_model(model, dtype)
        untouched = dense_view(base)
        result = measure(loading.load_adapter(base, adapter), base=untouched, **arguments)
    if json_file is not None:
        loading.write_json(json_file, result)
    rows = [
        (part, budget, f"{values['full_ratio']:.3f}", f"{result[part]['dense_ms']:.2f}", f"{values['routed_ms']:.2f}",
         f"{values['speedup']:.3f}", f"{values['eta']:.2f}", f"{values['tokens_per_s']:.0f}")
        for part in ("prefill", "decode") if part in result
        for budget, values in result[part]["budgets"].items()
    ]  # fmt: skip
    loading.print_table(("", "budget", "full ratio", "dense ms", "routed ms", "speed-up", "eta", "tokens/s"), rows)
