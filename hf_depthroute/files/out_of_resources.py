"""Out of memory, out of disk: the many ways in which libraries say so."""

from __future__ import annotations

import errno

import torch


def out_of_memory(error: BaseException) -> bool:
    """Whether the machine or the GPU ran out of memory."""
    # The CPU allocator raises a plain RuntimeError.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def disk_full(error: BaseException) -> bool:
    """Whether a write failed for lack of space or quota; some say so in the message only."""
    number = getattr(error, "errno", None)
    said = str(error)
    return (
        number in (errno.ENOSPC, errno.EDQUOT)
        or "No space left on device" in said
        or ("PytorchStreamWriter" in said and "failed writing" in said)
        # torch.save, of a file that ends too early.
        or ("inline_container" in said and "unexpected pos" in said)
        or "iostream error" in said  # torch.save, where it cannot even end the file
    )
