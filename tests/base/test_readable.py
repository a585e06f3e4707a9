"""Nothing that hangs on the call of a module is lost: hooks, offloading, own forwards,
split and quantised weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from models import DEVICE, build_base, build_routed, decoder_layers, routed, tokens
from peft import PeftModel
from places import HELPERS
from ports import free_port
from protocol import gap
from torch import nn
from torch.nn.utils import parametrize
from transformers.cache_utils import DynamicCache

from hf_depthroute.base.readable import is_readable, is_watched
from hf_depthroute.execution.attention import supports_subset
from hf_depthroute.routing.routing import ROUTING
from hf_depthroute.routing.stack import state_of

FAMILIES = ("llama", "qwen3", "phi3", "gpt2", "gpt_neox", "stablelm")
SKIPPING = ("attention", "block")
LAYER = 2


@contextmanager
def hooked(module: nn.Module) -> Iterator[None]:
    with module.register_forward_hook(lambda module, args, out: changed(out)):
        yield


@contextmanager
def hooked_before(module: nn.Module) -> Iterator[None]:
    def change(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (
            (changed(args), kwargs)
            if args
            else (args, kwargs | {"hidden_states": changed(kwargs["hidden_states"])})
        )

    with module.register_forward_pre_hook(change, with_kwargs=True):
        yield


@contextmanager
def with_its_own_forward(module: nn.Module) -> Iterator[None]:
    own = module.forward
    module.forward = lambda *args, **kwargs: changed(own(*args, **kwargs))
    yield
    del module.forward


@contextmanager
def parametrised(module: nn.Module) -> Iterator[None]:
    class Larger(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 1.5 * weight

    if isinstance(module._parameters.get("weight"), nn.Parameter):
        parametrize.register_parametrization(module, "weight", Larger())
    yield
    if parametrize.is_parametrized(module):
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)


@contextmanager
def offloaded(module: nn.Module) -> Iterator[None]:
    cpu_offload(module, execution_device=torch.device(DEVICE))
    yield
    remove_hook_from_submodules(module)


def changed(value: Any) -> Any:
    return (1.5 * value[0], *value[1:]) if isinstance(value, tuple) else 1.5 * value


WAYS: tuple[Callable[[nn.Module], Any], ...] = (
    hooked,
    hooked_before,
    with_its_own_forward,
    parametrised,
    offloaded,
)


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The base's modules inside one routed layer, by name."""
    layer, called = decoder_layers(model)[LAYER], set()
    modules = {
        name: m for name, m in layer.named_modules() if name and not name.startswith(ROUTING)
    }
    handles = [
        m.register_forward_hook(lambda *_, name=name: called.add(name))
        for name, m in modules.items()
    ]
    outputs(model, "masked")
    for handle in handles:
        handle.remove()
    return {name: module for name, module in modules.items() if name in called}


@torch.no_grad()
def outputs(model: PeftModel, executor: str) -> torch.Tensor:
    """Logits of a prompt of two rows, and of a prompt of one and two decoding steps."""
    with state_of(model).override(executor=executor):
        ids, cache = tokens(2, 9), DynamicCache(config=model.config)
        parts = [model(ids).logits]
        for part in ids[:1, :7], ids[:1, 7:8], ids[:1, 8:]:
            parts.append(model(part, past_key_values=cache).logits)
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "mlp"), *((f, k) for f in FAMILIES for k in SKIPPING)]
)
def test_every_module_of_a_layer_is_called(
    family: str, kind: str, way: Callable[[nn.Module], Any]
) -> None:
    model = build_routed(family, kind, layers=[LAYER])
    before = outputs(model, "masked")
    for name, module in parts_of(model).items():
        with way(module):
            expected = outputs(model, "masked")
            for executor in ("auto", "rows"):
                assert gap(outputs(model, executor), expected) < 1e-5, (name, executor)
        if way is offloaded:
            assert torch.equal(expected, before), name
        elif way is not parametrised and "dropout" not in name:
            assert not torch.equal(expected, before), name
    assert torch.equal(outputs(model, "masked"), before)


@pytest.mark.parametrize(
    ("family", "name"), [("phi3", "qkv_proj"), ("gpt2", "c_attn"), ("gpt_neox", "query_key_value")]
)
def test_a_watched_fused_projection_is_called_once_for_all_tokens(family: str, name: str) -> None:
    model, rows = build_routed(family, "attention", layers=[LAYER]), []
    part = next(m for n, m in decoder_layers(model)[LAYER].named_modules() if n.endswith(name))
    with (
        part.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[:-1])),
        torch.no_grad(),
    ):
        model(tokens(2, 9))
    assert rows == [(2, 9)]


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_that_record_outputs_do_not_stop_skipping(family: str) -> None:
    model = build_routed(family, "attention", layers=[LAYER])
    attention = next(
        m
        for n, m in decoder_layers(model)[LAYER].named_modules()
        if n.endswith(("attn", "attention"))
    )
    before = outputs(model, "auto")
    with torch.no_grad():
        model(tokens(1, 4), output_hidden_states=True)  # transformers leaves its hooks behind
    assert attention._forward_hooks and supports_subset(attention, "rotary", {})
    assert torch.equal(outputs(model, "auto"), before)


def test_quantised_split_and_missing_weights_are_not_read() -> None:
    class Packed(nn.Parameter):
        pass

    linear = nn.Linear(4, 4)
    assert (
        is_readable(linear, nn.Linear)
        and not is_readable(linear, nn.Embedding)
        and not is_watched(linear)
    )
    linear.weight = Packed(torch.zeros(4, 4))
    assert not is_readable(linear, nn.Linear)
    assert not is_readable(nn.Linear(4, 4, device="meta"), nn.Linear)
    partitioned = nn.Linear(4, 4)
    partitioned.weight.ds_id = 0  # type: ignore[attr-defined]
    assert not is_readable(partitioned, nn.Linear)
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert is_watched(nn.Linear(4, 4))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_a_base_that_is_split_over_processes_gives_the_logits_of_a_whole_one(
    tmp_path: Path,
) -> None:
    expected = {}
    for family, kind in [
        ("llama", "block"),
        ("phi3", "attention"),
        ("phi3", "block"),
        ("gpt_neox", "attention"),
    ]:
        folder, base = tmp_path / f"{family}-{kind}", build_base(family)
        base.save_pretrained(folder)
        model = routed(base, kind, layers=[1, 2])
        model.save_pretrained(folder / "adapter")
        with torch.no_grad():
            expected[folder] = model(tokens(2, 9)).logits
    worker = HELPERS / "tensor_parallel_worker.py"
    command = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(free_port()),
        str(worker),
    ]
    subprocess.run(
        [sys.executable, *command, str(tmp_path)], check=True, timeout=300, capture_output=True
    )
    for folder, logits in expected.items():
        for rank in (0, 1):
            assert gap(torch.load(folder / f"{rank}.pt"), logits) < 1e-5, folder.name
