"""Cases measured one after the other in one process: `run_cases`, and `bench` for one model at one size."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..adapter.tuner import get_depth_routed_model
from ..evaluation.roofline import Peaks
from ..files.out_of_resources import out_of_memory
from ..inference.calibration import active_routings
from ..parts.targets import TARGETS
from .cases import Case
from .inference import Workload, measure_inference
from .lora import measure_loading, measure_training
from .measurements import as_single, label_of
from .memory import measure_memory
from .modes import check_modes, forget_compiled
from .shapes import dense_view, first_sequences, random_model, random_tokens
from .timing import describe_machine, dtype_name, measure_peaks, relative_load
from .variants import Variants, adapter_dtype, hold_adapter_in, wants_base_dtype

PARTS = ("prefill", "decode", "memory")
_TUNED_PROMPT = 128  # tokens


@dataclass(frozen=True)
class Given:
    """A routed model that is measured as it is.

    Attributes:
        model: A model with an active depth-routed adapter, in eval mode; its budget is restored.
        base: The untouched base, from `dense_view` before the adapter was injected; not timed when None.
        input_ids: Prompts `[B, T]`, repeated up to a case's batch; random tokens when None.
        recalibrate: Whether each budget is calibrated on the tokens.
    """

    model: Any
    base: nn.Module | None = None
    input_ids: torch.Tensor | None = None
    recalibrate: bool = True


def run_cases(
    cases: Sequence[Case],
    *,
    name: str = "bench",
    given: Given | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure all cases, one after the other; models of the same shape are built once.

    A case for which there is not enough memory says so in its result and does not end the run.

    Args:
        cases: What to measure.
        name: A name for the result.
        given: The model of the cases that have no shape.
        device: Where random weights are made; default: the GPU if there is one.
        progress: Called with one line per case.

    Returns:
        A JSON-ready dict: `name`, `machine`, `peaks` (per dtype) and `measurements`, in each of which `label` tells
        the case, and `setting` how the model was made.

    Raises:
        ValueError: A case has no shape and no model is given, or what is given cannot be measured.
    """
    say = progress or (lambda line: None)
    if given is None and any(case.shape is None for case in cases):
        raise ValueError("a case has no shape, and no model is given")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    device = device if given is None else next(given.model.parameters()).device
    machine = describe_machine(device) | {"load_before": relative_load()}
    result: dict[str, Any] = {"name": name, "machine": machine, "peaks": {}, "measurements": []}
    for kind in dict.fromkeys(case.made_from() for case in cases):
        group = [case for case in cases if case.made_from() == kind]
        base = _random_base(group[0], device) if given is None else given.model
        dtype = next(base.parameters()).dtype
        peaks = measure_peaks(device, dtype)
        result["peaks"][dtype_name(dtype)] = peaks.to_dict()
        for case in group:
            setting = _setting(case, base)
            label = case.describe() if given is None else label_of(case.sizes(), setting)
            say(label)
            measured = {"case": case.case, "label": label, "setting": setting}
            try:
                measured |= _measure(case, given or base, peaks)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                measured["error"] = "out of memory"
                say("  out of memory")
            result["measurements"].append(measured)
            forget_compiled()
            gc.collect()
        del base
    return result


