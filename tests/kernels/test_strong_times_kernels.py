"""The compiled strong_times against its formula, on every device that has it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torch_manualgrad.core.internals import FakeTensorMode
from torch_manualgrad.derivatives.elementwise.strong_times import strong_times

REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
SPECIAL = torch.tensor([0.0, -0.0, 1.5, -2.0, math.inf, -math.inf, math.nan, 1e300])


def with_zeros(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    x = torch.randn(shape, dtype=torch.complex128, generator=torch.Generator().manual_seed(seed))
    x = torch.where(x.real.abs() < 0.3, 0, x)  # zeros among them
    return (x if dtype.is_complex else x.real).to(device, dtype)


def check(factor: Tensor, other: Tensor) -> None:
    found, expected = strong_times(factor, other), strong_times.reference(factor, other)
    # float32 in between rounds differently from half precision
    torch.testing.assert_close(found, expected, equal_nan=True)
    if not found.numel():
        return
    assert found.stride() == expected.stride()
    with FakeTensorMode() as mode:
        fake = strong_times.op(mode.from_tensor(factor), mode.from_tensor(other))
    assert (fake.shape, fake.dtype, fake.stride()) == (found.shape, found.dtype, found.stride())


@pytest.mark.parametrize("dtype", REAL + COMPLEX, ids=str)
def test_shapes_and_strides(dtype, device):
    a = with_zeros(3, 4, 5, dtype=dtype, device=device)
    b = with_zeros(5, 4, 3, dtype=dtype, device=device, seed=1).permute(2, 1, 0)
    for factor, other in (
        (a, a.flip(0)), (b, b), (a, b), (b, a), (a, b[0]), (a[0], b), (a[:, :1], b[:1]), (a[:0], b[:0]),
        (a[0, 0, 0], b), (a, b[0, 0, 0]), (a[0, 0, 0], b[0, 0, 0]), (a[..., ::2], b[..., ::2]),
        (a.expand(2, 3, 4, 5), b), (a[:, :, :1].expand(3, 4, 5), b),
    ):  # fmt: skip
        check(factor, other)
    large = with_zeros(3, 50_000, dtype=dtype, device=device)
    check(large, large.roll(1, -1))
    check(large, large[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_special_values(dtype, device):
    """Bitwise: 0 where either is, and the product elsewhere."""
    x = SPECIAL.to(device, dtype)
    found = strong_times(x[:, None], x)
    expected = torch.where((x[:, None] == 0) | (x == 0), 0, x[:, None] * x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    bad = torch.complex(x.float(), x.float().flip(0))
    zero = torch.zeros_like(bad)
    assert (strong_times(bad, zero) == 0).all() and (strong_times(zero, bad) == 0).all()


def test_dtypes_promote(device):
    whole = torch.tensor([0, 2], device=device)
    for factor, other in (
        (whole, torch.tensor([math.nan, 1.5], device=device)),
        (torch.tensor([0.5, 1.5], device=device).half(), torch.tensor([1.5, 2.5], device=device).double()),
        (torch.tensor([0.5, 1.5], device=device), torch.tensor([1.5j, 2.5], device=device)),
        (torch.tensor([0.5, 1.5], device=device), torch.tensor(2.5, dtype=torch.float64, device=device)),
        (whole, whole),
        (whole > 0, whole),
        (torch.tensor([0.5, 1.5], device=device), torch.tensor(2.5)),
    ):
        check(factor, other)
    z = torch.tensor([1 + 2j, 0j], device=device)
    check(z.conj(), z)  # a lazy conjugate


def test_shapes_that_do_not_fit(device):
    with pytest.raises(RuntimeError, match=r"does not broadcast|must match"):
        strong_times(torch.ones(2, device=device), torch.ones(3, device=device))


def test_a_batch_keeps_the_derivative_at_zero():
    """Under vmap it stays the product that it is, and is not made of others."""
    x = torch.tensor([[0.0, 2.0], [1.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([3.0, 5.0], dtype=torch.float64)
    slope = torch.func.grad(lambda x: torch.func.vmap(strong_times, (0, None))(x, y).sum())(x)
    torch.testing.assert_close(slope, y.expand(2, 2))
    torch.testing.assert_close(torch.func.vmap(strong_times, (1, 0))(x, y), x.T * y[:, None])
