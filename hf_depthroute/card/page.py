"""From facts and results to the card's text, and into a README that somebody may have written in."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import jinja2
from huggingface_hub import ModelCard

from ..staged_files import write_bytes
from . import views
from .benchmarks import write_entries
from .facts import read_facts
from .metadata import base_id, make_metadata
from .readme import BEGIN, CARD_NAME, END, MEASURED, PLACEHOLDER, merge, read_readme
from .record import remembered
from .results import Results, Score, read_losses, read_results
from .text import Safe, code, command_line, escape, literal, row, shown_path
from .training import is_number

if TYPE_CHECKING:
    from peft import PeftModel


def make_card(
    adapter: str | Path | PeftModel,
    results: Sequence[Any] = (),
    *,
    adapter_name: str | None = None,
    training: Mapping[str, Any] | None = None,
    repo_id: str | None = None,
    model_name: str | None = None,
    language: str | None = None,
    license: str | None = None,
    tags: Sequence[str] = (),
    datasets: Sequence[str] = (),
) -> ModelCard:
    """The model card of a routed adapter. What was not measured is said to be not measured.

    Args:
        adapter: Its folder, as `save_pretrained` or `hf-depthroute train` leave it; or the model itself, which is as
            `save_pretrained` would save it now.
        results: Each a JSON file of `eval --out` or `bench --out`, its content, or what `evaluate_budgets`,
            `evaluate_tasks` or `bench` returned.
        adapter_name: Which adapter, where there are several.
        training: The record of the run; by default `training.json` in the folder, or what the model remembers.
        repo_id: The Hub's id that the loading code names.
        model_name: The title. Default: after the repository, or the base.
        language: The metadata's language, such as `"en"`.
        license: The metadata's licence, such as `"apache-2.0"`; not guessed.
        tags: More tags.
        datasets: Hub ids of the training data; by default what the record says.

    Raises:
        ResultError: A result cannot be read, or was measured with other weights.
        AdapterMismatchError: There is no routed adapter, or its files are not whole.
    """
    arguments: dict[str, Any] = {
        "adapter_name": adapter_name, "repo_id": repo_id, "model_name": model_name, "language": language,
        "license": license, "tags": tags, "datasets": datasets,
    }  # fmt: skip
    if not isinstance(adapter, (str, Path)):
        return _of_model(adapter, results, arguments)
    return _composed(adapter, results, training=training, **arguments)[0]


def _composed(
    adapter: str | Path,
    results: Sequence[Any] = (),
    *,
    adapter_name: str | None = None,
    training: Mapping[str, Any] | None = None,
    repo_id: str | None = None,
    model_name: str | None = None,
    datasets: Sequence[str] = (),
    **words: Any,
) -> tuple[ModelCard, Results]:
    """`make_card` of a folder, and what its results were read as."""
    facts = read_facts(Path(adapter), adapter_name, training)
    record = facts.training
    found = read_results(results, facts.weights_hash)
    changed = record.get("weights_hash") not in (None, facts.weights_hash)
    if record.get("evaluation") and not changed and not found.losses:
        found.losses.append(read_losses(_evaluation(record)))
    trained_on = list(datasets) or [str(name) for name in (views.dataset_of(record),) if name]
    base = facts.config.base_model_name_or_path
    title = model_name or (repo_id or "").split("/")[-1] or _title(base)
    metadata = make_metadata(facts, found, model_name=title, datasets=trained_on, **words)
    body = (
        _environment()
        .get_template("model_card.md.jinja")
        .render(
            title=title,
            adapter=repo_id or PLACEHOLDER,
            facts=facts,
            config=facts.config,
            base=shown_path(base or "") or None,
            base_id=base_id(facts),
            results=found,
            routed=views.routed_rows(facts),
            thresholds=views.threshold_rows(facts),
            losses=[views.loss_table(losses) for losses in found.losses],
            scores=views.score_table(found.scores),
            benches=[views.bench_table(bench) for bench in found.benches],
            slower=views.slower(found.benches),
            training=views.training(record, trained_on),
            changed=changed,
        )
    )
    note = f"\n{MEASURED}" if found.losses or found.scores or found.benches else ""
    text = f"\n{BEGIN.format(facts.digest)}{note}\n{body.strip()}\n\n{END}\n"
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n{text}"), found


def write_card(folder: str | Path, results: Sequence[Any] = (), **arguments: Any) -> Path:
    """Write `README.md` in an adapter's folder; the arguments and errors are those of `make_card`.

    Scores on benchmarks of the Hub go into files of their own, `.eval_results/depth_routing_*.yaml`, too.

    The card stands between two HTML comments; what somebody wrote around them stays, and so do keys of the metadata
    that a card does not set. Without `results`, a card with results of the same adapter stays too.
    """
    return put_card(folder, *updated_card(folder, results, **arguments))


def updated_card(
    folder: str | Path, results: Sequence[Any] = (), **arguments: Any
) -> tuple[ModelCard, list[Score] | None]:
    """The card that `write_card` writes, and the scores that it shows; None where the results of the old one stay."""
    old = read_readme(Path(folder))
    new, found = _composed(folder, results, **arguments)
    if old is None:
        return new, found.scores
    card, stays = merge(old, new, arguments.get("repo_id"))
    return card, None if stays else found.scores


def put_card(folder: str | Path, card: ModelCard, scores: Sequence[Score] | None = None) -> Path:
    """Put a card in the place of `README.md`: also in that of a link, such as those of the Hub's cache."""
    path = Path(folder) / CARD_NAME
    write_bytes(path, str(card).encode(), follow=False)
    if scores is not None:
        write_entries(path.parent, scores)
    return path


