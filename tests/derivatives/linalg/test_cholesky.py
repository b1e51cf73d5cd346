"""Cholesky: the Hermitian convention, the triangle that is not read, special points, and where PyTorch is wrong."""

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.derivatives.samples.drawing import random, random_definite

DTYPES = [torch.float64, torch.complex128]
NAMES = ("linalg_cholesky_ex", "cholesky", "cholesky_inverse", "cholesky_solve")
CHOLESKY = [rule for name in NAMES if (rule := mg.rules.get(f"aten::{name}"))]
LEGACY = "aten::cholesky" in mg.rules  # gone since torch 2.14
FACTORIZATIONS = [torch.linalg.cholesky, *([torch.cholesky] if LEGACY else [])]
pytestmark = pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")


def factor(*shape, dtype, other=0.0, upper=False):
    """A factor with a real diagonal, and ``other`` in the triangle that is not read."""
    X = random(*shape, dtype=dtype, seed=3)
    L = X.tril(-1) + torch.diag_embed(1.5 + X.diagonal(dim1=-2, dim2=-1).abs()).to(dtype)
    L = torch.where(torch.ones(shape[-2:]).triu(1).bool(), other, L)
    return L.mT.contiguous() if upper else L


def gradient(f, x):
    x = x.clone().requires_grad_()
    y = f(x)
    cotangent = random(*y.shape, dtype=y.dtype, seed=9)
    return torch.autograd.grad(y, x, cotangent)[0], cotangent


