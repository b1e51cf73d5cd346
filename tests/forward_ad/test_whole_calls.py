"""Levels and Taylor series through calls that are differentiated as a whole: custom rules, implicit functions and checkpoints.

Each rule differs from the derivative of its function, so that one that is passed over is seen."""

import pytest
import torch
from helpers.own_rules import product
from torch.func import grad, hessian, jvp

import torch_manualgrad as mg
from torch_manualgrad.core.forward import hooks, jvps
from torch_manualgrad.forward_ad import dual_level, make_dual, unpack_dual
from torch_manualgrad.implicit import (
    HiddenTensorError,
    eigsh,
    fixed_point,
    linear_solve,
    minimize,
    odeint,
    root,
    svds,
)

F64 = torch.float64
X = torch.tensor([0.3, 0.7, 1.1], dtype=F64)
ALONG = (torch.tensor([0.5, -0.4, 0.9], dtype=F64), X.cos(), X * X)
MATRIX = 4 * torch.eye(3, dtype=F64) + torch.arange(9, dtype=F64).reshape(3, 3) / 9


@mg.custom_jvp
def pushed(pair, scale):
    return {"out": torch.sin(pair[0]) * pair[1] * scale, "count": torch.arange(3, device=pair[0].device), "n": 3}


@pushed.defjvp
def _(primals, tangents):
    ((x, y), scale), ((dx, dy), _) = primals, tangents
    return pushed((x, y), scale), {
        "out": (2 * torch.cos(x) * dx * y + 3 * torch.sin(x) * dy) * scale,
        "count": None,
        "n": None,
    }


conjugate = mg.custom_vjp(lambda z, w: z.conj() * w.abs())
conjugate.defvjp(lambda z, w: (conjugate(z, w), (z, w)), lambda kept, g: (2 * g.conj() * kept[1].abs(), None))


def newton(f, x, *parameters):
    for _ in range(20):
        x = x - f(x, *parameters) / (3 * x**2 + 1)
    return x


def stationary(f, x, a, b):
    for _ in range(20):
        x = x - (x**3 + a.exp() * x - b) / (3 * x**2 + a.exp())
    return x


cubic = root(lambda x, a, b: x**3 + x + a - b, newton)
lowest = minimize(lambda x, a, b: (x**4 / 4 + a.exp() * x * x / 2 - b * x).sum(), stationary)
settled = fixed_point(lambda x, a, b: [torch.tanh(x[0] * 0.3 * a) + b], rtol=1e-14)

PROGRAMS = {
    "custom_vjp": product,
    "custom_jvp": lambda x, y: pushed((x, y), 1.5)["out"],
    "complex": lambda x, y: torch.view_as_real(conjugate(torch.complex(x, y), torch.complex(y, x))).sum(-1),
    "root": lambda x, y: cubic(torch.ones_like(x), x, y),
    "minimize": lambda x, y: lowest(torch.ones_like(x), x, y),
    "fixed_point": lambda x, y: settled([torch.ones_like(x)], x, y)[0],
    "linear_solve": lambda x, y: linear_solve(lambda v, d: MATRIX @ v + d * v, y, x * x, solver="direct"),
    "checkpoint": mg.checkpoint(lambda x, y: (x * y).sin().exp()),
}
TIMES = torch.tensor([0.0, 0.5], dtype=F64)
OF_SERIES = {
    **PROGRAMS,
    "odeint": lambda x, y: odeint(lambda t, s, a: -s * a * t.cos(), x, TIMES, y, rtol=1e-3)[-1],
    "eigsh": lambda x, y: eigsh(lambda v, a, b: a * v - 0.3 * v.roll(1) - 0.3 * v.roll(-1), 3, 1, x, y)[1][:, 0] ** 2,
    "svds": lambda x, y: svds(lambda v, a, b: torch.cat([a * v, b * v.flip(0)]), 3, 1, x, y)[2][0] ** 2,
}
EACH = pytest.mark.parametrize("name", PROGRAMS)


def program(name):
    return lambda x: OF_SERIES[name](x * x, (x + 0.3).cos()).exp()


def mixed(f, along):
    """The derivative in all these directions, by torch.func."""
    for v in along:
        f = (lambda f, v: lambda x: jvp(f, (x,), (v,))[1])(f, v)
    return f(X)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", OF_SERIES)
def test_series(name):
    f = program(name)
    for order, found in enumerate(mg.forward_ad.directional(f, X, ALONG[0], 3), 1):
        close(found, mixed(f, ALONG[:1] * order))
    value, terms = mg.forward_ad.jet(f, (X,), ([None, ALONG[0], ALONG[1]],))
    close(value, f(X))
    close(terms, [torch.zeros_like(X), mixed(f, ALONG[:1]), mixed(f, ALONG[1:2])])


@EACH
def test_laplacians_and_their_gradients(name):
    f = lambda x: program(name)(x).sum()  # noqa: E731
    expected = lambda x: hessian(f)(x).trace()  # noqa: E731
    for block in (None, 0):
        found = mg.forward_ad.laplacian(f, block_dim=block)
        close(found(X), expected(X))
        x = X.clone().requires_grad_()
        close(torch.autograd.grad(found(x), x)[0], grad(expected)(X))


