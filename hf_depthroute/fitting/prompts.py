"""Cheaper prompts: static layers, chosen and fitted by their cost to the text behind a prompt.

A token of a prompt matters to the text behind it through its keys and values alone. So a layer of a prompt is priced on
that text: for every layer, each way to leave out a part of it is fitted by least squares, and its cost in nats is read
from gradients (`sensitivity`). The cheapest set that saves enough is then a knapsack.

Shapes: B batch, T positions, N tokens, d model width.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import nn

from ..adapter.restoring import restoring
from ..adapter.tuner import get_depth_routed_model
from ..base.contexts import evaluating
from ..base.distributed import each_of_all, own_rows, rows_of_all, sharing, total
from ..base.families import find_layers
from ..base.readout import check_head
from ..config.adapter import ConfigError, DepthRouteConfig
from ..config.fields import PATTERNS, RoutingFields
from ..data.batches import model_inputs, token_mask
from ..evaluation.roofline import count_work
from ..execution.call import RoutedCall
from ..files.versions import versions
from ..inference.calibration import active_routings
from ..inference.fitting import fit_branch
from ..parts.baseline_gates import SinkGate
from ..parts.neurons import NeuronBranch, neurons_of
from ..parts.regression import norms_and_sinks
from ..parts.targets import TARGETS
from ..routing.holder import Routing
from ..routing.trace import RouteTrace, full_depth, record_routes, replay_routes
from ..training.record import remember_training
from .bar import FitBar
from .layer_walk import LayerWalk
from .sensitivity import stream_gradients
from .text import Batches, own_part, positions, split

_PROMPT = 2 / 3  # of every row is taken for a prompt, the rest for the text behind it
_PENALTY = 1e-3
_OPTIONS = 3  # a layer's options take as long as so many passes through it
_NO_BUDGET = 1e-3  # sinks are few, and no budget says how many
_FOUND = ("target", "gate", "branch", "branch_rank", "static_layers", *PATTERNS)
_FEWEST = 512  # tokens of prompts to fit on, at least


@dataclass(frozen=True)
class Option:
    """A way to leave out a part of a layer: the target, and the branch in its place."""

    target: str
    branch: str
    rank: int


@dataclass
class StaticFit:
    """Result for one layer and one option.

    Attributes:
        nats: What it costs the text behind the prompt, nats per token, as it is predicted from gradients.
        saved: The share of the FLOPs of a prompt that it leaves out.
        branch_r2: `1 - |update - branch|^2 / |update|^2` on the text fitted on, sinks left out, errors relative to the
            stream behind the full path.
    """

    nats: float
    saved: float
    branch_r2: float


@restoring
def fit_prompts(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]] | Mapping[str, Any],
    keep: float = 0.8,
    config: DepthRouteConfig | None = None,
    *,
    progress: bool | None = None,
) -> PeftModel:
    """Make a model read prompts with the share `keep` of the FLOPs, without training: `phases="prefill"`.

        model = fit_prompts(AutoModelForCausalLM.from_pretrained(name), batches, keep=0.8)

    Every layer may do without its FFN, its attention's queries, or both; keys and values are always written. In their
    place is a low-rank branch or some of the FFN's own neurons (`branch="neurons"`), fitted by least squares. All
    tokens of a prompt take it but the last one; what is generated runs in full. Which layers do so, and how, is found
    on the text: two thirds of each row are a prompt, and the rest is the text whose loss counts. The last layer of a
    prompt is free, since nothing reads it but its last token.

    Every fifth row is held out, and costs are measured on it; so is the loss that the record tells. With the
    regressions it takes as long as some eight forward passes of the text.

    Args:
        model: A transformers model of a supported family, not routed. It is changed in place, as by
            `get_depth_routed_model`, and left in eval mode.
        batches: As of `fit_router`; rows as long as the prompts that are served, with text behind them, are best.
        keep: In (0, 1): the share of the FLOPs of a prompt that is left, the router's own included.
        config: Which `layers` may be routed, by default all; its `seed`, `modules_to_save` and `task_type` are kept.
            Target, gate and branch are found, and left out of it.
        progress: Show a bar; by default where a terminal is.

    Returns:
        The routed model: `target_pattern`, `branch_pattern` and `rank_pattern` say what was found.

    Raises:
        ConfigError: `keep` is out of range, or so low that no choice of layers reaches it; the model is untouched.
        ValueError: Fewer than 512 tokens of prompts are left to fit on; or the model has no LM head.
    """
    started = time.monotonic()
    if not 0 < keep < 1:
        raise ConfigError(f"keep={keep!r} must be between 0 and 1, the share of the FLOPs of a prompt")
    check_head(model, "fit_prompts")
    given = DepthRouteConfig(layers="all", phases="prefill") if config is None else config
    for name in _FOUND:
        if (value := getattr(given, name)) != getattr(RoutingFields, name):
            raise ConfigError(f"{name}={value!r}: of prompts it is found for every layer; leave it out")
    text, held_out = split(list(model_inputs(model, batches)))
    tokens = sum(int(_prompts(batch)[0].sum()) for batch in text)
    if tokens < _FEWEST:
        raise ValueError(f"fit_prompts: batches holds {tokens} tokens of prompts to fit on; {_FEWEST} is the least")
    first = DepthRouteConfig(layers=given.layers, gate="none", branch="none", phases="prefill", seed=given.seed)
    routed = get_depth_routed_model(model, first)
    with torch.no_grad(), evaluating(routed), sharing(), _bar(routed, text, held_out, progress) as bar:
        bar.phase("options of every layer")
        search = Search(routed, own_part(text), own_part(held_out), given.seed, bar)
        found = search.found
        chosen = choose(found, 1 - keep)
        if not chosen:
            most = sum(max(fit.saved for fit in fits.values()) for fits in found.values())
            raise ConfigError(f"keep={keep:g} is not reached: leaving out all that can be saves {most:.2f} of a prompt")
        branches = {index: search.branches[index][option] for index, option in chosen.items()}
        routed = get_depth_routed_model(routed.unload(), _config_of(chosen, given))
        for holder in active_routings(routed):
            held = holder.depth_route_branch[holder.active_name()]
            held.load_state_dict(branches[holder.layer_index].state_dict())
        del search, branches
        bar.phase("the chosen ones")
        r2 = _refit(routed, own_part(text), bar)
        dense_R, loss_R, kl_R = _behind(routed, own_part(held_out))
    more_R = loss_R - dense_R
    record = {
        "fit": {
            "phases": "prefill",
            "keep": keep,
            "tokens": tokens,
            "held_out_tokens": sum(int(token_mask(batch).sum()) for batch in held_out),
            "loss_dense": float(dense_R.mean()),
            "loss": float(loss_R.mean()),
            "loss_over_dense_error": float(more_R.std() / len(more_R) ** 0.5) if len(more_R) > 1 else None,
            "divergence": float(kl_R.mean()),
            "layers": {
                str(index): asdict(option) | asdict(found[index][option]) | {"branch_r2": r2[index]}
                for index, option in chosen.items()
            },
        },
        "seconds": round(time.monotonic() - started, 1),
        "trainable_parameters": sum(p.numel() for p in routed.parameters() if p.requires_grad),
        "versions": versions(),
    }
    remember_training(routed, record)
    return routed.eval()


def _bar(model: PeftModel, text: Batches, held_out: Batches, shown: bool | None) -> FitBar:
    fitted, held = positions(own_part(text)), positions(own_part(held_out))
    searched = _OPTIONS * (fitted + held)
    return FitBar(find_layers(model), searched + 2 * fitted + 2 * held, searched, shown)


def _config_of(chosen: Mapping[int, Option], given: DepthRouteConfig) -> DepthRouteConfig:
    """The adapter's target and branch are those of most layers; the others are in the patterns."""
    (main, _), *_ = Counter(chosen.values()).most_common()
    others = {index: option for index, option in chosen.items() if option != main}
    return DepthRouteConfig(
        layers=sorted(chosen),
        target=main.target,
        gate="sinks",
        budget=_NO_BUDGET,
        branch=main.branch,
        branch_rank=main.rank,
        target_pattern={i: o.target for i, o in others.items() if o.target != main.target} or None,
        branch_pattern={i: o.branch for i, o in others.items() if o.branch != main.branch} or None,
        rank_pattern={i: o.rank for i, o in others.items() if o.rank != main.rank} or None,
        phases="prefill",
        seed=given.seed,
        task_type=given.task_type,
        modules_to_save=given.modules_to_save,
    )


