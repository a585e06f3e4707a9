"""The language-model loss without logits: the value, its gradients, what it needs in memory,
and when it is refused."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import DEVICE, FAMILY_NAMES, build_base, build_routed, tokens
from peft import LoraConfig, get_peft_model
from speed.memory import peak_bytes
from torch import nn
from training import (
    adapter_state,
    assert_same_tensors,
    gradients,
    make_trainer,
    rows,
    stacked,
    step_logs,
)
from transformers import Trainer

from hf_depthroute import DepthRouteTrainer, get_depth_routed_model
from hf_depthroute.config.adapter import DepthRouteConfig
from hf_depthroute.training import fused_loss as module
from hf_depthroute.training.fused_loss import FusedLoss, fused_cross_entropy, fused_loss_obstacle

TOLERANCE = 1e-6  # float32, relative to the largest value


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows a chunk at the tiny vocabulary, so that several chunks and a
    shorter last one occur."""
    monkeypatch.setattr(module, "_LOGITS", {"cpu": 3 * 64})


def operands(
    dtype: torch.dtype = torch.float32, bias: bool = False, head: bool = False
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    targets = torch.randint(0, 64, (2, 11), generator=generator)
    targets[0, 3:5] = targets[1, -1] = -100
    return {
        "hidden": draw(2, 11, 16).requires_grad_(),
        "weight": draw(64, 16).requires_grad_(head),
        "bias": draw(64).requires_grad_(head) if bias else None,
        "targets": targets,
    }


def naive(hidden: Any, targets: Any, weight: Any, bias: Any) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def grads(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: x.grad for name, x in given.items() if x is not None and x.grad is not None}


def close(one: torch.Tensor, two: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    return bool((one.float() - two.float()).abs().max() <= tolerance * two.float().abs().max())


# --- the function ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_the_logits(bias: bool, head: bool) -> None:
    one, two = operands(bias=bias, head=head), operands(bias=bias, head=head)
    total, count = fused_cross_entropy(one["hidden"], one["targets"], one["weight"], one["bias"])
    expected = naive(**two)
    (0.3 * total).backward()
    (0.3 * expected).backward()
    assert count == 2 * 11 - 3
    assert close(total, expected)
    assert (
        grads(one).keys()
        == grads(two).keys()
        == {"hidden", *["weight"] * head, *["bias"] * (head and bias)}
    )
    assert all(close(grads(one)[name], grad) for name, grad in grads(two).items())


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_has_the_float32_softmax_and_errors_of_the_size_of_the_naive_ones(
    autocast: bool,
) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    one, two, exact = operands(dtype), operands(dtype), operands(torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        total, _ = fused_cross_entropy(one["hidden"], one["targets"], one["weight"])
        expected = naive(**two)
    total.backward()
    expected.backward()
    if not autocast:
        with torch.no_grad():  # the exact gradient at the rounded operands
            for name in ("hidden", "weight"):
                exact[name].copy_(two[name].float())
    naive(**exact).backward()
    assert total.dtype == torch.float32 and close(total, expected, 1e-5)
    assert one["hidden"].grad.dtype == dtype
    fused, plain = (
        (given["hidden"].grad.float() - exact["hidden"].grad).abs().max() for given in (one, two)
    )
    assert fused <= 1.5 * plain + 1e-6


def test_a_frozen_head_costs_no_gradient_and_no_grad_mode_none_at_all() -> None:
    given = operands(bias=True)
    arguments = (
        given["hidden"].flatten(0, 1),
        given["weight"],
        given["bias"],
        given["targets"].flatten(),
        -100,
    )
    sizes = [
        part.numel() for part in module._chunked_cross_entropy(*arguments, [True, False, False])
    ]
    assert sizes == [1, 22 * 16, 0, 0]
    with torch.no_grad():
        quiet, _ = fused_cross_entropy(
            given["hidden"], given["targets"], given["weight"], given["bias"]
        )
    assert quiet.grad_fn is None and close(quiet, naive(**given).detach())


@pytest.mark.parametrize("wanted", [[True, False, False], [True, True, True], [False, True, False]])
def test_the_operator_is_registered_as_it_should_be(wanted: list[bool]) -> None:
    given = operands(bias=True)
    rows, targets = given["hidden"].detach().flatten(0, 1), given["targets"].flatten()
    tensors = [
        x.requires_grad_(wants) for x, wants in zip((rows, given["weight"], given["bias"]), wanted)
    ]
    torch.library.opcheck(module._chunked_cross_entropy, (*tensors, targets, -100, wanted))


def test_extreme_logits_stay_finite() -> None:
    given = operands()
    with torch.no_grad():
        given["hidden"].mul_(1e4)
    total, _ = fused_cross_entropy(given["hidden"], given["targets"], given["weight"])
    total.backward()
    assert close(total, naive(**given))
    assert given["hidden"].grad.isfinite().all()


def test_an_invalid_row_is_not_hidden() -> None:
    given = operands()
    with torch.no_grad():
        given["hidden"][0, 0] = torch.nan
    assert fused_cross_entropy(given["hidden"], given["targets"], given["weight"])[0].isnan()


def test_half_a_million_logits_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for logits in (64, 5 * 64, 2**24):
        monkeypatch.setattr(module, "_LOGITS", {"cpu": logits})
        given = operands()
        fused_cross_entropy(given["hidden"], given["targets"], given["weight"])[0].backward()
        results.append(given["hidden"].grad)
    assert close(results[0], results[2]) and close(results[1], results[2])


# --- a model --------------------------------------------------------------------------------------


def batch(length: int = 12) -> dict[str, torch.Tensor]:
    return stacked(rows(3, length, padding=(0, 4, 2)))


def loss_and_gradients(
    model: nn.Module, fused: bool, **inputs: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    if fused:
        with FusedLoss(model):
            loss = model(**inputs).loss
    else:
        loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_equal_to_naive(model: nn.Module, **inputs: Any) -> None:
    loss, grads = loss_and_gradients(model, True, **inputs)
    expected, expected_grads = loss_and_gradients(model, False, **inputs)
    assert close(loss, expected)
    assert_same_tensors(grads, expected_grads, tolerance=TOLERANCE)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_has_the_naive_loss_and_gradients(family: str) -> None:
    model = build_routed(family).train()
    assert_equal_to_naive(model, **batch())
    assert_equal_to_naive(model, **batch(), num_items_in_batch=torch.tensor(50))


def test_the_loss_of_expert_balance_is_kept() -> None:
    model = build_routed("olmoe").train()
    with_it = loss_and_gradients(model, True, **batch(), output_router_logits=True)[0]
    assert with_it != loss_and_gradients(model, True, **batch())[0]
    assert_equal_to_naive(model, **batch(), output_router_logits=True)


def test_shifted_labels_and_a_whole_number_of_items_are_understood() -> None:
    model, inputs = build_routed("llama").train(), batch()
    shifted = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    assert_equal_to_naive(model, **inputs, shift_labels=shifted, num_items_in_batch=30)


def test_a_batch_without_a_target_is_a_nan_without_gradient() -> None:
    inputs = batch()
    inputs["labels"].fill_(-100)
    model = build_routed("llama").train()
    loss, grads = loss_and_gradients(model, True, **inputs)
    assert loss.isnan() and loss_and_gradients(model, False, **inputs)[0].isnan()
    assert all((grad == 0).all() for grad in grads.values())


def test_every_weight_of_an_unfrozen_model_gets_the_naive_gradient() -> None:
    # Its head is no embedding too: both have a gradient of their own.
    model = build_base("llama").train()
    assert_equal_to_naive(model, **batch())
    assert model.lm_head.weight.grad.abs().max() > 0


def test_it_works_under_lora_and_gradient_checkpointing() -> None:
    torch.manual_seed(0)
    model = get_peft_model(
        build_base("llama"), LoraConfig(target_modules=["q_proj", "down_proj"])
    ).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_equal_to_naive(model, **batch())


def test_the_model_is_left_as_it_was_also_after_an_exception() -> None:
    model, inputs = build_routed("llama"), batch()
    before = model(**inputs).logits
    with pytest.raises(KeyError, match="stop"), FusedLoss(model):
        raise KeyError("stop")
    with torch.no_grad():
        context = FusedLoss(model)
        for _ in range(2):  # one object serves many blocks
            with context:
                model(**inputs)
    assert torch.equal(model(**inputs).logits, before)
    assert (
        "forward" not in model.base_model.model.lm_head.__dict__
        and fused_loss_obstacle(model) is None
    )


# --- what is refused ------------------------------------------------------------------------------


class LowRankHead(nn.Linear):
    """A head that computes something of its own."""


def _other_head(base: Any) -> None:
    base.lm_head = LowRankHead(32, 64, bias=False, device=DEVICE)


def _own_loss(base: Any) -> None:
    base.loss_function = lambda logits, labels, **kwargs: logits.sum()


def _hook(base: Any) -> None:
    base.register_forward_hook(lambda module, args, output: None)


def _larger_head(base: Any) -> None:
    base.config.vocab_size = 60


def _unknown(base: Any) -> None:
    base.config.model_type = "bloom"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_head, "not a plain linear layer"),
        (_own_loss, "loss function of its own"),
        (_hook, "forward hooks"),
        (_larger_head, "differ in size"),
        (_unknown, "is not known"),
    ],
)
def test_a_model_with_another_forward_is_refused(
    change: Callable[[Any], None], message: str
) -> None:
    base = build_base("llama")
    assert fused_loss_obstacle(base) is None
    change(base)
    with pytest.raises(ValueError, match=message):
        FusedLoss(base)


def test_a_model_that_changes_its_logits_is_noticed_in_the_forward_pass() -> None:
    base = build_base("llama")
    context = FusedLoss(base)
    with context, pytest.raises(RuntimeError, match="changes its logits"):
        base.loss_function(
            logits=base.lm_head(torch.zeros(1, 4, 32)) * 0.5, labels=tokens(1, 4), vocab_size=64
        )


# --- the trainer ----------------------------------------------------------------------------------


def trained(
    folder: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> tuple[Any, Any, int]:
    """The trainer after five batches, its gradients, and how often the fused loss was computed."""
    calls: list[int] = []
    compute = FusedLoss._causal_lm_loss
    with monkeypatch.context() as patch:
        patch.setattr(
            FusedLoss, "_causal_lm_loss", lambda *a, **k: calls.append(1) or compute(*a, **k)
        )
        trainer, kept = make_trainer(model, rows(10, padding=(0, 3, 5)), folder, **fields)
        trainer.train()
    return trainer, kept, len(calls)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"exit_weight": 0.5, "lm_weight": 0.5},
        {"oracle": "all_full", "oracle_warmup": 0, "cgs_weight": 0.5, "cgs_warmup": 0},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ],
    ids=["plain", "accumulated", "exits", "forks", "checkpointed"],
)
def test_the_trainer_takes_it_and_trains_the_same(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, kept, calls = trained(tmp_path, build_routed("llama", "jepa"), monkeypatch, **fields)
    plain, expected, none = trained(
        tmp_path, build_routed("llama", "jepa"), monkeypatch, fused_loss=False, **fields
    )
    assert (calls, none) == (5, 0)
    assert_same_tensors(kept.steps[0], expected.steps[0], tolerance=TOLERANCE)
    for entry, other in zip(step_logs(fused), step_logs(plain), strict=True):
        assert {name for name in entry if name.startswith("loss")} == {
            n for n in other if n.startswith("loss")
        }
        assert all(
            entry[n] == pytest.approx(other[n], rel=1e-4) for n in entry if n.startswith("loss")
        )
    assert_same_tensors(adapter_state(fused.model), adapter_state(plain.model), tolerance=1e-4)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"fused_loss": False}, "fused_loss=False"),
        ({"label_smoothing_factor": 0.1}, "label smoothing"),
        ({"distill_weight": 0.1}, "distill"),
        ({"lm_weight": 0.0}, "lm_weight=0"),
    ],
)
def test_where_logits_are_needed_they_are_computed(
    fields: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _, calls = trained(tmp_path, build_routed("llama"), monkeypatch, **fields)
    assert calls == 0 and reason in str(trainer.fused_loss_obstacle())
    assert all(entry["loss"] > 0 for entry in step_logs(trainer))


def test_a_gate_that_reads_logits_keeps_them(tmp_path: Path) -> None:
    config = DepthRouteConfig(
        layers=[2, 3], gate="exit", target="block", threshold=-0.5, branch="none"
    )
    trainer, _ = make_trainer(
        get_depth_routed_model(build_base("llama"), config), rows(2), tmp_path
    )
    assert "inside the layers" in str(trainer.fused_loss_obstacle())


def test_a_subclass_that_asks_for_outputs_gets_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []

    class Looking(DepthRouteTrainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
        ) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            shapes.append(outputs.logits.shape)
            return loss

    *_, calls = trained(tmp_path, build_routed("llama"), monkeypatch, cls=Looking)
    assert calls == 0 and set(shapes) == {(2, 12, 64)}


def test_a_trainer_with_a_loss_of_its_own_gets_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TRL's, which computes accuracies from them."""
    from hf_depthroute.training.trainer import DepthRouteTrainerMixin

    shapes = []

    class Own(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, *args: Any
        ) -> Any:
            loss, outputs = super().compute_loss(model, inputs, True, *args)
            shapes.append(outputs.logits.shape)
            return (loss, outputs) if return_outputs else loss

    class Mixed(DepthRouteTrainerMixin, Own):
        pass

    *_, calls = trained(tmp_path, build_routed("llama"), monkeypatch, cls=Mixed)
    assert calls == 0 and set(shapes) == {(2, 12, 64)}


def test_evaluation_has_logits(tmp_path: Path) -> None:
    seen = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions.shape)
        return {}

    trainer, _ = make_trainer(
        build_routed("llama"), rows(2), tmp_path, eval_dataset=rows(3), eval_strategy="epoch"
    )
    trainer.compute_metrics = metrics
    trainer.train()
    assert seen == [(3, 12, 64)]


