"""`hf-depthroute eval`: the dense base and routing over budgets, by their loss or by lm-eval's tasks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..shown import reason
from . import options as o
from .adapter import Adapter, OldAdapter
from .errors import CliError
from .output import ResultFile, write_result


def evaluate(
    adapter: Adapter = "",
    dataset: Annotated[
        str | None, typer.Option(help="Text to take the loss on: as for train. Or give --tasks.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="lm-eval tasks or groups instead, comma-separated, such as piqa,depthroute_router_tuning."),
    ] = None,
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
    include_path: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="With --tasks: lm-eval task files of your own.")
    ] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="With --tasks: shots. Default: the task's.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --tasks: at most this many documents of each.")] = None,
    blocks: Annotated[int, typer.Option(min=1, help="At most this many blocks.")] = 64,
    batch_size: o.BatchSize = 8,
    length: o.Length = 256,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")] = "auto",
    json_file: ResultFile = None,
    allow_base_mismatch: o.AllowBaseMismatch = False,
    adapter_option: OldAdapter = None,
    trust_remote_code: o.TrustRemoteCode = False,
    debug: o.Debug = False,
) -> None:
    """Compare the dense base with budgets, by loss or by lm-eval tasks.

    With --dataset: the loss under the training rule (top-k) and under the threshold rule. An adapter that follows no
    budget gets one row. The gap column is the threshold loss minus the top-k loss: what the causal rule costs over the
    training rule.

    \b
    Example:
      hf-depthroute eval routed --dataset python-stdlib --split validation --budgets 0.25,0.5,0.75
      hf-depthroute eval routed --tasks piqa,arc_easy --budgets 0.5 --limit 200
    """
    if (dataset is None) == (tasks is None):
        raise CliError("eval: give one of --dataset and --tasks")
    from . import loading

    loading.quiet(debug)
    if tasks is not None:
        _evaluate_tasks(
            *(adapter, model, tasks, o.parse_budgets(budgets), dtype, allow_base_mismatch, json_file, debug),
            {"include_path": include_path, "num_fewshot": num_fewshot, "limit": limit, "batch_size": batch_size},
        )
        return
    assert dataset is not None
    from ..data import load_text, pack
    from ..evaluation import evaluate_budgets
    from ..finite import check_losses

    wanted = o.parse_budgets(budgets)
    loading.check_dtype(dtype, loading.DTYPES)
    adapter_config = loading.load_adapter_config(adapter)
    model, base_config = loading.find_base(adapter, adapter_config, model)
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
    check_losses(routed, [row.loss for row in rows], batches[0])

    result = {
        "model": model,
        "adapter": adapter,
        "weights_hash": adapter_config.weights_hash,
        "dataset": dataset,
        "dataset_name": dataset_name,
        "split": split,
        "calibrate_on": calibrate_on,
        "blocks": sum(len(batch["input_ids"]) for batch in batches[0]),
        "length": length,
        "rows": [asdict(row) for row in rows],
    }
    if write_result(json_file, result):
        return
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


def _evaluate_tasks(
    adapter: str,
    model: str | None,
    tasks: str,
    budgets: list[float],
    dtype: str,
    mismatch: bool,
    out: Path | None,
    debug: bool,
    how: dict[str, Any],
) -> None:
    from . import loading

    loading.check_dtype(dtype, loading.DTYPES)
    adapter_config = loading.load_adapter_config(adapter)
    model, base_config = loading.find_base(adapter, adapter_config, model)
    tokenizer = loading.load_tokenizer(model, base_config)
    try:
        from ..evaluation.harness import evaluate_tasks, scores
        from ..finite import finite_logits
    except ImportError as error:
        raise CliError('--tasks needs lm-eval: pip install "hf-depthroute[eval]"') from error
    if not debug:
        import logging

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    routed = loading.load_adapter(loading.load_model(model, dtype), adapter, mismatch)
    names = [name.strip() for name in tasks.split(",")]
    try:
        with finite_logits(routed):
            runs = evaluate_tasks(routed, tokenizer, names, budgets, **how)
    except ValueError as error:
        raise CliError(f"--tasks {tasks}: {reason(error)}") from error
    from lm_eval.utils import handle_non_serializable

    parts = {
        run.name: {"budget": run.budget, "full_ratio": run.full_ratio, "seconds": run.seconds, "lm_eval": run.results}
        for run in runs
    }
    content = {"model": model, "adapter": adapter, "weights_hash": adapter_config.weights_hash, "runs": parts}
    if write_result(out, json.loads(json.dumps(content, default=handle_non_serializable))):
        return
    dense = scores(runs[0])
    loading.print_table(
        ("task", "metric", "run", "value", "stderr", "delta", "full ratio", "dense s / s"),
        [
            (
                *key,
                run.name,
                f"{value:.4f}",
                "" if error is None else f"{error:.4f}",
                "" if run is runs[0] else f"{value - dense[key][0]:+.4f}",
                f"{run.full_ratio:.3f}",
                f"{runs[0].seconds / run.seconds:.2f}",
            )
            for key in dense
            for run in runs
            for value, error in [scores(run)[key]]
        ],
    )
