"""What is refused before a model is touched: faults of an adapter's two files,
on every path that reads them."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import build_base, decoder_layers, logits, routed
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_depthroute import allow_base_mismatch
from hf_depthroute.adapter.base_check import sampled_weights
from hf_depthroute.adapter.files import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    AdapterMismatchError,
    read_config,
    read_tensors,
    tensors_hash,
)
from hf_depthroute.cli import main
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.routing.routing import Routing

GATE = "base_model.model.model.layers.2.routing.depth_route_gate.hidden.weight"
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base and an adapter of it."""
    folder = tmp_path_factory.mktemp("saved")
    build_base("llama").save_pretrained(folder / "base")
    routed(AutoModelForCausalLM.from_pretrained(folder / "base"), "mlp", seed=7).save_pretrained(
        folder / "adapter"
    )
    return folder / "base", folder / "adapter"


@pytest.fixture(scope="module")
def expected(saved: tuple[Path, Path]) -> torch.Tensor:
    """The logits of the base alone."""
    return logits(AutoModelForCausalLM.from_pretrained(saved[0]))


@pytest.fixture
def adapter(saved: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved[1], tmp_path / "adapter"))


# Config -------------------------------------------------------------------------------------------


def text(change: Callable[[str], str]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / CONFIG_NAME
        path.write_text(change(path.read_text()))

    return damage


def fields(**values: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / CONFIG_NAME
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def literal(field: str, value: str) -> Damage:
    """A value that Python's JSON writer would not write."""
    return text(lambda t: json.dumps(json.loads(t) | {field: "@"}).replace('"@"', value))


CONFIG_FAULTS: dict[str, tuple[Damage, str]] = {
    "half a config": (text(lambda t: t[: len(t) // 2]), "corrupt|Expecting|delimiter|Unterminated"),
    "empty config": (text(lambda t: ""), "corrupt|Expecting value"),
    "not JSON": (text(lambda t: "layers: [1]\n" + t), "corrupt"),
    "a list": (text(lambda t: f"[{t}]"), "no JSON object|DEPTH_ROUTE"),
    "duplicate key": (
        text(lambda t: t.replace("{", '{"budget": 0.1,', 1)),
        "'budget' is there twice",
    ),
    "duplicate peft_type": (
        text(lambda t: t.replace("{", '{"peft_type": "DEPTH_ROUTE",', 1)),
        "there twice",
    ),
    "duplicate key inside": (
        text(
            lambda t: t.replace('"base_architecture": {', '"base_architecture": {"hidden_size": 1,')
        ),
        "'hidden_size' is there twice",
    ),
    "NaN literal": (literal("budget", "NaN"), "NaN"),
    "Infinity literal": (literal("threshold", "-Infinity"), "Infinity"),
    "overflowing number": (literal("budget", "1e999"), "budget=inf"),
    "endless integer": (literal("seed", "9" * 5000), "corrupt|Exceeds"),
    "deep nesting": (literal("base_architecture", "[" * 100_000 + "]" * 100_000), "nested|deep"),
    "nesting of objects": (
        literal("base_architecture", '{"a":' * 2000 + "1" + "}" * 2000),
        "nested|deep",
    ),
    "two megabytes": (text(lambda t: t + " " * (2 << 20)), "larger than 1,048,576 bytes"),
    "bytes that are no text": (
        lambda f: (f / CONFIG_NAME).write_bytes(b'{"peft_type": "DEPTH_ROUTE", "\xff": 1}'),
        "corrupt",
    ),
    "unknown field": (fields(routes=3), "no field 'routes'"),
    "trust_remote_code": (fields(trust_remote_code=True), "no field 'trust_remote_code'"),
    "misspelt field": (fields(bugdet=0.5), "did you mean budget"),
    "newer format": (
        fields(format_version=99, library_version="9.1.0", new=1),
        "hf_depthroute 9.1.0",
    ),
    "format of words": (fields(format_version="two"), "format_version='two'"),
    "budget of zero": (fields(budget=0), "budget=0 "),
    "budget above one": (fields(budget=1.5), "budget=1.5"),
    "budget of words": (fields(budget="half"), "budget='half'"),
    "layers out of range": (fields(layers=[10**9]), "layers="),
    "layers twice": (fields(layers=[1, 1]), "layers="),
    "layers of a regex": (fields(layers="(a+)+$"), "layers="),
    "a million layers": (fields(layers=list(range(10_000))), "layers="),
    "layers below zero": (fields(layers=[-1]), "layers="),
    "unknown gate": (fields(gate="os.system"), "gate='os.system'"),
    "unknown target": (fields(target="lm_head"), "target='lm_head'"),
    "absurd width": (fields(gate_hidden=10**9), "gate_hidden="),
    "negative seed": (fields(seed=-1), "seed=-1"),
    "code to import": (
        fields(auto_mapping={"base_model_class": "system", "parent_library": "os"}),
        "auto_mapping=.*only a class of transformers",
    ),
    "path as hash": (fields(weights_hash="../../etc/passwd"), "weights_hash="),
    "modules as a regex": (fields(modules_to_save=["(.*)*"]), "modules_to_save="),
    "modules of numbers": (fields(modules_to_save=[3]), "modules_to_save="),
    "base without a name": (fields(base_model_name_or_path=["a"]), "base_model_name_or_path="),
    "architecture of words": (fields(base_architecture="llama"), "base_architecture="),
    "token indices": (fields(trainable_token_indices=[0]), "trainable_token_indices"),
}

# Weights ------------------------------------------------------------------------------------------


def flipped(position: float) -> Damage:
    def damage(folder: Path) -> None:
        data = bytearray((folder / WEIGHTS_NAME).read_bytes())
        data[int(len(data) * position)] ^= 0x04
        (folder / WEIGHTS_NAME).write_bytes(data)

    return damage


def cut(keep: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / WEIGHTS_NAME
        path.write_bytes(keep(path.read_bytes()))

    return damage


def tensors(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], seal: bool = True
) -> Damage:
    """`seal`: with the hash of what was changed, as somebody who means harm would."""

    def damage(folder: Path) -> None:
        changed = change(load_file(folder / WEIGHTS_NAME))
        save_file(changed, folder / WEIGHTS_NAME)
        if seal:
            fields(weights_hash=tensors_hash(changed))(folder)

    return damage


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS_NAME), folder / "adapter_model.bin")
    (folder / WEIGHTS_NAME).unlink()


def copies(module: str, tensor: str | None = None, shape: tuple[int, ...] = ()) -> Damage:
    """A config that asks for copies of a base module, with one tensor of it at most,
    and the hash that fits."""

    def damage(folder: Path) -> None:
        weights = {
            name: value
            for name, value in load_file(folder / WEIGHTS_NAME).items()
            if "routing" in name
        }
        if tensor is not None:
            weights[f"base_model.model.model.{tensor}.weight"] = torch.ones(shape)
        save_file(weights, folder / WEIGHTS_NAME)
        fields(modules_to_save=[module], weights_hash=tensors_hash(weights))(folder)

    return damage


def sampled(change: Callable[[dict[str, float]], Any]) -> Damage:
    """Other weights of the base that the adapter asks for."""

    def changed(text: str) -> str:
        config = json.loads(text)
        config["base_architecture"]["sampled_weights"] = change(
            config["base_architecture"]["sampled_weights"]
        )
        return json.dumps(config)

    return text(changed)


def no_tensor_of(layers: str) -> Damage:
    def damage(folder: Path) -> None:
        tensors(lambda t: {})(folder)
        fields(layers=layers)(folder)

    return damage


WEIGHT_FAULTS: dict[str, tuple[Damage, str]] = {
    "truncated": (cut(lambda b: b[:-100]), "corrupt"),
    "half": (cut(lambda b: b[: len(b) // 2]), "corrupt"),
    "header only": (cut(lambda b: b[:64]), "corrupt"),
    "empty": (cut(lambda b: b""), "corrupt"),
    "longer": (cut(lambda b: b + b"\0" * 8), "corrupt"),
    "huge header": (cut(lambda b: b"\xff" * 8 + b[8:]), "corrupt"),
    "text": (cut(lambda b: b"hello" * 100), "corrupt"),
    "flipped byte at the end": (flipped(0.999), "hash"),
    "flipped byte in the middle": (flipped(0.5), "hash"),
    "zeroed block": (cut(lambda b: b[:-4096] + bytes(4096)), "hash"),
    "weights of another save": (
        tensors(lambda t: {k: v + 0.5 for k, v in t.items()}, seal=False),
        "hash",
    ),
    "a pickle": (pickled, "pickle"),
    "output head": (
        tensors(lambda t: {**t, "base_model.model.lm_head.weight": torch.zeros(64, 32)}),
        "lm_head",
    ),
    "base layer": (
        tensors(
            lambda t: {
                **t,
                "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight": torch.zeros(
                    64, 32
                ),
            }
        ),
        "base_layer",
    ),
    "base weight": (
        tensors(
            lambda t: {
                **t,
                "base_model.model.model.layers.0.mlp.up_proj.weight": torch.zeros(64, 32),
            }
        ),
        "layers.0.mlp.up_proj.weight",
    ),
    "layer that is not routed": (
        tensors(lambda t: {**t, GATE.replace("layers.2", "layers.0"): t[GATE].clone()}),
        "layer that is not routed",
    ),
    "name that climbs": (
        tensors(lambda t: {**t, "../../" + GATE: t[GATE].clone()}),
        "unexpected tensor",
    ),
    "endless name": (tensors(lambda t: {**t, "a." * 50_000 + GATE: t[GATE].clone()}), "tensor"),
    "eight-bit floats": (
        tensors(lambda t: {**t, GATE: t[GATE].to(torch.float8_e4m3fn)}),
        "dtype F8",
    ),
    "complex": (tensors(lambda t: {**t, GATE: t[GATE].to(torch.complex64)}), "dtype C64"),
    "NaN": (tensors(lambda t: {**t, GATE: t[GATE] * torch.nan}), "not finite"),
    "infinity": (tensors(lambda t: {**t, GATE: t[GATE] / 0}), "not finite"),
}
# What only the model can tell; refused after injection, which is undone.
MODEL_FAULTS: dict[str, tuple[Damage, str]] = {
    "missing tensor": (tensors(lambda t: {k: v for k, v in t.items() if k != GATE}), "is missing"),
    "missing table": (
        tensors(lambda t: {k: v for k, v in t.items() if "1.routing.depth_route_quan" not in k}),
        "missing",
    ),
    "no tensor at all": (tensors(lambda t: {}), "is missing"),
    "wrong shape": (tensors(lambda t: {**t, GATE: torch.zeros(3, 3)}), "has shape"),
    "integers": (tensors(lambda t: {**t, GATE: t[GATE].long()}), "dtype"),
    "another layer list": (fields(layers=[1, 2]), "not routed"),
    "layer beyond the model": (fields(layers=[1, 2, 3, 40]), "out of range"),
    "wider gate": (fields(gate_hidden=200), "has shape|at most"),
    "gate beyond all bounds": (fields(gate_hidden=2000), "at most 256"),
    "another gate": (fields(gate="jepa"), "tensor"),
    "another branch": (fields(branch="none"), "unexpected tensor"),
    "a number of sampled weights": (sampled(lambda weights: 5), "sampled_weights is no list"),
    "weights beyond all floats": (
        sampled(lambda weights: dict.fromkeys(weights, 10**400)),
        "sampled weights differ",
    ),
    "rule for layers and no tensor": (no_tensor_of("last:3"), "is missing"),
    "another width": (
        text(lambda t: t.replace('"hidden_size": 32', '"hidden_size": 64')),
        "hidden_size is 64",
    ),
    "another family": (
        text(lambda t: t.replace('"model_type": "llama"', '"model_type": "gpt2"')),
        "model_type is 'gpt2'",
    ),
    "no vocabulary": (
        text(lambda t: t.replace('"vocab_size": 64', '"vocab_size": -64')),
        "vocab_size is -64",
    ),
    "a copy of the model": (
        copies("model", "layers.0.mlp.up_proj", (64, 32)),
        "'model' means model, which cannot",
    ),
    "a copy of all layers": (
        copies("layers", "layers.0.mlp.up_proj", (64, 32)),
        "'layers' means model.layers, which",
    ),
    "a copy of no module": (copies("nothing"), "no module 'nothing'"),
    "a copy without tensors": (copies("up_proj"), "is missing"),
    "half a copy": (copies("up_proj", "layers.0.mlp.up_proj", (64, 32)), "is missing"),
    "a copy of another shape": (copies("embed_tokens", "embed_tokens", (3, 3)), "has shape"),
}
# Nothing in the files says so; loading compares them with the model.
SEEN_BY_THE_MODEL_ALONE = (
    "weights beyond all floats", "no vocabulary", "another family", "layer beyond the model",
    "a copy of the model", "a copy of all layers", "a copy of no module", "a copy without tensors",
    "half a copy", "a copy of another shape",
)  # fmt: skip
FAULTS = CONFIG_FAULTS | WEIGHT_FAULTS | MODEL_FAULTS

PATHS: dict[str, Callable[[Any, Path], Any]] = {
    "PeftModel.from_pretrained": lambda base, folder: PeftModel.from_pretrained(base, folder),
    "PeftModel.from_pretrained, low_cpu_mem_usage": lambda base, folder: PeftModel.from_pretrained(
        base, folder, low_cpu_mem_usage=True
    ),
    "model.load_adapter": lambda base, folder: base.load_adapter(folder),
    "PeftModel.load_adapter": lambda base, folder: routed(
        base, "mlp", adapter_name="first"
    ).load_adapter(folder, "second"),
    "AutoModelForCausalLM": lambda base, folder: AutoModelForCausalLM.from_pretrained(folder),
    "AutoPeftModelForCausalLM": lambda base, folder: peft.AutoPeftModelForCausalLM.from_pretrained(
        folder
    ),
}
ONTO_A_BASE = (
    "PeftModel.from_pretrained",
    "PeftModel.from_pretrained, low_cpu_mem_usage",
    "model.load_adapter",
)
AUTO = ("AutoModelForCausalLM", "AutoPeftModelForCausalLM")
# transformers' auto classes parse the config before PEFT does, to find the base; what they cannot
# parse, they refuse.
PARSED_BY_TRANSFORMERS = (
    "half a config", "empty config", "not JSON", "a list", "endless integer", "deep nesting",
    "nesting of objects", "bytes that are no text", "base without a name",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fault", FAULTS)
def test_is_refused_with_one_line(
    saved: tuple[Path, Path], adapter: Path, expected: torch.Tensor, fault: str, path: str
) -> None:
    damage, said = FAULTS[fault]
    damage(adapter)
    # The auto classes find it themselves.
    base = None if path in AUTO else AutoModelForCausalLM.from_pretrained(saved[0])
    names = [] if base is None else list(base.state_dict())
    if path == "AutoModelForCausalLM" and fault in PARSED_BY_TRANSFORMERS:
        with pytest.raises((ValueError, RecursionError, TypeError, AttributeError)):
            PATHS[path](base, adapter)
        return
    with pytest.raises(
        (AdapterMismatchError, ConfigError, json.JSONDecodeError), match=said
    ) as caught:
        PATHS[path](base, adapter)
    assert "\n" not in str(caught.value) or isinstance(caught.value, json.JSONDecodeError)
    assert len(str(caught.value)) < 600
    if path in ONTO_A_BASE:
        assert list(base.state_dict()) == names
        assert not any(isinstance(module, Routing) for module in base.modules())
        assert torch.equal(logits(base), expected)


AFTER_THE_CONFIG = [
    (fault, path)
    for fault in [*WEIGHT_FAULTS, "no weights"]
    for path in [*ONTO_A_BASE, "PeftModel.load_adapter"]
    # These are the same as another fault there.
    if fault not in ("zeroed block", "a pickle")
    and (fault, path) != ("NaN", "PeftModel.load_adapter")
]


def with_copy(saved: tuple[Path, Path], module: str, factor: float, folder: Path) -> torch.Tensor:
    """Save an adapter whose copy of `module` is `factor` times the base's;
    the logits of its model."""
    model = routed(
        AutoModelForCausalLM.from_pretrained(saved[0]), "mlp", modules_to_save=[module]
    ).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if f"{module}.modules_to_save" in name:
                value.mul_(factor)
    model.save_pretrained(folder)
    return logits(model)


@pytest.mark.parametrize("path", [path for path in PATHS if path != "PeftModel.load_adapter"])
@pytest.mark.parametrize("module", ["lm_head", "up_proj"])
def test_copies_of_base_modules_come_back(
    saved: tuple[Path, Path], tmp_path: Path, module: str, path: str
) -> None:
    expected = with_copy(saved, module, 1.5, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(saved[0])
    alone = logits(base)
    loaded = PATHS[path](base, tmp_path)
    loaded = base if path == "model.load_adapter" else loaded
    assert torch.equal(logits(loaded.eval()), expected) and not torch.equal(expected, alone)
    if isinstance(loaded, PeftModel):
        assert torch.equal(logits(loaded.unload()), alone)


def test_two_adapters_have_copies_of_their_own(saved: tuple[Path, Path], tmp_path: Path) -> None:
    expected = {
        str(factor): with_copy(saved, "lm_head", factor, tmp_path / str(factor))
        for factor in (2, 3)
    }
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(saved[0]), tmp_path / "2", "2"
    ).eval()
    model.load_adapter(tmp_path / "3", "3")
    for name in ("3", "2"):
        model.set_adapter(name)
        assert torch.equal(logits(model), expected[name])
    copies("lm_head")(tmp_path / "3")
    with pytest.raises(AdapterMismatchError, match=r"lm_head.* missing"):
        model.load_adapter(tmp_path / "3", "4")
    assert torch.equal(logits(model), expected["2"])


@pytest.mark.parametrize(("fault", "path"), AFTER_THE_CONFIG)
def test_weights_that_come_after_the_config_are_refused_too(
    saved: tuple[Path, Path],
    adapter: Path,
    expected: torch.Tensor,
    fault: str,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the Hub the config arrives first, and the adapter is injected before its
    weights are there."""
    damage = (
        WEIGHT_FAULTS[fault][0]
        if fault in WEIGHT_FAULTS
        else lambda folder: (folder / WEIGHTS_NAME).unlink()
    )
    damage(adapter)
    monkeypatch.setattr("hf_depthroute.adapter.loading.check_folder", lambda folder, config: None)
    base = AutoModelForCausalLM.from_pretrained(saved[0])
    names = list(base.state_dict())
    kinds = (AdapterMismatchError,) if fault != "no weights" else (ValueError, OSError)
    with pytest.raises(kinds):
        PATHS[path](base, adapter)
    if path in ONTO_A_BASE:
        assert list(base.state_dict()) == names
        assert not any(isinstance(module, Routing) for module in base.modules())
        assert torch.equal(logits(base), expected)
    else:
        assert all(
            set(m.depth_route_gate) == {"first"} for m in base.modules() if isinstance(m, Routing)
        )


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_hostile_config_costs_no_time(adapter: Path, fault: str) -> None:
    CONFIG_FAULTS[fault][0](adapter)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        with pytest.raises((AdapterMismatchError, ConfigError, json.JSONDecodeError)):
            peft.PeftConfig.from_pretrained(adapter)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault not in SEEN_BY_THE_MODEL_ALONE]
)
def test_doctor_names_it(
    saved: tuple[Path, Path], adapter: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    FAULTS[fault][0](adapter)
    with pytest.raises(SystemExit) as caught:
        main(["doctor", str(adapter)])
    out, err = capsys.readouterr()
    assert caught.value.code == 4
    assert err.count("\n") == 1 and err.startswith("error: ")
    assert "Traceback" not in out + err


def test_doctor_describes_a_whole_adapter(
    saved: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", str(saved[1])])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(line.startswith("ok ") for line in out.splitlines())
    assert (
        "layers [1, 2, 3]" in out
        and "all finite" in out
        and "sha256:" in out
        and "model_type llama" in out
    )


@settings(deadline=None)
@given(
    data=st.binary(max_size=600),
    head=st.sampled_from([b"", b'{"peft_type": "DEPTH_ROUTE", ', b"[", b'{"a": ']),
)
def test_any_bytes_are_a_config_or_refused(data: bytes, head: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, CONFIG_NAME)
        path.write_bytes(head + data)
        try:
            assert isinstance(read_config(path), dict)
        except AdapterMismatchError as error:
            assert "\n" not in str(error)


@given(data=st.binary(max_size=600), size=st.one_of(st.none(), st.integers(0, 2**64 - 1)))
def test_any_bytes_are_weights_or_refused(data: bytes, size: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, WEIGHTS_NAME)
        path.write_bytes((b"" if size is None else size.to_bytes(8, "little")) + data)
        try:
            assert not read_tensors(path, {"layers": [1]})
        except AdapterMismatchError as error:
            assert "\n" not in str(error)


def test_other_methods_configs_are_read_as_before(tmp_path: Path) -> None:
    peft.LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path)
    path = tmp_path / CONFIG_NAME
    path.write_text(path.read_text().replace("{", '{"r": 3, "from_the_future": 1,', 1))
    with pytest.warns(UserWarning, match="from_the_future"):
        assert isinstance(peft.PeftConfig.from_pretrained(tmp_path), peft.LoraConfig)


# The base -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["PeftModel.from_pretrained", "model.load_adapter", "PeftModel.load_adapter"]
)
def test_another_base_of_the_same_shape_needs_the_callers_word(
    saved: tuple[Path, Path], path: str
) -> None:
    other = build_base("llama", seed=5)
    names = list(other.state_dict())
    with pytest.raises(AdapterMismatchError, match="sampled weights differ"):
        PATHS[path](other, saved[1])
    if path in ONTO_A_BASE:
        assert list(other.state_dict()) == names
    with allow_base_mismatch():
        PATHS[path](build_base("llama", seed=5), saved[1])
    with pytest.raises(AdapterMismatchError, match="sampled weights differ"):
        PATHS[path](build_base("llama", seed=5), saved[1])


def test_an_allowed_mismatch_still_needs_the_architecture(saved: tuple[Path, Path]) -> None:
    with allow_base_mismatch(), pytest.raises(AdapterMismatchError, match="model_type"):
        PeftModel.from_pretrained(build_base("qwen2"), saved[1])


def test_an_adapter_saved_on_an_allowed_base_belongs_to_it(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    with allow_base_mismatch():
        PeftModel.from_pretrained(build_base("llama", seed=5), saved[1]).save_pretrained(tmp_path)
    PeftModel.from_pretrained(build_base("llama", seed=5), tmp_path)
    with pytest.raises(AdapterMismatchError):
        PeftModel.from_pretrained(build_base("llama"), tmp_path)


def test_an_adapter_belongs_to_the_base_it_was_trained_with(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    model = PeftModel.from_pretrained(build_base("llama"), saved[1])
    with torch.no_grad():
        for layer in decoder_layers(model):
            layer.mlp.up_proj.weight.mul_(1.5)
    model.save_pretrained(tmp_path)
    with pytest.raises(
        AdapterMismatchError, match=r"3 of 28 sampled weights differ, such as layers\.0\.mlp"
    ):
        PeftModel.from_pretrained(build_base("llama"), tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_base_in_another_dtype_is_the_same_base(
    saved: tuple[Path, Path], dtype: torch.dtype
) -> None:
    PeftModel.from_pretrained(build_base("llama").to(dtype), saved[1])


def test_a_piece_of_a_weight_that_fsdp_holds_is_not_its_sample() -> None:
    base = build_base("llama")
    names = set(sampled_weights(base))
    weight = decoder_layers(base)[0].mlp.up_proj.weight
    weight._fsdp_flattened = True  # what FSDP1 leaves on its pieces, with use_orig_params
    assert names - set(sampled_weights(base)) == {"layers.0.mlp.up_proj.weight"}


def test_a_base_with_lora_on_it_is_the_same_base(saved: tuple[Path, Path]) -> None:
    lora = peft.get_peft_model(
        build_base("llama"), peft.LoraConfig(target_modules=["q_proj", "down_proj"]), "lora"
    )
    lora.base_model.model.load_adapter(saved[1], adapter_name="router")


def test_the_commands_ask_for_the_callers_word(
    saved: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_base("llama", seed=5).save_pretrained(tmp_path / "other")
    command = [
        "bench",
        "--adapter",
        str(saved[1]),
        "--model",
        str(tmp_path / "other"),
        "--cases",
        "prefill",
    ]
    command += ["--length", "8", "--repeats", "1", "--decode-steps", "0"]
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 4
    assert "sampled weights differ" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main([*command, "--allow-base-mismatch"])
    assert caught.value.code == 0
