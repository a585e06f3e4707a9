"""Weights read into an adapter that is there: those of the same adapter, or nothing changes."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CONFIGS, build_base, build_routed, logits, randomised, routed, tokens
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from training import make_trainer, rows
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer

import hf_depthroute.adapter.doctor
import hf_depthroute.adapter.loading
from hf_depthroute import (
    DepthRouteConfig,
    DepthRouteTrainer,
    DepthRouteTrainingArguments,
    allow_base_mismatch,
    calibrate,
    get_depth_routed_model,
    set_budget,
)
from hf_depthroute.adapter.files import CONFIG_NAME, WEIGHTS_NAME, AdapterMismatchError
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.training.checkpoints import trained
from hf_depthroute.training.record import remember_training, remembered

MEMORY = {"branch": "memory", "memory_slots": 8192, "memory_width": 2, "memory_heads": 1}


def assert_untouched(model: Any, expected: torch.Tensor, folder: Path) -> None:
    assert list(model.peft_config) == ["default"]
    assert torch.equal(logits(model), expected)
    model.save_pretrained(folder)
    assert torch.equal(logits(PeftModel.from_pretrained(build_base("llama"), folder)), expected)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layers": [0, 1, 2]}, "tensor"),
        ({"gate": "jepa"}, "has gate='jepa', the one in the model 'mlp'"),
        ({"target": "attention"}, "has target='attention'"),
        ({"threshold": 0.25, "selection": "threshold"}, "has threshold=0.25"),
        ({"branch_rank": 2}, "has shape"),
    ],
)
def test_a_refused_reload_leaves_the_adapter_as_it_was(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    routed(build_base("llama"), **fields).save_pretrained(tmp_path / "other")
    model = routed(build_base("llama"), seed=3)
    expected = logits(model)
    with pytest.raises(AdapterMismatchError, match=said):
        model.load_adapter(tmp_path / "other", "default")
    assert_untouched(model, expected, tmp_path / "again")


def test_a_state_dict_without_a_tensor_leaves_the_adapter_as_it_was(tmp_path: Path) -> None:
    model = routed(build_base("llama"))
    expected, state = logits(model), get_peft_model_state_dict(model)
    state.popitem()
    with pytest.raises(AdapterMismatchError, match="is missing"):
        set_peft_model_state_dict(model, state)
    assert_untouched(model, expected, tmp_path)


def test_a_reload_asks_for_the_base_and_the_hash(tmp_path: Path) -> None:
    routed(build_base("llama", seed=1)).save_pretrained(tmp_path / "other base")
    model = routed(build_base("llama"))
    model.save_pretrained(tmp_path / "same")
    expected = logits(model)
    with pytest.raises(
        AdapterMismatchError, match=r"made for another base model.*sampled weights differ"
    ):
        model.load_adapter(tmp_path / "other base", "default")
    shutil.copy(tmp_path / "other base" / WEIGHTS_NAME, tmp_path / "same")
    with pytest.raises(AdapterMismatchError, match="its hash is not the one there"):
        model.load_adapter(tmp_path / "same", "default")
    assert_untouched(model, expected, tmp_path / "again")
    with allow_base_mismatch():
        model.load_adapter(tmp_path / "other base", "default")
    assert not torch.equal(logits(model), expected)


def test_a_reload_is_compared_with_the_hash_of_its_own_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the weights are exchanged after the config was read."""
    model = routed(build_base("llama"))
    model.save_pretrained(tmp_path)
    save_file(
        {name: value + 1 for name, value in load_file(tmp_path / WEIGHTS_NAME).items()},
        tmp_path / WEIGHTS_NAME,
    )
    monkeypatch.setattr("hf_depthroute.adapter.loading.check_folder", lambda folder, config: None)
    with pytest.raises(AdapterMismatchError, match="not those that the config was saved with"):
        model.load_adapter(tmp_path, "default")
    assert model.peft_config["default"].weights_hash is None


