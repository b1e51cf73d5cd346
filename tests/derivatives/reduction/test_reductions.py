"""Reductions at their special points, and to third order: zeros, infinities, ties, nan, empty tensors, conventions."""

import itertools
import math

import pytest
import torch
from helpers.tensors import random
from hypothesis import given, settings, strategies as st
from torch import nan, tensor
from torch.func import grad, jvp, vjp

import torch_manualgrad as mg

F64 = torch.float64
INF = math.inf


def weighted(f):
    """A number made of the real and imaginary parts of what f returns, each with another weight."""

    def number(x):
        y = f(x)
        y = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
        return (y * torch.arange(1, y.numel() + 1, dtype=F64).sin().reshape(y.shape)).sum()

    return number


def along(f, t, mode):
    """The derivative of a number in the direction t, as a function of the place."""
    if mode == "fwd":
        return lambda x: jvp(f, (x,), (t,))[1]
    return lambda x: (grad(f)(x).conj() * t).real.sum() if x.is_complex() else (grad(f)(x) * t).sum()


def third_orders(f, x):
    """The third derivative along three directions, in all eight nestings."""
    directions = [random(*x.shape, dtype=x.dtype, seed=9 + i) for i in range(3)]
    for modes in itertools.product(("rev", "fwd"), repeat=3):
        g = f
        for t, mode in zip(directions, modes):
            g = along(g, t, mode)
        yield modes, g(x)


def by_differences(f, x, step=0.02):
    """The same from the first derivatives, which are tested by themselves, and differences of fourth order of these."""
    a, b, c = [random(*x.shape, dtype=x.dtype, seed=9 + i) for i in range(3)]
    first = along(f, a, "rev")

    def difference(g, t):
        return lambda x: (
            (8 * (g(x + step * t) - g(x - step * t)) - (g(x + 2 * step * t) - g(x - 2 * step * t))) / (12 * step)
        )

    return difference(difference(first, b), c)(x)


NONLINEAR = {
    "prod": torch.prod,
    "prod along a dim": lambda x: torch.prod(x, 1),
    "cumprod": lambda x: torch.cumprod(x, 1),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 1),
    "logsumexp": lambda x: torch.logsumexp(x, 1),
    "var": lambda x: torch.var(x, 1),
    "std": lambda x: torch.std(x, 1, correction=0),
    "std_mean": lambda x: torch.cat(torch.std_mean(x, 1)).real,
}
ZEROS = tensor([[0.0, 0.0, 1.5, 0.7], [0.8, 0.0, -1.2, 0.5]], dtype=F64)


@pytest.mark.parametrize("dtype", [F64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", NONLINEAR)
def test_third_order_in_all_nestings(name, dtype):
    f = weighted(NONLINEAR[name])
    for x in [random(2, 4, dtype=dtype), ZEROS.to(dtype)] if "prod" in name else [random(2, 4, dtype=dtype)]:
        with mg.override("*"):
            expected = by_differences(f, x)
            for modes, found in third_orders(f, x):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=lambda m, n=modes: f"{n}: {m}")


def distances(x):
    """Those of cdist's and pdist's backward operators, as functions of points."""
    d = torch.cdist(x.detach(), x.detach() + 1, 3.0, compute_mode="donot_use_mm_for_euclid_dist")
    g = torch.ops.aten._cdist_backward(x.new_ones(3, 3), x.contiguous(), x.contiguous() + 1, 3.0, d)
    return g, torch.ops.aten._pdist_backward(x.new_ones(3), x.contiguous(), 2.5, torch.pdist(x.detach(), 2.5))


@pytest.mark.parametrize("which", [0, 1], ids=["cdist", "pdist"])
def test_third_order_of_the_backward_of_distances(which):
    f, x = weighted(lambda x: distances(x)[which]), random(3, 2)
    with mg.override("*"):
        expected = by_differences(f, x, 2e-3)
        for modes, found in third_orders(f, x):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, msg=lambda m, n=modes: f"{n}: {m}")


