"""A soak of one routed model under four threads with mixed settings:
every request gets what it gets alone.

    python tests/helpers/soak_threads.py --seconds 1800 --seed 1

Threads draw requests of every kind (plain, full depth, recorded, replayed, other budgets, lossless,
in batches) and run them on one model; after some hundred requests the model is one that is routed
in another way. A request that raises, or gives another result than alone, is printed and ends the
soak with 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
import warnings
from collections import Counter

import torch
from request_kinds import ROUTED, Request, build, differs, requests_of

THREADS = 4
REQUESTS = 200  # of one model, before the next


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.setswitchinterval(1e-4)
    end, rng = time.monotonic() + options.seconds, random.Random(options.seed)
    ran: Counter[str] = Counter()
    faults: list[str] = []
    while time.monotonic() < end and not faults:
        for name in rng.sample(list(ROUTED), len(ROUTED)):
            if time.monotonic() < end:
                _soak(name, end, rng.getrandbits(32), ran, faults)
    for name, count in sorted(ran.items()):
        print(f"{count:7d} {name}")
    raised = sum("raised" in fault for fault in faults)
    wrong = len(faults) - raised
    print(f"{sum(ran.values())} requests in {THREADS} threads, {raised} raised, {wrong} wrong")
    return bool(faults)


def _soak(name: str, end: float, seed: int, ran: Counter[str], faults: list[str]) -> None:
    model = build(name)
    # Of each thread its own, as a draft view is a thread's own; what they give is the same.
    of_threads = [requests_of(model) for _ in range(THREADS)]
    alone = {kind: request() for kind, request in of_threads[0].items()}
    model.train().eval()  # nothing is prepared, as in a fresh process
    lock = threading.Lock()

    def work(number: int, requests: dict[str, Request]) -> None:
        rng = random.Random(seed + number)
        for _ in range(REQUESTS // THREADS):
            if time.monotonic() >= end or faults:
                return
            kind = rng.choice(list(requests))
            try:
                fault = (
                    "another result than alone" if differs(requests[kind](), alone[kind]) else ""
                )
            except Exception as error:
                fault = f"raised {type(error).__name__}: {error}"
            with lock:
                ran[f"{name}, {kind}"] += 1
                if fault:
                    faults.append(f"{name}, {kind}: {fault}")
                    print(faults[-1], flush=True)

    threads = [threading.Thread(target=work, args=given) for given in enumerate(of_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    raise SystemExit(main())
