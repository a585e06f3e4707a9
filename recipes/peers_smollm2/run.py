"""Other packages and this library on one real model: loss, calls, FLOPs,
how answers hold, and time.

    pip install --no-deps economize==0.3.2 tide-inference==0.2.1 mixture-of-depth==1.2.0 torchao==0.18.0
    python recipes/peers_smollm2/run.py --model HuggingFaceTB/SmolLM2-135M-Instruct
    python recipes/peers_smollm2/run.py --model HuggingFaceTB/SmolLM2-135M-Instruct --times

Each system of `systems.py` writes a file of its own into `--out` as it ends, and keeps what it
trained or chose in `--work`; a second run measures what is missing. A system whose package is not
installed is left out with a line that says so. `--times` is a step of its own, for a machine that
does nothing else: the systems that have a result, in one process, in turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # `smollm2` is there
from measure import attempt, behaviour, first_line, timed  # noqa: E402
from smollm2.run import LENGTH, ROW, SETTINGS, Texts, base, batches, pieces, row_losses  # noqa: E402
from systems import PEERS, Setup, System  # noqa: E402

from hf_depthroute.bench.timing import describe_machine  # noqa: E402

FITTED = 16_384  # tokens


def setup_of(args: argparse.Namespace, texts: Texts, tokenizer: Any) -> Setup:
    shared: dict[str, torch.Tensor] = {}

    def load() -> Any:
        """A model of its own over weights that all of them read, so that many fit into memory."""
        model = base(args.model)
        for name, weight in model.named_parameters():
            weight.data = shared.setdefault(name, weight.data)
        # Every generation is as long as it was asked for.
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model

    def rows(length: int) -> torch.Tensor:
        return torch.cat(
            [batch["input_ids"] for batch in texts.to_fit(args.tokens, length, seed=0)]
        )

    return Setup(
        load, rows(LENGTH), rows(ROW), int(load().config.num_hidden_layers), args.work, tokenizer
    )


@torch.no_grad()
def losses(system: System, ids: torch.Tensor, setting: str) -> torch.Tensor:
    """By row, nats a token: of rows of 256, or of the text behind prompts of 384."""
    if setting == "prompts":
        return SETTINGS["prompts"](system.model, ids)
    found = []
    for batch in batches(pieces(ids, LENGTH)):
        logits = system.logits(batch["input_ids"])
        found.append(row_losses(logits[:, :-1], batch["input_ids"][:, 1:]))
    return torch.cat(found)


class Dense:
    """The unchanged model, whose losses are computed once."""

    def __init__(self, setup: Setup, texts: Texts) -> None:
        self.texts, self.system, self.depth = texts.report, PEERS["dense"].make(setup), setup.depth
        self.known: dict[tuple[str, str], torch.Tensor] = {}

    def losses(self, name: str, setting: str) -> torch.Tensor:
        if (name, setting) not in self.known:
            self.known[name, setting] = losses(self.system, self.texts[setting][name], setting)
        return self.known[name, setting]


def over_dense(system: System, dense: Dense, setting: str) -> dict[str, Any]:
    """By text: nats over dense, and the standard error over rows."""
    found = {}
    for name, ids in dense.texts[setting].items():
        more = losses(system, ids, setting) - dense.losses(name, setting)
        error = float(more.std() / len(more) ** 0.5)
        found[name] = {
            "more": round(float(more.mean()), 4),
            "error": round(error, 4),
            "rows": len(more),
        }
    print("  ", {name: text["more"] for name, text in found.items()}, flush=True)
    return {"texts": found}


def missing(name: str) -> bool:
    """Whether a system's package is absent; says so."""
    peer = PEERS[name]
    if not peer.module or importlib.util.find_spec(peer.module):
        return False
    print(
        f"{name}: {peer.module} is not installed, left out; pip install --no-deps {peer.package}",
        flush=True,
    )
    return True


