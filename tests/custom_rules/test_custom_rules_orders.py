"""Functions with a rule of their own in every mode up to the third order, next to the same functions in ordinary operations.

The rules differ from the true derivatives, so that a derivative that passes by the rule is seen at each order. In ordinary
operations the same is written with `detach`: 2 f(x) - f(x).detach() has the value of f and twice its derivatives.
"""

from __future__ import annotations

import random as python_random

import pytest
import torch
from helpers.modes import MODES, derivatives
from helpers.tensors import close, random
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import torch_manualgrad as mg
from torch_manualgrad.testing import check

F64, C128 = torch.float64, torch.complex128


def doubled(value):
    return 2 * value - value.detach()


# -- a custom_vjp and a custom_jvp of each kind -----------------------------------------------------------------------


@mg.custom_vjp
def sine(x, y):
    return torch.sin(x) * y


def sine_fwd(x, y):
    return torch.sin(x) * y, (torch.cos(x), torch.sin(x), y)


def sine_bwd(residuals, g):
    cos, sin, y = residuals
    return 2 * cos * g * y, 2 * sin * g


sine.defvjp(sine_fwd, sine_bwd)


@mg.custom_jvp
def sine_forward(x, y):
    return torch.sin(x) * y


@sine_forward.defjvp
def sine_jvp(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    return torch.sin(x) * y, 2 * torch.cos(x) * dx * y + 2 * torch.sin(x) * dy


@mg.custom_vjp()
def exponential(x):
    return torch.exp(x)


def exponential_fwd(x):
    out = torch.exp(x)
    return out, out


exponential.defvjp(exponential_fwd, lambda out, g: (2 * out * g,))


@mg.custom_jvp
def exponential_forward(x):
    return torch.exp(x)


exponential_forward.defjvps(lambda t, out, x: 2 * out * t)


@mg.custom_vjp
def reversal(x):
    """The residual is nothing, and the result is the argument."""
    return x


reversal.defvjp(lambda x: (x, None), lambda _, g: (-g,))


@mg.custom_vjp
def trees(p, n):
    """Pytrees, two results (one an integer), and an argument as a residual."""
    return {"a": p["x"] * p["y"] ** n, "k": p["k"] + 1, "b": (p["y"].cos(),)}


def trees_fwd(p, n):
    return trees(p, n), (p, n)


def trees_bwd(residuals, g):
    p, n = residuals
    assert g["k"] is None
    dx = 2 * g["a"] * p["y"] ** n
    dy = 2 * (g["a"] * p["x"] * n * p["y"] ** (n - 1) - g["b"][0] * p["y"].sin())
    return {"x": dx, "y": dy, "k": None}, None


trees.defvjp(trees_fwd, trees_bwd)


@mg.custom_jvp
def trees_forward(p, n):
    return {"a": p["x"] * p["y"] ** n, "k": p["k"] + 1, "b": (p["y"].cos(),)}


@trees_forward.defjvp
def trees_jvp(primals, tangents):
    (p, n), (t, dn) = primals, tangents
    assert t["k"] is None and dn == 0
    da = 2 * (t["x"] * p["y"] ** n + p["x"] * n * p["y"] ** (n - 1) * t["y"])
    return trees_forward(p, n), {"a": da, "k": None, "b": (-2 * p["y"].sin() * t["y"],)}


def of_trees(f):
    def call(x, y):
        out = f({"x": x, "y": y, "k": torch.tensor([1, 2])}, 3.0)
        assert out["k"].tolist() == [2, 3]
        return out["a"] * out["b"][0] + out["k"].sum()

    return call


def ordinary_trees(x, y):
    return doubled(x * y**3) * doubled(y.cos()) + 5


X, Y = random(3), random(3, seed=1)
SCALE = torch.tensor(0.7, dtype=F64)
CASES = {
    "vjp": (sine, lambda x, y: doubled(torch.sin(x) * y), (X, Y)),
    "vjp of no dims": (sine, lambda x, y: doubled(torch.sin(x) * y), (X[0], Y[0])),
    "jvp": (sine_forward, lambda x, y: doubled(torch.sin(x) * y), (X, Y)),
    "a result as residual": (exponential, lambda x: torch.exp(2 * x - x.detach()), (X,)),
    "defjvps": (exponential_forward, lambda x: torch.exp(2 * x - x.detach()), (X,)),
    "gradient reversal": (lambda x: reversal(x) * x, lambda x: (2 * x.detach() - x) * x, (X,)),
    "trees, vjp": (of_trees(trees), ordinary_trees, (X, Y)),
    "trees, jvp": (of_trees(trees_forward), ordinary_trees, (X, Y)),
    "one inside of the other": (
        lambda x, y: sine(sine_forward(x, y), exponential(y)) * sine(x, y),
        lambda x, y: doubled(torch.sin(doubled(torch.sin(x) * y)) * torch.exp(2 * y - y.detach()))
        * doubled(torch.sin(x) * y),
        (X, Y),
    ),
    "the same argument twice": (lambda x: sine(x, x), lambda x: doubled(torch.sin(x) * x), (X,)),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_every_mode(name, mode):
    ours, ordinary, inputs = CASES[name]
    close(ours(*inputs), ordinary(*inputs))
    close(derivatives(ours, inputs, mode), derivatives(ordinary, inputs, mode))


# -- random programs --------------------------------------------------------------------------------------------------

PAIRS = [
    (sine, lambda x, y: doubled(torch.sin(x) * y)),
    (sine_forward, lambda x, y: doubled(torch.sin(x) * y)),
    (lambda x, y: exponential(-x * x) + y, lambda x, y: torch.exp(2 * (-x * x) + (x * x).detach()) + y),
    (lambda x, y: exponential_forward(-x * x) - y, lambda x, y: torch.exp(2 * (-x * x) + (x * x).detach()) - y),
    (lambda x, y: reversal(x) * y, lambda x, y: (2 * x.detach() - x) * y),
    (lambda x, y: torch.tanh(x + y), lambda x, y: torch.tanh(x + y)),
    (lambda x, y: vmap(sine)(x, y.flip(0)), lambda x, y: doubled(torch.sin(x) * y.flip(0))),
    (lambda x, y: vmap(sine_forward, (0, None))(x, y.sum()), lambda x, y: doubled(torch.sin(x) * y.sum())),
    (lambda x, y: vmap(grad(sine), (0, 0))(x, y), lambda x, y: 2 * torch.cos(x) * y),
    (lambda x, y: vjp(sine_forward, x, y)[1](x)[0], lambda x, y: 2 * torch.cos(x) * y * x),
    (lambda x, y: sine(x.clamp(min=0), y), lambda x, y: doubled(torch.sin(x.clamp(min=0)) * y)),
]  # fmt: skip


def program(seed):
    """A composition of custom functions, and the same in ordinary operations."""
    steps = [(python_random.Random(seed * 100 + k)).choice(PAIRS) for k in range(4)]

    def run(which):
        def f(x, y):
            for step in steps:
                x, y = step[which](x, y), x * 0.5
            return x * y

        return f

    return run(0), run(1)


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed):
    ours, ordinary = program(seed)
    for mode in (m for m in MODES if len(m) < 9 or (seed + MODES.index(m)) % 8 == 0):
        close(derivatives(ours, (X, Y), mode), derivatives(ordinary, (X, Y), mode), rtol=1e-8)


# -- transforms -------------------------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("ours", [sine, sine_forward], ids=["vjp", "jvp"])
ordinary = CASES["vjp"][1]


@BOTH
def test_transforms(ours):
    total = lambda f: lambda *args: f(*args).sum()  # noqa: E731
    close(grad(total(ours), (0, 1))(X, Y), grad(total(ordinary), (0, 1))(X, Y))
    close(vjp(ours, X, Y)[1](Y), vjp(ordinary, X, Y)[1](Y))
    close(jvp(ours, (X, Y), (Y, X)), jvp(ordinary, (X, Y), (Y, X)))
    close(jacrev(ours, (0, 1))(X, Y), jacrev(ordinary, (0, 1))(X, Y))
    close(jacfwd(ours, (0, 1))(X, Y), jacfwd(ordinary, (0, 1))(X, Y))
    close(hessian(total(ours), (0, 1))(X, Y), hessian(total(ordinary), (0, 1))(X, Y))
    close(jacrev(jacfwd(jacrev(ours)))(X, Y), jacrev(jacfwd(jacrev(ordinary)))(X, Y))
    value, push = linearize(ours, X, Y)
    close([value, push(Y, X)], list(jvp(ordinary, (X, Y), (Y, X))))


@BOTH
def test_vmap(ours):
    A, B = random(4, 3), random(3, 4, seed=1)
    for dims, arguments in (((0, 1), (A, B)), ((0, None), (A, Y)), ((None, 1), (X, B)), ((-1, 0), (B, A))):
        for transform in (lambda f: f, lambda f: jacrev(f, (0, 1)), lambda f: jacfwd(f, (0, 1))):
            found, expected = (vmap(transform(f), dims)(*arguments) for f in (ours, ordinary))
            close(found, expected)
        f, g = (lambda x, y, f=f: vmap(f, dims)(x, y).sin().sum() for f in (ours, ordinary))
        close(hessian(f, (0, 1))(*arguments), hessian(g, (0, 1))(*arguments))
    nested = random(2, 4, 3), random(2, 3, seed=2)
    close(vmap(vmap(ours, (0, None)))(*nested), vmap(vmap(ordinary, (0, None)))(*nested))
    third = lambda f: vmap(grad(lambda x, y: (hessian(lambda x: f(x, y).sum())(x) ** 2).sum()))  # noqa: E731
    close(third(ours)(A, A.flip(0)), third(ordinary)(A, A.flip(0)))
    close(vmap(ours)(A[:0], A[:0]), A[:0])


@BOTH
def test_batched_gradients(ours):
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    out, expected = ours(x, y), ordinary(x, y)
    batch = torch.eye(3, dtype=F64)
    for o, keep in ((out, True), (expected, True)):
        o.found = torch.autograd.grad(o, (x, y), batch, is_grads_batched=True, create_graph=keep)
    close(out.found, expected.found)
    found, wanted = (torch.autograd.grad(sum(g.sin().sum() for g in o.found), (x, y)) for o in (out, expected))
    close(found, wanted)
    for vectorize in (False, True):
        found = torch.autograd.functional.hessian(lambda x, y: ours(x, y).sin().sum(), (x, y), vectorize=vectorize)
        wanted = torch.autograd.functional.hessian(lambda x, y: ordinary(x, y).sin().sum(), (x, y))
        close(found, wanted)


def make_true(kind):
    """With the true derivative, for finite differences."""
    if kind == "vjp":
        f = mg.custom_vjp(lambda z, w: torch.sin(z) * w.conj())
        f.defvjp(
            lambda z, w: (torch.sin(z) * w.conj(), (z, w)),
            lambda r, g: (g * (torch.cos(r[0]) * r[1].conj()).conj(), (g * torch.sin(r[0]).conj()).conj()),
        )
        return f
    f = mg.custom_jvp(lambda z, w: torch.sin(z) * w.conj())
    f.defjvps(lambda t, _, z, w: torch.cos(z) * t * w.conj(), lambda t, _, z, w: torch.sin(z) * t.conj())
    return f


@pytest.mark.parametrize("kind", ["vjp", "jvp"])
def test_complex_numbers_by_finite_differences(kind):
    """And vmap, fake tensors, checkpoints and more. The cotangents are PyTorch's, which are conjugate to JAX's."""
    check(make_true(kind), [(random(2, dtype=C128), random(2, dtype=C128, seed=1))])
    check(make_true(kind), [(random(2), random(2, seed=1))])


def test_real_numbers_from_complex_ones():
    f = mg.custom_vjp(lambda z: z.abs() ** 2)
    f.defvjp(lambda z: (z.abs() ** 2, z), lambda z, g: (2 * g * z,))
    ordinary = lambda z: (z * z.conj()).real  # noqa: E731
    for mode in MODES:
        found, expected = (derivatives(lambda a, b, g=g: g(torch.complex(a, b)), (X, Y), mode) for g in (f, ordinary))
        close(found, expected)


# -- randomness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_residuals_are_computed_again_with_the_same_random_numbers(randomness):
    """Of second order, with residuals that fwd draws; the drawn numbers are the result's derivative."""

    @mg.custom_vjp
    def noisy(x):
        return x * x * torch.rand_like(x)

    def fwd(x):
        noise = torch.rand_like(x)
        return x * x * noise, x * noise

    noisy.defvjp(fwd, lambda r, g: (2 * r * g,))
    torch.manual_seed(0)
    x = X.clone().requires_grad_()
    out = noisy(x)
    noise = out / x**2
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    close([first, second], [2 * x * noise, 2 * noise])
    before = torch.get_rng_state()
    close(
        grad(lambda x: grad(lambda x: noisy(x).sum())(x).sum())(X) / 2, grad(lambda x: x.sum())(X) * 0 + 0.5, rtol=0.6
    )
    assert not torch.equal(before, torch.get_rng_state())

    def both(x):
        slope, push = jvp(grad(lambda x: noisy(x).sum()), (x,), (torch.ones_like(x),))
        return slope, push

    slope, curvature = vmap(both, randomness=randomness)(random(4, 3))
    close(slope, curvature * random(4, 3))
    rows = curvature.detach()
    assert torch.equal(rows[0], rows[1]) == (randomness == "same")
    with pytest.raises(RuntimeError, match="random"):
        vmap(noisy)(random(4, 3).requires_grad_())
