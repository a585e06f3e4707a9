"""Branches fitted by least squares: the best `down` there is, on the tokens that need it."""

import pytest
import torch
import torch.nn.functional as F
from models import FAMILY_NAMES, build_base, decoder_layers, tokens

from hf_depthroute import DepthRouteConfig, calibrate, get_depth_routed_model, record_routes
from hf_depthroute.inference.fitting import fit_branch, fit_branches, fit_memory
from hf_depthroute.parts.branches import LowRankBranch
from hf_depthroute.parts.memory import NgramMemory, suffixes
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.trace import full_depth

BATCHES = [{"input_ids": tokens(8, 16, seed=seed)} for seed in (5, 6)]
TARGETS = ("ffn", "attention", "block")
MEMORY = {
    "branch": "memory",
    "memory_slots": 2048,
    "memory_width": 64,
    "memory_heads": 1,
    "ngram_order": 2,
}


def build(family="llama", layers=(1, 3), **fields):
    fields = {"target": "ffn", "gate": "none", "branch_rank": 12} | fields
    return get_depth_routed_model(
        build_base(family), DepthRouteConfig(layers=list(layers), **fields)
    ).eval()


def branches(model):
    return {
        routing.layer_index: routing.depth_route_branch["default"] for routing in routings_of(model)
    }


@torch.no_grad()
def dense_update(model, layer, target, batches):
    """What the branch of the only routed `layer` reads and what it should say, `[N, d]` each,
    on the dense stream."""
    rows = []
    decoder = decoder_layers(model)[layer]
    seen = {}
    handles = [
        decoder.register_forward_hook(
            lambda m, args, kwargs, out: seen.update(
                h=args[0] if args else kwargs["hidden_states"],
                out=out[0] if isinstance(out, tuple) else out,
            ),
            with_kwargs=True,
        ),
        decoder.self_attn.register_forward_hook(lambda m, args, out: seen.update(update=out[0])),
    ]
    with full_depth(model):
        for batch in batches:
            model(**batch)
            a = seen["h"] + seen["update"]
            read, after = {
                "ffn": (a, seen["out"]),
                "attention": (seen["h"], a),
                "block": (seen["h"], seen["out"]),
            }[target]
            rows.append((read.flatten(0, 1), (after - read).flatten(0, 1)))
    for handle in handles:
        handle.remove()
    return (torch.cat(parts) for parts in zip(*rows))


@pytest.mark.parametrize("target", TARGETS)
def test_down_is_the_ridge_solution_and_the_error_is_what_is_left(target):
    model = build(layers=[2], target=target)
    found = fit_branches(model, BATCHES, ridge=0.1)
    read, update = dense_update(model, 2, target, BATCHES)
    branch = branches(model)[2]
    with torch.no_grad():
        # As the next norm sees errors.
        scale = 1 / (read + update).square().mean(1, keepdim=True).sqrt().double()
        features = F.silu(branch.up(branch.norm(read))).double() * scale
        gram = features.T @ features
        penalty = 0.1 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
        expected = torch.linalg.solve(gram + penalty, features.T @ (update * scale)).T
        left = ((update - branch(read)) * scale).square().sum() / (update * scale).square().sum()
    assert torch.allclose(branch.down.weight.double(), expected, atol=1e-5)
    assert found == {2: pytest.approx(left.item(), abs=1e-5)}
    assert 0 < found[2] < 1


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_fitted_branches_bring_the_logits_closer_to_the_dense_model(family, target):
    dense, model = build_base(family), build(family, target=target)
    batch = BATCHES[0]
    with torch.no_grad():
        wanted = dense(**batch).logits
        before = (model(**batch).logits - wanted).square().mean()
        errors = fit_branches(model, BATCHES)
        after = (model(**batch).logits - wanted).square().mean()
    assert list(errors) == [1, 3]
    assert all(0 < error < 1 for error in errors.values())
    assert after < before


def test_a_rank_as_high_as_the_tokens_imitates_exactly():
    batch = [{"input_ids": tokens(2, 6, seed=9)}]
    model = build(layers=[1, 2], branch_rank=64)
    errors = fit_branches(model, batch, ridge=0.0)
    assert max(errors.values()) < 1e-8
    with torch.no_grad():
        assert torch.allclose(
            model(**batch[0]).logits, build_base("llama")(**batch[0]).logits, atol=1e-3
        )


