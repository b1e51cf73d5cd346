"""Functions that derivatives call later read closure variables as they were at the call, such as a loop's."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian

import torch_manualgrad as mg
from torch_manualgrad.core.closures import as_of_now

F64 = torch.float64
ZERO, ONE = torch.zeros((), dtype=F64), torch.ones((), dtype=F64)
FACTORS = (0.5, 1.0, 2.0)


def of_fixed_point(a: Tensor, make: Callable[..., Tensor]) -> Tensor:
    total = ZERO
    for c in FACTORS:
        total = total + make(lambda x, a: 0.3 * torch.cos(c * x) + a, ZERO, a)
    return total


def iterated(f, x, a):
    for _ in range(80):
        x = f(x, a)
    return x


def of_root(a, solve):
    total = ZERO
    for c in FACTORS:
        total = total + solve(lambda x, a: x**3 - c * a, c, a)
    return total


def of_function(a, wrap):
    """Functions of one argument that read the loop's variable, also through others."""
    total = ZERO
    for c in FACTORS:

        def wave(a):
            return (a * c).sin()

        inner = functools.partial(lambda scale, a: wave(a) * scale + c * a**3, 2.0)
        total = total + wrap(lambda a: inner(a) * c, lambda a, t: t * (2 * c * (c * a).cos() + 3 * c * a**2) * c)(a)  # noqa: B023
    return total


def with_jvp(f, jvp):
    made = mg.custom_jvp(f)
    made.defjvp(lambda primals, tangents: (made(*primals), jvp(*primals, *tangents)))
    return made


def with_jvps(f, jvp):
    made = mg.custom_jvp(f)
    made.defjvps(lambda t, out, a: jvp(a, t) + 0 * out)
    return made


def with_vjp(f, jvp):
    made = mg.custom_vjp(f)
    made.defvjp(lambda a: (f(a), (a, jvp(a, 1))), lambda kept, g: (kept[1] * g,))
    return made


def with_late_vjp(f, jvp):
    made = mg.custom_vjp(f)
    made.defvjp(lambda a: (made(a), a), lambda a, g: (jvp(a, g),))
    return made


def minimized(a, solve):
    total = ZERO
    for c in FACTORS:
        # the minimum of (x - c a)^2 + c x^2 is at c a / (1 + c)
        total = total + solve(lambda x, a: (x - c * a) ** 2 + c * x**2, lambda f, x, a: c * a / (1 + c), a)
    return total


def projected(a, solve):
    total = ZERO
    for c in FACTORS:
        f, h = lambda x, a: (x - a) ** 2 + 0 * c, lambda x, a: x - torch.sin(c * a)
        total = total + solve(f, lambda f, x, a: torch.sin(c * a), h, a)
    return total


def linear(a, solve):
    total = ZERO
    for c in FACTORS:
        total = total + solve(lambda x, a: (a + c) * x, c, a)
    return total


def decays(a, solve):
    total = ZERO
    for c in FACTORS:
        total = total + solve(lambda t, y, a: -c * a * y, c, a)
    return total


