"""What of the vLLM plugin needs no vLLM: command lines, refusals,
and the adapter state that vLLM's layers get."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import command_line
import pytest
import torch
from models import build_base, decoder_layers, routed
from peft import PeftModel
from places import ROOT
from text_models import save_base
from transformers import AutoConfig, AutoModelForCausalLM

from hf_depthroute import DepthRouteConfig, get_depth_routed_model, set_budget
from hf_depthroute.adapter.files import AdapterMismatchError
from hf_depthroute.base.families import UnsupportedModelError
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.routing.routing import ROUTING
from hf_depthroute.vllm.limits import (
    check_adapter,
    check_base_config,
    check_engine,
    check_lora,
    check_request_budgets,
)
from hf_depthroute.vllm.routings import load_routings
from hf_depthroute.vllm.settings import Settings, settings_of, tell_apart
from hf_depthroute_vllm import ARCHITECTURE


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, `base`, and an adapter on it, `adapter`."""
    folder = tmp_path_factory.mktemp("saved")
    base = save_base(folder / "base")
    routed(AutoModelForCausalLM.from_pretrained(base)).save_pretrained(folder / "adapter")
    return folder


def load(saved: Path, **settings: Any) -> dict[int, Any]:
    base = saved / "base"
    files = sorted(base.glob("*.safetensors"))
    return load_routings(
        Settings(str(saved / "adapter"), **settings), AutoConfig.from_pretrained(base), files
    )