@pytest.mark.parametrize("p", [0.0, 1.0, 1.5, 2.0, 3.0, 4.0, INF])
def test_the_backward_of_distances_at_points_that_coincide_is_finite(p):
    x = tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 5.0]], dtype=F64)
    g = torch.ones(3, 3, dtype=F64)

    def f(x):
        cdist = torch.ops.aten._cdist_backward(g, x, x.detach(), p, torch.cdist(x.detach(), x.detach(), p))
        return (cdist + torch.ops.aten._pdist_backward(g[0], x, p, torch.pdist(x.detach(), p))).sin().sum()

    with mg.override("*"):
        for mode in ("rev", "fwd"):
            assert grad(along(f, torch.ones_like(x), mode))(x).isfinite().all()


# -- products ---------------------------------------------------------------------------------------------------------


def others(x, dim):
    """By leaving out one entry at a time."""
    n = x.shape[dim]
    index = torch.arange(n)
    return torch.stack([x.index_select(dim, index[index != i]).prod(dim) for i in range(n)], dim)


@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("zeros", [0, 1, 2, 5])
def test_products_of_the_others(n, zeros):
    x = random(2, n, 3)
    x[:, : min(zeros, n)] = 0
    found = mg.ops.prod_backward(torch.ones(2, 3, dtype=F64), x, x.prod(1), 1)
    torch.testing.assert_close(found, others(x, 1))
    torch.testing.assert_close(
        mg.ops.prod_backward(torch.ones(2, 1, 3, dtype=F64), x, x.prod(1, True), -2, True), found
    )


@pytest.mark.parametrize("n", range(1, 12))
def test_cumulative_products_of_any_length(n):
    x, g = random(3, n), random(3, n, seed=1)
    x[1, n // 2] = 0
    P = x.cumprod(1)
    expected = torch.autograd.functional.vjp(lambda x: x.cumprod(1), x, g)[1]
    torch.testing.assert_close(mg.ops.cumprod_backward(g, x, 1, P), expected)
    torch.testing.assert_close(
        (mg.ops.cumprod_jvp(g, x, P, 1) * g).sum(), (mg.ops.cumprod_backward(g, x, 1, P) * g).sum()
    )


def test_a_long_cumulative_product_against_pytorchs():
    x = (1 + 0.01 * random(20_000)).float()
    g = random(20_000, seed=1).float()
    expected = torch.autograd.functional.vjp(lambda x: x.double().cumprod(0).float(), x, g)[1]
    torch.testing.assert_close(mg.ops.cumprod_backward(g, x, 0, x.cumprod(0)), expected, rtol=1e-3, atol=1e-3)


def test_a_cumulative_product_in_place():
    x = ZEROS.clone()
    for modes in itertools.product(("rev", "fwd"), repeat=2):
        with mg.override():
            expected, found = (
                along(along(weighted(f), x, modes[0]), x, modes[1])(x)
                for f in (lambda x: (x * 1).cumprod(1), lambda x: (x * 1).cumprod_(1))
            )
        torch.testing.assert_close(found, expected)


def factors(case, dtype):
    x = 0.5 + random(3, 40, dtype=dtype).abs().to(dtype)
    rows = {"normal": 1.0, "one zero": 1.0, "all underflow": 1e-20, "some do": torch.tensor([[1.0], [1e-20], [0.08]])}
    x = x * rows[case]
    if case == "one zero":
        x[1, 7] = 0
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64], ids=str)
@pytest.mark.parametrize("case", ["normal", "one zero", "all underflow", "some do"])
def test_division_where_it_may_be(case, dtype):
    """By whatever way, products have the derivative that double precision has, as far as it is a number of the dtype."""
    x = factors(case, dtype)
    exact = x.to(torch.complex128 if dtype.is_complex else F64)
    g = torch.ones(3, 40, dtype=dtype)
    g[:, 1::2] = 0
    rtol, atol = (1e-12 if dtype is F64 else 1e-4), 4 * torch.finfo(dtype).smallest_normal
    for found, expected in (
        (mg.ops.prod_backward(g[:, 0], x, x.prod(1), 1), others(exact, 1).conj()),
        (mg.ops.prod_backward(g[0, 0], x[0], x[0].prod()), others(exact[0], 0).conj()),
        (
            mg.ops.cumprod_backward(g, x, 1, x.cumprod(1)),
            mg.ops.cumprod_backward.reference(g.to(exact.dtype), exact, 1, exact.cumprod(1)),
        ),
    ):
        torch.testing.assert_close(found, expected.to(dtype), rtol=rtol, atol=atol)


