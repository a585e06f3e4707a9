"""Lossless drafting: the routed view drafts, the full model decides what is written."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload
from models import (
    COVERING,
    DEPTH,
    VOCABULARY,
    build_base,
    build_routed,
    decoder_layers,
    logits,
    routed,
    tokens,
)
from speed.draft_search import search_draft
from text_models import save_base
from transformers import Qwen2Config, Qwen2ForCausalLM

from hf_depthroute import draft_view, lossless_generate, set_budget
from hf_depthroute.adapter.labels import has_other_hooks
from hf_depthroute.cli import errors, main
from hf_depthroute.fitting.narrowing import narrowed
from hf_depthroute.inference.drafting import DraftCounter, _Draft
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.state import RunSettings
from hf_depthroute.routing.trace import count_routes, full_depth, record_routes

GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}


def full_output(model: Any, ids: torch.Tensor, **settings: Any) -> torch.Tensor:
    with full_depth(model):
        return model.generate(ids, **GREEDY | settings)


def drafted_output(
    model: Any, ids: torch.Tensor, draft: Any, **settings: Any
) -> tuple[torch.Tensor, DraftCounter]:
    counter = DraftCounter()
    return lossless_generate(model, ids, draft=draft, counter=counter, **GREEDY | settings), counter


def storage(module: torch.nn.Module) -> set[int]:
    return {t.data_ptr() for t in (*module.parameters(), *module.buffers()) if t.numel()}


# The same text


@pytest.mark.parametrize("family, kind", COVERING)
def test_greedy_output_is_the_full_models(family: str, kind: str) -> None:
    model, ids = build_routed(family, kind), tokens(1, 6, seed=3)
    wanted = full_output(model, ids)
    # The routed model writes something else.
    assert not torch.equal(model.generate(ids, **GREEDY), wanted)
    for drop in ([], [1]):
        found, counter = drafted_output(
            model, ids, draft_view(model, budget=0.5, drop=drop, num_tokens=3)
        )
        assert torch.equal(found, wanted)
        assert counter.new_tokens == 20
        # The draft was wrong at times.
        assert counter.drafted > counter.new_tokens - counter.target_passes


@pytest.mark.parametrize("family", ["llama", "gpt2", "olmoe"])
def test_what_is_right_is_accepted(family: str) -> None:
    model, ids = build_routed(family), tokens(1, 6, seed=3)
    _, counter = drafted_output(model, ids, draft_view(model, budget=1.0, num_tokens=3))
    assert counter.acceptance_rate == 1
    assert counter.target_passes == math.ceil(20 / 4)
    assert counter.tokens_per_pass == 20 / counter.target_passes


@pytest.mark.parametrize(
    "fields",
    [
        {"gate": "exit", "branch": "none", "target": "block"},
        {"granularity": "sequence", "target": "block"},
        {"granularity": "sequence", "target": "attention"},
        {"gate": "none", "target": "block"},
        {"selection": "controller"},
        {"causal_rule": "predictor"},
    ],
    ids=str,
)
def test_other_kinds_of_routing_draft_too(fields: dict[str, Any]) -> None:
    model, ids = build_routed("llama", "other", **fields), tokens(1, 6, seed=3)
    wanted = full_output(model, ids)
    for drop in ([], [1]):
        assert torch.equal(drafted_output(model, ids, draft_view(model, drop=drop))[0], wanted)


def test_static_experts_keep_their_layers_lists_when_a_block_is_left_out() -> None:
    model = routed(
        build_base("olmoe"),
        "experts",
        gate="none",
        layers=[1, 2, 3],
        dropped_experts=[[0], [1, 2], [3]],
    )
    draft = draft_view(model, drop=[0, 2])
    (config,) = {id(h.active_config()): h.active_config() for h in routings_of(draft)}.values()
    assert (config.layers, config.dropped_experts) == ([0, 1], [[0], [3]])
    ids = tokens(1, 6, seed=3)
    assert torch.equal(drafted_output(model, ids, draft)[0], full_output(model, ids))


@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}], ids=str
)
def test_logits_processors_hold(settings: dict[str, Any]) -> None:
    model, ids = build_routed("gpt2"), tokens(1, 6, seed=3)
    wanted = full_output(model, ids, **settings)
    assert not torch.equal(wanted, full_output(model, ids))
    draft = draft_view(model, budget=0.75, num_tokens=3)
    assert torch.equal(drafted_output(model, ids, draft, **settings)[0], wanted)


@pytest.mark.parametrize("least", [0, 10])
def test_the_text_ends_where_the_full_models_does(least: int) -> None:
    model, ids = build_routed("qwen3"), tokens(1, 6, seed=3)
    end = int(full_output(model, ids)[0, 6 + 3])
    settings = {"eos_token_id": end, "min_new_tokens": least, "pad_token_id": 0}
    wanted = full_output(model, ids, **settings)
    assert wanted.shape[1] == 6 + 4 if least == 0 else wanted.shape[1] > 6 + least
    for budget in (0.75, 1.0):
        draft = draft_view(model, budget=budget, num_tokens=5)
        assert torch.equal(drafted_output(model, ids, draft, **settings)[0], wanted)


def test_a_padded_prompt_gives_the_same_text() -> None:
    model, ids = build_routed("llama"), tokens(1, 6, seed=3)
    wanted = full_output(model, ids)[:, 6:]
    padded = torch.cat([torch.zeros(1, 3, dtype=ids.dtype), ids], dim=1)
    mask = (torch.arange(9) >= 3).long()[None]
    found, _ = drafted_output(
        model, padded, draft_view(model, 0.75), attention_mask=mask, pad_token_id=0
    )
    assert torch.equal(found[:, 9:], wanted)


def test_sliding_windows_and_dropped_blocks_of_both_kinds() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = Qwen2Config(
        **sizes, **heads, layer_types=kinds, use_sliding_window=True, sliding_window=8
    )
    model, ids = routed(Qwen2ForCausalLM(config).eval()), tokens(1, 6, seed=3)
    wanted = full_output(model, ids)
    for drop, left in (([0], kinds[1:]), ([1, 2], ["full_attention", "sliding_attention"])):
        draft = draft_view(model, budget=0.75, drop=drop, num_tokens=3)
        assert draft.config.layer_types == left
        assert torch.equal(drafted_output(model, ids, draft)[0], wanted)
    assert config.layer_types == kinds


def test_a_plain_model_drafts_by_leaving_blocks_out() -> None:
    model, ids = build_base("qwen3"), tokens(1, 6, seed=3)
    wanted = model.generate(ids, **GREEDY)
    assert torch.equal(drafted_output(model, ids, draft_view(model, drop=[1, 2]))[0], wanted)


def test_sampling_keeps_the_full_models_distribution() -> None:
    model, ids = build_routed("gpt2"), tokens(1, 4, seed=3)
    settings = {"do_sample": True, "top_k": 3, "temperature": 0.5, "eos_token_id": None}

    def distribution(of: Any) -> torch.Tensor:
        with torch.no_grad():
            scores = of(ids).logits[0, -1] / settings["temperature"]
        return scores.masked_fill(scores < scores.topk(3).values[-1], -torch.inf).softmax(-1)

    draft = draft_view(model, budget=0.05, drop=[0, 3], num_tokens=2)
    with full_depth(model):
        wanted = distribution(model)
    count = 400
    drawn = [
        drafted_output(model, ids, draft, max_new_tokens=2, **settings)[0][0, 4]
        for _ in range(count)
    ]
    found = torch.bincount(torch.stack(drawn), minlength=VOCABULARY) / count

    def distance(p: torch.Tensor, q: torch.Tensor) -> float:
        return float((p - q).abs().sum() / 2)

    assert distance(distribution(draft), wanted) > 0.3  # another distribution would show
    assert distance(found, wanted) < 0.08


# The view


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_view_holds_no_tensor_of_its_own(family: str) -> None:
    model = build_routed(family)
    before, names = logits(model), list(model.state_dict())
    draft = draft_view(model, budget=0.25, drop=[1])
    assert storage(draft) < storage(model.get_base_model())  # the dropped block's are missing
    assert len(decoder_layers(draft)) == draft.config.num_hidden_layers == DEPTH - 1
    assert torch.equal(logits(model), before) and list(model.state_dict()) == names
    assert len(decoder_layers(model)) == model.config.num_hidden_layers == DEPTH
    assert type(draft).__name__ == type(model.get_base_model()).__name__


def test_view_and_model_have_their_own_budget_and_flags() -> None:
    model = build_routed("llama", selection="controller")
    before = logits(model)
    draft = draft_view(model, budget=0.25)
    assert torch.equal(logits(model), before)
    assert not torch.equal(logits(draft), before)
    quarter = logits(draft)
    set_budget(model, 0.75)
    assert torch.equal(logits(draft), quarter)
    set_budget(draft, 0.75)
    assert torch.equal(logits(draft), logits(model))
    with model.disable_adapter():
        # A view is routed, whatever the model's state.
        assert torch.equal(logits(draft_view(model)), logits(draft))
        assert not torch.equal(logits(model), logits(draft))


def test_training_the_model_moves_the_view_along() -> None:
    model = build_routed("llama")
    draft = draft_view(model)
    with torch.no_grad():
        for routing in routings_of(model):
            routing.depth_route_branch["default"].down.weight.mul_(2)
            routing.depth_route_quantiles["default"].values.add_(0.5)
    assert torch.equal(logits(draft), logits(model))


def test_traces_of_the_model_do_not_see_the_draft() -> None:
    model, ids = build_routed("llama"), tokens(1, 6, seed=3)
    with record_routes(model) as trace:
        draft = draft_view(model, budget=0.75)
        drafted_output(model, ids, draft)
    assert len(trace) == 0  # the model ran in full
    with count_routes(draft) as counter:
        drafted_output(model, ids, draft)
    assert 0 < sum(counter.full_ratio().values()) < 3


@pytest.mark.parametrize("family", ["llama", "gpt2", "olmoe"])
def test_a_dropped_block_leaves_the_stream_as_it_is(family: str) -> None:
    model = build_routed(family)
    draft = draft_view(model, budget=1.0, drop=[1, 2])
    zeroed = copy.deepcopy(build_base(family))
    for layer in decoder_layers(zeroed)[1:3]:
        layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
    assert torch.equal(logits(draft), logits(zeroed))
    cache = draft(tokens(1, 6), use_cache=True).past_key_values
    assert [layer.get_seq_length() for layer in cache.layers] == [6] * (DEPTH - 2)


def test_the_draft_that_is_left_numbers_its_routed_layers_anew() -> None:
    model = build_routed("llama", layers=[1, 3])
    draft = draft_view(model, drop=[0, 2])
    assert [routing.layer_index for routing in routings_of(draft)] == [0, 1]
    assert routings_of(draft)[0].active_config().layers == [0, 1]
    assert [routing.layer_index for routing in routings_of(model)] == [1, 3]
    assert routings_of(model)[0].active_config().layers == [1, 3]


def test_what_is_said_of_single_layers_is_said_of_them_in_the_draft() -> None:
    patterns = {"target_pattern": {3: "ffn"}, "rank_pattern": {2: 8}}
    model = build_routed("llama", layers=[1, 2, 3], target="block", **patterns)
    config = routings_of(draft_view(model, drop=[0]))[0].active_config()
    assert [config.target_of(place) for place in range(3)] == ["block", "block", "ffn"]
    assert config.rank_pattern == {1: 8}
    fewer = narrowed(model, dense=[3])
    assert routings_of(fewer)[0].active_config().target_pattern is None


def test_a_view_of_an_offloaded_model_reads_the_same_weights() -> None:
    base = build_base("llama")
    expected = logits(draft_view(build_routed("llama"), drop=[1]))
    cpu_offload(base, execution_device=torch.device("cpu"))
    model = routed(base)
    draft = draft_view(model, drop=[1])
    mine, its = (
        m.get_submodule("model.layers.0.mlp.up_proj")._hf_hook
        for m in (draft, model.get_base_model())
    )
    assert mine is not its and mine.weights_map is its.weights_map
    assert torch.equal(logits(draft), expected)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"drop": [4]}, "layers 0 to 3"),
        ({"drop": [-1]}, "layers 0 to 3"),
        ({"drop": [1, 1]}, "each once"),
        ({"drop": [0, 1, 2, 3]}, "not all"),
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"confidence": 1.0}, "confidence=1.0"),
        ({"budget": 0.0}, "budget=0"),
    ],
)
def test_a_view_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draft_view(build_routed("llama"), **arguments)


def test_a_view_that_would_skip_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="would skip nothing"):
        draft_view(build_base("llama"))
    with pytest.raises(ValueError, match="no gate"):
        draft_view(build_routed("llama", "other", gate="none"), budget=0.5)


# Drafting


def test_plain_generate_verifies_at_full_depth() -> None:
    model, ids = build_routed("llama"), tokens(1, 6, seed=3)
    wanted, draft = full_output(model, ids), draft_view(model, budget=0.75)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(model.generate(ids, assistant_model=draft, **GREEDY), wanted)
    assert not torch.equal(model.generate(ids, **GREEDY), wanted)  # routed again


def test_a_routed_verifier_is_warned_of() -> None:
    model, ids = build_routed("llama"), tokens(1, 6, seed=3)
    routed_text, draft = model.generate(ids, **GREEDY), draft_view(model, budget=0.75)
    with pytest.warns(UserWarning, match="the model that verifies is routed itself"):
        found = model.get_base_model().generate(ids, assistant_model=draft, **GREEDY)
    assert torch.equal(found, routed_text)


def test_the_short_loop_drafts_what_transformers_own_does() -> None:
    model, ids = build_routed("llama"), tokens(1, 6, seed=3)
    for settings in ({"eos_token_id": 3}, {"eos_token_id": 3, "repetition_penalty": 1.5}):
        fast, slow = (draft_view(model, budget=0.75, drop=[1], num_tokens=3) for _ in range(2))
        slow.__class__ = type("Slow", (SlowDraft, type(slow)), {})
        one, two = (drafted_output(model, ids, draft, **settings) for draft in (fast, slow))
        assert torch.equal(one[0], two[0])
        assert one[1] == two[1]


class SlowDraft:
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        # A key that the loop leaves alone.
        return _Draft.generate(self, *args, **kwargs, return_dict_in_generate=True)


def test_a_draft_ends_behind_a_token_it_is_not_sure_of() -> None:
    model, ids = build_routed("llama"), tokens(1, 6, seed=3)
    found, counter = drafted_output(
        model, ids, draft_view(model, 0.75, num_tokens=8, confidence=0.999)
    )
    assert torch.equal(found, full_output(model, ids))
    assert counter.drafted <= counter.target_passes


def test_several_sequences_are_refused() -> None:
    model = build_routed("llama")
    with pytest.raises(ValueError, match="batch_size = 1"):
        lossless_generate(model, tokens(2, 6), draft=draft_view(model), **GREEDY)
    assert all(routing.state.settings == RunSettings() for routing in routings_of(model))
    assert not has_other_hooks(model.get_base_model())


# The search


def test_the_search_returns_the_fastest_of_its_table() -> None:
    model = build_routed("gpt2")
    before = logits(model)
    found = search_draft(
        model, [tokens(1, 6)], max_new_tokens=6, budgets=[0.5, 1.0], drops=[[], [2]],
        lengths=[2, 3], rounds=1, confidences=[0.0], eos_token_id=None,
    )  # fmt: skip
    assert found.table[0] is found.best
    last = [row.speedup for row in found.table[: 2 * 2]]  # two shapes, two lengths
    assert last == sorted(last, reverse=True) and len(found.table) == 5
    shapes = {(row.budget, tuple(row.drop)) for row in found.table}
    assert shapes == {(0.5, ()), (0.5, (2,)), (1.0, (2,))}  # not the full model itself
    assert all(
        row.identical and 0 <= row.acceptance_rate <= 1 <= row.tokens_per_pass
        for row in found.table
    )
    assert found.plain_tokens_per_second > 0
    assert torch.equal(logits(model), before)
    assert draft_view(model, **found.best.arguments()).config.num_hidden_layers == DEPTH - len(
        found.best.drop
    )


def test_the_search_drops_the_least_important_blocks() -> None:
    model = build_base("llama")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        decoder_layers(model)[2].get_submodule(name).weight.data.mul_(0.01)
    found = search_draft(
        model,
        [tokens(1, 6)],
        max_new_tokens=6,
        lengths=[3],
        confidences=[0.0],
        rounds=1,
        eos_token_id=None,
    )
    drops = sorted(row.drop for row in found.table)
    assert [len(drop) for drop in drops] == [2, 1] or [len(drop) for drop in drops] == [1, 2]
    assert all(2 in drop for drop in drops) and all(row.budget is None for row in found.table)
    weak = next(row for row in found.table if row.drop == [2])
    assert weak.acceptance_rate > 0.5


def test_the_search_refuses_to_search_nothing() -> None:
    with pytest.raises(ValueError, match="prompts is empty"):
        search_draft(build_routed("llama"), [])
    with pytest.raises(ValueError, match="nothing to try"):
        search_draft(build_base("llama"), [tokens(1, 4)], max_new_tokens=2, drops=[[]])


# The command line


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafting")
    base = save_base(folder / "base")
    model = routed(transformers.AutoModelForCausalLM.from_pretrained(base))
    model.save_pretrained(folder / "adapter")
    return folder / "adapter"


@pytest.fixture
def generate(adapter: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    level = transformers.logging.get_verbosity()

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        words = (
            "generate",
            "--adapter",
            adapter,
            "--prompt",
            "the cat sat",
            "--max-new-tokens",
            8,
            *arguments,
        )
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    yield call
    transformers.logging.set_verbosity(level)
    transformers.logging.enable_progress_bar()


@pytest.mark.parametrize(
    "options, said",
    [
        ([], "draft: budget the adapter's, layers left out none, 5 tokens ahead"),
        (
            ["--draft-budget", 0.75, "--draft-drop", "2,1", "--draft-tokens", 2],
            "budget 0.75, layers left out 1, 2, 2 t",
        ),
        (["--sample", "--seed", 3, "--draft-drop", 1], "layers left out 1,"),
    ],
)
def test_the_command_writes_the_full_models_text(
    generate: Callable[..., Any], options: list[Any], said: str
) -> None:
    code, out, err = generate("--lossless", *options)
    assert code == 0, err
    if "--sample" not in options:
        assert out == generate("--full")[1]
    assert said in err
    found = re.match(r"\d+ tokens, [\d.]+ tokens/s, ([\d.]+) of the draft accepted", err)
    assert found and 0 <= float(found[1]) <= 1


@pytest.mark.parametrize(
    "options, message",
    [
        (["--draft-budget", 0.5], "--draft-budget needs --lossless"),
        (["--lossless", "--full"], "--lossless writes what --full writes"),
        (["--lossless", "--budget", 0.5], "use --draft-budget"),
        (["--lossless", "--draft-drop", "x"], "--draft-drop 'x'"),
        (["--lossless", "--draft-drop", "1,1"], "each once"),
        (["--lossless", "--draft-drop", "4"], "layers 0 to 3"),
        (["--lossless", "--draft-drop", "0,1,2,3"], "not all"),
        (["--lossless", "--draft-budget", 2], "budget=2.0"),
    ],
)
def test_the_command_refuses(
    generate: Callable[..., Any], options: list[Any], message: str
) -> None:
    code, _, err = generate(*options)
    assert code == errors.USAGE
    (line,) = err.splitlines()
    assert message in line
