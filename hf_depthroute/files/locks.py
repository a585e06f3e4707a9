"""A lock that the system frees when its process ends, however it ends.

`filelock` locks a file of its own, which would stay in the folder that is locked; a file system
that refuses to lock makes it fall back on the file's being there, and then a killed process holds
the lock for good.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def locked(
    path: Path, busy: Exception, patience: float = 0.0, shared: bool = False
) -> Iterator[None]:
    """Hold the lock of `path`, a folder or a file, which is made if need be, inside the block.

    On Windows, or a file system without locks, there is none. `busy` is raised where it is held
    elsewhere after `patience` seconds. Holders that are all `shared` do not exclude each other.
    """
    if fcntl is None:
        yield
        return
    number = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(number, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    break
                if time.monotonic() >= end:
                    raise busy from error
            time.sleep(0.05)
        yield
    finally:
        os.close(number)
