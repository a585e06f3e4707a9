"""Frozen layers below the first routed one keep no graph,
with and without gradient checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import build_base, decoder_layers, routed
from training import assert_same_tensors, make_trainer, rows

REENTRANT = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
}


def run(folder: Path, **fields: Any) -> tuple[list[tuple[int, bool]], dict[str, Any]]:
    """Every forward pass of a layer in one step, recomputations included,
    with whether its input has a gradient."""
    model, seen = routed(build_base("llama"), layers=[2, 3]), []

    def watch(index: int) -> Any:
        def note(attention: Any, args: Any, kwargs: Any) -> None:
            seen.append((index, (args[0] if args else kwargs["hidden_states"]).requires_grad))

        return note

    for index, layer in enumerate(decoder_layers(model)):
        layer.self_attn.register_forward_pre_hook(watch(index), with_kwargs=True)
    trainer, kept = make_trainer(model, rows(2), folder, **fields)
    trainer.train()
    return seen, kept.steps[0]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_frozen_layers_below_the_first_routed_one_run_once_and_without_a_graph(
    checkpointing: bool, tmp_path: Path
) -> None:
    seen, gradients = run(tmp_path, gradient_checkpointing=checkpointing)
    assert [entry for entry in seen if entry[0] < 3] == [(0, False), (1, False), (2, False)] + [
        (2, False)
    ] * checkpointing
    assert (3, True) in seen
    assert_same_tensors(gradients, run(tmp_path)[1])


def test_reentrant_checkpoints_keep_the_gradient_that_they_need(tmp_path: Path) -> None:
    seen, gradients = run(tmp_path, **REENTRANT)
    assert (1, True) in seen
    assert_same_tensors(gradients, run(tmp_path)[1])