@pytest.mark.parametrize(("fields", "refused"), [(MEMORY, True), ({}, False)])
def test_a_reload_with_another_seed_is_refused_where_it_makes_the_hashes(
    fields: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    saved, model = (routed(build_base("llama"), seed=seed, **fields) for seed in (1, 2))
    saved.save_pretrained(tmp_path)
    if refused:
        with pytest.raises(AdapterMismatchError, match="has seed=1, the one in the model 2"):
            model.load_adapter(tmp_path, "default")
    else:
        model.load_adapter(tmp_path, "default")
        assert torch.equal(logits(model), logits(saved))


def test_another_methods_files_are_not_read_into_a_routed_adapter(tmp_path: Path) -> None:
    get_peft_model(build_base("llama"), LoraConfig(target_modules=["q_proj"])).save_pretrained(
        tmp_path / "lora"
    )
    model = routed(build_base("llama"))
    expected = logits(model)
    with pytest.raises(AdapterMismatchError, match="is no depth-routed adapter"):
        model.load_adapter(tmp_path / "lora", "default")
    assert_untouched(model, expected, tmp_path / "again")


def test_a_saved_config_begins_a_new_adapter_whose_checkpoints_load(tmp_path: Path) -> None:
    routed(build_base("llama")).save_pretrained(tmp_path / "saved")
    config = PeftConfig.from_pretrained(tmp_path / "saved")
    assert config.weights_hash is not None
    config.inference_mode = False
    model = get_depth_routed_model(build_base("llama"), config)
    state = get_peft_model_state_dict(model)
    set_peft_model_state_dict(model, state)  # of another hash than the saved one
    arguments = DepthRouteTrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=2, save_steps=1, eval_steps=1,
        eval_strategy="steps", per_device_train_batch_size=2, load_best_model_at_end=True,
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    data = rows(4)
    trainer = DepthRouteTrainer(model, arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    best = PeftModel.from_pretrained(build_base("llama"), trainer.state.best_model_checkpoint)
    assert torch.equal(logits(model.eval()), logits(best))


def test_a_config_that_is_given_for_saved_weights_has_to_mean_the_same(tmp_path: Path) -> None:
    model = routed(build_base("llama"))
    model.save_pretrained(tmp_path)
    config = PeftConfig.from_pretrained(tmp_path)
    config.budget = 0.25
    config.prompt_tail = 4
    loaded = PeftModel.from_pretrained(build_base("llama"), tmp_path, config=config)
    set_budget(model, 0.25)
    assert torch.equal(logits(loaded), logits(model))
    config.gate_input = "residual"
    for arguments in ((), ("default", False, config)):
        given = {} if arguments else {"config": config}
        base = build_base("llama")
        with pytest.raises(AdapterMismatchError, match="gate_input='normed', the config that was"):
            PeftModel.from_pretrained(base, tmp_path, *arguments, **given)
        assert torch.equal(logits(base), logits(build_base("llama")))
    bare = DepthRouteConfig(layers=[1, 2, 3], context_dim=16, summary_dim=8, action_dim=4)
    with pytest.raises(AdapterMismatchError, match="weights"):
        PeftModel.from_pretrained(build_base("llama", seed=1), tmp_path, config=bare)
    (tmp_path / CONFIG_NAME).unlink()
    bare.budget = 0.25
    alone = PeftModel.from_pretrained(build_base("llama"), tmp_path, config=bare)
    assert torch.equal(logits(alone), logits(model))


def test_native_loading_compares_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    routed(build_base("llama")).save_pretrained(tmp_path)
    state = {name: value + 1 for name, value in load_file(tmp_path / WEIGHTS_NAME).items()}
    base = build_base("llama")
    with pytest.raises(AdapterMismatchError, match="not those that the config was saved with"):
        base.load_adapter(
            adapter_state_dict=state, peft_config=PeftConfig.from_pretrained(tmp_path)
        )
    assert torch.equal(logits(base), logits(build_base("llama")))


# Resized embeddings -------------------------------------------------------------------------------


def resized(folder: Path) -> Any:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder)
    base.resize_token_embeddings(70, mean_resizing=False)
    return base


@pytest.mark.parametrize("how", ["PEFT", "transformers", "resized after injection"])
def test_an_adapter_of_resized_embeddings_loads(how: str, tmp_path: Path) -> None:
    build_base("llama").save_pretrained(tmp_path / "base")
    if how == "resized after injection":
        model = routed(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
        torch.manual_seed(0)
        model.get_base_model().resize_token_embeddings(70, mean_resizing=False)
    else:
        model = routed(resized(tmp_path / "base"))
    if how == "transformers":
        model.get_base_model()._hf_peft_config_loaded = True
        model.get_base_model().save_pretrained(tmp_path / "adapter")
    else:
        model.save_pretrained(tmp_path / "adapter")
    assert all(".routing." in name for name in load_file(tmp_path / "adapter" / WEIGHTS_NAME))
    loaded = PeftModel.from_pretrained(resized(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(model))
    with pytest.warns(UserWarning, match="made with vocab_size 70, this model has 64"):
        PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
        )


def llama(tied: bool) -> Any:
    config = CONFIGS["llama"][1]()
    config.tie_word_embeddings = tied
    return randomised(LlamaForCausalLM(config), "sdpa", torch.float32, 0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("rows", "multiple"), [(65, None), (65, 128), (40, None), (5, None)])
@pytest.mark.parametrize("path", ["PeftModel.from_pretrained", "transformers", "reload"])
def test_an_adapter_does_not_depend_on_the_vocabulary(
    path: str, rows: int, multiple: int | None, tied: bool, tmp_path: Path
) -> None:
    """One more token, rows added to a multiple, fewer rows: it loads, says so,
    and routes as before."""
    model = routed(llama(tied))
    model.save_pretrained(tmp_path)
    ids = tokens(2, 8) % rows
    expected = model(input_ids=ids).logits[..., : min(rows, 64)]
    base = llama(tied)
    model = routed(base, seed=9) if path == "reload" else base
    base.resize_token_embeddings(rows, pad_to_multiple_of=multiple, mean_resizing=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if path == "transformers":
            base.load_adapter(str(tmp_path))
        elif path == "reload":
            model.load_adapter(tmp_path, "default")
        else:
            model = PeftModel.from_pretrained(base, tmp_path)
    assert any(
        "made with vocab_size 64, this model has" in str(warning.message) for warning in said
    )
    torch.testing.assert_close(
        model.eval()(input_ids=ids).logits[..., : min(rows, 64)], expected, rtol=0, atol=1e-5
    )


def test_a_grown_vocabulary_does_not_let_another_base_in(tmp_path: Path) -> None:
    routed(build_base("llama")).save_pretrained(tmp_path)
    other = build_base("llama", seed=5)
    other.resize_token_embeddings(70, mean_resizing=False)
    with pytest.raises(AdapterMismatchError, match="sampled weights differ"):
        PeftModel.from_pretrained(other, tmp_path)
    grown = build_base("llama")
    grown.resize_token_embeddings(70, mean_resizing=False)
    with torch.no_grad():
        grown.get_input_embeddings().weight.mul_(3)
    with pytest.raises(AdapterMismatchError, match=r"such as embeddings\.weight"):
        PeftModel.from_pretrained(grown, tmp_path)


def test_embeddings_that_are_asked_for_are_refused_and_the_earlier_save_stays(
    tmp_path: Path,
) -> None:
    model = routed(build_base("llama"))
    model.save_pretrained(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME)}
    with pytest.raises(ConfigError, match="name the embeddings in modules_to_save"):
        model.save_pretrained(tmp_path, save_embedding_layers=True)
    assert before == {name: (tmp_path / name).read_bytes() for name in before}


def test_loras_embeddings_are_saved_as_peft_does(tmp_path: Path) -> None:
    lora = get_peft_model(build_base("llama"), LoraConfig(target_modules=["q_proj"]))
    lora.save_pretrained(tmp_path, save_embedding_layers=True)
    assert any("embed_tokens" in name for name in load_file(tmp_path / WEIGHTS_NAME))


def test_what_no_load_takes_does_not_replace_a_good_adapter(tmp_path: Path) -> None:
    model = routed(build_base("llama"))
    expected = logits(model)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        next(value for name, value in model.named_parameters() if "depth_route_gate" in name).fill_(
            torch.nan
        )
    with pytest.raises(AdapterMismatchError, match="not finite"):
        model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(build_base("llama"), tmp_path)), expected)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".saving-")]


