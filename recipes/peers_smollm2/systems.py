"""The systems that are compared: each has one pass over rows of tokens and greedy generation,
used as documented.

A system that needs a package says which; the package is imported only when the system is made.
Every system takes about the share of FLOPs that leaving out a fifth of the blocks takes, except
those that choose their share themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

Logits = Callable[[torch.Tensor], torch.Tensor]
Generate = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
SEARCHED = 512  # tokens of the searches that run many passes: SLEB, layer_skip
STEPS = 64  # of training, one row each


@dataclass
class System:
    """One model with something done to it.

    `base` is the transformers model inside, where rows and steps are counted. `logits` takes
    `[B, T]` to `[B, T, V]`. `generate` takes ids and mask `[B, T]` and the number of new tokens to
    `[B, T + new]`. `trained` says on what.
    """

    base: Any
    logits: Logits
    generate: Generate
    trained: str = ""
    model: Any = None  # as transformers calls it


@dataclass
class Setup:
    """What a system is made from.

    `load` gives a fresh base of `depth` blocks. `rows` `[N, T]` are fitted or trained on, `prompts`
    the same text for a router of prompts. What was found is kept in `work`.
    """

    load: Callable[[], Any]
    rows: torch.Tensor
    prompts: torch.Tensor
    depth: int
    work: Path
    tokenizer: Any = None

    @property
    def left_out(self) -> int:
        """A fifth of the blocks."""
        return self.depth // 5


def in_transformers(model: Any, trained: str = "", **how: Any) -> System:
    """A model that transformers runs, this library's included."""

    def generate(ids: torch.Tensor, mask: torch.Tensor, new: int) -> torch.Tensor:
        kept: torch.Tensor = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **how
        )
        return kept

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return System(
        base, lambda ids: model(input_ids=ids, use_cache=False).logits, generate, trained, model
    )


def fitted(
    setup: Setup,
    name: str,
    keep: float,
    rows: torch.Tensor,
    fields: dict[str, Any],
    base: Any = None,
    **given: Any,
) -> System:
    """This library: the adapter `work/name`, fitted first where it is not there,
    on `base` or on a fresh one."""
    from peft import PeftModel

    from hf_depthroute import DepthRouteConfig, fit_router

    if not (setup.work / name / "adapter_config.json").exists():
        batches = [{"input_ids": part} for part in rows.split(4)]
        model = fit_router(
            setup.load(), batches, keep, DepthRouteConfig(layers="all", seed=0, **fields), **given
        )
        model.save_pretrained(str(setup.work / name))
    model = PeftModel.from_pretrained(
        setup.load() if base is None else base, str(setup.work / name)
    ).eval()
    return in_transformers(model, f"fitted, {rows.numel():,} tokens")


def routed_all(setup: Setup, base: Any = None) -> System:
    return fitted(setup, "all-neurons-0.67-0", 0.67, setup.rows, {"branch": "neurons"}, base)


def routed_prompts(setup: Setup) -> System:
    """As `smollm2/run.py` fits it: a share of the time of a prompt of 1,024,
    the last 64 tokens in full."""
    from smollm2.run import BEHIND, ROWS, TAIL

    fields = {"phases": "prefill", "prompt_tail": TAIL}
    return fitted(
        setup,
        "prompts-0.8-0",
        0.8,
        setup.prompts,
        fields,
        keep_of="time",
        length=ROWS["long"] - BEHIND,
    )


def short_gpt(setup: Setup) -> System:
    """The least influential blocks left out for every token, keys and values written,
    as this library can."""
    from smollm2.run import batches, block_influence

    from hf_depthroute import DepthRouteConfig, get_depth_routed_model

    path, model = setup.work / "influence.json", setup.load()
    if not path.exists():
        path.write_text(json.dumps(block_influence(model, batches(setup.rows))), encoding="utf-8")
    out = sorted(json.loads(path.read_text(encoding="utf-8"))[: setup.left_out])
    config = DepthRouteConfig(layers=out, target="block", gate="none", branch="none")
    return in_transformers(
        get_depth_routed_model(model, config).eval(), f"influence, {setup.rows.numel():,} tokens"
    )


def early_exit(setup: Setup) -> System:
    """The first blocks alone, as transformers' `assistant_early_exit` drafts."""
    model = setup.load()
    model.config.num_hidden_layers -= setup.left_out
    return in_transformers(model)


def early_exit_draft(setup: Setup) -> System:
    model = setup.load()
    return in_transformers(model, assistant_early_exit=setup.depth - setup.left_out)


