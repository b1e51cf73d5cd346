"""QR factorizations whose Q is kept as reflectors."""

import pytest
import torch
from helpers.tensors import random

import torch_manualgrad as mg

F64 = torch.float64


def by_geqrf(A):
    a, tau = torch.geqrf(A)
    return torch.linalg.householder_product(a[..., : tau.shape[-1]], tau), a[..., : tau.shape[-1], :].triu()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(4, 4), (2, 5, 3), (3, 5)], ids=str)
def test_the_factors_have_the_derivatives_of_qr(shape, dtype):
    A, t = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    g = [random(*x.shape, dtype=dtype, seed=2) for x in torch.linalg.qr(A)]
    with mg.override():
        found, expected = (
            (torch.func.jvp(f, (A,), (t,))[1], torch.func.vjp(f, A)[1](tuple(g)))
            for f in (by_geqrf, lambda A: tuple(torch.linalg.qr(A)))
        )
    torch.testing.assert_close(found, expected)


def test_where_a_column_has_no_reflector():
    """As it is zero below the diagonal; close by it has one, so that nothing finite is its tangent."""
    A = torch.tensor([[2.0, 1.0, 0.5], [0.0, 1.0, 3.0], [0.0, 2.0, 1.0]], dtype=F64)
    assert torch.geqrf(A)[1][0] == 0
    with mg.override():
        _, (a_t, _) = torch.func.jvp(torch.geqrf, (A,), (random(3, 3),))
    assert not a_t[1:, 0].isfinite().any()


def test_a_matrix_without_full_rank():
    """The tangents of reflectors of rounding errors are nan, or there is a warning, as for QR."""
    A = random(4, 1) @ random(1, 3, seed=1)
    with mg.override(), pytest.warns(mg.linalg.GaugeWarning, match="without full rank"):
        _, (a_t, tau_t) = torch.func.jvp(torch.geqrf, (A,), (random(4, 3, seed=2),))
    assert a_t[0].isfinite().all() and tau_t[0].isfinite()


def test_the_last_reflector_of_a_square_matrix():
    """It is none: its tau is 0 and stays 0, and its row of R has a derivative."""
    A = random(3, 3)
    with mg.override():
        (_, tau), (a_t, tau_t) = torch.func.jvp(torch.geqrf, (A,), (random(3, 3, seed=1),))
    assert tau[2] == 0 and tau_t[2].abs() < 1e-12 and a_t.isfinite().all()
