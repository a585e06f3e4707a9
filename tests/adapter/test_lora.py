"""LoRA and routing on one model, in either order: training, saving, merging,
and what cannot work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from models import build_base, build_routed, decoder_layers, logits, routed, tokens
from peft import LoraConfig, PeftModel, get_peft_model
from places import HELPERS
from safetensors.torch import load_file
from torch import nn
from training import adapter_state, assert_same_tensors, make_trainer, rows
from transformers import AutoModelForCausalLM

from hf_depthroute import (
    DepthRouteConfig,
    get_depth_routed_model,
    record_routes,
    replay_routes,
    set_budget,
)
from hf_depthroute.config.adapter import ConfigError

FAMILIES = ("llama", "gpt2")
ORDERS = ("below", "on top")
LORA_TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}
OUTPUTS = {"llama": "self_attn.o_proj", "gpt2": "attn.c_proj"}

every_family = pytest.mark.parametrize("family", FAMILIES)
every_order = pytest.mark.parametrize("order", ORDERS)
every_target = pytest.mark.parametrize("target", ["ffn", "attention", "block"])


def lora_config(family: str, **fields: Any) -> LoraConfig:
    return LoraConfig(**{"target_modules": LORA_TARGETS[family], "task_type": "CAUSAL_LM"} | fields)


def with_lora(base: Any, family: str, **fields: Any) -> PeftModel:
    """LoRA under the name "tuned", with random weights that change the logits."""
    lora = peft.get_peft_model(base, lora_config(family, **fields), adapter_name="tuned")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return lora.eval()


def both(family: str, order: str = "below", **fields: Any) -> tuple[PeftModel, PeftModel]:
    """The LoRA wrapper and the routed wrapper of one model,
    LoRA injected first ("below") or second ("on top")."""
    if order == "below":
        lora = with_lora(build_base(family), family)
        return lora, routed(lora.get_base_model(), adapter_name="router", **fields)
    model = routed(build_base(family), adapter_name="router", **fields)
    return with_lora(model.get_base_model(), family), model


def trainable(model: nn.Module) -> set[str]:
    """Which of base, lora and router has parameters that train."""
    return {
        kind_of(name) for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def kind_of(name: str) -> str:
    return "lora" if "lora_" in name else "router" if ".routing." in name else "base"


def changed_by_training(model: PeftModel, folder: Path) -> set[str]:
    """Which of base, lora and router one optimizer step of `DepthRouteTrainer` changes."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    make_trainer(model, rows(2), folder)[0].train()
    after = dict(model.named_parameters())
    assert all(after[name].isfinite().all() for name in after)
    return {kind_of(name) for name, value in before.items() if not torch.equal(value, after[name])}


