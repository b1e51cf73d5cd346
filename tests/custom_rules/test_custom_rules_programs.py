"""Programs that use functions with rules of their own: modules, compilers, checkpoints, overrides; and memory."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref

import pytest
import torch
from helpers.tensors import close, random
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.utils.checkpoint import checkpoint

import torch_manualgrad as mg
from torch_manualgrad.core.rule import reached

F64 = torch.float64
X, Y = random(3), random(3, seed=1)


def doubled(value):
    return 2 * value - value.detach()


def ordinary(x, y):
    return doubled(torch.sin(x) * y)


@mg.custom_vjp
def sine(x, y):
    return torch.sin(x) * y


sine.defvjp(
    lambda x, y: (torch.sin(x) * y, (torch.cos(x), torch.sin(x), y)),
    lambda r, g: (2 * r[0] * g * r[2], 2 * r[1] * g),
)


@mg.custom_jvp
def sine_forward(x, y):
    return torch.sin(x) * y


sine_forward.defjvps(lambda t, out, x, y: 2 * torch.cos(x) * t * y, lambda t, out, x, y: 2 * torch.sin(x) * t)
BOTH = pytest.mark.parametrize("f", [sine, sine_forward], ids=["vjp", "jvp"])


def hessians(f):
    """By autograd, in reverse over reverse mode, and by torch.func."""
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    first = torch.autograd.grad(f(x, y).sin().sum(), (x, y), create_graph=True)
    second = torch.autograd.grad(sum(g.sin().sum() for g in first), (x, y))
    return [*first, *second, hessian(lambda x, y: f(x, y).sin().sum(), (0, 1))(X, Y)]


# -- arguments --------------------------------------------------------------------------------------------------------


def test_keywords_defaults_and_numbers():
    @mg.custom_vjp
    def power(x, n=2, *, scale=1.0):
        return scale * x**n

    with pytest.raises(AttributeError, match=r"call power.defvjp\(fwd, bwd\)"):
        power(X)
    power.defvjp(lambda x, n: (x**n, (x, n)), lambda r, g: (2 * g * r[1] * r[0] ** (r[1] - 1), None))
    assert power.__name__ == "power" and "custom_vjp of power" in repr(power)
    for call in (power, lambda x: power(x=x), lambda x: power(n=2, x=x), lambda x: power(x, 2.0)):
        close(grad(lambda x: call(x).sum())(X), 4 * X)  # noqa: B023
    with pytest.raises(TypeError, match="scale can be passed by name only"):
        power(X, scale=2.0)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        power()


def test_functions_as_arguments():
    @mg.custom_vjp(nondiff_argnums=(0, 2))
    def applied(f, x, times):
        return f(x) * times

    def fwd(f, x, times):
        return applied(f, x, times), x

    def bwd(f, times, x, g):
        return (2 * times * g * grad(lambda x: f(x).sum())(x),)

    applied.defvjp(fwd, bwd)
    f = lambda x: applied(torch.sin, x, 3)  # noqa: E731
    close(hessian(lambda x: f(x).sum())(X), torch.diag(-6 * X.sin()))
    close(jvp(f, (X,), (Y,))[1], 6 * X.cos() * Y)

    @mg.custom_jvp(nondiff_argnums=0)
    def applied_forward(f, x):
        return f(x)

    @applied_forward.defjvp
    def applied_jvp(f, primals, tangents):
        (x,), (t,) = primals, tangents
        return applied_forward(f, x), 2 * jvp(f, (x,), (t,))[1]

    close(hessian(lambda x: applied_forward(torch.sin, x).sum())(X), torch.diag(-2 * X.sin()))


def test_a_function_may_differentiate_inside():
    """Its own gradient by autograd, under a transform too."""

    @mg.custom_vjp
    def force(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (g,) = torch.autograd.grad((x**4).sum(), x, create_graph=True)
            h = g * 1
        return h * 0.25

    force.defvjp(lambda x: (force(x), x), lambda x, g: (3 * x**2 * g,))
    x = X.clone().requires_grad_()
    close(torch.autograd.grad(force(x).sum(), x)[0], 3 * x**2)
    close(hessian(lambda x: force(x).sum())(X), torch.diag(6 * X))
    slope = mg.custom_vjp(lambda x: grad(lambda x: x**4)(x) / 4)
    slope.defvjp(lambda x: (slope(x), x), lambda x, g: (3 * x**2 * g,))
    close(hessian(lambda x: vmap(slope)(x).sum())(X), torch.diag(6 * X))


def test_methods():
    class Layer(torch.nn.Module):
        factor = 2.0

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(Y.clone())

        @mg.custom_vjp(nondiff_argnums=0)
        def scaled(self, x, w):
            return x * w * self.factor

        scaled.defvjp(lambda self, x, w: (self.scaled(x, w), (x, w)), lambda self, r, g: (7 * g * r[1], 7 * g * r[0]))

        def forward(self, x):
            return self.scaled(x, self.weight)

        @mg.custom_vjp(nondiff_argnums=0)
        def hidden(self, x):
            return x * self.weight

        hidden.defvjp(lambda self, x: (x * self.weight, None), lambda self, _, g: (g,))

    layer = Layer()
    layer(X).sum().backward()
    close(layer.weight.grad, 7 * X)
    with pytest.raises(mg.custom_rules.HiddenTensorError, match="the argument self.weight"):
        layer.hidden(X)
    tracked = X.clone().requires_grad_()
    with pytest.raises(mg.custom_rules.HiddenTensorError, match="the argument f"):
        g = mg.custom_vjp(lambda f, x: x, nondiff_argnums=0)
        g.defvjp(lambda f, x: (x, None), lambda f, _, g: (g,))
        g({"a": tracked}, X)

    class Free(Layer):
        @mg.custom_vjp
        def scaled(x, w):  # noqa: N805
            return x * w

        scaled.defvjp(lambda x, w: (x * w, (x, w)), lambda r, g: (7 * g * r[1], 7 * g * r[0]))
        scaled = staticmethod(scaled)

    layer = Free()
    layer(X).sum().backward()
    close(layer.weight.grad, 7 * X)
    found = grad(lambda p: functional_call(layer, p, (X,)).sin().sum())({"weight": Y})["weight"]
    close(found, 7 * X * (X * Y).cos())


def test_integers_and_arguments_without_gradient():
    @mg.custom_vjp
    def picked(x, index, y):
        return x[index] * y

    def bwd(residuals, g):
        x, index, y = residuals
        return 2 * torch.zeros_like(x).index_put((index,), g * y, accumulate=True), index * 0, None

    picked.defvjp(lambda x, index, y: (x[index] * y, (x, index, y)), bwd)
    index = torch.tensor([0, 0, 2])
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    found = torch.autograd.grad(picked(x, index, y).sum(), (x, y), allow_unused=True, materialize_grads=True)
    close(found, (torch.zeros_like(X).index_put((index,), 2 * Y, accumulate=True), torch.zeros_like(Y)))
    assert not picked(x.detach(), index, y.detach()).requires_grad
    with torch.no_grad():
        assert not picked(x, index, y).requires_grad
    close(jvp(lambda x: picked(x, index, Y), (X,), (Y,))[1], 2 * Y[index] * Y)


def test_results_that_are_arguments_are_copies():
    both = mg.custom_vjp(lambda x: (x, x, x[1:]))
    both.defvjp(lambda x: ((x, x, x[1:]), None), lambda _, g: (g[0] + 10 * g[1],))
    x = X.clone().requires_grad_()
    first, second, third = both(x)
    assert len({t.data_ptr() for t in (x, first, second, third)}) == 4
    close(torch.autograd.grad(first.sum() + second.sum(), x)[0], torch.full_like(X, 11))
    first.mul_(3)
    close(second, X)
    with torch.no_grad():
        x += 1
    close(torch.autograd.grad(first.sum(), x, retain_graph=True)[0], torch.full_like(X, 3))


def test_what_is_changed_in_place_is_refused():
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    for f in (sine, sine_forward):
        a, b = x * 1, y * 1
        out = f(a, b)
        a.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


# -- tensors that are no arguments ------------------------------------------------------------------------------------

HIDDEN = pytest.raises(mg.custom_rules.HiddenTensorError)
GLOBAL = random(3).requires_grad_()


class _Holder:
    def __init__(self, tensor):
        self.items = {"w": [tensor]}


class _Slotted:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w


def hidden_cases():
    w = random(3, seed=4).requires_grad_()
    linear = torch.nn.Linear(3, 3, dtype=F64)
    holder, inner = _Holder(w), (lambda x: x * w)
    yield "w", lambda x: x * w
    yield "GLOBAL", lambda x: x * GLOBAL
    yield "linear.weight", lambda x: linear(x)
    yield "holder.items['w'][0]", lambda x: x * holder.items["w"][0]
    yield "w", lambda x: inner(x)
    yield "default", lambda x, w=w: x * w
    yield "w", lambda x: torch.vmap(lambda a, b: a * b)(x, w)
    yield "w", lambda x: torch.einsum("i,i->i", [x, w])
    slotted = _Slotted(w)
    yield "a tensor of shape [3], read by mul", lambda x: x * slotted.w


@pytest.mark.parametrize("k", range(len(list(hidden_cases()))))
@pytest.mark.parametrize("followed", ["x", "nothing"])
@pytest.mark.parametrize("kind", ["vjp", "jvp"])
def test_tensors_that_are_no_arguments_are_refused_by_name(k, followed, kind):
    name, function = list(hidden_cases())[k]
    call = one_argument(kind, function)
    x = X.clone().requires_grad_(followed == "x")
    with HIDDEN as error:
        call(x)
    assert name in str(error.value)
    with torch.no_grad():
        call(x)


def one_argument(kind, function):
    if kind == "jvp":
        f = mg.custom_jvp(lambda x: function(x))
        f.defjvp(lambda p, t: (function(*p), t[0]))
    else:
        f = mg.custom_vjp(lambda x: function(x))
        f.defvjp(lambda x: (function(x), None), lambda _, g: (g,))
    return f


@pytest.mark.parametrize("kind", ["vjp", "jvp"])
def test_tensors_of_transforms_that_are_no_arguments_are_refused(kind):
    def through(x, w):
        return one_argument(kind, lambda x: x * w)(x).sum()

    for call in (
        lambda: grad(through, 1)(X, Y),
        lambda: grad(through, 0)(X, Y.requires_grad_(True)),
        lambda: jvp(lambda w: through(X, w), (Y.detach(),), (X,)),
        lambda: vmap(through, (0, None))(random(4, 3), Y.detach().requires_grad_()),
        lambda: vmap(grad(through))(random(4, 3), random(4, 3)),
        lambda: grad(lambda x: grad(through, 1)(x, Y).sum())(X),
    ):
        with HIDDEN as error:
            call()
        assert "argument: w." in str(error.value)
    Y.requires_grad_(False)
    batch = random(4, 3)
    close(vmap(through, (None, 0))(X, batch), (X * batch).sum(1))  # nothing is differentiated
    with torch.autograd.forward_ad.dual_level(), HIDDEN:
        through(X, torch.autograd.forward_ad.make_dual(Y, X))


def test_a_bwd_that_reads_a_tensor_which_is_no_argument():
    """The second derivative has it in reverse mode; in forward mode it would be lost, and is refused."""

    def call(x, w):
        f = mg.custom_vjp(lambda x: x * 1)
        f.defvjp(lambda x: (x * 1, None), lambda _, g: (g * w**2,))
        return f(x)

    x, w = X.clone().requires_grad_(), Y.clone().requires_grad_()
    (first,) = torch.autograd.grad(call(x, w).sum(), x, create_graph=True)
    close([first, torch.autograd.grad(first.sum(), w)[0]], [w**2, 2 * w])
    slope = lambda w: grad(lambda x: call(x, w).sum())(X)  # noqa: E731
    close([grad(lambda w: slope(w).sum())(Y), jvp(slope, (Y,), (X,))[1]], [2 * Y, 2 * Y * X])
    close(vmap(grad(lambda x, w: call(x, w).sum()))(random(4, 3), random(4, 3, seed=1)), random(4, 3, seed=1) ** 2)
    with pytest.raises(mg.custom_rules.HiddenTensorError, match="the bwd of <lambda> reads .* argument: w"):
        jvp(lambda x: call(x, w), (X,), (Y,))


def test_tensors_that_are_only_near_are_not_refused():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.scale = torch.nn.Parameter(Y.clone()), 3.0

        def forward(self, x):
            f = mg.custom_vjp(lambda x: x * self.scale)
            f.defvjp(lambda x: (x * self.scale, None), lambda _, g: (7 * g,))
            return f(x) * self.weight

    close(grad(lambda x: Layer()(x).sum())(X), 7 * Y)
    w = Y.clone().requires_grad_()
    f = one_argument("vjp", lambda x: (w.detach().sum(), x * len(w) * (w.shape[0] / 9))[1])
    close(grad(lambda x: f(x).sum())(X), torch.ones_like(X))


# -- what the rules return --------------------------------------------------------------------------------------------


def broken(fwd=None, bwd=None, jvp=None):
    if jvp is not None:
        f = mg.custom_jvp(lambda x, y: {"a": x * y})
        f.defjvp(jvp)
    else:
        f = mg.custom_vjp(lambda x, y: {"a": x * y})
        f.defvjp(fwd or (lambda x, y: ({"a": x * y}, None)), bwd)
    return f


def test_errors_name_the_function_the_argument_and_what_came_back():
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    for text, f in {
        r"the fwd of <lambda>: expected a pair \(out, residuals\), got": broken(lambda x, y: x, lambda r, g: (g, g)),
        "the bwd of <lambda>: expected a tuple of 2 cotangents, of x, y, got": broken(bwd=lambda r, g: (g["a"],)),
        r"the bwd of <lambda>: expected a tuple of 2 cotangents, of x, y, got a Tensor": broken(
            bwd=lambda r, g: g["a"]
        ),
        r"cotangent of y: expected None or a tensor of shape \[3\], got a Tensor of shape \[2\]": broken(
            bwd=lambda r, g: (g["a"], g["a"][:2])
        ),
        "cotangent of x: expected a real tensor": broken(bwd=lambda r, g: (g["a"] * 1j, None)),
        "cotangent of x: expected None or a tensor": broken(bwd=lambda r, g: ("a", None)),
        "cotangent of y: expected a floating point or complex": broken(bwd=lambda r, g: (None, g["a"].long())),
        "cotangent of x: expected None or a tensor of shape": broken(bwd=lambda r, g: ({"b": g["a"]}, None)),
        "the jvp of <lambda>: expected a pair": broken(jvp=lambda p, t: t[0]),
        r"the jvp of <lambda>: out: expected the structure \{'a': \*\}, got \*": broken(
            jvp=lambda p, t: (p[0], {"a": t[0]})
        ),
        r"the jvp of <lambda>: out: expected a tensor of shape \[3\], .*, got a Tensor of shape \[1, 3\]": broken(
            jvp=lambda p, t: ({"a": p[0][None]}, {"a": t[0]})
        ),
        r"the tangent of out: expected the structure \{'a': \*\}, got": broken(
            jvp=lambda p, t: ({"a": p[0]}, {"b": t[0]})
        ),
        r"the tangent of out: expected None or a tensor of shape \[3\]": broken(
            jvp=lambda p, t: ({"a": p[0]}, {"a": t[0].sum()})
        ),
    }.items():
        with pytest.raises(ValueError, match=text):
            f(x, y)["a"].sum().backward()
    trees = mg.custom_vjp(lambda p: p["x"][0])
    trees.defvjp(lambda p: (p["x"][0], None), lambda _, g: ({"x": (g, g)},))
    with pytest.raises(ValueError, match=r"the cotangent of p: expected the structure \{'x': \(\*,\)\}, got"):
        trees({"x": (x,)}).sum().backward()


def test_wrong_definitions():
    with pytest.raises(TypeError, match="custom_vjp: expected a function"):
        mg.custom_vjp(3)
    with pytest.raises(TypeError, match="defvjp: bwd: expected a function"):
        mg.custom_vjp(lambda x: x).defvjp(lambda x: x, None)
    with pytest.raises(TypeError, match="defjvp: jvp: expected a function"):
        mg.custom_jvp(lambda x: x).defjvp(3)
    with pytest.raises(TypeError, match="defjvps: expected functions or None"):
        mg.custom_jvp(lambda x: x).defjvps(3)
    with pytest.raises(ValueError, match="without nondiff_argnums"):
        mg.custom_jvp(lambda x: x, nondiff_argnums=(0,)).defjvps(None)
    for wrong in (-1, (0, 0)):
        with pytest.raises(ValueError, match="nondiff_argnums: expected different numbers"):
            mg.custom_vjp(lambda x: x, nondiff_argnums=wrong)
    with pytest.raises(TypeError, match="nondiff_argnums: expected a number"):
        mg.custom_vjp(lambda x: x, nondiff_argnums="x")
    f = mg.custom_vjp(lambda x: x, nondiff_argnums=1)
    f.defvjp(lambda x: (x, None), lambda _, g: (g,))
    with pytest.raises(ValueError, match="nondiff_argnums"):
        f(X.clone().requires_grad_())
    two = mg.custom_jvp(lambda x, y: x * y)
    two.defjvps(lambda t, out, x, y: t * y)
    with pytest.raises(ValueError, match="has 2 arguments, and 1 functions"):
        grad(lambda x: two(x, Y).sum())(X)


def test_a_rule_that_autograd_cannot_transpose_is_refused():
    """Never a silent zero: in the mode that is derived from the other."""
    f = mg.custom_vjp(lambda x: x.sin())
    f.defvjp(lambda x: (x.sin(), x), lambda x, g: (g.detach() * x.cos(),))
    close(grad(lambda x: f(x).sum())(X), X.cos())
    with pytest.raises(RuntimeError, match=r"the bwd of <lambda> returns a value for x that does not depend"):
        jvp(f, (X,), (Y,))
    f = mg.custom_jvp(lambda x: x.sin())
    f.defjvp(lambda p, t: (p[0].sin(), t[0].detach() * p[0].cos()))
    close(jvp(f, (X,), (Y,))[1], X.cos() * Y)
    with pytest.raises(RuntimeError, match=r"the jvp of <lambda> returns a value for the result that does not depend"):
        grad(lambda x: f(x).sum())(X)
    zero = mg.custom_vjp(lambda x: x.round())
    zero.defvjp(lambda x: (x.round(), None), lambda _, g: (torch.zeros_like(g),))
    close(jvp(zero, (X,), (Y,)), (X.round(), torch.zeros(3, dtype=F64)))


# -- programs ---------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("options", [{}, {"strong_zero": True}])
def test_under_every_rule_of_the_package(f, options):
    with mg.override("*", **options):
        found = hessians(f)
    close(found, hessians(ordinary))


@BOTH
@pytest.mark.parametrize("reentrant", [True, False])
def test_in_a_checkpoint(f, reentrant):
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    out = checkpoint(lambda x, y: f(x, y) * f(y, x), x, y, use_reentrant=reentrant)
    close(
        torch.autograd.grad(out.sum(), (x, y)), torch.autograd.grad((ordinary(x, y) * ordinary(y, x)).sum(), (x, y))
    ) if (not reentrant) else out.sum().backward()
    if reentrant:
        close((x.grad, y.grad), torch.autograd.grad((ordinary(x, y) * ordinary(y, x)).sum(), (x, y)))


@BOTH
def test_hooks_on_saved_tensors(f):
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: packed.append(x.shape) or x.numpy(force=True), torch.tensor
    ):
        x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
        out = f(x, y).sum()
    assert packed
    out.backward()
    close(x.grad, torch.autograd.grad(ordinary(x, y).sum(), x)[0])


@BOTH
@pytest.mark.parametrize("backend", ["aot_eager", "manualgrad"])
def test_a_compiled_program_has_the_rules(f, backend):
    torch._dynamo.reset()
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    for make in (lambda f: lambda x, y: f(x * 1, y).sin() * 2, lambda f: lambda x, y: grad(lambda x: f(x, y).sum())(x)):
        if backend == "manualgrad" and make(f)(X, Y) is None:
            continue
        compiled = torch.compile(make(f), backend=backend, fullgraph=True)
        found, expected = (torch.autograd.grad(g(x, y).sum(), (x, y)) for g in (compiled, make(ordinary)))
        close(found, expected)
    torch._dynamo.reset()


@BOTH
@pytest.mark.parametrize("strict", [False, True])
def test_export_has_the_operators_of_the_function(f, strict):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.y = torch.nn.Parameter(Y.clone())

        def forward(self, x):
            return f(x, self.y) * 2

    program = torch.export.export(Model(), (X,), strict=strict)
    assert "manualgrad_programs" not in str(program.graph)
    close(program.module()(Y), Model()(Y))


@BOTH
def test_make_fx(f):
    from torch.fx.experimental.proxy_tensor import make_fx

    programs = [(jvp_of(f), jvp_of(ordinary)), (vmap(f), vmap(ordinary))]
    if reached("2.13"):  # torch 2.10 cannot trace the basis of two arguments
        programs.append((hessians_of(f), hessians_of(ordinary)))
    for g, h in programs:
        graph = make_fx(g)(X, Y)
        assert not re.search("manualgrad_programs.(call|node)", graph.code)
        close(graph(Y, X), h(Y, X))


def hessians_of(f):
    return hessian(lambda x, y: f(x, y).sin().sum(), (0, 1))


def jvp_of(f):
    return lambda x, y: jvp(f, (x, y), (y, x))


@BOTH
def test_autocast_is_that_of_the_call(f):
    dtypes = []

    @mg.custom_vjp
    def product(a, b):
        return a @ b

    def fwd(a, b):
        return a @ b, (a, b)

    def bwd(residuals, g):
        a, b = residuals
        dtypes.append((g @ b.mT).dtype)
        return (g @ b.mT), a.mT @ g

    product.defvjp(fwd, bwd)
    a = random(3, 3, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = product(a, a)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert dtypes == [torch.bfloat16] and a.grad.dtype == torch.float32


def saved_bytes(f):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x, lambda x: x):
        out = f()
    assert out.requires_grad
    return sum(saved)


def test_what_is_kept():
    x = random(1000).requires_grad_()
    assert saved_bytes(lambda: one_argument("vjp", torch.clone)(x)) == 0
    small = mg.custom_vjp(lambda x: x.sin())
    small.defvjp(lambda x: (x.sin(), x), lambda x, g: (g * x.cos(),))
    assert saved_bytes(lambda: small(x)) == x.nbytes
    small.defvjp(lambda x: (x.sin(), x.cos()), lambda cos, g: (g * cos,))
    assert saved_bytes(lambda: small(x)) == 2 * x.nbytes


@BOTH
def test_nothing_is_kept_after_the_graph(f):
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    big = random(1000)
    holder = weakref.ref(big)
    g = one_argument("vjp", lambda x, big=big: x * big[:3])
    del big
    out = g(x).sum() + f(x, y).sum()
    out.backward()
    del out, g
    gc.collect()
    assert holder() is None


def test_training_and_copies_of_a_model():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(3, 3, dtype=F64)

        def forward(self, x):
            return sine(self.first(x), sine_forward(x, self.first.bias))

    torch.manual_seed(0)
    model = Model()
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    before = model(X).square().sum().item()
    for _ in range(3):
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()
    assert model(X).square().sum().item() < before == other(X).square().sum().item()


def test_a_function_is_copied_and_pickled_as_a_function():
    assert copy.deepcopy({"f": sine})["f"] is sine
    assert pickle.loads(pickle.dumps(sine_forward)) is sine_forward


def test_a_fwd_that_is_called_again_has_the_variables_of_its_call():
    x, total, expected = X.clone().requires_grad_(), 0, 0
    for k in (1, 2, 3):
        f = mg.custom_vjp(lambda x: x.sin() * k)  # noqa: B023
        f.defvjp(lambda x: (x.sin() * k, x.cos() * k), lambda cos, g: (g * cos,))  # noqa: B023
        total, expected = total + f(x), expected + x.sin() * k
    found, wanted = (torch.autograd.grad(y.sum(), x, create_graph=True)[0] for y in (total, expected))
    close(torch.autograd.grad(found.sum(), x)[0], torch.autograd.grad(wanted.sum(), x)[0])


def test_random_numbers_in_a_traced_graph():
    from torch.fx.experimental.proxy_tensor import make_fx

    f = mg.custom_vjp(lambda x: x * torch.rand_like(x))

    def fwd(x):
        noise = torch.rand_like(x)
        return x * noise, noise

    f.defvjp(fwd, lambda noise, g: (g * noise,))
    graph = make_fx(grad(lambda x: f(x).sum()))(X)
    assert "rand_like" in graph.code
    with pytest.raises(RuntimeError, match="the fwd of <lambda> draws random numbers"):
        make_fx(grad(lambda x: grad(lambda x: f(x).sin().sum())(x).sum()))(X)
    with pytest.raises(RuntimeError, match="<lambda> draws random numbers"):
        make_fx(grad(lambda x: mg.checkpoint(lambda x: x * torch.rand_like(x))(x).sum()))(X)


# -- rules that are not linear, and results that are no pytrees --------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        lambda g: g.clamp(-0.1, 0.1),
        lambda g: g.clamp(-1, 1),
        torch.sign,
        lambda g: g**2,
        lambda g: g / g.norm(),
        lambda g: g + 1,
        torch.abs,
        torch.relu,
        lambda g: g.sort().values,
        lambda g: g.norm() * torch.ones_like(g),
        lambda g: (g**3).sum() / g.square().sum() * torch.ones_like(g),  # homogeneous, and odd
    ],
)
def test_a_rule_that_is_not_linear_has_no_transpose(rule):
    x, t = random(3), random(3, seed=1)
    by_vjp = mg.custom_vjp(lambda x: x * 1)
    by_vjp.defvjp(lambda x: (x * 1, None), lambda _, g: (rule(g),))
    close(torch.func.vjp(by_vjp, x)[1](t)[0], rule(t))
    by_jvp = mg.custom_jvp(lambda x: x * 1)
    by_jvp.defjvp(lambda primals, tangents: (primals[0] * 1, rule(tangents[0])))
    close(torch.func.jvp(by_jvp, (x,), (t,))[1], rule(t))
    for call in (
        lambda: torch.func.jvp(by_vjp, (x,), (t,)),
        lambda: torch.vmap(lambda t: torch.func.jvp(by_vjp, (x,), (t,))[1])(torch.stack([t, t])),
        lambda: torch.func.vjp(by_jvp, x)[1](t),
    ):
        with pytest.raises(RuntimeError, match="is not linear in its last argument"):
            call()


def test_a_result_with_tensors_that_is_no_pytree_is_refused():
    f = mg.custom_vjp(lambda x: torch.distributions.Normal(x, 1.0))
    f.defvjp(lambda x: (torch.distributions.Normal(x, 1.0), None), lambda _, g: (None,))
    with pytest.raises(TypeError, match="the result of .* would lose its derivative"):
        f(random(3).requires_grad_())


@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp"])
def test_a_write_to_a_differentiated_argument_raises(kind):
    f = getattr(mg, kind)(lambda value, state: value.mul_(2) + state.add_(1))
    if kind == "custom_vjp":
        f.defvjp(lambda x, s: (f(x, s), None), lambda _, g: (2 * g, None))
    else:
        f.defjvp(lambda primals, tangents: (f(*primals), 2 * tangents[0]))
    state = torch.zeros_like(X)
    of_copy = lambda x: f(x * 1, state.clone())  # noqa: E731
    gradient = grad(lambda x: of_copy(x).sum())
    pushed = lambda x: jvp(of_copy, (x,), (x,))  # noqa: E731
    batch = torch.stack([X, Y])
    calls = [
        lambda: of_copy(X.clone().requires_grad_()),
        lambda: gradient(X),
        lambda: pushed(X),
        lambda: vmap(gradient)(batch),
    ]
    for call in (*calls, lambda: grad(lambda x: vmap(of_copy)(x).sum())(batch)):
        with pytest.raises(RuntimeError, match="writes to its argument value, of shape .3., which is differentiated"):
            call()
    g = mg.custom_vjp(lambda x, state: 2 * x + 0 * state.add_(1))  # an argument that is not differentiated may change
    g.defvjp(lambda x, s: (g(x, s), None), lambda _, g: (2 * g, None))
    close(grad(lambda x: g(x, state).sum())(X), 2 * torch.ones_like(X))
    assert state.eq(1).all()
