"""Branches of the FFN's own neurons on vLLM, which fuses the projections that they are rows of.

So each gets its rows as weights of its own, read from the base's files, and a copy of the norm in
front.

Shapes: d model width, r neurons.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from ..base.intermediate import intermediate_of
from ..config.rules import ConfigError
from ..parts.neurons import NeuronBranch
from ..routing.routing import Routing


class OwnNeurons(nn.Module):
    """A `NeuronBranch` with the rows of the base's projections as weights of its own:
    `[..., d] -> [..., d]`.

    `maps` are `weight` `[r, d]` and, where there is one, `bias` `[r]` of each projection; the one
    before the activation is the first. `neurons` are their places in the intermediate, int64 `[r]`,
    and `output` is the FFN's name of the projection from it.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    neurons: Tensor

    def __init__(
        self,
        norm: nn.Module | None,
        maps: Sequence[Mapping[str, Tensor]],
        activation: Any,
        down: nn.Module,
        neurons: Tensor,
        output: str,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.activation = activation
        self.down = down
        self.register_buffer("neurons", neurons)
        self._output = output
        self._stacked: list[tuple[Tensor, Tensor]] = []  # of LoRAs, by slot
        self._loras: Any = None
        self._maps = len(maps)
        for name in ("weight", "bias"):
            rows = [values[name] for values in maps if name in values]
            self.register_parameter(name, None)
            if rows:
                setattr(self, name, nn.Parameter(torch.cat(rows), requires_grad=False))

    def forward(self, a: Tensor) -> Tensor:
        x = a if self.norm is None else self.norm(a)
        read = F.linear(x.to(self.weight.dtype), self.weight, self.bias)
        if self._stacked:
            self._add(read.view(-1, read.shape[-1]), x.reshape(-1, x.shape[-1]))
        first, *others = read.chunk(self._maps, -1)
        hidden = self.activation(first)
        if others:
            hidden = hidden * others[0]
        out: Tensor = self.down(hidden.to(a.dtype))
        return out

    def reads_loras_of(self, ffn: nn.Module, loras: Any) -> None:
        """From now on, follow the LoRAs of `ffn`; `loras`, a `LoraRows`, adds them."""
        layers: list[Any] = [
            module for name, module in ffn.named_children() if name != self._output
        ]
        wrapped = [layer for layer in layers if hasattr(layer, "lora_a_stacked")]
        self._stacked = [
            pair for layer in wrapped for pair in zip(layer.lora_a_stacked, layer.lora_b_stacked)
        ]
        self._loras = loras

    def _add(self, read: Tensor, x: Tensor) -> None:
        """Add the rows' LoRAs at the neurons to the maps' outputs `read`, `[n, maps r]`, in place;
        `x` is their input, `[n, d]`."""
        in_each = self._maps // len(self._stacked)
        width = in_each * len(self.neurons)
        for part, (a, b) in zip(read.split(width, -1), self._stacked):
            step = b.shape[2] // in_each
            places = torch.cat([self.neurons + step * index for index in range(in_each)])
            self._loras.add_lora_linear(part, x, [a], [b[:, :, places]], 1.0, [width])


def own_neurons(
    model: nn.Module, routings: Iterable[Routing], files: Sequence[Path], dtype: torch.dtype
) -> None:
    """Put `OwnNeurons` in the place of every branch of neurons in `routings`, those of the layers
    of a transformers model without weights. `dtype` is the base's in vLLM.

    Raises:
        ConfigError: The files do not have the weights under transformers' names.
    """
    branches = [
        (routing.depth_route_branch, key, part, *part.reads())
        for routing in routings
        for key, part in routing.depth_route_branch.items()
        if type(part) is NeuronBranch
    ]
    read = [module for *_, norm, maps, _ in branches for module in (norm, *maps)]
    stored = _stored(model, [module for module in read if module is not None], files, dtype)
    for group, key, branch, norm, maps, activation in branches:
        kept = [rows for linear in maps for rows in _rows(branch, linear, stored[linear])]
        front = None
        if norm is not None:
            front = _with_values(norm, stored[norm])
        form = intermediate_of(branch.sources()[-1])
        assert form is not None
        group[key] = OwnNeurons(front, kept, activation, branch.down, branch.neurons, form.output)


def _rows(
    branch: NeuronBranch, linear: nn.Module, values: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """The parameters of the chosen neurons, for each of the maps in a projection."""
    chosen = {name: branch.chosen(linear, value) for name, value in values.items()}
    count = len(next(iter(chosen.values())))
    return [{name: rows[part] for name, rows in chosen.items()} for part in range(count)]


def _with_values(module: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    made = copy.deepcopy(module).to_empty(device="cpu")
    for name, value in values.items():
        setattr(made, name, nn.Parameter(value, requires_grad=False))
    return made


def _stored(
    model: nn.Module, modules: Sequence[nn.Module], files: Sequence[Path], dtype: torch.dtype
) -> dict[nn.Module, dict[str, Tensor]]:
    """Each module's parameters, by name, from files that may leave out the model's prefix."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    names = {module: name.removeprefix(prefix) for name, module in model.named_modules()}
    wanted = {
        f"{names[module]}.{name}": (module, name)
        for module in modules
        for name, _ in module.named_parameters(recurse=False)
    }
    found: dict[nn.Module, dict[str, Tensor]] = {module: {} for module in modules}
    for path in files if wanted else ():
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():  # noqa: SIM118
                if (of := wanted.pop(stored.removeprefix(prefix), None)) is not None:
                    found[of[0]][of[1]] = file.get_tensor(stored).to(dtype)
    if wanted:
        raise ConfigError(
            "branch='neurons' is not served by vLLM here: the base's safetensors files have no "
            f"{next(iter(wanted))}, of which the branch is a part"
        )
    return found
