"""Granularity `sequence`: one decision on the prompt, kept with the cache,
and no keys for what skips attention."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers.integrations.flex_attention
from models import DEPTH, FAMILY_NAMES, build_base, build_routed, decoder_layers, routed, tokens
from peft import PeftModel
from protocol import gap
from row_counts import counted_rows
from torch.nn.attention.flex_attention import flex_attention
from transformers import DynamicCache, StaticCache

from hf_depthroute import calibrate, record_routes, replay_routes, route_cost, use_budget
from hf_depthroute.base.cache import kv_cache_bytes
from hf_depthroute.base.cache_layers import SkippingLayer
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.execution.sequences import decide_sequences
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.trace import RouteTrace

TARGETS = ("ffn", "attention", "block")
ROUTED = [1, 2, 3]
LENGTH = 12
every_target = pytest.mark.parametrize(
    ("family", "target"), [(f, t) for f in FAMILY_NAMES for t in TARGETS]
)


def mixed(family: str, target: str, attention: str = "sdpa", **fields: Any) -> PeftModel:
    """A model that routes half of the sequences of most batches."""
    fields = {"granularity": "sequence", "selection": "controller"} | fields
    return build_routed(family, "mlp", attention, target=target, **fields)


def prompts(model: PeftModel, length: int = 6) -> torch.Tensor:
    """Eight prompts; every routed layer keeps some of them and skips some."""
    for seed in range(20):
        ids = tokens(8, length, seed)
        with torch.no_grad(), record_routes(model) as trace:
            model(ids)
        if all(0 < int(record.mask[:, 0].sum()) < 8 for record in trace.values()):
            return ids
    raise AssertionError("no batch with both decisions in every layer")


@torch.no_grad()
def extend(
    model: PeftModel, ids: torch.Tensor, cuts: list[int], cache: Any = None
) -> tuple[torch.Tensor, Any, RouteTrace]:
    """Logits of `ids` run in pieces that end at `cuts`; the first piece is the prompt.

    The trace is the prompt's.
    """
    cache = DynamicCache(config=model.config) if cache is None else cache
    start, logits, first = 0, [], None
    for stop in cuts:
        with record_routes(model) as trace:
            logits.append(model(ids[:, start:stop], past_key_values=cache, use_cache=True).logits)
        start, first = stop, first or trace
    assert first is not None
    return torch.cat(logits, dim=1), cache, first


def stretched(trace: RouteTrace, length: int) -> RouteTrace:
    """The prompt's decisions for a run of `length` tokens."""
    return RouteTrace.cat([trace.positions(0, 1)] * length)


@every_target
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_continued_prompt_equals_a_run_with_the_prompts_decision(
    family: str, target: str, attention: str
) -> None:
    model = mixed(family, target, attention)
    prompt = prompts(model)
    ids = torch.cat([prompt, tokens(8, LENGTH - 6, seed=50)], dim=1)
    _, _, trace = extend(model, ids, [6])
    with torch.no_grad(), replay_routes(model, stretched(trace, LENGTH)):
        expected = model(ids, use_cache=False).logits
    for cuts in ([6, *range(7, 13)], [6, 9, 12], [6, 12]):
        logits, cache, _ = extend(model, ids, cuts)
        assert gap(logits, expected) < 1e-5
        assert [cache.get_seq_length(i) for i in range(DEPTH)] == [LENGTH] * DEPTH
    logits, cache, _ = extend(
        model, ids, [6, 9, 12], StaticCache(config=model.config, max_cache_len=16)
    )
    assert gap(logits, expected) < 1e-5


@every_target
def test_gathered_equals_masked(family: str, target: str) -> None:
    model = mixed(family, target)
    ids = prompts(model, LENGTH)
    with torch.no_grad(), record_routes(model) as trace:
        gathered = model(ids, use_cache=False).logits
    with torch.no_grad(), replay_routes(model, trace):
        masked = model.train()(ids, use_cache=False).logits
    assert gap(gathered, masked) < 1e-5


