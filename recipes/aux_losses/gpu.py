"""The study at the shape of its paper on one GPU: pretrain the base, measure a step,
then run as many steps as fit.

    python recipes/aux_losses/gpu.py --work WORK --out OUT --minutes 25

The base is that of arXiv:2604.17228 (GPT-2 architecture, d=640, 12 layers, 10 heads, inner 2560,
768 positions) with a vocabulary of 16,384 instead of 151,665, pretrained on the source text of the
Python packages installed on the machine. Then G1, G3, A1, A3-G1 and A3-G3 with two seeds, batch 16
x 256, bf16, as many at a time as end first: one more is timed until it gains less than a tenth, or
does not fit the memory. Every phase leaves its result in WORK and is skipped when that exists, and
the study keeps its complete runs: start the same command again after a kill. The number of steps is
fixed at the first start, 20,000 or what the remaining minutes allow; OUT gets the results, which
name it.

`--smoke` runs all of it on a small model in a few minutes, also without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import sysconfig
import time
import zlib
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `study` is there

import torch
import torch.multiprocessing
import transformers
import yaml
from paper.page import write_report
from safetensors.torch import load_file, save_file
from step_cost import training_step
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

from hf_depthroute import DepthRouteConfig, get_depth_routed_model
from hf_depthroute.bench import describe_machine
from hf_depthroute.cli import main as command_line
from hf_depthroute.evaluation.perplexity import mean_loss
from hf_depthroute.training.arguments import RoutingArguments

HERE = Path(__file__).resolve().parent
CONFIGS = ["g1", "g3", "a1", "a3_g1", "a3_g3"]
SEEDS = [42, 123]
SIZES: dict[str, dict[str, int]] = {
    "paper": {"width": 640, "layers": 12, "heads": 10, "vocabulary": 16_384, "length": 256, "batch": 16,
              "rank": 80, "routed": 4, "files": 100_000, "pretrain_batch": 64, "eval_every": 500, "steps": 20_000},
    "smoke": {"width": 64, "layers": 4, "heads": 4, "vocabulary": 512, "length": 32, "batch": 4,
              "rank": 8, "routed": 2, "files": 60, "pretrain_batch": 8, "eval_every": 4, "steps": 8},
}  # fmt: skip


def source_texts(limit: int) -> dict[str, list[str]]:
    """Python sources of the standard library and the installed packages;
    one file in 50 is validation."""
    texts: dict[str, list[str]] = {"train": [], "validation": []}
    seen: set[int] = set()
    for name in ("stdlib", "purelib"):
        root = Path(sysconfig.get_path(name))
        for path in sorted(root.rglob("*.py"))[:limit]:
            text = path.read_text(encoding="utf-8", errors="ignore")
            key = zlib.crc32(text.encode())
            if len(text) > 200 and key not in seen:
                seen.add(key)
                held_out = zlib.crc32(path.relative_to(root).as_posix().encode()) % 50 == 0
                texts["validation" if held_out else "train"].append(text)
    return texts


def make_blocks(work: Path, size: dict[str, int]) -> dict[str, torch.Tensor]:
    """Token blocks `[N, length]`, int32."""
    path = work / "blocks.safetensors"
    if not path.exists():
        texts = source_texts(size["files"])
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.train_from_iterator(
            texts["train"][:: max(1, len(texts["train"]) // 4000)],
            trainers.BpeTrainer(
                vocab_size=size["vocabulary"],
                special_tokens=["<|end|>"],
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
        blocks = {}
        for split, parts in texts.items():
            ids = [i for encoded in tokenizer.encode_batch(parts) for i in (*encoded.ids, 0)]
            count = len(ids) // size["length"]
            blocks[split] = torch.tensor(ids[: count * size["length"]], dtype=torch.int32).view(
                count, -1
            )
        kept = torch.randperm(
            len(blocks["validation"]), generator=torch.Generator().manual_seed(0)
        )[:256]
        blocks["validation"] = blocks["validation"][kept.sort().values].contiguous()
        save_file(blocks, path.with_suffix(".partial"))
        path.with_suffix(".partial").rename(path)
    return load_file(path)


def pretrain(
    work: Path, size: dict[str, int], train: torch.Tensor, minutes: float, device: torch.device
) -> None:
    """The base model, in WORK/base."""
    if (work / "base").exists():
        return
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=size["vocabulary"], n_positions=768, n_embd=size["width"],
        n_layer=size["layers"], n_head=size["heads"], n_inner=4 * size["width"], resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    order = torch.randperm(len(train))
    batch, started, seconds_per_step, steps, step = size["pretrain_batch"], time.time(), 0.0, 30, 0
    schedule: Any = None
    while step < steps:
        index = torch.arange(step * batch, (step + 1) * batch) % len(order)
        ids = train[order[index]].long().to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 10:
            _wait(device)
            started = time.time()
        if step == 20:  # the rest of the schedule fits the time
            _wait(device)
            seconds_per_step = (time.time() - started) / 10
            steps = max(30, int(60 * minutes / seconds_per_step))
            schedule = get_cosine_schedule_with_warmup(optimizer, steps // 50, steps)
        if schedule is not None:
            schedule.step()
        if step % 200 == 0:
            print(f"pretraining: step {step} of {steps}, loss {loss.item():.3f}", flush=True)
    print(
        f"pretrained {steps} steps, {steps * batch * train.shape[1]:,} tokens, loss "
        f"{loss.item():.3f}",
        flush=True,
    )
    model.eval().save_pretrained(work / "base.partial")
    (work / "base.partial").rename(work / "base")


class Steps:
    """Training steps of one config, to be timed."""

    def __init__(self, name: str, work: Path, size: dict[str, int], device: torch.device) -> None:
        config = yaml.safe_load((HERE / "configs" / f"{name}.yaml").read_text())
        model = get_depth_routed_model(
            GPT2LMHeadModel.from_pretrained(work / "base").to(device),
            DepthRouteConfig(**adapter_fields(size), **config.get("adapter", {})),
        ).train()
        training = {"oracle": "all_full", **config.get("training", {})}
        self.step = training_step(model, RoutingArguments(**training, oracle_warmup=0))
        self.train = make_blocks(work, size)["train"]
        self.batch, self.device = size["batch"], device

    def seconds(self, count: int) -> float:
        """Seconds of a step, mean of `count`."""
        _wait(self.device)
        start = time.perf_counter()
        for n in range(count):
            ids = (
                self.train[n * self.batch : (n + 1) * self.batch]
                .long()
                .to(self.device, non_blocking=True)
            )
            self.step(n, ids)
        _wait(self.device)
        return (time.perf_counter() - start) / count


def measure_steps(work: Path, size: dict[str, int], device: torch.device) -> dict[str, Any]:
    """Seconds of a training step of every config, and the part of a step that is spent
    outside kernels."""
    path = work / "steps.json"
    if path.exists():
        return json.loads(path.read_text())
    result: dict[str, Any] = {}
    for name in CONFIGS:
        steps = Steps(name, work, size, device)
        steps.seconds(10)
        seconds = steps.seconds(20)
        result[name] = {"seconds": seconds}
        if device.type == "cuda":
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                steps.seconds(10)
            kernels = sum(event.self_device_time_total for event in profiled.key_averages()) / 1e7
            result[name] |= {"kernel_seconds": kernels, "outside_kernels": 1 - kernels / seconds}
        print(name, result[name], flush=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def measure_jobs(work: Path, size: dict[str, int], device: torch.device) -> dict[str, float]:
    """Steps a second of all of so many runs at a time; up to 8,
    as long as one more gains a tenth."""
    path = work / "jobs.json"
    if path.exists():
        return json.loads(path.read_text())
    result: dict[str, float] = {}
    context = torch.multiprocessing.get_context("spawn")
    most = 8 if device.type == "cuda" else os.cpu_count() or 1
    for jobs in range(1, most + 1):
        ready, found = context.Barrier(jobs), context.Queue()
        workers = [
            context.Process(target=_timed, args=(work, size, device.type, jobs, ready, found))
            for _ in range(jobs)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if jobs > 1 and any(worker.exitcode for worker in workers):
            break  # the memory does not hold so many
        if any(worker.exitcode for worker in workers):
            sys.exit("a single run ended; its error is above")
        result[str(jobs)] = sum(1 / found.get() for _ in workers)
        print(f"{jobs} at a time: {result[str(jobs)]:.2f} steps a second", flush=True)
        if jobs > 1 and result[str(jobs)] < 1.1 * result[str(jobs - 1)]:
            break
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _timed(
    work: Path, size: dict[str, int], device: str, jobs: int, ready: Any, found: Any
) -> None:
    """In a process of its own: the seconds of a step of the largest config,
    beside the other processes."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    try:
        steps = Steps("g3", work, size, torch.device(device))
        steps.seconds(5)
        ready.wait(timeout=90)
        found.put(steps.seconds(40))
    except BaseException:
        ready.abort()  # the others would wait for nothing
        raise


