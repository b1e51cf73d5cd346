"""Closed forms, conventions, extremes and properties of the norm and distance formulas; the modes are tests of the rules."""

import math

import pytest
import torch
from helpers.tensors import random
from hypothesis import given, settings, strategies as st
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import torch_manualgrad as mg
from torch_manualgrad.derivatives.reduction import distance, renorm
from torch_manualgrad.derivatives.reduction.norm import norm_backward, norm_jvp

inf, nan = math.inf, math.nan
F64, C128 = torch.float64, torch.complex128
ORDERS = [0.0, 0.3, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 17.5, -1.0, -2.0, -2.5, inf, -inf]
IMPLEMENTATIONS = {"operator": norm_backward, "body": norm_backward.reference}


@pytest.fixture(params=IMPLEMENTATIONS)
def backward(request):
    """x -> the gradient of ||x||_p over the last dim."""

    def run(x, p):
        one = torch.ones(x.shape[:-1], dtype=x.abs().dtype)
        return IMPLEMENTATIONS[request.param](one, x, p, torch.linalg.vector_norm(x.detach(), p, -1), [-1], False)

    return run


def close_or_nan(actual, expected, rtol=1e-10, **options):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=options.pop("atol", rtol), equal_nan=True, **options)


def finite(x):
    return torch.isfinite(torch.view_as_real(x) if x.is_complex() else x).all()


# -- against PyTorch, where it is right ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize(
    "shape, dim, keepdim",
    [((3, 4), None, False), ((3, 4), (1,), True), ((2, 3, 4), (0, -1), False), ((3, 4), (0,), False), ((), None, False),
     ((), (-1,), True), ((0, 3), (1,), False)],
)  # fmt: skip
def test_equals_stock_at_smooth_points(p, dtype, shape, dim, keepdim):
    x = random(*shape, dtype=dtype).requires_grad_()
    n = torch.linalg.vector_norm(x, p, dim, keepdim)
    g, t = random(*n.shape, seed=1), random(*shape, dtype=dtype, seed=2)
    (stock,) = torch.autograd.grad(n, x, g, allow_unused=True, materialize_grads=True)
    for run in IMPLEMENTATIONS.values():
        close_or_nan(run(g, x.detach(), p, n.detach(), dim, keepdim), stock)
    close_or_nan(
        norm_jvp(x.detach(), t, p, n.detach(), dim, keepdim),
        jvp(lambda x: torch.linalg.vector_norm(x, p, dim, keepdim), (x.detach(),), (t,))[1],
    )


@pytest.mark.parametrize("p", [2.0, 3.0, 4.0, 2.5])
def test_hessian_equals_stock(p, backward):
    x = random(5)
    expected = hessian(lambda x: torch.linalg.vector_norm(x, p))(x)
    for transform in (jacfwd, jacrev):
        close_or_nan(transform(lambda x: backward(x, p))(x), expected)


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("p", ORDERS)
def test_third_order_has_every_nesting(p, dtype):
    """By central differences of the second order, whose own proof is in the tests of the rules."""
    z, u, v = random(3, 6)

    def x(z):
        return torch.complex(z[:3], z[3:]) if dtype.is_complex else z

    def tangent(z):
        return norm_jvp.reference(x(z), x(u), p, torch.zeros((), dtype=F64), None, False)

    def second(z):
        return jvp(tangent, (z,), (v,))[1]

    step = 1e-6
    expected = (second(z + step * u) - second(z - step * u)) / (2 * step)
    close_or_nan(jvp(second, (z,), (u,))[1], expected, 1e-5)
    close_or_nan(grad(second)(z) @ u, expected, 1e-5)
    close_or_nan(jvp(lambda z: grad(tangent)(z) @ v, (z,), (u,))[1], expected, 1e-5)
    close_or_nan(grad(lambda z: grad(tangent)(z) @ v)(z) @ u, expected, 1e-5)


