"""The recipe under DeepSpeed's ZeRO-3, on two processors, for test_distributed.py.

    accelerate launch --config_file zero3.yaml zero3_worker.py FOLDER

Where there is no GPU, Accelerate counts one process under DeepSpeed, and looks for a GPU's number.
Here it is told better. DeepSpeed's compiled operators are left out: their build may not end.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from accelerate_worker import run_recipe


def _gloo(*_: Any, **__: Any) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_GPU


def _cpu(state: Any) -> None:
    state.device = torch.device("cpu")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for operator in deepspeed.ops.__compatible_ops__:
        deepspeed.ops.__compatible_ops__[operator] = False
    PartialState._prepare_backend = _gloo  # type: ignore[method-assign]
    PartialState.set_device = _cpu  # type: ignore[method-assign]
    run_recipe(folder, folder / "zero3", "--accumulate", "1", cpu=False)
    checkpoint = folder / "zero3" / "checkpoints" / "step-2"
    run_recipe(
        folder,
        folder / "zero3-resumed",
        "--accumulate",
        "1",
        "--resume",
        str(checkpoint),
        cpu=False,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
