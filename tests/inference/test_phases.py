"""`phases="prefill"`: prompts are routed but for their last token,
and what follows is the base's work."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from batching import generate, generate_batch
from command_line import run
from hypothesis import given
from hypothesis import strategies as st
from models import build_base, build_routed, decoder_layers, routed, tokens
from peft import PeftModel
from protocol import gap
from row_counts import counted_rows
from text_models import save_base
from transformers import AutoModelForCausalLM, GenerationConfig

from hf_depthroute import (
    DepthRouteConfig,
    calibrate,
    draft_view,
    record_routes,
    replay_routes,
    route_cost,
    set_phases,
)
from hf_depthroute.adapter.call_tokens import last_tokens_of
from hf_depthroute.bench import bench
from hf_depthroute.cli.serve import change_config, link_model
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.routing.stack import routings_of, state_of
from hf_depthroute.routing.trace import RouteTrace, count_routes

PROMPT, STEPS = 7, 3
# Every target, every way to mix the paths, and what decides besides a threshold: family, kind,
# fields.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ffn": ("llama", "mlp", {}),
    "ffn_gpt2": ("gpt2", "mlp", {}),
    "jepa": ("llama", "jepa", {}),
    "attention": ("llama", "attention", {}),
    "attention_gpt2": ("gpt2", "attention", {}),
    "block": ("llama", "block", {}),
    "block_gpt2": ("gpt2", "block", {}),
    "ffn_moe": ("olmoe", "mlp", {}),
    "experts": ("olmoe", "experts", {}),
    "parallel": ("gpt_neox", "block", {"layers": [1, 2]}),
    "halting": ("llama", "block", {"gate": "halting", "branch": "none"}),
    "bottleneck": ("llama", "block", {"gate": "bottleneck", "branch": "swiglu"}),
    "bottleneck_gpt2": ("gpt2", "block", {"gate": "bottleneck", "branch": "swiglu"}),
    "scaled": ("llama", "mlp", {"scale_by_gate": True}),
    "scaled_attention": ("llama", "attention", {"scale_by_gate": True}),
    "soft": ("llama", "mlp", {"selection": "soft"}),
    "predictor": ("llama", "mlp", {"causal_rule": "predictor"}),
    "controller": ("llama", "mlp", {"selection": "controller"}),
    "exit": ("llama", "block", {"gate": "exit", "branch": "none"}),
    "static": ("llama", "mlp", {"gate": "none"}),
}
every_case = pytest.mark.parametrize("case", CASES)


def build(case: str) -> PeftModel:
    family, kind, fields = CASES[case]
    return build_routed(family, kind, **fields)


@torch.no_grad()
def decoded(model: Any, ids: torch.Tensor, prompt: int, **kwargs: Any) -> torch.Tensor:
    """Logits of the prompt's last position and of each token behind it, `[B, 1 + steps, V]`."""
    out = model(input_ids=ids[:, :prompt], use_cache=True, **kwargs)
    logits = [out.logits[:, -1:]]
    for position in range(prompt, ids.shape[1]):
        one = ids[:, position : position + 1]
        logits.append(
            model(input_ids=one, past_key_values=out.past_key_values, use_cache=True).logits
        )
    return torch.cat(logits, dim=1)


@torch.no_grad()
def by_hand(model: PeftModel, ids: torch.Tensor, prompt: int, tail: int = 1) -> torch.Tensor:
    """`decoded`: the prompt but its last `tail` tokens through the routed model,
    everything else through the base."""
    cache = model(input_ids=ids[:, : prompt - tail], use_cache=True).past_key_values
    logits = []
    with model.disable_adapter():
        for position in range(prompt - tail, prompt - 1):
            model(input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True)
        for position in range(prompt - 1, ids.shape[1]):
            one = ids[:, position : position + 1]
            logits.append(model(input_ids=one, past_key_values=cache, use_cache=True).logits)
    return torch.cat(logits, dim=1)