@every_target
def test_reordered_cropped_repeated_and_selected_caches_keep_the_decision(
    family: str, target: str
) -> None:
    assert_changed_caches_keep_the_decision(mixed(family, target))


def assert_changed_caches_keep_the_decision(model: PeftModel) -> None:
    prompt = prompts(model)
    ids = torch.cat([prompt, tokens(8, LENGTH - 6, seed=51)], dim=1)
    expected, _, _ = extend(model, ids, [6, 12])

    def after(change: Any, rows: torch.Tensor, resume: int) -> None:
        _, cache, _ = extend(model, ids, [6, 9])
        change(cache)
        with torch.no_grad():
            found = model(ids[rows, resume:], past_key_values=cache, use_cache=True).logits
        assert gap(found, expected[rows, resume:]) < 1e-5
        assert [cache.get_seq_length(i) for i in range(DEPTH)] == [LENGTH] * DEPTH

    rows = torch.tensor([7, 0, 0, 3, 2, 5, 1, 4])
    after(lambda cache: cache.reorder_cache(rows), rows, 9)
    after(lambda cache: cache.crop(-2), torch.arange(8), 7)
    after(lambda cache: cache.batch_repeat_interleave(2), torch.arange(8).repeat_interleave(2), 9)
    after(lambda cache: cache.batch_select_indices(torch.tensor([6, 1])), torch.tensor([6, 1]), 9)


@pytest.mark.parametrize("target", TARGETS)
def test_the_prompts_weight_scales_what_follows(target: str) -> None:
    model = mixed("llama", target, scale_by_gate=True)
    assert_changed_caches_keep_the_decision(model)
    prompt = prompts(model)
    ids = torch.cat([prompt, tokens(8, LENGTH - 6, seed=52)], dim=1)
    expected, cache, first = extend(model, ids, [6, 12])
    assert gap(extend(model, ids, [6, *range(7, 13)])[0], expected) < 1e-5
    assert (
        gap(
            extend(model, ids, [6, 12], StaticCache(config=model.config, max_cache_len=16))[0],
            expected,
        )
        < 1e-5
    )
    with torch.no_grad(), record_routes(model) as step:
        model(tokens(8, 1), past_key_values=cache)
    assert all(
        torch.equal(record.probs, first[index].probs[:, :1]) for index, record in step.items()
    )


@pytest.mark.parametrize("target", TARGETS)
def test_cache_cropped_to_nothing_decides_again(target: str) -> None:
    model = mixed("llama", target)
    first, second = prompts(model), tokens(8, 6, seed=60)
    expected, _, trace = extend(model, second, [6])
    _, cache, before = extend(model, first, [6])
    assert any(before[i].mask[:, 0].sum() != trace[i].mask[:, 0].sum() for i in ROUTED)
    cache.crop(-6)
    logits, _, again = extend(model, second, [6], cache)
    assert all(torch.equal(again[i].mask, trace[i].mask) for i in ROUTED)
    assert gap(logits, expected) < 1e-5


