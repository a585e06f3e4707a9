"""How near two rules come to the budget on text of several kinds, and what that costs: thresholds, and running ranks.

    python recipes/smollm2/rules.py --model HuggingFaceTB/SmolLM2-135M-Instruct --adapter recipes/smollm2/work/ADAPTER

The adapter, which routes all tokens, is calibrated on other rows than it was fitted on. Reported on the first rows of
1,152 tokens of each text: nats over dense and the share of the gated layers' tokens that ran. A lower budget with
thresholds is measured beside, since a rule that runs less also loses more.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import run
import torch
from peft import PeftModel
from transformers import AutoTokenizer

from hf_depthroute import calibrate, set_causal_rule, use_budget
from hf_depthroute.parts import rules
from hf_depthroute.routing.trace import count_routes

LOWER = 0.96  # of the adapter's budget: about as small a share as running ranks leave
PRIORS = (32, 128)  # other weights of the calibration than the library's


@torch.no_grad()
def losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The mean loss of each row, nats, `[R]`; every token is read at one time."""
    found = []
    for row in ids.split(1):
        logits = model(input_ids=row, use_cache=False).logits
        found.append(run.row_losses(logits[:, :-1], row[:, 1:]))
    return torch.cat(found)


def measured(
    model: Any, texts: dict[str, torch.Tensor], dense: dict[str, torch.Tensor]
) -> dict[str, Any]:
    found = {}
    for name, ids in texts.items():
        with count_routes(model) as counter:
            more = losses(model, ids) - dense[name]
        shares = counter.full_ratio().values()
        found[name] = {
            "more": round(float(more.mean()), 4),
            "error": round(float(more.std() / len(more) ** 0.5), 4),
            "ran": round(sum(shares) / len(shares), 4),
        }
        print(f"  {name}: {found[name]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or Hub name"
    )
    parser.add_argument("--adapter", type=Path, required=True, help="of all tokens, made by run.py")
    parser.add_argument(
        "--data", type=Path, default=run.HERE.parents[2] / "shared" / "data" / "text"
    )
    parser.add_argument("--out", type=Path, default=run.HERE / "rules.json")
    parser.add_argument("--rows", type=int, default=4, help="of 1,152 tokens, of each text")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts = run.Texts(
        args.data, AutoTokenizer.from_pretrained(args.model, trust_remote_code=False), 16
    )
    reported = {name: ids[: args.rows] for name, ids in texts.report["long"].items()}
    base = run.base(args.model)
    dense = {name: losses(base, ids) for name, ids in reported.items()}
    model: Any = PeftModel.from_pretrained(base, str(args.adapter)).eval()
    calibrate(model, texts.to_fit(16_384, run.LENGTH, seed=31))
    budget = model.peft_config["default"].budget
    found: dict[str, Any] = {
        "adapter": args.adapter.name,
        "budget": budget,
        "rows": args.rows,
        "tokens": 1152,
    }
    print("quantile", flush=True)
    found["quantile"] = measured(model, reported, dense)
    print("quantile at a lower budget", flush=True)
    with use_budget(model, LOWER * budget):
        found["quantile at a lower budget"] = measured(model, reported, dense)
    set_causal_rule(model, "running")
    for prior in (rules._PRIOR, *PRIORS):
        print(f"running, the calibration counts as {prior} tokens", flush=True)
        rules._PRIOR = prior
        found[f"running {prior}"] = measured(model, reported, dense)
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
