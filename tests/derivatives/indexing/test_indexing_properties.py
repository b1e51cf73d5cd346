"""Index and shape operators on tensors of many shapes, strides and dims: what PyTorch has right, the rules have too."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.func import jvp, vjp

import torch_manualgrad as mg

DTYPES = [torch.float64, torch.complex128]


@st.composite
def tensors(draw, low=1, high=3):
    """Any strides: permuted, of every second entry."""
    shape = draw(st.lists(st.integers(1, 4), min_size=low, max_size=high))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    dtype = draw(st.sampled_from(DTYPES))
    x = torch.randn([2 * n for n in shape], dtype=dtype, generator=generator)
    x = x[tuple(slice(None, None, 2) for _ in shape)] if draw(st.booleans()) else x[tuple(slice(n) for n in shape)]
    return x.permute(draw(st.permutations(range(len(shape)))))


def integers(draw, below, *shape):
    """Indices, repeated ones too."""
    n = torch.Size(shape).numel()
    return torch.tensor(draw(st.lists(st.integers(0, below - 1), min_size=n, max_size=n))).long().reshape(shape)


def along(draw, x):
    return draw(st.integers(-x.dim(), x.dim() - 1))


def gather(draw, x):
    dim = along(draw, x)
    shape = [draw(st.integers(1, n)) for n in x.shape]
    shape[dim] = draw(st.integers(1, 5))
    index = integers(draw, x.shape[dim], *shape)
    return lambda x: torch.gather(x, dim, index)


def scatter_add(draw, x):
    dim = along(draw, x)
    sizes = list(x.shape)
    sizes[dim] = 3
    index = integers(draw, 3, *x.shape)
    return lambda x: torch.ones(sizes, dtype=x.dtype).scatter_add(dim, index, x)


def scatter_prod(draw, x):
    dim = along(draw, x)
    sizes = list(x.shape)
    sizes[dim] = 2
    index = integers(draw, 2, *x.shape)
    return lambda x: torch.ones(sizes, dtype=x.dtype).scatter_reduce(dim, index, x, "prod")


def take(draw, x):
    index = integers(draw, x.numel(), 2, 3) - draw(st.integers(0, 1)) * x.numel()
    return lambda x: torch.take(x, index)


def index(draw, x):
    indices = [integers(draw, n, 2) if draw(st.booleans()) else None for n in x.shape]
    indices = indices if any(i is not None for i in indices) else [integers(draw, x.shape[0], 3)]
    return lambda x: torch.ops.aten.index(x, indices)


def index_put(draw, x):
    where = integers(draw, x.shape[0], 3)
    return lambda x: x.index_put((where,), x[:1], accumulate=True)


def index_add(draw, x):
    dim = along(draw, x)
    where = integers(draw, 3, x.shape[dim])
    sizes = list(x.shape)
    sizes[dim] = 3
    return lambda x: torch.ones(sizes, dtype=x.dtype).index_add(dim, where, x, alpha=-2)


def index_select(draw, x):
    dim = along(draw, x)
    where = integers(draw, x.shape[dim], 4)
    return lambda x: torch.index_select(x, dim, where)


def masked_select(draw, x):
    mask = integers(draw, 2, *x.shape).bool()
    return lambda x: torch.masked_select(x, mask)


def masked_scatter(draw, x):
    mask = integers(draw, 2, *x.shape).bool()
    return lambda x: torch.zeros_like(x).masked_scatter(mask, x.contiguous())


def cat(draw, x):
    dim = along(draw, x)
    return lambda x: torch.cat([x, x.narrow(dim, 0, 1), x], dim)


def stack(draw, x):
    dim = along(draw, x)
    return lambda x: torch.stack([x, 2 * x], dim)


def roll(draw, x):
    dims, shift = [along(draw, x), along(draw, x)], draw(st.integers(-3, 3))
    return lambda x: torch.roll(x, [shift, -1], dims)


def repeat(draw, x):
    repeats = [draw(st.integers(0, 3)) for _ in range(x.dim() + draw(st.integers(0, 1)))]
    return lambda x: x.repeat(repeats)


def constant_pad(draw, x):
    pad = [draw(st.integers(-1, 2)) if n > 2 else draw(st.integers(0, 2)) for n in reversed(x.shape) for _ in range(2)]
    return lambda x: torch.constant_pad_nd(x, pad, 1.5)


def triangle(draw, x):
    diagonal = draw(st.integers(-3, 3))
    return lambda x: torch.tril(x[None, :], diagonal)


def diag_embed(draw, x):
    offset = draw(st.integers(-2, 2))
    return lambda x: torch.diag_embed(x, offset, 0, -1)


def slice_scatter(draw, x):
    dim = along(draw, x)
    start = draw(st.integers(0, x.shape[dim] - 1))
    return lambda x: torch.zeros_like(x).real.slice_scatter(x.real.narrow(dim, start, 1), dim, start, start + 1)


OPERATORS = [
    gather, scatter_add, scatter_prod, take, index, index_put, index_add, index_select, masked_select, masked_scatter,
    cat, stack, roll, repeat, constant_pad, triangle, diag_embed, slice_scatter,
]  # fmt: skip


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda f: f.__name__)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_rev_and_fwd_are_stocks(operator, data):
    x = data.draw(tensors())
    x = x.real if operator is scatter_prod else x  # of which PyTorch has no complex derivative
    f = operator(data.draw, x)
    if data.draw(st.booleans()):
        given, f = f, lambda x: given(x[:1].expand(x.shape))
    t = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    y = f(x)
    g = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2))
    reverse, forward = vjp(f, x)[1](g)[0], jvp(f, (x,), (t,))[1]
    with mg.override("*"):
        torch.testing.assert_close(vjp(f, x)[1](g)[0], reverse)
        found = jvp(f, (x,), (t,))[1]
    if operator is scatter_prod:  # where PyTorch's tangent is zero
        torch.testing.assert_close((found.conj() * g).sum().real, (t.conj() * reverse).sum().real)
    else:
        torch.testing.assert_close(found, forward)
