"""FlexiDepth (arXiv:2503.23798): its equations, its checkpoint's layout,
and what every adapter promises."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command_line
import peft
import pytest
import torch
import torch.nn.functional as F
from models import VOCABULARY, WIDTH
from safetensors.torch import load_file, save_file
from text_models import word_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, StaticCache

from hf_depthroute import (
    DepthRouteConfig,
    calibrate,
    convert_flexidepth,
    get_depth_routed_model,
    preset,
    record_routes,
    replay_routes,
    route_cost,
)
from hf_depthroute.adapter.files import AdapterMismatchError
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.inference.fitting import fit_branches
from hf_depthroute.parts.flexidepth import BottleneckGate
from hf_depthroute.routing.stack import routings_of, state_of

DEPTH, BOTTLENECK, BRANCH = 6, 8, 8
ROUTED = [3, 4, 5]
LONGEST = 1e-5  # of differences in float32
Tensors = dict[str, torch.Tensor]


def config_of_base() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=128,
        num_hidden_layers=DEPTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def router_tensors(seed: int = 2) -> Tensors:
    """Random weights under the checkpoint's names, with scores on both sides of zero."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    tensors = {}
    for layer in ROUTED:
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.router.router_enc.weight": drawn(BOTTLENECK, WIDTH, scale=0.3),
            f"{prefix}.router.router_norm.weight": 1 + drawn(BOTTLENECK, scale=0.2),
            f"{prefix}.router.router_dec.weight": drawn(WIDTH, BOTTLENECK, scale=0.4),
            f"{prefix}.router.router_head.weight": drawn(1, WIDTH, scale=0.4),
            f"{prefix}.router_proj.gate_proj.weight": drawn(BRANCH, WIDTH, scale=0.3),
            f"{prefix}.router_proj.down_proj.weight": drawn(BRANCH, WIDTH, scale=0.3),
            f"{prefix}.router_proj.up_proj.weight": drawn(WIDTH, BRANCH, scale=0.3),
        }
    return tensors


def write_checkpoint(folder: Path) -> Path:
    """`folder/plain`, a tiny Llama with its tokenizer, and `folder/published`,
    the same with routers, in two shards."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(config_of_base())
    for name, parameter in base.named_parameters():
        if name.endswith("norm.weight"):  # not all ones, as in a trained model
            parameter.data += 0.3 * torch.randn_like(parameter)
        elif ".layers." in name:  # so that every layer matters
            parameter.data *= 5
    base.save_pretrained(folder / "plain")
    word_tokenizer().save_pretrained(folder / "plain")
    whole = {name: value.clone() for name, value in base.state_dict().items()} | router_tensors()
    names = sorted(whole)
    shards = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    published = folder / "published"
    published.mkdir()
    for shard, held in shards.items():
        save_file({name: whole[name] for name in held}, published / shard)
    index = {
        "metadata": {},
        "weight_map": {name: shard for shard, held in shards.items() for name in held},
    }
    (published / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "plain" / "config.json").read_text()) | {
        "model_type": "ddllama",
        "architectures": ["DDLlamaForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_ddllama.DDLlamaForCausalLM"},
        "routing_layers": ROUTED,
    }
    (published / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `plain`, `published`, and the converted `adapter`."""
    folder = write_checkpoint(tmp_path_factory.mktemp("flexidepth"))
    convert_flexidepth(folder / "published", folder / "adapter", str(folder / "plain"))
    return folder


