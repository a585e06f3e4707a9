"""One system in a process of its own: `run.py` asks by a line of JSON, the answer is one.

Runs in either environment.

Every system is the same Llama with random weights, 12 layers of the width of Qwen2.5-0.5B, in
bfloat16 where time is asked for and in float32 where equality is. Six layers of it, 1, 3, ..., 11,
are routed, and half of the tokens skip.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

ROUTED = [1, 3, 5, 7, 9, 11]
CAPACITY = 0.5
STEPS = 16  # of a decode
ROUTER_TUNING = (
    Path(__file__).parents[2] / ".peers" / "router-tuning" / "utils" / "model" / "model_patch.py"
)


def llama(dtype: torch.dtype) -> Any:
    sizes = {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(
        vocab_size=32_000, num_hidden_layers=12, max_position_embeddings=2048, **sizes
    )
    config.architectures = ["LlamaForCausalLM"]
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


def mixture_of_depths(model: Any) -> Any:
    """The MoD package: blocks, by the largest scores of a sequence."""
    from MoD import apply_mod_to_hf

    model = apply_mod_to_hf(model).eval()
    for index in ROUTED:
        model.model.layers[index].capacity = CAPACITY
    return model


def router_tuning(model: Any, granularity: str, threshold: float = 0.5) -> Any:
    """Router-Tuning's own code; its gates have no bias,
    so that random ones let half of the tokens run."""
    spec = importlib.util.spec_from_file_location("model_patch", ROUTER_TUNING)
    assert spec is not None and spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    model.config.is_mod = [index in ROUTED for index in range(12)]
    model.config.granularity, model.config.threshold = granularity, threshold
    model = code.apply_router_tuning_patch(model).eval()
    return model.to(model.dtype)


def early_exit(model: Any) -> Any:
    """LayerSkip's draft, as `generate(assistant_early_exit=6)` of transformers runs it:
    no token goes further."""
    model.config.num_hidden_layers = 6
    return model


def routed(model: Any, **fields: Any) -> Any:
    """This library, by default with gates like the peers';
    thresholds are calibrated on the prompts that are timed."""
    from hf_depthroute import DepthRouteConfig, calibrate, get_depth_routed_model

    fields = {"gate": "linear", "branch": "none", "threshold": "budget"} | fields
    model = get_depth_routed_model(
        model, DepthRouteConfig(layers=ROUTED, budget=CAPACITY, **fields)
    )
    for name, weight in model.named_parameters():
        if "gate" in name and not weight.any():
            torch.nn.init.normal_(weight, std=0.02)  # linear gates start at zero
    if fields["threshold"] == "budget":
        calibrate(model, [{"input_ids": tokens(1, 1024)}, {"input_ids": tokens(4, 256)}])
    return model.eval()


PEERS: dict[str, Callable[[Any], Any]] = {  # in their environment
    "dense, 4.40": lambda model: model,
    "mod": mixture_of_depths,
    "router-tuning, attention": lambda model: router_tuning(model, "attn_token"),
    "router-tuning, ffn": lambda model: router_tuning(model, "mlp_token"),
    "router-tuning, everything skipped": lambda model: router_tuning(
        model, "attn_sequence", threshold=2.0
    ),
}
SYSTEMS: dict[str, Callable[[Any], Any]] = {
    **PEERS,
    "dense": lambda model: model,
    "early exit": early_exit,
    "block": lambda model: routed(model, target="block"),
    "block, defaults": lambda model: routed(model, target="block", gate="mlp", branch="lowrank"),
    "ffn": lambda model: routed(model, target="ffn"),
    "ffn, defaults": lambda model: routed(model, target="ffn", gate="mlp", branch="lowrank"),
    "attention": lambda model: routed(model, target="attention"),
    "attention, everything skipped": lambda model: routed(
        model, target="attention", granularity="sequence", threshold=1e4
    ),
}


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(32_000, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def prefill(model: Any, batch: int, length: int) -> dict[str, float]:
    ids = tokens(batch, length)
    model(input_ids=ids, use_cache=True)
    started = time.perf_counter()
    model(input_ids=ids, use_cache=True)
    return {"seconds": time.perf_counter() - started}


@torch.no_grad()
def decode(model: Any, batch: int, length: int) -> dict[str, float]:
    """A step after `length` tokens."""
    cache = model(input_ids=tokens(batch, length), use_cache=True).past_key_values
    steps = tokens(batch, STEPS + 2, seed=1).split(1, dim=1)
    for number, ids in enumerate(steps):
        if number == 2:
            started = time.perf_counter()
        cache = model(input_ids=ids, past_key_values=cache, use_cache=True).past_key_values
    return {"seconds": (time.perf_counter() - started) / STEPS}


def computed(model: Any, batch: int, length: int) -> dict[str, float]:
    """The shares of the rows that enter the routed layers' attention (queries) and
    FFN in a prefill."""
    seen = {"attention": 0, "ffn": 0}

    def counting(part: str) -> Callable[[Any, Any], None]:
        def count(module: Any, args: Any) -> None:
            seen[part] += args[0].shape[:-1].numel()

        return count

    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    hooks = []
    for layer in (getattr(layers[index], "block", layers[index]) for index in ROUTED):
        hooks.append(layer.self_attn.q_proj.register_forward_pre_hook(counting("attention")))
        hooks.append(layer.mlp.register_forward_pre_hook(counting("ffn")))
    try:
        with torch.no_grad():
            model(input_ids=tokens(batch, length), use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    return {part: rows / (batch * length * len(ROUTED)) for part, rows in seen.items()}


@torch.no_grad()
def difference(model: Any, batch: int, length: int) -> dict[str, float]:
    """How far the logits of a prefill are from those of its tokens one by one,
    over their spread."""
    ids = tokens(batch, length)
    whole, cache, parts = model(input_ids=ids, use_cache=True).logits, None, []
    for step in ids.split(1, dim=1):
        found = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache = found.past_key_values
        parts.append(found.logits)
    return {"difference": float((whole - torch.cat(parts, dim=1)).abs().max() / whole.std())}


WORK = {"prefill": prefill, "decode": decode, "computed": computed, "difference": difference}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    models: dict[torch.dtype, Any] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        dtype = torch.float32 if asked["work"] == "difference" else torch.bfloat16
        try:
            if dtype not in models:
                models[dtype] = SYSTEMS[args.system](llama(dtype))
            answer = WORK[asked["work"]](models[dtype], asked["batch"], asked["length"])
        except Exception as error:  # what a peer cannot do is a result
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
        if dtype == torch.float32:
            models.pop(dtype, None)


if __name__ == "__main__":
    main()
