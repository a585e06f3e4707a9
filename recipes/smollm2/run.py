"""Routing without training on a real model: loss on five kinds of text against the
time of a prompt.

    python recipes/smollm2/run.py --model HuggingFaceTB/SmolLM2-135M-Instruct

Every part writes a file of its own to `--out` as soon as it is measured, and keeps its adapter in
`--work`; a second run measures what is missing. Texts are read from `../shared/data/text`; one that
is not there is skipped. Fitted on equal parts of C4, Wikipedia, technical text and code, WikiText-2
left out; reported on parts that were not fitted on.

Three settings. `prompts`: the first 384 tokens of a row of 512 are a prompt, read as
`phases="prefill"` serves it, and the loss is that of the 128 tokens behind it, which run in full.
`long`: the same for prompts of 1,024 tokens, which is the length that is timed. `all`: every token
of rows of 256 is routed.
"""

from __future__ import annotations

import argparse
import json
import string
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peft import PeftModel

from hf_depthroute.bench.timing import describe_machine
from hf_depthroute.config.fields import PATTERNS

HERE = Path(__file__).resolve().parent
FITTED_ON = {
    "c4": "c4.utf8",
    "wiki": "wiki.utf8",
    "technical": "technical.utf8",
    "code": "code.utf8",
}
FILES = FITTED_ON | {"wikitext2": "wikitext2_test_raw.txt"}
LENGTH, ROW, BEHIND, TAIL = 256, 512, 128, 64
CHOSEN = 2048  # tokens that a subset of layers is chosen by
TRAINED = 1  # row in a step of training
ROWS = {"all": ROW, "prompts": ROW, "long": 1152}


class Texts:
    """Token ids of each text that is there.

    The last tenth of a text is reported on, and the rest fitted on.
    """

    def __init__(self, folder: Path, tokenizer: Any, rows: int) -> None:
        self.fit: dict[str, torch.Tensor] = {}
        self.report: dict[str, dict[str, torch.Tensor]] = {setting: {} for setting in ROWS}
        for name, file in FILES.items():
            path = folder / file
            if not path.exists():
                print(f"{name}: no {path.name}, skipped", flush=True)
                continue
            text = path.read_text(encoding="utf-8")
            last = len(text) - len(text) // 10
            for setting, length in ROWS.items():
                self.report[setting][name] = _rows(text[last:], tokenizer, length)[
                    : rows * ROW // length
                ]
            if name in FITTED_ON:
                self.fit[name] = _rows(text[: min(last, 1_000_000)], tokenizer, ROW)

    def to_fit(self, tokens: int, length: int, seed: int) -> list[dict[str, torch.Tensor]]:
        """Batches of about `tokens` tokens in rows of `length`, an equal part of each text,
        drawn by `seed`."""
        drawn, generator = [], torch.Generator().manual_seed(seed)
        for rows in self.fit.values():
            rows = pieces(rows, length)
            drawn.append(
                rows[
                    torch.randperm(len(rows), generator=generator)[
                        : tokens // length // len(self.fit)
                    ]
                ]
            )
        ids = torch.cat(drawn)
        return batches(ids[torch.randperm(len(ids), generator=generator)])


