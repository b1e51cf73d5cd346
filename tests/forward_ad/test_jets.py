"""Taylor series through functions of torch, beside mpmath, nested forward mode and what is known."""

import math
import os
import subprocess
import sys

import mpmath
import pytest
import torch
from helpers.jets import largest_error, nested_derivatives
from helpers.tensors import seeded_by_shape
from torch import nn
from torch.nn import functional as F

import torch_manualgrad as mg
from torch_manualgrad.core.override import compiled_calls
from torch_manualgrad.forward_ad import directional, jet
from torch_manualgrad.forward_ad.jets import taylor

X = 0.37
SIGMOID = lambda x: 1 / (1 + mpmath.exp(-x))  # noqa: E731
PHI = lambda x: mpmath.ncdf(x)  # noqa: E731
KNOWN = {
    "exp": (torch.exp, mpmath.exp),
    "exp2": (torch.exp2, lambda x: mpmath.mpf(2) ** x),
    "expm1": (torch.expm1, mpmath.expm1),
    "log": (torch.log, mpmath.log),
    "log1p": (torch.log1p, lambda x: mpmath.log(1 + x)),
    "sqrt": (torch.sqrt, mpmath.sqrt),
    "rsqrt": (torch.rsqrt, lambda x: 1 / mpmath.sqrt(x)),
    "reciprocal": (torch.reciprocal, lambda x: 1 / x),
    "pow": (lambda x: x**2.7, lambda x: x ** mpmath.mpf("2.7")),
    "power of itself": (lambda x: x**x, lambda x: x**x),
    "sin": (torch.sin, mpmath.sin),
    "cos": (torch.cos, mpmath.cos),
    "tan": (torch.tan, mpmath.tan),
    "tanh": (torch.tanh, mpmath.tanh),
    "sigmoid": (torch.sigmoid, SIGMOID),
    "asin": (torch.asin, mpmath.asin),
    "acos": (torch.acos, mpmath.acos),
    "atan": (torch.atan, mpmath.atan),
    "asinh": (torch.asinh, mpmath.asinh),
    "atanh": (torch.atanh, mpmath.atanh),
    "acosh": (lambda x: torch.acosh(1.5 + x), lambda x: mpmath.acosh(mpmath.mpf("1.5") + x)),
    "erf": (torch.erf, mpmath.erf),
    "erfc": (torch.erfc, mpmath.erfc),
    "erfinv": (torch.erfinv, mpmath.erfinv),
    "gelu": (F.gelu, lambda x: x * PHI(x)),
    "silu": (F.silu, lambda x: x * SIGMOID(x)),
    "softplus": (F.softplus, lambda x: mpmath.log(1 + mpmath.exp(x))),
    "mish": (F.mish, lambda x: x * mpmath.tanh(mpmath.log(1 + mpmath.exp(x)))),
    "lgamma": (torch.lgamma, mpmath.loggamma),
    "digamma": (torch.digamma, mpmath.digamma),
    "atan2": (lambda x: torch.atan2(x * x, x + 1), lambda x: mpmath.atan(x * x / (x + 1))),
    "quotient": (lambda x: x.sin() / (x.exp() + 1), lambda x: mpmath.sin(x) / (mpmath.exp(x) + 1)),
    "nested": (lambda x: torch.sin(torch.exp(torch.sin(x))), lambda x: mpmath.sin(mpmath.exp(mpmath.sin(x)))),
}


