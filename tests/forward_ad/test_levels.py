"""Dual levels: mixed derivatives to order 4, operators of every kind, and what raises."""

import math
from contextlib import ExitStack

import pytest
import torch
import torch.autograd.forward_ad as stock
import torch.nn.functional as F
from helpers.tensors import is_dense_differentiable

import torch_manualgrad as mg
from torch_manualgrad.core.schema import tensors_in
from torch_manualgrad.forward_ad import dual_level, has_same_meta, make_dual, unpack_dual
from torch_manualgrad.forward_ad.levels import calls as tangent_calls, state as tangent_state
from torch_manualgrad.forward_ad.levels.rules import recomputed


@pytest.fixture(autouse=True)
def double():
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def tangent(x, level=None):
    return unpack_dual(x, level=level).tangent


def by_levels(function, x, directions, order=None):
    """The mixed derivative, unpacked from the level at ``order[0]`` first."""
    with ExitStack() as stack:
        levels = [stack.enter_context(dual_level()) for _ in directions]
        for level, v in zip(levels, directions):
            x = make_dual(x, v, level=level)
        y = function(x)
        for i in order or range(len(levels)):
            y = tangent(y, levels[i])
    return y


def by_func(function, x, directions):
    if not directions:
        return function(x)
    *rest, v = directions
    return torch.func.jvp(lambda y: by_func(function, y, rest), (x,), (v,))[1]


W = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) / 2


def buffer(x):
    b = torch.ones(4, 4)
    b[0] = x[1] * x[0]
    b.t()[1].mul_(x[:, 2])
    b.mul_(x)
    return b.diagonal().sin_().sum() * b


FUNCTIONS = {
    "elementwise": lambda x: (x * x).exp() / (1 + x.cos() ** 2),
    "perceptron": lambda x: F.linear(F.gelu(F.linear(x, W)), W, W[0]).softmax(-1),
    "normalized": lambda x: F.layer_norm(x, (4,), W[0], W[1]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], (x * x)[None], x.mT[None]),
    "einsum": lambda x: torch.einsum("ij,jk,ik->i", x, x.sin(), x),
    "written in place": lambda x: x.clone().mul_(x).sin_().add_(x[0]),
    "a buffer": buffer,
    "inverse": lambda x: torch.linalg.inv(x + 4 * torch.eye(4)),
    "determinant": lambda x: torch.linalg.det(x @ x.mT + torch.eye(4)),
    "singular values": lambda x: torch.linalg.svdvals(x),
    "eigenvalues": lambda x: torch.linalg.eigvals(x + 5 * torch.diag(torch.arange(4.0))),
    "complex": lambda x: (torch.view_as_complex(x.view(4, 2, 2)).conj() * 1j).exp().imag,
    "fft": lambda x: torch.fft.rfft(x * x).abs(),
    "branches": lambda x: torch.where(x > 0, x**3, -x * x).cumsum(0).amax(1),
    "stopped": lambda x: x.detach() * x.sin() + torch.zeros_like(x),
    "no rule": lambda x: torch._foreach_exp([x, x * x.sin()])[1],  # PyTorch's own jvp
    "gumbel": lambda x: (lambda y: y.ceil() - y.detach() + y)(x.softmax(-1)) * F.hardshrink(x),
    "reductions": lambda x: x.std(0) * x.norm() + x.logsumexp(1) * x.prod(),
    "convolution": lambda x: F.conv1d(x[None].sin(), x[:, :, None]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_mixed_derivatives_agree_with_torch_func(name):
    x, *directions = torch.randn(5, 4, 4)
    for n in (1, 2, 3, 4) if name in ("elementwise", "a buffer", "no rule", "determinant") else (1, 2, 3):
        with mg.override("*"):  # PyTorch's own second derivatives are wrong for some
            expected = by_func(FUNCTIONS[name], x, directions[:n])
        found = by_levels(FUNCTIONS[name], x, directions[:n])
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-10 * float(expected.abs().max())), n


