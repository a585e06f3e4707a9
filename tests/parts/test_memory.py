"""Conditional memory: hashes that never change, n-grams that end where a document begins,
and a gate that is forced."""

from __future__ import annotations

import copy
import json
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from continuations import CONTINUATIONS, LENGTH, Run, run
from continuations import continued as continued_run
from engram.slots import slot_use
from hypothesis import given
from hypothesis import strategies as st
from memories import GENERATIONS, change, naive_suffixes
from models import (
    DEVICE,
    FAMILY_NAMES,
    KINDS,
    WIDTH,
    build_base,
    build_routed,
    decoder_layers,
    logits,
    routed,
    tokens,
)
from moe.routers import ROWS
from peft import PeftModel
from protocol import gap
from safetensors.torch import load_file, save_file
from study.metrics import oracle_auc
from study.run import unfreeze
from study.utility import exact_utility, utility_labels
from torch import nn
from training import backward, gradients, make_trainer, rows, stacked, step_logs
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, StaticCache

from hf_depthroute import (
    DepthRouteConfig,
    DepthRouteTrainer,
    calibrate,
    calibrate_budgets,
    draft_view,
    fit_router,
    get_depth_routed_model,
    record_routes,
    replay_routes,
    route_cost,
    set_budget,
    set_phases,
    tune_execution,
)
from hf_depthroute.adapter.call_tokens import token_ids_of
from hf_depthroute.adapter.doctor import examine
from hf_depthroute.adapter.files import AdapterMismatchError
from hf_depthroute.card import make_card
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.execution import context
from hf_depthroute.inference.calibration import use_selection
from hf_depthroute.inference.fitting import fit_branches
from hf_depthroute.parts.memory import MISSING, NgramMemory, continued, suffixes
from hf_depthroute.routing.routing import Routing
from hf_depthroute.routing.stack import routings_of, state_of
from hf_depthroute.routing.trace import RouteRecord, RouteTrace
from hf_depthroute.training.losses import LOSSES
from hf_depthroute.vllm.limits import check_adapter

LAYERS = (1, 2, 3)
SMALL: dict[str, Any] = KINDS["memory"]


def memory_model(family: str = "llama", **fields: Any) -> PeftModel:
    """A model with random slots in layers 1 to 3."""
    return build_routed(family, "memory", **fields)


def config(**fields: Any) -> DepthRouteConfig:
    return DepthRouteConfig(**SMALL | fields)


def forced(alphas: dict[int, float], shape: tuple[int, int]) -> RouteTrace:
    """What makes `replay_routes` use these gates."""
    zeros = torch.zeros(shape)
    return RouteTrace(
        {
            i: RouteRecord(zeros.bool(), zeros, zeros + alpha, None, 1.0)
            for i, alpha in alphas.items()
        }
    )


# --- n-grams and hashes ---------------------------------------------------------------------------


GOLDEN = {
    "default": [
        [3232, 90018, 184350, 247516, 263295, 357620, 416438, 467792],
        [3232, 90018, 184350, 247516, 268991, 327241, 384658, 486895],
        [61477, 76029, 177775, 197621, 290750, 320452, 436832, 473881],
        [33480, 76837, 176304, 232521, 292348, 348917, 424489, 465292],
        [55115, 113159, 127735, 219118, 271780, 317784, 431258, 475275],
    ],
    "other": [
        [148, 1733, 2893],
        [148, 1334, 2249],
        [692, 1665, 2972],
        [56, 1432, 2909],
        [605, 1885, 2245],
    ],
}


def test_slots_are_what_they_have_always_been() -> None:
    """An adapter's slots mean something only under the hashes that it was trained with."""
    ngrams = torch.tensor(
        [[5, 3, 2], [5, 3, MISSING], [5, MISSING, MISSING], [0, 0, 0], [2**31 - 1, 151_664, 7]]
    )
    default = DepthRouteConfig(target="memory")
    assert NgramMemory(8, default, 2).slots(ngrams).tolist() == GOLDEN["default"]
    other = DepthRouteConfig(
        target="memory", seed=7, ngram_order=4, memory_heads=1, memory_slots=3000, memory_width=2
    )
    assert (
        NgramMemory(8, other, 5).slots(F.pad(ngrams, (0, 1), value=9)).tolist() == GOLDEN["other"]
    )


def test_hashes_differ_by_seed_layer_order_and_head_and_stay_in_their_part_of_the_table() -> None:
    ngrams = torch.cat(
        [tokens(50, 3), torch.randint(2**31, (500, 3), generator=torch.Generator().manual_seed(0))]
    )
    memory = NgramMemory(8, config(), 2)
    slots = memory.slots(ngrams)
    assert slots.shape == (550, 8)
    share = 4096 // 8
    assert bool((slots.div(share, rounding_mode="floor") == torch.arange(8)).all())
    within = slots % share
    assert len({tuple(column) for column in within.T.tolist()}) == 8
    assert all(
        int(column.bincount(minlength=share).count_nonzero()) > 0.5 * share
        for column in within[50:].T
    )
    for changed in (NgramMemory(8, config(), 3), NgramMemory(8, config(seed=1), 2)):
        assert float((changed.slots(ngrams) == slots).float().mean()) < 0.05


