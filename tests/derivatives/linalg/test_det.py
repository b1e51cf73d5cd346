"""Determinants at the points where PyTorch's own derivatives are zero, nan, wrong or raise; the rest is in test_rules."""

import itertools
import math

import pytest
import torch
from helpers.matrices import cofactors, integers

import torch_manualgrad as mg

DTYPES = [torch.float64, torch.complex128]


def mixed(A, T, k):
    """The k-th derivative of det(A + t T) at t = 0, by multilinearity: k rows of T, the others of A."""
    n = A.shape[-1]
    terms = [
        torch.linalg.det(torch.stack([T[i] if i in rows else A[i] for i in range(n)]))
        for rows in itertools.combinations(range(n), k)
    ]
    return math.factorial(k) * sum(terms)


def gradient(f, A, **options):
    x = A.detach().clone().requires_grad_()
    y = f(x)
    return torch.autograd.grad(y, x, torch.ones_like(y), **options)[0]


def zoo(n, dtype):
    """Matrices of every rank, with zero pivots first, last, many, or none."""
    regular = integers(n, n, dtype)
    found = [integers(n, rank, dtype) for rank in range(n + 1)]
    found += [torch.ones(n, n, dtype=dtype).triu(1), torch.ones(n, n, dtype=dtype).tril(-1).contiguous()]
    found += [torch.diag(torch.ones(n - 1, dtype=dtype), 1)]
    for i in range(n):
        column, row = regular.clone(), regular.clone()
        column[:, i], row[i] = 0, 0
        found += [column, row]
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 6])
def test_gradient_is_the_cofactors_at_every_rank(n, dtype):
    for A in zoo(n, dtype):
        expected = cofactors(A).conj()
        size = max(1.0, A.abs().max().item()) ** (n - 1)
        for B, C in ((A, expected), (A.mT, expected.mT)):
            with mg.override():
                first = gradient(torch.linalg.det, B)
                tracked = gradient(torch.linalg.det, B, create_graph=True)
            torch.testing.assert_close(first, C, rtol=1e-12, atol=1e-12 * size)
            torch.testing.assert_close(tracked.detach(), C, rtol=1e-12, atol=1e-12 * size)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_gradients_from_the_factors_equal_those_from_the_matrix(dtype):
    """Values, strides and conj bits, for a factorization of A and of A^T, also of nothing."""
    for shape in ((3, 3), (2, 5, 5), (40, 40), (0, 3, 3), (2, 0, 0)):
        generator = torch.Generator().manual_seed(0)
        regular = torch.randn(shape, dtype=dtype, generator=generator) / max(1, shape[-1]) + torch.eye(shape[-1])
        for A in (regular, regular.mT):
            det, LU, pivots = torch.ops.aten._linalg_det(A)
            sign, _, LU_again, _ = torch.ops.aten._linalg_slogdet(A)
            for op, given in (
                (mg.ops.adjugate_again, (A, det, LU, pivots)),
                (mg.ops.linalg_det_backward, (det, det, A, LU, pivots)),
                (mg.ops.slogdet_backward, (sign, sign.real, A, sign, LU_again, pivots)),
            ):
                found, expected = op(*given), op.reference(*given)
                torch.testing.assert_close(found, expected, check_stride=True)
                assert not found.is_conj()


def test_stock_first_order_is_zero_at_a_zero_pivot():
    A = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
    assert (gradient(torch.linalg.det, A) == 0).all()
    with mg.override():
        torch.testing.assert_close(gradient(torch.linalg.det, A), torch.tensor([[4.0, -2.0], [-2.0, 1.0]]))


def forward(f):
    return lambda t: torch.func.jvp(f, (t,), (torch.ones_like(t),))[1]


@pytest.mark.parametrize(
    "nesting", [p for k in (2, 3) for p in itertools.product((forward, torch.func.grad), repeat=k)]
)
def test_every_nesting_at_every_rank(nesting):
    T = integers(6, 6, seed=7)
    for rank in range(7):
        A = integers(6, rank)

        def f(t, A=A):
            return torch.linalg.det(A + t * T)

        for transform in nesting:
            f = transform(f)
        with mg.override():
            found = f(torch.zeros((), dtype=A.dtype))
        expected = mixed(A, T, len(nesting))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-6 * T.norm().item() ** len(nesting))


