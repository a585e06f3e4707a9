"""lm-eval on a base and its adapter: dense and routed at several budgets, side by side.

Importing this module registers the model `depthroute` with lm-eval:

    import hf_depthroute.evaluation.harness
    lm_eval.simple_evaluate("depthroute", {"adapter": "me/router", "budget": 0.5}, tasks=["piqa"])
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lm_eval
import peft
import torch
import transformers
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..adapter.base_check import allow_base_mismatch as allowed
from ..base.contexts import synchronise
from ..files.hub import explained
from ..inference.calibration import active_routings, set_budget
from ..inference.phases import set_phases
from ..inference.restoring import restored
from ..routing.stack import state_of
from ..routing.state import Recorder
from ..routing.trace import RouteCounter, RouteRecord
from .served import as_base, read_generated, served_scores


@register_model("depthroute")
class DepthRouteLM(HFLM):
    """`HFLM` of a routed model: its own thresholds, or those of another budget.

    Decisions about tokens are causal, so a score depends neither on the batch nor on its padding. A
    decision about a whole sequence reads all of it, `phases="prefill"` asks for its last token, and
    lm-eval pads without a mask: there, batches hold one sequence. With `phases="prefill"` a
    continuation is scored as it is served: its prompt is read first, once for all continuations of
    it, and the continuation in full behind it. A text without a prompt, whose perplexity is asked
    for, enters in one pass, as if all of it were a prompt.

    Args:
        pretrained: The base's Hub id or folder, by default the adapter's own; or a `PeftModel` that
            is routed.
        adapter: Hub id or folder of the adapter; not with a `PeftModel`.
        budget: In (0, 1]; the adapter's by default.
        phases: `"all"` or `"prefill"`; the adapter's by default.
        allow_base_mismatch: Load the adapter onto another base of the same shape.
        dtype: The base's dtype, `"auto"` as stored.
        device: Default: a GPU if there is one.
        trust_remote_code: The base's repository may run Python code of its own.
        **kwargs: Arguments of `HFLM`, such as `batch_size`, `tokenizer`, `max_length`.

    Raises:
        ValueError: There is no adapter, or it does not route.
    """

    def __init__(
        self,
        pretrained: Any = None,
        adapter: str | None = None,
        budget: float | None = None,
        phases: str | None = None,
        allow_base_mismatch: bool = False,
        dtype: str = "auto",
        device: str | None = None,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> None:
        if pretrained is None or isinstance(pretrained, str):
            if adapter is None:
                raise ValueError("the model depthroute needs adapter=HUB_ID_OR_FOLDER")
            base, model = _load(pretrained, adapter, allow_base_mismatch, dtype, trust_remote_code)
            has_gpu = torch.cuda.is_available()  # lm-eval's program asks for one by default
            if device is None or (device.startswith("cuda") and not has_gpu):
                device = "cuda" if has_gpu else "cpu"
            model = model.to(device)
            kwargs.setdefault("tokenizer", base)
        else:
            model = pretrained
        if budget is not None:
            set_budget(model, float(budget))
        if phases is not None:
            set_phases(model, phases)
        configs = [routing.active_config() for routing in active_routings(model)]
        self._prompts_alone = any(config.phases == "prefill" for config in configs)
        if self._prompts_alone or any(config.granularity == "sequence" for config in configs):
            kwargs["batch_size"] = 1
        self.seconds = 0.0  # inside the model
        self.counter: RouteCounter | None = None  # of what runs full, if that is wanted
        super().__init__(pretrained=model, trust_remote_code=trust_remote_code, **kwargs)

    def _loglikelihood_tokens(
        self, requests: Any, *args: Any, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        without_prompt = any(name is None for name, _, _ in requests)
        if not self._prompts_alone or without_prompt:
            return super()._loglikelihood_tokens(requests, *args, **kwargs)
        scored: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        served = served_scores(self.model, requests, self.max_length, self._counting)
        hidden = kwargs.get("disable_tqdm", False)
        with (
            self._timed(),
            tqdm(total=len(requests), disable=hidden, desc="Scoring answers") as bar,
        ):
            for number, score, greedy in served:
                scored[number] = score, greedy
                self.cache_hook.add_partial("loglikelihood", requests[number][0], scored[number])
                bar.update()
        return scored

    def _model_call(self, inps: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        with self._counting(inps), self._timed():
            return super()._model_call(inps, *args, **kwargs)

    def _model_generate(self, context: torch.Tensor, *args: object, **kwargs: Any) -> Any:
        with self._timed():
            ids = super()._model_generate(context, *args, **kwargs)
        if self.counter is not None:  # counting makes decoding slower, so it is done afterwards
            # What generating has read of it, also padding after answers.
            after = ids[:, context.shape[1] : -1]
            for prompt, real, new in zip(context, kwargs["attention_mask"].bool(), after):
                # [1, 1], or [0, 1] for none
                kept = (new != self.tokenizer.pad_token_id).nonzero()[-1:] + 1
                text = torch.cat([prompt[real], new[: int(kept.sum())]])[None]
                with self._counting():
                    for _ in read_generated(self.model, text, int(real.sum()), logits_to_keep=1):
                        pass
        return ids

    def _counting(self, padded_BT: torch.Tensor | None = None) -> AbstractContextManager[None]:
        """Count what the passes in the block decide, if that is wanted.

        Args:
            padded_BT: Token ids of the one pass, which ends its rows with zeros for padding, and
                gives the model no mask. A text that ends in token 0 loses it here.
        """
        if self.counter is None:
            return nullcontext()
        counter: Recorder = self.counter
        if padded_BT is not None:
            counter = _TextCounter(self.counter, padded_BT.flip(1).cumsum(1).flip(1) > 0)
        return state_of(self.model).override(recorders=(counter,))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        synchronise(self.device)
        self.seconds += time.perf_counter() - start


@dataclass(frozen=True, eq=False)
class _TextCounter:
    """A recorder of one forward pass that counts its text, and no padding."""

    counter: RouteCounter  # that it is added to
    text_BT: torch.Tensor  # bool

    def __setitem__(self, layer_index: int, record: RouteRecord) -> None:
        text_BT = self.text_BT.to(record.mask.device)
        self.counter[layer_index] = replace(record, token_mask=text_BT)


@dataclass
class TaskRun:
    """One variant's evaluation.

    Attributes:
        budget: None for the dense base, and for an adapter that follows no budget.
        full_ratio: Share of the tokens that ran full, over layers and requests; 1 for the dense
            base.
        seconds: Inside the model, for all requests; one run, after a call to warm up. What a
            generation decided is counted outside of it. `hf-depthroute bench` measures speed as
            such.
        results: As lm-eval returns and saves them.
        phases: What was routed; None for the dense base.
    """

    name: str
    budget: float | None
    full_ratio: float
    seconds: float
    results: dict[str, Any] = field(repr=False)
    phases: str | None = None


def evaluate_tasks(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    budgets: Sequence[float] = (0.25, 0.5, 0.75),
    *,
    batch_size: int = 8,
    num_fewshot: int | None = None,
    limit: int | None = None,
    include_path: str | Path | None = None,
) -> list[TaskRun]:
    """Run lm-eval's tasks on the dense base, then on the routed model at every budget.

    Args:
        model: A `PeftModel` with an active routed adapter. Its budget is restored.
        tokenizer: The base's.
        tasks: Names of tasks and groups, such as `"piqa"`.
        budgets: In (0, 1]. An adapter that follows no budget runs once, as it is.
        batch_size: Requests in a batch.
        num_fewshot: Shots of every task; by default what each task says.
        limit: At most this many documents of each task.
        include_path: A folder with task files of your own.

    Raises:
        ValueError: A task is unknown.
    """
    config = active_routings(model)[0].active_config()
    manager = _manager(tasks, include_path)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise ValueError(
            f"lm-eval has no task {unknown[0]!r}; name one of its tasks, or pass the folder of "
            "your own"
        )
    variants = [("dense", None), *((f"budget {b:g}", b) for b in budgets)]
    if not config.takes_budget():
        variants[1:] = [("routed", None)]
    settings: dict[str, Any] = {"num_fewshot": num_fewshot, "limit": limit, "log_samples": False}
    runs = []
    with restored(model):
        for name, budget in variants:
            lm = DepthRouteLM(model, budget=budget, tokenizer=tokenizer, batch_size=batch_size)
            with as_base(model) if name == "dense" else nullcontext():
                _warm_up(lm)
                lm.counter = None if name == "dense" else RouteCounter()
                results = lm_eval.simple_evaluate(
                    lm, tasks=list(tasks), task_manager=manager, **settings
                )
            run = TaskRun(name, budget, 1.0, lm.seconds, dict(results or {}))
            if lm.counter is not None:
                run.full_ratio = statistics.fmean(lm.counter.full_ratio().values())
                run.phases = config.phases
            runs.append(run)
    return runs


def _warm_up(lm: DepthRouteLM) -> None:
    """The first calls of a process are several times slower."""
    rows = lm.batch_size if isinstance(lm.batch_size, int) else 1
    ids = torch.ones(rows, 16, dtype=torch.long, device=lm.device)
    for _ in range(3):
        lm._model_call(ids)
    lm.seconds = 0.0


def _manager(tasks: Sequence[str], include_path: str | Path | None) -> TaskManager:
    """lm-eval's index of tasks; its own, which take ten seconds, only where one is asked for."""
    if include_path is None:
        return TaskManager()
    own = TaskManager(include_path=str(include_path), include_defaults=False)
    if set(tasks) <= set(own.all_subtasks):
        return own
    return TaskManager(include_path=str(include_path))


def _load(
    base: str | None, adapter: str, mismatch: bool, dtype: str, trust: bool
) -> tuple[str, Any]:
    with explained(f"adapter {adapter}"):
        name = base or peft.PeftConfig.from_pretrained(adapter).base_model_name_or_path
    if not name:
        raise ValueError(f"adapter {adapter} does not name its base model; pass pretrained=")
    with explained(f"model {name}"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, trust_remote_code=trust
        )
    with explained(f"adapter {adapter}"), allowed() if mismatch else nullcontext():
        return name, peft.PeftModel.from_pretrained(model, adapter)
