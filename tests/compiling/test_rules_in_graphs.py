"""Functions with rules of their own in compiled functions. Each rule differs from the derivative of its function, so that one
that is lost is seen."""

import functools

import pytest
import torch
from helpers import modes
from helpers.own_rules import product
from helpers.thinning import in_turn
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import torch_manualgrad as mg
from torch_manualgrad.core.rule import reached

pytestmark = pytest.mark.filterwarnings("error:torch_manualgrad")

X, Y = torch.tensor([0.3, 0.7, 1.1], dtype=torch.float64), torch.tensor([0.5, -0.4, 0.9], dtype=torch.float64)


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


# -- functions with rules ---------------------------------------------------------------------------------------------


@mg.custom_jvp
def pushed(x, y):
    return torch.sin(x) * y


@pushed.defjvp
def _(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    return pushed(x, y), 2 * torch.cos(x) * dx * y + 3 * torch.sin(x) * dy


@mg.custom_vjp
def rounded(x):
    return x.detach().round()


rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (g,))


@mg.custom_vjp
def clipped(x):
    return x.clone()


clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (g.clamp(-0.5, 0.5),))


@mg.custom_vjp
def residuals(x):
    return torch.sin(x)


def _residuals_fwd(x):
    y = residuals(x)
    return y, (torch.exp(residuals(x)), y.square(), x, torch.cos(x).detach())


residuals.defvjp(
    _residuals_fwd, lambda r, g: (g * r[0] * r[1] * torch.tanh(r[2]) * residuals(r[2]) * r[3] + 0 * g.detach(),)
)


@mg.custom_jvp
def exponential(x):
    return torch.exp(x)


exponential.defjvps(lambda t, out, x: 2 * t * out * torch.sin(x).detach())


@functools.partial(mg.custom_vjp, nondiff_argnums=(0, 2))
def applied(function, x, power):
    return function(x) ** power


applied.defvjp(
    lambda function, x, power: (applied(function, x, power), x),
    lambda function, power, x, g: (3 * g * power * function(x) ** (power - 1) * torch.cos(x),),
)


@mg.custom_vjp
def tree(pair, scale=2.0):
    return {"sum": pair["a"] + pair["b"][0], "count": torch.arange(3, device=pair["a"].device), "n": 3}


tree.defvjp(
    lambda pair, scale: (tree(pair, scale), pair),
    lambda pair, g: ({"a": 2 * g["sum"] * pair["b"][0], "b": [None]}, None) if g["count"] is None else None,
)


@mg.custom_jvp
def ranked(x):
    return x.sort().values, x.argsort()


@ranked.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    out = ranked(x)
    return out, (5 * t[x.argsort()] * x, None)


@mg.custom_vjp
def untracked(x):
    return x**3


def _untracked_bwd(x, g):
    with torch.no_grad():
        constant = x.exp()
    return (g * x * constant * x.sin().detach(),)


untracked.defvjp(lambda x: (untracked(x), x), _untracked_bwd)


@mg.custom_vjp
def in_place(x):
    made = torch.zeros_like(x)
    made += x
    made[0] *= 2
    return made


in_place.defvjp(lambda x: (in_place(x), x), lambda x, g: (g.clone().mul_(x).mul_(3),))


@mg.custom_vjp
def outer(x):
    return product(x, x * 2)


outer.defvjp(lambda x: (outer(x), x), lambda x, g: (product(x, x) * g + pushed(x, x) * g,))


@mg.custom_vjp
def sine(x):
    return torch.sin(x)


@mg.custom_vjp
def cosine(x):
    return torch.cos(x)


sine.defvjp(lambda x: (sine(x), x), lambda x, g: (2 * cosine(x) * g,))
cosine.defvjp(lambda x: (cosine(x), x), lambda x, g: (-3 * sine(x) * g,))


@mg.custom_vjp
def transformed(x):
    return torch.tanh(x)


transformed.defvjp(
    lambda x: (transformed(x), x), lambda x, g: (g * grad(lambda x: (x**3).detach().sum() + (x**4).sum())(x),)
)


@mg.custom_vjp
def slope(x):
    return grad(lambda x: (x**3).sum())(x)


