"""Pretrain the small Llama that `make demo` uses: BPE tokenizer, model, validation loss and model card.

    python recipes/embedded_base/pretrain.py --out recipes/embedded_base/model

The text is the Python standard library's own sources on this machine (`hf_depthroute.data.text.stdlib_files`). One run
takes about half an hour on two CPU cores. Weights are stored in bfloat16 to stay small. `--card-only` writes the card
again from the numbers of the last run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import time
from pathlib import Path
from string import Template

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, get_cosine_schedule_with_warmup

from hf_depthroute.data.text import PYTHON_STDLIB, load_text, pack
from hf_depthroute.evaluation.perplexity import mean_loss

CARDS = Path(__file__).parents[2] / "model_cards"


def fingerprint(texts: list[str]) -> str:
    """Twelve hex digits that identify a list of texts."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:12]


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
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")


def card(folder: Path) -> str:
    """The model card, with every number from the files of the model in `folder`."""
    training = json.loads((folder / "training.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    return Template((CARDS / "embedded_base.template.md").read_text()).substitute(
        training,
        train_tokens=f"{training['train_tokens']:,}",
        train_tokens_seen=f"{training['train_tokens_seen']:,}",
        parameters=f"{sum(tensor.numel() for tensor in load_file(folder / 'model.safetensors').values()):,}",
        minutes=round(training["seconds"] / 60),
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        ffn=config["intermediate_size"],
        vocabulary=f"{config['vocab_size']:,}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--card-only", action="store_true")
    args = parser.parse_args()
    if args.card_only:
        (CARDS / "embedded_base.md").write_text(card(args.out))
        return
    torch.manual_seed(args.seed)

    train, validation = (load_text(PYTHON_STDLIB, split=s) for s in ("train", "validation"))
    tokenizer = train_tokenizer(list(train["text"]), vocab_size=2048)
    blocks = {
        split: torch.tensor(pack(data, tokenizer, args.length)["input_ids"])
        for split, data in (("train", train), ("validation", validation))
    }
    print({split: tuple(b.shape) for split, b in blocks.items()}, flush=True)

    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=768, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)

    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=args.lr, betas=(0.9, 0.95)
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=100, num_training_steps=args.steps)

    start, order, cursor = time.time(), torch.randperm(len(blocks["train"])), 0
    for step in range(1, args.steps + 1):
        if cursor + args.batch > len(order):
            order, cursor = torch.randperm(len(blocks["train"])), 0
        batch = blocks["train"][order[cursor : cursor + args.batch]]
        cursor += args.batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f} {(time.time() - start) / step:.2f} s/step", flush=True)

    model = model.to(torch.bfloat16)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    batches = [{"input_ids": block} for block in blocks["validation"].split(16)]
    validation_loss = mean_loss(model.float(), batches)
    result = {
        "validation_loss": round(validation_loss, 4),
        "block_length": args.length,
        "validation_blocks": len(blocks["validation"]),
        "validation_text": fingerprint(list(validation["text"])),
        "train_tokens_seen": args.steps * args.batch * args.length,
        "train_tokens": blocks["train"].numel(),
        "python": platform.python_version(),
        "steps": args.steps,
        "seconds": round(time.time() - start),
    }
    (args.out / "training.json").write_text(json.dumps(result, indent=2) + "\n")
    (CARDS / "embedded_base.md").write_text(card(args.out))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
