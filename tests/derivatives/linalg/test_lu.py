"""LU at zero pivots, without pivoting, at sizes that take other paths; the modes at regular points are tests of the rules."""

import itertools

import pytest
import torch
from helpers.tensors import close, random
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

import torch_manualgrad as mg
from torch_manualgrad.testing import check

F64, C128 = torch.float64, torch.complex128
DTYPES = [F64, C128]
SHAPES = [(4, 4), (4, 6), (6, 4), (2, 3, 3)]


def finite(*tensors):
    return all(bool(torch.isfinite(torch.view_as_real(x) if x.is_complex() else x).all()) for x in tensors)


def eliminated(A):
    """L and U of A without pivoting, from the textbook."""
    m, n = A.shape[-2:]
    k = min(m, n)
    L, U = torch.eye(m, k, dtype=A.dtype), A.clone()
    for j in range(min(k, m - 1)):
        L[j + 1 :, j] = U[j + 1 :, j] / U[j, j]
        U[j + 1 :] = U[j + 1 :] - torch.outer(L[j + 1 :, j], U[j])
    return L, U[:k].triu()


def with_pivots(shape, pivots, dtype, seed=0):
    """P and A = P L U without any rounding, where U has these pivots (powers of two) and |L| < 1 keeps P."""
    m, n = shape
    k = min(m, n)
    generator = torch.Generator().manual_seed(seed)

    def integers(*size):
        parts = torch.randint(-1, 2, (2, *size), generator=generator).to(F64)
        return torch.complex(*parts) if dtype.is_complex else parts[0]

    L = (integers(m, k) / 4).tril(-1) + torch.eye(m, k, dtype=dtype)
    U = (2 * integers(k, n)).triu(1)
    U.diagonal().copy_(torch.tensor(pivots, dtype=dtype))
    P = torch.eye(m, dtype=dtype)[torch.randperm(m, generator=generator)]
    return P, P @ L @ U


def differences(f, A, T, h=1e-6):
    """Central differences of a function with several outputs."""
    return tuple((plus - minus) / (2 * h) for plus, minus in zip(f(A + h * T), f(A - h * T)))


def inner(xs, ys):
    return sum((x.conj() * y).real.sum() if x.is_complex() else (x * y).sum() for x, y in zip(xs, ys))


def factors_of(entry):
    """A -> (L, U) by one of the ways in, all with our derivatives."""
    if entry == "linalg.lu":
        return lambda A: torch.linalg.lu(A)[1:]
    if entry == "lu_factor":
        return lambda A: torch.lu_unpack(*torch.linalg.lu_factor_ex(A)[:2])[1:]
    return lambda A: mg.linalg.lu(A)[1:]


ENTRIES = ["linalg.lu", "lu_factor", "mg"]


