"""Lossless drafting on real and on made-up weights: is the text identical, what is accepted,
and how fast is it?

    python recipes/speed/lossless.py --json recipes/speed/lossless-cpu.json

* `embedded`: the 5-million-parameter base of `recipes/embedded_base`, with a router trained here
  for a minute.
* `wide`: the 18-million-parameter one, with a router that is fitted here.
* `stories`: the public stories260K checkpoint, where `../shared/data` is there, with a router
  trained the same way.
* `deep`: a random Llama of 24 blocks of which the last 20 hardly change the stream. No trained
  model has such weights; it shows what the machinery makes of a draft that is cheap and nearly
  always right.

Everything in float32 and greedy. Every row is the median of rounds in which plain generation and
all drafts of a stage run one after the other; prefill is included. `load_average` is the machine's
at the end of a case; the figures of a busy machine are rough.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from draft_search import search_draft

from hf_depthroute.bench import describe_machine

HERE = Path(__file__).resolve().parent
STORIES = HERE.parents[2] / "shared" / "data"
CODE_PROMPTS = (
    "def read_lines(path):\n",
    "import os\n\n\nclass Reader:\n    def __init__(self, ",
    "    if not isinstance(value, ",
)
STORY_PROMPTS = (
    "Once upon a time, there was",
    "One day, a little girl named Lily",
    "The dog was sad because",
)


TRAIN = ("train", "--layers", "last:{}", "--budget", "0.5", "--steps", "60", "--batch-size", "8", "--length", "128",
         "--lr", "0.002", "--warmup-steps", "10", "--calibration-blocks", "32", "--logging-steps", "60")  # fmt: skip
FIT = ("fit", "--keep", "0.5", "--blocks", "64", "--length", "256")


def from_text(model: Path, dataset: str, how: tuple[str, ...], texts: tuple[str, ...]) -> Any:
    """Drafts of the model with a router that the command `how` makes on `dataset`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        adapter = str(Path(folder) / "adapter")
        words = [
            "--model",
            str(model),
            "--dataset",
            dataset,
            "--dtype",
            "float32",
            "--out",
            adapter,
        ]
        subprocess.run(
            [sys.executable, "-m", "hf_depthroute", *how, *words],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        base = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, trust_remote_code=False
        )
        routed = peft.PeftModel.from_pretrained(base, adapter).eval()
        return search_draft(routed, prompts, max_new_tokens=32, pad_token_id=tokenizer.eos_token_id)


def training(layers: int) -> tuple[str, ...]:
    return tuple(word.format(layers) for word in TRAIN)


def deep() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=384, intermediate_size=1024, num_hidden_layers=24,
        num_attention_heads=6, num_key_value_heads=2, initializer_range=0.05,
        tie_word_embeddings=False, eos_token_id=None,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers[4:]:
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.02)
    prompts = [torch.randint(4096, (1, 16))]
    drops = [list(range(24 - count, 24)) for count in (6, 12, 18)]
    return search_draft(model, prompts, drops=drops, confidences=(0.0,), max_new_tokens=32)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--only", choices=("embedded", "wide", "stories", "deep"))
    args = parser.parse_args()
    bases = HERE.parent / "embedded_base"
    stories = STORIES / "stories260k"
    cases = {
        "embedded": lambda: from_text(bases / "model", "python-stdlib", training(4), CODE_PROMPTS),
        "wide": lambda: from_text(bases / "wide", "python-stdlib", FIT, CODE_PROMPTS),
        "stories": lambda: from_text(
            stories, str(STORIES / "stories.txt"), training(3), STORY_PROMPTS
        ),
        "deep": deep,
    }
    results: dict[str, Any] = {
        "machine": describe_machine(torch.device("cpu")),
        "dtype": "float32",
        "cases": {},
    }
    for name, case in cases.items():
        if args.only not in (None, name):
            continue
        if name == "stories" and not stories.is_dir():
            print("stories: left out, ../shared/data is not there")
            continue
        found = case()
        results["cases"][name] = asdict(found) | {"load_average": os.getloadavg()[0]}
        print(f"{name}: plain generation {found.plain_tokens_per_second:.1f} tokens/s", flush=True)
        for row in found.table:
            print(
                f"  budget {row.budget}, left out {row.drop}, {row.num_tokens} ahead, confidence "
                f"{row.confidence}: {row.speedup:.2f}x, accepted {row.acceptance_rate:.2f}, "
                f"{row.tokens_per_pass:.2f} per pass, "
                f"{'identical' if row.identical else 'DIFFERENT'}"
            )
    if args.only is not None and args.json.exists():
        before = json.loads(args.json.read_text())
        results["cases"] = before["cases"] | results["cases"]
    args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