def test_a_calibrated_layer_is_fitted_on_the_tokens_that_take_its_cheap_path():
    model = build(layers=[2], gate="mlp", budget=0.5, branch_rank=4)
    calibrate(model, BATCHES)
    errors = fit_branches(model, BATCHES, ridge=0.0)
    read, update = dense_update(model, 2, "ffn", BATCHES)
    masks = []
    for batch in BATCHES:
        with torch.no_grad(), record_routes(model) as trace:
            model(**batch)
        masks.append(trace[2].mask.flatten())
    cheap = ~torch.cat(masks)
    branch = branches(model)[2]
    with torch.no_grad():
        scale = 1 / (read + update).square().mean(1, keepdim=True).sqrt().double()[cheap]
        left = ((update - branch(read))[cheap] * scale).square().sum() / (
            update[cheap] * scale
        ).square().sum()
        features = F.silu(branch.up(branch.norm(read)))[cheap] * scale
        best = torch.linalg.lstsq(features, update[cheap] * scale).solution
    assert 0 < cheap.sum() < len(cheap)
    assert errors[2] == pytest.approx(left.item(), abs=1e-5)
    assert torch.allclose(branch.down.weight.double(), best.T, atol=1e-4)


@pytest.mark.parametrize(
    "fields", [{"gate": "mlp"}, {"gate": "linear"}], ids=["never calibrated", "runs dense"]
)
def test_a_layer_without_cheap_tokens_is_fitted_on_all_tokens(fields):
    model, static = build(layers=[2], **fields), build(layers=[2])
    errors = fit_branches(model, BATCHES)
    assert errors == pytest.approx(fit_branches(static, BATCHES))
    assert torch.allclose(
        branches(model)[2].down.weight, branches(static)[2].down.weight, atol=1e-6
    )


def test_padding_changes_nothing():
    ids = BATCHES[0]["input_ids"]
    padded = torch.cat([ids, torch.zeros(len(ids), 4, dtype=ids.dtype)], dim=1)
    mask = torch.cat([torch.ones_like(ids), torch.zeros(len(ids), 4, dtype=ids.dtype)], dim=1)
    one, two = build(), build()
    plain = fit_branches(one, [{"input_ids": ids}])
    masked = fit_branches(two, [{"input_ids": padded, "attention_mask": mask}])
    assert masked == pytest.approx(plain, rel=1e-4)


def test_fitting_again_gives_the_same_weights_and_leaves_the_mode():
    one, two = build(gate="mlp", target="block").train(), build(gate="mlp", target="block")
    torch.manual_seed(3)
    first = fit_branches(one, BATCHES)
    assert one.training and fit_branches(two, BATCHES) == pytest.approx(first, rel=1e-12)
    for index, branch in branches(one).items():
        assert torch.allclose(
            branch.down.weight, branches(two)[index].down.weight, rtol=0, atol=1e-6
        )
    assert not any(layer._forward_pre_hooks for layer in decoder_layers(one))


def test_later_layers_are_fitted_on_the_stream_of_the_fitted_ones():
    model, alone = build(layers=[1, 2]), build(layers=[2])
    both = fit_branches(model, BATCHES)
    assert both[2] != pytest.approx(fit_branches(alone, BATCHES)[2], rel=1e-3)


def memory_of(width, **fields):
    return NgramMemory(width, DepthRouteConfig(**MEMORY | {"memory_width": width} | fields))


def test_a_slot_holds_the_mean_of_what_is_missed_and_a_token_is_predicted_from_the_others():
    memory = memory_of(6, ngram_order=1)
    ids = torch.tensor([4, 5, 4, 6, 4, 5, 7, 7])
    missed = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)) + 5
    left = fit_memory(memory, ids[:, None], missed)
    # Nearly equal means and five units off zero: of the constants, the smallest one misses least.
    for place, token in enumerate(ids.tolist()):
        others = [n for n in range(8) if ids[n] == token and n != place]
        assert torch.allclose(
            left[place], missed[place] - missed[others].sum(0) / (len(others) + 1), atol=1e-4
        )
        assert torch.allclose(
            memory.update(ids[place : place + 1], torch.float32),
            missed[ids == token].sum(0) / (len(others) + 2), atol=1e-4,
        )  # fmt: skip


