"""Half an hour of clients that read, stop reading and vanish: what servers answer,
and what they keep.

    python recipes/vllm_load/soak.py

Runs in an environment with vLLM. The base is the one that comes with this project, its router
fitted. Every whole answer is compared with the one that the same prompt got alone, before. One of
three clients goes away: in the middle of its stream, or before it has read anything. The dense
server has as many clients of its own, at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
from servers import Server, dense, routed, running

HERE = Path(__file__).parent
BASE = HERE.parent / "embedded_base" / "model"
NAME, CLIENTS, TOKENS, EVERY = "soak", 8, 48, 30.0
# What becomes of a request, with its share.
ENDS = {"read": 0.67, "stopped": 0.17, "vanished": 0.16}


def make_adapter(folder: Path) -> tuple[Path, list[list[int]]]:
    """A fitted adapter, and beginnings of other files as prompts, 4 to 400 tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_depthroute import fit_router
    from hf_depthroute.data import load_text, pack

    tokenizer = AutoTokenizer.from_pretrained(BASE, trust_remote_code=False)
    train, held = (
        pack(load_text("python-stdlib", split=split), tokenizer, 512).with_format("torch")[
            "input_ids"
        ][:]
        for split in ("train", "validation")
    )
    adapter = folder / "adapter"
    if not (adapter / "adapter_config.json").exists():
        model = AutoModelForCausalLM.from_pretrained(BASE, trust_remote_code=False)
        fit_router(
            model, [{"input_ids": rows} for rows in train[:32].split(8)], keep=0.5
        ).save_pretrained(adapter)
    lengths = (4, 9, 16, 25, 36, 50, 64, 81, 100, 128, 160, 200, 240, 300, 350, 400)
    return adapter, [held[i, :length].tolist() for i, length in enumerate(lengths)]


def body(prompt: list[int], stream: bool) -> dict[str, Any]:
    greedy = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    return {"model": NAME, "prompt": prompt, "stream": stream, **greedy}


async def answer_to(session: Any, url: str, prompt: list[int]) -> list[int]:
    async with session.post(f"{url}/v1/completions", json=body(prompt, stream=False)) as response:
        found: list[int] = (await response.json())["choices"][0]["token_ids"]
    return found


async def stop_reading(session: Any, url: str, prompt: list[int], lines: int) -> None:
    """Close a stream after its first `lines` lines."""
    async with session.post(f"{url}/v1/completions", json=body(prompt, stream=True)) as response:
        for _ in range(lines):
            await response.content.readline()
        response.close()


async def vanish(server: Server, prompt: list[int], after: float) -> None:
    """Send a request and cut the connection within half a second, mostly while it runs."""
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    text = json.dumps(body(prompt, stream=False)).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "
        f"application/json\r\nContent-Length: {len(text)}"
    )
    writer.write(head.encode() + b"\r\n\r\n" + text)
    await writer.drain()
    await asyncio.sleep(after)
    writer.transport.abort()


async def client(
    session: Any, server: Server, known: list[Any], until: float, seed: int, found: dict[str, int]
) -> None:
    drawn = random.Random(seed)
    while time.monotonic() < until:
        prompt, expected = drawn.choice(known)
        (end,) = drawn.choices(list(ENDS), list(ENDS.values()))
        if end == "vanished":
            await vanish(server, prompt, drawn.uniform(0, 0.5))
        elif end == "stopped":
            await stop_reading(session, server.url, prompt, drawn.randrange(1, 2 * TOKENS))
        elif await answer_to(session, server.url, prompt) != expected:
            found["wrong"] += 1
        found[end] += 1


def seen(server: Server, since: float) -> dict[str, Any]:
    names = {
        "running": "vllm:num_requests_running", "cache_used": "vllm:kv_cache_usage_perc",
        "generated": "vllm:generation_tokens_total", "rows": "depthroute:rows_total",
        "rows_full": "depthroute:rows_full_total",
    }  # fmt: skip
    metrics = {key: server.metric(name) for key, name in names.items()}
    return {"seconds": round(time.monotonic() - since), "mib": round(server.memory(), 1)} | metrics


async def soak(server: Server, prompts: list[list[int]], minutes: float) -> dict[str, Any]:
    import aiohttp

    found = dict.fromkeys((*ENDS, "wrong"), 0)
    # A connection each: one that is kept may be closed by the server just when the next request is
    # sent on it.
    connector, timeout = (
        aiohttp.TCPConnector(force_close=True, limit=0),
        aiohttp.ClientTimeout(total=600),
    )
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        known = [(prompt, await answer_to(session, server.url, prompt)) for prompt in prompts]
        began = time.monotonic()
        until = began + 60 * minutes
        samples = []
        async with asyncio.TaskGroup() as clients:
            for seed in range(CLIENTS):
                clients.create_task(client(session, server, known, until, seed, found))
            while time.monotonic() < until:
                await asyncio.sleep(min(EVERY, max(0.0, until - time.monotonic())))
                samples.append(await asyncio.to_thread(seen, server, began))
                print(json.dumps({"port": server.port} | samples[-1] | found), flush=True)
        after = [await answer_to(session, server.url, prompt) == answer for prompt, answer in known]
        for _ in range(60):  # what vanished is noticed at the next token
            last = await asyncio.to_thread(seen, server, began)
            if not last["running"] and not last["cache_used"]:
                break
            await asyncio.sleep(1)
    layers = server.metrics("depthroute:rows_total")
    facts = {
        "same_afterwards": all(after),
        "layers": len(layers),
        "layers_agree": len(set(layers)) == 1,
    }
    return {"minutes": minutes, "clients": CLIENTS, **found, **facts, "samples": [*samples, last]}


async def soak_all(
    servers: dict[str, Server], prompts: list[list[int]], minutes: float
) -> dict[str, dict[str, Any]]:
    found = await asyncio.gather(*(soak(server, prompts, minutes) for server in servers.values()))
    return dict(zip(servers, found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "soak.json")
    parser.add_argument(
        "--work", type=Path, default=HERE / "work", help="for the adapter and the log"
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    from hf_depthroute.files.staged import write_text

    args.work.mkdir(parents=True, exist_ok=True)
    adapter, prompts = make_adapter(args.work)
    options = ["--dtype", "float32", "--max-model-len", "512", "--served-model-name", NAME]
    words = {"dense": dense(BASE), "routed": routed(BASE, adapter, "all")}
    with running(words, options, args.work, args.threads) as servers:
        found = asyncio.run(soak_all(servers, prompts, args.minutes))
    write_text(args.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
