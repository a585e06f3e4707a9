"""Training routers and loading them, compared with LoRA on the same layers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_depthroute.adapter.tuner import get_depth_routed_model
from hf_depthroute.base.stack import stack_of
from hf_depthroute.bench.measurements import short_label
from hf_depthroute.bench.modes import random_tokens
from hf_depthroute.bench.result_tables import Row, with_error
from hf_depthroute.bench.timing import interleave, seconds_of
from hf_depthroute.bench.variants import dense_view
from hf_depthroute.config.adapter import DepthRouteConfig
from hf_depthroute.inference.calibration import active_routings
from hf_depthroute.training.arguments import RoutingArguments
from hf_depthroute.training.fused_loss import FusedLoss
from hf_depthroute.training.objective import RoutingObjective

from .memory import peak_bytes
from .roofline import Peaks, count_work, measure_peaks

LOSSES = ("naive", "fused")
_CLIP = 1.0


def measure_training(
    base: Any,
    config: DepthRouteConfig,
    *,
    batch: int = 2,
    length: int = 256,
    loss: str = "naive",
    lora_rank: int = 8,
    rounds: int = 15,
    peaks: Peaks | None = None,
) -> dict[str, Any]:
    """Time whole optimizer steps: forward, losses, backward, clipping, AdamW.

    The routed step is that of `DepthRouteTrainer` with its default losses and no oracle. LoRA
    trains on the FFNs of the same layers (see `with_lora`) with the language-model loss alone. Both
    see the same tokens, and both compute that loss in the same way.

    Args:
        base: The untouched model; it is not changed, but all of its parameters are frozen.
        config: The routed adapter's.
        batch: Sequences.
        length: Tokens per sequence.
        loss: `"naive"`, or `"fused"`: logits are never materialised.
        lora_rank: The LoRA adapter's rank.
        rounds: Each makes one step of either kind.
        peaks: The machine's peaks; measured when None.

    Returns:
        A JSON-ready dict: `routed_ms`, `lora_ms`, `ratio` and `ratio_error` (routed over LoRA),
        tokens per second, peak bytes above the weights, trained parameters, and the step's
        `roofline`.

    Raises:
        ValueError: `loss` is unknown, or `"fused"` does not work for this model.
    """
    if loss not in LOSSES:
        raise ValueError(f"loss {loss!r} is unknown; use one of: {', '.join(LOSSES)}")
    routed = get_depth_routed_model(dense_view(base), config).train()
    layers = [routing.layer_index for routing in active_routings(routed)]
    lora = with_lora(dense_view(base), layers, lora_rank).train()
    ids = random_tokens(base, batch, length)
    device = ids.device
    peaks = peaks or measure_peaks(device, next(base.parameters()).dtype)
    objective = RoutingObjective(RoutingArguments(), routed)
    steps = {"routed": _step(routed, ids, loss, objective), "lora": _step(lora, ids, loss, None)}
    samples = interleave(
        {name: partial(seconds_of, step, device) for name, step in steps.items()}, rounds
    )
    memory = {name: peak_bytes(step, device) for name, step in steps.items()}
    ratio, error = samples.ratio("routed", "lora").rounded()
    with torch.no_grad():
        shares = {index: (1.0, 1.0) for index in layers}  # in training both paths run
        work = count_work(
            routed,
            batch=batch,
            length=length,
            logits=length,
            shares=shares,
            trained_from=min(layers),
        ).summary(peaks)
    tokens = ids.numel()
    return {
        "batch": batch,
        "length": length,
        "loss": loss,
        "lora_rank": lora_rank,
        "rounds": rounds,
        "routed_ms": round(samples.median("routed") * 1e3, 3),
        "lora_ms": round(samples.median("lora") * 1e3, 3),
        "ratio": ratio,
        "ratio_error": error,
        "routed_tokens_per_s": round(tokens / samples.median("routed"), 1),
        "lora_tokens_per_s": round(tokens / samples.median("lora"), 1),
        "routed_peak_bytes": memory["routed"],
        "lora_peak_bytes": memory["lora"],
        # In float32, as the naive loss holds them.
        "logits_bytes": 4 * tokens * base.config.vocab_size,
        "routed_trained_parameters": _trained(routed),
        "lora_trained_parameters": _trained(lora),
        "roofline": work,
    }


def with_lora(model: Any, layers: list[int], rank: int) -> Any:
    """`model` with LoRA on the linear layers of the FFNs of `layers`;
    of the attention where experts are fused."""
    stack = stack_of(model)
    family, layer = stack.family, stack.layers[layers[0]]
    names: list[str] = []
    for part in (family.ffn, family.attention):
        children = getattr(layer, part).named_children()
        names = names or [
            name for name, module in children if isinstance(module, nn.Linear | Conv1D)
        ]
    config = peft.LoraConfig(
        r=rank,
        target_modules=names,
        layers_to_transform=layers,
        layers_pattern=family.layers,
        fan_in_fan_out=isinstance(getattr(getattr(layer, family.ffn), names[0], None), Conv1D),
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)


def _step(
    model: Any, ids: torch.Tensor, loss: str, objective: RoutingObjective | None
) -> Callable[[], None]:
    """One optimizer step on `ids` `[B, T]`."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    head = _head_of(model, loss)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, fused=True)

    def step() -> None:
        if objective is None:
            with head:
                total = model(input_ids=ids, labels=ids, use_cache=False).loss
        else:
            objective.schedule(0)
            with objective.watching() as watched:
                with head:
                    lm = model(input_ids=ids, labels=ids, use_cache=False).loss
                total = objective(lm, watched, 1.0, ids)
        total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, _CLIP)
        optimizer.step()
        if objective is not None:
            objective.after_step()
        optimizer.zero_grad()

    return step


