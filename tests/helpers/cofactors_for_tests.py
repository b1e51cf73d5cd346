"""Matrices of small integers of any rank, and the cofactors of a matrix by their definition."""

import torch


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
