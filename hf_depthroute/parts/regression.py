"""Least squares for parts that nothing trains: a map from features, and directions of a given rank.

Where every process holds a share of the rows (`distributed.sharing`), sums are over all of them.

Shapes: N rows, d features, m outputs, r rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..base.distributed import own_rows, total


def moments(x_Nd: torch.Tensor, y_Nm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x^T x` `[d, d]` and `x^T y` `[d, m]`, float64."""
    x = x_Nd.double()
    return total(x.T @ x), total(x.T @ y_Nm.double())


def ridge_weights(gram_dd: torch.Tensor, cross_dm: torch.Tensor, penalty: float) -> torch.Tensor:
    """The weights `[d, m]` of ridge regression, from `x^T x` and `x^T y`.

    Args:
        gram_dd: `x^T x`, float64.
        cross_dm: `x^T y`, float64.
        penalty: On the squared weights, as a fraction of the mean squared feature.
    """
    identity = torch.eye(len(gram_dd), dtype=gram_dd.dtype, device=gram_dd.device)
    return torch.linalg.lstsq(gram_dd + penalty * gram_dd.diagonal().mean() * identity, cross_dm).solution


def leading_directions(gram_dd: torch.Tensor, cross_dm: torch.Tensor, rank: int, penalty: float) -> torch.Tensor:
    """Reduced-rank regression: the `r` directions `[r, d]` of `x` from which `y` is predicted best by a linear map.

    With `W` the ridge weights, they are `W v` of the `r` leading eigenvectors `v` of the prediction's second moment
    `W^T x^T x W`, found by orthogonal iteration (Izenman, "Reduced-rank regression for the multivariate linear model",
    1975).

    Args:
        gram_dd: `x^T x`, float64.
        cross_dm: `x^T y`, float64.
        rank: `r`, at most `m`.
        penalty: As in `ridge_weights`.
    """
    weights_dm = ridge_weights(gram_dd, cross_dm, penalty)
    moment_mm = weights_dm.T @ gram_dd @ weights_dm
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(len(moment_mm), rank, dtype=gram_dd.dtype, generator=generator)
    basis_mr = torch.linalg.qr(start.to(gram_dd.device)).Q
    for _ in range(16):
        basis_mr = torch.linalg.qr(moment_mm @ basis_mr).Q
    return (weights_dm @ basis_mr).T


@torch.enable_grad()
def regress(module: nn.Module, x_Nd: torch.Tensor, y_N: torch.Tensor, steps: int, seed: int) -> None:
    """Fit a gate's `scores` to `y` by least squares: AdamW, 1,024 rows a step, learning rate 2e-3 falling to 0.

    The same rows are drawn for the same seed; the global generator is not touched.
    """
    parameters = list(module.parameters())
    wanted = [parameter.requires_grad for parameter in parameters]
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    generator = torch.Generator().manual_seed(seed)
    own, size = own_rows(len(x_Nd))
    for _ in range(steps):
        rows = torch.randint(size, (1024,), generator=generator)
        rows = (rows[(own.start <= rows) & (rows < own.stop)] - own.start).to(x_Nd.device)
        loss = F.mse_loss(module(x_Nd[rows])["scores"], y_N[rows], reduction="sum") / 1024
        grads = total(nn.utils.parameters_to_vector(torch.autograd.grad(loss, parameters)))
        for parameter, grad in zip(parameters, grads.split([parameter.numel() for parameter in parameters])):
            parameter.grad = grad.view_as(parameter)
        optimizer.step()
        scheduler.step()
    for parameter, before in zip(parameters, wanted):
        parameter.grad = None
        parameter.requires_grad_(before)
