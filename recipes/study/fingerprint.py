"""Hashes of everything that a study's results depend on;
they are compared before a study is continued."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

import hf_depthroute

PACKAGE, STUDY = Path(hf_depthroute.__file__).parent, Path(__file__).parent
# Parts of the package and of this folder that no result depends on.
UNRELATED: tuple[str, ...] = ("cli/", "report/", "bench/", "files/hub.py")
UNRELATED += tuple(
    f"study/{name}.py" for name in ("__main__", "claims", "intervals", "results", "table")
)

_NAMES = {"code": "code of hf_depthroute", "data": "data", "base": "base model"}


def hash_code(package: Path, study: Path) -> str:
    """A hash of the source files of `hf_depthroute` and of this folder that results depend on."""
    digest = hashlib.sha256()
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    files |= {f"study/{path.name}": path for path in study.glob("*.py")}
    for relative, path in sorted(files.items()):
        if not relative.startswith(UNRELATED):
            digest.update(f"{relative}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


CODE = hash_code(PACKAGE, STUDY)  # as it was when this process imported it


def hash_model(model: Any) -> str:
    """A hash of a model's configuration, parameters and buffers."""
    config = {
        k: v
        for k, v in model.config.to_dict().items()
        if k not in ("_name_or_path", "transformers_version")
    }
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}\0".encode())
        digest.update(
            value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """The versions of the libraries whose numerics matter."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }


def combine(parts: dict[str, Any]) -> str:
    """The fingerprint of all parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def explain(before: dict[str, Any], now: dict[str, Any]) -> str:
    """In words, which parts differ: hashes by name, settings and versions with their values."""
    words = []
    for name in now:
        if before.get(name) == now[name]:
            continue
        if name in _NAMES:
            words.append(f"other {_NAMES[name]}")
        else:
            words.append(
                f"other {name} ({', '.join(differences(before.get(name, {}), now[name]))})"
            )
    return ", ".join(words)


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """`["training.rank_weight 0.2 -> 0"]`: the leaves of two nested mappings that differ."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [f"{name} {json.dumps(before)} -> {json.dumps(now)}"]
    found = []
    for key in sorted({*before, *now}):
        found += differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    return found
