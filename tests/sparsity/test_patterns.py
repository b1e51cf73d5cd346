"""Patterns of functions: exact where they can be, for all values, and an error where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_manualgrad as mg
from torch_manualgrad.sparsity import PatternError
from torch_manualgrad.sparsity.detection import detect

DOUBLE = {"dtype": torch.float64}


def example(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), **DOUBLE)


def pattern(f, x, *args):
    return detect(f, x, args).pattern.dense()


def dense(f, x, *args):
    return torch.func.jacrev(f)(x, *args).reshape(-1, x.numel()) != 0


def into_zeros(x):
    out = torch.zeros_like(x)
    out[1:] = x[1:] * x[:-1]
    out[0] = x[0]
    return out


def views_and_writes(x):
    y = x.clone()
    left, right = y[:3], y.view(2, 4)[1]
    left += 2 * right[:3]
    y[-1] = 0
    right.t_() if right.dim() > 1 else right.neg_()
    return y.reshape(4, 2).t()


def overwritten(x):
    y = x.repeat(2)
    y[x.numel() :] = 1
    y[::2].copy_(x[:8].flip(0))
    return y


def complex_parts(x):
    z = torch.view_as_complex(x.reshape(4, 2))
    z = z.conj() * torch.tensor([1 + 1j, 2 - 1j, 3 + 1j, 4 + 1j], dtype=z.dtype)
    return torch.cat([z.real, z.imag, torch.view_as_real(z)[:, 0]])


INDEX = torch.tensor([0, 3, 3, 5])
EXACT = {
    "neighbors": (lambda x: x[1:] * x[:-1], 8),
    "roll": (lambda x: torch.roll(x, 1) - x, 8),
    "into zeros": (into_zeros, 8),
    "views and writes": (views_and_writes, 8),
    "overwritten": (overwritten, 8),
    "permuted": (lambda x: x.reshape(2, 2, 2).permute(2, 0, 1).contiguous().exp(), 8),
    "gather": (lambda x: x[INDEX] ** 2, 8),
    "index_add": (lambda x: torch.zeros(4, **DOUBLE).index_add(0, INDEX.clamp(max=3), x[:4] * 2), 8),
    "index_put": (lambda x: x.index_put((INDEX,), x[:4] ** 2, accumulate=True), 8),
    "scatter": (lambda x: x.scatter(0, torch.tensor([1, 4]), x[6:]), 8),
    "rows": (lambda x: x.reshape(4, 2).sum(1), 8),
    "softmax of rows": (lambda x: torch.softmax(x.reshape(4, 2), 1), 8),
    "product with a matrix": (lambda x: x.reshape(4, 2) @ torch.ones(2, 3, **DOUBLE), 8),
    "broadcast": (lambda x: x[:4, None] * x[None, 4:], 8),
    "pad": (lambda x: F.pad(x[None], (2, 1), mode="circular")[0].diff(), 8),
    "padded with a number": (lambda x: F.pad(x, (2, 1), value=3.0), 8),
    "reflected": (lambda x: F.pad(x[None], (2, 1), mode="reflect")[0], 8),
    "convolution": (lambda x: F.conv1d(x.reshape(1, 1, 8), torch.ones(2, 1, 3, **DOUBLE), padding=1), 8),
    "dilated, strided": (
        lambda x: F.conv1d(x.reshape(1, 2, 8), torch.ones(4, 1, 2, **DOUBLE), stride=2, dilation=3, groups=2), 16
    ),
    "transposed": (
        lambda x: F.conv_transpose1d(
            x.reshape(1, 2, 4), torch.ones(2, 3, 3, **DOUBLE), stride=2, padding=1, output_padding=1, groups=1
        ),
        8,
    ),
    "two dims": (lambda x: F.conv2d(x.reshape(1, 1, 4, 4), torch.ones(1, 1, 3, 2, **DOUBLE), padding=(1, 0)), 16),
    "average pool": (lambda x: F.avg_pool1d(x.reshape(1, 1, 8), 3, 2, 1), 8),
    "layer norm": (lambda x: F.layer_norm(x.reshape(4, 2), (2,)) + x.reshape(4, 2), 8),
    "cat": (lambda x: torch.cat([x[::2], x[1::2].sin(), torch.ones(2, **DOUBLE)]), 8),
    "vmap inside": (lambda x: torch.vmap(lambda a, b: a * b.sum())(x[:4], x.reshape(4, 2)), 8),
    "grad inside": (lambda x: torch.func.grad(lambda x: (x[1:] * x[:-1]).square().sum())(x), 8),
    "autograd inside": (lambda x: torch.autograd.grad((x[1:] ** 2 * x[:-1]).sum(), x, create_graph=True)[0], 8),
    "jvp inside": (lambda x: torch.func.jvp(lambda x: x[1:] * x[:-1].sin(), (x,), (torch.ones_like(x),))[1], 8),
    "complex inside": (complex_parts, 8),
    "determinants": (lambda x: torch.linalg.det(x.reshape(2, 2, 2)), 8),
    "solve": (lambda x: torch.linalg.solve(x.reshape(2, 2, 2), torch.ones(2, 2, **DOUBLE)), 8),
    "float32 and back": (lambda x: x.float().double()[1:] * x[:-1], 8),
    "attention": (lambda x: F.scaled_dot_product_attention(*[x.reshape(2, 1, 2, 2)] * 3), 8),
    "einsum": (lambda x: torch.einsum("bi,ij->bj", x.reshape(4, 2), torch.ones(2, 2, **DOUBLE)), 8),
    "cumsum of rows": (lambda x: x.reshape(4, 2).flip(1).cumsum(1)[:, -1], 8),
    "a constant": (lambda x: torch.ones(3, **DOUBLE), 8),
    "a number": (lambda x: x[3] * x[4], 8),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_patterns_are_exact(name):
    f, n = EXACT[name]
    x = example(n)
    found = detect(f, x, ())
    assert not found.conservative
    assert torch.equal(found.pattern.dense(), dense(f, x))


def test_a_pattern_holds_for_all_values():
    x = -torch.ones(4, **DOUBLE)
    assert torch.equal(pattern(torch.relu, x), torch.eye(4, dtype=torch.bool))
    assert torch.equal(pattern(lambda x: x * 0, x), torch.eye(4, dtype=torch.bool))
    both = pattern(lambda x: torch.where(x > 0, x, x.flip(0)), x)
    assert torch.equal(both, torch.eye(4, dtype=torch.bool) | torch.eye(4, dtype=torch.bool).flip(0))
    assert pattern(lambda x: x.max()[None], x).all()
    assert pattern(lambda x: x.sort().values, x).all()
    assert pattern(lambda x: x[x.argmax(keepdim=True)], x).all()
    assert pattern(lambda x: x[(x > 0).long()], x).all()
    assert pattern(lambda x: torch.zeros_like(x).scatter(0, x.argsort(), x), x).all()


def test_discrete_values_have_no_derivative():
    x = example(4)
    assert not pattern(lambda x: x.round() + x.sign() + x.floor() + (x > x.flip(0)).double(), x).any()
    assert torch.equal(pattern(lambda x: x * (x.sum() > 0), x), torch.eye(4, dtype=torch.bool))


def test_what_has_the_shape_of_x_is_constant():
    x = example(4)
    assert torch.equal(pattern(lambda x: x[torch.zeros_like(x, dtype=torch.int64)], x), torch.eye(4)[[0] * 4] > 0)
    assert torch.equal(pattern(lambda x: x * float(torch.ones_like(x).sum()), x), torch.eye(4, dtype=torch.bool))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * x[0].item(),
        lambda x: x * float(x.abs().max()),
        lambda x: x[x > 0],
        lambda x: x * len(x.unique()),
        lambda x: x.nonzero().double(),
        lambda x: x * sum(x.tolist()),
        lambda x: x * float(x.detach().numpy()[0]),
        lambda x: x if torch.equal(x, x) else x,
    ],
)
def test_what_depends_on_values_raises(f):
    with pytest.raises(PatternError, match="values"):
        detect(f, example(4), ())


def test_results_that_are_no_dense_tensors_raise():
    with pytest.raises(TypeError, match="f: expected a function that returns a tensor"):
        detect(lambda x: (x, x), example(4), ())
    with pytest.raises(TypeError, match="f: expected a dense floating point"):
        detect(lambda x: x.argsort(), example(4), ())
    with pytest.raises(PatternError, match="returns a tensor of layout torch.sparse_coo that depends on x"):
        detect(lambda x: x.to_sparse(), example(4), ())
    with pytest.raises(PatternError, match="returns a nested tensor that depends on x"):
        detect(lambda x: torch.nested.nested_tensor([x[:2], x]).to_padded_tensor(0.0), example(4), ())
    with pytest.raises(PatternError, match="Control flow such as torch.cond cannot be followed"):
        detect(lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)), example(4), ())


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(0) * 2


def test_a_function_with_its_own_backward_depends_on_everything():
    x = example(4)
    found = detect(lambda x: Reversed.apply(x) + x, x, ())
    assert found.pattern.dense().all() and found.conservative == {"autograd.Function Reversed": 1}
    found = detect(lambda x: Reversed.apply(x).sum(), x, (), second=True)
    assert found.pattern.dense().all()


def test_operators_of_libraries_depend_on_everything():
    with torch.library._scoped_library("sparsity_test", "FRAGMENT") as library:
        library.define("swap(Tensor x) -> Tensor")
        library.impl("swap", lambda x: x.flip(0) * 2, "CompositeExplicitAutograd")
        found = detect(lambda x: torch.cat([torch.ops.sparsity_test.swap(x[:2]), x]), example(4), ())
    assert found.conservative == {"sparsity_test.swap.default": 1}
    assert found.pattern.dense()[:, :2][:2].all() and not found.pattern.dense()[:2, 2:].any()


def test_custom_operators_of_this_package_depend_on_everything():
    @mg.custom_op("sparsitytest::twice(Tensor x) -> Tensor")
    def twice(x):
        return 2 * x

    @twice.impl_save_for_backward
    def save(inputs, output):
        return ()

    @twice.impl_backward
    def backward(ctx, saved, grad):
        return {"x": 2 * grad}

    found = detect(lambda x: torch.cat([twice(x[:2]), x]), example(4), ())
    assert found.conservative == {"sparsitytest.twice.default": 1}
    assert found.pattern.dense()[:2, :2].all() and not found.pattern.dense()[:2, 2:].any()


def test_under_an_override():
    x = example(8)
    f = lambda x: torch.softmax(x.reshape(4, 2), 1) * torch.linalg.norm(x.reshape(4, 2), dim=1, keepdim=True)  # noqa: E731
    expected = pattern(f, x)
    with mg.override("*"):
        assert torch.equal(pattern(f, x), expected)


def test_compiled_functions_run_eagerly():
    f = torch.compile(lambda x: x[1:] * x[:-1], backend="eager")
    x = example(8)
    f(x)
    assert torch.equal(pattern(f, x), dense(lambda x: x[1:] * x[:-1], x))


def test_a_sparse_matrix_has_its_pattern():
    a = torch.eye(4, **DOUBLE).roll(1, 0)
    for sparse in (a.to_sparse(), a.to_sparse_csr()):
        f = lambda x, s=sparse: (s @ x.reshape(4, 2)).reshape(-1)  # noqa: E731
        assert torch.equal(pattern(f, example(8)), torch.kron(a, torch.eye(2, **DOUBLE)) != 0)
        assert torch.equal(pattern(lambda x, s=sparse: s @ x, example(4)), a != 0)


def test_inputs_of_any_shape_and_stride():
    x = example(4, 3).t()
    f = lambda x: x[:, 1:] - x[:, :-1]  # noqa: E731
    assert torch.equal(pattern(f, x), dense(f, x))
    assert pattern(lambda x: x, example(0)).shape == (0, 0)
    assert pattern(lambda x: x.exp(), torch.tensor(1.0)).tolist() == [[True]]
    expanded = torch.ones(1, **DOUBLE).expand(3)
    assert torch.equal(pattern(torch.sin, expanded), torch.eye(3, dtype=torch.bool))


def test_a_run_leaves_the_input_alone():
    x = example(4).requires_grad_()
    before = x.detach().clone()

    def f(x):
        return x.mul(2).add_(1)

    detect(f, x, ())
    assert torch.equal(x.detach(), before) and x.grad is None


def test_memory_that_is_freed_is_not_mistaken():
    def f(x):
        out = x[:1] * 0
        for _ in range(20):
            y = x * 2
            del y
            constant = torch.ones(8, **DOUBLE)
            out = out + constant[:1]
        return out

    assert pattern(f, example(8)).sum() == 1


@pytest.mark.parametrize(
    "f, expected",
    [
        (lambda x: (x[1:] * x[:-1]).sum(), torch.ones(4, 4).triu(-1).tril(1) - torch.eye(4)),
        (lambda x: x.square().sum(), torch.eye(4)),
        (lambda x: (x + x.flip(0)).sum() + x.relu().sum() + x.abs().sum(), torch.zeros(4, 4)),
        (lambda x: x.sum() ** 2, torch.ones(4, 4)),
        (lambda x: (x[0] / x[1:]).sum(), None),
        (lambda x: x[:2] @ x[2:], torch.eye(4).roll(2, 0)),
        (
            lambda x: (x[:2, None] * torch.ones(2, 2, **DOUBLE)).sum() + x[3].exp(),
            torch.diag(torch.tensor([0, 0, 0, 1.0])),
        ),
    ],
)
def test_patterns_of_hessians(f, expected):
    found = detect(f, example(4), (), second=True).pattern.dense()
    if expected is None:
        expected = torch.func.hessian(f)(example(4)) != 0
    assert torch.equal(found, expected != 0)


def test_too_dense_a_pattern_raises(monkeypatch):
    from torch_manualgrad.sparsity import rows  # its limit

    monkeypatch.setattr(rows, "MOST", 1000)
    with pytest.raises(ValueError, match="Pass pattern="):
        detect(lambda x: x.sum() * x, torch.ones(100), ())


def test_a_tensor_of_another_library_is_refused():
    with pytest.raises(PatternError):
        detect(lambda x: Tensor.to_sparse_csr(x.reshape(2, 2)).to_dense(), example(4), ())


def straight_through():
    f = mg.custom_jvp(torch.round)
    f.defjvps(lambda t, out, x: t)
    return f


def flipped():
    f = mg.custom_vjp(lambda x: x * 1)
    f.defvjp(lambda x: (x * 1, None), lambda _, g: (g.flip(0),))
    return f


@pytest.mark.parametrize("make", [straight_through, flipped])
def test_a_function_with_a_rule_of_its_own_depends_on_everything(make):
    rule = make()
    f = lambda x: rule(2 * x) ** 2 + x  # noqa: E731
    x = torch.tensor([0.3, 1.2, 2.0], dtype=torch.float64)
    plan = mg.sparse_jacobian.prepare(f, x)
    assert any("custom_" in name for name in plan.conservative)
    torch.testing.assert_close(plan.matrix(x).to_dense(), torch.func.jacrev(f)(x))
    h = lambda x: f(x).sum()  # noqa: E731
    torch.testing.assert_close(mg.sparse_hessian(h)(x).to_dense(), torch.func.hessian(h)(x))


def test_a_checkpoint_has_the_pattern_of_its_function():
    f = lambda x: x.sin() * x.roll(1)  # noqa: E731
    x = torch.linspace(0, 1, 6, dtype=torch.float64)
    plan, plain = (mg.sparse_jacobian.prepare(g, x) for g in (mg.checkpoint(f), f))
    assert plan.nnz == plain.nnz == 12 and not plan.conservative
    torch.testing.assert_close(plan.matrix(x).to_dense(), torch.func.jacrev(f)(x))


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_a_recurrent_layer_of_one_sequence(kind):
    torch.manual_seed(0)
    net = kind(4, 3).double()
    for x in (torch.randn(3, 1, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)):
        f = lambda x: net(x)[0]  # noqa: E731
        torch.testing.assert_close(mg.sparse_jacobian(f)(x).to_dense(), torch.func.jacrev(f)(x))
