"""The functions of mg.forward_ad, of compiled functions."""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers.thinning import in_turn, label

import torch_manualgrad as mg
from torch_manualgrad.compiling.watching import watch
from torch_manualgrad.forward_ad import biharmonic, directional, hessian_diagonal, jet, laplacian, weighted_laplacian

EAGER = {"lowering": "eager"}


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


def network(activation=None):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), activation or torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def in_place(net):
    net.compile(backend="manualgrad", options=EAGER)
    return net


X = torch.linspace(-1, 2, 6, dtype=torch.float64).reshape(2, 3)
COMPILED = {
    "module": lambda net: torch.compile(net, backend="manualgrad", options=EAGER),
    "module.compile": in_place,
    "function": lambda net: torch.compile(lambda x: net(x), backend="manualgrad", options=EAGER),
    "mg.compile": lambda net: mg.compile(lambda x: net(x), lowering="eager"),
}
TRANSFORMS = {
    "laplacian": lambda f: laplacian(f)(X[0]),
    "of a batch": lambda f: laplacian(f, batch_dims=1)(X),
    "with Jacobian": lambda f: laplacian(f, with_jacobian=True)(X[0]),
    "weighted": lambda f: weighted_laplacian(f, X[1])(X[0]),
    "biharmonic": lambda f: biharmonic(f)(X[0]),
    "diagonal": lambda f: hessian_diagonal(f)(X[0]),
    "jet": lambda f: jet(f, (X[0],), ([X[1], None],)),
    "directional": lambda f: directional(f, X[0], X[1], 3),
    "of a Laplacian": lambda f: hessian_diagonal(laplacian(f))(X[0]),
    "gradient of one": lambda f: torch.func.grad(lambda x: laplacian(f)(x).sum())(X[0]),
    "batch of them": lambda f: torch.func.vmap(laplacian(f))(X),
}


@pytest.mark.parametrize("compiled, name", in_turn(COMPILED, TRANSFORMS), ids=label)
def test_series_of_compiled_functions_are_compiled(compiled, name):
    expected = TRANSFORMS[name](network())
    function = COMPILED[compiled](network())
    with warnings.catch_warnings(action="error", category=RuntimeWarning), watch() as report:
        torch.testing.assert_close(TRANSFORMS[name](function), expected)
    assert report.graphs
    with watch() as report:  # a transform made anew uses the same graphs
        torch.testing.assert_close(TRANSFORMS[name](function), expected)
    assert not report.graphs


def test_gradients_of_parameters():
    gradients = []
    for compile in (lambda net: net, COMPILED["module"]):
        net = network()
        laplacian(compile(net), batch_dims=1)(X).pow(2).sum().backward()
        gradients.append([p.grad for p in net.parameters()])
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b)


def test_each_transform_has_its_own_graphs():
    f = COMPILED["module"](network())
    plain = network()
    for number in (0, 1, 0):
        x = X if number else X[0]
        torch.testing.assert_close(laplacian(f, batch_dims=number)(x), laplacian(plain, batch_dims=number)(x))
    for order in range(1, 4):
        with (
            warnings.catch_warnings(action="error", category=RuntimeWarning),
            torch._dynamo.config.patch(recompile_limit=1),
        ):
            found = directional(f, X[0], X[1], order)
        torch.testing.assert_close(found, directional(plain, X[0], X[1], order))


def test_what_dynamo_cannot_trace_runs_uncompiled():
    def f(x):
        return F.hardswish(x).pow(3).sum()

    compiled = mg.compile(f, lowering="eager")
    with pytest.warns(RuntimeWarning, match="a function runs uncompiled under mg.forward_ad"):
        found = laplacian(compiled)(X[0])
    torch.testing.assert_close(found, laplacian(f)(X[0]))
    with warnings.catch_warnings(action="error", category=RuntimeWarning):  # not traced again
        torch.testing.assert_close(laplacian(compiled)(X[0]), found)
    with pytest.raises(Exception, match="past its handler"):
        laplacian(mg.compile(f, lowering="eager", fullgraph=True))(X[0])


def test_hooks_and_decorators_of_compiled_functions_act():
    compiled = COMPILED["module"](network())
    compiled.register_forward_hook(lambda module, inputs, output: 2 * output)
    torch.testing.assert_close(laplacian(compiled)(X[0]), 2 * laplacian(network())(X[0]))
    f = COMPILED["function"](network())

    @functools.wraps(f)
    def twice(x):
        return 2 * f(x)

    torch.testing.assert_close(laplacian(twice)(X[0]), 2 * laplacian(network())(X[0]))


def test_errors_of_the_function_are_raised():
    def f(x):
        raise ValueError("not for this x")

    with pytest.raises(ValueError, match="not for this x"):
        laplacian(mg.compile(f, lowering="eager"))(X[0])
