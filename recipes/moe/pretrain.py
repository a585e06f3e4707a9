"""Pretrain a tiny OLMoE with four ways of balancing its experts.

    python recipes/moe/pretrain.py --work DIR [--variants none switch switch_z bias]

One folder per variant under `DIR/bases`: the model, its bias if it has one, and `result.json`. A variant that has a
`result.json` is left as it is. The text is the Python standard library's sources, the tokenizer that of the embedded
base.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import OlmoeConfig, OlmoeForCausalLM, get_cosine_schedule_with_warmup

from hf_depthroute.data.blocks import Blocks, draw_order, prepare_blocks, to_batches
from hf_depthroute.data.text import PYTHON_STDLIB
from hf_depthroute.evaluation.perplexity import mean_loss
from hf_depthroute.training.base_routers import BalanceBias, expert_load, load_balance, observe_routers, router_z

EMBEDDED = Path(__file__).parents[1] / "embedded_base" / "model"
DATA = {"length": 128, "validation_blocks": 128}
STEPS, BATCH, LEARNING_RATE = 300, 16, 2e-3
VARIANTS: dict[str, dict[str, float]] = {
    "none": {},
    "switch": {"balance": 0.01},
    "switch_z": {"balance": 0.01, "router_z": 0.001},
    "bias": {"bias_step": 0.002},
}


def blocks() -> Blocks:
    return prepare_blocks(DATA, PYTHON_STDLIB, str(EMBEDDED))


def build() -> OlmoeForCausalLM:
    """8 experts, 2 of them per token; 3.7 million parameters, 1.3 million of them used by a token."""
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, num_experts=8, num_experts_per_tok=2, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    return OlmoeForCausalLM(config)


def loads(model: OlmoeForCausalLM, batches: list[dict[str, torch.Tensor]]) -> dict[str, list[float]]:
    return {str(index): one.assigned.tolist() for index, one in expert_load(model, batches).items()}


def pretrain(variant: str, data: Blocks, folder: Path) -> None:
    """Train one variant and write its folder."""
    given = VARIANTS[variant]
    model = build().train()
    validation = to_batches(data.validation, BATCH, torch.device("cpu"))
    before = loads(model, validation)
    bias = BalanceBias(model, step=given["bias_step"]) if "bias_step" in given else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=20, num_training_steps=STEPS)
    curve: list[dict[str, float]] = []
    start = time.perf_counter()
    with ExitStack() as stack:
        if bias is not None:
            stack.enter_context(bias.applied())
        for step, order in enumerate(draw_order(len(data.train), STEPS * BATCH, seed=0).split(BATCH), 1):
            ids = data.train[order].long()
            with observe_routers(model) as routers:
                lm = model(input_ids=ids, labels=ids, use_cache=False).loss
                balance, z = load_balance(routers), router_z(routers)
            (lm + given.get("balance", 0.0) * balance + given.get("router_z", 0.0) * z).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if bias is not None:
                bias.update()
            if step % 10 == 0:
                curve.append({"step": step, "lm": lm.item(), "balance": balance.item(), "router_z": z.item()})
            if step % 50 == 0:
                print(f"{variant}: step {step}, loss {lm.item():.3f}, balance {balance.item():.3f}", flush=True)
        seconds = time.perf_counter() - start
        result: dict[str, Any] = {
            "variant": variant,
            **given,
            "steps": STEPS,
            "tokens": STEPS * BATCH * DATA["length"],
            "seconds": round(seconds),
            "validation_loss": mean_loss(model, validation),
            "load_before": before,
            "load_after": loads(model, validation),
            "curve": curve,
        }
    model.save_pretrained(folder)
    if bias is not None:
        save_file(bias.state_dict(), folder / "bias.safetensors")
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{variant}: validation loss {result['validation_loss']:.4f}, {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = blocks()
    for variant in args.variants:
        folder = args.work / "bases" / variant
        if not (folder / "result.json").exists():
            pretrain(variant, data, folder)


if __name__ == "__main__":
    main()
