"""Decompositions and solves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torch_manualgrad as mg

from ..programs import entry, path, total
from .samples import draw, gradient, matrix, vectors

linalg = torch.linalg

path(20678, 'backward of QR with mode "r"', lambda t: total(linalg.qr(vectors(t, 3, 3), "r")[1].abs()), 0.3, "rev")


@entry(89761, "gradient of solve where a vector and a batch look alike", lambda: torch.full((2, 2), 0.5))
def _() -> Tensor:
    a = 2 * torch.eye(2).expand(2, 2, 2)
    return gradient(lambda b: linalg.solve(a, b).sum(), torch.ones(2, 2))[0]


path(42216, "backward of QR of a wide matrix", lambda t: total(linalg.qr(vectors(t, 2, 4))[1].abs()), 0.3, "rev-rev")
path(28831, "derivative of cholesky_solve", lambda t: total(torch.cholesky_solve(vectors(t, 3, 1), matrix(t, seed=3).tril())),
     0.3, "rev-rev")  # fmt: skip
path(110009, "gradients of pinv and of an SVD by hand",
     lambda t: total(linalg.pinv(vectors(t, 4, 3))), 0.3, "rev-rev")  # fmt: skip


@entry(42792, "gradient of the leading columns of QR at a rank-deficient matrix", lambda: _qr_truth(), tolerance=1e-4)
def _() -> Tensor:
    return gradient(_qr_product, _deficient())[0]


def _deficient() -> Tensor:
    return torch.cat([draw(4, 2), draw(4, 2) @ draw(2, 1, seed=1)], 1)


def _qr_product(a: Tensor) -> Tensor:
    q, r = linalg.qr(a)
    return total(q[:, :2] @ r[:2, :2])


def _qr_truth() -> Tensor:
    weights = torch.arange(1.0, 9, dtype=torch.float64).reshape(4, 2).cos()
    return torch.cat([weights, torch.zeros(4, 1, dtype=torch.float64)], 1)


@entry(69532, "a rank-revealing SVD, for the backward of matrices of low rank", lambda: _of_rank_two_truth(), override=None,
       ours=lambda: gradient(lambda a: _rebuilt(mg.linalg.svd(a, rank=2)), _of_rank_two())[0])  # fmt: skip
def _() -> Tensor:
    return gradient(lambda a: _rebuilt(linalg.svd(a, full_matrices=False)), _of_rank_two())[0]


def _of_rank_two() -> Tensor:
    return torch.diag(torch.tensor([2.0, 2.0, 0.0, 0.0], dtype=torch.float64))


def _of_rank_two_truth() -> Tensor:
    truth = torch.ones(4, 4, dtype=torch.float64)
    truth[2:, 2:] = 0  # the two zero singular values take no part
    return truth


def _rebuilt(factors: Any) -> Tensor:
    u, s, vh = factors
    return (u * s @ vh).sum()
