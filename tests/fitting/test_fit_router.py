"""A router without training: branches and gates by regression, one threshold over all layers."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import termios
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from command_line import run
from models import build_base, build_routed, decoder_layers, tokens
from peft import PeftModel
from protocol import gap
from text_models import save_base, write_text
from transformers import AutoModelForCausalLM

from hf_depthroute import (
    DepthRouteConfig,
    DepthRouteTrainer,
    DepthRouteTrainingArguments,
    calibrate,
    calibrate_budgets,
    fit_router,
    get_depth_routed_model,
    record_routes,
    set_budget,
)
from hf_depthroute.cli import main
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.evaluation.perplexity import mean_loss
from hf_depthroute.fitting.bar import FitBar
from hf_depthroute.fitting.layer_walk import LayerWalk, walk_layers
from hf_depthroute.fitting.narrowing import trial_of
from hf_depthroute.fitting.text import FitWarning
from hf_depthroute.inference.calibration import active_routings, is_calibrated
from hf_depthroute.parts.gate import Gate, ScoreHead
from hf_depthroute.parts.gates import GATES
from hf_depthroute.parts.regression import leading_directions, ridge_weights
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.trace import count_routes
from hf_depthroute.training.record import record_of, remembered


def text(rows: int = 16, length: int = 64, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    ids = tokens(rows, length, seed=seed)
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(4)]


def share(model: Any, batches: list[dict[str, torch.Tensor]], depth: int) -> float:
    with count_routes(model) as counter, torch.no_grad():
        for batch in batches:
            model(**batch)
    ratios = counter.full_ratio()
    return (sum(ratios.values()) + depth - len(ratios)) / depth


@pytest.mark.parametrize("target", ["ffn", "attention", "block"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "olmoe", "mixtral"])
def test_the_share_of_all_calls_is_what_was_asked_for(family: str, target: str) -> None:
    base = build_base(family)
    depth = len(decoder_layers(base))
    config = DepthRouteConfig(layers="all", target=target, gate="affine")
    model = fit_router(base, text(), keep=0.6, config=config, rounds=1)
    held_out = [{"input_ids": torch.cat([batch["input_ids"] for batch in text()])[4::5]}]
    assert share(model, held_out, depth) == pytest.approx(0.6, abs=0.04)
    assert not model.training
    ids = tokens(2, 12, seed=3)
    with torch.no_grad(), record_routes(model) as trace:
        model(input_ids=ids)
    assert all(0 <= int(record.mask.sum()) <= ids.numel() for record in trace.values())


def test_a_walk_gives_every_layer_what_the_model_gives_it() -> None:
    """Also behind padding, where the layers get masks."""
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig(layers=[1, 2]))
    batch = text(4)[0]
    batch["attention_mask"] = batch["attention_mask"].clone()
    batch["attention_mask"][0, :20] = 0
    with model.disable_adapter(), torch.no_grad():
        wanted = model(**batch, output_hidden_states=True).hidden_states
    seen = {}

    def visit(index: int, calls: list[Any]) -> list[torch.Tensor]:
        seen[index] = [call.finish(call.full()) for call in calls]
        return seen[index]

    walk_layers(LayerWalk(model, [batch]), visit)
    real = batch["attention_mask"].bool()
    assert sorted(seen) == [1, 2]
    for index, (out,) in seen.items():
        if index + 1 < len(decoder_layers(model)):  # the last of `hidden_states` is normed
            assert gap(out[real], wanted[index + 1][real]) < 1e-5


@pytest.mark.parametrize("branch", ["lowrank", "memory"])
def test_a_walk_reads_the_documents_of_a_packed_row_apart(branch: str) -> None:
    """Attention, positions and n-grams begin anew with each."""
    sizes: dict[str, Any] = {"memory_slots": 8192, "memory_width": 4} if branch == "memory" else {}
    model = build_routed("llama", branch=branch, layers=[1, 2], **sizes)
    ids, positions = tokens(1, 20, seed=3), torch.cat([torch.arange(12), torch.arange(8)])[None]

    def cheap(batch: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        found = {}

        def visit(index: int, calls: list[Any]) -> list[torch.Tensor]:
            found[index] = calls[0].finish(calls[0].cheap())
            return [calls[0].finish(calls[0].full())]

        walk_layers(LayerWalk(model, [batch]), visit)
        return found

    packed = cheap({"input_ids": ids, "position_ids": positions})
    for part in (slice(0, 12), slice(12, 20)):
        for index, out in cheap({"input_ids": ids[:, part]}).items():
            assert gap(packed[index][:, part], out) < 1e-5


def test_reduced_rank_regression_is_the_best_map_of_its_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 12, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(12, 8, generator=generator, dtype=torch.float64)
    y += 0.1 * torch.randn(500, 8, generator=generator, dtype=torch.float64)
    gram, cross = x.T @ x, x.T @ y
    full = x @ ridge_weights(gram, cross, 0.0)
    u, s, v = torch.linalg.svd(full, full_matrices=False)
    best = (u[:, :3] * s[:3]) @ v[:3]
    features = x @ leading_directions(gram, cross, 3, 0.0).T
    found = features @ torch.linalg.lstsq(features, y).solution
    assert float((found - best).norm() / best.norm()) < 1e-3


def test_the_gate_knows_something_of_the_error() -> None:
    model = fit_router(
        build_base("llama"),
        text(32),
        keep=0.5,
        config=DepthRouteConfig(layers="all", gate="affine"),
        rounds=1,
    )
    record = remembered(model, "default").training
    assert record is not None
    for layer in record["fit"]["layers"].values():
        assert layer["nats"] > 0 or layer["share"] > 0.95
        assert layer["gate_r2"] > 0.05
        assert layer["branch_r2"] > 0.05


@pytest.mark.parametrize("gate", ["mlp", "affine"])
def test_a_fit_is_repeatable_and_loads(tmp_path: Path, gate: str) -> None:
    base = build_base("llama")
    config = DepthRouteConfig(layers="all", gate=gate)
    first = fit_router(copy.deepcopy(base), text(), keep=0.5, config=config, rounds=2)
    torch.rand(3)
    second = fit_router(copy.deepcopy(base), text(), keep=0.5, config=config, rounds=2)
    ids = tokens(2, 20, seed=9)
    with torch.no_grad():
        assert torch.equal(first(ids).logits, second(ids).logits)
        first.save_pretrained(str(tmp_path / "fitted"))
        loaded = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "fitted")).eval()
        assert torch.equal(first(ids).logits, loaded(ids).logits)


def offloaded(how: str, folder: Path) -> Any:
    """The tiny Llama with its weights elsewhere: in memory, on disk, or spread by a device map."""
    base, cpu = build_base("llama"), torch.device("cpu")
    if how == "cpu_offload":
        return cpu_offload(base, execution_device=cpu)
    if how == "disk_offload":
        return disk_offload(base, str(folder), execution_device=cpu)
    places = {
        f"model.layers.{index}": "cpu" if index == 1 else "disk"
        for index in range(len(decoder_layers(base)))
    }
    places |= dict.fromkeys(
        ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu"
    )
    return dispatch_model(
        base, places, main_device="cpu", offload_dir=str(folder), force_hooks=True
    )


@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "dispatch_model"])
def test_an_offloaded_base_is_fitted_as_another(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where layers are left out afterwards, and the adapter goes in once more."""
    monkeypatch.setattr("hf_depthroute.fitting.router.DENSE", 0.55)
    config = DepthRouteConfig(layers=[0, 2, 3], gate="affine")
    expected = fit_router(build_base("llama"), text(), keep=0.6, config=config)
    model = fit_router(offloaded(how, tmp_path / "offload"), text(), keep=0.6, config=config)
    layers = model.peft_config["default"].layers
    assert layers == expected.peft_config["default"].layers and 0 < len(layers) < 3
    assert any(parameter.is_meta for parameter in model.parameters())
    model.save_pretrained(str(tmp_path / "fitted"))
    loaded = PeftModel.from_pretrained(build_base("llama"), str(tmp_path / "fitted")).eval()
    ids = tokens(2, 20, seed=9)
    with torch.no_grad():
        wanted = expected(ids).logits
        assert torch.equal(model(ids).logits, wanted)
        assert torch.equal(loaded(ids).logits, wanted)
    assert mean_loss(model, text()) == mean_loss(expected, text())


