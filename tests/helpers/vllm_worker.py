"""A program that serves prompts with vLLM in a process of its own:
`python vllm_worker.py REQUEST.json ANSWER.json`.

Without arguments it reads the two paths from a line of its input, answers, prints the second, and
reads the next line: vLLM takes longer to import than to serve a small model.

A request is a list of engines, one after the other: each has `model`, `adapter` (settings),
`options` of `vllm.LLM`, `new_tokens`, and `passes`, lists of calls, each a list of prompts;
`budgets` are pairs of a prompt and the budget that it asks for, `loras` of a prompt and the folder
of its LoRA. An answer has, for every engine, `tokens` in the shape of the passes, `cached` (tokens of prompts that the prefix cache had), and for
every process, by routed layer, `entered` (rows that entered its MLP) and `counted` (rows in full,
rows).
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",
)  # fmt: skip

_ROWS: dict[int, int] = {}


def watch(model: Any) -> None:
    """Count the rows that enter the MLPs of routed layers."""
    from hf_depthroute.base.families import find_decoder, row_of
    from hf_depthroute.routing.routing import ROUTING

    family = row_of(model.config)
    _ROWS.clear()
    for index, layer in enumerate(getattr(find_decoder(model.model, family), family.layers)):
        if ROUTING in layer._modules:
            _ROWS[index] = 0

            def count(module: Any, args: Any, index: int = index) -> None:
                _ROWS[index] += args[0].shape[:-1].numel()

            getattr(layer, family.ffn).register_forward_pre_hook(count)


def counted(model: Any) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
    """What `watch` saw, and what the library counted, by layer."""
    table = model.vllm_config.compilation_config.static_forward_context
    counts = [step.count for step in table.values() if getattr(step, "count", None) is not None]
    return dict(_ROWS), {count.layer_index: (int(count.full), count.rows) for count in counts}


def serve(engine: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest

    from hf_depthroute.vllm.settings import BUDGET, Settings

    options = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "block_size": 32,
    } | engine["options"]
    options["hf_overrides"] = Settings(**engine["adapter"]).hf_overrides
    llm = LLM(engine["model"], skip_tokenizer_init=True, **options)
    llm.apply_model(watch)
    how = {
        "temperature": 0.0,
        "max_tokens": engine["new_tokens"],
        "ignore_eos": True,
        "detokenize": False,
    }
    budgets = {tuple(prompt): budget for prompt, budget in engine.get("budgets", [])}

    def greedy(prompt: list[int]) -> SamplingParams:
        budget = budgets.get(tuple(prompt))
        return SamplingParams(**how, extra_args=None if budget is None else {BUDGET: budget})  # type: ignore[arg-type]

    folders = {tuple(prompt): folder for prompt, folder in engine.get("loras", [])}
    names = sorted(set(folders.values()))

    def lora(prompt: list[int]) -> LoRARequest | None:
        folder = folders.get(tuple(prompt))
        return None if folder is None else LoRARequest(folder, 1 + names.index(folder), folder)

    tokens, cached = [], 0
    for calls in engine["passes"]:
        answers = []
        for prompts in calls:
            given = [{"prompt_token_ids": prompt} for prompt in prompts]
            how_each = [greedy(prompt) for prompt in prompts]
            requested = [lora(prompt) for prompt in prompts] if names else None
            outputs = llm.generate(given, how_each, use_tqdm=False, lora_request=requested)  # type: ignore[arg-type]
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
            cached += sum(output.num_cached_tokens or 0 for output in outputs)
        tokens.append(answers)
    seen = llm.apply_model(counted)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return {
        "tokens": tokens,
        "cached": cached,
        "entered": [s[0] for s in seen],
        "counted": [s[1] for s in seen],
    }


def answer(request: str, file: str) -> None:
    engines = json.loads(Path(request).read_text())
    Path(file).write_text(json.dumps([serve(engine) for engine in engines]))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        answer(*sys.argv[1:])
    else:
        for line in sys.stdin:
            paths = json.loads(line)
            answer(*paths)
            print(paths[1], flush=True)