def in_economize(model: Any, trained: str = "") -> System:
    """A pass of economize outside decoding: a policy of depth decides in it as in decoding,
    by its documentation."""
    depth = next((part for part in model.techniques.values() if hasattr(part, "make_policy")), None)

    def routed_pass(ids: torch.Tensor) -> torch.Tensor:
        runner, (rows, length) = model.runner, ids.shape
        context = runner.context(runner.new_cache(length, rows), torch.arange(length), None)
        logits: torch.Tensor = runner.logits(
            runner.forward(ids, context, policy=depth.make_policy()).final
        )
        return logits

    def generate(ids: torch.Tensor, mask: torch.Tensor, new: int) -> torch.Tensor:
        out: torch.Tensor = model.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False
        )
        return out

    logits = (
        (lambda ids: model(input_ids=ids, use_cache=False).logits) if depth is None else routed_pass
    )
    return System(model.base_model, logits, generate, trained)


def economize(
    setup: Setup, name: str, config: Callable[[int], Any], searched: int | None = None
) -> System:
    """A technique that chooses by calibration, on the first `searched` tokens, or on all rows."""
    import economize as package

    folder, rows = setup.work / name, setup.rows
    if searched:
        rows = rows[: max(1, searched // rows.shape[1])]
    if not folder.exists():
        parts = list(rows.split(1))  # one row each, so that a search over one batch is over one row
        model = package.apply(setup.load(), config(setup.left_out), calibration=parts)
        model.save_pretrained(str(folder))
    return in_economize(
        package.load(setup.load(), str(folder)).eval(), f"calibrated, {rows.numel():,} tokens"
    )


def depth_prune(setup: Setup, method: str) -> System:
    def config(left_out: int) -> Any:
        from economize.techniques.prune import DepthPruneConfig

        return DepthPruneConfig(method=method, num_blocks=left_out)

    return economize(setup, f"economize-{method}", config, SEARCHED if method == "sleb" else None)


def teal_config(sparsity: float) -> Any:
    from economize.techniques.sparsity import TealConfig

    # Its default leaves prompts dense.
    return TealConfig(sparsity=sparsity, prefill="all", greedy_batches=1)


def teal(setup: Setup, sparsity: float) -> System:
    return economize(
        setup,
        f"economize-teal-{sparsity:g}",
        lambda _: teal_config(sparsity),
        16 * setup.rows.shape[1],
    )


def layer_skip(setup: Setup) -> System:
    def config(left_out: int) -> Any:
        from economize.techniques.layer_skip import LayerSkipConfig

        return LayerSkipConfig(num_skip=left_out)

    return economize(setup, "economize-layer_skip", config, SEARCHED)


def trained_depth(setup: Setup, name: str, config: Any, objective: Any) -> System:
    """A technique of economize with parameters of its own,
    after `STEPS` steps of one row by its own `fit`."""
    import economize as package
    from economize.train import fit

    folder = setup.work / f"economize-{name}"
    if not folder.exists():
        model = package.apply(setup.load(), config)
        fit(
            model,
            setup.rows[:STEPS],
            objective,
            steps=STEPS,
            batch_size=1,
            warmup_steps=STEPS // 8,
            seed=0,
        )
        model.eval().save_pretrained(str(folder))
    trained = f"{STEPS} steps, {min(STEPS, len(setup.rows)) * setup.rows.shape[1]:,} tokens"
    return in_economize(package.load(setup.load(), str(folder)).eval(), trained)


def mod(setup: Setup) -> System:
    """Every second layer, as its default; its capacity leaves a fifth of all
    calls of blocks out."""
    from economize.techniques.dynamic_depth import MoDConfig

    return trained_depth(setup, "mod", MoDConfig(capacity=0.6), "mod")


def gateskip(setup: Setup) -> System:
    """All layers, as its default, by the rule that holds a share;
    trained down to the same share."""
    from economize.techniques.dynamic_depth import GateSkipConfig, GateSkipObjective

    config = GateSkipConfig(rule="budget", budget=0.8)
    return trained_depth(setup, "gateskip", config, GateSkipObjective(final_budget=0.8))


def flexidepth(setup: Setup, quantile: float | None = None) -> System:
    """The second half of the layers, as its default. `quantile`: the threshold is set, after
    training, where that share of the scores of rows it trained on lies below, because 64 steps move
    few scores below one half."""
    from economize.techniques.dynamic_depth import FlexiDepthConfig

    system = trained_depth(setup, "flexidepth", FlexiDepthConfig(), "flexidepth")
    if quantile is None:
        return system
    import economize as package

    model = package.load(setup.load(), str(setup.work / "economize-flexidepth")).eval()
    technique = model.techniques["flexidepth"]
    scores: list[torch.Tensor] = []
    read = technique.score
    technique.score = lambda index, hidden: noted(read(index, hidden), scores)
    in_economize(model).logits(setup.rows[:8])
    technique.score = read
    object.__setattr__(technique.config, "threshold", float(torch.cat(scores).quantile(quantile)))
    return in_economize(model, system.trained)


def noted(score: torch.Tensor | None, scores: list[torch.Tensor]) -> torch.Tensor | None:
    if score is not None:
        scores.append(score.detach().flatten())
    return score


def tide(setup: Setup, threshold: float = 0.85) -> System:
    """Its routers calibrated on the same rows by its own three steps,
    in its default configuration."""
    import sys

    import TIDE

    path = setup.work / "tide.pt"
    if not path.exists():
        texts = setup.tokenizer.batch_decode(setup.rows)
        setup.tokenizer.pad_token = setup.tokenizer.pad_token or setup.tokenizer.eos_token
        calibration: Any = sys.modules["TIDE.calibrate"]
        calibration._load_calibration_texts = lambda *_: texts  # it reads WikiText-103 from the Hub
        TIDE.calibrate(setup.load(), setup.tokenizer, save_path=str(path), device="cpu")
    model = setup.load()
    engine = TIDE.TIDE(model, str(path), config=TIDE.TIDEConfig(exit_threshold=threshold))

    def generate(ids: torch.Tensor, mask: torch.Tensor, new: int) -> torch.Tensor:
        # It takes no mask.
        out: torch.Tensor = engine.generate(ids, max_new_tokens=new, temperature=0.0)
        return out

    return System(model, engine, generate, f"calibrated, {setup.rows.numel():,} tokens")


def mod_package(setup: Setup) -> System:
    """The package mixture-of-depth, for transformers 4."""
    from MoD import apply_mod_to_hf

    return in_transformers(apply_mod_to_hf(setup.load()).eval())


def int8(setup: Setup) -> Any:
    """The base with weights of 8 bits."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = setup.load()
    quantize_(model.model.layers, Int8WeightOnlyConfig())
    return model


def teal_base(setup: Setup, sparsity: float) -> Any:
    """The base with economize's masks on the inputs of its linear maps."""
    return teal(setup, sparsity).base


@dataclass(frozen=True)
class Peer:
    """How a system is made, what it imports, and the package to install for that."""

    make: Callable[[Setup], System]
    module: str = ""
    package: str = ""


ECONOMIZE, TIDE_PACKAGE = ("economize", "economize==0.3.2"), ("TIDE", "tide-inference==0.2.1")
TORCHAO = ("torchao", "torchao==0.18.0")
PEERS: dict[str, Peer] = {
    "dense": Peer(lambda setup: in_transformers(setup.load())),
    "routed": Peer(routed_all),
    "prompts": Peer(routed_prompts),
    "shortgpt": Peer(short_gpt),
    "exit": Peer(early_exit),
    "exit-draft": Peer(early_exit_draft),
    "economize-shortgpt": Peer(partial(depth_prune, method="shortgpt"), *ECONOMIZE),
    "economize-sleb": Peer(partial(depth_prune, method="sleb"), *ECONOMIZE),
    "economize-layer_skip": Peer(layer_skip, *ECONOMIZE),
    "economize-teal": Peer(partial(teal, sparsity=0.4), *ECONOMIZE),
    "economize-mod": Peer(mod, *ECONOMIZE),
    "economize-gateskip": Peer(gateskip, *ECONOMIZE),
    "economize-flexidepth": Peer(flexidepth, *ECONOMIZE),
    "economize-flexidepth-0.4": Peer(partial(flexidepth, quantile=0.4), *ECONOMIZE),
    "tide": Peer(tide, *TIDE_PACKAGE),
    "tide-off": Peer(partial(tide, threshold=1.0), *TIDE_PACKAGE),
    "mod-package": Peer(mod_package, "MoD", "mixture-of-depth==1.2.0"),
    "int8": Peer(lambda setup: in_transformers(int8(setup)), *TORCHAO),
    "int8-routed": Peer(lambda setup: routed_all(setup, int8(setup)), *TORCHAO),
    "teal-routed": Peer(lambda setup: routed_all(setup, teal_base(setup, 0.4)), *ECONOMIZE),
}
