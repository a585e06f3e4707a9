"""Converting FlexiDepth's published checkpoint into an adapter:
"Adaptive Layer-skipping in Pre-trained LLMs".

A checkpoint of the layout of xuan-luo/FlexiDepth-Llama-3-8B-Instruct is a whole Llama whose routed
layers have seven tensors more: `router.router_{enc,norm,dec,head}.weight` and
`router_proj.{gate,down,up}_proj.weight`. There `down_proj` leads into the branch and `up_proj` out
of it; here the names are those of an FFN. The equations are in `parts.flexidepth`.

Shapes: d model width, b bottleneck width, r branch width.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, LlamaConfig

from ..config.adapter import ConfigError, DepthRouteConfig
from ..files.shown import reason
from ..parts.flexidepth import EPSILON, BottleneckGate
from ..routing.routing import Routing
from ..routing.stack import routings_of
from .base_check import check_base, describe_base
from .files import AdapterMismatchError, read_config
from .tensor_rules import fault_of_values
from .tuner import get_depth_routed_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PUBLISHED_BASE = "meta-llama/Meta-Llama-3-8B-Instruct"  # whose weights the published checkpoint has
_LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}
_MOST = {
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 18,
    "num_hidden_layers": 4096,
    "vocab_size": 1 << 24,
}
# Fields that have one value here, with what they are where they are left out.
_EXACT = {
    "hidden_act": ("silu", "silu"),
    "rms_norm_eps": (None, EPSILON),
    "mlp_bias": (False, False),
}
# Fields that change what weights compute; a base's are the checkpoint's.
_SAME = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
)
_NOT_A_LLAMAS = ("auto_map", "architectures", "model_type", "quantization_config")
_ADDED = re.compile(r"model\.layers\.(\d{1,4})\.((?:router|router_proj)\.\w+\.weight)")
_FLOATS = ("F32", "BF16", "F16")
# The tensor of a routed layer, ours, and its shape.
_TENSORS = {
    "router.router_enc.weight": ("gate", "enc.weight", "bd"),
    "router.router_norm.weight": ("gate", "norm.weight", "b"),
    "router.router_dec.weight": ("gate", "dec.weight", "db"),
    "router.router_head.weight": ("gate", "score.weight", "1d"),
    "router_proj.gate_proj.weight": ("branch", "gate.weight", "rd"),
    "router_proj.down_proj.weight": ("branch", "up.weight", "rd"),
    "router_proj.up_proj.weight": ("branch", "down.weight", "dr"),
}
# Of the base; the branch reads it too.
_BRANCH_NORM = {"post_attention_layernorm.weight": ("branch", "norm.weight")}


def convert_flexidepth(
    checkpoint: str | Path, out: str | Path, base: str | None = None
) -> DepthRouteConfig:
    """Write the adapter in a checkpoint of FlexiDepth's layout (arXiv:2503.23798) into a
    folder of its own.

    In float32 the adapter on its base computes what the checkpoint's own code does. The
    checkpoint's files are read tensor by tensor: of the base's weights only the norms of the routed
    layers, and single values that tell this base from others.

    Args:
        checkpoint: Folder with `config.json` and safetensors files, such as a download of
            xuan-luo/FlexiDepth-Llama-3-8B-Instruct. None of its code runs.
        out: Folder for the adapter.
        base: Folder or Hub id of the plain Llama whose weights the checkpoint has; by default
            meta-llama/Meta-Llama-3-8B-Instruct, for a checkpoint of its size. A folder is compared
            with the checkpoint: its weights, and the fields of its configuration by which they
            compute.

    Returns:
        The adapter's configuration, as it was saved.

    Raises:
        AdapterMismatchError: A tensor is missing, unknown, there twice, of another shape or not
            finite; the configuration is not that of such a checkpoint; or the folder `base` holds
            another model.
        ConfigError: `out` is the checkpoint's own folder, or `base` has to be named.
        OSError: The disk is full.
    """
    folder = Path(checkpoint)
    target = Path(out)
    if target.resolve() == folder.resolve():
        raise ConfigError(f"out={str(out)!r}: is the checkpoint's own folder; choose another one")
    given = read_config(folder / "config.json")
    sizes = _check_config(folder, given)
    base = base or (PUBLISHED_BASE if sizes == _LLAMA_3_8B else None)
    if base is None:
        raise ConfigError(
            f"base: {folder} is not of the size of {PUBLISHED_BASE}; name the plain Llama whose "
            "weights it has"
        )
    model = _without_weights(folder, given)
    model.name_or_path = base
    with ExitStack() as stack:
        files = _open_files(folder, stack)
        layers, widths = _check_tensors(folder, given, files, model)
        config = DepthRouteConfig(
            task_type="CAUSAL_LM",
            layers=layers,
            target="block",
            gate="bottleneck",
            gate_hidden=widths["b"],
            branch="swiglu",
            branch_rank=widths["r"],
        )
        routed = get_depth_routed_model(model, config)
        for routing in routings_of(routed):
            _fill(folder, routing, files)
    saved: Any = routed.peft_config["default"]
    saved.base_architecture = describe_base(model, sorted(folder.glob("*.safetensors")))
    if Path(base).is_dir():
        plain = _without_weights(Path(base), read_config(Path(base) / "config.json"))
        check_base(plain, saved.base_architecture, sorted(Path(base).glob("*.safetensors")))
        _check_same(Path(base), plain, model)
    routed.save_pretrained(str(target))
    return DepthRouteConfig.from_pretrained(str(target))


def _check_config(folder: Path, given: Mapping[str, object]) -> dict[str, Any]:
    """The sizes in a checkpoint's configuration; `AdapterMismatchError` for another layout."""
    for name, most in _MOST.items():
        value = given.get(name)
        if type(value) is not int or not 1 <= value <= most:
            raise _fault(
                folder, f"config.json: {name}={value!r:.100} must be an integer from 1 to {most}"
            )
    for name, (default, value) in _EXACT.items():
        if given.get(name, default) != value:
            found = f"{name}={repr(given.get(name))[:100]}"
            raise _fault(
                folder, f"config.json: {found} is not converted exactly; only {value!r} is"
            )
    return {name: given[name] for name in _MOST}


