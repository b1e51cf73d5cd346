"""odeint next to closed forms: every mode to the third order, stiff systems, methods, and failures."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers.modes import MODES, derivatives
from helpers.tensors import close, random
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap

from torch_manualgrad.implicit import ConvergenceError, ConvergenceWarning, HiddenTensorError, odeint, odes
from torch_manualgrad.implicit.odes import METHODS, Ode
from torch_manualgrad.testing import check

F64, C128 = torch.float64, torch.complex128
TIMES = torch.tensor([0.2, 0.9, 1.7], dtype=F64)


def relaxing(t, y, rate):
    """To the sine, at a rate: backward in time errors grow by ``exp(rate * t)``."""
    return -rate * (y - torch.sin(t))


def relaxed(y0, t, rate):
    part = lambda t: (rate * rate * torch.sin(t) - rate * torch.cos(t)) / (1 + rate * rate)  # noqa: E731
    return torch.stack([(y0 - part(t[0])) * torch.exp(-rate * (s - t[0])) + part(s) for s in t])


def logistic(t, y, r, capacity):
    return r * y * (1 - y / capacity)


def grown(y0, t, r, capacity):
    return torch.stack([capacity / (1 + (capacity / y0 - 1) * torch.exp(-r * (s - t[0]))) for s in t])


RATE = torch.tensor(0.8, dtype=F64)
CASES = {
    "linear": (relaxing, relaxed, (random(2), TIMES, RATE)),
    "backward in time": (relaxing, relaxed, (random(2), TIMES.flip(0), RATE)),
    "not linear": (logistic, grown, (random().abs() + 0.5, TIMES[:2], RATE, torch.tensor(2.0, dtype=F64))),
}


FAST = {(name, mode) for name in CASES for mode in ("", *MODES) if len(mode) < 9}
FAST |= {("not linear", mode) for mode in ("revrevrev", "revrevfwd", "fwdfwdrev", "fwdfwdfwd")}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[] if (name, mode) in FAST else pytest.mark.slow)
        for name in CASES
        for mode in ("", *MODES)
    ],
)
def test_every_mode(name, mode):
    f, closed, inputs = CASES[name]
    tolerance = 1e-8 if len(mode) < 9 else 1e-5
    ours = functools.partial(odeint, f, rtol=tolerance / 10, atol=tolerance / 10, on_failure="raise")
    close(derivatives(ours, inputs, mode), derivatives(closed, inputs, mode), rtol=100 * tolerance)


@pytest.mark.parametrize("rate", [30.0, 100.0, pytest.param(1000.0, marks=pytest.mark.slow)])
def test_a_system_that_forgets_its_start(rate):
    """Integrated backward it grows by up to exp(2000)."""
    y0, rate = random(2).requires_grad_(), torch.tensor(rate, dtype=F64, requires_grad=True)
    t = torch.tensor([0.0, 2.0], dtype=F64)
    found = torch.autograd.grad(odeint(relaxing, y0, t, rate, rtol=1e-9, atol=1e-10)[-1].sum(), (y0, rate))
    expected = torch.autograd.grad(relaxed(y0, t, rate)[-1].sum(), (y0, rate))
    close(found[0], expected[0])
    close(found[1], expected[1], rtol=1e-4, atol=0)


@pytest.mark.parametrize("rate", [10.0, 100.0])
def test_a_start_that_is_forgotten_without_linearity(rate):
    """Backward in time y is infinite soon."""

    def f(t, y, rate):
        return rate * (torch.cos(t) - y**3)

    rate, t = torch.tensor(rate, dtype=F64, requires_grad=True), torch.tensor([0.0, 1.0, 2.0], dtype=F64)
    y0 = torch.tensor([1.0, 2.0], dtype=F64)
    found = torch.autograd.grad(odeint(f, y0, t, rate, rtol=1e-8, on_failure="raise").sum(), rate)
    states = fixed_steps(lambda t, y: f(t, y, rate), y0, t, 1000)
    close(found, torch.autograd.grad(states.sum(), rate), rtol=1e-4, atol=0)


def test_a_path_that_cannot_be_followed_backward_is_reported():
    """With a method that shows no steps there are no states to take."""
    rate = torch.tensor(40.0, dtype=F64, requires_grad=True)
    y = odeint(relaxing, random(2), torch.tensor([0.0, 2.0], dtype=F64), rate, method=fixed_steps)
    with pytest.warns(ConvergenceWarning, match="more times"):
        torch.autograd.grad(y[-1].sum(), rate)
    in_short_steps = functools.partial(fixed_steps, count=20)
    y = odeint(relaxing, random(2), torch.linspace(0, 2, 41, dtype=F64), rate, method=in_short_steps)
    (found,) = torch.autograd.grad(y[-1].sum(), rate)
    leaf = rate.detach().requires_grad_()
    (expected,) = torch.autograd.grad(relaxed(random(2), torch.linspace(0, 2, 41, dtype=F64), leaf)[-1].sum(), leaf)
    close(found, expected, rtol=1e-3, atol=0)


def fixed_steps(f, y0, t, count=200):
    """The classical method of order 4, of vectors, as other packages have it."""
    states, y = [y0], y0
    for a, b in zip(t, t[1:]):
        h = (b - a) / count
        for i in range(count):
            s = a + i * h
            k1 = f(s, y)
            k2 = f(s + h / 2, y + h / 2 * k1)
            k3 = f(s + h / 2, y + h / 2 * k2)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + f(s + h, y + h * k3))
        states.append(y)
    return torch.stack(states)


SLOW = ("scipy.BDF", "scipy.Radau", "scipy.RK23")


@pytest.mark.parametrize(
    "method",
    [
        *[pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in METHODS],
        functools.partial(fixed_steps, count=30),
    ],
)
def test_methods(method):
    if isinstance(method, str) and method.startswith("scipy"):
        pytest.importorskip("scipy")
    y0, r, capacity = random(3).abs() + 0.2, RATE, torch.tensor(2.0, dtype=F64)
    ours = functools.partial(odeint, logistic, method=method, rtol=1e-8, atol=1e-10)
    for mode in ("", "rev", "fwd", "fwdrev"):
        inputs = (y0, TIMES, r, capacity)
        close(derivatives(ours, inputs, mode), derivatives(grown, inputs, mode), rtol=2e-5)


def rotating(t, y, w):
    return w * y


def test_complex_numbers_and_their_gradients():
    y0, w = random(2, dtype=C128), 0.7 * random(2, dtype=C128, seed=1)

    def real(f):
        return lambda y, w: torch.view_as_real(f(torch.view_as_complex(y), torch.view_as_complex(w)))

    ours = real(lambda y, w: odeint(rotating, y, TIMES, w, rtol=1e-10, atol=1e-11))
    closed = real(lambda y, w: torch.stack([y * torch.exp(w * (s - TIMES[0])) for s in TIMES]))
    inputs = [torch.view_as_real(y0), torch.view_as_real(w)]
    for mode in ("", "rev", "fwd", "revrev", "fwdrev"):
        close(derivatives(ours, inputs, mode), derivatives(closed, inputs, mode), rtol=1e-7)


@pytest.mark.slow
def test_by_finite_differences():
    def pendulum(t, y, length):
        return {"angle": y["velocity"], "velocity": (-9.81 / length * torch.sin(y["angle"]) - 0.1 * y["velocity"])}

    def end(angle, velocity, length):
        y = odeint(pendulum, {"angle": angle, "velocity": velocity}, TIMES, length, rtol=1e-10, atol=1e-11)
        return y["angle"], y["velocity"][-1]

    check(end, [(random(2), random(2, seed=1), torch.tensor(1.3, dtype=F64))])


def test_transforms_and_vmap():
    y0, rates = random(3, 2), torch.tensor([0.5, 0.8, 1.1], dtype=F64)
    ours = lambda y, r: odeint(relaxing, y, TIMES, r, rtol=1e-10, atol=1e-11)[-1].square().sum()  # noqa: E731
    closed = lambda y, r: relaxed(y, TIMES, r)[-1].square().sum()  # noqa: E731
    close(vmap(ours)(y0, rates), vmap(closed)(y0, rates), rtol=1e-8)
    close(vmap(ours, (None, 0))(y0[0], rates), vmap(closed, (None, 0))(y0[0], rates), rtol=1e-8)
    close(vmap(grad(ours, (0, 1)))(y0, rates), vmap(grad(closed, (0, 1)))(y0, rates), rtol=1e-8)
    close(hessian(ours)(y0[0], rates[0]), hessian(closed)(y0[0], rates[0]), rtol=1e-8)
    for f in (jacrev, jacfwd):
        close(f(ours, 1)(y0[0], rates[0]), f(closed, 1)(y0[0], rates[0]), rtol=1e-8)


def test_a_neural_equation_in_single_precision():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    parameters = dict(net.named_parameters())
    y0, t = torch.randn(5, 2), torch.tensor([0.0, 1.0])

    def f(t, y, parameters):
        return functional_call(net, parameters, (y,)) * torch.cos(t)

    y = odeint(f, y0, t, parameters)
    assert y.dtype == torch.float32 and y.shape == (2, 5, 2)
    found = torch.autograd.grad(y[-1].square().sum(), list(parameters.values()))
    wide = {name: p.detach().double().requires_grad_() for name, p in parameters.items()}
    states = fixed_steps(lambda t, y: f(t, y, wide), y0.double(), t.double(), 50)
    expected = torch.autograd.grad(states[-1].square().sum(), list(wide.values()))
    close([g.double() for g in found], list(expected), rtol=2e-3)


def test_memory_does_not_grow_with_the_steps(monkeypatch):
    """Neither that of the graph, nor that of the states of a path."""
    knots, kept, calls = [], [], []
    integrated = Ode._integrated

    def counted(self, *args):
        path = integrated(self, *args)
        knots.append(len(path.knots))
        return path

    def f(t, y, rate):
        calls[-1] += 1
        return relaxing(t, y, rate)

    monkeypatch.setattr(Ode, "_integrated", counted)
    monkeypatch.setattr(odes, "KNOTS", 8)
    for rtol in (1e-3, 1e-12):
        saved = []
        calls.append(0)
        rate = RATE.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            y = odeint(f, random(2), TIMES, rate, rtol=rtol, atol=rtol)
        kept.append(sum(x.numel() for x in saved))
        torch.autograd.grad(y.sum(), rate)
    assert kept[0] == kept[1] and calls[1] > 10 * calls[0] and 8 <= max(knots) <= 16


def test_one_time_and_states_of_no_elements():
    y0, t = random(2).requires_grad_(), TIMES[:1].clone().requires_grad_()
    y = odeint(relaxing, y0, t, RATE)
    assert y.shape == (1, 2)
    found = torch.autograd.grad(y.square().sum(), (y0, t))
    close(found, (2 * y0, torch.zeros(1, dtype=F64)))
    assert odeint(relaxing, torch.zeros(0, 3), TIMES, RATE).shape == (3, 0, 3)


def test_a_parameter_without_influence_has_a_zero():
    unused = torch.ones(3, dtype=F64, requires_grad=True)
    y = odeint(lambda t, y, unused: -y, random(2), TIMES, unused)
    close(torch.autograd.grad(y.sum(), unused)[0], torch.zeros(3, dtype=F64))


def test_a_hidden_tensor_is_named():
    hidden = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(HiddenTensorError, match="hidden"):
        odeint(lambda t, y: hidden * y, torch.ones(2), torch.tensor([0.0, 1.0]))
    with pytest.raises(HiddenTensorError):
        grad(lambda a: odeint(lambda t, y: a * y, torch.ones(2), torch.tensor([0.0, 1.0])).sum())(torch.tensor(1.0))


def test_a_solution_that_ends():
    """y' = y^2 from 1 has no solution at 1 and later."""
    t = torch.tensor([0.0, 0.5, 2.0], dtype=F64)
    with pytest.warns(ConvergenceWarning, match="odeint did not converge"):
        y = odeint(lambda t, y: y * y, torch.ones((), dtype=F64), t)
    close(y[1], torch.tensor(2.0, dtype=F64), rtol=1e-6)
    assert y[2].isnan()
    with pytest.raises(ConvergenceError):
        odeint(lambda t, y: y * y, torch.ones((), dtype=F64), t, maxiter=5, on_failure="raise")
    with pytest.raises(ConvergenceError):
        odeint(lambda t, y: y / 0, torch.ones((), dtype=F64), t, on_failure="raise")


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: odeint(rotating, torch.ones(2), torch.tensor([0, 1]), 1.0), "t: expected floating point times"),
        (lambda: odeint(rotating, torch.ones(2), torch.tensor([0.0, 1.0, 1.0]), 1.0), "t: expected strictly increasing"),
        (lambda: odeint(rotating, torch.ones(2), torch.tensor([0.0, torch.nan]), 1.0), "t: expected strictly increasing"),
        (lambda: odeint(rotating, torch.ones(2), torch.tensor(0.0), 1.0), r"t: expected a vector .* got shape \[\]"),
        (lambda: odeint(rotating, torch.ones(2).int(), torch.tensor([0.0, 1.0]), 1.0), "y0: expected floating point"),
        (lambda: odeint(rotating, torch.ones(2), torch.tensor([0.0, 1.0]), 1.0, method="rk4"), "method: .* got 'rk4'"),
        (lambda: odeint(rotating, torch.ones(2), torch.tensor([0.0, 1.0]), 1.0, rtol=-1.0), "rtol: .* got -1.0"),
        (lambda: odeint(lambda t, y: y[:1], torch.ones(2), torch.tensor([0.0, 1.0])), r"f: .* shape \[2\]"),
        (
            lambda: odeint(rotating, torch.ones(2), torch.tensor([0.0, 1.0]), 1.0, method=lambda f, y, t: y),
            r"method: expected states of shape \[2, 2\]",
        ),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(call, match):
    with pytest.raises((ValueError, TypeError), match=match):
        call()
