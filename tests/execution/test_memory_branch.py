"""Memory as a cheap branch: a token that skips gets what the n-grams that end at it
have in a table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from continuations import CONTINUATIONS, LENGTH, base_gap, run
from continuations import continued as continued_run
from engram.slots import slot_use
from memories import GENERATIONS, change, naive_suffixes
from models import WIDTH, build_base, build_routed, decoder_layers, logits, routed, tokens
from peft import PeftModel
from protocol import assert_free, assert_pinned, gap, narrow, spread
from safetensors.torch import load_file, save_file
from study.utility import utility_labels
from training import (
    adapter_state,
    assert_same_tensors,
    backward,
    gradients,
    make_trainer,
    rows,
    stacked,
    step_logs,
)
from transformers import DynamicCache, StaticCache

from hf_depthroute import (
    DepthRouteConfig,
    DepthRouteTrainer,
    calibrate,
    calibrate_budgets,
    draft_view,
    get_depth_routed_model,
    lossless_generate,
    record_routes,
    replay_routes,
    route_cost,
    set_budget,
    tune_execution,
)
from hf_depthroute.adapter.call_tokens import token_ids_of
from hf_depthroute.adapter.doctor import examine
from hf_depthroute.adapter.files import AdapterMismatchError
from hf_depthroute.base.cache import kv_cache_bytes
from hf_depthroute.card import make_card
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.inference.autotune import _Prompts, _supported
from hf_depthroute.parts.memory import MISSING, NgramMemory, suffixes
from hf_depthroute.routing.routing import Routing
from hf_depthroute.routing.stack import state_of
from hf_depthroute.routing.trace import RouteTrace
from hf_depthroute.vllm.limits import check_adapter

SMALL: dict[str, Any] = {"branch": "memory", "memory_slots": 8192, "memory_width": 4}
TARGETS = ("ffn", "attention", "block")


def branch_model(family: str = "llama", **fields: Any) -> PeftModel:
    """A model with random slots and branches in layers 1 to 3."""
    return build_routed(family, **SMALL | fields)


def config(**fields: Any) -> DepthRouteConfig:
    return DepthRouteConfig(**SMALL | fields)


def routing_of(model: PeftModel, index: int) -> Routing:
    routing: Routing = decoder_layers(model)[index].routing
    return routing


def nobody(model: PeftModel, ids: torch.Tensor) -> RouteTrace:
    """What makes `replay_routes` skip every token."""
    with torch.no_grad(), record_routes(model) as trace:
        model(ids)
    return RouteTrace(
        {index: replace(r, mask=torch.zeros_like(r.mask)) for index, r in trace.items()}
    )


# --- hashes ---------------------------------------------------------------------------------------

GOLDEN = [
    [17847, 51104, 86715, 162074, 195963, 212845, 282498, 309143, 373229, 380598, 426956, 470890],
    [17847, 51104, 86715, 162074, 195963, 212845, 282498, 309143, 344260, 379633, 434612, 475793],
    [17847, 51104, 86715, 162074, 182944, 214778, 253500, 297616, 338503, 396134, 421247, 482049],
]


def test_slots_are_what_they_have_always_been() -> None:
    ngrams = torch.tensor([[5, 3, 2], [5, 3, MISSING], [5, MISSING, MISSING]])
    found = NgramMemory(8, DepthRouteConfig(branch="memory"), 2).slots(ngrams)
    assert found.tolist() == GOLDEN


@pytest.mark.parametrize("order", [1, 2, 5])
def test_a_hash_reads_its_own_order_alone_and_the_shortest_is_one(order: int) -> None:
    memory = NgramMemory(8, config(ngram_order=order, memory_slots=1 << 14), 2)
    ngrams = torch.arange(5, 5 + order)
    slots = memory.slots(ngrams).view(order, 4)
    share = (1 << 14) // (4 * order)
    assert bool(
        (slots.flatten().div(share, rounding_mode="floor") == torch.arange(4 * order)).all()
    )
    for place in range(order):
        other = ngrams.clone()
        other[place] = 60
        same = memory.slots(other).view(order, 4) == slots
        assert same[:place].all() and not same[place:].any()


def test_products_are_those_of_plain_integers() -> None:
    memory, grams = NgramMemory(8, config(), 1), [[7, 9, 60], [7, 9, MISSING]]
    expected = []
    for gram in grams:
        expected.append([])
        for s in range(12):
            mixed = 0
            for place in range(s // 4 + 1):
                mixed ^= (gram[place] + 1) * memory._multipliers[place][s]
            expected[-1].append(mixed % memory._primes[s] + 8192 // 12 * s)
    assert memory.slots(torch.tensor(grams)).tolist() == expected


# --- what the layer computes ----------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("order", [1, 3])
def test_a_skipped_token_gets_what_the_formula_says(target: str, order: int) -> None:
    model, ids = branch_model(layers=[1], target=target, ngram_order=order), tokens(2, 6)
    layer, routing = decoder_layers(model)[1], routing_of(model, 1)
    trace = nobody(model, ids)
    for executor in ("gathered", "rows", "masked"):
        seen: dict[str, torch.Tensor] = {}
        hooks = [
            layer.register_forward_pre_hook(lambda m, args, s=seen: s.update(h=args[0].clone())),
            layer.register_forward_hook(lambda m, args, out, s=seen: s.update(out=out)),
        ]
        if target != "block":  # what stands in front of the FFN, or behind the attention
            norm = layer.post_attention_layernorm
            hooks.append(
                norm.register_forward_pre_hook(lambda m, args, s=seen: s.update(a=args[0].clone()))
            )
            attention = layer.self_attn
            hooks.append(
                attention.register_forward_hook(lambda m, a, out, s=seen: s.update(attended=out[0]))
            )
        with (
            torch.no_grad(),
            replay_routes(model, trace),
            state_of(model).override(executor=executor),
        ):
            model(ids)
        for hook in hooks:
            hook.remove()
        branch, memory = (
            routing.depth_route_branch["default"],
            routing.depth_route_memory["default"],
        )
        with torch.no_grad():
            stream = seen["h"] + seen["attended"] if target == "ffn" else seen["h"]
            variance = stream.square().mean(-1, keepdim=True)
            x = (
                stream
                * (variance + layer.input_layernorm.variance_epsilon).rsqrt()
                * branch.norm.weight
            )
            low_rank = F.silu(x @ branch.up.weight.T) @ branch.down.weight.T
            grams = torch.tensor(
                [naive_suffixes(row, order, [True] * 6, [False] * 6) for row in ids.tolist()]
            )
            recalled = memory.table[memory.slots(grams)].flatten(-2) @ memory.value.weight.T
            after = stream + low_rank + recalled
            if target == "attention":
                after = after + layer.mlp(layer.post_attention_layernorm(after))
        assert float(recalled.abs().mean()) > 0.05
        assert gap(seen["out"], after) < 1e-5, executor


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "gemma2", "olmoe"])
def test_every_way_to_run_it_gives_the_same(family: str, target: str) -> None:
    model, ids = branch_model(family, target=target, layers=[1, 2]), tokens(3, 12)
    with record_routes(model) as trace:
        expected = logits(model)
    assert all(0 < float(record.mask.float().mean()) < 1 for record in trace.values())
    for executor in ("gathered", "rows", "masked"):
        with state_of(model).override(executor=executor), torch.no_grad():
            assert gap(model(ids).logits, expected) < 1e-5, executor
    for routing in (routing_of(model, 1), routing_of(model, 2)):
        routing.depth_route_memory["default"].table.data.zero_()
    with torch.no_grad(), replay_routes(model, trace):
        assert gap(model(ids).logits, expected) > 1e-3


def test_rows_are_looked_up_for_skipped_tokens_only() -> None:
    model, ids = branch_model(layers=[1]), tokens(3, 12)
    looked_up: list[torch.Tensor] = []
    memory = routing_of(model, 1).depth_route_memory["default"]
    slots = memory.slots
    memory.slots = lambda ngrams: looked_up.append(ngrams) or slots(ngrams)
    with torch.no_grad(), record_routes(model) as trace:
        model(ids)
    mask = trace[1].mask
    assert torch.equal(looked_up[0], suffixes(ids, 3)[~mask])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon"])
def test_a_full_budget_is_the_base_bit_for_bit(family: str, target: str) -> None:
    base, ids = build_base(family), tokens(3, 12)
    with torch.no_grad():
        expected = base(ids).logits
        model = routed(base, **SMALL, target=target, layers=[0, 2])
        set_budget(model, 1.0)
        assert torch.equal(model(ids).logits, expected)
        with record_routes(model):
            assert torch.equal(model(ids).logits, expected)
        set_budget(model, 0.5)
        assert not torch.equal(model(ids).logits, expected)
        with model.disable_adapter():
            assert torch.equal(model(ids).logits, expected)
        assert torch.equal(model.unload()(ids).logits, expected)


def test_a_fresh_memory_adds_nothing() -> None:
    ids = tokens(3, 12)
    one, two = (
        get_depth_routed_model(
            build_base("llama"), DepthRouteConfig(gate="none", layers=[1, 2], **fields)
        ).eval()
        for fields in ({}, SMALL)
    )
    with torch.no_grad():
        assert torch.equal(one(ids).logits, two(ids).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_finite(dtype: torch.dtype) -> None:
    model = routed(build_base("llama", dtype=dtype), **SMALL)
    for training in (False, True):
        with torch.no_grad():
            out = model.train(training)(tokens(3, 12)).logits
        assert out.dtype == dtype and bool(out.isfinite().all())


# --- the same numbers, however the input is cut ---------------------------------------------------


@pytest.mark.parametrize("name", CONTINUATIONS)
@pytest.mark.parametrize(
    ("family", "target"),
    [("llama", "ffn"), ("llama", "attention"), ("llama", "block"), ("gpt2", "ffn")],
)
def test_a_cached_continuation_is_the_prefill(family: str, target: str, name: str) -> None:
    model, ids = branch_model(family, target=target), tokens(3, LENGTH)
    whole, trace = run(model, input_ids=ids, use_cache=False)
    pinned, _ = continued_run(model, ids, name, pinned=trace)
    assert_pinned(gap(pinned, whole), base_gap(model, ids, name))
    assert_free(model, trace, continued_run(model, ids, name)[1])


@pytest.mark.parametrize("order", [1, 5])
@pytest.mark.parametrize(
    "name", ["dynamic cache, token by token", "static cache, token by token", "crop"]
)
def test_the_shortest_and_the_longest_order_continue_too(order: int, name: str) -> None:
    model, ids = branch_model(ngram_order=order, memory_slots=1 << 14), tokens(3, LENGTH)
    whole, trace = run(model, input_ids=ids, use_cache=False)
    assert gap(continued_run(model, ids, name, pinned=trace)[0], whole) < 1e-5


def test_later_tokens_change_nothing_earlier() -> None:
    model, ids = branch_model(), tokens(3, LENGTH)
    changed = torch.cat([ids[:, :7], tokens(3, LENGTH - 7, seed=5)], dim=1)
    (one, first), (two, second) = run(model, input_ids=ids), run(model, input_ids=changed)
    assert gap(one[:, :7], two[:, :7]) < 1e-5
    assert_free(model, first.positions(0, 7), second.positions(0, 7))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("target", TARGETS)
def test_padding_changes_nothing(target: str, side: str) -> None:
    model, ids = branch_model(target=target), tokens(3, LENGTH)
    pad = (4, 0) if side == "left" else (0, 4)
    padded, mask = F.pad(ids, pad, value=7), F.pad(torch.ones_like(ids), pad)
    columns = torch.arange(pad[0], pad[0] + LENGTH).expand(3, -1)
    expected, trace = run(model, input_ids=ids)
    found, _ = run(model, spread(trace, columns, LENGTH + 4), input_ids=padded, attention_mask=mask)
    assert gap(found[:, pad[0] : pad[0] + LENGTH], expected) < 1e-5
    assert_free(model, trace, narrow(run(model, input_ids=padded, attention_mask=mask)[1], columns))


def test_packed_documents_are_separate_ones() -> None:
    model, ids = branch_model(), tokens(1, LENGTH)
    first, second = (run(model, input_ids=part) for part in ids.split([5, LENGTH - 5], dim=1))
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None]
    pinned = RouteTrace.cat([first[1], second[1]])
    packed, _ = run(model, pinned, input_ids=ids, position_ids=positions, use_cache=False)
    assert gap(packed, torch.cat([first[0], second[0]], dim=1)) < 1e-5


def test_compiled_passes_are_eager_ones_without_a_break() -> None:
    model, ids = branch_model(), tokens(2, 8)
    torch.compiler.reset()
    compiled: Any = torch.compile(model.get_base_model(), backend="eager", fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=8)
    with torch.no_grad():
        expected = model(ids).logits
        assert gap(compiled(ids, use_cache=False).logits, expected) < 1e-5
        model(ids[:, :4], past_key_values=cache)
        for position in range(4, 8):
            out = compiled(ids[:, position : position + 1], past_key_values=cache).logits
            assert gap(out[:, 0], expected[:, position]) < 1e-5
    torch.compiler.reset()


@pytest.mark.parametrize("options", GENERATIONS.values(), ids=GENERATIONS)
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "left-padded"])
@pytest.mark.parametrize("target", ["ffn", "block"])
def test_generation_with_a_cache_is_generation_without(
    target: str, padded: bool, options: dict[str, Any]
) -> None:
    model, ids = branch_model(layers=[0, 2], target=target), tokens(2, 6)
    mask = torch.ones_like(ids)
    if padded:
        ids[0, :3], mask[0, :3] = 0, 0
    lengths = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "attention_mask": mask}
    beams = {"num_beams": options.get("num_beams", 1)}
    expected = model.generate(input_ids=ids, use_cache=False, **lengths, **beams)
    assert torch.equal(model.generate(input_ids=ids, **lengths, **options), expected)


def test_the_tokens_in_front_of_a_step_matter() -> None:
    model, ids = branch_model(), tokens(1, 8)
    trace = nobody(model, ids)
    with torch.no_grad(), replay_routes(model, trace):
        expected = model(ids).logits[:, -1:]
    with torch.no_grad(), replay_routes(model, trace.positions(0, 7)):
        cache = model(ids[:, :-1], use_cache=True).past_key_values
    for layer in cache.layers[1:]:
        layer.tokens = torch.full_like(layer.tokens, MISSING)
    with torch.no_grad(), replay_routes(model, trace.positions(7, 8)):
        assert gap(model(ids[:, -1:], past_key_values=cache).logits, expected) > 1e-3


@pytest.mark.parametrize("full", ["budget", "executor", "phases"])
def test_tokens_of_calls_that_run_full_are_known_later(full: str) -> None:
    """A chat with `phases="prefill"`: what was generated stands in front of the next prompt."""
    model, ids = branch_model(phases="prefill" if full == "phases" else "all"), tokens(1, 9)
    pieces = ids.split([4, 1, 1, 3], dim=1)
    with torch.no_grad():
        cache = model(pieces[0], use_cache=True).past_key_values
        for piece in pieces[1:3]:
            set_budget(model, 1.0 if full == "budget" else 0.5)
            with state_of(model).override(executor="full" if full == "executor" else "auto"):
                model(piece, past_key_values=cache)
        set_budget(model, 0.5)
        for layer in cache.layers[1:]:
            assert torch.equal(layer.tokens[:, -3:, 0], ids[:, 3:6])
        model(pieces[3], past_key_values=cache)
        for layer in cache.layers[1:]:
            assert torch.equal(layer.tokens, suffixes(ids, 3)[..., :-1])


def test_a_cache_that_ran_without_the_memory_is_refused() -> None:
    model, ids = branch_model(), tokens(1, 8)
    # All of it, and the end of it.
    for first, static in ((0, False), (4, False), (0, True), (4, True)):
        cache: Any = DynamicCache(config=model.config)
        if static:
            cache = StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            if first:
                model(ids[:, :first], past_key_values=cache)
            with model.disable_adapter():
                model(ids[:, first:], past_key_values=cache)
            with pytest.raises(
                ValueError, match=r"filled without the adapter's memory.*start a new cache"
            ):
                model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("gradients", [False, True])
def test_runs_under_autocast(target: str, gradients: bool) -> None:
    model, ids = branch_model(target=target), tokens(3, LENGTH)
    plain, trace = run(model, input_ids=ids, use_cache=False)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    with torch.set_grad_enabled(gradients), replay_routes(model, trace), autocast:
        mixed = model(ids, use_cache=False).logits
    assert gap(mixed, plain) < 0.1 * float(plain.std())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("phases", ["all", "prefill"])
def test_static_dropping_sends_every_token_through_the_cheap_path(target: str, phases: str) -> None:
    model, ids = branch_model(gate="none", target=target, phases=phases), tokens(3, LENGTH)
    whole, trace = run(model, input_ids=ids, use_cache=False)
    for record in trace.values():
        assert not record.mask[:, :-1].any() and bool(record.mask[:, -1].all()) is (
            phases == "prefill"
        )
    if phases == "prefill":
        return
    with state_of(model).override(executor="masked"), torch.no_grad():
        assert gap(model(ids).logits, whole) < 1e-5
    for name in CONTINUATIONS:
        assert gap(continued_run(model, ids, name)[0], whole) < 1e-5, name
    with torch.no_grad():
        caches = [
            model(ids, use_cache=True).past_key_values,
            model.get_base_model()(ids).past_key_values,
        ]
        with model.disable_adapter():
            dense = model(ids, use_cache=True).past_key_values
    share = 1 if target == "ffn" else 0.25
    # Layers that are dropped write none.
    assert kv_cache_bytes(caches[0]) == share * kv_cache_bytes(dense)


def test_a_prompt_is_routed_and_what_is_generated_is_not() -> None:
    model, ids = branch_model(phases="prefill"), tokens(2, 6)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    found = model.generate(input_ids=ids, **options)
    static = model.generate(
        input_ids=ids, cache_implementation="static", disable_compile=True, **options
    )
    assert torch.equal(found, static)
    with torch.no_grad():  # by hand: a prompt by the router, and every step by the base's layers
        out = model(ids, use_cache=True)
        with model.disable_adapter():
            for position in range(6, 11):
                out = model(found[:, position : position + 1], past_key_values=out.past_key_values)
                assert torch.equal(out.logits[:, -1].argmax(-1), found[:, position + 1])


def test_drafts_are_taken_back() -> None:
    model, ids = branch_model(layers=[0, 2]), tokens(1, 5)
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    expected = model.generate(input_ids=ids, **options)
    found = model.generate(input_ids=ids, assistant_model=build_base("llama", seed=3), **options)
    assert torch.equal(found, expected)  # the routed model looks at what another one drafted
    with model.disable_adapter():
        dense = model.generate(input_ids=ids, **options)
    for drop in ((), (1,)):
        draft = draft_view(model, budget=0.5, drop=drop)
        assert torch.equal(lossless_generate(model, input_ids=ids, draft=draft, **options), dense)


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_every_trainable_parameter_gets_a_gradient_and_the_base_gets_none(target: str) -> None:
    model = branch_model(target=target).train()
    backward(model, stacked(rows(4, padding=(0, 3))))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad is (".routing." in name), name
        assert (
            parameter.grad is not None and bool((parameter.grad != 0).any())
        ) is parameter.requires_grad, name


@pytest.mark.parametrize("executor", ["gathered", "masked"])
@pytest.mark.parametrize("target", TARGETS)
def test_gradients_of_inference_reach_table_and_input(target: str, executor: str) -> None:
    """As attribution and the fit of a branch need them: sparse execution, with a graph."""
    found = []
    for chosen in (executor, "rows"):
        model = branch_model(target=target, layers=[1, 2])
        embeddings = model.get_input_embeddings().weight.requires_grad_(True)
        for index in (1, 2):  # what was computed densely has a gradient for its gate too
            routing_of(model, index).depth_route_gate["default"].requires_grad_(False)
        with state_of(model).override(executor=chosen):
            model(tokens(2, 8)).logits.square().mean().backward()
        memory = routing_of(model, 1).depth_route_memory["default"]
        found.append((memory.table.grad, memory.value.weight.grad, embeddings.grad))
        assert all(float(grad.abs().max()) > 0 for grad in found[-1])
    assert all(gap(one, two) < 1e-5 for one, two in zip(*found))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_gradient(reentrant: bool) -> None:
    batch, found = stacked(rows(3, padding=(0, 3))), []
    for checkpointed in (False, True):
        model = branch_model().train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        backward(model, batch)
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    assert all(gap(found[0][name], found[1][name]) == 0 for name in found[0])


@pytest.mark.parametrize("train_gates", [True, False])
def test_a_trainer_moves_the_table(tmp_path: Path, train_gates: bool) -> None:
    model = get_depth_routed_model(build_base("llama"), config(layers=[1, 2]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fields: dict[str, Any] = {"train_gates": train_gates, "util_weight": 0.5, "warmup_steps": 0}
    trainer, _ = make_trainer(model, rows(2) * 20, tmp_path, DepthRouteTrainer, **fields)
    trainer.train()
    assert step_logs(trainer)[-1]["loss_lm"] < 0.95 * step_logs(trainer)[0]["loss_lm"]
    moved = {
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }
    assert {
        name for name in before if "depth_route_memory" in name or "depth_route_branch" in name
    } <= moved
    assert any("depth_route_gate" in name for name in moved) is train_gates
    assert not [name for name in moved if ".routing." not in name]


@pytest.mark.parametrize("kind", ["on_policy", "all_full"])
@pytest.mark.parametrize(("family", "batch"), [("llama", 2), ("llama", 1), ("falcon", 2)])
def test_labels_equal_passes_with_forced_decisions(family: str, batch: int, kind: str) -> None:
    """What a decision is worth: the loss of the cheap path, memory included,
    minus that of the full path."""
    layers, ids = [0, 1, 2], tokens(batch, 8)
    model = branch_model(family, layers=layers)
    with torch.no_grad(), record_routes(model) as trace:
        model(ids)

    @torch.no_grad()
    def loss(index: int, runs: bool) -> torch.Tensor:
        masks = {
            i: torch.ones_like(r.mask) if kind == "all_full" else r.mask for i, r in trace.items()
        }
        masks[index] = torch.full_like(masks[index], runs)
        with replay_routes(
            model, RouteTrace({i: replace(r, mask=masks[i]) for i, r in trace.items()})
        ):
            out = model(ids, use_cache=False).logits
        return F.cross_entropy(
            out[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        ).view(batch, -1)

    last = utility_labels(model, {"input_ids": ids}, kind, window=1)[2].utility[:, :-1]
    expected = loss(2, False) - loss(2, True)
    assert gap(last, expected) < 1e-4 and float(expected.abs().max()) > 1e-3


# --- files ----------------------------------------------------------------------------------------


def test_save_and_load_give_the_same_model_and_bytes(tmp_path: Path) -> None:
    model = branch_model(seed=3)
    model.save_pretrained(tmp_path / "one")
    loaded = PeftModel.from_pretrained(build_base("llama"), tmp_path / "one").eval()
    assert torch.equal(logits(loaded), logits(model))
    assert_same_tensors(adapter_state(loaded), adapter_state(model))
    loaded.save_pretrained(tmp_path / "two")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    saved = json.loads((tmp_path / "one/adapter_config.json").read_text())
    expected = {**SMALL, "target": "ffn", "memory_heads": 4, "ngram_order": 3, "seed": 3}
    assert {name: saved[name] for name in expected} == expected


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    branch_model(layers=[1, 2]).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "more slots than the file has": (
        {"memory_slots": 16384},
        "has shape .8192, 4., the config says .16384, 4.",
    ),
    "another order": ({"ngram_order": 2}, "has shape"),
    "no order": ({"ngram_order": 0}, "ngram_order=0 must be an integer from 1 to 5"),
    "an order as text": ({"ngram_order": "3"}, "ngram_order='3' must be an integer from 1 to 5"),
    "too many orders": ({"ngram_order": 6}, "ngram_order=6 must be an integer from 1 to 5"),
    "slots beyond any table": (
        {"memory_slots": 1 << 27},
        "memory_slots=134217728 must be an integer from 512 to",
    ),
    "slots beyond all memory": (
        {"memory_slots": 1 << 26, "memory_width": 32},
        "config says .67108864, 32.",
    ),
    "too few slots for the hashes": (
        {"memory_slots": 6143},
        "memory_slots=6143 must be at least 6144, 512 for each",
    ),
    "a branch alone": (
        {"branch": "lowrank"},
        "memory_slots=8192 goes with target='memory' or branch='memory'",
    ),
    "a list of branches": (
        {"branch": ["memory"]},
        "branch=.*memory.* is not supported; use one of",
    ),
    "target memory": ({"target": "memory"}, "with target='memory' it is always"),
    "experts": (
        {"target": "experts"},
        "branch='memory' looks up what ends at a token; it is not supported with",
    ),
    "sequences": (
        {"granularity": "sequence"},
        "branch='memory' looks up what ends at a token; it is not supported",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_configurations_are_refused_before_anything_is_allocated(
    adapter: Path, case: str
) -> None:
    fields, said = HOSTILE[case]
    change(adapter, **fields)
    base = build_base("llama")
    with pytest.raises((ConfigError, AdapterMismatchError), match=said) as refused:
        PeftModel.from_pretrained(base, adapter)
    assert "\n" not in str(refused.value)
    assert not [module for module in base.modules() if isinstance(module, Routing)]
    assert any(finding.state == "fault" for finding in examine(adapter))


@pytest.mark.parametrize("part", ["memory.table", "memory.value.weight", "branch.up.weight"])
def test_a_file_without_a_part_is_refused(adapter: Path, part: str) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    for layer in (1, 2):
        del tensors[f"base_model.model.model.layers.{layer}.routing.depth_route_{part}"]
    save_file(tensors, path)
    change(adapter, weights_hash=None)
    with pytest.raises(AdapterMismatchError, match="missing"):
        PeftModel.from_pretrained(build_base("llama"), adapter)
    if part != "branch.up.weight":
        said = [finding.text for finding in examine(adapter) if finding.state == "fault"]
        assert any(part in text for text in said), said


def test_a_table_of_another_branch_is_refused(adapter: Path) -> None:
    """A low-rank adapter whose file holds tables too: they are not even read."""
    path = adapter / "adapter_config.json"
    kept = json.loads(path.read_text()) | {"branch": "lowrank", "weights_hash": None}
    path.write_text(
        json.dumps({n: v for n, v in kept.items() if "memory" not in n and n != "ngram_order"})
    )
    with pytest.raises(AdapterMismatchError, match=r"table has shape \[8192, 4\], the config says"):
        PeftModel.from_pretrained(build_base("llama"), adapter)


def test_tables_that_are_too_large_are_refused_before_they_are_made() -> None:
    for fields, said in (
        (
            {"memory_width": 22},
            (
                "memory_width=22: 12 hashes look up 264 numbers for a token; on this model at most "
                "256$"
            ),
        ),
        (
            {"memory_slots": 1 << 26, "memory_width": 8},
            "memory_slots=67108864: 1,610,612,736 numbers in 3 layers; at",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            get_depth_routed_model(build_base("llama"), config(layers=[1, 2, 3], **fields))


def test_doctor_summary_and_card_say_what_it_is(adapter: Path) -> None:
    findings = list(examine(adapter))
    assert not [finding for finding in findings if finding.state == "fault"]
    said = "memory: slots that training has reached: layer 1 100.0%, layer 2 100.0%"
    assert said in [finding.text for finding in findings]
    model = PeftModel.from_pretrained(build_base("llama"), adapter)
    assert "branch memory, 8,192 slots of 4, 4 heads, 1- to 3-grams" in repr(model)
    card = make_card(adapter).text
    for line in (
        (
            "What is skipped is replaced by a low-rank branch and by what a table holds for the "
            "last token ids."
        ),
        "| branch | `memory`, rank 4 |",
        "| n-grams | 4 hashes of every order, 1 to 3 |",
        "8,192 slots of 4",
    ):
        assert line in card, line


# --- what does not go together, and what it costs -------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"target": "experts"},
        {"target": "memory"},
        {"granularity": "sequence"},
        {"ngram_order": 0},
        {"memory_heads": 0},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused_in_one_line(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        DepthRouteConfig(branch="memory", **fields)
    assert "\n" not in str(refused.value)
    assert str(next(iter(fields.values()))) in str(refused.value)


def test_what_cannot_work_says_so_in_one_line() -> None:
    model = branch_model()
    with pytest.raises(
        ConfigError,
        match=r"^the adapter's memory looks .*inputs_embeds holds none; pass input_ids$",
    ):
        model(inputs_embeds=torch.zeros(1, 3, WIDTH))
    with pytest.raises(
        ConfigError, match=r"^the adapter's memory does not know .* in continuous batching"
    ):
        token_ids_of(tokens(1, 4), {"cache": object()})
    with pytest.raises(
        ConfigError, match=r"^branch='memory' is not served by vLLM: .*token ids.*"
    ) as refused:
        check_adapter(config())
    assert "\n" not in str(refused.value)
    with pytest.raises(
        ValueError,
        match=r"^slot_use: target='ffn' has no table of slots, nor has branch='lowrank'$",
    ):
        slot_use(build_routed("llama"), [{"input_ids": tokens(2, 8)}])


def test_every_executor_that_runs_it_can_be_timed() -> None:
    model = branch_model(layers=[2])
    assert set(_supported(_Prompts(model, tokens(2, 8), None))) == {"gathered", "masked"}


def test_cost_counts_what_skipping_tokens_pay() -> None:
    plain, model = build_routed("llama", layers=[1, 2]), branch_model(layers=[1, 2])
    for budget in (0.25, 1.0):
        sizes: dict[str, Any] = {"batch_size": 2, "length": 5, "budget": budget}
        one, two = route_cost(plain, **sizes), route_cost(model, **sizes)
        product = 12 * 4 * WIDTH  # of W_V
        assert two.flops_routed - one.flops_routed == pytest.approx(
            2 * 2 * 10 * (1 - budget) * product
        )
        assert two.flops_ideal == one.flops_ideal and two.flops_dense == one.flops_dense
        ffn = 3 * WIDTH * 64
        assert two.ffn_ratio - one.ffn_ratio == pytest.approx((1 - budget) * product / ffn)
    assert two.parameters_adapter - one.parameters_adapter == 2 * (8192 * 4 + product)


def test_a_memory_that_costs_more_than_it_replaces_is_said() -> None:
    remark = route_cost(branch_model(gate="linear", memory_width=21)).remark
    assert (
        remark is not None and "make branch_rank (now 4), memory_width (now 21) smaller" in remark
    )


def test_calibration_and_the_choice_of_executors_take_it() -> None:
    model, batches = branch_model(layers=[1, 2]), [{"input_ids": tokens(4, 12)}]
    calibrate_budgets(model, batches)
    set_budget(model, 0.25)
    with record_routes(model) as trace, torch.no_grad():
        model(**batches[0])
    assert all(abs(float(record.mask.float().mean()) - 0.25) < 0.05 for record in trace.values())
    assert list(calibrate(model, batches)) == [1, 2]
    chosen = tune_execution(model, tokens(2, 8), steps=1, repeats=1, keep_decisions=True)
    assert {choice.executor for choice in chosen} <= {"gathered", "masked"}


def test_occupancy_is_counted_from_the_shortest_order_on() -> None:
    model, ids = branch_model(layers=[2]), tokens(3, 12)
    grams = {tuple(row) for row in suffixes(ids, 3).clamp(min=MISSING).flatten(0, 1).tolist()}
    use = slot_use(model, [{"input_ids": ids}])[2]
    assert use.lookups == 4 * sum(len({gram[:order] for gram in grams}) for order in (1, 2, 3))
    memory = routing_of(model, 2).depth_route_memory["default"]
    assert use.hit == len(memory.slots(suffixes(ids, 3)).unique())
