"""What two processes compute for test_distributed.py.

    accelerate launch --multi_gpu --num_processes 2 distributed_worker.py FOLDER

Every rank saves what it found as FOLDER/<name>-<rank>.pt. The scenarios are functions of the rank
and the number of processes, so the test runs them in one process for comparison.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from places import ROOT

sys.path.append(str(ROOT / "recipes"))

import torch
import torch.distributed as dist
from accelerate_worker import run_recipes
from models import build_base, build_routed, decoder_layers, tokens
from moe.routers import ROWS, observe_routers
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import Row, adapter_state, gradients, make_trainer, rows, stacked, step_logs
from transformers import Trainer

from hf_depthroute import (
    DepthRouteCallback,
    DepthRouteConfig,
    DepthRouteTrainer,
    calibrate,
    fit_router,
    record_routes,
    replay_routes,
)
from hf_depthroute.inference.non_finite import NonFiniteError
from hf_depthroute.routing.stack import routings_of, state_of
from hf_depthroute.routing.trace import RouteRecord, RouteTrace
from hf_depthroute.training.exits import observe_exits
from hf_depthroute.training.forks import observe_prefix
from hf_depthroute.training.losses import LOSSES, LossInputs, routing_losses
from hf_depthroute.training.objective import RoutingObjective
from hf_depthroute.training.oracle import prefix_utility
from hf_depthroute.training.record import remembered
from hf_depthroute.training.trainer import RoutingArguments

Result = dict[str, Any]
GLOBAL_BATCH = 4


def share(value: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Rank `rank`'s rows of a global batch."""
    return value.chunk(world)[rank]


def step(
    rank: int,
    world: int,
    batch: Row,
    full_rows: list[bool] | None = None,
    checkpointing: bool | None = None,
    labelled: bool = False,
    observed: bool = False,
    sharded: bool = False,
) -> Result:
    """Loss, gradients and masks of one global batch; `full_rows` fixes which of its rows run full.

    With `labelled`, the losses that need an oracle's labels take part; with `observed`, those of
    other methods, which watch the exits and the base's routers. With `sharded`, FSDP2 splits every
    weight over the processes.
    """
    model = (
        build_routed("olmoe", causal_rule="predictor")
        if observed
        else build_routed("llama", "jepa")
    )
    model.train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": checkpointing}
        )
        model.enable_input_require_grads()
    if sharded and world > 1:
        for layer in decoder_layers(model):
            fully_shard(layer)
        fully_shard(model)
    wrapped = DistributedDataParallel(model) if world > 1 and not sharded else model
    # As the Trainer does it: the sum over this rank's tokens, over the tokens of all ranks, times
    # their number.
    targets = (batch["labels"][:, 1:] != -100).sum()
    mine = {name: share(value, rank, world) for name, value in batch.items()}
    with ExitStack() as stack:
        if full_rows is not None:
            mask = torch.tensor(full_rows)[:, None].expand(batch["input_ids"].shape)
            fixed = RouteRecord(share(mask, rank, world), torch.empty(0), torch.empty(0), None, 0.5)
            replayed = RouteTrace({routing.layer_index: fixed for routing in routings_of(model)})
            stack.enter_context(replay_routes(wrapped, replayed))
        trace = stack.enter_context(record_routes(wrapped))
        prefix = None if sharded else stack.enter_context(observe_prefix(model))
        inputs: dict[str, Any] = {}
        weights = {"alive": 1.0, "cgs": 0.5, "z": 0.1}
        if observed:
            metrics = {**LOSSES["similarity"].metrics, **LOSSES["recoverability"].metrics}
            stack.enter_context(state_of(model).override(observed=metrics))
            watches = (observe_exits, observe_routers)
            inputs["observed"] = {watch: stack.enter_context(watch(model)) for watch in watches}
            others = ("capacity", "depth", "similarity", "recoverability", "exit")
            weights |= dict.fromkeys(others, 1.0)
        lm = wrapped(**mine, num_items_in_batch=targets).loss * world
        if labelled:
            assert prefix is not None
            inputs["utility"] = prefix_utility(prefix, mine["labels"], "on_policy")
            inputs["counterfactual"] = prefix_utility(
                prefix, mine["labels"], "on_policy", window=1, layers=[2]
            )
        terms = routing_losses(trace, lm, weights, alive_min=0.99, labels=mine["labels"], **inputs)
        if observed:  # rows from outside the package
            terms |= {
                name: row.compute(LossInputs(trace, observed=inputs["observed"]))
                for name, row in ROWS.items()
            }
        sum(terms.values()).backward()
    return {
        "terms": {name: term.item() for name, term in terms.items()},
        "gradients": {
            name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in gradients(model).items()
        },
        "ratio": trace.full_ratio(),
    }


