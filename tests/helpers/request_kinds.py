"""Requests with settings of their own, as threads of a server run them at one time on one model.

A request is a function of the model; what it returns is compared with what it returns alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from models import build_routed, tokens

from hf_depthroute import draft_view, lossless_generate, record_routes, replay_routes, use_budget
from hf_depthroute.routing.stack import routings_of, state_of
from hf_depthroute.routing.trace import RouteTrace, full_depth

Request = Callable[[], tuple[torch.Tensor, ...]]

# Ways to route that keep something of their own: family, kind, and fields of the configuration.
ROUTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ffn": ("llama", "mlp", {}),
    "controller": ("llama", "mlp", {"selection": "controller"}),
    "jepa": ("qwen3", "jepa", {}),
    "predictor": ("llama", "mlp", {"causal_rule": "predictor"}),
    "prefill": ("llama", "mlp", {"phases": "prefill"}),
    "attention": ("llama", "attention", {}),
    "block": ("gpt2", "block", {}),
    "exit": ("llama", "mlp", {"target": "block", "gate": "exit", "branch": "none"}),
    "sequence": ("llama", "block", {"granularity": "sequence"}),
    "experts": ("olmoe", "experts", {}),
    "memory": ("llama", "memory", {}),
    "branch_memory": (
        "llama",
        "mlp",
        {"branch": "memory", "memory_slots": 8192, "memory_width": 4},
    ),
}


def build(name: str) -> Any:
    family, kind, fields = ROUTED[name]
    return build_routed(family, kind, **fields)


def generated(model: Any, seed: int, rows: int = 1, count: int = 8) -> tuple[torch.Tensor, ...]:
    """Token ids and the logits that they were chosen by."""
    out = model.generate(
        tokens(rows, 5 + seed % 3, seed),
        attention_mask=torch.ones(rows, 5 + seed % 3, dtype=torch.long),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences, torch.stack(out.logits, 1)


def recorded(model: Any, seed: int) -> tuple[torch.Tensor, ...]:
    """The decisions of the last step too, of every layer."""
    with record_routes(model) as trace:
        found = generated(model, seed)
    return (
        *found,
        *(record.mask for record in trace.values()),
        *(record.probs for record in trace.values()),
    )


@torch.no_grad()
def replayed(model: Any, seed: int) -> tuple[torch.Tensor, ...]:
    """The decisions of one prompt on another."""
    shape = (2, 6)
    with record_routes(model) as trace:
        first = model(tokens(*shape, seed)).logits
    with replay_routes(model, trace), record_routes(model) as again:
        second = model(tokens(*shape, seed + 1)).logits
    assert isinstance(again, RouteTrace)
    return first, second, *(record.mask for record in again.values())


def under(context: Callable[[], Any], run: Request) -> Request:
    def request() -> tuple[torch.Tensor, ...]:
        with context():
            return run()

    return request


def requests_of(model: Any) -> dict[str, Request]:
    """One request of every kind that the adapter of `model` allows."""
    config = routings_of(model)[0].active_config()
    made: dict[str, Request] = {
        "plain": lambda: generated(model, 1),
        "other text": lambda: generated(model, 2),
        "batch": lambda: generated(model, 3, rows=3),
        "full depth": under(lambda: full_depth(model), lambda: generated(model, 1)),
        "recorded": lambda: recorded(model, 4),
        "masked": under(
            lambda: state_of(model).override(executor="masked"), lambda: generated(model, 1)
        ),
        "one layer": under(
            lambda: state_of(model).override(layers=frozenset({2})), lambda: generated(model, 1)
        ),
    }
    if config.granularity == "token" and config.target != "experts":
        made["replayed"] = lambda: replayed(model, 5)
    if config.takes_budget() and config.causal_rule == "quantile":
        made["small budget"] = under(lambda: use_budget(model, 0.2), lambda: generated(model, 1))
        made["large budget"] = under(lambda: use_budget(model, 0.9), lambda: generated(model, 1))
        made["everything"] = under(lambda: use_budget(model, 1.0), lambda: generated(model, 1))
    if config.target != "memory" and config.phases == "all" and config.granularity == "token":
        draft = draft_view(model)
        made["lossless"] = lambda: (
            lossless_generate(model, tokens(1, 6, 7), draft=draft, max_new_tokens=8),
        )
    return made


def differs(found: tuple[torch.Tensor, ...], alone: tuple[torch.Tensor, ...]) -> bool:
    """Ids and decisions have to be equal, floating-point numbers up to what another
    division of work rounds."""
    pairs = list(zip(found, alone))
    if len(found) != len(alone) or any(a.shape != b.shape for a, b in pairs):
        return True
    return not all(
        torch.allclose(a, b, atol=1e-4, rtol=1e-4, equal_nan=True)
        if a.is_floating_point()
        else torch.equal(a, b)
        for a, b in pairs
    )


def run_together(
    requests: Mapping[str, Request], alone: Mapping[str, tuple[torch.Tensor, ...]]
) -> list[str]:
    """Run the requests in threads that start at one moment; what went wrong, in words."""
    faults: list[str] = []
    gate = threading.Barrier(len(requests))

    def work(name: str, request: Request) -> None:
        gate.wait()
        try:
            if differs(request(), alone[name]):
                faults.append(f"{name}: another result than alone")
        except Exception as error:
            faults.append(f"{name}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=given) for given in requests.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return faults
