"""Matrices of given singular values, and derivatives of functions of them."""

from __future__ import annotations

import torch

F64, C128 = torch.float64, torch.complex128


def random(*shape, dtype=F64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def matrix(m, values, dtype=F64, seed=0):
    """(m, n) with these singular values."""
    n = len(values)
    U, V = (torch.linalg.qr(random(k, n, dtype=dtype, seed=seed + k))[0] for k in (m, n))
    return (U * torch.tensor(values, dtype=dtype)) @ V.mH


def points(dtype):
    close = (1, 1 + 1e-9, 2)
    yield torch.eye(3, dtype=dtype)
    yield matrix(3, (1, 1, 2), dtype)
    yield matrix(3, close, dtype)
    yield matrix(3, (0.5, 1.2, 2), dtype)
    yield matrix(5, (1, 1, 2), dtype)
    yield matrix(5, close, dtype)
    yield matrix(5, (1, 1, 2), dtype).mH.resolve_conj()
    yield torch.stack([matrix(3, (1, 1, 2), dtype), matrix(3, (1, 1, 1), dtype, seed=1)])


def derivatives(f, A):
    """First derivative, and the second in the direction of fixed random numbers."""
    A = A.clone().requires_grad_()
    E = random(*A.shape, dtype=torch.promote_types(A.dtype, F64), seed=9).to(A.dtype)
    (g,) = torch.autograd.grad(f(A), A, create_graph=True)
    (h,) = torch.autograd.grad((g * E).sum().real, A)
    return g.detach(), h
