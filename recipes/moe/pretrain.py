"""Pretrain a tiny OLMoE with five ways of balancing its experts.

    python recipes/moe/pretrain.py --work DIR [--steps 300] [--variants none switch ...] [--seeds 0 1 2]

One folder per variant, seed and number of steps under `DIR/bases`: the model, its bias if it has
one, and `result.json`. One that has a `result.json` is left as it is. The text is the Python
standard library's sources, the tokenizer that of the embedded base. Beside loss and load,
`result.json` has the loss where every expert takes `capacity_factor * T K / E` pairs of a batch and
the rest is dropped, and the cosine between the gradients of the task and of the balance loss in the
routers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `study` is there

import torch
from balance import BalanceBias, expert_load
from moe.routers import (
    RouterTrace,
    hooked_routers,
    load_balance,
    observe_routers,
    router_z,
    routers,
)
from safetensors.torch import save_file
from study.blocks import Blocks, draw_order, prepare_blocks, to_batches
from transformers import OlmoeConfig, OlmoeForCausalLM, get_cosine_schedule_with_warmup

from hf_depthroute.data.text import PYTHON_STDLIB
from hf_depthroute.evaluation.perplexity import mean_loss

EMBEDDED = Path(__file__).parents[1] / "embedded_base" / "model"
DATA = {"length": 128, "validation_blocks": 128}
BATCH, LEARNING_RATE = 16, 2e-3
VARIANTS: dict[str, dict[str, float]] = {
    "none": {},
    "switch": {"balance": 0.01},
    "switch_strong": {"balance": 0.1},
    "switch_z": {"balance": 0.01, "router_z": 0.001},
    "bias": {"bias_step": 0.002},
}
CAPACITIES = (1.0, 1.25, 1.5)


def blocks() -> Blocks:
    return prepare_blocks(DATA, PYTHON_STDLIB, str(EMBEDDED))


def build(seed: int) -> OlmoeForCausalLM:
    """8 experts, 2 of them per token; 3.7 million parameters,
    1.3 million of them used by a token."""
    torch.manual_seed(seed)
    config = OlmoeConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, num_experts=8, num_experts_per_tok=2,
        max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0,
        pad_token_id=1,
    )  # fmt: skip
    return OlmoeForCausalLM(config)


def loads(
    model: OlmoeForCausalLM, batches: list[dict[str, torch.Tensor]]
) -> dict[str, list[float]]:
    return {str(index): one.assigned.tolist() for index, one in expert_load(model, batches).items()}


@contextmanager
def limited(model: OlmoeForCausalLM, factor: float, counts: dict[str, int]) -> Iterator[None]:
    """Every expert takes the first `factor * N K / E` pairs of a batch of `N` tokens;
    `counts` gets all and dropped."""

    def drop(layer: int, router: Any, args: Any, outputs: Any) -> tuple[torch.Tensor, ...]:
        logits_NE, weights_NK, chosen_NK = outputs
        experts = logits_NE.shape[-1]
        pairs = torch.nn.functional.one_hot(chosen_NK.flatten(), experts)
        place = (pairs.cumsum(0) * pairs).sum(-1)  # of each pair among those of its expert, from 1
        fits_NK = (place <= factor * chosen_NK.numel() / experts).view_as(chosen_NK)
        counts["all"] += fits_NK.numel()
        counts["dropped"] += int((~fits_NK).sum())
        return logits_NE, weights_NK * fits_NK, chosen_NK

    with hooked_routers(model, RouterTrace(), drop):
        yield


def capacity(
    model: OlmoeForCausalLM, validation: list[dict[str, torch.Tensor]]
) -> dict[str, dict[str, float]]:
    """By capacity factor, the share of pairs that overflow and the loss without them."""
    found = {}
    for factor in CAPACITIES:
        counts = {"all": 0, "dropped": 0}
        with limited(model, factor, counts):
            loss = mean_loss(model, validation)
        found[f"{factor:g}"] = {"loss": loss, "dropped": counts["dropped"] / counts["all"]}
    return found


def conflict(model: OlmoeForCausalLM, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    """Gradients in the routers: the cosine between that of the task and that of the balance loss,
    and their norms."""
    weights = [router.weight for router in routers(model).values()]
    with observe_routers(model) as trace:
        task = model(**batch, labels=batch["input_ids"], use_cache=False).loss
    grads = [
        torch.cat(
            [part.flatten() for part in torch.autograd.grad(loss, weights, retain_graph=True)]
        )
        for loss in (task, load_balance(trace))
    ]
    cosine = float(torch.nn.functional.cosine_similarity(*grads, dim=0))
    return {
        "cosine": cosine,
        "task_norm": float(grads[0].norm()),
        "balance_norm": float(grads[1].norm()),
    }


def pretrain(variant: str, seed: int, steps: int, data: Blocks, folder: Path) -> None:
    """Train one variant and write its folder."""
    given = VARIANTS[variant]
    model = build(seed).train()
    validation = to_batches(data.validation, BATCH, torch.device("cpu"))
    before = loads(model, validation)
    bias = BalanceBias(model, step=given["bias_step"]) if "bias_step" in given else None
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    schedule = get_cosine_schedule_with_warmup(
        optimizer, num_warmup_steps=20, num_training_steps=steps
    )
    curve: list[dict[str, float]] = []
    conflicts: list[dict[str, float]] = []
    start = time.process_time()
    with ExitStack() as stack:
        if bias is not None:
            stack.enter_context(bias.applied())
        for step, order in enumerate(
            draw_order(len(data.train), steps * BATCH, seed=seed).split(BATCH), 1
        ):
            ids = data.train[order].long()
            with observe_routers(model) as trace:
                lm = model(input_ids=ids, labels=ids, use_cache=False).loss
                balance, z = load_balance(trace), router_z(trace)
            (lm + given.get("balance", 0.0) * balance + given.get("router_z", 0.0) * z).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if bias is not None:
                bias.update()
            if step % (steps // 30) == 0:
                curve.append(
                    {"step": step, "lm": lm.item(), "balance": balance.item(), "router_z": z.item()}
                )
            if step % (steps // 3) == 0:
                model.eval()
                conflicts.append({"step": step, **conflict(model, validation[0])})
                model.train()
                print(f"{variant}, seed {seed}: step {step}, loss {lm.item():.3f}", flush=True)
        seconds = time.process_time() - start
        result: dict[str, Any] = {
            "variant": variant, **given, "seed": seed, "steps": steps,
            "tokens": steps * BATCH * DATA["length"], "seconds": round(seconds),
            "validation_loss": mean_loss(model, validation), "load_before": before,
            "load_after": loads(model, validation), "capacity": capacity(model, validation),
            "conflict": conflicts, "curve": curve,
        }  # fmt: skip
    model.save_pretrained(folder)
    if bias is not None:
        save_file(bias.state_dict(), folder / "bias.safetensors")
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{variant}, seed {seed}: validation loss {result['validation_loss']:.4f}, {seconds:.0f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=3000, help="a multiple of 30")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = blocks()
    for seed, variant in itertools.product(args.seeds, args.variants):
        folder = args.work / "bases" / f"{variant}-s{seed}-{args.steps}"
        if not (folder / "result.json").exists():
            pretrain(variant, seed, args.steps, data, folder)


if __name__ == "__main__":
    main()