@pytest.mark.parametrize("rise", [0.001, 1.0])
def test_the_second_round_is_kept_unless_it_loses_more_than_noise(
    rise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows the routed stream, which text of other kinds tells."""
    trials = []

    def measured(model: Any, batches: Any) -> Any:
        found = trial_of(model, batches)
        trials.append(found)
        if len(trials) == 2:
            noise_R = torch.linspace(-0.1, 0.1, len(found.loss_R), dtype=torch.float64)
            found = found._replace(loss_R=trials[0].loss_R + noise_R + rise)
        return found

    monkeypatch.setattr("hf_depthroute.fitting.router.trial_of", measured)
    config = DepthRouteConfig(layers="all", gate="affine")
    model = fit_router(build_base("llama"), text(), keep=0.5, config=config)
    found = remembered(model, "default").training["fit"]  # type: ignore[index]
    first, second = found["loss_of_rounds"]
    assert second == pytest.approx(first + rise)
    alone = fit_router(build_base("llama"), text(), keep=0.5, config=config, rounds=1)
    weights = [routings_of(fit)[0].depth_route_branch["default"] for fit in (model, alone)]
    kept_first = torch.equal(weights[0].down.weight, weights[1].down.weight)
    assert kept_first == (rise == 1.0)
    if kept_first:
        held_out = [{"input_ids": torch.cat([batch["input_ids"] for batch in text()])[4::5]}]
        assert mean_loss(model, held_out) == pytest.approx(found["loss"], abs=1e-4)
        assert found["loss"] == pytest.approx(first, abs=0.05)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_every_budget_is_held(scope: str) -> None:
    base = build_base("llama")
    model = get_depth_routed_model(base, DepthRouteConfig(layers="all", budget_scope=scope))
    # What a layer skips has to matter to the next one's scores.
    for routing in active_routings(model):
        branch = routing.depth_route_branch["default"]
        branch.down.weight.data.copy_(
            torch.randn(branch.down.weight.shape, generator=torch.Generator().manual_seed(2))
        )
    batches = text(64)
    calibrate(model, batches, 0.5)
    before = {h.layer_index: float(h.active_quantiles()(0.5)) for h in active_routings(model)}
    calibrate_budgets(model, batches)
    assert before == {
        h.layer_index: float(h.active_quantiles()(0.5)) for h in active_routings(model)
    }
    assert active_routings(model)[0].active_config().budget == 0.5
    for budget in (0.1, 0.3, 0.5, 0.7, 0.9):
        set_budget(model, budget)
        assert share(model, batches, len(decoder_layers(base))) == pytest.approx(budget, abs=0.02)


def test_budgets_need_a_calibration() -> None:
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig())
    with pytest.raises(ValueError, match="never fitted"):
        calibrate_budgets(model, text())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target": "experts", "gate": "mlp"}, "not fitted"),
        ({"gate": "jepa"}, "use one of: mlp, affine"),
        ({"branch": "none"}, "fits a branch"),
        ({"layers": [1]}, "run everything"),
    ],
)
def test_what_cannot_be_fitted_is_refused_before_anything_changes(
    fields: dict[str, Any], message: str
) -> None:
    base = build_base("olmoe" if fields.get("target") == "experts" else "llama")
    before = [type(layer) for layer in decoder_layers(base)]
    with pytest.raises(ConfigError, match=message):
        fit_router(base, text(), keep=0.3, config=DepthRouteConfig(**({"layers": "all"} | fields)))
    assert [type(layer) for layer in decoder_layers(base)] == before


class NormGate(Gate):
    """A gate of another package: the size of its input, and a fit of its own."""

    is_fitted = True

    def __init__(self, width: int, config: Any, scores: int = 1) -> None:
        super().__init__(width, config, scores)
        self.score = ScoreHead(1, scores)

    def forward(self, a: torch.Tensor) -> Any:
        return {"scores": self.score(a.norm(dim=-1, keepdim=True))}

    @torch.no_grad()
    def fit(
        self,
        a_Nd: torch.Tensor,
        y_N: torch.Tensor,
        seed: int,
        always_Sd: torch.Tensor | None = None,
    ) -> None:
        norms_N = a_Nd.norm(dim=-1)
        slope = torch.cov(torch.stack([norms_N, y_N]))[0, 1] / norms_N.var()
        self.score.weight.fill_(slope)
        self.score.bias.fill_(y_N.mean() - slope * norms_N.mean())


def test_a_gate_of_another_package_is_fitted_by_its_own_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(GATES, "norm", NormGate)
    config = DepthRouteConfig(layers="all", gate="norm", gate_input="residual")
    model = fit_router(build_base("llama"), text(), keep=0.6, config=config)
    assert share(model, text(), len(decoder_layers(model))) == pytest.approx(0.6, abs=0.1)
    monkeypatch.setattr(NormGate, "is_fitted", False)
    with pytest.raises(ConfigError, match="gate='norm' is not fitted"):
        fit_router(build_base("llama"), text(), keep=0.6, config=config)


@pytest.mark.parametrize("keep", [0.0, 1.0, -1.0, float("nan")])
def test_a_share_out_of_range_is_refused(keep: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        fit_router(build_base("llama"), text(), keep=keep)


def steps_of(
    model: Any, folder: Path, steps: int, lr: float, loss: str = "lm", **more: Any
) -> list[float]:
    """The term `loss` of each step of a training on one batch."""
    batch = {name: value[:8] for name, value in text(8, seed=1)[0].items()}
    rows = [{"input_ids": ids, "labels": ids} for ids in batch["input_ids"]]
    arguments = DepthRouteTrainingArguments(
        output_dir=str(folder), max_steps=steps, learning_rate=lr,
        per_device_train_batch_size=len(rows), lr_scheduler_type="constant", logging_steps=1,
        save_steps=steps, report_to="none", use_cpu=True, **more,
    )  # fmt: skip
    trainer = DepthRouteTrainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    return [entry[f"loss_{loss}"] for entry in trainer.state.log_history if f"loss_{loss}" in entry]


def test_training_starts_where_the_fit_ended(tmp_path: Path) -> None:
    """Its first loss is the fitted model's, which is not that of new routers; training lowers it,
    and knows of both."""
    base = build_base("qwen3")
    fitted = fit_router(copy.deepcopy(base), text(), keep=0.5)
    config = fitted.peft_config["default"]
    fit = remembered(fitted, "default").training["fit"]  # type: ignore[index]
    ids = text(8, seed=1)[0]["input_ids"]
    with torch.no_grad():
        before = float(fitted(ids, labels=ids).loss)
    unfitted = get_depth_routed_model(
        copy.deepcopy(base),
        DepthRouteConfig(layers=config.layers, budget=config.budget, budget_scope="global"),
    )
    new = steps_of(unfitted, tmp_path / "new", steps=1, lr=0.0)[0]
    losses = steps_of(fitted, tmp_path / "fitted", steps=30, lr=1e-3)
    assert losses[0] == pytest.approx(before, abs=1e-4)
    assert abs(losses[0] - new) > 1e-3
    assert losses[-1] < before - 1e-2
    record = remembered(fitted, "default").training
    assert record is not None and record["fit"] == fit and record["hyperparameters"]["steps"] == 30
    saved = json.loads((tmp_path / "fitted" / "checkpoint-30" / "training.json").read_text())
    assert saved["fit"] == json.loads(json.dumps(fit))


def test_branches_learn_under_gates_that_stay(tmp_path: Path) -> None:
    """No weight of a gate moves, and no gradient of a score reaches a branch:
    in front of the scores, all is given."""
    model = fit_router(build_base("llama"), text(), keep=0.5)
    first, second = active_routings(model)[:2]
    before = copy.deepcopy(model.state_dict())
    losses = steps_of(
        model,
        tmp_path,
        steps=30,
        lr=1e-3,
        loss="distill",
        train_gates=False,
        lm_weight=0.0,
        distill_weight=1.0,
    )
    changed = {
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }
    assert changed and not any("depth_route_gate" in name for name in changed)
    assert any("depth_route_branch" in name for name in changed)
    assert losses[-1] < losses[0]

    model.train()
    second.depth_route_gate.requires_grad_(False)
    with record_routes(model) as trace:
        model(text()[0]["input_ids"])
    assert not trace[second.layer_index].scores.requires_grad
    second.depth_route_gate.requires_grad_(True)
    with record_routes(model) as trace:
        model(text()[0]["input_ids"])
    trace[second.layer_index].scores.sum().backward()
    assert all(
        p.grad is not None and p.grad.any()
        for p in first.depth_route_branch["default"].down.parameters()
    )


def test_the_spread_of_shares_is_that_of_the_held_out_rows() -> None:
    model = fit_router(build_base("llama"), text(), keep=0.6)
    depth = len(decoder_layers(model))
    held_out = [
        {"input_ids": ids[None]}
        for ids in torch.cat([batch["input_ids"] for batch in text()])[4::5]
    ]
    shares = torch.tensor([share(model, [row], depth) for row in held_out])
    fewest, most = remembered(model, "default").training["fit"]["share_of_rows"]
    assert shares.min() - 1e-6 <= fewest <= most <= shares.max() + 1e-6
    assert fewest == pytest.approx(float(shares.quantile(0.05)), abs=1e-3)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="512 is the least"):
        fit_router(build_base("llama"), text(2, 8))


def test_the_command_says_in_a_line_that_text_is_too_short(tmp_path: Path) -> None:
    base, short = save_base(tmp_path / "base"), write_text(tmp_path / "text.txt", 20)
    ended = run(
        "fit",
        "--model",
        base,
        "--dataset",
        short,
        "--out",
        tmp_path / "out",
        "--length",
        32,
        "--blocks",
        4,
    )
    assert ended.code == 2
    assert "512 is the least" in ended.err
    assert not (tmp_path / "out").exists()


def test_the_command_saves_what_loads(tmp_path: Path) -> None:
    base, out = save_base(tmp_path / "base"), tmp_path / "fitted"
    ended = run(
        "fit", "--model", base, "--dataset", write_text(tmp_path / "text.txt", 200), "--keep", 0.6,
        "--out", out, "--length", 32, "--gate", "affine",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    layers = json.loads((out / "training.json").read_text())["fit"]["layers"].values()
    share = sum(layer["share"] for layer in layers) / len(layers)
    losses = (
        rf"loss on \d+ held-out tokens: dense .* with {share:.1%} of the calls \(--keep 0.6\)\n"
    )
    assert re.search(losses, ended.out)
    assert "note: fit_router: " in ended.err and "tokens to fit on are few" in ended.err
    fewest, most = json.loads((out / "training.json").read_text())["fit"]["share_of_rows"]
    assert f"in nine rows of ten, {fewest:.0%} to {most:.0%} of all calls run in full" in ended.out
    assert f"({fewest:.1%} to {most:.1%} in nine rows of ten)" in (out / "README.md").read_text()
    assert json.loads((out / "training.json").read_text())["fit"]["keep"] == 0.6
    card = (out / "README.md").read_text()
    assert "* Data: `text.txt`, split `train`" in card and 'base = "path/to/' in card
    said = re.search(
        r"budget of the adapter: ([\d.]+) of the calls in (\d) layers with a gate, .* all (\d) "
        r"layers",
        ended.out,
    )
    assert (
        said is not None
        and f"{json.loads((out / 'adapter_config.json').read_text())['budget']:.3g}" == said[1]
    )
    assert f"| budget | {said[0].removeprefix('budget of the adapter: ')} |" in card
    assert said[0].removeprefix("budget of the adapter: ") in run("doctor", out).out
    assert "pip install git+https://" in card  # no index has the package
    card = (out / "README.md").read_text()
    assert "fitted without training on" in card
    found = json.loads((out / "training.json").read_text())["fit"]["layers"]["0"]
    assert f"| `0` | {found['share']:.1%} | {found['branch_r2']:.2f} |" in card
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(out))
    assert is_calibrated(model)


def test_the_command_fills_a_memory(tmp_path: Path) -> None:
    base, out = save_base(tmp_path / "base"), tmp_path / "fitted"
    ended = run(
        "fit", "--model", base, "--dataset", write_text(tmp_path / "text.txt", 200), "--out", out,
        "--length", 32, "--gate", "affine", "--branch", "memory", "--memory-slots", 2048,
        "--memory-width", 8, "--memory-heads", 1, "--ngram-order", 2,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(out))
    assert (
        model.peft_config["default"].branch == "memory"
        and model.peft_config["default"].ngram_order == 2
    )
    tables = [weight for name, weight in model.named_parameters() if name.endswith(".table")]
    assert tables and all(weight.shape == (2048, 8) and weight.ne(0).any() for weight in tables)


def test_one_bar_counts_all_phases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reached: list[float] = []

    class Watched(FitBar):
        def __exit__(self, *error: object) -> None:
            reached.append(self.done / self.total)
            super().__exit__(*error)

    monkeypatch.setattr("hf_depthroute.fitting.router.FitBar", Watched)
    model = fit_router(build_base("llama"), text(), progress=True)
    shown = capsys.readouterr().err
    assert "fit: round 1 of 2" in shown and "fit: other budgets" in shown and "100%" in shown
    assert 0.8 <= reached[0] <= 1
    record = record_of(model)
    parts = {"gradients", "round 1 of 2", "round 2 of 2", "layers to leave out", "other budgets"}
    assert record["seconds_of"].keys() >= parts
    assert sum(record["seconds_of"].values()) <= record["seconds"] + 0.5  # each is rounded
    assert not any(layer._forward_pre_hooks for layer in decoder_layers(model))


def test_the_command_draws_the_bar_on_a_terminal(tmp_path: Path) -> None:
    base, given = save_base(tmp_path / "base"), write_text(tmp_path / "text.txt", 200)
    words = ["fit", "--model", base, "--dataset", given, "--length", 32, "--out", tmp_path / "out"]
    terminal, end = os.openpty()
    termios.tcsetwinsize(end, (24, 100))
    parts: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # what a closed terminal raises
            while part := os.read(terminal, 4096):
                parts.append(part)

    reader = threading.Thread(target=read)  # a terminal that nobody reads stops who writes
    reader.start()
    with (
        os.fdopen(end, "w") as stderr,
        contextlib.redirect_stderr(stderr),
        pytest.raises(SystemExit) as ended,
    ):
        main([str(word) for word in words])
    reader.join()
    os.close(terminal)
    shown = b"".join(parts)
    assert ended.value.code == 0, shown
    assert b"fit: round 1 of 2: " in shown and b"100%" in shown


def test_no_bar_is_drawn_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    fit_router(
        build_base("llama"), text(), config=DepthRouteConfig(layers="all", gate="affine"), rounds=1
    )
    assert "fit:" not in capsys.readouterr().err


def test_a_short_text_is_accepted_with_a_line_and_the_loss_has_its_error() -> None:
    with pytest.warns(FitWarning, match="tokens to fit on are few: on 3,000") as said:
        model = fit_router(
            build_base("llama"),
            text(),
            config=DepthRouteConfig(layers="all", gate="affine"),
            rounds=1,
        )
    assert [warning.filename for warning in said if warning.category is FitWarning] == [__file__]
    fit = remembered(model, "default").training["fit"]  # type: ignore[index]
    assert abs(fit["loss"] - fit["loss_dense"]) < 10 * fit["loss_over_dense_error"] < 1