def test_a_hash_reads_its_own_order_alone() -> None:
    memory = NgramMemory(8, config(), 2)
    slots, changed = (memory.slots(torch.tensor([7, 8, third])) for third in (9, 10))
    assert torch.equal(slots[:4], changed[:4])  # 2-grams
    assert not bool((slots[4:] == changed[4:]).any())


def test_products_of_any_id_stay_inside_int64() -> None:
    memory = NgramMemory(8, config(), 2)
    assert all(0 < m < 2**31 and m % 2 for row in memory._multipliers for m in row if m)
    assert memory._multipliers[2][:4] == [0] * 4
    largest = 2**31 - 1
    exact = [
        ((largest + 1) * memory._multipliers[0][s] ^ (largest + 1) * memory._multipliers[1][s])
        % memory._primes[s]
        for s in range(4)
    ]
    assert memory.slots(torch.full((3,), largest)).tolist()[:4] == [
        e + 512 * s for s, e in enumerate(exact)
    ]


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 50), st.booleans(), st.booleans()), min_size=1, max_size=9
    ),
    order=st.integers(2, 5),
)
def test_suffixes_equal_a_loop(rows: list[tuple[int, bool, bool]], order: int) -> None:
    ids, real, starts = (list(part) for part in zip(*rows))
    starts[0] = False
    found = suffixes(torch.tensor([ids]), order, torch.tensor([real]), torch.tensor([starts]))
    assert found[0].tolist() == naive_suffixes(ids, order, real, starts)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(2, 5))
def test_pieces_of_a_sequence_have_the_suffixes_of_the_whole(
    lengths: list[int], order: int
) -> None:
    ids = tokens(2, sum(lengths))
    pieces: list[torch.Tensor] = []
    for piece in ids.split(lengths, dim=1):
        found = suffixes(piece, order)
        pieces.append(continued(found, pieces[-1][:, -1, :-1]) if pieces else found)
    assert torch.equal(torch.cat(pieces, dim=1), suffixes(ids, order))


# --- what the layer computes ----------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILY_NAMES, "gpt_neox", "falcon", "gemma2", "olmo2"])
def test_the_layer_is_given_what_the_formula_says(family: str) -> None:
    layers = [1, 2]
    model, ids = memory_model(family, layers=layers), tokens(2, 6)
    seen: dict[int, torch.Tensor] = {}
    read: dict[int, torch.Tensor] = {}
    for index in layers:
        layer = decoder_layers(model)[index]
        layer.register_forward_pre_hook(
            lambda m, args, kw, i=index: seen.update({i: args[0]}), with_kwargs=True
        )
        base = layer._base_forward
        layer.__dict__["_base_forward"] = lambda h, i=index, f=base, **kw: (
            read.update({i: h}) or f(h, **kw)
        )
    with torch.no_grad(), record_routes(model) as trace:
        model(ids)
    for routing in routings_of(model.requires_grad_(False)):
        index = routing.layer_index
        gate, memory = routing.depth_route_gate["default"], routing.depth_route_memory["default"]
        ngrams = torch.tensor(
            [naive_suffixes(row, 3, [True] * 6, [False] * 6) for row in ids.tolist()]
        )
        e = memory.table[memory.slots(ngrams)].flatten(-2)
        h, k, v = seen[index], e @ gate.key.weight.T, e @ memory.value.weight.T
        normed = [x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() for x in (h, k)]
        alpha = torch.sigmoid((normed[0] * normed[1]).sum(-1) / WIDTH**0.5)
        assert gap(trace[index].probs, alpha) < 1e-6
        assert gap(read[index], h + alpha[..., None] * v) < 1e-5
        assert float((alpha[..., None] * v).abs().max()) > 0.01


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", [*FAMILY_NAMES, "falcon", "cohere"])
def test_a_gate_that_is_forced_to_zero_leaves_the_base_bit_for_bit(
    family: str, training: bool
) -> None:
    base, ids = build_base(family), tokens(3, 12)
    with torch.no_grad():
        expected = base(ids).logits
        model = routed(base, "memory", layers=[0, 2]).train(training)
        assert not torch.equal(model(ids).logits, expected)
        with replay_routes(model, forced({0: 0.0, 2: 0.0}, (3, 12))):
            assert torch.equal(model(ids).logits, expected)
        with model.disable_adapter():
            assert torch.equal(model(ids).logits, expected)
        assert torch.equal(model.unload()(ids).logits, expected)


def test_a_fresh_memory_leaves_the_base_bit_for_bit() -> None:
    base = build_base("llama")
    expected = logits(base)
    assert torch.equal(logits(get_depth_routed_model(base, config(layers="all")).eval()), expected)


