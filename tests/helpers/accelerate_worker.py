"""Runs of recipes/accelerate/train.py, in this process: one of several under a launcher,
or the only one.

Accelerate leaves FSDP to accelerators, and PyTorch's `fully_shard` runs on CPUs too. So an FSDP2
configuration is taken over here; what does the work is the recipe's, Accelerate's and PyTorch's own
code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from places import ROOT

RECIPE = ROOT / "recipes" / "accelerate"
OPTIONS = (
    "--gate jepa --length 16 --batch-size 4 --accumulate 2 --steps 4 --save-every 2 --log-every 4"
)


def run_recipe(data: Path, out: Path, *more: str, cpu: bool = True) -> None:
    """Train on the model and the text in `data`; `cpu` asks Accelerate for processors."""
    sys.path.insert(0, str(RECIPE))
    try:
        import train  # type: ignore[import-not-found]

        options = [
            "--model",
            str(data / "base"),
            "--dataset",
            str(data / "text.txt"),
            "--out",
            str(out),
        ]
        forget()
        train.train(train.parse([*OPTIONS.split(), *options, *more, *(["--cpu"] if cpu else [])]))
    finally:
        sys.path.remove(str(RECIPE))
        forget()


def forget() -> None:
    """Let the next Accelerator read its environment anew; the process group stays."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextmanager
def configured(name: str) -> Iterator[None]:
    """Inside the block, an Accelerator finds what `accelerate launch --config_file <name>` hands
    to its processes."""
    arguments = launch_command_parser().parse_args(
        ["--config_file", str(RECIPE / name), "train.py"]
    )
    arguments, *_ = _validate_launch_command(arguments)
    found = prepare_multi_gpu_env(arguments)
    changed = {
        key: value for key, value in found.items() if os.environ.get(key) != value and "FSDP" in key
    }
    init: Any = AcceleratorState.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = FullyShardedDataParallelPlugin()

    with (
        mock.patch.dict(os.environ, changed),
        mock.patch.object(AcceleratorState, "__init__", make),
    ):
        yield


def run_recipes(data: Path, folder: Path) -> None:
    """Under a launcher of two processes: DDP, FSDP2, and FSDP2 again from its own checkpoint."""
    run_recipe(data, folder / "ddp")
    with configured("fsdp2.yaml"):
        run_recipe(data, folder / "fsdp2")
        run_recipe(
            data, folder / "resumed", "--resume", str(folder / "fsdp2" / "checkpoints" / "step-2")
        )
    dist.barrier()
