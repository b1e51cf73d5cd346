"""Linear algebra."""

import torch
from helpers.tensors import random
from torch.func import grad

from claims import F64, own, point, tangent

SINGULAR = torch.tensor([[4.0, 2.0], [2.0, 1.0]], dtype=F64)
EYE = torch.eye(2, dtype=F64)


def rebuilt_by_svd(A):
    U, S, Vh = torch.linalg.svd(A)
    return ((U * S) @ Vh)[0].sum()


def rebuilt_by_eigh(A):
    L, V = torch.linalg.eigh(A)
    return ((V * L) @ V.mH).trace()


def rebuilt_by_eig(A):
    L, V = torch.linalg.eig(A)
    return ((V * L) @ torch.linalg.inv(V)).real.trace()


def dropped_by_rcond():
    """Least squares where the smallest singular value counts as zero: the gradient is that at rank 1."""
    A = torch.tensor([[2.0, 0.0], [0.0, 1e-12], [0.0, 0.0]], dtype=F64)
    B = torch.tensor([[1.0], [1.0], [1.0]], dtype=F64)
    return grad(lambda A: torch.linalg.lstsq(A, B, rcond=1e-3, driver="gelsd").solution[1, 0])(A)[:2, 1]


def with_large_cotangent():
    """The error, in units of the precision, where it is above 10."""
    A, G = random(4, 4), 1e8 * random(4, 4, seed=1)
    (found,) = torch.autograd.grad(torch.linalg.matrix_exp(A := A.float().requires_grad_()), A, G.float())
    exact = torch.linalg.matrix_exp(torch.cat([torch.cat([A.mT, G.float()], 1), torch.cat([0 * A, A.mT], 1)]).double())
    error = (found.double() - exact[:4, 4:]).norm() / exact[:4, 4:].norm() / torch.finfo(torch.float32).eps
    return error.clamp(min=10)


def zero_column(A):
    return torch.linalg.qr(A).R[0].sum()


A_ZERO_COLUMN = torch.tensor([[3.0, 0.0], [4.0, 0.0]], dtype=F64)
FULL = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)  # of which the lower triangle is read


def solved_by_a_full_factor(L):
    """At L = I the derivative is the lower triangle of -(w B^T + B w^T); PyTorch's reads the other triangle."""
    w, B = FULL.new_tensor([[1.0], [2.0]]), FULL.new_tensor([[3.0], [4.0]])
    return (w * torch.cholesky_solve(B, L)).sum()


PROOFS = {
    "aten::_linalg_solve_ex": {"values": [own("fwd-fwd")]},
    "aten::linalg_pinv.atol_rtol_tensor": {"values": [own("rev")]},
    "aten::triangular_solve": {"values": [own("fwd-rev")]},
    "aten::cholesky": {"missing": [own("fwd")]},
    "aten::geqrf": {"missing": [own("rev"), own("fwd")]},
    "aten::cholesky_inverse": {"values": [own("fwd-fwd")]},
    "aten::cholesky_solve": {"values": [point(lambda: grad(solved_by_a_full_factor)(FULL), [[-6.0, 0.0], [-10.0, -16.0]])]},
    "aten::_linalg_det": {
        "values": [own("fwd-fwd"), point(lambda: grad(torch.linalg.det)(SINGULAR), [[1.0, -2.0], [-2.0, 4.0]])]
    },
    "aten::_linalg_slogdet": {"values": [own("fwd-fwd")]},
    "aten::_linalg_eigh": {"values": [own("rev-fwd"), point(lambda: grad(rebuilt_by_eigh)(EYE), EYE)]},
    "aten::linalg_eig": {"values": [own("rev-fwd"), point(lambda: grad(rebuilt_by_eig)(EYE), EYE)]},
    "aten::linalg_householder_product": {"values": [own("fwd-fwd")]},
    "aten::ormqr": {"missing": [own("fwd")]},
    "aten::linalg_lstsq": {"values": [point(dropped_by_rcond, [0.25, 0.0])]},
    "aten::linalg_lu": {
        "values": [point(lambda: grad(lambda A: torch.linalg.lu(A)[2][0].sum())(SINGULAR), [[1.0, 1.0], [0.0, 0.0]])]
    },
    "aten::linalg_lu_factor_ex": {
        "values": [
            point(lambda: grad(lambda A: torch.linalg.lu_factor_ex(A)[0][0].sum())(SINGULAR), [[1.0, 1.0], [0.0, 0.0]])
        ]
    },
    "aten::linalg_lu_solve": {"missing": [own("fwd-rev", torch.complex128)]},
    "aten::_trilinear": {"missing": [own("rev", torch.complex128)]},
    "aten::_grouped_mm": {"missing": [own("fwd")]},
    "aten::linalg_matrix_exp": {"values": [point(with_large_cotangent, 10.0)]},
    "aten::linalg_matrix_sqrth": {"values": [own("fwd-fwd")]},
    "aten::linalg_polar": {"values": [own("fwd-fwd")]},
    "aten::linalg_qr": {
        "values": [point(lambda: grad(zero_column)(A_ZERO_COLUMN)[1, 1], -0.8)],
        "missing": tangent(lambda A: torch.linalg.qr(A, "r").R, 3, 2),
    },
    "aten::_linalg_svd": {"values": [point(lambda: grad(rebuilt_by_svd)(EYE), [[1.0, 1.0], [0.0, 0.0]])]},
}  # fmt: skip
