"""Routers fitted without training, beside the best layers to leave out, at equal numbers of calls.

    python recipes/fit_router/run.py --seeds 0 1 2 3 4
    python recipes/fit_router/run.py --tune --seeds 5 --steps 200 --kinds static mlp
    python recipes/fit_router/run.py --seeds 0 1 2 3 4 --steps 200 --kinds static mlp
    python recipes/fit_router/report.py

Four bases: the two embedded ones, `../shared/data/stories260k`, and a GPT-2 that `--folder` gets
from a few minutes on Tiny-Shakespeare, on which nothing of the method was tuned. Both sides have
the same branches, fitted on the same text by the same least squares. Static dropping gets the best
of all subsets of layers, by the loss on text of its own; routers get one threshold from that text;
the loss is that of a third text. With `--steps` the branches of both sides are trained from there,
on 8 x 128 tokens a step, to the predictions of the dense base; the gates stay as they were fitted.
The kinds of `LEARNED` are gates that start from random weights and the same branches, in all layers
with one threshold, and train with them; `mlp_recoverability` starts from the fitted ones.
`static_memory` and `mlp_memory` are `static` and `mlp` with `branch="memory"`, which also looks
n-grams up; `static_rank` and `mlp_rank` have low-rank branches that multiply a token with as many
weights as those. The learning rate of each kind is the one with the lowest loss on the text to
choose on (`--tune`), with another seed. What `results.json` holds is not measured again, unless it
was trained at another rate or for other steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
EMBEDDED = HERE.parent / "embedded_base" / "model"
WIDE = HERE.parent / "embedded_base" / "wide"
BATCH = 8
KINDS = ("static", "mlp", "affine")  # the best layers left out, and the gates that are fitted
# The same with branches that also look n-grams up, and with ranks that multiply a token with as
# many weights as these.
OTHER_BRANCHES = ("static_memory", "mlp_memory", "static_rank", "mlp_rank")
MEMORY = {
    "branch": "memory",
    "memory_slots": 32768,
    "memory_width": 64,
    "memory_heads": 1,
    "ngram_order": 2,
}

# Gates that are learned, from random weights: fields of the adapter, and losses beside the
# divergence from the base.
_ORACLE = {
    "oracle": "all_full",
    "util_weight": 1.0,
    "rank_weight": 0.2,
    "budget_weight": 1.0,
    "alive_weight": 0.5,
}
LEARNED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "random": ({"gate": "random"}, {}),
    "linear": (
        {"gate": "linear", "threshold": "budget"},
        {"budget_weight": 1.0, "alive_weight": 0.5},
    ),
    "oracle": ({"gate": "mlp"}, _ORACLE),
    "jepa": (
        {"gate": "jepa", "context_dim": 51, "summary_dim": 26, "action_dim": 6},
        _ORACLE | {"jepa_weight": 1.0},
    ),
    "similarity": ({"gate": "mlp"}, {"similarity_weight": 1.0}),
    "recoverability": ({"gate": "mlp"}, {"recoverability_weight": 1.0}),
    "annealed": (
        {"gate": "mlp"},
        {"recoverability_weight": 1.0, "budget_start": 1.0, "budget_schedule_steps": 750},
    ),
    "gumbel": ({"gate": "mlp", "selection": "gumbel"}, {"budget_weight": 1.0, "alive_weight": 0.5}),
    "controller": ({"gate": "mlp", "selection": "controller"}, {"controller_step": 0.1}),
}
RELEARNED = "mlp_recoverability"  # the fitted gates, trained on by the labels of `recoverability`


@dataclass
class Text:
    """Token ids `[rows, length]`: to fit on, to choose layers and thresholds on, to report."""

    fit: torch.Tensor
    choose: torch.Tensor
    report: torch.Tensor

    def drawn(self, rows: int, seed: int) -> list[dict[str, torch.Tensor]]:
        """Batches of `rows` rows to fit on, drawn with `seed`."""
        order = torch.randperm(len(self.fit), generator=torch.Generator().manual_seed(seed))
        return batches(self.fit[order[:rows]])


@dataclass
class Base:
    """A base with its text; `dropped` are the numbers of layers that static dropping leaves out."""

    model: Callable[[], Any]
    text: Text
    dropped: tuple[int, ...]
    rows: int


def batches(ids: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": part} for part in ids.split(BATCH)]


def blocks(ids: Any, length: int) -> torch.Tensor:
    flat = torch.as_tensor(ids)
    return flat[: len(flat) // length * length].view(-1, length)


def load(path: Path, dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    """A base in evaluation mode; `changed` are fields of its configuration."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, trust_remote_code=False, **changed
    ).eval()


