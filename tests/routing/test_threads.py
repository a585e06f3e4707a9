"""Threads that run one model at the same time with settings of their own:
each gets what it gets alone."""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build_routed, decoder_layers, logits, tokens
from request_kinds import ROUTED, build, generated, requests_of, run_together
from training import make_trainer, rows, step_logs

from hf_depthroute import (
    calibrate,
    calibrate_budgets,
    record_routes,
    set_budget,
    set_causal_rule,
    set_phases,
    use_budget,
)
from hf_depthroute.adapter.generation import check_generation
from hf_depthroute.base.contexts import evaluating
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.parts.branches import MixedLinear
from hf_depthroute.routing import plan
from hf_depthroute.routing.routing import Routing
from hf_depthroute.routing.stack import routings_of, state_of
from hf_depthroute.routing.state import RunSettings, RunState
from hf_depthroute.routing.trace import full_depth
from hf_depthroute.training.losses import routing_losses


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns after every few operations."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.nightly(unless=lambda name: name in ("ffn", "predictor", "block", "experts"))
@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("name", ROUTED)
def test_requests_with_settings_of_their_own_get_what_they_get_alone(name: str) -> None:
    model: Any = build(name)
    requests = requests_of(model)
    alone = {kind: request() for kind, request in requests.items()}
    assert (
        len({tuple(found[1].flatten()[:50].tolist()) for found in alone.values() if len(found) > 1})
        > 3
    )
    for _ in range(4):
        model.train().eval()  # what was prepared for decoding is dropped, as in a fresh process
        assert run_together(requests, alone) == []
    assert all(routing.state.settings == RunSettings() for routing in routings_of(model))
    assert torch.equal(generated(model, 1)[0], alone["plain"][0])


