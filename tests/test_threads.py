"""Threads that run one model at the same time with settings of their own: each gets what it gets alone."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import build_routed, logits, tokens
from request_kinds import ROUTED, build, generated, requests_of, run_together

from hf_depthroute import record_routes, use_budget
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.routing.state import RunSettings, RunState
from hf_depthroute.routing.trace import full_depth, overridden, routings


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns after every few operations."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("name", ROUTED)
def test_requests_with_settings_of_their_own_get_what_they_get_alone(name: str) -> None:
    model: Any = build(name)
    requests = requests_of(model)
    alone = {kind: request() for kind, request in requests.items()}
    assert len({tuple(found[1].flatten()[:50].tolist()) for found in alone.values() if len(found) > 1}) > 3
    for _ in range(4):
        model.train().eval()  # what was prepared for decoding is dropped, as in a fresh process
        assert run_together(requests, alone) == []
    assert all(holder.state.settings == RunSettings() for holder in routings(model))
    assert torch.equal(generated(model, 1)[0], alone["plain"][0])


def test_overrides_that_overlap_in_two_threads_end_as_if_they_were_alone() -> None:
    """The order that left routing off for good where settings were saved and put back: in 1, in 2, out 1, out 2."""
    model = build_routed("llama")
    expected = logits(model)
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with full_depth(model):
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    with full_depth(model):
        full = logits(model)
        thread.start()
        assert entered.wait(10)
    assert torch.equal(logits(model), expected)  # the other thread's block is still open
    left.set()
    thread.join()
    assert torch.equal(logits(model), expected)
    assert not torch.equal(full, expected)


def test_a_budget_for_one_request_leaves_the_adapter_alone() -> None:
    model = build_routed("llama")
    config: Any = model.peft_config["default"]
    before = logits(model)
    with use_budget(model, 0.25), record_routes(model) as trace:
        small = logits(model)
    assert {record.budget for record in trace.values()} == {0.25}
    assert not torch.equal(small, before)
    assert config.budget == 0.5
    assert torch.equal(logits(model), before)
    with use_budget(model, 0.25), use_budget(model, 0.5):
        assert torch.allclose(logits(model), before)
    with pytest.raises(ConfigError), use_budget(model, 0.0):
        pass
    assert torch.equal(logits(model), before)


def test_blocks_of_one_thread_nest_and_close_in_any_order() -> None:
    state = RunState()
    first, second = state.override(executor="masked"), state.override(executor="rows", layers=frozenset({1}))
    first.__enter__()
    second.__enter__()
    assert (state.settings.executor, state.settings.layers) == ("rows", frozenset({1}))
    first.__exit__(None, None, None)
    assert (state.settings.executor, state.settings.layers) == ("rows", frozenset({1}))
    second.__exit__(None, None, None)
    assert state.settings == RunSettings()
    with pytest.raises(TypeError, match="exectuor"), state.override(exectuor="rows"):
        pass
    assert state.settings == RunSettings()


def test_layers_share_one_state_and_copies_have_their_own() -> None:
    model = build_routed("llama")
    other = copy.deepcopy(model)
    assert len({id(holder.state) for holder in routings(model)}) == 1
    assert len({id(holder.state) for holder in routings(other)}) == 1
    assert routings(model)[0].state is not routings(other)[0].state
    with full_depth(model):
        assert torch.equal(copy.deepcopy(model)(tokens(1, 4)).logits, other(tokens(1, 4)).logits)


def test_a_layer_alone_can_be_routed() -> None:
    model = build_routed("llama")
    with overridden(model, layers=frozenset({2})), record_routes(model) as trace:
        logits(model)
    assert list(trace) == [2]
