"""Counterfactual gate supervision on the memory that it was made for,
from scratch at a size of minutes.

    python recipes/engram/run.py --tune --seeds 5 --steps 1000 --rate 4e-3
    python recipes/engram/run.py --seeds 0 1 2
    python recipes/engram/run.py --gradients --steps 120
    python recipes/engram/report.py

A Llama of 6 layers and width 128 trains from random weights on Python sources, with a memory in
front of layers 1, 2 and 3 that trains with it. `memory` has the language-model loss alone; `cgs`
also supervises the gates by what the memory is worth, `weak` with a hundredth of the weight,
`smooth` by the mean of that worth over 9 tokens, and `curriculum` and `curriculum_slow` from the
middle of the training on; `equal` is `memory` for as many more steps as `cgs` takes longer, and
`none` has no memory. The optimizer is that of the published study, its warm-up scaled with
`--steps`; the learning rates of `none`, `memory` and `cgs` are those with the lowest loss on text
of its own (`--tune`), with another seed, of the search nearest in steps, and `equal`, `weak` and
`curriculum_slow` have that of `memory`, the rest that of `cgs`. What `results.json` holds is not
measured again. `--gradients` measures how large the gradients of both losses are. `--size paper` is
the published study, from the Hub, for a GPU, where it has not been run: 332.9 M parameters
(`--count`), rates that are published.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `study` is there

import torch
import transformers
from study.metrics import oracle_auc
from study.step_ratio import Stopwatch
from study.utility import utility_labels

from hf_depthroute import (
    DepthRouteConfig,
    DepthRouteTrainer,
    DepthRouteTrainingArguments,
    get_depth_routed_model,
    preset,
    record_routes,
)
from hf_depthroute.base.lm_head import token_losses
from hf_depthroute.base.stack import stack_of
from hf_depthroute.parts.memory import NgramMemory, suffixes
from hf_depthroute.training import losses

HERE = Path(__file__).parent
TOKENIZER = HERE.parent / "embedded_base" / "model"
KINDS = ("none", "memory", "cgs", "equal", "weak", "smooth", "curriculum", "curriculum_slow")
# lambda.
SUPERVISED = {"cgs": 0.5, "weak": 0.005, "smooth": 0.5, "curriculum": 0.5, "curriculum_slow": 0.5}
RATE_OF = {  # whose learning rate a kind has that has no search of its own
    "equal": "memory", "weak": "memory", "curriculum_slow": "memory", "smooth": "cgs",
    "curriculum": "cgs",
}  # fmt: skip
BATCH = 16
POINTS = 10  # of the curves
SMOOTHED = 9  # tokens
PACKAGES = ("networkx", "numpy", "sympy", "torch")  # what torch needs, and torch

Texts = dict[str, torch.Tensor]  # token ids `[rows, T]`: "train" on, "choose" rates on, "report"


def python_sources() -> Texts:
    """Rows of 256 tokens of the standard library."""
    from hf_depthroute.data import load_text

    return held_apart(load_text("python-stdlib"), load_text("python-stdlib", split="validation"))


def package_sources() -> Texts:
    """Rows of 256 tokens of the standard library and of `PACKAGES` without their tests:
    2,000 steps read none twice.

    As in the standard library, a file is held out when the CRC of its path is divisible by 20.
    """
    import datasets

    from hf_depthroute.data import load_text

    texts: dict[str, list[str]] = {"train": [], "validation": []}
    for package in map(importlib.import_module, PACKAGES):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root.parent)
            if not {"benchmarks", "test", "tests", "testing"} & set(relative.parts):
                held = zlib.crc32(relative.as_posix().encode()) % 20 == 0
                texts["validation" if held else "train"].append(
                    path.read_text(encoding="utf-8", errors="replace")
                )
    return held_apart(
        *(
            datasets.concatenate_datasets(
                [
                    load_text("python-stdlib", split=split),
                    datasets.Dataset.from_dict({"text": found}),
                ]
            )
            for split, found in texts.items()
        )
    )


def held_apart(train: Any, held: Any) -> Texts:
    """Two datasets of texts as rows of 256 tokens; the second to choose on and to report."""
    from transformers import AutoTokenizer

    from hf_depthroute.data import pack

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER, trust_remote_code=False)
    rows, kept = (torch.tensor(pack(texts, tokenizer, 256)["input_ids"]) for texts in (train, held))
    kept = kept[torch.randperm(len(kept), generator=torch.Generator().manual_seed(0))]
    return {"train": rows, "choose": kept[:64], "report": kept[64:192]}


def described(text: Texts, packages: tuple[str, ...]) -> dict[str, Any]:
    """How many tokens each part of a text has, and what it is from."""
    versions = {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in packages
    }
    return {"tokens": {part: rows.numel() for part, rows in text.items()}, "versions": versions}


def web_pages() -> Texts:
    """Rows of 1,024 tokens of FineWeb-Edu, 95 M to train on, from the Hub."""
    from transformers import AutoTokenizer

    from hf_depthroute.data import load_text, pack

    tokenizer = AutoTokenizer.from_pretrained("deepseek-ai/DeepSeek-V3", trust_remote_code=False)
    pages = load_text("HuggingFaceFW/fineweb-edu", name="sample-10BT", streaming=True)
    rows = (torch.tensor(row["input_ids"]) for row in pack(pages, tokenizer, 1024))
    held = torch.stack(list(itertools.islice(rows, 576)))
    train = torch.stack(list(itertools.islice(rows, 95_000_000 // 1024)))
    return {"train": train, "choose": held[:64], "report": held[64:]}


@dataclasses.dataclass(frozen=True)
class Size:
    """A base, its memory and its text.

    Attributes:
        base: Makes the base, with random weights.
        slots: Number of slots in the table of a layer.
        layers: Which have a memory.
        texts: Reads the text.
        rate: The learning rate that a search begins with; of kinds without a search, theirs.
    """

    base: Callable[[], Any]
    slots: int
    layers: list[int]
    texts: Callable[[], Texts]
    rate: float


def tiny_llama() -> Any:
    """1.8 million parameters, memory apart."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=2048, hidden_size=128, intermediate_size=384, num_hidden_layers=6,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256,
            tie_word_embeddings=False,
        )
    )  # fmt: skip


