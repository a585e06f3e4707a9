"""Cases of one model, measured one after the other in one process."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..files.out_of_resources import out_of_memory
from ..inference.calibration import active_routings
from .cases import Case
from .inference import measure_inference
from .measurements import as_single, label_of
from .modes import first_sequences, forget_compiled, random_tokens
from .timing import describe_machine, dtype_name, relative_load
from .variants import Variants, adapter_dtype

Result = dict[str, Any]


def run_cases(
    cases: Sequence[Case],
    model: nn.Module,
    base: nn.Module | None = None,
    input_ids: torch.Tensor | None = None,
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Measure all cases of a model, each after every budget was calibrated on its tokens.

    A case for which there is not enough memory says so in its result and does not end the run.

    Args:
        model: A model with an active depth-routed adapter, in eval mode; its budget is restored.
        base: The untouched base, from `dense_view` before the adapter was injected, timed too.
        input_ids: Prompts `[B, T]`, repeated up to a case's batch; by default random tokens.

    Returns:
        A JSON-ready dict: `name`, `machine` and `measurements`, in each of which `label` tells
        the case, and `setting` how the model was made.

    Raises:
        ValueError: What is given cannot be measured.
    """
    result = new_result("bench", next(model.parameters()).device)
    setting = setting_of(model)
    measure_one = functools.partial(measure, model=model, base=base, input_ids=input_ids)
    for case in cases:
        label = label_of(case.sizes(), setting)
        result["measurements"].append(run_case(case, label, setting, measure_one, progress))
    return result


def new_result(name: str, device: torch.device) -> Result:
    """A result without measurements."""
    machine = describe_machine(device) | {"load_before": relative_load()}
    return {"name": name, "machine": machine, "measurements": []}


def run_case(
    case: Case,
    label: str,
    setting: Mapping[str, object],
    measure: Callable[[Any], Result],
    progress: Callable[[str], None] | None = None,
) -> Result:
    """The result of `measure` for the case, or that there was not enough memory."""
    say = progress or (lambda line: None)
    say(label)
    measured: Result = {"case": case.case, "label": label, "setting": setting}
    try:
        measured |= measure(case)
    except Exception as error:
        if not out_of_memory(error):
            raise
        measured["error"] = "out of memory"
        say("  out of memory")
    forget_compiled()
    gc.collect()
    return measured


def bench(
    model: nn.Module,
    *,
    base: nn.Module | None = None,
    input_ids: torch.Tensor | None = None,
    decode_batch: int = 1,
    decode_steps: int = 16,
    repeats: int = 15,
    **fields: Any,
) -> Result:
    """Measure an adapter on its base: untouched base, adapter disabled, budget 1, and every budget.

    Args:
        model: As in `run_cases`; `base` and `input_ids` too.
        decode_steps: Timed decoding steps after the prompt, of random tokens; 0 leaves decode out.
        fields: What every `Case` gets: `budgets`, `batch`, `length`, `baselines`, `logits`.

    Returns:
        A JSON-ready dict, as from `as_single`.

    Raises:
        ValueError: No routed adapter is active, or a value cannot be used.
        MemoryError: There is not enough.
    """
    if input_ids is not None:
        fields |= {"batch": input_ids.shape[0], "length": input_ids.shape[1]}
    prefill = Case(case="prefill", rounds=repeats, **fields)
    cases = [prefill]
    if decode_steps:
        cases.append(replace(prefill, case="decode", batch=decode_batch, steps=decode_steps))
    result = run_cases(cases, model, base, input_ids)
    sizes = {"batch": prefill.batch, "length": prefill.length, "decode_batch": decode_batch}
    return as_single(result, sizes | {"decode_steps": decode_steps, "repeats": repeats})


def measure(
    case: Case, model: nn.Module, base: nn.Module | None, input_ids: torch.Tensor | None
) -> Result:
    """One case of a routed model."""
    tokens = tokens_of(case, model, input_ids)
    variants = Variants(model, base, case.budgets, first_sequences(tokens))
    try:
        measured = measure_inference(variants, case, tokens)
    finally:
        variants.restore()
    return {"adapter_dtype": adapter_dtype(model), **measured}


def tokens_of(case: Case, model: nn.Module, input_ids: torch.Tensor | None = None) -> torch.Tensor:
    """The prompts, given or random, and the tokens of the steps after them, `[B, T]`."""
    ids = random_tokens(model, case.batch, case.length + case.decoded)
    if input_ids is not None:
        rows = torch.arange(case.batch) % len(input_ids)
        ids[:, : case.length] = input_ids.to(ids.device)[rows]
    return ids


def setting_of(model: nn.Module) -> dict[str, Any]:
    """A description of a routed model: its routed layers, its size and its dtype."""
    routings = active_routings(model)
    config = routings[0].active_config()
    # Of a fit for prompts there are several.
    targets = sorted({config.target_of(h.layer_index) for h in routings})
    layers = [h.layer_index for h in routings]
    setting = {"routed_layers": layers, "target": "+".join(targets), "gate": config.gate}
    if config.phases != "all":
        setting["phases"] = config.phases
    return setting | size_of(model)


def size_of(model: Any) -> dict[str, Any]:
    """The part of a setting that the base says."""
    return {
        "model_type": model.config.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": dtype_name(next(model.parameters()).dtype),
    }