AT_LEVELS = [n for n in PROGRAMS if n != "minimize"]


@pytest.mark.parametrize("name", ["minimize", "eigsh", "svds"])
def test_calls_with_transforms_raise_at_levels(name):
    with dual_level(), pytest.raises(RuntimeError, match="cannot run at a dual level|inside a torch.func transform"):
        program(name)(make_dual(X, ALONG[0]))


@pytest.mark.parametrize("name", [*AT_LEVELS, "odeint"])
def test_levels(name):
    f = program(name)
    with dual_level() as a, dual_level() as b, dual_level() as c:
        x = X
        for level, v in zip((a, b, c), ALONG):
            x = make_dual(x, v, level=level)
        y = f(x)
        for order, level in enumerate((c, b, a), 1):
            y = unpack_dual(y, level=level).tangent
            value = y
            for other in (c, b, a)[order:]:
                value = unpack_dual(value, level=other).primal
            assert not value.requires_grad
            close(value, mixed(f, ALONG[::-1][:order]))


@pytest.mark.parametrize("name", AT_LEVELS)
def test_levels_and_reverse_mode(name):
    f = program(name)
    expected = jvp(grad(lambda x: f(x).sum()), (X,), (ALONG[0],))[1]
    x = X.clone().requires_grad_()
    with dual_level():
        dual = make_dual(x, ALONG[0])
        (gradient,) = torch.autograd.grad(f(dual).sum(), dual)
        close(unpack_dual(gradient).tangent, expected)
        tangent = unpack_dual(f(make_dual(x, ALONG[0]))).tangent
        close(torch.autograd.grad(tangent.sum(), x)[0], expected)


def _vjp(f):
    made = mg.custom_vjp(f)
    made.defvjp(lambda x: (f(x), None), lambda _, g: (g,))
    return made


def _jvp(f):
    made = mg.custom_jvp(f)
    made.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return made


READERS = {
    "custom_vjp": _vjp,
    "custom_jvp": _jvp,
    "root": lambda f: lambda x: root(lambda z, a: z - f(a), lambda g, z, a: z - g(z, a))(torch.zeros_like(x), x),
    "fixed_point": lambda f: lambda x: fixed_point(lambda z, a: f(a) + z / 2)(torch.zeros_like(x), x),
    "linear_solve": lambda f: lambda x: linear_solve(lambda z, a: f(a) * 0 + 2 * z, x, x),
}


def _of(value):
    """A tensor in a place where no name is found."""
    return iter([value]).__next__


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("named", [True, False])
def test_a_tensor_that_is_no_argument_and_has_a_tangent_raises(name, named):
    with dual_level():
        hidden = make_dual(X, ALONG[0])
        make = _of((hidden,)) if not named else None
        f = (lambda x: x * hidden) if named else (lambda x: x * make.__self__.__reduce__()[1][0][0][0])
        with pytest.raises(HiddenTensorError, match="hidden" if named else ""):
            READERS[name](f)(X)
        with pytest.raises(HiddenTensorError, match="hidden" if named else ""):
            READERS[name](f)(make_dual(X, ALONG[1]))


@pytest.mark.parametrize("name", READERS)
def test_a_series_that_is_no_argument_raises(name):
    with pytest.raises((NotImplementedError, HiddenTensorError)):
        mg.forward_ad.directional(lambda x: READERS[name](lambda y: y * x)(X), X, ALONG[0], 2)
    with pytest.raises((NotImplementedError, HiddenTensorError)):
        mg.forward_ad.directional(lambda x: READERS[name](lambda y: y * x)(x), X, ALONG[0], 2)


@pytest.mark.parametrize("name", ["custom_vjp", "root"])
def test_series_that_are_not_known_raise(name):
    f = program(name)
    with pytest.raises(NotImplementedError, match="in each other"):
        mg.forward_ad.biharmonic(lambda x: f(x).sum())(X)
    with pytest.raises(NotImplementedError, match="each example of the batch"):
        mg.forward_ad.laplacian(f, batch_dims=1)(torch.stack([X, X]))


def test_planted_faults_are_seen(monkeypatch):
    right = hooks.by_jvps
    with monkeypatch.context() as patch:
        patch.setattr(hooks, "by_jvps", lambda f, args: right(lambda *args: f(*args) * 0 + f(*args).detach(), args))
        with pytest.raises(AssertionError):
            test_series("custom_vjp")
        with pytest.raises(AssertionError):
            test_laplacians_and_their_gradients("root")
    for key, name in (("manualgrad_programs::call", "custom_jvp"), ("manualgrad_programs::node", "root")):
        jvp_of = jvps[key]
        with monkeypatch.context() as patch:
            patch.setitem(jvps, key, lambda v, o, t: [[None if x is None else x.detach() for x in jvp_of(v, o, t)[0]]])  # noqa: B023
            for test in (test_levels, test_levels_and_reverse_mode):
                with pytest.raises((AssertionError, RuntimeError)):
                    test(name)
    with monkeypatch.context() as patch:
        patch.setattr(hooks, "has_level_tangent", lambda x: False)
        for name in READERS:
            with pytest.raises(BaseException, match="DID NOT RAISE"):
                test_a_tensor_that_is_no_argument_and_has_a_tangent_raises(name, True)
