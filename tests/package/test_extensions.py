"""Gates, losses, targets and rules from outside the package, by public tables:
nothing in it knows rows by name."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from command_line import run
from models import build_base, logits, tokens
from peft import PeftModel
from text_models import save_base, write_text
from torch import nn
from training import rows, stacked, training_arguments
from transformers import HfArgumentParser

from hf_depthroute import (
    DepthRouteConfig,
    DepthRouteTrainer,
    RoutingArguments,
    calibrate,
    get_depth_routed_model,
    record_routes,
    set_budget,
)
from hf_depthroute.adapter.doctor import examine
from hf_depthroute.base.families import Family
from hf_depthroute.base.stack import stack_of
from hf_depthroute.base.sublayers import hidden_of, norm_of
from hf_depthroute.card import make_card
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.evaluation.cost import route_cost
from hf_depthroute.execution.call import RoutedCall
from hf_depthroute.execution.decode import DecodeStep
from hf_depthroute.execution.executors import decode_steps
from hf_depthroute.execution.target import Target
from hf_depthroute.execution.targets.ffn import FFNTarget
from hf_depthroute.parts.gate import Gate
from hf_depthroute.parts.gates import GATES, GateOutput, ScoreHead
from hf_depthroute.parts.rules import RULES, Rule, RuleContext
from hf_depthroute.parts.targets import TARGETS
from hf_depthroute.training.losses import LOSSES, LossInputs, LossTerm, routing_losses
from hf_depthroute.training.trace_statistics import mean_probability


class NormGate(Gate):
    """Two features: the size of the stream, and its largest entry."""

    def __init__(self, width: int, config: DepthRouteConfig, scores: int = 1) -> None:
        super().__init__(width, config, scores)
        self.score = ScoreHead(2, scores)

    def forward(self, a: torch.Tensor) -> GateOutput:  # [B, T, d] -> scores [B, T]
        return {"scores": self.score(torch.stack([a.norm(dim=-1), a.abs().amax(dim=-1)], dim=-1))}


class DoubtGate(Gate):
    """The entropy of what the LM head would say now, times a learned factor:
    a gate that declares much."""

    called = "doubt"
    targets, selections = ("block", "attention"), ("threshold", "soft")
    default_selection, default_temperature = "threshold", 0.5
    reads = "residual"
    spares_layer_0 = True
    reads_logits = True

    def __init__(self, width: int, config: DepthRouteConfig, scores: int = 1) -> None:
        super().__init__(width, config, scores)
        self.score = ScoreHead(1)
        self._lm_head: tuple[Any, ...] = ()

    def connect(self, lm_head: Any) -> None:
        self._lm_head = (lm_head,)

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.ones_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    def weights_per_token(self) -> int:
        return int(self._lm_head[0].head.weight.numel())

    def forward(self, a: torch.Tensor) -> GateOutput:  # [B, T, d] -> scores [B, T]
        with torch.no_grad():
            surprise = self._lm_head[0](a).float().log_softmax(-1)
        return {"scores": self.score(-(surprise.exp() * surprise).sum(-1, keepdim=True))}


class LayerTarget(Target):
    """A whole decoder layer, run as the base runs it."""

    skips = ("attention", "ffn")
    called = "layers"
    decides: ClassVar[dict[str, str]] = {"token": "whether it runs the layer."}
    norm_of = "attention"
    decode_step = None

    def norm(self, layer: Any, family: Family, stream: torch.Tensor) -> torch.Tensor:
        return norm_of(layer, family, "attention")(stream)

    def full(self, call: RoutedCall) -> torch.Tensor:
        return hidden_of(call.layer._base_forward(call.stream, **call.kwargs))


def sure_loss(inputs: LossInputs) -> torch.Tensor:
    """`mean_l (1 - p_bar_l)`: small where the gates would run everything."""
    return (1 - mean_probability(inputs.trace)).mean()


@contextmanager
def head_inputs(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """The streams `[B, T, d]` that enter the LM head, with graph,
    while the model runs in the block."""
    seen: list[torch.Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(
        lambda head, args: seen.append(args[0])
    )
    try:
        yield seen
    finally:
        handle.remove()


def small_stream(inputs: LossInputs) -> torch.Tensor | None:
    """The mean square of the stream at the head."""
    return (
        inputs.observed[head_inputs][-1].square().mean() if head_inputs in inputs.observed else None
    )


class EveryOther(Rule):
    """Every other token, whatever its score."""

    compares = False

    def decide(
        self, scores: torch.Tensor, context: RuleContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.arange(scores.shape[1], device=scores.device) % 2 == 0
        mask = chosen.expand(scores.shape)
        return mask if context.real is None else mask & context.real, context.probs


@pytest.fixture
def norm_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GATES, "norm", NormGate)


@pytest.fixture
def sure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "sure", LossTerm(0.0, sure_loss))


@pytest.fixture
def doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GATES, "doubt", DoubtGate)


def normed() -> PeftModel:
    return get_depth_routed_model(build_base("llama"), DepthRouteConfig(layers=[1, 3], gate="norm"))


def saved(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())


def change(folder: Path, **fields: Any) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(saved(folder) | fields))


@pytest.mark.usefixtures("norm_gate")
def test_gate_of_another_package_trains_follows_a_budget_and_survives_saving(
    tmp_path: Path,
) -> None:
    model = normed()
    before = {
        name: p.clone()
        for name, p in model.named_parameters()
        if p.requires_grad and "gate" in name
    }
    arguments = training_arguments(tmp_path / "run", max_steps=2)
    DepthRouteTrainer(model=model, args=arguments, train_dataset=rows(4)).train()
    after = dict(model.named_parameters())
    assert len(before) == 4 and all(
        not torch.equal(after[name], value) for name, value in before.items()
    )
    batches = [{"input_ids": tokens(8, 16)}]
    assert calibrate(model, batches) == {1: 0.5, 3: 0.5}
    expected = logits(model.eval())
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(build_base("llama"), tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), expected)
    set_budget(loaded, 0.25)
    told = [
        loaded.generate(tokens(2, 6), max_new_tokens=4, do_sample=False, use_cache=cached)
        for cached in (True, False)
    ]
    assert torch.equal(*told)
    assert [finding for finding in examine(tmp_path / "adapter") if finding.state == "fault"] == []


def test_adapter_names_the_package_of_a_gate_that_is_not_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(
            GATES, "norm", type("NormGate", (NormGate,), {"__module__": "packaging.gates"})
        )
        normed().save_pretrained(tmp_path)
    assert (saved(tmp_path)["gate_package"], saved(tmp_path)["gate_module"]) == (
        "packaging",
        "packaging.gates",
    )
    with pytest.raises(
        ConfigError, match=r"gate='norm' is not .* the package packaging, module packaging\.gates"
    ):
        PeftModel.from_pretrained(build_base("llama"), tmp_path)


def test_gate_of_a_script_has_a_module_and_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(GATES, "norm", NormGate)
        normed().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"names no package, module {__name__}"):
        PeftModel.from_pretrained(build_base("llama"), tmp_path)


def test_row_that_stands_in_for_an_own_gate_is_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(GATES, "mlp", NormGate)
        get_depth_routed_model(build_base("llama"), DepthRouteConfig(layers=[1])).save_pretrained(
            tmp_path
        )
    with pytest.raises(
        ConfigError, match=f"gate='mlp' is not hf_depthroute's own.*module {__name__}"
    ):
        PeftModel.from_pretrained(build_base("llama"), tmp_path)


@pytest.mark.usefixtures("norm_gate")
def test_what_the_file_names_is_text_that_is_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    normed().save_pretrained(tmp_path)
    (tmp_path / "imported_by_mistake.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    change(tmp_path, gate_module="imported_by_mistake")
    PeftModel.from_pretrained(build_base("llama"), tmp_path)
    change(tmp_path, gate="another")
    with pytest.raises(ConfigError, match="module imported_by_mistake"):
        PeftModel.from_pretrained(build_base("llama"), tmp_path)
    assert "imported_by_mistake" not in sys.modules


@pytest.mark.parametrize("name", ["gate_package", "gate_module"])
@pytest.mark.parametrize("value", ["a b", "x" * 300, "rm -rf /\n", "", 1, ["a"], "é"])
def test_only_names_are_taken_for_a_package_or_a_module(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=.* must be what a save wrote$"):
        DepthRouteConfig(**{name: value})


def test_own_gates_add_nothing_to_the_file() -> None:
    assert not {"gate_package", "gate_module"} & set(DepthRouteConfig().to_dict())


@pytest.mark.usefixtures("norm_gate")
def test_gate_scores_experts_if_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {"gate": "norm", "target": "experts", "layers": [1]}
    with pytest.raises(
        ConfigError, match=r"cannot score experts; use one of: mlp, linear, random, none$"
    ):
        DepthRouteConfig(**fields)
    monkeypatch.setattr(NormGate, "scores_experts", True, raising=False)
    model = get_depth_routed_model(build_base("olmoe"), DepthRouteConfig(**fields))
    assert sum(calibrate(model, [{"input_ids": tokens(8, 16)}]).values()) == pytest.approx(
        0.5, abs=0.05
    )


@pytest.mark.usefixtures("doubt")
def test_what_a_gate_declares_holds_without_anybody_knowing_its_name(tmp_path: Path) -> None:
    config = DepthRouteConfig(gate="doubt", target="block")
    told = {
        name: getattr(config, name)
        for name in ("selection", "threshold", "gate_temperature", "gate_input")
    }
    assert told == {
        "selection": "threshold",
        "threshold": None,
        "gate_temperature": 0.5,
        "gate_input": "residual",
    }
    model = get_depth_routed_model(build_base("llama"), config)
    assert model.peft_config["default"].layers == [1, 2, 3]
    trainer = DepthRouteTrainer(
        model=model, args=training_arguments(tmp_path / "run", max_steps=2), train_dataset=rows(4)
    )
    assert trainer.fused_loss_obstacle() == "the gate reads them inside the layers"
    trainer.train()
    ratios = calibrate(model, [{"input_ids": tokens(8, 16)}])
    assert ratios == pytest.approx({1: 0.5, 2: 0.5, 3: 0.5}, abs=0.02)
    expected = logits(model.eval())
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(build_base("llama"), tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), expected)


@pytest.mark.parametrize("row", [nn.Linear, lambda width, config, scores: nn.Linear(width, scores)])
def test_row_that_is_no_gate_is_refused_in_one_line(
    row: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GATES, "plain", row)
    with pytest.raises(
        ConfigError, match=r"^gate='plain' is no subclass of hf_depthroute\.parts\.gate\.Gate"
    ) as refused:
        DepthRouteConfig(gate="plain")
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("doubt")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {},
            (
                "gate='doubt' decides on whole blocks or attention, .*; use target='block' or "
                "'attention' and granularity"
            ),
        ),
        (
            {"target": "block", "selection": "topk"},
            "selection='topk': doubt trains with 'threshold' or 'soft'",
        ),
    ],
)
def test_what_a_gate_does_not_take_is_refused_in_one_line(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        DepthRouteConfig(gate="doubt", **fields)
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("doubt")
def test_gate_that_spares_layer_0_says_so() -> None:
    with pytest.raises(ConfigError, match="doubt never routes layer 0; leave layers unset"):
        get_depth_routed_model(
            build_base("llama"), DepthRouteConfig(gate="doubt", target="block", layers=[0, 1])
        )


@pytest.fixture
def layer_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "layer", LayerTarget())


def test_target_without_its_full_path_is_refused_where_it_is_made() -> None:
    class HalfTarget(Target):
        decode_step = None

        def norm(self, layer: Any, family: Family, stream: torch.Tensor) -> torch.Tensor:
            return stream

    with pytest.raises(TypeError, match="full"):
        HalfTarget()  # type: ignore[abstract]


def test_target_says_itself_whether_a_decoding_step_computes_it() -> None:
    with pytest.raises(TypeError, match=r"OtherFFN\.decode_step is not declared"):

        class OtherFFN(FFNTarget):
            def full(self, call: RoutedCall) -> torch.Tensor:
                return call.stream


@pytest.mark.parametrize("step", [DecodeStep, None])
def test_target_of_another_package_decodes_by_the_step_that_it_declares(
    step: type[DecodeStep] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SameFFN(FFNTarget):
        called = "FFNs of another package"
        decode_step = step

    monkeypatch.setitem(TARGETS, "same", SameFFN())
    model, ffn = (
        get_depth_routed_model(
            build_base("llama"), DepthRouteConfig(layers=[1, 3], target=target)
        ).eval()
        for target in ("same", "ffn")
    )
    steps = decode_steps(stack_of(model).layers, 1)
    made = [
        steps.get(routing_layer) for routing_layer in (stack_of(model).layers[i] for i in (1, 3))
    ]
    assert [type(each) for each in made] == [type(None) if step is None else step] * 2
    generated = [m.generate(tokens(1, 6), max_new_tokens=4, do_sample=False) for m in (model, ffn)]
    assert torch.equal(*generated)


@pytest.mark.usefixtures("layer_target")
def test_target_of_another_package_trains_is_counted_saved_and_described(tmp_path: Path) -> None:
    def made(target: str) -> PeftModel:
        config = DepthRouteConfig(layers=[1, 3], target=target)
        model = get_depth_routed_model(build_base("llama"), config)
        arguments = training_arguments(tmp_path / target, max_steps=2)
        DepthRouteTrainer(model=model, args=arguments, train_dataset=rows(4)).train()
        return model

    # Which is the same layer, and saves what is skipped.
    model, block = made("layer"), made("block")
    torch.testing.assert_close(logits(model.eval()), logits(block.eval()))
    assert route_cost(model) == route_cost(block)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(build_base("llama"), tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), logits(model))
    assert (
        "a small router decides for each token\nwhether it runs the layer.\n"
        in make_card(tmp_path / "adapter").text
    )
    with pytest.raises(
        ConfigError,
        match="granularity='sequence' is not supported with target='layer'; use 'token'",
    ):
        DepthRouteConfig(target="layer", granularity="sequence")


@pytest.mark.usefixtures("norm_gate", "sure")
def test_gate_and_loss_of_another_package_are_values_on_the_command_line(tmp_path: Path) -> None:
    base, text = save_base(tmp_path / "base"), write_text(tmp_path / "text.txt")
    words = [
        "train",
        "--model",
        base,
        "--dataset",
        text,
        "--batch-size",
        2,
        "--length",
        16,
        "--steps",
        2,
    ]
    refused = run(*words, "--gate", "magic", "--out", tmp_path / "none")
    assert (
        refused.code == 2
        and f"use one of: {', '.join(GATES)}" in refused.error
        and "norm" in refused.error
    )
    made = run(
        *words, "--gate", "norm", "--loss-weights", '{"sure": 0.5}', "--out", tmp_path / "out"
    )
    assert made.code == 0, made.err
    assert saved(tmp_path / "out")["gate"] == "norm"
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert all("loss_sure" in entry for entry in record["log_history"] if "loss" in entry)


@pytest.mark.usefixtures("sure")
def test_loss_of_another_package_is_weighted_trained_with_and_logged(tmp_path: Path) -> None:
    def first_step(**weights: float) -> dict[str, float]:
        model = get_depth_routed_model(build_base("llama"), DepthRouteConfig(layers=[1, 3]))
        arguments = training_arguments(tmp_path, max_steps=1, loss_weights=weights or None)
        trainer = DepthRouteTrainer(model=model, args=arguments, train_dataset=rows(2))
        trainer.train()
        return trainer.state.log_history[0]

    plain, weighted = first_step(), first_step(sure=3.0)
    assert "loss_sure" not in plain
    p_bar = (weighted["gate_prob/layer_1"] + weighted["gate_prob/layer_3"]) / 2
    assert weighted["loss_sure"] == pytest.approx(1 - p_bar)
    assert weighted["loss"] - plain["loss"] == pytest.approx(3 * weighted["loss_sure"], abs=1e-3)
    assert weighted["grad_norm"] > 2 * plain["grad_norm"]


def test_loss_that_is_not_named_has_the_weight_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "sure", LossTerm(0.5, sure_loss))
    assert RoutingArguments().weights()["sure"] == 0.5
    assert RoutingArguments(loss_weights={"sure": 0.0}).weights()["sure"] == 0.0
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig(layers=[1])).train()
    with record_routes(model) as trace:
        output = model(**stacked(rows(2)))
    assert "sure" in routing_losses(trace, output.loss)


@pytest.mark.usefixtures("sure")
def test_weights_of_other_losses_come_as_json_from_a_command_line() -> None:
    (parsed,) = HfArgumentParser(RoutingArguments).parse_args_into_dataclasses(
        ["--loss_weights", '{"sure": 0.25}']
    )
    parsed.check()
    assert parsed.loss_weights == {"sure": 0.25} and parsed.weights()["sure"] == 0.25


@pytest.mark.usefixtures("sure")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"unsure": 1.0}, "there is no loss 'unsure'; import what adds it.*lm, jepa"),
        ({"cgs": 1.0}, "'cgs' has an argument of its own; use cgs_weight"),
        ({"sure": -1.0}, "sure_weight=-1.0 must be a finite number"),
        ({"sure": "1"}, "sure_weight='1' must be a finite number"),
        ([1.0], "must map names of losses to weights"),
        ("{", "is not JSON"),
    ],
)
def test_wrong_loss_weights_are_refused_in_one_line(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        RoutingArguments(loss_weights=given).check()
    assert "\n" not in str(refused.value)


def compared_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and row name of every comparison of something called gate or target with
    the name of a row."""
    rows = {"gate": set(GATES), "target": set(TARGETS)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            sides = [node.subject, *(case.pattern for case in node.cases)]
        else:
            continue
        called = {getattr(side, "attr", getattr(side, "id", None)) for side in sides}
        parts = [part for side in sides for part in ast.walk(side)]
        said = {
            part.value
            for part in parts
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        }
        yield from (
            (node.lineno, name) for kind in called & set(rows) for name in rows[kind] & said
        )


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("if config.gate == 'exit': pass", [(1, "exit")]),
        ("x = c.target in ('ffn', 'other')", [(1, "ffn")]),
        ("match target:\n case 'block': pass", [(1, "block")]),
        ("x = gate.exits and target.skips == ('ffn',)", []),
    ],
)
def test_comparisons_of_names_are_found(code: str, found: list[tuple[int, str]]) -> None:
    assert list(compared_names(ast.parse(code))) == found


