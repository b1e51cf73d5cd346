"""Tangents at levels of torch.func without Python: every rule's jvp gives there what the general kernel, in Python, gives."""

from itertools import islice

import pytest
import torch
from helpers.calls import made, needs_library
from helpers.levels import number_of
from helpers.rules import RULES, calls, local, random_like
from torch.func import grad, hessian, jacfwd, jvp, vjp, vmap

import torch_manualgrad as mg
from torch_manualgrad.core.override import compiled_calls
from torch_manualgrad.testing.comparison.problem import seed_generators

pytestmark = needs_library
DTYPES = [torch.float64, torch.complex128]


def pushed(f, inputs, tangents):
    return jvp(lambda *xs: tuple(f(*xs)), inputs, tangents)


def pushed_twice(f, inputs, tangents):
    return jvp(lambda *xs: pushed(f, xs, tangents)[1], inputs, tangents)


def pushed_in_batches(f, inputs, tangents):
    return vmap(lambda *ts: pushed(f, inputs, ts)[1])(*[torch.stack([t, 0.5 * t]) for t in tangents])


def of_the_first(f, inputs, tangents):
    """The others have no tangent."""
    return pushed(lambda x: f(x, *inputs[1:]), inputs[:1], tangents[:1])


def pulled_back(f, inputs, tangents):
    number = lambda *xs: sum(t.abs().square().sum() for t in pushed(f, xs, tangents)[1])  # noqa: E731
    return grad(number, tuple(range(len(inputs))))(*inputs)


def of_pullback(f, inputs, tangents):
    """Of the vjp at a level that has ended, on whole batches with tangents."""
    number = number_of(f)
    pull = lambda *xs: vmap(vjp(number, *xs)[1])(torch.ones(2, dtype=torch.float64))  # noqa: E731
    return jvp(pull, inputs, tangents)


WAYS = {
    "jvp": pushed,
    "of the first": of_the_first,
    "jvp of jvp": pushed_twice,
    "vmap of jvp": pushed_in_batches,
    "grad of jvp": pulled_back,
    "jvp of vmap of vjp": of_pullback,
}
FAST = ("jvp",)


def found_by(way, call, inputs):
    """Tensors, or the kind of error."""
    tangents = tuple(random_like(inputs))
    with torch.random.fork_rng():
        seed_generators(0)
        try:
            found = torch.utils._pytree.tree_leaves(WAYS[way](call, tuple(inputs), tangents))
        except (RuntimeError, NotImplementedError, ValueError) as error:
            return type(error)
    return [x.resolve_conj() for x in found if x is not None]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", [pytest.param(w, marks=[pytest.mark.slow] * (w not in FAST)) for w in WAYS])
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_every_rule_gives_with_tangents_what_it_gives_in_python(rule, way):
    for dtype in DTYPES[:1] if way in FAST else DTYPES:
        for call in islice(calls(rule, dtype), 1 if way in FAST else 2):
            if not call.inputs:
                continue
            others = [x * 0.9375 if x.is_floating_point() else x for x in call.inputs]
            with mg.override(rule, "*"):
                with compiled_calls.in_python(), compiled_calls.recording_after(-1):
                    expected = found_by(way, call, others)
                with compiled_calls.recording_after(0):
                    for _ in range(1 if way in FAST else 2):
                        found_by(way, call, call.inputs)
                    found = found_by(way, call, others)
            if isinstance(expected, type):
                assert found is expected, f"{call}: {found}, and in Python {expected}"
                continue
            assert not isinstance(found, type), f"{call}: {found}"
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True, msg=lambda m, c=call: f"{c}: {m}")


# -- what a recording depends on ----------------------------------------------------------------------------------------


def own(jvp):
    """A rule for `atan2` with a jvp that passes for one of the package's, whose jvps are recorded."""
    jvp.__module__ = "torch_manualgrad.derivatives"
    vjp = lambda grad, self, other: (grad * other, grad * self)  # noqa: E731
    vjp.__module__ = "torch_manualgrad.derivatives"
    return local("aten::atan2", vjp={("self", "other"): vjp}, jvp={"result": jvp})