@every_case
def test_generation_is_the_bases_on_a_routed_prompt(case: str) -> None:
    model, ids = build(case), tokens(2, PROMPT + STEPS)
    expected, routed_logits = by_hand(model, ids, PROMPT), decoded(model, ids, PROMPT)
    set_phases(model, "prefill")
    found = decoded(model, ids, PROMPT)
    assert gap(found, expected) < 1e-5
    assert gap(found, routed_logits) > 1e-2
    with model.disable_adapter():
        assert gap(found, decoded(model, ids, PROMPT)) > 1e-2


@pytest.mark.parametrize("tail", [3, PROMPT])
@every_case
def test_the_last_tokens_of_a_prompt_run_in_full(case: str, tail: int) -> None:
    model, ids = build(case), tokens(2, PROMPT + STEPS)
    expected = by_hand(model, ids, PROMPT, tail) if tail < PROMPT else None
    set_phases(model, "prefill")
    one = decoded(model, ids, PROMPT)
    for routing in routings_of(model):
        routing.active_config().prompt_tail = tail
    found = decoded(model, ids, PROMPT)
    if expected is None:  # the whole prompt
        with model.disable_adapter():
            expected = decoded(model, ids, PROMPT)
    assert gap(found, expected) < 1e-5
    assert gap(found, one) > 1e-2


@given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3),
    count=st.integers(1, 7),
    told=st.sampled_from(["position_ids", "cu_seq_lens_q", "left", "right"]),
    filled=st.integers(0, 5),
)
def test_they_are_the_last_of_every_sequence(
    lengths: list[list[int]], count: int, told: str, filled: int
) -> None:
    if told == "cu_seq_lens_q":
        lengths = lengths[:1]
    if told in ("left", "right"):
        lengths = [row[:1] for row in lengths]
    size = max(map(sum, lengths))
    expected, mask, positions = (
        torch.zeros(len(lengths), size, dtype=torch.long) for _ in range(3)
    )
    for row, parts in enumerate(lengths):
        start = size - sum(parts) if told == "left" else 0
        for length in parts:
            mask[row, start : start + length] = 1
            positions[row, start : start + length] = torch.arange(length)
            expected[row, start + max(0, length - count) : start + length] = 1
            start += length
    kwargs: dict[str, Any] = {}
    if told == "position_ids":
        kwargs["position_ids"] = positions
    elif told == "cu_seq_lens_q":
        kwargs["cu_seq_lens_q"] = torch.tensor([0, *itertools.accumulate(lengths[0])])
        # Rows of no sequence.
        mask, expected = F.pad(mask, (0, filled)), F.pad(expected, (0, filled))
    else:
        kwargs["attention_mask"] = mask
    found = last_tokens_of(mask, None if told == "cu_seq_lens_q" else mask.bool(), kwargs, count)
    assert torch.equal(found.long(), expected)


def test_a_static_layer_is_skipped_by_the_prompt_alone() -> None:
    """Its keys and values are written then, as those of a gate that no token passes."""
    ids = tokens(2, PROMPT + STEPS)
    never = build_routed("llama", "block", gate="linear", threshold=1e9, branch="none")
    model = build_routed("llama", "block", gate="none", branch="none", phases="prefill")
    assert gap(decoded(model, ids, PROMPT), by_hand(never, ids, PROMPT)) < 1e-5
    expected = generate(model)
    assert [output.generated_tokens for output in generate_batch(model)] == expected


@every_case
def test_the_tokens_before_the_last_are_routed_as_before(case: str) -> None:
    model, ids = build(case), tokens(3, 9)
    with torch.no_grad(), record_routes(model) as before:
        logits = model(ids).logits
    set_phases(model, "prefill")
    with torch.no_grad(), record_routes(model) as after:
        found = model(ids).logits
    assert gap(found[:, :-1], logits[:, :-1]) < 1e-5
    assert not all(bool(record.mask[:, -1].all()) for record in before.values())
    for index, record in after.items():
        assert torch.equal(record.mask[:, :-1], before[index].mask[:, :-1])
        assert bool(record.mask[:, -1].all()) and record.mask.shape == before[index].mask.shape
    assert torch.equal(model(ids).logits, found)  # recording changes no output


