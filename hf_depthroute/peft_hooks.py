"""Reading and saving, where PEFT asks the whole library and not the method: strict and atomic for our adapters.

`PeftConfig.from_json_file` is what every path reads a config with before it touches a model, and
`PeftModel.save_pretrained` what every path saves with. Both are wrapped once, on import; adapters of other methods
pass through unchanged.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from peft import PeftModel
from peft.config import PeftConfigMixin

from .adapter_file import AdapterMismatchError, check_folder, read_config
from .config import ConfigError, DepthRouteConfig
from .saving import atomically, settle

OURS = re.compile(rb'"peft_type"\s*:\s*"DEPTH_ROUTE"')
_MARK = "_depth_route_wrapped"


def install() -> None:
    """Wrap both; a second call does nothing."""
    reader: Any = PeftConfigMixin.from_json_file.__func__  # type: ignore[attr-defined]
    if not hasattr(reader, _MARK):
        PeftConfigMixin.from_json_file = classmethod(_strictly(reader))  # type: ignore[method-assign,assignment]
    if not hasattr(PeftModel.save_pretrained, _MARK):
        saver = atomically(PeftModel.save_pretrained)
        setattr(saver, _MARK, True)
        PeftModel.save_pretrained = saver  # type: ignore[method-assign]


def _strictly(read: Any) -> Any:
    @functools.wraps(read)
    def from_json_file(cls: Any, path_json_file: str, **kwargs: Any) -> Any:
        path = Path(path_json_file)
        if _says_ours(path):
            return _read_ours(path)
        found = read(cls, path_json_file, **kwargs)
        ours = isinstance(found, dict) and found.get("peft_type") == "DEPTH_ROUTE"
        return _read_ours(path) if ours else found

    setattr(from_json_file, _MARK, True)
    return from_json_file


def _says_ours(path: Path) -> bool:
    """Before any parser sees it: a config that nests too deep must not reach one."""
    try:
        with open(path, "rb") as file:
            return OURS.search(file.read(1 << 20)) is not None
    except OSError:
        return False  # PEFT says why


def _read_ours(path: Path) -> dict[str, Any]:
    try:
        return _checked(path)
    except AdapterMismatchError:
        settle(path.parent)
        return _checked(path)


def _checked(path: Path) -> dict[str, Any]:
    config = read_config(path)
    try:
        DepthRouteConfig(**config)
    except (ValueError, TypeError) as error:  # ours, and what PEFT says about its own fields
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from error
    check_folder(path.parent, config)
    return config
