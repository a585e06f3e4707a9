"""Invariants 23 and 24 at the rules themselves: how many tokens are chosen, and which."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_depthroute.parts.rules import budget_count, threshold_mask, topk_mask

INF, NAN = math.inf, math.nan

budgets = st.one_of(st.integers(1, 100).map(lambda percent: percent / 100), st.floats(0.001, 1.0))
score_values = st.one_of(
    st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0]), st.floats(-5, 5, width=32)
)
rows = st.integers(0, 24).flatmap(
    lambda n: st.tuples(
        st.lists(score_values, min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
    )
)
property_test = settings(max_examples=200, deadline=None, derandomize=True)


def exact_count(budget: float, n: int) -> int:
    return math.ceil(Fraction(str(budget)).limit_denominator(10**9) * n)


def choose(scores: list[float], real: list[bool] | None, budget: float) -> list[bool]:
    token_mask = None if real is None else torch.tensor([real], dtype=torch.bool).reshape(1, -1)
    return topk_mask(torch.tensor([scores]).reshape(1, -1), budget, token_mask)[0].tolist()


def chosen_by_definition(scores: list[float], real: list[bool], budget: float) -> list[bool]:
    """The rule written out: real scores that are numbers, highest first,
    lowest index first among equals."""
    count = exact_count(budget, sum(real))
    eligible = [
        i
        for i, (score, is_real) in enumerate(zip(scores, real))
        if is_real and not math.isnan(score)
    ]
    best = set(sorted(eligible, key=lambda i: (-scores[i], i))[:count])
    return [i in best for i in range(len(scores))]


@pytest.mark.parametrize("percent", range(1, 101))
def test_count_is_exact_for_every_percent_and_length(percent: int) -> None:
    lengths = torch.arange(201)
    expected = [-(-percent * n // 100) for n in range(201)]
    assert budget_count(percent / 100, lengths).tolist() == expected


@property_test
@given(st.floats(1e-9, 1.0), st.integers(0, 10**6))
def test_count_of_a_scheduled_budget_does_not_overflow(budget: float, n: int) -> None:
    count = int(budget_count(budget, torch.tensor([n])))
    assert budget * n - 1e-3 <= count <= min(n, budget * n + 1 + 1e-3)
    assert count >= min(n, 1)


@pytest.mark.parametrize(("parts", "whole"), [(1, 3), (2, 3), (5, 6), (6, 7), (1, 7)])
def test_a_simple_fraction_of_a_multiple_is_exact(parts: int, whole: int) -> None:
    lengths = torch.arange(0, 100 * whole, whole)
    assert budget_count(parts / whole, lengths).tolist() == [parts * n for n in range(100)]


@pytest.mark.parametrize("percent", range(1, 101))
def test_topk_chooses_exactly_the_count(percent: int) -> None:
    for n in (0, 1, 2, 3, 7, 50, 100, 200):
        scores = torch.randn(2, n, generator=torch.Generator().manual_seed(n))
        assert topk_mask(scores, percent / 100).sum(dim=1).tolist() == [-(-percent * n // 100)] * 2


@property_test
@given(rows, budgets)
def test_topk_follows_its_definition(row: tuple[list[float], list[bool]], budget: float) -> None:
    scores, real = row
    assert choose(scores, real, budget) == chosen_by_definition(scores, real, budget)


@property_test
@given(rows, st.one_of(st.sampled_from([INF, -INF, 0.0]), st.floats(-5, 5, width=32)))
def test_threshold_follows_its_definition(
    row: tuple[list[float], list[bool]], threshold: float
) -> None:
    scores, real = row
    mask = threshold_mask(
        torch.tensor([scores]).reshape(1, -1),
        threshold,
        torch.tensor([real], dtype=torch.bool).reshape(1, -1),
    )
    assert mask[0].tolist() == [r and score >= threshold for score, r in zip(scores, real)]


@property_test
@given(st.integers(1, 40), st.sampled_from([0.0, 1.0, INF, -INF]), budgets)
def test_ties_go_to_the_lowest_indices_and_the_count_is_exact(
    n: int, value: float, budget: float
) -> None:
    count = exact_count(budget, n)
    assert choose([value] * n, None, budget) == [i < count for i in range(n)]


@property_test
@given(rows, budgets)
def test_nan_and_padding_are_never_chosen(
    row: tuple[list[float], list[bool]], budget: float
) -> None:
    scores, real = row
    for chosen, score, is_real in zip(choose(scores, real, budget), scores, real):
        assert not (chosen and (math.isnan(score) or not is_real))


def test_infinite_scores_are_ordered() -> None:
    assert choose([-INF, 0.0, INF, NAN], None, 0.25) == [False, False, True, False]
    assert choose([-INF, 0.0, INF, NAN], None, 0.5) == [False, True, True, False]
    assert choose([-INF, 0.0, INF, NAN], None, 1.0) == [True, True, True, False]


def test_one_row_does_not_change_another() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0], [NAN, INF, 5.0, 5.0]])
    assert topk_mask(scores, 0.5).tolist() == [
        [True, True, False, False],
        [False, True, True, False],
    ]


@pytest.mark.parametrize("length", [0, 1])
def test_shortest_sequences(length: int) -> None:
    scores = torch.zeros(2, length)
    assert topk_mask(scores, 0.01).tolist() == [[True] * length] * 2
    assert threshold_mask(scores, 0.0).tolist() == [[True] * length] * 2
    assert threshold_mask(scores, 0.5).tolist() == [[False] * length] * 2


def test_all_padding_row_chooses_nothing() -> None:
    real = torch.tensor([[False] * 4, [True] * 4])
    assert topk_mask(torch.ones(2, 4), 0.5, real).sum(dim=1).tolist() == [0, 2]
    assert threshold_mask(torch.ones(2, 4), -INF, real).sum(dim=1).tolist() == [0, 4]


def test_padding_does_not_shrink_or_widen_the_budget() -> None:
    real = torch.arange(10) < torch.tensor([[10], [7], [3]])
    assert topk_mask(torch.zeros(3, 10), 0.3, real).sum(dim=1).tolist() == [3, 3, 1]