implicit = mg.implicit
CASES = {
    "fixed_point": (
        lambda a: of_fixed_point(a, lambda f, x, a: implicit.fixed_point(f)(x, a)),
        lambda a: of_fixed_point(a, iterated),
    ),
    "root": (
        lambda a: of_root(a, lambda f, c, a: implicit.root(f, lambda f, x, a: (c * a) ** (1 / 3))(ONE, a)),
        lambda a: of_root(a, lambda f, c, a: (c * a) ** (1 / 3)),
    ),
    "minimize": (
        lambda a: minimized(a, lambda f, solver, a: implicit.minimize(f, solver)(ONE, a)),
        lambda a: minimized(a, lambda f, solver, a: solver(f, ONE, a)),
    ),
    "minimize with a constraint": (
        lambda a: projected(a, lambda f, solver, h, a: implicit.minimize(f, solver, h)(ONE, a)),
        lambda a: projected(a, lambda f, solver, h, a: solver(f, ONE, a)),
    ),
    "linear_solve": (
        lambda a: linear(a, lambda matvec, c, a: implicit.linear_solve(matvec, ONE, a)),
        lambda a: linear(a, lambda matvec, c, a: 1 / (a + c)),
    ),
    "odeint": (
        lambda a: decays(a, lambda f, c, a: implicit.odeint(f, ONE, torch.stack([ZERO, ONE]), a, rtol=1e-11)[-1]),
        lambda a: decays(a, lambda f, c, a: torch.exp(-c * a)),
    ),
    "checkpoint": (lambda a: of_function(a, lambda f, jvp: mg.checkpoint(f)), lambda a: of_function(a, lambda f, _: f)),
    "custom_jvp": (lambda a: of_function(a, with_jvp), lambda a: of_function(a, lambda f, _: f)),
    "custom_jvp, by defjvps": (lambda a: of_function(a, with_jvps), lambda a: of_function(a, lambda f, _: f)),
    "custom_vjp": (lambda a: of_function(a, with_vjp), lambda a: of_function(a, lambda f, _: f)),
    "custom_vjp that computes later": (
        lambda a: of_function(a, with_late_vjp),
        lambda a: of_function(a, lambda f, _: f),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_loop_whose_backward_is_later(name):
    ours, expected = CASES[name]
    a = torch.tensor(0.7, dtype=F64)
    x = a.clone().requires_grad_()
    close = functools.partial(torch.testing.assert_close, rtol=1e-7, atol=1e-9)
    close(torch.autograd.grad(ours(x), x)[0], grad(expected)(a))
    close(grad(ours)(a), grad(expected)(a))
    close(hessian(ours)(a), hessian(expected)(a))


LOOP = """
def wave(a):
    return (a * c).sin()

compiled = torch.compile(wave, backend="aot_eager")
functions = [wave, dict(wave=lambda a: wave(a))]
total = ZERO
for c in (0.5, 1.0, 2.0):
    total = total + {}
"""
CALLS = {
    "checkpoint": "mg.checkpoint(lambda a: wave(a) * c)(a)",
    "checkpoint of a partial call": "mg.checkpoint(functools.partial(lambda f, a: f(a) * c, wave))(a)",
    "checkpoint of a checkpoint": "mg.checkpoint(mg.checkpoint(lambda a: wave(a) * c))(a)",
    "a default": "mg.checkpoint(lambda a, f=lambda a: wave(a) * c: f(a))(a)",
    "custom_jvp": "with_jvp(lambda a: wave(a) * c, lambda a, t: t * c**2 * (c * a).cos())(a)",
    "custom_vjp": "with_late_vjp(lambda a: wave(a) * c, lambda a, t: t * c**2 * (c * a).cos())(a)",
    "fixed_point": "implicit.fixed_point(lambda x, a: 0.3 * torch.cos(c * x) + wave(a))(ZERO, a)",
    "a compiled function": "mg.checkpoint(torch.compile(lambda a: wave(a) * c, backend='aot_eager'))(a)",
    "a compiled global": "mg.checkpoint(lambda a: compiled(a) * c)(a)",
    "a list": "mg.checkpoint(lambda a: functions[0](a) * c)(a)",
    "a dictionary": "mg.checkpoint(lambda a: functions[1]['wave'](a) * c)(a)",
    "a checkpoint of fixed_point": "mg.checkpoint(lambda a: implicit.fixed_point(lambda x, a: 0.3 * torch.cos(c * x) + wave(a))(ZERO, a))(a)",
}


@pytest.mark.parametrize("name", CALLS)
def test_a_loop_of_a_script(name):
    """Its variable is a global, which other global functions read too."""

    def total(call):
        def of(a):
            names = {**globals(), "a": a}
            exec(LOOP.format(call), names)
            return names["total"]

        return of

    plain = "iterated(lambda x, a: 0.3 * torch.cos(c * x) + wave(a), ZERO, a)" if "fixed" in name else "wave(a) * c"
    a = torch.tensor(0.7, dtype=F64)
    x = a.clone().requires_grad_()
    close = functools.partial(torch.testing.assert_close, rtol=1e-7, atol=1e-9)
    expected = grad(total(plain))(a)
    close(torch.autograd.grad(total(CALLS[name])(x), x)[0], expected)
    close(grad(total(CALLS[name]))(a), expected)


def test_a_variable_that_changes_after_the_call():
    c, a = 2.0, torch.tensor(0.7, dtype=F64, requires_grad=True)
    wave = mg.checkpoint(lambda a: (a * c).sin())
    y = wave(a)
    c = 5.0
    torch.testing.assert_close(torch.autograd.grad(y, a)[0], 2 * (2 * a).cos())
    torch.testing.assert_close(torch.autograd.grad(wave(a), a)[0], 5 * (5 * a).cos())


@pytest.fixture
def graphs():
    """A backend for ``torch.compile``, and the graphs that it has run, once for each time."""
    runs = []

    def backend(graph, inputs):
        def run(*args):
            runs.append(graph)
            return graph(*args)

        return run

    torch._dynamo.reset()
    yield backend, runs
    torch._dynamo.reset()


def test_a_compiled_function_in_a_loop(graphs):
    backend, runs = graphs
    a = torch.tensor(0.7, dtype=F64, requires_grad=True)

    def total(wrap, compile):
        out = ZERO
        for c in FACTORS:
            inner = compile(lambda a: (a * c).sin())  # noqa: B023
            out = out + wrap(lambda a: inner(a) * c)(a)  # noqa: B023
        return out

    compile = functools.partial(torch.compile, backend=backend)
    expected = torch.autograd.grad(total(lambda f: f, lambda f: f), a)
    torch.testing.assert_close(torch.autograd.grad(total(mg.checkpoint, compile), a), expected)
    compiled = compile(lambda a: (a * c).sin())
    c = 2.0
    y = mg.checkpoint(lambda a: compiled(a) * c)(a)
    before = len(runs)
    assert torch.autograd.grad(y, a)[0] == 4 * (2 * a).cos()
    assert len(runs) == before + 1  # its variables have not changed, so that it is compiled in the backward, too


def test_a_compiled_function_that_draws_and_whose_variable_changes(graphs):
    backend, _ = graphs
    c = 2.0
    drop = torch.compile(lambda a: torch.nn.functional.dropout(a, 0.5) * c, backend=backend)
    a = torch.ones(20, dtype=F64, requires_grad=True)
    y = mg.checkpoint(drop)(a)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), a, retain_graph=True)[0], y)
    c = 3.0
    with pytest.raises(
        RuntimeError, match="compiled function .* without compilation, because the variable c has changed"
    ):
        y.sum().backward()