def plain(rank: int, world: int) -> Result:
    return step(rank, world, stacked(rows(GLOBAL_BATCH, padding=(0, 5, 2, 0))))


def checkpointed(rank: int, world: int) -> Result:
    return step(rank, world, stacked(rows(GLOBAL_BATCH, padding=(0, 5, 2, 0))), checkpointing=False)


def checkpointed_reentrant(rank: int, world: int) -> Result:
    return step(rank, world, stacked(rows(GLOBAL_BATCH, padding=(0, 5, 2, 0))), checkpointing=True)


def one_rank_routes_nothing(rank: int, world: int) -> Result:
    return step(rank, world, stacked(rows(GLOBAL_BATCH)), full_rows=[True, True, False, False])


def one_rank_is_padding(rank: int, world: int) -> Result:
    return step(rank, world, stacked(rows(GLOBAL_BATCH, padding=(0, 3, 12, 12))))


def sharded(rank: int, world: int) -> Result:
    return step(rank, world, stacked(rows(GLOBAL_BATCH, padding=(0, 5, 2, 0))), sharded=True)


def sharded_and_checkpointed(rank: int, world: int) -> Result:
    batch = stacked(rows(GLOBAL_BATCH, padding=(0, 5, 2, 0)))
    return step(rank, world, batch, sharded=True, checkpointing=False)


def sharded_and_one_rank_routes_nothing(rank: int, world: int) -> Result:
    return step(
        rank, world, stacked(rows(GLOBAL_BATCH)), full_rows=[True, True, False, False], sharded=True
    )


def oracle(rank: int, world: int) -> Result:
    return step(rank, world, stacked(rows(GLOBAL_BATCH, padding=(0, 5, 2, 0))), labelled=True)


def other_methods(rank: int, world: int) -> Result:
    return step(rank, world, stacked(rows(GLOBAL_BATCH, padding=(0, 5, 2, 0))), observed=True)


def by_objective(rank: int, world: int) -> Result:
    """What has a state, or means, of its own: the counterfactual temperature and
    the distillation."""
    batch = stacked(rows(GLOBAL_BATCH, padding=(0, 1, 5, 6)))
    model = build_routed("llama").train()
    wrapped = DistributedDataParallel(model) if world > 1 else model
    targets = (batch["labels"][:, 1:] != -100).sum()
    mine = {name: share(value, rank, world) for name, value in batch.items()}
    arguments = RoutingArguments(cgs_weight=0.5, cgs_warmup=0, distill_weight=1.0, alive_min=0.99)
    objective = RoutingObjective(arguments, model)
    objective.schedule(0)
    with objective.watching() as watched:
        output = wrapped(**mine, num_items_in_batch=targets)
        objective(output.loss * world, watched, 1.0, mine["labels"], output.logits).backward()
    terms, _ = objective._pending[0]
    return {
        "terms": {name: term.item() for name, term in terms.items()} | objective.state(),
        "gradients": gradients(model),
        "ratio": watched.trace.full_ratio(),
    }