def _rows(text: str, tokenizer: Any, length: int) -> torch.Tensor:
    """Rows of `length`, each with the beginning token where the tokenizer puts one."""
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    if ids[0] != tokenizer.bos_token_id:
        return ids[: len(ids) // length * length].view(-1, length)
    begin, ids = ids[:1], ids[1:]
    rows = ids[: len(ids) // (length - 1) * (length - 1)].view(-1, length - 1)
    return torch.cat([begin.expand(len(rows), 1), rows], dim=1)


def pieces(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Rows cut to `length`; where all begin with one token, so do the pieces,
    in the place of their first."""
    cut = rows.reshape(-1, length)
    if len(rows) > 1 and bool((rows[:, 0] == rows[0, 0]).all()):
        cut = torch.cat([rows[:1, :1].expand(len(cut), 1), cut[:, 1:]], dim=1)
    return cut


def batches(ids: torch.Tensor, size: int = 4) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": part} for part in ids.split(size)]


def row_losses(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The mean loss of each row, nats: `logits` `[B, T, V]` predict `ids` `[B, T]`."""
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), ids.flatten(), reduction="none"
    )
    return losses.view(ids.shape).mean(1).double()


@torch.no_grad()
def all_tokens(model: Any, ids: torch.Tensor) -> torch.Tensor:
    found = []
    for batch in batches(pieces(ids, LENGTH)):
        logits = model(**batch, use_cache=False).logits
        found.append(row_losses(logits[:, :-1], batch["input_ids"][:, 1:]))
    return torch.cat(found)


@torch.no_grad()
def behind_prompts(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The prompt as it is served, then the text behind it at full depth,
    on the KV cache that the prompt left."""
    from transformers import DynamicCache

    from hf_depthroute.routing.trace import full_depth

    found = []
    for part in ids.split(4):
        cache = DynamicCache(config=model.config)
        first = model(input_ids=part[:, :-BEHIND], past_key_values=cache, logits_to_keep=1).logits
        with full_depth(model):
            rest = model(input_ids=part[:, -BEHIND:], past_key_values=cache).logits
        found.append(row_losses(torch.cat([first, rest[:, :-1]], dim=1), part[:, -BEHIND:]))
    return torch.cat(found)


SETTINGS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "all": all_tokens,
    "prompts": behind_prompts,
    "long": behind_prompts,
}


def over_dense(model: Any, texts: Texts, setting: str, dense: dict[str, Any]) -> dict[str, Any]:
    """By text: nats over dense, the standard error over rows,
    and the share of a gated layer's tokens that ran."""
    from hf_depthroute.routing.trace import count_routes

    found: dict[str, Any] = {}
    for name, ids in texts.report[setting].items():
        with count_routes(model) as counter:
            more = SETTINGS[setting](model, ids) - torch.tensor(dense[name], dtype=torch.float64)
        found[name] = {
            "more": round(float(more.mean()), 4),
            "error": round(float(more.std() / len(more) ** 0.5), 4),
            "rows": len(more),
        }
        if setting == "all":
            shares = counter.full_ratio().values()
            found[name]["ran"] = round(sum(shares) / len(shares), 4)
        print(f"  {name}: {found[name]}", flush=True)
    return found


def base(name: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False).eval()


def routing_layers(model: Any) -> list[int]:
    from hf_depthroute.routing.stack import routings_of

    return [routing.layer_index for routing in routings_of(model)]


def left_out(load: Callable[[], Any], layers: list[int], target: str) -> Any:
    """The prompt without a part of `layers`, nothing in its place; keys and values are written."""
    from hf_depthroute import DepthRouteConfig, get_depth_routed_model

    config = DepthRouteConfig(
        layers=layers, target=target, gate="none", branch="none", phases="prefill", prompt_tail=TAIL
    )
    return get_depth_routed_model(load(), config).eval()


def block_influence(model: Any, text: list[dict[str, torch.Tensor]]) -> list[int]:
    """Layers by ShortGPT's block influence, `1 - cos(input, output)`,
    the least first (arXiv:2403.03853)."""
    sums = torch.zeros(model.config.num_hidden_layers, dtype=torch.float64)
    with torch.no_grad():
        for batch in text:
            states = model(
                **batch, use_cache=False, output_hidden_states=True, logits_to_keep=1
            ).hidden_states
            for index, (h, out) in enumerate(pairwise(states)):
                sums[index] += (
                    (1 - torch.cosine_similarity(h.float(), out.float(), dim=-1)).double().mean()
                )
    return [int(index) for index in sums.argsort()]


@torch.no_grad()
def timed(model: Any, ids: torch.Tensor, steps: int) -> dict[str, float]:
    """Seconds of a prompt, of a token decoded behind it,
    and of a token for each of eight sequences.

    A first prompt is not timed: it prepares the weights of the adapter that has just been switched
    to.
    """
    model(input_ids=ids, use_cache=True, logits_to_keep=1)
    found: dict[str, float] = {}
    for name, rows in {"token": ids, "tokens_of_8": ids[:, :512].view(8, 64)}.items():
        started = time.perf_counter()
        out = model(input_ids=rows, use_cache=True, logits_to_keep=1)
        found.setdefault("prompt", time.perf_counter() - started)
        past, token, each = out.past_key_values, out.logits[:, -1:].argmax(-1), []
        for _ in range(steps):
            started = time.perf_counter()
            out = model(input_ids=token, past_key_values=past, use_cache=True)
            each.append(time.perf_counter() - started)
            token = out.logits[:, -1:].argmax(-1)
        found[name] = median(each)
    return found


class Run:
    """The parts of the recipe, each measured once."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        self.args = args
        self.texts = Texts(
            args.data, AutoTokenizer.from_pretrained(args.model, trust_remote_code=False), args.rows
        )
        if not self.texts.fit:
            raise SystemExit("no text to fit on; see --data")
        for folder in (args.out, args.work):
            folder.mkdir(parents=True, exist_ok=True)

    def once(self, part: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        path = self.args.out / f"{part.replace(' ', '-')}.json"
        if not path.exists():
            print(f"{part}:", flush=True)
            path.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def dense(self, setting: str) -> dict[str, Any]:
        def measure() -> dict[str, Any]:
            model = base(self.args.model)
            return {
                name: SETTINGS[setting](model, ids).tolist()
                for name, ids in self.texts.report[setting].items()
            }

        return self.once(f"dense {setting}", measure)

    def routed(self, part: str, setting: str, make: Callable[[], Any]) -> None:
        """Measure the loss of the model that `make` gives, and keep its adapter."""

        def measure() -> dict[str, Any]:
            from hf_depthroute import route_cost
            from hf_depthroute.training.record import remembered

            started = time.perf_counter()
            model = make()
            seconds = round(time.perf_counter() - started)
            model.save_pretrained(str(self.args.work / part.replace(" ", "-")))
            settings = {
                "all": {"all": LENGTH},
                "prompts": {"prompts": ROW - BEHIND, "long": ROWS["long"] - BEHIND},
            }
            measured = {}
            for name, length in settings[setting].items():
                texts = over_dense(model, self.texts, name, self.dense(name))
                ran = [text["ran"] for text in texts.values() if "ran" in text]
                shares = dict.fromkeys(routing_layers(model), sum(ran) / len(ran)) if ran else None
                cost = route_cost(model, length=length, full_ratio=shares)
                measured[name] = {
                    "flops": round(cost.flops_routed / cost.flops_dense, 4),
                    "texts": texts,
                }
            config = model.peft_config["default"]
            return {
                "settings": measured,
                "seconds": seconds,
                "fit": (remembered(model, "default").training or {}).get("fit"),
                "config": {name: value for name, value in config.to_dict().items() if name in KEPT},
            }

        self.once(part, measure)

    def times(self) -> dict[str, Any]:
        """Times over dense, medians of interleaved rounds: a prompt of 1,024 tokens,
        and tokens decoded."""
        model: Any = base(self.args.model)
        folders = sorted(
            folder
            for folder in self.args.work.iterdir()
            if (folder / "adapter_config.json").exists()
        )
        # PEFT takes no dots.
        names, routed = {folder.name.replace(".", "_"): folder for folder in folders}, None
        for name, folder in names.items():
            if routed is None:
                routed = PeftModel.from_pretrained(model, str(folder), adapter_name=name)
            else:
                routed.load_adapter(str(folder), name)
        if routed is None:
            raise SystemExit(f"no adapter in {self.args.work}")
        routed.eval()
        ids = torch.cat([rows.flatten() for rows in self.texts.report["all"].values()])[:1024][None]
        seconds: dict[str, dict[str, list[float]]] = {}
        every = ["dense", *names]
        for number in range(self.args.rounds + 1):  # the first warms up
            turned = number % len(every)  # what runs before a system is not always the same
            for name in every[turned:] + every[:turned]:
                with routed.disable_adapter() if name == "dense" else nullcontext():
                    if name != "dense":
                        routed.set_adapter(name)
                    found = timed(routed, ids, self.args.steps)
                for part, value in found.items() if number else ():
                    seconds.setdefault(name, {}).setdefault(part, []).append(value)
        medians = {
            name: {part: median(values) for part, values in parts.items()}
            for name, parts in seconds.items()
        }
        return {
            "machine": describe_machine(torch.device("cpu")),
            "rounds": self.args.rounds,
            "dense_seconds": medians["dense"],
            "over_dense": {
                folder.name: {
                    part: round(value / medians["dense"][part], 4)
                    for part, value in medians[name].items()
                }
                for name, folder in names.items()
            },
        }

    def fit(self, keep: float, seed: int, length: int, given: dict[str, Any], **fields: Any) -> Any:
        from hf_depthroute import DepthRouteConfig, fit_router

        text, config = (
            self.texts.to_fit(self.args.tokens, length, seed),
            DepthRouteConfig(seed=seed, **fields),
        )
        return fit_router(base(self.args.model), text, keep, config, **given)

    def trained(self, part: str, seed: int, length: int) -> Any:
        """The branches of the adapter `part`, trained to the dense predictions;
        goes on where it was stopped.

        Rows of `length` tokens; of prompts, the predictions of the text behind two thirds of a row.
        """
        from transformers.trainer_utils import get_last_checkpoint

        from hf_depthroute import DepthRouteTrainer, DepthRouteTrainingArguments
        from hf_depthroute.training.prompts import collate_behind_prompts

        folder, steps = (
            self.args.work / "checkpoints" / f"{part} {self.args.train}".replace(" ", "-"),
            self.args.train,
        )
        each = -(-steps * TRAINED // len(self.texts.fit))
        rows = torch.cat([pieces(rows, length)[:each] for rows in self.texts.fit.values()])
        model = base(self.args.model, getattr(torch, self.args.train_dtype))
        model = PeftModel.from_pretrained(
            model, str(self.args.work / part.replace(" ", "-")), is_trainable=True
        )
        arguments = DepthRouteTrainingArguments(
            output_dir=str(folder), max_steps=steps, learning_rate=self.args.rate, warmup_steps=20,
            seed=seed, per_device_train_batch_size=TRAINED, logging_steps=20, save_steps=100,
            save_total_limit=1, use_cpu=True, bf16=self.args.train_dtype == "bfloat16",
            report_to="none", disable_tqdm=True,
            train_gates=False, lm_weight=0.0, distill_weight=1.0, util_weight=0.0, rank_weight=0.0,
            jepa_weight=0.0, budget_weight=0.0, alive_weight=0.0,
        )  # fmt: skip
        dataset = [{"input_ids": row, "labels": row} for row in rows]
        last = get_last_checkpoint(str(folder)) if folder.exists() else None
        prompts_alone = model.active_peft_config.phases == "prefill"
        collator = collate_behind_prompts if prompts_alone else None
        trainer = DepthRouteTrainer(
            model=model, args=arguments, train_dataset=dataset, data_collator=collator
        )
        trainer.train(resume_from_checkpoint=last)
        model.save_pretrained(str(folder / "trained"))
        return PeftModel.from_pretrained(base(self.args.model), str(folder / "trained")).eval()

    def static(self, count: int, branch: str) -> Any:
        """The FFNs that are best replaced for every token, by a `branch`;
        found with a quarter of the text to fit on, and neurons in their place."""
        import static

        choose = self.texts.to_fit(CHOSEN, LENGTH, seed=1)

        def loss(model: Any) -> float:
            return float(
                torch.cat([all_tokens(model, batch["input_ids"]) for batch in choose]).mean()
            )

        def found() -> dict[str, Any]:
            few = self.texts.to_fit(self.args.tokens // 4, LENGTH, seed=0)
            return {"order": static.greedy(base(self.args.model), max(self.args.static), few, loss)}

        layers = self.once(f"subset {max(self.args.static)}", found)["order"][:count]
        return static.fitted(
            base(self.args.model),
            sorted(layers),
            self.texts.to_fit(self.args.tokens, LENGTH, seed=0),
            fields_of(branch),
        )


def fields_of(branch: str) -> dict[str, Any]:
    """The fields of the configuration for `neurons`, or with its rank, `neurons768`."""
    rank = branch.lstrip(string.ascii_letters)
    if not rank:
        return {"branch": branch}
    return {"branch": branch.removesuffix(rank), "branch_rank": int(rank)}


KEPT = (
    *(
        "layers",
        "static_layers",
        "target",
        "branch",
        "branch_rank",
        "gate",
        "phases",
        "prompt_tail",
        "budget",
    ),
    *PATTERNS,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or Hub name"
    )
    parser.add_argument("--data", type=Path, default=HERE.parents[2] / "shared" / "data" / "text")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="where the results are put"
    )
    parser.add_argument(
        "--work", type=Path, default=HERE / "work", help="where the adapters are put"
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the rows that are fitted on"
    )
    parser.add_argument(
        "--prompts", nargs="*", type=float, default=[0.8, 0.7], help="shares of a prompt of 1,024"
    )
    parser.add_argument(
        "--keep-of", default="time", choices=["time", "flops"], help="measured beside nothing else"
    )
    parser.add_argument(
        "--all", nargs="*", type=float, default=[0.75], help="shares of all FFN calls"
    )
    parser.add_argument(
        "--branches",
        nargs="*",
        default=["lowrank", "neurons"],
        help="of all tokens; a number behind the name is its rank, as in neurons768",
    )
    parser.add_argument(
        "--static",
        nargs="*",
        type=int,
        default=[],
        help="FFNs replaced for every token, found greedily",
    )
    parser.add_argument(
        "--static-branch", default="neurons", help="in their place, named as in --branches"
    )
    parser.add_argument(
        "--train",
        type=int,
        default=0,
        help="steps from there, to the predictions of the dense model",
    )
    parser.add_argument(
        "--rate", type=float, default=2e-4, help="of learning in these steps, at most"
    )
    parser.add_argument(
        "--train-dtype",
        default="bfloat16",
        choices=["bfloat16", "float32"],
        help="of the base in these steps",
    )
    parser.add_argument(
        "--pruned", nargs="*", type=int, default=[6, 8], help="last blocks left out of prompts"
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="that are timed, on an idle machine; or 0"
    )
    parser.add_argument("--steps", type=int, default=32, help="decoded tokens in a round")
    parser.add_argument("--tokens", type=int, default=16_384, help="to fit on")
    parser.add_argument(
        "--rows",
        type=int,
        default=16,
        help="of 512 tokens, of each text to report on; of 1,152 fewer",
    )
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    run, load = Run(args), partial(base, args.model)
    for seed in args.seeds:
        for keep in args.prompts:
            given = {"keep_of": args.keep_of, "length": ROWS["long"] - BEHIND}
            fields = {"layers": "all", "phases": "prefill", "prompt_tail": TAIL}
            part = f"prompts {keep:g} {seed}"
            run.routed(part, "prompts", partial(run.fit, keep, seed, ROW, given, **fields))
            if args.train:
                run.routed(
                    f"{part} trained {args.train}", "prompts", partial(run.trained, part, seed, ROW)
                )
    depth = load().config.num_hidden_layers
    for count in args.pruned:
        last = list(range(depth - count, depth))
        for target in ("block", "ffn"):
            run.routed(f"pruned {target} {count}", "prompts", partial(left_out, load, last, target))
        text = run.texts.to_fit(4096, ROW, seed=0)
        order = run.once("influence", lambda text=text: {"order": block_influence(load(), text)})[
            "order"
        ]
        run.routed(
            f"shortgpt {count}", "prompts", partial(left_out, load, sorted(order[:count]), "block")
        )
    for seed in args.seeds:
        for keep in args.all:
            for branch in args.branches:
                fields = {"layers": "all", **fields_of(branch)}
                part = f"all {branch} {keep:g} {seed}"
                run.routed(part, "all", partial(run.fit, keep, seed, LENGTH, {}, **fields))
                if args.train:
                    run.routed(
                        f"{part} trained {args.train}",
                        "all",
                        partial(run.trained, part, seed, LENGTH),
                    )
    for count in args.static:
        part = f"static {args.static_branch} {count}"
        run.routed(part, "all", partial(run.static, count, args.static_branch))
        if args.train:
            run.routed(f"{part} trained {args.train}", "all", partial(run.trained, part, 0, LENGTH))
    if args.rounds:
        run.once("times", run.times)


if __name__ == "__main__":
    main()
