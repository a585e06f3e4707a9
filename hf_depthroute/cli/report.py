"""`hf-depthroute report`: one HTML page about a routed model."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..files.shown import counted, say
from . import options as o
from .earlier_results import check_losses, check_times, read_bench, read_losses, wanted_budgets
from .errors import CliError
from .output import short_name, write_text

if TYPE_CHECKING:
    from ..config.adapter import DepthRouteConfig
    from ..report.collect import Sample
    from .loading import Source

_TIMED_BLOCKS = 4  # sequences of the prefill that is timed, as in bench


@dataclass(kw_only=True)
class ReportOptions(o.TextOptions, o.AdapterOptions):
    dataset: Annotated[
        str,
        typer.Option(show_default=False, callback=o.check_dataset),
        "Text to measure and to show: as for train.",
    ] = ""
    split: Annotated[str, "Split of the text."] = "train"
    budgets: Annotated[
        str | None, "Fractions of tokens that run full, comma-separated. Default: 0.25,0.5,0.75."
    ] = None
    blocks: Annotated[o.Count, "At most this many blocks."] = 64
    samples: Annotated[o.Count, "Blocks of the text in the token view."] = 3
    prompt: Annotated[str | None, "Show how this is continued, or answered, too."] = None
    chat_template: o.ChatTemplate = True
    max_new_tokens: Annotated[o.Count, "With --prompt: tokens to add."] = 64
    eval_file: Annotated[o.File, "--eval", "Losses from eval --out, instead of taking them."] = None
    bench_file: Annotated[o.File, "--bench", "Times from bench --out, instead of taking them."] = (
        None
    )
    speed: Annotated[bool, "--speed/--no-speed", "Measure the speed."] = True
    repeats: Annotated[o.Count, "Rounds of the speed; medians are reported."] = 15
    title: Annotated[str | None, "Of the page. Default: the adapter's name."] = None
    out: Annotated[o.Folder, "Where to write: a folder or a .html. Default: ADAPTER/report."] = None


@o.command
def report(options: ReportOptions) -> None:
    """Write one HTML page about a routed model, which loads nothing.

    It has loss, speed and arithmetic by budget, what every layer ran, scores with thresholds, and a
    text coloured token by token.

    \b
    Example:
      hf-depthroute report routed --dataset my_text.jsonl --budgets 0.25,0.5,0.75
      hf-depthroute report routed --dataset my_text.jsonl --prompt "Once upon a time" --out page.html
    """  # noqa: E501
    if not options.dataset:
        raise CliError(f"report: give --dataset, the text to measure adapter {options.adapter} on")
    if options.prompt is None:
        options.refuse_unused(("chat_template", "max_new_tokens"), "without --prompt")
    if options.bench_file is not None or not options.speed:
        options.refuse_unused(("repeats",), "with --bench or --no-speed: nothing is timed")
    say(_report_adapter(options))


def _report_adapter(given: ReportOptions) -> Path:
    """Write the page; its path. What can be refused is refused before the weights load."""
    path = _page_path(given)
    known = read_losses(given.eval_file) if given.eval_file else {}
    timed = read_bench(given.bench_file) if given.bench_file else {}
    wanted = wanted_budgets(given, known.get("rows"))
    from . import loading

    source = loading.find_source(given)
    follows = source.config.takes_budget()
    budgets = wanted if follows else [float(source.config.budget)]
    if known:
        check_losses(given, source.config, known, budgets)
    if timed:
        check_times(given, source.config, timed, wanted)
    loading.check_length(given.length, source.base_config)
    tokenizer = source.tokenizer()
    batches = source.batches(tokenizer, given.split, given.blocks)
    samples = _samples(given, source, tokenizer, batches)

    from ..bench import dense_view
    from ..evaluation import BEHIND_PROMPTS
    from ..parts.gates import GATES
    from ..report.collect import RunReport, collect_scores, collect_tokens, count_costs
    from ..report.run_page import render_page

    # It weighs what every token gets: there is nothing to skip, and no budget.
    soft = GATES[source.config.gate].soft
    base = source.base_model()
    untouched = dense_view(base)
    routed = source.routed(base)
    source.check_fitted(routed, wanted)
    rows = known["rows"] if known else _measure_losses(routed, budgets, batches)
    notes = []
    if source.config.phases == "prefill":
        notes = [f"{BEHIND_PROMPTS[0].upper()}{BEHIND_PROMPTS[1:]}."]
    if given.speed and not given.bench_file:
        say("speed ...", sys.stderr)
        try:
            timed = _measure_speed(routed, untouched, budgets, batches, given.repeats)
        except ValueError as error:
            notes.append(f"Speed was not measured: {error}.")
    say("scores and decisions ...", sys.stderr)
    scores = collect_scores(routed, batches, budgets)
    blocks = sum(len(batch["input_ids"]) for batch in batches)
    shape = (min(_TIMED_BLOCKS, len(batches[0]["input_ids"])), given.length)
    page = RunReport(
        title=given.title or f"Depth routing: {short_name(given.adapter)}",
        facts=_facts(given, source, routed, soft, blocks, known, timed),
        rows=rows,
        budgets=budgets,
        follows_budget=follows,
        scores=scores,
        costs=count_costs(routed, scores, *shape),
        cost_shape=shape,
        tokens=collect_tokens(routed, tokenizer, samples, budgets),
        bench=timed or None,
        notes=notes,
        weighs=soft,
        decides=_decides(source.config),
        undecided=source.config.undecided,
    )
    write_text(path, render_page(page))
    return path


def _page_path(given: ReportOptions) -> Path:
    """Where the page goes: into `--out`, or a folder `report` of the adapter's, or here."""
    if given.out is not None and given.out.suffix.lower() in (".html", ".htm"):
        if given.out.is_dir():
            raise CliError(f"--out {given.out}: is a folder, not a file")
        return given.out
    adapter = Path(given.adapter)
    folder = given.out or (adapter / "report" if adapter.is_dir() else Path("report"))
    if folder.exists() and not folder.is_dir():
        raise CliError(f"--out {folder}: is a file, not a folder; name a folder or a .html file")
    return folder / "report.html"


