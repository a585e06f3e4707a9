"""Bases from GGUF files: an adapter remembers the file,
and fits the base that the file was made of."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from command_line import run
from models import build_base, routed
from peft import PeftModel
from text_models import save_base
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_depthroute.adapter.base_check import BaseDiffersWarning
from hf_depthroute.adapter.files import AdapterMismatchError

GgufConfig = getattr(transformers, "GgufConfig", None)
pytestmark = pytest.mark.skipif(
    GgufConfig is None, reason="this transformers does not say what a GGUF base is"
)


def as_from_gguf(model: Any, levels: int = 15) -> Any:
    """The model as loaded from a file of few bits: blocks of 32 weights take one of 16 values,
    and plain numbers."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:  # norms stay as they are
                blocks = weight.reshape(-1, 32)
                low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
                step = ((high - low) / levels).clamp(min=1e-8)
                weight.copy_((low + ((blocks - low) / step).round() * step).reshape(weight.shape))
    model.config.quantization_config = GgufConfig(gguf_file="/somewhere/tiny.Q4_1.gguf")
    return model


def test_an_adapter_remembers_the_name_of_the_file(tmp_path: Path) -> None:
    routed(as_from_gguf(build_base("llama"))).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["base_architecture"]["gguf_file"] == "tiny.Q4_1.gguf"
    assert "somewhere" not in json.dumps(saved)
    assert "gguf_file tiny.Q4_1.gguf" in run("doctor", tmp_path).out
    # Of tokenizer and model.
    assert (tmp_path / "README.md").read_text().count('gguf_file="tiny.Q4_1.gguf"') == 2


@pytest.mark.parametrize("made_on_gguf", [True, False])
def test_an_adapter_of_one_loads_on_the_other_and_says_how_far_they_are_apart(
    made_on_gguf: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    gguf, original = as_from_gguf(build_base("llama")), build_base("llama")
    made_on, other = (gguf, original) if made_on_gguf else (original, gguf)
    routed(made_on).save_pretrained(tmp_path)
    with pytest.warns(
        BaseDiffersWarning, match=r"off by \d+\.\d% \(median of \d+ samples\).*tiny\.Q4_1\.gguf"
    ):
        PeftModel.from_pretrained(other, tmp_path)


def test_another_model_is_refused_however_it_was_loaded(tmp_path: Path) -> None:
    routed(as_from_gguf(build_base("llama"))).save_pretrained(tmp_path)
    torch.manual_seed(99)
    stranger = transformers.LlamaForCausalLM(build_base("llama").config)
    with pytest.raises(
        AdapterMismatchError, match=r"another base model: \d+ of \d+ .*, by \d+% \(median of all\)"
    ):
        PeftModel.from_pretrained(as_from_gguf(stranger), tmp_path)


def test_a_copy_that_is_no_gguf_file_is_another_base(tmp_path: Path) -> None:
    routed(build_base("llama")).save_pretrained(tmp_path)
    other = as_from_gguf(build_base("llama"))
    other.config.quantization_config = None
    with pytest.raises(AdapterMismatchError, match="another base model"):
        PeftModel.from_pretrained(other, tmp_path)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A folder that holds nothing but a GGUF file, and an adapter."""
    save_base(tmp_path / "base")
    routed(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")).save_pretrained(
        tmp_path / "adapter"
    )
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "tiny.gguf").write_bytes(b"GGUF")
    return tmp_path / "files", tmp_path / "adapter"


def test_the_command_line_names_the_option_that_is_missing(files: tuple[Path, Path]) -> None:
    folder, adapter = files
    generate = ("generate", adapter, "--prompt", "the cat", "--model")
    ended = run(*generate, folder)
    assert ended.code == 2
    assert ended.error.endswith("has no config.json, but a GGUF file; pass --gguf-file tiny.gguf")
    assert run(*generate, folder / "tiny.gguf").error.endswith(
        f"pass --model {folder} --gguf-file tiny.gguf"
    )
    assert run(*generate, folder, "--gguf-file", "big.gguf").error.endswith(
        f"is not in {folder}; it has tiny.gguf"
    )
    fit = ("fit", "--model", folder, "--dataset", "python-stdlib", "--out", folder / "out")
    assert run(*fit).error.endswith("pass --gguf-file tiny.gguf")
    assert run("train", *fit[1:]).error.endswith("pass --gguf-file tiny.gguf")


def test_the_command_line_names_the_package_that_is_missing(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, adapter = files
    monkeypatch.setattr("hf_depthroute.cli.gguf.importlib.util.find_spec", lambda name: None)
    ended = run(
        "generate", adapter, "--prompt", "the cat", "--model", folder, "--gguf-file", "tiny.gguf"
    )
    assert ended.code == 2 and ended.error.endswith("install it with: pip install gguf")


@pytest.fixture
def asked(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of transformers' classes that were asked for `tiny.gguf`;
    they read the base that it stands for."""
    seen: list[str] = []
    stored = str(files[0].parent / "base")
    for name in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"):
        load = getattr(transformers, name).from_pretrained

        def from_gguf(folder: str, *, name: str = name, load: Any = load, **how: Any) -> Any:
            if how.pop("gguf_file", None) is None:
                return load(folder, **how)
            assert folder == str(files[0])
            seen.append(name)
            settings = how.pop("quantization_config", None)
            loaded = load(stored, **how)
            if settings is not None:  # as a model that calls itself quantised
                assert settings.dequantize
                loaded.is_quantized, loaded.hf_quantizer = True, object()
                loaded.name_or_path = loaded.config._name_or_path = folder
            return loaded

        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", from_gguf)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: name == "gguf" or find(name, *rest)
    )
    return seen