@pytest.mark.parametrize("name", KNOWN)
def test_ten_orders_against_mpmath(name):
    f, known = KNOWN[name]
    with mpmath.workdps(60):
        expected = [float(c * math.factorial(k)) for k, c in enumerate(mpmath.taylor(known, mpmath.mpf(X), 10))][1:]
    x = torch.tensor(X, dtype=torch.float64)
    found = directional(f, x, torch.ones_like(x), 10)
    torch.testing.assert_close(torch.stack(found), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


ELSEWHERE = KNOWN | {
    "log2": (torch.log2, lambda x: mpmath.log(x, 2)),
    "log10": (torch.log10, mpmath.log10),
    "a number to a power": (lambda x: 0.3**x, lambda x: mpmath.mpf(0.3) ** x),
    "a tensor to a power": (lambda x: torch.full_like(x, 1.7) ** x, lambda x: mpmath.mpf(1.7) ** x),
    "power of itself": (lambda x: x**x, lambda x: x**x if x > 0 else mpmath.j),  # nan, as in PyTorch
    "log sigmoid": (F.logsigmoid, lambda x: -mpmath.log1p(mpmath.exp(-x))),
    "gelu by tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: x * SIGMOID(2 * mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf(0.044715) * x**3)),
    ),
    "gelu": (F.gelu, lambda x: x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2),
    "softplus": (lambda x: F.softplus(x, threshold=1e3), lambda x: mpmath.log1p(mpmath.exp(x))),
}
POINTS = [1e-20, -1e-20, 1e-8, -1e-8, 1e-3, 0.9, 3.0, -3.0, 12.0, -12.0, 40.0, -40.0, 300.0]
# digamma's derivative is PyTorch's polygamma(1, x), which has nine digits; "nested" and "quotient" have rounded arguments
INEXACT = {"lgamma": 1e-9, "digamma": 1e-9, "nested": 1e-8, "quotient": 1e-8}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_four_orders_elsewhere(name):
    """Each derivative to its own size, where it is small and where its terms almost cancel."""
    f, known = ELSEWHERE[name]
    for point in POINTS:
        x = torch.tensor(point, dtype=torch.float64)
        with mpmath.workdps(150):
            if not f(x).isfinite() or mpmath.im(known(mpmath.mpf(point))) != 0:
                continue
            coefficients = mpmath.taylor(known, mpmath.mpf(point), 4)
            expected = [mpmath.re(c) * math.factorial(k) for k, c in enumerate(coefficients)][1:]
        for one, other in zip(directional(f, x, torch.ones_like(x), 4), expected):
            if 1e-250 < abs(other) < 1e250:
                assert abs(one.item() - other) <= INEXACT.get(name, 1e-11) * abs(other), (
                    point,
                    one.item(),
                    float(other),
                )


def in_place(x):
    y = x.sin()
    y += x
    y.mul_(x)
    y -= 2
    return y


FUNCTIONS = {
    "products": lambda x: (x[0] * x[1].exp()).sum() + x[:, 2].sin().prod() + x.mT @ x,
    "softmax": lambda x: x.softmax(-1) * x.log_softmax(0) + torch.logsumexp(x, 1, keepdim=True),
    "norms": lambda x: torch.linalg.norm(x) + x.norm(dim=1) + x.var(0).sum(),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x.sin()),
    "in place": in_place,
    "where": lambda x: torch.where(x > 0, x**3, x.sin()).sum() + x[x > 0].cos().sum() + x.relu() ** 2,
    "largest": lambda x: x.max(0).values ** 2 + x.sort(1)[0].prod(1)[:3] + x.abs().amax(),
    "joined": lambda x: torch.cat([x, x.sin()], 1).flatten().cumsum(0)[::2] * torch.stack([x, 2 * x])[1].sum(),
    "loss": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 0])) + F.mse_loss(x, x.sin()),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None] * 2, x.sin()[None], is_causal=True),
    "inverse": lambda x: torch.linalg.inv(x.mT @ x) @ torch.linalg.solve(x.mT @ x + 1, x.mT),
    "determinants": lambda x: torch.linalg.slogdet(x.mT @ x)[1] + torch.linalg.det(x[:3]),
    "factors": lambda x: torch.linalg.eigvalsh(x.mT @ x) * torch.linalg.svdvals(x) + torch.linalg.cholesky(x.mT @ x),
    "layers": lambda x: NETWORK(x),
    "encoder": lambda x: ENCODER(x[None]),
}
torch.manual_seed(0)
NETWORK = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 2)).double().requires_grad_(False)
ENCODER = nn.TransformerEncoderLayer(3, 1, 4, batch_first=True, dropout=0.0).double().requires_grad_(False)


def error_of(f, x, order):
    v = seeded_by_shape(*x.shape).cos()
    found = directional(f, x, v, order)
    with mg.override("*"):  # PyTorch's own nested forward mode is wrong in several of these
        return largest_error([found], nested_derivatives(lambda y: [f(y)], [x], [v], order))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_against_nested_forward_mode(name):
    assert error_of(FUNCTIONS[name], seeded_by_shape(4, 3), 3) < 1e-9


