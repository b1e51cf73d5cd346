"""Elementwise functions where the derivative needs care: removable singularities, axes, bounds, ties and infinities.

Where PyTorch has a convention it is the expected value. All eight ways to nest reverse and forward mode give the same.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import torch_manualgrad as mg
from torch_manualgrad.core.rule import reached

F64 = torch.float64
# PyTorch's slopes at a bound that is a number; and of the number, and of the bound, where the bound is a tensor
AT_NUMBER, FIRST, SECOND = (0.0, 0.5, 0.5) if reached("2.15") else (1.0, 1.0, 0.0)
inf, nan, pi = math.inf, math.nan, math.pi
aten = torch.ops.aten


def number(x):
    return torch.tensor(x, dtype=F64)


def beside(op, y):
    """op(x, y) as a function of x."""
    return lambda x: op(x, number(y))


def after(op, y):
    """op(y, x) as a function of x."""
    return lambda x: op(number(y), x)


def far(op):
    """op at 1e8 x, of a size of about one."""
    return lambda x: 1e4 * op(1e8 * x)


def first(op):
    """The first of op((x, -inf)), of which the second entry is masked."""
    return lambda x: op(torch.stack([x, number(-inf)]), 0)[0]


def both(op):
    """The first of op((x, x))."""
    return lambda x: op(torch.stack([x, x]), 0)[0]


def masked_logaddexp(x):
    """Of (x, x) and (x, 2 x), of which three entries are masked."""
    masks = {"input_mask": torch.tensor([True, False]), "other_mask": torch.tensor([False, False])}
    return torch.masked.logaddexp(torch.stack([x, x]), torch.stack([x, 2 * x]), **masks)[0]


# name -> function of one number, where, and the first three derivatives there
EDGES = {
    "sinc": (torch.sinc, 0.0, 0.0, -(pi**2) / 3, 0.0),
    "sinc of tiny": (torch.sinc, 1e-200, 0.0, -(pi**2) / 3, 0.0),
    "i1": (torch.special.i1, 0.0, 0.5, 0.0, 0.375),
    "i0e far from zero": (far(torch.special.i0e), 1.0, -0.19947114094873312, 0.29920671217111647, -0.74801678229783317),
    "i1e far from zero": (far(torch.special.i1e), 1.0, -0.19947113795666600, 0.29920670469094865, -0.74801675611724572),
    "i1e far below zero": (
        far(torch.special.i1e),
        -1.0,
        -0.19947113795666600,
        -0.29920670469094865,
        -0.74801675611724572,
    ),
    "hypot at the origin": (lambda x: torch.hypot(x, 2 * x), 0.0, 0.0, 0.0, 0.0),
    "atan2 on the right": (beside(torch.atan2, 2.0), 0.0, 0.5, 0.0, -0.25),
    "atan2 on the left": (beside(torch.atan2, -2.0), 0.0, -0.5, 0.0, 0.25),
    "atan2 above": (after(torch.atan2, 2.0), 0.0, -0.5, 0.0, 0.25),
    "atan2 below": (after(torch.atan2, -2.0), 0.0, 0.5, 0.0, -0.25),
    "atan2 at the origin": (lambda x: torch.atan2(x, 2 * x), 0.0, 0.0, 0.0, 0.0),
    "x ** 0 at 0": (lambda x: torch.pow(x, 0), 0.0, 0.0, 0.0, 0.0),
    "x ** 1 at 0": (lambda x: torch.pow(x, 1), 0.0, 1.0, 0.0, 0.0),
    "x ** 2 at 0": (lambda x: torch.pow(x, 2), 0.0, 0.0, 2.0, 0.0),
    "x ** 3 at 0": (lambda x: torch.pow(x, 3), 0.0, 0.0, 0.0, 6.0),
    "x ** 3 at a negative base": (lambda x: torch.pow(x, 3), -2.0, 12.0, -12.0, 6.0),
    "x ** tensor 0 at 0": (beside(torch.pow, 0.0), 0.0, 0.0, 0.0, 0.0),
    "x ** tensor 1 at 0": (beside(torch.pow, 1.0), 0.0, 1.0, 0.0, 0.0),
    "x ** tensor 2 at 0": (beside(torch.pow, 2.0), 0.0, 0.0, 2.0, 0.0),
    "x ** tensor 3 at 0": (beside(torch.pow, 3.0), 0.0, 0.0, 0.0, 6.0),
    "x ** tensor 3 at a negative base": (beside(torch.pow, 3.0), -2.0, 12.0, -12.0, 6.0),
    "0 ** y": (after(torch.pow, 0.0), 2.0, 0.0, 0.0, 0.0),
    "number 0 ** y": (lambda y: torch.pow(0.0, y), 2.0, 0.0, 0.0, 0.0),
    "0 log y": (after(torch.xlogy, 0.0), 0.0, 0.0, 0.0, 0.0),
    "logaddexp with -inf": (beside(torch.logaddexp, 0.0), -inf, 0.0, 0.0, 0.0),
    "logaddexp with inf": (beside(torch.logaddexp, 0.0), inf, 1.0, 0.0, 0.0),
    "logaddexp of two -inf": (beside(torch.logaddexp, -inf), -inf, 0.5, 0.0, 0.0),
    "logaddexp2 of two inf": (beside(torch.logaddexp2, inf), inf, 0.5, 0.0, 0.0),
    "masked.logaddexp": (masked_logaddexp, 0.5, 1.0, 0.0, 0.0),
    "softmax of a number": (lambda x: torch.softmax(x, 0), 0.5, 0.0, 0.0, 0.0),
    "log_softmax of a number": (lambda x: torch.log_softmax(x, 0), 0.5, 0.0, 0.0, 0.0),
    "softmax beside -inf": (first(torch.softmax), 0.5, 0.0, 0.0, 0.0),
    "log_softmax beside -inf": (first(torch.log_softmax), 0.5, 0.0, 0.0, 0.0),
    "_safe_softmax beside -inf": (first(aten._safe_softmax), 0.5, 0.0, 0.0, 0.0),
    "_safe_softmax of -inf": (both(aten._safe_softmax), -inf, 0.0, 0.0, 0.0),
    "clamp at min": (lambda x: torch.clamp(x, -1, 1), -1.0, AT_NUMBER, 0.0, 0.0),
    "clamp at max": (lambda x: torch.clamp(x, -1, 1), 1.0, AT_NUMBER, 0.0, 0.0),
    "clamp at a tensor": (lambda x: torch.clamp(x, number(-1.0), number(1.0)), 1.0, FIRST, 0.0, 0.0),
    "clamp, its bound": (lambda b: torch.clamp(number(1.0), number(-1.0), b), 1.0, SECOND, 0.0, 0.0),
    "clamp_min at min": (lambda x: torch.clamp_min(x, 1.0), 1.0, AT_NUMBER, 0.0, 0.0),
    "clamp_min, its bound": (after(torch.clamp_min, 1.0), 1.0, SECOND, 0.0, 0.0),
    "clamp_max at max": (beside(torch.clamp_max, 1.0), 1.0, FIRST, 0.0, 0.0),
    "maximum of equals": (beside(torch.maximum, 1.0), 1.0, 0.5, 0.0, 0.0),
    "minimum of equals": (after(torch.minimum, 1.0), 1.0, 0.5, 0.0, 0.0),
    "fmin of equals, the second": (after(torch.fmin, 1.0), 1.0, SECOND, 0.0, 0.0),
    "fmax beside nan": (beside(torch.fmax, nan), 1.0, 1.0, 0.0, 0.0),
    "relu": (torch.relu, 0.0, 0.0, 0.0, 0.0),
    "leaky_relu": (F.leaky_relu, 0.0, 0.01, 0.0, 0.0),
    "hardsigmoid": (F.hardsigmoid, 3.0, 0.0, 0.0, 0.0),
    "hardtanh": (F.hardtanh, 1.0, 0.0, 0.0, 0.0),
    "softshrink": (F.softshrink, 0.5, 0.0, 0.0, 0.0),
    "abs": (torch.abs, 0.0, 0.0, 0.0, 0.0),
    "copysign": (beside(torch.copysign, -1.0), 0.0, 0.0, 0.0, 0.0),
    "logit outside of eps": (lambda x: torch.logit(x, 0.1), 1.0, 0.0, 0.0, 0.0),
    "tanh of inf": (torch.tanh, inf, 0.0, 0.0, 0.0),
    "sigmoid of -inf": (torch.sigmoid, -inf, 0.0, 0.0, 0.0),
    "mish of a large number": (F.mish, 1000.0, 1.0, 0.0, 0.0),
    "where, not taken": (lambda x: torch.where(x > 0, number(1.0), x), nan, 1.0, 0.0, 0.0),
    "masked_fill": (lambda x: x.masked_fill(torch.tensor(True), 1.0), nan, 0.0, 0.0, 0.0),
    "frexp of a huge number": (lambda x: torch.frexp(x * 2.0**500).mantissa, 1.5, 0.5, 0.0, 0.0),
}


# The same where PyTorch's tangent is another than its gradient, or its third order is nan, and the rule claims nothing.
NAMED = {
    "fmax of equals, the first": (beside(torch.fmax, 1.0), 1.0, FIRST, 0.0, 0.0),
    "maximum beside nan": (beside(torch.maximum, nan), 1.0, 1.0, 0.0, 0.0),
    "gelu of a large number": (lambda x: F.gelu(x, approximate="tanh"), 1000.0, 1.0, 0.0, 0.0),
}


def forward(f):
    return lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]


@pytest.mark.parametrize(
    "name, which", [*itertools.product(EDGES, [(), ("*",)]), *itertools.product(NAMED, [("*",)])], ids=str
)
def test_three_orders_in_every_nesting(name, which):
    f, x, *expected = (EDGES | NAMED)[name]
    with mg.override(*which):
        for modes in itertools.product([torch.func.grad, forward], repeat=3):
            derivative = f
            for mode, value in zip(modes, expected):
                derivative = mode(derivative)
                torch.testing.assert_close(derivative(number(x)), number(value), atol=1e-12, rtol=1e-9)


def test_a_power_of_itself_in_fourth_order():
    """PyTorch's fourth derivative of x ** x at 2 is off by one: it takes x ** 0 for a constant in the exponent too."""
    log = 1 + math.log(2)
    expected = 4 * (log**4 + 6 * log**2 / 2 + 3 / 4 - 4 * log / 4 + 2 / 8)

    def fourth():
        f = lambda x: torch.pow(x, x)  # noqa: E731
        for _ in range(4):
            f = torch.func.grad(f)
        return f(number(2.0)).item()

    assert fourth() == pytest.approx(expected - 1)
    with mg.override():
        assert fourth() == pytest.approx(expected)


