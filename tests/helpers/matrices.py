"""Matrices of given singular values, and derivatives of functions of them."""

from __future__ import annotations

import torch

from helpers.tensors import random

F64, C128 = torch.float64, torch.complex128


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


def weights(n, seed=7, dtype=F64):
    """Real weights, of a loss of a square matrix."""
    return random(n, n, seed=seed).to(dtype)


def integers(n, rank, dtype=torch.float64, seed=0):
    """A matrix of small integers of this rank: in exact arithmetic, and mostly with exact zeros among its pivots."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(-3, 4, (2, n, n), generator=generator).double() for _ in range(2)]
    left, right = (torch.complex(*p) if dtype.is_complex else p[0] for p in parts)
    return left[:, :rank] @ right[:rank]


def cofactors(A):
    """adj(A)^T minor by minor."""
    n = A.shape[-1]
    keep = [[k for k in range(n) if k != i] for i in range(n)]
    rows = [[(-1) ** (i + j) * torch.linalg.det(A[keep[i]][:, keep[j]]) for j in range(n)] for i in range(n)]
    return torch.stack([torch.stack(r) for r in rows])
