"""A routed model goes through `torch.export` and `torch.compile(dynamic=True)` as its base does,
with every target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import build_routed, tokens
from protocol import gap
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"target": "attention", "gate": "jepa"}),
    ("llama", {"target": "block", "gate": "exit", "branch": "none", "gate_input": "residual"}),
    ("llama", {"target": "memory", "memory_slots": 4096, "memory_width": 4}),
    ("llama", {"causal_rule": "predictor"}),
    ("llama", {"granularity": "sequence"}),
    ("llama", {"target": "block", "granularity": "sequence"}),
    ("llama", {"target": "block", "gate": "none", "branch": "none"}),
    ("phi3", {"target": "block"}),
    ("gpt2", {"target": "attention", "gate": "linear"}),
    ("olmoe", {}),
    ("olmoe", {"target": "experts"}),
    ("falcon", {"target": "block"}),
]
BY_DAY = [CASES[0], CASES[9], CASES[11]]  # an FFN, attention with fused queries, experts


@pytest.fixture(autouse=True)
def fixed_global_state() -> Iterator[None]:
    """That of all tests, without placing their tensors: the compiler does not see through that."""
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Logits(nn.Module):
    """Tensors in, a tensor out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(
            input_ids=ids, attention_mask=mask, use_cache=False
        ).logits
        return logits


def inputs(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :2] = 0
    return tokens(batch, length, seed=length), mask


def gap_of_real(module: Any, expected: Any, batch: int, length: int) -> float:
    ids, mask = inputs(batch, length)
    return gap(module(ids, mask)[mask.bool()], expected(ids, mask)[mask.bool()])


@pytest.mark.nightly(unless=lambda family, fields: (family, fields) in BY_DAY)
@pytest.mark.parametrize(("family", "fields"), CASES)
@torch.no_grad()
def test_an_exported_program_of_any_length_gives_the_logits(
    family: str, fields: dict[str, Any]
) -> None:
    model = Logits(build_routed(family, "", **{"layers": [1, 2]} | fields))
    shape = {0: Dim("batch", max=8), 1: Dim("length", min=4, max=32)}
    program = export(model, inputs(2, 9), dynamic_shapes=(shape, shape))
    for batch, length in ((2, 9), (3, 12), (4, 5)):
        assert gap_of_real(program.module(), model, batch, length) < 1e-5
    # It runs without the library.
    assert "hf_depthroute" not in {node.target.namespace for node in operators(program)}


@pytest.mark.nightly
@torch.no_grad()
def test_experts_are_compiled_in_several_graphs() -> None:
    model = Logits(build_routed("olmoe", "experts", layers=[1]))
    compiled = torch.compile(model, dynamic=True, backend="eager")
    assert gap_of_real(compiled, model, 2, 9) < 1e-5 and gap_of_real(compiled, model, 2, 12) < 1e-5


def operators(program: Any) -> list[Any]:
    return [node for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


@pytest.mark.nightly
@torch.no_grad()
def test_a_strictly_traced_program_runs_without_the_library_too() -> None:
    model = Logits(build_routed("llama", "", target="block", layers=[1, 2]))
    program = export(model, inputs(2, 9), strict=True)
    assert gap_of_real(program.module(), model, 2, 9) < 1e-5
    assert "hf_depthroute" not in {node.target.namespace for node in operators(program)}


@pytest.mark.nightly(unless=lambda fields: not fields)
@pytest.mark.parametrize(("family", "fields"), [CASES[i] for i in (0, 6)])
@torch.no_grad()
def test_one_compilation_serves_every_length(family: str, fields: dict[str, Any]) -> None:
    model = Logits(build_routed(family, "", **{"layers": [1, 2]} | fields))
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=counter)
    for length in (9, 12, 7):
        assert gap_of_real(compiled, model, 2, length) < 1e-5
    assert counter.frame_count == 1