ROWS = torch.tensor([[-inf, -inf, -inf], [1.0, 2.0, -inf]], dtype=F64)  # the first is fully masked
WEIGHTS = torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]], dtype=F64)


def unmasked_rows(op):
    """op of each row, and 0 for one that is fully masked, as programs write it."""
    return lambda x: torch.where((x > -inf).any(1, keepdim=True), op(x, 1), 0.0)


FULLY_MASKED = {
    "_safe_softmax": (lambda x: aten._safe_softmax(x, 1), False),
    "softmax": (unmasked_rows(torch.softmax), True),
    "log_softmax": (lambda x: unmasked_rows(torch.log_softmax)(x).clamp(min=-100), True),
    "attention": (
        lambda x: F.scaled_dot_product_attention(WEIGHTS[:, :2], WEIGHTS[:, :2], WEIGHTS[:, :2], x[:, :2]),
        False,
    ),
}


@pytest.mark.parametrize("which", [(), ("*",)], ids=str)
@pytest.mark.parametrize("name", FULLY_MASKED)
def test_a_fully_masked_row_has_derivative_zero(name, which):
    """softmax itself is nan there, and nothing else can be said of its derivative; where zero is strong, that is hidden."""
    f, strong = FULLY_MASKED[name]

    def loss(x):
        y = f(x)
        return (WEIGHTS[:, : y.shape[1]] * y.sin()).sum()

    def tangent(x):
        return torch.func.jvp(loss, (x,), (WEIGHTS,))[1]

    def pullback(x):
        return (torch.func.grad(loss)(x) * WEIGHTS).sum()

    with mg.override(*which, strong_zero=strong):
        gradients = [torch.func.grad(g)(ROWS) for g in (loss, tangent, pullback)]
        numbers = [forward_along(g) for g in (loss, tangent, pullback)]
    for gradient in gradients:
        assert gradient[0].eq(0).all() and gradient.isfinite().all(), name
    assert all(n.isfinite() for n in numbers)