@pytest.mark.parametrize("product", [torch.prod, lambda x: torch.prod(x, 0), lambda x: torch.cumprod(x, 0)[-1]])
def test_products_that_leave_the_range(product):
    for x in ([1e-200, 2e-200], [1e200, 2e200]):
        x = tensor(x, dtype=F64, requires_grad=True)
        with mg.override():
            (first,) = torch.autograd.grad(product(x), x, create_graph=True)
            assert torch.equal(first.detach(), x.detach().flip(0))
            assert torch.autograd.grad(first[0], x)[0].tolist() == [0, 1]


# -- exponentials -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", [lambda x: torch.logsumexp(x, -1), lambda x: torch.logcumsumexp(x, -1)[..., -1]])
@pytest.mark.parametrize("given", [[-INF, -INF], [-INF, 1.0, 2.0], [1.0, -INF], [-INF, -INF, 3.0, -INF, 800.0]])
def test_minus_infinity_counts_for_nothing(reduce, given):
    x = tensor(given, dtype=F64)
    finite = x.isfinite()
    expected = torch.zeros_like(x)
    expected[finite] = x[finite].softmax(0)
    with mg.override():
        found = grad(reduce)(x)
        torch.testing.assert_close(found, expected)
        t = torch.arange(1.0, 1 + len(x), dtype=F64)
        torch.testing.assert_close(jvp(reduce, (x,), (t,))[1], (expected * t).sum())
        second = torch.diag(expected) - torch.outer(expected, expected)
        for mode in ("rev", "fwd"):
            torch.testing.assert_close(grad(along(reduce, t, mode))(x), second @ t)
            torch.testing.assert_close(jvp(along(reduce, t, mode), (x,), (t,))[1], t @ second @ t)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16, torch.float16, torch.complex128], ids=str)
@pytest.mark.parametrize("dim, keepdim", [([1], False), ([-1], True), ([0, 1], False), ([0], True)])
def test_logsumexp_has_one_first_order_in_both_grad_modes(dtype, dim, keepdim):
    """In plain backwards it is computed by fewer operators."""
    rows = [[-INF, -INF, -INF], [INF, 1.0, -INF], [math.nan, 1.0, 2.0], [-INF, 1.0, 2.0], [0.0, 0.0, 0.0]]
    highest = torch.finfo(dtype).max
    rows += [[-highest, -INF, -highest], [highest, highest, 0.0], [300.0, 301.0, 299.0], [-80.0, 0.5, -0.5]]
    for x in [tensor(rows, dtype=dtype), tensor(rows[3:5], dtype=dtype), tensor(rows[:1], dtype=dtype)]:
        x = x.requires_grad_()
        with mg.override():
            y = torch.logsumexp(x, dim, keepdim)
        g = torch.linspace(0.5, 2.0, y.numel()).to(dtype).reshape(y.shape)
        for _ in range(3):  # the third time it is a recording
            found = torch.autograd.grad(y, x, g, retain_graph=True)
        expected = torch.autograd.grad(y, x, g, create_graph=True)
        tolerance = {} if dtype.itemsize > 2 else {"rtol": 16 * torch.finfo(dtype).eps, "atol": 1e-6}
        torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)


def test_logsumexp_of_large_numbers_is_more_accurate_than_stocks():
    x = (1e4 + torch.linspace(0, 3, 35).reshape(5, 7)).requires_grad_()
    expected = x.detach().to(F64).softmax(1)

    def error():
        (found,) = torch.autograd.grad(torch.logsumexp(x, 1).sum(), x)
        return ((found.to(F64) - expected) / expected).abs().max()

    stock = error()
    with mg.override():
        assert error() < 4 * torch.finfo(torch.float32).eps < stock / 100


