"""Reading, loading and saving, where PEFT asks the whole library and not the method.

`PeftConfig.from_json_file` is what every path reads a config with before it touches a model; here it is strict.
`PeftModel.from_pretrained` and `load_adapter` inject before they read the weights; here what fails is taken out again.
`PeftModel.save_pretrained` writes in place; here it stages and renames, and writes the card of what was saved;
`push_to_hub` sends that card. `print_trainable_parameters` counts; here it says what is routed too. A tuner of another
method takes over the config of an adapter that has its name; here it is refused. All are wrapped once, on import;
adapters of other methods pass through unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from peft import PeftModel
from peft.config import PeftConfigMixin
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import save_and_load
from safetensors import SafetensorError

from .adapter_file import PEFT_TYPE, WEIGHTS_NAME, AdapterMismatchError, check_folder, read_config
from .card.push import with_card
from .card.saved import instead_of_pefts
from .config import ConfigError, DepthRouteConfig
from .cost import cost_remark
from .holder import Routing
from .loading import discard
from .placement import kept_where_it_is
from .saving import atomically, settle
from .shown import reason, say
from .summary import routed_lines

_METHOD = re.compile(rb'"peft_type"\s{0,99}:\s{0,99}"([A-Z0-9_]{1,99})"')
_LONGEST = 512  # more than the pattern takes
_LOADING: ContextVar[tuple[Any, str] | None] = ContextVar("_LOADING", default=None)  # a model and an adapter's name
_MARK = "_depth_route_wrapped"


def install() -> None:
    """Wrap them; a second call does nothing."""
    if hasattr(PeftModel.save_pretrained, _MARK):
        return
    saver = atomically(PeftModel.save_pretrained)
    setattr(saver, _MARK, True)
    PeftModel.save_pretrained = saver  # type: ignore[method-assign]
    reader: Any = PeftConfigMixin.from_json_file.__func__  # type: ignore[attr-defined]
    PeftConfigMixin.from_json_file = classmethod(_strictly(reader))  # type: ignore[method-assign,assignment]
    maker: Any = PeftModel.from_pretrained.__func__  # type: ignore[attr-defined]
    PeftModel.from_pretrained = classmethod(_undoing_new(maker))  # type: ignore[method-assign,assignment]
    PeftModel.load_adapter = _undoing_added(PeftModel.load_adapter)  # type: ignore[method-assign]
    save_and_load.torch_load = _unless_ours(save_and_load.torch_load)
    PeftModel.print_trainable_parameters = _and_routed(  # type: ignore[method-assign]
        PeftModel.print_trainable_parameters
    )
    BaseTuner.__init__ = _leaving_our_names(BaseTuner.__init__)  # type: ignore[method-assign]
    updater: Any = PeftModel.create_or_update_model_card
    PeftModel.create_or_update_model_card = instead_of_pefts(updater)  # type: ignore[method-assign,assignment]
    PeftModel.push_to_hub = with_card(PeftModel.push_to_hub)  # type: ignore[method-assign]


def _and_routed(count: Any) -> Any:
    @functools.wraps(count)
    def print_trainable_parameters(self: Any) -> None:
        count(self)
        remark = cost_remark(self)
        for line in [*routed_lines(self), *([remark] if remark else [])]:
            say(line)

    return print_trainable_parameters


def _leaving_our_names(start: Any) -> Any:
    @functools.wraps(start)
    def __init__(self: Any, model: Any, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        config = peft_config.get(adapter_name) if isinstance(peft_config, dict) else peft_config
        if not isinstance(config, DepthRouteConfig) and _has(model, adapter_name):
            raise ConfigError(
                f"adapter name {adapter_name!r} is taken by the depth-routed adapter on this model, and PEFT keeps one "
                f"config per name; give the other one another: adapter_name='tuned'"
            )
        start(self, model, peft_config, adapter_name, *args, **kwargs)

    return __init__


def _undoing_new(make: Any) -> Any:
    @functools.wraps(make)
    def from_pretrained(
        cls: Any, model: Any, model_id: Any, adapter_name: str = "default", *args: Any, **kwargs: Any
    ) -> Any:
        with kept_where_it_is(model, model_id, kwargs), _undone(model, model_id, adapter_name):
            return make(cls, model, model_id, adapter_name, *args, **kwargs)

    return from_pretrained


def _undoing_added(load: Any) -> Any:
    @functools.wraps(load)
    def load_adapter(self: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        loading = _LOADING.set((self, adapter_name))
        try:
            with _undone(self, model_id, adapter_name):
                return load(self, model_id, adapter_name, *args, **kwargs)
        finally:
            _LOADING.reset(loading)

    return load_adapter


def _unless_ours(read: Any) -> Any:
    """`torch_load`, which PEFT takes for what is no safetensors file, refusing the pickle of a routed adapter.

    `check_folder` refuses one beside a config. It does not see what a repository of the Hub holds, nor what takes the
    place of the safetensors after it has looked.
    """

    @functools.wraps(read)
    def torch_load(*args: Any, **kwargs: Any) -> Any:
        loading = _LOADING.get()
        if loading is not None and _has(*loading):
            raise AdapterMismatchError("adapter_model.bin is a pickle; only safetensors are read")
        return read(*args, **kwargs)

    return torch_load


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


def _strictly(read: Any) -> Any:
    @functools.wraps(read)
    def from_json_file(cls: Any, path_json_file: str, **kwargs: Any) -> Any:
        path = Path(path_json_file)
        if not path.exists():
            return read(cls, path_json_file, **kwargs)  # PEFT says why
        methods = _methods_in(path) if path.is_file() else set()
        if methods and PEFT_TYPE not in methods:
            return read(cls, path_json_file, **kwargs)
        # Ours, or its method is not to be found like this: in bounds first.
        ours = PEFT_TYPE in methods or read_config(path).get("peft_type") == PEFT_TYPE
        return _read_ours(path) if ours else read(cls, path_json_file, **kwargs)

    return from_json_file


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
    try:
        return _checked(path)
    except AdapterMismatchError:
        settle(path.parent)
        return _checked(path)


def _checked(path: Path) -> dict[str, Any]:
    config = read_config(path)
    try:
        DepthRouteConfig(**config)
    except (ValueError, TypeError) as error:  # ours, and what PEFT says about its own fields
        raise ConfigError(f"{path}: {reason(error)}") from error
    check_folder(path.parent, config)
    return config