def test_vllm_finds_the_plugin_and_nothing_else_imports_vllm() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["entry-points"]["vllm.general_plugins"] == {
        "depth_route": "hf_depthroute_vllm:register"
    }
    code = (
        "import sys, hf_depthroute_vllm; light = set(sys.modules); "
        "import hf_depthroute.vllm.routings, hf_depthroute.cli; "
        "print('hf_depthroute' in light, 'torch' in light, 'vllm' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "False False False\n", ended.stderr


def test_the_command_line_names_base_and_adapter_wherever_it_is_typed(saved: Path) -> None:
    ended = command_line.run(
        "vllm-config", saved / "adapter", "--budget", "0.25", "--port", "1", "--enforce-eager"
    )
    words = shlex.split(ended.out)
    assert (ended.code, ended.err) == (0, "")
    assert words[:3] == ["vllm", "serve", str(saved / "base")]
    assert words[3:5] == ["--served-model-name", "adapter"] and words[-3:] == [
        "--port",
        "1",
        "--enforce-eager",
    ]
    overrides = json.loads(words[words.index("--hf-overrides") + 1])
    assert overrides["architectures"] == [ARCHITECTURE] and overrides["auto_map"] == {}
    assert settings_of(SimpleNamespace(**overrides)) == Settings(
        str(saved / "adapter"), budget=0.25
    )


def test_generated_tokens_are_routed_where_phases_say_so(saved: Path) -> None:
    ended = command_line.run("vllm-config", saved / "adapter", "--phases", "all")
    overrides = json.loads(shlex.split(ended.out)[-1])
    assert settings_of(SimpleNamespace(**overrides)) == Settings(
        str(saved / "adapter"), phases="all"
    )


def test_requests_have_budgets_where_the_server_is_told_so(saved: Path) -> None:
    ended = command_line.run("vllm-config", saved / "adapter", "--request-budgets")
    overrides = json.loads(shlex.split(ended.out)[-1])
    assert settings_of(SimpleNamespace(**overrides)) == Settings(
        str(saved / "adapter"), request_budgets=True
    )
    assert settings_of(SimpleNamespace(**Settings("a").hf_overrides)).request_budgets is None


def test_budgets_of_requests_are_refused_where_nothing_follows_them(saved: Path) -> None:
    with pytest.raises(
        ConfigError, match="request_budgets=True: this adapter's threshold is fixed"
    ):
        check_request_budgets(DepthRouteConfig(gate="linear"))
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        check_request_budgets(DepthRouteConfig(), v2_runner=True)
    with pytest.raises(
        ConfigError, match="request_budgets=True: the thresholds of this adapter were never fitted"
    ):
        base = AutoModelForCausalLM.from_pretrained(saved / "base")
        get_depth_routed_model(base, DepthRouteConfig()).save_pretrained(saved / "untrained")
        files = sorted((saved / "base").glob("*.safetensors"))
        settings = Settings(str(saved / "untrained"), request_budgets=True)
        load_routings(settings, AutoConfig.from_pretrained(saved / "base"), files)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--request-budgets"], "--request-budgets goes with --engine vllm"),
        (["vllm-config", "--budget", "0"], "budget=0.0"),
        (["vllm-config", "--phases", "decode"], "phases='decode'"),
        (
            ["vllm-config", "--hf-overrides", "{}"],
            "--hf-overrides cannot be given: the adapter is in it",
        ),
        (["vllm-config", "--hf-overrides={}"], "--hf-overrides cannot be given"),
        (["serve", "--engine", "other"], "--engine other: use one of: transformers, vllm"),
        (["serve", "--engine", "vllm", "--max-requests", "3"], "for vLLM, pass --max-num-seqs"),
        (
            ["serve", "--engine", "vllm", "--trust-remote-code"],
            "--trust-remote-code is not supported",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_that_cannot_serve_says_so_in_one_line(
    saved: Path, words: list[str], said: str
) -> None:
    command, *options = words
    ended = command_line.run(command, saved / "adapter", *options)
    assert ended.code == 2
    assert said in ended.error


def test_serve_without_vllm_says_what_to_install(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ended = command_line.run("serve", saved / "adapter", "--engine", "vllm")
    assert ended.code == 2 and "pip install vllm" in ended.err.splitlines()[-1]


REFUSED: dict[str, dict[str, Any]] = {
    "target": {"target": "attention"},
    "granularity": {"granularity": "sequence"},
    "gate": {"gate": "exit", "target": "block", "branch": "none"},
    "causal_rule": {"causal_rule": "predictor"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("field", REFUSED)
def test_an_adapter_that_would_give_other_tokens_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match="is not served by vLLM: ") as refused:
        check_adapter(DepthRouteConfig(**REFUSED[field]))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("target", ["attention", "experts"])
def test_a_target_is_refused_with_its_reason(target: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"target='{target}' is not served by vLLM: (vLLM|the attention)"
    ):
        check_adapter(DepthRouteConfig(target=target))


def test_layers_may_differ_as_a_fit_for_prompts_leaves_them() -> None:
    check_adapter(
        DepthRouteConfig(
            layers=[1, 2, 3], target="block", gate="sinks", budget=0.001, phases="prefill",
            prompt_tail=64, target_pattern={2: "attention", 3: "ffn"},
            branch_pattern={3: "neurons"}, rank_pattern={3: 8},
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "error"),
    [
        ("olmoe", ConfigError),
        ("granite", ConfigError),
        ("gpt2", ConfigError),
        ("falcon", ConfigError),
        ("t5", UnsupportedModelError),
    ],
)
def test_a_base_that_vllm_runs_otherwise_is_refused(family: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        check_base_config(AutoConfig.for_model(family))


def engine(**changed: Any) -> Any:
    """The parts of vLLM's configuration that are looked at; `changed` by dotted name."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            quantization=None, enable_sleep_mode=False, trust_remote_code=False,
            runner_type="generate"
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, prefill_context_parallel_size=1, enable_expert_parallel=False,
            enable_dbo=False
        ),
        load_config=SimpleNamespace(load_format="auto"),
        compilation_config=SimpleNamespace(cudagraph_mode=None, pass_config=SimpleNamespace(enable_sp=None)),
        speculative_config=None, lora_config=None, kv_transfer_config=None,
    )  # fmt: skip
    for name, value in changed.items():
        *path, last = name.split("__")
        part = config
        for step in path:
            part = getattr(part, step)
        setattr(part, last, value)
    return config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("parallel_config__pipeline_parallel_size", 2),
        ("parallel_config__prefill_context_parallel_size", 2),
        ("parallel_config__enable_expert_parallel", True),
        ("parallel_config__enable_dbo", True),
        ("speculative_config", object()),
        ("lora_config", SimpleNamespace(fully_sharded_loras=True)),
        ("kv_transfer_config", object()),
        ("model_config__quantization", "fp8"),
        ("model_config__enable_sleep_mode", True),
        ("model_config__trust_remote_code", True),
        ("model_config__runner_type", "pooling"),
        ("load_config__load_format", "dummy"),
        ("compilation_config__pass_config__enable_sp", True),
        ("compilation_config__cudagraph_mode", SimpleNamespace(name="FULL_AND_PIECEWISE")),
    ],
)
def test_an_engine_that_would_give_other_tokens_is_refused(name: str, value: Any) -> None:
    check_engine(engine())
    with pytest.raises(
        ConfigError, match=r"^--[a-z-]+.* is not supported with a depth-routed adapter: "
    ) as refused:
        check_engine(engine(**{name: value}))
    assert "\n" not in str(refused.value)


def test_loras_of_neurons_are_refused_where_processes_share_an_ffn() -> None:
    check_engine(engine(lora_config=SimpleNamespace(fully_sharded_loras=False)))
    check_lora(DepthRouteConfig(), processes=2)
    for fields in ({"branch": "neurons"}, {"branch_pattern": {3: "neurons"}}):
        config = DepthRouteConfig(layers=[2, 3], **fields)
        check_lora(config, processes=1)
        with pytest.raises(ConfigError, match="--enable-lora with --tensor-parallel-size is not"):
            check_lora(config, processes=2)


@pytest.mark.parametrize("given", [None, {}, {"adapter": 3}, {"adapter": "a", "layers": [1]}])
def test_settings_that_nobody_wrote_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="vllm-config ADAPTER prints the whole line"):
        settings_of(SimpleNamespace(depth_route=given))


def test_another_save_into_the_folder_is_another_model_to_the_cache_of_vllm(saved: Path) -> None:
    """vLLM's key is the configuration's text, in which the adapter is a path;
    a graph says which layers are routed."""
    path = saved / "adapter" / "adapter_config.json"

    def key() -> str:
        config = AutoConfig.from_pretrained(saved / "base")
        tell_apart(config, Settings(str(path.parent)))
        text: str = config.to_json_string()
        return text

    before, written = key(), path.read_bytes()
    assert key() == before
    fields = json.loads(written)
    path.write_text(json.dumps(fields | {"layers": fields["layers"][1:]}))
    try:
        assert key() != before
    finally:
        path.write_bytes(written)


def test_routings_are_what_peft_loads_whatever_the_default_dtype_and_mode(saved: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(saved / "base")
    model = PeftModel.from_pretrained(base, str(saved / "adapter")).eval()
    expected = {
        index: layer.routing
        for index, layer in enumerate(decoder_layers(model))
        if ROUTING in layer._modules
    }
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode(), torch.device("meta"):
            routings = load(saved)
            assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert routings.keys() == expected.keys()
    x = torch.randn(1, 7, 32)
    for index, routing in routings.items():
        for (name, here), (other, there) in zip(
            routing.state_dict().items(), expected[index].state_dict().items()
        ):
            assert name == other and torch.equal(here, there) and here.dtype == there.dtype, name
        assert not any(p.requires_grad or p.is_inference() for p in routing.parameters())
        plans = [one.plan(False, (1, 7)) for one in (routing, expected[index])]
        assert torch.equal(plans[0].threshold, plans[1].threshold)
        assert torch.equal(
            routing.score(plans[0], x)["scores"], expected[index].score(plans[1], x)["scores"]
        )


def test_the_budget_is_set_as_set_budget_sets_it(saved: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(saved / "base")
    model = PeftModel.from_pretrained(base, str(saved / "adapter")).eval()
    set_budget(model, 0.25)
    for index, routing in load(saved, budget=0.25).items():
        expected = decoder_layers(model)[index].routing
        assert torch.equal(
            routing.plan(False, (1, 1)).threshold, expected.plan(False, (1, 1)).threshold
        )
    with pytest.raises(ConfigError, match=r"budget=1\.5"):
        load(saved, budget=1.5)


def test_another_base_is_refused_by_its_files_before_they_are_loaded(
    saved: Path, tmp_path: Path
) -> None:
    other = save_base(tmp_path / "base")
    build_base("llama", seed=7).save_pretrained(other)
    (tmp_path / "adapter").symlink_to(saved / "adapter")
    with pytest.raises(
        AdapterMismatchError, match=r"made for another base model: .* sampled weights differ"
    ):
        load(tmp_path)


def test_files_without_a_weight_of_the_base_are_refused(saved: Path) -> None:
    config = AutoConfig.from_pretrained(saved / "base")
    with pytest.raises(AdapterMismatchError, match="is in the base's safetensors files"):
        load_routings(Settings(str(saved / "adapter")), config, [])


def test_an_adapter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama")
    with pytest.raises(ConfigError, match=r"no adapter_config\.json in it, on this machine"):
        load_routings(Settings(str(tmp_path)), config, [])


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt_neox", "falcon"])
def test_weights_are_found_under_the_names_of_any_family(family: str, tmp_path: Path) -> None:
    from hf_depthroute.adapter.base_check import sampled_weights, stored_weights

    base = build_base(family)
    base.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(base.config)
    assert stored_weights(empty, tmp_path.glob("*.safetensors")) == sampled_weights(base)
