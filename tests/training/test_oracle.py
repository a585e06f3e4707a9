"""Counterfactual labels against a naive loop that really forks: one full forward pass per layer,
path and position."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import FAMILY_NAMES, GATES, build_routed, decoder_layers, tokens
from study.refresh import refresh_cost
from study.utility import exact_utility, utility_labels
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_depthroute.adapter.labels import as_served
from hf_depthroute.base import lm_head
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.inference.calibration import use_selection
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.trace import RouteRecord, RouteTrace, record_routes, replay_routes
from hf_depthroute.training.forks import divergence_from_dense, observe_prefix
from hf_depthroute.training.objective import RoutingArguments, RoutingObjective
from hf_depthroute.training.oracle import (
    ORACLES,
    UtilityLabels,
    prefix_utility,
)

LAYERS = (1, 2, 3)
WINDOW, GAMMA = 3, 0.5


def batch(padded: bool = True, length: int = 8) -> dict[str, torch.Tensor]:
    ids = tokens(2, length)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :2] = 0  # left padding
        mask[0, -1] = 0  # right padding
    return {"input_ids": ids * mask, "attention_mask": mask}


def chosen(mask: torch.Tensor) -> RouteRecord:
    """A record that makes a replay choose `mask`."""
    scores = torch.zeros(mask.shape)
    return RouteRecord(mask, scores, scores, None, 0.5)


@torch.no_grad()
def forced_loss(
    model: nn.Module, inputs: dict[str, torch.Tensor], masks: dict[int, torch.Tensor]
) -> torch.Tensor:
    """Windowed loss `[B, T]` of a real forward pass with the given decisions;
    layers without a mask decide."""
    with (
        use_selection(model, "topk"),
        replay_routes(model, RouteTrace({i: chosen(m) for i, m in masks.items()})),
    ):
        logits = model(**inputs, use_cache=False).logits
    ids, real = inputs["input_ids"], inputs["attention_mask"].bool()
    rows, length = ids.shape
    loss = torch.zeros(rows, length)
    for b in range(rows):
        for t in range(length - 1):
            if real[b, t] and real[b, t + 1]:
                loss[b, t] = F.cross_entropy(logits[b, t], ids[b, t + 1])
    windowed = torch.zeros_like(loss)
    for t in range(length):
        for delta in range(min(WINDOW, length - t)):
            windowed[:, t] += GAMMA**delta * loss[:, t + delta]
    return windowed


def policy(model: nn.Module, inputs: dict[str, torch.Tensor], kind: str) -> dict[int, torch.Tensor]:
    """The trunk's decisions: all full, or the gate's."""
    if kind == "all_full":
        return {i: torch.ones(inputs["input_ids"].shape, dtype=torch.bool) for i in LAYERS}
    with torch.no_grad(), use_selection(model, "topk"), record_routes(model) as trace:
        model(**inputs, use_cache=False)
    return {i: record.mask for i, record in trace.items()}


def forked_masks(
    trunk: dict[int, torch.Tensor], layer: int, forked: torch.Tensor, kind: str
) -> dict[int, torch.Tensor]:
    """Layers before the fork as in the trunk, the fork, and after it full,
    or (on policy) left to the gate."""
    later = {i: m for i, m in trunk.items() if i > layer and kind == "all_full"}
    return {**{i: m for i, m in trunk.items() if i < layer}, layer: forked, **later}


@pytest.mark.parametrize("kind", ORACLES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_layer_wide_labels_equal_real_forks(family: str, gate: str, kind: str) -> None:
    model = build_routed(family, gate)
    inputs = batch()
    with use_selection(model, "topk"):
        labels = utility_labels(model, inputs, kind, WINDOW, GAMMA)
    trunk = policy(model, inputs, kind)
    assert tuple(labels) == LAYERS
    for layer in LAYERS:
        ones = torch.ones_like(trunk[layer])
        cheap = forced_loss(model, inputs, forked_masks(trunk, layer, ~ones, kind))
        full = forced_loss(model, inputs, forked_masks(trunk, layer, ones, kind))
        assert (labels[layer].utility - (cheap - full)).abs().max() <= 1e-5
        assert labels[layer].utility.abs().max() > 1e-3
        real = inputs["attention_mask"].bool()
        expected = real.clone()
        expected[1, -1] = False  # predicts nothing; row 0 ends in padding one position earlier
        expected[0, -2] = False
        assert torch.equal(labels[layer].valid, expected)


@pytest.mark.parametrize("kind", ORACLES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_exact_labels_equal_real_forks_of_one_token(family: str, kind: str) -> None:
    model = build_routed(family)
    inputs = batch(padded=False)
    positions = torch.tensor([0, 3, 6])
    with use_selection(model, "topk"):
        exact = exact_utility(model, inputs, positions, kind, WINDOW, GAMMA)
    trunk = policy(model, inputs, kind)
    for layer in LAYERS:
        for column, position in enumerate(positions.tolist()):
            losses = {}
            for path in (False, True):
                forked = trunk[layer].clone()
                forked[:, position] = path
                losses[path] = forced_loss(model, inputs, forked_masks(trunk, layer, forked, kind))[
                    :, position
                ]
            assert (exact[layer][:, column] - (losses[False] - losses[True])).abs().max() <= 1e-5


def test_the_layer_wide_fork_is_biased_except_where_no_attention_follows() -> None:
    model = build_routed("llama")
    inputs = batch(padded=False)
    positions = torch.arange(8)
    labels = utility_labels(model, inputs, "all_full", 1, GAMMA)
    exact = exact_utility(model, inputs, positions, "all_full", 1, GAMMA)
    # The last layer: nothing mixes positions after it.
    assert (labels[3].utility - exact[3]).abs().max() <= 1e-5
    assert (labels[1].utility - exact[1]).abs().max() > 1e-3


def test_labels_of_a_training_step_fork_the_observed_pass() -> None:
    model = build_routed("llama").train()
    inputs = batch()
    with observe_prefix(model) as prefix:
        model(**inputs)  # with a cache, as transformers trains by default
        with use_selection(model, "topk"):
            labels = prefix_utility(prefix, inputs["input_ids"], "on_policy", WINDOW, GAMMA)
    model.eval()
    with use_selection(model, "topk"):
        expected = utility_labels(model, inputs, "on_policy", WINDOW, GAMMA)
    for layer in LAYERS:
        assert (labels[layer].utility - expected[layer].utility).abs().max() <= 1e-5


def test_prompts_alone_have_no_labels() -> None:
    """Their tokens are routed, and the next few have no loss; those that have one run in full."""
    model = build_routed("llama", phases="prefill").train()
    ids = tokens(2, 8)
    labels = ids.clone()
    labels[:, :5] = -100
    with observe_prefix(model) as prefix, as_served(model, {"input_ids": ids, "labels": labels}):
        model(ids)
        with pytest.raises(ValueError, match="phases='prefill'"):
            prefix_utility(prefix, labels)
    with pytest.raises(ConfigError, match="phases='prefill'"):
        RoutingObjective(RoutingArguments(util_weight=1.0, oracle="all_full"), model)
    with observe_prefix(model) as prefix, as_served(model, {"input_ids": ids, "labels": ids}):
        model(ids)  # no row has a prompt
        assert prefix_utility(prefix, ids)


@pytest.mark.parametrize("weights", [{"oracle": "all_full"}, {"cgs_weight": 0.5}])
@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        ("mlp", {"gate": "halting", "target": "block", "branch": "none"}, "gate='halting'"),
        ("mlp", {"granularity": "sequence"}, "granularity='sequence'"),
    ],
)
def test_what_has_no_labels_is_refused_before_the_first_step(
    kind: str, fields: dict[str, Any], named: str, weights: dict[str, Any]
) -> None:
    model = build_routed("llama", kind, **fields)
    RoutingObjective(RoutingArguments(), model)
    with pytest.raises(ConfigError, match=f"they do not support {named}"):
        RoutingObjective(RoutingArguments(**weights), model)


def test_forks_can_be_limited_to_some_layers() -> None:
    model = build_routed("llama")
    every, one = (
        utility_labels(model, batch(), "on_policy", layers=layers) for layers in (None, [2])
    )
    assert tuple(one) == (2,)
    assert (one[2].utility - every[2].utility).abs().max() <= 1e-6


def packed(lengths: tuple[int, int] = (6, 4)) -> dict[str, torch.Tensor]:
    """Two documents in one row; the first token of neither is predicted."""
    ids = tokens(1, sum(lengths))
    labels = ids.clone()
    labels[:, [0, lengths[0]]] = -100
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def labels_of(
    model: nn.Module, inputs: dict[str, torch.Tensor], kind: str, **more: Any
) -> dict[int, UtilityLabels]:
    with observe_prefix(model) as prefix:
        model(**inputs, use_cache=False, **more)
        return prefix_utility(prefix, inputs["labels"], kind, WINDOW, GAMMA)


@pytest.mark.parametrize("kind", ORACLES)
def test_labels_of_packed_documents_are_those_of_each_alone(kind: str) -> None:
    """A window ends with its document."""
    model, inputs = build_routed("llama", selection="threshold"), packed()
    labels = labels_of(model, inputs, kind)
    for part in (slice(0, 6), slice(6, 10)):
        expected = labels_of(model, {name: value[:, part] for name, value in inputs.items()}, kind)
        for layer in LAYERS:
            assert (labels[layer].utility[:, part] - expected[layer].utility).abs().max() <= 1e-5
            assert torch.equal(labels[layer].valid[:, part], expected[layer].valid)


def test_a_batch_of_packed_documents_is_read_as_such() -> None:
    model, inputs = build_routed("llama", selection="threshold"), packed()
    expected = labels_of(model, inputs, "all_full")
    del inputs["labels"]  # the ids then, but for the first of each document
    labels = utility_labels(model, inputs, "all_full", WINDOW, GAMMA)
    for layer in LAYERS:
        assert torch.equal(labels[layer].utility, expected[layer].utility)
        assert torch.equal(labels[layer].valid, expected[layer].valid)


def attend_within(
    module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """As FlashAttention with packed rows: all rows in a line, cut at `cu_seq_lens_q`;
    what no cut covers is NaN."""
    heads = q.shape[1] // k.shape[1]
    lined = [
        x.transpose(1, 2).flatten(0, 1).transpose(0, 1)
        for x in (q, *(x.repeat_interleave(heads, 1) for x in (k, v)))
    ]
    out = torch.full_like(lined[0], float("nan"))
    for start, end in pairwise(kwargs["cu_seq_lens_q"].tolist()):
        parts = (x[None, :, start:end] for x in lined)
        out[:, start:end] = F.scaled_dot_product_attention(
            *parts, is_causal=True, scale=kwargs["scaling"]
        )[0]
    return out.transpose(0, 1).unflatten(0, (q.shape[0], q.shape[2])), None


@pytest.mark.parametrize("kind", ORACLES)
def test_forks_of_packed_rows_keep_their_documents_apart_where_attention_counts_rows(
    kind: str,
) -> None:
    AttentionInterface.register("within", attend_within)
    AttentionMaskInterface.register("within", ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    model, inputs = build_routed("llama", selection="threshold"), packed()
    expected = labels_of(model, inputs, kind)
    model.get_base_model().set_attn_implementation("within")
    ends = torch.tensor([0, 6, 10], dtype=torch.int32)
    labels = labels_of(
        model, inputs, kind, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=6, max_length_k=6
    )
    for layer in LAYERS:
        assert (labels[layer].utility - expected[layer].utility).abs().max() <= 1e-5


def test_labels_that_are_not_predicted_have_no_loss() -> None:
    model = build_routed("llama")
    inputs = batch(padded=False)
    labels = inputs["input_ids"].clone()
    labels[:, :6] = -100  # only positions 5 and 6 predict a token
    result = utility_labels(model, {**inputs, "labels": labels}, "all_full", WINDOW, GAMMA)
    assert result[2].valid[0].tolist() == [False, False, False, True, True, True, True, False]
    assert (result[2].utility[:, :3] == 0).all()


def test_the_common_prefix_runs_once_and_every_fork_is_in_one_batch() -> None:
    model = build_routed("llama")
    calls: dict[int, list[int]] = {}
    for index, layer in enumerate(decoder_layers(model)):
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, i=index: (
                calls.setdefault(i, []).append(kwargs["hidden_states"].shape[0])
                if "hidden_states" in kwargs
                else calls.setdefault(i, []).append(args[0].shape[0])
            ),
            with_kwargs=True,
        )
    utility_labels(model, batch(), "all_full")
    # The plain pass of two sequences, then one pass over the forks: 1, 2 and 3 streams of two
    # sequences.
    assert calls == {0: [2], 1: [2, 2], 2: [2, 4], 3: [2, 6]}


def test_logits_exist_in_chunks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_routed("llama")
    expected = utility_labels(model, batch(), "all_full")
    seen: list[int] = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, output: seen.append(output.shape[0]))
    monkeypatch.setattr(lm_head, "_LOGITS", 5 * head.weight.shape[0])
    labels = utility_labels(model, batch(), "all_full")
    assert seen[1:] == [5] * 8 + [4]  # four streams of eleven predicted tokens
    assert all((labels[i].utility - expected[i].utility).abs().max() <= 1e-5 for i in LAYERS)


@pytest.mark.parametrize("gate", GATES)
def test_an_oracle_changes_nothing(gate: str) -> None:
    model = build_routed("gpt2", gate).train()
    model.get_base_model().transformer.h[0].eval()  # a module that the user froze in eval mode
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.random.get_rng_state()
    utility_labels(model, batch())
    exact_utility(model, batch(), torch.tensor([1]))
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(layer._forward_pre_hooks for layer in decoder_layers(model))
    assert not any(routing.state.settings.recorders for routing in routings_of(model))


def test_forks_run_without_dropout() -> None:
    model = build_routed("gpt2").train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    with observe_prefix(model) as prefix:
        model(**batch())
        one, two = (prefix_utility(prefix, batch()["input_ids"]) for _ in range(2))
    assert all(torch.equal(one[i].utility, two[i].utility) for i in LAYERS)


def test_divergence_from_dense_is_the_kl_to_the_disabled_adapter() -> None:
    model = build_routed("llama").train()
    inputs = batch()
    with observe_prefix(model) as prefix:
        logits = model(**inputs).logits
        value = divergence_from_dense(prefix, logits, inputs["input_ids"])
        value.backward()
    with torch.no_grad(), model.disable_adapter():
        dense = model(**inputs).logits.log_softmax(-1)
    routed = logits.detach().log_softmax(-1)
    real = inputs["attention_mask"].bool()
    terms: list[Any] = [
        (dense[b, t].exp() * (dense[b, t] - routed[b, t])).sum()
        for b in range(2)
        for t in range(7)
        if real[b, t] and real[b, t + 1]
    ]
    assert value.item() == pytest.approx((sum(terms) / len(terms)).item(), abs=1e-5)
    assert value.item() > 1e-3
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_the_cost_of_a_refresh_is_a_ratio_of_times() -> None:
    assert 0.05 < refresh_cost(build_routed("llama"), batch(), rounds=2) < 50


def test_an_unknown_oracle_is_refused() -> None:
    with pytest.raises(ValueError, match="use one of: all_full, on_policy"):
        utility_labels(build_routed("llama"), batch(), "later")


@pytest.mark.parametrize("case", ["ds_id", "placements", "device"])
def test_a_model_in_pieces_is_refused(case: str) -> None:
    model = build_routed("llama")
    head = model.get_output_embeddings()
    if case == "device":
        head.to("meta")
    else:  # what DeepSpeed and FSDP put on a parameter
        setattr(head.weight, case, 1)
    with pytest.raises(
        ValueError, match="several devices" if case == "device" else "FSDP or ZeRO-3"
    ):
        utility_labels(model, batch())
