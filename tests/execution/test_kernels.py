"""Row ops against a masked reference: plain PyTorch, and the Triton kernels,
interpreted where there is no GPU.

`conftest` switches Triton's interpreter on. It multiplies bfloat16 bit patterns as integers, so
that 16-bit products are tested in float16 there.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from protocol import gap

from hf_depthroute.execution.kernels import attend_rows, linear_rows, ops, plain, swiglu_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, INNER = 20, 36  # odd sizes: no block shape divides them
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}  # relative to the largest value


@pytest.fixture(params=["plain", "triton"])
def kernels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """The module under test: `plain`, or `launch` with the Triton kernels."""
    if request.param == "plain":
        yield plain
        return
    pytest.importorskip("triton")
    from triton.runtime import interpreter

    from hf_depthroute.execution.kernels import launch

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        """As of NumPy 2.4 an array of one element is no index;
        the interpreter's scalars are such arrays."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    yield launch


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def chosen(rows: int, share: float) -> torch.Tensor:
    """Bool `[rows]`; at a share between 0 and 1 the first row is skipped and the last one runs."""
    mask = torch.rand(rows, generator=torch.Generator().manual_seed(rows)) < share
    if 0 < share < 1:
        mask[0], mask[-1] = False, True
    return mask.to(DEVICE)


def weights(dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = ((INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER))
    return [0.3 * drawn(*shape, dtype=dtype, seed=number) for number, shape in enumerate(shapes)]


def masked_swiglu(
    stream: Any, x: Any, mask: Any, scale: Any, gate: Any, up: Any, down: Any
) -> torch.Tensor:
    update = (
        torch.nn.functional.silu(x.float() @ gate.float().T) * (x.float() @ up.float().T)
    ) @ down.float().T
    factor = 1.0 if scale is None else scale.float()[:, None]
    return torch.where(mask[:, None], stream.float() + factor * update, stream.float())


def masked_attention(
    q: Any, keys: Any, values: Any, mask: Any, allowed: Any, past: int, scaling: float
) -> Any:
    share = q.shape[2] // keys.shape[1]
    keys, values = (part.float().repeat_interleave(share, 1) for part in (keys, values))
    if allowed is None:
        time = torch.arange(q.shape[1], device=q.device)[:, None] + past
        allowed = (torch.arange(keys.shape[2], device=q.device) <= time)[None, None]
    scores = torch.einsum("bthk,bhsk->bhts", q.float(), keys) * scaling
    scores = (
        scores.masked_fill(~allowed, -torch.inf)
        if allowed.dtype == torch.bool
        else scores + allowed.float()
    )
    out = torch.einsum("bhts,bhsk->bthk", scores.softmax(-1), values)
    return torch.where(mask[..., None, None], out, 0.0)


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    assert gap(found, expected) <= TOLERANCE[dtype] * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_linear_and_swiglu_equal_the_masked_reference(
    kernels: ModuleType, rows: int, share: float, dtype: torch.dtype
) -> None:
    x, stream, mask = (
        drawn(rows, WIDTH, dtype=dtype),
        drawn(rows, WIDTH, dtype=dtype, seed=9),
        chosen(rows, share),
    )
    maps, bias, scale = weights(dtype), drawn(INNER, dtype=dtype), drawn(rows).abs()
    expected = torch.where(mask[:, None], x.float() @ maps[0].float().T + bias.float(), 0.0)
    assert_close(kernels.linear(x, mask, maps[0], bias), expected, dtype)
    for factor in (None, scale):
        expected = masked_swiglu(stream, x, mask, factor, *maps)
        assert_close(kernels.swiglu(stream, x, mask, factor, *maps), expected, dtype)


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_skipped_rows_and_weights_are_not_read(kernels: ModuleType, rows: int) -> None:
    """NaN in what is not to be read: a product that is masked afterwards may hide it,
    a sum over it would not."""
    stream, maps = drawn(rows, WIDTH), weights(torch.float32)
    x, mask = drawn(rows, WIDTH, seed=1), chosen(rows, 0.5)
    expected = masked_swiglu(stream, x, mask, None, *maps)
    x[~mask] = torch.nan
    assert gap(kernels.swiglu(stream, x, mask, None, *maps), expected) < 1e-4
    nothing = torch.zeros_like(mask)
    bad = [torch.full_like(part, torch.nan) for part in maps]
    assert torch.equal(kernels.swiglu(stream, x, nothing, drawn(rows), *bad), stream)
    assert not bool(kernels.linear(x, nothing, bad[0], None).any())


# B, T, H, G, k, S: decoding, a few new tokens, split keys, tiles.
SHAPES = [(2, 1, 4, 2, 8, 16), (2, 3, 4, 2, 24, 30), (1, 1, 2, 1, 16, 600), (2, 40, 2, 1, 16, 44)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "window", "gaps", "float"])
def test_attention_equals_the_masked_reference(
    kernels: ModuleType, shape: tuple[int, ...], kind: str
) -> None:
    batch, length, heads, groups, head, keys_seen = shape
    past = keys_seen - length
    q, keys = drawn(batch, length, heads, head), drawn(batch, groups, keys_seen, head, seed=1)
    values = drawn(batch, keys_seen, groups, head, seed=2).transpose(1, 2)  # not contiguous
    time = torch.arange(length, device=DEVICE)[:, None] + past
    key = torch.arange(keys_seen, device=DEVICE)
    allowed: torch.Tensor | None = (key <= time)[None, None]
    if kind == "none":
        allowed = None
    elif kind == "window":
        allowed = (allowed & (key > time - 9)).expand(batch, 1, -1, -1)
    elif kind == "gaps":
        allowed = allowed & (drawn(batch, 1, length, keys_seen, seed=3) > -0.5) | (key == 0)
    elif kind == "float":
        allowed = torch.where(
            allowed, drawn(batch, 1, length, keys_seen, seed=3), torch.finfo(torch.float32).min
        )
    for share in (0.0, 0.5, 1.0):
        mask = chosen(batch * length, share).view(batch, length)
        expected = masked_attention(q, keys, values, mask, allowed, past, head**-0.5)
        poisoned = q.masked_fill(~mask[..., None, None], torch.nan)
        assert (
            gap(kernels.attend(poisoned, keys, values, mask, allowed, past, head**-0.5), expected)
            < 1e-5
        )


