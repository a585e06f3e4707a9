"""The metadata that the Hub indexes, at the top of a card.

`library_name` is `peft`: the Hub knows that library, files the adapter under its base, counts its
downloads by `adapter_config.json` and shows PEFT's way of loading; under a name that the Hub does
not know there would be none of this. What it cannot say, that `hf_depthroute` has to be imported,
the card says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ..config.adapter import TASKS
from ..data.text import PYTHON_STDLIB, is_local_file
from .escaping import clean, clean_or_none, hub_id
from .facts import Facts
from .measured import Losses, Results, Score

TAGS = ("depth-routing", "hf_depthroute")


def make_metadata(
    facts: Facts,
    results: Results,
    *,
    model_name: str,
    language: str | None,
    license: str | None,
    tags: Sequence[str],
    datasets: Sequence[str],
) -> ModelCardData:
    """The metadata of a card.

    A base or a dataset that is a local path has no id to be indexed by, and is left out.
    """
    base = base_id(facts)
    indexed = [name for name in map(dataset_id, datasets) if name is not None]
    extra: dict[str, Any] = {}
    tags = [*TAGS, *map(clean, tags)]
    if base is not None:
        extra["base_model_relation"] = "adapter"
        tags.insert(0, f"base_model:adapter:{base}")
    evaluations = [*_losses(results.losses), *_scores(results.scores)]
    if evaluations:
        extra |= {"model_name": model_name, "eval_results": evaluations}
    return ModelCardData(
        base_model=base,
        library_name="peft",
        pipeline_tag=TASKS[facts.config.task_type or "CAUSAL_LM"][1],
        tags=tags,
        datasets=list(dict.fromkeys(indexed)) or None,
        language=clean_or_none(language),
        license=clean_or_none(license),
        **extra,
    )


def base_id(facts: Facts) -> str | None:
    """The base's id on the Hub, unless its name is that of a folder here."""
    name = hub_id(facts.config.base_model_name_or_path)
    if name is None or Path(name).is_dir():
        return None
    return name


def dataset_id(name: str | None) -> str | None:
    """A dataset's id on the Hub, unless it is a file or a folder here."""
    found = hub_id(name)
    if found is None or found == PYTHON_STDLIB or is_local_file(found) or Path(found).exists():
        return None
    return found


def _losses(measured: Sequence[Losses]) -> list[EvalResult]:
    """The loss of what inference does; the base's and the training rule's are in the text only."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset_id(losses.dataset) or "text",
            dataset_name=clean(Path(losses.dataset).name),
            dataset_config=clean_or_none(losses.config),
            dataset_split=clean_or_none(losses.split),
            metric_type="loss",
            metric_name="Loss, nats per token"
            + _condition(None if row.rule == "fixed" else row.budget),
            metric_value=round(row.loss, 4),
        )
        for losses in measured
        for row in losses.rows
        if row.rule in ("threshold", "fixed") and math.isfinite(row.loss)
    ]


def _scores(measured: Sequence[Score]) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=clean(score.dataset or score.task),
            dataset_name=clean(score.task),
            metric_type=clean(score.metric),
            metric_name=clean(score.metric + _condition(score.budget, score.phases)),
            metric_value=round(score.value, 4),
        )
        for score in measured
        if score.run != "dense" and math.isfinite(score.value)
    ]


def _condition(budget: float | None, phases: str | None = None) -> str:
    parts = []
    if budget is not None:
        parts.append(f"budget {budget:g}")
    if phases is not None:
        parts.append(f"phases {phases}")
    if parts:
        return f" ({', '.join(parts)})"
    return ""