def test_nothing_outside_their_own_files_compares_the_names_of_gates_and_targets() -> None:
    package = Path(sys.modules["hf_depthroute"].__file__ or "").parent
    found = [
        f"{path.relative_to(package)}:{line}: {name}"
        for path in sorted(package.rglob("*.py"))
        if path.parent.name != "parts"
        for line, name in compared_names(ast.parse(path.read_text()))
    ]
    templates = [
        path.name
        for path in package.rglob("*.jinja")
        if re.search(r"\b(gate|target) [!=]= ", path.read_text())
    ]
    assert found + templates == []


def test_a_loss_from_outside_brings_what_it_watches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two rows with the same observer share it; without a weight nothing is watched,
    and the term does not apply."""
    watched: list[nn.Module] = []

    @contextmanager
    def counted(model: nn.Module) -> Iterator[list[torch.Tensor]]:
        watched.append(model)
        with head_inputs(model) as seen:
            yield seen

    def size(inputs: LossInputs) -> torch.Tensor:
        return inputs.observed[counted][-1].abs().mean()

    monkeypatch.setitem(
        LOSSES, "small", LossTerm(0.0, lambda i: i.observed[counted][-1].square().mean(), counted)
    )
    monkeypatch.setitem(LOSSES, "size", LossTerm(0.0, size, counted))
    monkeypatch.setitem(LOSSES, "alone", LossTerm(0.0, small_stream, head_inputs))
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig(layers=[1, 2]))
    given = training_arguments(
        tmp_path, max_steps=1, loss_weights={"small": 0.5, "size": 0.1}, fused_loss=False
    )
    trainer = DepthRouteTrainer(model, given, train_dataset=rows(2))
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["loss_small"] > 0 < log["loss_size"] and "loss_alone" not in log
    assert len(watched) == 1
    assert "alone" not in routing_losses(record_of_pass(model), weights={"alone": 1.0})
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_a_loss_from_outside_brings_what_it_wants_to_know_of_both_paths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def largest(
        before: torch.Tensor, after_full: torch.Tensor, after_cheap: torch.Tensor
    ) -> torch.Tensor:
        return (after_full - after_cheap).abs().amax(dim=-1)

    def sure_where_it_matters(inputs: LossInputs) -> torch.Tensor | None:
        records = list(inputs.trace.values())
        if not all("largest" in record.extras for record in records):
            return None
        return torch.stack(
            [(record.largest * (1 - record.probs)).mean() for record in records]
        ).mean()

    term = LossTerm(0.0, sure_where_it_matters, metrics={"largest": largest})
    monkeypatch.setitem(LOSSES, "matters", term)
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig(layers=[1, 2]))
    given = training_arguments(tmp_path, max_steps=1, loss_weights={"matters": 0.5})
    trainer = DepthRouteTrainer(model, given, train_dataset=rows(2))
    trainer.train()
    assert trainer.state.log_history[0]["loss_matters"] > 0
    assert all("largest" not in record.extras for record in record_of_pass(model).values())


def record_of_pass(model: Any) -> Any:
    with record_routes(model.train()) as trace:
        model(**stacked(rows(2)))
    return trace


def test_a_rule_from_outside_decides_in_training_and_a_threshold_still_does_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        ConfigError, match="selection='every_other' is not supported; use one of: topk, "
    ):
        DepthRouteConfig(selection="every_other")
    monkeypatch.setitem(RULES, "every_other", EveryOther())
    model = get_depth_routed_model(
        build_base("llama"), DepthRouteConfig(layers=[1, 2], selection="every_other")
    )
    padded = torch.ones(2, 8, dtype=torch.long)
    padded[0, :3] = 0
    with record_routes(model) as trace:
        model.train()(tokens(2, 8), attention_mask=padded)
    for record in trace.values():
        assert torch.equal(record.mask, (torch.arange(8) % 2 == 0) & padded.bool())
        assert record.threshold is None
    calibrate(model, [{"input_ids": tokens(4, 16)}], budget=0.25)
    with record_routes(model.eval()) as trace, torch.no_grad():
        model(tokens(4, 16))
    assert trace.full_ratio() == pytest.approx({1: 0.25, 2: 0.25}, abs=0.02)