@pytest.mark.parametrize("case", ["ffn", "attention", "block_gpt2", "experts"])
def test_it_is_the_replay_of_the_same_decisions_with_the_last_in_full(case: str) -> None:
    model, ids = build(case), tokens(3, 9)
    with torch.no_grad(), record_routes(model) as trace:
        model(ids)
    last = torch.zeros(3, 9, dtype=torch.bool)
    last[:, -1] = True
    edited = {i: r.mask | (last if r.mask.ndim == 2 else last[..., None]) for i, r in trace.items()}
    with (
        torch.no_grad(),
        replay_routes(model, RouteTrace({i: replace(trace[i], mask=edited[i]) for i in trace})),
    ):
        expected = model(ids).logits
    set_phases(model, "prefill")
    with torch.no_grad():
        assert gap(model(ids).logits, expected) < 1e-5
        with replay_routes(model, trace):  # a replay has the last word
            replayed = model(ids).logits
    assert gap(replayed, expected) > 1e-2


@every_case
def test_a_recorded_run_replays_to_itself(case: str) -> None:
    model, ids = build(case), tokens(2, PROMPT + 1)
    set_phases(model, "prefill")
    with torch.no_grad():
        with record_routes(model) as trace:
            prompt = model(ids[:, :PROMPT], use_cache=True)
        with record_routes(model) as step:
            logits = model(ids[:, PROMPT:], past_key_values=prompt.past_key_values).logits
        assert all(bool(record.mask.all()) for record in step.values())
        joined = RouteTrace.cat([trace, step])
        with replay_routes(model, joined.positions(0, PROMPT)):
            again = model(ids[:, :PROMPT], use_cache=True)
        with replay_routes(model, joined.positions(PROMPT, PROMPT + 1)):
            replayed = model(ids[:, PROMPT:], past_key_values=again.past_key_values).logits
    assert gap(again.logits, prompt.logits) < 1e-5
    assert gap(replayed, logits) < 1e-5


@every_case
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_decision(case: str, side: str) -> None:
    model, lengths, ids = build(case), (9, 5, 2), tokens(3, 9, seed=5)
    set_phases(model, "prefill")
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    if side == "left":
        mask = mask.flip(1)
    with torch.no_grad(), record_routes(model) as trace:
        padded = model(
            input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
        ).logits
    for row, length in enumerate(lengths):
        real = mask[row].bool()
        with torch.no_grad(), record_routes(model) as alone:
            expected = model(input_ids=ids[row : row + 1, real]).logits[0]
        assert gap(padded[row, real], expected) < 1e-4
        for index, record in trace.items():
            assert torch.equal(record.mask[row, real], alone[index].mask[0])
            assert bool(record.mask[row, real][-1].all()) and len(alone[index].mask[0]) == length


@pytest.mark.parametrize("case", ["ffn", "block", "attention_gpt2", "experts"])
def test_a_batch_with_padding_generates_what_its_rows_do(case: str) -> None:
    model, lengths, ids = build(case), (9, 5, 2), tokens(3, 9)
    set_phases(model, "prefill")
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long().flip(1)
    how: dict[str, Any] = {
        "max_new_tokens": 5,
        "do_sample": False,
        "eos_token_id": 63,
        "pad_token_id": 0,
    }
    together = model.generate(input_ids=ids * mask, attention_mask=mask, **how)[:, 9:]
    for row, length in enumerate(lengths):
        alone = model.generate(input_ids=ids[row : row + 1, -length:], **how)[0, length:]
        assert torch.equal(together[row, : len(alone)], alone)


