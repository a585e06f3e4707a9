"""A budget for each request, as a sampling parameter of vLLM.

vLLM tells its logits processors before each forward pass which request is at which place of the
batch, with the request's sampling parameters. `RequestBudgets` is one of them for that alone; it
leaves logits as they are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from ..config.adapter import check_budget
from .settings import BUDGET

KEY = "depth_route_budgets"  # in vLLM's table of what a forward pass may ask for


class RequestBudgets(LogitsProcessor):
    """The budgets of the requests of a batch, in the table of vLLM's configuration.

    `by_place` has, by place in the batch, the budget of a request that asked for one.
    """

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.by_place: dict[int, float] = {}
        vllm_config.compilation_config.static_forward_context[KEY] = self

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request whose budget is not in (0, 1]; its client gets status 400."""
        budget_of(sampling_params)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.by_place, batch_update, lambda params, *_: budget_of(params))

    def of_batch(self, batch: Any) -> list[float | None]:
        """The budget of each request of a batch, in its order; None: the server's."""
        return [self.by_place.get(place) for place in range(len(batch.query_start_loc) - 1)]

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor) -> Tensor:
        return logits


def budget_of(params: SamplingParams) -> float | None:
    """The budget that a request asks for; None if it asks for none.

    Raises:
        ConfigError: It is no number in (0, 1].
    """
    given = (params.extra_args or {}).get(BUDGET)
    if given is None:
        return None
    return check_budget(given)