def test_the_order_of_unpacking_does_not_matter():
    x, *directions = torch.randn(4, 4, 4)
    expected = by_levels(buffer, x, directions)
    for order in ((0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        assert torch.allclose(by_levels(buffer, x, directions, order), expected, rtol=1e-12)


def test_taylor_coefficients_of_a_known_series():
    """exp(sin x) at 0: derivatives 1, 1, 0, -3; and the fourth of tan^2 at 0, 16."""
    one, zero = torch.ones(()), torch.zeros(())
    for n, expected in enumerate((1.0, 1.0, 0.0, -3.0), 1):
        found = by_levels(lambda x: x.sin().exp(), zero, [one] * n)
        assert math.isclose(0.0 if found is None else found.item(), expected, abs_tol=1e-14)
    assert math.isclose(by_levels(lambda x: x.tan() ** 2, zero, [one] * 4).item(), 16, rel_tol=1e-13)


def test_finite_differences_where_torch_func_raises():
    """An out= variant, to order 3: torch.func refuses the first derivative."""

    def function(x):
        return torch.exp(x * x, out=torch.empty(0)).mul_(x)

    x, v = torch.randn(3) / 2, torch.randn(3)
    with pytest.raises(RuntimeError):
        by_func(function, x, [v])
    for n in (1, 2, 3):
        lower = lambda x: by_levels(function, x, [v] * (n - 1)) if n > 1 else function(x)  # noqa: B023, E731
        difference = (lower(x + 1e-5 * v) - lower(x - 1e-5 * v)) / 2e-5
        assert torch.allclose(by_levels(function, x, [v] * n), difference, rtol=1e-7, atol=1e-7)


def test_a_dual_of_duals_at_any_level():
    """Tangents that are dual at inner and at outer levels: (x + e1 u + e2 (v + e1 w))^2, and the levels swapped."""
    x, u, v, w = torch.randn(4, 3)
    for swapped in (False, True):
        with dual_level() as a, dual_level() as b:
            first, second = (b, a) if swapped else (a, b)
            d = make_dual(make_dual(x, u, level=first), make_dual(v, w, level=first), level=second)
            y = d * d
            assert torch.allclose(tangent(tangent(y, first), second), 2 * (u * v + x * w))
            assert torch.allclose(tangent(tangent(y, second), first), 2 * (u * v + x * w))
            assert torch.allclose(unpack_dual(tangent(y, first), level=second).primal, 2 * x * u)
            primal = unpack_dual(y, level=first).primal
            assert tangent(primal, first) is None and torch.allclose(tangent(primal, second), 2 * x * v)
            with pytest.raises(ValueError, match="primal has a tangent at level"):
                make_dual(make_dual(x, make_dual(v, w, level=first), level=second), u, level=first)


def test_no_confusion_of_perturbations():
    """The derivative of x * d/dy (x + y), by hand 1: the inner level does not see the outer tangent."""
    one = torch.ones(())
    with dual_level() as outer:
        x = make_dual(torch.tensor(3.0), one)
        with dual_level() as inner:
            inside = tangent(x + make_dual(torch.tensor(2.0), one), inner)
        assert tangent(x * inside, outer).item() == 1


def rule_samples(slow):
    chosen = (
        "exp",
        "addcmul",
        "cat",
        "sort",
        "native_layer_norm",
        "_linalg_svd",
        "index_put",
        "_unsafe_view",
        "renorm",
        "rrelu_with_noise",  # writes to an argument, and has no underscore
        "_native_batch_norm_legit",
    )
    for name, rule in mg.rules.items():
        if rule.samples is not None and (slow or name.removeprefix("aten::") in chosen):
            yield name


@pytest.mark.parametrize("name", list(rule_samples(slow=False)))
def test_every_kind_of_rule(name):
    check_rule(name, torch.float64)


@pytest.mark.slow
def test_every_rule():
    for name in rule_samples(slow=True):
        for dtype in (torch.float64, torch.complex128):
            check_rule(name, dtype)


def check_rule(name, dtype):
    """The first and the mixed second derivative of the first sample, and the layout of the tangent."""
    rule = mg.rules[name]
    sample = next(iter(rule.samples(dtype, "cpu")), None)
    leaves, spec = torch.utils._pytree.tree_flatten((sample.args, sample.kwargs) if sample else ((), {}))
    places = [i for i, x in enumerate(leaves) if is_dense_differentiable(x)]
    held = {rule.signature.names[i] for i in recomputed(rule)}
    if held & {"weight", "scale"}:
        places = places[:1]  # a tangent of these raises

    def function(*xs):
        full = list(leaves)
        for i, x in zip(places, xs):
            full[i] = x
        args, kwargs = torch.utils._pytree.tree_unflatten(full, spec)
        torch.manual_seed(1)
        result = rule.aten(*args, **kwargs)
        named = zip(rule.signature.output_names, rule.signature.outputs(result))
        return tuple(
            o
            for n, r in named
            if n not in rule.not_differentiable
            for o in tensors_in([r])
            if is_dense_differentiable(o)
        )

    xs, vs, ws = (
        tuple(leaves[i].detach() if r is None else torch.randn_like(leaves[i]) for i in places) for r in (None, 1, 2)
    )
    with mg.override("*"):
        try:
            first = torch.func.jvp(function, xs, vs)[1]
            second = torch.func.jvp(lambda *xs: torch.func.jvp(function, xs, vs)[1], xs, ws)[1]
        except Exception:
            return  # sparse results, dtypes that the operator does not take
    with dual_level() as a, dual_level() as b:
        duals = [make_dual(make_dual(x, w, level=a), v, level=b) for x, v, w in zip(xs, vs, ws)]
        for y, t, tt in zip(function(*duals), first, second):
            found = tangent(y, b)
            if found is not None:
                assert has_same_meta(found, y), name
            for value, expected in ((found, t), (None if found is None else tangent(found, a), tt)):
                value = torch.zeros_like(expected) if value is None else unpack_dual(value, level=a).primal
                assert torch.allclose(value, expected, rtol=1e-8, atol=1e-9, equal_nan=True), name


# -- custom operators


def test_custom_ops_by_their_own_derivative():
    @mg.custom_op("levels_test::cube(Tensor x) -> Tensor")
    def cube(x):
        return x**3

    cube.impl_save_for_backward(lambda inputs, output: inputs.x)
    cube.impl_backward(lambda ctx, saved, grad: {"x": 3 * grad * saved**2})
    x = torch.randn(3)
    try:
        assert torch.allclose(by_levels(cube, x, [x, x]), 6 * x**3)
        cube.impl_jvp(lambda inputs, output, tangents: 30 * tangents.x * inputs.x**2)
        assert torch.allclose(by_levels(cube, x, [x, x]), 60 * x**3)
    finally:
        cube.undefine()


def test_a_formula_with_a_kernel_is_differentiated_by_its_body():
    x = torch.randn(2, 3)
    backward = lambda y: mg.ops.norm_backward(torch.ones(2), y, 3.0, y.norm(3.0, 1), [1], False)  # noqa: E731
    with mg.override("*"):
        expected = by_func(backward, x, [x, x + 1])
    assert torch.allclose(by_levels(backward, x, [x, x + 1]), expected)


# -- what raises


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


@torch.library.custom_op("levels_test::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def refused():
    x = torch.randn(2, 2)
    yield "a custom op of torch", NotImplementedError, "levels_test::unknown", unknown
    yield "a gap", NotImplementedError, "_unique2", torch.unique
    yield "no jvp", NotImplementedError, "_standard_gamma_grad", lambda d: torch._standard_gamma_grad(d, d)
    yield "an autograd.Function", RuntimeError, "aten::round.*autograd.Function", Straight.apply
    yield "a sparse result", NotImplementedError, "sparse", lambda d: d.to_sparse()
    yield "torch.func", RuntimeError, "mul.Tensor.*torch.func", lambda d: torch.func.grad(lambda y: (y * d).sum())(x)
    yield "vmap", RuntimeError, "sin.*torch.func", lambda d: torch.vmap(torch.sin)(d)
    quantized = lambda d: torch.fake_quantize_per_channel_affine(  # noqa: E731
        d.float(), d[0].float(), torch.zeros(2, dtype=torch.int32), 0, -8, 7
    )
    yield "a scale", NotImplementedError, "scale has a tangent", quantized
    yield "x.data", NotImplementedError, "detach", lambda d: d.data
    offsets = torch.tensor([0, 2])
    jagged = lambda d: torch.nested.nested_tensor_from_jagged(d, offsets).sin()  # noqa: E731
    yield "a jagged tensor", NotImplementedError, "NestedTensor with layout torch.jagged", jagged


@pytest.mark.parametrize("error, message, call", [pytest.param(*r[1:], id=r[0]) for r in refused()])
def test_no_tangent_is_dropped_without_a_word(error, message, call):
    with dual_level():
        d = make_dual(torch.rand(2, 2), torch.ones(2, 2))
        with pytest.raises(error, match=message):
            call(d)


def test_running_statistics_have_an_unknown_tangent():
    norm = torch.nn.BatchNorm1d(3)
    with dual_level():
        d = make_dual(torch.rand(4, 3), torch.ones(4, 3))
        for _ in range(2):  # training does not read them
            assert tangent(norm(d)).shape == (4, 3)
        with pytest.raises(NotImplementedError, match="a running statistic"):
            unpack_dual(norm.running_mean)
        with pytest.raises(NotImplementedError, match="running_mean.*is unknown.*a running statistic"):
            norm.eval()(d)
    assert norm.eval()(torch.rand(4, 3)).shape == (4, 3)


def test_running_statistics_have_tangents_in_evaluation():
    x, mean, var, t = torch.randn(4, 3), torch.randn(3), torch.rand(3) + 0.5, torch.randn(3)
    with dual_level():
        found = tangent(F.batch_norm(x, make_dual(mean, t), make_dual(var, 2 * t)))
    root = (var + 1e-5).rsqrt()
    assert torch.allclose(found, -t * root - (x - mean) * root**3 * t)


def test_class_weights_have_tangents():
    x, w, t = torch.randn(2, 2), torch.rand(2) + 0.5, torch.randn(2)
    with dual_level():
        found = tangent(F.nll_loss(x, torch.tensor([0, 1]), make_dual(w, t)))
    assert torch.allclose(found, torch.func.jvp(lambda w: -(w * x.diagonal()).sum() / w.sum(), (w,), (t,))[1])


def test_lists_written_in_place():
    x = torch.rand(3)
    with dual_level():
        parameters = [make_dual(x, torch.ones(3)), x.clone()]
        torch._foreach_mul_(parameters, 2.0)
        torch._foreach_add_(parameters, [parameters[0], parameters[0].sin()])
        assert torch.allclose(tangent(parameters[0]), torch.full((3,), 4.0))
        assert torch.allclose(tangent(parameters[1]), 2 * (2 * x).cos())


def test_levels_are_left_in_order():
    outer, inner = dual_level(), dual_level()
    with outer:
        inner.__enter__()
        with pytest.raises(RuntimeError, match="not the innermost"):
            outer.__exit__()
        inner.__exit__()
        with pytest.raises(RuntimeError, match="entered before"):
            inner.__enter__()
    with pytest.raises(RuntimeError, match="inside of a torch.func transform"):
        torch.func.grad(lambda x: [dual_level().__enter__(), x.sum()][1])(torch.ones(2))


def test_random_and_integer_results_have_no_tangent():
    with dual_level():
        d = make_dual(torch.rand(3), torch.ones(3))
        assert tangent(d > 0.5) is None and tangent(d.argsort()) is None and tangent(torch.rand_like(d)) is None
        assert tangent(d.clone().uniform_()).eq(0).all() and d.sum().item() > 0
        assert tangent(torch.nn.Linear(3, 2, dtype=d.dtype)(d)).shape == (2,)  # parameters can be made inside


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.max_pool1d(x, 2),
        torch.nn.MaxPool1d(2),
        lambda x: torch.max_pool1d(x, 2, stride=1).sin(),
        lambda x: F.adaptive_max_pool1d(x, 2),
        lambda x: torch.linalg.eigvalsh(x @ x.mT),
        torch.linalg.svdvals,
        lambda x: torch.linalg.eigvals(x @ x.mT).real.sum(),
    ],
)
def test_functions_that_choose_a_kernel_by_what_is_tracked(function, tracked):
    x, v = torch.rand(2, 2, 3, 4, dtype=torch.float64)
    x.requires_grad_(tracked)
    _, expected = torch.func.jvp(function, (x,), (v,))
    with dual_level():
        torch.testing.assert_close(tangent(function(make_dual(x, v))), expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.cross_entropy(x @ w, torch.tensor([0, 1])),
        lambda x, w: F.conv1d(x[:, None], w[None, None, 0]),
        lambda x, w: F.conv_transpose1d(x[:, None], w[None, None, 0]),
        lambda x, w: torch.fft.fft(x @ w).abs(),
        lambda x, w: torch.linalg.solve(w[:3], (x @ w).mT),
        lambda x, w: torch.linalg.multi_dot([x, w, w.mT]),
        lambda x, w: F.kl_div(x @ w, w[:2].sigmoid(), reduction="sum"),
        lambda x, w: F.softmax(x @ w, -1),
        lambda x, w: F.bilinear(x, x, w[None, :, :1].expand(2, 4, 4)),
    ],
)
def test_autocast(function):
    # autocast leaves double precision, which is the default in these tests
    x, v = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    w = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, expected = torch.func.jvp(lambda x: function(x, w), (x,), (v,))
        with dual_level():
            found = function(make_dual(x, v), w)
            assert found.dtype == value.dtype and tangent(found).dtype == expected.dtype
            torch.testing.assert_close(unpack_dual(found).primal, value)
            torch.testing.assert_close(tangent(found), expected, rtol=2e-2, atol=2e-2)