# -- scale -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("complex_", [False, True])
@pytest.mark.parametrize(
    "dtype, scale, rtol",
    [(F64, s, 1e-12) for s in (1e200, 1e-200, 1e300, 1e-300)]
    + [(torch.float32, s, 1e-4) for s in (1e15, 1e30, 1e-20, 1e-30)],
)
def test_gradient_does_not_depend_on_scale(p, complex_, dtype, scale, rtol, backward):
    x = random(4, dtype=C128 if complex_ else F64)
    scaled = (x * scale).to(dtype.to_complex() if complex_ else dtype)
    close_or_nan(backward(scaled, p), backward(x, p).to(scaled.dtype), rtol)
    t = random(4, dtype=x.dtype, seed=1)
    zero = torch.zeros((), dtype=dtype)
    close_or_nan(
        norm_jvp(scaled, t.to(scaled.dtype), p, zero, None, False),
        norm_jvp(x, t, p, zero.double(), None, False).to(dtype),
        20 * rtol,
    )
    # tangent x-sized: the second order as well
    turned = scaled.flip(0)
    second = jvp(lambda x: backward(x, p), (scaled,), (turned,))[1]
    close_or_nan(second, jvp(lambda x: backward(x, p), (x,), (x.flip(0),))[1].to(scaled.dtype), 20 * rtol)


def test_powers_of_a_wide_range(backward):
    """|x_i| / n is below the smallest number, its power is not."""
    x = torch.tensor([1e-30, 1e20], dtype=torch.float32)
    for p in (1.1, 1.5, 0.5, 0.9):
        a = torch.tensor([1e-50, 1.0], dtype=F64)
        expected = a ** (p - 1) * (a**p).sum() ** (1 / p - 1)
        close_or_nan(backward(x, p), expected.float(), 1e-4)
    x = torch.tensor([1e-30, 1e20, -3e-30], dtype=torch.float32)
    close_or_nan(backward(x, -1.0), torch.tensor([9 / 16, 0, -1 / 16]), 1e-5)


@pytest.mark.parametrize("p", [-0.5, -1.0, -2.0])
def test_second_derivatives_of_a_wide_range_for_negative_orders(p, backward):
    """w_i is (m / |x_i|)^(1 - p), here 1e-34; a derivative of the inverse quotient would underflow."""
    x = torch.tensor([1e-4 * 10 ** (34 / (1 - p)), 1e-4, 3e-4], dtype=torch.float32)
    for v in torch.eye(3):
        second = jvp(lambda x: backward(x, p), (x,), (v,))[1]
        expected = jvp(lambda x: backward(x, p), (x.double(),), (v.double(),))[1].float()
        torch.testing.assert_close(second[0], expected[0], rtol=1e-4, atol=1e-44)
        close_or_nan(second[1:], expected[1:], 1e-4)


# -- conventions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [0.0, 1.0, -2.0]])
def test_zero_is_finite_to_third_order(p, dtype, values, backward):
    x = torch.tensor(values, dtype=dtype)
    t = torch.tensor([1.0, -0.5, 2.0], dtype=dtype)

    def first(x):
        return backward(x, p)

    def second(x):
        return jvp(first, (x,), (t,))[1]

    found = [first(x), second(x), jvp(second, (x,), (t,))[1]]
    x.requires_grad_()
    w = first(x)
    if w.requires_grad:
        (h,) = torch.autograd.grad((w * t).abs().square().sum() + (w * t).real.sum(), x, create_graph=True)
        found.append(h)
        if h.requires_grad:
            found += torch.autograd.grad((h * t).real.sum(), x, allow_unused=True, materialize_grads=True)
    for k, f in enumerate(found):
        assert finite(f), (k, f)
        if not any(values):
            assert not f.any(), (k, f)


@pytest.mark.parametrize("p", [2.0, 4.0, 6.0])
def test_even_orders_are_exact_at_zero_entries(p, backward):
    x = torch.tensor([0.0, 1.0, -2.0], dtype=F64)
    close_or_nan(jacrev(lambda x: backward(x, p))(x), hessian(lambda x: (x**p).sum() ** (1 / p))(x))