slope.defvjp(lambda x: (slope(x), jvp(torch.sin, (x,), (x,))[1]), lambda kept, g: (kept * g,))

TABLE = torch.linspace(1, 2, 3, dtype=torch.float64)


@mg.custom_vjp
def with_table(x):
    return x * TABLE


with_table.defvjp(lambda x: (with_table(x), x), lambda x, g: (2 * g * TABLE * x,))

layer = nn.Linear(3, 3, dtype=torch.float64)


@mg.custom_vjp
def through_module(x, parameters):
    return functional_call(layer, parameters, (x,))


through_module.defvjp(
    lambda x, parameters: (through_module(x, parameters), (x, parameters)),
    lambda kept, g: (2 * g @ kept[1]["weight"], {"weight": 3 * torch.outer(g, kept[0]), "bias": None}),
)

scaled = {"weight": layer.weight.detach() / 2, "bias": layer.bias.detach()}


class Holder:
    @staticmethod
    @mg.custom_vjp
    def method(x, *, unused=None):
        return x**2


Holder.method.defvjp(lambda x: (Holder.method(x), x), lambda x, g: (5 * g * x,))


PROGRAMS = {
    "product": lambda x, y: (product(x * x, y) ** 3).sum(),
    "product, by name": lambda x, y: (product(y=x * x, x=y) ** 3).sum(),
    "pushed": lambda x, y: (pushed(x * x, y) ** 3).sum(),
    "one tensor twice": lambda x, y: (product(x, x) * pushed(x, x) * y).sum(),
    "straight-through": lambda x, y: (rounded(x * x) ** 3 * y).sum() / 4,
    "clipped": lambda x, y: (clipped(x * y) ** 3 * y).sum(),
    "residuals": lambda x, y: (residuals(x * x) ** 3 * y).sum(),
    "exponential": lambda x, y: (exponential(x * y) ** 2).sum(),
    "nondiff": lambda x, y: (applied(torch.sin, x * y, 3) * applied(lambda x: x * 2, x, 2)).sum(),
    "tree": lambda x, y: (tree({"a": x, "b": [y]})["sum"] ** 2 * tree({"a": x, "b": [y]}, 1.0)["count"]).sum(),
    "integers": lambda x, y: (ranked(y)[0] ** 2 * x[ranked(y)[1]]).sum(),
    "untracked": lambda x, y: (untracked(x * y) ** 2).sum(),
    "in place": lambda x, y: (in_place(x * y) ** 2).sum(),
    "a rule in a rule": lambda x, y: (outer(x * y) ** 2).sum(),
    "rules of each other": lambda x, y: (sine(x * y) ** 2).sum(),
    "transformed": lambda x, y: (transformed(x * y) ** 2).sum(),
    "a slope": lambda x, y: (slope(x * y) ** 2).sum(),
    "a table": lambda x, y: (with_table(x * y) ** 2).sum() / 4,
    "a module": lambda x, y: (through_module(x * y, {n: p * x.sum() for n, p in scaled.items()}) ** 2).sum(),
    "a method": lambda x, y: (Holder.method(x * y) ** 2).sum(),
    "in a checkpoint": lambda x, y: (mg.checkpoint(lambda x: product(x, y).sin())(x * y) ** 2).sum(),
    "under vmap": lambda x, y: (vmap(product, (0, None))(torch.stack([x, x * y]), y) ** 2).sum(),
    "under grad": lambda x, y: (grad(lambda x: (product(x, y) ** 3).sum())(x) ** 2).sum(),
    "under jvp": lambda x, y: (jvp(lambda x: pushed(x, y) ** 3, (x,), (y,))[1] ** 2).sum(),
    "under vmap of grad": lambda x, y: (vmap(grad(lambda x: product(x, x**2)))(x) ** 2 * y).sum() / 9,
}


# Forward mode transposes a bwd that is linear, and dual numbers do not nest.
REVERSE_ONLY = ("clipped", "a slope", "under jvp")
SHORT, LONG = ("", "rev", "revrev", "fwd", "fwdrev"), ("revrev", "fwdrev", "revfwd", "fwdfwd", "revrevrev", "fwdrevrev")


