"""Values of sparse Hessians, by each coloring and in every mode, and blocks of separable functions."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

import torch_manualgrad as mg
from torch_manualgrad.sparsity import PatternError


def example(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def arrow(x):
    return (x[0] * x[1:] ** 2).sum() + x[0].exp()


def surface(u):
    """The area of a graph: each element interacts with neighbors in both directions."""
    return (1 + u.diff(dim=0)[:, :-1] ** 2 + u.diff(dim=1)[:-1] ** 2).sqrt().sum()


def tree(x):
    """A binary tree."""
    return sum((x[k] * x[(k - 1) // 2]).sin() for k in range(1, len(x)))


FUNCTIONS = {
    "rosenbrock": (rosenbrock, (9,)),
    "arrow": (arrow, (9,)),
    "surface": (surface, (4, 5)),
    "tree": (tree, (12,)),
}


@pytest.mark.parametrize("coloring", ["star", "acyclic", "columns"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_hessian_is_the_dense_one(name, coloring):
    f, shape = FUNCTIONS[name]
    x = example(*shape)
    for ordering in ("auto", "natural", "random"):
        found = mg.sparse_hessian(f, coloring=coloring, ordering=ordering, check=True)(x)
        torch.testing.assert_close(found.to_dense(), torch.func.hessian(f)(x))


@pytest.mark.parametrize("mode", ["fwd-rev", "rev-rev"])
def test_modes(mode):
    x = example(9)
    plan = mg.sparse_hessian.prepare(rosenbrock, x, mode=mode)
    torch.testing.assert_close(plan.matrix(x).to_dense(), torch.func.hessian(rosenbrock)(x))


def test_colors():
    x = example(40)
    assert [mg.sparse_hessian.prepare(arrow, x, coloring=c).colors for c in ("columns", "star", "acyclic")] == [
        40,
        2,
        2,
    ]
    assert [mg.sparse_hessian.prepare(rosenbrock, x, coloring=c).colors for c in ("columns", "star", "acyclic")] == [
        3,
        3,
        2,
    ]
    plan = mg.sparse_hessian.prepare(rosenbrock, x)
    assert repr(plan) == "HessianPlan(40 x 40, 118 nonzeros, 3 colors, mode 'fwd-rev')" and plan.steps == 1
    assert mg.sparse_hessian.prepare(rosenbrock, x, coloring="acyclic").steps == 20


@pytest.mark.parametrize("coloring", ["star", "acyclic"])
def test_values_are_differentiable_in_every_mode(coloring):
    x = example(5)
    plan = mg.sparse_hessian.prepare(rosenbrock, x, coloring=coloring)
    dense = lambda x: torch.func.hessian(rosenbrock)(x)[plan.rows, plan.columns]  # noqa: E731
    assert gradcheck(plan.values, (x.clone().requires_grad_(),), check_forward_ad=True)
    for outer in (torch.func.jacfwd, torch.func.jacrev):
        torch.testing.assert_close(outer(plan.values)(x), outer(dense)(x))
    batch = example(3, 5)
    torch.testing.assert_close(torch.vmap(plan.values)(batch), torch.stack([dense(x) for x in batch]))
    compiled = torch.compile(plan.values, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), dense(x))


def test_layouts_and_arguments():
    f = lambda x, a: (a * x[1:] ** 2 * x[:-1]).sum()  # noqa: E731
    x, a = example(6), example(5).requires_grad_()
    expected = torch.func.hessian(f)(x, a)
    for layout in ("csr", "bsr"):
        found = mg.sparse_hessian(f, layout=layout, blocksize=(2, 2))(x, a)
        torch.testing.assert_close(found.to_dense(), expected)
    plan = mg.sparse_hessian.prepare(f, x, a)
    (gradient,) = torch.autograd.grad(plan.values(x, a).sum(), a)
    torch.testing.assert_close(gradient, torch.func.grad(lambda a: torch.func.hessian(f)(x, a).sum())(a))


def test_given_patterns():
    x = example(6)
    given = torch.ones(6, 6).triu(-1).tril(1)
    assert mg.sparse_hessian.prepare(rosenbrock, x, pattern=given).nnz == 16
    with pytest.raises(PatternError, match="the pattern misses nonzeros"):
        mg.sparse_hessian.prepare(rosenbrock, x, pattern=torch.eye(6))
    with pytest.raises(ValueError, match="pattern: expected a symmetric pattern"):
        mg.sparse_hessian.prepare(rosenbrock, x, pattern=given.triu())


def test_a_linear_function_has_no_entries():
    x = example(3, 2)
    plan = mg.sparse_hessian.prepare(lambda x: x.sum(), x)
    assert (plan.colors, plan.values(x).shape, plan.matrix(x).shape) == (0, (0,), (3, 2, 3, 2))
    assert mg.sparse_hessian(lambda x: x.sum() ** 2)(example(0)).shape == (0, 0)


def test_errors():
    x = example(4)
    with pytest.raises(ValueError, match="f: expected a function that returns a real tensor without dims"):
        mg.sparse_hessian(torch.sin)(x)
    with pytest.raises(TypeError, match="x: expected a real tensor"):
        mg.sparse_hessian(arrow)(x.to(torch.complex128))
    with pytest.raises(ValueError, match="coloring: expected 'star' or 'acyclic' or 'columns', got 'x'"):
        mg.sparse_hessian(arrow, coloring="x")
    with pytest.raises(RuntimeError, match="sparse tensors cannot pass transforms"):
        torch.vmap(mg.sparse_hessian(arrow))(example(2, 4))


# -- blocks -----------------------------------------------------------------------------------------------------------


def separable(x, scale=1.0):
    return (scale * x.sin().prod(-1)).sum() + (x**3).sum()


@pytest.mark.parametrize("shape", [(5, 3), (4, 2, 2), (6,)])
def test_blocks_are_those_of_the_hessian(shape):
    x = example(*shape)
    f = separable if len(shape) == 2 else lambda x: (x**3).sum() + x.reshape(len(x), -1).prod(1).sum()
    full = torch.func.hessian(f)(x)
    expected = torch.stack([full[i].select(x.dim() - 1, i) for i in range(len(x))])
    for mode in ("auto", "fwd-rev", "rev-rev"):
        found = mg.hessian_blocks(f, mode=mode)(x)
        assert found.shape == (*x.shape, *x.shape[1:])
        torch.testing.assert_close(found, expected)


def test_blocks_are_differentiable():
    x = example(3, 2).requires_grad_()
    assert gradcheck(mg.hessian_blocks(separable), (x,), check_forward_ad=False)
    blocks = mg.hessian_blocks(separable, check=False)
    torch.testing.assert_close(torch.vmap(blocks)(example(2, 3, 2))[1], blocks(example(2, 3, 2)[1]))
    scale = torch.tensor(2.0, dtype=torch.float64)
    assert torch.func.jacfwd(lambda s: blocks(x, s))(scale).shape == (3, 2, 2)


def test_a_function_that_is_not_separable_raises():
    with pytest.raises(
        PatternError, match=r"not separable over the first dim of x: the second derivative in x.0. and x.1."
    ):
        mg.hessian_blocks(lambda x: (x[1:] * x[:-1]).sum())(example(4, 2))
    with pytest.raises(TypeError, match="with a batch dim"):
        mg.hessian_blocks(torch.sin)(torch.tensor(1.0))
    assert mg.hessian_blocks(separable)(example(0, 3)).shape == (0, 3, 3)


@pytest.mark.parametrize("mode", ["auto", "fwd-rev", "rev-rev"])
def test_blocks_of_dual_numbers(mode):
    x = example(3, 2)
    blocks = mg.hessian_blocks(lambda x: (x.sin().prod(1) + x.exp().sum(1) ** 2).sum(), mode=mode, check=False)
    expected = torch.func.jvp(blocks, (x,), (x,))[1]
    with torch.autograd.forward_ad.dual_level():
        found = torch.autograd.forward_ad.unpack_dual(blocks(torch.autograd.forward_ad.make_dual(x, x))).tangent
    torch.testing.assert_close(found, expected)


def test_an_expanded_point():
    """torch.func.jvp takes none."""
    x = torch.full((1,), 2.0, dtype=torch.float64).expand(3)
    cubes = lambda x: x**3  # noqa: E731
    for mode in ("auto", "fwd", "rev"):
        torch.testing.assert_close(mg.sparse_jacobian(cubes, mode=mode)(x).to_dense(), 12 * torch.eye(3, dtype=x.dtype))
    torch.testing.assert_close(
        mg.sparse_hessian(lambda x: cubes(x).sum())(x).to_dense(), 12 * torch.eye(3, dtype=x.dtype)
    )
    torch.testing.assert_close(mg.hessian_blocks(lambda x: cubes(x).sum())(x), 6 * x)