def test_an_ngram_that_training_never_met_adds_nothing() -> None:
    base, known, new = build_base("llama"), tokens(1, 8), tokens(1, 8, seed=9)
    with torch.no_grad():
        expected = base(new).logits
        model = get_depth_routed_model(base, config(memory_slots=1 << 20, layers=[1])).eval()
        memory = decoder_layers(model)[1].routing.depth_route_memory["default"]
        memory.table[memory.slots(suffixes(known, 3)).flatten()] = 1.0
        assert not torch.equal(model(known).logits, model.get_base_model()(new).logits)
        assert torch.equal(model(new).logits, expected)


def test_replayed_gates_are_those_of_the_trace() -> None:
    model = memory_model()
    with record_routes(model) as trace:
        expected = logits(model)
    halves = RouteTrace({i: replace(record, probs=record.probs / 2) for i, record in trace.items()})
    with replay_routes(model, trace):
        assert torch.equal(logits(model), expected)
    with replay_routes(model, halves):
        assert gap(logits(model), expected) > 1e-3


def test_rules_and_executors_that_skip_change_nothing() -> None:
    model = memory_model()
    expected = logits(model)
    for rule in ("topk", "threshold"):
        with use_selection(model, rule):
            assert torch.equal(logits(model), expected)
    for executor in ("rows", "gathered", "masked"):
        with state_of(model).override(executor=executor):
            assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_finite_with_float32_scores(dtype: torch.dtype) -> None:
    model = routed(build_base("llama", dtype=dtype), "memory")
    for training in (False, True):
        with torch.no_grad(), record_routes(model.train(training)) as trace:
            assert bool(model(tokens(3, 12)).logits.isfinite().all())
        assert all(record.scores.dtype == torch.float32 for record in trace.values())


# --- the same numbers, however the input is cut ---------------------------------------------------


def assert_same(found: Run, expected: Run) -> None:
    """Nothing is decided, so that nothing can flip: without replaying,
    gates and logits are the same."""
    assert gap(found[0], expected[0]) < 1e-5
    for index, record in expected[1].items():
        assert gap(found[1][index].probs, record.probs) < 1e-6


@pytest.mark.parametrize("name", CONTINUATIONS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "olmoe"])
def test_a_cached_continuation_is_the_prefill(family: str, name: str) -> None:
    model, ids = memory_model(family), tokens(3, LENGTH)
    assert_same(continued_run(model, ids, name), run(model, input_ids=ids, use_cache=False))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str) -> None:
    model, ids = memory_model(), tokens(3, LENGTH)
    pad = (4, 0) if side == "left" else (0, 4)
    padded, mask = F.pad(ids, pad, value=7), F.pad(torch.ones_like(ids), pad)
    (found, trace), columns = (
        run(model, input_ids=padded, attention_mask=mask),
        slice(pad[0], pad[0] + LENGTH),
    )
    expected = run(model, input_ids=ids)
    assert_same((found[:, columns], trace.positions(pad[0], pad[0] + LENGTH)), expected)
    # Every real token runs in full.
    assert all(torch.equal(record.mask, mask.bool()) for record in trace.values())


def test_packed_documents_are_separate_ones_and_later_tokens_change_nothing() -> None:
    model, ids = memory_model(), tokens(1, LENGTH)
    first, second = (run(model, input_ids=part) for part in ids.split([5, LENGTH - 5], dim=1))
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None]
    packed = run(model, input_ids=ids, position_ids=positions, use_cache=False)
    assert_same(
        packed, (torch.cat([first[0], second[0]], dim=1), RouteTrace.cat([first[1], second[1]]))
    )
    later = run(
        model,
        input_ids=ids,
        position_ids=positions + 7 * (torch.arange(LENGTH) > 4),
        use_cache=False,
    )
    assert_same(later, packed)  # a piece of a longer document has higher positions
    whole = run(model, input_ids=ids)
    # Its 2-gram would reach into the first document.
    assert gap(whole[0][:, 5], packed[0][:, 5]) > 1e-3
    assert_same((whole[0][:, :5], whole[1].positions(0, 5)), first)


def test_compiled_passes_are_eager_ones_without_a_break() -> None:
    model, ids = memory_model(), tokens(2, 8)
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


# --- generation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", GENERATIONS.values(), ids=GENERATIONS)
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "left-padded"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon"])
def test_generation_with_a_cache_is_generation_without(
    family: str, padded: bool, options: dict[str, Any]
) -> None:
    model, ids = memory_model(family, layers=[0, 2]), tokens(2, 6)
    mask = torch.ones_like(ids)
    if padded:
        ids[0, :3], mask[0, :3] = 0, 0
    lengths = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "attention_mask": mask}
    beams = {"num_beams": options.get("num_beams", 1)}
    expected = model.generate(input_ids=ids, use_cache=False, **lengths, **beams)
    assert torch.equal(model.generate(input_ids=ids, **lengths, **options), expected)


def test_the_tokens_in_front_of_a_step_matter() -> None:
    """What a memory without the cache's tokens would get wrong."""
    model, ids = memory_model(), tokens(1, 8)
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        for layer in cache.layers:
            if getattr(layer, "tokens", None) is not None:
                layer.tokens = torch.full_like(layer.tokens, MISSING)
        assert (
            gap(model(ids[:, -1:], past_key_values=cache).logits, model(ids).logits[:, -1:]) > 1e-3
        )


