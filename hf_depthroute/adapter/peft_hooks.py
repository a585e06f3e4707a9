"""Reading, loading and saving, where PEFT asks the whole library and not the method.

`PeftConfig.from_json_file` is what every path reads a config with before it touches a model; here it is strict.
`PeftModel.from_pretrained` and `load_adapter` inject before they read the weights; here what fails is taken out again.
`PeftModel.save_pretrained` writes in place; here it stages and renames. `print_trainable_parameters` counts; here it
says what is routed too. A tuner of another method takes over the config of an adapter that has its name; here it is
refused. All are wrapped once, on import; adapters of other methods pass through unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel
from peft.config import PeftConfigMixin
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import save_and_load
from safetensors import SafetensorError

from ..config.adapter import ConfigError, DepthRouteConfig
from ..files.shown import reason, say
from ..routing.description import routed_lines
from ..routing.holder import Routing
from .files import PEFT_TYPE, WEIGHTS_NAME, AdapterMismatchError, check_folder, read_config
from .loading import discard
from .saving import save_whole, settle

_METHOD = re.compile(rb'"peft_type"\s{0,99}:\s{0,99}"([A-Z0-9_]{1,99})"')
_LONGEST = 512  # more than the pattern takes
_LOADING: ContextVar[tuple[Any, str] | None] = ContextVar("_LOADING", default=None)  # a model and an adapter's name
_HUB = ("subfolder", "revision", "cache_dir", "token")
_MARK = "_depth_route_wrapped"
# What else `print_trainable_parameters` says of a model: a line each, or None where there is nothing to say.
remarks: list[Callable[[PeftModel], str | None]] = []


def install() -> None:
    """Wrap them; a second call does nothing."""
    if hasattr(PeftModel.save_pretrained, _MARK):
        return
    _wrap(PeftModel, "save_pretrained", save_whole)
    _wrap(PeftModel, "from_pretrained", _from_pretrained)
    _wrap(PeftModel, "load_adapter", _load_adapter)
    _wrap(PeftModel, "print_trainable_parameters", _print_trainable_parameters)
    _wrap(PeftConfigMixin, "from_json_file", _from_json_file)
    _wrap(save_and_load, "torch_load", _torch_load)
    _wrap(BaseTuner, "__init__", _init_tuner)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put `around` in the place of `owner.name`, which it is given in front of the arguments."""
    found = vars(owner)[name]
    original = getattr(found, "__func__", found)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, classmethod(wrapped) if isinstance(found, classmethod) else wrapped)


def _print_trainable_parameters(count: Any, self: Any) -> None:
    count(self)
    for line in [*routed_lines(self), *(remark(self) for remark in remarks)]:
        if line is not None:
            say(line)


