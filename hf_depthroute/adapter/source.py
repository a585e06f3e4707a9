"""The folder that an adapter is loaded from, and what is looked at there before a model
makes room for it.

Another process may save there meanwhile, or may have been killed while it did; one at a time writes
there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from safetensors import SafetensorError

from ..files.locks import locked
from .files import (
    CONFIG_NAME,
    STAGE_PREFIX,
    WEIGHTS_NAME,
    AdapterMismatchError,
    check_header,
    read_config,
    read_tensors,
    tensors_hash,
)

if TYPE_CHECKING:
    from torch import nn

    from ..config.adapter import DepthRouteConfig

Found = TypeVar("Found")
_TRIES = 20
LOCK_SECONDS = 30.0
HUB = ("subfolder", "revision", "cache_dir", "token")


class Loading(NamedTuple):
    """A load of an adapter onto `model` in progress."""

    model: Any
    adapter_name: str
    source: Any  # a folder or a Hub id; None if the weights are given
    hub: Mapping[str, Any]  # how a Hub id is asked for; the names in `HUB`


_LOADING: ContextVar[Loading | None] = ContextVar("_LOADING", default=None)


@contextmanager
def loading_from(
    model: nn.Module, adapter_name: str, source: object, kwargs: Mapping[str, object]
) -> Iterator[None]:
    """Inside the block, an adapter is being read from files."""
    hub = {name: kwargs[name] for name in HUB if kwargs.get(name) is not None}
    token = _LOADING.set(Loading(model, adapter_name, source, hub))
    try:
        yield
    finally:
        _LOADING.reset(token)


def current_load() -> Loading | None:
    """The load that goes on, on any path; None if no adapter is being read from files."""
    return _LOADING.get()


def folder_of(source: Any, hub: Mapping[str, Any]) -> Path:
    """The folder of an adapter's files; one that does not exist, of a Hub id."""
    return Path("" if source is None else source, hub.get("subfolder") or "")


def check_tables(config: DepthRouteConfig) -> None:
    """Refuse a load whose file lacks the tables of n-grams of `config`: gigabytes, perhaps.

    Raises:
        AdapterMismatchError: The file is missing, or its header does not go with `config`.
    """
    load = _LOADING.get()
    if load is None or load.source is None or not config.has_memory:
        return
    path = folder_of(load.source, load.hub) / WEIGHTS_NAME
    if not Path(load.source).is_dir():
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(str(load.source), WEIGHTS_NAME, **load.hub))
    check_header(path, config.to_dict())


def read_whole(folder: Path, read: Callable[[], Found]) -> Found:
    """Return `read()`, called again if another process has saved into `folder` meanwhile.

    A save replaces two files, one after the other, and each is whole; what is read in between is of
    two saves.

    Raises:
        AdapterMismatchError: As `read`, if the files stay as they are.
    """
    for _ in range(_TRIES):
        before = _state(folder)
        try:
            return read()
        except AdapterMismatchError:
            if _state(folder) == before:
                raise
    return read()


def _state(folder: Path) -> list[tuple[int, int, int] | None]:
    """Which files of an adapter stand in a folder: one that replaces another has another number."""
    found: list[tuple[int, int, int] | None] = []
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        try:
            stat = (folder / name).stat()
        except OSError:
            found.append(None)
        else:
            found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return found


def settle(folder: Path) -> None:
    """Finish a save that was killed between its two renames; leave all else alone.

    A named adapter is saved from the folder above its own.
    """
    for root in (folder, folder.parent):
        if any(root.glob(f"{STAGE_PREFIX}*")) and os.access(root, os.W_OK):
            with alone_in(root):  # a save that is going on is waited for
                finish(root)


def finish(root: Path) -> None:
    """Put a staged config next to the weights that it was staged with, if those are in place."""
    for staged in sorted(root.glob(f"{STAGE_PREFIX}*/**/{CONFIG_NAME}")):
        place = root.joinpath(*staged.relative_to(root).parts[1:])
        if _goes_through_link(staged, root) or _goes_through_link(place.parent, root):
            continue  # no save leaves one
        weights = place.with_name(WEIGHTS_NAME)
        with suppress(ValueError, OSError, SafetensorError):
            config = read_config(staged)
            wanted = config.get("weights_hash")
            if wanted is None or not weights.is_file():
                continue
            if tensors_hash(read_tensors(weights, config)) == wanted:
                os.replace(staged, place)


def _goes_through_link(path: Path, root: Path) -> bool:
    return Path(os.path.realpath(path)) != Path(os.path.realpath(root), path.relative_to(root))


def alone_in(folder: Path) -> AbstractContextManager[None]:
    """Inside the block this process is the only writer of `folder`."""
    busy = OSError(
        errno.EAGAIN, f"another process has been saving there for {LOCK_SECONDS:.0f} s", str(folder)
    )
    return locked(folder, busy, LOCK_SECONDS)