def pairing(a, b):
    return (a.conj() * b).sum().real


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("cholesky", FACTORIZATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_is_hermitian_and_pytorchs(dtype, cholesky, upper):
    A = random_definite(2, 4, 4, dtype=dtype)
    stock, _ = gradient(lambda A: cholesky(A, upper=upper), A)
    with mg.override(*CHOLESKY):
        ours, _ = gradient(lambda A: cholesky(A, upper=upper), A)
    assert torch.equal(ours, ours.mH)
    # an imaginary cotangent of the real diagonal has no part in the gradient: PyTorch's is not Hermitian there
    torch.testing.assert_close(ours, 0.5 * (stock + stock.mH))


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("cholesky", FACTORIZATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tangent_enters_by_its_hermitian_part(dtype, cholesky, upper):
    """So the tangent is the adjoint of the gradient in every direction."""
    A, dA = random_definite(3, 3, dtype=dtype), random(3, 3, dtype=dtype)

    def f(A):
        return cholesky(A, upper=upper)

    with mg.override(*CHOLESKY):
        tangent = torch.func.jvp(f, (A,), (dA,))[1]
        hermitian = torch.func.jvp(f, (A,), (0.5 * (dA + dA.mH),))[1]
        g, cotangent = gradient(f, A)
    torch.testing.assert_close(tangent, hermitian)
    torch.testing.assert_close(pairing(g, dA), pairing(cotangent, tangent))
    L, dL = (f(A).mH, tangent.mH) if upper else (f(A), tangent)
    torch.testing.assert_close(dL @ L.mH + L @ dL.mH, 0.5 * (dA + dA.mH))


@pytest.mark.skipif(not LEGACY, reason="this torch has no such operator")
def test_the_legacy_entry_has_forward_modes_only_here():
    A = random_definite(3, 3, dtype=torch.float64)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.func.jvp(torch.cholesky, (A,), (A,))
    with mg.override("aten::cholesky"):
        torch.testing.assert_close(torch.func.jvp(torch.cholesky, (A,), (A,))[1], torch.cholesky(A) / 2)


def test_third_order():
    """chol(t A) = sqrt(t) chol(A)."""
    A = random_definite(3, 3, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    forward, reverse = torch.func.jacfwd, torch.func.jacrev
    with mg.override(*CHOLESKY):
        for cholesky in FACTORIZATIONS:
            for a, b, c in ((forward, forward, forward), (reverse, forward, reverse), (forward, reverse, reverse)):
                third = a(b(c(lambda t, f=cholesky: f(t * A))))(one)
                torch.testing.assert_close(third, 3 / 8 * torch.linalg.cholesky(A))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_failed_factorization_makes_only_its_own_gradient_nan(dtype):
    A = random_definite(3, 2, 2, dtype=dtype)
    A[1] = -A[1]
    with mg.override(*CHOLESKY):
        whole, cotangent = gradient(lambda A: torch.linalg.cholesky_ex(A).L, A)
        alone = A[2].clone().requires_grad_()
        (expected,) = torch.autograd.grad(torch.linalg.cholesky(alone), alone, cotangent[2])
        with pytest.raises(torch.linalg.LinAlgError, match="positive-definite"):
            torch.linalg.cholesky(A.requires_grad_())
    torch.testing.assert_close(whole[2], expected)
    assert whole[[0, 2]].isfinite().all()


@pytest.mark.parametrize("f", [*FACTORIZATIONS, torch.cholesky_inverse, lambda L: torch.cholesky_solve(L, L)])
@pytest.mark.parametrize("shape", [(0, 0), (2, 0, 0), (0, 3, 3)])
def test_empty(f, shape):
    A = torch.ones(shape, requires_grad=True)
    with mg.override(*CHOLESKY):
        (g,) = torch.autograd.grad(f(A).sum(), A)
    assert g.shape == shape


def test_one_by_one():
    a = torch.tensor([[4.0]], requires_grad=True)
    expected = {
        **dict.fromkeys(FACTORIZATIONS, 0.25),  # sqrt(a)
        torch.cholesky_inverse: -2 / 64,  # 1 / a^2
        lambda a: torch.cholesky_solve(torch.ones(1, 1), a): -2 / 64,
    }
    with mg.override(*CHOLESKY):
        for f, value in expected.items():
            assert torch.autograd.grad(f(a), a)[0].item() == pytest.approx(value)


def solve_with(factor, upper):
    B = random(3, 2, dtype=factor.dtype, seed=1)
    return torch.cholesky_solve(B, factor, upper=upper)


FROM_FACTOR = {
    "cholesky_inverse": lambda L, upper: torch.cholesky_inverse(L, upper=upper),
    "cholesky_solve": solve_with,
}


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("name", FROM_FACTOR)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_garbage_in_the_other_triangle_is_read_by_pytorch_and_ignored_here(dtype, name, upper):
    def f(L):
        return FROM_FACTOR[name](L, upper)

    L = factor(3, 3, dtype=dtype, other=5.0, upper=upper)
    dL = random(3, 3, dtype=dtype)
    if dtype.is_complex:  # the diagonal stays real
        dL = dL - 1j * torch.diag_embed(dL.diagonal().imag)
    h = 1e-6
    expected = (f(L + h * dL) - f(L - h * dL)) / (2 * h)
    near = {"rtol": 1e-6, "atol": 1e-6}

    assert not torch.allclose(torch.func.jvp(f, (L,), (dL,))[1], expected, rtol=1e-2)
    read = torch.triu if upper else torch.tril
    g, cotangent = gradient(f, L)
    assert not torch.allclose(pairing(read(g), dL), pairing(cotangent, expected), rtol=1e-2)

    with mg.override(f"aten::{name}"):
        torch.testing.assert_close(torch.func.jvp(f, (L,), (dL,))[1], expected, **near)
        g, cotangent = gradient(f, L)
    torch.testing.assert_close(pairing(read(g), dL), pairing(cotangent, expected), **near)


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("name", FROM_FACTOR)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_of_a_factor_is_pytorchs_where_it_is_read_and_zero_elsewhere(dtype, name, upper):
    """First and second order, for a factor that has zeros where it is not read."""
    read = torch.triu if upper else torch.tril
    L = factor(2, 3, 3, dtype=dtype, upper=upper)

    def f(L):
        return FROM_FACTOR[name](L, upper)

    def derivatives():
        x = L.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(x).abs().square().sum(), x, create_graph=True)
        return g.detach(), torch.autograd.grad(read(g), x, random(*g.shape, dtype=dtype, seed=5))[0]

    stock = derivatives()
    with mg.override(f"aten::{name}"):
        ours = derivatives()
    torch.testing.assert_close(ours, tuple(map(read, stock)))
    assert (stock[0] - read(stock[0])).abs().max() > 0.01


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("name", FROM_FACTOR)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_other_triangle_is_ignored(dtype, name, upper):
    """First and second derivatives, every mode: the same with nan there, in the tangents too."""

    def f(L):
        return FROM_FACTOR[name](L, upper)

    def loss(L):
        return f(L).abs().square().sum()

    L, nans = (factor(3, 3, dtype=dtype, other=other, upper=upper) for other in (0.0, torch.nan))
    read = (L != 0).to(dtype)

    def derivatives(L):
        def along(mode, t=L):
            return torch.func.jvp(mode, (L,), (t,))[1]

        rev = torch.func.grad(loss)
        yield rev(L)
        yield along(f)
        yield along(rev)
        yield along(lambda x: torch.func.jvp(f, (x,), (x,))[1])
        yield torch.func.grad(lambda x: torch.func.jvp(loss, (x,), (L,))[1])(L)
        yield torch.func.grad(lambda x: pairing(torch.where(read != 0, rev(x), 0), torch.ones_like(x)))(L)

    with mg.override(*CHOLESKY):
        for ours, clean in zip(derivatives(nans), derivatives(L), strict=True):
            torch.testing.assert_close(ours, clean)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("columns", [1, 4])
def test_each_subset_of_inputs_that_require_grad(columns, wanted):
    """And batches that broadcast, either way."""
    for of_B, of_L in (((4, columns), (2, 4, 4)), ((3, 1, 4, columns), (4, 4)), ((2, 4, columns), (3, 1, 4, 4))):
        B, L = random(*of_B, dtype=torch.float64), factor(*of_L, dtype=torch.float64)
        inputs = [x.requires_grad_(w) for x, w in zip((B, L), wanted)]
        chosen = [x for x in inputs if x.requires_grad]

        def gradients(chosen=chosen, inputs=inputs):
            B, L = inputs
            return torch.autograd.grad(torch.cholesky_solve(B, L.tril()).sin().sum(), chosen)

        expected = gradients()
        with mg.override(*CHOLESKY):
            torch.testing.assert_close(gradients(), expected)


@pytest.mark.parametrize("f", [torch.linalg.cholesky, torch.cholesky_inverse, lambda L: torch.cholesky_solve(L, L)])
def test_layouts_and_float32(f):
    """Contiguous, column-major and strided inputs have one gradient, in the input's dtype."""
    A = random_definite(2, 4, 4, dtype=torch.float64)
    if f is not torch.linalg.cholesky:
        A = torch.linalg.cholesky(A)
    with mg.override(*CHOLESKY):
        expected, _ = gradient(f, A.contiguous())
        for other in (A.mT.contiguous().mT, A.repeat_interleave(2, -1)[..., ::2]):
            x = other.detach().requires_grad_()
            y = f(x)
            (g,) = torch.autograd.grad(y, x, random(*y.shape, dtype=y.dtype, seed=9))
            torch.testing.assert_close(g, expected)
        x = A.float().requires_grad_()
        (g,) = torch.autograd.grad(f(x), x, random(*A.shape, dtype=torch.float64, seed=9).float())
    assert g.dtype == torch.float32
    torch.testing.assert_close(g.double(), expected, rtol=1e-4, atol=1e-4)


def test_errors_are_those_of_the_forward():
    for f in (torch.linalg.cholesky, torch.cholesky_inverse, lambda A: torch.cholesky_solve(torch.ones(2, 1), A)):
        A = torch.ones(2, 3, requires_grad=True)
        with pytest.raises(RuntimeError) as stock:
            f(A)
        with mg.override(*CHOLESKY), pytest.raises(RuntimeError) as ours:
            f(A)
        assert str(ours.value) == str(stock.value)