def test_the_file_is_named_once(files: tuple[Path, Path], asked: list[str], tmp_path: Path) -> None:
    """`train` reads configuration, tokenizer and model from it,
    and later commands find it by the adapter."""
    folder, out = files[0], tmp_path / "out"
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 200)
    text = ("--dataset", tmp_path / "text.txt", "--length", "16")
    base = ("--model", folder, "--gguf-file", "tiny.gguf")
    trained = run("train", *base, *text, "--out", out, "--steps", "1", "--layers", "1")
    assert trained.code == 0, trained.error  # a Trainer refuses a model that calls itself quantised
    everything = {"AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"}
    assert set(asked) == everything
    asked.clear()
    assert run("generate", out, "--prompt", "the cat", "--max-new-tokens", "2").code == 0
    assert set(asked) == everything
    asked.clear()
    named = run("generate", files[1], *base, "--prompt", "the cat", "--max-new-tokens", "2")
    assert named.code == 0 and set(asked) == everything, named.error


def write_gguf(path: Path) -> None:
    """A Llama of two layers, its matrices in blocks of four bits,
    with a tokenizer of single bytes."""
    gguf = pytest.importorskip("gguf", reason="needs pip install gguf")
    width, inner, layers, heads = 64, 96, 2, 4
    alphabet = sorted(bytes_to_unicode().values())
    words = ["<s>", "</s>", "<unk>", "<|endoftext|>", *alphabet, "th", "the"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(width // heads)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3] * 4 + [1] * (len(words) - 4))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {
        "token_embd": (len(words), width),
        "output": (len(words), width),
        "output_norm": (width,),
    }
    for layer in range(layers):
        shapes |= {f"blk.{layer}.attn_{name}": (width, width) for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{layer}.ffn_{name}": (inner, width) for name in ("gate", "up")}
        shapes |= {f"blk.{layer}.ffn_down": (width, inner)}
        shapes |= {f"blk.{layer}.{name}_norm": (width,) for name in ("attn", "ffn")}
    draw = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType.Q4_0
    for name, shape in shapes.items():
        values = (
            draw.normal(0, 0.2, shape).astype(np.float32)
            if len(shape) > 1
            else np.ones(shape, np.float32)
        )
        if len(shape) > 1:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_of_four_bits_is_routed_by_the_command_line(tmp_path: Path) -> None:
    """A file that the package gguf wrote itself: trained on, found again by the adapter,
    and the same base."""
    folder, out = tmp_path / "files", tmp_path / "out"
    folder.mkdir()
    write_gguf(folder / "tiny.Q4_0.gguf")
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 200)
    base = ("--model", folder, "--gguf-file", "tiny.Q4_0.gguf")
    text = ("--dataset", tmp_path / "text.txt", "--length", "16")
    trained = run("train", *base, *text, "--out", out, "--steps", "2", "--layers", "1")
    assert trained.code == 0, trained.error
    saved = json.loads((out / "adapter_config.json").read_text())
    assert saved["base_architecture"]["gguf_file"] == "tiny.Q4_0.gguf"
    assert saved["base_architecture"]["hidden_size"] == 64
    said = [
        run("generate", out, *how, "--prompt", "the cat", "--max-new-tokens", "4")
        for how in ((), base)
    ]
    assert [ended.code for ended in said] == [0, 0], said
    assert said[0].out == said[1].out
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.Q4_0.gguf")
    weights = loaded.model.layers[0].mlp.gate_proj.weight.reshape(-1, 32)
    assert max(len(block.unique()) for block in weights) <= 16  # blocks of four bits
    routed_model = PeftModel.from_pretrained(loaded, out)
    with torch.no_grad():
        assert routed_model(torch.tensor([[3, 4, 5]])).logits.isfinite().all()
