"""A preset is the method: it names every field that makes one,
and the recipe of its paper has the same.

What a recipe sets otherwise is named here with its reason; a field that differs without one fails,
and so does a reason whose field no longer differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from scripts import load_script
from study.grid import read_study

from hf_depthroute import PRESETS, DepthRouteConfig, DepthRouteTrainingArguments, preset
from hf_depthroute.config.fields import RoutingFields
from hf_depthroute.files.strict_yaml import read_mapping
from hf_depthroute.parts.gates import GATES
from hf_depthroute.parts.targets import TARGETS

RECIPES = ROOT / "recipes"
METHOD = ("target", "granularity", "gate", "gate_input", "branch", "selection")

SMALL = "six layers"
PILOTS = "picked in pilots: with the published value the gates hardly move in so few steps"
RUN_LENGTH = "scaled with the steps of the run"
SCHEDULE = "the library's default; the paper does not say, the preset follows its authors' code"
CALIBRATED = (
    "held by a calibrated threshold of all layers after training, so that shares are equal in "
    "comparisons"
)


@dataclass(frozen=True)
class Recipe:
    """What a recipe runs, and why it differs from the preset, by field."""

    name: str
    adapter: DepthRouteConfig
    training: dict[str, Any]
    reasons: dict[str, str]


def given(arguments: DepthRouteTrainingArguments) -> dict[str, Any]:
    return {field.name: getattr(arguments, field.name) for field in fields(arguments)}


def script(path: str) -> Any:
    """A recipe's `run.py` or the like; those that import their neighbours find them."""
    folder = str((RECIPES / path).parent)
    own = ("pretrain", "tasks")
    for module in own:
        sys.modules.pop(module, None)
    sys.path.insert(0, folder)
    try:
        return load_script(RECIPES / path)
    finally:
        sys.path.remove(folder)
        for module in own:
            sys.modules.pop(module, None)


def depth_routing(out: Path, config: str, name: str, more: dict[str, str]) -> Recipe:
    study = read_study(RECIPES / "aux_losses" / "long.yaml")
    (spec,) = [spec for spec in study.specs([config], [study.seeds[0]])]
    arguments = DepthRouteTrainingArguments(output_dir=str(out), use_cpu=True, **spec.training)
    return Recipe(name, DepthRouteConfig(**spec.adapter), given(arguments), more)


def recipes(out: Path) -> Iterator[Recipe]:
    tuning = script("router_tuning/run.py")
    study = read_mapping(RECIPES / "router_tuning" / "study.yaml")
    row = next(
        row
        for row in study["table"]
        if (row["target"], row["granularity"]) == ("attention", "sequence")
    )
    arguments = tuning.training_arguments(study, row | {"seed": 1}, out)
    tuned = {
        "capacity_weight": (
            "at the paper's largest, 0.1, the routers stay dense here; 4 to 10 reach the budget"
        ),
        "learning_rate": PILOTS,
        "warmup_steps": RUN_LENGTH,
        **dict.fromkeys(("lr_scheduler_type", "lr_scheduler_kwargs"), SCHEDULE),
    }
    adapter = tuning.adapter_config(study, row)
    yield Recipe("router-tuning", adapter, given(arguments), tuned | {"layers": SMALL})

    lora = script("lora/run.py")
    yield Recipe(
        "router-tuning",
        DepthRouteConfig(**{"budget": lora.BUDGET, **lora.TUNED}),
        lora.CAPACITY,
        {"capacity_weight": tuned["capacity_weight"], "layers": SMALL},
    )

    moe = script("moe/route.py")
    spec = next(spec for spec in moe.specs() if spec["method"] == "per_expert")
    adapter = moe.configure(spec, None, [], out)
    reasons = tuned | {"capacity_weight": PILOTS, "budget_scope": CALIBRATED}
    yield Recipe(
        "router-tuning-experts", adapter, given(moe.training_arguments(spec, out)), reasons
    )

    selective = script("token_selective/run.py")
    run = selective.read_runs(RECIPES / "token_selective" / "paper.yaml")["tsa"]
    own_loop = {
        "learning_rate": run["lr"],
        "weight_decay": run["weight_decay"],
        "depth_weight": run["depth_weight"],
    }
    yield Recipe("token-selective-attention", selective.adapter_config(run), own_loop, {})

    engram = script("engram/run.py")
    model = engram.with_memory(engram.SIZES["small"], 0)
    trainer = engram.trainer_of("cgs", model, torch.zeros(1, 8, dtype=torch.long), 0, 2000, 4e-3)
    reasons = {
        "layers": "six layers in place of twelve: 1, 2 and 3",
        "memory_slots": "20,000 for a text of 2.5 million tokens",
        "learning_rate": "the best of a search, for each kind of training",
        "cgs_warmup": "a tenth of the steps, as in the paper",
    }
    adapter = DepthRouteConfig(**model.peft_config["default"].to_dict())
    yield Recipe("counterfactual-gate-supervision-memory", adapter, given(trainer.args), reasons)


def recipes_of_the_long_study(out: Path) -> Iterator[Recipe]:
    searched = {
        "learning_rate": "by tune.py, for this base and this length",
        "budget_weight": "by tune.py: at 1 the mean probability ends at 0.8 for a budget of 0.5",
    }
    plain = {"warmup_steps": RUN_LENGTH, "layers": SMALL}
    sizes = dict.fromkeys(
        ("context_dim", "summary_dim", "action_dim"),
        "of the width what the paper's gate has of its",
    )
    g1, g3 = "conditional-depth-routing", "conditional-depth-routing-jepa"
    yield depth_routing(out, "g1_8e3", g1, searched | plain)
    yield depth_routing(out, "g3_8e3", g3, searched | plain | sizes)


def without_effect(config: DepthRouteConfig, training: dict[str, Any]) -> set[str]:
    """Fields that change nothing of a method: sizes of other gates,
    weights of losses that do not apply."""
    gate = GATES[config.gate]
    sizes = {"gate_hidden", "context_dim", "summary_dim", "action_dim"} - set(gate.sizes)
    unused = {
        "branch_rank": config.branch == "none",
        "jepa_weight": not gate.predicts_outcomes,
        "predictor_weight": config.causal_rule != "predictor",
        "budget_weight": TARGETS[config.target].reads_ids,  # a memory has no budget
        "alive_weight": TARGETS[config.target].reads_ids,
        **dict.fromkeys(("util_weight", "rank_weight"), training.get("oracle", "none") == "none"),
    }
    return sizes | {name for name, applies in unused.items() if applies}


def differing(recipe: Recipe) -> set[str]:
    config, training = preset(recipe.name)
    adapter = [field.name for field in fields(RoutingFields) if field.name != "seed"]
    found = {name for name in adapter if getattr(config, name) != getattr(recipe.adapter, name)}
    found |= {name for name, value in training.items() if recipe.training.get(name, value) != value}
    return found - without_effect(config, training)


def test_a_preset_and_the_recipes_of_its_paper_differ_where_a_reason_says_so(
    tmp_path: Path,
) -> None:
    compared = [*recipes(tmp_path), *recipes_of_the_long_study(tmp_path)]
    assert [(recipe.name, differing(recipe)) for recipe in compared] == [
        (recipe.name, set(recipe.reasons)) for recipe in compared
    ]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_leaves_no_field_of_the_method_to_a_default(name: str) -> None:
    row = PRESETS[name].adapter
    target = TARGETS[row["target"]]
    gate = row.get("gate", target.fixed.get("gate"))
    settled = {*row, *target.fixed} | ({"gate_input"} if GATES[gate].reads else set())
    assert set(METHOD) <= settled