@pytest.mark.parametrize(
    "p, x, expected",
    [
        (2.0, [1.0, nan, 0.0], [nan, nan, nan]),
        (3.0, [1.0, nan, 0.0], [nan, nan, nan]),
        (0.5, [1.0, nan, 0.0], [nan, nan, nan]),
        (-1.0, [1.0, nan, 2.0], [nan, nan, nan]),
        (2.0, [1.0, inf, 0.0], [0.0, nan, 0.0]),
        (3.0, [1e200, inf, -inf], [0.0, nan, nan]),
        (-1.0, [1.0, inf, -1.0], [0.25, 0.0, -0.25]),
        (inf, [1.0, nan, 3.0], [0.0, nan, 0.0]),
        (-inf, [1.0, nan, 3.0], [0.0, nan, 0.0]),
        (1.0, [1.0, nan, -3.0], [1.0, nan, -1.0]),
        (inf, [2.0, -2.0, 1.0], [0.5, -0.5, 0.0]),
        (-inf, [2.0, -1.0, 1.0], [0.0, -0.5, 0.5]),
        (inf, [0.0, 0.0], [0.0, 0.0]),
        (1.0, [0.0, -3.0, inf], [0.0, -1.0, 1.0]),
        (0.0, [0.0, -3.0], [0.0, 0.0]),
        (-1.0, [0.0, 1.0], [0.0, 0.0]),
    ],
)
def test_edge_table(p, x, expected, backward):
    found = backward(torch.tensor(x, dtype=F64), p)
    for actual, wanted in zip(found.tolist(), expected):
        assert actual == pytest.approx(wanted, nan_ok=True)


# -- dtypes, layout, errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [p for p in ORDERS if p < 0 and p != -inf])
def test_infinite_entries_of_negative_orders_contribute_nothing(p, backward):
    """In every order: the gradient, its derivative and that of this one are those of the finite entries, and 0."""
    finite_entries, places = random(2), torch.tensor([0, 2])
    for infinite in (inf, -inf):
        x = torch.full((3,), infinite, dtype=F64).index_copy(0, places, finite_entries).requires_grad_()
        found, expected = [backward(x, p)], [backward(y := finite_entries.clone().requires_grad_(), p)]
        for _ in range(2):
            found.append(torch.autograd.grad(found[-1].abs().sum(), x, create_graph=True)[0])
            expected.append(torch.autograd.grad(expected[-1].abs().sum(), y, create_graph=True)[0])
        for f, e in zip(found, expected, strict=True):
            close_or_nan(f, torch.zeros(3, dtype=F64).index_copy(0, places, e))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", ORDERS)
def test_half_is_computed_in_float32(p, dtype, backward):
    x = random(40).to(dtype)
    expected = backward(x.float(), p).to(dtype)
    # a kernel that starts from the saved norm raises its rounding to the power p - 1
    power = 1 if math.isinf(p) else 1 + abs(p - 1)
    close_or_nan(backward(x, p), expected, 2 * power * torch.finfo(dtype).eps)


@pytest.mark.parametrize("p", ORDERS)
def test_layout_is_that_of_the_input(p):
    x = random(2, 3, 4).permute(1, 2, 0)
    for run in IMPLEMENTATIONS.values():
        assert run(random(4, 2), x, p, random(4, 2), [0], False).stride() == torch.empty_like(x).stride()


def test_errors_name_the_argument():
    x = random(3, 4)
    with pytest.raises(IndexError, match="2"):
        norm_backward.reference(random(3), x, 2.0, random(3), [2], False)
    with pytest.raises(RuntimeError, match="grad"):
        norm_backward.reference(random(4), x, 2.0, random(4), [1], False)
    with pytest.raises(TypeError, match="int64"):
        norm_jvp(torch.ones(3, dtype=torch.int64), torch.ones(3), 2.0, torch.ones(()))


# -- renorm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0, inf])
def test_renorm_is_scale_safe(p):
    """Far above maxnorm the result is x / n times maxnorm, of degree zero: its derivative goes as the inverse scale."""
    x, t = random(2, 3), random(2, 3, seed=1)
    plain = renorm.renorm_jvp(x * 1e6, t * 1e6, p, 0, 1.0)
    close_or_nan(renorm.renorm_jvp(x * 1e200, t * 1e200, p, 0, 1.0), plain, 1e-6)
    close_or_nan(
        renorm.renorm_backward(t * 1e200, x * 1e200, p, 0, 1.0),
        renorm.renorm_backward(t * 1e6, x * 1e6, p, 0, 1.0),
        1e-6,
    )
    close_or_nan(renorm.renorm_backward(t, x * 0, p, 0, 0.0), t)


