"""The load of vLLM's own `bench serve` on one base, dense and routed, in turn.

    python recipes/vllm_load/load.py
    python recipes/vllm_load/load.py --engine transformers --prompts 32 512 --rounds 2
    python recipes/vllm_load/load.py --model FOLDER --adapter recipes/smollm2/work/prompts-0.8-0 --prompts 1024 2000 \\
        --clients 1 4 --out recipes/vllm_load/load_smollm2.json
    python recipes/vllm_load/report.py

Runs in an environment with vLLM (`make vllm` makes `.venv-vllm`). The base has random weights at
the width of Qwen2.5-0.5B, and a router of every FFN that is calibrated on random tokens. vLLM's
random prompts are runs of token ids in ascending order, so what really runs in full is counted, by
vLLM. One server for each way to serve is up all the time; a cell of the table goes to one after the
other, in every round in another order.

With `--model` and `--adapter` the base is a real one, with a router for prompts; beside the dense
server on the backend that routed models have, there is one on vLLM's own model.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from servers import Server, dense, native, routed, running

HERE = Path(__file__).parent
TOKENIZER = HERE.parent / "embedded_base" / "model"
WIDTHS = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
OUTPUT = 32  # generated tokens of a request
NAME = "load"
ROUTED = ("all", "prefill")
# By transformers serve, of what is sent.
ACCEPTED = {"model", "prompt", "max_tokens", "temperature", "stream"}
FIGURES = ("total_token_throughput", "median_ttft_ms", "median_tpot_ms")


def make_models(folder: Path, layers: int, budget: float) -> tuple[Path, Path]:
    """The base and the adapter in `folder`; those of a run before are taken as they are."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from hf_depthroute import DepthRouteConfig, calibrate, get_depth_routed_model

    folder = folder / f"{layers}-{budget:g}"
    base, adapter = folder / "base", folder / "adapter"
    if not (adapter / "adapter_config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(TOKENIZER, trust_remote_code=False)
        torch.manual_seed(0)
        sizes = WIDTHS | {
            "num_hidden_layers": layers,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 4096,
        }
        # Transformers serve knows no request that is to be written to its end.
        sizes |= {"eos_token_id": None}
        model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **sizes)).eval()
        model.save_pretrained(base)
        tokenizer.save_pretrained(base)
        routed_model = get_depth_routed_model(
            model, DepthRouteConfig(layers="all", budget=budget)
        ).eval()
        calibrate(routed_model, [{"input_ids": torch.randint(3, len(tokenizer), (4, 512))}])
        routed_model.save_pretrained(adapter)
    return base, adapter


def accept_fewer_fields() -> None:
    """Let `bench serve` leave out of its requests what `transformers serve` refuses."""
    from vllm.benchmarks.lib import endpoint_request_func as requests

    class Fewer:
        def __init__(self, session: Any) -> None:
            self.session = session

        def post(self, url: str, json: dict[str, Any], headers: dict[str, str]) -> Any:
            return self.session.post(
                url, json={k: v for k, v in json.items() if k in ACCEPTED}, headers=headers
            )

    async def request(request_func_input: Any, session: Any, pbar: Any = None) -> Any:
        return await requests.async_request_openai_completions(
            request_func_input, Fewer(session), pbar
        )

    requests.ASYNC_REQUEST_FUNCS["openai"] = request


def bench(
    server: Server, name: str, base: Path, prompt: int, clients: int, requests: int, seed: int
) -> dict[str, float]:
    """vLLM's figures for `requests` random prompts of `prompt` tokens to model `name`,
    `clients` of them at a time."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    words = {
        "base-url": server.url, "model": base, "served-model-name": name, "tokenizer": base,
        "dataset-name": "random", "random-input-len": prompt, "random-output-len": OUTPUT,
        "num-prompts": requests, "max-concurrency": clients, "num-warmups": 1, "seed": seed,
        "temperature": 1,
    }  # fmt: skip
    options = [word for option, value in words.items() for word in (f"--{option}", str(value))]
    found = main(parser.parse_args([*options, "--ignore-eos", "--disable-tqdm"]))
    assert found["completed"] == requests
    return {figure: found[figure] for figure in FIGURES}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--out", type=Path, help="default: load.json, load_transformers.json")
    parser.add_argument(
        "--work", type=Path, default=HERE / "work", help="for the base, the adapter and logs"
    )
    parser.add_argument(
        "--model", type=Path, help="folder of a base that is there, in place of random weights"
    )
    parser.add_argument(
        "--adapter", type=Path, help="folder of its adapter for prompts, with --model"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 512, 2000], help="tokens")
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[1, 4, 16], help="requests at a time"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--each", type=int, default=2, help="requests of each client, of prompts below 2,000 tokens"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if (args.model is None) != (args.adapter is None) or (args.model and args.engine != "vllm"):
        parser.error("--model and --adapter go together, and with vLLM")
    if args.model is not None and args.out is None:
        parser.error("--model needs --out")
    torch.set_num_threads(args.threads)
    from hf_depthroute.bench.timing import describe_machine
    from hf_depthroute.files.staged import write_text

    out = args.out or HERE / ("load.json" if args.engine == "vllm" else f"load_{args.engine}.json")
    args.work.mkdir(parents=True, exist_ok=True)
    if args.model is None:
        base, adapter = make_models(args.work, args.layers, args.budget)
        setting: dict[str, Any] = {"layers": args.layers, "budget": args.budget, **WIDTHS}
    else:
        base, adapter = args.model, args.adapter
        setting = {"model": args.model.name, "adapter": args.adapter.name}
    if args.engine == "vllm":
        words = {"dense": dense(base)}
        if args.model is not None:
            words |= {"native": native(base)}
        words |= {
            name: routed(base, adapter, name)
            for name in ROUTED
            if args.model is None or name == "prefill"
        }
        names = dict.fromkeys(words, NAME)
        # Random prompts of one seed begin alike, so cells of one round would find each other's in
        # the cache.
        options = [
            "--served-model-name",
            NAME,
            "--max-model-len",
            "2304",
            "--no-enable-prefix-caching",
        ]
    else:
        accept_fewer_fields()
        words = {"dense": ["transformers.cli.transformers", "serve", str(base)]}
        words["all"] = ["hf_depthroute", "serve", str(adapter), "--model", str(base)]
        names, options = {"dense": str(base), "all": adapter.name}, []
    options += ["--dtype", args.dtype]
    setting |= {"dtype": args.dtype, "output": OUTPUT}
    found: dict[str, Any] = {
        "machine": describe_machine(torch.device("cpu")),
        "setting": setting,
        "cells": [],
    }
    with running(words, options, args.work, args.threads) as servers:
        for turn in range(args.rounds):
            for prompt in args.prompts:
                for clients in args.clients:
                    first = turn % len(servers)
                    order = list(servers)[first:] + list(servers)[:first]
                    requests = (
                        max(3 * args.each, args.each * clients)
                        if prompt < 2000
                        else max(4, clients)
                    )
                    cell: dict[str, Any] = {
                        "prompt": prompt,
                        "clients": clients,
                        "requests": requests,
                        "round": turn,
                    }
                    for name in order:
                        cell[name] = bench(
                            servers[name], names[name], base, prompt, clients, requests, turn
                        )
                    found["cells"].append(cell)
                    print(json.dumps(cell), flush=True)
                    if args.engine == "vllm":
                        found["rows_full"] = {
                            n: servers[n].rows_full() for n in servers if n in ROUTED
                        }
                    write_text(out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