@pytest.mark.parametrize("case", ["ffn", "block", "experts"])
@pytest.mark.parametrize("told", ["position_ids", "cu_seq_lens_q", "4D mask"])
def test_every_document_of_a_packed_row_has_its_own_last_token(case: str, told: str) -> None:
    model, documents = (
        build(case),
        [tokens(1, 5, seed=1), tokens(1, 1, seed=3), tokens(1, 7, seed=2)],
    )
    set_phases(model, "prefill")
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents], dim=0)[None]
    inputs: dict[str, Any] = {
        "input_ids": torch.cat(documents, dim=1),
        "position_ids": positions,
        "use_cache": False,
    }
    if told == "cu_seq_lens_q":
        inputs["cu_seq_lens_q"] = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    if told == "4D mask":
        document = (positions == 0).cumsum(1)
        inputs["attention_mask"] = (
            torch.ones(13, 13).tril().bool() & (document == document.mT)[None, None]
        )
    with torch.no_grad():
        with record_routes(model) as trace:
            logits = model(**inputs).logits
        separate = []
        for document in documents:
            with record_routes(model) as alone:
                separate.append((model(document).logits, alone))
    assert gap(logits, torch.cat([one for one, _ in separate], dim=1)) < 1e-4
    expected = RouteTrace.cat([one for _, one in separate])
    assert all(torch.equal(record.mask, expected[index].mask) for index, record in trace.items())


@pytest.mark.parametrize("case", ["ffn", "block", "experts", "halting"])
def test_continuous_batching_generates_what_generate_does(case: str) -> None:
    model = build(case)
    everything = generate(model)
    set_phases(model, "prefill")
    expected = generate(model)
    assert expected != everything
    assert [output.generated_tokens for output in generate_batch(model)] == expected


@pytest.mark.parametrize("case", ["ffn", "attention", "block_gpt2", "experts"])
def test_a_chunk_of_a_prompt_runs_its_last_token_in_full(case: str) -> None:
    model, ids = build(case), tokens(2, 8)
    set_phases(model, "prefill")
    with torch.no_grad():
        with record_routes(model) as first:
            cache = model(ids[:, :5], use_cache=True).past_key_values
        with record_routes(model) as second:
            model(ids[:, 5:], past_key_values=cache, use_cache=True)
    for trace, length in ((first, 5), (second, 3)):
        for record in trace.values():
            assert record.mask.shape[1] == length and bool(record.mask[:, -1].all())
    assert not all(bool(record.mask[:, :-1].all()) for record in second.values())


@every_case
def test_a_decoding_step_asks_neither_gate_nor_branch(case: str) -> None:
    model, ids, asked = build(case), tokens(2, PROMPT + 1), []
    set_phases(model, "prefill")
    groups = [
        group for h in routings_of(model) for group in (h.depth_route_gate, h.depth_route_branch)
    ]
    parts = [part for group in groups for part in group.values()]
    for part in parts:
        part.register_forward_pre_hook(lambda *_: asked.append(1))
    with torch.no_grad():
        cache = model(ids[:, :PROMPT], use_cache=True).past_key_values
        assert asked
        asked.clear()
        model(ids[:, PROMPT:], past_key_values=cache)
        model(ids[:, :1])  # a prompt of one token
        mask = torch.tensor([[0], [1]])
        model(ids[:, :1], attention_mask=mask)  # not a plain decoding step
    assert not asked


@pytest.mark.parametrize("case", ["ffn", "attention", "block_gpt2", "ffn_moe", "experts"])
def test_the_rows_that_run_are_the_rows_that_were_chosen(case: str) -> None:
    model, ids = build(case), tokens(2, PROMPT + STEPS)
    set_phases(model, "prefill")
    with counted_rows(model) as counts, count_routes(model) as counter:
        decoded(model, ids, PROMPT)
    assert counts["computed"] == counts["decided"]
    ratios, least = counter.full_ratio(), (STEPS + 1) / (PROMPT + STEPS)
    for index, full in ratios.items():
        assert full == pytest.approx(counts["decided"][index] / counts["all"][index])
        assert full >= least
    assert max(ratios.values()) > least  # of the prompt before its last token, too
    assert sum(counts["decided"].values()) < sum(counts["all"].values())


