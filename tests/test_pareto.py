"""The pareto recipe: its frontier of static baselines, its verdicts, and its committed tables."""

import importlib
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "recipes" / "pareto"


@pytest.fixture
def recipe(monkeypatch):
    """Import a script of the recipe; its neighbours are found while it is imported."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("run", "frontier", "report", "timing"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in ("run", "frontier", "report", "timing"):
        sys.modules.pop(name, None)


def point(module, method, group, value, time, losses):
    return module.Point(method, method, group, value, {}, losses, [time] * len(losses))


def test_the_frontier_joins_dense_and_the_baselines_by_straight_lines(recipe):
    frontier = recipe("frontier")
    points = [
        point(frontier, "drop", "baseline", 1, 0.9, [2.1, 2.3]),
        point(frontier, "drop", "baseline", 2, 0.8, [3.0, 3.0]),
        point(frontier, "other", "baseline", 1, 0.7, [2.6, 2.6]),
        point(frontier, "exit", "baseline", 1, 1.2, [2.0, 2.0]),  # slower than dense: not a way to save time
    ]
    assert frontier.frontier_at(points, 2.0, 0.9).loss == pytest.approx(2.2)  # both curves meet here
    assert frontier.frontier_at(points, 2.0, 0.95).loss == pytest.approx(2.1)
    assert frontier.frontier_at(points, 2.0, 0.8).label == "other"
    assert frontier.frontier_at(points, 2.0, 0.8).loss == pytest.approx(2.4)
    assert frontier.frontier_at(points, 2.0, 1.1).loss == 2.0
    assert frontier.frontier_at(points, 2.0, 0.6) is None


def test_a_verdict_is_yes_only_beyond_the_seed_spread(recipe):
    frontier = recipe("frontier")
    drop = [point(frontier, "drop", "baseline", 1, 0.8, [3.0, 3.0, 3.0])]

    def verdict(losses, time=0.9):
        return frontier.judge([*drop, point(frontier, "routed", "routed", 0.5, time, losses)], 2.0)[1]

    assert verdict([2.30, 2.31, 2.29]).startswith("budget 0.5: **yes**")  # the frontier is at 2.5
    assert verdict([2.1, 2.4, 2.7]).startswith("budget 0.5: **no**")
    assert verdict([2.6, 2.6, 2.6]).startswith("budget 0.5: **no**")
    assert verdict([2.1]).startswith("budget 0.5: **no**")  # one seed has no spread
    assert "no routed config" in verdict([2.1, 2.1, 2.1], time=1.05)


def test_every_config_is_a_valid_adapter_at_all_of_its_points(recipe):
    from hf_depthroute import DepthRouteConfig

    run = recipe("run")
    setting = run.read_yaml(FOLDER / "pareto.yaml")
    importance = {target: {i: 0.1 * i for i in range(6)} for target in ("attention", "ffn", "block")}
    for name, method in run.methods().items():
        for value in run.points(method)[1]:
            adapter, _ = run.configure(run.Run(name, value, 0), setting, importance)
            DepthRouteConfig(**adapter)


def test_the_tables_are_made_from_the_committed_results(recipe):
    report = recipe("report")
    result = json.loads((FOLDER / "results.json").read_text())
    assert report.text(result, report.summarise(result)) == (FOLDER / "results.md").read_text()
    assert result["dense"]["loss"] < min(row["loss"] for row in result["runs"]) + 0.05
