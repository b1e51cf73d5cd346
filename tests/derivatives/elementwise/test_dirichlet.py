"""Samples of the Dirichlet distribution."""

import pytest
import torch

import torch_manualgrad as mg

F64 = torch.float64

# a, b, x, and the first and second derivative of the quantile x of the beta distribution in a; by mpmath.betainc and
# finite differences of 50 digits
POINTS = [
    (0.05, 0.2, 0.3, 21.39632791026447, 112.33351798880214),
    (3.0, 2.0, 0.9, 0.027726502766380638, -0.015545032935832214),
    (200.0, 300.0, 0.41, 0.0011964270351234945, -4.8744105449558897e-6),
    (0.5, 40.0, 1e-4, 0.0011148273248107028, 0.0081795319077207607),
    (2e3, 0.5, 0.5, 0.00017330597290525282, -1.1325400893079526e-7),
    (4.0, 0.01, 0.75, 0.06075096356362822, -0.029072517848208428),
]


@pytest.mark.parametrize("a, b, x, first, second", POINTS)
def test_a_component_is_differentiated_as_the_quantile_at_its_probability(a, b, x, first, second):
    a, b, x, first, second = torch.tensor([a, b, x, first, second], dtype=F64)

    def slope(a, x):
        return mg.ops.dirichlet_grad(x, a, a + b) * (1 - x)

    torch.testing.assert_close(slope(a, x), first, rtol=1e-11, atol=0)
    forward = torch.func.jvp(slope, (a, x), (torch.ones_like(a), first))[1]
    in_a, in_x = torch.func.grad(slope, (0, 1))(a, x)
    torch.testing.assert_close(forward, second, rtol=1e-9, atol=0)
    torch.testing.assert_close(in_a + in_x * first, second, rtol=1e-9, atol=0)


def test_two_components_move_together():
    alpha, x = torch.tensor([0.4, 2.5], dtype=F64), torch.tensor([0.15, 0.85], dtype=F64)
    ((dx, dy),) = torch.func.vjp(lambda t: mg.rules["aten::_sample_dirichlet"].jvp[("result",)](t, alpha, x), alpha)[1](
        torch.tensor([1.0, 0.0], dtype=F64)
    )
    same = mg.ops.dirichlet_grad(x, alpha, alpha.sum().expand(2)) * (1 - x)
    torch.testing.assert_close(torch.stack([dx, -dy]), same)


def samples(alpha):
    torch.manual_seed(0)
    return torch._sample_dirichlet(alpha)  # torch.distributions has an autograd function of its own


def test_samples_in_all_modes():
    """They agree, and the mean of x over samples has the derivatives of a / (a + b + c)."""
    alpha, direction, weights = torch.tensor([[0.3, 1.2, 4.0], [1.0, -0.5, 2.0], [1.0, 3.0, -2.0]], dtype=F64)
    many, directions = alpha.repeat(4000, 1), direction.repeat(4000, 1)

    def pushed(alpha):
        return torch.func.jvp(samples, (alpha,), (directions,))[1] @ weights

    def pulled(alpha):
        return torch.func.grad(lambda a: (samples(a) @ weights).sum())(alpha) @ direction

    def of_the_mean(alpha):
        return torch.func.jvp(lambda a: (a / a.sum()) @ weights, (alpha,), (direction,))[1]

    with mg.override():
        slope, seconds = pushed(many), []
        for first in (pushed, pulled):
            torch.testing.assert_close(first(many), slope, rtol=1e-12, atol=1e-13)
            seconds.append(torch.func.grad(lambda a, f=first: f(a).sum())(many) @ direction)
            seconds.append(torch.func.jvp(first, (many,), (directions,))[1])
    for second in seconds:
        torch.testing.assert_close(second, seconds[0], rtol=1e-10, atol=1e-11)
    expected = torch.func.jvp(of_the_mean, (alpha,), (direction,))
    for found, value in zip((slope, seconds[0]), expected):
        assert (found.mean() - value).abs() < 4 * found.std() / len(many) ** 0.5


@pytest.mark.parametrize("x, expected", [(0.0, 0.0), (-0.5, torch.nan), (1.5, torch.nan), (torch.nan, torch.nan)])
def test_at_the_ends_of_the_domain(x, expected):
    x, one = torch.tensor(x), torch.tensor(1.0)
    torch.testing.assert_close(mg.ops.dirichlet_grad(x, one, 3 * one), torch.tensor(expected), equal_nan=True)
    assert mg.ops.dirichlet_grad(one, one, one) == 0


def test_many_numbers_by_blocks():
    formula = mg.ops.dirichlet_grad
    x = torch.linspace(0.01, 0.99, 600, dtype=F64).view(2, 300)
    given = (x, 3 * x, 10 - x)
    torch.testing.assert_close(formula(*given), formula.reference(*given), rtol=1e-13, atol=0)