@pytest.mark.nightly(unless=lambda fields: not fields)
@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize(
    "fields", [{}, {"fused_loss": False}, {"oracle": "on_policy", "exit_weight": 0.1}], ids=str
)
def test_a_training_and_who_generates_meanwhile_do_not_see_each_other(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    def losses(model: Any, folder: str) -> list[dict[str, float]]:
        trainer, _ = make_trainer(model, rows(8), tmp_path / folder, max_steps=12, **fields)
        trainer.train()
        return step_logs(trainer)

    alone, model = losses(build_routed("llama", "mlp"), "alone"), build_routed("llama", "mlp")
    lengths, errors, done = [], [], threading.Event()

    def generate() -> None:
        while not done.is_set():
            try:
                lengths.append(generated(model, 1, count=4)[0].shape[1])
            except Exception as error:  # in a thread it would be lost
                errors.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        together = losses(model, "together")
    finally:
        done.set()
        thread.join()
    assert errors == []
    assert len(lengths) > 2 and len(set(lengths)) == 1
    assert [step["loss"] for step in together] == [step["loss"] for step in alone]


def budgets(model: Any, turn: int) -> None:
    set_budget(model, (0.25, 1.0, 0.75, 0.5)[turn % 4])


def phases(model: Any, turn: int) -> None:
    set_phases(model, ("prefill", "all")[turn % 2])


def adapters(model: Any, turn: int) -> None:
    model.set_adapter(("other", "default")[turn % 2])


def off_and_on(model: Any, turn: int) -> None:
    with model.disable_adapter():
        time.sleep(1e-3)


def a_step(model: Any, turn: int) -> None:
    """Training with a learning rate of 0, whose thresholds move nevertheless."""
    model.train()
    ids = tokens(2, 8, turn)
    with record_routes(model) as trace:
        loss = model(input_ids=ids, labels=ids).loss
    sum(routing_losses(trace, loss).values()).backward()
    model.zero_grad()
    model.eval()


# What changes the model for all threads, and the ways to route that it is tried on. Not that of
# whole sequences and of memories, of a layer that is turned off in the middle of a generation: the
# cache says so then (`base.cache`).
CHANGES: list[tuple[Callable[[Any, int], None], str]] = [
    *((budgets, name) for name in ("controller", "exit", "attention", "sequence", "branch_memory")),
    *((phases, name) for name in ("controller", "attention", "branch_memory")),
    *(
        (adapters, name)
        for name in ("controller", "exit", "attention", "sequence", "branch_memory")
    ),
    *((off_and_on, name) for name in ("controller", "exit", "attention")),
    *(
        (a_step, name)
        for name in ("controller", "predictor", "attention", "sequence", "branch_memory")
    ),
]


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_a_change_of_the_model_beside_generations_raises_nothing_and_is_whole_in_the_end(
    change: Callable[[Any, int], None], name: str
) -> None:
    """Generations that are under way go on with what changed;
    those that begin later do not notice it."""
    model: Any = build(name)
    if change is adapters:
        model.add_adapter("other", dataclasses.replace(model.peft_config["default"], seed=5))
        model.set_adapter("default")
    kinds = {"batch", "full depth", "recorded"}
    requests = {kind: request for kind, request in requests_of(model).items() if kind in kinds}
    alone = {kind: request() for kind, request in requests.items()}
    faults: list[str] = []
    done = threading.Event()

    def work(kind: str) -> None:
        try:
            while not done.is_set():
                requests[kind]()
        except Exception as error:
            faults.append(f"{kind}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(kind,)) for kind in requests]
    for thread in threads:
        thread.start()
    try:
        for turn in range(4 if change is a_step else 12):
            change(model, turn)
            time.sleep(1e-3)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert faults == []
    if change is a_step:  # the thresholds have moved
        fresh = build(name)
        fresh.load_state_dict(model.state_dict())
        alone = {kind: request() for kind, request in requests_of(fresh).items() if kind in kinds}
    assert run_together(requests, alone) == []


def test_adapters_that_are_turned_off_while_they_are_asked_about_raise_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As between two questions of `generate`, another thread's `disable_adapter`."""
    model: Any = build_routed("llama", phases="prefill")
    active = Routing.adapter
    asked: list[Routing] = []

    def turned_off(self: Routing) -> str | None:
        asked.append(self)
        return active(self) if asked.count(self) == 1 else None

    monkeypatch.setattr(Routing, "adapter", turned_off)
    check_generation(model, [tokens(1, 8)], {})
    assert asked


def at_its_middle(model: Any, act: Callable[[], object]) -> Any:
    """A handle; until it is removed, `act` is called when the first gate of a pass has run."""
    gate = routings_of(model)[0].depth_route_gate["default"]
    return gate.register_forward_hook(lambda *given: act() and None)


def turn_off(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def route_all(model: Any) -> None:
    set_phases(model, "all")


@pytest.mark.parametrize("change", [turn_off, route_all])
def test_a_pass_with_labels_leaves_no_settings(change: Callable[[Any], None]) -> None:
    """Another thread turns the adapter off in its middle, or makes it route all tokens."""
    model: Any = build_routed("llama", phases="prefill")
    ids = tokens(1, 8)
    with at_its_middle(model, lambda: change(model)):
        model(input_ids=ids, labels=ids)
    assert state_of(model).settings == RunSettings()


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_pass_with_labels_that_is_interrupted_leaves_the_next_one_alone() -> None:
    """PyTorch calls a module's hooks after an error, but not after Ctrl-C."""
    model: Any = build_routed("llama", phases="prefill")
    expected, ids = logits(model), tokens(1, 8)
    loss = model(input_ids=ids, labels=ids).loss
    for following in (lambda: logits(model), lambda: model(input_ids=ids, labels=ids).loss):
        with at_its_middle(model, interrupt), pytest.raises(KeyboardInterrupt):
            model(input_ids=tokens(3, 5), labels=tokens(3, 5))
        found = following()
        assert torch.equal(found, expected if found.ndim else loss)
        assert state_of(model).settings == RunSettings()


def turn_on(model: Any) -> None:
    model.base_model.enable_adapter_layers()


def activate_other(model: Any) -> None:
    model.set_adapter("other")


@pytest.mark.parametrize("name", ["memory", "branch_memory", "exit", "sequence", "controller"])
@pytest.mark.parametrize("change", [turn_on, turn_off, activate_other])
def test_a_pass_is_routed_whole_by_the_adapter_that_it_began_with(
    change: Callable[[Any], None], name: str
) -> None:
    """Another thread turns it off, or another one on, between two layers of a pass."""
    model: Any = build(name)
    model.add_adapter("other", dataclasses.replace(model.peft_config["default"], seed=5))
    if change is turn_on:
        turn_off(model)
    expected = logits(model)
    first = routings_of(model)[0].layer_index
    layer = decoder_layers(model)[first]
    with layer.register_forward_hook(lambda *given: change(model)):
        found = logits(model)
    assert torch.equal(found, expected)
    assert not torch.equal(logits(model), expected)


def meanwhile(act: Callable[[], object], done: list[threading.Thread]) -> None:
    """Another thread does it once, and is given the time for it if it does not have to wait."""
    if not done:
        done.append(threading.Thread(target=act))
        done[0].start()
        done[0].join(0.5)


def test_adapters_are_not_asked_about_while_they_are_switched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some layers would have the one and some the other, which no pass may have together."""
    model: Any = build_routed("llama", phases="prefill", prompt_tail=1)
    config = dataclasses.replace(model.peft_config["default"], seed=5, prompt_tail=4)
    model.add_adapter("other", config)
    switch, asked, faults, done = Routing.set_adapter, [], [], []

    def ask() -> None:
        try:
            asked.append(logits(model))
        except Exception as error:
            faults.append(error)

    def interrupted(self: Routing, *args: Any, **kwargs: Any) -> None:
        switch(self, *args, **kwargs)
        meanwhile(ask, done)

    monkeypatch.setattr(Routing, "set_adapter", interrupted)
    model.set_adapter("other")
    done[0].join()
    assert faults == []
    assert torch.equal(asked[0], logits(model))


def test_the_adapter_is_off_until_the_last_block_that_turned_it_off_ends() -> None:
    """In 1, in 2, out 1, out 2, as in two threads."""
    model: Any = build_routed("llama")
    routed = logits(model)
    first, second = model.disable_adapter(), model.disable_adapter()
    first.__enter__()
    base = logits(model)
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(logits(model), base)
    second.__exit__(None, None, None)
    assert torch.equal(logits(model), routed)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), routed)
    assert state_of(model).turned_off == []


def test_evaluations_that_overlap_leave_the_modes_that_they_found() -> None:
    """In 1, in 2, out 1, out 2, as in two threads; one has the base, the other what is around."""
    model: Any = build_routed("llama").train()
    frozen = model.get_base_model().lm_head.eval()
    before = [module.training for module in model.modules()]
    first, second = evaluating(model.get_base_model()), evaluating(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not any(module.training for module in model.get_base_model().modules())
    second.__exit__(None, None, None)
    assert [module.training for module in model.modules()] == before
    assert model.training and not frozen.training


def test_a_calibration_that_fails_beside_an_evaluation_leaves_the_modes_that_it_found() -> None:
    model: Any = build_routed("llama").train()
    other = evaluating(model)
    other.__enter__()

    def end_both(*_: Any) -> None:
        other.__exit__(None, None, None)
        raise ValueError("interrupted")

    with (
        decoder_layers(model)[0].register_forward_pre_hook(end_both),
        pytest.raises(ValueError, match="interrupted"),
    ):
        calibrate(model, [{"input_ids": tokens(2, 8)}])
    assert all(module.training for module in model.modules())


def test_a_block_that_begins_while_another_ends_leaves_the_adapter_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PEFT looks whether adapters are on, and then turns them off."""
    model: Any = build_routed("llama")
    expected, looks, done = logits(model), type(model).get_model_status, []
    first = model.disable_adapter()
    first.__enter__()

    def interrupted(self: Any) -> Any:
        status = looks(self)
        meanwhile(lambda: first.__exit__(None, None, None), done)
        return status

    monkeypatch.setattr(type(model), "get_model_status", interrupted)
    with model.disable_adapter():
        pass
    done[0].join()
    assert torch.equal(logits(model), expected)


def test_what_trains_is_as_before_where_two_threads_turn_the_adapter_off_and_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one turns it off while the other turns it on, parameter by parameter."""
    model: Any = build_routed("llama")
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert trained
    turn_off(model)
    named, done = Routing.named_parameters, []

    def interrupted(self: Routing, *args: Any, **kwargs: Any) -> Any:
        meanwhile(lambda: turn_off(model), done)
        return named(self, *args, **kwargs)

    monkeypatch.setattr(Routing, "named_parameters", interrupted)
    turn_on(model)
    done[0].join()
    monkeypatch.undo()
    turn_on(model)
    assert trained == {name for name, value in model.named_parameters() if value.requires_grad}


def test_a_budget_for_one_request_is_checked_for_one_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread turns on an adapter of other layers between two questions."""
    model: Any = build_routed("llama", layers=[0, 1])
    model.add_adapter("other", dataclasses.replace(model.peft_config["default"], layers=[2, 3]))
    calibrate(model, {"input_ids": tokens(4, 32, 5)})
    ask, done = Routing.active_config, []

    def interrupted(self: Routing) -> Any:
        meanwhile(lambda: model.set_adapter("other"), done)
        return ask(self)

    monkeypatch.setattr(Routing, "active_config", interrupted)
    with use_budget(model, 0.25):
        pass
    done[0].join()
    assert model.active_adapter == "other"


def test_a_copy_of_a_base_module_is_asked_once_which_adapter_is_active() -> None:
    """An adapter without copies is turned on in the middle of its call."""
    model: Any = build_routed("llama", modules_to_save=["lm_head"])
    head = model.get_base_model().lm_head
    h = torch.randn(1, 2, head.weight.shape[1])
    expected = head(h)

    class Switched(type(head)):
        asked = 0

        @property
        def active_adapters(self) -> list[str]:
            type(self).asked += 1
            return ["default"] if self.asked < 3 else []

    head.__class__ = Switched
    assert torch.equal(head(h), expected)


def other_budget(model: Any, budget: float) -> None:
    set_budget(model, budget)


def other_tables(model: Any, budget: float) -> None:
    calibrate(model, {"input_ids": tokens(2, 12, 5 if budget < 0.5 else 6)}, budget=budget)


def own_tables(model: Any, budget: float) -> None:
    """At whatever budget the adapter has by then."""
    calibrate(model, {"input_ids": tokens(2, 12, 7)})


def all_budgets(model: Any, budget: float) -> None:
    calibrate_budgets(model, {"input_ids": tokens(2, 12, 8)}, budgets=(0.25, 0.75))


def other_phases(model: Any, budget: float) -> None:
    set_phases(model, "prefill" if budget < 0.5 else "all")


def other_adapter(model: Any, budget: float) -> None:
    model.set_adapter("other" if budget < 0.5 else "default")


def what_is_in_force(model: Any) -> list[Any]:
    """Of every layer, with every module's mode."""
    parts = [routing.state_dict() for routing in routings_of(model)]
    buffers = [
        value.tolist()
        for part in parts
        for name, value in part.items()
        if "quantiles" in name or "contr" in name
    ]
    configs = [(config.budget, config.phases) for config in model.peft_config.values()]
    active = [routing.active_adapters for routing in routings_of(model)]
    return [
        buffers,
        configs,
        model.active_adapter,
        active,
        [module.training for module in model.modules()],
    ]


# Two threads change the model at one time, in training mode.
BOTH: list[tuple[Callable[[Any, float], None], Callable[[Any, float], None]]] = [
    (other_budget, other_budget),
    (other_tables, other_tables),
    (other_tables, other_budget),
    (own_tables, other_budget),
    (all_budgets, other_budget),
    (own_tables, other_phases),
    (own_tables, other_adapter),
    (other_adapter, other_adapter),
]


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize(("first", "second"), BOTH)
def test_two_changes_at_one_time_leave_what_one_after_the_other_leaves(
    first: Callable[[Any, float], None], second: Callable[[Any, float], None]
) -> None:
    def made() -> Any:
        model: Any = build("controller")
        model.add_adapter("other", dataclasses.replace(model.peft_config["default"], seed=5))
        model.set_adapter("default")
        return model.train()

    pair = [lambda model: first(model, 0.25), lambda model: second(model, 0.75)]
    allowed = []
    for order in (pair, pair[::-1]):
        model = made()
        for change in order:
            change(model)
        allowed.append(what_is_in_force(model))
    if first is second:
        assert allowed[0] != allowed[1]
    for _ in range(6):
        model = made()
        start, faults = threading.Barrier(2), []

        def work(
            change: Callable[[Any], None],
            model: Any = model,
            start: Any = start,
            faults: Any = faults,
        ) -> None:
            start.wait(10)
            try:
                change(model)
            except Exception as error:
                faults.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=work, args=(change,)) for change in pair]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert faults == []
        assert what_is_in_force(model) in allowed


@pytest.mark.parametrize(("name", "value"), [("budget", 0.1), ("causal_rule", "running")])
def test_a_plan_is_not_kept_for_settings_that_it_was_not_made_of(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    """Another thread changes the budget, or the rule, while a plan is made,
    and changes it back before the next pass."""
    model: Any = build_routed("llama")
    expected, config = logits(model), model.peft_config["default"]
    model.train().eval()  # what was prepared is dropped
    make, made = plan.make_plan, []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        before = getattr(config, name)
        setattr(config, name, value)
        try:
            made.append(make(*args, **kwargs))
        finally:
            setattr(config, name, before)
        return made[-1]

    monkeypatch.setattr(plan, "make_plan", interrupted)
    assert torch.equal(logits(model), expected)
    assert {plan.rule for plan in made} == {"threshold"}
    assert torch.equal(logits(model), expected)


def test_a_plan_that_is_made_while_another_prompt_begins_does_not_serve_that_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thresholds have been written meanwhile, in a way that PyTorch does not count."""
    routing = routings_of(build_routed("llama"))[0]
    make = plan.make_plan

    def interrupted(*args: Any) -> Any:
        made = make(*args)
        routing.depth_route_quantiles["default"].values.data.add_(1)
        routing.forget_prepared()
        return made

    monkeypatch.setattr(plan, "make_plan", interrupted)
    before = routing.plan(False)
    monkeypatch.undo()
    assert routing.plan(False).threshold == pytest.approx(before.threshold + 1)


@torch.no_grad()
def test_what_is_made_of_weights_while_another_prompt_begins_does_not_serve_that_prompt() -> None:
    routing = routings_of(build_routed("llama"))[0]
    linear = next(module for module in routing.modules() if isinstance(module, MixedLinear))

    def made() -> torch.Tensor:
        return linear.weight.clone()

    def interrupted() -> torch.Tensor:
        before = made()
        linear.weight.data.add_(1)
        routing.forget_prepared()
        return before

    assert not torch.equal(linear.derived(interrupted, "copy", linear.weight), linear.weight)
    assert torch.equal(linear.derived(made, "copy", linear.weight), linear.weight)


def test_a_plan_follows_shares_that_are_set_after_the_thresholds() -> None:
    """Another thread calibrates, and generates in between: thresholds first, then the shares."""
    model: Any = build_routed("llama", budget_scope="global")
    calibrate(model, {"input_ids": tokens(4, 32, 5)})
    set_causal_rule(model, "running")
    config, routing = model.peft_config["default"], routings_of(model)[0]
    before = routing.plan(False)
    config.share_shifts = {index: shift + 1 for index, shift in config.share_shifts.items()}
    after = routing.plan(False)
    assert after.expected.shift == pytest.approx(before.expected.shift + 1)


def test_settings_are_read_once() -> None:
    """Another thread changes them between two looks."""

    def changing(kind: type, name: str, values: list[Any]) -> Any:
        found = iter(values)
        return type(kind.__name__, (kind,), {name: property(lambda self: next(found))})

    config = build_routed("llama").peft_config["default"]
    config.__class__ = changing(type(config), "causal_rule", ["running", "quantile"])
    assert config.inference_rule == "running"
    state = RunState()
    state.__class__ = changing(RunState, "scheduled_budget", [0.7, None])
    assert state.budget(0.5, training=True) == 0.7
    state.__class__ = changing(RunState, "scheduled_temperature", [0.7, None])
    assert state.temperature(0.5, training=True) == 0.7


def test_overrides_that_overlap_in_two_threads_end_as_if_they_were_alone() -> None:
    """The order that left routing off for good where settings were saved and put back: in 1, in 2,
    out 1, out 2."""
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
    first, second = (
        state.override(executor="masked"),
        state.override(executor="rows", layers=frozenset({1})),
    )
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
    assert len({id(routing.state) for routing in routings_of(model)}) == 1
    assert len({id(routing.state) for routing in routings_of(other)}) == 1
    assert routings_of(model)[0].state is not routings_of(other)[0].state
    with full_depth(model):
        assert torch.equal(copy.deepcopy(model)(tokens(1, 4)).logits, other(tokens(1, 4)).logits)


def test_a_layer_alone_can_be_routed() -> None:
    model = build_routed("llama")
    with state_of(model).override(layers=frozenset({2})), record_routes(model) as trace:
        logits(model)
    assert list(trace) == [2]