def test_attention_in_half_precision(kernels: ModuleType) -> None:
    q, keys, values = (
        drawn(*shape, dtype=torch.float16)
        for shape in ((2, 40, 4, 16), (2, 2, 40, 16), (2, 2, 40, 16))
    )
    mask = chosen(80, 0.5).view(2, 40)
    expected = masked_attention(q, keys, values, mask, None, 0, 0.25)
    assert gap(kernels.attend(q, keys, values, mask, None, 0, 0.25), expected) < 5e-3


def operands(requires_grad: bool = True) -> dict[Any, tuple[Any, ...]]:
    """Small inputs of every operator."""
    x, stream, mask = drawn(6, WIDTH), drawn(6, WIDTH, seed=1), chosen(6, 0.5)
    maps, bias, scale = weights(torch.float32), drawn(INNER), drawn(6).abs()
    q, keys, values = drawn(2, 3, 4, 8), drawn(2, 2, 5, 8), drawn(2, 2, 5, 8, seed=1)
    cases: dict[Any, tuple[Any, ...]] = {
        linear_rows: (x, mask, maps[0], bias),
        swiglu_rows: (stream, x, mask, scale, *maps),
        attend_rows: (q, keys, values, mask.view(2, 3), None, 2, 0.35),
    }
    for arguments in cases.values():
        for part in arguments:
            if isinstance(part, torch.Tensor) and part.is_floating_point():
                part.requires_grad_(requires_grad)
    return cases


@pytest.mark.parametrize("op", [linear_rows, swiglu_rows, attend_rows], ids=lambda op: op._name)
def test_operator_is_registered_as_a_compiler_needs_it(op: Any) -> None:
    torch.library.opcheck(op, operands()[op])


@pytest.mark.parametrize("op", [linear_rows, swiglu_rows, attend_rows], ids=lambda op: op._name)
def test_gradients_equal_those_of_the_masked_reference(op: Any) -> None:
    references = {
        linear_rows: lambda x, mask, weight, bias: torch.where(
            mask[:, None], x @ weight.T + bias, 0.0
        ),
        swiglu_rows: masked_swiglu,
        attend_rows: masked_attention,
    }
    arguments = operands()[op]
    inputs = [part for part in arguments if isinstance(part, torch.Tensor) and part.requires_grad]
    found, expected = op(*arguments), references[op](*arguments)
    direction = drawn(*found.shape, seed=5)
    for one, other in zip(
        torch.autograd.grad((found * direction).sum(), inputs),
        torch.autograd.grad((expected * direction).sum(), inputs),
    ):
        assert float(other.abs().max()) > 1e-3
        assert gap(one, other) < 1e-4


def test_without_triton_cuda_falls_back_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ops._on_cuda.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ops._on_cuda() is plain
        assert ops._on_cuda() is plain
    ops._on_cuda.cache_clear()
    assert len(caught) == 1
    assert "Triton is not installed" in str(caught[0].message)
