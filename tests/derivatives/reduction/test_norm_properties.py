"""What holds for the gradient w of every p-norm, whatever the input: property tests of the operator and of its body."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

import torch_manualgrad as mg

inf = math.inf
ORDERS = st.one_of(st.sampled_from([1.0, 2.0, 3.0, 4.0, 1.5, 0.5, -1.0, -2.0, inf, -inf]), st.floats(0.3, 12.0))
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
    return x, draw(ORDERS), dim, draw(st.booleans())


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