def test_stock_second_order_is_nan_two_ranks_down():
    A, T = torch.diag(torch.tensor([2.0, 1.0, 0.0, 0.0])).double(), integers(4, 4, seed=7)

    def second():
        x = A.clone().requires_grad_()
        (g,) = torch.autograd.grad(torch.linalg.det(x), x, create_graph=True)
        return (torch.autograd.grad((g * T).sum(), x)[0] * T).sum()

    assert second().isnan()
    with mg.override():
        torch.testing.assert_close(second(), mixed(A, T, 2))


def test_forward_over_forward_where_stock_is_wrong_before_2_15():
    A, T = integers(4, 4), integers(4, 4, seed=7)

    def second(t):
        return forward(forward(lambda t: torch.linalg.det(A + t * T)))(t)

    zero = torch.zeros((), dtype=A.dtype)
    assert torch.isclose(second(zero), mixed(A, T, 2)) == (torch.__version__ >= "2.15")
    with mg.override():
        torch.testing.assert_close(second(zero), mixed(A, T, 2))


def test_far_below_full_rank_orders_are_zero_and_then_nan():
    """Rank n - 6: the orders up to the fourth are zero; the sixth is not, and nothing may say otherwise."""
    T = integers(6, 6, seed=7)

    def f(t):
        return torch.linalg.det(t * T)

    with mg.override():
        for _ in range(4):
            f = forward(f)
            assert f(torch.zeros((), dtype=T.dtype)) == 0
        assert forward(f)(torch.zeros((), dtype=T.dtype)).isnan()


def test_fourth_order_at_rank_n_minus_4():
    A, T = integers(6, 2), integers(6, 6, seed=7)

    def f(t):
        return torch.linalg.det(A + t * T)

    with mg.override():
        for _ in range(4):
            f = forward(f)
        torch.testing.assert_close(f(torch.zeros((), dtype=T.dtype)), mixed(A, T, 4), rtol=1e-9, atol=0)


def test_second_order_of_an_ill_conditioned_matrix():
    U, _, Vh = torch.linalg.svd(integers(6, 6))
    A = (U * torch.logspace(0, -12, 6, dtype=U.dtype)) @ Vh
    T = integers(6, 6, seed=7)
    with mg.override():
        found = torch.func.hessian(lambda t: torch.linalg.det(A + t * T))(torch.zeros((), dtype=T.dtype))
    torch.testing.assert_close(found, mixed(A, T, 2), rtol=1e-3, atol=0)  # the condition of the smallest two


def test_extreme_entries():
    A = torch.diag(torch.tensor([1e200, 1e-200, 3.0, 1e-30], dtype=torch.float64))
    with mg.override():
        for options in ({}, {"create_graph": True}):
            found = gradient(torch.linalg.det, A, **options).diagonal().detach()
            expected = torch.tensor([3e-230, 3e170, 1e-30, 3.0], dtype=A.dtype)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("f", [torch.linalg.det, lambda A: torch.linalg.slogdet(A)[1]], ids=["det", "logabsdet"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128], ids=str)
def test_layouts_and_empty_batches(f, dtype):
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(2, 3, 3, dtype=dtype, generator=generator) + 3 * torch.eye(3)
    layouts = [A, A.mT, A[1], A[0].mT, A[:1].expand(4, 3, 3), torch.stack([A, A], -1)[..., 0], A[:0], A[..., :0, :0]]
    for x in (*layouts, A[..., :1, :1]):
        expected = gradient(f, x) if x.numel() else x  # of no matrix torch 2.10 has no gradient
        with mg.override():
            for found in (gradient(f, x), gradient(f, x, create_graph=True).detach()):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
                assert found.dtype == x.dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slogdet_of_a_singular_matrix_raises_nothing(dtype):
    A = torch.stack([integers(3, 3, dtype, seed=1), integers(3, 2, dtype), torch.zeros(3, 3, dtype=dtype)])
    A[1, 2] = A[1, 0]  # an exact zero pivot

    def f(x):
        sign, logabsdet = torch.linalg.slogdet(x)
        return logabsdet + (sign * (1 + 2j)).real if dtype.is_complex else logabsdet

    with pytest.raises(RuntimeError, match="singular"):
        gradient(f, A, create_graph=True)
    alone = gradient(f, A[0])
    with mg.override("slogdet"):
        for options in ({}, {"create_graph": True}):
            found = gradient(f, A, **options)
            torch.testing.assert_close(found[0].detach(), alone)
            assert found[1:].isnan().all()
        tangent = torch.func.jvp(f, (A,), (torch.ones_like(A),))[1]
        hessian = torch.func.grad(lambda x: torch.func.grad(lambda y: f(y).sum())(x)[0].abs().sum())(A)
    assert tangent[0].isfinite() and tangent[1:].isnan().all()
    assert hessian[0].isfinite().all()