def test_series_of_several_arguments_and_a_tree():
    """The terms of a curve that is not straight: those of a polynomial in t, and a product of two."""
    x, y = (torch.tensor(v, dtype=torch.float64) for v in (2.0, 3.0))
    one, two = (torch.tensor(v, dtype=torch.float64) for v in (1.0, 2.0))
    value, series = jet(
        lambda a, b: {"product": a * b, "a": [a.square()]}, (x, y), ([one, two, None], [None, None, one])
    )
    # a = 2 + t + t^2, b = 3 + t^3 / 6: a b = 6 + 3 t + 3 t^2 + t^3 / 3 + ..., a^2 = 4 + 4 t + 5 t^2 + 2 t^3 + ...
    assert value["product"] == 6 and value["a"][0] == 4
    assert torch.stack(series["product"]).tolist() == pytest.approx([3, 6, 2])
    assert torch.stack(series["a"][0]).tolist() == pytest.approx([4, 10, 12])


@pytest.mark.parametrize("p", [0.5, 0.3])
def test_dropout_has_one_mask(p):
    """The default of the operator that draws the mask is 0.5; its functional form has none."""
    x, v = seeded_by_shape(4, 3), seeded_by_shape(3, 4).mT
    torch.manual_seed(0)
    value, (slopes, bends) = jet(lambda x: torch.nn.functional.dropout(x, p).square(), (x,), ([v, None],))
    mask = value != 0
    assert not mask.all()
    torch.testing.assert_close(slopes, torch.where(mask, 2 * x * v / (1 - p) ** 2, 0))
    torch.testing.assert_close(bends, torch.where(mask, 2 * v * v / (1 - p) ** 2, 0))


def test_complex_numbers():
    z = torch.complex(seeded_by_shape(3), seeded_by_shape(3) + 2)
    f = lambda x: torch.exp(1j * x) * z + (x * z).abs() + (x + z).log().real  # noqa: E731
    assert error_of(f, seeded_by_shape(3), 3) < 1e-9


def test_a_series_inside_of_a_series():
    f = lambda x, y: (x * y.sin()).exp()  # noqa: E731
    x, y, one = (torch.tensor(v, dtype=torch.float64) for v in (0.3, 0.7, 1.0))
    mixed = directional(lambda x: directional(lambda y: f(x, y), y, one, 2)[1], x, one, 2)[1]
    d = lambda f: lambda t: torch.func.jvp(f, (t,), (one,))[1]  # noqa: E731
    expected = d(d(lambda x: d(d(lambda y: f(x, y)))(y)))(x)
    torch.testing.assert_close(mixed, expected)
    # x is a constant of the inner series, though it has one outside
    assert directional(lambda x: x * directional(lambda y: x + y, one, one, 1)[0], x, one, 1)[0] == 1


def test_under_reverse_mode_vmap_and_the_compiler():
    weight = seeded_by_shape(3, 3).requires_grad_()
    x, v = seeded_by_shape(2, 3), seeded_by_shape(2, 3).sin()

    def third(w, x, v):
        return directional(lambda y: F.layer_norm((y @ w).tanh(), (3,)), x, v, 3)[2]

    eager = third(weight, x, v)
    (gradient,) = torch.autograd.grad(eager.square().sum(), weight)
    expected = torch.func.grad(lambda w: third(w, x, v).square().sum())(weight.detach())
    torch.testing.assert_close(gradient, expected)
    assert torch.autograd.gradcheck(lambda w: third(w, x, v), (weight,))
    torch.testing.assert_close(torch.vmap(third, (None, 0, 0))(weight, x, v), eager)
    compiled = torch.compile(third, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(weight, x, v), eager)