def test_a_copied_cache_goes_on_like_the_original() -> None:
    model, ids = memory_model(), tokens(2, 8)
    with torch.no_grad():
        cache = model(ids[:, :5], use_cache=True).past_key_values
        for each in (copy.deepcopy(cache), cache):
            assert (
                gap(model(ids[:, 5:], past_key_values=each).logits, model(ids).logits[:, 5:]) < 1e-5
            )


def test_a_pickled_cache_goes_on_like_the_original() -> None:
    model, ids = memory_model(), tokens(2, 8)
    with torch.no_grad():
        cache = pickle.loads(pickle.dumps(model(ids[:, :5], use_cache=True).past_key_values))
        assert gap(model(ids[:, 5:], past_key_values=cache).logits, model(ids).logits[:, 5:]) < 1e-5


@pytest.mark.parametrize("cuts", [(6,), (4, 5, 6), (3, 5, 6)])
@pytest.mark.parametrize("static", [False, True])
def test_what_follows_padding_goes_on_with_the_last_real_tokens(
    static: bool, cuts: tuple[int, ...]
) -> None:
    model, ids = memory_model(), tokens(2, 9)
    real = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    with torch.no_grad():
        cache = (
            StaticCache(config=model.config, max_cache_len=16)
            if static
            else DynamicCache(config=model.config)
        )
        for start, stop in pairwise((0, *cuts)):
            model(
                torch.where(real.bool(), ids[:, :6], 7)[:, start:stop],
                attention_mask=real[:, :stop],
                past_key_values=cache,
            )
        for _ in range(3):
            real = F.pad(real, (0, 1), value=1)
            place = real.sum(1, keepdim=True) - 1
            out = model(
                ids.gather(1, place), attention_mask=real, position_ids=place, past_key_values=cache
            ).logits
            for row, end in enumerate(place.flatten().tolist()):
                assert gap(out[row], model(ids[row : row + 1, : end + 1]).logits[0, -1:]) < 1e-5


def test_a_static_cache_holds_the_tokens_where_it_held_them() -> None:
    """A captured CUDA graph reads and writes the addresses of the moment of its capture."""
    model, ids = memory_model(layers=[1]), tokens(2, 8)
    cache = StaticCache(config=model.config, max_cache_len=8)
    with torch.no_grad():
        expected = model(ids).logits
        for _ in range(2):
            found = [
                model(part, past_key_values=cache).logits
                for part in (ids[:, :5], *ids[:, 5:].split(1, dim=1))
            ]
            assert gap(torch.cat(found, dim=1), expected) < 1e-5
            held = cache.layers[1].tokens
            assert torch.equal(held[:, 0], ids[:, -2:].flip(1))
            cache.reset()
            assert cache.layers[1].tokens is held and bool((held == MISSING).all())


def test_a_cropped_cache_goes_on_from_what_is_left() -> None:
    model, ids = memory_model(), tokens(1, 8)
    with torch.no_grad():
        expected = model(ids).logits[:, 4:]
        cache = model(
            torch.cat([ids[:, :4], tokens(1, 3, seed=9)], dim=1), use_cache=True
        ).past_key_values
        cache.crop(-3)
        assert gap(model(ids[:, 4:], past_key_values=cache).logits, expected) < 1e-5


def test_drafted_tokens_are_taken_back_by_assisted_generation() -> None:
    model, assistant = memory_model(layers=[0, 2]), build_base("llama", seed=3)
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    expected = model.generate(input_ids=tokens(1, 5), **options)
    found = model.generate(input_ids=tokens(1, 5), assistant_model=assistant, **options)
    assert torch.equal(found, expected)


def test_a_cache_that_was_filled_without_the_memory_is_refused() -> None:
    model, ids = memory_model(), tokens(1, 8)
    with torch.no_grad(), model.disable_adapter():
        cache = model(ids, use_cache=True).past_key_values
    with (
        pytest.raises(ValueError, match=r"filled without the adapter's memory.*start a new cache"),
        torch.no_grad(),
    ):
        model(ids[:, :1], past_key_values=cache)


def test_a_cache_of_a_memory_with_longer_n_grams_is_refused() -> None:
    model, ids = memory_model(), tokens(1, 8)
    model.add_adapter("two", config(ngram_order=2))
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        model.set_adapter("two")
        with pytest.raises(
            ValueError, match=r"filled without the adapter's memory.*start a new cache"
        ):
            model.eval()(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("length", [1, 6])
def test_all_layers_of_a_forward_pass_share_its_n_grams(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.Tensor] = []

    def counted(*given: Any) -> torch.Tensor:
        made.append(suffixes(*given))
        return made[-1]

    monkeypatch.setattr(context, "suffixes", counted)
    model = memory_model(layers=[0, 1, 2, 3])
    made.clear()
    with torch.no_grad():
        model(tokens(2, length))
    assert len(made) == 1


def test_embeddings_without_ids_are_refused_in_one_line() -> None:
    model = memory_model()
    with pytest.raises(ConfigError, match=r"inputs_embeds holds none; pass input_ids$"):
        model(inputs_embeds=torch.zeros(1, 3, WIDTH))
    with model.disable_adapter():
        model(inputs_embeds=torch.zeros(1, 3, WIDTH))


def test_continuous_batching_is_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match="does not know a request's earlier tokens in continuous batching"
    ):
        token_ids_of(tokens(1, 4), {"cache": object()})


