"""Pretrain the small Llamas of this project: BPE tokenizer, model, validation loss and model card.

    python recipes/embedded_base/pretrain.py --out recipes/embedded_base/model
    python recipes/embedded_base/pretrain.py --shape wide_base --out MODEL --work WORK

`embedded_base` is what most studies use. Its text is the Python standard library's own sources on
this machine (`hf_depthroute.data.text.stdlib_files`). One run takes about half an hour on two CPU
cores. `wide_base` also reads the sources of the installed packages, and trains at a constant rate
until it is stopped: stop it, and run the same command with `--finish`, which lets the rate fall to
zero over a quarter as many steps again and writes the model. Without `--finish`, the same command
trains on from where the rate was constant.

WORK (OUT/work unless given) holds the tokens, a log of JSON lines and a checkpoint, written every
few minutes and when the run is terminated. The same command goes on from there. Weights are stored
in bfloat16 to stay small. `--card-only` writes the card again from the numbers of the last run.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import platform
import signal
import sysconfig
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
    get_wsd_schedule,
)

from hf_depthroute.data.text import PYTHON_STDLIB, load_text, pack
from hf_depthroute.evaluation.perplexity import mean_loss
from hf_depthroute.files.staged import write_bytes, write_json, write_text

CARDS = Path(__file__).parents[2] / "model_cards"
LONGEST_FILE = 200_000  # bytes; longer files are mostly generated tables


@dataclass(frozen=True)
class Shape:
    """A model, its text and how it is trained.

    Without `steps`, the learning rate is constant until `--finish`.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    packages: bool
    optimizer: str
    lr: float
    steps: int | None = None


SHAPES = {
    "embedded_base": Shape(
        256, 768, 6, 4, 2, 2048, packages=False, optimizer="adamw", lr=2e-3, steps=1500
    ),
    "wide_base": Shape(512, 2048, 4, 8, 4, 4096, packages=True, optimizer="muon", lr=4e-3),
}


def fingerprint(texts: list[str]) -> str:
    """Twelve hex digits that identify a list of texts."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:12]


def package_texts(known: list[str], held_out: list[str]) -> tuple[list[str], dict[str, str]]:
    """The sources of the installed packages, each text once and none of `known`,
    and what licence each states.

    Left out are this project and copies of held-out texts: files with more than half of the lines
    of one.
    """
    found_in, sizes = defaultdict(list), {}
    for index, text in enumerate(held_out):
        lines = long_lines(text)
        sizes[index] = max(10, len(lines))  # a few lines say little
        for line in lines:
            found_in[line].append(index)

    texts: list[str] = []
    licences: dict[str, str] = {}
    seen = {text.strip() for text in [*known, *held_out, ""]}
    folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    for package in sorted(
        metadata.distributions(path=folders), key=lambda package: package.name.lower()
    ):
        if package.name.replace("_", "-") == "hf-depthroute":
            continue
        for file in sorted(
            file for file in package.files or [] if file.suffix == ".py" and ".." not in file.parts
        ):
            path = Path(str(package.locate_file(file)))
            if not path.is_file() or path.stat().st_size > LONGEST_FILE:
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.strip() in seen:
                continue
            seen.add(text.strip())
            shared = Counter(index for line in long_lines(text) for index in found_in.get(line, []))
            if not any(count > sizes[index] / 2 for index, count in shared.items()):
                texts.append(text)
                licences[f"{package.name} {package.version}"] = licence(package)
    return texts, licences


def long_lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= 20}


def licence(package: metadata.Distribution) -> str:
    """What the package's metadata states, in one line."""
    said = package.metadata
    classes = [
        line.split(" :: ")[-1]
        for line in said.get_all("Classifier") or []
        if line.startswith("License ::")
    ]
    stated = (
        said.get("License-Expression") or ", ".join(classes) or said.get("License") or "not stated"
    )
    return stated.strip().splitlines()[0][:80]


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return wrap(tokenizer)


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>"
    )


def prepare(
    shape: Shape, length: int, work: Path
) -> tuple[PreTrainedTokenizerFast, dict[str, Any]]:
    """The tokenizer, and a dict of the blocks of both splits and of what the text was;
    made once, then read."""
    if not (work / "data.pt").exists():
        from datasets import Dataset

        train, validation = (
            list(load_text(PYTHON_STDLIB, split=s)["text"]) for s in ("train", "validation")
        )
        packages, licences = package_texts(train, validation) if shape.packages else ([], {})
        tokenizer = train_tokenizer(train + packages[::10], vocab_size=shape.vocabulary)
        tokenizer.save_pretrained(work / "tokenizer")
        data: dict[str, Any] = {
            "validation_text": fingerprint(validation),
            "python": platform.python_version(),
            "licences": {f"Python {platform.python_version()}": "PSF-2.0", **licences},
        }
        for split, texts in (("train", train + packages), ("validation", validation)):
            packed = pack(Dataset.from_dict({"text": texts}), tokenizer, length)
            data[split] = packed.with_format("torch")["input_ids"][:].short()
        write_tensors(work / "data.pt", data)
    read = Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))
    return wrap(read), torch.load(work / "data.pt")


