"""Pages for the report's tests: a planted report whose text is as hostile as text can be,
and what it holds."""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_depthroute.report.collect import BINS, BudgetCost, LayerScores, RunReport
from hf_depthroute.report.tokens import losses_by_position, run_data
from hf_depthroute.routing.trace import RouteRecord, RouteTrace

ATTACK = "</script><img src=x onerror=window.hacked=1>"
HOSTILE = f"{ATTACK} & <b>\n\n\u05e9\u05dc\u05d5\u05dd\U0001f999\x07\u202eevil\t'\"`{{{{7*7}}}}"
LAYERS = (2, 5, 6)
BUDGETS = (0.25, 0.5, 0.9)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: a token is a byte, except for one token that is an attack."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(ATTACK, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama's: a word begins with a marked space, and a character outside of the vocabulary
    becomes its bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh"]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def planted_trace(
    tokens: int, budget: float, layers: tuple[int, ...] = LAYERS, seed: int = 0
) -> RouteTrace:
    """Normal scores `[1, T]`, and what a threshold at the budget's quantile makes of them."""
    generator = torch.Generator().manual_seed(seed)
    records = {}
    for layer in layers:
        scores = torch.randn(1, tokens, generator=generator)
        threshold = scores.quantile(1 - budget)
        mask = scores >= threshold
        records[layer] = RouteRecord(
            mask, scores, torch.sigmoid(scores / 2), None, budget, threshold=threshold
        )
    return RouteTrace(records)


def planted_report(
    text: str = HOSTILE,
    layers: tuple[int, ...] = LAYERS,
    budgets: tuple[float, ...] = BUDGETS,
    repeat: int = 1,
) -> tuple[RunReport, list[RouteTrace], PreTrainedTokenizerFast]:
    """A report on one text, the trace of each budget, and the tokenizer."""
    tokenizer = byte_tokenizer()
    ids = torch.tensor([tokenizer(text)["input_ids"] * repeat])
    logits = torch.randn(*ids.shape, 300, generator=torch.Generator().manual_seed(1))
    traces = [
        planted_trace(ids.shape[1], budget, layers, seed) for seed, budget in enumerate(budgets)
    ]
    losses = losses_by_position(logits, ids)[0]
    runs = [
        run_data(
            trace,
            0,
            tokenizer,
            ids[0].tolist(),
            loss=losses,
            dense_loss=losses,
            prompt_length=ids.shape[1] - 4,
        )
        for trace in traces
    ]

    def layer_scores(record: RouteRecord) -> LayerScores:
        edges = torch.linspace(-3, 3, BINS + 1)
        full, skipped = (
            torch.histogram(record.scores[chosen], edges).hist.int().tolist()
            for chosen in (record.mask, ~record.mask)
        )
        threshold = None if record.threshold is None else float(record.threshold)
        return LayerScores(
            threshold, float(record.mask.float().mean()), edges.tolist(), full, skipped
        )

    def row(budget: float, rule: str, loss: float, gap: float | None = None) -> dict:
        return {
            "budget": budget,
            "rule": rule,
            "loss": loss,
            "perplexity": 9.0,
            "full_ratio": budget,
            "gap": gap,
        }

    rows = [row(1.0, "dense", 2.0)]
    for budget in budgets:
        rows += [row(budget, "topk", 3 - budget), row(budget, "threshold", 3.01 - budget, 0.01)]
    timed = {
        str(budget): {
            "routed_ms": 10 * budget, "ratio": 0.9, "ratio_error": 0.01, "speedup": 1.111,
            "eta": 0.5, "full_ratio": budget, "flops_routed_over_dense": 0.8, "tokens_per_s": 100.0,
        }
        for budget in budgets
    }  # fmt: skip
    part = {"batch": 4, "length": 64, "dense_ms": 11.0, "budgets": timed}
    report = RunReport(
        title=f"A title {ATTACK}",
        facts=[(f"Name {ATTACK}", ATTACK)],
        rows=rows,
        budgets=list(budgets),
        follows_budget=True,
        scores=[
            {layer: layer_scores(record) for layer, record in trace.items()} for trace in traces
        ],
        costs=[BudgetCost(100.0, 40.0, 60 * budget, 5.0, 55 - 60 * budget) for budget in budgets],
        cost_shape=(4, 64),
        tokens={"layers": list(traces[0]), "texts": [{"label": f"Label {ATTACK}", "runs": runs}]},
        bench={
            "setting": {"batch": 4, "decode_batch": 1, "length": 64},
            "prefill": part,
            "decode": part,
        },
        notes=[f"A note {ATTACK}"],
    )
    return report, traces, tokenizer