class Search:
    """Every option in every layer, fitted and priced.

    Attributes:
        found: By layer index and option.
        branches: The fitted branches, the same way.
    """

    def __init__(self, model: PeftModel, text: Batches, held_out: Batches, seed: int, bar: FitBar) -> None:
        self.found: dict[int, dict[Option, StaticFit]] = {}
        self.branches: dict[int, dict[Option, Any]] = {}
        self._fitted = len(text)  # the batches before this one are fitted on, the others held out
        batches = text + held_out
        masks = [_prompts(batch) for batch in batches]
        self._cheap = [cheap for cheap, _ in masks]
        self._behind = sum(each_of_all(sum(int(behind.sum()) for _, behind in masks[self._fitted :])))
        first = own_rows(_rows(held_out))[0].start
        self._gradients: list[list[torch.Tensor]] = []
        for batch, (_, behind) in zip(held_out, masks[self._fitted :]):
            seeds = [seed * 1_000_003 + first + row for row in range(len(behind))]
            self._gradients.append(stream_gradients(model, batch, behind, seeds))
            first += len(behind)
        self._walk = LayerWalk(model, batches)
        length = max(batch["input_ids"].shape[1] for batch in batches)
        saved = _savings(model, int(length * _PROMPT))
        states = self._walk.first()
        for index in range(len(self._walk.layers)):
            holder = self._walk.holder(index)
            if holder is None:
                states = [self._walk.run(index, batch, h) for batch, h in enumerate(states)]
            else:
                states = self._layer(holder, states, saved)
            bar.layer_done()

    def _layer(self, holder: Routing, states: list[torch.Tensor], saved: Any) -> list[torch.Tensor]:
        index = holder.layer_index
        paths: dict[str, list[tuple[RoutedCall, torch.Tensor]]] = {}
        self.found[index], self.branches[index] = {}, {}
        for target in ("ffn", "attention", "block"):
            paths[target] = [self._path(holder, target, batch, h, paths) for batch, h in enumerate(states)]
        outputs = [call.finish(full) for call, full in paths["ffn"]]
        rows: dict[tuple[str, str], Rows] = {}
        for option in options_of(holder):
            branch = holder.make_branch(option.target, option.branch, option.rank).to(outputs[0].device)
            kind = option.target, option.branch
            if kind not in rows:
                rows[kind] = rows_of(branch, paths[option.target][: self._fitted], self._cheap[: self._fitted])
            r2 = fit_on(branch, rows[kind])
            sinks = _sink_gate(paths[option.target])
            nats = self._price(index, branch, sinks, paths[option.target][self._fitted :], outputs[self._fitted :])
            self.branches[index][option] = branch
            self.found[index][option] = StaticFit(nats, saved(holder, option), r2)
        return outputs

    def _path(self, holder: Routing, target: str, batch: int, h: torch.Tensor, paths: Any) -> Any:
        """The routed part, and the stream behind its full path; layers that run one after the other compute it once."""
        plan = holder.plan(False)
        assert plan is not None
        traits = TARGETS[target]
        call = self._walk.call(holder.layer_index, batch, h, replace(plan, site=target, target=traits))
        if holder.family.parallel or not traits.skips_attention:
            return call, call.full()
        ffn_call, ffn_full = paths["ffn"][batch]
        return call, ffn_full if traits.skips_ffn else ffn_call.stream

    def _price(
        self,
        index: int,
        branch: Any,
        gate: SinkGate,
        paths: list[tuple[RoutedCall, torch.Tensor]],
        outputs: list[torch.Tensor],
    ) -> float:
        """Half of two estimates: with what the tokens of a row do together, and with what each does alone.

        The first is right on average, and noisy: one sample for each row. The second misses what errors do together,
        and takes its scale from all of them.
        """
        together, alone = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for (call, _), out, gradients, cheap in zip(
            paths, outputs, self._gradients, self._cheap[self._fitted :], strict=True
        ):
            change = call.finish(call.stream + branch(call.stream)) - out
            skipped = cheap & (gate(call.stream)["scores"] < 0)
            slopes_BT = (
                (gradients[index].to(change.device) * change.float()).sum(-1).double().masked_fill(~skipped, 0.0)
            )
            together += slopes_BT.sum(1).square().sum().cpu()
            alone += slopes_BT.square().sum().cpu()
        return float(total(together + alone)) / 4 / max(1, self._behind)