def _without_weights(folder: Path, given: Mapping[str, Any]) -> PreTrainedModel:
    """The plain Llama of a checkpoint's configuration, on the meta device."""
    fields = {name: value for name, value in given.items() if name not in _NOT_A_LLAMAS}
    try:
        config = LlamaConfig(**fields)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever a value that is not a Llama's leads to
        raise _fault(folder, f"config.json: makes no Llama: {reason(error)}") from error


def _check_same(folder: Path, base: PreTrainedModel, model: PreTrainedModel) -> None:
    """`AdapterMismatchError` where weights compute another function in `base` than in `model`."""
    for name in _SAME:
        here = getattr(base.config, name)
        wanted = getattr(model.config, name)
        if _compared(here) != _compared(wanted):
            raise _fault(
                folder,
                f"config.json: {name} is {repr(here)[:200]}, and the checkpoint's is "
                f"{repr(wanted)[:200]}; name the plain Llama whose weights it has",
            )


def _compared(value: Any) -> Any:
    """A field as it is compared; in those of the rotation `type` is `rope_type` once more."""
    if isinstance(value, dict):
        return {name: part for name, part in value.items() if name != "type"}
    return value


def _open_files(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """By tensor name, the open safetensors file that holds it."""
    files: dict[str, object] = {}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise _fault(folder, "holds no safetensors file; is it a checkpoint?")
    index = folder / "model.safetensors.index.json"
    listed: Any = {}
    if index.is_file():
        listed = read_config(index).get("weight_map")
    if not isinstance(listed, dict):
        raise _fault(
            folder, f"{index.name}: weight_map is no list of tensors by name; download it again"
        )
    missing = sorted(set(map(str, listed.values())) - {path.name for path in paths})
    if missing:
        raise _fault(
            folder, f"{missing[0][:100]} is missing, which {index.name} lists; download it again"
        )
    for path in paths:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise _fault(folder, f"{path.name}: corrupt ({error}); download it again") from error
        for name in file.keys():  # noqa: SIM118
            if name in files:
                raise _fault(
                    folder, f"tensor {name[:100]} is in two files; remove the one that is left over"
                )
            files[name] = file
    return files


def _check_tensors(
    folder: Path, given: Mapping[str, Any], files: Mapping[str, Any], model: Any
) -> tuple[list[int], dict[str, int]]:
    """The routed layers, and the widths by letter; checks every tensor's name, dtype and shape."""
    found: dict[int, set[str]] = {}
    base = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    tied = None
    if model.config.tie_word_embeddings:
        tied = "lm_head.weight"
    depth = given["num_hidden_layers"]
    for name in files:
        added = _ADDED.fullmatch(name)
        if added is not None and added[2] in _TENSORS and int(added[1]) < depth:
            found.setdefault(int(added[1]), set()).add(added[2])
        elif name not in base:
            raise _fault(
                folder,
                f"unexpected tensor {name[:100]}; neither Llama nor FlexiDepth's layout has it",
            )
    layers = sorted(found)
    if not layers:
        raise _fault(folder, "no layer has a router; is it a plain model?")
    listed = given.get("routing_layers", layers)
    if listed != layers:
        raise _fault(
            folder,
            f"config.json: routing_layers={reprlib.repr(listed)}, and {reprlib.repr(layers)} have "
            "routers",
        )
    wanted = [f"model.layers.{layer}.{part}" for layer in layers for part in _TENSORS]
    for name in (*wanted, *base):
        if name not in files and name != tied:
            raise _fault(folder, f"tensor {name} is missing; download it again")
    entry = {name: files[name].get_slice(name) for name in files}
    first = f"model.layers.{layers[0]}"
    narrow = entry[f"{first}.router.router_norm.weight"].get_shape() or [0]
    branch = entry[f"{first}.router_proj.down_proj.weight"].get_shape() or [0]
    letters = {"d": int(given["hidden_size"]), "1": 1, "b": narrow[0], "r": branch[0]}
    shapes = base | {
        name: tuple(letters[letter] for letter in _TENSORS[name.split(".", 3)[3]][2])
        for name in wanted
    }
    for name, part in entry.items():
        if tuple(part.get_shape()) != shapes[name]:
            raise _fault(
                folder, f"tensor {name} has shape {part.get_shape()}, not {list(shapes[name])}"
            )
        if part.get_dtype() not in _FLOATS:
            raise _fault(
                folder,
                f"tensor {name} has dtype {part.get_dtype()}; use one of: {', '.join(_FLOATS)}",
            )
    return layers, letters


def _fill(folder: Path, routing: Routing, files: Mapping[str, Any]) -> None:
    parts: dict[str, Any] = {
        "gate": routing.depth_route_gate["default"],
        "branch": routing.depth_route_branch["default"],
    }
    assert isinstance(parts["gate"], BottleneckGate)
    tensors = {name: (part, own) for name, (part, own, _) in _TENSORS.items()}
    for stored, (part, own) in (tensors | _BRANCH_NORM).items():
        name = f"model.layers.{routing.layer_index}.{stored}"
        value = files[name].get_tensor(name).float()
        if fault := fault_of_values(name, value):
            raise _fault(folder, f"tensor {name} {fault}; download it again")
        parts[part].get_parameter(own).data.copy_(value)


def _fault(folder: Path, what: str) -> AdapterMismatchError:
    return AdapterMismatchError(f"{folder}: {what}")