def _of_model(model: PeftModel, results: Sequence[Any], arguments: dict[str, Any]) -> ModelCard:
    name = arguments["adapter_name"] or routed_name(model)
    if name is None:
        raise ValueError("the model has no depth-routed adapter")
    run = remembered(model, name)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        arguments |= {"adapter_name": name, "training": run.record(model, name)}
        return make_card(folder, [*run.results, *results], **arguments)


def routed_name(model: Any) -> str | None:
    """The name of the model's routed adapter: the active one, where there are several; None where there is none."""
    from ..config import DepthRouteConfig

    names = [name for name, config in model.peft_config.items() if isinstance(config, DepthRouteConfig)]
    active = [name for name in names if name in model.active_adapters]
    return next(iter([*active, *names]), None)


def _evaluation(record: Mapping[str, Any]) -> dict[str, Any]:
    """The evaluation at the end of `hf-depthroute train`, in the form of `eval --out`."""
    arguments, held_out = record.get("arguments") or {}, record.get("held_out_blocks")
    length = arguments.get("length")
    split = f"{arguments.get('split')}, {held_out} blocks held out" if held_out else None
    return {
        "dataset": arguments.get("eval_dataset") or arguments.get("dataset"),
        "dataset_name": None if arguments.get("eval_dataset") else arguments.get("dataset_name"),
        "split": split or arguments.get("validation_split") or "train",
        "length": length if is_number(length) else None,
        "rows": record["evaluation"],
    }


def _url(name: str) -> Safe:
    return Safe(quote(name))


def _listed(parts: Sequence[str]) -> Safe:
    return Safe(", ".join(escape(part) for part in parts))


def _lines(parts: Sequence[str]) -> Safe:
    return Safe("\n".join(escape(part) for part in parts))


def _title(base: str | None) -> str:
    return f"Depth-routing adapter of {shown_path(base).split('/')[-1]}" if base else "Depth-routing adapter"


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_depthroute", "card"),
        autoescape=False,  # of HTML; `finalize` escapes Markdown and HTML
        finalize=escape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"code": code, "row": row, "literal": literal, "command_line": command_line}
    environment.filters |= {"url": _url, "listed": _listed, "lines": _lines}
    return environment
