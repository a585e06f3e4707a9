"""PEFT integration: inject the adapter, name its keys, load it strictly, take it out again."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import register_peft_method
from peft.utils.other import set_additional_trainable_modules
from torch import nn

from .config import ConfigError, DepthRouteConfig, register_peft_type
from .families import describe_base, find_decoder, find_family
from .gates import default_hidden
from .layer import HOLDER, TOKEN_MASK, Routing, swap, unswap

PREFIX = "depth_route_"

# Checkpoint key: base_model.model.model.layers.3.routing.depth_route_gate.hidden.weight
# Model key:      base_model.model.model.layers.3.routing.depth_route_gate.default.hidden.weight
_OWN_KEY = re.compile(rf"\.{HOLDER}\.{PREFIX}[a-z]+\.")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class AdapterMismatchError(ValueError):
    """An adapter does not belong to this model, or its file does not hold exactly the adapter's tensors."""


def get_depth_routed_model(
    model: nn.Module, config: DepthRouteConfig, adapter_name: str = "default", **kwargs: Any
) -> PeftModel:
    """Inject routers and cheap branches into `model`; only they train.

    The same as `peft.get_peft_model(model, config, adapter_name)`, except that `config` is copied and the task type
    defaults to causal language modelling.

    Args:
        model: A transformers model of a supported family. It is changed in place.
        config: What to inject.
        adapter_name: 1 to 64 letters, digits, `_` or `-`.
        **kwargs: Passed to `peft.get_peft_model`.

    Raises:
        UnsupportedModelError: The model's family is not supported; the model is untouched.
        ConfigError: A layer index is out of range for this model; the model is untouched.
    """
    config = copy.deepcopy(config)
    if config.task_type is None:
        config.task_type = "CAUSAL_LM"
    return get_peft_model(model, config, adapter_name=adapter_name, **kwargs)