def test_reset_cache_decides_again() -> None:
    model = mixed("llama", "attention")
    first, second = prompts(model), tokens(8, 6, seed=60)
    expected, _, trace = extend(model, second, [6])
    _, cache, before = extend(model, first, [6])
    assert any(not torch.equal(before[i].mask[:, 0], trace[i].mask[:, 0]) for i in ROUTED)
    cache.reset()
    if cache.get_seq_length():  # of layer 0, which is transformers' own
        pytest.skip("in this version of transformers a cache that was reset keeps its length")
    logits, _, _ = extend(model, second, [6], cache)
    assert gap(logits, expected) < 1e-5


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("target", ["attention", "block"])
def test_skipped_sequences_write_no_keys_and_run_no_row(family: str, target: str) -> None:
    model = mixed(family, target)
    ids = prompts(model)
    rows = {index: 0 for index in ROUTED}
    handles = []
    for index in ROUTED:
        layer = decoder_layers(model)[index]
        module = getattr(layer, layer.routing.family.attention)

        def count(_: Any, args: Any, index: int = index) -> None:
            rows[index] += len(args[0])

        handles.append(module.register_forward_pre_hook(count))
    _, cache, trace = extend(model, ids, [6])
    for handle in handles:
        handle.remove()
    kept = {index: int(trace[index].mask[:, 0].sum()) for index in ROUTED}
    assert rows == kept
    held = {
        i: 0 if cache.layers[i].keys is None else len(cache.layers[i].keys) for i in range(DEPTH)
    }
    assert held == {0: 8, **kept}
    assert all(isinstance(cache.layers[i], SkippingLayer) for i in ROUTED)
    assert [cache.get_seq_length(i) for i in range(DEPTH)] == [6] * DEPTH
    with model.disable_adapter():
        dense = _dense_cache(model, ids)
    per_sequence = kv_cache_bytes(dense) / (8 * DEPTH)
    assert kv_cache_bytes(cache) == per_sequence * (8 + sum(kept.values()))
    ratio = {index: count / 8 for index, count in kept.items()}
    assert route_cost(model, batch_size=8, length=6, full_ratio=ratio).kv_bytes == kv_cache_bytes(
        cache
    )


# Caches that hold the keys and values of every sequence, and the family whose layers are to be in
# one.
EVERY_SEQUENCE: dict[str, tuple[str, list[int]]] = {
    "static": ("llama", [1, 2, 3]),
    "sliding": ("olmo3", [1]),
}


@pytest.mark.parametrize("target", ["attention", "block"])
@pytest.mark.parametrize("kind", EVERY_SEQUENCE)
@pytest.mark.parametrize("gate", ["mlp", "none"])
def test_caches_of_every_sequence_run_the_kept_ones_only(target: str, kind: str, gate: str) -> None:
    family, layers = EVERY_SEQUENCE[kind]
    granularity = "token" if gate == "none" else "sequence"
    model = mixed(family, target, gate=gate, granularity=granularity, layers=layers)
    ids = tokens(8, 3) if gate == "none" else prompts(model, 3)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    cache: Any = DynamicCache(config=model.config)
    if kind == "static":
        cache = StaticCache(config=model.config, max_cache_len=8)
    with torch.no_grad(), counted_rows(model) as counts:
        assert gap(model(ids, past_key_values=cache).logits, expected) < 1e-5
        model(ids[:, :1], past_key_values=cache)
    assert counts["computed"] == counts["decided"]
    assert sum(counts["computed"].values()) < sum(counts["all"].values())
    assert not any(isinstance(cache.layers[i], SkippingLayer) for i in layers)
    if kind == "sliding":
        with model.disable_adapter():
            dense = kv_cache_bytes(_dense_cache(model, ids))
        assert route_cost(model, batch_size=8, length=3).kv_bytes == dense


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("target", ["attention", "block"])
def test_block_masks_of_flex_attention_are_those_of_their_sequences(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        transformers.integrations.flex_attention,
        "WrappedFlexAttention",
        lambda *_: lambda: flex_attention,
    )
    model = mixed("llama", target)
    ids, mask = prompts(model), torch.ones(8, 6, dtype=torch.long)
    mask[:, :2] = torch.tensor([[0, 0], [1, 1]]).repeat(4, 1)
    with torch.no_grad(), record_routes(model) as trace:
        expected = model(ids, attention_mask=mask).logits
    assert all(0 < int(record.mask[:, -1].sum()) < 8 for record in trace.values())
    model.get_base_model().set_attn_implementation("flex_attention")
    # Transformers would compile the block mask.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        found = model(ids, attention_mask=mask).logits
    assert gap(found[mask.bool()], expected[mask.bool()]) < 1e-4


def test_gumbel_noise_decides_a_sequence_once() -> None:
    model = mixed("llama", "block", selection="gumbel").train()
    torch.manual_seed(0)
    with record_routes(model) as trace:
        model(tokens(8, 9))
    for record in trace.values():
        assert torch.equal(record.mask, record.mask[:, :1].expand(-1, 9))
        assert torch.equal(record.probs, record.probs[:, :1].expand(-1, 9))