def embedded() -> Base:
    return python_sources(EMBEDDED, torch.float32)


def wide() -> Base:
    """As it is stored, since half an hour of float32 is minutes of bfloat16 where
    processors have it."""
    return python_sources(WIDE, torch.bfloat16)


def python_sources(folder: Path, dtype: torch.dtype) -> Base:
    from transformers import AutoTokenizer

    from hf_depthroute.data import load_text, pack

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    train, held = (
        torch.tensor(pack(load_text("python-stdlib", split=split), tokenizer, 256)["input_ids"])
        for split in ("train", "validation")
    )
    held = held[torch.randperm(len(held), generator=torch.Generator().manual_seed(0))]
    return Base(
        lambda: load(folder, dtype), Text(train, held[:64], held[64:192]), (1, 2, 3), rows=64
    )


def stories(data: Path) -> Base:
    from transformers import AutoTokenizer

    folder = data / "stories260k"
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    ids = tokenizer((data / "stories.txt").read_text(), add_special_tokens=False).input_ids
    rows = blocks(ids, 256)
    first, second = int(0.7 * len(rows)), int(0.8 * len(rows))
    return Base(
        lambda: load(folder), Text(rows[:first], rows[first:second], rows[second:]), (1, 2), rows=64
    )


def shakespeare(data: Path, folder: Path) -> Base:
    rows = blocks(list((data / "tinyshakespeare.txt").read_bytes()), 128)
    first, second = int(0.8 * len(rows)), int(0.85 * len(rows))
    text = Text(rows[:first], rows[first:second], rows[second : second + 256])
    if not (folder / "config.json").exists():
        pretrain(text.fit, folder)
    # What trains in a base that drops out learns to make up for that, and is worse at inference
    # than what was fitted.
    kept = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return Base(lambda: load(folder, **kept), text, (1, 2, 3), rows=128)


