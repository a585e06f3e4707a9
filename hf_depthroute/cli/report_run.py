"""The page of a routed model: what `hf-depthroute report` measures of an adapter, and where it writes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..shown import say
from . import options as o
from .errors import CliError
from .output import write_text

DEFAULT_BUDGETS = "0.25,0.5,0.75"
_TIMES = ("routed_ms", "ratio", "speedup", "eta", "full_ratio", "flops_routed_over_dense", "tokens_per_s")
_TIMED_BLOCKS = 4  # sequences of the prefill that is timed, as in bench


@dataclass(frozen=True)
class RunOptions:
    """The options of `hf-depthroute report` about an adapter, as they were given."""

    adapter: str
    model: str | None
    dataset: str
    dataset_name: str | None
    split: str
    column: str
    streaming: bool
    budgets: str | None
    blocks: int
    batch_size: int
    length: int
    samples: int
    prompt: str | None
    max_new_tokens: int
    eval_file: Path | None
    bench_file: Path | None
    speed: bool
    repeats: int
    title: str | None
    dtype: str
    out: Path | None
    allow_base_mismatch: bool


def report_run(given: RunOptions, debug: bool) -> Path:
    """Measure, and write the page; its path.

    Raises:
        CliError: An option, a file or the adapter cannot be used.
    """
    # Everything that can be refused is refused before the weights are loaded.
    path = _page_path(given)
    rows = None if given.eval_file is None else _read_rows(given.eval_file)
    timed = None if given.bench_file is None else _read_bench(given.bench_file)
    wanted = _wanted_budgets(given, rows)
    from . import loading

    loading.quiet(debug)
    loading.check_dtype(given.dtype, loading.DTYPES)
    config = loading.load_adapter_config(given.adapter)
    model, base_config = loading.find_base(given.adapter, config, given.model)
    loading.check_length(given.length, base_config)
    tokenizer = loading.load_tokenizer(model, base_config)
    batches = _batches(given, tokenizer, debug)
    samples = _samples(given, tokenizer, batches, base_config)

    from ..bench.shapes import dense_view
    from ..evaluation import evaluate_budgets
    from ..finite import check_losses
    from ..report.run.collect import RunReport, collect_scores, collect_tokens, count_costs
    from ..report.run.page import render_page

    base = loading.load_model(model, given.dtype)
    untouched = dense_view(base)
    routed = loading.load_adapter(base, given.adapter, given.allow_base_mismatch)
    follows = config.takes_budget()
    budgets = wanted if follows else [float(config.budget)]
    if rows is None:
        _progress("losses")
        rows = [asdict(row) for row in evaluate_budgets(routed, batches, None, budgets)]
        check_losses(routed, [row["loss"] for row in rows], batches)
    _check_rows(given, rows, budgets, follows)
    notes = []
    if timed is None and given.speed:
        _progress("speed")
        timed, note = _measure_speed(routed, untouched, budgets, batches, given.repeats)
        notes += [note] if note else []
    _progress("scores and decisions")
    scores = collect_scores(routed, batches, budgets)
    tokens = collect_tokens(routed, tokenizer, samples, budgets)
    shape = (min(_TIMED_BLOCKS, len(batches[0]["input_ids"])), given.length)
    name = _name(given.adapter)
    page = render_page(
        RunReport(
            title=given.title or f"Depth routing: {name}",
            facts=_facts(given, model, routed, sum(len(batch["input_ids"]) for batch in batches), timed),
            rows=rows,
            budgets=budgets,
            follows_budget=follows,
            scores=scores,
            costs=count_costs(routed, scores, *shape),
            cost_shape=shape,
            tokens=tokens,
            bench=timed,
            notes=notes,
        )
    )
    write_text(path, page)
    return path


def _page_path(given: RunOptions) -> Path:
    """Where the page goes: `--out page.html`, `--out FOLDER`, or the adapter's own folder if it has one here."""
    if given.out is not None and given.out.suffix.lower() in (".html", ".htm"):
        if given.out.is_dir():
            raise CliError(f"--out {given.out}: is a folder, not a file")
        return given.out
    default = Path(given.adapter) / "report" if Path(given.adapter).is_dir() else Path("report")
    folder = default if given.out is None else given.out
    if folder.exists() and not folder.is_dir():
        raise CliError(f"--out {folder}: is a file, not a folder; name a folder or a .html file")
    return folder / "report.html"


def _wanted_budgets(given: RunOptions, rows: list[dict[str, Any]] | None) -> list[float]:
    if rows is None:
        return sorted(set(o.parse_budgets(given.budgets or DEFAULT_BUDGETS)))
    known = sorted({float(row["budget"]) for row in rows if row["rule"] == "threshold"})
    if given.budgets is None:
        return known
    budgets = sorted(set(o.parse_budgets(given.budgets)))
    missing = [budget for budget in budgets if budget not in known]
    if missing:
        raise CliError(f"--eval {given.eval_file}: has no row of budget {missing[0]:g}")
    return budgets