# --- memory ---------------------------------------------------------------------------------------


def test_at_a_vocabulary_of_150k_logits_take_a_quarter_of_the_memory() -> None:
    hidden = torch.randn(1, 256, 8)
    weight, targets = torch.randn(150_000, 8), torch.randint(0, 150_000, (1, 256))

    def step(fused: bool) -> Callable[[], None]:
        def run() -> None:
            given = hidden.clone().requires_grad_()
            total = (
                fused_cross_entropy(given, targets, weight)[0]
                if fused
                else naive(given, targets, weight, None)
            )
            total.backward()

        return run

    gc.collect()
    plain, fused = (peak_bytes(step(kind), hidden.device) for kind in (False, True))
    logits = 256 * 150_000 * 4
    assert plain > 2 * logits  # logits, their log-probabilities, their gradient
    assert fused < plain / 4


# --- the kernel library ---------------------------------------------------------------------------


@pytest.fixture
def kernel_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """A stand-in for `liger-kernel` with its constructor and call; what it was called with."""
    calls: list[dict[str, Any]] = []

    class LigerFusedLinearCrossEntropyLoss(nn.Module):
        def __init__(self, ignore_index: int = -100, reduction: str = "mean") -> None:
            super().__init__()
            self.settings = {"ignore_index": ignore_index, "reduction": reduction}

        def forward(
            self, lin_weight: Any, _input: Any, target: Any, bias: Any = None
        ) -> torch.Tensor:
            calls.append(self.settings)
            return F.cross_entropy(
                F.linear(_input, lin_weight, bias).float(), target, **self.settings
            )

    for name in (
        "liger_kernel",
        "liger_kernel.transformers",
        "liger_kernel.transformers.fused_linear_cross_entropy",
    ):
        stand_in: Any = types.ModuleType(name)
        stand_in.LigerFusedLinearCrossEntropyLoss = LigerFusedLinearCrossEntropyLoss
        monkeypatch.setitem(sys.modules, name, stand_in)
    module._liger_sum.cache_clear()
    yield calls
    module._liger_sum.cache_clear()