@dataclass
class Rows:
    """Rows that a branch is fitted to: the output of its norm and the update `[N, d]`, the size of the stream `[N]`."""

    x_Nd: torch.Tensor
    y_Nd: torch.Tensor
    norms_N: torch.Tensor
    energy: torch.Tensor | None = None  # of the FFN's neurons, once it is known


def rows_of(branch: Any, paths: list[tuple[RoutedCall, torch.Tensor]], cheap: list[torch.Tensor]) -> Rows:
    """The rows of the tokens in `cheap`, without the sinks."""
    x, update, after = [], [], []
    for (call, full), mask in zip(paths, cheap, strict=True):
        x.append(branch.normed(call.stream)[mask].float())
        update.append((full - call.stream)[mask].float())
        after.append(full[mask].float())
    norms_N, sinks_N = norms_and_sinks(torch.cat(after))
    return Rows(torch.cat(x)[~sinks_N], torch.cat(update)[~sinks_N], norms_N[~sinks_N])


def fit_on(branch: Any, rows: Rows) -> float:
    """Fit a branch; the share of the update that it explains."""
    if isinstance(branch, NeuronBranch) and rows.energy is None:
        rows.energy = branch.energy(rows.x_Nd, 1 / rows.norms_N.square())
    penalty = max(_PENALTY, 0.1 * rows.x_Nd.shape[1] / sum(each_of_all(len(rows.x_Nd))))
    return 1 - fit_branch(branch, rows.x_Nd, rows.y_Nd, penalty, rows.norms_N, rows.energy)


