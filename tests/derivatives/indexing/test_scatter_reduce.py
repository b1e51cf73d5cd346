"""scatter_reduce and index_reduce beside a loop over entries: zeros, ties, indices smaller than the source, every order."""

import pytest
import torch
from helpers.tensors import random
from helpers.transforms import assert_all_close, third_derivatives
from torch.func import grad, jacrev, jvp

import torch_manualgrad as mg

F64 = torch.float64
INDEX = torch.tensor([[0, 2, 0], [0, 2, 1], [0, 0, 1], [0, 2, 1]])


def by_loop(x, dim, index, src, reduce, include_self=True):
    """Of matrices, along dim 0: the entries of each group, one after the other."""
    assert dim == 0
    groups = [[[] for _ in range(x.shape[1])] for _ in range(x.shape[0])]
    for i in range(index.shape[0]):
        for j in range(index.shape[1]):
            groups[int(index[i, j])][j].append(src[i, j])
    rows = []
    for i in range(x.shape[0]):
        row = []
        for j in range(x.shape[1]):
            group = groups[i][j] if groups[i][j] and not include_self else [x[i, j], *groups[i][j]]
            total = group[0]
            for y in group[1:]:
                total = total * y if reduce == "prod" else total + y
            row.append(total / len(group) if reduce == "mean" else total)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def tensors(zeros, dtype=F64):
    """A result's own and a source with so many zeros, most of them in one group."""
    x, src = random(3, 3, dtype=dtype), random(5, 4, dtype=dtype, seed=1)
    for place in [(0, 0), (1, 0), (2, 0), (1, 1)][:zeros]:
        src[place] = 0
    if zeros > 3:
        x[0, 0] = 0
    return x, src


def packed(function, reduce, include_self, weights):
    """A nonlinear function of the entries of both tensors in one."""

    def f(z):
        x, src = z[:9].reshape(3, 3), z[9:].reshape(5, 4)
        return (weights * function(x, 0, INDEX, src, reduce, include_self=include_self)).sin().sum()

    return f


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce, zeros", [("prod", n) for n in range(5)] + [("mean", 0), ("sum", 0)])
def test_third_order_with_any_number_of_zeros(reduce, zeros, include_self):
    z = torch.cat([t.reshape(-1) for t in tensors(zeros)])
    directions = [random(29, seed=k) for k in (2, 3, 4)]
    weights = random(3, 3, seed=5)
    f = packed(by_loop, reduce, include_self, weights)
    expected = third_derivatives(f, z, directions)["rrr"]
    with mg.override():
        found = third_derivatives(packed(torch.scatter_reduce, reduce, include_self, weights), z, directions)
    assert_all_close(found, expected)


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_an_index_smaller_than_the_source(reduce):
    x, src = random(3, 4), random(5, 4, seed=1)
    small = INDEX[:2, :3]
    with pytest.raises(RuntimeError):
        grad(lambda src: torch.scatter_reduce(x, 0, small, src, reduce).square().sum())(src)
    with mg.override():
        found = grad(lambda src: torch.scatter_reduce(x, 0, small, src, reduce).square().sum())(src)
    expected = grad(lambda src: torch.scatter_reduce(x, 0, small, src[:2, :3].clone(), reduce)[:, :3].square().sum())
    with mg.override():
        torch.testing.assert_close(found[:2, :3], expected(src)[:2, :3])
    assert not found[2:].any() and not found[:, 3:].any()


@pytest.mark.parametrize("function", [torch.scatter, torch.scatter_add])
def test_scatters_of_an_index_smaller_than_the_source(function):
    x, src, index = random(3, 4), random(5, 4, seed=1), torch.tensor([[0, 1], [2, 0]])

    def f(src):
        return function(x, 0, index, src).pow(3).sum()

    with pytest.raises(RuntimeError, match="invalid gradient"):
        grad(f)(src)
    with mg.override():
        value = grad(f)(src)
        curvature = jvp(grad(f), (src,), (torch.ones_like(src),))[1]
    landed = function(x, 0, index, src).gather(0, index)
    assert torch.equal(value[:2, :2], 3 * landed**2) and value.count_nonzero() == 4
    if function is torch.scatter:
        assert torch.equal(curvature[:2, :2], 6 * landed)


def test_an_extremum_is_shared_by_the_entries_that_count():
    x, index, src = torch.zeros(2), torch.tensor([0, 0, 0]), torch.tensor([-1.0, 0.0, 0.0])

    def f(src):
        return torch.scatter_reduce(x, 0, index, src, "amax", include_self=False)[0]

    assert grad(f)(src).sum() < 0.9  # an entry that does not count has a share
    with mg.override():
        assert grad(f)(src).tolist() == [0, 0.5, 0.5]