@pytest.fixture
def model(saved: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(saved / "plain", dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, saved / "adapter").eval()


def tokens(batch: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def reference(saved: Path, ids: torch.Tensor) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Logits `[B, T, V]` and routers' `p` `[B, T]`, by the equations and the
    checkpoint's own names."""
    base = AutoModelForCausalLM.from_pretrained(saved / "plain", dtype=torch.float32).eval()
    tensors, decoder = router_tensors(), base.model
    h = decoder.embed_tokens(ids)
    length = ids.shape[1]
    rotary = decoder.rotary_emb(h, torch.arange(length)[None])
    later = torch.full((length, length), -torch.inf).triu(1)[None, None]
    found = {}
    for index, layer in enumerate(decoder.layers):
        x = layer.input_layernorm(h)
        attended = layer.self_attn(x, position_embeddings=rotary, attention_mask=later)[0]
        if index not in ROUTED:
            h = h + attended
            h = h + layer.mlp(layer.post_attention_layernorm(h))
            continue
        part = {
            n.removeprefix(f"model.layers.{index}."): v
            for n, v in tensors.items()
            if f".{index}." in n
        }
        z = x @ part["router.router_enc.weight"].T
        z = (
            part["router.router_norm.weight"]
            * z
            * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-5)
        )
        z = torch.tanh(z) @ part["router.router_dec.weight"].T
        w = torch.sigmoid(z @ part["router.router_head.weight"].T)  # [B, T, 1]
        runs = w > 0.5
        a = h + attended * runs
        y = layer.post_attention_layernorm(a)
        small = F.silu(y @ part["router_proj.gate_proj.weight"].T) * (
            y @ part["router_proj.down_proj.weight"].T
        )
        small = small @ part["router_proj.up_proj.weight"].T
        h = a + torch.where(runs, w * layer.mlp(y), (1 - w) * small)
        found[index] = w[..., 0]
    return base.lm_head(decoder.norm(h)), found


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@pytest.mark.parametrize("executor", ["auto", "gathered", "masked", "rows"])
@torch.no_grad()
def test_the_converted_adapter_computes_the_references_equations(
    saved: Path, model: Any, executor: str
) -> None:
    ids = tokens()
    wanted, found = reference(saved, ids)
    with state_of(model).override(executor=executor), record_routes(model) as trace:
        logits = model(ids).logits
    assert list(trace) == ROUTED
    for index, w in found.items():
        assert 0.2 < float((w > 0.5).float().mean()) < 0.8  # both paths are taken
        assert torch.equal(trace[index].mask, w > 0.5)
        assert gap(trace[index].probs, w) < 1e-6
    assert gap(logits, wanted) < LONGEST


@torch.no_grad()
def test_it_would_fail_with_another_reading_of_the_paper(saved: Path, model: Any) -> None:
    ids = tokens()
    wanted, _ = reference(saved, ids)
    for field, value in {"gate": "no scale", "branch": "whole"}.items():
        with pytest.MonkeyPatch.context() as patch:
            if field == "gate":  # the paths are chosen, and not scaled
                patch.setattr(BottleneckGate, "scales_ffn", False)
            else:  # the branch reads the stream
                for routing in routings_of(model):
                    patch.setattr(routing.depth_route_branch["default"], "normed", lambda a: a)
            for routing in routings_of(model):
                routing.forget_prepared()
            assert gap(model(ids).logits, wanted) > 100 * LONGEST, value


@torch.no_grad()
def test_a_skipped_row_runs_neither_attention_output_nor_ffn(model: Any) -> None:
    ids, rows = tokens(), {}
    base = model.get_base_model().model
    for index in ROUTED:

        def count(module: Any, args: Any, index: int = index) -> None:
            rows[index] = args[0].numel() // args[0].shape[-1]

        base.layers[index].mlp.register_forward_pre_hook(count)
    with record_routes(model) as trace:
        model(ids)
    assert rows == {index: int(trace[index].mask.sum()) for index in ROUTED}


@pytest.mark.parametrize("static", [False, True], ids=["dynamic cache", "static cache"])
@torch.no_grad()
def test_prefill_equals_token_by_token(model: Any, static: bool) -> None:
    for batch in (1, 3):  # one sequence has a step of its own
        ids = tokens(batch)
        whole = model(ids).logits
        cache = StaticCache(config=model.config, max_cache_len=ids.shape[1]) if static else None
        parts = []
        for t in range(ids.shape[1]):
            out = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
        assert gap(torch.cat(parts, dim=1), whole) < LONGEST


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_changes_nothing(model: Any, side: str) -> None:
    ids, pad = tokens(1), torch.zeros(1, 5, dtype=torch.long)
    order = (pad, ids) if side == "left" else (ids, pad)
    padded = torch.cat(order, dim=1)
    mask = torch.cat(
        [torch.zeros_like(p) if p is pad else torch.ones_like(p) for p in order], dim=1
    )
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    real = mask[0].bool()
    alone = model(ids).logits
    assert (
        gap(model(padded, attention_mask=mask, position_ids=positions).logits[:, real], alone)
        < LONGEST
    )


@torch.no_grad()
def test_later_tokens_and_the_rest_of_a_batch_change_nothing(model: Any) -> None:
    ids = tokens(3)
    whole = model(ids).logits
    assert gap(model(ids[:, :9]).logits, whole[:, :9]) < LONGEST
    assert gap(model(ids[1:2]).logits, whole[1:2]) < LONGEST


def test_gathered_equals_masked_with_gradients(saved: Path) -> None:
    found = []
    for executor in ("gathered", "masked"):
        base = AutoModelForCausalLM.from_pretrained(saved / "plain", dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, saved / "adapter", is_trainable=True).eval()
        with state_of(model).override(executor=executor):
            model(tokens(), labels=tokens()).loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert found[0] and len(found[0]) == len(found[1])
    assert max(gap(one, other) for one, other in zip(*found)) < LONGEST


def test_every_weight_trains_and_no_weight_of_the_base_does(saved: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(saved / "plain", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, saved / "adapter", is_trainable=True).train()
    model(tokens(), labels=tokens()).loss.backward()
    grads = {
        name: p.grad is not None and bool(p.grad.any()) for name, p in model.named_parameters()
    }
    assert {name for name, has in grads.items() if has} == {
        name for name in grads if ".depth_route_" in name
    }


@torch.no_grad()
def test_a_saved_copy_in_a_fresh_process_is_the_same_and_generates(
    saved: Path, model: Any, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "again")
    one, other = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (saved / "adapter", tmp_path / "again")
    )
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    code = (
        "import sys, torch, peft, hf_depthroute\n"
        "from transformers import AutoModelForCausalLM\n"
        "base = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)\n"
        "model = peft.PeftModel.from_pretrained(base, sys.argv[2]).eval()\n"
        "ids = torch.tensor([[5, 6, 7, 8]])\n"
        "print(model.generate(ids, max_new_tokens=8, do_sample=False, "
        "pad_token_id=0)[0].tolist())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, saved / "plain", tmp_path / "again"],
        capture_output=True,
        text=True,
        check=True,
    )
    ids = torch.tensor([[5, 6, 7, 8]])
    for _ in range(8):  # greedy, from the reference
        ids = torch.cat([ids, reference(saved, ids)[0][:, -1:].argmax(-1)], dim=1)
        if ids[0, -1] == 2:
            break
    assert json.loads(ended.stdout) == ids[0].tolist()


def test_the_command_converts_what_generate_then_runs(saved: Path, tmp_path: Path) -> None:
    words = ["convert", saved / "published", "--out", tmp_path / "made", "--base", saved / "plain"]
    ended = command_line.run(*words)
    assert ended.code == 0, ended.err
    assert "3 routed layers (3 to 5), gate width 8, branch width 8" in ended.out and ended.err == ""
    made, wanted = (
        load_file(f / "adapter_model.safetensors") for f in (tmp_path / "made", saved / "adapter")
    )
    assert made.keys() == wanted.keys() and all(
        torch.equal(made[name], wanted[name]) for name in made
    )
    assert command_line.run("doctor", tmp_path / "made").code == 0
    # What is there is not replaced by accident.
    assert command_line.run(*words).error.startswith("--out")
    assert command_line.run(*words, "--overwrite").code == 0
    said = command_line.run(
        "generate", tmp_path / "made", "--prompt", "the cat sat", "--max-new-tokens", "4"
    )
    assert said.code == 0, said.err


def changed(published: Path, edit: Callable[[Tensors], None]) -> None:
    """Rewrite the checkpoint as one file of the tensors that `edit` leaves."""
    whole = {
        name: value
        for path in published.glob("*.safetensors")
        for name, value in load_file(path).items()
    }
    for path in published.glob("*.safetensors*"):
        path.unlink()
    edit(whole)
    save_file(whole, published / "model.safetensors")


HEAD, ENC = "model.layers.4.router.router_head.weight", "model.layers.4.router.router_enc.weight"
FAULTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda t: t.pop(HEAD), f"tensor {HEAD} is missing"),
    "base missing": (lambda t: t.pop("model.norm.weight"), "tensor model.norm.weight is missing"),
    "unknown": (
        lambda t: t.update({"model.extra": torch.ones(1)}),
        "unexpected tensor model.extra",
    ),
    "bias": (
        lambda t: t.update({HEAD.replace("weight", "bias"): torch.ones(1)}),
        "unexpected tensor",
    ),
    "no such layer": (
        lambda t: t.update({HEAD.replace("4", "9"): torch.ones(1, WIDTH)}),
        "unexpected tensor",
    ),
    "shape": (
        lambda t: t.update({ENC: torch.ones(BOTTLENECK + 1, WIDTH)}),
        "has shape [9, 32], not [8, 32]",
    ),
    "dtype": (
        lambda t: t.update({ENC: torch.ones(BOTTLENECK, WIDTH, dtype=torch.int64)}),
        "has dtype I64",
    ),
    "not finite": (lambda t: t[HEAD].fill_(torch.nan), "holds values that are not finite"),
    "no routers": (
        lambda t: [t.pop(name) for name in list(t) if "router" in name],
        "no layer has a router",
    ),
    "another layer": (
        lambda t: t.update({n.replace(".5.", ".2."): t.pop(n) for n in list(t) if "5.router" in n}),
        "routing_layers=[3, 4, 5], and [2, 3, 4] have routers",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_is_not_of_the_layout_is_refused(tmp_path: Path, fault: str) -> None:
    folder = write_checkpoint(tmp_path)
    edit, said = FAULTS[fault]
    changed(folder / "published", edit)
    ended = command_line.run(
        "convert", folder / "published", "--out", folder / "made", "--base", folder / "plain"
    )
    assert ended.code == 4 and said in ended.error
    assert not (folder / "made").exists()


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu' is not converted exactly"),
    "epsilon": ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06 is not converted exactly"),
    "biases": ({"mlp_bias": True}, "mlp_bias=True is not converted exactly"),
    "size": ({"hidden_size": 10**9}, "hidden_size=1000000000 must be an integer from 1 to 65536"),
    "depth": ({"num_hidden_layers": True}, "num_hidden_layers=True must be an integer"),
    "heads": ({"num_attention_heads": "four"}, "config.json: makes no Llama"),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_configuration_that_is_not_converted_exactly_is_refused(
    tmp_path: Path, fault: str
) -> None:
    folder = write_checkpoint(tmp_path)
    fields, said = CONFIGS[fault]
    path = folder / "published" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(AdapterMismatchError) as refused:
        convert_flexidepth(folder / "published", folder / "made", str(folder / "plain"))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    published = write_checkpoint(tmp_path) / "published"
    arguments = published, tmp_path / "made", str(tmp_path / "plain")
    first, second = sorted(published.glob("*.safetensors"))
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(AdapterMismatchError, match=r"model-00002-of-00002\.safetensors: corrupt"):
        convert_flexidepth(*arguments)
    second.unlink()
    with pytest.raises(
        AdapterMismatchError, match=r"model-00002-of-00002\.safetensors is missing, which model"
    ):
        convert_flexidepth(*arguments)
    second.write_bytes(first.read_bytes())
    with pytest.raises(AdapterMismatchError, match="is in two files"):
        convert_flexidepth(*arguments)
    for path in (first, second):
        path.unlink()
    (published / "model.safetensors.index.json").unlink()
    with pytest.raises(AdapterMismatchError, match="holds no safetensors file"):
        convert_flexidepth(*arguments)


def test_the_base_is_named_and_compared(saved: Path, tmp_path: Path) -> None:
    ended = command_line.run("convert", saved / "published", "--out", tmp_path / "made")
    assert ended.code == 2 and "name the plain Llama whose weights it has" in ended.error
    torch.manual_seed(9)
    LlamaForCausalLM(config_of_base()).save_pretrained(tmp_path / "other")
    with pytest.raises(AdapterMismatchError, match="made for another base model"):
        convert_flexidepth(saved / "published", tmp_path / "made", str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="is the checkpoint's own folder"):
        convert_flexidepth(saved / "published", saved / "published", str(saved / "plain"))
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    with pytest.raises(AdapterMismatchError, match="made for another base model"):
        peft.PeftModel.from_pretrained(other, saved / "adapter")


OTHER_FUNCTIONS: dict[str, dict[str, Any]] = {
    "rope_parameters": {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
    "rms_norm_eps": {"rms_norm_eps": 1e-6},
    "num_attention_heads": {"num_attention_heads": 8, "head_dim": 4, "num_key_value_heads": 4},
    "num_key_value_heads": {"num_key_value_heads": 4},
    "intermediate_size": {"intermediate_size": 64},
    "attention_bias": {"attention_bias": True},
}


@pytest.mark.parametrize("field", OTHER_FUNCTIONS)
def test_a_base_whose_weights_compute_something_else_is_refused(
    saved: Path, tmp_path: Path, field: str
) -> None:
    shutil.copytree(saved / "plain", tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | OTHER_FUNCTIONS[field]))
    ended = command_line.run(
        "convert", saved / "published", "--out", tmp_path / "made", "--base", tmp_path / "other"
    )
    assert ended.code == 4 and f"other: config.json: {field} is " in ended.error
    assert not (tmp_path / "made").exists()


def test_a_base_whose_configuration_is_written_as_earlier_versions_did_is_the_same(
    saved: Path, tmp_path: Path
) -> None:
    scaled = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 20000.0}
    for name, rope in ("published", scaled), ("plain", None):
        shutil.copytree(saved / name, tmp_path / name)
        path = tmp_path / name / "config.json"
        config = json.loads(path.read_text())
        del config["rope_parameters"]
        rope = rope or {
            "rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 20000}
        }
        path.write_text(json.dumps(config | rope))
    convert_flexidepth(tmp_path / "published", tmp_path / "made", str(tmp_path / "plain"))