def test_what_was_switched_can_be_switched_back() -> None:
    model, ids = build("ffn"), tokens(2, PROMPT + STEPS)
    before = decoded(model, ids, PROMPT)
    set_phases(model, "prefill")
    between = decoded(model, ids, PROMPT)
    set_phases(model, "all")
    assert torch.equal(decoded(model, ids, PROMPT), before)
    assert not torch.equal(between, before)
    set_phases(model, "prefill")
    assert torch.equal(decoded(model, ids, PROMPT), between)


@pytest.mark.parametrize("executor", ["masked", "gathered", "rows"])
def test_every_executor_runs_it_alike(executor: str) -> None:
    model, ids = build("block"), tokens(2, PROMPT + STEPS)
    set_phases(model, "prefill")
    expected = decoded(model, ids, PROMPT)
    with state_of(model).override(executor=executor):
        assert gap(decoded(model, ids, PROMPT), expected) < 1e-5


def test_one_compiled_graph_holds_it() -> None:
    model, ids = build_routed("llama", "block", layers=[0, 1], phases="prefill"), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    torch._dynamo.reset()
    with torch.no_grad():
        for inputs in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": ids[:, :1]}):
            found = torch.compile(model, fullgraph=True, backend="eager")(**inputs).logits
            real = inputs.get("attention_mask", torch.ones_like(ids[:, :1])).bool()
            assert gap(found[real], model(**inputs).logits[real]) < 1e-5
    torch._dynamo.reset()


