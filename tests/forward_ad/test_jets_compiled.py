"""Taylor series under torch.compile: right, or an error that says so; never the number of a call that has lost its series.

Dynamo puts some functions of torch into its graph without asking the handlers of a tensor's class or of a mode.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_manualgrad.forward_ad import directional, laplacian
from torch_manualgrad.forward_ad.jets import elementwise as jet_elementwise, linear as jet_linear

X = torch.tensor([-4.2, -2.3, -0.8, -0.3, 0.4, 0.9, 2.6, 4.5], dtype=torch.float64)
V = X.cos()
INSIDE = X.sin() * 0.9  # where inverse functions have values
OTHER = X.cos() + 1.5

ARGUMENTS = {"clamp": (-0.5, 0.5), "clamp_max": (0.5,), "clamp_min": (-0.5,), "threshold": (-0.5, 0.3), "pow": (3.0,)}
# What Dynamo takes into its graph as it is.
PAST_THE_HANDLER = {
    "abs": abs,
    "F.hardswish": F.hardswish,
    "F.hardsigmoid": F.hardsigmoid,
    "F.tanh": F.tanh,
    "a constant after it": lambda x: abs(x) * OTHER,
    "a series after it": lambda x: abs(x) * x,
    "a layer": nn.Sequential(nn.Linear(8, 8), nn.Hardswish(), nn.Linear(8, 8)).double().requires_grad_(False),
}
IN_PLACE = {"torch.exp_": torch.exp_, "F.relu_": F.relu_, "F.hardswish": lambda y: F.hardswish(y, inplace=True)}


def of_one_tensor(names, places):
    """Functions, methods and operators by these names."""
    found = {}
    for name in names:
        for place in places:
            if (f := getattr(place, name, None)) is not None:
                rest = ARGUMENTS.get(name, ())
                found[f"{getattr(place, '__name__', place)}.{name}"] = lambda x, f=f, rest=rest: f(x, *rest)
    return found


def beside_eager(functions, x, order=2, fullgraph=True):
    """All of them in one graph."""
    torch.compiler.reset()
    together = lambda x, v: [directional(f, x, v, order) for f in functions.values()]  # noqa: E731
    expected = together(x, V)
    found = torch.compile(together, backend="aot_eager", fullgraph=fullgraph, dynamic=False)(x, V)
    for name, one, other in zip(functions, found, expected):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")


def test_functions_with_kinks():
    """A few, each on both sides of its kinks."""
    of_one = [F.elu, F.hardtanh, F.leaky_relu, F.softshrink, torch.abs, torch.Tensor.relu, torch.ops.aten.hardswish]
    of_two = [torch.maximum, torch.copysign, lambda x, y: torch.where(x > 0, x * y, y), lambda x, y: x.clamp(-y, y)]
    beside_eager({"sum": lambda x: sum(f(x) for f in of_one) + sum(f(x, OTHER) for f in of_two) * x}, X)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if i % 3 else n for i, n in enumerate(PAST_THE_HANDLER)]
)
def test_calls_that_dynamo_drops_raise_or_run_eagerly(name):
    f = PAST_THE_HANDLER[name]
    beside_eager({name: f}, X, fullgraph=False)
    try:
        beside_eager({name: f}, X)  # torch 2.10 hands abs on
    except Exception as error:
        assert "past its handler" in str(error)  # noqa: PT017


@pytest.mark.parametrize("name", IN_PLACE)
def test_writes_that_dynamo_does_not_hand_on_raise(name):
    def f(x):
        y = x.sin()
        IN_PLACE[name](y)
        return y

    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        beside_eager({name: f}, X, 1)


def test_functions_with_a_break_in_the_middle_and_operators():
    def f(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.exp() + abs(y) + F.hardswish(x)

    beside_eager({"a break": f}, X, fullgraph=False)
    net = nn.Sequential(nn.Linear(8, 3), nn.Hardswish(), nn.Linear(3, 1)).double()
    points = torch.stack([X, V])
    operator = lambda x: laplacian(net, batch_dims=1)(x)  # noqa: E731
    torch.testing.assert_close(torch.compile(operator, backend="aot_eager")(points), operator(points))


def test_methods_that_torch_writes_in_python():
    functions = {
        "norm": lambda x: x.norm(),
        "split": lambda x: x.split(3)[0].sin(),
        "unflatten": lambda x: x.sin().unflatten(0, (2, 4)),
        "prod, whose derivative splits": lambda x: x.prod(),
    }
    beside_eager(functions, X, order=1, fullgraph=False)


@pytest.mark.slow
@pytest.mark.parametrize("place", [torch, torch.Tensor, torch.special, F, torch.ops.aten], ids=str)
def test_every_elementwise_function(place):
    """Each entry of jets of one tensor, by every name that it has, in one graph or in none."""
    names = [n.removeprefix("aten::").partition(".")[0] for n in [*jet_elementwise.RULES, *jet_linear.PIECEWISE]]
    inside = {"asin", "acos", "atanh", "erfinv", "log1p"}
    positive = {"log", "log2", "log10", "sqrt", "rsqrt", "lgamma", "digamma", "pow", "acosh", "logit"}
    checked = 0
    for name, f in of_one_tensor(sorted(set(names) - {"polygamma", "where"}), [place]).items():
        short = name.rpartition(".")[2]
        x = INSIDE if short in inside else INSIDE.abs() + (1 if short == "acosh" else 0) if short in positive else X
        try:
            directional(f, x, V, 2)
        except (TypeError, RuntimeError, ValueError):  # of more arguments than one
            continue
        try:
            beside_eager({name: f}, x)
        except Exception as error:
            assert "past its handler" in str(error), name
            beside_eager({name: f}, x, fullgraph=False)
        checked += 1
    print(f"\n{place}: {checked}")
    assert checked