def test_preset_is_of_the_papers_sizes() -> None:
    config, _ = preset("flexidepth")
    assert config.routed_layers(32) == list(range(16, 32))
    model = get_depth_routed_model(LlamaForCausalLM(config_of_base()), config)
    routing = routings_of(model)[0]
    gate: Any = routing.depth_route_gate["default"]
    branch: Any = routing.depth_route_branch["default"]
    assert [h.layer_index for h in routings_of(model)] == ROUTED
    assert gate.enc.weight.shape == (WIDTH // 16, WIDTH) and branch.gate.weight.shape == (
        128 // 16,
        WIDTH,
    )
    assert route_cost(model).flops_routed < route_cost(model).flops_dense


@torch.no_grad()
def test_the_fixed_threshold_is_a_probability_above_one_half() -> None:
    near = torch.tensor([-1e-7, 0.0, 6e-8, 1e-7, 1.2e-7, 1.0])
    threshold = DepthRouteConfig(gate="bottleneck", target="block").fixed_threshold
    assert torch.equal(near >= threshold, torch.sigmoid(near) > 0.5)


@torch.no_grad()
def test_it_follows_a_budget_where_it_is_asked_to(saved: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(saved / "plain", dtype=torch.float32)
    fields = {"gate": "bottleneck", "target": "block", "branch": "swiglu", "layers": "last:half"}
    model = get_depth_routed_model(
        base, DepthRouteConfig(**fields, threshold="budget", budget=0.25)
    ).eval()
    ids = tokens(8)
    calibrate(model, [{"input_ids": ids}])
    with record_routes(model) as trace:
        logits = model(ids).logits
    assert all(abs(share - 0.25) < 0.03 for share in trace.full_ratio().values())
    with replay_routes(model, trace):
        assert gap(model(ids).logits, logits) == 0


REFUSED: dict[str, dict[str, Any]] = {
    "target": {"target": "ffn"},
    "granularity": {"granularity": "sequence"},
    "selection": {"selection": "soft"},
    "branch": {"branch": "memory"},
    "scale_by_gate": {"scale_by_gate": True},
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_the_gate_cannot_do_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        DepthRouteConfig(
            **{"gate": "bottleneck", "target": "block", "branch": "swiglu"} | REFUSED[field]
        )


def test_fitting_refuses_a_branch_that_is_scaled(model: Any) -> None:
    with pytest.raises(ValueError, match="gate='bottleneck' multiplies"):
        fit_branches(model, [{"input_ids": tokens()}])
