"""A fuzz target for the adapter loader: damaged files are refused in one line,
or load to the same model.

    python tests/helpers/fuzz_adapter.py --seconds 600 --seed 1

Every round damages a copy of a saved adapter, by bytes, by blocks, or by structure, and loads it
onto its base. A crash, another kind of error, a hang, or a model that computes something else is a
finding: it is printed with the round's number, which repeats it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import build_base, logits, routed
from peft import PeftModel
from safetensors.torch import load_file, save_file

from hf_depthroute.adapter.files import CONFIG_NAME, WEIGHTS_NAME, AdapterMismatchError
from hf_depthroute.config.adapter import ConfigError

OURS = re.compile(rb'"peft_type"\s*:\s*"DEPTH_ROUTE"')
REFUSALS = (AdapterMismatchError, ConfigError)
# What PEFT says of a config that no longer tells which method it is of.
OF_NO_METHOD = (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError)
ADAPTERS = ("mlp", "memory")  # kinds of `models.KINDS`
SECONDS = 5.0  # longer than this is a hang
WORDS = [None, True, False, 0, 1, -1, 3, 2**40, 0.5, -0.5, 1e300]
WORDS += ["", "all", "last:2", "mlp", "jepa", "ffn", "memory", "DEPTH_ROUTE"]


def bytes_of(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        kind = rng.randrange(5)
        at = rng.randrange(len(data) or 1)
        if kind == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at : at + rng.choice([1, 8, 512])]
        elif kind == 2:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice([1, 8, 64])))
        elif kind == 3:
            data[at : at + 64] = bytes(min(64, len(data) - at))
        else:
            data = data[:at]
    path.write_bytes(data)


def header(path: Path, rng: random.Random) -> None:
    """The JSON header of a safetensors file, with offsets, shapes and dtypes that disagree."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    content = json.loads(data[8 : 8 + size])
    name = rng.choice([key for key in content if key != "__metadata__"])
    entry = content[name]
    kind = rng.randrange(5)
    if kind == 0:
        entry["data_offsets"] = [rng.randrange(-8, 1 << 20), rng.choice([0, 1, 1 << 62])]
    elif kind == 1:
        entry["shape"] = [rng.choice([0, 1, 7, 1 << 31, 1 << 62]) for _ in range(rng.randrange(4))]
    elif kind == 2:
        entry["dtype"] = rng.choice(["F64", "BF16", "U8", "I64", "F8_E4M3", "Q9"])
    elif kind == 3:
        content[rng.choice(["lm_head.weight", name + ".", "..", name[:-3]])] = content.pop(name)
    else:
        del content[name]
    text = json.dumps(content).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def field(path: Path, rng: random.Random) -> None:
    content = json.loads(path.read_text())
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice([*content, "weights_hash", "layers", "surprise"])
        content[name] = rng.choice(
            [*WORDS, [rng.choice(WORDS)], {"a": rng.choice(WORDS)}, content.get("layers")]
        )
    path.write_text(json.dumps(content))


def tensor(path: Path, rng: random.Random) -> None:
    content = load_file(path)
    name = rng.choice(list(content))
    value = content[name]
    content[name] = rng.choice(
        [
            value + 1,
            value * torch.nan,
            value.half(),
            value.reshape(-1),
            value.new_zeros(0),
            value.double(),
        ]
    )
    save_file({key: each.contiguous() for key, each in content.items()}, path)


DAMAGES: list[tuple[str, Callable[[Path, random.Random], None]]] = [
    (CONFIG_NAME, bytes_of),
    (WEIGHTS_NAME, bytes_of),
    (WEIGHTS_NAME, header),
    (CONFIG_NAME, field),
    (WEIGHTS_NAME, tensor),
]


def fuzz(seconds: float, seed: int, only: int | None = None) -> tuple[Counter[str], list[str]]:
    """Outcomes by name, and what was found."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    findings: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        good, bad = {kind: Path(scratch, kind) for kind in ADAPTERS}, Path(scratch, "bad")
        expected = {}
        for kind, folder in good.items():
            routed(build_base("llama"), kind, seed=7).save_pretrained(folder)
            expected[kind] = logits(PeftModel.from_pretrained(build_base("llama"), folder).eval())
        base = build_base("llama")
        end, number = time.monotonic() + seconds, -1
        while time.monotonic() < end:
            number = number + 1 if only is None else only
            rng = random.Random(f"{seed}-{number}")
            shutil.rmtree(bad, ignore_errors=True)
            kind = rng.choice(ADAPTERS)
            shutil.copytree(good[kind], bad)
            name, damage = rng.choice(DAMAGES)
            damage(bad / name, rng)
            outcome, finding = _round(base, bad, expected[kind], settings=name == CONFIG_NAME)
            outcomes[f"{damage.__name__}: {outcome}"] += 1
            if finding is not None:
                findings.append(
                    f"seed {seed} round {number} ({damage.__name__} of {name}, {kind}): {finding}"
                )
                base = build_base("llama")
            if only is not None:
                break
    return outcomes, findings


def _round(
    base: Any, folder: Path, expected: torch.Tensor, settings: bool
) -> tuple[str, str | None]:
    """`settings`: the config was damaged, and may say something else that is valid,
    such as another budget."""
    start = time.monotonic()
    try:
        model = PeftModel.from_pretrained(base, folder).eval()
    except REFUSALS as error:
        outcome, finding = "refused", None
        if len(str(error)) > 1000 or "\n" in str(error):
            finding = f"the message is no line: {str(error)[:200]!r}"
    except Exception as error:
        if not isinstance(error, OF_NO_METHOD) or OURS.search((folder / CONFIG_NAME).read_bytes()):
            return "crashed", f"{type(error).__name__}: {str(error)[:300]}"
        outcome, finding = "refused by PEFT", None
    else:
        outcome, finding = "loaded", None
        if not torch.equal(logits(model), expected):
            outcome = "loaded another model"
            finding = None if settings else "loads, and computes something else"
        model.unload()
    if time.monotonic() - start > SECONDS:
        finding = f"took {time.monotonic() - start:.1f} s"
    if hasattr(base.model.layers[2], "routing") or hasattr(base, "peft_config"):
        return outcome, "the base is not what it was"
    return outcome, finding


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--round", type=int, default=None, help="only this round, to repeat a finding"
    )
    given = parser.parse_args()
    outcomes, findings = fuzz(given.seconds, given.seed, given.round)
    for name, count in sorted(outcomes.items()):
        print(f"{count:7,} {name}")
    print(f"{sum(outcomes.values()):7,} executions, {len(findings)} findings")
    for finding in findings[:20]:
        print(finding)
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