def time_of_all(throughput: dict[str, float], jobs: int, runs: int) -> float:
    """Time of all runs over that of a single one alone: full rounds of `jobs`,
    and a last one of what is left."""
    rounds = [jobs] * (runs // jobs) + [runs % jobs] * (runs % jobs > 0)
    return sum(at_once * throughput["1"] / throughput[str(at_once)] for at_once in rounds)


def adapter_fields(size: dict[str, int]) -> dict[str, Any]:
    return {
        "layers": f"last:{size['routed']}",
        "branch_rank": size["rank"],
        "gate_input": "residual",
        "budget": 0.5,
    }


def thresholds(work: Path, size: dict[str, int], device: torch.device) -> list[float]:
    """Fixed before the runs, from the base alone: 0.10, 0.07 and 0.05 above its validation loss."""
    blocks = load_file(work / "blocks.safetensors")["validation"].long().to(device)
    model = GPT2LMHeadModel.from_pretrained(work / "base").to(device)
    with torch.autocast(device.type, torch.bfloat16):
        dense = mean_loss(model, [{"input_ids": part} for part in blocks.split(size["batch"])])
    return [round(dense + above, 3) for above in (0.10, 0.07, 0.05)]


def write_study(work: Path, size: dict[str, int], steps: int, thresholds: list[float]) -> None:
    study = {
        "name": "aux_losses_gpu", "base": str(work / "base"), "data": {"blocks": str(work / "blocks.safetensors")},
        "steps": steps, "batch_size": size["batch"], "eval_every": min(size["eval_every"], steps // 4), "seeds": SEEDS,
        "thresholds": thresholds, "margin": 0.005, "adapter": adapter_fields(size),
        "training": {"learning_rate": 2e-4, "warmup_steps": max(1, steps // 20), "bf16": True, "oracle": "all_full",
                     "oracle_warmup": min(100, steps // 4)},
        "configs": [str(HERE / "configs" / f"{name}.yaml") for name in CONFIGS],
    }  # fmt: skip
    (work / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder that is kept between starts"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument(
        "--minutes",
        type=float,
        default=25,
        help="for everything; fixes the steps at the first start",
    )
    parser.add_argument("--pretrain-minutes", type=float, default=6)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    size = SIZES["smoke" if args.smoke else "paper"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transformers.logging.set_verbosity_error()
    started = time.time()
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)

    work = args.work.resolve()
    train = make_blocks(work, size)["train"]
    print(f"{train.numel():,} training tokens after {time.time() - started:.0f} s", flush=True)
    pretrain(work, size, train, 0.1 if args.smoke else args.pretrain_minutes, device)
    steps_measured = measure_steps(work, size, device)
    throughput = measure_jobs(work, size, device)
    runs = len(CONFIGS) * len(SEEDS)
    jobs = min(map(int, throughput), key=lambda jobs: time_of_all(throughput, jobs, runs))
    study = work / "study.yaml"
    if not study.exists():
        left = 60 * args.minutes - (time.time() - started)
        mean = sum(case["seconds"] for case in steps_measured.values()) / len(steps_measured)
        per_step = mean * time_of_all(throughput, jobs, runs)
        fits = int(0.85 * left / per_step)  # the rest is evaluation
        unit = size["eval_every"]
        steps = min(size["steps"], max(2 * unit, fits // unit * unit))
        write_study(work, size, steps, thresholds(work, size, device))
    try:
        command_line(["study", str(study), "--out", str(work / "study"), "--jobs", str(jobs)])
    except SystemExit as ended:
        if ended.code:
            sys.exit(ended.code)
    write_report(work / "study", args.out)
    for name in ("steps.json", "jobs.json"):
        shutil.copy(work / name, args.out)
    (args.out / "machine.json").write_text(json.dumps(describe_machine(device), indent=1) + "\n")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
