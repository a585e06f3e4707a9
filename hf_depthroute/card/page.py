"""From facts and results to the card's text, and into a README that may hold text of the user's."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from peft import PeftModel

from ..adapter.files import CARD_NAME, AdapterMismatchError
from ..config.adapter import TASKS, DepthRouteConfig
from ..files.shown import DepthRouteWarning, counted, reason
from ..files.staged import write_bytes
from ..parts.gates import GATES
from ..parts.memory import shortest_order
from ..parts.targets import TARGETS
from ..routing.description import budget_words, patterns_words
from ..training.record import remembered
from ..version import REPOSITORY, __version__
from .escaping import Safe, cell, code, command_line, escape, literal, shown_path
from .facts import TRAINING_NAME, Facts, is_number, read_facts
from .measured import OF_OTHER_FORM, read_losses, read_results
from .metadata import base_id, make_metadata
from .readme import BEGIN, END, MEASURED, PLACEHOLDER, Card, merge, old_card

_MACHINE = ("device", "threads", "cores", "load_before", "torch", "transformers", "python")
# What a record of training that was changed makes a card's template do.
_FAULTS = (*OF_OTHER_FORM, ArithmeticError, jinja2.TemplateError)
_NOT_SHOWN = ("config", "debug", "out", "overwrite", "model", "dataset", "dataset_name")


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
) -> Card:
    """The model card of a routed adapter. What was not measured is said to be not measured.

    Args:
        adapter: Its folder, as `save_pretrained` or `hf-depthroute train` leave it; or the model
            itself, which is as `save_pretrained` would save it now.
        results: Each a JSON file of `eval --out` or `bench --out`, its content, or what
            `evaluate_budgets`, `evaluate_tasks` or `bench` returned.
        adapter_name: Which adapter, where there are several.
        training: The record of the run; by default `training.json` in the folder, or what the model
            remembers.
        repo_id: The Hub's id that the loading code names.
        model_name: The title. Default: after the repository, or the base.
        language: The metadata's language, such as `"en"`.
        license: The metadata's licence, such as `"apache-2.0"`; not guessed.
        tags: More tags.
        datasets: Hub ids of the training data; by default what the record says.

    Raises:
        ResultError: A result cannot be read, or was measured with other weights or on another base.
        AdapterMismatchError: There is no routed adapter, or its files are not whole.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(adapter, (str, Path)):
            folder = str(adapter)
        else:
            adapter_name = adapter_name or routed_name(adapter)
            if adapter_name is None:
                raise ValueError("the model has no depth-routed adapter")
            run = remembered(adapter, adapter_name)
            results = [*run.results, *results]
            training = run.record(adapter, adapter_name)
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            adapter.save_pretrained(folder)

        def card_with(record: Mapping[str, Any] | None) -> Card:
            facts = read_facts(Path(folder), adapter_name, record)
            words = {"language": language, "license": license, "tags": tags}
            return _card_of(facts, results, repo_id, model_name, datasets, **words)

        try:
            return card_with(training)
        except AdapterMismatchError:
            raise
        except _FAULTS as error:
            made = card_with({})
            warnings.warn(
                f"left out of the model card: {TRAINING_NAME}, which is not in the form that "
                f"training writes ({reason(error)})",
                DepthRouteWarning,
                stacklevel=2,
            )
            return made


def _card_of(
    facts: Facts,
    results: Sequence[Any],
    repo_id: str | None,
    model_name: str | None,
    datasets: Sequence[str],
    **metadata: Any,
) -> Card:
    config = facts.config
    record = facts.training
    found = read_results(results, facts.weights_hash, config.phases)
    changed = record.get("weights_hash") not in (None, facts.weights_hash)
    if record.get("evaluation") and not changed and not found.losses:
        found.losses.append(read_losses(_evaluation(record)))
    arguments = record.get("arguments") or {}
    recorded = record.get("dataset") or arguments.get("dataset")
    trained_on = list(datasets) or ([str(recorded)] if recorded else [])
    hyperparameters = record.get("hyperparameters") or ({} if record.get("command") else arguments)
    base = shown_path(config.base_model_name_or_path or "")
    of_base = f"Depth-routing adapter of {base.split('/')[-1]}".removesuffix(" of ")
    title = model_name or (repo_id or "").split("/")[-1] or of_base
    budget = f"{config.budget:.3g}"
    if facts.depth is not None and isinstance(config.layers, list):
        budget = budget_words(config, facts.depth)
    body = _template().render(
        title=title,
        adapter=repo_id or PLACEHOLDER,
        facts=facts,
        gate=GATES[config.gate],
        decides=TARGETS[config.target].decides[config.granularity],
        budget=budget,
        exceptions=patterns_words(config),
        shortest_order=shortest_order(config) if config.has_memory else None,
        auto_class=TASKS[config.task_type or "CAUSAL_LM"][0],
        base=base or None,
        base_id=base_id(facts),
        elsewhere=base != (config.base_model_name_or_path or ""),
        results=found,
        record=record,
        arguments=arguments,
        shown_arguments={
            name: shown_path(str(value))
            for name, value in hyperparameters.items()
            if value is not None and name not in _NOT_SHOWN
        },
        trained_on=trained_on,
        changed=changed,
        version=__version__,
        repository=Safe(REPOSITORY),
    )
    note = ""
    if found.losses or found.scores or found.benches:
        note = f"\n{MEASURED}"
    text = f"\n{BEGIN.format(facts.digest)}{note}\n{body.strip()}\n\n{END}\n"
    data = make_metadata(facts, found, model_name=title, datasets=trained_on, **metadata)
    return Card(data, text)


