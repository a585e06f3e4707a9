"""What sequence-level attention skipping saves of the KV cache,
and that generation is that of a masked reference.

    python recipes/router_tuning/kv_cache.py --out recipes/router_tuning/kv_cache.json

Half of the embedded base's layers are routed at budget 0.5; an untrained gate, calibrated on
prompts of the validation text, decides. The reference has no cache: it computes both paths for
every token of every step, and repeats the prompts' decisions. The bytes are also counted for the
shape of Llama-3-8B, on the meta device.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_depthroute import (
    DepthRouteConfig,
    calibrate,
    get_depth_routed_model,
    record_routes,
    replay_routes,
    route_cost,
)
from hf_depthroute.base.cache import kv_cache_bytes
from hf_depthroute.data.text import PYTHON_STDLIB, load_text, pack
from hf_depthroute.routing.trace import RouteTrace

BASE = Path(__file__).parents[1] / "embedded_base" / "model"
PROMPTS, LENGTH, NEW = 32, 128, 16


def routed_model() -> tuple[Any, torch.Tensor]:
    """The calibrated model and prompts `[PROMPTS, LENGTH]` that it was not calibrated on."""
    base = AutoModelForCausalLM.from_pretrained(
        BASE, dtype=torch.float32, trust_remote_code=False
    ).eval()
    config = DepthRouteConfig(
        layers="every:2",
        target="attention",
        granularity="sequence",
        selection="controller",
        branch="none",
    )
    model = get_depth_routed_model(base, config).eval()
    text = load_text(PYTHON_STDLIB, split="validation")
    packed: Any = pack(text, AutoTokenizer.from_pretrained(BASE, trust_remote_code=False), LENGTH)
    blocks = torch.tensor(packed["input_ids"][: 9 * PROMPTS])
    calibrate(model, [{"input_ids": part} for part in blocks[PROMPTS:].split(PROMPTS)], budget=0.5)
    return model, blocks[:PROMPTS]


@torch.no_grad()
def reference(model: Any, prompts: torch.Tensor, trace: RouteTrace) -> torch.Tensor:
    """Greedy generation without a cache, both paths for every token,
    with the prompts' decisions."""
    ids = prompts
    model.train()  # masked execution
    for _ in range(NEW):
        pinned = RouteTrace.cat([trace.positions(0, 1)] * ids.shape[1])
        with replay_routes(model, pinned):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    model.eval()
    return ids


@torch.no_grad()
def held(model: Any, prompts: torch.Tensor) -> int:
    cache = DynamicCache(config=model.config)
    model(prompts, past_key_values=cache, use_cache=True)
    return kv_cache_bytes(cache)


def llama3_8b() -> dict[str, Any]:
    """`route_cost` at the setting of arXiv:2410.13184: 16 of 32 layers, 50 % capacity,
    2,048 x 64, bfloat16."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        base = LlamaForCausalLM(config).to(torch.bfloat16)
        adapter = DepthRouteConfig(
            layers=list(range(15, 31)),
            gate="linear",
            target="attention",
            granularity="sequence",
            branch="none",
        )
        model = get_depth_routed_model(base, adapter)
    sizes = {"batch_size": 64, "length": 2048}
    return {
        "dense_bytes": route_cost(model, budget=1.0, **sizes).kv_bytes,
        "routed_bytes": route_cost(model, budget=0.5, **sizes).kv_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model, prompts = routed_model()
    with torch.no_grad(), record_routes(model) as trace:
        model(prompts)
    shares = trace.full_ratio()
    with model.disable_adapter():
        dense = held(model, prompts)
    routed = held(model, prompts)
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    found = model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), **settings)
    expected = reference(model, prompts, trace)
    result = {
        "prompts": PROMPTS,
        "length": LENGTH,
        "routed_layers": list(shares),
        "share_of_sequences_kept": {str(index): share for index, share in shares.items()},
        "dense_bytes": dense,
        "routed_bytes": routed,
        "counted_bytes": route_cost(
            model, batch_size=PROMPTS, length=LENGTH, full_ratio=shares
        ).kv_bytes,
        "new_tokens": NEW,
        "generation_equals_reference": torch.equal(found, expected),
        "llama_3_8b_64_x_2048": llama3_8b(),
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
