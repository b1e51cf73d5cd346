"""Values of sparse Jacobians in every mode, their layouts, and those of complex functions."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import torch_manualgrad as mg
from torch_manualgrad.core.rule import reached
from torch_manualgrad.sparsity import PatternError


def example(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def f(x):
    return torch.cat([x[1:] * x[:-1] ** 2, x.sin()])


def heat(u):
    return sum(torch.roll(u, k, d) for k in (1, -1) for d in (0, 1)) - 4 * u + u**3


def net(x):
    weights = torch.linspace(-1, 1, 3 * 2 * 9, dtype=x.dtype).reshape(3, 2, 3, 3)
    return F.max_pool2d(torch.tanh(F.conv2d(x, weights, padding=1)), 2)


def wide(x):
    """Few rows, which are dense."""
    return torch.stack([x[:10].square().sum(), x[10:].exp().sum()])


FUNCTIONS = {"f": (f, (8,)), "heat": (heat, (5, 6)), "net": (net, (1, 2, 4, 4)), "wide": (wide, (20,))}


def chosen(plan, jacobian):
    return jacobian.reshape(plan.pattern.shape)[plan.rows, plan.columns]


@pytest.mark.parametrize("mode", ["auto", "fwd", "rev"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_jacobian_is_that_of_jacfwd(name, mode):
    function, shape = FUNCTIONS[name]
    x = example(*shape)
    found, expected = mg.sparse_jacobian(function, mode=mode, check=True)(x), torch.func.jacfwd(function)(x)
    assert found.shape == expected.shape and found.is_coalesced()
    torch.testing.assert_close(found.to_dense(), expected)


def test_the_mode_with_fewer_colors_is_chosen():
    plan = mg.sparse_jacobian.prepare(wide, example(20))
    assert (plan.mode, plan.colors) == ("rev", 1)
    assert plan.coloring.shape == (2,)
    plan = mg.sparse_jacobian.prepare(f, example(8))
    assert (plan.mode, plan.colors) == ("fwd", 2)
    assert repr(plan) == "JacobianPlan(15 x 8, 22 nonzeros, 2 colors, mode 'fwd')"


def test_plans_name_operators_that_were_taken_to_mix_everything():
    lengths = torch.tensor([3, 5])
    plan = mg.sparse_jacobian.prepare(lambda x: torch.segment_reduce(x, "sum", lengths=lengths), example(8), mode="rev")
    assert plan.conservative == {"aten.segment_reduce.default": 1} and plan.nnz == 16
    assert repr(plan).endswith("mode 'rev', conservative: aten.segment_reduce.default)")


@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_values_are_differentiable_in_every_mode(mode):
    x = example(5)
    plan = mg.sparse_jacobian.prepare(f, x, mode=mode)
    dense = lambda x: chosen(plan, torch.func.jacrev(f)(x))  # noqa: E731
    tracked = x.clone().requires_grad_()
    assert gradcheck(plan.values, (tracked,), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(plan.values, (tracked,), check_fwd_over_rev=True)
    for outer in (torch.func.jacfwd, torch.func.jacrev):
        torch.testing.assert_close(outer(plan.values)(x), outer(dense)(x))
        for inner in (torch.func.jacfwd, torch.func.jacrev):
            torch.testing.assert_close(outer(inner(plan.values))(x), outer(inner(dense))(x))
    with fwAD.dual_level():
        tangent = fwAD.unpack_dual(plan.values(fwAD.make_dual(x, torch.ones_like(x)))).tangent
    torch.testing.assert_close(tangent, torch.func.jvp(dense, (x,), (torch.ones_like(x),))[1])


@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_values_under_vmap_compile_and_overrides(mode):
    x = example(3, 8)
    plan = mg.sparse_jacobian.prepare(f, x[0], mode=mode)
    expected = torch.stack([chosen(plan, torch.func.jacrev(f)(row)) for row in x])
    torch.testing.assert_close(torch.vmap(plan.values)(x), expected)
    compiled = torch.compile(plan.values, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x[0]), expected[0])
    with mg.override("*"):
        torch.testing.assert_close(plan.values(x[1]), expected[1])
    jacobians = torch.vmap(torch.func.jacrev(plan.values))(x)
    torch.testing.assert_close(jacobians[2], torch.func.jacrev(plan.values)(x[2]))


@pytest.mark.slow
def test_compiled_values_are_differentiable_twice():
    x = example(2, 4, 4)
    plan = mg.sparse_jacobian.prepare(lambda w: torch.stack([w[0] ** 2 * w[1], w[0] - w[1].roll(1, 0)]), x)
    compiled = torch.compile(plan.values, backend="manualgrad", fullgraph=True)
    tracked = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(compiled(tracked).pow(3).sum(), tracked, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), tracked)
    loss = lambda x: torch.func.grad(lambda x: plan.values(x).pow(3).sum())(x).square().sum()  # noqa: E731
    torch.testing.assert_close(second, torch.func.grad(loss)(x))


def test_reverse_mode_goes_through_the_values_of_the_matrix():
    x = example(8).requires_grad_()
    for layout in ("coo", "csr"):
        found = mg.sparse_jacobian(f, layout=layout)(x)
        values = found.coalesce().values() if layout == "coo" else found.values()
        (gradient,) = torch.autograd.grad(values.square().sum(), x)
        expected = torch.func.grad(lambda x: torch.func.jacrev(f)(x).square().sum())(x)
        torch.testing.assert_close(gradient, expected)


def test_further_arguments_are_constants_of_the_pattern_and_differentiable():
    g = lambda x, a, power: a * x[1:] ** power * x[:-1]  # noqa: E731
    x, a = example(6), example(5).requires_grad_()
    plan = mg.sparse_jacobian.prepare(g, x, a, 3)
    torch.testing.assert_close(plan.values(x, a, 3), chosen(plan, torch.func.jacfwd(g)(x, a, 3)))
    (gradient,) = torch.autograd.grad(plan.values(x, a, 3).sum(), a)
    torch.testing.assert_close(gradient, 3 * x[1:] ** 2 * x[:-1] + x[1:] ** 3)
    assert mg.sparse_jacobian(g)(x, a, 2).shape == (5, 6)


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        pytest.param(
            torch.inference_mode,
            marks=pytest.mark.skipif(
                not reached("2.13"), reason="torch.func.jacfwd raises in inference mode of torch 2.10"
            ),
        ),
        mg.override,
        lambda: torch.device("meta"),
    ],
)
def test_contexts(context):
    x = example(8)
    expected = torch.func.jacfwd(f)(x), torch.func.hessian(lambda x: f(x).sum())(x)
    with context():
        found = mg.sparse_jacobian(f)(x), mg.sparse_hessian(lambda x: f(x).sum())(x)
    for sparse, dense in zip(found, expected):
        torch.testing.assert_close(sparse.to_dense(), dense)


@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_gradients_reach_parameters_that_the_function_reads(mode):
    layer, x = torch.nn.Linear(6, 3, dtype=torch.float64), example(6)
    plan = mg.sparse_jacobian.prepare(lambda x: layer(x).tanh(), x, mode=mode)
    plan.values(x).square().sum().backward()
    dense = lambda weight: torch.func.jacrev(lambda x: (weight @ x + layer.bias.detach()).tanh())(x)  # noqa: E731
    expected = torch.func.grad(lambda weight: dense(weight).square().sum())(layer.weight.detach())
    torch.testing.assert_close(layer.weight.grad, expected)


def test_arguments_that_a_pattern_depends_on_have_to_stay():
    g = lambda x, index, a, *rest: a * x[index]  # noqa: E731
    x, index, a = example(6), torch.tensor([0, 2]), example(2)
    plan = mg.sparse_jacobian.prepare(g, x, index, a, 3, "name", 0.5)
    plan.values(x, index.clone(), 2 * a, 3, "name", 0.7)
    torch.vmap(lambda a: plan.values(x, index, a, 3, "name", 0.5))(example(3, 2))
    for changed in (
        (index + 1, a, 3, "name", 0.5), (index, a[:1], 3, "name", 0.5), (index, a, 4, "name", 0.5), (index, a, 3, "other", 0.5),
        (index, index, 3, "name", 0.5), (index, a, 3, "name"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="args: the plan was prepared for"):
            plan.values(x, *changed)
    s = torch.eye(6, dtype=x.dtype).to_sparse()
    plan = mg.sparse_jacobian.prepare(lambda x, s: s @ x, x, s)
    assert plan.values(x, 2 * s).tolist() == [2] * 6
    with pytest.raises(ValueError, match="the places in sparse matrices"):
        plan.values(x, torch.eye(6, dtype=x.dtype).flip(0).to_sparse())
    given = mg.sparse_jacobian.prepare(g, x, index, a, pattern=torch.ones(2, 6))
    assert given.values(x, index + 1, a).count_nonzero() == 2


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 100])
def test_chunks(chunk_size):
    x = example(5, 6)
    for mode in ("fwd", "rev"):
        plan = mg.sparse_jacobian.prepare(heat, x, chunk_size=chunk_size, mode=mode)
        assert plan.chunk_size == min(chunk_size, plan.colors)
        torch.testing.assert_close(plan.values(x), chosen(plan, torch.func.jacfwd(heat)(x)))


def test_layouts():
    x = example(4, 4)
    expected = torch.func.jacfwd(heat)(x).reshape(16, 16)
    jacobian = lambda **options: mg.sparse_jacobian(heat, **options)(x)  # noqa: E731
    assert jacobian(layout="csr").layout is torch.sparse_csr
    torch.testing.assert_close(jacobian(layout="csr").to_dense(), expected)
    bsr = jacobian(layout="bsr", blocksize=(4, 2))
    assert bsr.layout is torch.sparse_bsr and bsr.values().shape[1:] == (4, 2)
    torch.testing.assert_close(bsr.to_dense(), expected)
    sparse = pytest.importorskip("scipy.sparse")
    found = jacobian(layout="scipy")
    assert isinstance(found, sparse.csr_array)
    torch.testing.assert_close(torch.as_tensor(found.toarray()), expected)


def test_given_patterns():
    x = example(8)
    found = mg.sparse_jacobian.prepare(f, x)
    scipy = pytest.importorskip("scipy.sparse").csr_array(found.pattern.to_dense().numpy())
    for given in (found.pattern, found.pattern.to_dense(), found.pattern.to_dense().to_sparse_csr(), scipy):
        plan = mg.sparse_jacobian.prepare(f, x, pattern=given)
        assert torch.equal(plan.values(x), found.values(x))
    dense = torch.ones(15, 8)
    assert mg.sparse_jacobian.prepare(f, x, pattern=dense).colors == 8
    shaped = torch.func.jacfwd(heat)(example(4, 5)) != 0
    assert mg.sparse_jacobian.prepare(heat, example(4, 5), pattern=shaped).nnz == 100


@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_a_given_pattern_that_misses_an_entry_raises(mode):
    x = example(8)
    given = mg.sparse_jacobian.prepare(f, x).pattern.to_dense()
    given[2, 3] = False
    with pytest.raises(PatternError, match="the pattern misses nonzeros") as error:
        mg.sparse_jacobian.prepare(f, x, pattern=given, mode=mode)
    assert str(error.value).endswith("rows: 2" if mode == "fwd" else "columns: 3")
    mg.sparse_jacobian.prepare(f, x, pattern=given, mode=mode, check=False)


@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_entries_that_cancel_up_to_rounding_pass_the_check(mode):
    cancelling = lambda x: torch.cat([x[:1], (x * 0.1 + x * 0.2 - x * 0.3)[1:]])  # noqa: E731
    found = mg.sparse_jacobian(cancelling, mode=mode, check=True)(example(6)).to_dense()
    torch.testing.assert_close(found, torch.diag(torch.tensor([1.0, 0, 0, 0, 0, 0], dtype=found.dtype)))


def test_a_hook_that_changes_gradients_is_found_by_the_check():
    def hooked(x):
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda g: g.flip(0))
        return y * 2

    with pytest.raises(PatternError, match="misses nonzeros"):
        mg.sparse_jacobian.prepare(hooked, example(4), mode="rev", check=True)


def test_empty_and_constant_functions():
    x = example(3)
    constant = lambda x: torch.ones(2, dtype=x.dtype)  # noqa: E731
    for mode in ("auto", "fwd", "rev"):
        plan = mg.sparse_jacobian.prepare(constant, x, mode=mode)
        assert (plan.colors, plan.nnz) == (0, 0) and plan.values(x).shape == (0,)
        assert mg.sparse_jacobian(constant, mode=mode)(x).shape == (2, 3)
        assert mg.sparse_jacobian(torch.sin, mode=mode)(example(0)).shape == (0, 0)
    number = torch.tensor(0.3, dtype=torch.float64)
    found = mg.sparse_jacobian(torch.sin)(number)
    assert found.shape == () and torch.equal(found.to_dense(), number.cos())


def test_float32():
    x = example(8, dtype=torch.float32)
    found = mg.sparse_jacobian(f, check=True)(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.to_dense(), torch.func.jacfwd(f)(x))


class OnlyReverse(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]

    generate_vmap_rule = True


def test_a_function_without_forward_mode_takes_reverse_mode():
    x = example(4)
    plan = mg.sparse_jacobian.prepare(OnlyReverse.apply, x, pattern=torch.eye(4))
    assert plan.mode == "rev"
    torch.testing.assert_close(plan.values(x), 2 * x)


# -- complex ----------------------------------------------------------------------------------------------------------


def entire(z):
    return z[1:] * z[:-1] ** 2 + z[1:].exp()


def not_holomorphic(z):
    return z.conj()[1:] * z[:-1] ** 2 + z.abs()[1:]


def directional(function, z, v):
    """Derivative along a real parameter, by central differences."""
    h = 1e-6
    return (function(z + h * v) - function(z - h * v)) / (2 * h)


@pytest.mark.parametrize("mode", ["auto", "fwd", "rev"])
def test_holomorphic_functions(mode):
    z = example(5, dtype=torch.complex128)
    found = mg.sparse_jacobian(entire, holomorphic=True, mode=mode, check=True)(z).to_dense()
    expected = torch.zeros(4, 5, dtype=z.dtype)
    expected[range(4), range(1, 5)] = z[:-1] ** 2 + z[1:].exp()
    expected[range(4), range(4)] = 2 * z[1:] * z[:-1]
    torch.testing.assert_close(found, expected)


def test_a_function_that_is_not_holomorphic_raises():
    z = example(5, dtype=torch.complex128)
    for mode in ("fwd", "rev"):
        with pytest.raises(PatternError, match="not holomorphic"):
            mg.sparse_jacobian(not_holomorphic, holomorphic=True, mode=mode)(z)
    with pytest.raises(ValueError, match="expected a complex result"):
        mg.sparse_jacobian(torch.abs, holomorphic=True)(z)


def test_wirtinger_pairs():
    z = example(5, dtype=torch.complex128)
    by_z, by_conj = mg.sparse_jacobian(not_holomorphic, wirtinger=True, check=True)(z)
    unit = z / z.abs()
    diagonal = torch.zeros(4, 5, dtype=z.dtype)
    diagonal[range(4), range(4)] = 2 * z.conj()[1:] * z[:-1]
    diagonal[range(4), range(1, 5)] = unit.conj()[1:] / 2
    torch.testing.assert_close(by_z.to_dense(), diagonal)
    diagonal = torch.zeros(4, 5, dtype=z.dtype)
    diagonal[range(4), range(1, 5)] = z[:-1] ** 2 + unit[1:] / 2
    torch.testing.assert_close(by_conj.to_dense(), diagonal)
    v = example(5, dtype=torch.complex128) * 1j
    torch.testing.assert_close(
        by_z.to_dense() @ v + by_conj.to_dense() @ v.conj(), directional(not_holomorphic, z, v), rtol=1e-6, atol=1e-8
    )


def test_wirtinger_pair_of_a_real_function_and_its_derivatives():
    z = example(4, dtype=torch.complex128)
    plan = mg.sparse_jacobian.prepare(lambda z: z.abs() ** 2, z, wirtinger=True)
    by_z, by_conj = plan.values(z)
    torch.testing.assert_close((by_z, by_conj), (z.conj(), z.clone()))
    assert gradcheck(lambda z: plan.values(z), (z.clone().requires_grad_(),))


def test_a_complex_function_of_real_numbers():
    x = example(4)
    g = lambda x: torch.exp(1j * x) * x.roll(1)  # noqa: E731
    pairs = torch.func.jacfwd(lambda x: torch.view_as_real(g(x)))(x)
    expected = torch.complex(pairs[:, 0], pairs[:, 1])
    torch.testing.assert_close(mg.sparse_jacobian(g, check=True)(x).to_dense(), expected)
    with pytest.raises(ValueError, match="mode: expected 'fwd' or 'auto'"):
        mg.sparse_jacobian(g, mode="rev")(x)


# -- errors -----------------------------------------------------------------------------------------------------------


def test_errors():
    x, z = example(4), example(4, dtype=torch.complex128)
    plan = mg.sparse_jacobian.prepare(f, x)
    with pytest.raises(TypeError, match="x: expected a tensor"):
        mg.sparse_jacobian(f)([1.0])
    with pytest.raises(TypeError, match="x: expected a dense floating point"):
        mg.sparse_jacobian(f)(torch.arange(3))
    with pytest.raises(ValueError, match="x: the plan was prepared for shape .4., torch.float64 on cpu, got"):
        plan.values(example(5))
    with pytest.raises(ValueError, match="x: the plan was prepared for"):
        plan.values(x.float())
    with pytest.raises(ValueError, match="sparse_jacobian: mode: expected 'auto' or 'fwd' or 'rev', got 'x'"):
        mg.sparse_jacobian(f, mode="x")
    with pytest.raises(ValueError, match="sparse_jacobian.prepare: ordering: expected"):
        mg.sparse_jacobian.prepare(f, x, ordering="x")
    with pytest.raises(ValueError, match="chunk_size: expected a positive number, got 0"):
        mg.sparse_jacobian.prepare(f, x, chunk_size=0)
    with pytest.raises(ValueError, match="blocksize: expected two numbers that divide the shape"):
        plan.matrix(x, layout="bsr", blocksize=(2, 3))
    with pytest.raises(ValueError, match="layout: expected"):
        plan.matrix(x, layout="dia")
    with pytest.raises(ValueError, match="expected one of them to be True for a complex x"):
        mg.sparse_jacobian(entire)(z)
    with pytest.raises(ValueError, match="none for a real one"):
        mg.sparse_jacobian(f, holomorphic=True)(x)
    with pytest.raises(ValueError, match="expected one of them at most"):
        mg.sparse_jacobian(entire, holomorphic=True, wirtinger=True)(z)
    with pytest.raises(TypeError, match=r"pattern: expected a matrix of shape .7, 4."):
        mg.sparse_jacobian.prepare(f, x, pattern=torch.ones(3, 3))
    with pytest.raises(RuntimeError, match="sparse_jacobian.prepare.f, x. outside of the transform"):
        torch.func.jacfwd(lambda x: mg.sparse_jacobian(f)(x).to_dense())(x)


def test_an_invalid_coloring_is_refused(monkeypatch):
    from torch_manualgrad.sparsity import hessian, jacobian  # the modules, which the functions hide

    for module, prepare in ((jacobian, mg.sparse_jacobian.prepare), (hessian, mg.sparse_hessian.prepare)):
        monkeypatch.setattr(module, "colored", lambda pattern, *_: torch.zeros(pattern.shape[1], dtype=torch.int64))
        function = heat if module is jacobian else lambda u: heat(u).square().sum()
        for kind in ({}, {"coloring": "acyclic"})[: 1 + (module is hessian)]:
            with pytest.raises(PatternError, match="the coloring is not valid"):
                prepare(function, example(4, 4), **kind)


def test_a_constant_has_an_empty_wirtinger_pair():
    z = example(3, dtype=torch.complex128)
    by_z, by_conj = mg.sparse_jacobian(lambda z: torch.ones(2), wirtinger=True)(z)
    assert by_z.shape == by_conj.shape == (2, 3) and by_z.dtype == torch.complex128


def test_functions_whose_derivatives_pytorch_batches_wrongly():
    points, x, index = example(4, 2), example(3, 2), torch.zeros(3, 2, dtype=torch.long)
    for f in (lambda x: torch.cdist(x, points), lambda x: x.scatter_reduce(1, index, x * x, "prod")):
        expected = torch.autograd.functional.jacobian(f, x)
        for mode in ("fwd", "rev"):
            found = mg.sparse_jacobian(f, mode=mode, check=True)(x).to_dense()
            torch.testing.assert_close(found, expected)
    assert not mg.active()
