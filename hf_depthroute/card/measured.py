"""Measured results, from the JSON of `hf-depthroute eval` and `bench` or the return values of the
Python functions.

These files are data: what is not of the expected form is refused in one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from peft import get_peft_model_state_dict
from torch import Tensor, nn

from ..adapter.files import tensors_hash
from ..base.distributed import world_size
from ..base.stack import unwrapped
from ..evaluation.harness_scores import read_scores
from ..evaluation.perplexity import BudgetRow
from ..files.shown import OneLine
from ..inference.calibration import active_routings
from ..training.record import active_run
from .escaping import hub_id
from .facts import is_number

_MAX_BYTES = 64 << 20
# What reading content of another form raises.
OF_OTHER_FORM = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)


class ResultError(OneLine, ValueError):
    """A result that a card is to show cannot be read, or is of another adapter."""


@dataclass(frozen=True)
class Losses:
    """Rows on one text; the first is the dense base's."""

    dataset: str
    config: str | None
    split: str | None
    blocks: int | None
    length: int | None
    rows: list[BudgetRow]
    calibrated: bool = False  # for every budget; else with the adapter's own thresholds
    calibrated_on: str | None = None  # on this split, where it is known


@dataclass(frozen=True)
class Score:
    """One task's metric in one run of lm-eval."""

    task: str
    metric: str
    run: str
    budget: float | None
    value: float
    stderr: float | None
    dense: float  # the base's value
    full_ratio: float
    documents: int | None  # of all tasks of a group
    dataset: str | None  # the Hub's id, where known; that which the tasks of a group share
    phases: str | None = None  # what was routed, where that needs to be said

    @property
    def condition(self) -> str:
        """The run, and its phases where they need to be said."""
        return _with_phases(self.run, self.phases)


@dataclass(frozen=True)
class Speed:
    """One case of a benchmark at one budget, in milliseconds; `eta` is None if it means nothing."""

    case: str
    budget: float
    full_ratio: float
    dense_ms: float
    routed_ms: float
    speedup: float
    eta: float | None


@dataclass
class Results:
    """Everything that was measured of one adapter; `benches` are machines with their cases."""

    losses: list[Losses] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    benches: list[tuple[dict[str, object], list[Speed]]] = field(default_factory=list)


def add_results(model: nn.Module, *results: object) -> None:
    """Show these results in the cards that `save_pretrained` and `push_to_hub` of this model write.

    A result without a hash of the weights is taken for one of the adapter as it is now; where the
    weights are sharded or offloaded, for one of the adapter at any time.

    Args:
        model: A model with an active routed adapter.
        *results: As for `make_card`: files of `eval --out` or `bench --out`, or what
            `evaluate_budgets`, `evaluate_tasks` or `bench` returned for this adapter.

    Raises:
        ValueError: No routed adapter is active, or a result is none.
    """
    run = active_run(model)
    name = active_routings(model)[0].active_name()
    tensors = get_peft_model_state_dict(unwrapped(model), adapter_name=name)
    now = {}
    if world_size() == 1 and all(type(t) is Tensor and not t.is_meta for t in tensors.values()):
        now["weights_hash"] = tensors_hash(tensors)
    run.results += [r if isinstance(r, (str, Path)) else now | _plain(r) for r in results]


def read_results(
    sources: Iterable[object], weights_hash: str | None, phases: str = "all"
) -> Results:
    """Read results of one adapter, as `make_card` takes them.

    One that names another `weights_hash` is refused. Where the adapter's `phases` or a result's are
    not `"all"`, the result names its own.

    Raises:
        ResultError: One of them cannot be read, or is of another adapter or on another base.
    """
    results = Results()
    for number, source in enumerate(sources, 1):
        if isinstance(source, (str, Path)):
            name = str(source)
            content = _read_file(Path(source))
        else:
            name = f"result {number}"
            content = _plain(source)
        check_origin(name, content, weights_hash)
        try:
            if "rows" in content:
                results.losses.append(read_losses(content))
            elif "runs" in content:
                results.scores += _scores(content["runs"], phases)
            elif any(part in content for part in ("measurements", "prefill", "decode", "memory")):
                results.benches.append(_bench(content, phases))
            else:
                raise ResultError(
                    "is neither a result of hf-depthroute eval nor of hf-depthroute bench"
                )
        except ResultError as error:
            raise ResultError(f"{name}: {error}") from error
        except OF_OTHER_FORM as error:
            raise ResultError(
                f"{name}: not a result of eval or bench ({error!r} is wrong)"[:300]
            ) from error
    return results


def check_origin(
    name: str, content: Mapping[str, object], weights_hash: str | None, any_base: bool = False
) -> None:
    """`ResultError` where a result says that it is of other weights, or on another base."""
    if weights_hash is not None and content.get("weights_hash") not in (None, weights_hash):
        raise ResultError(
            f"{name}: was measured with other weights than this adapter's; measure it again"
        )
    if content.get("base_mismatch") and not any_base:
        raise ResultError(
            f"{name}: was measured on another base than this adapter's; measure it on its own"
        )