def train(rank: int, world: int, cls: type[Trainer]) -> Result:
    """Two steps of two accumulated batches; rank order is the order of rows in the global batch."""
    model = build_routed("llama", "jepa")
    fields: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": GLOBAL_BATCH // world,
        "budget_schedule_steps": 2,
        "alive_min": 0.99,
    }
    examples = rows(4 * GLOBAL_BATCH, padding=(0, 5, 2, 0, 12, 12))
    with tempfile.TemporaryDirectory() as folder:
        trainer, kept = make_trainer(model, examples, Path(folder), cls, **fields)
        if cls is Trainer:
            trainer.add_callback(
                DepthRouteCallback(
                    trainer, RoutingArguments(alive_min=0.99, budget_schedule_steps=2)
                )
            )
        trainer.train()
        found = {"logs": step_logs(trainer), "gradients": kept.steps[0]}
        found["state"] = adapter_state(model)
        calibrate(model, {"input_ids": tokens(4, 8)})
        found["evaluated"] = trainer.evaluate(examples)
    return found


def trainer(rank: int, world: int) -> Result:
    return train(rank, world, DepthRouteTrainer)


def callback(rank: int, world: int) -> Result:
    return train(rank, world, Trainer)


STEPS: tuple[Callable[[int, int], Result], ...] = (
    plain,
    checkpointed,
    checkpointed_reentrant,
    one_rank_routes_nothing,
    one_rank_is_padding,
    oracle,
    other_methods,
    by_objective,
)
SHARDED: tuple[Callable[[int, int], Result], ...] = (
    sharded,
    sharded_and_checkpointed,
    sharded_and_one_rank_routes_nothing,
)
RUNS: tuple[Callable[[int, int], Result], ...] = (trainer, callback)


def accelerate_loop() -> Result:
    """The plain loop of docs/how-to/distributed-training.md, on a tiny model."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = build_routed("llama", "jepa")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader = torch.utils.data.DataLoader(rows(16, padding=(0, 3)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses = []
    model.train()
    for batch in loader:
        with record_routes(model) as trace:
            output = model(**batch)
        loss = sum(routing_losses(trace, lm=output.loss).values())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {
        "world": accelerator.num_processes,
        "wrapped": type(model).__name__,
        "losses": losses,
        "state": adapter_state(model),
    }


def fitted(rank: int, world: int) -> Result:
    """A router that is fitted, not trained; eleven rows, so that the shares differ in size."""
    batches = [{"input_ids": part} for part in tokens(11, 96).split(4)]
    found: Result = {}
    memory = {
        "branch": "memory",
        "memory_slots": 2048,
        "memory_width": 16,
        "memory_heads": 1,
        "ngram_order": 2,
    }
    kinds: dict[str, dict[str, Any]] = {
        "affine": {"gate": "affine"},
        "mlp": {},
        "memory": {"gate": "affine"} | memory,
    }
    for name, fields in (kinds | {"prompts": {"phases": "prefill"}}).items():
        model = fit_router(
            build_base("llama"), batches, 0.6, DepthRouteConfig(layers="all", **fields)
        )
        record = remembered(model, "default").training or {}
        found[name] = {"state": adapter_state(model), "fit": record["fit"]}
    return found


def fitted_to_nan(rank: int, world: int) -> Result:
    """Errors of fits of a text with NaN in one of the last process's rows,
    one that is fitted on (18) or held out (19)."""
    found: Result = {}
    for phases in ("all", "prefill"):
        for row in (18, 19):
            base = build_base("llama")
            ids = tokens(20, 96).clamp(max=62)
            ids[row, 50] = 63
            with torch.no_grad():
                base.get_input_embeddings().weight[63] = torch.nan
            config = DepthRouteConfig(layers="all", phases=phases)
            try:
                fit_router(base, [{"input_ids": ids}], 0.6, config)
            except NonFiniteError as error:
                found[f"{phases} {row}"] = str(error)
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found = {"accelerate_loop": accelerate_loop()}  # comes first: it starts the process group
    rank, world = dist.get_rank(), dist.get_world_size()
    for scenario in (*STEPS, *SHARDED, *RUNS, fitted, fitted_to_nan):
        found[scenario.__name__] = scenario(rank, world)
        # Here and now: what is left of wrapped models holds threads and the process group.
        gc.collect()
    run_recipes(folder, folder)
    for name, result in found.items():
        torch.save(result, folder / f"{name}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