def gpt2() -> Any:
    """That of the publication."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=128_815,
            tie_word_embeddings=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


SIZES = {
    "small": Size(tiny_llama, 20_000, [1, 2, 3], python_sources, 2e-3),
    # The rate of "small" after 1,000 steps.
    "packages": Size(tiny_llama, 20_000, [1, 2, 3], package_sources, 4e-3),
    "paper": Size(gpt2, 500_000, [2, 4, 6], web_pages, 6e-4),
}


def base(size: Size, seed: int) -> Any:
    """The same weights for every kind of a seed."""
    torch.manual_seed(seed)
    return size.base()


def with_memory(size: Size, seed: int) -> Any:
    """The base with a memory; all of it trains."""
    fields = preset("counterfactual-gate-supervision-memory")[0].to_dict()
    sizes = {name: fields[name] for name in ("memory_width", "memory_heads", "ngram_order")}
    config = DepthRouteConfig(
        target="memory", layers=size.layers, memory_slots=size.slots, seed=seed, **sizes
    )
    return get_depth_routed_model(base(size, seed), config).requires_grad_(True)


def smoothed_loss(inputs: losses.LossInputs) -> torch.Tensor | None:
    """`cgs_loss` with labels that are means over 9 neighbouring tokens."""
    if inputs.counterfactual is None:
        return None
    means = {}
    for index, labels in inputs.counterfactual.items():
        counted = torch.stack(
            [labels.utility * labels.valid, labels.valid.to(labels.utility)], dim=1
        )
        sums = torch.nn.functional.avg_pool1d(counted, SMOOTHED, stride=1, padding=SMOOTHED // 2)
        means[index] = dataclasses.replace(labels, utility=sums[:, 0] / sums[:, 1].clamp(min=1e-6))
    return losses.cgs_loss(dataclasses.replace(inputs, counterfactual=means))


def heat(model: Any, train: torch.Tensor, report: torch.Tensor) -> torch.Tensor:
    """How often the training text looks the slots of a token up, mean of the logarithms,
    `[rows, T]`; first memory."""
    routing = next(module for module in model.modules() if isinstance(module, NgramMemory))
    order = model.peft_config["default"].ngram_order
    counts = torch.zeros(len(routing.table))
    for rows in train.split(512):
        counts += torch.bincount(
            routing.slots(suffixes(rows, order, None)).flatten(), minlength=len(counts)
        )
    return counts[routing.slots(suffixes(report, order, None))].add(1).log().mean(-1)


@torch.no_grad()
def measured(model: Any, report: torch.Tensor, hot: torch.Tensor | None) -> dict[str, Any]:
    """Loss, and of a memory those of tokens with hot and cold slots with the mean
    `alpha` of each layer.

    Args:
        report: Token ids `[rows, T]`.
        hot: Which tokens are hot, bool of the same shape; the others are cold. None where there is
            no memory.
    """
    model.eval()
    found, alphas = [], []
    for ids in report.to(model.device).split(BATCH):
        with contextlib.nullcontext({}) if hot is None else record_routes(model) as trace:
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        found.append(
            token_losses(logits.flatten(0, 1), ids[:, 1:].flatten()).view(len(ids), -1).cpu()
        )
        alphas.append(
            torch.stack([record.probs for record in trace.values()]).cpu()
            if hot is not None
            else None
        )
    model.train()
    loss = torch.cat(found)
    point: dict[str, Any] = {"loss": float(loss.mean())}
    if hot is not None:
        alpha = torch.cat(alphas, dim=1)[..., :-1]
        for name, chosen in (("hot", hot[:, :-1]), ("cold", ~hot[:, :-1])):
            point |= {
                name: float(loss[chosen].mean()),
                f"alpha_{name}": alpha[:, chosen].mean(-1).tolist(),
            }
    return point


def areas(model: Any, report: torch.Tensor) -> dict[str, float | None]:
    """By layer, how well `alpha` tells where the memory helps: the area under the ROC curve."""
    model.eval()
    seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for ids in report.to(model.device).split(BATCH):
        batch = {"input_ids": ids, "labels": ids}
        with torch.no_grad(), record_routes(model) as trace:
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
        for index, labels in utility_labels(model, batch, "on_policy", window=1).items():
            seen.setdefault(index, []).append(
                (trace[index].probs[labels.valid], labels.utility[labels.valid])
            )
    return {
        str(index): oracle_auc(*(torch.cat(part) for part in zip(*rows)))
        for index, rows in seen.items()
    }


class Curve(transformers.TrainerCallback):
    """`measure` at equal distances over a training, and at its end."""

    def __init__(self, steps: int, measure: Callable[[], dict[str, Any]]) -> None:
        self.every, self.measure = max(1, steps // POINTS), measure
        self.points: list[dict[str, Any]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self.points.append({"step": state.global_step} | self.measure())


def train(
    kind: str, text: Texts, part: str, seed: int, steps: int, rate: float, size: Size
) -> dict[str, Any]:
    """Train one kind from scratch; its curve on a part of the text, and the areas at its end."""
    model = base(size, seed) if kind == "none" else with_memory(size, seed)
    hot = None
    if kind != "none":
        warmth = heat(model, text["train"], text[part])
        hot = warmth > warmth.median()
    trainer = trainer_of(kind, model, text["train"], seed, steps, rate)
    curve = Curve(steps, lambda: measured(model, text[part], hot))
    trainer.add_callback(curve)
    trainer.add_callback(watch := Stopwatch())
    with cgs_as(smoothed_loss if kind == "smooth" else losses.cgs_loss):
        trainer.train()
    found = {"steps": steps, "rate": rate, "seconds": round(watch.seconds), "curve": curve.points}
    return found if kind == "none" else found | {"areas": areas(model, text[part])}


@contextlib.contextmanager
def cgs_as(compute: Callable[[losses.LossInputs], torch.Tensor | None]) -> Iterator[None]:
    """Trainings take another function for the supervision of gates."""
    cgs = losses.LOSSES["cgs"]
    losses.LOSSES["cgs"] = losses.LossTerm(cgs.weight, compute)
    try:
        yield
    finally:
        losses.LOSSES["cgs"] = cgs


def gradients(text: Texts, seed: int, steps: int, rate: float, size: Size) -> dict[str, Any]:
    """Norms of the gradients of both losses, by part of the model,
    medians over the last half of the labelled steps.

    The supervision is taken with a weight of 1; table and projections are those of the layer that
    it supervises.
    """
    model = with_memory(size, seed)
    layers = stack_of(model).layers
    seen: list[dict[str, list[float]]] = []

    def observed(inputs: losses.LossInputs) -> torch.Tensor | None:
        found = losses.cgs_loss(inputs)
        if inputs.counterfactual is None or found is None or inputs.lm is None:
            return found
        (layer,) = inputs.counterfactual
        memory = {
            name: weight
            for name, weight in layers[layer].named_parameters()
            if "depth_route" in name
        }
        parts = {
            "embedding": [model.get_input_embeddings().weight],
            "first layer": list(layers[0].parameters()),
            "projections": [
                weight for name, weight in memory.items() if not name.endswith(".table")
            ],
            "table": [weight for name, weight in memory.items() if name.endswith(".table")],
        }
        row = {}
        for part, weights in parts.items():
            both = [
                torch.autograd.grad(loss, weights, retain_graph=True, materialize_grads=True)
                for loss in (inputs.lm, found)
            ]
            row[part] = [
                float(torch.cat([one.flatten() for one in grads]).norm()) for grads in both
            ]
        seen.append(row)
        return found

    with cgs_as(observed):
        trainer_of("cgs", model, text["train"], seed, steps, rate).train()
    last = seen[len(seen) // 2 :]
    medians = {
        part: {
            name: statistics.median(row[part][i] for row in last)
            for i, name in enumerate(("lm", "cgs"))
        }
        for part in last[0]
    }
    return {"seed": seed, "steps": steps, "rate": rate, "parts": medians}


def trainer_of(
    kind: str, model: Any, rows: torch.Tensor, seed: int, steps: int, rate: float
) -> transformers.Trainer:
    """The published optimizer; a tenth of the steps passes before gates are supervised,
    with a curriculum a half."""
    common = {
        "output_dir": tempfile.gettempdir(), "max_steps": steps, "learning_rate": rate,
        "seed": seed, "per_device_train_batch_size": BATCH, "warmup_steps": steps // 20,
        "weight_decay": 0.1, "adam_beta2": 0.95, "lr_scheduler_type": "cosine",
        "logging_steps": max(1, steps // POINTS), "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "bf16": torch.cuda.is_available(),
    }  # fmt: skip
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    if kind == "none":
        return transformers.Trainer(
            model, transformers.TrainingArguments(**common), train_dataset=dataset
        )
    supervised = {
        "cgs_weight": SUPERVISED.get(kind, 0.0),
        "cgs_interval": 4,
        "cgs_warmup": steps // (2 if kind.startswith("curriculum") else 10),
    }
    arguments = DepthRouteTrainingArguments(**common, **(supervised if kind in SUPERVISED else {}))
    return DepthRouteTrainer(model=model, args=arguments, train_dataset=dataset)


def step_ratio(text: Texts, size: Size, steps: int = 16, rounds: int = 5) -> dict[str, Any]:
    """What a supervised step takes of a plain one: short trainings in turn."""
    times: dict[str, list[float]] = {"memory": [], "cgs": []}
    for _, kind in itertools.product(range(rounds + 1), times):
        trainer = trainer_of(kind, with_memory(size, 0), text["train"], 0, steps, 1e-4)
        trainer.add_callback(watch := Stopwatch())
        trainer.train()
        times[kind].append(watch.seconds)
    # The first round warms up.
    ratios = [cgs / memory for memory, cgs in list(zip(times["memory"], times["cgs"]))[1:]]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if rounds > 1 else 0.0
    return {"ratio": statistics.median(ratios), "error": error, "rounds": rounds, "steps": steps}


class Results:
    """What was measured, by key; each entry is written as soon as it is there.

    Processes may share a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {}
        self._read()

    def once(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What is known of `key`, measured where nothing is."""
        from hf_depthroute.files.locks import locked
        from hf_depthroute.files.staged import write_text

        self._read()
        if key not in self.found:
            known = measure()
            with locked(HERE, TimeoutError(f"{HERE} is locked"), patience=60):
                self._read()
                self.found[key] = known
                write_text(self.path, json.dumps(self.found, indent=1) + "\n")
            print(key, known["curve"][-1] if "curve" in known else known, flush=True)
        return self.found[key]

    def _read(self) -> None:
        if self.path.exists():
            self.found = json.loads(self.path.read_text())

    def rate(self, kind: str, size: Size, steps: int) -> float:
        """The learning rate of a kind: of the search for it, or for the kind it varies,
        that is nearest in steps."""
        tuned = RATE_OF.get(kind, kind)
        rows = [row for key, row in self.found.items() if key.startswith(f"tuning {tuned} ")]
        if not rows:
            return size.rate
        best = min(
            rows, key=lambda row: (abs(math.log(row["steps"] / steps)), row["curve"][-1]["loss"])
        )
        return float(best["rate"])


def tune(
    text: Texts, seed: int, kinds: list[str], steps: int, rate: float, size: Size, results: Results
) -> None:
    """Rates that double, or halve, until the loss rises."""

    def loss(kind: str, rate: float) -> float:
        key = f"tuning {kind} {steps} {rate:g}"
        found = results.once(key, lambda: train(kind, text, "choose", seed, steps, rate, size))
        return float(found["curve"][-1]["loss"])

    for kind in kinds:
        best, factor = rate, 2.0 if loss(kind, rate * 2) < loss(kind, rate) else 0.5
        while loss(kind, best * factor) < loss(kind, best):
            best *= factor


def parameters(size: Size) -> int:
    """How many the base with its memory has; no weight is made."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in with_memory(size, 0).parameters())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument(
        "--tune", action="store_true", help="try learning rates instead, with the first seed"
    )
    parser.add_argument("--rate", type=float, help="the first that --tune tries")
    parser.add_argument(
        "--gradients", action="store_true", help="measure gradients instead, with the first seed"
    )
    parser.add_argument(
        "--count", action="store_true", help="count the parameters, and train nothing"
    )
    parser.add_argument(
        "--out", type=Path, help="default: results.json beside this file; of other sizes, SIZE.json"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    size = SIZES[args.size]
    if args.count:
        print(f"{parameters(size) / 1e6:.1f} M parameters")
        return
    torch.set_num_threads(args.threads)
    text = size.texts()
    results = Results(
        args.out or HERE / ("results.json" if args.size == "small" else f"{args.size}.json")
    )
    if args.tune:
        tuned = [kind for kind in args.kinds if kind in ("none", "memory", "cgs")]
        tune(text, args.seeds[0], tuned, args.steps, args.rate or size.rate, size, results)
        return
    if args.gradients:
        rate = results.rate("cgs", size, args.steps)
        results.once("gradients", lambda: gradients(text, args.seeds[0], args.steps, rate, size))
        return
    results.once("text", lambda: described(text, PACKAGES if args.size == "packages" else ()))
    more = 1.0
    if "equal" in args.kinds:
        ratio = results.once("step", lambda: step_ratio(text, size))["ratio"]
        more += (ratio - 1) * 0.9  # supervised after the first tenth
    for seed, kind in itertools.product(args.seeds, args.kinds):
        steps = round(args.steps * more) if kind == "equal" else args.steps
        rate = results.rate(kind, size, args.steps)
        key = f"{kind} {seed} {args.steps}"
        run = results.once(
            key, lambda k=kind, s=seed, n=steps, r=rate: train(k, text, "report", s, n, r, size)
        )
        if run["rate"] != rate:
            raise SystemExit(
                f"{results.path.name}: {key!r} was trained at {run['rate']:g}, the search says "
                f"{rate:g}; take it out to train it again"
            )


if __name__ == "__main__":
    main()