def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        for row in rows:
            row["budget"], row["loss"] = float(row["budget"]), float(row["loss"])
            row["perplexity"], row["full_ratio"] = float(row["perplexity"]), float(row["full_ratio"])
            row["rule"] = str(row["rule"])
    except OSError as error:
        raise CliError(f"--eval {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CliError(f"--eval {path}: not a result of hf-depthroute eval --out ({error!r} is wrong)") from error
    return list(rows)


def _read_bench(path: Path) -> dict[str, Any]:
    from ..bench.results import read_result

    try:
        result = read_result(path)
    except ValueError as error:
        raise CliError(f"--bench {error}") from error
    if "prefill" not in result and "decode" not in result:
        raise CliError(f"--bench {path}: has no single prefill or decode; measure one size with hf-depthroute bench")
    try:
        setting = result["setting"]
        for part, batch in (("prefill", "batch"), ("decode", "decode_batch")):
            if part in result:
                result[part] = {"batch": setting[batch], "length": setting["length"], **result[part]}
                result[part]["dense_ms"] = float(result[part]["dense_ms"])
                for row in result[part]["budgets"].values():
                    row |= {name: float(row[name]) for name in _TIMES if (name, row[name]) != ("eta", None)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CliError(f"--bench {path}: not a result of hf-depthroute bench --out ({error!r} is wrong)") from error
    return result


def _check_rows(given: RunOptions, rows: list[dict[str, Any]], budgets: list[float], follows: bool) -> None:
    """One dense row, and one of the inference rule per budget, all with a loss that is a number."""
    rule = "threshold" if follows else "fixed"
    if not budgets:
        raise CliError(f"--eval {given.eval_file}: has no row of the threshold rule")
    source = f"--eval {given.eval_file}" if given.eval_file else f"adapter {given.adapter}"
    for budget in budgets:
        if not any(row["rule"] == rule and row["budget"] == budget for row in rows):
            raise CliError(f"{source}: no {rule} row of budget {budget:g}")
    if not any(row["rule"] == "dense" for row in rows):
        raise CliError(f"{source}: no dense row")
    broken = [row for row in rows if not math.isfinite(row["loss"])]
    if broken:
        raise CliError(f"{source}: the {broken[0]['rule']} loss is {broken[0]['loss']}; there is nothing to draw")


def _batches(given: RunOptions, tokenizer: Any, debug: bool) -> list[dict[str, Any]]:
    from ..data import load_text, pack
    from . import loading

    text = load_text(
        given.dataset, split=given.split, name=given.dataset_name, column=given.column,
        streaming=given.streaming, verbose=debug,
    )  # fmt: skip
    return loading.to_batches(pack(text, tokenizer, given.length, verbose=debug), given.batch_size, given.blocks)


def _samples(given: RunOptions, tokenizer: Any, batches: list[dict[str, Any]], base_config: Any) -> list[Any]:
    from ..report.run.collect import Sample
    from . import loading

    rows = [row for batch in batches for row in batch["input_ids"]][: given.samples]
    found = [Sample(f"text {number}", row) for number, row in enumerate(rows, 1)]
    if given.prompt is None:
        return found
    ids = tokenizer(given.prompt, return_tensors="pt", return_token_type_ids=False)["input_ids"][0].long()
    if len(ids) == 0:
        raise CliError("--prompt has no tokens in this model's tokenizer")
    total = len(ids) + given.max_new_tokens
    loading.check_length(total, base_config, f"--prompt of {len(ids)} tokens + --max-new-tokens =")
    return [Sample("prompt and what each budget wrote", ids, given.max_new_tokens), *found]


def _measure_speed(
    routed: Any, untouched: Any, budgets: list[float], batches: list[dict[str, Any]], repeats: int
) -> tuple[dict[str, Any] | None, str | None]:
    """The measured speed on the first blocks of the text; the reason where it cannot be measured."""
    from ..bench.single import bench

    prompts = batches[0]["input_ids"][:_TIMED_BLOCKS]
    room = getattr(routed.config, "max_position_embeddings", None) or math.inf
    steps = int(min(16, room - prompts.shape[1]))
    try:
        how = {"input_ids": prompts, "decode_steps": steps, "repeats": repeats}
        return bench(routed, base=untouched, budgets=budgets, **how), None
    except ValueError as error:
        return None, f"Speed was not measured: {error}."


def _facts(
    given: RunOptions, model: str, routed: Any, blocks: int, timed: Mapping[str, Any] | None
) -> list[tuple[str, str]]:
    from ..versions import versions

    config = routed.active_peft_config
    text = f"{_name(given.dataset)}, split {given.split}, {blocks} blocks of {given.length} tokens"
    adapter = [f"{_name(given.adapter)}: gate {config.gate}, target {config.target}, per {config.granularity}"]
    adapter += [f"branch {config.branch}", f"trained at budget {config.budget:g}"]
    size = sum(p.numel() for name, p in routed.named_parameters() if ".routing." not in name)
    facts = [
        ("Base model", f"{_name(model)}, {routed.config.model_type}, {size:,} parameters"),
        ("Adapter", ", ".join(adapter)),
        ("Text", text),
    ]
    machine, setting = (timed or {}).get("machine", {}), (timed or {}).get("setting", {})
    if machine:
        facts.append(("Machine", f"{machine['device']}, {machine['threads']} threads, {setting.get('dtype', '')}"))
    facts.append(("Versions", ", ".join(f"{name} {version}" for name, version in versions().items())))
    return facts


def _name(source: str) -> str:
    """A Hub id as it is; of a local path its last part, since a page is for other machines."""
    return Path(source).resolve().name if Path(source).exists() else source


def _progress(what: str) -> None:
    say(f"{what} ...", sys.stderr)