def write_card(folder: str | Path, results: Sequence[object] = (), **arguments: object) -> Path:
    """Write `README.md` in an adapter's folder; the arguments and errors are those of `make_card`.

    The card stands between two HTML comments; the user's text around them stays, and so do keys of
    the metadata that a card does not set. Without `results`, a card with results of the same
    adapter stays too.
    """
    return put_card(folder, updated_card(folder, results, **arguments))


def updated_card(folder: str | Path, results: Sequence[Any] = (), **arguments: Any) -> Card:
    """The card that `write_card` writes."""
    old = old_card(Path(folder))
    new = make_card(folder, results, **arguments)
    if old is None:
        return new
    return merge(old, new, arguments.get("repo_id"))


def put_card(folder: str | Path, card: Card) -> Path:
    """Put a card in the place of `README.md`, and of a link such as the Hub cache's."""
    path = Path(folder) / CARD_NAME
    write_bytes(path, str(card).encode(), follow=False)
    return path


def routed_name(model: Any) -> str | None:
    """The name of the model's routed adapter, the active one first; None if there is none."""
    names = [*model.active_adapters, *model.peft_config]
    return next((n for n in names if isinstance(model.peft_config[n], DepthRouteConfig)), None)


def _evaluation(record: Mapping[str, Any]) -> dict[str, Any]:
    """The evaluation at the end of `hf-depthroute train`, in the form of `eval --out`."""
    arguments = record.get("arguments") or {}
    length = arguments.get("length")
    split = arguments.get("validation_split") or "train"
    if record.get("held_out_blocks"):
        split = f"{arguments.get('split')}, {counted(record['held_out_blocks'], 'block')} held out"
    return {
        "dataset": arguments.get("eval_dataset") or arguments.get("dataset"),
        "dataset_name": None if arguments.get("eval_dataset") else arguments.get("dataset_name"),
        "split": split,
        "length": length if is_number(length) else None,
        "rows": record["evaluation"],
    }


def _machine_words(machine: Mapping[str, object]) -> Safe:
    known = [f"{name} {code(machine[name])}" for name in _MACHINE if machine.get(name) is not None]
    return Safe(", ".join(known).removeprefix("device "))


def _last_entry(log: Sequence[Mapping[str, object]], name: str) -> Safe | None:
    """The last log entry with this loss, as `step 50: loss 1.2, ...`."""
    entry = next((entry for entry in reversed(log) if is_number(entry.get(name))), None)
    if entry is None:
        return None
    terms = [n for n in entry if n == name or str(n).startswith("loss_")]
    said = ", ".join(f"{code(n)} {entry[n]:.4f}" for n in terms if is_number(entry[n]))
    step = entry.get("step")
    return Safe(f"step {int(step):,}: {said}" if is_number(step) else said)


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_depthroute", "card"),
        autoescape=False,  # of HTML; `finalize` escapes Markdown and HTML
        finalize=escape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "cell": cell,
        "code": code,
        "literal": literal,
        "command_line": command_line,
        "shown_path": shown_path,
        "machine_words": _machine_words,
        "last_entry": _last_entry,
        "figure": "{:.4f}".format,
        "grouped": "{:,}".format,
        "share": "{:.1%}".format,
        "url": lambda name: Safe(quote(name)),
        "listed": lambda parts: Safe(", ".join(parts)),
        "pairs": lambda pairs: Safe(", ".join(f"{code(n)} {code(v)}" for n, v in pairs.items())),
    }
    return environment.get_template("model_card.md.jinja")
