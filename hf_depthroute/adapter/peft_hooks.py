"""Reading, loading and saving, where PEFT asks the whole library and not the method.

`PeftConfig.from_json_file` is what every path reads a config with before it touches a model; here
it is strict. `PeftModel.from_pretrained` and `load_adapter`, PEFT's and transformers', inject
before they read the weights; here what fails is taken out again, and what is loaded into an adapter
that is there has to be the same adapter. `PeftModel.save_pretrained` writes in place; here it
stages and renames. `get_peft_model_state_dict` adds embeddings that were resized; here it does not.
`print_trainable_parameters` counts; here it says what is routed too. A tuner of another method
takes over the config of an adapter that has its name, and switches its `modules_to_save` off; here
it is refused. `get_peft_model` chooses a class by the task; here the model says its task where the
configuration does not. `set_adapter` goes from layer to layer; here two threads that call it take
turns. `disable_adapter` puts back what it found; here blocks that overlap end together. A batch of
several LoRAs, and an activated LoRA, need whole sequences; here their layers get them. `generate`
runs with any settings; here a routed model refuses those that would change a decision. All are
wrapped once, on import; adapters of other methods pass through unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import peft
from peft import PeftConfig, PeftModel
from peft.config import PeftConfigMixin
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import save_and_load
from safetensors import SafetensorError
from transformers import GenerationMixin
from transformers.integrations import PeftAdapterMixin

from ..config.adapter import ConfigError, DepthRouteConfig
from ..files.shown import say
from ..routing.description import routed_lines
from ..routing.stack import one_switch, routed_layers, routed_stack
from .base_check import check_base
from .checks import add_of_same_method
from .files import CONFIG_NAME, PEFT_TYPE, WEIGHTS_NAME, AdapterMismatchError
from .generation import checked_generate
from .loading import check_same, from_json_file, has_adapter, unchanged_on_error
from .modules_to_save import check_names_of_others
from .saving import save_whole
from .sequence_loras import told_of_sequences
from .source import HUB, current_load, folder_of, loading_from, read_whole
from .tasks import copies_once, make_for_task

if TYPE_CHECKING:
    from torch import nn

_MARK = "_depth_route_wrapped"
_AFTER_NAME = ("is_trainable", "config")  # arguments of `PeftModel.from_pretrained` by place
# What else `print_trainable_parameters` says of a model: a line each, or None if there is nothing
# to say.
remarks: list[Callable[[PeftModel], str | None]] = []


def install() -> None:
    """Wrap them; a second call does nothing."""
    wrap(PeftModel, "save_pretrained", save_whole)
    wrap(PeftModel, "from_pretrained", _from_pretrained)
    wrap(PeftModel, "load_adapter", _load_adapter)
    wrap(PeftModel, "add_adapter", add_of_same_method)
    wrap(PeftModel, "set_adapter", _in_turn)
    wrap(PeftModel, "disable_adapter", _turned_off)
    wrap(PeftModel, "_enable_peft_forward_hooks", told_of_sequences)
    for name in ("set_adapter", "disable_adapters", "enable_adapters"):
        wrap(PeftAdapterMixin, name, _in_turn)
    wrap(PeftAdapterMixin, "load_adapter", _load_natively)
    wrap(GenerationMixin, "generate", checked_generate)
    wrap(PeftModel, "print_trainable_parameters", _print_trainable_parameters)
    wrap(PeftConfigMixin, "from_json_file", from_json_file)
    wrap(save_and_load, "torch_load", _torch_load)
    # Each holds the function itself.
    for module in (peft, peft.peft_model, peft.utils, save_and_load):
        wrap(module, "get_peft_model_state_dict", _state_dict_of)
    wrap(peft, "get_peft_model", make_for_task)
    wrap(peft.peft_model, "_set_trainable", copies_once)
    wrap(BaseTuner, "__init__", _init_tuner)


def wrap(owner: Any, name: str, around: Callable[..., object]) -> None:
    """Replace `owner.name` by `around`, which gets the original first; done once."""
    found = vars(owner).get(name, getattr(owner, name))
    original = getattr(found, "__func__", found)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(*args: object, **kwargs: object) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, classmethod(wrapped) if isinstance(found, classmethod) else wrapped)


def _in_turn(change: Any, self: Any, *args: Any, **kwargs: object) -> Any:
    with one_switch(self):
        return change(self, *args, **kwargs)


@contextmanager
def _turned_off(disable: Any, self: Any) -> Iterator[None]:
    """`PeftModel.disable_adapter`; of blocks that overlap, the last to end turns adapters on.

    PEFT's own does so at the end of the first, inside the others; or never, where a block began at
    that moment.
    """
    stack = routed_stack(self)
    if stack is None:
        with disable(self):
            yield
        return
    blocks = stack.state.turned_off
    with one_switch(self):
        block = disable(self)
        block.__enter__()
        blocks.append(block)
    try:
        yield
    finally:
        with one_switch(self):
            blocks.pop().__exit__(None, None, None)


def _print_trainable_parameters(count: Any, self: Any) -> None:
    count(self)
    for line in [*routed_lines(self), *(remark(self) for remark in remarks)]:
        if line is not None:
            say(line)


def _init_tuner(
    start: Any, self: Any, model: Any, peft_config: Any, adapter_name: str, *args: Any, **kw: Any
) -> None:
    config = peft_config
    if isinstance(peft_config, dict):
        config = peft_config.get(adapter_name)
    if not isinstance(config, DepthRouteConfig):
        _check_other_method(model, adapter_name)
        check_names_of_others(model, getattr(config, "modules_to_save", None) or ())
    start(self, model, peft_config, adapter_name, *args, **kw)


def _check_other_method(model: nn.Module, adapter_name: str) -> None:
    """Refuse an adapter of another method that would take a name, or switch copies off."""
    if has_adapter(model, adapter_name):
        raise ConfigError(
            f"adapter name {adapter_name!r} is taken by the depth-routed adapter on this model, "
            "and PEFT keeps one config per name; give the other one another: adapter_name='tuned'"
        )
    configs = [h.config(name) for h in routed_layers(model) for name in h.depth_route_gate]
    copied = next((config.modules_to_save for config in configs if config.modules_to_save), None)
    if copied is not None:
        raise ConfigError(
            f"the depth-routed adapter on this model has modules_to_save={copied}, and PEFT would "
            "switch the copies off next to an adapter of another method; unload it first, or give "
            "modules_to_save to the other one"
        )


def _from_pretrained(
    make: Any,
    cls: Any,
    model: nn.Module,
    model_id: object,
    adapter_name: str = "default",
    *args: object,
    **kwargs: object,
) -> Any:
    config = dict(zip(_AFTER_NAME, args)).get("config", kwargs.get("config"))

    def read() -> Any:
        with (
            _kept_where_it_is(model, model_id, kwargs),
            _vouched_by_files(config, model_id, model, kwargs),
        ):
            return make(cls, model, model_id, adapter_name, *args, **kwargs)

    return _loaded(read, model, adapter_name, model_id, kwargs)


@contextmanager
def _vouched_by_files(
    config: object, source: object, base: nn.Module, kwargs: Mapping[str, object]
) -> Iterator[None]:
    """Inside the block `config`, which a caller gives for the weights in `source`,
    asks for those that the config there vouches for, if there is one."""
    folder = folder_of(source, kwargs)
    alone = folder.is_dir() and not (folder / CONFIG_NAME).is_file()
    if not isinstance(config, DepthRouteConfig) or alone:
        yield
        return
    hub = {name: kwargs[name] for name in HUB if name in kwargs}
    before = config.weights_hash
    try:
        config.weights_hash = _check_reload(source, config, base, hub, given=True).weights_hash
    except (ConfigError, AdapterMismatchError):
        raise
    except ValueError:  # the Hub has the weights alone
        yield
        return
    try:
        yield
    finally:
        config.weights_hash = before


def _load_adapter(
    load: Any, self: Any, model_id: object, adapter_name: str, *args: Any, **kwargs: object
) -> Any:
    # None while `from_pretrained` loads: the adapter has just been injected for this.
    config = None
    if current_load() is None:
        config = self.peft_config.get(adapter_name)
    base = self.base_model
    if isinstance(base, BaseTuner):
        base = base.model

    def read() -> Any:
        with _kept_where_it_is(base, model_id, kwargs):
            if not isinstance(config, DepthRouteConfig):
                return load(self, model_id, adapter_name, *args, **kwargs)
            saved = _check_reload(model_id, config, base, self._split_kwargs(kwargs)[0])
            config.weights_hash = saved.weights_hash
            try:
                loaded = load(self, model_id, adapter_name, *args, **kwargs)
            finally:
                config.weights_hash = None
            config.share_shifts = saved.share_shifts
            _forget_measured(base, adapter_name)
            return loaded

    return _loaded(read, self, adapter_name, model_id, kwargs)


def _forget_measured(base: Any, adapter_name: str) -> None:
    """Drop the record of an adapter's training and its shares: they were of the weights before."""
    for routing in routed_layers(base):
        routing.runs.pop(adapter_name, None)
        quantiles: Any = routing.depth_route_quantiles._modules.get(adapter_name)
        if quantiles is not None:
            quantiles.measured = None