# -- distances -------------------------------------------------------------------------------------------------------

DISTANCES = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, inf]


@pytest.mark.parametrize("p", DISTANCES)
@pytest.mark.parametrize("a, b", [((5, 3), (4, 3)), ((2, 1, 5, 3), (3, 4, 3)), ((5, 3), (2, 4, 3)), ((1, 1), (1, 1))])
def test_cdist_equals_stock_and_its_blocks_its_body(p, a, b):
    x1, x2 = random(*a), random(*b, seed=1)
    x2[..., 0, :] = x1[(0,) * (x1.dim() - 1)]  # a pair of equal points
    d = torch.ops.aten._cdist_forward(x1, x2, p, 2)
    g = random(*d.shape, seed=2)
    body = distance.cdist_backward.reference(g, x1, x2, p, d)
    close_or_nan(distance.cdist_backward(g, x1, x2, p, d), body)
    close_or_nan(body, torch.ops.aten._cdist_backward(g, x1, x2, p, d).sum_to_size(a))
    t1, t2 = random(*a, seed=3), random(*b, seed=4)
    for tangents in ((t1, t2), (t1, None), (None, t2)):
        arguments = (x1, tangents[0], x2, tangents[1], p)
        close_or_nan(distance.cdist_jvp(*arguments), distance.cdist_jvp.reference(*arguments))
    other = distance.cdist_backward(g.mT, x2, x1, p, d.mT)
    close_or_nan((distance.cdist_jvp(x1, t1, x2, t2, p) * g).sum(), (body * t1).sum() + (other * t2).sum())


@pytest.mark.parametrize("sizes", [(1, 7, 5, 3), (50, 200, 30, 40), (2, 300, 400, 9), (3, 2, 100_000, 2)])
def test_blocks_cover_everything_once(sizes):
    batch, rows, others, columns = sizes
    cover = torch.zeros(batch, rows)
    for b, r in distance._blocks(torch.empty(batch, rows, columns), torch.empty(batch, others, columns)):
        cover[b, r] += 1
    assert (cover == 1).all()


@pytest.mark.parametrize("p", DISTANCES)
@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_cdist_is_scale_safe(p, scale):
    x1, x2, g = random(6, 3), random(5, 3, seed=1), random(6, 5, seed=2)
    x1, x2 = torch.cat([x1, x1 / 3]), torch.cat([x2, x1[:1]])
    g = random(12, 6, seed=2)
    expected = distance.cdist_backward.reference(g, x1, x2, p, g)
    d = torch.ops.aten._cdist_forward(x1 * scale, x2 * scale, p, 2)
    close_or_nan(distance.cdist_backward(g, x1 * scale, x2 * scale, p, d), expected)
    # a few far or close pairs among ordinary ones
    x1 = torch.cat([x1, x1[:2] * scale])
    x2 = torch.cat([x2, x2[:2] * scale])
    g = random(14, 8, seed=3)
    d = torch.ops.aten._cdist_forward(x1, x2, p, 2)
    close_or_nan(distance.cdist_backward(g, x1, x2, p, d), distance.cdist_backward.reference(g, x1, x2, p, d))


def test_cdist_shares_ties_that_stock_does_not():
    x1, x2 = torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 0.0]])
    d = torch.cdist(x1, x2, inf)
    assert torch.ops.aten._cdist_backward(torch.ones(1, 1), x1, x2, inf, d).tolist() == [[1.0, 1.0]]
    assert distance.cdist_backward(torch.ones(1, 1), x1, x2, inf, d).tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("p", DISTANCES)
def test_pdist_equals_stock(p):
    x, t = random(5, 3), random(5, 3, seed=1)
    d = torch.ops.aten._pdist_forward(x, p)
    g = random(*d.shape, seed=2)
    found = distance.pdist_backward(g, x, p, d)
    close_or_nan(found, torch.ops.aten._pdist_backward(g, x, p, d))
    close_or_nan((distance.pdist_jvp(x, t, p) * g).sum(), (found * t).sum())