@pytest.mark.slow
def test_compiled_functions():
    """Operators, indexing, comparisons, classes of rules."""
    w = seeded_by_shape(3, 3)
    functions = [
        lambda x: (x @ w) / (2 + x.mT[:2].exp().sum()) - w[0] ** 2 * x,
        lambda x: torch.where(x > 0, x.softmax(-1), 2 * x[0]).max(0)[0] + torch.linalg.norm(x),
        lambda x: torch.linalg.slogdet(x.mT @ x + w.abs())[1] * F.elu(x).cumsum(0),
        lambda x: directional(lambda y: (x * y).sin(), x, x, 2)[1],
    ]
    x, v = seeded_by_shape(2, 3), seeded_by_shape(2, 3).cos()
    for f in functions:
        torch.compiler.reset()
        compiled = torch.compile(
            lambda x, v: directional(f, x, v, 2), backend="aot_eager", fullgraph=True, dynamic=False
        )
        torch.testing.assert_close(compiled(x, v), directional(f, x, v, 2))


BEGINS = """
import torch
from torch_manualgrad.forward_ad import directional

f = lambda x: torch.linalg.norm(x @ x.mT).exp() * x.softmax(-1)
x = torch.linspace(-1, 1, 6).reshape(2, 3)
run = torch.compile(lambda x: directional(f, x, x.cos(), 2), backend="aot_eager", fullgraph=True)
torch.testing.assert_close(run(x), directional(f, x, x.cos(), 2))
"""


