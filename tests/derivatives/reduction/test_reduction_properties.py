"""Under override("*") every reduction gives PyTorch's derivatives, whatever the shape, strides and dims: property tests."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.func import jvp, vjp

import torch_manualgrad as mg

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
ALONG = {
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
    del ALONG["aminmax"]
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


@pytest.mark.parametrize("name", ALONG)
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_along_any_dim(name, data):
    x, view = data.draw(inputs(real=name in ORDERED))
    dim = data.draw(st.integers(-max(x.dim(), 1), max(x.dim(), 1) - 1))
    keepdim = data.draw(st.booleans())
    compare(lambda x: ALONG[name](view(x), dim, keepdim), x)