# What is beside it --------------------------------------------------------------------------------


def test_an_adapter_loaded_for_inference_leaves_the_one_that_trains(tmp_path: Path) -> None:
    routed(build_base("llama"), layers=[0, 2], modules_to_save=["lm_head"]).save_pretrained(
        tmp_path
    )
    model = routed(build_base("llama"), adapter_name="mine", modules_to_save=["lm_head"]).train()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("lm_head.modules_to_save.mine" in name for name in trained)
    model.load_adapter(tmp_path, "reference")
    assert {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    } == trained
    model.train()
    model(input_ids=tokens(2, 8), labels=tokens(2, 8)).loss.backward()


def test_a_config_makes_adapters_of_several_bases() -> None:
    config = DepthRouteConfig(layers="last:2")
    before = config.to_dict()
    for seed in (0, 1):
        model = get_peft_model(build_base("llama", seed=seed), config, adapter_name="router")
        assert model.peft_config["router"].layers == [2, 3]
    assert {**config.to_dict(), "base_model_name_or_path": None} == {
        **before,
        "base_model_name_or_path": None,
    }


@pytest.mark.parametrize(
    "way", ["PeftModel.from_pretrained", "load_adapter", "transformers", "PeftConfig", "doctor"]
)
def test_files_that_another_process_replaces_meanwhile_are_read_again(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saves are whole, and a load is of one of them."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(folders):
        build_routed("llama", seed=seed).save_pretrained(folder)
    place = Path(shutil.copytree(folders[0], tmp_path / "adapter"))
    saves = iter([1, 0, 1])
    read = hf_depthroute.adapter.loading.read_config

    def slow(path: Path) -> Any:
        """The config; then another process saves, so that the weights are of another save."""
        found, save = read(path), next(saves, None)
        for name in (WEIGHTS_NAME, CONFIG_NAME) if save is not None else ():
            shutil.copy(folders[save] / name, tmp_path / "staged")
            os.replace(tmp_path / "staged", place / name)
        return found

    for module in (hf_depthroute.adapter.loading, hf_depthroute.adapter.doctor):
        monkeypatch.setattr(module, "read_config", slow)
    base = build_base("llama")
    if way == "doctor":
        assert [
            found for found in hf_depthroute.adapter.doctor.examine(place) if found.state != "ok"
        ] == []
        return
    if way == "PeftConfig":
        PeftConfig.from_pretrained(place)
        return
    if way == "transformers":
        base.load_adapter(str(place))
        model: Any = base
    elif way == "load_adapter":
        model = build_routed("llama", seed=5)
        model.load_adapter(place, "other")
        model.set_adapter("other")
    else:
        model = PeftModel.from_pretrained(base, place)
    last = PeftModel.from_pretrained(build_base("llama"), folders[1])
    assert torch.equal(logits(model.eval()), logits(last.eval()))


def test_other_weights_have_none_of_what_was_measured_before(tmp_path: Path) -> None:
    text = {"input_ids": tokens(8, 40, seed=3)}
    model, other = routed(build_base("llama")), routed(build_base("llama"))
    for one in (model, other):
        calibrate(one, text)
        remember_training(one, {"steps": 3})
    other.save_pretrained(tmp_path / "other")
    model.load_adapter(tmp_path / "other", "default")
    assert all(routing.active_quantiles().measured is None for routing in routings_of(model))
    assert remembered(model, "default").training is None


def test_the_best_checkpoint_has_no_shares_of_the_last_step(tmp_path: Path) -> None:
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig(layers=[1, 2, 3]))
    arguments = DepthRouteTrainingArguments(
        output_dir=str(tmp_path), max_steps=4, save_steps=1, eval_steps=1, eval_strategy="steps",
        learning_rate=0.3, per_device_train_batch_size=2, load_best_model_at_end=True, report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    DepthRouteTrainer(model, arguments, train_dataset=rows(8), eval_dataset=rows(4, seed=5)).train()
    assert all(routing.active_quantiles().measured is None for routing in routings_of(model))
    assert remembered(model, "default").training is not None


def beside_lora() -> PeftModel:
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    lora = get_peft_model(build_base("llama"), config, adapter_name="tuned")
    return routed(lora.get_base_model(), adapter_name="router")


def second_of_two() -> PeftModel:
    """Two of one configuration; the other's weights are saved where a Trainer looks for these."""
    model = routed(build_base("llama"), seed=3)
    fields = {"layers": [1, 2, 3], "context_dim": 16, "summary_dim": 8, "action_dim": 4}
    model.add_adapter("router", DepthRouteConfig(**fields, seed=3))
    model.set_adapter("router")
    return model


@pytest.mark.parametrize("trainer_class", [DepthRouteTrainer, Trainer])
@pytest.mark.parametrize(
    "make",
    [lambda: routed(build_base("llama"), adapter_name="router"), beside_lora, second_of_two],
    ids=["named", "beside LoRA", "second of two"],
)
def test_the_best_checkpoint_is_that_of_the_adapters_that_train(
    make: Callable[[], PeftModel], trainer_class: type[Trainer], tmp_path: Path
) -> None:
    model = make()
    trainer = make_trainer(
        model, rows(8), tmp_path, trainer_class, max_steps=3, save_steps=1, eval_steps=1,
        eval_strategy="steps", save_strategy="steps", learning_rate=0.1,
        load_best_model_at_end=True, eval_dataset=rows(4, seed=5),
    )[0]  # fmt: skip
    # Which one is best does not matter, but that it is not the last.
    trainer.evaluate = lambda *args, **kwargs: {"eval_loss": abs(trainer.state.global_step - 2)}
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name == "checkpoint-2"
    held = model.state_dict()
    names = [name for name in ("router", "tuned") if name in model.peft_config]
    for name in names:
        saved = load_file(best / name / WEIGHTS_NAME)
        found = get_peft_model_state_dict(model, held, name)
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[key], saved[key]) for key in saved)