def _load_natively(
    load: Any,
    self: Any,
    peft_model_id: Any = None,
    adapter_name: str | None = None,
    *args: object,
    **kwargs: Any,
) -> Any:
    name = "default" if adapter_name is None else adapter_name
    asked = (
        kwargs.get("adapter_kwargs"),
        getattr(kwargs.get("load_config"), "download_kwargs", None),
        kwargs,
    )
    hub = {key: value for part in asked for key, value in (part or {}).items()}
    read = partial(load, self, peft_model_id, adapter_name, *args, **kwargs)
    return _loaded(read, self, name, peft_model_id, hub)


def _loaded(
    read: Callable[[], object],
    model: nn.Module,
    adapter_name: str,
    source: object,
    hub: Mapping[str, object],
) -> Any:
    """`read()`, which loads an adapter onto `model`; again where it has been saved meanwhile."""

    def undone() -> Any:
        with loading_from(model, adapter_name, source, hub), _undone(model, source, adapter_name):
            return read()

    return read_whole(folder_of(source, hub), undone)


def _check_reload(
    source: Any,
    config: DepthRouteConfig,
    base: nn.Module,
    hub: Mapping[str, Any],
    given: bool = False,
) -> DepthRouteConfig:
    """The configuration in `source`, checked against that of the model, or one that is `given`."""
    saved = PeftConfig.from_pretrained(source, **hub)
    if not isinstance(saved, DepthRouteConfig):
        other = "the one of that name in the model is"
        if given:
            other = "the config that was given is of one"
        raise AdapterMismatchError(f"{source}: is no depth-routed adapter, and {other}")
    try:
        check_same(config, saved, given)
        check_base(base, saved.base_architecture or {})
    except AdapterMismatchError as error:
        raise AdapterMismatchError(f"{source}: {error}") from error
    return saved


