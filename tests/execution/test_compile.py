"""A compiled routed model: one graph, no recompilation, the tokens of the eager model,
and rows that are skipped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CONFIGS, DEPTH, DEVICE, build_routed, decoder_layers, randomised, routed, tokens
from peft import PeftModel
from protocol import gap
from torch._dynamo.testing import CompileCounterWithBackend
from training import adapter_state, assert_same_tensors, make_trainer, rows, step_logs
from transformers import PreTrainedModel, StaticCache

from hf_depthroute.execution.kernels import plain
from hf_depthroute.routing.stack import state_of
from hf_depthroute.routing.trace import record_routes

STEPS = 5


@pytest.fixture(autouse=True)
def fixed_global_state() -> None:
    """That of all tests, without placing their tensors: the compiler does not see through that."""
    torch.set_num_threads(1)
    torch.manual_seed(1234)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def shallow(family: str, kind: str, **fields: Any) -> PeftModel:
    """Two layers, both routed: compilation time grows with the depth,
    and nothing that is tested here does."""
    cls, config = CONFIGS[family]
    sizes = config()
    sizes.num_hidden_layers = 2
    if getattr(sizes, "layer_types", None):
        sizes.layer_types = sizes.layer_types[:2]
    base: PreTrainedModel = randomised(cls(sizes), "sdpa", torch.float32, 0)
    return routed(base, kind, layers=[0, 1], **fields)


@torch.no_grad()
def decoded(model: PeftModel, step: Callable[..., Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens `[2, STEPS]` and their logits after an eager prefill into a static cache;
    `step` decodes."""
    cache = StaticCache(config=model.config, max_cache_len=16)
    ids = tokens(2, 6)
    logits = [model(input_ids=ids, past_key_values=cache).logits[:, -1:]]
    for position in range(6, 6 + STEPS):
        last, at = logits[-1].argmax(-1), torch.tensor([[position]], device=DEVICE)
        logits.append(step(input_ids=last, past_key_values=cache, position_ids=at).logits)
    found = torch.cat(logits[1:], dim=1)
    return found.argmax(-1), found


class CountingFunctions:
    """Stands in for `torch.nn.functional` in the row ops:
    counts the rows that go through a linear map."""

    def __init__(self) -> None:
        self.rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn.functional, name)

    def linear(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        self.rows += len(x)
        return torch.nn.functional.linear(x, *args)


# Linear maps inside the row ops of a routed layer.
LINEARS = {"mlp": 3, "jepa": 3, "attention": 2, "block": 5}
CASES = [
    ("llama", "mlp", "eager"),
    ("qwen3", "attention", "eager"),
    ("llama", "block", "aot_eager"),
    ("qwen3", "jepa", "eager"),
]


@pytest.mark.nightly(unless=lambda kind: kind in ("mlp", "attention"))
@pytest.mark.parametrize("family,kind,backend", CASES)
def test_compiled_decoding_skips_and_gives_the_eager_tokens(
    family: str, kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, decided = shallow(family, kind), []

    def eager(**inputs: Any) -> Any:
        with record_routes(model) as trace:
            out = model(**inputs)
        decided.extend(int(record.mask.sum()) for record in trace.values())
        return out

    expected, expected_logits = decoded(model, eager)
    counting, counter = CountingFunctions(), CompileCounterWithBackend(backend)
    monkeypatch.setattr(plain, "F", counting)
    found, logits = decoded(model, torch.compile(model, fullgraph=True, backend=counter))
    assert counter.frame_count == 1  # STEPS steps, one compilation
    assert torch.equal(found, expected)
    assert gap(logits, expected_logits) < 1e-4
    if DEVICE == "cpu":  # elsewhere kernels of their own run
        assert counting.rows == LINEARS[kind] * sum(decided)
    assert 0 < sum(decided) < 2 * len(decided)  # two sequences


def test_compiled_prefill_equals_eager() -> None:
    model, ids = shallow("llama", "block"), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend="eager")(
            input_ids=ids, attention_mask=mask
        ).logits
        expected = model(input_ids=ids, attention_mask=mask).logits
    real = mask.bool()
    assert gap(found[real], expected[real]) < 1e-5


def test_what_row_ops_do_not_support_is_compiled_masked() -> None:
    model, ids = shallow("llama", "mlp"), tokens(2, 3)
    for layer in decoder_layers(model):
        layer.mlp.act_fn = torch.nn.GELU()
    counter = CompileCounterWithBackend("eager")
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend=counter)(input_ids=ids).logits
        expected = model(input_ids=ids).logits
    assert not any("swiglu_rows" in str(node.target) for node in counter.graphs[0].graph.nodes)
    assert gap(found, expected) < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "olmoe", "gpt2"])
@pytest.mark.parametrize("kind", ["mlp", "attention", "block"])
def test_row_ops_equal_the_gathered_executor(family: str, kind: str) -> None:
    """In eager mode, with padding and a cache; gpt2 and the experts of olmoe fall back."""
    model, ids = build_routed(family, kind), tokens(3, 8)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0

    @torch.no_grad()
    def run(executor: str) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        with state_of(model).override(executor=executor), record_routes(model) as trace:
            prompt = model(input_ids=ids[:, :6], attention_mask=mask[:, :6], use_cache=True)
            rest = model(
                input_ids=ids[:, 6:], attention_mask=mask, past_key_values=prompt.past_key_values
            )
        logits = torch.cat([prompt.logits, rest.logits], dim=1)
        return logits[mask.bool()], {index: record.mask for index, record in trace.items()}

    (found, masks), (expected, expected_masks) = run("rows"), run("gathered")
    assert len(masks) == DEPTH - 1
    assert all(torch.equal(masks[index], expected_masks[index]) for index in masks)
    assert gap(found, expected) < 1e-5


