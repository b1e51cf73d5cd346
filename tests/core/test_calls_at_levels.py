"""Calls at levels of torch.func without Python: every rule gives there what the general kernel, in Python, gives."""

import threading
from itertools import islice

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from helpers.calls import made, needs_library, norm, vector
from helpers.levels import WAYS, found_by, number_of
from helpers.rules import RULES, calls
from helpers.thinning import in_turn, label
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

import torch_manualgrad as mg
from torch_manualgrad.core.override import compiled_calls

pytestmark = needs_library
DTYPES = [torch.float64, torch.complex128]


def compare(call, way, **how):
    """At other values than those that were recorded."""
    f = number_of(call)
    others = [x * 0.9375 if x.is_floating_point() else x for x in call.inputs]
    with mg.override(call.rule, "*", **how):
        with compiled_calls.in_python(), compiled_calls.recording_after(-1):
            expected = found_by(way, f, others)
        with compiled_calls.recording_after(0):
            found_by(way, f, call.inputs)
            found_by(way, f, call.inputs)
            found = found_by(way, f, others)
    if isinstance(expected, type):
        assert found is expected, f"{call}: {found}, and in Python {expected}"
        return False
    assert not isinstance(found, type), f"{call}: {found}"
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda m: f"{call}: {m}")
    return True


@pytest.mark.parametrize("rule, way", in_turn(RULES, WAYS, share=1 / 2, start=1), ids=label)
def test_every_rule_gives_at_levels_what_it_gives_in_python(rule, way):
    for dtype in DTYPES:
        for call in islice(calls(rule, dtype), 2):
            if call.inputs:
                compare(call, way)


def found_or_error(function):
    try:
        return function()
    except (RuntimeError, ValueError) as error:
        return type(error), str(error).split("\n")[0][:60]


def is_error(found):
    return isinstance(found, tuple) and isinstance(found[0], type)


# -- what is recorded at one level, and used at another ------------------------------------------------------------------


def mlp(x):
    W, b = torch.linspace(-1, 1, 12, dtype=x.dtype).reshape(3, 4), torch.linspace(0, 1, 3, dtype=x.dtype)
    h = torch.nn.functional.layer_norm(torch.nn.functional.linear(x, W, b), (3,), b + 1, b)
    h = torch.cat([h.tanh(), torch.nn.functional.gelu(h).softmax(-1)], -1)
    return torch.nn.functional.mse_loss(h, torch.zeros_like(h)) + torch.logsumexp(h, -1).sum()


def number(x):
    return mlp(x).sum()


def outside(f, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x).square().sum(), x)[0]


PROGRAMS = {
    "grad": lambda x: grad(number)(x),
    "vjp": lambda x: vjp(number, x)[1](torch.ones((), dtype=x.dtype))[0],
    "vmap of grad": lambda x: vmap(grad(number))(torch.stack([x, 2 * x])),
    "vmap of vmap of grad": lambda x: vmap(vmap(grad(number)))(torch.stack([x, 2 * x])[:, None]),
    "grad of grad": lambda x: grad(lambda y: grad(number)(y).square().sum())(x),
    "grad of grad of grad": lambda x: grad(lambda z: grad(lambda y: grad(number)(y).square().sum())(z).sum())(x),
    "vmap of grad of grad": lambda x: vmap(grad(lambda y: grad(number)(y).square().sum()))(torch.stack([x, 2 * x])),
    "grad of vmap of grad": lambda x: grad(lambda y: vmap(grad(number))(torch.stack([y, 2 * y])).square().sum())(x),
    "hessian": lambda x: hessian(number)(x),
    "jacrev of jacrev": lambda x: jacrev(jacrev(number))(x),
    "jvp of grad": lambda x: jvp(grad(number), (x,), (x.cos(),))[1],
    "grad of jvp": lambda x: grad(lambda y: jvp(number, (y,), (y.cos(),))[1])(x),
    "vjp of grad": lambda x: vjp(grad(number), x)[1](x.cos())[0],
    "jvp of grad of grad": lambda x: jvp(grad(lambda y: grad(number)(y).square().sum()), (x,), (x.cos(),))[1],
    "autograd of vmap of grad": lambda x: outside(lambda y: vmap(grad(number))(torch.stack([y, 2 * y])), x),
    "autograd of jacrev": lambda x: outside(lambda y: jacrev(number)(y), x),
    "two levels": lambda x: grad(lambda y: grad(lambda z: number(y * z) * number(z))(x).sum())(x),
}


