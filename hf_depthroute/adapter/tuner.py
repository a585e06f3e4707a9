"""PEFT integration: inject the adapter, name its keys, load it strictly, take it out again."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import register_peft_method
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from ..base.lm_head import LMHead
from ..base.stack import Stack, keeping
from ..base.sublayers import width_of
from ..config.adapter import ConfigError, DepthRouteConfig, register_peft_type
from ..files.shown import DepthRouteWarning
from ..parts.gate import default_hidden
from ..parts.gates import GATES
from ..parts.targets import TARGETS
from ..routing.routing import ROUTING, Routing
from ..routing.stack import RoutedStack, one_switch
from ..routing.state import RunState
from ..routing.trace import full_depth
from .base_check import describe_base
from .checks import check_injection, check_name_is_free, default_rank
from .injection import enter
from .labels import hook_labels
from .loading import (
    PREFIX,
    discard,
    guard,
    kept_trained,
    match_tensors,
    own_tensors,
    take_out,
    without_adapter_name,
)
from .modules_to_save import copies_that_train, copy_modules, set_copies, unwrap
from .peft_hooks import install
from .source import check_tables, current_load
from .tasks import for_task, make_for_task

# Called after every injection.
after_injection: list[Callable[[], None]] = []


def get_depth_routed_model(
    model: nn.Module,
    config: DepthRouteConfig | None = None,
    adapter_name: str = "default",
    **kwargs: object,
) -> PeftModel:
    """Inject routers and cheap branches into `model`; only they train.

    The same as `peft.get_peft_model(model, config, adapter_name)`, except that `config` stays as it
    is.

    Args:
        model: A transformers model of a supported family. It is changed in place.
        config: What to inject. None: `DepthRouteConfig()`, the FFNs of the last third of the layers
            at a budget of 0.5.
        adapter_name: 1 to 64 letters, digits, `_` or `-`.
        **kwargs: Passed to `peft.get_peft_model`.

    Raises:
        UnsupportedModelError: The model's family is not supported; the model is untouched.
        ConfigError: A layer index is out of range for this model; the model is untouched.
        TypeError: `config` is of another PEFT method.
    """
    if config is not None and not isinstance(config, DepthRouteConfig):
        raise TypeError(
            f"get_depth_routed_model takes a DepthRouteConfig, not {type(config).__name__}; "
            "peft.get_peft_model is for other methods"
        )
    config = copy.deepcopy(config) or DepthRouteConfig()
    return make_for_task(get_peft_model, model, config, adapter_name=adapter_name, **kwargs)


class DepthRouteModel(BaseTuner):
    """The tuner of a depth-routed `PeftModel`.

    Every decoder layer's class is switched to one subclass; layers that are routed get one child,
    `routing` (`hf_depthroute.routing.routing.Routing`), that holds all adapter state. Base weights
    and their names do not change.
    """

    prefix = PREFIX
    tuner_layer_cls = Routing
    _copies_train: list[tuple[nn.Parameter, bool]] | None = None  # while the adapters are off

    def __init__(
        self, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(model, PeftModel):
            raise ConfigError(
                "the model is wrapped in a PeftModel already; inject into its base: "
                "get_depth_routed_model(model.get_base_model(), config, adapter_name=...)"
            )
        # First: PEFT overwrites the config of an adapter of the same name.
        check_name_is_free(model, adapter_name)
        super().__init__(model, peft_config, adapter_name, *args, **kwargs)
        # Our own reference: another method that is unloaded from the model deletes the model's.
        self.__dict__["peft_config"] = self.peft_config

    def inject_adapter(
        self, model: nn.Module, adapter_name: str, *args: object, **kwargs: object
    ) -> None:
        """Add adapter `adapter_name`. All checks come first; when one fails, `model` is untouched.

        With the very configuration that an adapter of the model has,
        `model.peft_config["default"]`, the new one is a copy of it, thresholds included: TRL makes
        its reference like this, and copies parameters alone.
        """
        config = cast(DepthRouteConfig, self.peft_config[adapter_name])
        same = (name for name, held in self.peft_config.items() if held is config)
        twin = next((name for name in same if name != adapter_name), None)
        try:
            with keeping(model) as stack:
                if isinstance(config, DepthRouteConfig):
                    config = for_task(model, config)
                routed = check_injection(model, adapter_name, config, stack)
                check_tables(config)
        except Exception:
            del self.peft_config[adapter_name]
            raise

        attends = any(TARGETS[target].skips_attention for target in config.targets())
        if attends and config.granularity == "token" and stack.family.queries is None:
            warnings.warn(
                f"{type(model).__name__}: attention that is skipped per token is computed and "
                "masked in this family; nothing is saved there",
                DepthRouteWarning,
                stacklevel=2,
            )
        self.peft_config[adapter_name] = config  # a copy: the caller's fits other bases too
        _fill_in(config, routed, stack)
        config.base_architecture = describe_base(model)
        if current_load() is None:
            config.weights_hash = None  # of weights that this adapter does not start from

        restore = kept_trained(model)
        added = adapter_name not in self.active_adapters  # an active one goes on as it was
        try:
            self._enter(model, adapter_name, config, stack)
            if twin is not None:
                _copy_adapter(model, twin, adapter_name)
        except BaseException:
            self.peft_config.pop(adapter_name)
            discard(model, adapter_name)
            restore()
            raise
        if added:
            restore()
        for call in after_injection:
            call()

    def _enter(self, model: nn.Module, name: str, config: DepthRouteConfig, stack: Stack) -> None:
        """Change the model, after all checks."""
        enter(stack)
        guard(model)
        hook_labels(model, stack.decoder)
        self._fill(model, name, config, stack)
        self._mark_only_adapters_as_trainable(model)
        copy_modules(model, config, name, active=name in self.active_adapters)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def _fill(self, model: nn.Module, name: str, config: DepthRouteConfig, stack: Stack) -> None:
        """Add the adapter's parts to the layers it routes, and connect what reads elsewhere."""
        gate = GATES[config.gate]
        owner: Routing | None = None
        family = stack.family
        layers = stack.layers
        state = stack.state if isinstance(stack, RoutedStack) else RunState()
        _drop_empty_routings(layers)
        for index in cast("list[int]", config.layers):
            layer = layers[index]
            if ROUTING not in layer._modules:
                new = Routing(index, family, layer, self.peft_config, state)
                setattr(layer, ROUTING, new.train(layer.training))
            routing: Routing = getattr(layer, ROUTING)
            routing.peft_configs = self.peft_config
            routing.add_adapter(name, config)
            if gate.predicts_outcomes and config.gate_of(index) == config.gate:
                owner = owner or routing
                routing.add_projection(name, config, owner)
            if gate.reads_logits and config.gate_of(index) == config.gate:
                routing.gate(name).connect(LMHead(model))
            self.targeted_module_names.append(f"{index}.{ROUTING}")
        held = (layer._modules.get(ROUTING) for layer in layers)
        routed = tuple(cast(Routing, routing) for routing in held if routing is not None)
        RoutedStack(family, stack.decoder, routed, state).keep()

    def generate(self, *args: object, **kwargs: object) -> Any:
        """`generate` of the base model, which raises what `check_generation` does.

        With a draft view as `assistant_model`, the model verifies at full depth.
        """
        if getattr(kwargs.get("assistant_model"), "verified_at_full_depth", False):
            with full_depth(self.model):
                return self.model.generate(*args, **kwargs)
        return self.model.generate(*args, **kwargs)

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Activate routed adapters and their copies; other methods' copies stay as they are."""
        names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
        with one_switch(self.model):
            for routing in self._routings():
                routing.set_adapter(names, inference_mode=inference_mode)
            configs = self.peft_config.items()
            routed = {name for name, config in configs if isinstance(config, DepthRouteConfig)}
            set_copies(self.model, routed, names, inference_mode)
            self.active_adapter = adapter_name

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter; in the place of the only active one, the first that is left is active.

        PEFT's own has each layer choose among those that it holds, and it may hold no other.
        """
        with one_switch(self.model):
            configs = self.peft_config.items()
            routed = [name for name, config in configs if isinstance(config, DepthRouteConfig)]
            left = [name for name in routed if name != adapter_name]
            if self.active_adapters == [adapter_name] and left:
                warnings.warn(
                    f"Adapter {adapter_name} was active which is now deleted. Setting active "
                    f"adapter to {left[0]}.",
                    stacklevel=3,
                )
                self.set_adapter(left[0])
            super().delete_adapter(adapter_name)

    def unload(self) -> nn.Module:
        """Remove every routed adapter; the model is as before injection, other methods included."""
        take_out(self.model)
        for name, config in list(self.peft_config.items()):
            if isinstance(config, DepthRouteConfig):
                del self.peft_config[name]
                unwrap(self.model, name)
        if self.peft_config:
            return cast(nn.Module, self.model)
        return cast(nn.Module, super()._unload_and_optionally_merge(merge=False))

    def merge_and_unload(self, *args: object, **kwargs: object) -> nn.Module:
        raise ValueError(
            "a depth-routed adapter cannot be merged: routing depends on the input. "
            "Use unload() to get the base model back"
        )

    def disable_adapter_layers(self) -> None:
        """Turn the adapters off; which of the base modules' copies train is remembered."""
        with one_switch(self.model):
            if self._copies_train is None:
                self._copies_train = copies_that_train(self.model, set(self.peft_config))
            super().disable_adapter_layers()

    def enable_adapter_layers(self) -> None:
        """Turn the adapters on again; unlike PEFT's own, it leaves frozen copies frozen."""
        with one_switch(self.model):
            super().enable_adapter_layers()
            for parameter, trained in self._copies_train or ():
                parameter.requires_grad_(trained)
            self._copies_train = None

    def merge_adapter(self, *args: object, **kwargs: object) -> None:
        self.merge_and_unload()

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Parts are made in float32; where PEFT is asked not to keep that, they take the base's."""
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
        if autocast_adapter_dtype:
            return
        for routing in self._routings():
            routing.hold_in_base_dtype(adapter_name)

    def _routings(self) -> list[Routing]:
        return [module for module in self.model.modules() if isinstance(module, Routing)]

    @classmethod
    def _get_adapter_state_dict(  # type: ignore[override]
        cls, *, adapter_name: str, state_dict: dict[str, torch.Tensor], **kwargs: object
    ) -> dict[str, torch.Tensor]:
        """This adapter's tensors only, not those of other PEFT methods on the same model."""
        return own_tensors(state_dict, adapter_name)

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        """The name follows `depth_route_*`, before a nested module: PEFT does not look there."""
        bare = without_adapter_name(key, adapter_name)
        return bare or super()._remove_adapter_name_from_key(key, adapter_name)

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls,
        model: nn.Module,
        config: PeftConfig,
        adapter_name: str,
        state_dict: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Checkpoint keys to model keys.

        Raises:
            AdapterMismatchError: A tensor is missing, left over, of another shape, or not finite;
                the model is as it was before the call.
        """
        return match_tensors(model, config, adapter_name, state_dict)

    def _create_and_replace(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError("depth-routed adapters are injected by inject_adapter")


def _fill_in(config: DepthRouteConfig, routed: list[int], stack: Stack) -> None:
    """Fill in what the configuration leaves to the model: layers, and widths."""
    ffns = {index: getattr(stack.layers[index], stack.family.ffn) for index in routed}
    width = width_of(stack.layers[0], stack.family)
    config.layers = routed
    config.static_layers = sorted(config.static_layers or ()) or None
    config.branch_rank = config.branch_rank or default_rank(config, width, ffns[routed[0]])
    ranks = dict(config.rank_pattern or {})
    for index, branch in (config.branch_pattern or {}).items():
        if branch != config.branch and index not in ranks:
            ranks[index] = default_rank(config, width, ffns[index], index)
    config.rank_pattern = dict(sorted(ranks.items())) or None
    divisor = GATES[config.gate].hidden_divisor
    config.gate_hidden = config.gate_hidden or default_hidden(width, divisor)


def _drop_empty_routings(layers: Iterable[nn.Module]) -> None:
    """Take out what deleted adapters left: transformers asks the first routing what is active."""
    for layer in layers:
        routing = layer._modules.get(ROUTING)
        if routing is not None and not routing.depth_route_gate:
            del layer._modules[ROUTING]


def _copy_adapter(model: nn.Module, source: str, name: str) -> None:
    """Give adapter `name` the tensors of `source`, which has the same configuration."""
    for module in model.modules():
        groups: list[Any] = []
        if isinstance(module, Routing):
            names = module.adapter_layer_names + module.other_param_names
            groups = [getattr(module, name_of_group) for name_of_group in names]
        elif isinstance(module, ModulesToSaveWrapper):
            groups = [module.modules_to_save]
        for group in groups:
            if name in group and source in group:
                group[name].load_state_dict(group[source].state_dict())


def register() -> None:
    """Make PEFT know the method; a second call does nothing."""
    install()
    if register_peft_type() not in PEFT_TYPE_TO_TUNER_MAPPING:
        register_peft_method(
            name=PREFIX.rstrip("_"), config_cls=DepthRouteConfig, model_cls=DepthRouteModel
        )
