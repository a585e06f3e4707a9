"""The figures of a study, on numbers small enough to do by hand."""

from __future__ import annotations

import pytest
import torch
from models import build_routed, tokens
from study import metrics
from study.blocks import draw_order, spread
from study.utility import utility_labels

from hf_depthroute.base.families import find_decoder, find_family
from hf_depthroute.evaluation.cost import route_cost

EVALUATIONS = [(0, 9.0), (2, 4.0), (4, 2.0), (6, 3.0), (8, 2.0)]


def test_averages_leave_out_the_untrained_model():
    assert metrics.window_average(EVALUATIONS, 4) == 3.0
    assert metrics.window_average(EVALUATIONS, 8) == 2.75
    assert metrics.window_average(EVALUATIONS[:1], 8) is None


def test_the_best_step_is_the_first_of_equals():
    assert metrics.best_of(EVALUATIONS) == (4, 2.0)


def test_hits_are_the_first_steps_at_or_under_each_threshold():
    hits = metrics.first_hits(EVALUATIONS, [9.5, 4.0, 2.5, 1.0])
    assert hits == {"9.5": 0, "4.0": 2, "2.5": 4, "1.0": None}


def test_tail_means_run_over_the_last_tenth_and_over_what_was_logged():
    rows = [{"step": step, "p": float(step)} for step in range(1, 21)]
    rows[-1]["q"] = 5.0
    assert metrics.tail_means(rows, ["p", "q", "r"]) == {"p": 19.5, "q": 5.0, "r": None}
    assert metrics.tail_means(rows[:3], ["p"]) == {"p": 3.0}


def test_the_oracle_auc_counts_ordered_pairs():
    utility = torch.tensor([1.0, -1.0, 0.5, -0.5])
    assert metrics.oracle_auc(utility, utility) == 1.0
    assert metrics.oracle_auc(-utility, utility) == 0.0
    assert metrics.oracle_auc(torch.tensor([0.9, 0.1, 0.3, 0.5]), utility) == 0.75
    assert metrics.oracle_auc(utility, utility.abs()) is None


def test_fork_bias_compares_two_measures_of_the_same_tokens():
    exact = torch.tensor([[1.0, -1.0], [2.0, -3.0]])
    same = metrics.fork_bias(2 * exact + 1, exact)
    assert same["correlation"] == pytest.approx(1.0)
    assert same["sign_agreement"] == 1.0
    assert (same["mean_layer_wide"], same["mean_exact"]) == (0.5, -0.25)
    assert metrics.fork_bias(-exact, exact)["sign_agreement"] == 0.0
    assert metrics.fork_bias(torch.ones(2, 2), exact)["correlation"] is None


def test_frequent_types_are_the_fewest_that_make_up_half_of_the_tokens():
    # 3 and 1 three times, 0 twice, 2 and 4 once.
    train = torch.tensor([[3, 3, 3, 1, 1], [1, 0, 0, 2, 4]])
    assert metrics.frequent_types(train, 6).nonzero().flatten().tolist() == [1, 3]
    assert metrics.frequent_types(train[:1], 6).nonzero().flatten().tolist() == [3]
    frequent, rare = metrics.split_loss(
        torch.tensor([1.0, 2.0, 5.0]), torch.tensor([3, 1, 4]), metrics.frequent_types(train, 6)
    )
    assert (frequent, rare) == (1.5, 5.0)
    assert metrics.split_loss(
        torch.ones(2), torch.tensor([3, 1]), metrics.frequent_types(train, 6)
    ) == (1.0, None)


def test_training_cost_at_the_size_of_the_paper():
    ffn, branch = 2 * 640 * 2560, 2 * 640 * 80
    mlp = 640 * 160 + 160
    jepa = 640 * 128 + 2 * (144 * 64 + 64 * 64) + 192 * 64 + 64
    bare = [metrics.training_ffn_ratio(4, branch / ffn, gate / ffn, 0.5) for gate in (mlp, jepa)]
    assert bare == pytest.approx([1.0625, 1.068], abs=5e-4)  # the paper: 1.054 and 1.068
    full = metrics.training_ffn_ratio(4, branch / ffn, jepa / ffn, 0.5, "all_full", 5)
    assert full - bare[1] == pytest.approx((4 + 4 * branch / ffn + 6) / 4 / 5)


def test_an_all_full_refresh_runs_what_its_cost_counts():
    model = build_routed("llama")
    family, rows = find_family(model), {"ffn": 0, "branch": 0}
    ids = tokens(2, 10)

    def count(name):
        def hook(module, args, output):
            rows[name] += args[0].shape[:-1].numel()

        return hook

    layers = getattr(find_decoder(model, family), family.layers)[1:]
    for layer in layers:
        getattr(layer, family.ffn).register_forward_hook(count("ffn"))
        layer.routing.depth_route_branch["default"].register_forward_hook(count("branch"))
    model(ids)
    before = dict(rows)
    utility_labels(model, {"input_ids": ids})
    # `utility_labels` first runs the model's own forward pass; a refresh in training has it
    # already.
    ran = {name: (rows[name] - 2 * before[name]) / ids.numel() / len(layers) for name in rows}
    gate = route_cost(model, budget=1.0).ffn_ratio - 1
    branch = route_cost(model, full_ratio={1: 0.0, 2: 0.0, 3: 0.0}).ffn_ratio - gate
    with_oracle, without = (
        metrics.training_ffn_ratio(3, branch, gate, 0.5, oracle, oracle_interval=1)
        for oracle in ("all_full", "none")
    )
    assert ran["ffn"] + branch * ran["branch"] == pytest.approx(with_oracle - without)


def test_the_order_of_blocks_is_made_of_epochs_and_grows_at_its_end():
    order = draw_order(5, 12, seed=3)
    assert sorted(order[:5].tolist()) == sorted(order[5:10].tolist()) == [0, 1, 2, 3, 4]
    assert torch.equal(draw_order(5, 7, seed=3), order[:7])
    assert not torch.equal(draw_order(5, 12, seed=4), order)


def test_spread_takes_blocks_from_everywhere():
    blocks = torch.arange(10)[:, None]
    assert spread(blocks, 4).flatten().tolist() == [0, 2, 5, 7]
    assert len(spread(blocks, 99)) == 10