def test_packing_by_lengths_is_packing_by_positions() -> None:
    ids, positions = tokens(1, 8), torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
    by_positions = suffixes(ids, 3, None, token_ids_of(ids, {"position_ids": positions})[1]).clamp(
        min=MISSING
    )
    starts = token_ids_of(ids, {"cu_seq_lens_q": torch.tensor([0, 3, 5, 8])})[1]
    by_lengths = suffixes(ids, 3, None, starts).clamp(min=MISSING)
    assert torch.equal(by_positions, by_lengths)
    separate = [suffixes(part, 3).clamp(min=MISSING) for part in ids.split([3, 2, 3], dim=1)]
    assert torch.equal(by_positions, torch.cat(separate, dim=1))


# --- training -------------------------------------------------------------------------------------


def test_every_trainable_parameter_gets_a_gradient_and_the_base_gets_none() -> None:
    model = memory_model().train()
    terms, _ = backward(model, stacked(rows(4, padding=(0, 3))))
    assert set(terms) == {"lm"}  # there is no budget to hold
    for name, parameter in model.named_parameters():
        inside = ".routing.depth_route_gate." in name or ".routing.depth_route_memory." in name
        assert parameter.requires_grad is inside, name
        assert (parameter.grad is not None and bool((parameter.grad != 0).any())) is inside, name


def test_the_first_step_reaches_the_slots_that_were_looked_up_and_no_others() -> None:
    model, batch = (
        get_depth_routed_model(build_base("llama"), config(layers=[2])).train(),
        stacked(rows(2)),
    )
    model(**batch).loss.backward()
    memory = decoder_layers(model)[2].routing.depth_route_memory["default"]
    reached = memory.table.grad.abs().sum(-1).nonzero().flatten()
    seen = memory.slots(suffixes(batch["input_ids"], 3)).unique()
    assert set(reached.tolist()) <= set(seen.tolist()) and len(reached) > 0.9 * len(seen)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_loss_and_no_gradient(reentrant: bool) -> None:
    batch, found = stacked(rows(3, padding=(0, 3))), []
    for checkpointed in (False, True):
        model = memory_model().train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        found.append((backward(model, batch)[0]["lm"], gradients(model)))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1].keys() == found[1][1].keys()
    assert all(gap(found[0][1][name], found[1][1][name]) == 0 for name in found[0][1])