@every_family
@every_target
def test_sparse_execution_over_lora_equals_the_masked_computation(family: str, target: str) -> None:
    lora, model = both(family, target=target)
    ran: list[int] = []

    def count(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        ran.append(args[0][..., 0].numel())

    for layer in decoder_layers(model)[1:]:
        layer.get_submodule(OUTPUTS[family]).register_forward_pre_hook(count)
    with record_routes(model) as trace:
        sparse = logits(model)
    chosen = [int(record.mask.sum()) for record in trace.values()]
    assert 0 < sum(chosen) < 3 * 36
    assert ran == ([36, 36, 36] if target == "ffn" else chosen)
    model.train()
    with replay_routes(model, trace):
        masked = logits(model)
    assert (sparse - masked).abs().max() < 1e-5
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    with replay_routes(model, trace):
        assert (logits(model.eval()) - sparse).abs().max() > 0.1


@every_family
@every_target
def test_decoding_over_lora_equals_prefill(family: str, target: str) -> None:
    _, model = both(family, target=target)
    ids, steps, cache = tokens(3, 12), [], None
    with torch.no_grad():
        for piece in ids.split([8, 1, 1, 1, 1], dim=1):
            out = model(input_ids=piece, past_key_values=cache, use_cache=True)
            steps.append(out.logits)
            cache = out.past_key_values
        assert (torch.cat(steps, dim=1) - model(input_ids=ids).logits).abs().max() < 1e-5


@every_family
@pytest.mark.parametrize(
    ("order", "target"),
    [("below", "ffn"), ("below", "attention"), ("below", "block"), ("on top", "ffn")],
)
def test_joint_training_changes_lora_and_routers_and_not_the_base(
    family: str, order: str, target: str, tmp_path: Path
) -> None:
    lora, model = both(family, order, target=target)
    assert trainable(model) == trainable(lora) == {"lora", "router"}
    assert changed_by_training(model, tmp_path) == {"lora", "router"}


@every_family
def test_two_steps_train_one_after_the_other(family: str, tmp_path: Path) -> None:
    lora = with_lora(build_base(family), family)
    lora.set_requires_grad("tuned", False)
    model = get_depth_routed_model(
        lora.get_base_model(), DepthRouteConfig(layers=[1, 2]), adapter_name="router"
    )
    lora.set_requires_grad("tuned", False)  # injection lets all adapters of the model train
    assert changed_by_training(model, tmp_path / "router") == {"router"}
    lora.set_requires_grad("tuned", True)
    model.set_requires_grad("router", False)
    assert changed_by_training(model, tmp_path / "lora") == {"lora"}


LOAD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
from models import logits
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
import hf_depthroute
found = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    for names in (("tuned", "router"), ("router", "tuned")):
        model = AutoModelForCausalLM.from_pretrained(folder / "base")
        for name in names:
            model = PeftModel.from_pretrained(model, folder / "adapters" / name, adapter_name=name).get_base_model()
        found["-".join((folder.name, *names))] = logits(model.eval())
save_file(found, sys.argv[3])
"""


def test_both_load_in_a_new_process_in_either_order(tmp_path: Path) -> None:
    expected = {}
    for family in FAMILIES:
        for order in ORDERS:
            folder = tmp_path / "saved" / f"{family}-{order}"
            build_base(family).save_pretrained(folder / "base")
            lora, model = both(family, order, target="attention")
            # Adapters of one base share their table of configs: either wrapper saves both.
            (lora if order == "below" else model).save_pretrained(folder / "adapters")
            for names in ("tuned-router", "router-tuned"):
                expected[f"{folder.name}-{names}"] = logits(model)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    arguments = [str(tmp_path / "saved"), str(HELPERS), str(tmp_path / "found.safetensors")]
    subprocess.run([sys.executable, "-c", LOAD, *arguments], check=True, env=environment)
    found = load_file(tmp_path / "found.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@every_family
@every_order
@every_target
def test_lora_merges_and_unmerges_in_place(family: str, order: str, target: str) -> None:
    lora, model = both(family, order, target=target)
    with record_routes(model) as trace:
        expected = logits(model)
    lora.merge_adapter()
    with record_routes(model) as merged:
        assert (logits(model) - expected).abs().max() < 1e-5
    assert all(torch.equal(trace[index].mask, merged[index].mask) for index in trace)
    lora.unmerge_adapter()
    assert (logits(model) - expected).abs().max() < 1e-5


@every_family
@every_order
def test_merged_lora_leaves_a_routed_model_that_can_be_saved(
    family: str, order: str, tmp_path: Path
) -> None:
    lora, model = both(family, order)
    expected = logits(model)
    merged = lora.merge_and_unload()
    with record_routes(merged) as trace:
        assert (logits(merged) - expected).abs().max() < 1e-5
    assert list(trace) == [1, 2, 3]
    assert torch.equal(logits(model), logits(merged))

    model.save_pretrained(tmp_path / "adapter", selected_adapters=["router"])
    dense = model.unload()
    dense.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert (logits(base) - expected).abs().max() > 0.1
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter" / "router").eval()
    assert (logits(loaded) - expected).abs().max() < 1e-5


@every_family
def test_disabling_either_gives_the_base_and_budget_one_gives_lora_alone(family: str) -> None:
    base = logits(build_base(family))
    lora, model = both(family)
    for wrapper in (lora, model):
        with wrapper.disable_adapter():
            assert torch.equal(logits(wrapper), base)
    set_budget(model, 1.0)
    alone = logits(with_lora(build_base(family), family))
    assert torch.equal(logits(model), alone)


@every_family
def test_lora_on_all_linear_maps_leaves_the_router_alone(family: str) -> None:
    model = routed(build_base(family), adapter_name="router")
    before = {name for name in model.get_base_model().state_dict() if ".routing." in name}
    lora = with_lora(model.get_base_model(), family, target_modules="all-linear")
    assert {name for name in lora.get_base_model().state_dict() if ".routing." in name} == before


def test_what_cannot_work_is_refused() -> None:
    lora = with_lora(build_base("llama"), "llama")
    expected = logits(lora)
    with pytest.raises(ValueError, match="a PeftModel holds adapters of one method"):
        lora.add_adapter("router", DepthRouteConfig())
    with pytest.raises(ConfigError, match="get_base_model"):
        get_depth_routed_model(lora, DepthRouteConfig(), adapter_name="router")
    assert torch.equal(logits(lora), expected)
    _, model = both("llama")
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match="cannot be merged"):
            merge()


def test_add_adapter_of_another_method_names_the_way() -> None:
    """PEFT's own line says that it cannot be done, and not how it is done."""
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    routed_model = build_routed("llama")
    with pytest.raises(
        ValueError,
        match=r"add_adapter\('tuned', LoraConfig\).*get_peft_model\(model.get_base_model",
    ):
        routed_model.add_adapter("tuned", lora)
    get_peft_model(routed_model.get_base_model(), lora, adapter_name="tuned")  # as the line says
    other = get_peft_model(build_base("llama"), lora)
    with pytest.raises(ValueError, match=r"adapter_name='router'"):
        other.add_adapter("router", DepthRouteConfig(layers=[1]))
    other.add_adapter("second", lora)  # one method


LORA_EVERYWHERE = ["q_proj", "v_proj", "gate_proj", "down_proj"]


@every_target
@pytest.mark.parametrize("granularity", ["token", "sequence"])
def test_a_batch_of_several_loras_gives_each_sequence_its_own(
    target: str, granularity: str
) -> None:
    """What PEFT tells a layer of the batch by `adapter_names` is of sequences, not of rows."""
    lora = with_lora(build_base("llama"), "llama", target_modules=LORA_EVERYWHERE)
    lora.add_adapter("other", lora_config("llama", target_modules=LORA_EVERYWHERE))
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if ".other." in name:
                tuned = lora.get_parameter(name.replace(".other.", ".tuned."))
                parameter.copy_(-0.7 * tuned)
    routed(lora.get_base_model(), adapter_name="router", target=target, granularity=granularity)
    ids = tokens(4, 12)
    names = ["other", "tuned", "tuned", "other"]
    with torch.no_grad():
        mixed = lora(input_ids=ids, adapter_names=names).logits
        for row, name in enumerate(names):
            lora.base_model.set_adapter(name)
            alone = lora(input_ids=ids[row : row + 1]).logits
            assert (mixed[row] - alone[0]).abs().max() < 1e-5


@pytest.mark.parametrize("within", [False, True])
def test_rows_are_skipped_unless_such_a_lora_is_among_what_is_skipped(within: bool) -> None:
    targets = LORA_EVERYWHERE if within else LORA_TARGETS["llama"]
    lora = with_lora(build_base("llama"), "llama", target_modules=targets)
    model = routed(lora.get_base_model(), adapter_name="router")
    rows_in = []
    for index in (1, 2, 3):
        ffn = decoder_layers(model)[index].mlp
        ffn.register_forward_hook(lambda _, given, out: rows_in.append(given[0].numel() // 32))
    ids = tokens(2, 12)
    with torch.no_grad(), record_routes(model) as trace:
        lora(input_ids=ids, adapter_names=["tuned", "__base__"])
    full = [int(record.mask.sum()) for record in trace.values()]
    assert all(0 < count < 24 for count in full)
    assert rows_in == ([24] * 3 if within else full)


@every_target
def test_an_activated_lora_begins_where_it_does_without_the_router(target: str) -> None:
    """It counts back from the end of a sequence, so it has to see all of it."""
    lora = with_lora(
        build_base("llama"),
        "llama",
        target_modules=LORA_EVERYWHERE,
        alora_invocation_tokens=[7, 8],
    )
    model = routed(lora.get_base_model(), adapter_name="router", target=target)
    ids = tokens(1, 16)
    ids[:, 8:10] = torch.tensor([7, 8])
    with torch.no_grad():
        whole = lora(input_ids=ids).logits
        without = model(input_ids=ids).logits
    assert (whole - without)[:, :8].abs().max() < 1e-5 < (whole - without)[:, 8:].abs().max()
    with torch.no_grad(), record_routes(model) as trace:
        whole = lora(input_ids=ids).logits
    model.train()
    with torch.no_grad(), replay_routes(model, trace):
        masked = lora(input_ids=ids).logits
    assert (whole - masked).abs().max() < 1e-5


@every_target
def test_x_lora_weighs_tokens_as_without_the_router(target: str, tmp_path: Path) -> None:
    """Its weights are of every token of the batch, so its layers have to see all of it."""
    for rank in (4, 8):
        lora = with_lora(build_base("llama"), "llama", target_modules=LORA_EVERYWHERE, r=rank)
        lora.save_pretrained(str(tmp_path / str(rank)))
    base = build_base("llama")
    base.config.use_cache = False
    adapters = {"0": str(tmp_path / "4/tuned"), "1": str(tmp_path / "8/tuned")}
    config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, adapters=adapters)
    lora = get_peft_model(base, config, adapter_name="mixed").eval()
    ids = tokens(2, 12)
    with torch.no_grad():
        whole = lora(input_ids=ids).logits
        model = routed(lora.get_base_model(), adapter_name="router", target=target)
        set_budget(model, 1.0)
        assert torch.equal(lora(input_ids=ids).logits, whole)
        set_budget(model, 0.5)
        batch = lora(input_ids=ids).logits
        for row in range(2):
            alone = lora(input_ids=ids[row : row + 1]).logits
            assert (batch[row] - alone[0]).abs().max() < 1e-5
    assert (batch - whole).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("family", "norm"), [("llama", "post_attention_layernorm"), ("gpt2", "ln_2")]
)
@pytest.mark.parametrize("method", ["a LoRA's copy", "LN tuning"])
def test_a_branch_starts_with_the_bases_norm_under_another_methods(
    family: str, norm: str, method: str
) -> None:
    """Its own norm is a plain one, whatever stands in the place of the base's."""
    config: Any = lora_config(family, modules_to_save=[norm])
    if method == "LN tuning":
        config = peft.LNTuningConfig(target_modules=[norm], task_type="CAUSAL_LM")
    other = get_peft_model(build_base(family), config, adapter_name="tuned")
    model = routed(other.get_base_model(), adapter_name="router", layers=[1])
    plain = routed(build_base(family), adapter_name="router", layers=[1])
    assert_same_tensors(adapter_state(model), adapter_state(plain))
    assert torch.equal(logits(model), logits(plain))