def test_products_that_leave_the_range():
    src = torch.tensor([1e-200, 1e-200, 1e200], dtype=F64)
    with mg.override():

        def f(src):
            return torch.ones(1, dtype=F64).scatter_reduce(0, torch.zeros(3, dtype=torch.long), src, "prod")[0]

        torch.testing.assert_close(grad(f)(src), torch.tensor([1.0, 1.0, 0.0], dtype=F64))


def test_complex_products():
    x, src = tensors(3, torch.complex128)
    weights = random(3, 3, dtype=torch.complex128, seed=3)
    expected = grad(lambda src: (weights * by_loop(x, 0, INDEX, src, "prod")).sum().abs())(src)
    with mg.override():
        found = grad(lambda src: (weights * torch.scatter_reduce(x, 0, INDEX, src, "prod")).sum().abs())(src)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_index_reduce_is_scatter_reduce_with_an_index_for_each_slice(reduce, include_self):
    x, src, index = random(3, 4), random(5, 4, seed=1), torch.tensor([0, 2, 0, 0, 2])
    expanded = index[:, None].expand(5, 4)
    with mg.override():
        for nested in (jacrev, lambda f: lambda x: jvp(f, (x,), (random(5, 4, seed=2),))[1]):
            one = nested(lambda src: torch.index_reduce(x, 0, index, src, reduce, include_self=include_self))(src)
            two = nested(lambda src: torch.scatter_reduce(x, 0, expanded, src, reduce, include_self=include_self))(src)
            torch.testing.assert_close(one, two)


def test_expanded_and_empty_sources():
    x, index = random(3, 4), torch.tensor([[0, 0, 1, 2], [0, 1, 1, 2]])
    with mg.override():
        source = random(1).requires_grad_()
        torch.scatter_reduce(x, 0, index, source.expand(2, 4), "prod").sum().backward()
        assert source.grad.isfinite().all()
        empty = torch.empty(0, dtype=torch.long)
        y = x[0].clone().requires_grad_()
        src = random(0).requires_grad_()
        torch.scatter_reduce(y, 0, empty, src, "prod").sum().backward()
        assert y.grad.eq(1).all() and src.grad.shape == (0,)


def test_vmap_and_compile():
    x, src = tensors(2)

    def f(x, src):
        return torch.scatter_reduce(x, 0, INDEX, src, "prod").square().sum()

    with mg.override():
        both = grad(f, argnums=(0, 1))
        expected = [both(x * k, src * k) for k in (1.0, 2.0)]
        batched = torch.func.vmap(both)(torch.stack([x, 2 * x]), torch.stack([src, 2 * src]))
        compiled = torch.compile(lambda x, s: both(x, s), backend="aot_eager", dynamic=True)(x, src)
    for i in range(2):
        torch.testing.assert_close(batched[i], torch.stack([e[i] for e in expected]))
        torch.testing.assert_close(compiled[i], expected[0][i])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduce", ["amax", "mean"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("op", ["scatter", "index"])
def test_entries_are_counted_exactly(op, reduce, include_self, dtype):
    """A half cannot count 3000 entries one by one."""
    n = 3000
    x, src = torch.ones(2, dtype=dtype, requires_grad=True), torch.ones(n, dtype=dtype, requires_grad=True)
    index = torch.zeros(n, dtype=torch.int64)
    with mg.override():
        if op == "scatter":
            y = torch.scatter_reduce(x, 0, index, src, reduce, include_self=include_self)
        else:
            y = torch.index_reduce(x, 0, index, src, reduce, include_self=include_self)
        for _ in range(3):  # the third time it is a recording
            of_x, of_src = torch.autograd.grad(y, (x, src), torch.tensor([60.0, 2.0], dtype=dtype), retain_graph=True)
    share = torch.tensor(60.0, dtype=dtype) / (n + include_self)
    torch.testing.assert_close(of_x, torch.stack([share * include_self, torch.tensor(2.0, dtype=dtype)]))
    torch.testing.assert_close(of_src, share.expand(n))


@pytest.mark.parametrize("name", ["aten::scatter_reduce.two", "aten::index_reduce"])
def test_no_call_asks_python_who_serves_it(name):
    """Deciding took as long as the operator. The rule takes all calls, as its backwards take no longer than PyTorch's."""
    assert mg.rules[name].defer_to_stock is None