def dropping(made, *rules):
    (made.defjvp if len(rules) == 1 else made.defvjp)(*rules)
    return made


DROPS = {
    "checkpoint": lambda drop: mg.checkpoint(drop),
    "checkpoint with a hidden tensor": lambda drop: mg.checkpoint(lambda a: drop(a) + 0 * HIDDEN),
    "custom_vjp": lambda drop: dropping(
        mg.custom_vjp(drop), lambda a: ((y := drop(a)), y / a), lambda slope, g: (slope * g,)
    ),
    "custom_jvp": lambda drop: dropping(mg.custom_jvp(drop), lambda a, t: ((y := drop(*a)), y / a[0] * t[0])),
    "fixed_point": lambda drop: lambda a: mg.implicit.fixed_point(lambda x, a: a)(a, drop(a)),
}
HIDDEN = torch.ones((), dtype=F64, requires_grad=True)


@pytest.mark.parametrize("name", DROPS)
def test_compiled_dropout(name, graphs):
    """The mask is the same in the derivative, and what the compiler traces changes no state of vmap."""
    drop = torch.compile(lambda a: torch.nn.functional.dropout(a, 0.5) * 2, backend=graphs[0])
    a = torch.ones(40, dtype=F64, requires_grad=True)
    y = DROPS[name](drop)(a)
    assert set(y.tolist()) == {0.0, 4.0}
    y.sum().backward()
    torch.testing.assert_close(a.grad, y)


def test_compiled_functions_that_call_each_other(graphs):
    backend, _ = graphs
    c = 2.0

    @torch.compile(backend=backend)
    def even(a, n):
        return a * c if n == 0 else odd(a, n - 1)

    @torch.compile(backend=backend)
    def odd(a, n):
        return even(a, n - 1)

    a = torch.tensor(0.7, dtype=F64, requires_grad=True)
    y = mg.checkpoint(even)(a, 4)
    c = 5.0
    assert torch.autograd.grad(y, a)[0] == 2


