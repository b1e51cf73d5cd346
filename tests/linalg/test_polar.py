"""Polar factors, Procrustes, Kabsch: where singular values repeat or vanish."""

from __future__ import annotations

import pytest
import torch
from helpers.matrices import C128, F64, derivatives, matrix, points
from helpers.tensors import random
from helpers.thinning import in_turn, label

import torch_manualgrad as mg
from torch_manualgrad.linalg import kabsch, nuclear_norm, polar, procrustes, spectral_norm
from torch_manualgrad.testing import check


@pytest.mark.parametrize("side, dtype", in_turn(["right", "left"], [F64, C128]), ids=label)
def test_polar_in_six_modes(side, dtype):
    for A in points(dtype):
        U, P = polar(A, side)
        torch.testing.assert_close(U @ P if side == "right" else P @ U, A)
        torch.testing.assert_close(P, P.mH, rtol=0, atol=0)
        Q = U if A.shape[-2] >= A.shape[-1] else U.mH
        torch.testing.assert_close(Q.mH @ Q, torch.eye(3, dtype=dtype).expand_as(Q.mH @ Q))
    check(lambda A: tuple(polar(A, side)), [(A,) for A in points(dtype)])


@pytest.mark.parametrize("dtype", [F64, C128])
def test_procrustes_in_six_modes(dtype):
    A, B = random(5, 3, dtype=dtype), random(2, 5, 3, dtype=dtype, seed=1)
    check(procrustes, [(A, B), (torch.eye(3, dtype=dtype), torch.eye(3, dtype=dtype))])
    R = procrustes(A, B)
    torch.testing.assert_close(R, polar(A.mH @ B).U)


@pytest.mark.parametrize("values", [(1, 1, 1), (3, 2, 0), (2, 2, -1), (2, 1.5, 1.2)], ids=str)
def test_rotations_in_six_modes(values):
    """Also where the determinant changes its sign, and where the two largest singular values are equal."""
    M = torch.diag(torch.tensor(values, dtype=F64))
    Q = torch.linalg.qr(random(3, 3))[0]
    check(lambda M: procrustes(Q, Q @ M, rotation=True), [(M,)])
    R = procrustes(Q, Q @ M, rotation=True)
    torch.testing.assert_close(torch.linalg.det(R), torch.ones((), dtype=F64))
    torch.testing.assert_close(R, torch.eye(3, dtype=F64))


def test_the_rotation_is_the_best_one():
    A, B = random(6, 3), random(6, 3, seed=1)
    R = procrustes(A, B, rotation=True)
    others = torch.linalg.qr(random(500, 3, 3, seed=2))[0]
    others = others * torch.linalg.det(others).sign()[:, None, None]
    near = R @ torch.linalg.matrix_exp(0.01 * (others - others.mT))
    for candidates in (others, near):
        assert ((A @ candidates - B).square().sum((-2, -1)) >= (A @ R - B).square().sum()).all()


TETRAHEDRON = torch.tensor([[1, 1, 1], [-1, -1, 1], [-1, 1, -1], [1, -1, -1]], dtype=F64)


def test_kabsch_in_six_modes():
    moved = TETRAHEDRON.clone()
    moved[0, 0] += 0.1
    P, weights = random(6, 3), random(6).abs() + 0.1
    samples = [
        (TETRAHEDRON, moved),  # the covariance of the first is a multiple of I
        (P, P + 0.3 * random(6, 3, seed=1)),
        (P, random(2, 6, 3, seed=1), weights),
        (P[:, :2], random(6, 2, seed=1)),
        (P * torch.tensor([1.0, 1, 0], dtype=F64), P),  # in a plane
    ]
    check(lambda *a: tuple(kabsch(*a)), samples)


def test_kabsch_recovers_a_motion():
    P, weights = random(7, 3), torch.rand(7, dtype=F64)
    R, t = procrustes(random(4, 3, seed=2), random(4, 3, seed=3), rotation=True), random(3, seed=4)
    found = kabsch(P, P @ R.mT + t, weights)
    torch.testing.assert_close(found.rotation, R)
    torch.testing.assert_close(found.translation, t)
    assert found.rmsd < 1e-14
    distance = P.clone()
    distance[0] += 1  # a weight of zero takes a point out
    weights[0] = 0
    torch.testing.assert_close(kabsch(P, distance @ R.mT + t, weights).rotation, R)
    # a mirror image is no motion
    assert torch.linalg.det(kabsch(P, -P).rotation) > 0 and kabsch(P, -P).rmsd > 0.1