def forward_along(f):
    return torch.func.jvp(f, (ROWS,), (WEIGHTS,))[1]


# by mpmath.zeta(s, x, 1) and (s, x, 2)
ZETA = [
    (1.01, 0.5, -9998.63681822648630867588167288, 2000000.97556174356189492679077),
    (2.0, 1.0, -0.937548254315843753702574094568, 1.98928023429890102342085868742),
    (3.5, 10.0, -0.0038011418939247166012723288981, 0.0103162304191984091653090474353),
    (60.0, 0.05, 3.45384416022514622248370585177e78, 1.03467924186124518577050700839e79),
]


@pytest.mark.parametrize("s, x, first, second", ZETA)
def test_zeta_in_its_first_argument(s, x, first, second):
    f = beside(torch.special.zeta, x)
    with mg.override():
        for one, other in itertools.product([torch.func.grad, forward], repeat=2):
            torch.testing.assert_close(other(f)(number(s)), number(first), rtol=1e-13, atol=0)
            torch.testing.assert_close(one(other(f))(number(s)), number(second), rtol=1e-12, atol=0)
        assert torch.func.grad(f)(number(0.5)).isnan()


@pytest.mark.parametrize("axes", [(), (0,)], ids=["per tensor", "per channel"])
def test_fake_quantization_with_a_learned_scale(axes):
    """The first order is PyTorch's, which is for float32; the second, of the function with constant rounding."""
    generator = torch.Generator().manual_seed(0)
    x, weights = (3 * torch.randn(2, 40, generator=generator) for _ in range(2))
    scale, zero_point = torch.tensor([0.23, 0.4]), torch.tensor([1.2, -30.0])  # of which one is outside of the range
    n = 2 if axes else 1
    op = [aten._fake_quantize_learnable_per_tensor_affine, aten._fake_quantize_learnable_per_channel_affine][n - 1]
    given = [t.requires_grad_() for t in (x, scale[:n], zero_point[:n])]

    def gradients(**more):
        return torch.autograd.grad(op(*given, *axes, -8, 7, 0.3), given, weights, **more)

    expected = gradients()
    outside = expected[0] == 0
    with mg.override():
        found = gradients(create_graph=True)
        in_zero_point = torch.autograd.grad(found[1].sum(), given[2])[0].sum()
        others = [x.detach(), given[2].detach()]
        _, tangent = torch.func.jvp(lambda s: op(others[0], s, others[1], *axes, -8, 7, 0.3), *2 * [(scale[:n],)])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(in_zero_point, -0.3 * weights[outside].sum())
    torch.testing.assert_close((tangent * weights).sum(), (found[1] * scale[:n]).sum())


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("name", ["y0", "y1", "modified_k0", "modified_k1", "scaled_modified_k0", "scaled_modified_k1"])
def test_bessel_functions_with_a_pole_at_zero_have_infinite_slopes(name, zero):
    """That of either zero, as on the right; never zero from the second order on."""
    *kinds, order = name.split("_")
    function = getattr(torch.special, "_".join([*kinds, "bessel", order]))
    with mg.override("*"):
        slope = torch.func.grad(function)
        assert slope(number(zero)) == (inf if order.startswith("y") else -inf)
        assert not torch.func.grad(slope)(number(zero)).isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_of_half_precision_in_its_tail(dtype):
    """PyTorch's kernel is 0 below -6 in single precision only."""
    x = torch.linspace(-13, -3, 41).to(dtype).requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.gelu(x).sum(), x)
    with mg.override("*"):
        (found,) = torch.autograd.grad(torch.nn.functional.gelu(x).sum(), x)
    assert torch.equal(found, expected) and expected[-8:].all()
