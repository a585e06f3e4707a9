"""What a `RouteTrace` says about its gates: scalars per layer for the log."""

from __future__ import annotations

import torch

from .averages import cosine
from .trace import RouteTrace


@torch.no_grad()
def diagnostics(trace: RouteTrace) -> dict[str, torch.Tensor]:
    """Scalars per layer for the log, such as `full_ratio/layer_11`.

    `full_ratio` (tokens run full), `gate_prob` (mean `p`), `score_var` (variance of `u`), and for the JEPA gate
    `q_distance` (mean `||q_full - q_cheap||_2`) and `q_cosine` (mean cosine of the two).
    """
    result: dict[str, torch.Tensor] = {}
    for index, record in trace.items():
        real = record.real

        def mean(values: torch.Tensor, real: torch.Tensor = real) -> torch.Tensor:
            return (values * real).sum() / real.sum().clamp(min=1)

        average = mean(record.scores)
        values = {
            "full_ratio": mean(record.mask.float()),
            "gate_prob": mean(record.probs),
            "score_var": mean((record.scores - average).square()),
        }
        if "q_full" in record.extras:
            q_full, q_cheap = record.q_full.float(), record.q_cheap.float()
            values["q_distance"] = mean((q_full - q_cheap).norm(dim=-1))
            values["q_cosine"] = mean(cosine(q_full, q_cheap))
        result |= {f"{name}/layer_{index}": value for name, value in values.items()}
    return result