def test_kabsch_of_points_with_themselves():
    """The rmsd is 0 there, and it and its derivatives are; R is smooth, and stock's svd is nan or noise."""
    Q = TETRAHEDRON.clone().requires_grad_()
    (g,) = torch.autograd.grad(kabsch(TETRAHEDRON, Q).rmsd, Q, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), Q)
    assert g.eq(0).all() and h.eq(0).all()

    def by_svd(Q):
        U, _, Vh = torch.linalg.svd(Q.mT @ TETRAHEDRON)
        return U @ Vh

    G = random(3, 3)
    (stock,) = torch.autograd.grad((by_svd(Q) * G).sum(), Q)
    (ours,) = torch.autograd.grad((kabsch(TETRAHEDRON, Q).rotation * G).sum(), Q)
    assert stock.isnan().any()
    # Q^T P = 4 I: with R = exp(X), X = (Z - Z^T) / 8 for Z = dQ^T P
    torch.testing.assert_close(ours, TETRAHEDRON @ (G - G.mT).mT / 8)


@pytest.mark.parametrize("dtype", [F64, C128])
def test_the_operators_by_themselves(dtype):
    """With only one of their arguments differentiated, too."""
    C = random(3, 3, dtype=dtype, seed=4)

    def decomposed(P):
        P = (P + P.mH) / 2
        L, V = torch.linalg.eigh(P.detach())
        return P, L.flip(-1), V.flip(-1)

    P = random(3, 3, dtype=dtype)
    P = P @ P.mH + torch.eye(3)
    X = mg.ops.skew_lyapunov(*decomposed(P), C)
    torch.testing.assert_close(P @ X + X @ P, (C - C.mH) / 2)
    check(lambda P: mg.ops.skew_lyapunov(*decomposed(P), C), [(P,)])
    check(lambda P, C: mg.ops.skew_lyapunov(*decomposed(P), C), [(P, C)])
    check(lambda P: mg.ops.hermitian_inverse(*decomposed(P)), [(P,)])


# -- what is not determined ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("shape", [(3, 3), (4, 3), (3, 4)], ids=str)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_polar_without_full_rank_is_finite(shape, rank, dtype):
    m, n = shape
    A = random(m, rank, dtype=dtype) @ random(rank, n, dtype=dtype, seed=1)
    U, P = polar(A)
    torch.testing.assert_close(U @ P, A)
    G = random(m, n, dtype=dtype, seed=2)
    for d in derivatives(lambda A: (polar(A).U * G).sum().real, A):
        assert d.isfinite().all() and d.abs().max() < 1e3


def test_a_square_real_matrix_of_rank_one_less():
    """The pairs that the derivative divides by are s_i + 0 > 0: it is that of the branch, here by finite differences."""
    A, E = matrix(3, (2, 1, 0)), random(3, 3, seed=1)
    W, S, Vh = torch.linalg.svd(A)
    A = (W * torch.tensor([2.0, 1, 0], dtype=F64)) @ Vh
    sign = torch.linalg.det(polar(A).U).round()

    def branch(A):
        return procrustes(torch.eye(3, dtype=F64), A * torch.tensor([1.0, 1, sign], dtype=F64), rotation=True)

    _, found = torch.func.jvp(lambda A: polar(A).U * torch.tensor([1.0, 1, sign], dtype=F64), (A,), (E,))
    expected = (branch(A + 1e-5 * E) - branch(A - 1e-5 * E)) / 2e-5
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (0, 3), (1, 1), (2, 0, 0), (0, 3, 2), (2, 0, 3)], ids=str)
def test_empty_and_one_by_one(shape):
    def loss(A):
        (U, P), (_, left) = polar(A), polar(A, "left")
        return U.sum() + P.square().sum() + left.square().sum() + nuclear_norm(A).sum() + spectral_norm(A).sum()

    A = torch.ones(shape, dtype=F64, requires_grad=True)
    (g,) = torch.autograd.grad(loss(A), A, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), A)
    assert g.shape == h.shape == A.shape and h.isfinite().all()