def pretrain(rows: torch.Tensor, folder: Path, steps: int = 2000) -> None:
    """A GPT-2 on bytes, 1.2 million weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": 128, "n_embd": 128, "n_layer": 6, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=None, eos_token_id=None, **sizes)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-3, total_steps=steps, pct_start=0.05
    )
    for step in range(steps):
        ids = rows[torch.randint(len(rows), (16,))]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"pretraining, step {step}: loss {float(loss):.3f}", flush=True)
    model.save_pretrained(folder)


@torch.no_grad()
def row_losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The mean loss of each row, nats."""
    from hf_depthroute.base.lm_head import token_losses

    found = []
    for batch in batches(ids):
        logits = model(**batch, use_cache=False).logits
        losses = token_losses(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
        found.append(losses.view(len(logits), -1).mean(1))
    return torch.cat(found).double()


def branch_of(kind: str, width: int) -> dict[str, Any]:
    """The fields of the branch of a kind, on a base of a width."""
    return {"memory": MEMORY, "rank": {"branch_rank": width // 8 + 64}}.get(
        kind.partition("_")[2], {}
    )


def left_out(base: Base, layers: tuple[int, ...], seed: int, kind: str = "static") -> Any:
    """The base with the FFNs of `layers` replaced by fitted branches."""
    from hf_depthroute import DepthRouteConfig, get_depth_routed_model
    from hf_depthroute.inference.fitting import fit_branches

    model = base.model()
    config = DepthRouteConfig(
        layers=list(layers), gate="none", seed=seed, **branch_of(kind, model.config.hidden_size)
    )
    model = get_depth_routed_model(model, config).eval()
    fit_branches(model, base.text.drawn(base.rows, seed))
    return model


def best_subset(base: Base, count: int, kind: str = "static") -> dict[str, Any]:
    """The layers whose absence costs least on the text to choose on:
    every subset is fitted and tried."""
    depth = base.model().config.num_hidden_layers
    losses = {
        subset: float(row_losses(left_out(base, subset, 0, kind), base.text.choose).mean())
        for subset in itertools.combinations(range(depth), count)
    }
    return {"layers": list(min(losses, key=losses.__getitem__)), "tried": len(losses)}


def fitted(base: Base, kind: str, keep: float, seed: int) -> tuple[Any, dict[str, Any]]:
    """A fitted router, with its thresholds set on the text to choose on, and what was found."""
    from hf_depthroute import DepthRouteConfig, calibrate, fit_router
    from hf_depthroute.training.record import remembered

    model = base.model()
    branch = branch_of(kind, model.config.hidden_size)
    config = DepthRouteConfig(layers="all", gate=kind.partition("_")[0], seed=seed, **branch)
    model = fit_router(model, base.text.drawn(base.rows, seed), keep=keep, config=config)
    calibrate(model, batches(base.text.choose))
    record = remembered(model, "default").training
    assert record is not None
    return model, record


def losses_of(kind: str) -> dict[str, Any]:
    """What trains the gates of a kind; nothing where they stay as they were fitted."""
    return (
        LEARNED["recoverability" if kind == RELEARNED else kind][1]
        if kind in (*LEARNED, RELEARNED)
        else {}
    )


def share_of_calls(model: Any, ids: torch.Tensor) -> float:
    from hf_depthroute.base.stack import stack_of
    from hf_depthroute.routing.trace import count_routes

    with count_routes(model) as counter, torch.no_grad():
        for batch in batches(ids):
            model(**batch, use_cache=False)
    ratios, depth = counter.full_ratio(), len(stack_of(model).layers)
    return (sum(ratios.values()) + depth - len(ratios)) / depth


def learner(base: Base, kind: str, keep: float, seed: int) -> Any:
    """Fitted branches in all layers, and a gate of `LEARNED` that knows nothing yet."""
    from hf_depthroute import DepthRouteConfig, get_depth_routed_model
    from hf_depthroute.inference.fitting import fit_branches

    config = DepthRouteConfig(
        layers="all", budget=keep, budget_scope="global", seed=seed, **LEARNED[kind][0]
    )
    model = get_depth_routed_model(base.model(), config).eval()
    fit_branches(model, base.text.drawn(base.rows, seed))
    return model


def trained(model: Any, base: Base, seed: int, steps: int, rate: float, **losses: Any) -> None:
    """Train to the predictions of the dense base, with the gates where they have `losses`;
    set thresholds anew."""
    from hf_depthroute import DepthRouteTrainer, DepthRouteTrainingArguments, calibrate
    from hf_depthroute.inference.calibration import active_routings

    rows = base.text.fit.reshape(-1, 128)
    arguments = DepthRouteTrainingArguments(
        output_dir=tempfile.gettempdir(), max_steps=steps, learning_rate=rate, warmup_steps=20, seed=seed,
        per_device_train_batch_size=8, logging_steps=50, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, **{
            "train_gates": bool(losses), "lm_weight": 0.0, "distill_weight": 1.0,
            "util_weight": 0.0, "rank_weight": 0.0, "jepa_weight": 0.0, "budget_weight": 0.0,
            "alive_weight": 0.0, **losses,
        },
    )  # fmt: skip
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    DepthRouteTrainer(model=model, args=arguments, train_dataset=dataset).train()
    model.eval()
    if active_routings(model)[0].active_config().takes_budget():
        calibrate(model, batches(base.text.choose))


class Results:
    """What was measured, by base and key; each entry is written as soon as it is there.

    Processes may share a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, dict[str, Any]] = {}
        self._read()

    def once(
        self,
        base: str,
        key: str,
        measure: Callable[[], dict[str, Any]],
        trained: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """What is known of `key`, measured where it is not,
        or was not trained with the values of `trained`."""
        from hf_depthroute.files.locks import locked
        from hf_depthroute.files.staged import write_text

        known = self.found.get(base, {}).get(key)
        if known is None or (trained and not trained.items() <= known.get("trained", {}).items()):
            known = measure()
            with locked(HERE, TimeoutError(f"{HERE} is locked"), patience=60):
                self._read()
                self.found.setdefault(base, {})[key] = known
                write_text(self.path, json.dumps(self.found, indent=1) + "\n")
            print(base, key, known, flush=True)
        return known

    def _read(self) -> None:
        if self.path.exists():
            self.found = json.loads(self.path.read_text())


def best_layers(name: str, base: Base, kind: str, count: int, results: Results) -> tuple[int, ...]:
    """The `count` layers that `kind` leaves out."""
    key = f"subset{kind.removeprefix('static')} {count}"
    return tuple(results.once(name, key, lambda: best_subset(base, count, kind))["layers"])


def rate_of(found: dict[str, Any], kind: str, steps: int) -> float:
    """The learning rate with the lowest loss on the text to choose on, after as many steps."""
    tuned = {
        row["rate"]: row["more"]
        for key, row in found.items()
        if key.startswith(f"tuning {kind} {steps} ")
    }
    return min(tuned, key=tuned.__getitem__)


def tune(
    name: str,
    base: Base,
    seed: int,
    kinds: list[str],
    steps: int,
    first_rate: float,
    results: Results,
) -> None:
    """Two layers' worth of calls skipped, trained at rates that double, or halve,
    until the loss rises."""
    dense = float(row_losses(base.model(), base.text.choose).mean())
    depth = base.model().config.num_hidden_layers

    def measured(kind: str, rate: float) -> dict[str, Any]:
        keep = 1 - 2 / depth
        if kind.startswith("static"):
            model = left_out(base, best_layers(name, base, kind, 2, results), seed, kind)
        elif kind in LEARNED:
            model = learner(base, kind, keep, seed)
        else:
            model = fitted(base, kind, keep, seed)[0]
        trained(model, base, seed, steps, rate, **losses_of(kind))
        return {
            "rate": rate,
            "steps": steps,
            "more": float(row_losses(model, base.text.choose).mean()) - dense,
        }

    def loss(kind: str, rate: float) -> float:
        return float(
            results.once(name, f"tuning {kind} {steps} {rate:g}", lambda: measured(kind, rate))[
                "more"
            ]
        )

    for kind in kinds:
        rate, factor = (
            first_rate,
            2.0 if loss(kind, first_rate * 2) < loss(kind, first_rate) else 0.5,
        )
        while loss(kind, rate * factor) < loss(kind, rate):
            rate *= factor


def known_pairs(base: Base) -> dict[str, Any]:
    """The shares of the tokens, and of the pairs of tokens,
    to report on that the text to fit on holds (seed 0)."""
    fit, report = (
        torch.cat([batch["input_ids"] for batch in base.text.drawn(base.rows, 0)]),
        base.text.report,
    )
    fit_pairs, pairs = (
        torch.stack([ids[:, :-1], ids[:, 1:]], -1).flatten(0, 1) for ids in (fit, report)
    )
    both = torch.cat([fit_pairs, pairs]).unique(dim=0, return_inverse=True)[1]
    known = torch.isin(both[len(fit_pairs) :], both[: len(fit_pairs)])
    return {
        "tokens": float(torch.isin(report, fit).float().mean()),
        "pairs": float(known.float().mean()),
    }


def study(
    name: str, base: Base, seeds: list[int], kinds: list[str], steps: int, results: Results
) -> None:
    dense = row_losses(base.model(), base.text.report)
    depth = base.model().config.num_hidden_layers

    def with_training(kind: str) -> dict[str, Any] | None:
        return (
            {"steps": steps, "rate": rate_of(results.found[name], kind, steps)} if steps else None
        )

    def measured(model: Any) -> dict[str, Any]:
        more = row_losses(model, base.text.report) - dense
        return {"more": float(more.mean()), "error": float(more.std() / len(more) ** 0.5)}

    def and_trained(model: Any, kind: str, seed: int) -> dict[str, Any]:
        """What is known of the model, and after training where that is asked for;
        shares of routers only."""
        found = measured(model)
        how = with_training(kind)
        if how is None:
            return found
        trained(model, base, seed, **how, **losses_of(kind))
        after = how | measured(model)
        return found | {
            "trained": after
            | (
                {}
                if kind.startswith("static")
                else {"share": share_of_calls(model, base.text.report)}
            )
        }

    def static(kind: str, count: int, seed: int) -> dict[str, Any]:
        model = left_out(base, best_layers(name, base, kind, count, results), seed, kind)
        return {"share": 1 - count / depth} | and_trained(model, kind, seed)

    def routed(kind: str, keep: float, seed: int) -> dict[str, Any]:
        started = time.perf_counter()
        model, record = fitted(base, kind, keep, seed)
        seconds = time.perf_counter() - started
        fit = record["fit"]
        shares = {index: round(layer["share"], 3) for index, layer in fit["layers"].items()}
        return {
            "share": share_of_calls(model, base.text.report), "seconds": round(seconds),
            "shares": shares,
            "rounds": [loss - fit["loss_dense"] for loss in fit["loss_of_rounds"]],
        } | and_trained(model, kind, seed)  # fmt: skip

    def from_nothing(kind: str, keep: float, seed: int) -> dict[str, Any]:
        model, how = learner(base, kind, keep, seed), with_training(kind)
        assert how is not None
        trained(model, base, seed, **how, **losses_of(kind))
        return {
            "trained": how | measured(model) | {"share": share_of_calls(model, base.text.report)}
        }

    tokens = {"fit": base.rows * base.text.fit.shape[1]}
    tokens |= {part: getattr(base.text, part).numel() for part in ("choose", "report")}
    results.once(name, "dense", lambda: {"loss": float(dense.mean()), "tokens": tokens})

    results.once(name, "known", lambda: known_pairs(base))

    def result(kind: str, count: int, seed: int) -> dict[str, Any]:
        if kind.startswith("static"):
            return static(kind, count, seed)
        return (from_nothing if kind in LEARNED else routed)(kind, 1 - count / depth, seed)

    for seed, count, kind in itertools.product(seeds, base.dropped, kinds):
        how = with_training(kind)
        results.once(
            name, f"{kind} {count} {seed}", functools.partial(result, kind, count, seed), how
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bases", nargs="+", default=["embedded", "wide", "stories260k", "shakespeare"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    every = [*KINDS, *OTHER_BRANCHES, *LEARNED, RELEARNED]
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=every)
    parser.add_argument(
        "--counts",
        nargs="+",
        type=int,
        help="layers' worth of calls to skip; default: those of a base",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        help="of training, from the fit and from the layers left out",
    )
    parser.add_argument("--rate", type=float, default=1e-3, help="the first that --tune tries")
    parser.add_argument(
        "--tune", action="store_true", help="try learning rates instead, with the first seed"
    )
    parser.add_argument("--data", type=Path, default=HERE.parents[2] / "shared" / "data")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("fit_router_base"),
        help="for the base that is pretrained",
    )
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if not args.steps and (args.tune or set(args.kinds) & set(LEARNED)):
        parser.error("--tune, and gates that start from nothing, need --steps")
    torch.set_num_threads(args.threads)
    makers = {
        "embedded": embedded,
        "wide": wide,
        "stories260k": lambda: stories(args.data),
        "shakespeare": lambda: shakespeare(args.data, args.folder),
    }
    results = Results(args.out)
    for name in args.bases:
        if args.tune:
            tune(name, makers[name](), args.seeds[0], args.kinds, args.steps, args.rate, results)
        else:
            base = makers[name]()
            counts = args.counts or base.dropped
            study(
                name,
                dataclasses.replace(base, dropped=tuple(counts)),
                args.seeds,
                args.kinds,
                args.steps,
                results,
            )


if __name__ == "__main__":
    main()