@pytest.mark.parametrize("case", ["ffn", "halting", "predictor"])
def test_training_is_the_same(case: str) -> None:
    model, ids = build(case), tokens(2, 9)
    model.train()
    logits = []
    for phases in ("all", "prefill"):
        set_phases(model, phases)
        with record_routes(model):
            torch.manual_seed(0)
            logits.append(model(ids).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("fields", [{}, {"budget_scope": "global"}, {"selection": "controller"}])
def test_calibration_is_the_same(fields: dict[str, Any]) -> None:
    batch = {"input_ids": tokens(4, 3)}  # short: a third of the tokens are last ones
    found = []
    for phases in ("all", "prefill"):
        model = build_routed("llama", "mlp", **fields)
        set_phases(model, phases)
        ratios = calibrate(model, [batch], 0.4)
        found.append(
            (ratios, [routing.active_quantiles().values for routing in routings_of(model)])
        )
    (ratios, tables), (other_ratios, other_tables) = found
    assert ratios == other_ratios
    assert all(map(torch.equal, tables, other_tables))


def test_only_the_other_phases_are_written(saved_adapter: Callable[[PeftModel], Path]) -> None:
    """Versions without the field refuse a file with it, and read one without."""
    model, ids = build("ffn"), tokens(2, 9)
    before = saved_adapter(model)
    assert (
        not {"phases", "prompt_tail"}
        & json.loads((before / "adapter_config.json").read_text()).keys()
    )
    assert (
        PeftModel.from_pretrained(build_base("llama"), before).peft_config["default"].phases
        == "all"
    )
    set_phases(model, "prefill")
    loaded = PeftModel.from_pretrained(build_base("llama"), saved_adapter(model)).eval()
    assert loaded.peft_config["default"].phases == "prefill"
    assert "phases prefill" in str(loaded)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_decoding_step_costs_what_the_base_does() -> None:
    model = build("ffn")
    prompt, step = route_cost(model, length=64), route_cost(model, length=1, cached=64)
    set_phases(model, "prefill")
    routed = route_cost(model, length=64)
    full = 1 / 64  # the last token's
    wanted = prompt.flops_routed + full * (prompt.flops_dense - prompt.flops_routed)
    assert routed.flops_routed == pytest.approx(wanted, rel=0.02)
    model.peft_config["default"].prompt_tail = 32
    half = route_cost(model, length=64).flops_routed
    assert prompt.flops_dense - half == pytest.approx(
        (prompt.flops_dense - prompt.flops_routed) / 2, rel=0.1
    )
    assert route_cost(model, length=32).flops_routed == route_cost(model, length=32).flops_dense
    model.peft_config["default"].prompt_tail = None
    cost = route_cost(model, length=1, cached=64)
    assert cost.flops_routed == cost.flops_dense == step.flops_dense != step.flops_routed
    assert cost.ffn_ratio == 1.0


def test_bench_times_the_bases_decoding() -> None:
    model = build("ffn")
    set_phases(model, "prefill")
    result = bench(model, input_ids=tokens(1, 8), budgets=(0.5,), decode_steps=2, repeats=1)
    prefill, decode = (result[part]["budgets"]["0.5"] for part in ("prefill", "decode"))
    assert prefill["full_ratio"] < 1 == decode["full_ratio"] == decode["flops_routed_over_dense"]
    assert decode["eta"] is None  # nothing is skipped
    assert model.peft_config["default"].phases == "prefill"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="phases='decode' is not supported; use one of: all, prefill"
    ):
        DepthRouteConfig(phases="decode")
    with pytest.raises(ConfigError, match="needs granularity='token'"):
        DepthRouteConfig(phases="prefill", granularity="sequence")
    whole = build_routed("llama", granularity="sequence")
    for phases in ("prefill", "decode"):
        with pytest.raises(ConfigError, match=f"phases='{phases}'"):
            set_phases(whole, phases)
    set_phases(whole, "all")
    model = build("ffn")
    with (
        model.disable_adapter(),
        pytest.raises(ValueError, match="no depth-routed adapter is active"),
    ):
        set_phases(model, "prefill")
    set_phases(model, "prefill")
    with pytest.raises(ConfigError, match=r"call set_phases\(model, 'all'\) first"):
        draft_view(model)
    set_phases(model, "all")
    draft_view(model)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    model = routed(AutoModelForCausalLM.from_pretrained(save_base(tmp_path / "base")))
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_the_command_line_takes_it(adapter: Path) -> None:
    words = (
        "generate",
        adapter,
        "--prompt",
        "the cat sat on the mat",
        "--max-new-tokens",
        20,
        "--phases",
    )
    ended = {phases: run(*words, phases) for phases in ("all", "prefill")}
    assert {one.code for one in ended.values()} == {0}
    shares = {
        phases: float(one.err.rsplit("full ratio ", 1)[1].split()[0])
        for phases, one in ended.items()
    }
    assert shares["all"] < shares["prefill"] < 1
    new = int(ended["prefill"].err.split(" tokens", 1)[0].rsplit(maxsplit=1)[-1])
    assert shares["prefill"] > new / (new + 6)
    assert "phases='some'" in run(*words, "some").error
    assert "--phases has no effect with --full" in run(*words, "prefill", "--full").error
    assert "add --phases all" in run(*words, "prefill", "--lossless").error
    assert "phases='some'" in run("bench", adapter, "--phases", "some").error
    assert "phases='some'" in run("serve", adapter, "--phases", "some").error
    assert "budget=2.0" in run("serve", adapter, "--budget", "2").error


def test_a_served_adapter_has_the_phases_that_were_asked_for(adapter: Path, tmp_path: Path) -> None:
    served, before = tmp_path / "served", (adapter / "adapter_config.json").read_bytes()
    link_model(tmp_path / "base", adapter, served)
    change_config(served / "adapter_config.json", phases="prefill")
    model: Any = AutoModelForCausalLM.from_pretrained(served)
    assert {routing.active_config().phases for routing in routings_of(model)} == {"prefill"}
    assert (adapter / "adapter_config.json").read_bytes() == before
    assert len(decoder_layers(model)) == len(
        decoder_layers(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    )


def test_what_one_generation_config_leaves_open_the_models_own_says() -> None:
    model = build_routed("llama", phases="prefill")
    model.get_base_model().generation_config.use_cache = False
    settings = GenerationConfig(max_new_tokens=4, do_sample=False)
    settings.use_cache = None
    with pytest.raises(ConfigError, match="by the KV cache"):
        model.generate(input_ids=tokens(1, 8), generation_config=settings)
