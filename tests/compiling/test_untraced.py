"""Functions that are allowed in graphs, which Dynamo does not trace: what they do to derivatives is not in the graph."""

import pytest
import torch
from torch.autograd import Function

import torch_manualgrad as mg
from torch_manualgrad.core.rule import reached


class Own(Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 7 * g


class Allowed(Own):
    pass


def applied(x):
    return Own.apply(x)


def without_grad(x):
    with torch.no_grad():
        y = x.exp()
    return x * y


def detached(x):
    return x.detach() * x


def data(x):
    return x.data * x


def written(x):
    return x.sin() * x


for function in (Allowed, applied, without_grad, detached, data, written):
    torch._dynamo.allow_in_graph(function)

X = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)


def gradients(f):
    first = torch.autograd.grad(f(X), X, create_graph=True)
    return first if not first[0].requires_grad else (*first, *torch.autograd.grad(first[0].sin().sum(), X))


@pytest.mark.parametrize("function", [applied, without_grad, detached, data])
def test_what_ends_or_replaces_a_derivative_runs_uncompiled(function):
    torch.compiler.reset()

    def f(x):
        return function(x * x).sum()

    expected = gradients(f)
    with pytest.warns(RuntimeWarning, match=rf"runs uncompiled .*Dynamo does not trace {function.__name__}"):
        found = gradients(mg.compile(f, lowering="eager"))
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("error:torch_manualgrad")
@pytest.mark.parametrize(
    "function", [written, pytest.param(Allowed.apply, marks=[] if reached("2.13") else pytest.mark.skip)]
)
def test_others_are_compiled(function):
    torch.compiler.reset()

    def f(x):
        return function(x * x).pow(2).sum()

    expected = gradients(f)
    torch.testing.assert_close(gradients(mg.compile(f, lowering="eager", fullgraph=True)), expected)
