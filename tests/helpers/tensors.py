"""Random tensors, and comparisons of tensors."""

import torch
from torch import Tensor


def random(
    *shape: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu", seed: int = 0
) -> Tensor:
    """Normally distributed numbers, the same for the same seed."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed), device="cpu").to(device)


def rounded(
    *shape: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu", seed: int = 0
) -> Tensor:
    """The numbers of `random` in double precision, rounded to the dtype."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return random(*shape, dtype=wide, seed=seed).to(device, dtype)


def seeded_by_shape(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers that differ between shapes."""
    return random(*shape, dtype=dtype, seed=sum(shape))


def same(actual: object, expected: object, **options: object) -> None:
    """`torch.testing.assert_close`, with its tolerances unless others are given."""
    torch.testing.assert_close(actual, expected, **options)


def close(actual: object, expected: object, rtol: float = 1e-9, **options: object) -> None:
    """Fails unless both agree to `rtol`, absolutely and relatively."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=options.pop("atol", rtol), **options)


def is_dense_differentiable(x: object) -> bool:
    """Whether this is a dense tensor of real or complex numbers. A sparse tensor is held constant."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) and x.layout is torch.strided