def test_traces_of_a_prompt_and_its_continuation_join() -> None:
    model = mixed("llama", "ffn", gate="jepa")
    _, cache, first = extend(model, tokens(3, 6), [6])
    with torch.no_grad(), record_routes(model) as second:
        model(tokens(3, 2), past_key_values=cache)
    joined = RouteTrace.cat([first, second])[1]
    assert joined.q_full.shape == (3, 8, 8) and joined.q_full[:, 6:].isnan().all()
    assert joined.scores[:, 6:].isnan().all() and not joined.scores[:, :6].isnan().any()


@torch.no_grad()
def _dense_cache(model: PeftModel, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True)
    return cache


@every_target
def test_greedy_generation_equals_a_masked_reference(family: str, target: str) -> None:
    """The reference runs without a cache, computes both paths for every token,
    and repeats the prompts' decision."""
    model = mixed(family, target)
    ids = prompts(model)
    ids[:3, :2] = 0
    mask = (ids != 0).long()
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    with record_routes(model) as trace, torch.no_grad():
        model(**inputs, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    fast = model.generate(**inputs, **settings)
    static = model.generate(
        **inputs, **settings, cache_implementation="static", disable_compile=True
    )
    slow = ids
    model.train()  # both paths run
    for length in range(6, 11):
        all_mask = torch.cat([mask, torch.ones(8, length - 6, dtype=torch.long)], dim=1)
        positions = (all_mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad(), replay_routes(model, stretched(trace, length)):
            logits = model(
                slow, attention_mask=all_mask, position_ids=positions, use_cache=False
            ).logits[:, -1]
        logits[:, model.config.eos_token_id] = -torch.inf  # as min_new_tokens has it
        slow = torch.cat([slow, logits.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(fast, slow)
    assert torch.equal(static, slow)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_another_budget_in_the_middle_of_a_generation_leaves_its_sequences_decided(
    target: str, recorded: bool
) -> None:
    """At a budget of 1 as well, where nothing else asks what was decided."""
    model = mixed("llama", target)
    ids = torch.cat([prompts(model), tokens(8, 3, 9)], dim=1)
    cuts = [6, 7, 8, 9]
    expected = extend(model, ids, cuts)[0]
    for budget in (0.1, 0.9, 1.0):
        cache = DynamicCache(config=model.config)
        found = [extend(model, ids[:, :6], [6], cache)[0]]
        with (
            torch.no_grad(),
            use_budget(model, budget),
            record_routes(model) if recorded else nullcontext(),
        ):
            found += [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(6, 9)]
        torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=1e-5, rtol=1e-5)
        assert cache.get_seq_length() == 9


@every_target
def test_beam_search_equals_one_over_a_cache_of_every_sequence(family: str, target: str) -> None:
    """A static cache holds every sequence, and the kept ones are gathered there."""
    model = mixed(family, target)
    ids = prompts(model)
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "num_beams": 3}
    fast = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    static = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **settings,
        cache_implementation="static",
        disable_compile=True,
    )
    assert torch.equal(fast, static)


def test_calibration_holds_the_share_of_sequences() -> None:
    model = mixed("llama", "attention")
    batches = [{"input_ids": tokens(8, 10, seed)} for seed in range(8)]
    for budget in (0.25, 0.75):
        shares = calibrate(model, batches, budget=budget)
        assert all(abs(share - budget) < 0.05 for share in shares.values())


def test_long_prompt_in_float16_and_bad_padding_are_decided_on_the_mean_of_real_tokens() -> None:
    model = build_routed(
        "llama", "mlp", target="ffn", granularity="sequence", gate_input="residual"
    )
    layer, routing = decoder_layers(model)[1], decoder_layers(model)[1].routing
    plan = routing.plan(training=False)
    # Its sum is above the largest float16.
    stream = torch.full((1, 2000, 32), 100.0, dtype=torch.float16)
    stream[:, 1500:] = torch.nan
    real = torch.arange(2000)[None] < 1500
    scores = decide_sequences(layer, plan, stream, real, {}).scores
    expected = routing.score(plan, stream[:, :1])["scores"]
    assert torch.isfinite(scores).all()
    assert torch.equal(scores[:, :1], expected)


def test_cache_filled_by_the_adapter_is_refused_without_it() -> None:
    model = mixed("llama", "attention")
    ids = prompts(model)
    _, cache, _ = extend(model, ids, [6])
    with model.disable_adapter(), pytest.raises(ValueError, match="start a new cache"):
        model(ids[:, :1], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("target", TARGETS)
def test_static_drop_of_layers_equals_a_model_without_them(target: str) -> None:
    """Gate `none` without a branch: the routed layers' part does nothing,
    and its attention writes no keys."""
    base, ids = build_base("llama"), tokens(3, LENGTH)
    reference = build_base("llama")
    for index in (1, 3):
        layer = reference.model.layers[index]
        if target in ("ffn", "block"):
            layer.mlp.down_proj.weight.data.zero_()
        if target in ("attention", "block"):
            layer.self_attn.o_proj.weight.data.zero_()
    with torch.no_grad():
        expected = reference(ids).logits
    model = routed(base, gate="none", target=target, layers=[1, 3], branch="none")
    logits, cache, _ = extend(model, ids, [5, 6, 12])
    assert gap(logits, expected) < 1e-5
    if target != "ffn":
        assert [cache.layers[i].keys is None for i in range(DEPTH)] == [False, True, False, True]
    assert route_cost(model).flops_ideal < route_cost(model).flops_dense


@pytest.mark.parametrize("target", ["attention", "block"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_pass_of_the_base_over_a_cache_that_kept_everything_is_counted(
    target: str, first: int
) -> None:
    """Positions, cropping and later turns go by the length, whoever wrote the keys."""
    model = routed(
        build_base("llama"),
        "mlp",
        layers=list(range(first, DEPTH)),
        target=target,
        granularity="sequence",
    )
    for routing in routings_of(model):
        routing.active_quantiles().values.fill_(-1e9)  # every sequence is kept, which is the base
    ids, cache = tokens(1, LENGTH), DynamicCache()
    with torch.no_grad():
        with model.disable_adapter():
            dense = model(ids).logits
        model(ids[:, :5], past_key_values=cache)
        assert isinstance(cache.layers[-1], SkippingLayer)
        with model.disable_adapter():
            model(ids[:, 5:8], past_key_values=cache)
        cache.crop(-1)
        found = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(7, LENGTH)]
    assert gap(torch.cat(found, dim=1), dense[:, 7:]) < 1e-5
    assert [layer.get_seq_length() for layer in cache.layers] == [LENGTH] * DEPTH


@pytest.mark.parametrize("option", [{"prefill_chunk_size": 2}, {"prompt_lookup_num_tokens": 2}])
def test_a_decision_about_a_prompt_is_made_on_all_of_it(option: dict[str, int]) -> None:
    model, ids = mixed("llama", "ffn"), tokens(1, 6)
    with pytest.raises(ConfigError, match=f"{next(iter(option))}: granularity='sequence'"):
        model.generate(input_ids=ids, max_new_tokens=2, **option)
    with torch.no_grad():
        expected = model(ids).logits[:, -1].argmax(-1)
    plain = model.generate(
        input_ids=ids, max_new_tokens=1, do_sample=False, **dict.fromkeys(option)
    )
    assert torch.equal(plain[:, 6], expected)


def test_a_decision_that_no_cache_keeps_is_refused_in_generation() -> None:
    """It would be made again at every step, on what was generated so far."""
    model, ids = mixed("llama", "ffn"), tokens(1, 6)
    with pytest.raises(ConfigError, match="use_cache=False: granularity='sequence'"):
        model.generate(input_ids=ids, max_new_tokens=2, use_cache=False)
    with model.disable_adapter():
        model.generate(input_ids=ids, max_new_tokens=2, use_cache=False)