def _sink_gate(paths: list[tuple[RoutedCall, torch.Tensor]]) -> SinkGate:
    """The gate of a layer whose routed part reads the streams of `paths`."""
    gate = SinkGate(0, None).to(paths[0][1].device)
    gate.set_bound(torch.cat([call.stream.flatten(0, 1) for call, _ in paths]))
    return gate


def options_of(holder: Routing) -> list[Option]:
    """Options of a layer: FFN, attention or both, by low-rank branches and by parts of the FFN's neurons."""
    ffn, width = holder.ffn, holder.width
    low = max(1, width // 8)
    found = [Option("block", "lowrank", low)]
    if (neurons := neurons_of(ffn)) is None:
        found += [Option("ffn", "lowrank", low), Option("ffn", "lowrank", max(1, width // 3))]
    else:
        found += [Option("ffn", "neurons", max(1, neurons // part)) for part in (4, 2)]
        found += [Option("block", "neurons", max(1, neurons // 4))]
    if holder.family.queries is None:  # attention that is skipped per token is computed all the same
        return [option for option in found if not TARGETS[option.target].skips_attention]
    return [*found, Option("attention", "lowrank", low)]


def choose(found: Mapping[int, Mapping[Option, StaticFit]], wanted: float) -> dict[int, Option]:
    """The option of each layer, or none, that together save `wanted` at the least predicted cost; `{}` if none do.

    A knapsack, by Lagrange's multiplier: every layer takes what is best at one price for what is saved. Of the sets
    that any price gives, it is the cheapest one that saves enough.
    """

    def at(price: float) -> dict[int, Option]:
        taken = {}
        for index, fits in found.items():
            option, fit = min(fits.items(), key=lambda item: item[1].nats - price * item[1].saved)
            if fit.nats < price * fit.saved:
                taken[index] = option
        return taken

    def saved(taken: Mapping[int, Option]) -> float:
        return sum(found[index][option].saved for index, option in taken.items())

    low, high = 0.0, 1e6
    if saved(at(high)) < wanted:
        return {}
    for _ in range(100):
        middle = (low + high) / 2 if low else high / 16 if high > 1e-12 else 0.0
        low, high = (low, middle) if saved(at(middle)) >= wanted else (middle, high)
        if high - low <= 1e-9 * high:
            break
    return at(high)


def _savings(model: PeftModel, length: int) -> Any:
    """A function of a layer's holder and an option: the share of the FLOPs of a prompt that the option leaves out."""
    full = dict.fromkeys((holder.layer_index for holder in active_routings(model)), (1.0, 1.0))
    dense = count_work(model, batch=1, length=length, shares=full).total_flops
    known: dict[tuple[Any, ...], float] = {}

    def saved(holder: Routing, option: Option) -> float:
        key = holder.layer_index, option.target
        config, name = holder.active_config(), holder.active_name()
        if key not in known:
            before, config.target = config.target, option.target
            try:
                shares = full | {holder.layer_index: (1 / length, 1.0)}
                left = count_work(model, batch=1, length=length, shares=shares).total_flops
            finally:
                config.target = before
            known[key] = (dense - left) / dense
        branch = holder.make_branch(option.target, option.branch, option.rank)
        weights = sum(p.numel() for p in branch.parameters() if p.ndim == 2)
        weights += branch.borrowed_weights() if isinstance(branch, NeuronBranch) else 0
        assert name is not None
        return known[key] - 2.0 * weights * length / dense

    return saved


def _refit(model: PeftModel, text: Batches, bar: FitBar) -> dict[int, float]:
    """Fit the branches again, layer by layer, to what leads from the routed model's stream back to the dense model's.

    So a branch makes up for its own layer, and for as much of what those before it have lost as can be told.
    """
    walk, cheap = LayerWalk(model, text), [_prompts(batch)[0] for batch in text]
    states, dense = walk.first(), walk.first()
    r2: dict[int, float] = {}
    for index in range(len(walk.layers)):
        holder = walk.holder(index)
        plan = None if holder is None else holder.plan(False)
        if holder is None or plan is None:
            states = [walk.run(index, batch, h) for batch, h in enumerate(states)]
            dense = states if not r2 else [walk.run(index, batch, h) for batch, h in enumerate(dense)]
            continue
        calls = [walk.call(index, batch, h, plan) for batch, h in enumerate(states)]
        wanted = [walk.call(index, batch, h, plan) for batch, h in enumerate(dense)]
        wanted_fulls = [call.full() for call in wanted]
        branch = holder.depth_route_branch[holder.active_name()]
        gate: Any = holder.depth_route_gate[holder.active_name()]
        gate.set_bound(torch.cat([call.stream.flatten(0, 1) for call in calls]))
        skipped = [mask & (gate(call.stream)["scores"] < 0) for call, mask in zip(calls, cheap)]
        r2[index] = fit_on(branch, rows_of(branch, list(zip(calls, wanted_fulls)), skipped))
        states = [
            call.finish(torch.where(mask[..., None], call.cheap(), call.full())) for call, mask in zip(calls, skipped)
        ]
        dense = [call.finish(full) for call, full in zip(wanted, wanted_fulls)]
    return r2


def _behind(model: PeftModel, text: Batches) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of the dense and of the routed model, and `KL(dense || routed)`, on the text behind each row's prompt.

    Nats per token, `[R]` each.
    """
    found = []
    for batch in text:
        cheap, behind = _prompts(batch)
        with full_depth(model):
            dense = model(**batch, use_cache=False).logits[behind].float().log_softmax(-1)
        with record_routes(model) as trace:  # sinks run in full, and so does the text behind the prompt
            model(**batch, use_cache=False, logits_to_keep=1)
        forced = RouteTrace({index: replace(record, mask=record.mask | ~cheap) for index, record in trace.items()})
        with replay_routes(model, forced):
            routed = model(**batch, use_cache=False).logits[behind].float().log_softmax(-1)
        labels = batch["input_ids"].roll(-1, 1)[behind][:, None]
        parts = -dense.gather(-1, labels), -routed.gather(-1, labels)
        kl = F.kl_div(routed, dense, reduction="none", log_target=True).sum(-1, keepdim=True)
        rows = [part.new_zeros(behind.shape).masked_scatter(behind, part).sum(1) for part in (*parts, kl)]
        found.append(torch.stack(rows).div(behind.sum(1).clamp(min=1)).double().cpu())
    dense_R, loss_R, kl_R = rows_of_all(torch.cat(found, dim=1).T).T
    return dense_R, loss_R, kl_R


def _prompts(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Bool `[B, T]` each: the tokens of each row's prompt but its last, and the positions whose next token counts."""
    real = token_mask(batch)
    place, count = real.cumsum(1), real.sum(1, keepdim=True)
    last = (count * _PROMPT).long()  # the prompt's last token is the `last`-th real one
    return real & (place < last), real & (place >= last) & (place < count)


def _rows(batches: Batches) -> int:
    return sum(len(batch["input_ids"]) for batch in batches)