@pytest.mark.parametrize("names", [("*",), ()], ids=["every rule", "the better ones"])
def test_a_recording_of_one_level_serves_at_others(names):
    x = torch.linspace(-1, 2, 8, dtype=torch.float64).reshape(2, 4)
    with mg.override(*names):
        with compiled_calls.in_python():  # PyTorch's own third derivatives of layer norm are wrong
            expected = {name: program(1.5 * x) for name, program in PROGRAMS.items()}
        with compiled_calls.recording_after(0):
            for order in (1, -1):
                for program in list(PROGRAMS.values())[::order]:
                    program(x)
            for name, program in PROGRAMS.items():
                torch.testing.assert_close(program(1.5 * x), expected[name], msg=lambda m, name=name: f"{name}: {m}")


# -- which calls need no Python ------------------------------------------------------------------------------------------


def played(function):
    before = compiled_calls.recordings_played()
    function()
    return compiled_calls.recordings_played() - before


def test_levels_of_grad_need_no_python():
    x = torch.linspace(-1, 2, 8, dtype=torch.float64).reshape(2, 4)
    with mg.override("*"), compiled_calls.recording_after(1):
        for name in ("grad", "vjp", "vmap of grad"):
            for _ in range(3):
                PROGRAMS[name](x)
            _, (calls, compiled, in_python) = made(lambda name=name: PROGRAMS[name](x))
            assert calls > 10 and in_python == 0, name
            assert played(lambda name=name: PROGRAMS[name](x)) > 5


def test_the_level_of_a_vjp_that_has_ended_is_as_none():
    x = vector().detach()
    with mg.override("aten::linalg_vector_norm"):
        _, pull = vjp(norm, x)
        assert made(lambda: pull(torch.ones((), dtype=x.dtype)))[1] == (0, 1, 0)


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_modes_strong_zeros_and_tangents_outside_of_transforms_are_pythons():
    x = vector().detach()
    with mg.override("*"):
        with Seen():
            assert made(lambda: grad(lambda x: x.tanh().sum())(x))[1][0] == 0
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x)
            found = forward_ad.unpack_dual(grad(lambda x: x.tanh().sum())(dual)).tangent
    torch.testing.assert_close(found, -2 * x.tanh() * (1 - x.tanh() ** 2) * x)
    with mg.override("aten::tanh", strong_zero=True):
        assert made(lambda: grad(lambda x: x.tanh().sum())(x))[1][0] == 0


# -- what PyTorch does, and refuses, there --------------------------------------------------------------------------------


def written_to(x):
    y = x.exp()
    y.mul_(2)
    return y.sum()


def written_to_a_view(x):
    y = x.sin()
    y[1:].mul_(y.detach()[:1])
    return (y * y).sum()


def written_to_what_is_read(x):
    x = x.clone()
    y = x.sin()
    x.mul_(2)
    return y.sum()


def written_to_what_is_not_read(x):
    y = x.exp()
    y = y + 0
    y.add_(x)
    return y.sin().sum()


def without_grad(x):
    with torch.no_grad():
        y = x.exp()
    return (y * x.tanh()).sum()


def with_detached(x):
    return (x.exp().detach() * x.tanh()).sum()


def by_numbers(x):
    return (2 * x.tanh() / 3 - torch.where(x > 0, x, 0.5) + x**2).sum()