def bench(
    model: Any,
    *,
    base: nn.Module | None = None,
    input_ids: torch.Tensor | None = None,
    recalibrate: bool = True,
    parts: Sequence[str] = ("prefill", "decode"),
    decode_batch: int = 1,
    decode_steps: int = 16,
    repeats: int = 15,
    progress: Callable[[str], None] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Measure an adapter on its base: untouched base, adapter disabled, budget 1, and every budget.

    Args:
        model: As in `Given`; `base`, `input_ids` and `recalibrate` too.
        parts: Some of `PARTS`.
        decode_batch: Sequences in decode.
        decode_steps: Timed decoding steps after the prompt, of random tokens; 0 leaves decode out.
        repeats: Rounds.
        progress: Called with one line per part.
        fields: What every `Case` gets: `budgets`, `batch`, `length`, `masked`, `tune`, `baselines`, `logits`.

    Returns:
        A JSON-ready dict, as from `as_single`.

    Raises:
        ValueError: No routed adapter is active, or a value cannot be used.
        MemoryError: There is not enough.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ValueError(f"part {unknown[0]!r} is unknown; use some of: {', '.join(PARTS)}")
    if input_ids is not None:
        fields |= {"batch": input_ids.shape[0], "length": input_ids.shape[1]}
    prefill = Case("prefill", rounds=repeats, **fields)
    decode = replace(prefill, case="decode", batch=decode_batch, steps=max(1, decode_steps))
    cases = [decode if part == "decode" else replace(prefill, case=part) for part in parts]
    cases = [case for case in cases if case.case != "decode" or decode_steps]
    result = run_cases(cases, given=Given(model, base, input_ids, recalibrate), progress=progress)
    sizes = {"batch": prefill.batch, "length": prefill.length, "decode_batch": decode_batch}
    return as_single(result, sizes | {"decode_steps": decode_steps, "repeats": repeats})


def _random_base(case: Case, device: torch.device) -> Any:
    dtype = getattr(torch, case.dtype)
    return random_model(str(case.shape), dtype, depth=case.depth, vocabulary=case.vocabulary, device=device)


def _routed(base: Any, case: Case) -> Given:
    """Copies of the modules around the same weights: the base itself stays as it is for the next case."""
    model = get_depth_routed_model(dense_view(base), case.config())
    device = next(base.parameters()).device
    if case.case != "memory" and wants_base_dtype(device, check_modes(case.baselines, device)):
        hold_adapter_in(model, getattr(torch, case.dtype))
    return Given(model, dense_view(base))


def _measure(case: Case, subject: Any, peaks: Peaks) -> dict[str, Any]:
    """One case, on a base with random weights or on what is given."""
    if case.case == "train":
        sizes = {"batch": case.batch, "length": case.length, "rounds": case.rounds}
        return measure_training(subject, case.config(), loss=case.loss, peaks=peaks, **sizes)
    if case.case == "load":
        return measure_loading(subject, case.config(), rounds=case.rounds)
    given = subject if isinstance(subject, Given) else _routed(subject, case)
    steps = {"prefill": 0, "memory": 1}.get(case.case, case.steps)
    ids = random_tokens(given.model, case.batch, case.length + steps)
    if given.input_ids is not None:
        ids[:, : case.length] = given.input_ids.to(ids.device)[torch.arange(case.batch) % len(given.input_ids)]
    decodes, tuned_on = case.case == "decode", None
    if case.tune and case.case != "memory":
        tuned_on = ids[:, : case.length]
        if decodes and not TARGETS[active_routings(given.model)[0].active_config().target].skips_attention:
            tuned_on = tuned_on[:, -_TUNED_PROMPT:]  # an FFN's steps do not depend on how long the prompt was
    calibrated_on = first_sequences(ids) if given.recalibrate else None
    variants = Variants(given.model, given.base, case.budgets, case.masked, calibrated_on, tuned_on, decodes)
    workload = Workload(ids, steps, case.logits)
    try:
        if case.case == "memory":
            measured = measure_memory(variants, workload)
        else:
            measured = measure_inference(variants, workload, modes=case.baselines, rounds=case.rounds, peaks=peaks)
    finally:
        variants.restore()
    return {"adapter_dtype": adapter_dtype(given.model), **measured}


def _setting(case: Case, model: Any) -> dict[str, Any]:
    """How the model was made; `model` is the base of random weights, or the routed model that was given."""
    made: dict[str, Any]
    if case.shape is None:
        holders = active_routings(model)
        config = holders[0].active_config()
        made = {"routed_layers": [h.layer_index for h in holders], "target": config.target, "gate": config.gate}
    else:
        config = case.config()
        made = {"routed_layers": config.routed_layers(case.layer_count()), "target": case.target}
        made |= {"gate": case.gate, "shape": case.shape, "depth": case.layer_count()}
        made |= {"vocabulary": model.config.vocab_size}
    if config.phases != "all":
        made["phases"] = config.phases
    return made | {
        "model_type": model.config.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": dtype_name(next(model.parameters()).dtype),
    }