# -- pivots of zero ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 3), (3, 5), (1, 1)])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_last_pivot_of_zero_is_a_smooth_point(entry, shape, dtype):
    P, A = with_pivots(shape, [2.0, 4.0, 0.0][-shape[0] :], dtype)
    f = factors_of(entry)

    def fixed(A):
        return eliminated(P.mT @ A)

    with mg.override():
        assert torch.equal(torch.linalg.lu(A)[0], P) and torch.linalg.lu(A)[2][-1, shape[0] - 1] == 0
        T, V = random(*shape, dtype=dtype, seed=1), random(*shape, dtype=dtype, seed=2)
        values, tangents = jvp(f, (A,), (T,))
        close(tangents, differences(fixed, A, T), 1e-7)
        gs = tuple(random(*x.shape, dtype=dtype, seed=3 + i) for i, x in enumerate(values))
        gradient = vjp(f, A)[1](gs)[0]
        close(inner([gradient], [T]), inner(gs, tangents))

        # the second derivative, in each of its four ways
        second = differences(lambda A: jvp(f, (A,), (T,))[1], A, V)
        expected = inner(gs, second)
        close(expected, inner(gs, differences(lambda A: differences(fixed, A, T, 1e-4), A, V, 1e-4)), 1e-5)
        close(inner(gs, jvp(lambda A: jvp(f, (A,), (T,))[1], (A,), (V,))[1]), expected, 1e-7)
        close(inner([vjp(lambda A: jvp(f, (A,), (T,))[1], A)[1](gs)[0]], [V]), expected, 1e-7)
        close(inner([jvp(lambda A: vjp(f, A)[1](gs)[0], (A,), (V,))[1]], [T]), expected, 1e-7)
        close(inner([vjp(lambda A: vjp(f, A)[1](gs)[0], A)[1](T)[0]], [V]), expected, 1e-7)

    if entry != "mg":
        assert not finite(vjp(f, A)[1](gs)[0])  # PyTorch's
        assert not finite(*jvp(f, (A,), (T,))[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_last_pivot_of_zero_of_a_tall_matrix_leaves_u_smooth(dtype):
    P, A = with_pivots((5, 3), [2.0, 4.0, 0.0], dtype)
    T, g = random(5, 3, dtype=dtype, seed=1), random(3, 3, dtype=dtype, seed=2)
    P, _, U = torch.linalg.lu(A)
    assert U[2, 2] == 0

    def upper(A):
        return mg.linalg.lu(A).U

    expected = differences(lambda A: eliminated((P.mT @ A)[:3])[1:], A, T)[0]
    close(jvp(upper, (A,), (T,))[1], expected, 1e-7)
    close(inner([vjp(upper, A)[1](g)[0]], [T]), inner([g], [expected]), 1e-7)
    assert not finite(vjp(lambda A: torch.linalg.lu(A)[2], A)[1](g)[0])
    # L is not: its last column is a quotient by that pivot
    dL = jvp(lambda A: mg.linalg.lu(A).L, (A,), (T,))[1]
    assert not finite(dL[3:, 2]) and finite(dL[:, :2])
    assert not finite(vjp(lambda A: mg.linalg.lu(A).L, A)[1](random(5, 3, dtype=dtype))[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 4), (4, 6), (6, 4)])
@pytest.mark.parametrize("pivots", [[2.0, 0.0, 4.0, 1.0], [0.0, 2.0, 4.0, 1.0], [2.0, 4.0, 0.0, 0.0]])
def test_an_earlier_pivot_of_zero_is_never_silent(pivots, shape, dtype):
    L, U = random(shape[0], 4, dtype=dtype), random(4, shape[1], dtype=dtype, seed=1).triu()
    L = L.tril(-1) + torch.eye(*L.shape, dtype=dtype)
    U.diagonal().copy_(torch.tensor(pivots, dtype=dtype))
    P = torch.eye(shape[0], dtype=dtype)
    gs = random(*L.shape, dtype=dtype, seed=2), random(*U.shape, dtype=dtype, seed=3)
    T = random(*shape, dtype=dtype, seed=4)
    for of_L, of_U in [(gs[0], gs[1]), (gs[0], None), (None, gs[1])]:
        assert not finite(mg.ops.linalg_lu_backward(of_L, of_U, P, L, U, True))
    assert not finite(*mg.ops.linalg_lu_jvp(T, P, L, U, True))


def test_singular_matrices_in_a_batch_do_not_disturb_the_others():
    _, singular = with_pivots((3, 3), [2.0, 4.0, 0.0], F64)
    A = torch.stack([random(3, 3), singular, torch.zeros(3, 3, dtype=F64)])
    f = factors_of("mg")
    gs = tuple(random(3, 3, 3, seed=i) for i in (1, 2))
    gradient = vjp(f, A)[1](gs)[0]
    for i in (0, 1):
        close(gradient[i], vjp(f, A[i])[1](tuple(g[i] for g in gs))[0])
    assert finite(gradient[:2]) and not finite(gradient[2])


# -- closed forms, special shapes, larger sizes -----------------------------------------------------------------------


@pytest.mark.parametrize("pivot", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 0), (0, 3), (3, 0), (0, 3, 3), (1, 1), (1, 3), (3, 1)])
def test_the_product_of_the_factors_has_the_derivative_of_the_matrix(shape, dtype, pivot):
    A = random(*shape, dtype=dtype).requires_grad_()
    P, L, U = mg.linalg.lu(A, pivot=pivot)
    assert P.shape == (A.shape[:-1] + A.shape[-2:-1] if pivot else (0,)) and not P.requires_grad
    product = P @ L @ U if pivot else L @ U
    G = random(*shape, dtype=dtype, seed=1)
    close(product, A)
    close(torch.autograd.grad(product, A, G)[0], G)
    dL, dU = jvp(lambda A: mg.linalg.lu(A, pivot=pivot)[1:], (A.detach(),), (G,))[1]
    tangent = (dL @ U + L @ dU).detach()
    close(P @ tangent if pivot else tangent, G)
    assert torch.equal(dL, dL.tril(-1)) and torch.equal(dU, dU.triu())


