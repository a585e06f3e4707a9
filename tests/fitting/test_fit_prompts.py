"""Prompts with a share of the FLOPs: static layers,
chosen by what they cost the text behind a prompt."""

from __future__ import annotations

import copy
import itertools
import json
import random
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from command_line import run
from models import build_base, decoder_layers, tokens
from peft import PeftModel
from text_models import save_base, write_text
from transformers import AutoConfig, AutoModelForCausalLM

from hf_depthroute import DepthRouteConfig, fit_router, record_routes
from hf_depthroute.base.lm_head import logits_at
from hf_depthroute.base.stack import stack_of
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.data.batches import prompts_of, token_mask
from hf_depthroute.evaluation import evaluate_budgets
from hf_depthroute.evaluation.flops import count_flops
from hf_depthroute.fitting import option_times
from hf_depthroute.fitting.bar import FitBar
from hf_depthroute.fitting.option_times import PassTimes, in_time, time_savings
from hf_depthroute.fitting.options import Option, StaticFit, choose, options_of
from hf_depthroute.fitting.prompts import fit_prompts
from hf_depthroute.fitting.sensitivity import stream_gradients, stream_metrics, text_gradients
from hf_depthroute.fitting.text import FitWarning, split
from hf_depthroute.inference.calibration import active_routings
from hf_depthroute.routing.stack import routed_stack
from hf_depthroute.routing.trace import routings_of
from hf_depthroute.training.record import record_of, remembered

TEXT = [{"input_ids": part} for part in tokens(20, 60, seed=5).split(4)]


def fitted(keep: float, family: str = "llama", **fields: Any) -> Any:
    config = DepthRouteConfig(layers="all", phases="prefill", **{"prompt_tail": 1, **fields})
    return fit_router(build_base(family), TEXT, keep, config)


def found(model: Any) -> dict[str, Any]:
    record = remembered(model, "default").training
    assert record is not None
    fit: dict[str, Any] = record["fit"]
    return fit


def prompt_flops(model: Any, length: int) -> float:
    """The share of a prompt's FLOPs that is left, as it is counted elsewhere."""
    in_full = model.peft_config["default"].prompt_tail / length
    shares = {routing.layer_index: in_full for routing in active_routings(model)}
    routed = sum(count_flops(model, batch=1, length=length, shares=shares).values())
    with model.disable_adapter():
        return routed / sum(count_flops(model, batch=1, length=length).values())


