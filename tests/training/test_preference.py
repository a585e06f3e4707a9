"""TRL's preference and reinforcement trainers: policy,
reference and rollouts are the model that will be deployed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from headless import headless
from models import build_base, build_routed, logits, tokens
from peft import PeftModel
from text_models import word_tokenizer
from training import adapter_state

from hf_depthroute import DepthRouteConfig, set_phases
from hf_depthroute.base.contexts import evaluating
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.trace import count_routes, record_routes

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

PROMPTS = ("the cat sat", "a dog ran to", "it was the", "the big red")
PAIRS = [
    {"prompt": p, "chosen": " the cat sat on it", "rejected": " a hat was red and big"}
    for p in PROMPTS
]
UNPAIRED = [
    {"prompt": p, "completion": " the cat sat on it", "label": i % 2 == 0}
    for i, p in enumerate(PROMPTS)
]
KINDS = {
    "mlp": {},
    "controller": {"selection": "controller"},
    "gumbel": {"selection": "gumbel", "gate": "jepa"},
    "global": {"budget_scope": "global"},
    "predictor": {"causal_rule": "predictor"},
    "block": {"target": "block"},
    "linear": {"gate": "linear"},
}


def trained(folder: Path, **fields: Any) -> PeftModel:
    """An adapter from files, as people go on with one."""
    build_routed("llama", **fields).save_pretrained(folder)
    return PeftModel.from_pretrained(build_base("llama"), folder, is_trainable=True)


def arguments(cls: Any, folder: Path, **fields: Any) -> Any:
    shared = {
        "output_dir": str(folder / "run"),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    return cls(**shared | fields)


def rewards(log: dict[str, float], prefix: str = "") -> list[float]:
    names = tuple(f"{prefix}rewards/{side}" for side in ("chosen", "rejected"))
    return [value for name, value in log.items() if name.startswith(names)]


@pytest.mark.nightly(
    unless=lambda kind, checkpointing, precompute: (
        kind == "mlp" or not (checkpointing or precompute)
    )
)
@pytest.mark.parametrize("precompute", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_dpo_starts_at_its_reference(
    kind: str, checkpointing: bool, precompute: bool, tmp_path: Path
) -> None:
    model = trained(tmp_path, **KINDS[kind])
    start = adapter_state(model)
    args = arguments(
        trl.DPOConfig,
        tmp_path,
        max_length=32,
        precompute_ref_log_probs=precompute,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
    )
    data = datasets.Dataset.from_list(PAIRS)
    trainer = trl.DPOTrainer(
        model, args=args, train_dataset=data, eval_dataset=data, processing_class=word_tokenizer()
    )
    before = trainer.evaluate()
    assert before["eval_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert rewards(before, "eval_") == pytest.approx([0.0, 0.0], abs=1e-5)
    trainer.train()
    log = next(entry for entry in trainer.state.log_history if "loss_lm" in entry)
    assert log["loss_lm"] == pytest.approx(0.6931, abs=1e-4)
    assert rewards(log) == pytest.approx([0.0, 0.0], abs=1e-5)
    after = adapter_state(model)
    names = {name for name in after if ".default." in name}
    assert any(not torch.equal(after[name], start[name]) for name in names)
    for name in names:
        # The reference stays.
        assert torch.equal(after[name.replace(".default.", ".ref.")], start[name]), name
    trainer.evaluate()


@pytest.mark.parametrize("precompute", [False, True])
def test_kto_starts_at_its_reference(precompute: bool, tmp_path: Path) -> None:
    args = arguments(trl.KTOConfig, tmp_path, max_length=32, precompute_ref_log_probs=precompute)
    data = datasets.Dataset.from_list(UNPAIRED)
    trainer = trl.KTOTrainer(
        trained(tmp_path),
        args=args,
        train_dataset=data,
        eval_dataset=data,
        processing_class=word_tokenizer(),
    )
    assert rewards(trainer.evaluate(), "eval_") == pytest.approx([0.0, 0.0], abs=1e-5)
    trainer.train()
    log = next(entry for entry in trainer.state.log_history if "loss_lm" in entry)
    assert rewards(log) and rewards(log) == pytest.approx([0.0] * len(rewards(log)), abs=1e-5)
    assert log["loss_lm"] == pytest.approx(0.5, abs=1e-4)
    trainer.evaluate()


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_rollouts_are_those_of_inference_and_their_reference_is_the_start(
    name: str, tmp_path: Path
) -> None:
    model = trained(tmp_path)
    calls: list[int] = []
    generate = model.generate

    def twice(*args: Any, **kwargs: Any) -> Any:
        """As asked for, and in evaluation mode with the same random numbers."""
        state = torch.get_rng_state()
        with count_routes(model) as counted:
            out = generate(*args, **kwargs)
        torch.set_rng_state(state)
        with evaluating(model), count_routes(model) as expected:
            again = generate(*args, **kwargs)
        assert torch.equal(out, again) and counted.full_ratio() == expected.full_ratio()
        assert any(ratio < 1 for ratio in counted.full_ratio().values())
        calls.append(int(model.training))
        return out

    model.generate = twice
    args = arguments(
        getattr(trl, f"{name}Config"),
        tmp_path,
        num_generations=2,
        max_completion_length=6,
        beta=0.1,
        generation_kwargs={"suppress_tokens": [2]},
    )
    data = datasets.Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    trainer = getattr(trl, f"{name}Trainer")(
        model,
        reward_funcs=lambda completions, **_: [
            float(len(text) + i) for i, text in enumerate(completions)
        ],
        args=args,
        train_dataset=data,
        eval_dataset=data,
        processing_class=word_tokenizer(),
    )
    trainer.train()
    log = next(entry for entry in trainer.state.log_history if "loss_lm" in entry)
    assert log["kl"] == pytest.approx(0.0, abs=1e-6)
    trainer.evaluate()
    assert 1 in calls and 0 in calls


def reward_base() -> Any:
    base = headless("SEQ_CLS")
    base.score = torch.nn.Linear(base.config.hidden_size, 1, bias=False)
    base.config.num_labels = base.num_labels = 1
    return base


def test_a_reward_model_trains_and_evaluates(tmp_path: Path) -> None:
    base = reward_base()
    data = datasets.Dataset.from_list(PAIRS)
    trainer = trl.RewardTrainer(
        base,
        args=arguments(trl.RewardConfig, tmp_path, max_length=32),
        train_dataset=data,
        eval_dataset=data,
        processing_class=word_tokenizer(),
        peft_config=DepthRouteConfig(layers=[1, 2, 3]),
    )
    trainer.train()
    assert "loss_budget" in next(entry for entry in trainer.state.log_history if "loss_lm" in entry)
    trainer.evaluate()
    trainer.save_model(str(tmp_path / "reward"))
    loaded = PeftModel.from_pretrained(reward_base(), tmp_path / "reward").eval()
    assert torch.equal(loaded(tokens(2, 9))[0], trainer.model.eval()(tokens(2, 9))[0])


@pytest.mark.parametrize("selection", ["topk", "soft", "gumbel", "controller"])
def test_training_mode_without_gradients_decides_as_inference_does(selection: str) -> None:
    model = build_routed("llama", selection=selection)
    masks, found = [], []
    for training in (False, True):
        with record_routes(model.train(training)) as trace:
            found.append(logits(model))
        masks.append(trace)
    assert torch.equal(*found)
    assert all(torch.equal(masks[0][index].mask, masks[1][index].mask) for index in masks[0])


@pytest.mark.parametrize("kind", ["mlp", "attention", "block"])
@pytest.mark.parametrize("granularity", ["token", "sequence"])
def test_training_mode_generates_what_evaluation_mode_does(granularity: str, kind: str) -> None:
    model = build_routed("llama", kind, granularity=granularity)
    found = []
    for training in (False, True):
        with count_routes(model.train(training)) as counted:
            text = model.generate(
                tokens(2, 6), max_new_tokens=10, do_sample=False, eos_token_id=None
            )
        found.append((text, counted.full_ratio()))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_an_adapter_of_anothers_configuration_is_a_copy_of_it() -> None:
    model = build_routed("llama", gate="jepa", selection="controller", modules_to_save=["lm_head"])
    with torch.no_grad():
        model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(1.5)
    expected = logits(model)
    model.add_adapter("ref", model.peft_config["default"])
    assert torch.equal(logits(model), expected)
    model.set_adapter("ref")
    assert torch.equal(logits(model), expected)
    assert not any(p.requires_grad for name, p in model.named_parameters() if ".default." in name)
    model.set_adapter("default")
    model.add_adapter("fresh", DepthRouteConfig(layers=[1, 2, 3]))
    assert all(
        int(routing.depth_route_quantiles["fresh"].updates) == 0 for routing in routings_of(model)
    )


def test_a_policy_that_routes_prompts_alone_is_refused(tmp_path: Path) -> None:
    """Its log-probabilities come from one pass, in which the answer would be
    routed as a prompt is."""
    model = trained(tmp_path, phases="prefill")
    args = arguments(trl.DPOConfig, tmp_path, max_length=32)
    data = datasets.Dataset.from_list(PAIRS)
    trainer = trl.DPOTrainer(
        model, args=args, train_dataset=data, eval_dataset=data, processing_class=word_tokenizer()
    )
    for run in (trainer.evaluate, trainer.train):
        with pytest.raises(ValueError, match=r"DPOTrainer .* set_phases\(model, 'all'\)"):
            run()


TRIPLES = [{**pair, "reference": " the cat sat"} for pair in PAIRS]
WITHOUT_REFERENCE: list[tuple[str, str, list[dict[str, Any]], dict[str, Any]]] = [
    ("trl.experimental.orpo", "ORPO", PAIRS, {}),
    ("trl.experimental.cpo", "CPO", PAIRS, {}),
    ("trl.experimental.cpo", "CPO", PAIRS, {"loss_type": "simpo", "cpo_alpha": 0.0}),
    ("trl.experimental.tpo", "TPO", TRIPLES, {}),
    ("trl", "Distillation", [{"prompt": prompt} for prompt in PROMPTS], {}),
]


@pytest.mark.parametrize(
    "module, name, data, fields",
    WITHOUT_REFERENCE,
    ids=lambda value: value if isinstance(value, str) and "." not in value else "",
)
def test_a_trainer_without_a_reference_refuses_it_too(
    module: str,
    name: str,
    data: list[dict[str, Any]],
    fields: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trainers = pytest.importorskip(module)
    if not hasattr(trainers, f"{name}Trainer"):
        pytest.skip(f"this TRL has no {name}Trainer")
    lengths = {} if name == "Distillation" else {"max_length": 32}
    teacher = {"teacher_model": build_base("llama")} if name == "Distillation" else {}
    model = trained(tmp_path, phases="prefill")
    text = datasets.Dataset.from_list(data)
    trainer = getattr(trainers, f"{name}Trainer")(
        model,
        args=arguments(getattr(trainers, f"{name}Config"), tmp_path, **lengths, **fields),
        train_dataset=text,
        eval_dataset=text,
        processing_class=word_tokenizer(),
        **teacher,
    )
    for run in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match=rf"{name}Trainer .* set_phases\(model, 'all'\)"):
            run()
    set_phases(model, "all")
    trainer.train()


def test_a_reward_model_of_prompts_alone_trains(tmp_path: Path) -> None:
    """It reads the end of a text, which runs in full."""
    data = datasets.Dataset.from_list(PAIRS)
    trainer = trl.RewardTrainer(
        reward_base(),
        args=arguments(trl.RewardConfig, tmp_path, max_length=32),
        train_dataset=data,
        eval_dataset=data,
        processing_class=word_tokenizer(),
        peft_config=DepthRouteConfig(layers=[1, 2, 3], phases="prefill"),
    )
    trainer.train()
    trainer.evaluate()