def measured(name: str, setup: Setup, dense: Dense) -> dict[str, Any]:
    """Everything of a system but its times; why it cannot be made, where it cannot."""
    started = time.perf_counter()
    try:
        system = PEERS[name].make(setup)
    except Exception as error:  # what a package cannot do is a result
        return {"fails": first_line(error)}
    made = round(time.perf_counter() - started)
    ids = torch.cat([pieces(rows, LENGTH)[:1] for rows in dense.texts["all"].values()])[:4]
    setting = "prompts" if name == "prompts" else "all"
    found = {"trained": system.trained, "setting": setting, "seconds_to_make": made}
    found |= behaviour(system, ids, dense.depth)
    if name == "dense":
        nats = {
            text: round(float(dense.losses(text, "all").mean()), 4) for text in dense.texts["all"]
        }
        return found | {"nats": nats}
    return found | {"loss": attempt(partial(over_dense, system, dense, setting))}


def times(setup: Setup, texts: Texts, names: list[str], minutes: float) -> dict[str, Any]:
    """Medians over interleaved rounds, as many as `minutes` allow: a prompt, a token,
    a token of each of 8 rows."""
    ended = time.perf_counter() + minutes * 60
    systems: dict[str, System] = {}
    for name in names:
        made = attempt(lambda name=name: PEERS[name].make(setup))
        if isinstance(made, System):
            systems[name] = made
    text = torch.cat([rows.flatten() for rows in texts.report["all"].values()])
    asked = {
        "prompt": (text[:1024][None], 1), "one": (text[:64][None], 9),
        "eight": (text[: 8 * 64].view(8, 64), 9),
    }  # fmt: skip
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in systems}
    for system in systems.values():  # warms up
        attempt(partial(timed, system, text[:64][None], 2))
    rounds, longest = 0, 0.0
    while rounds < 2 or time.perf_counter() + longest < ended:
        began = time.perf_counter()
        for name, system in systems.items():
            for kind, (ids, new) in asked.items():
                found = attempt(partial(timed, system, ids, new))
                if "fails" not in found:
                    part = "prompt" if kind == "prompt" else "token"
                    seconds[name].setdefault(kind, []).append(found[part])
        longest = max(longest, time.perf_counter() - began)
        rounds += 1
    medians = {
        name: {kind: median(values) for kind, values in kinds.items()}
        for name, kinds in seconds.items()
    }
    dense = medians["dense"]
    return {
        "machine": describe_machine(torch.device("cpu")) | {"threads": torch.get_num_threads()},
        "rounds": rounds,
        "dense_seconds": dense,
        "over_dense": {
            name: {kind: round(value / dense[kind], 4) for kind, value in kinds.items()}
            for name, kinds in medians.items()
        },
    }


def works(folder: Path, name: str) -> bool:
    """Whether a system was measured, and could be made."""
    path = folder / f"{name}.json"
    return path.exists() and "fails" not in json.loads(path.read_text(encoding="utf-8"))


def keep(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or Hub name"
    )
    parser.add_argument("--data", type=Path, default=HERE.parents[2] / "shared" / "data" / "text")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="where the results are put"
    )
    parser.add_argument(
        "--work", type=Path, default=HERE / "work", help="where what is fitted and trained is put"
    )
    parser.add_argument("--systems", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--tokens", type=int, default=FITTED, help="to fit, calibrate or train on")
    parser.add_argument(
        "--rows", type=int, default=2, help="of 512 tokens, of each text to report on"
    )
    parser.add_argument(
        "--times", action="store_true", help="measure times alone, on an idle machine"
    )
    parser.add_argument(
        "--minutes", type=float, default=6, help="that the times take, of them at least two rounds"
    )
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    texts = Texts(args.data, tokenizer, args.rows)
    setup = setup_of(args, texts, tokenizer)
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in args.systems if not missing(name)]
    if args.times:
        keep(
            args.out / "times.json",
            times(setup, texts, [name for name in names if works(args.out, name)], args.minutes),
        )
        return
    dense = Dense(setup, texts)
    for name in names:
        if not (args.out / f"{name}.json").exists():
            print(name, flush=True)
            keep(args.out / f"{name}.json", measured(name, setup, dense))


if __name__ == "__main__":
    main()
