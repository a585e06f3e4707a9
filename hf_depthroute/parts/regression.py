"""Least squares for parts that nothing trains: a map from features, and directions of a given rank.

Where every process holds a share of the rows (`distributed.sharing`), sums are over all of them.

Shapes: N rows, S rows that are to be told apart, d features, m outputs, r rank.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.distributed import own_rows, rows_of_all, total

_SINK = 5.0  # a token with this many times the median norm is an attention sink
_RANGE = 20.0  # SiLU of minus this is nothing
_MARGIN = 0.1  # below the lowest row that is apart, of its distance from the middle
_TAKEN = 0.01  # of the rows that are not apart, at most, are taken for ones that are
_PENALTY = 1e-2
_ADDED = 1024  # rows in one float32 product
_NEARLY_LINEAR = 0.1  # standard deviation of the input of a SiLU that is to be nearly linear
# The score of a token that has to run in full, in standard deviations of the others'
ALWAYS = 100.0


def moments(x_Nd: Tensor, y_Nm: Tensor) -> tuple[Tensor, Tensor]:
    """`x^T x` `[d, d]` and `x^T y` `[d, m]`, float64; of more than 1,024 rows,
    sums of float32 products of so many."""
    if len(x_Nd) <= _ADDED:
        x = x_Nd.double()
        y = y_Nm.double()
        return total(x.T @ x), total(x.T @ y)
    width = x_Nd.shape[1]
    gram = x_Nd.new_zeros(width, width, dtype=torch.float64)
    cross = x_Nd.new_zeros(width, y_Nm.shape[1], dtype=torch.float64)
    for x, y in zip(x_Nd.float().split(_ADDED), y_Nm.float().split(_ADDED)):
        gram += x.T @ x
        cross += x.T @ y
    return total(gram), total(cross)


def count_of_all(rows: Tensor) -> Tensor:
    """The number of rows of all processes, float32 `[]`."""
    return total(torch.tensor(float(len(rows)), device=rows.device))


def ridge_weights(gram_dd: Tensor, cross_dm: Tensor, penalty: float) -> Tensor:
    """The weights `[d, m]` of ridge regression, from `x^T x` and `x^T y` in float64.

    The penalty on squared weights is a fraction of the mean squared feature.
    """
    identity = torch.eye(len(gram_dd), dtype=gram_dd.dtype, device=gram_dd.device)
    penalised_dd = gram_dd + penalty * gram_dd.diagonal().mean() * identity
    factor_dd, failed = torch.linalg.cholesky_ex(penalised_dd)
    if penalty == 0 or failed:  # it may be singular
        return torch.linalg.lstsq(penalised_dd, cross_dm).solution
    return torch.cholesky_solve(cross_dm, factor_dd)


def norms_and_sinks(after_Nd: Tensor) -> tuple[Tensor, Tensor]:
    """How large each token's stream is, and which tokens are attention sinks.

    In large models the stream of the first token of a sequence, and of a few others, is 100 times
    as large as that of the rest (Sun et al., "Massive Activations in Large Language Models",
    arXiv:2402.17762). It holds such tokens apart for the attention of the later ones, and least
    squares would see nothing else.

    Args:
        after_Nd: The stream behind the full path.

    Returns:
        `rms(after)`, float32 `[N]`, and bool `[N]`, true where it exceeds 5 times the median.
    """
    norms_N = after_Nd.float().square().mean(dim=-1).sqrt()
    middle = rows_of_all(norms_N).median()
    return norms_N.clamp(min=float(1e-6 * middle)), norms_N > _SINK * middle


def separating_unit(x_Nd: Tensor, apart_Sd: Tensor) -> tuple[Tensor, Tensor]:
    """Weights `[d]` and bias `[]` of a map that is at least 20 at the rows in `apart`,
    and at most -20 at the others.

    The direction is that of linear discriminant analysis. Where the two overlap, it is 20 at the
    rows in `apart` all the same, and above 0 at some of the others, too, but at no more than a
    hundredth of them: a row in `apart` that looks like the rest is left with them. Where all do, it
    is -20 everywhere.
    """
    count = count_of_all(x_Nd)
    mean_d = total(x_Nd.sum(0)) / count
    apart_d = total(apart_Sd.sum(0)) / count_of_all(apart_Sd)
    centred_Nd = x_Nd - mean_d
    gram_dd, _ = moments(centred_Nd, centred_Nd[:, :1])
    apart_d1 = (apart_d - mean_d).double()[:, None]
    direction_d = ridge_weights(gram_dd / count, apart_d1, 0.1).squeeze(1).to(x_Nd)
    others_N = rows_of_all(centred_Nd @ direction_d)
    apart_S = rows_of_all((apart_Sd - mean_d) @ direction_d)
    middle = others_N.median()
    most = others_N.kthvalue(math.ceil((1 - _TAKEN) * len(others_N))).values
    # The map is 0 between `low` and `high`, at the lowest here.
    told_S = apart_S[apart_S - 0.5 * _MARGIN * (apart_S - middle) > most]
    if not len(told_S):
        return torch.zeros_like(direction_d), direction_d.new_tensor(-_RANGE)
    low = told_S.min()
    high = torch.minimum(others_N.max(), low - _MARGIN * (low - middle))
    weights_d = direction_d * (2 * _RANGE / (low - high).clamp(min=1e-30))
    return weights_d, -_RANGE * (low + high) / (low - high).clamp(min=1e-30) - weights_d @ mean_d


def leading_directions(gram_dd: Tensor, cross_dm: Tensor, rank: int, penalty: float) -> Tensor:
    """Reduced-rank regression: the `r` directions `[r, d]` of `x` from which `y` is predicted best
    by a linear map.

    With `W` the ridge weights, they are `W v` of the `r` leading eigenvectors `v` of the
    prediction's second moment `W^T x^T x W`, found by orthogonal iteration (Izenman, "Reduced-rank
    regression for the multivariate linear model", 1975). The rank is at most `m`.
    """
    weights_dm = ridge_weights(gram_dd, cross_dm, penalty)
    moment_mm = weights_dm.T @ gram_dd @ weights_dm
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(len(moment_mm), rank, dtype=gram_dd.dtype, generator=generator)
    basis_mr = torch.linalg.qr(start.to(gram_dd.device)).Q
    for _ in range(16):
        basis_mr = torch.linalg.qr(moment_mm @ basis_mr).Q
    return (weights_dm @ basis_mr).T


def sizes_of(directions_du: Tensor, gram_dd: Tensor, weight: Tensor) -> Tensor:
    """The root mean square of `x` along each direction, `[u]`,
    at least a millionth of the largest one.

    Along a direction that the text does not have, what rounding leaves of it may be below zero;
    and a unit that is divided by it would be huge on other text. `weight` is the sum of the weights
    of the rows in `gram_dd`.
    """
    squares_u = (directions_du * (gram_dd @ directions_du)).sum(0) / weight
    sizes_u = squares_u.clamp(min=0).sqrt()
    return sizes_u.clamp(min=max(1e-30, 1e-6 * float(sizes_u.max())))


@torch.no_grad()
def fit_scores(
    hidden: nn.Linear,
    score: nn.Linear,
    x_Nd: Tensor,
    y_N: Tensor,
    seed: int,
    always_Sd: Tensor | None,
) -> None:
    """Fit `score(SiLU(hidden(x)))` to `y` in closed form: hidden units are chosen,
    and the scores are a ridge on them.

    The first unit is the linear prediction of `y`, so small that SiLU leaves it nearly linear. Half
    of the others are the leading principal components of `x`, each with both signs, which together
    also give its size; the other half are random directions (an extreme learning machine: Huang et
    al., "Extreme learning machine: Theory and applications", Neurocomputing 70, 2006).

    Tokens that have to get a high score, `always_Sd`, get `ALWAYS`, by the last unit alone; it is 0
    at the rows of `x`. Both maps, `d -> h` and `h -> 1`, have a bias.
    """
    units = hidden.out_features - (always_Sd is not None and hidden.out_features > 1)
    count = count_of_all(x_Nd)
    mean_d = total(x_Nd.sum(0)) / count
    centred_Nd = x_Nd - mean_d
    gram_dd, cross_d1 = moments(centred_Nd, y_N[:, None])
    pairs = min((units - 1) // 4, len(mean_d))
    leading_dp = torch.linalg.eigh(gram_dd).eigenvectors.flip(1)[:, :pairs]
    generator = torch.Generator().manual_seed(seed)
    others_dr = torch.randn(len(mean_d), units - 1 - 2 * pairs, generator=generator).to(gram_dd)
    linear_d1 = ridge_weights(gram_dd, cross_d1, _PENALTY)
    directions_du = torch.cat([linear_d1, leading_dp, -leading_dp, others_dr], dim=1)
    directions_du = (directions_du / sizes_of(directions_du, gram_dd, count)).to(x_Nd)
    directions_du[:, 0] *= _NEARLY_LINEAR
    features_Nu = F.silu(centred_Nd @ directions_du)
    means_u = total(features_Nu.sum(0)) / count
    features_Nu = features_Nu - means_u
    spreads_u = (total(features_Nu.square().sum(0)) / count).sqrt().clamp(min=1e-30)
    scaled_u1 = ridge_weights(*moments(features_Nu / spreads_u, y_N[:, None]), _PENALTY)
    weights_u = scaled_u1.squeeze(1).to(x_Nd) / spreads_u
    for part in (hidden.weight, hidden.bias, score.weight):
        part.zero_()
    hidden.weight[:units] = directions_du.T
    hidden.bias[:units] = -mean_d @ directions_du
    score.weight[0, :units] = weights_u
    score.bias.copy_(total(y_N.sum()) / count - means_u @ weights_u)
    if always_Sd is not None and units < hidden.out_features:
        hidden.weight[units], hidden.bias[units] = separating_unit(x_Nd, always_Sd)
        score.weight[0, units] = ALWAYS / _RANGE


@torch.enable_grad()
def refine_scores(
    hidden: nn.Linear,
    score: nn.Linear,
    x_Nd: Tensor,
    y_N: Tensor,
    seed: int,
    steps: int,
    units: int,
) -> None:
    """Go on from `fit_scores` by gradient descent on the squared error: AdamW, 1,024 rows a step,
    rate 2e-3 to 0.

    The same rows are drawn for the same seed; the global generator is not touched. The first
    `units` hidden units change; one after them tells apart the tokens that have to run in full.
    """
    held = (hidden.weight[:units], hidden.bias[:units], score.weight[0, :units], score.bias)
    parts = [part.detach().clone().requires_grad_() for part in held]
    up, up_bias, down, down_bias = parts
    optimizer = torch.optim.AdamW(parts, lr=2e-3, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    generator = torch.Generator().manual_seed(seed)
    own, size = own_rows(len(x_Nd))
    for _ in range(steps):
        rows = torch.randint(size, (1024,), generator=generator)
        rows = (rows[(own.start <= rows) & (rows < own.stop)] - own.start).to(x_Nd.device)
        scores = F.silu(F.linear(x_Nd[rows], up, up_bias)) @ down + down_bias
        loss = F.mse_loss(scores, y_N[rows], reduction="sum") / 1024
        grads = total(nn.utils.parameters_to_vector(torch.autograd.grad(loss, parts)))
        for part, grad in zip(parts, grads.split([part.numel() for part in parts])):
            part.grad = grad.view_as(part)
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        for part, found in zip(held, parts):
            part.copy_(found)
