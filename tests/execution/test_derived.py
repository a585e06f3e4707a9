"""What inference keeps between its steps (cast weights,
plans) never outlives what it was made from."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from models import GATES, build_routed, tokens
from peft import PeftModel
from transformers.cache_utils import DynamicCache

from hf_depthroute import calibrate, record_routes, set_budget
from hf_depthroute.execution import step_weights
from hf_depthroute.parts.branches import MixedLinear
from hf_depthroute.parts.gates import JEPAGate
from hf_depthroute.routing.stack import routings_of


@pytest.fixture(params=GATES)
def model(request: pytest.FixtureRequest) -> PeftModel:
    """A bfloat16 base with float32 adapter weights, as PEFT makes them."""
    model = build_routed("llama", request.param)
    adapter = {name for name, p in model.named_parameters() if "depth_route" in name}
    for name, parameter in model.named_parameters():
        if name not in adapter:
            parameter.data = parameter.data.bfloat16()
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Of a prompt, and of decoding steps of one and two sequences."""
    return torch.cat(
        [model(input_ids=tokens(*shape)).logits.flatten() for shape in ((2, 8), (1, 1), (2, 1))]
    )


def fresh(model: PeftModel) -> torch.Tensor:
    """The logits of a copy, which starts with nothing kept."""
    return logits(copy.deepcopy(model))


def kept(model: PeftModel) -> int:
    return sum(len(m._derived) for m in model.modules() if isinstance(m, MixedLinear | JEPAGate))


def test_steps_with_kept_weights_equal_steps_that_cast(model: PeftModel) -> None:
    first = logits(model)
    with torch.no_grad():
        model(input_ids=tokens(2, 8))
    assert kept(model) > 0
    assert torch.equal(logits(model), first)
    with torch.enable_grad():  # keeps nothing
        prompt = model(input_ids=tokens(2, 8)).logits.flatten()
    assert torch.equal(prompt, first[: len(prompt)])


