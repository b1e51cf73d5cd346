"""The incomplete gamma functions in their first argument, and samples of the gamma distribution."""

import itertools
import math

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.derivatives.elementwise.incomplete_gamma import igamma_self_derivative

F64 = torch.float64
inf, nan = math.inf, math.nan

# a, x, the first and second derivative of P(a, x) in a, and those of the quantile in a, where x is the quantile; by
# mpmath.gammainc and finite differences of 60 digits
POINTS = [
    (0.001, 0.5, -0.56035940010800309, -0.58485123986970825, 461.99216718924001, -283510.09794979981),
    (0.3, 1e-300, -7.6950293736796394e-88, 5.3142234106022973e-85, 2.3020211233644898e-297, 5.2839582257719943e-294),
    (2.5, 0.9, -0.15978853462519973, 0.17071844812959466, 0.61190370566015597, 0.086092492410793294),
    (0.02, 30.0, -3.5331198886945673e-15, -2.6964844044663967e-14, 52.320217119705461, -2418.795474034662),
    (4.0, 3.5, -0.21026046069056719, 0.02979375412717124, 0.97439582761203379, 0.0041017506240654262),
    (25.0, 2.0, -8.0816063571953253e-19, 2.0474627239923452e-18, 0.22083730106685963, 0.010709616774397338),
    (800.0, 801.0, -0.014088599138311805, -1.7599750146674156e-5, 1.0008332292781693, -5.2096352418155395e-7),
    (9000.0, 10000.0, -1.3293715162843047e-25, -1.4006456375129358e-26, 1.0536246607959407, -2.9774533294191013e-6),
    (9000.0, 8500.0, -2.3503521204735946e-9, 1.3434364545100368e-10, 0.97171102782932487, 1.571391046235018e-6),
]


def number(x):
    return torch.tensor(x, dtype=F64)


def forward(f):
    return lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]


@pytest.mark.parametrize("a, x, first, second, _, __", POINTS)
def test_in_the_first_argument(a, x, first, second, _, __):
    with mg.override():
        for op, sign in ((torch.igamma, 1), (torch.igammac, -1)):
            for one, other in itertools.product([torch.func.grad, forward], repeat=2):
                f = other(lambda a, op=op: op(a, number(x)))
                torch.testing.assert_close(f(number(a)), number(sign * first), rtol=2e-13, atol=0)
                torch.testing.assert_close(one(f)(number(a)), number(sign * second), rtol=1e-12, atol=0)


@pytest.mark.parametrize("a, x, _, __, first, second", POINTS)
def test_a_sample_is_differentiated_as_the_quantile_at_its_probability(a, x, _, __, first, second):
    a, x = number(a), number(x)
    slope = mg.ops.standard_gamma_grad(a, x)
    torch.testing.assert_close(slope, number(first), rtol=2e-13, atol=0)
    for derivative in (
        torch.func.jvp(mg.ops.standard_gamma_grad, (a, x), (torch.ones_like(a), slope))[1],
        sum(g * t for g, t in zip(torch.func.grad(mg.ops.standard_gamma_grad, (0, 1))(a, x), (1, slope))),
    ):
        torch.testing.assert_close(derivative, number(second), rtol=1e-10, atol=1e-13)


EDGES = [(2.0, 0.0, 0.0), (2.0, inf, 0.0), (inf, 2.0, 0.0), (0.0, inf, 0.0), (0.0, 2.0, -0.048900510708061120)]
UNDEFINED = [(0.0, 0.0), (inf, inf), (-1.0, 2.0), (2.0, -1.0), (nan, 1.0), (1.0, nan)]


@pytest.mark.parametrize("a, x, expected", [*EDGES, *[(a, x, nan) for a, x in UNDEFINED]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_at_the_ends_of_the_domain(a, x, expected, dtype):
    a, x = torch.tensor(a, dtype=dtype), torch.tensor(x, dtype=dtype)
    found = igamma_self_derivative(a, x)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=dtype), equal_nan=True)
    for f in (torch.igamma, torch.igammac):
        with mg.override():
            second = torch.func.grad(torch.func.grad(f))(a, x)
        assert not second.isinf() and (second.isfinite() or math.isnan(expected))


def test_large_shapes():
    """Where a sample is a + z sqrt(a), its derivative is 1 + z / (2 sqrt(a)), and more digits of x do not exist."""
    for a in (1e6, 1e9, 1e12):
        root = math.sqrt(a)
        slope = mg.ops.standard_gamma_grad(number(a), number(a + 0.7 * root))
        assert (slope - 1).item() * root == pytest.approx(0.35, rel=3 / root)


def samples(shape):
    torch.manual_seed(0)
    return torch.distributions.Gamma(shape, torch.ones_like(shape)).rsample()


def test_samples_in_both_orders():
    shape = torch.tensor([0.05, 0.7, 3.0, 40.0], dtype=F64)
    weights = torch.arange(1.0, 5.0, dtype=F64)
    x = samples(shape)
    slope = mg.ops.standard_gamma_grad(shape, x)
    by_shape, by_sample = torch.func.vjp(mg.ops.standard_gamma_grad, shape, x)[1](weights)
    expected = by_shape + by_sample * slope
    with mg.override():
        assert torch.equal(samples(shape), x)
        for mode in (torch.func.grad(lambda a: weights @ samples(a)), lambda a: weights * forward(samples)(a)):
            torch.testing.assert_close(mode(shape), weights * slope, rtol=1e-13, atol=0)
            torch.testing.assert_close(forward(mode)(shape), expected, rtol=1e-12, atol=0)
            second = torch.func.grad(lambda a, mode=mode: mode(a).sum())(shape)
            torch.testing.assert_close(second, expected, rtol=1e-12, atol=0)


def test_samples_in_a_batch():
    shapes = torch.tensor([[0.05, 0.7], [3.0, 40.0]], dtype=F64)

    def value_and_slope(a):
        return torch.func.jvp(torch._standard_gamma, (a,), (torch.ones_like(a),))

    with mg.override():
        x, slope = torch.func.vmap(value_and_slope, randomness="different")(shapes)
    torch.testing.assert_close(slope, mg.ops.standard_gamma_grad(shapes, x))


@pytest.mark.parametrize("name", ["igamma_self_derivative", "standard_gamma_grad"])
def test_many_numbers_by_blocks(name):
    formula = mg.ops[name]
    a = torch.linspace(0.01, 30.0, 3000, dtype=F64).view(2, 1500)
    x = a.flip(1).contiguous()
    torch.testing.assert_close(formula(a, x), formula.reference(a, x), rtol=1e-14, atol=0)
    torch.testing.assert_close(formula(a.clone().requires_grad_(), x).detach(), formula(a, x), rtol=1e-14, atol=0)


def test_cases_that_the_sample_kernel_declines():
    formula = mg.ops.standard_gamma_grad
    a, x = torch.tensor([[0.5, 2.0], [3.0, 40.0]], dtype=F64), torch.tensor([[0.2, 0.7], [1.5, 44.0]], dtype=F64)
    expected = formula(a, x)
    torch.testing.assert_close(formula(a.mT, x.mT), expected.mT, rtol=1e-14, atol=0)
    half = formula(a.half(), x.half())
    assert half.dtype == torch.half
    torch.testing.assert_close(half.to(F64), formula(a.half().to(F64), x.half().to(F64)), rtol=1e-3, atol=0)
