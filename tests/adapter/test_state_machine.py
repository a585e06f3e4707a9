"""Adapters added, switched, disabled, deleted, saved, loaded, run and trained in any order:
the base never changes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from models import build_base, logits, make_consequential, tokens

from hf_depthroute import DepthRouteConfig, get_depth_routed_model
from hf_depthroute.adapter.files import tensors_hash
from hf_depthroute.routing.trace import record_routes
from hf_depthroute.training.losses import routing_losses

NAMES = st.sampled_from(["default", "one", "two"])
FIELDS = st.fixed_dictionaries(
    {
        "gate": st.sampled_from(["mlp", "jepa", "linear"]),
        "target": st.sampled_from(["ffn", "attention", "block"]),
        "layers": st.sampled_from([[1, 2, 3], [0, 2], "last:1", "all"]),
        "branch": st.sampled_from(["lowrank", "none"]),
        "budget": st.sampled_from([0.3, 0.5, 1.0]),
    }
)


def base_hash(model: Any) -> str:
    return tensors_hash(
        {name: value for name, value in model.state_dict().items() if ".routing." not in name}
    )


class Adapters(RuleBasedStateMachine):
    """A model, the adapters on it by name with the logits each of them has, and what was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.model: Any = None
        self.known: dict[str, torch.Tensor] = {}
        self.saved: dict[str, torch.Tensor] = {}
        self.active = ""
        self.disabled = False

    @initialize(family=st.sampled_from(["llama", "gpt2", "olmoe"]), name=NAMES, fields=FIELDS)
    def inject(self, family: str, name: str, fields: dict[str, Any]) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        base = build_base(family)
        self.family, self.base_logits, self.base_hash = family, logits(base), base_hash(base)
        self.model = get_depth_routed_model(base, self._config(fields), name).eval()
        self.active = name
        make_consequential(self.model, name)
        self.known[name] = logits(self.model)

    @rule(name=NAMES, fields=FIELDS)
    @precondition(lambda self: len(self.known) < 3)
    def add(self, name: str, fields: dict[str, Any]) -> None:
        if name in self.known:
            return
        self.model.add_adapter(name, self._config(fields))
        self._switch(name)
        make_consequential(self.model, name, seed=len(self.known))
        self.known[name] = logits(self.model)

    @rule(name=NAMES)
    def switch(self, name: str) -> None:
        if name in self.known:
            self._switch(name)

    @rule()
    def disable_for_a_while(self) -> None:
        with self.model.disable_adapter():
            assert torch.equal(logits(self.model), self.base_logits)

    @rule(name=NAMES)
    @precondition(lambda self: len(self.known) > 1)
    def delete(self, name: str) -> None:
        if name not in self.known:
            return
        self.model.delete_adapter(name)
        del self.known[name]
        self._switch(next(iter(self.known)))

    @rule()
    def save(self) -> None:
        self.model.save_pretrained(self.folder)
        self.saved = dict(self.known)

    @rule(name=NAMES, target_name=NAMES)
    @precondition(lambda self: self.saved and len(self.known) < 3)
    def load(self, name: str, target_name: str) -> None:
        if name not in self.saved or target_name in self.known:
            return
        self.model.load_adapter(
            self.folder if name == "default" else self.folder / name, target_name
        )
        self.model.eval()
        self.known[target_name] = self.saved[name]
        self._switch(target_name)

    @rule(length=st.integers(1, 5))
    def generate(self, length: int) -> None:
        out = self.model.generate(
            input_ids=tokens(2, 6), max_new_tokens=length, do_sample=False, pad_token_id=0
        )
        assert out.shape[1] <= 6 + length

    @rule()
    def train_a_step(self) -> None:
        self.model.train()
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        if trainable:
            optimizer = torch.optim.AdamW(trainable, lr=1e-2)
            with record_routes(self.model) as trace:
                loss = self.model(input_ids=tokens(2, 8), labels=tokens(2, 8)).loss
            sum(routing_losses(trace, loss).values()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.model.eval()
        self.known[self.active] = logits(self.model)

    @invariant()
    def the_base_is_what_it_was(self) -> None:
        if self.model is not None:
            assert base_hash(self.model.get_base_model()) == self.base_hash

    @invariant()
    def the_active_adapter_computes_what_it_did(self) -> None:
        if self.model is not None:
            assert torch.equal(logits(self.model), self.known[self.active])

    def teardown(self) -> None:
        shutil.rmtree(self.folder)
        if self.model is not None:
            assert torch.equal(logits(self.model.unload()), self.base_logits)

    def _switch(self, name: str) -> None:
        self.model.set_adapter(name)
        self.active = name

    def _config(self, fields: dict[str, Any]) -> DepthRouteConfig:
        small = {
            "context_dim": 8,
            "summary_dim": 8,
            "action_dim": 4,
            "gate_hidden": 8,
            "branch_rank": 4,
        }
        return DepthRouteConfig(
            **{k: v for k, v in {**fields, **small}.items()}, task_type="CAUSAL_LM"
        )


Adapters.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAdapters = Adapters.TestCase
