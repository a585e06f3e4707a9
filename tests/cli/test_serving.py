"""Serving: continuous batching decodes what `generate` does,
and `transformers serve` finds the adapter."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from batching import PROMPTS, generate, generate_batch
from models import build_routed, decoder_layers, routed, tokens
from text_models import save_base, word_tokenizer
from transformers import AutoModelForCausalLM
from transformers.utils.import_utils import is_serve_available

from hf_depthroute import record_routes
from hf_depthroute.cli.serve import link_model

# Every target, every way to make queries, and both ways to skip that are not a gate's: family,
# kind, fields.
BATCHED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ffn": ("llama", "mlp", {}),
    "attention": ("qwen3", "attention", {}),
    "attention_fused": ("gpt2", "attention", {}),
    "block": ("llama", "block", {}),
    "experts": ("olmoe", "experts", {}),
    "halting": ("llama", "block", {"gate": "halting", "branch": "none"}),
    "exit": ("llama", "block", {"gate": "exit", "branch": "none"}),
    "static": ("llama", "attention", {"gate": "none"}),
    "predictor": ("llama", "mlp", {"causal_rule": "predictor"}),
}


@pytest.mark.nightly(unless=lambda case: case in ("ffn", "attention_fused", "block", "experts"))
@pytest.mark.parametrize("case", BATCHED)
def test_continuous_batching_decodes_what_generate_does(case: str) -> None:
    family, kind, fields = BATCHED[case]
    model = build_routed(family, kind, **fields)
    expected = generate(model)
    with model.disable_adapter():
        assert expected != generate(model)
    assert [output.generated_tokens for output in generate_batch(model)] == expected


def test_continuous_batching_with_eager_attention() -> None:
    model = build_routed("llama", "block", attention="eager")
    assert [output.generated_tokens for output in generate_batch(model, "eager")] == generate(model)


@pytest.mark.parametrize("kind", ["mlp", "block"])
def test_continuous_batching_runs_the_ffn_on_the_chosen_tokens_only(kind: str) -> None:
    model, rows, chosen, masks = build_routed("llama", kind), [0], [0], []
    layer = decoder_layers(model)[2]
    layer.mlp.register_forward_hook(
        lambda module, args, out: rows.append(args[0].shape[:-1].numel())
    )
    forward = model.get_base_model().forward

    def recorded(*args: Any, **kwargs: Any) -> Any:
        """The engine has a thread of its own, which settings of another thread do not reach."""
        with record_routes(model) as trace:
            out = forward(*args, **kwargs)
        masks.append(trace[2].token_mask)
        chosen.append(int(trace[2].mask.sum()))
        return out

    model.get_base_model().forward = recorded
    outputs = generate_batch(model)
    seen = sum(len(prompt) for prompt in PROMPTS) + sum(
        len(output.generated_tokens) - 1 for output in outputs
    )
    assert sum(rows) == sum(chosen)
    assert 0 < sum(rows) < seen
    assert masks and not [mask for mask in masks if mask is not None]


def test_decisions_about_sequences_are_refused_in_one_line() -> None:
    model = build_routed("llama", granularity="sequence")
    for output in generate_batch(model):
        assert output.generated_tokens == []
        assert "granularity='sequence'" in output.error and "\n" not in output.error


def make_adapter(folder: Path) -> tuple[Path, Path, Any]:
    base = save_base(folder / "base")
    model = routed(AutoModelForCausalLM.from_pretrained(base))
    model.save_pretrained(folder / "adapter")
    return base, folder / "adapter", model


def test_a_served_folder_loads_as_one_model(tmp_path: Path) -> None:
    base, adapter, model = make_adapter(tmp_path)
    (adapter / "config.json").write_text("{}")
    link_model(base, adapter, tmp_path / "served" / "me" / "router")
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "served" / "me" / "router")
    ids = tokens(2, 9)
    assert torch.equal(served(ids).logits, model(ids).logits)


@pytest.mark.skipif(is_serve_available(), reason="the packages that serve needs are there")
def test_serve_without_its_packages_says_what_to_install(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from hf_depthroute.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["serve", "adapter"])
    assert (
        ended.value.code == 2 and 'pip install "transformers[serving]"' in capsys.readouterr().err
    )


@pytest.mark.skipif(not is_serve_available(), reason='needs pip install "transformers[serving]"')
def test_the_server_completes_as_generate_does_lists_the_model_and_ends_on_ctrl_c(
    tmp_path: Path,
) -> None:
    _, adapter, model = make_adapter(tmp_path)
    tokenizer = word_tokenizer()
    ids = torch.tensor([tokenizer("the cat sat on")["input_ids"]])
    expected = tokenizer.decode(
        model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :],
        skip_special_tokens=True,
    )
    options = ["--port", "0", "--device", "cpu", "--continuous-batching", "--cb-num-blocks", "8"]
    command = [sys.executable, "-m", "hf_depthroute", "serve", str(adapter), *options]
    # It is killed in the end.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    server = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment,
        # A test run in the background of a shell ignores Ctrl-C, and its children inherit that.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert server.stderr is not None
    seen: list[str] = []
    try:
        for line in server.stderr:
            seen.append(line)
            if "running on" in line:
                break
        else:
            raise AssertionError("".join(seen))
        address = next(word for word in seen[-1].split() if word.startswith("http://"))
        body = {"model": "adapter", "prompt": "the cat sat on", "max_tokens": 4, "temperature": 0.0}
        request = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            completion = json.load(answer)
        with urllib.request.urlopen(f"{address}/v1/models", timeout=60) as answer:
            models = json.load(answer)["data"]
        server.send_signal(signal.SIGINT)
        _, rest = server.communicate(timeout=60)
    finally:
        server.kill()
        server.communicate()
    assert [(model["id"], model["object"]) for model in models] == [("adapter", "model")]
    assert (server.returncode, rest.splitlines()[-1]) == (130, "error: interrupted")
    assert completion["choices"][0]["text"].strip() == expected.strip()
    assert any("as model 'adapter'" in line for line in seen)