def test_training_with_forced_gates_as_supervision_learns(tmp_path: Path) -> None:
    """Counterfactual gate supervision, the paper's method, on its own host."""
    model = get_depth_routed_model(build_base("llama"), config(layers=[1, 2]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fields: dict[str, Any] = {
        "cgs_weight": 0.5,
        "cgs_warmup": 1,
        "cgs_interval": 2,
        "warmup_steps": 0,
    }
    trainer, _ = make_trainer(model, rows(2) * 20, tmp_path, DepthRouteTrainer, **fields)
    trainer.train()
    logs = step_logs(trainer)
    assert (
        "loss_budget" not in logs[0]
        and sum("loss_cgs" in entry for entry in logs) >= len(logs) // 2 - 1
    )
    assert logs[-1]["loss_lm"] < 0.9 * logs[0]["loss_lm"]
    moved = {
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }
    assert {name for name, p in model.named_parameters() if p.requires_grad} <= moved
    assert not [name for name in moved if ".routing." not in name]


def test_routers_of_the_base_are_balanced_beside_a_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, row in ROWS.items():
        monkeypatch.setitem(LOSSES, name, row)
    model = get_depth_routed_model(build_base("olmoe"), config(layers=[1]))
    unfreeze(model)
    trainer, _ = make_trainer(model, rows(2), tmp_path, loss_weights=dict.fromkeys(ROWS, 0.01))
    trainer.train()
    assert {"loss_balance", "loss_router_z", "loss_lm"} <= set(step_logs(trainer)[0])


def test_a_base_trains_with_its_memory_from_scratch() -> None:
    """As `recipes/token_selective` trains its routers: an untrained base,
    and everything unfrozen."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 2,
        "n_positions": 32,
        "bos_token_id": None,
    }
    base = GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=None, tie_word_embeddings=False))
    model = get_depth_routed_model(base.to(DEVICE), config(layers=[1, 2])).train()
    unfreeze(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    optimizer, batch, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), stacked(rows(4)), []
    for _ in range(20):
        terms, _ = backward(model, batch)
        losses.append(terms["lm"].item())
        optimizer.step()
        unmoved = [
            name
            for name, p in model.named_parameters()
            if p.grad is None or not bool((p.grad != 0).any())
        ]
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]
    assert unmoved == []


# --- the oracle -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["on_policy", "all_full"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "falcon", "olmoe"])
def test_labels_equal_passes_with_forced_gates(family: str, batch: int, kind: str) -> None:
    """`loss(alpha = 0) - loss(alpha = 1)`, the other layers by their gates, or at 1."""
    layers = [0, 1, 2]
    model, ids = memory_model(family, layers=layers), tokens(batch, 8)
    mask = torch.ones_like(ids)
    mask[-1, :2] = 0
    inputs = {"input_ids": ids * mask, "attention_mask": mask}

    @torch.no_grad()
    def loss(alphas: dict[int, float]) -> torch.Tensor:
        with replay_routes(model, forced(alphas, (batch, 8))):
            out = model(**inputs, use_cache=False).logits
        return F.cross_entropy(
            out[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        ).view(batch, -1)

    others = dict.fromkeys(layers, 1.0) if kind == "all_full" else {}
    counted = (mask[:, 1:] * mask[:, :-1]).bool()
    for index, labels in utility_labels(model, inputs, kind, window=1).items():
        expected = loss(others | {index: 0.0}) - loss(others | {index: 1.0})
        assert gap(labels.utility[:, :-1][counted], expected[counted]) < 1e-4
        assert float(expected[counted].abs().max()) > 1e-3


def test_one_token_alone_is_forked_exactly() -> None:
    model, ids = memory_model(), tokens(2, 6)
    positions = torch.tensor([1, 4])
    with torch.no_grad(), record_routes(model) as trace:
        model(ids)
    found = exact_utility(model, {"input_ids": ids}, positions, "on_policy", window=1)[2]

    @torch.no_grad()
    def loss(position: int, alpha: float) -> torch.Tensor:
        probs = trace[2].probs.clone()
        probs[:, position] = alpha
        with replay_routes(model, RouteTrace({2: replace(trace[2], probs=probs)})):
            out = model(ids).logits
        return F.cross_entropy(out[:, position], ids[:, position + 1], reduction="none")

    for place, position in enumerate(positions.tolist()):
        assert gap(found[:, place], loss(position, 0.0) - loss(position, 1.0)) < 1e-4


def test_oracle_auc_of_the_memorys_gate_is_measured() -> None:
    model, inputs = memory_model(), {"input_ids": tokens(4, 12)}
    with torch.no_grad(), record_routes(model) as trace:
        model(**inputs)
    labels = utility_labels(model, inputs, "on_policy", window=1)
    for index in LAYERS:
        valid = labels[index].valid
        found = oracle_auc(trace[index].probs[valid], labels[index].utility[valid])
        assert found is not None and 0 < found < 1


# --- files ----------------------------------------------------------------------------------------


def test_save_and_load_give_the_same_model_and_bytes(tmp_path: Path) -> None:
    model = memory_model(seed=3)
    model.save_pretrained(tmp_path / "one")
    loaded = PeftModel.from_pretrained(build_base("llama"), tmp_path / "one").eval()
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "two")
    assert (tmp_path / "one/adapter_config.json").read_text() == (
        tmp_path / "two/adapter_config.json"
    ).read_text()
    saved = json.loads((tmp_path / "one/adapter_config.json").read_text())
    expected = {
        "target": "memory",
        "gate": "memory",
        "branch": "none",
        "selection": "soft",
        "threshold": 0.0,
    }
    expected |= {
        "memory_slots": 4096,
        "memory_width": 4,
        "memory_heads": 4,
        "ngram_order": 3,
        "seed": 3,
    }
    assert {name: saved[name] for name in expected} == expected


def test_other_targets_save_no_field_of_a_memory() -> None:
    assert not [
        name for name in DepthRouteConfig().to_dict() if "memory" in name or "ngram" in name
    ]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    memory_model(layers=[1, 2]).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "more slots than the file has": (
        {"memory_slots": 8192},
        "has shape .4096, 4., the config says .8192, 4.",
    ),
    "wider slots": ({"memory_width": 8}, "has shape"),
    "another order": ({"ngram_order": 2}, "has shape"),
    "slots beyond any table": (
        {"memory_slots": 1 << 27},
        "memory_slots=134217728 must be an integer from 512 to",
    ),
    "slots beyond all memory": (
        {"memory_slots": 1 << 26, "memory_width": 32},
        "config says .67108864, 32.",
    ),
    "slots too wide": ({"memory_width": 65536}, "config says .4096, 65536."),
    "slots of no width": ({"memory_width": 0}, "memory_width=0 must be an integer"),
    "no head": ({"memory_heads": 0}, "memory_heads=0 must be"),
    "a million heads": ({"memory_heads": 10**6}, "memory_heads=1000000 must be"),
    "unigrams": ({"ngram_order": 1}, "ngram_order=1 must be"),
    "text for a number": ({"memory_slots": "4096"}, "memory_slots='4096' must be"),
    "too few slots for the hashes": (
        {"memory_slots": 4095},
        "memory_slots=4095 must be at least 4096, 512 for each",
    ),
    "another gate": (
        {"gate": "jepa"},
        "gate='jepa': with target='memory' it is always 'memory'; leave it out",
    ),
    "a threshold": ({"threshold": 0.5}, "threshold=0.5: with target='memory' it is always 0.0"),
    "another target": ({"target": "ffn"}, "gate='memory' decides on memory"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_configurations_are_refused_before_anything_is_allocated(
    adapter: Path, case: str
) -> None:
    fields, said = HOSTILE[case]
    change(adapter, **fields)
    base = build_base("llama")
    expected, start = logits(base), time.process_time()
    with pytest.raises((ConfigError, AdapterMismatchError), match=said) as refused:
        PeftModel.from_pretrained(base, adapter)
    assert time.process_time() - start < 2.0
    assert "\n" not in str(refused.value)
    assert torch.equal(logits(base), expected)
    assert not [module for module in base.modules() if isinstance(module, Routing)]
    assert any(finding.state == "fault" for finding in examine(adapter))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"memory_width": 33},
            (
                r"memory_width=33: 8 hashes look up 264 numbers for a token; on this model at most "
                r"256$"
            ),
        ),
        (
            {"memory_slots": 1 << 26, "memory_width": 8},
            r"memory_slots=67108864: 1,610,612,736 numbers in 3 layers; at",
        ),
    ],
)
def test_tables_that_are_too_large_are_refused_before_they_are_made(
    fields: dict[str, Any], said: str
) -> None:
    base = build_base("llama")
    with pytest.raises(ConfigError, match=said) as refused:
        get_depth_routed_model(base, config(layers=[1, 2, 3], **fields))
    assert "\n" not in str(refused.value)
    assert not [module for module in base.modules() if isinstance(module, Routing)]


def damaged(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return damage


TABLE = "base_model.model.model.layers.1.routing.depth_route_memory.table"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no table": (damaged(lambda t: t.pop(TABLE)), "missing|hash"),
    "a table of integers": (damaged(lambda t: t.update({TABLE: t[TABLE].long()})), "dtype"),
    "a table with NaN": (damaged(lambda t: t[TABLE].fill_(float("nan"))), "not finite|hash"),
    "other slots": (damaged(lambda t: t[TABLE].mul_(2)), "hash"),
    "a second table": (
        damaged(lambda t: t.update({TABLE + "s": t[TABLE].clone()})),
        "unexpected|hash",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_tables_are_refused(adapter: Path, case: str) -> None:
    damage, said = DAMAGES[case]
    damage(adapter)
    with pytest.raises(AdapterMismatchError, match=said):
        PeftModel.from_pretrained(build_base("llama"), adapter)


def test_the_doctor_says_how_many_slots_training_has_reached(adapter: Path) -> None:
    texts = [finding.text for finding in examine(adapter)]
    assert "memory: slots that training has reached: layer 1 100.0%, layer 2 100.0%" in texts
    assert not [finding for finding in examine(adapter) if finding.state == "fault"]


def test_the_doctor_knows_the_shapes_of_a_memory(adapter: Path) -> None:
    change(adapter, memory_slots=8192)
    faults = [finding.text for finding in examine(adapter) if finding.state == "fault"]
    assert any(
        text.endswith("memory.table has shape [4096, 4], the config says [8192, 4]")
        for text in faults
    )


def test_summary_and_card_say_what_it_is(adapter: Path) -> None:
    model = PeftModel.from_pretrained(build_base("llama"), adapter)
    assert "memory per token, 4,096 slots of 4, 4 heads, 2- to 3-grams" in repr(model)
    card = make_card(adapter).text
    for line in (
        "a memory. In the layers below",
        "Nothing of the base is skipped.",
        "4,096 slots of 4",
        "| budget | none |",
    ):
        assert line in card, line


# --- what does not go together --------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"gate": "linear"}, {"budget": 0.3}, {"selection": "topk"}, {"threshold": "budget"},
        {"phases": "prefill"}, {"budget_scope": "global"}, {"scale_by_gate": True},
        {"causal_rule": "predictor"}, {"gate_temperature": 2.0}, {"granularity": "sequence"},
        {"dropped_experts": [[0]]},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_options_that_make_no_sense_are_refused_in_one_line(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        DepthRouteConfig(target="memory", **fields)
    assert next(iter(fields)) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["memory_slots", "memory_width", "memory_heads", "ngram_order"])
def test_its_fields_are_refused_for_other_targets(name: str) -> None:
    value = {"ngram_order": 4}.get(name, 5000 if name == "memory_slots" else 2)
    with pytest.raises(ConfigError, match=f"{name}={value} goes with target='memory'"):
        DepthRouteConfig(**{name: value})


BATCH = [{"input_ids": tokens(2, 8)}]
REFUSALS: dict[str, tuple[Callable[[PeftModel], Any], str]] = {
    "calibrate": (lambda m: calibrate(m, BATCH), "no budget, and no threshold"),
    "calibrate_budgets": (lambda m: calibrate_budgets(m, BATCH), "no budget, and no threshold"),
    "set_budget": (lambda m: set_budget(m, 0.5), "no budget, and no threshold"),
    "set_phases": (
        lambda m: set_phases(m, "prefill"),
        "phases='prefill' is not for target='memory', where it is",
    ),
    "draft_view": (draft_view, "a draft by it would save nothing"),
    "tune_execution": (
        lambda m: tune_execution(m, tokens(1, 4)),
        "skips nothing, so there is nothing to choose",
    ),
    "fit_branches": (lambda m: fit_branches(m, BATCH), "branch='none' has nothing to fit"),
    "fit_router": (
        lambda m: fit_router(m.unload(), BATCH, config=config()),
        "gate='memory' is not fitted",
    ),
    "vLLM": (
        lambda m: check_adapter(m.peft_config["default"]),
        "target='memory' is not served by vLLM: .*token ids",
    ),
    "slot_use elsewhere": (
        lambda m: slot_use(build_routed("llama"), BATCH),
        "target='ffn' has no table of slots",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_work_says_so_in_one_line(case: str) -> None:
    call, said = REFUSALS[case]
    with pytest.raises((ValueError, ConfigError), match=said) as refused:
        call(memory_model())
    assert "\n" not in str(refused.value)


# --- size and use ---------------------------------------------------------------------------------


def test_the_papers_model_has_its_number_of_parameters() -> None:
    """12 layers, d = 768, memory in layers 2, 4 and 6, 500,000 slots of 32 each,
    DeepSeek-V3's vocabulary, untied."""
    with torch.device("meta"):
        base = GPT2LMHeadModel(GPT2Config(vocab_size=128_815, tie_word_embeddings=False))
        model = get_depth_routed_model(base, DepthRouteConfig(target="memory", layers=[2, 4, 6]))
    assert all(parameter.is_meta for parameter in model.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    tables, projections, norms = 3 * 500_000 * 32, 3 * 2 * 256 * 768, 3 * 2 * 768
    assert count == 283_702_272 + tables + projections + norms == 332_886_528
    assert round(count / 1e6, 1) == 332.9
    cost = route_cost(model)
    assert (cost.parameters_base, cost.parameters_adapter) == (
        283_702_272,
        tables + projections + norms,
    )


def test_cost_counts_what_the_memory_adds() -> None:
    model = memory_model(layers=[1, 2])
    cost = route_cost(model, batch_size=2, length=5)
    # W_K and W_V in two layers.
    assert cost.flops_routed - cost.flops_dense == 2.0 * 10 * 2 * 2 * (32 * 32)
    assert cost.flops_ideal == cost.flops_dense
    assert (cost.ffn_ratio, cost.remark) == (2.0, None)


def test_occupancy_and_collisions_are_counted() -> None:
    model = memory_model(layers=[1, 2])
    ids = tokens(3, 12)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad():
        model.get_base_model().model.layers[1].routing.depth_route_memory["default"].table[100:] = 0
    found = slot_use(model, [{"input_ids": ids, "attention_mask": mask}, {"input_ids": ids[:1]}])
    assert list(found) == [1, 2]
    grams = {
        tuple(row) for row in suffixes(ids, 3, mask.bool()).clamp(min=MISSING)[mask.bool()].tolist()
    }
    for index, use in found.items():
        memory = decoder_layers(model)[index].routing.depth_route_memory["default"]
        by_slot: dict[int, set[tuple[int, ...]]] = {}
        for gram in grams:
            for place, slot in enumerate(memory.slots(torch.tensor(gram)).tolist()):
                by_slot.setdefault(slot, set()).add(gram[: 2 if place < 4 else 3])
        assert use.slots == 4096 and use.trained == (100 if index == 1 else 4096)
        assert use.hit == len(by_slot)
        assert use.lookups == 4 * len({gram[:2] for gram in grams}) + 4 * len(grams)
        assert use.collided == sum(len(held) for held in by_slot.values() if len(held) > 1) > 0


def test_no_slot_is_counted_for_an_n_gram_across_packed_documents() -> None:
    model, ids = memory_model(layers=[1]), tokens(1, 6)
    twice = {"input_ids": ids.repeat(1, 2), "position_ids": torch.arange(6).repeat(1, 2)}
    assert slot_use(model, [twice]) == slot_use(model, [{"input_ids": ids}])


def test_two_memories_and_another_adapter_switch() -> None:
    base = build_base("llama")
    model = routed(base, "memory", adapter_name="one", layers=[1])
    first = logits(model)
    model.add_adapter("two", config(layers=[2, 3], ngram_order=2))
    model.add_adapter("skips", DepthRouteConfig(layers=[1, 2], budget=1.0))
    with torch.no_grad():
        for routing in routings_of(model):
            if "two" in routing.depth_route_memory:
                nn.init.normal_(routing.depth_route_memory["two"].table)
    model.set_adapter("two")
    assert gap(logits(model.eval()), first) > 1e-3
    model.set_adapter("skips")
    logits(model)
    model.delete_adapter("two")
    model.set_adapter("one")
    assert torch.equal(logits(model), first)