def test_longer_ngrams_take_what_shorter_ones_leave_and_few_directions_what_there_is_in_them():
    ids = tokens(1, 4096, seed=1) % 12 + 3
    ngrams = suffixes(ids, 2)[0]
    generator = torch.Generator().manual_seed(2)
    by_pair = torch.randn(15, 15, 3, generator=generator) @ torch.randn(3, 10, generator=generator)
    missed = by_pair[ngrams[:, 0], ngrams[:, 1].clamp(min=0)]
    left = {}
    for order in (1, 2):
        memory = memory_of(10, ngram_order=order, memory_width=3, memory_slots=65536)
        left[order] = float(
            fit_memory(memory, ngrams[1:], missed[1:]).square().sum() / missed[1:].square().sum()
        )
    assert left[1] > 0.5 and left[2] < 0.03


def test_a_memory_is_fitted_to_the_chosen_tokens_alone():
    memory, missed = memory_of(6, ngram_order=1), torch.randn(64, 6)
    ngrams, chosen = tokens(64, 1), torch.arange(64) < 40
    left = fit_memory(memory, ngrams, missed, chosen)
    table = memory.table.clone()
    update = memory.update(ngrams, torch.float32)
    fit_memory(memory, ngrams[:40], missed[:40])
    assert torch.equal(table, memory.table)
    assert torch.allclose(left[40:], (missed - update)[40:], atol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
def test_a_fitted_memory_brings_text_that_it_has_not_seen_closer_to_the_dense_model(target):
    text, other = [{"input_ids": tokens(32, 128, seed=8) % 12 + 3}], tokens(4, 32, seed=9) % 12 + 3
    far = {}
    for name, fields in {"lowrank": {}, "memory": MEMORY}.items():
        model = build(target=target, branch_rank=2, **fields)
        fit_branches(model, text)
        with torch.no_grad():
            close = model(input_ids=other).logits
            with model.disable_adapter():
                far[name] = float(F.mse_loss(close, model(input_ids=other).logits))
    assert far["memory"] < 0.96 * far["lowrank"]


def test_a_narrow_branch_gets_what_the_metric_says_matters() -> None:
    """The update has a large part that costs nothing and a small one that does;
    there is room for one of them."""
    generator = torch.Generator().manual_seed(0)
    x_Nd = torch.randn(512, 8, generator=generator)
    y_Nd = torch.zeros(512, 8)
    y_Nd[:, 0], y_Nd[:, 1] = 10 * x_Nd[:, 2], x_Nd[:, 3]
    costs_dd = torch.diag(torch.tensor([0.0, 1.0, *[0.0] * 6]))
    missed = {}
    for name, metric_dd in (("alike", None), ("by cost", costs_dd)):
        branch = LowRankBranch(torch.nn.RMSNorm(8), 8, 1, bias=False)
        branch.reset_parameters(generator)
        fit_branch(branch, x_Nd, y_Nd, 0.01, metric_dd=metric_dd)
        missed[name] = (y_Nd - branch.down(branch.features(x_Nd))).square().mean(0)
    assert missed["alike"][0] < 1 and missed["alike"][1] > 0.9
    assert missed["by cost"][0] > 90 and missed["by cost"][1] < 0.01


def test_what_cannot_be_fitted_is_refused():
    experts = get_depth_routed_model(
        build_base("olmoe"), DepthRouteConfig(target="experts", gate="linear")
    )
    with pytest.raises(ValueError, match="target='experts' has no update to imitate"):
        fit_branches(experts, BATCHES)
    with pytest.raises(ValueError, match="branch='none' has nothing to fit"):
        fit_branches(build(branch="none"), BATCHES)
    with pytest.raises(ValueError, match="ridge=-1 must be at least 0"):
        fit_branches(build(), BATCHES, ridge=-1)
    with pytest.raises(ValueError, match="no real token"):
        fit_branches(build(), [])