def _head_of(model: nn.Module, loss: str) -> AbstractContextManager[None]:
    return nullcontext() if loss == "naive" else FusedLoss(model)


def _trained(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def measure_loading(
    base: Any, config: DepthRouteConfig, *, lora_rank: int = 8, rounds: int = 15
) -> dict[str, Any]:
    """Time injection, saving and loading of a routed adapter and of LoRA on the same layers' FFNs.

    Args:
        base: The untouched model; copies of its modules around the same tensors get the adapters.
        config: The routed adapter's.
        lora_rank: The LoRA adapter's rank.
        rounds: Each does everything once.

    Returns:
        A JSON-ready dict: for `routed` and `lora` the milliseconds `inject_ms`, `save_ms` and
        `load_ms` and the bytes of the folder, and `ratio` with `ratio_error`: load time, routed
        over LoRA.
    """
    device = next(base.parameters()).device

    def routed(model: Any) -> Any:
        return get_depth_routed_model(model, config)

    layers = [routing.layer_index for routing in active_routings(routed(dense_view(base)))]
    makers: dict[str, Callable[[Any], Any]] = {
        "routed": routed,
        "lora": lambda model: with_lora(model, layers, lora_rank),
    }

    def timer(work: Callable[[Any], Any], subject: Callable[[], Any]) -> Callable[[], float]:
        def seconds() -> float:
            given = subject()
            return seconds_of(lambda: work(given), device)

        return seconds

    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch) / name for name in makers}
        timers: dict[tuple[str, str], Callable[[], float]] = {}
        for name, make in makers.items():
            made = make(dense_view(base))
            made.save_pretrained(folders[name])

            def load(model: Any, folder: Path = folders[name]) -> Any:
                return peft.PeftModel.from_pretrained(model, folder)

            def save(model: Any, folder: Path = folders[name]) -> None:
                model.save_pretrained(folder)

            timers[name, "inject"] = timer(make, lambda: dense_view(base))
            timers[name, "save"] = timer(save, lambda made=made: made)  # type: ignore[misc]
            timers[name, "load"] = timer(load, lambda: dense_view(base))
        samples = interleave(timers, rounds)
        sizes = {
            name: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            for name, folder in folders.items()
        }
    ratio, error = samples.ratio(("routed", "load"), ("lora", "load")).rounded()
    rows = {
        name: {
            f"{step}_ms": round(samples.median((name, step)) * 1e3, 3)
            for step in ("inject", "save", "load")
        }
        | {"bytes": sizes[name]}
        for name in makers
    }
    return {"rounds": rounds, "lora_rank": lora_rank, **rows, "ratio": ratio, "ratio_error": error}


# The rows of their tables


def training_rows(m: Mapping[str, Any]) -> Iterator[Row]:
    sizes = {
        "router peak MB": "routed_peak_bytes",
        "LoRA peak MB": "lora_peak_bytes",
        "logits MB": "logits_bytes",
    }
    yield {
        "case": short_label(m), "router step ms": f"{m['routed_ms']:.1f}",
        "LoRA step ms": f"{m['lora_ms']:.1f}", "router / LoRA": with_error(m),
        "tokens/s": f"{m['routed_tokens_per_s']:.0f}",
        **{name: f"{m[key] / 1e6:.1f}" for name, key in sizes.items()},
    }  # fmt: skip


def loading_rows(m: Mapping[str, Any]) -> Iterator[Row]:
    for name in ("routed", "lora"):
        row = {"model": m["label"].removeprefix("load: "), "adapter": name}
        row |= {f"{step} ms": f"{m[name][f'{step}_ms']:.1f}" for step in ("inject", "save", "load")}
        yield row | {"MB": f"{m[name]['bytes'] / 1e6:.2f}"}