def test_changed_weights_are_cast_again(model: PeftModel) -> None:
    before = logits(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "depth_route" in name:
                parameter.mul_(-1.5)
    after = logits(model)
    assert not torch.equal(after, before)
    assert torch.equal(after, fresh(model))


def test_weights_written_behind_the_back_count_after_eval(model: PeftModel) -> None:
    before = logits(model)
    for name, parameter in model.named_parameters():
        if "depth_route" in name:
            parameter.data.copy_(-1.5 * parameter.data)
    model.eval()
    assert not torch.equal(logits(model), before)
    assert torch.equal(logits(model), fresh(model))


def test_copies_and_pickles_carry_nothing_kept(model: PeftModel) -> None:
    expected = logits(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert kept(other) == 0
        assert torch.equal(logits(other), expected)


def test_weights_made_in_inference_mode_are_never_kept() -> None:
    with torch.inference_mode():
        linear = MixedLinear(4, 4).eval()
        x = torch.randn(2, 4).bfloat16()
        linear(x)
        linear.weight.zero_()
        linear.bias.zero_()
        assert linear(x).abs().sum() == 0
    assert not linear._derived


def test_a_kept_plan_follows_budget_threshold_and_table(
    model: PeftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Joint maps round in another way than the recorded pass.
    monkeypatch.setattr(step_weights, "fuse", lambda *parts: None)

    def share() -> float:
        with record_routes(model) as trace:
            recorded = logits(model)
        # With a recorder no plan is kept: both have to agree.
        assert torch.equal(recorded, logits(model))
        return sum(trace.full_ratio().values())

    calibrate(model, [{"input_ids": tokens(8, 16)}], budget=0.5)
    half = share()
    set_budget(model, 0.2)
    fifth = share()
    assert fifth < half
    config = routings_of(model)[0].config("default")
    config.threshold = -torch.inf
    assert share() == len(routings_of(model))
    config.threshold = None
    assert share() == fifth
    for routing in routings_of(model):
        routing.active_quantiles().set(
            torch.full_like(routing.active_quantiles().values, torch.inf)
        )
    assert share() == 0


# Every way in which a training or an averaging library writes a weight. PyTorch counts some of them
# only.


def written(weight: torch.Tensor) -> torch.Tensor:
    return -1.5 * weight.detach().clone() + (2.0 if weight.ndim == 1 else 0.25)


def by_copy(module: Any, name: str, weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(written(weight))


def in_inference_mode(module: Any, name: str, weight: torch.Tensor) -> None:
    new = written(weight)
    with torch.inference_mode():
        weight.copy_(new)


def by_loading(module: Any, name: str, weight: torch.Tensor) -> None:
    module.load_state_dict({name: written(weight)}, strict=False)


def by_assigning_what_is_loaded(module: Any, name: str, weight: torch.Tensor) -> None:
    module.load_state_dict({name: written(weight)}, strict=False, assign=True)


def by_foreach(module: Any, name: str, weight: torch.Tensor) -> None:
    with torch.no_grad():
        torch._foreach_copy_([weight], [written(weight)])


def by_a_fused_optimizer(module: Any, name: str, weight: torch.Tensor) -> None:
    if weight.requires_grad:
        weight.grad = weight.detach().clone()
        torch.optim.AdamW([weight], lr=1.0, fused=True).step()
    else:
        by_copy(module, name, weight)


def as_another_parameter(module: Any, name: str, weight: torch.Tensor) -> None:
    kind = torch.nn.Parameter if isinstance(weight, torch.nn.Parameter) else torch.clone
    setattr(module, name, kind(written(weight)))


def by_set(module: Any, name: str, weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.set_(written(weight))


def by_data(module: Any, name: str, weight: torch.Tensor) -> None:
    weight.data.copy_(written(weight))


def by_other_data(module: Any, name: str, weight: torch.Tensor) -> None:
    weight.data = written(weight)


def by_other_data_at_the_old_place(module: Any, name: str, weight: torch.Tensor) -> None:
    """As an averaging library stores weights, swaps the averages in,
    and restores what training went on to change."""
    stored, new = weight.data, written(weight)
    weight.data = new.clone()
    stored.copy_(new)
    weight.data = stored


def by_foreach_on_data(module: Any, name: str, weight: torch.Tensor) -> None:
    torch._foreach_copy_([weight.data], [written(weight)])


def by_vector_to_parameters(module: Any, name: str, weight: torch.Tensor) -> None:
    torch.nn.utils.vector_to_parameters(written(weight).flatten(), [weight])


def by_numpy(module: Any, name: str, weight: torch.Tensor) -> None:
    weight.detach().numpy()[...] = written(weight).numpy()


def through_another_dtype(module: Any, name: str, weight: torch.Tensor) -> None:
    """As a library merges in double precision and goes back."""
    module.double()
    by_data(
        module,
        name,
        module._parameters[name] if name in module._parameters else module._buffers[name],
    )
    module.float()


COUNTED = [
    by_copy, in_inference_mode, by_loading, by_assigning_what_is_loaded, by_foreach,
    as_another_parameter, by_set,
]  # fmt: skip
NOT_COUNTED = [
    by_a_fused_optimizer, by_data, by_other_data, by_other_data_at_the_old_place,
    by_foreach_on_data, by_vector_to_parameters, by_numpy, through_another_dtype,
]  # fmt: skip


def targets_of(model: PeftModel) -> dict[str, tuple[Any, str]]:
    """A tensor of each kind that something is prepared from."""
    routing = routings_of(model)[0]
    gate, branch = routing.depth_route_gate["default"], routing.depth_route_branch["default"]
    maps = [module for module in gate.modules() if isinstance(module, MixedLinear)]
    return {
        "gate": (maps[0], "weight"),
        "score": (gate.score, "weight"),
        "branch": (branch.down, "weight"),
        "branch's norm": (branch.norm, "weight"),
        "base's norm": (routing.norm_in_front("ffn"), "weight"),
        "table": (routing.active_quantiles(), "values"),
    }


@torch.no_grad()
def generated(model: Any, steps: int = 3) -> torch.Tensor:
    """Logits of a prompt of one token or more and of steps behind it,
    of one and of two sequences."""
    found = []
    for batch, length in ((1, 5), (2, 5), (1, 1)):
        ids, cache = tokens(batch, length + steps, seed=length), DynamicCache(config=model.config)
        for part in (ids[:, :length], *ids[:, length:].split(1, dim=1)):
            found.append(model(input_ids=part, past_key_values=cache).logits.flatten())
    return torch.cat(found)


# One of each kind: counted, not counted, the same tensor in another place, another tensor, another
# dtype in between.
BY_DAY = [
    by_copy,
    by_data,
    by_other_data_at_the_old_place,
    as_another_parameter,
    through_another_dtype,
]


@pytest.mark.nightly(
    unless=lambda gate, write: write in BY_DAY and (gate == "mlp" or write is by_data)
)
@pytest.mark.parametrize("write", [*COUNTED, *NOT_COUNTED], ids=lambda write: write.__name__)
@pytest.mark.parametrize("gate", GATES)
def test_the_next_prompt_sees_every_way_of_writing(gate: str, write: Any) -> None:
    for name in targets_of(build_routed("llama", gate)):
        model = build_routed("llama", gate)
        module, attribute = targets_of(model)[name]
        before = generated(model)
        write(module, attribute, getattr(module, attribute))
        after = generated(model)
        assert not torch.equal(after, before), name
        assert torch.equal(after, generated(copy.deepcopy(model))), name


@pytest.mark.parametrize("write", COUNTED, ids=lambda write: write.__name__)
def test_the_next_step_sees_what_pytorch_counts(write: Any) -> None:
    ids = tokens(1, 8)
    for name in targets_of(build_routed("llama", "mlp")):
        model = build_routed("llama", "mlp")
        module, attribute = targets_of(model)[name]
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids[:, :6], past_key_values=cache)
            model(input_ids=ids[:, 6:7], past_key_values=cache)
            write(module, attribute, getattr(module, attribute))
            other, old = copy.deepcopy(model), copy.deepcopy(cache)
            after = model(input_ids=ids[:, 7:], past_key_values=cache).logits
            assert torch.equal(after, other(input_ids=ids[:, 7:], past_key_values=old).logits), name


def test_early_exit_follows_resized_embeddings() -> None:
    fields: dict[str, Any] = {
        "target": "block",
        "branch": "none",
        "gate_input": "residual",
        "layers": [2],
    }
    model = build_routed("llama", gate="exit", **fields)
    model.get_base_model().resize_token_embeddings(70)
    with torch.no_grad():
        model.get_base_model().lm_head.weight.mul_(2)
        with record_routes(model) as trace:
            hidden = model(tokens(1, 6), output_hidden_states=True).hidden_states[2]
        base = model.get_base_model()
        sure = base.lm_head(base.model.norm(hidden)).softmax(-1).amax(-1)
    torch.testing.assert_close(trace[2].scores, -sure)
