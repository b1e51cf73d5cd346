"""What the families of linear algebra share: parts of a matrix, and samples."""

from __future__ import annotations

import torch
from torch import Tensor

# What the kernels for the derivatives of small matrices take (csrc/linalg/limits.h), by side, device and dtype.
LARGEST = 32
_DEVICES = frozenset({"cpu", "cuda"})
_DTYPES = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})


def recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is done with these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def small(A: Tensor, side: int, in_cache: int = 0) -> bool:
    """Whether a kernel takes matrices of this larger side.

    Args:
        A: one of the matrices, or the triangle of one.
        in_cache: up to which side the CPU kernel for single real square matrices is faster than BLAS, by measurement.
    """
    if A.dtype not in _DTYPES:
        return False
    return side <= LARGEST or (
        side <= in_cache and A.is_cpu and not A.is_complex() and side == A.shape[-1] == A.shape[-2]
    )


def fused(side: int, *tensors: Tensor | None, in_cache: int = 0) -> bool:
    """Whether a kernel takes matrices of this larger side: small ones, of which nothing is recorded.

    What is recorded goes by the formula's own steps, which autograd sees through. The last tensor is a matrix, or the
    triangle of one.
    """
    A = tensors[-1]
    assert A is not None
    return A.device.type in _DEVICES and small(A, side, in_cache) and not recorded(*tensors)


def sym(X: Tensor) -> Tensor:
    """X + X^H."""
    return X + X.mH


def skew(X: Tensor) -> Tensor:
    """X - X^H."""
    return X - X.mH


def phi(X: Tensor) -> Tensor:
    """The lower triangle with half of the diagonal: phi(X) + phi(X)^H = X for a Hermitian X with a real diagonal."""
    lower = X.tril()
    return lower - 0.5 * torch.diag_embed(X.diagonal(dim1=-2, dim2=-1))


def leading(X: Tensor, *, rows: int | None = None, columns: int | None = None) -> Tensor:
    """The first rows and columns. Not ``X[..., :columns]``: where these are all, it is an alias, which PyTorch's vmap of
    batched gradients refuses."""
    X = X if rows is None else X.narrow(-2, 0, rows)
    return X if columns is None else X.narrow(-1, 0, columns)


def magnitude(A: Tensor) -> Tensor:
    """The largest modulus in each matrix, ``(*, 1, 1)``, 1 where that is zero: a constant to every derivative."""
    if A.numel() == 0:
        return torch.ones((), dtype=A.dtype, device=A.device).abs()
    largest = A.detach().abs().amax((-2, -1), keepdim=True)
    return torch.where(largest > 0, largest, 1)


def eye_like(X: Tensor) -> Tensor:
    """The identity of the size of the last dim of X, in its dtype and on its device."""
    return torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)


def random(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """Normal entries, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, generator=generator).to(device)


def random_conditioned(
    *shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0, least: float = 1.0
) -> Tensor:
    """Random matrices with the well separated singular values least, least + 0.7, ...: off every kink."""
    X = random(*shape, dtype=dtype, seed=seed)
    U, S, Vh = torch.linalg.svd(X, full_matrices=False)
    S = least + 0.7 * torch.arange(S.shape[-1] - 1, -1, -1, dtype=S.dtype).expand(S.shape)
    return ((U * S.unsqueeze(-2)) @ Vh).to(device)


def random_definite(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """Hermitian positive definite matrices with well separated eigenvalues."""
    X = random_conditioned(*shape, dtype=dtype, seed=seed)
    return (X @ X.mH).to(device)