class DepthRouteModel(BaseTuner):
    """The tuner behind a depth-routed `PeftModel`.

    Every decoder layer's class is switched to one subclass; layers that are routed get one child, `routing`
    (`hf_depthroute.layer.Routing`), that holds all adapter state. Base weights and their names do not change.
    """

    prefix = PREFIX
    tuner_layer_cls = Routing
    target_module_mapping: dict[str, list[str]] = {}

    def inject_adapter(
        self,
        model: nn.Module,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Add adapter `adapter_name`. All checks come first; when one fails, `model` is untouched."""
        config = self.peft_config[adapter_name]
        try:
            family = find_family(model)
            decoder = find_decoder(model, family)
            layers = getattr(decoder, family.layers)
            routed = self._check(model, adapter_name, config, depth=len(layers))
        except ValueError:
            del self.peft_config[adapter_name]
            raise

        width = getattr(layers[0], family.ffn_norm).weight.shape[-1]
        config.layers = routed
        config.branch_rank = config.branch_rank or max(1, width // 8)
        config.gate_hidden = config.gate_hidden or default_hidden(width)
        config.base_architecture = describe_base(model)

        if not hasattr(layers[0], "_depth_route_base"):
            decoder.register_forward_pre_hook(_pass_token_mask, with_kwargs=True)
        for layer in layers:
            swap(layer)
        owner: Routing | None = None
        for index in routed:
            layer = layers[index]
            if HOLDER not in layer._modules:
                norm = getattr(layer, family.ffn_norm)
                holder = Routing(index, family, norm, self.peft_config)
                holder.train(layer.training)
                setattr(layer, HOLDER, holder)
            holder = getattr(layer, HOLDER)
            holder.peft_configs = self.peft_config
            ffn_bias = any(n.endswith("bias") for n, _ in getattr(layer, family.ffn).named_parameters())
            holder.add_adapter(adapter_name, config, width, ffn_bias)
            if config.gate == "jepa":
                owner = owner or holder
                holder.add_projection(adapter_name, config, width, owner)
            self.targeted_module_names.append(f"{index}.{HOLDER}")

        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)
        self._mark_only_adapters_as_trainable(model)
        set_additional_trainable_modules(
            model=model,
            peft_config=config,
            model_config=BaseTuner.get_model_config(self),
            adapter_name=adapter_name,
            activate_adapter=adapter_name in self.active_adapters,
        )

    def _check(self, model: nn.Module, name: str, config: PeftConfig, depth: int) -> list[int]:
        if not isinstance(config, DepthRouteConfig):
            raise ConfigError(f"adapter {name!r}: expected a DepthRouteConfig, got {type(config).__name__}")
        if not _NAME.fullmatch(name):
            raise ConfigError(f"adapter name {name!r} must be 1 to 64 letters, digits, '_' or '-'")
        for module in model.modules():
            if isinstance(module, Routing):
                if name in module.depth_route_gate:
                    raise ConfigError(f"there already is a depth-routed adapter named {name!r}; choose another name")
            elif isinstance(module, BaseTunerLayer) and name in module._get_available_adapters():
                kind = type(module).__module__.split(".")[-2]
                raise ConfigError(
                    f"adapter name {name!r} is taken by a {kind} adapter on this model; pass adapter_name='depth_route'"
                )
        here = describe_base(model)
        for key, wanted in (config.base_architecture or {}).items():
            if key not in here or here[key] != wanted:
                raise AdapterMismatchError(
                    f"this adapter was made for another base model: {key} is {wanted}, this model has {here.get(key)}"
                )
        return config.routed_layers(depth)

    def unload(self) -> nn.Module:
        """Remove every routed adapter; the base model, as it was before injection."""
        family = find_family(self.model)
        decoder = find_decoder(self.model, family)
        for layer in getattr(decoder, family.layers):
            unswap(layer)
        for key, hook in list(decoder._forward_pre_hooks.items()):
            if hook is _pass_token_mask:
                del decoder._forward_pre_hooks[key]
                decoder._forward_pre_hooks_with_kwargs.pop(key, None)
        return super()._unload_and_optionally_merge(merge=False)

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> nn.Module:
        raise ValueError(
            "a depth-routed adapter cannot be merged: routing depends on the input. "
            "Use unload() to get the base model back"
        )

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        self.merge_and_unload()

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: PeftConfig,
        adapter_name: str,
        state_dict: dict[str, torch.Tensor],
        unwanted_adapter_names: list[str],
    ) -> dict[str, torch.Tensor]:
        """This adapter's tensors only, not those of other PEFT methods on the same model."""
        mine = re.compile(rf"{_OWN_KEY.pattern}{re.escape(adapter_name)}\.")
        return {key: value for key, value in state_dict.items() if mine.search(key)}

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        """The name stands behind `depth_route_*`, in front of a nested module, where PEFT does not look for it."""
        found = _OWN_KEY.search(key)
        if found is None:
            return super()._remove_adapter_name_from_key(key, adapter_name)
        return key[: found.end()] + key[found.end() :].removeprefix(f"{adapter_name}.")

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: PeftConfig, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Checkpoint keys to model keys.

        Raises:
            AdapterMismatchError: A tensor is missing, left over, of another shape, or not finite. PEFT would load the
                rest and leave routers random with a warning.
        """
        mine = re.compile(rf"{_OWN_KEY.pattern}{re.escape(adapter_name)}\.")
        wanted = {}
        for key, value in model.state_dict().items():
            if mine.search(key):
                bare = cls._remove_adapter_name_from_key(key, adapter_name).removeprefix("base_model.model.")
                wanted[bare] = (key, value)
        given = {key.removeprefix("base_model.model."): (key, value) for key, value in state_dict.items()}
        remapped = {}
        for bare, (key, expected) in wanted.items():
            if bare not in given:
                raise AdapterMismatchError(f"adapter file: tensor {bare} is missing")
            _, value = given.pop(bare)
            if value.shape != expected.shape:
                raise AdapterMismatchError(
                    f"adapter file: tensor {bare} has shape {tuple(value.shape)}, expected {tuple(expected.shape)}"
                )
            if value.is_floating_point() and not value.isfinite().all():
                raise AdapterMismatchError(f"adapter file: tensor {bare} holds values that are not finite")
            remapped[key] = value
        saved_modules = tuple(config.modules_to_save or ())
        for bare, (key, value) in given.items():
            if not any(f".{name}." in f".{bare}" for name in saved_modules):
                raise AdapterMismatchError(f"adapter file: unexpected tensor {bare}")
            remapped[key] = value
        return remapped

    def _create_and_replace(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("depth-routed adapters are injected by inject_adapter")


def _pass_token_mask(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the decoder stack: hand the 2D attention mask down to the layers as a keyword.

    Layers see a 4D mask, a boolean mask, none, or a block mask, depending on the attention implementation.
    """
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return None
    inputs = next((x for x in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]) if x is not None), None)
    if inputs is None or mask.shape[1] < inputs.shape[1]:
        return None
    # With a cache, the mask covers past positions too; the new ones come last.
    return args, {**kwargs, TOKEN_MASK: mask[:, mask.shape[1] - inputs.shape[1] :].bool()}


def register() -> None:
    """Make PEFT know the method. Runs on import; a second call does nothing."""
    if register_peft_type() not in PEFT_TYPE_TO_TUNER_MAPPING:
        register_peft_method(name=PREFIX.rstrip("_"), config_cls=DepthRouteConfig, model_cls=DepthRouteModel)


register()
