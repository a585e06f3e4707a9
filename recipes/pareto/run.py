"""Train every method of `configs/` at every budget and seed, and measure its losses.

    python recipes/pareto/run.py --out OUT --jobs 2
    python recipes/pareto/run.py --out OUT --only ffn_mlp static_ffn --seeds 0

A run lives in `OUT/runs/METHOD/POINT/SEED/`: the adapter, and `run.json` last. A run that is there is not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SWEPT = ("budgets", "depth_weights", "dropped")  # what makes the points of a method


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        method: Name of a file in `configs/`.
        point: Its budget, its depth weight, or how many layers it drops.
        seed: Draws the adapter's weights and the order of the data.
    """

    method: str
    point: float
    seed: int

    def folder(self, out: Path) -> Path:
        return out / "runs" / self.method / f"{self.point:g}" / str(self.seed)


def read_yaml(path: Path) -> dict[str, Any]:
    from hf_depthroute.files.strict_yaml import read_mapping

    return read_mapping(path)


def methods() -> dict[str, dict[str, Any]]:
    return {path.stem: read_yaml(path) for path in sorted((HERE / "configs").glob("*.yaml"))}


def points(method: dict[str, Any]) -> tuple[str, list[float]]:
    """What the method sweeps, and the values."""
    kind = next(name for name in SWEPT if name in method)
    return kind, method[kind]


def load_blocks(setting: dict[str, Any], out: Path) -> Any:
    """Training and validation blocks, int32 `[N, T]` and `[M, T]`; tokenised once."""
    from hf_depthroute.data.blocks import prepare_blocks, read_blocks

    path = out / "blocks.safetensors"
    if not path.exists():
        data = {"length": setting["length"], "validation_blocks": setting["validation_blocks"]}
        blocks = prepare_blocks(data, "python-stdlib", str(base_of(setting)))
        path.write_bytes(blocks.to_bytes())
    return read_blocks(path)


def base_of(setting: dict[str, Any]) -> Path:
    return (HERE / setting["base"]).resolve()


def load_base(setting: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base_of(setting), dtype=torch.float32, trust_remote_code=False).eval()


def importance_of(setting: dict[str, Any], blocks: Any) -> dict[str, dict[int, float]]:
    """Importance of every layer's attention, FFN and both, on the calibration blocks."""
    from hf_depthroute.inference.importance import IMPORTANCE_TARGETS, layer_importance

    base, batches = load_base(setting), calibration_batches(setting, blocks)
    return {target: layer_importance(base, batches, target) for target in IMPORTANCE_TARGETS}


def calibration_batches(setting: dict[str, Any], blocks: Any) -> list[dict[str, Any]]:
    import torch

    from hf_depthroute.data.blocks import spread, to_batches

    return to_batches(spread(blocks.train, setting["calibration_blocks"]), 8, torch.device("cpu"))


