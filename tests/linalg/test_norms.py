"""Nuclear and spectral norm: where singular values repeat, vanish, or tie."""

from __future__ import annotations

import pytest
import torch
from helpers.matrices import C128, F64, derivatives, matrix, points
from helpers.tensors import random
from helpers.thinning import in_turn, label

from torch_manualgrad.linalg import nuclear_norm, spectral_norm
from torch_manualgrad.testing import check


def tied_below_the_first(dtype):
    yield from (A for A in points(dtype) if A.dim() == 2 and not torch.equal(A, torch.eye(3, dtype=dtype)))
    yield torch.stack([matrix(3, (1, 1, 2), dtype), matrix(3, (1, 1, 3), dtype, seed=1)]).mT


@pytest.mark.parametrize("dtype, keepdim", in_turn([F64, C128], [False, True]), ids=label)
def test_norms_in_six_modes(dtype, keepdim):
    for norm, order, samples in (
        (nuclear_norm, "nuc", list(points(dtype))),
        (spectral_norm, 2, list(tied_below_the_first(dtype))),
    ):
        for A in samples:
            torch.testing.assert_close(norm(A, keepdim), torch.linalg.matrix_norm(A, order, keepdim=keepdim))
        check(lambda A, norm=norm: norm(A, keepdim), [(A,) for A in samples])


@pytest.mark.parametrize("norm", [nuclear_norm, spectral_norm])
@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (3, 3), (1, 1)], ids=str)
def test_at_zero_everything_is_zero(norm, shape):
    assert all(d.eq(0).all() for d in derivatives(norm, torch.zeros(shape, dtype=F64)))
    stock = derivatives(lambda A: torch.linalg.matrix_norm(A, "nuc" if norm is nuclear_norm else 2), torch.zeros(shape))
    assert shape == (1, 1) or not all(d.isfinite().all() for d in stock)


def test_the_nuclear_norm_without_full_rank():
    A = matrix(4, (3, 1, 0, 0))
    g, h = derivatives(nuclear_norm, A)
    W, S, Vh = torch.linalg.svd(A)
    torch.testing.assert_close(g, W[:, :2] @ Vh[:2])
    # the derivative among matrices of rank 2: along a curve of these
    L, R = W[:, :2] * S[:2].sqrt(), S[:2].sqrt().unsqueeze(-1) * Vh[:2]
    dL, dR = random(4, 2, seed=1), random(2, 4, seed=2)
    x = A.clone().requires_grad_()
    (g,) = torch.autograd.grad(nuclear_norm(x), x, create_graph=True)
    (change,) = torch.autograd.grad((g * (dL @ R + L @ dR)).sum(), x)
    step = 1e-5
    factors = []
    for sign in (1, -1):
        W, _, Vh = torch.linalg.svd((L + sign * step * dL) @ (R + sign * step * dR))
        factors.append(W[:, :2] @ Vh[:2])
    torch.testing.assert_close(change, (factors[0] - factors[1]) / (2 * step), rtol=1e-7, atol=1e-8)
    assert h.isfinite().all()


def test_the_spectral_norm_at_ties():
    A = matrix(4, (2, 2, 1))
    g, h = derivatives(spectral_norm, A)
    W, _, Vh = torch.linalg.svd(A, full_matrices=False)
    torch.testing.assert_close(g, W[:, :2] @ Vh[:2] / 2)
    assert h.isfinite().all()
    for _ in range(20):  # a subgradient
        B = random(4, 3, seed=_)
        assert torch.linalg.matrix_norm(B, 2) >= 2 + (g * (B - A)).sum() - 1e-12
    x = torch.eye(2, dtype=F64, requires_grad=True)
    (g,) = torch.autograd.grad(spectral_norm(x), x, create_graph=True)
    turn = torch.tensor([[0.0, 1], [-1, 0]], dtype=F64)  # keeps the two equal, to second order
    torch.testing.assert_close(torch.autograd.grad((g * turn).sum(), x)[0], turn / 2)


def test_large_and_tiny_matrices():
    for scale in (1e150, 1e-150, 1e200):
        for norm in (nuclear_norm, spectral_norm):
            A = matrix(3, (1, 1.5, 2))
            g, h = derivatives(norm, A)
            scaled_g, scaled_h = derivatives(norm, scale * A)
            torch.testing.assert_close(scaled_g, g)
            torch.testing.assert_close(scaled_h * scale, h)


def test_third_order_of_the_spectral_norm():
    f = spectral_norm
    A, E = matrix(4, (1, 1, 2)), random(4, 3, seed=5)

    def second(t):
        return torch.func.grad(torch.func.grad(lambda t: f(A + t * E)))(t)

    zero = torch.zeros((), dtype=F64)
    expected = (second(zero + 1e-4) - second(zero - 1e-4)) / 2e-4
    torch.testing.assert_close(torch.func.grad(second)(zero), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.func.jacfwd(second)(zero), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_single_precision(dtype):
    wide = torch.promote_types(dtype, F64)
    for f in (nuclear_norm, spectral_norm):
        for least in (1, 1e-3):  # the rounding of A is seen through the condition number
            A = matrix(3, (least, 1, 2), wide).to(dtype)
            allowed = 10 * torch.finfo(dtype).eps * 2 / least
            for single, double in zip(derivatives(f, A), derivatives(f, A.to(wide))):
                assert single.dtype == dtype
                error = (single - double).abs().max() / double.abs().max()
                assert error < allowed, (least, error)


@pytest.mark.parametrize("f", [nuclear_norm, spectral_norm])
def test_compiled(f):
    A = torch.stack([matrix(4, (1, 1, 2)), matrix(4, (1, 1, 3), seed=1)]).requires_grad_()
    found = []
    for g in (torch.compile(f, fullgraph=True, backend="aot_eager"), f):
        y = g(A)
        found.append(torch.autograd.grad((y * random(*y.shape)).sum(), A)[0])
    torch.testing.assert_close(*found)


def test_errors():
    with pytest.raises(ValueError, match="A: expected a matrix"):
        nuclear_norm(torch.ones(3))
    with pytest.raises(TypeError, match="A: expected a floating"):
        spectral_norm(torch.ones(2, 2, dtype=torch.bool))
