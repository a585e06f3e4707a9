"""`hf-depthroute eval`: loss of the dense base, top-k and threshold routing over budgets."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from . import options as o


def evaluate(
    adapter: o.Adapter,
    dataset: o.Dataset,
    model: o.BaseModel = None,
    config: o.ConfigFile = None,
    dataset_name: o.DatasetName = None,
    split: Annotated[str, typer.Option(help="Split to evaluate on.")] = "train",
    column: o.Column = "text",
    streaming: o.Streaming = False,
    budgets: o.Budgets = "0.25,0.5,0.75",
    calibrate_on: Annotated[
        str | None, typer.Option(help="Split to calibrate every budget on. Default: the adapter's own thresholds.")
    ] = None,
    calibration_blocks: Annotated[int, typer.Option(min=1, help="Blocks to calibrate on.")] = 64,
    blocks: Annotated[int, typer.Option(min=1, help="At most this many blocks.")] = 64,
    batch_size: o.BatchSize = 8,
    length: o.Length = 256,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")] = "auto",
    json_file: o.JsonFile = None,
    allow_base_mismatch: o.AllowBaseMismatch = False,
    debug: o.Debug = False,
) -> None:
    """Compare dense, top-k and threshold loss at several budgets; an adapter that follows no budget gets one row.

    The gap column is the threshold loss minus the top-k loss: what the causal rule costs over the training rule.

    \b
    Example:
      hf-depthroute eval --adapter routed --dataset python-stdlib --split validation --budgets 0.25,0.5,0.75
    """
    from . import loading

    loading.quiet(debug)
    from ..data import load_text, pack
    from ..evaluation import evaluate_budgets

    wanted = o.parse_budgets(budgets)
    loading.check_dtype(dtype, loading.DTYPES)
    adapter_config = loading.load_adapter_config(adapter)
    model = loading.base_of(adapter, adapter_config, model)
    base_config = loading.load_config(model)
    loading.check_length(length, base_config)

    splits = [split] if calibrate_on is None else [split, calibrate_on]
    texts = [
        load_text(dataset, split=name, name=dataset_name, column=column, streaming=streaming, verbose=debug)
        for name in splits
    ]
    tokenizer = loading.load_tokenizer(model, base_config)
    limits = (blocks, calibration_blocks)
    batches = [
        loading.to_batches(pack(text, tokenizer, length, verbose=debug), batch_size, limit)
        for text, limit in zip(texts, limits)
    ]
    routed = loading.load_adapter(loading.load_model(model, dtype), adapter, allow_base_mismatch)
    rows = evaluate_budgets(routed, batches[0], batches[1] if calibrate_on else None, wanted)

    if json_file is not None:
        loading.write_json(
            json_file,
            {
                "model": model,
                "adapter": adapter,
                "dataset": dataset,
                "split": split,
                "calibrate_on": calibrate_on,
                "blocks": sum(len(batch["input_ids"]) for batch in batches[0]),
                "length": length,
                "rows": [asdict(row) for row in rows],
            },
        )
    loading.print_table(
        ("budget", "rule", "loss", "perplexity", "full ratio", "gap"),
        [
            (
                f"{row.budget:g}",
                row.rule,
                f"{row.loss:.4f}",
                f"{row.perplexity:.3f}",
                f"{row.full_ratio:.3f}",
                "" if row.gap is None else f"{row.gap:+.4f}",
            )
            for row in rows
        ],
    )
