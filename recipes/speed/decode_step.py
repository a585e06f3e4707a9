"""Where the time of a decoding step goes: one sequence, dense, routed,
and with a router that costs nothing.

    python recipes/speed/decode_step.py --json recipes/speed/decode-step.json

Random weights at the shape of Qwen2.5-0.5B, bfloat16, the last 12 and all 24 FFNs routed at budget
0.5. The three run the same tokens on the same cache, in turn. The free router repeats the decisions
of the routed run and computes nothing for them. Parts are timed where they run, around their calls:
`gate, up` is the product of gate and branch with what is made of it, `down` the branch's other map;
`rest` is the whole step less the parts: embedding, head, residual sums, and the Python in between.
`of ideal` is how much of what the free router saves the routed one does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `speed` is there

import torch
from speed.shapes import random_model

from hf_depthroute import DepthRouteConfig, calibrate, get_depth_routed_model
from hf_depthroute.base.families import find_family
from hf_depthroute.base.stack import stack_of
from hf_depthroute.bench.modes import random_tokens
from hf_depthroute.bench.timing import describe_machine
from hf_depthroute.execution.decode import DecodeStep
from hf_depthroute.files.staged import write_json
from hf_depthroute.parts.fused import FusedGateBranch

PROMPT, WAYS = 256, ("dense", "routed", "free")


class Clock:
    """Seconds by part, of one step."""

    def __init__(self) -> None:
        self.parts: defaultdict[str, float] = defaultdict(float)
        self.on = False

    def around(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return call(*args, **kwargs)
            start = time.perf_counter()
            out = call(*args, **kwargs)
            self.parts[part] += time.perf_counter() - start
            return out

        return timed


class FreeStep:
    """Repeats decisions: what a decoding step is with a router that takes no time
    and has no branch."""

    def __init__(self) -> None:
        self.decisions: list[bool] = []
        self._next = 0

    def rewind(self) -> None:
        self._next = 0

    def __call__(
        self, step: DecodeStep, layer: Any, h: torch.Tensor, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        attention_norm, attention, ffn_norm, ffn = (getattr(layer, name) for name in step.names)
        a = h + attention(attention_norm(h), **kwargs)[0]
        runs = self.decisions[self._next]
        self._next += 1
        return a + ffn(ffn_norm(a)) if runs else a


@contextmanager
def as_way(way: str, model: Any, free: FreeStep) -> Iterator[None]:
    free.rewind()
    step = (
        patch.object(DecodeStep, "__call__", lambda *args: free(*args))
        if way == "free"
        else nullcontext()
    )
    with step, model.disable_adapter() if way == "dense" else nullcontext():
        yield


def measure(layers: Any, depth: int | None, steps: int, rounds: int) -> dict[str, Any]:
    base = random_model("qwen2.5-0.5b", depth=depth, vocabulary=4096)
    model = get_depth_routed_model(base, DepthRouteConfig(layers=layers, budget=0.5)).eval()
    tokens = random_tokens(model, 1, PROMPT + steps, seed=1)
    calibrate(model, [{"input_ids": tokens}])
    clock, free, family = Clock(), FreeStep(), find_family(model)
    for layer in stack_of(model).layers:
        for part in ("attention_norm", "attention", "ffn_norm", "ffn"):
            module = getattr(layer, getattr(family, part))
            module.forward = clock.around(part.replace("_", " "), module.forward)
    scores = FusedGateBranch.scores

    def recorded(maps: FusedGateBranch, a: torch.Tensor, threshold: float, *rest: Any) -> Any:
        out = run(maps, a, threshold, *rest)
        free.decisions.append(bool(out[1]))
        return out

    run = FusedGateBranch.run
    whole: dict[str, list[float]] = {way: [] for way in WAYS}
    parts: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in WAYS}
    with torch.no_grad(), model.disable_adapter():
        cache = model(tokens[:, :PROMPT], use_cache=True).past_key_values

    def decode(way: str) -> None:
        for position in range(PROMPT, PROMPT + steps):
            clock.parts.clear()
            start = time.perf_counter()
            model(
                tokens[:, position : position + 1], past_key_values=cache, use_cache=True
            ).logits.argmax(-1)
            seconds = time.perf_counter() - start
            if clock.on:
                for part, found in clock.parts.items():
                    parts[way][part].append(found)
                parts[way]["rest"].append(seconds - sum(clock.parts.values()))
            else:
                whole[way].append(seconds)
        cache.crop(-steps)

    with torch.no_grad():
        with patch.object(FusedGateBranch, "run", recorded):
            decode("routed")
        whole["routed"].clear()
        for turn in range(rounds):
            for way in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
                with as_way(way, model, free):
                    decode(way)
        clock.on = True
        timed = {
            "scores": clock.around("gate, up", scores),
            "cheap": clock.around("down", FusedGateBranch.cheap),
        }
        for _ in range(rounds):
            for way in WAYS:
                with as_way(way, model, free), patch.multiple(FusedGateBranch, **timed):
                    decode(way)
    ms = {way: 1e3 * statistics.median(found) for way, found in whole.items()}
    share = sum(free.decisions) / len(free.decisions)
    saved = {way: ms["dense"] - ms[way] for way in WAYS}
    count = rounds * steps
    return {
        "layers": layers, "share": round(share, 4), "ms": {way: round(value, 3) for way, value in ms.items()},
        "of_ideal": round(saved["routed"] / saved["free"], 3),
        "parts_ms": {
            way: {part: round(1e3 * sum(found) / count, 3) for part, found in of.items()} for way,
            of in parts.items()
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, help="keep so many layers")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    half = (args.depth or 24) // 2
    found = [
        measure(layers, args.depth, args.steps, args.rounds) for layers in (f"last:{half}", "all")
    ]
    for row in found:
        print(
            f"\n{row['layers']}: {row['share']:.0%} run in full; {row['of_ideal']:.2f} of what a "
            "free router saves"
        )
        names = list(dict.fromkeys(part for of in row["parts_ms"].values() for part in of))
        print(f"{'ms a step':<16}" + "".join(f"{way:>10}" for way in WAYS))
        for part in names:
            print(
                f"{part:<16}"
                + "".join(f"{row['parts_ms'][way].get(part, 0):10.3f}" for way in WAYS)
            )
        print(f"{'whole step':<16}" + "".join(f"{row['ms'][way]:10.3f}" for way in WAYS))
    if args.json:
        write_json(args.json, {"machine": describe_machine(torch.device("cpu")), "steps": args.steps,
                               "rounds": args.rounds, "measured": found})  # fmt: skip


if __name__ == "__main__":
    main()