@pytest.mark.parametrize("shape", [(80, 80), (3, 70, 70), (90, 65), (65, 90)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_stock_at_larger_sizes(shape, dtype):
    """Where rows are moved in place of a product with P."""
    A, T = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    gs = tuple(random(*x.shape, dtype=dtype, seed=2) for x in torch.linalg.lu(A)[1:])
    for entry in ENTRIES[:2]:
        f = factors_of(entry)
        expected = vjp(f, A)[1](gs)[0], *jvp(f, (A,), (T,))[1]
        with mg.override():
            close((vjp(f, A)[1](gs)[0], *jvp(f, (A,), (T,))[1]), expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_single_precision(dtype):
    wide = torch.promote_types(dtype, F64)
    A = random(2, 20, 20, dtype=wide).to(dtype)
    gs = tuple(random(2, 20, 20, dtype=wide, seed=i).to(dtype) for i in (1, 2))
    for pivot in (True, False):
        B = A if pivot else A + 20 * torch.eye(20)
        f = lambda A, pivot=pivot: mg.linalg.lu(A, pivot=pivot)[1:]  # noqa: E731
        found = vjp(f, B)[1](gs)[0]
        expected = vjp(f, B.to(wide))[1](tuple(g.to(wide) for g in gs))[0]
        assert found.dtype == dtype and (found - expected).abs().max() < 1e-4 * expected.abs().max()


# -- without pivoting -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 3), (5, 3), (3, 5), (16, 16), (40, 40), (50, 20), (20, 50), (33, 34), (2, 100)])
def test_without_pivoting_it_is_elimination(shape, dtype):
    A = random(*shape, dtype=dtype) + 10 * torch.eye(*shape)
    before = A.clone()
    P, L, U = mg.linalg.lu(A, pivot=False)
    close((L, U), eliminated(A))
    assert P.shape == (0,) and P.dtype == dtype and torch.equal(A, before)
    for other in (A.mT.contiguous().mT, torch.stack([A, A], -1)[..., 0]):
        assert torch.equal(mg.linalg.lu(other, pivot=False).U, U)


def test_torch_has_it_on_cuda_only():
    with pytest.raises(RuntimeError, match="without pivoting is not implemented on the CPU"):
        torch.linalg.lu(random(2, 2), pivot=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_pivoting_in_every_mode_and_transform(dtype):
    samples = [mg.Sample(random(*shape, dtype=dtype) + 3 * torch.eye(*shape[-2:])) for shape in SHAPES]

    def lu(A):
        return mg.linalg.lu(A, pivot=False)[1:]

    assert not check(lu, samples, name="lu without pivoting").failures


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operator_in_every_mode_and_transform(dtype):
    samples = [mg.Sample(random(*shape, dtype=dtype), pivot) for shape in SHAPES[:2] for pivot in (True, False)]
    assert not check(torch.ops.manualgrad.lu.default, samples).failures


def test_a_zero_pivot_without_pivoting_gives_inf_or_nan():
    for A in (torch.tensor([[0.0, 1], [1, 1]]), torch.zeros(3, 3), torch.zeros(40, 50), torch.zeros(50, 40)):
        L, U = mg.linalg.lu(A.requires_grad_(), pivot=False)[1:]
        assert not finite(L)
        assert not finite(*torch.autograd.grad(L.sum() + U.sum(), A))
    _, A = with_pivots((3, 3), [2.0, 4.0, 0.0], F64)
    P = torch.linalg.lu(A)[0]
    assert finite(*mg.linalg.lu(P.mT @ A, pivot=False))  # the last one divides nothing


@pytest.mark.parametrize("pivot", [True, False])
def test_third_order_agrees_in_every_nesting(pivot):
    A = random(3, 3, seed=5)

    def f(A):
        _, L, U = mg.linalg.lu(A, pivot=pivot)
        return (L.sin().sum() * U.cos()).sum()

    hessian = jacfwd(jacrev(f))
    e = random(3, 3, seed=6)
    (expected,) = differences(lambda A: (hessian(A),), A, e, 1e-5)
    for a, b, c in itertools.product((jacfwd, jacrev), repeat=3):
        close(torch.einsum("ijklmn,mn->ijkl", a(b(c(f)))(A), e), expected, 1e-5)


@pytest.mark.parametrize("pivot", [True, False])
def test_vmap_and_compile(pivot):
    A = random(4, 3, 5)

    def f(A):
        P, L, U = mg.linalg.lu(A, pivot=pivot)
        return L.square().sum() + U.exp().sum()

    expected = torch.stack([grad(f)(a) for a in A])
    close(vmap(grad(f))(A), expected)
    close(grad(lambda A: vmap(f, in_dims=2)(A.permute(1, 2, 0)).sum())(A), expected)
    P, L, U = vmap(lambda A: tuple(mg.linalg.lu(A, pivot=pivot)), out_dims=(0 if pivot else None, 0, 0))(A)
    close((L, U), tuple(mg.linalg.lu(A, pivot=pivot))[1:])
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    x = A.clone().requires_grad_()
    compiled(x).backward()
    close(x.grad, expected)


def test_results_and_errors():
    A = random(3, 4)
    found = mg.linalg.lu(A)
    assert found._fields == ("P", "L", "U")
    close(tuple(found), tuple(torch.linalg.lu(A)))
    for pivot in (True, False):
        with pytest.raises(ValueError, match=r"A: expected a matrix .*got shape \[3\]"):
            mg.linalg.lu(random(3), pivot=pivot)
        with pytest.raises(TypeError, match="A: expected a floating point or complex dtype, got torch.int64"):
            mg.linalg.lu(torch.ones(2, 2, dtype=torch.int64), pivot=pivot)
        with pytest.raises(
            NotImplementedError, match="A: expected single or double precision, or autocast, got torch.float16"
        ):
            mg.linalg.lu(torch.ones(2, 2, dtype=torch.float16), pivot=pivot)


# -- unpacking --------------------------------------------------------------------------------------------------------


def test_lu_unpack_in_part():
    LU, pivots = torch.linalg.lu_factor(random(4, 3))
    with mg.override("*"):
        x = LU.clone().requires_grad_()
        P, L, U = torch.lu_unpack(x, pivots, unpack_data=False)
        assert P.shape == (4, 4) and L.shape == U.shape == (0,)
        assert jvp(lambda x: torch.lu_unpack(x, pivots, unpack_data=False)[1], (LU,), (LU,))[1].shape == (0,)
        P, L, U = torch.lu_unpack(x, pivots, unpack_pivots=False)
        assert P.shape == (0,)
        (L.sum() + U.sum()).backward()
        close(x.grad, torch.ones_like(x))


def test_lu_unpack_backward_needs_a_cotangent():
    close(mg.ops.lu_unpack_backward(torch.ones(3, 2), None, 3, 2), torch.ones(3, 2).tril(-1))
    close(mg.ops.lu_unpack_backward(None, torch.ones(2, 2), 3, 2), torch.ones(3, 2).triu())
    with pytest.raises(ValueError, match="both None"):
        mg.ops.lu_unpack_backward(None, None, 3, 2)
    P, L, U = torch.linalg.lu(random(3, 2))
    assert torch.equal(mg.ops.linalg_lu_backward(None, None, P, L, U, True), torch.zeros(3, 2, dtype=F64))
    for grad_L, grad_U, name in ((torch.ones(2, 2), None, "grad_L"), (None, torch.ones(4, 3, 2), "grad_U")):
        with pytest.raises(ValueError, match=rf"{name}: expected .*\(\*, \w, \w\).*, got \["):
            mg.ops.lu_unpack_backward(grad_L, grad_U, 3, 2)
