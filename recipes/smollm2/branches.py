"""Branches of SmolLM2-135M-Instruct one layer at a time, on the dense model's stream:
what each kind explains.

    python recipes/smollm2/branches.py --model HuggingFaceTB/SmolLM2-135M-Instruct

Fitted on three quarters of some rows of C4, reported on the others without the attention sinks,
errors relative to the stream behind the layer. `unweighted` is a low-rank branch fitted to all rows
alike, sinks included; `lowrank` and `neurons` are fitted as `fit_router` fits them. `sinks_found`
says how many of the held-out sinks the unit that `fit_router` gives to a gate tells from the other
tokens. The text is read from `../shared/data/text`.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
LENGTH = 256


@torch.no_grad()
def streams(
    model: Any, ids: torch.Tensor, layers: list[int]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """The stream before and after the FFN of each layer, `[N, d]` each, from rows `[B, T]`."""
    seen: dict[int, list[list[torch.Tensor]]] = {index: [[], []] for index in layers}

    def note(index: int, which: int, module: Any, args: tuple[Any, ...], out: Any) -> None:
        value = args[0] if which == 0 else out[0] if isinstance(out, tuple) else out
        seen[index][which].append(value.reshape(-1, value.shape[-1]))

    for index in layers:
        layer = model.model.layers[index]
        layer.post_attention_layernorm.register_forward_hook(partial(note, index, 0))
        layer.register_forward_hook(partial(note, index, 1))
    for part in ids.split(8):
        model.model(part, use_cache=False)
    return {index: (torch.cat(before), torch.cat(after)) for index, (before, after) in seen.items()}


@torch.no_grad()
def measured(layer: Any, before: torch.Tensor, after: torch.Tensor) -> dict[str, Any]:
    from hf_depthroute.inference.fitting import fit_branch
    from hf_depthroute.parts.branches import LowRankBranch
    from hf_depthroute.parts.neurons import NeuronBranch
    from hf_depthroute.parts.regression import norms_and_sinks, separating_unit

    norms, sinks = norms_and_sinks(after)
    width, held = before.shape[1], torch.arange(len(before)) >= len(before) * 3 // 4
    norm, report = layer.post_attention_layernorm, held & ~sinks
    found: dict[str, Any] = {"sinks": int(sinks.sum())}
    for kind in ("unweighted", "lowrank", "neurons"):
        branch: Any = LowRankBranch(norm, width, width // 8, bias=False)
        if kind == "neurons":
            branch = NeuronBranch(norm, layer.mlp, width, layer.mlp.up_proj.out_features // 4)
        branch.reset_parameters(torch.Generator().manual_seed(0))
        rows = ~held if kind == "unweighted" else ~held & ~sinks
        penalty = max(1e-3, 0.1 * width / int(rows.sum()))
        weights = None if kind == "unweighted" else norms[rows]
        fit_branch(
            branch.eval(),
            branch.normed(before[rows]).float(),
            (after - before)[rows],
            penalty,
            weights,
        )
        update = (after - before)[report] / norms[report, None]
        missed = update - branch(before[report]) / norms[report, None]
        found[kind] = round(float(1 - missed.square().sum() / update.square().sum()), 3)
    if sinks[held].any() and sinks[~held].any():
        x = norm(before)
        weight, bias = separating_unit(x[~held & ~sinks], x[~held & sinks])
        told = x @ weight + bias > 0
        found["sinks_found"] = [int((told & sinks & held).sum()), int((sinks & held).sum())]
        found["others_taken_for_sinks"] = round(float(told[report].float().mean()), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or Hub name"
    )
    parser.add_argument("--data", type=Path, default=HERE.parents[2] / "shared" / "data" / "text")
    parser.add_argument(
        "--layers", nargs="+", type=int, default=[0, 3, 7, 11, 14, 17, 20, 24, 28, 29]
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=HERE / "branches.json")
    args = parser.parse_args()
    path = args.data / "c4.utf8"
    if not path.exists():
        raise SystemExit(f"no {path}, nothing to fit on")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, trust_remote_code=False
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    ids = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
    rows = ids[0, : args.tokens // LENGTH * LENGTH].view(-1, LENGTH)
    found: dict[str, Any] = {}
    for index, (before, after) in streams(model, rows, args.layers).items():
        found[str(index)] = measured(model.model.layers[index], before, after)
        print(index, found[str(index)], flush=True)
    result = {"tokens": rows.numel(), "layers": found}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