def test_the_kernel_library_is_asked_for_the_sum(kernel_library: list[dict[str, Any]]) -> None:
    given = operands(bias=True)
    rows, targets = given["hidden"].flatten(0, 1), given["targets"].flatten()
    total = module._liger_sum()(rows, given["weight"], given["bias"], targets, -100)
    assert kernel_library == [{"ignore_index": -100, "reduction": "sum"}]
    assert torch.equal(total, naive(**given))


def test_without_the_kernel_library_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {
        "liger_kernel",
        *(name for name in sys.modules if name.startswith("liger_kernel.")),
    }:
        monkeypatch.setitem(sys.modules, name, None)  # its import fails
    module._liger_sum.cache_clear()
    assert module._liger_sum() is None
    module._liger_sum.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_value_is_the_same(dtype: torch.dtype) -> None:
    one, two = operands(dtype), operands(dtype)
    for given in (one, two):
        given.update(
            {
                n: x.detach().cuda().requires_grad_(x.requires_grad)
                for n, x in given.items()
                if x is not None
            }
        )
    total, count = fused_cross_entropy(one["hidden"], one["targets"], one["weight"])
    expected = naive(**two)
    total.backward()
    expected.backward()
    assert count == 19 and close(total, expected, 1e-5)
    assert close(one["hidden"].grad, two["hidden"].grad, 1e-5 if dtype == torch.float32 else 2e-2)