def test_vmap_of_formulas():
    x, g = random(3, 4, 2), random(3, 4, 4)

    def run(g, x):
        return distance.cdist_backward(g, x, x.flip(0), 1.5, torch.cdist(x, x.flip(0), 1.5))

    close_or_nan(vmap(run)(g, x), torch.stack([run(*pair) for pair in zip(g, x)]))


# -- what holds for the gradient w of every p-norm, whatever the input ------------------------------------------------

ANY_ORDER = st.one_of(st.sampled_from([1.0, 2.0, 3.0, 4.0, 1.5, 0.5, -1.0, -2.0, inf, -inf]), st.floats(0.3, 12.0))
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3)
FORMS = [mg.ops.norm_backward, mg.ops.norm_backward.reference]


@st.composite
def problems(draw):
    """(x, p, dim, keepdim): entries of modulus 1/4 to about 4, so that every power stays in range."""
    shape = draw(SHAPES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([torch.float64, torch.complex128]))
    x = torch.randn(shape, generator=generator, dtype=dtype)
    x = x + 0.25 * x.sgn()
    if draw(st.booleans()):
        x = x.mT if x.dim() > 1 else x.flip(0)
    dim = draw(st.one_of(st.none(), st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1)))
    return x, draw(ANY_ORDER), dim, draw(st.booleans())


def field(form, x, p, dim, keepdim):
    norm = torch.linalg.vector_norm(x, p, dim, keepdim)
    return form(torch.ones_like(norm), x, p, norm, dim, keepdim), norm


@pytest.mark.parametrize("form", FORMS, ids=["operator", "body"])
@settings(max_examples=60, deadline=None)
@given(problems())
def test_euler(form, problem):
    """A norm is homogeneous of degree one: sum Re(conj(w) x) = ||x||."""
    x, p, dim, keepdim = problem
    w, norm = field(form, x, p, dim, keepdim)
    product = (w.conj() * x).real if x.is_complex() else w * x
    torch.testing.assert_close(product.sum(dim, keepdim) if dim else _whole(product, keepdim), norm)


def _whole(product, keepdim):
    return product.sum().reshape([1] * product.dim() if keepdim else [])


@pytest.mark.parametrize("form", FORMS, ids=["operator", "body"])
@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(-290, 290))
def test_scale(form, problem, exponent):
    """w(c x) = w(x): also where the norm that the forward saves has left the range of its dtype."""
    x, p, dim, keepdim = problem
    if p <= 0.5:  # n itself, of the order of 5^(1/p) |x| and more, may leave the range at the ends
        exponent //= 2
    w, _ = field(form, x, p, dim, keepdim)
    scaled, _ = field(form, x * 2.0**exponent * 2.0**exponent, p, dim, keepdim)
    torch.testing.assert_close(scaled, w, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", FORMS, ids=["operator", "body"])
@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_dual_norm_of_the_gradient_is_one(form, problem):
    """For p >= 1 the gradient is a unit vector of the dual norm, 1/p + 1/q = 1; at ties of inf too."""
    x, p, dim, keepdim = problem
    if p < 1:
        return
    w, norm = field(form, x, p, dim, keepdim)
    q = inf if p == 1 else 1.0 if p == inf else p / (p - 1)
    torch.testing.assert_close(torch.linalg.vector_norm(w, q, dim, keepdim), torch.ones_like(norm))


@settings(max_examples=60, deadline=None)
@given(problems())
def test_operator_and_body_agree(problem):
    ours, reference = (field(form, *problem)[0] for form in FORMS)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-14)


@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(0, 2**32))
def test_duality(problem, seed):
    """<g, jvp(t)> = <vjp(g), t>."""
    x, p, dim, keepdim = problem
    generator = torch.Generator().manual_seed(seed)
    norm = torch.linalg.vector_norm(x, p, dim, keepdim)
    g = torch.randn(norm.shape, generator=generator, dtype=norm.dtype)
    t = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    forward = (g * mg.ops.norm_jvp(x, t, p, norm, dim, keepdim)).sum()
    pulled = mg.ops.norm_backward(g, x, p, norm, dim, keepdim)
    backward = ((pulled.conj() * t).real if x.is_complex() else pulled * t).sum()
    torch.testing.assert_close(forward, backward)
