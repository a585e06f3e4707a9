"""Time prefill of every method and point against the dense base: one process, one thread, interleaved.

    OMP_NUM_THREADS=1 python recipes/pareto/timing.py --out OUT --rounds 8

Writes `OUT/timing.json` after every round. A round times every adapter once, in random order, and the untouched base
before and after each; a ratio is an adapter's time over the mean of those two, and the result the median over rounds.
Of a method's seeds the first is timed. Times are of the process's own clock: with one thread that is the wall clock of
an idle machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from run import HERE, base_of, load_base, read_yaml


def prompts(setting: dict[str, Any]) -> Any:
    """Validation text, int64 `[batch, length]`."""
    from hf_depthroute.data.blocks import prepare_blocks

    bench = setting["bench"]
    data = {"length": bench["length"], "validation_blocks": bench["batch"]}
    return prepare_blocks(data, "python-stdlib", str(base_of(setting))).validation.long()


def seconds(model: Any, input_ids: Any) -> float:
    start = time.process_time()
    model(input_ids, use_cache=True)
    return time.process_time() - start


def write(out: Path, setting: dict[str, Any], ratios: dict[str, list[float]], dense: list[float]) -> None:
    """`timing.json` of the rounds so far: ratios by `METHOD|POINT`, the times of the base in seconds."""
    import torch

    from hf_depthroute.bench import describe_machine

    rounds = min(map(len, ratios.values()))
    result = {
        "setting": {**setting["bench"], "rounds": rounds, "dtype": "float32"},
        "machine": describe_machine(torch.device("cpu")),
        "dense_ms": round(statistics.median(dense) * 1e3, 1),
        "adapters": {name: [round(value, 4) for value in values] for name, values in ratios.items()},
    }
    (out / "timing.json").write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    import torch
    from peft import PeftModel

    import hf_depthroute  # noqa: F401  (registers the adapter type)
    from hf_depthroute.bench import dense_view

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    setting = read_yaml(HERE / "pareto.yaml")
    input_ids = prompts(setting)
    base = load_base(setting)
    dense = dense_view(base)
    folders: dict[str, Path] = {}
    for path in sorted((args.out / "runs").glob("*/*/*/run.json")):
        folders.setdefault("|".join(path.relative_to(args.out / "runs").parts[:2]), path.parent / "adapter")
    adapters = {name: f"a{number}" for number, name in enumerate(folders)}
    model: Any = base
    for name, folder in folders.items():
        if model is base:
            model = PeftModel.from_pretrained(base, folder, adapter_name=adapters[name])
        else:
            model.load_adapter(folder, adapters[name])
    inner = model.get_base_model().eval()
    print(f"{len(folders)} adapters loaded", flush=True)

    ratios: dict[str, list[float]] = {name: [] for name in folders}
    references: list[float] = []
    with torch.no_grad():
        for _ in range(3):
            seconds(dense, input_ids)
        for round_ in range(args.rounds):
            references.append(seconds(dense, input_ids))
            for name in random.Random(round_).sample(list(folders), len(folders)):
                model.set_adapter(adapters[name])
                taken = seconds(inner, input_ids)
                references.append(seconds(dense, input_ids))
                ratios[name].append(taken / statistics.mean(references[-2:]))
            write(args.out, setting, ratios, references)
            print(
                f"round {round_ + 1} of {args.rounds}: dense {statistics.median(references) * 1e3:.0f} ms", flush=True
            )


if __name__ == "__main__":
    main()
