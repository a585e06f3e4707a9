"""What a decoding step launches: operators, and on a GPU kernels,
of the base and of a routed model.

    python recipes/speed/launches.py --json launches.json

Counted are the operators that a step dispatches and that are no views. On a GPU the kernels that
ran are counted too: a row operator launches two to four. Where every kernel is launched by the
host, a step of one sequence takes as long as its launches. `as chosen` is what `"auto"` does: it
may run the step as the base does. On a CPU the operators of a GPU's step are counted, not those of
the steps that CPUs have of their own.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `speed` is there

import torch
from speed.shapes import SHAPES, random_model
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from hf_depthroute import DepthRouteConfig, calibrate, get_depth_routed_model
from hf_depthroute.adapter import injection
from hf_depthroute.bench.modes import random_tokens
from hf_depthroute.bench.timing import describe_machine
from hf_depthroute.execution import costs
from hf_depthroute.files.staged import write_json
from hf_depthroute.routing.stack import state_of
from hf_depthroute.routing.trace import full_depth

PROMPT = 32


class Operators(TorchDispatchMode):
    """Counts the operators inside the block that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def count(model: Any, ids: torch.Tensor, way: AbstractContextManager[Any]) -> dict[str, int]:
    """The counts of one step after a prompt, `ids` `[1, T]`: the second step,
    for which everything is prepared."""
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[:, :-2], past_key_values=cache, use_cache=True)
    counted: dict[str, int] = {}
    gpu = (
        patch.object(injection, "decodes", lambda *_: False),
        patch.object(costs, "is_launched", lambda _: True),
    )
    with way, gpu[0], gpu[1]:
        model(input_ids=ids[:, -2:-1], past_key_values=cache, use_cache=True)
        if ids.is_cuda:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)
                torch.cuda.synchronize()
            counted["kernels"] = sum(
                event.device_type == DeviceType.CUDA for event in seen.events()
            )
            cache.crop(-1)
        with Operators() as operators:
            model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)
    return counted | {"operators": operators.count}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = random_model(
        args.shape, getattr(torch, args.dtype), depth=args.depth, vocabulary=1024, device=device
    )
    model = get_depth_routed_model(base, DepthRouteConfig(layers="all")).eval()
    ids = random_tokens(model, 1, PROMPT)
    calibrate(model, {"input_ids": ids})
    ways = {
        "base": full_depth(model),
        "rows": state_of(model).override(executor="rows"),
        "gathered": state_of(model).override(executor="gathered"),
        "as chosen": nullcontext(),
    }
    warnings.simplefilter("ignore")
    steps = {name: count(model, ids, way) for name, way in ways.items()}
    layers = {
        name: {kind: (number - steps["base"][kind]) / args.depth for kind, number in counts.items()}
        for name, counts in steps.items()
    }
    sizes = {"shape": args.shape, "depth": args.depth, "dtype": args.dtype}
    write_json(
        args.json,
        {"machine": describe_machine(device), **sizes, "steps": steps, "added_per_layer": layers},
    )
    for name, counts in steps.items():
        print(f"{name:<10} {counts}, for every routed layer {layers[name]} more than the base")


if __name__ == "__main__":
    main()