def test_what_trains_is_told_by_the_adapters_own_parts() -> None:
    """A frozen adapter may be called as a part of the base is."""
    model = routed(build_base("llama"))
    model.add_adapter("model", DepthRouteConfig(layers=[1, 2, 3]))
    assert trained(model) == ["default"]


def test_a_way_of_ones_own_to_load_the_best_checkpoint_stays(tmp_path: Path) -> None:
    for model in (routed(build_base("llama")), build_base("llama")):
        trainer = make_trainer(model, rows(4), tmp_path, Trainer, max_steps=1)[0]
        own = trainer._load_best_model = lambda: None
        trainer.train()
        assert trainer._load_best_model is own


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {},  # of a process that holds no part of it
        lambda state: {f"module.{name}": value for name, value in state.items()},  # of DDP
        lambda state: {name: value for name, value in state.items() if ".2.routing." not in name},
    ],
)
def test_a_state_dict_without_a_layer_does_not_take_the_place_of_an_adapter(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """It would be refused when it is loaded, and the earlier save be lost."""
    model = build_routed("llama")
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    with pytest.raises(AdapterMismatchError, match="has no tensor of layer"):
        model.save_pretrained(tmp_path, state_dict=change(model.state_dict()))
    loaded = PeftModel.from_pretrained(build_base("llama"), tmp_path)
    assert torch.equal(logits(loaded), logits(model))
