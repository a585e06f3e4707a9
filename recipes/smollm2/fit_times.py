"""How long a fit takes, and its parts, in float32 and in bfloat16.

    python recipes/smollm2/fit_times.py --model HuggingFaceTB/SmolLM2-135M-Instruct

Prompts with a share of the measured time, and all tokens; 16,384 tokens each. Nothing else may run
on the machine. Every fit is written to `fit-times.json` as it ends; a second run makes what is
missing. One fit each.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import run
import torch
from transformers import AutoTokenizer

from hf_depthroute import DepthRouteConfig, fit_router
from hf_depthroute.bench.timing import describe_machine
from hf_depthroute.training.record import record_of


def prompts(model: Any, texts: run.Texts, tokens: int) -> Any:
    text = texts.to_fit(tokens, run.ROW, 0)
    config = DepthRouteConfig(layers="all", phases="prefill", prompt_tail=run.TAIL)
    length = run.ROWS["long"] - run.BEHIND
    return fit_router(model, text, 0.8, config, keep_of="time", length=length)


def all_tokens(model: Any, texts: run.Texts, tokens: int) -> Any:
    text = texts.to_fit(tokens, run.LENGTH, 0)
    return fit_router(model, text, 0.67, DepthRouteConfig(layers="all", branch="neurons"))


FITS = {"prompts": prompts, "all tokens": all_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or Hub name"
    )
    parser.add_argument(
        "--data", type=Path, default=run.HERE.parents[2] / "shared" / "data" / "text"
    )
    parser.add_argument("--out", type=Path, default=run.HERE / "fit-times.json")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    texts = run.Texts(args.data, tokenizer, rows=1)
    found: dict[str, Any] = {}
    if args.out.exists():
        found = json.loads(args.out.read_text())
    for name, fit in FITS.items():
        for dtype in (torch.bfloat16, torch.float32):
            part = f"{name}, {str(dtype).removeprefix('torch.')}"
            if part in found:
                continue
            record = record_of(fit(run.base(args.model, dtype), texts, args.tokens))
            found[part] = {
                "seconds": record["seconds"],
                "seconds_of": record["seconds_of"],
                "machine": describe_machine(torch.device("cpu")),
            }
            print(part, found[part]["seconds"], found[part]["seconds_of"], flush=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
