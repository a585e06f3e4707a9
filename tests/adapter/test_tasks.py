"""Classifiers, embedding models and reward models are routed: a decision needs no LM head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from headless import AUTO, headless
from models import CONFIGS, build_base, tokens
from peft import PeftModel
from safetensors.torch import load_file
from training import make_trainer, rows
from transformers import (
    AutoModelForSequenceClassification,
    LlamaForQuestionAnswering,
    Trainer,
)

from hf_depthroute import (
    DepthRouteConfig,
    DepthRouteTrainer,
    calibrate,
    fit_router,
    get_depth_routed_model,
    record_routes,
    set_budget,
)
from hf_depthroute.adapter.files import WEIGHTS_NAME, AdapterMismatchError
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.evaluation.perplexity import mean_loss
from hf_depthroute.routing.stack import routings_of

LAYERS = [1, 2, 3]


def outputs(model: Any, count: int = 2) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(count, 12))[0]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("task", AUTO)
def test_a_model_without_lm_head_is_routed_saved_and_loaded(
    task: str, given: bool, family: str, tmp_path: Path
) -> None:
    base = headless(task, family)
    dense = outputs(base)
    config = DepthRouteConfig(layers=LAYERS, gate="mlp", **({"task_type": task} if given else {}))
    model = peft.get_peft_model(base, config).eval()
    assert type(model) is AUTO[task][1] and model.peft_config["default"].task_type == task
    for index, routing in enumerate(routings_of(model)):
        for parameter in routing.parameters():
            torch.nn.init.normal_(
                parameter, std=0.3, generator=torch.Generator().manual_seed(index)
            )
    heads = [(name, p) for name, p in model.named_parameters() if "modules_to_save" in name]
    assert bool(heads) == (task != "FEATURE_EXTRACTION") and all(
        parameter.requires_grad for _, parameter in heads
    )
    assert all(
        ".routing." in name or "modules_to_save" in name
        for name, p in model.named_parameters()
        if p.requires_grad
    )
    with torch.no_grad():
        for _, parameter in heads:
            parameter.add_(0.1)
    shares = calibrate(model, {"input_ids": tokens(4, 12)})
    assert list(shares) == LAYERS and all(0.3 < share < 0.7 for share in shares.values())
    expected = outputs(model)
    assert not torch.equal(expected, dense)
    model.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / WEIGHTS_NAME))
    assert all(".routing." in name or ".score." in name or ".classifier." in name for name in names)
    other = headless(task, family)
    with torch.no_grad():
        for name in ("score", "classifier"):
            for parameter in getattr(other, name, torch.nn.Module()).parameters():
                parameter.zero_()  # the adapter has its own
    loaded = PeftModel.from_pretrained(other, tmp_path).eval()
    assert type(loaded) is type(model) and torch.equal(outputs(loaded), expected)
    loaded.save_pretrained(tmp_path / "again")
    assert set(load_file(tmp_path / "again" / WEIGHTS_NAME)) == names
    set_budget(loaded, 1.0)
    assert not torch.equal(outputs(loaded), expected)
    with loaded.disable_adapter():
        outputs(loaded)
    assert type(loaded.unload()) is type(other)


def test_a_decision_is_the_same_with_and_without_an_lm_head() -> None:
    masks = []
    for model in (build_base("llama"), headless("FEATURE_EXTRACTION")):
        routed = get_depth_routed_model(model, DepthRouteConfig(layers=LAYERS, gate="mlp")).eval()
        with record_routes(routed) as trace:
            outputs(routed)
        masks.append([record.scores for record in trace.values()])
    assert all(torch.equal(one, two) for one, two in zip(*masks, strict=True))


@pytest.mark.parametrize(
    ("make", "fields", "said"),
    [
        (
            lambda: headless("SEQ_CLS"),
            {"task_type": "CAUSAL_LM"},
            "does not generate text; .*set it to 'SEQ_CLS'",
        ),
        (
            lambda: headless("FEATURE_EXTRACTION"),
            {"task_type": "CAUSAL_LM"},
            "set it to 'FEATURE_EXTRACTION'",
        ),
        (
            lambda: headless("FEATURE_EXTRACTION"),
            {"task_type": "SEQ_CLS"},
            "no head named classifier or score",
        ),
        (
            lambda: build_base("llama"),
            {"task_type": "TOKEN_CLS"},
            "with its TokenClassification class",
        ),
        (
            lambda: LlamaForQuestionAnswering(CONFIGS["llama"][1]()),
            {},
            "its head is of no task that is routed",
        ),
        (
            lambda: headless("SEQ_CLS"),
            {"gate": "exit", "target": "block"},
            "needs a model with an LM head",
        ),
    ],
)
def test_a_task_that_does_not_fit_is_refused_and_the_model_is_as_it_was(
    make: Any, fields: Any, said: str
) -> None:
    base = make()
    names, kinds = list(base.state_dict()), [type(module) for module in base.modules()]
    trains = [parameter.requires_grad for parameter in base.parameters()]
    with pytest.raises(ConfigError, match=said) as caught:
        peft.get_peft_model(base, DepthRouteConfig(**{"layers": LAYERS} | fields))
    assert "\n" not in str(caught.value)
    assert list(base.state_dict()) == names and [type(module) for module in base.modules()] == kinds
    assert [parameter.requires_grad for parameter in base.parameters()] == trains


def test_an_adapter_for_text_is_refused_on_a_classifier_which_stays_as_it_was(
    tmp_path: Path,
) -> None:
    get_depth_routed_model(build_base("llama"), DepthRouteConfig(layers=LAYERS)).save_pretrained(
        tmp_path
    )
    base = headless("SEQ_CLS")
    names = list(base.state_dict())
    with pytest.raises(ConfigError, match="does not generate text"):
        PeftModel.from_pretrained(base, tmp_path)
    assert list(base.state_dict()) == names


def test_a_head_of_another_size_is_refused(tmp_path: Path) -> None:
    get_depth_routed_model(headless("SEQ_CLS"), DepthRouteConfig(layers=LAYERS)).save_pretrained(
        tmp_path
    )
    config = CONFIGS["llama"][1]()
    config.num_labels = 5
    other = AutoModelForSequenceClassification.from_config(config)
    other.model.load_state_dict(headless("SEQ_CLS").model.state_dict())
    with pytest.raises(AdapterMismatchError, match=r"score\.weight has shape"):
        PeftModel.from_pretrained(other, tmp_path)
    assert not any("routing" in name for name in other.state_dict())


@pytest.mark.parametrize("cls", [Trainer, DepthRouteTrainer])
@pytest.mark.parametrize("task", ["SEQ_CLS", "TOKEN_CLS"])
def test_a_classifier_trains_its_routers_and_its_head(task: str, cls: Any, tmp_path: Path) -> None:
    model = get_depth_routed_model(headless(task), DepthRouteConfig(layers=LAYERS, gate="mlp"))
    examples = [
        row | {"labels": torch.tensor(0) if task == "SEQ_CLS" else row["labels"] % 3}
        for row in rows(4)
    ]
    trainer, kept = make_trainer(
        model.train(), examples, tmp_path, cls, gradient_accumulation_steps=2
    )
    trainer.train()
    moved = {name for name, gradient in kept.steps[0].items() if gradient.abs().sum() > 0}
    assert any("modules_to_save" in name for name in moved) and any(
        "depth_route_gate" in name for name in moved
    )
    assert any("loss_budget" in entry for entry in trainer.state.log_history)
    with pytest.raises(ValueError, match="needs a model with an LM head, and LlamaFor") as caught:
        make_trainer(model, examples, tmp_path, cls, oracle="all_full", oracle_warmup=0)[0].train()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "call", [mean_loss, lambda model, blocks: fit_router(model, blocks, keep=0.5)]
)
def test_a_loss_of_text_needs_a_head_and_says_so(call: Any) -> None:
    with pytest.raises(ValueError, match="needs a model with an LM head, and LlamaModel has none"):
        call(headless("FEATURE_EXTRACTION"), [{"input_ids": tokens(2, 12)}])


@pytest.mark.parametrize("task", AUTO)
def test_the_card_loads_the_adapter_with_the_class_of_its_task(task: str, tmp_path: Path) -> None:
    get_depth_routed_model(headless(task), DepthRouteConfig(layers=LAYERS)).save_pretrained(
        tmp_path
    )
    card = (tmp_path / "README.md").read_text()
    assert f"model = {AUTO[task][0].__name__}.from_pretrained(base" in card
    assert ".generate(" not in card and "pipeline_tag: text-generation" not in card


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_classifiers_last_token_is_the_one_that_its_head_reads(family: str) -> None:
    """By the id of padding: without a mask, and where the end of a text has that id."""
    config = DepthRouteConfig(
        layers="all", target="block", gate="none", phases="prefill", prompt_tail=2
    )
    model = get_depth_routed_model(headless("SEQ_CLS", family), config)
    ids = tokens(2, 12)
    labels = torch.tensor([0, 2])
    ids[0, 8:] = 0
    mask = ids != 0
    for training in (False, True):
        model.train(training)
        with torch.no_grad():
            alone = [model(ids[:1, :8]).logits, model(ids[1:]).logits]
            for shown in (None, mask.long(), (mask | (ids.roll(1, 1) != 0)).long()):
                read = model(ids, attention_mask=shown, labels=labels)
                torch.testing.assert_close(read.logits, torch.cat(alone))
                read = model(ids, attention_mask=shown)
                torch.testing.assert_close(read.logits, torch.cat(alone))