def test_a_process_may_begin_with_a_compiled_function():
    """What is made on use cannot be made in a graph."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, "-c", BEGINS], capture_output=True, text=True, env=environment)
    assert not run.returncode, run.stderr


# -- what raises -----------------------------------------------------------------------------------------------------------


REFUSED = {
    "a number": (lambda x: x.sum().item() * x, TypeError, "item"),
    "an unknown operator": (torch.unique, NotImplementedError, "aten::_unique2"),
    "an order that is not known": (
        lambda x: torch.ops.aten._prelu_kernel_backward(x, x, x),
        NotImplementedError,
        "_prelu_kernel",
    ),
    "into a constant": (lambda x: torch.zeros(3, dtype=x.dtype).add_(x), NotImplementedError, "aten::add_"),
    "an item of a constant": (lambda x: torch.zeros(3).__setitem__(0, x[0]), NotImplementedError, "aten::"),
    "a view": (lambda x: x.sin()[:2].mul_(2), NotImplementedError, "views"),
    "a transform inside": (lambda x: torch.func.grad(lambda y: y.sum())(x), NotImplementedError, "torch.func"),
    "vmap inside": (lambda x: torch.vmap(torch.sin)(x), NotImplementedError, "aten::sin"),
    "autograd inside": (lambda x: torch.autograd.grad(x.sum(), x), RuntimeError, "require grad"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_taken_for_a_constant(name):
    f, error, text = REFUSED[name]
    x = seeded_by_shape(3)
    with pytest.raises(error, match=text):
        directional(f, x, x, 2)


def test_arguments_that_do_not_fit():
    x = seeded_by_shape(3)
    with pytest.raises(ValueError, match="jet: series: expected one for each of 1 primals, got 2"):
        jet(torch.sin, (x,), ([x], [x]))
    with pytest.raises(ValueError, match="one length"):
        jet(torch.add, (x, x), ([x], [x, x]))
    with pytest.raises(ValueError, match="expected the shape of"):
        jet(torch.sin, (x,), ([x[:2]],))
    with pytest.raises(ValueError, match="real or complex"):
        jet(torch.sin, (torch.arange(3),), ([None],))


def test_jets_answer_queries_of_their_value():
    def f(x):
        assert isinstance(x, torch.Tensor) and x.shape == (3,) and x.dtype is torch.float64 and len(x) == 3
        assert x.size(0) == x.numel() == 3 and x.dim() == x.ndim == 1 and not x.is_complex()
        if (x > 0).any():
            x = x + x.detach() + torch.zeros_like(x) + sum(x)
        return x

    x = seeded_by_shape(3)
    (first,) = directional(f, x, x, 1)
    torch.testing.assert_close(first, x + x.sum())


# -- planted faults ----------------------------------------------------------------------------------------------------------


def test_a_wrong_factor_in_the_recurrence_is_found(monkeypatch):
    right = taylor.next_of
    monkeypatch.setattr(taylor, "next_of", lambda x, slope, k: right(x, slope, k) * (1 + 1e-3 * (k > 2)))
    assert error_of(FUNCTIONS["softmax"], seeded_by_shape(4, 3), 3) > 1e-6


def test_a_lost_cross_term_is_found(monkeypatch):
    right = taylor.convolve

    def without_last(x, y, k, start=0, product=None):
        return right([c if j < 2 else None for j, c in enumerate(x)], y, k, start, product)

    monkeypatch.setattr(taylor, "convolve", without_last)
    assert error_of(FUNCTIONS["products"], seeded_by_shape(4, 3), 3) > 1e-3


def test_numbers_among_tensors_under_kernels_in_python():
    """They make tensors of the numbers, in the middle of what is traced."""
    x = torch.tensor([0.3, 0.7], dtype=torch.float64)
    expected = mg.forward_ad.directional(lambda x: 3 / (2 * x + 0.75), x, torch.ones_like(x), 3)
    f = lambda x: mg.forward_ad.directional(lambda x: 3 / (2 * x + 0.75).reshape(2), x, torch.ones_like(x), 3)  # noqa: E731
    with mg.override("*"), compiled_calls.in_python():
        found = f(x)
        torch.compiler.reset()
        compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=False)(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(compiled, expected)


def test_a_number_that_is_written_under_kernels_in_python():
    """The tensor made of it is an alias of a tensor of it in the trace."""
    x = torch.tensor([0.3, 0.7, -0.4], dtype=torch.float64)

    def f(x):
        y = x * 1.0
        y[x > 0.5] = 0.3
        return y * x

    expected = directional(f, x, torch.ones_like(x), 3)
    with mg.override("*"):
        found = directional(f, x, torch.ones_like(x), 3)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found[0], torch.tensor([0.6, 0.3, -0.8], dtype=torch.float64))


def test_a_jvp_is_not_called_for_series_of_zeros():
    """The result depends on the shape of the argument alone, or has no first derivative along the curve."""

    def pooled(x):
        one, first = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 1, 1, dtype=torch.long)
        return torch.ops.aten.max_pool2d_with_indices_backward(one, x, [2, 2], [], [0, 0], [1, 1], False, first)

    target = torch.tensor([[[[0.3, 0.7], [2.0, -1.0]]]], dtype=torch.float64)
    losses = (F.smooth_l1_loss, F.mse_loss, F.huber_loss, F.l1_loss, F.soft_margin_loss)
    for loss in losses:
        x = target.sin()
        for order in (1, 2, 3):
            assert all(not t.any() for t in directional(lambda x, f=loss: f(pooled(x).sin(), target), x, x, order))
        # along a curve that begins with its second derivative
        _, (first, second) = mg.forward_ad.jet(lambda x, f=loss: f(x, target.cos()), (x,), [[None, x]])
        expected = directional(lambda x, f=loss: f(x, target.cos()), x, x, 1)[0]
        assert not first.any()
        torch.testing.assert_close(second, expected)


def test_parts_of_a_number_that_is_conjugated_lazily():
    x = torch.complex(seeded_by_shape(3), seeded_by_shape(3).cos())
    for part in (lambda z: z.real, lambda z: z.imag):
        call = lambda y, p=part: p(torch.conj(y) * 1.0) + p(y)  # noqa: E731
        found = mg.forward_ad.jet(lambda y, p=part: p(y) * 2, (x.conj(),), [[x, None]])[1]
        torch.testing.assert_close(found[0], part(x) * 2)
        torch.testing.assert_close(directional(call, x, x, 1)[0], call(x))


@pytest.mark.parametrize(
    "view",
    [
        torch.view_as_complex,
        lambda x: x.view(-1),
        lambda x: x.view(2, 5),
        lambda x: x.unfold(0, 2, 1),
        lambda x: x.as_strided((3,), (2,)),
        lambda x: x.view(torch.int64).double() * 0 + x,
    ],
)
def test_a_direction_may_lie_in_another_order_than_the_value(view):
    x, v = torch.randn(5, 2, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64).T
    found = directional(lambda x: view(x) ** 2, x, v, 2)
    expected = directional(lambda x: view(x) ** 2, x, v.contiguous(), 2)
    torch.testing.assert_close(found, expected)