def test_slogdet_cotangents_that_are_missing():
    A = integers(3, 3, torch.complex128, seed=1)
    inverse = torch.linalg.inv(A).mH
    with mg.override():
        torch.testing.assert_close(gradient(lambda x: torch.linalg.slogdet(x)[1], A), inverse)
        sign = torch.linalg.slogdet(A)[0]
        found = gradient(lambda x: torch.linalg.slogdet(x)[0], A)
        torch.testing.assert_close(found, -1j * sign.imag * inverse)
        B = A.real.clone().requires_grad_()
        assert torch.autograd.grad(torch.linalg.slogdet(B)[0] * 1.0, B, allow_unused=True)[0] is None


def test_logdet_uses_the_same_rule():
    A = integers(4, 4, seed=2)
    A = A @ A.mT + torch.eye(4)
    with mg.override("logdet"):
        torch.testing.assert_close(gradient(torch.logdet, A), torch.linalg.inv(A).mT)
        found = torch.func.hessian(torch.logdet)(A)
        assert gradient(torch.logdet, torch.zeros_like(A)).isnan().all()
    inverse = torch.linalg.inv(A)
    torch.testing.assert_close(found, -torch.einsum("li,jk->ijkl", inverse, inverse).contiguous())


@pytest.mark.parametrize("function", [torch.linalg.det, torch.linalg.slogdet])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_matrix_with_the_neg_bit(function, transposed: bool) -> None:
    """An imaginary part of a conjugate: PyTorch factorizes a copy, and takes the strides of the original for its own."""
    plain = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given = torch.complex(torch.zeros_like(plain), -plain.mT if transposed else -plain).conj().imag
    given = given.mT if transposed else given
    assert given.is_neg() and not given.is_contiguous() and torch.equal(given, plain)

    def gradient(A):
        A = A.detach().requires_grad_()
        result = function(A)
        return torch.autograd.grad(result if isinstance(result, torch.Tensor) else result[1], A)[0]

    expected = gradient(plain)
    if not transposed:
        assert not torch.allclose(gradient(given), expected)  # PyTorch's is that of the transpose
    with mg.override("*"):
        torch.testing.assert_close(gradient(given), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rules", [(), ("*",)])
def test_a_matrix_that_is_not_finite_leaves_the_others_alone(rules, value):
    """Singular values of such a matrix raise."""
    A = torch.randn(2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    A[0, 0, 0] = value

    def loss(A):
        return torch.linalg.det(A).square().sum()

    one = A[1:].clone()
    with mg.override(*rules):
        for transform in (
            lambda f: torch.func.grad(f),
            lambda f: lambda A: torch.func.grad(lambda A: torch.func.grad(f)(A).square().sum())(A),
            lambda f: lambda A: torch.func.jvp(torch.func.grad(f), (A,), (A.clamp(-1, 1).nan_to_num(),))[1],
            lambda f: (
                lambda A: torch.func.jvp(
                    lambda A: torch.func.jvp(torch.linalg.det, (A,), (torch.ones_like(A),))[1],
                    (A,),
                    (torch.ones_like(A),),
                )[1]
            ),
        ):
            found = transform(loss)(A)
            torch.testing.assert_close(found[1:], transform(loss)(one))
            assert not found[0].isfinite().all()