def in_half_precision(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.nn.functional.layer_norm(x.float()[None] @ x.float()[:, None], (1,)).sum() + x.tanh().sum()


def of_a_constant(x):
    return torch.ones(3, dtype=x.dtype).exp().sum()


LEVELS = {
    "grad": grad,
    "vjp": lambda f: lambda x: vjp(f, x)[1](torch.ones((), dtype=x.dtype))[0],
    "vjp twice": lambda f: lambda x: [vjp(f, x)[1](torch.ones((), dtype=x.dtype))[0] for _ in range(2)],
    "vmap of grad": lambda f: lambda x: vmap(grad(f))(torch.stack([x, x * 2])),
    "grad of grad": lambda f: grad(lambda x: grad(f)(x).sin().sum()),
    "grad of vmap": lambda f: grad(lambda x: vmap(f)(torch.stack([x, x * 2])).sum()),
    "jvp of grad": lambda f: lambda x: jvp(grad(f), (x,), (x.cos(),)),
    "jacrev": jacrev,
}
FUNCTIONS = [
    written_to, written_to_a_view, written_to_what_is_read, written_to_what_is_not_read, without_grad, with_detached,
    by_numbers, in_half_precision, of_a_constant,
]  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_it_is_as_in_pytorch(function, level):
    x = vector().detach()
    expected = found_or_error(lambda: LEVELS[level](function)(x))
    close = {"rtol": 0.02, "atol": 0.02} if function is in_half_precision else {}
    with mg.override("*"):
        if is_error(expected):  # a rule may save something else
            with compiled_calls.in_python():
                expected = found_or_error(lambda: LEVELS[level](function)(x))
        with compiled_calls.recording_after(0):
            for _ in range(3):
                found = found_or_error(lambda: LEVELS[level](function)(x))
                if is_error(expected):
                    assert found == expected
                else:
                    torch.testing.assert_close(found, expected, **close)


def test_a_node_shows_what_it_has_saved():
    x, seen = vector().detach(), []

    def f(x):
        y, z = x.tanh(), x.logsumexp(0)
        y.grad_fn._raw_saved_result.register_hooks(lambda t: 2 * t, lambda t: t / 2)
        seen.append((y.grad_fn.name(), y.grad_fn._saved_result, z.grad_fn._saved_dim))
        return y.sum()

    def run():
        seen.clear()
        gradient = grad(f)(x), vmap(grad(f))(x[None])
        return gradient, [(name, value + 0, dim) for name, value, dim in seen[:1]]

    with mg.override("*"):
        found, ((name, value, dim),) = run()
    torch.testing.assert_close(found, (1 - x.tanh() ** 2, 1 - x.tanh()[None] ** 2))
    assert name == "TanhBackward0" and torch.equal(value, x.tanh()) and dim == (0,)


def test_what_leaves_a_level_is_as_in_pytorch():
    x = vector().detach()
    kept = []

    def f(x):
        y = x.exp()
        kept.append((x, y))
        return (y * y.tanh()).sum()

    def outside():
        kept.clear()
        grad(f)(x)
        inner, y = kept[0]
        return [
            y + 1,
            y.tanh() * 2,
            torch.tensor(is_error(found_or_error(lambda: torch.autograd.grad(y.sum(), inner)))),
            grad(lambda x: (x * y).tanh().sum())(x),
            vjp(lambda x: (x * y).tanh(), x)[1](y)[0],
        ]

    expected = outside()
    with mg.override("*"):
        for _ in range(3):
            torch.testing.assert_close(outside(), expected)


def test_a_pullback_outlives_its_override_and_its_thread():
    x, results = vector().detach(), []
    expected = vjp(lambda x: x.tanh().exp(), x)[1](x)[0]
    with mg.override("*"):
        _, pull = vjp(lambda x: x.tanh().exp(), x)
        thread = threading.Thread(target=lambda: results.append(pull(x)[0]))
        thread.start()
        thread.join()
    torch.testing.assert_close([pull(x)[0], *results], [expected, expected])


def test_threads_have_levels_of_their_own():
    x, results = torch.linspace(-1, 2, 8, dtype=torch.float64).reshape(2, 4), {}
    programs = [PROGRAMS[name] for name in ("grad", "vmap of grad", "grad of grad", "jacrev of jacrev")]
    expected = [program(x) for program in programs]

    def run(k):
        for _ in range(4):
            results[k] = programs[k](x)

    with mg.override("*"), compiled_calls.recording_after(0):
        threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    torch.testing.assert_close([results[k] for k in range(4)], expected)


def test_a_graph_outside_is_differentiated_twice_and_kept():
    x = vector()

    def program():
        y = grad(lambda y: (y.tanh() * x.exp()).sum())(x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
        return first, second, torch.autograd.grad(first.sum(), x)[0]

    expected = program()
    with mg.override("*"), compiled_calls.recording_after(0):
        for _ in range(3):
            torch.testing.assert_close(program(), expected)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomalies_are_found():
    with mg.override("*"):
        with torch.autograd.detect_anomaly():
            x = vector().detach()
            torch.testing.assert_close(grad(lambda x: x.tanh().sum())(x), 1 - x.tanh() ** 2)
            with pytest.raises(RuntimeError, match="SqrtBackward0|DivBackward0|nan"):
                grad(lambda x: (x.sqrt() * 0).sum())(torch.zeros(2))


def test_hooks_on_saved_tensors_are_refused():
    with mg.override("*"), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        with pytest.raises(RuntimeError, match="hooks"):
            grad(lambda x: x.tanh().sum())(vector().detach())


def test_sparse_tensors_inside_of_wrappers_are_pytorchs():
    x = vector().detach()
    sparse = torch.eye(5, dtype=x.dtype).to_sparse()
    f = lambda x: (torch.sparse.mm(sparse, x[:, None]) * x[:, None]).sum()  # noqa: E731
    expected = grad(f)(x)
    with mg.override("*"):
        torch.testing.assert_close(grad(f)(x), expected)
