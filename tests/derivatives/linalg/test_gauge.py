"""A loss, or a direction, that depends on the choice of a basis or of a phase, and so has no derivative."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers.matrices import weights

import torch_manualgrad as mg
from torch_manualgrad.core.override import compiled_calls
from torch_manualgrad.linalg import Degeneracy, GaugeError, GaugeWarning


@pytest.mark.parametrize("decompose", [mg.linalg.svd, mg.linalg.eigh])
def test_gauge(decompose):
    def grad(**options):
        x = torch.diag(torch.tensor([1.0, 1.0, 3.0], dtype=torch.float64)).requires_grad_()
        V = decompose(x, **options)[1 if decompose is mg.linalg.eigh else 0]
        return torch.autograd.grad((weights(3) * V).sum(), x)[0]

    with pytest.warns(GaugeWarning, match="choice of basis"):
        kept = grad()
    assert kept.isfinite().all()
    with pytest.raises(GaugeError, match="choice of basis"):
        grad(gauge="error")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(grad(gauge="ignore"), kept)
        broad = grad(degeneracy=Degeneracy(broadening=1e-2))
    assert broad.isfinite().all() and broad.abs().max() < 1e3


@pytest.mark.skipif(not compiled_calls.loaded(), reason="no library of calls for this torch")
@pytest.mark.parametrize("n", [3, 40])
@pytest.mark.parametrize(
    "decompose", [lambda A: torch.linalg.svd(A, full_matrices=False).U, lambda A: torch.linalg.eigh(A).eigenvectors]
)
def test_gauge_dependence_is_reported_by_calls_without_python(decompose, n):
    """And computed once."""
    A = torch.diag(torch.arange(n).div(2, rounding_mode="floor").double()).requires_grad_()
    with mg.override():
        V = decompose(A)
        before = compiled_calls.counts()
        with pytest.warns(GaugeWarning, match="choice of basis") as found:
            (grad,) = torch.autograd.grad((weights(n) * V).sum(), A)
        after = compiled_calls.counts()
        assert len(found) == 1
        assert (after.compiled - before.compiled, after.python - before.python) == (1, 0)
        with compiled_calls.in_python(), pytest.warns(GaugeWarning, match="choice of basis"):
            V = decompose(A)
            assert torch.equal(torch.autograd.grad((weights(n) * V).sum(), A)[0], grad)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            V = decompose(A)
            with pytest.raises(GaugeWarning):
                torch.autograd.grad((weights(n) * V).sum(), A)


def test_gauge_of_a_phase():
    A = torch.randn(3, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with pytest.raises(GaugeError, match="phase"):
        mg.linalg.svd(A, gauge="error").U[0, 0].imag.backward()
    U, S, Vh = mg.linalg.svd(A, full_matrices=False, gauge="error")
    torch.autograd.grad((U[:, :1] @ Vh[:1]).real.sum(), A)


def of_one_vector(A, options):
    """Of A with two equal values, a loss of one of their vectors."""
    return (mg.linalg.svd(A, **options).U * weights(3)).sum()


WAYS = {
    "once": lambda f, A: torch.autograd.grad(f(A), A),
    "to differentiate again": lambda f, A: torch.autograd.grad(f(A), A, create_graph=True),
    "grad": lambda f, A: torch.func.grad(f)(A.detach()),
    "hessian": lambda f, A: torch.func.grad(lambda A: torch.func.grad(f)(A).sum())(A.detach()),
    "tangent": lambda f, A: torch.func.jvp(f, (A.detach(),), (weights(3, 1),)),
    "compiled": lambda f, A: torch.autograd.grad(torch.compile(f, backend="aot_eager")(A), A),
}


@pytest.mark.parametrize("way", WAYS)
def test_reported_whatever_way_it_is_differentiated(way):
    A = torch.diag(torch.tensor([1.0, 1.0, 3.0], dtype=torch.float64)).requires_grad_()
    with pytest.warns(GaugeWarning, match="choice of basis"):
        WAYS[way](lambda A: of_one_vector(A, {}), A)
    with pytest.raises(GaugeError, match="choice of basis"):
        WAYS[way](lambda A: of_one_vector(A, {"gauge": "error"}), A)


FORMULAS = {
    "svd_backward": lambda X, S: (X, None, X, X, S, X),
    "linalg_svd_jvp": lambda X, S: (X, X, S, X),
    "linalg_eigh_backward": lambda X, S: (None, X, S, X),
    "linalg_eigh_jvp": lambda X, S: (X, S, X),
    "linalg_eig_backward": lambda X, S: (None, X, S, X, False),
    "linalg_eig_jvp": lambda X, S: (X, S, X, False),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_another_gauge_is_refused(name):
    X = torch.eye(2, requires_grad=True)
    for given in (FORMULAS[name](X, torch.ones(2)), FORMULAS[name](X.detach(), torch.ones(2))):
        for call in (mg.ops[name], mg.ops[name].reference):
            with pytest.raises(ValueError, match="gauge: expected one of .* got 'maybe'"):
                call(*given, None, 0.0, 0.0, "maybe")


@pytest.mark.parametrize("options", [(), (1e-3,), (None, 0.0, 0.1), (None, 0.0, 0.0, "ignore")], ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_options_may_be_left_out(name, options):
    """Of the formula and of its operators, which get them from the dispatcher without those at their defaults."""
    X = weights(3)
    S = torch.tensor([1.0, 2.0, 4.0], dtype=X.dtype)
    if "eig_" in name:
        X, S = X.to(torch.complex128), S.to(torch.complex128)
    given = FORMULAS[name](X, S)
    formula = mg.ops[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GaugeWarning)
        expected = formula.reference(*given, *options)
        for call in (formula, formula.op, formula.overloads["python"].op):
            torch.testing.assert_close(call(*given, *options), expected)


def test_eig_of_a_hermitian_matrix_is_eigh():
    A = weights(4) + weights(4).mT
    L, V = torch.linalg.eigh(A)
    for gL, gV in ((L.cos(), weights(4, 1)), (None, weights(4, 1)), (L.cos(), None)):
        expected = mg.ops.linalg_eigh_backward(gL, gV, L, V, gauge="ignore")
        for f in (mg.ops.linalg_eig_backward, mg.ops.linalg_eig_backward.reference):
            torch.testing.assert_close(f(gL, gV, L, V, True, gauge="ignore"), expected)
    expected = mg.ops.linalg_eigh_jvp(A, L, V)
    for f in (mg.ops.linalg_eig_jvp, mg.ops.linalg_eig_jvp.reference):
        torch.testing.assert_close(f(A, L, V, True), expected)