def test_plus_infinity_is_as_in_pytorch():
    for x in ([INF, 1.0], [1.0, INF, 2.0]):
        x = tensor(x, dtype=F64)
        for reduce in (lambda x: torch.logsumexp(x, 0), lambda x: torch.logcumsumexp(x, 0)[0]):
            expected = grad(reduce)(x)
            with mg.override():
                torch.testing.assert_close(grad(reduce)(x), expected, equal_nan=True)


def test_complex_exponentials_that_overflow():
    x = tensor([1e4 + 1j, 0.5j, 1e4 - 1j, 2.0], dtype=torch.complex128)
    t = random(4, dtype=torch.complex128)
    w = (x - x[0]).exp()
    with mg.override():
        found = jvp(lambda x: torch.logcumsumexp(x, 0), (x,), (t,))[1]
        torch.testing.assert_close(found, (w * t).cumsum(0) / w.cumsum(0))


# -- variances --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [torch.ones(3, dtype=F64), torch.full((2, 3), 0.5, dtype=F64), tensor(2.0, dtype=F64)])
@pytest.mark.parametrize("deviation", [torch.std, lambda x, **c: torch.std_mean(x, **c)[0]])
@pytest.mark.parametrize("which", [(), ("*",)], ids=["improving", "all"])
def test_equal_entries_have_no_derivative_in_any_order(x, deviation, which):
    def f(x):
        return deviation(x, correction=0)

    t = torch.ones_like(x).cumsum(0) if x.dim() else x
    with mg.override(*which):
        assert grad(f)(x).eq(0).all()
        for modes in itertools.product(("rev", "fwd"), repeat=2):
            g = along(along(f, t, modes[0]), t, modes[1])
            assert g(x) == 0 and grad(g)(x).eq(0).all()


@pytest.mark.parametrize("which", [(), ("*",)], ids=["improving", "all"])
@pytest.mark.parametrize("keepdim", [False, True])
def test_an_empty_list_of_dims_means_all(which, keepdim):
    x, t = random(2, 3), random(2, 3, seed=1)
    for f in (
        torch.var,
        torch.std,
        lambda *a, **k: torch.std_mean(*a, **k)[0],
        lambda *a, **k: torch.var_mean(*a, **k)[0],
    ):
        every = [weighted(lambda x, f=f, dim=dim: f(x, dim, correction=1, keepdim=keepdim)) for dim in ([0, 1], [])]
        with mg.override(*which):
            for modes in itertools.product(("rev", "fwd"), repeat=2):
                expected, found = (along(along(g, t, modes[0]), t, modes[1])(x) for g in every)
                torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dim", [None, [0], [0, 1]])
@pytest.mark.parametrize("correction", [0, 1, 2, 3, 6])
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_degrees_of_freedom(dim, correction):
    x = random(2, 3)
    x[:, 1] = 4
    for f in (torch.var, torch.std):
        sizes = 2 if dim == [0] else 6
        expected = torch.func.jacrev(lambda x, f=f: f(x, dim, correction=correction))(x)
        with mg.override("*"):
            found = torch.func.jacrev(lambda x, f=f: f(x, dim, correction=correction))(x)
        if correction < sizes:
            torch.testing.assert_close(found, expected)
        else:
            assert not found.isfinite().any() or (found[found.isfinite()] == 0).all()


# -- ties and nan -----------------------------------------------------------------------------------------------------

TIES = tensor([[2.0, 5.0, 2.0, 5.0], [5.0, 2.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0]], dtype=F64)
ALL = [torch.amax, torch.amin, torch.max, torch.min, torch.median, torch.nanmedian]
PAIRS = [torch.max, torch.min, torch.median, torch.nanmedian, torch.mode, torch.sort, torch.cummax, torch.cummin]
ALONG = [lambda x, d, f=f: f(x, d)[0] for f in PAIRS]
ALONG += [torch.amax, torch.amin, lambda x, d: torch.kthvalue(x, 2, d)[0], lambda x, d: torch.topk(x, 2, d)[0]]
if "missing" not in mg.rules["aten::aminmax"].improves:  # else PyTorch has no derivative to compare with
    ALL += [lambda x, i=i: torch.aminmax(x)[i] for i in range(2)]
    ALONG += [lambda x, d, i=i: torch.aminmax(x, dim=d)[i] for i in range(2)]