def _state_dict_of(
    read: Any,
    model: Any,
    state_dict: object = None,
    adapter_name: str = "default",
    unwrap_compiled: bool = False,
    save_embedding_layers: bool | str = "auto",
) -> Any:
    if isinstance(model.peft_config[adapter_name], DepthRouteConfig):
        if save_embedding_layers not in ("auto", False):
            raise ConfigError(
                f"save_embedding_layers={save_embedding_layers!r}: the file of a routed adapter "
                "holds no weights of the base; name the embeddings in modules_to_save, or save "
                "the base too"
            )
        save_embedding_layers = False
    return read(model, state_dict, adapter_name, unwrap_compiled, save_embedding_layers)


def _torch_load(read: Any, *args: Any, **kwargs: object) -> Any:
    """PEFT's loader of other formats than safetensors, but for a routed adapter's pickle.

    `check_folder` refuses one next to a config; it does not see what the Hub holds, nor what takes
    the place of the safetensors afterwards.
    """
    load = current_load()
    if load is not None and has_adapter(load.model, load.adapter_name):
        raise AdapterMismatchError("adapter_model.bin is a pickle; only safetensors are read")
    return read(*args, **kwargs)


@contextmanager
def _kept_where_it_is(
    model: nn.Module, source: object, kwargs: Mapping[str, object]
) -> Iterator[None]:
    """Hide from PEFT how `model` is spread over devices, CPU and disk if its adapter is a router.

    PEFT distributes such a base anew, as if all memory were free, and fails where weights are on
    disk. Routers change no base weight and go where their layer runs.
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
    hub = {name: kwargs[name] for name in HUB if name in kwargs}
    try:
        return bool(PeftConfig._get_peft_type(source, **hub) == PEFT_TYPE)
    except Exception:  # PEFT looks again, and says what is wrong
        return False


@contextmanager
def _undone(model: nn.Module, source: object, adapter_name: str) -> Iterator[None]:
    """Take a new routed adapter out again whose weights could not be read."""
    before = has_adapter(model, adapter_name)
    added = False
    try:
        with unchanged_on_error(model, adapter_name):
            try:
                yield
            finally:
                added = not before and has_adapter(model, adapter_name)
    except Exception as error:
        if added:
            if isinstance(error, SafetensorError):
                raise AdapterMismatchError(
                    f"{source}: {WEIGHTS_NAME} is corrupt or not in safetensors format ({error}); "
                    "download it again"
                ) from error
            if isinstance(error, KeyError):  # PEFT looks up the tensors of modules_to_save
                raise AdapterMismatchError(
                    f"{source}: tensor {error} of modules_to_save is missing"
                ) from error
        raise