def test_recurrent_layers_that_are_not_tracked():
    layer, x = torch.nn.LSTM(4, 3, dtype=torch.float32).requires_grad_(False), torch.rand(2, 3, 4, dtype=torch.float32)
    with mg.override():
        _, expected = torch.func.jvp(lambda x: layer(x)[0], (x,), (x,))
    with dual_level(), torch.no_grad():  # oneDNN's layer, which has a result that is undefined
        torch.testing.assert_close(tangent(layer(make_dual(x, x))[0]), expected)


# -- PyTorch's own dual numbers: one more level


@pytest.mark.parametrize("outside", [True, False])
def test_with_torchs_own_dual_numbers(outside):
    x, v, w = torch.randn(3, 4)
    function = lambda x: (x * x).exp().sin_()  # noqa: E731
    expected, of_primal = by_func(function, x, [v, w]), by_func(function, x, [w if outside else v])
    with stock.dual_level() if outside else dual_level(), dual_level() if outside else stock.dual_level():
        if outside:
            d = make_dual(stock.make_dual(x, v), w)
        else:
            d = stock.make_dual(make_dual(x, v), w)
        y = function(d)
        assert torch.allclose(stock.unpack_dual(tangent(y)).tangent, expected)
        assert torch.allclose(tangent(stock.unpack_dual(y).tangent), expected)
        primal = stock.unpack_dual(y).primal
        assert stock.unpack_dual(primal).tangent is None and stock.unpack_dual(tangent(primal)).tangent is None
        assert torch.allclose(tangent(primal), of_primal)


# -- planted faults: that the tests above can fail


def test_a_jvp_that_drops_the_outer_tangent_is_found(monkeypatch):
    monkeypatch.setattr(tangent_calls, "outside", lambda levels, level: [])
    with pytest.raises((AssertionError, AttributeError, TypeError)):
        test_mixed_derivatives_agree_with_torch_func("elementwise")


def test_a_copy_that_drops_the_outer_tangent_is_found(monkeypatch):
    own = tangent_state.write
    monkeypatch.setattr(tangent_state, "write", lambda x, value, levels: own(x, value, levels[-1:]))
    with pytest.raises((AssertionError, AttributeError, TypeError)):
        test_mixed_derivatives_agree_with_torch_func("a buffer")
