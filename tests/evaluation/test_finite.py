"""Finite weights that compute NaN or infinity: every command says so, with the layer,
and none prints a result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import run
from models import routed, tokens
from text_models import save_base, write_text
from transformers import AutoModelForCausalLM

from hf_depthroute.inference.non_finite import NonFiniteError, finite_logits, first_non_finite_layer
from hf_depthroute.routing.stack import routings_of

PROMPT = ("--prompt", "the cat sat on the mat", "--max-new-tokens", 4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


def overflowing(base: Path, layer: int = 2, part: str = "branch") -> torch.nn.Module:
    """The adapter's branch (or gate) in `layer` holds 1e38, which a file may."""
    model = routed(AutoModelForCausalLM.from_pretrained(base), budget=0.25)
    routing = next(h for h in routings_of(model) if h.layer_index == layer)
    group = routing.depth_route_branch if part == "branch" else routing.depth_route_gate
    with torch.no_grad():
        for parameter in group["default"].parameters():
            parameter.fill_(1e38)
    return model


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    overflowing(base).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize("extra", [[], ["--sample"], ["--budget", "0.1"]])
def test_generate_names_the_layer_and_writes_no_text(extra: list[str], adapter: Path) -> None:
    ended = run("generate", adapter, *PROMPT, *extra)
    assert ended.code == 1
    assert "layer 2 (routed" in ended.error and "not finite" in ended.error
    assert ended.out == ""


@pytest.mark.parametrize("extra", [["--full"], ["--lossless"]])
def test_the_dense_base_is_not_touched_by_it(extra: list[str], adapter: Path) -> None:
    ended = run("generate", adapter, *PROMPT, *extra)
    assert ended.code == 0 and ended.out


def test_eval_prints_and_writes_no_nan(adapter: Path, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    ended = run(
        "eval",
        adapter,
        "--dataset",
        text,
        "--length",
        16,
        "--blocks",
        4,
        "--json",
        tmp_path / "rows.json",
    )
    assert ended.code == 1
    assert "layer 2 (routed" in ended.error
    assert "nan" not in ended.out and not (tmp_path / "rows.json").exists()


def test_report_draws_no_nan(adapter: Path, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    ended = run(
        "report",
        adapter,
        "--dataset",
        text,
        "--length",
        16,
        "--blocks",
        4,
        "--out",
        tmp_path / "page.html",
    )
    assert ended.code == 1
    assert "layer 2 (routed" in ended.err.split("\n")[-2] and not (tmp_path / "page.html").exists()


def test_eval_of_tasks_prints_no_nan(adapter: Path, base: Path) -> None:
    pytest.importorskip("lm_eval")
    model = overflowing(base)
    with pytest.raises(NonFiniteError, match="layer 2"), finite_logits(model):
        model(tokens(2, 8))
        model(tokens(1, 1))


def test_a_finite_model_is_left_alone(base: Path) -> None:
    model = routed(AutoModelForCausalLM.from_pretrained(base))
    ids = tokens(2, 8)
    expected = model(ids).logits
    hooks = dict(model.get_base_model()._forward_hooks)
    with finite_logits(model):
        assert torch.equal(model(ids).logits, expected)
    assert first_non_finite_layer(model, [{"input_ids": ids}]) is None
    assert model.get_base_model()._forward_hooks == hooks


def test_nothing_waits_for_the_device_in_a_forward_pass(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = overflowing(base)
    waits: list[str] = []
    for name in ("item", "__bool__", "tolist", "cpu"):
        kept = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda self, *a, _n=name, _k=kept, **k: waits.append(_n) or _k(self, *a, **k),
        )
    model(tokens(4, 16))  # the first pass looks at its thresholds
    waits.clear()
    with pytest.raises(NonFiniteError), finite_logits(model):
        model(tokens(4, 16))
        watched = list(waits)
    assert watched == []