def compare(name, compiled, wanted):
    for mode in wanted:
        if "fwd" in mode and name in REVERSE_ONLY:
            continue
        expected = modes.derivatives(PROGRAMS[name], (X, Y), mode)
        found = modes.derivatives(compiled, (X, Y), mode)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda m: f"{mode}: {m}")


@pytest.mark.parametrize("name", ("untracked", "transformed"))
def test_graphs_have_the_derivatives_of_the_rules(name):
    compare(name, mg.compile(PROGRAMS[name], fullgraph=True, lowering="eager"), SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_graphs_have_every_derivative_of_the_rules(name):
    compare(name, mg.compile(PROGRAMS[name], fullgraph=True, lowering="eager"), SHORT + LONG)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_inductor_has_the_derivatives_of_the_rules(name):
    compare(name, mg.compile(PROGRAMS[name], fullgraph=True), SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("product", "pushed"))
def test_the_graphs_of_pytorch_have_the_first_derivatives_of_the_rules(name):
    compare(name, torch.compile(PROGRAMS[name], fullgraph=True), ("", "rev"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_graph_of_pytorch_has_the_first_derivatives_of_the_rules(name):
    compare(name, torch.compile(PROGRAMS[name], fullgraph=True, backend="aot_eager"), ("", "rev"))


# -- tensors that are read by closure, random numbers, other calls ------------------------------------------------------

hidden = torch.ones(3, dtype=torch.float64, requires_grad=True)
BACKENDS = [mg.compiling.backend, "aot_eager"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ("closure", "module", "computed"))
def test_a_tensor_that_is_read_by_closure_and_tracked_is_refused(backend, kind):
    def f(x):
        y = {"closure": hidden, "module": layer.bias, "computed": x.detach() * hidden}[kind]
        return applied(lambda x: x * y, x, 1).sum()

    x = X.clone().requires_grad_()
    with pytest.raises(Exception, match="reads a tensor that requires grad"):
        torch.autograd.grad(torch.compile(f, backend=backend, fullgraph=True)(x), x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_may_be_read_by_closure_where_its_derivative_is_not_lost(backend):
    @mg.custom_vjp
    def g(x):
        return x * hidden.detach() * hidden.shape[0]

    g.defvjp(lambda x: (g(x), None), lambda _, g: (2 * g * hidden,))
    x = X.clone().requires_grad_()
    compiled = torch.compile(lambda x: g(x).sum(), backend=backend, fullgraph=True)
    (found,) = torch.autograd.grad(compiled(x), x, create_graph=backend != "aot_eager")
    assert torch.equal(found, 2 * hidden)
    if backend != "aot_eager":
        assert torch.autograd.grad(found.sum(), hidden)[0].tolist() == [2, 2, 2]


@mg.custom_vjp
def dropped(x):
    return x * (torch.rand_like(x) > 0.5)


def _dropped_fwd(x):
    mask = torch.rand_like(x) > 0.5
    return x * mask, mask


dropped.defvjp(_dropped_fwd, lambda mask, g: (3 * g * mask,))


def test_a_rule_that_draws_random_numbers_runs_uncompiled():
    x = torch.ones(64, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(lambda x: dropped(x), backend="manualgrad")
    with pytest.warns(RuntimeWarning, match="draws random numbers"):
        y = compiled(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, 3 * y) and 0 < found.sum() < 3 * 64
    with pytest.raises(Exception, match="draws random numbers"):
        mg.compile(lambda x: dropped(x), fullgraph=True)(x)
    y = torch.compile(lambda x: dropped(x), fullgraph=True)(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], 3 * y)


@mg.custom_vjp
def halved(x, n=1):
    return x * n


halved.defvjp(lambda x, n: (halved(x, n), x), lambda x, g: (g * halved(x, 2) if x.ndim else g, None))


def test_a_call_in_its_own_rule_with_other_arguments_has_no_derivative():
    compiled = mg.compile(lambda x: halved(x).sum(), fullgraph=True, lowering="eager")
    x = X.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(compiled(x), x)[0], 2 * x)
    with pytest.raises(NotImplementedError, match="its rule calls the function with other"):
        torch.autograd.grad(compiled(x), x, create_graph=True)


def test_a_rule_that_dynamo_cannot_trace_runs_uncompiled():
    @mg.custom_vjp
    def g(x):
        return torch.as_tensor(x.detach().tolist(), dtype=x.dtype).sin()

    g.defvjp(lambda x: (g(x), x), lambda x, g: (g * x * len(str(x.tolist())),))

    def f(x):
        return g(x * x).sum()

    for mode in ("", "rev", "revrev"):
        torch.compiler.reset()
        expected = modes.derivatives(f, (X,), mode)
        for a, b in zip(modes.derivatives(torch.compile(f, backend="manualgrad"), (X,), mode), expected, strict=True):
            torch.testing.assert_close(a, b)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(f, fullgraph=True, backend="manualgrad")(X)


@pytest.mark.skipif(reached("2.15"), reason="Dynamo of this torch takes no dual tensors")
def test_a_bwd_that_is_not_linear_has_no_transpose_in_a_graph():
    compiled = mg.compile(PROGRAMS["clipped"], fullgraph=True, lowering="eager")
    with pytest.raises(Exception, match="not linear in its last argument"):
        modes.derivatives(compiled, (X, Y), "fwd")


# What a rule computes next to its linear part: at the first two there are numbers, of any kind that a compiler could choose, where
# it raises or is nan.
DOMAINS = {
    "everywhere": lambda x: x,
    "of a matrix that is positive definite": lambda x: torch.linalg.cholesky(
        torch.diag(0.3 - (x - 0.7).square())
    ).diagonal(),
    "below 0": lambda x: torch.log(-torch.cos(x + 3)),
}


def _by_transposition(kind, along):
    """A function with a rule that is linear if ``along`` is, and a derivative that transposes it."""
    if kind == "custom_jvp":
        f = mg.custom_jvp(lambda x: x * 1)
        f.defjvp(lambda primals, tangents: (primals[0] * 1, along(primals[0], tangents[0])))
        return lambda x: grad(lambda x: f(x).square().sum())(x)
    f = mg.custom_vjp(lambda x: x * 1)
    f.defvjp(lambda x: (x * 1, x), lambda x, g: (along(x, g),))
    return lambda x: jvp(f, (x,), (x.cos(),))[1]


def _traced(f):
    return make_fx(f)(X)


@pytest.mark.parametrize("domain, kind", in_turn(DOMAINS, ["custom_vjp", "custom_jvp"]))
@pytest.mark.parametrize(
    "compiled",
    [
        functools.partial(mg.compile, fullgraph=True, lowering="eager"),
        functools.partial(torch.compile, fullgraph=True, backend="aot_eager"),
        pytest.param(functools.partial(torch.compile, fullgraph=True), marks=pytest.mark.slow),
        _traced,
    ],
    ids=["manualgrad", "aot_eager", "inductor", "make_fx"],
)
def test_a_rule_that_is_not_linear_has_no_transpose_in_a_graph(compiled, kind, domain):
    at = DOMAINS[domain]
    linear = _by_transposition(kind, lambda x, t: 2 * at(x) * t)
    torch.testing.assert_close(compiled(linear)(X), linear(X))
    for along in (lambda x, t: (at(x) * t).clamp(-1, 1), lambda x, t: at(x) * t + 1, lambda x, t: at(x) * t.abs()):
        torch.compiler.reset()
        with pytest.raises(Exception, match="not linear in its last argument"):
            compiled(_by_transposition(kind, along))(X)


def _of_result(x):
    y = rounded(x)
    return y.sum() * (2 if y.requires_grad else 3)


def _gradient_inside(x):
    z = x * 1
    (g,) = torch.autograd.grad(rounded(z).exp().sum(), z, create_graph=True)
    return g.pow(2).sum() * x.sum()


@pytest.mark.skipif(not reached("2.13"), reason="Dynamo of this torch ends the graph at these")
@pytest.mark.parametrize("function", [_of_result, _gradient_inside])
def test_a_result_requires_grad_whatever_computes_it(function):
    x = X.clone().requires_grad_()
    compiled = mg.compile(function, fullgraph=True, lowering="eager")
    found, expected = (torch.autograd.grad(f(x), x, create_graph=True)[0] for f in (compiled, function))
    torch.testing.assert_close(found, expected)


# -- sizes, transforms of compiled functions, what is counted -----------------------------------------------------------


@pytest.mark.parametrize("name", ("product", pytest.param("residuals", marks=pytest.mark.slow)))
def test_sizes_may_be_open(name):
    function = PROGRAMS[name]
    compiled = mg.compile(function, fullgraph=True, dynamic=True, lowering="eager")
    for n in (3, 4, 7):
        values = torch.linspace(0.2, 0.9, n, dtype=torch.float64), torch.linspace(-0.4, 0.8, n, dtype=torch.float64)
        for mode in ("rev", "revrev"):
            found, expected = (modes.derivatives(f, values, mode) for f in (compiled, function))
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@mg.custom_vjp
def mean(x):
    return x.sum() / x.shape[0]


mean.defvjp(lambda x: (mean(x), x), lambda x, g: (g * x / x.shape[0] ** 2,))


@mg.custom_vjp
def of_half(x):
    return x.sum() * (x.shape[0] // 2)


of_half.defvjp(  # the bwd reads a size that the fwd computes
    lambda x: (of_half(x), (x, torch.cat([x, x]).shape[0] // 2 + 1)),
    lambda r, g: (g * r[0] * torch.ones(r[1])[:-1] * r[1],),
)


@pytest.mark.parametrize("function", [mean, of_half])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rule_reads_open_sizes(backend, function):
    compiled = torch.compile(lambda x: function(x * x), backend=backend, fullgraph=True, dynamic=True)
    for n in (3, 5):
        x = torch.linspace(0, 1, n, requires_grad=True)
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x), torch.autograd.grad(function(x * x), x))


def test_compiled_functions_with_rules_can_be_transformed():
    compiled = mg.compile(PROGRAMS["product"], fullgraph=True, lowering="eager")
    batch = torch.stack([X, 2 * X])
    for transform in (grad, torch.func.hessian, lambda f: vmap(grad(f), (0, None))):
        x = batch if "vmap" in str(transform(compiled)) or transform not in (grad, torch.func.hessian) else X
        torch.testing.assert_close(transform(compiled)(x, Y), transform(PROGRAMS["product"])(x, Y))


def test_gradients_in_batches():
    x = X.clone().requires_grad_()
    found, expected = (
        torch.autograd.grad(f(x, Y), x, torch.eye(3, dtype=torch.float64), is_grads_batched=True)[0]
        for f in (mg.compile(lambda x, y: product(x, y), lowering="eager"), product)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "backend", ["aot_eager", functools.partial(mg.compiling.backend, lowering="eager", fallback=False)]
)
@pytest.mark.slow
def test_a_number_may_vary(backend):
    compiled = torch.compile(lambda x, n: applied(torch.sin, x, n).sum(), backend=backend, fullgraph=True)
    x = X.clone().requires_grad_()
    for n in (2, 3, 4, 2.5, 3.5):
        found, expected = (
            torch.autograd.grad(f(x, n), x)[0] for f in (compiled, lambda x, n: applied(torch.sin, x, n).sum())
        )
        torch.testing.assert_close(found, expected)


def test_a_change_of_what_a_rule_reads_compiles_it_again():
    state = {"factor": 2.0}

    @mg.custom_vjp
    def g(x):
        return x.sin()

    g.defvjp(lambda x: (g(x), x), lambda x, g: (g * x * state["factor"],))
    x = X.clone().requires_grad_()
    compiled = torch.compile(lambda x: g(x).sum(), backend="aot_eager", fullgraph=True)
    for factor in (2.0, 5.0):
        state["factor"] = factor
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], x * factor)


@pytest.mark.slow
def test_nothing_runs_uncompiled():
    with mg.compiling.watching.watch() as report:
        compiled = torch.compile(PROGRAMS["residuals"], backend="manualgrad")
        modes.derivatives(compiled, (X, Y), "revrev")
    assert not report.refused and not report.breaks and report.graphs
