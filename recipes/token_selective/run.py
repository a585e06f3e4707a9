"""Train the runs of a YAML file one after another: dense,
token-selective and early-exit models from scratch.

    OMP_NUM_THREADS=1 python recipes/token_selective/run.py recipes/token_selective/paper.yaml --out OUT

Every run leaves `OUT/NAME.json` and `OUT/NAME.safetensors`; one whose files exist is skipped, so a
stopped study goes on where it was. `measure.py` measures the models, `report.py` makes the tables
and plots.

Shapes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `study` is there

import torch
import torch.nn.functional as F
from safetensors.torch import save_model
from study.run import unfreeze
from tasks import Task, load_task
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

from hf_depthroute import DepthRouteConfig, get_depth_routed_model, record_routes
from hf_depthroute.bench import describe_machine
from hf_depthroute.files.strict_yaml import read_mapping
from hf_depthroute.inference.calibration import active_routings, use_selection
from hf_depthroute.training.losses import routing_losses

HERE = Path(__file__).parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TEXT = HERE.parents[1].parent / "shared" / "data" / "tinyshakespeare.txt"


def read_runs(path: Path) -> dict[str, dict[str, Any]]:
    """Every run's full settings: those of its task, then its own."""
    study = read_mapping(path)
    return {name: {**study["tasks"][run["task"]], **run} for name, run in study["runs"].items()}


def build_model(run: dict[str, Any], task: Task) -> Any:
    """The untrained model of a run: GPT-2, with halting routers between its blocks if the
    method is `tsa`."""
    torch.manual_seed(run["seed"])
    base = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=task.vocab_size, n_embd=run["width"], n_layer=run["layers"],
            n_head=run["heads"], n_inner=run["ffn"], n_positions=run["length"],
            activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=None, eos_token_id=None, use_cache=False,
        )
    )  # fmt: skip
    base.to(DEVICE)
    if run["method"] != "tsa":
        return base
    model = get_depth_routed_model(base, adapter_config(run))
    if "halting_bias" in run:
        for routing in active_routings(model):
            nn.init.constant_(routing.depth_route_gate["default"].score.bias, run["halting_bias"])
    unfreeze(model)
    return model


def adapter_config(run: dict[str, Any]) -> DepthRouteConfig:
    return DepthRouteConfig(
        gate="halting", target="block", branch="none", gate_temperature=1.0, seed=run["seed"]
    )


def task_loss(logits_BTV: torch.Tensor, tokens: torch.Tensor, first: int) -> torch.Tensor:
    """Mean next-token cross-entropy over the targets from position `first` on."""
    return F.cross_entropy(logits_BTV[:, first - 1 :].flatten(0, 1), tokens[:, first:].flatten())


def exit_loss(model: Any, tokens: torch.Tensor, first: int) -> torch.Tensor:
    """Mean over all exits, the tied head after every block, of the task loss."""
    output = model(input_ids=tokens[:, :-1], output_hidden_states=True)
    early = [model.lm_head(model.transformer.ln_f(hidden)) for hidden in output.hidden_states[1:-1]]
    return torch.stack(
        [task_loss(logits, tokens, first) for logits in (*early, output.logits)]
    ).mean()


def training_loss(
    model: Any, run: dict[str, Any], tokens: torch.Tensor, first: int
) -> torch.Tensor:
    if run["method"] == "exit":
        return exit_loss(model, tokens, first)
    if run["method"] == "dense":
        return task_loss(model(input_ids=tokens[:, :-1]).logits, tokens, first)
    with record_routes(model) as trace:
        lm = task_loss(model(input_ids=tokens[:, :-1]).logits, tokens, first)
    weights = {"budget": 0.0, "alive": 0.0, "depth": run["depth_weight"]}
    return torch.stack(list(routing_losses(trace, lm, weights).values())).sum()


@torch.no_grad()
def soft_loss(
    model: Any, task: Task, batch: int, blocks: int | None = None
) -> tuple[float, float | None]:
    """Validation loss with updates scaled by `p` as in training; and `alpha`, the mean of `p`,
    None where dense."""
    total, active, parts = 0.0, [], task.validation[:blocks].split(batch)
    for tokens in parts:
        if isinstance(model, GPT2LMHeadModel):
            logits = model(input_ids=tokens[:, :-1]).logits
        else:
            with record_routes(model) as trace, use_selection(model, "soft"):
                logits = model(input_ids=tokens[:, :-1]).logits
            active.append(
                torch.stack([record.probs.mean() for record in trace.values()]).mean() * len(tokens)
            )
        total += float(task_loss(logits, tokens, task.first)) * len(tokens)
    count = sum(len(part) for part in parts)
    return total / count, float(sum(active)) / count if active else None


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """No decay of biases, norms and embeddings."""
    named = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    plain = [p for name, p in named if p.ndim < 2 or name.endswith(("wte.weight", "wpe.weight"))]
    kept = {id(p) for p in plain}
    decayed = [p for _, p in named if id(p) not in kept]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


def train(run: dict[str, Any], task: Task) -> tuple[Any, dict[str, Any]]:
    """A model trained from scratch, and its record."""
    model = build_model(run, task)
    optimizer = torch.optim.AdamW(
        decay_groups(model, run["weight_decay"]), lr=run["lr"], betas=(0.9, 0.95), fused=True
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, run["warmup"], run["steps"])
    generator, started = torch.Generator().manual_seed(run["seed"]), time.perf_counter()
    curve = []
    for step in range(run["steps"] + 1):
        if step % run["eval_every"] == 0 or step == run["steps"]:
            model.eval()
            loss, alpha = soft_loss(model, task, run["batch"], run["eval_blocks"])
            curve.append(
                {
                    "step": step,
                    "loss": round(loss, 5),
                    "alpha": alpha if alpha is None else round(alpha, 5),
                }
            )
            print(curve[-1], f"{time.perf_counter() - started:.0f} s", flush=True)
            model.train()
        if step == run["steps"]:
            break
        training_loss(model, run, task.draw(run["batch"], generator), task.first).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    parameters = sum(p.numel() for p in model.parameters())
    return model.eval(), {
        "settings": run,
        "parameters": parameters,
        "device": describe_machine(DEVICE),
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path, help="small.yaml or paper.yaml")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="names of runs; default: all")
    parser.add_argument("--text", type=Path, default=TEXT, help="Tiny-Shakespeare")
    args = parser.parse_args()
    if not args.text.is_file():
        sys.exit(f"{args.text} does not exist; give Tiny-Shakespeare with --text")
    torch.set_flush_denormal(True)
    if DEVICE.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    args.out.mkdir(parents=True, exist_ok=True)
    runs = read_runs(args.study)
    for name in args.only or runs:
        if (args.out / f"{name}.json").exists():
            continue
        print(name, flush=True)
        run = runs[name]
        model, record = train(run, load_task(run["task"], args.text, run["length"], DEVICE))
        save_model(model, str(args.out / f"{name}.safetensors"))
        (args.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
