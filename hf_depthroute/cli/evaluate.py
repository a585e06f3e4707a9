"""`hf-depthroute eval`: the dense base and routing over budgets,
by their loss or by lm-eval's tasks."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..files.shown import say
from . import options as o
from .errors import CliError, refused
from .output import ResultFile, print_table, write_result

if TYPE_CHECKING:
    from .loading import Source

_OF_TASKS = ("include_path", "num_fewshot", "limit")
_OF_LOSS = (
    "dataset_name",
    "split",
    "column",
    "streaming",
    "calibrate_on",
    "calibration_blocks",
    "blocks",
    "length",
)
# A result, and its table: header and rows.
Measured = tuple[dict[str, Any], tuple[str, ...], Sequence[tuple[str, ...]]]


@dataclass(kw_only=True)
class EvalOptions(o.TextOptions, o.AdapterOptions):
    dataset: Annotated[
        str | None,
        typer.Option(callback=o.check_dataset),
        "Text to take the loss on: as for train. Or give --tasks.",
    ] = None
    tasks: Annotated[
        str | None, "lm-eval tasks or groups instead, comma-separated, such as piqa,arc_easy."
    ] = None
    split: Annotated[str, "Split to evaluate on."] = "train"
    budgets: o.Budgets = "0.25,0.5,0.75"
    phases: Annotated[
        str | None,
        "all, or prefill (only prompts are routed, the loss is of what follows). Default: the "
        "adapter's.",
    ] = None
    calibrate_on: Annotated[
        str | None, "Split to calibrate every budget on. Default: the adapter's own thresholds."
    ] = None
    calibration_blocks: Annotated[o.Count, "With --calibrate-on: blocks to calibrate on."] = 64
    include_path: Annotated[o.Folder, "With --tasks: lm-eval task files of your own."] = None
    num_fewshot: Annotated[
        int | None, typer.Option(min=0), "With --tasks: shots. Default: the task's."
    ] = None
    limit: Annotated[o.OptionalCount, "With --tasks: at most this many documents of each."] = None
    blocks: Annotated[o.Count, "At most this many blocks."] = 64
    json_file: ResultFile = None


@o.command
def evaluate(options: EvalOptions) -> None:
    """Compare the dense base with budgets, by loss or by lm-eval tasks.

    With --dataset: the loss under the training rule (top-k) and under the threshold rule. An
    adapter that follows no budget gets one row. The gap column is the threshold loss minus the
    top-k loss: what the causal rule costs over the training rule.

    \b
    Example:
      hf-depthroute eval routed --dataset python-stdlib --split validation --budgets 0.25,0.5,0.75
      hf-depthroute eval routed --tasks piqa,arc_easy --budgets 0.5 --limit 200
    """
    if (options.dataset is None) == (options.tasks is None):
        raise CliError("eval: give one of --dataset and --tasks")
    if options.tasks is None:
        options.refuse_unused(_OF_TASKS, "without --tasks")
        if options.calibrate_on is None:
            options.refuse_unused(("calibration_blocks",), "without --calibrate-on")
    else:
        options.refuse_unused(_OF_LOSS, "with --tasks, which bring their own texts")
        if options.include_path is not None and not options.include_path.is_dir():
            raise CliError(f"--include-path {options.include_path}: no such folder")
    budgets = o.parse_budgets(options.budgets)
    from . import loading

    source = loading.find_source(options)
    measure = _by_loss if options.tasks is None else _by_tasks
    content, header, rows = measure(source, options, budgets)
    if not write_result(options.json_file, content):
        print_table(header, rows)


def _by_loss(source: Source, options: EvalOptions, budgets: list[float]) -> Measured:
    from ..evaluation import BEHIND_PROMPTS, evaluate_budgets
    from ..inference.non_finite import check_losses
    from . import loading

    loading.check_length(options.length, source.base_config)
    tokenizer = source.tokenizer()
    on = options.calibrate_on
    batches = source.batches(tokenizer, options.split, options.blocks)
    calibration = None
    if on is not None:
        calibration = source.batches(tokenizer, on, options.calibration_blocks)
    routed = source.routed(source.base_model())
    if calibration is None:
        source.check_fitted(routed, budgets)
    rows = evaluate_budgets(routed, batches, calibration, budgets)
    if rows[0].behind_prompts:
        say(f"note: {BEHIND_PROMPTS}", sys.stderr)
    check_losses(routed, [row.loss for row in rows], batches)
    settings = o.values_of(options, ("dataset", "dataset_name", "split", "calibrate_on"))
    size = {"blocks": sum(len(batch["input_ids"]) for batch in batches), "length": options.length}
    header = ("budget", "rule", "loss", "perplexity", "full ratio", "gap")
    cells = []
    for row in rows:
        numbers = f"{row.loss:.4f}", f"{row.perplexity:.3f}", f"{row.full_ratio:.3f}"
        gap = "" if row.gap is None else f"{row.gap:+.4f}"
        cells.append((f"{row.budget:g}", row.rule, *numbers, gap))
    content = source.origin(routed) | settings | size | {"rows": [asdict(row) for row in rows]}
    return content, header, cells


@contextlib.contextmanager
def _lm_evals_errors_alone() -> Iterator[None]:
    """Inside the block, lm-eval logs errors alone; a note at its end tells of prompts that it cut,
    for each of which it has a warning."""
    cut = []

    def is_shown(record: logging.LogRecord) -> bool:
        if "runcat" in record.getMessage():  # truncated, truncating, left truncation
            cut.append(record)
        return record.levelno >= logging.ERROR

    logger = logging.getLogger("lm_eval")
    handler = logging.StreamHandler()
    handler.addFilter(is_shown)
    handlers, level, propagate = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
    if cut:
        say(
            "note: some prompts are longer than what the model reads, and lost their beginning "
            "(--debug shows lm-eval's own lines)",
            sys.stderr,
        )


def _by_tasks(source: Source, options: EvalOptions, budgets: list[float]) -> Measured:
    tokenizer = source.tokenizer()
    try:
        from ..evaluation.harness import evaluate_tasks
        from ..evaluation.harness_scores import read_scores
        from ..inference.non_finite import finite_logits
    except ImportError as error:
        raise CliError('--tasks needs lm-eval: pip install "lm-eval[hf]"') from error
    routed = source.routed(source.base_model())
    source.check_fitted(routed, budgets)
    how = o.values_of(options, (*_OF_TASKS, "batch_size"))
    names = [name.strip() for name in str(options.tasks).split(",")]
    quiet = contextlib.nullcontext() if options.debug else _lm_evals_errors_alone()
    with quiet, refused(f"--tasks {options.tasks}: "), finite_logits(routed):
        runs = evaluate_tasks(routed, tokenizer, names, budgets, **how)
    from lm_eval.utils import handle_non_serializable

    figures = ("budget", "phases", "full_ratio", "seconds")
    parts = {run.name: o.values_of(run, figures) | {"lm_eval": run.results} for run in runs}
    content = json.loads(
        json.dumps(source.origin(routed) | {"runs": parts}, default=handle_non_serializable)
    )
    header = ("task", "metric", "run", "value", "stderr", "delta", "full ratio")
    cells = []
    dense = read_scores(runs[0].results)
    for key in dense:
        for run in runs:
            value, spread = read_scores(run.results)[key]
            stderr = "" if spread is None else f"{spread:.4f}"
            delta = ""
            if run is not runs[0]:
                delta = f"{value - dense[key][0]:+.4f}"
            numbers = (f"{value:.4f}", stderr, delta, f"{run.full_ratio:.3f}")
            cells.append((*key, run.name, *numbers))
    return content, header, cells