def configure(
    run: Run, setting: dict[str, Any], importance: dict[str, dict[int, float]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the run's `DepthRouteConfig`, and those of its training arguments."""
    from hf_depthroute.inference.importance import least_important

    method = methods()[run.method]
    kind, _ = points(method)
    adapter = {"layers": setting["layers"], "branch_rank": setting["branch_rank"], "seed": run.seed} | method["adapter"]
    training = dict(method.get("training", {}))
    if kind == "budgets":
        adapter["budget"] = run.point
    elif kind == "depth_weights":
        training["depth_weight"] = run.point
    else:
        adapter["layers"] = least_important(importance[adapter["target"]], int(run.point))
    return adapter, training


def calibrated(adapter: dict[str, Any]) -> bool:
    """Whether the thresholds come from calibration; the others fix them in training."""
    learned = adapter.get("selection") == "controller" or adapter.get("causal_rule") == "predictor"
    return adapter["gate"] not in ("linear", "halting", "none") and not learned


def execute(run: Run, out: Path, importance: dict[str, dict[int, float]]) -> str:
    """Train and measure one run; one line about it."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    began = time.process_time()
    setting = read_yaml(HERE / "pareto.yaml")
    try:
        result = train(run, setting, load_blocks(setting, out), out, importance)
    except Exception:
        return f"{run} FAILED\n{traceback.format_exc()}"
    folder, seconds = run.folder(out), round(time.process_time() - began, 1)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "run.json.part"
    temporary.write_text(json.dumps({**dataclasses.asdict(run), **result, "cpu_seconds": seconds}, indent=1) + "\n")
    os.replace(temporary, folder / "run.json")
    return f"{run.method} {run.point:g} {run.seed}: loss {result['loss']:.3f}, share {result['share']}, {seconds:.0f} s"


def train(
    run: Run, setting: dict[str, Any], blocks: Any, out: Path, importance: dict[str, dict[int, float]]
) -> dict[str, Any]:
    """One run; its adapter is saved in the run's folder."""
    import torch
    import transformers

    from hf_depthroute import DepthRouteConfig, DepthRouteTrainer, DepthRouteTrainingArguments, get_depth_routed_model
    from hf_depthroute.data.blocks import OrderedBlocks, draw_order, to_batches
    from hf_depthroute.inference.calibration import calibrate
    from hf_depthroute.inference.fitting import fit_branches
    from hf_depthroute.routing.trace import count_routes

    transformers.set_seed(run.seed)
    adapter, training = configure(run, setting, importance)
    model = get_depth_routed_model(load_base(setting), DepthRouteConfig(**adapter))
    inner, batches = model.get_base_model(), calibration_batches(setting, blocks)
    fit_error = fit_branches(inner, batches) if methods()[run.method].get("fit") else None
    size = setting["batch_size"]
    with tempfile.TemporaryDirectory() as scratch:
        arguments = DepthRouteTrainingArguments(**{
            "output_dir": scratch, "max_steps": setting["steps"], "per_device_train_batch_size": size,
            "learning_rate": setting["learning_rate"], "warmup_steps": setting["warmup_steps"], "seed": run.seed,
            "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
            "logging_steps": setting["steps"], **training,
        })  # fmt: skip
        order = draw_order(len(blocks.train), setting["steps"] * size, run.seed)
        trainer = DepthRouteTrainer(
            model=model,
            args=arguments,
            train_dataset=OrderedBlocks(blocks.train, order),
            data_collator=transformers.default_data_collator,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    model.eval()
    if calibrated(adapter):
        calibrate(inner, batches)
    with count_routes(model) as counter:
        measured = quality(inner, to_batches(blocks.validation, 8, torch.device("cpu")), kinds_of_tokens(setting))
    model.save_pretrained(run.folder(out) / "adapter")
    shares = {str(layer): round(share, 4) for layer, share in counter.full_ratio().items()}
    return {
        **measured,
        "share": round(sum(shares.values()) / len(shares), 4),
        "shares": shares,
        "fit_error": fit_error,
    }


def kinds_of_tokens(setting: dict[str, Any]) -> dict[str, Any]:
    """Bool masks over the vocabulary: closing brackets, and line breaks with the indent that follows."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base_of(setting), trust_remote_code=False)
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    return {
        "bracket": torch.tensor([bool(t.strip()) and set(t.strip()) <= set(")]}") for t in texts]),
        "indent": torch.tensor(["\n" in t and not t.strip() for t in texts]),
    }


def quality(model: Any, batches: Iterable[dict[str, Any]], kinds: dict[str, Any]) -> dict[str, float]:
    """Next-token loss in nats and top-1 accuracy; the latter also where the next token is of one kind."""
    import torch
    import torch.nn.functional as F

    losses, right, targets = [], [], []
    with torch.no_grad():
        for batch in batches:
            logits_BTV = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].float()
            targets.append(batch["input_ids"][:, 1:].flatten())
            losses.append(F.cross_entropy(logits_BTV.flatten(0, 1), targets[-1], reduction="none"))
            right.append(logits_BTV.flatten(0, 1).argmax(-1) == targets[-1])
    loss_N, right_N, target_N = torch.cat(losses), torch.cat(right), torch.cat(targets)
    found = {"loss": loss_N.mean().item(), "accuracy": right_N.float().mean().item()}
    for kind, tokens_V in kinds.items():
        found[f"{kind}_accuracy"] = right_N[tokens_V[target_N]].float().mean().item()
    return {name: round(value, 5) for name, value in found.items()}


def quality_of_base(base: Any, setting: dict[str, Any], blocks: Any) -> dict[str, float]:
    import torch

    from hf_depthroute.data.blocks import to_batches

    return quality(base, to_batches(blocks.validation, 8, torch.device("cpu")), kinds_of_tokens(setting))


def all_runs(seeds: list[int], only: list[str] | None) -> Iterator[Run]:
    """Seed by seed, so that a run that is cut short has whole seeds; within one, the tried variants last."""
    known = methods()
    for name in only or []:
        if name not in known:
            sys.exit(f"--only {name}: no such file in {HERE / 'configs'}")
    for tried in (False, True):
        for seed in seeds:
            for name, method in known.items():
                if (only is None or name in only) and bool(method.get("tried")) == tried:
                    yield from (Run(name, point, seed) for point in points(method)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--only", nargs="+", help="names of configs")
    parser.add_argument("--seeds", type=int, nargs="+")
    args = parser.parse_args()
    setting = read_yaml(HERE / "pareto.yaml")
    args.out.mkdir(parents=True, exist_ok=True)
    blocks = load_blocks(setting, args.out)
    runs = list(all_runs(args.seeds or setting["seeds"], args.only))
    importance = importance_of(setting, blocks)
    (args.out / "importance.json").write_text(json.dumps(importance, indent=1) + "\n")
    left = [run for run in runs if not (run.folder(args.out) / "run.json").exists()]
    print(f"{len(left)} of {len(runs)} runs to do", flush=True)
    for run in left:
        shutil.rmtree(run.folder(args.out), ignore_errors=True)
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(execute, run, args.out, importance) for run in left]
        for done, job in enumerate(jobs, 1):
            print(f"[{done}/{len(left)}] {job.result()}", flush=True)


if __name__ == "__main__":
    main()
