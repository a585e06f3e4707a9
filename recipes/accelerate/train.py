"""Routers trained by a loop of your own, on one process or many: plain PyTorch, Accelerate,
and the routing objective.

    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/accelerate/train.py --out OUT

`OUT` holds the adapter, `losses.json`, and under `checkpoints` what `--resume` goes on from. The
batch size is that of all processes together, so a run gives the same adapter on one process as on
two.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.utils import set_seed

from hf_depthroute import DepthRouteConfig, get_depth_routed_model
from hf_depthroute.data.text import load_text, pack
from hf_depthroute.training.arguments import RoutingArguments
from hf_depthroute.training.objective import RoutingObjective

BASE = str(Path(__file__).parents[1] / "embedded_base" / "model")


class Progress:
    """What a checkpoint holds beside model, optimizer, schedule and random state."""

    def __init__(self, objective: RoutingObjective) -> None:
        self.objective = objective
        self.step = 0
        self.losses: list[float] = []  # of every optimizer step's last batch

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "losses": self.losses, "objective": self.objective.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.losses = state["step"], state["losses"]
        self.objective.load_state(state["objective"])


def make_loader(args: argparse.Namespace) -> Any:
    """Batches of blocks of tokens, in an order that the seed fixes."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    blocks = pack(load_text(args.dataset), tokenizer, args.length).with_format("torch")
    generator = torch.Generator().manual_seed(args.seed)
    return torch.utils.data.DataLoader(
        blocks, batch_size=args.batch_size, shuffle=True, drop_last=True, generator=generator
    )


def train(args: argparse.Namespace) -> None:
    set_seed(args.seed)
    # Before the Accelerator: once it has a ZeRO-3 configuration, transformers splits every model
    # that it loads.
    base = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, trust_remote_code=False
    )
    config = DepthRouteConfig(
        layers=args.layers, target=args.target, gate=args.gate, budget=args.budget
    )
    model = get_depth_routed_model(base, config).train()

    accelerator = Accelerator(
        cpu=args.cpu,
        gradient_accumulation_steps=args.accumulate,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
    )
    with accelerator.main_process_first():  # the others find the tokens in the cache
        loader = make_loader(args)

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.lr, weight_decay=0.01)
    # Prepared, the schedule moves with the optimizer; split batches keep it from moving once per
    # process.
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, args.steps // 10, args.steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    objective = RoutingObjective(RoutingArguments(), accelerator.unwrap_model(model))
    progress = Progress(objective)
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        accelerator.load_state(args.resume)
        accelerator.print(f"resumed at step {progress.step} from {args.resume}")

    for batch in forever(accelerator, loader, progress.step * args.accumulate):
        objective.schedule(progress.step)
        with accelerator.accumulate(model):
            with objective.watching() as watched:
                output = model(**batch)
                # A share of 1: `backward` divides by the number of accumulated batches, the routing
                # terms too.
                loss = objective(output.loss, watched, 1.0, batch["labels"], output.logits)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                objective.check_finite(progress.step + 1)
                # FSDP put others in the place of `trainable`.
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        objective.after_step()
        progress.step += 1
        progress.losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
        if progress.step % args.log_every == 0:
            values = " ".join(
                f"{n} {v:.4f}" for n, v in objective.pop_metrics().items() if n.startswith("loss_")
            )
            accelerator.print(f"step {progress.step}: {values}")
        if progress.step % args.save_every == 0:
            accelerator.save_state(str(args.out / "checkpoints" / f"step-{progress.step}"))
        if progress.step >= args.steps:
            break
    objective.end_schedule()
    save(accelerator, model, progress, args.out)


def forever(accelerator: Accelerator, loader: Any, done: int) -> Any:
    """Batches of epoch after epoch, without the first `done`."""
    epoch, skipped = divmod(done, len(loader))
    while True:
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)  # another order in every epoch, the same on every process
        yield from accelerator.skip_first_batches(loader, skipped) if skipped else loader
        epoch, skipped = epoch + 1, 0


def save(accelerator: Accelerator, model: Any, progress: Progress, out: Path) -> None:
    """Write the adapter; what FSDP or ZeRO-3 has split is gathered first,
    and every process takes part in that."""
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(out, state_dict=state)
        (out / "losses.json").write_text(json.dumps(progress.losses))
    accelerator.wait_for_everyone()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=BASE)
    parser.add_argument("--dataset", default="python-stdlib", help="as in hf-depthroute train")
    parser.add_argument("--length", type=int, default=128, help="tokens of a block")
    parser.add_argument("--batch-size", type=int, default=8, help="of all processes together")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of an optimizer step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--layers", default="last:3")
    parser.add_argument("--target", default="ffn")
    parser.add_argument("--gate", default="mlp")
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--resume", help="a checkpoint folder")
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse())
    PartialState().destroy_process_group()