def test_lists_and_dictionaries():
    plain, cycle = [1, torch.sin, functools.partial(iterated, x=1), ONE.sin, (iterated,)], []
    cycle.append(functools.partial(print, cycle))
    assert as_of_now(plain) is plain and as_of_now(cycle) is cycle  # what a function appends is not lost
    assert all(as_of_now(x) is x for x in plain)
    c = 2.0
    functions = {"a": [lambda x: x * c], "b": plain}
    copy = as_of_now(functions)
    c = 3.0
    assert copy["a"][0](1) == 2 and functions["a"][0](1) == 3 and copy["b"] is plain and list(copy) == ["a", "b"]


def test_what_a_rule_counts_is_counted():
    calls = {"jvp": 0}
    rules = 0

    @mg.custom_vjp
    def wave(a):
        return a.sin()

    def bwd(a, g):
        nonlocal rules
        rules += 1
        calls["jvp"] += 1
        return (g * a.cos(),)

    wave.defvjp(lambda a: (a.sin(), a), bwd)
    a = torch.tensor(0.7, dtype=F64, requires_grad=True)
    wave(a).backward()
    wave(a).backward()
    assert rules == calls["jvp"] == 2


steps = 0


def counting(a):
    global steps
    steps += 1
    return a.sin() * steps


def test_globals_that_a_function_writes():
    before = steps
    copy = as_of_now(counting)
    assert copy(ONE) == ONE.sin() * (before + 1) and steps == before + 1
    reads_all = lambda: globals()["steps"]  # noqa: E731
    assert as_of_now(reads_all)() == steps


class Scaled:
    scale = None

    def __init__(self, f):
        self.f = f

    def method(self, a):
        return self.f(a) * self.scale


def test_attributes_of_classes_are_found():
    """Tensors that an object has by its class are differentiated, as its own are."""
    weight = torch.tensor(2.0, dtype=F64, requires_grad=True)
    Scaled.scale = weight
    try:
        a = torch.tensor(0.7, dtype=F64, requires_grad=True)
        for f in (Scaled(torch.sin).method, lambda a: a.sin() * Scaled.scale):
            found = torch.autograd.grad(mg.checkpoint(f)(a), [a, weight])
            torch.testing.assert_close(found, (2 * a.cos(), a.sin()))
    finally:
        Scaled.scale = None


def test_a_rule_reads_what_the_functions_that_it_calls_write():
    names = {"mg": mg, "tally": 0, "__name__": "__main__"}
    exec(
        "def count():\n    global tally\n    tally += 1\n"
        "def scaled(a):\n    count()\n    return a * tally\n"
        "f = mg.custom_jvp(scaled)\n"
        "f.defjvp(lambda p, t: (scaled(*p), t[0] * 1.0))\n"
        "g = mg.custom_vjp(scaled)\n"
        "g.defvjp(lambda a: (scaled(a), None), lambda _, d: (d,))\n",
        names,
    )
    a = torch.tensor(0.7, dtype=F64, requires_grad=True)
    assert names["f"](a) == 0.7 and names["tally"] == 1
    assert names["g"](a) == 1.4 and names["tally"] == 2


def test_a_function_among_its_own_defaults():
    def f(a, g=None):
        return a if g is None else g(a, None) + 1

    f.__defaults__ = (f,)
    assert as_of_now(f)(ONE) == 2


def test_copies_of_functions():
    """Recursive ones, those that have no value yet, and attributes."""

    def outer(n):
        def countdown(k):
            return [] if k < n else [k, *countdown(k - 1)]

        def later() -> None:
            """Text."""
            return undefined  # noqa: F821

        countdown.label = "down"
        partial = functools.partial(countdown)
        partial.label = "down"
        copy, unset, of_partial = as_of_now(countdown), as_of_now(later), as_of_now(partial)
        before = countdown(4)
        n = 3
        assert copy(4) == of_partial(4) == before != countdown(4) and copy.label == of_partial.label == "down"
        assert unset.__doc__ == "Text." and unset.__annotations__ == later.__annotations__
        with pytest.raises(NameError):
            unset()
        undefined = 1
        return undefined

    outer(1)
    assert as_of_now(3) == 3 and as_of_now(torch.sin) is torch.sin
    compiled = torch.compile(iterated)
    assert as_of_now(compiled) is compiled