def with_nan():
    x = TIES.clone()
    x[0, 1] = nan
    return x


@pytest.mark.parametrize("x", [TIES, with_nan()], ids=["ties", "nan"])
@pytest.mark.parametrize("reduce", [*ALL, *[lambda x, f=f, d=d: f(x, d) for f in ALONG for d in (0, -1)]])
def test_who_gets_the_cotangent_is_as_in_pytorch(reduce, x):
    f = weighted(reduce)
    t = random(*x.shape)
    expected = grad(f)(x), jvp(f, (x,), (t,))[1]
    with mg.override("*"):
        found = grad(f)(x), jvp(f, (x,), (t,))[1]
        assert grad(along(f, t, "rev"))(x).nan_to_num().eq(0).all()
    for a, b in zip(found, expected):
        torch.testing.assert_close(a[b.isfinite()], b[b.isfinite()])
    torch.testing.assert_close(found[0], expected[0], equal_nan=True)


def test_nansum_of_an_infinite_cotangent():
    x = tensor([1.0, nan], dtype=F64, requires_grad=True)
    with mg.override("*"):
        assert torch.autograd.grad(x.nansum(), x, tensor(INF, dtype=F64))[0].tolist() == [INF, 0]


# -- shapes and dtypes ------------------------------------------------------------------------------------------------

CALLS = {
    "sum": lambda x, **dtype: x.sum((0, -1), keepdim=True, **dtype),
    "sum of all": lambda x, **dtype: x.sum(**dtype),
    "nansum": lambda x, **dtype: x.real.nansum(1, **dtype),
    "mean": lambda x, **dtype: x.mean([], **dtype),
    "mean of all": lambda x, **dtype: x.mean(**dtype),
    "prod": lambda x, **dtype: x.prod(1, **dtype),
    "prod of all": lambda x, **dtype: x.prod(**dtype),
    "cumsum": lambda x, **dtype: x.cumsum(0, **dtype),
    "cumprod": lambda x, **dtype: x.cumprod(1, **dtype),
}


