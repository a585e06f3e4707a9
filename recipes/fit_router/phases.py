"""What a routed prompt costs the text after it: everything routed,
or the prompt only (`phases="prefill"`).

    python recipes/fit_router/phases.py

The wider embedded base with routers fitted without training. Of each row the first 192 tokens are
the prompt; the loss is that of the 64 tokens behind it, which a prompt-only router leaves to the
full model, on the cache that the routed prompt has written. The time to the first token is that of
4 prompts of 1,020 tokens, over that of the dense base.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from run import batches, fitted, share_of_calls, wide

HERE = Path(__file__).parent
PROMPT = 192
KEEP = (1 / 4, 1 / 2, 3 / 4)
ROUNDS = 15


@torch.no_grad()
def losses(model: Any, ids: torch.Tensor, prompt: str, rest: str) -> torch.Tensor:
    """The mean loss of each row's continuation, nats; `prompt` and `rest` are `"all"`,
    `"prefill"` or `"full"`."""
    from hf_depthroute import set_phases
    from hf_depthroute.base.lm_head import token_losses
    from hf_depthroute.routing.trace import full_depth

    def run(phases: str, part: torch.Tensor, cache: Any) -> Any:
        if phases == "full":
            with full_depth(model):
                return model(input_ids=part, past_key_values=cache, use_cache=True)
        set_phases(model, phases)
        return model(input_ids=part, past_key_values=cache, use_cache=True)

    found = []
    for batch in batches(ids):
        rows = batch["input_ids"]
        first = run(prompt, rows[:, :PROMPT], None)
        second = run(rest, rows[:, PROMPT:], first.past_key_values)
        logits = torch.cat([first.logits[:, -1:], second.logits[:, :-1]], dim=1)
        found.append(token_losses(logits, rows[:, PROMPT:]).mean(1))
    set_phases(model, "all")
    return torch.cat(found).double()


@torch.no_grad()
def first_token(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Seconds until the next token of the prompts `ids` is known, routed or not,
    over the dense base's."""
    from hf_depthroute import set_phases
    from hf_depthroute.bench.timing import interleave, seconds_of
    from hf_depthroute.routing.trace import full_depth

    def run() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    def timer(phases: str) -> Callable[[], float]:
        def seconds() -> float:
            set_phases(model, "all" if phases == "full" else phases)
            with full_depth(model) if phases == "full" else nullcontext():
                run()
                return seconds_of(run, ids.device)

        return seconds

    samples = interleave({phases: timer(phases) for phases in ("full", "all", "prefill")}, ROUNDS)
    set_phases(model, "all")
    found = {phases: samples.ratio(phases, "full").rounded() for phases in ("all", "prefill")}
    return {phases: {"ratio": ratio, "error": error} for phases, (ratio, error) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=HERE / "phases.json")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    from hf_depthroute.bench.timing import describe_machine
    from hf_depthroute.files.staged import write_json

    base, rows = wide(), []
    prompts = base.text.report[:16].reshape(4, -1)[:, :1020]
    for keep in KEEP:
        for seed in args.seeds:
            model, _ = fitted(base, "mlp", keep, seed)
            dense = losses(model, base.text.report, "full", "full")
            row: dict[str, Any] = {
                "keep": keep,
                "seed": seed,
                "share": share_of_calls(model, base.text.report),
            }
            for name, phases in {"all": ("all", "all"), "prefill": ("prefill", "full")}.items():
                more = losses(model, base.text.report, *phases) - dense
                row[name] = {
                    "more": float(more.mean()),
                    "error": float(more.std() / len(more) ** 0.5),
                }
            row["first_token"] = first_token(model, prompts)
            rows.append(row)
            print(row, flush=True)
    found = {"base": "wide", "prompt": PROMPT, "tokens": base.text.report.numel()}
    found["machine"] = describe_machine(torch.device("cpu"))
    write_json(args.out, {**found, "rows": rows})


if __name__ == "__main__":
    main()
