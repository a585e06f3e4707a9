"""`--gguf-file`: a base that is a GGUF file in a folder or a repository of the Hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CliError

if TYPE_CHECKING:
    from ..config.adapter import DepthRouteConfig


def find_gguf_file(model: str | None, given: str | None, config: DepthRouteConfig) -> str | None:
    """The GGUF file of the base: `--gguf-file`, or the one that the adapter was made with where
    no base is named."""
    base = Path(model or config.base_model_name_or_path or "")
    if base.suffix == ".gguf" and base.is_file():
        raise CliError(
            f"model {base}: is a GGUF file; pass --model {base.parent} --gguf-file {base.name}"
        )
    found = given
    files = []
    if not (base / "config.json").is_file():
        files = sorted(path.name for path in base.glob("*.gguf"))
    if found is None:
        remembered = (config.base_architecture or {}).get("gguf_file")
        if isinstance(remembered, str) and (model is None or remembered in files):
            found = remembered
    if found is None and files:
        others = ""
        if len(files) > 1:
            others = f" (or {', '.join(files[1:4])})"
        raise CliError(
            f"model {base}: has no config.json, but a GGUF file; pass --gguf-file "
            f"{files[0]}{others}"
        )
    if given is not None and base.is_dir() and not (base / given).is_file():
        listed = ", ".join(files[:4]) or "no such file"
        raise CliError(f"--gguf-file {given}: is not in {base}; it has {listed}")
    if found is not None and importlib.util.find_spec("gguf") is None:
        raise CliError(
            f"--gguf-file {found}: reading it needs the package gguf; install it with: pip install "
            "gguf"
        )
    return found