def _samples(
    given: ReportOptions, source: Source, tokenizer: Any, batches: list[dict[str, Any]]
) -> list[Sample]:
    import torch

    from ..report.collect import Sample

    rows = [row for batch in batches for row in batch["input_ids"]][: given.samples]
    found = [Sample(f"text {number}", row) for number, row in enumerate(rows, 1)]
    if given.prompt is None:
        return found
    ids = torch.tensor(source.prompt_ids(tokenizer))
    return [Sample("prompt and what each budget wrote", ids, given.max_new_tokens), *found]


def _measure_losses(
    routed: Any, budgets: list[float], batches: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    from ..evaluation import evaluate_budgets
    from ..inference.non_finite import check_losses

    say("losses ...", sys.stderr)
    rows = [asdict(row) for row in evaluate_budgets(routed, batches, None, budgets)]
    check_losses(routed, [row["loss"] for row in rows], batches)
    return rows


def _measure_speed(
    routed: Any, untouched: Any, budgets: list[float], batches: list[dict[str, Any]], repeats: int
) -> dict[str, Any]:
    """The speed on the first blocks of the text; `ValueError` where it cannot be measured."""
    from ..bench.suite import bench

    budgets = [budget for budget in budgets if budget < 1]  # nothing is skipped at 1
    if not budgets:
        raise ValueError("no budget is below 1")
    prompts = batches[0]["input_ids"][:_TIMED_BLOCKS]
    room = getattr(routed.config, "max_position_embeddings", None) or math.inf
    rounds = {"decode_steps": int(min(16, room - prompts.shape[1])), "repeats": repeats}
    return bench(routed, base=untouched, input_ids=prompts, budgets=budgets, **rounds)


def _decides(config: DepthRouteConfig) -> str:
    """The routers' decision in words: about a token or a sequence, and its subject."""
    from ..parts.targets import TARGETS

    what = "whether it runs the full layer."
    if not config.target_pattern:  # else it differs from layer to layer
        what = TARGETS[config.target].decides[config.granularity]
    return f"for every {config.granularity} {what}"


def _facts(
    given: ReportOptions,
    source: Source,
    routed: Any,
    soft: bool,
    blocks: int,
    losses: Mapping[str, Any],
    timed: dict[str, Any],
) -> list[tuple[str, str]]:
    from ..base.weights import weight_shapes
    from ..files.versions import versions
    from ..routing.description import patterns_words

    config = source.config
    shapes = (shape for name, shape in weight_shapes(routed) if ".routing." not in name)
    size = sum(map(math.prod, shapes))
    base = f"{short_name(source.base)}, {routed.config.model_type}, {size:,} parameters"
    what = [f"gate {config.gate}", f"target {config.target}", f"per {config.granularity}"]
    if not soft:
        what += [f"branch {config.branch}", *patterns_words(config)]
    if config.takes_budget():
        what.append(f"budget {config.budget:g}")
    adapter = f"{short_name(given.adapter)}: {', '.join(what)}"
    facts = [
        ("Base model", base),
        ("Adapter", adapter),
        ("Text", _text(given.dataset, given.split, blocks, given.length)),
    ]
    if losses:  # they may be of another text
        recorded = [losses.get(name) for name in ("dataset", "split", "blocks", "length")]
        text = "not recorded" if None in recorded else _text(*recorded)
        facts.append(("Text of the losses", text))
        if (split := losses.get("calibrate_on")) is not None:
            facts.append(("Thresholds of the losses", f"calibrated for them on split {split}"))
    if machine := timed.get("machine"):
        dtype = timed.get("setting", {}).get("dtype", "")
        facts.append(("Machine", f"{machine['device']}, {machine['threads']} threads, {dtype}"))
    listed = ", ".join(f"{name} {version}" for name, version in versions().items())
    return [*facts, ("Versions", listed)]


def _text(dataset: object, split: object, blocks: object, length: object) -> str:
    return (
        f"{short_name(str(dataset))}, split {split}, {counted(blocks, 'block')} of {length} tokens"
    )
