"""Compiled functions next to the functions themselves, in every mode and order and under torch.func."""

import pytest
import torch
from helpers import modes
from helpers.programs import PROGRAMS
from helpers.thinning import in_turn, label
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import torch_manualgrad as mg
from torch_manualgrad.compiling.function import Function
from torch_manualgrad.core.rule import reached


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


# -- modes and orders -------------------------------------------------------------------------------------------------

MODES = modes.MODES
THREE_ORDERS = ("mlp", "detached", "partly_untracked", "in_place", "equal_gradients", "potential")
# their second derivatives take long to trace
LONG = ("transformer", "factors", "residual_network", "lstm_layer", "normalizations", "reductions", "special_functions")


def compare(name, modes_of, lowering):
    if name == "lstm_layer" and not reached("2.11"):
        pytest.skip("Dynamo of this torch is wrong about the shapes of torch.lstm, which runs uncompiled")
    function, inputs = PROGRAMS[name]
    with mg.override():
        compiled = mg.compile(function, dynamic=False, fullgraph=True, lowering=lowering)
        for mode in ("", *modes_of):
            expected = modes.derivatives(function, inputs, mode)
            found = modes.derivatives(compiled, inputs, mode)
            assert len(found) == len(expected)
            for a, b in zip(found, expected):
                assert a.dtype == b.dtype and a.shape == b.shape
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, equal_nan=True, msg=lambda m: f"{mode}: {m}")


@pytest.mark.parametrize(
    "name, mode", in_turn([n for n in PROGRAMS if n not in (*LONG, *THREE_ORDERS)], ("fwd", "revrev")), ids=label
)
def test_graphs_have_the_derivatives_of_the_function(name, mode):
    compare(name, (mode,), "eager")


@pytest.mark.parametrize(
    "name", [n if n in ("transformer", "lstm_layer") else pytest.param(n, marks=pytest.mark.slow) for n in LONG]
)
def test_graphs_have_the_first_derivatives_of_the_function(name):
    compare(name, ("rev", "fwd"), "eager")


SECOND, THIRD = ("revrev", "fwdrev", "revfwd", "fwdfwd"), ("revrevrev", "revrevfwd", "fwdfwdrev")


@pytest.mark.parametrize("name, second, third", in_turn(THREE_ORDERS, SECOND, THIRD), ids=label)
def test_graphs_have_the_first_three_derivatives(name, second, third):
    compare(name, ("fwd", second, third), "eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_graphs_have_every_derivative_of_the_function(name):
    compare(name, MODES, "eager")


def test_inductor_has_the_derivatives_of_the_function():
    compare("mlp", ("fwd", "revrev"), "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_inductor_has_every_derivative_of_the_function(name):
    compare(name, MODES, "inductor")


# -- torch.func -------------------------------------------------------------------------------------------------------

X = torch.linspace(-1, 1, 3, dtype=torch.float64)
W = torch.linspace(-1, 2, 9, dtype=torch.float64).reshape(3, 3)
BATCH = torch.stack([X, 2 * X])


def energy(x, w):
    return torch.tanh(x @ w).pow(2).sum()


TRANSFORMS = {
    "grad": lambda f: grad(f)(X, W),
    "hessian": lambda f: hessian(f)(X, W),
    "jvp": lambda f: jvp(f, (X, W), (W[0], 2 * W)),
    "revrev": lambda f: jacrev(jacrev(f))(X, W),
    "fwdrev": lambda f: jacrev(jacfwd(f))(X, W),
    "fwdfwd": lambda f: jacfwd(jacfwd(f))(X, W),
    "revrevfwd": lambda f: jacfwd(jacrev(grad(f)))(X, W),
    "revfwdrev": lambda f: jacrev(jacfwd(jacrev(f)))(X, W),
    "vmap": lambda f: vmap(f, (0, None))(BATCH, W),
    "vmap of grad": lambda f: vmap(grad(f), (0, None))(BATCH, W),
    "grad of vmap": lambda f: grad(lambda x: vmap(f, (0, None))(x, W).sum())(BATCH),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_run_compiled_graphs(name, monkeypatch):
    ran = []
    original = Function.primal
    monkeypatch.setattr(Function, "primal", lambda self, *values: ran.append(self) or original(self, *values))
    compiled = mg.compile(energy, lowering="eager", dynamic=False)
    with mg.override():
        torch.testing.assert_close(TRANSFORMS[name](compiled), TRANSFORMS[name](energy))
    assert ran


def test_pytrees_and_views_under_a_transform():
    @mg.compile(lowering="eager")
    def f(inputs):
        return {"sin": inputs["x"].sin(), "same": (inputs["x"], inputs["x"][None])}

    found = vmap(f)({"x": W})
    torch.testing.assert_close(found, {"sin": W.sin(), "same": (W, W[:, None])})


def test_a_closure_over_a_tensor_of_the_transform():
    assert torch.equal(grad(lambda x: mg.compile(lambda y: (x * y).sum(), lowering="eager")(x))(X), 2 * X)


def test_a_function_of_several_graphs_and_random_numbers_run_uncompiled():
    @mg.compile(lowering="eager")
    def broken(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return (y * x).sum()

    torch.testing.assert_close(grad(broken)(X), X.cos() * X + X.sin())
    noisy = mg.compile(lambda x: x + torch.rand_like(x), lowering="eager")
    a, b = vmap(noisy, randomness="different")(torch.zeros(2, 3))
    assert not torch.equal(a, b)


def test_errors_of_the_function_are_raised():
    def f(x):
        raise ValueError("not for this x")

    with pytest.raises(ValueError, match="not for this x"):
        grad(mg.compile(f, lowering="eager"))(X)