def sixteen(blocks: torch.Tensor) -> torch.Tensor:
    """Sixteen of `blocks` `[N, length]`, spread evenly; all where there are fewer."""
    return blocks[:: max(1, len(blocks) // 16)][:16]


def write_tensors(path: Path, content: dict[str, Any]) -> None:
    file = io.BytesIO()
    torch.save(content, file)
    write_bytes(path, file.getvalue())


def build(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=shape.hidden, intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def build_optimizers(model: LlamaForCausalLM, name: str, lr: float) -> list[torch.optim.Optimizer]:
    """AdamW; with `"muon"`, Muon for the matrices of the layers and AdamW for the rest."""
    layers = [p for p in model.model.layers.parameters() if p.ndim > 1] if name == "muon" else []
    decay = [p for p in model.parameters() if p.ndim > 1 and not any(p is q for q in layers)]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    if not layers:
        return [adamw]
    return [
        adamw,
        torch.optim.Muon(layers, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]


def build_schedule(
    optimizer: torch.optim.Optimizer, shape: Shape, args: argparse.Namespace, step: int, start: int
):
    """The learning rate from `step` on; `start` is the step from which `--finish` lets it fall."""
    last, warmup = step - 1, args.warmup
    if shape.steps:
        return get_cosine_schedule_with_warmup(optimizer, warmup, args.steps, last_epoch=last)
    total = args.steps or 2**62
    stable = total - total // 5 if not args.finish else start
    return get_wsd_schedule(
        optimizer,
        warmup,
        total - stable,
        num_stable_steps=stable - warmup,
        decay_type="linear",
        last_epoch=last,
    )


def fast_dtype(device: str) -> torch.dtype:
    """bfloat16 where there are instructions for it."""
    cpu = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if device == "cuda" or cpu else torch.float32


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} CPU threads ({torch.backends.cpu.get_cpu_capability()})"


def card(folder: Path) -> str:
    """The model card, with every number from the files of the model in `folder`."""
    training = json.loads((folder / "training.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    template = (CARDS / f"{training.get('shape', 'embedded_base')}.template.md").read_text()
    return Template(template).substitute(
        training,
        train_tokens=f"{training['train_tokens']:,}",
        train_tokens_seen=f"{training['train_tokens_seen']:,}",
        parameters=f"{sum(tensor.numel() for tensor in load_file(folder / 'model.safetensors').values()):,}",
        minutes=round(training["seconds"] / 60),
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        ffn=config["intermediate_size"],
        vocabulary=f"{config['vocab_size']:,}",
        packages=len(training.get("licences", {})) - 1,
    )


class Log:
    """JSON lines in a file and on the screen; lines after `step`, which a killed run left,
    are removed."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        old = path.read_text().splitlines(keepends=True) if path.exists() else []
        write_text(
            path,
            "".join(
                line for line in old if line.endswith("}\n") and json.loads(line)["step"] <= step
            ),
        )

    def write(self, row: dict[str, float]) -> None:
        print(json.dumps(row), flush=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def load_state(args: argparse.Namespace) -> dict[str, Any]:
    """The checkpoint to go on from; empty for a new run.

    An interrupted `--finish` goes on if it is of the newest.
    """
    places = [args.work / "checkpoint.pt", args.work / "finish.pt"]
    stable, finishing = (
        torch.load(place, map_location="cpu") if place.exists() else {} for place in places
    )
    if args.finish and not stable:
        raise SystemExit("--finish: there is no checkpoint to finish from")
    if args.finish:
        return (
            finishing
            if finishing.get("start") == stable["step"]
            else {**stable, "start": stable["step"]}
        )
    return stable


def train(shape: Shape, args: argparse.Namespace) -> None:
    """Train until the last step or a signal to terminate; the model is written at the last step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = fast_dtype(device)
    tokenizer, data = prepare(shape, args.length, args.work)
    blocks, held_out = data["train"], data["validation"]
    probe = [{"input_ids": block[None].long()} for block in sixteen(held_out)]

    settings = {
        name: getattr(args, name)
        for name in ("shape", "optimizer", "batch", "length", "lr", "warmup", "seed")
    }
    state = load_state(args)
    if state and state["settings"] != settings:
        raise SystemExit(f"{args.work} holds a run with other settings: {state['settings']}")
    torch.manual_seed(args.seed)
    model = build(shape, tokenizer)
    print(
        f"{len(blocks):,} blocks, {sum(p.numel() for p in model.parameters()):,} parameters",
        flush=True,
    )
    step, start, seconds, cursor = (
        state.get(name, 0) for name in ("step", "start", "seconds", "cursor")
    )
    if state:
        model.load_state_dict(state["model"])
    model.to(device)
    forward = torch.compile(model) if args.compile else model
    optimizers = build_optimizers(model, args.optimizer, args.lr)
    if args.finish:
        args.steps = start + max(1, start // 4)
    for optimizer, saved in zip(optimizers, state.get("optimizers", [])):
        optimizer.load_state_dict(saved)
    schedules = [build_schedule(optimizer, shape, args, step, start) for optimizer in optimizers]
    order = state["order"] if state else torch.randperm(len(blocks))
    if state:
        torch.set_rng_state(state["random"])
    del state

    def save() -> None:
        content = {
            "settings": settings, "step": step, "start": start, "seconds": seconds,
            "cursor": cursor, "order": order, "random": torch.get_rng_state(),
            "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }  # fmt: skip
        write_tensors(args.work / ("finish.pt" if args.finish else "checkpoint.pt"), content)

    terminated: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: terminated.append(number))
    log = Log(args.work / "log.jsonl", step)
    saved_at = logged_at = time.time()
    logged_step = step
    while step < (args.steps or 2**62):
        began = time.time()
        if cursor + args.batch > len(order):
            order, cursor = torch.randperm(len(blocks)), 0
        batch = blocks[order[cursor : cursor + args.batch]].long().to(device)
        cursor += args.batch
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = forward(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        step += 1
        if step % args.log_every == 0:
            row = {"step": step, "tokens": step * batch.numel(), "loss": round(loss.item(), 4)}
            row["tokens_per_second"] = round(
                (step - logged_step) * batch.numel() / (time.time() - logged_at), 1
            )
            row["lr"] = optimizers[0].param_groups[0]["lr"]
            if step % args.validate_every == 0:
                row["validation_loss"] = round(mean_loss(model, probe), 4)
            log.write(row)
            logged_at, logged_step = time.time(), step
        seconds += time.time() - began
        if terminated or time.time() - saved_at >= args.save_seconds:
            save()
            saved_at = time.time()
        if terminated:
            print(f"terminated after step {step}; the same command goes on", flush=True)
            return
    save()

    model = model.to(torch.bfloat16)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    batches = [{"input_ids": block.long()} for block in held_out.split(16)]
    result = {
        "shape": args.shape,
        "validation_loss": round(mean_loss(model.float(), batches), 4),
        "probe_loss": round(mean_loss(model, probe), 4),
        "block_length": args.length,
        "validation_blocks": len(held_out),
        "validation_text": data["validation_text"],
        "train_tokens_seen": step * args.batch * args.length,
        "train_tokens": blocks.numel(),
        "python": data["python"],
        "steps": step,
        "seconds": round(seconds),
        "machine": machine(device),
        "optimizer": {
            name: settings[name] for name in ("optimizer", "lr", "batch", "warmup", "seed")
        },
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "licences": data["licences"],
    }
    write_json(args.out / "training.json", result)
    write_text(CARDS / f"{args.shape}.md", card(args.out))
    print(
        json.dumps({name: value for name, value in result.items() if name != "licences"}, indent=2)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="embedded_base")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--work", type=Path, help="tokens, log and checkpoints; OUT/work unless given"
    )
    parser.add_argument(
        "--steps", type=int, help="for wide_base: the rate falls over the last fifth of them"
    )
    parser.add_argument(
        "--finish", action="store_true", help="let the rate fall from the present checkpoint on"
    )
    parser.add_argument("--optimizer", choices=["adamw", "muon"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--compile", action="store_true", help="with torch.compile, 1.3 times as fast"
    )
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--validate-every", type=int, default=50)
    parser.add_argument("--save-seconds", type=float, default=300)
    parser.add_argument("--card-only", action="store_true")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    if args.card_only:
        write_text(CARDS / f"{args.shape}.md", card(args.out))
        return
    if args.finish and (shape.steps or args.steps):
        parser.error(
            "--finish is for a shape without a number of steps, and says itself how many there are"
        )
    if args.threads:
        torch.set_num_threads(args.threads)
    args.work = args.work or args.out / "work"
    args.work.mkdir(parents=True, exist_ok=True)
    args.lr, args.optimizer = args.lr or shape.lr, args.optimizer or shape.optimizer
    args.steps = args.steps or shape.steps
    train(shape, args)


if __name__ == "__main__":
    main()