def _init_tuner(
    start: Any, self: Any, model: Any, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> None:
    config = peft_config.get(adapter_name) if isinstance(peft_config, dict) else peft_config
    if not isinstance(config, DepthRouteConfig) and _has(model, adapter_name):
        raise ConfigError(
            f"adapter name {adapter_name!r} is taken by the depth-routed adapter on this model, and PEFT keeps one "
            f"config per name; give the other one another: adapter_name='tuned'"
        )
    start(self, model, peft_config, adapter_name, *args, **kwargs)


def _from_pretrained(
    make: Any, cls: Any, model: Any, model_id: Any, adapter_name: str = "default", *args: Any, **kwargs: Any
) -> Any:
    with _kept_where_it_is(model, model_id, kwargs), _undone(model, model_id, adapter_name):
        return make(cls, model, model_id, adapter_name, *args, **kwargs)


def _load_adapter(load: Any, self: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    loading = _LOADING.set((self, adapter_name))
    try:
        with _undone(self, model_id, adapter_name):
            return load(self, model_id, adapter_name, *args, **kwargs)
    finally:
        _LOADING.reset(loading)


def _torch_load(read: Any, *args: Any, **kwargs: Any) -> Any:
    """What PEFT takes for what is no safetensors file, refusing the pickle of a routed adapter.

    `check_folder` refuses one beside a config. It does not see what a repository of the Hub holds, nor what takes the
    place of the safetensors after it has looked.
    """
    loading = _LOADING.get()
    if loading is not None and _has(*loading):
        raise AdapterMismatchError("adapter_model.bin is a pickle; only safetensors are read")
    return read(*args, **kwargs)


@contextmanager
def _kept_where_it_is(model: Any, source: Any, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Hide how `model` is spread over devices, CPU and disk if the adapter that PEFT loads onto it is a routed one.

    PEFT takes accelerate's hooks off such a base and distributes it anew, as if all memory were free; it fails where
    weights are on disk. Routers change no base weight and go where their layer runs.
    """
    if "hf_device_map" not in vars(model) or not _is_routed(source, kwargs):
        yield
        return
    device_map = vars(model).pop("hf_device_map")
    try:
        yield
    finally:
        model.hf_device_map = device_map


def _is_routed(source: Any, kwargs: Mapping[str, Any]) -> bool:
    if kwargs.get("config") is not None:
        return isinstance(kwargs["config"], DepthRouteConfig)
    try:
        return bool(PeftConfig._get_peft_type(source, **{n: kwargs[n] for n in _HUB if n in kwargs}) == PEFT_TYPE)
    except Exception:  # PEFT looks again, and says what is wrong
        return False


@contextmanager
def _undone(model: Any, source: Any, adapter_name: str) -> Iterator[None]:
    """Take a routed adapter out again that was not there before and whose weights could not be read."""
    before = _has(model, adapter_name)
    try:
        yield
    except Exception as error:
        if not before and _has(model, adapter_name):
            discard(model, adapter_name)
            if isinstance(error, SafetensorError):
                raise AdapterMismatchError(
                    f"{source}: {WEIGHTS_NAME} is corrupt or not in safetensors format ({error}); download it again"
                ) from error
            if isinstance(error, KeyError):  # PEFT looks up the tensors of modules_to_save
                raise AdapterMismatchError(f"{source}: tensor {error} of modules_to_save is missing") from error
        raise


def _has(model: Any, adapter_name: str) -> bool:
    return any(isinstance(m, Routing) and adapter_name in m.depth_route_gate for m in model.modules())


def _from_json_file(read: Any, cls: Any, path_json_file: str, **kwargs: Any) -> Any:
    path = Path(path_json_file)
    if not path.exists():
        return read(cls, path_json_file, **kwargs)  # PEFT says why
    methods = _methods_in(path) if path.is_file() else set()
    # Without a method that is found like this it may be ours: read in bounds first.
    if PEFT_TYPE not in methods and (methods or read_config(path).get("peft_type") != PEFT_TYPE):
        return read(cls, path_json_file, **kwargs)
    try:
        return _read_ours(path)
    except AdapterMismatchError:
        settle(path.parent)
        return _read_ours(path)


def _methods_in(path: Path) -> set[str]:
    """What a config of any size says about its method, before a parser sees it.

    Lists of target modules make the configs of other methods large; what is ours, or does not say whose it is, has the
    bounds of `read_config`.
    """
    found: set[str] = set()
    rest = b""
    with contextlib.suppress(OSError), open(path, "rb") as file:  # `read_config` says why
        while chunk := file.read(1 << 20):
            found |= {method.decode() for method in _METHOD.findall(rest + chunk)}
            rest = (rest + chunk)[-_LONGEST:]
    return found


def _read_ours(path: Path) -> dict[str, Any]:
    config = read_config(path)
    try:
        DepthRouteConfig(**config)
    except (ValueError, TypeError) as error:  # ours, and what PEFT says about its own fields
        raise ConfigError(f"{path}: {reason(error)}") from error
    check_folder(path.parent, config)
    return config
