"""What the Hub checks of a model card's metadata before it takes it."""

from __future__ import annotations

import re

import yaml

_FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


def card_fault(text: str) -> str | None:
    """Why the Hub would refuse a card's metadata: the checks of its documentation that
    concern a model."""
    found = _FRONT.match(text)
    if found is None:
        return None
    try:
        data = yaml.safe_load(found[1])
    except yaml.YAMLError as error:
        return f"not YAML: {error}"
    repo = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
    for name in ("base_model", "datasets"):
        values = data.get(name) or []
        for value in values if isinstance(values, list) else [values]:
            if not isinstance(value, str) or not repo.fullmatch(value):
                return f'"{name}" with value "{value}" is not valid'
    if data.get("base_model_relation", "adapter") not in (
        "adapter",
        "finetune",
        "merge",
        "quantized",
    ):
        return '"base_model_relation" is not valid'
    for name in ("library_name", "pipeline_tag"):
        if not isinstance(data.get(name, ""), str):
            return f'"{name}" must be a string'
    if not all(isinstance(tag, str) for tag in data.get("tags") or []):
        return '"tags" must be strings'
    for model in data.get("model-index") or []:
        if not isinstance(model.get("name"), str) or not model["name"]:
            return '"model-index[0].name" is required'
        for result in model["results"]:
            if not result.get("task", {}).get("type") or not {"type", "name"} <= set(
                result.get("dataset", {})
            ):
                return '"model-index" results need a task and a dataset'
            if not all(
                "type" in m and isinstance(m.get("value"), (int, float))
                for m in result.get("metrics", [])
            ):
                return '"model-index" metrics need a type and a value'
    return None
