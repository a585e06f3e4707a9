"""What two processes compute for test_readable.py with a base that is split over them
by its own plan.

    torchrun --nproc_per_node 2 tensor_parallel_worker.py FOLDER

FOLDER/<family>-<target> holds a base and, in `adapter`, an adapter; what a rank computes is saved
there as <rank>.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from models import tokens
from peft import PeftModel
from transformers import AutoModelForCausalLM

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for folder in sorted(
        path for path in Path(sys.argv[1]).iterdir() if (path / "adapter").is_dir()
    ):
        base = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
        model = PeftModel.from_pretrained(base, folder / "adapter").eval()
        with torch.no_grad():
            torch.save(model(tokens(2, 9)).logits, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