def test_the_last_layer_of_a_prompt_is_free() -> None:
    model = fitted(0.85)
    last = len(decoder_layers(model.get_base_model())) - 1
    assert model.peft_config["default"].layers == [last]
    assert found(model)["divergence"] == pytest.approx(0, abs=1e-7)
    ids = tokens(2, 24, seed=9)
    with torch.no_grad():
        routed = model.generate(
            ids, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        with model.disable_adapter():
            dense = model.generate(
                ids,
                max_new_tokens=8,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
    assert torch.equal(routed.sequences, dense.sequences)
    for one, other in zip(routed.logits, dense.logits, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "qwen3"])
@pytest.mark.parametrize("keep", [0.7, 0.5])
def test_a_prompt_costs_what_was_asked_for(family: str, keep: float) -> None:
    model = fitted(keep, family)
    left = prompt_flops(model, 40)
    assert left <= keep + 1e-6
    assert left > keep - 0.3  # the layers are few and large here
    with record_routes(model) as trace, torch.no_grad():
        model(TEXT[0]["input_ids"])
    for record in trace.values():
        assert record.mask[:, -1].all() and not record.mask[:, :-1].any()


def as_phi3(base: Any) -> Any:
    """The same function with fused projections, as Phi-3 has them."""
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
              "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_parameters")  # fmt: skip
    config = AutoConfig.for_model(
        "phi3", **{name: getattr(base.config, name) for name in fields}, pad_token_id=0
    )
    twin = AutoModelForCausalLM.from_config(config).eval()
    weights = base.state_dict()
    for name in [name for name in weights if "q_proj" in name or "gate_proj" in name]:
        for first, fused, others in (
            ("q_proj", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("gate_proj", "gate_up_proj", ("gate_proj", "up_proj")),
        ):
            if first in name:
                parts = [weights.pop(name.replace(first, other)) for other in others]
                weights[name.replace(first, fused)] = torch.cat(parts)
    twin.load_state_dict(weights)
    return twin


def test_a_fused_ffn_has_neurons_as_one_that_is_not_fused() -> None:
    config = DepthRouteConfig(layers="all", phases="prefill", prompt_tail=1)
    base = build_base("llama")
    twin = as_phi3(base)
    ids = tokens(2, 24, seed=9)
    with torch.no_grad():
        assert torch.allclose(base(ids).logits, twin(ids).logits, atol=1e-4)
    one, other = (found(fit_router(model, TEXT, 0.65, config)) for model in (base, twin))
    assert any(layer["branch"] == "neurons" for layer in one["layers"].values())
    assert one["layers"].keys() == other["layers"].keys()
    for index, layer in one["layers"].items():
        same = other["layers"][index]
        for name in ("target", "branch", "rank"):
            assert same[name] == layer[name]
        for name in ("nats", "saved", "branch_r2"):
            assert same[name] == pytest.approx(layer[name], rel=1e-2, abs=1e-6)


def test_a_short_text_is_accepted_with_a_line_that_names_the_caller() -> None:
    batches = [{"input_ids": part} for part in tokens(16, 64).split(4)]
    config = DepthRouteConfig(layers="all", phases="prefill")
    with pytest.warns(FitWarning, match="tokens to fit on are few; give it more than") as said:
        fit_router(build_base("llama"), batches, keep=0.8, config=config)
    assert [warning.filename for warning in said if warning.category is FitWarning] == [__file__]


def test_the_end_of_a_prompt_runs_in_full() -> None:
    """By default 64 tokens, of short prompts a quarter; they are part of what is kept,
    and make a fit cost less."""
    model = fitted(0.7, prompt_tail=None)
    assert model.peft_config["default"].prompt_tail == 10
    assert 0.4 < prompt_flops(model, 40) <= 0.7 + 1e-6
    with record_routes(model) as trace, torch.no_grad():
        model(TEXT[0]["input_ids"][:, :40])
    assert trace and all(
        r.mask[:, -10:].all() and not r.mask[:, :-10].any() for r in trace.values()
    )
    text = [{"input_ids": part} for part in tokens(8, 390, seed=5).split(4)]
    config = DepthRouteConfig(layers="all", phases="prefill")
    assert (
        fit_router(build_base("llama"), text, 0.8, config).peft_config["default"].prompt_tail == 64
    )


def test_a_card_says_what_is_left_of_a_prompt_and_not_what_was_asked_for(tmp_path: Path) -> None:
    model = fitted(0.85)
    left = 1 - sum(layer["saved"] for layer in found(model)["layers"].values())
    assert left < 0.845
    model.save_pretrained(str(tmp_path))
    card = (tmp_path / "README.md").read_text()
    assert f"with {left:.1%} of a prompt's FLOPs, behind it; 85.0% was asked for." in card


def test_what_is_kept_may_be_a_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The clock is a part of it that is exchanged: a block's option saves nothing on it here,
    an FFN's a fifth."""

    def saved(base: Any, found: Any, ids: torch.Tensor, tail: int) -> dict[Option, float]:
        assert ids.shape == (1, 40) and tail == 1
        options = {option for fits in found.values() for option in fits}
        return {option: 0.2 if option.target == "ffn" else 0.0 for option in options}

    monkeypatch.setattr(option_times, "time_savings", saved)
    monkeypatch.setattr(
        option_times, "time_left", lambda base, chosen, ids, tail: 1 - 0.2 * len(chosen)
    )
    config = DepthRouteConfig(layers="all", phases="prefill", prompt_tail=1)
    model = fit_router(build_base("llama"), TEXT, 0.6, config, keep_of="time")
    assert found(model)["keep_of"] == "time"
    layers = found(model)["layers"].values()
    assert len(layers) == 2 and {layer["target"] for layer in layers} == {"ffn"}
    model.save_pretrained(str(tmp_path))
    card = (tmp_path / "README.md").read_text()
    assert "60.0% of a prompt's time" in card and "time saved" in card and "FLOPs saved" not in card
    with pytest.raises(ConfigError, match="keep_of='seconds' must be one of: flops, time"):
        fit_router(build_base("llama"), TEXT, 0.6, config, keep_of="seconds")
    with pytest.raises(ConfigError, match="rounds is of a fit for all tokens"):
        fit_router(build_base("llama"), TEXT, 0.6, config, rounds=1)
    with pytest.raises(ConfigError, match="length=0 must be at least 1"):
        fit_router(build_base("llama"), TEXT, 0.6, config, length=0)
    everything = DepthRouteConfig(layers="all")
    with pytest.raises(ConfigError, match="keep_of and length are of a fit for prompts"):
        fit_router(build_base("llama"), TEXT, 0.6, everything, keep_of="time")
    with pytest.raises(ConfigError, match="keep_of and length are of a fit for prompts"):
        fit_router(build_base("llama"), TEXT, 0.6, everything, length=1024)


@pytest.mark.parametrize(("together", "layers"), [(0.2, 2), (0.15, 3), (0.3, 2), (0.5, 1)])
def test_a_share_of_the_time_is_held_by_all_options_together(
    together: float, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each FFN seems to save a fifth, and saves `together` beside the others."""
    options = [Option("ffn", "neurons", 4), Option("block", "lowrank", 4)]
    monkeypatch.setattr(option_times, "time_savings", lambda *given: dict(zip(options, (0.2, 0.0))))
    monkeypatch.setattr(
        option_times, "time_left", lambda base, chosen, ids, tail: 1 - together * len(chosen)
    )
    found = {index: dict.fromkeys(options, StaticFit(1.0 + index, 0.0, 0.0)) for index in range(4)}
    timed = in_time(build_base("llama"), found, 0.4, tokens(1, 40), 1)
    chosen = choose(timed, 0.4)
    assert sorted(chosen) == list(range(layers)) and set(chosen.values()) == {options[0]}
    assert sum(timed[index][option].saved for index, option in chosen.items()) == pytest.approx(
        together * layers
    )


def test_a_busy_machine_scales_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same work takes longer and longer: the parts, which were timed against each other,
    are believed."""
    options = [Option("ffn", "neurons", 4), Option("block", "lowrank", 4)]
    clock, calls = [0.0], itertools.count(1)

    def passed(model: Any, ids: torch.Tensor) -> None:
        clock[0] += next(calls)

    monkeypatch.setattr(option_times.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(option_times, "_pass", passed)
    monkeypatch.setattr(option_times, "time_savings", lambda *given: dict(zip(options, (0.2, 0.0))))
    found = {index: dict.fromkeys(options, StaticFit(1.0 + index, 0.0, 0.0)) for index in range(4)}
    timed = in_time(build_base("llama"), found, 0.4, tokens(1, 40), 1)
    assert all(
        fits[options[0]].saved == 0.2 and fits[options[1]].saved == 0.0 for fits in timed.values()
    )


@pytest.mark.parametrize("together", [0.0, -0.1])
def test_options_that_save_nothing_together_are_not_chosen(
    together: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are those that take longer, which a negative scale would turn into the best."""
    options = [Option("ffn", "neurons", 4), Option("attention", "lowrank", 4)]
    monkeypatch.setattr(
        option_times, "time_savings", lambda *given: dict(zip(options, (0.2, -0.05)))
    )
    monkeypatch.setattr(option_times, "time_left", lambda base, chosen, ids, tail: 1 - together)
    found = {index: dict.fromkeys(options, StaticFit(1.0, 0.0, 0.0)) for index in range(4)}
    assert choose(in_time(build_base("llama"), found, 0.4, tokens(1, 40), 1), 0.4) == {}


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_base_whose_whole_is_not_timed_to_the_end_is_as_before(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, calls = build_base("llama"), itertools.count(1)
    expected = base(tokens(2, 9)).logits

    def interrupted(model: Any, ids: torch.Tensor) -> None:
        if next(calls) == number:
            raise KeyboardInterrupt

    monkeypatch.setattr(option_times, "_pass", interrupted)
    with pytest.raises(KeyboardInterrupt):
        option_times.time_left(base, {0: OPTIONS[0]}, tokens(1, 40), tail=2)
    assert torch.equal(base(tokens(2, 9)).logits, expected)
    with pytest.raises(ValueError, match="no routed layer"):
        routings_of(base)


def test_the_time_that_is_left_is_that_of_passes_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of the base takes ten ticks, one with the two options eight;
    the very first takes a hundred."""
    clock, seen = [0.0], []

    def passed(model: Any, ids: torch.Tensor) -> None:
        routed = routings_of(model)[0].adapter() is not None
        seen.append(routed)
        clock[0] += 100 if len(seen) == 1 else 8 if routed else 10

    base, chosen = build_base("llama"), {0: OPTIONS[0], 2: OPTIONS[1]}
    expected = base(tokens(2, 9)).logits
    monkeypatch.setattr(option_times.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(option_times, "_pass", passed)
    assert option_times.time_left(base, chosen, tokens(1, 40), tail=2) == pytest.approx(0.8)
    assert torch.equal(base(tokens(2, 9)).logits, expected)


def seconds_of(model: Any, ids: torch.Tensor) -> PassTimes:
    """A made-up clock: four layers of a second each, and what each target saves of it in a
    layer that has it."""
    saved = {"ffn": 0.5, "block": 0.9, "attention": -0.1}
    routings = routings_of(model) if isinstance(model, PeftModel) else []
    targets = {
        routing.layer_index: routing.active_config().target_of(routing.layer_index)
        for routing in routings
    }
    layers = {index: 1.0 - saved.get(targets.get(index, ""), 0.0) for index in range(4)}
    return PassTimes(sum(layers.values()), layers)


OPTIONS = [
    Option("ffn", "neurons", 4),
    Option("block", "lowrank", 4),
    Option("attention", "lowrank", 4),
]


def test_the_time_of_every_option_is_measured_and_the_base_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = build_base("llama")
    ids, expected = tokens(1, 40), base(tokens(2, 9)).logits
    found = {index: dict.fromkeys(OPTIONS, StaticFit(0.0, 0.0, 0.0)) for index in (0, 2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # how even the real clock is depends on the machine
        assert time_savings(base, found, ids, tail=2).keys() == set(OPTIONS)
    monkeypatch.setattr(option_times, "_seconds", seconds_of)
    saved = time_savings(base, found, ids, tail=2)
    assert [saved[option] for option in OPTIONS] == pytest.approx([0.125, 0.225, -0.025])
    assert torch.equal(base(tokens(2, 9)).logits, expected)
    with pytest.raises(ValueError, match="no routed layer"):
        routings_of(base)


def test_a_pass_is_timed_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    base, clock = build_base("llama"), itertools.count()
    monkeypatch.setattr(option_times.time, "perf_counter", lambda: float(next(clock)))
    assert option_times._seconds(base, tokens(1, 8)) == (9.0, dict.fromkeys(range(4), 1.0))


def test_a_machine_that_is_busy_for_some_time_is_said_to_be_so_and_changes_no_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the sixth pass on everything takes twice as long,
    with options in all layers or in one."""
    number = itertools.count()

    def slower(model: Any, ids: torch.Tensor) -> PassTimes:
        factor, times = 1.0 if next(number) < 6 else 2.0, seconds_of(model, ids)
        return PassTimes(
            factor * times.whole, {index: factor * taken for index, taken in times.layers.items()}
        )

    monkeypatch.setattr(option_times, "_seconds", slower)
    found = {index: dict.fromkeys(OPTIONS, StaticFit(0.0, 0.0, 0.0)) for index in range(4)}
    for routed in (range(4), [2]):
        number = itertools.count()
        some = {index: found[index] for index in routed}
        with pytest.warns(UserWarning, match=r"the same work took 2\.\d times as long"):
            saved = time_savings(build_base("llama"), some, tokens(1, 40), tail=2)
        assert [saved[option] for option in OPTIONS] == pytest.approx([0.125, 0.225, -0.025])


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_base_whose_times_are_not_measured_to_the_end_is_as_before(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, calls = build_base("llama"), itertools.count(1)
    expected = base(tokens(2, 9)).logits

    def interrupted(model: Any, ids: torch.Tensor) -> PassTimes:
        if next(calls) == number:
            raise KeyboardInterrupt
        return seconds_of(model, ids)

    monkeypatch.setattr(option_times, "_seconds", interrupted)
    config = DepthRouteConfig(layers="all", phases="prefill", prompt_tail=1)
    with pytest.raises(KeyboardInterrupt):
        fit_router(base, TEXT, 0.6, config, keep_of="time")
    assert torch.equal(base(tokens(2, 9)).logits, expected)
    with pytest.raises(ValueError, match="no routed layer"):
        routings_of(base)


def test_a_lower_share_costs_more() -> None:
    costs = [found(fitted(keep))["divergence"] for keep in (0.85, 0.6, 0.4)]
    assert costs == sorted(costs) and costs[-1] > costs[0]


def test_costs_are_predicted_from_gradients() -> None:
    """`KL = 1/2 E (g . delta)^2`: over many draws, what a small change of a layer's
    output really costs."""
    model, ids = build_base("llama"), tokens(2, 24, seed=3)
    counted = torch.zeros_like(ids, dtype=torch.bool)
    counted[:, 15:] = True
    changed = torch.zeros_like(ids, dtype=torch.bool)
    changed[:, :15] = True
    with torch.no_grad():
        dense = model(ids).logits.log_softmax(-1)
    for index in (0, 1, 2):
        change = (
            0.02
            * torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(index))
            * changed[..., None]
        )
        with torch.no_grad():
            hook = (
                stack_of(model)
                .layers[index]
                .register_forward_hook(lambda layer, args, out, c=change: out + c)
            )
            routed = model(ids).logits.log_softmax(-1)
            hook.remove()
        wanted = F.kl_div(routed, dense, reduction="none", log_target=True).sum(-1)[counted].sum()
        squares = []
        for seed in range(100):
            g = stream_gradients(
                model, {"input_ids": ids}, counted, [2 * seed, 2 * seed + 1], draws=4
            )[index]
            assert g.shape == (4, 2, 24, 32)
            squares.append((g * change).sum((2, 3)).square().sum() / 4)
        assert float(torch.stack(squares).mean() / 2) == pytest.approx(float(wanted), rel=0.25), (
            index
        )


def test_a_metric_of_the_stream_prices_a_change_that_knows_no_token() -> None:
    """`|delta L|^2` is what a change of one token's stream costs the text behind it,
    over tokens and directions."""
    model, text = (
        build_base("llama"),
        [{"input_ids": part} for part in tokens(40, 24, seed=5).split(4)],
    )
    real = [torch.ones_like(batch["input_ids"], dtype=torch.bool) for batch in text]
    metrics = stream_metrics(text_gradients(model, text, real, seed=0, draws=2), real, 32)
    assert len(metrics) == len(stack_of(model).layers) and metrics[0].shape == (32, 32)
    generator = torch.Generator().manual_seed(0)
    for index in (0, 2):
        predicted, caused = [], []
        for batch in text:
            ids = batch["input_ids"]
            with torch.no_grad():
                dense = model(ids).logits.log_softmax(-1)
            for _ in range(20):
                change = torch.zeros(4, 24, 32)
                places = torch.randint(24, (4,), generator=generator)
                delta = 0.05 * torch.randn(4, 32, generator=generator)
                change[torch.arange(4), places] = delta
                hook = (
                    stack_of(model)
                    .layers[index]
                    .register_forward_hook(lambda layer, args, out, c=change: out + c)
                )
                with torch.no_grad():
                    routed = model(ids).logits.log_softmax(-1)
                hook.remove()
                caused.append(F.kl_div(routed, dense, reduction="sum", log_target=True) / 4)
                predicted.append((delta @ metrics[index]).square().sum() / 4)
        wanted = float(torch.stack(caused).mean())
        assert float(torch.stack(predicted).mean()) == pytest.approx(wanted, rel=0.25), index


def test_nothing_behind_the_last_layer_depends_on_a_prompt() -> None:
    model, ids = build_base("llama"), tokens(2, 24, seed=3)
    counted = torch.zeros_like(ids, dtype=torch.bool)
    counted[:, 15:] = True
    gradients = stream_gradients(model, {"input_ids": ids}, counted, [0, 1])
    assert not gradients[-1][0, :, :15].any() and gradients[-1][0, :, 15:-1].any()
    assert gradients[0][0, :, :15].any()
    alone = stream_gradients(model, {"input_ids": ids[1:]}, counted[1:], [1])
    assert torch.allclose(alone[0], gradients[0][:, 1:], atol=1e-5)  # a row's draws are its own


def test_no_other_set_saves_enough_and_costs_less() -> None:
    draw = random.Random(0)
    options = [Option("ffn", "lowrank", 1), Option("block", "lowrank", 1)]
    for _ in range(20):
        fits = {
            i: {o: StaticFit(draw.random(), draw.random() / 4, 0.0) for o in options}
            for i in range(5)
        }
        chosen = choose(fits, 0.4)
        cost = sum(fits[i][o].nats for i, o in chosen.items())
        if not chosen:
            assert sum(max(fit.saved for fit in row.values()) for row in fits.values()) < 0.4
            continue
        assert sum(fits[i][o].saved for i, o in chosen.items()) >= 0.4
        for other in itertools.product([None, *options], repeat=5):
            taken = [fits[i][o] for i, o in enumerate(other) if o is not None]
            assert (
                sum(fit.saved for fit in taken) < 0.4 + 1e-4  # less than the steps may miss
                or sum(fit.nats for fit in taken) > cost - 1e-9
            )


def test_a_prompt_is_two_thirds_of_the_real_tokens() -> None:
    mask = torch.tensor([[1] * 9, [0] * 3 + [1] * 6, [1] * 6 + [0] * 3])
    batch = {"input_ids": torch.zeros(3, 9, dtype=torch.long), "attention_mask": mask}
    assert prompts_of(batch, 2)[0].sum(1).tolist() == [4, 2, 2]
    cheap, behind = prompts_of(batch, 1)
    assert cheap.sum(1).tolist() == [5, 3, 3]  # all but the prompt's last token
    # That token and those behind it, but the text's last one.
    assert behind.sum(1).tolist() == [3, 2, 2]
    assert not (cheap & behind).any() and not ((cheap | behind) & ~token_mask(batch)).any()
    assert cheap[1].nonzero().squeeze(1).tolist() == [3, 4, 5]


def test_padding_changes_nothing() -> None:
    """Neither what is found nor what counts as a sink depends on what stands where no token is."""
    padded = [
        {
            "input_ids": F.pad(batch["input_ids"], (7, 0)),
            "attention_mask": F.pad(torch.ones_like(batch["input_ids"]), (7, 0)),
        }
        for batch in TEXT
    ]
    config = DepthRouteConfig(layers="all", phases="prefill")
    plain, other = (fit_router(build_base("llama"), text, 0.6, config) for text in (TEXT, padded))
    assert found(plain)["divergence"] == pytest.approx(found(other)["divergence"], rel=0.02)
    bounds = [
        [float(routing.depth_route_gate["default"].log_bound) for routing in active_routings(model)]
        for model in (plain, other)
    ]
    assert bounds[0] == pytest.approx(bounds[1], abs=1e-3)


def test_it_is_saved_and_loads(tmp_path: Path) -> None:
    model = fitted(0.5)
    model.save_pretrained(str(tmp_path))
    assert "fitted without training" in (tmp_path / "README.md").read_text()
    loaded: Any = PeftModel.from_pretrained(build_base("llama"), str(tmp_path)).eval()
    ids = tokens(2, 30, seed=9)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_only_the_layers_that_may_be_are_routed() -> None:
    model = fit_router(
        build_base("llama"), TEXT, 0.85, DepthRouteConfig(layers=[0, 1], phases="prefill")
    )
    assert set(model.peft_config["default"].layers) <= {0, 1}


def test_attention_that_would_be_computed_all_the_same_is_no_option() -> None:
    model = fitted(0.9, "falcon")
    for routing in active_routings(model):
        targets = {option.target for option in options_of(routing)}
        assert targets == (
            {"ffn"} if routing.family.queries is None else {"ffn", "attention", "block"}
        )


@pytest.mark.parametrize(
    ("keep", "fields", "message"),
    [
        (0.01, {}, "keep=0.01 is not reached"),
        (1.5, {}, "keep=1.5 must be between 0 and 1"),
        (0.8, {"target": "block"}, "target='block': of prompts it is found"),
        (0.8, {"gate": "affine"}, "gate='affine': of prompts it is found"),
        (0.8, {"branch": "none"}, "branch='none': of prompts it is found"),
    ],
)
def test_what_cannot_be_is_refused_and_the_base_stays_as_it_is(
    keep: float, fields: Any, message: str
) -> None:
    base: Any = build_base("llama")
    before, names = copy.deepcopy(base.state_dict()), [type(module) for module in base.modules()]
    with pytest.raises(ConfigError, match=message):
        fit_router(base, TEXT, keep, DepthRouteConfig(layers="all", phases="prefill", **fields))
    assert [type(module) for module in base.modules()] == names
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())


def test_one_bar_counts_all_phases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reached: list[float] = []

    class Watched(FitBar):
        def __exit__(self, *error: object) -> None:
            reached.append(self.done / self.total)
            super().__exit__(*error)

    monkeypatch.setattr("hf_depthroute.fitting.prompts.FitBar", Watched)
    record = record_of(fit_prompts(build_base("llama"), TEXT, 0.6, progress=True))
    shown = capsys.readouterr().err
    parts = ["gradients", "options of every layer", "the chosen ones", "losses"]
    assert list(record["seconds_of"]) == parts
    assert all(f"fit: {part}" in shown for part in parts) and "100%" in shown
    assert 0.8 <= reached[0] <= 1


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="512 is the least"):
        fit_prompts(build_base("llama"), TEXT[:2], 0.8)


@pytest.mark.parametrize("fit", [fit_prompts, fit_router])
def test_a_tail_that_is_all_of_every_prompt_is_refused(fit: Any) -> None:
    """Nothing would be routed, and there is nothing to fit a branch to."""
    base = build_base("llama")
    prompt = TEXT[0]["input_ids"].shape[1] * 2 // 3
    config = DepthRouteConfig(layers="all", phases="prefill", prompt_tail=prompt)
    with pytest.raises(ConfigError, match=rf"prompt_tail={prompt}: no prompt in the rows to fit"):
        fit(base, TEXT, 0.8, config)
    short = [{"input_ids": batch["input_ids"][:, :12]} for batch in TEXT]
    mixed = [TEXT[0], *short, *short]
    assert len(TEXT[0]["input_ids"]) < 5  # every fifth row is held out, so none of the long ones
    with pytest.raises(ConfigError, match=r"in the rows to hold out has more tokens"):
        fit(base, mixed, 0.8, replace(config, prompt_tail=8))
    assert routed_stack(base) is None


def test_a_prompt_no_longer_than_its_tail_is_refused() -> None:
    config = DepthRouteConfig(layers="all", phases="prefill", prompt_tail=4)
    with pytest.raises(ConfigError, match=r"length=4: of a prompt of so many tokens the last 4"):
        fit_prompts(build_base("llama"), TEXT, 0.8, config, length=4)


def test_the_command_fits_prompts(tmp_path: Path) -> None:
    base, out = save_base(tmp_path / "base"), tmp_path / "fitted"
    text = write_text(tmp_path / "text.txt", 400)
    words = (
        "fit",
        "--model",
        base,
        "--dataset",
        text,
        "--length",
        48,
        "--phases",
        "prefill",
        "--keep",
        0.7,
    )
    ended = run(*words, "--out", out)
    assert ended.code == 0, ended.err
    layers = json.loads((out / "training.json").read_text())["fit"]["layers"].values()
    left = 1 - sum(layer["saved"] for layer in layers)
    assert "loss behind prompts of" in ended.out and left < 0.7
    assert f" with {left:.1%} of the FLOPs of a prompt (--keep 0.7)\n" in ended.out
    assert json.loads((out / "adapter_config.json").read_text())["phases"] == "prefill"
    ended = run(*words, "--out", tmp_path / "other", "--target", "block")
    assert ended.code == 2 and "target='block': of prompts it is found" in ended.err


@pytest.mark.parametrize("layers", [1, 2, 6, 24, 30, 100])
def test_every_option_is_timed_often_enough_and_no_longer_than_each_layer_has_had_all(
    layers: int,
) -> None:
    options = [Option("ffn", "lowrank", rank) for rank in range(7)]
    of_layers = {
        index: dict.fromkeys(options[:6], StaticFit(0.0, 0.0, 0.0)) for index in range(layers)
    }
    of_layers[layers // 2][options[6]] = StaticFit(0.0, 0.0, 0.0)  # which no other layer has
    rounds = option_times._rounds(of_layers)
    timed = Counter(
        taken
        for number in range(rounds)
        for taken in option_times._options_of(of_layers, number).values()
    )
    assert all(timed[option] >= 12 for option in options[:6])
    assert timed[options[6]] >= 1

    del of_layers[layers // 2][options[6]]
    assert option_times._rounds(of_layers) == {1: 84, 2: 42, 6: 14, 24: 4, 30: 3, 100: 3}[layers]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_logits_of_some_positions_are_those_of_the_whole_pass(family: str) -> None:
    base, ids = build_base(family), tokens(3, 20, seed=2)
    behind = prompts_of({"input_ids": ids})[1]
    behind[1] = False
    with torch.no_grad():
        whole = base(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(logits_at(base, {"input_ids": ids}, behind), whole[behind])
        kept = []
        head = base.get_output_embeddings().register_forward_hook(
            lambda m, args, out: kept.append(out.shape[1])
        )
        logits_at(base, {"input_ids": ids}, behind)
        head.remove()
    assert kept == [int(behind[0].sum())]  # of 20


@pytest.mark.parametrize("phases", ["all", "prefill"])
def test_the_loss_of_a_fit_is_the_mean_of_all_tokens(phases: str) -> None:
    """Rows are of all lengths, and some are padding alone."""
    ids, mask = tokens(40, 60, seed=5), torch.ones(40, 60, dtype=torch.long)
    for number in range(40):
        mask[number, (60 if number % 9 else 8) - number % 5 :] = 0
    mask[::20] = 0
    text = [{"input_ids": i, "attention_mask": m} for i, m in zip(ids.split(4), mask.split(4))]
    tail = {"prompt_tail": 1} if phases == "prefill" else {}
    model = fit_router(
        build_base("llama"), text, 0.8, DepthRouteConfig(layers="all", phases=phases, **tail)
    )
    held_out = split(text)[1]
    dense, routed, *_ = evaluate_budgets(
        model, held_out, None, [model.peft_config["default"].budget]
    )
    assert found(model)["loss_dense"] == pytest.approx(dense.loss, abs=1e-5)
    if phases == "all":
        assert found(model)["loss"] == pytest.approx(routed.loss, abs=1e-5)


def test_an_offloaded_base_is_fitted_as_any_other() -> None:
    models = []
    for offloaded in (False, True):
        base = build_base("llama")
        if offloaded:
            cpu_offload(base, execution_device=torch.device("cpu"))
        models.append(
            fit_router(
                base, TEXT, 0.65, DepthRouteConfig(layers="all", phases="prefill", prompt_tail=1)
            )
        )
    assert "neurons" in {option["branch"] for option in found(models[0])["layers"].values()}
    assert found(models[1])["layers"].keys() == found(models[0])["layers"].keys()
    for index, option in found(models[0])["layers"].items():
        assert found(models[1])["layers"][index]["nats"] == pytest.approx(option["nats"], rel=1e-3)
    logits = [model(input_ids=tokens(3, 40, seed=9), use_cache=False).logits for model in models]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)