# -- higher orders, other dtypes, the compiler -----------------------------------------------------------------------


@pytest.mark.parametrize("values", [(1, 1, 1), (1, 1, 2), (1, 1.5, 2)], ids=str)
@pytest.mark.parametrize("m", [3, 4])
def test_third_order_of_the_polar_factor(m, values):
    """Leibniz on U^H U = I and on U P = A: third derivatives along a line are 0."""
    A, E = matrix(m, values), random(m, 3, seed=5)

    def derivative(order, t):
        if order == 0:
            return torch.cat(polar(A + t * E))
        return torch.func.jvp(lambda t: derivative(order - 1, t), (t,), (torch.ones_like(t),))[1]

    both = [derivative(k, torch.zeros((), dtype=F64)) for k in range(4)]
    U, P = [b[:m] for b in both], [b[m:] for b in both]
    for left, right in (([u.mT for u in U], U), (U, P)):
        third = left[0] @ right[3] + left[3] @ right[0] + 3 * (left[1] @ right[2] + left[2] @ right[1])
        torch.testing.assert_close(third, torch.zeros_like(third), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_single_precision(dtype):
    wide = torch.promote_types(dtype, F64)
    for f in (
        lambda A: (polar(A).U * G.to(A.dtype)).sum().real,
        lambda A: (polar(A).P * G.to(A.dtype)).sum().real,
    ):
        for least in (1, 1e-3):  # the rounding of A is seen through the condition number
            A, G = matrix(3, (least, 1, 2), wide).to(dtype), random(3, 3, dtype=wide, seed=3)
            allowed = 10 * torch.finfo(dtype).eps * 2 / least
            for single, double in zip(derivatives(f, A), derivatives(f, A.to(wide))):
                assert single.dtype == dtype
                error = (single - double).abs().max() / double.abs().max()
                assert error < allowed, (least, error)


@pytest.mark.parametrize("f", [lambda A: polar(A).U, lambda A: kabsch(A, A.flip(-1)).rotation])
def test_compiled(f):
    A = torch.stack([matrix(4, (1, 1, 2)), matrix(4, (1, 1, 3), seed=1)]).requires_grad_()
    found = []
    for g in (torch.compile(f, fullgraph=True, backend="aot_eager"), f):
        y = g(A)
        found.append(torch.autograd.grad((y * random(*y.shape)).sum(), A)[0])
    torch.testing.assert_close(*found)


def test_a_batch_under_vmap_with_one_of_two_batched():
    A, B = random(5, 3), random(4, 5, 3, seed=1)
    loss = lambda A, B: procrustes(A, B)[0, 1] + nuclear_norm(A.mT @ B)  # noqa: E731
    found = torch.func.vmap(torch.func.hessian(loss), in_dims=(None, 0))(A, B)
    for k in range(4):
        torch.testing.assert_close(found[k], torch.func.hessian(loss)(A, B[k]))


def test_under_override_nothing_changes():
    A = matrix(4, (1, 1, 2)).requires_grad_()
    (expected,) = torch.autograd.grad(polar(A).U[0, 0], A)
    with mg.override("*"):
        (found,) = torch.autograd.grad(polar(A).U[0, 0], A)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: polar(torch.ones(3)), ValueError, "A: expected a matrix"),
        (lambda: polar(torch.ones(3, 2), side="up"), ValueError, "side: expected 'right' or 'left', got 'up'"),
        (lambda: polar(torch.ones(3, 2, dtype=torch.int64)), TypeError, "A: expected a floating point"),
        (lambda: procrustes(torch.ones(3, 2), torch.ones(2, 2)), ValueError, r"B: expected the size of A, \[3, 2\]"),
        (
            lambda: procrustes(torch.ones(3, 2), torch.ones(3, 2, dtype=C128), rotation=True),
            TypeError,
            "B: expected the dtype of A, torch.float32, got torch.complex128",
        ),
        (
            lambda: procrustes(torch.ones(3, 2, dtype=C128), torch.ones(3, 2, dtype=C128), rotation=True),
            TypeError,
            "rotation: expected False for complex A and B, got True",
        ),
        (
            lambda: kabsch(torch.ones(3, 2), torch.ones(4, 2)),
            ValueError,
            r"Q: expected the size of P, \[3, 2\], got \[4, 2\]",
        ),
        (lambda: kabsch(torch.ones(3, 2, dtype=C128), torch.ones(3, 2)), TypeError, "P: expected real points"),
        (lambda: kabsch(torch.ones(3, 2), torch.ones(3, 2).double()), TypeError, "Q: expected the dtype of P"),
        (
            lambda: kabsch(torch.ones(2, 3, 2), torch.ones(3, 3, 2)),
            ValueError,
            r"Q: its batch \[3\] does not broadcast",
        ),
        (lambda: kabsch(torch.ones(3, 2), torch.ones(3, 2), torch.ones(2)), ValueError, "weights: expected one for"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("on_meta", ["A", "B", "P", "Q", "weights"])
def test_all_arguments_are_on_one_device(on_meta):
    """Otherwise a result may be memory that nobody has written, as of a product with a tensor on meta."""
    given = {"A": (3, 2), "B": (3, 2)} if on_meta in "AB" else {"P": (3, 2), "Q": (3, 2), "weights": (3,)}
    given = {name: torch.ones(shape, device="meta" if name == on_meta else "cpu") for name, shape in given.items()}
    with pytest.raises(ValueError, match=r"\w+: expected a tensor on \w+, where [AP] is, got one on"):
        (procrustes if on_meta in "AB" else kabsch)(**given)


# -- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(
    "weights, message",
    [
        (
            [1.0, -0.5, 1.0, 1.0],
            r"weights: expected numbers that are finite and not negative, got \[1.0, -0.5, 1.0, 1.0\]",
        ),
        ([1.0, float("nan"), 1.0, 1.0], r"weights: .* finite and not negative, got \[1.0, nan"),
        ([1.0, float("inf"), 1.0, 1.0], r"weights: .* finite and not negative, got \[1.0, inf"),
        ([0.0, 0.0, 0.0, 0.0], r"weights: expected one that is not 0, got \[0.0, 0.0, 0.0, 0.0\]"),
        ([[1.0, 1, 1, 1], [0, 0, 0, 0]], r"weights: expected one that is not 0, got \[\[1.0"),
        ([1j, 1, 1, 1], "weights: expected real numbers, got torch.complex64"),
        ([[1.0, 1, 1, 1]] * 3, r"weights: its batch \[3\] does not broadcast with that of P, \[2\]"),
        (1.0, r"weights: expected one for each of 4 points, got \[\]"),
    ],
)
def test_weights_that_are_refused(weights, message, dtype):
    P = torch.stack([TETRAHEDRON, TETRAHEDRON]).to(dtype)
    weights = torch.tensor(weights)
    with pytest.raises(TypeError if weights.is_complex() else ValueError, match=message):
        kabsch(P, P, weights if weights.is_complex() else weights.to(dtype))


def test_weights_of_other_kinds():
    expected = kabsch(TETRAHEDRON, random(4, 3), torch.tensor([1.0, 2, 0, 1], dtype=F64))
    for weights in (torch.tensor([1, 2, 0, 1]), torch.tensor([1.0, 2, 0, 1])):
        for found, value in zip(kabsch(TETRAHEDRON, random(4, 3), weights), expected):
            torch.testing.assert_close(found, value, rtol=0, atol=0)


def test_weights_that_cannot_be_read_give_nan():
    """Which the singular value decomposition refuses."""
    moved = random(4, 3)
    weighted = torch.func.vmap(lambda w: kabsch(TETRAHEDRON, moved, w).rmsd)
    good = torch.tensor([[1.0, 1, 1, 1], [1, 0, 1, 1]], dtype=F64)
    expected = [kabsch(TETRAHEDRON, moved, w).rmsd for w in good]
    torch.testing.assert_close(weighted(good), torch.stack(expected))
    for bad in ([1.0, -1, 1, 1], [0.0, 0, 0, 0]):
        with pytest.raises(torch.linalg.LinAlgError, match="non-finite"):
            weighted(torch.tensor([bad], dtype=F64))