def read_losses(content: Mapping[str, Any]) -> Losses:
    """The losses in `eval --out`, or in the evaluation at the end of a training."""
    rows = [
        BudgetRow(
            budget=_number(row["budget"]),
            rule=str(row["rule"]),
            loss=_number(row["loss"]),
            full_ratio=_number(row["full_ratio"]),
            gap=_optional(row.get("gap")),
            behind_prompts=bool(row.get("behind_prompts")),
            calibrated=bool(row.get("calibrated")),
        )
        for row in content["rows"]
    ]
    if not rows or rows[0].rule != "dense":
        raise ResultError("has no row of the dense base to compare with")

    def known(name: str, kind: type) -> Any:
        value = content.get(name)
        return None if value is None else kind(value)

    on = known("calibrate_on", str)
    return Losses(
        dataset=str(content.get("dataset") or "a text that was not recorded"),
        config=known("dataset_name", str),
        split=known("split", str),
        blocks=known("blocks", int),
        length=known("length", int),
        rows=rows,
        calibrated=on is not None or any(row.calibrated for row in rows),
        calibrated_on=on,
    )


def _scores(runs: Mapping[str, Mapping[str, Any]], phases: str) -> Iterator[Score]:
    found = {name: read_scores(run["lm_eval"]) for name, run in runs.items()}
    if "dense" not in found:
        raise ResultError("has no run of the dense base to compare with")
    for (task, metric), (dense, _) in found["dense"].items():
        for name, run in runs.items():
            value, stderr = found[name][task, metric]
            of_run = run["lm_eval"]
            members = of_run.get("group_subtasks", {}).get(task) or [task]
            configs = [of_run.get("configs", {}).get(member, {}) for member in members]
            counts = [of_run.get("n-samples", {}).get(member, {}) for member in members]
            local = any("data_files" in (config.get("dataset_kwargs") or {}) for config in configs)
            datasets = {hub_id(config.get("dataset_path")) for config in configs}
            budget = run.get("budget")
            if budget is not None:
                budget = _number(budget)
            elif name.startswith("budget "):
                budget = float(name.removeprefix("budget "))
            documents = None
            if all("effective" in count for count in counts):
                documents = sum(int(count["effective"]) for count in counts)
            dataset = None
            if len(datasets) == 1 and not local:
                dataset = datasets.pop()
            yield Score(
                task=str(task),
                metric=str(metric),
                run=str(name),
                budget=budget,
                value=_number(value),
                stderr=_optional(stderr),
                dense=_number(dense),
                full_ratio=_number(run["full_ratio"]),
                documents=documents,
                dataset=dataset,
                phases=_said(run.get("phases"), phases),
            )


def _said(measured: object, phases: str) -> str | None:
    """The phases of a result, where they or the adapter's are not all."""
    if measured is None or measured == phases == "all":
        return None
    return str(measured)


def _with_phases(words: str, phases: str | None) -> str:
    if phases is None:
        return words
    return f"{words}, phases {phases}"


def _bench(content: Mapping[str, Any], phases: str) -> tuple[dict[str, Any], list[Speed]]:
    from ..bench.measurements import TIMED, measurements, short_label

    def case(measured: Mapping[str, Any]) -> str:
        setting = measured["setting"]
        words = f"{short_label(measured)}, {setting.get('dtype')}"
        return _with_phases(words, _said(setting.get("phases", "all"), phases))

    rows = [
        Speed(
            case=case(m),
            budget=float(budget),
            full_ratio=_number(routed["full_ratio"]),
            dense_ms=_number(m["dense_ms"]),
            routed_ms=_number(routed["routed_ms"]),
            speedup=_number(routed["speedup"]),
            eta=_optional(routed.get("eta")),
        )
        for m in measurements(content)
        if m["case"] in TIMED and "error" not in m
        for budget, routed in m["budgets"].items()
    ]
    return dict(content["machine"]), rows


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        content = None
        if len(text) <= _MAX_BYTES:
            content = json.loads(text)
    except OSError as error:
        raise ResultError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{path}: not JSON ({str(error).splitlines()[0]})") from error
    if not isinstance(content, dict):
        raise ResultError(f"{path}: not a result of eval or bench")
    return content


def _plain(source: object) -> dict[str, object]:
    """The form of the files, of what the functions return."""
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, Sequence) and source and all(is_dataclass(part) for part in source):
        if hasattr(source[0], "rule"):
            return {"rows": [asdict(part) for part in source]}
        if hasattr(source[0], "results"):
            return {"runs": {p.name: vars(p) | {"lm_eval": p.results} for p in source}}
    raise ResultError(
        f"a {type(source).__name__} is no result: pass a file, its content, or what a function "
        "returned"
    )


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ResultError(f"{str(value)[:40]!r} is not a number")
    return float(value)


def _optional(value: object) -> float | None:
    """None for what is not known, which lm-eval writes as "N/A" and a quotient by zero as NaN."""
    if not is_number(value):
        return None
    return float(value)