def test_row_ops_scale_by_the_gate() -> None:
    for fields in (
        {"scale_by_gate": True, "target": "block"},
        {"gate": "halting", "target": "block"},
        {
            "gate": "bottleneck",
            "target": "block",
            "branch": "swiglu",
        },
    ):
        model, ids = build_routed("llama", **fields), tokens(3, 8)
        with torch.no_grad():
            expected = model(input_ids=ids).logits
            with state_of(model).override(executor="rows"):
                assert gap(model(input_ids=ids).logits, expected) < 1e-5


def test_hooks_and_wrappers_on_the_ffn_still_run() -> None:
    """Row ops read weights and would pass a hook by."""
    model, ids = build_routed("llama", "mlp"), tokens(2, 4)
    seen = []
    decoder_layers(model)[1].mlp.up_proj.register_forward_hook(lambda *_: seen.append(True))
    with torch.no_grad(), state_of(model).override(executor="rows"):
        model(input_ids=ids)
    assert seen


@pytest.mark.nightly(unless=lambda kind: kind == "mlp")
@pytest.mark.parametrize("kind", ["mlp", "jepa"])
def test_a_compiled_trainer_makes_the_steps_of_a_plain_one(kind: str, tmp_path: Path) -> None:
    """`TrainingArguments(torch_compile=True)`, with padding: one graph for all steps."""

    def trained(**fields: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = shallow("llama", kind)
        trainer, _ = make_trainer(model, rows(8, padding=(0, 3)), tmp_path, **fields)
        trainer.train()
        return [entry["loss"] for entry in step_logs(trainer)], adapter_state(model)

    expected, expected_state = trained()
    torch._dynamo.utils.counters.clear()
    found, state = trained(torch_compile=True, torch_compile_backend="eager")
    stats, breaks = (
        torch._dynamo.utils.counters["stats"],
        torch._dynamo.utils.counters["graph_break"],
    )
    assert stats["unique_graphs"] == 1 and not breaks
    assert len(found) == 4 and found == pytest.approx(expected, abs=1e-6)
    assert_same_tensors(state, expected_state, tolerance=1e-5)


def test_a_compiled_trainer_follows_a_budget_schedule(tmp_path: Path) -> None:
    """Each budget is compiled on its own."""
    losses = []
    for fields in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        trainer, _ = make_trainer(
            shallow("llama", "mlp"), rows(4), tmp_path, budget_schedule_steps=2, **fields
        )
        trainer.train()
        losses.append([entry["loss"] for entry in step_logs(trainer)])
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["mlp", "attention", "block", "memory"])
def test_graph_replay_gives_the_eager_tokens(kind: str) -> None:
    """One captured step of decoding, replayed at every position,
    against eager steps without row ops."""
    model = shallow("llama", kind).to("cuda")
    ids = tokens(2, 6).to("cuda")
    last, at = ids[:, -1:].clone(), torch.tensor([[0]], device="cuda")

    @torch.no_grad()
    def generated(step: Callable[[StaticCache], torch.Tensor]) -> torch.Tensor:
        cache = StaticCache(config=model.config, max_cache_len=16)
        model(input_ids=ids, past_key_values=cache)
        last.copy_(ids[:, -1:])
        found = []
        for position in range(6, 6 + STEPS):
            at.fill_(position)
            found.append(step(cache).argmax(-1))
            last.copy_(found[-1])
        return torch.cat(found, dim=1)

    def eager(cache: StaticCache) -> torch.Tensor:
        return model(input_ids=last, position_ids=at, past_key_values=cache).logits

    graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def replayed(cache: StaticCache) -> torch.Tensor:
        if id(cache) not in graphs:
            written = [
                part
                for layer in cache.layers
                for part in (layer.cumulative_length, getattr(layer, "tokens", None))
                if part is not None
            ]
            kept = [(part, part.clone()) for part in written]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            # warm-up: compiles the kernels; what it writes is written again.
            with torch.cuda.stream(side):
                eager(cache)
            torch.cuda.current_stream().wait_stream(side)
            for part, before in kept:
                part.copy_(before)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = eager(cache)
            graphs[id(cache)] = graph, logits
        graph, logits = graphs[id(cache)]
        graph.replay()
        return logits.clone()

    with state_of(model).override(executor="gathered"):
        expected = generated(eager)
    assert torch.equal(generated(replayed), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["mlp", "attention", "block"])
def test_a_routed_prompt_waits_for_the_gpu_no_more_than_the_base_does(kind: str) -> None:
    model, ids = shallow("llama", kind).to("cuda"), tokens(2, 32).to("cuda")

    @torch.no_grad()
    def waits() -> list[str]:
        model(input_ids=ids)  # block shapes of the kernels are chosen
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                model(input_ids=ids)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return [
            f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)
        ]

    with model.disable_adapter():
        base = waits()
    assert waits() == base