def counted(runs, change=lambda found: found):
    def rule(self_p, self_t, other_p, other_t):
        runs.append((self_t is None, other_t is None))
        norm = self_p.square() + other_p.square()
        terms = (None if self_t is None else self_t * other_p, None if other_t is None else -other_t * self_p)
        return change(sum(t for t in terms if t is not None) / norm)

    return own(rule)


def leaf(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


X, Y = leaf(3, 4), leaf(3, 4, seed=1)


def along(x, y, of=(True, True)):
    """The tangent of `atan2` along 1 in those of its arguments."""
    given = [v for v, yes in zip((x, y), of) if yes]
    f = lambda *vs: torch.atan2(*[next(it) if yes else v for v, yes in zip((x, y), of)]) if (it := iter(vs)) else 0  # noqa: E731
    return jvp(f, tuple(given), tuple(torch.ones_like(v) for v in given))[1]


def without_grad(x, y):
    with torch.no_grad():
        return along(x, y)


OTHER = {
    "values": lambda: along(2 * X, Y - 1),
    "sizes": lambda: along(X[:2], Y[:2]),
    "strides": lambda: along(X.t().contiguous().t(), Y),
    "a broadcast": lambda: along(X, Y[0]),
    "dtype": lambda: along(X.float(), Y.float()),
    "one tangent": lambda: along(X, Y, (True, False)),
    "the other tangent": lambda: along(X, Y, (False, True)),
    "the same tensor twice": lambda: jvp(lambda x: torch.atan2(x, x * 1), (X,), (Y,))[1],
    "a tangent with other strides": lambda: jvp(torch.atan2, (X, Y), (Y.t().contiguous().t(), X))[1],
    "the tangent of another": lambda: jvp(torch.atan2, (X, Y), (Y, Y))[1],
    "no grad": lambda: without_grad(X, Y),
    "a level outside": lambda: jvp(lambda x: along(x, Y), (X,), (Y,))[1],
    "grad outside": lambda: grad(lambda x: along(x, Y).sum())(X),
    "batches": lambda: vmap(along)(X, Y),
    "batches of one": lambda: vmap(along, (0, None))(X, Y[0]),
    "jacfwd": lambda: jacfwd(torch.atan2)(X[0], Y[0]),
    "hessian": lambda: hessian(lambda x: torch.atan2(x, Y[0]).sum())(X[0]),
    "autograd outside": lambda: torch.autograd.grad(along(Z := X.clone().requires_grad_(), Y).sum(), Z)[0],
}


@pytest.mark.parametrize("other", OTHER)
def test_what_differs_from_what_was_recorded(other):
    rule = counted([])
    with mg.override(rule), compiled_calls.recording_after(0):
        with compiled_calls.in_python():
            expected = OTHER[other]()
        for _ in range(3):
            along(X, Y)
        for _ in range(3):
            torch.testing.assert_close(OTHER[other](), expected, rtol=0, atol=0)


def test_the_jvp_is_recorded_once_and_played():
    runs = []
    with mg.override(counted(runs)), compiled_calls.recording_after(1):
        for k in range(1, 5):
            expected = (Y - X) / (k * (X.square() + Y.square()))
            torch.testing.assert_close(along(k * X, k * Y), expected)
    assert len(runs) == 2


def test_another_override_is_another_key():
    with compiled_calls.recording_after(0):
        for factor in (1, 2, 1, 3):
            for _ in range(3):
                with mg.override(counted([], lambda found, factor=factor: factor * found)):
                    torch.testing.assert_close(along(X, Y), factor * (Y - X) / (X.square() + Y.square()))


ELSEWHERE = torch.ones(3, 4, dtype=torch.float64)
REFUSED = {
    "a value is read": lambda found: found * bool(found.sum() < 1e9),
    "random numbers": lambda found: found + 0 * torch.rand(3, 4),
    "a tensor from elsewhere": lambda found: found * ELSEWHERE,
    "a tensor made of numbers": lambda found: found * torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_jvp_that_cannot_be_recorded_stays_in_python(why):
    runs = []
    with mg.override(counted(runs, REFUSED[why])), compiled_calls.recording_after(0):
        for k in range(1, 5):
            torch.testing.assert_close(along(k * X, k * Y), (Y - X) / (k * (X.square() + Y.square())))
    assert len(runs) == 4


def test_another_packages_jvp_is_not_recorded():
    runs = []

    def tangent(self_p, self_t):
        runs.append(1)
        return self_t * self_p.cos()

    with mg.override(local("aten::sin", jvp={"result": tangent})), compiled_calls.recording_after(0):
        for _ in range(4):
            torch.testing.assert_close(jvp(torch.sin, (X,), (Y,))[1], Y * X.cos())
    assert len(runs) == 4


def test_no_grad_holds_for_levels_outside():
    def inner(x):
        with torch.no_grad():
            return torch.atan2(x, Y)

    for place in (0, 1):  # the result, and its tangent
        f = grad(lambda x, place=place: jvp(inner, (x,), (x.cos(),))[place].sum())
        expected = f(X)
        with mg.override("aten::atan2"), compiled_calls.recording_after(0):
            for _ in range(3):
                torch.testing.assert_close(f(X), expected, rtol=0, atol=0)
            with compiled_calls.in_python():
                torch.testing.assert_close(f(X), expected, rtol=0, atol=0)


# -- which calls need no Python ------------------------------------------------------------------------------------------


def mlp(x):
    W, b = torch.linspace(-1, 1, 12, dtype=x.dtype).reshape(3, 4), torch.linspace(0, 1, 3, dtype=x.dtype)
    h = torch.nn.functional.layer_norm(torch.nn.functional.linear(x, W, b), (3,), b + 1, b)
    h = torch.cat([h.tanh(), torch.nn.functional.gelu(h).softmax(-1)], -1)
    return (h.square().mean() + torch.logsumexp(h, -1).sum()).sum()


PROGRAMS = {
    "jvp": lambda x: jvp(mlp, (x,), (x.cos(),))[1],
    "jacfwd": jacfwd(mlp),
    "grad of jvp": grad(lambda x: jvp(mlp, (x,), (x.cos(),))[1]),
    "jvp of jvp": lambda x: jvp(lambda x: jvp(mlp, (x,), (x.cos(),))[1], (x,), (x,))[1],
    "jvp of grad": lambda x: jvp(grad(mlp), (x,), (x.cos(),))[1],
    "hessian": hessian(mlp),
    "grad of grad": grad(lambda x: grad(mlp)(x).square().sum()),
}
IN_PYTHON: dict[str, int] = {}


@pytest.mark.parametrize("name", PROGRAMS)
def test_levels_with_tangents_need_no_python(name):
    x, program = torch.linspace(-1, 2, 8, dtype=torch.float64).reshape(2, 4), PROGRAMS[name]
    with mg.override("*"), compiled_calls.recording_after(1):
        for _ in range(4):
            program(x)
        _, (count, _, in_python) = made(lambda: program(x))
    assert count > 5 and in_python == IN_PYTHON.get(name, 0)


def test_outputs_without_a_derivative_and_lists_of_tensors():
    def f(x):
        values, places = x.sort(-1)
        first, *rest = (values * 2).split(2, -1)
        return torch.cat([first * first, *rest], -1) + places

    expected = jvp(f, (X,), (Y,))
    with mg.override("*"), compiled_calls.recording_after(0):
        for _ in range(3):
            torch.testing.assert_close(jvp(f, (X,), (Y,)), expected, rtol=0, atol=0)


def test_a_tangent_is_not_the_history_of_its_primal():
    """As where the primal is tracked at the level outside, and its tangent at another."""

    def f(x, t):
        y, dy = jvp(lambda x: torch.atan2(x.sin(), x.cos() + 2), (x,), (t,))
        return (y * dy).sum()

    expected = grad(f, (0, 1))(X, Y)
    with mg.override("*"), compiled_calls.recording_after(0):
        for _ in range(3):
            torch.testing.assert_close(grad(f, (0, 1))(X, Y), expected)