@pytest.mark.parametrize("dtype", [F64, torch.complex64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_gradient_has_the_dtype_of_its_input(name, dtype):
    if name == "nansum" and dtype.is_complex:
        return
    x = random(2, 3, 2).float().requires_grad_()
    found = []
    # PyTorch raises where a complex cotangent meets a real input
    for which, accepted in (([], torch.float64 if dtype.is_complex else dtype), (["*"], dtype)):
        with mg.override(*which) if which else torch.enable_grad():
            y = CALLS[name](x, dtype=accepted)
            found.append(torch.autograd.grad(y, x, torch.ones_like(y)))
    assert found[1][0].dtype == torch.float32
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_empty(shape):
    x = torch.zeros(shape, dtype=F64, requires_grad=True)
    calls = [torch.sum, torch.nansum, torch.mean, torch.prod, torch.std, torch.var]
    calls += [lambda x, f=f: f(x, 0) for f in (torch.sum, torch.prod, torch.cumsum, torch.cumprod, torch.logcumsumexp)]
    calls += [lambda x: torch.logsumexp(x, [0]), lambda x: torch.sort(x)[0], lambda x: torch.cummax(x, 0)[0]]
    for call in calls:
        with mg.override("*"):
            y = call(x)
            (first,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        assert first.shape == x.shape


# -- whatever the shape, strides and dims, a rule gives PyTorch's derivatives -----------------------------------------

# Reductions over several dims (or all: None), and those along one.
OVER = {
    "sum": torch.sum,
    "nansum": torch.nansum,
    "mean": torch.mean,
    "logsumexp": torch.logsumexp,
    "amax": torch.amax,
    "amin": torch.amin,
    "var": lambda x, dim, keepdim: torch.var(x, dim, keepdim=keepdim, correction=0),
    "std": lambda x, dim, keepdim: torch.std(x, dim, keepdim=keepdim, correction=0),
    "var_mean": lambda x, dim, keepdim: torch.var_mean(x, dim, keepdim=keepdim, correction=0.5),
    "std_mean": lambda x, dim, keepdim: torch.std_mean(x, dim, keepdim=keepdim, correction=0.5),
}
ALONG_ANY_DIM = {
    "prod": torch.prod,
    "aminmax": lambda x, dim, keepdim: tuple(torch.aminmax(x, dim=dim, keepdim=keepdim)),
    "max": lambda x, dim, keepdim: torch.max(x, dim, keepdim)[0],
    "median": lambda x, dim, keepdim: torch.median(x, dim, keepdim)[0],
    "mode": lambda x, dim, keepdim: torch.mode(x, dim, keepdim)[0],
    "kthvalue": lambda x, dim, keepdim: torch.kthvalue(x, 1, dim, keepdim)[0],
    "sort": lambda x, dim, keepdim: torch.sort(x, dim, descending=keepdim)[0],
    "topk": lambda x, dim, keepdim: torch.topk(x, 1, dim, largest=keepdim)[0],
    "cummax": lambda x, dim, keepdim: torch.cummax(x, dim)[0],
    "cumsum": lambda x, dim, keepdim: torch.cumsum(x, dim),
    "cumprod": lambda x, dim, keepdim: torch.cumprod(x, dim),
    "logcumsumexp": lambda x, dim, keepdim: torch.logcumsumexp(x, dim),
}
if "missing" in mg.rules["aten::aminmax"].improves:  # PyTorch has no derivative to compare with
    del ALONG_ANY_DIM["aminmax"]
ORDERED = {"nansum", "amax", "amin", "aminmax", "max", "median", "mode", "kthvalue", "sort", "topk", "cummax"}


@st.composite
def inputs(draw, real):
    """A tensor of up to three dims, and a view of it: itself, transposed, sliced, or broadcast."""
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    dtype = torch.float64 if real else draw(st.sampled_from([torch.float64, torch.complex128]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    views = [lambda x: x]
    if shape:
        views += [lambda x: x[..., ::2], lambda x: x[:1].expand(3, *shape[1:]), lambda x: x.movedim(0, -1)]
    return torch.randn(shape, dtype=dtype, generator=generator), draw(st.sampled_from(views))


def numbers(x):
    return torch.arange(1.0, 1 + x.numel()).reshape(x.shape).to(x.dtype)


def derivatives(f, x):
    """The outputs, the gradient and the tangents, for cotangents and a tangent that are the same each time."""
    outputs, pull = vjp(f, x)
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = tuple(numbers(y).sin() for y in several)
    (gradient,) = pull(weights if isinstance(outputs, tuple) else weights[0])
    tangents = jvp(f, (x,), (numbers(x).cos(),))[1]
    return outputs, gradient, tangents


def compare(f, x):
    expected = derivatives(f, x)
    with mg.override("*"):
        found = derivatives(f, x)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0, equal_nan=True)
    for a, b in zip(found[1:], expected[1:]):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("name", OVER)
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_over_any_dims(name, data):
    x, view = data.draw(inputs(real=name in ORDERED))
    dims = st.integers(-max(x.dim(), 1), max(x.dim(), 1) - 1)
    # PyTorch's logsumexp refuses an empty list, and its gradient of var is wrong for one
    least = name == "logsumexp" or "var" in name or "std" in name
    dim = data.draw(st.lists(dims, unique_by=lambda d: d % max(x.dim(), 1), min_size=least))
    keepdim = data.draw(st.booleans())
    compare(lambda x: OVER[name](view(x), dim, keepdim), x)


@pytest.mark.parametrize("name", ALONG_ANY_DIM)
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_along_any_dim(name, data):
    x, view = data.draw(inputs(real=name in ORDERED))
    dim = data.draw(st.integers(-max(x.dim(), 1), max(x.dim(), 1) - 1))
    keepdim = data.draw(st.booleans())
    compare(lambda x: ALONG_ANY_DIM[name](view(x), dim, keepdim), x)
