"""Compiled functions next to the functions themselves, in every mode and order and under torch.func."""

import copy
import types
import warnings

import pytest
import torch
from helpers import modes
from helpers.programs import PROGRAMS
from helpers.thinning import in_turn, label
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

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


EAGER = {"lowering": "eager"}


def compiled_in_place():
    module = Energy()
    module.compile(backend="manualgrad", options=EAGER)
    return module


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


class Energy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x, w):
        return energy(x, w) * self.scale


COMPILED = {
    "mg.compile": lambda: mg.compile(energy, lowering="eager", dynamic=False),
    "torch.compile": lambda: torch.compile(energy, backend="manualgrad", options=EAGER),
    "a module": lambda: torch.compile(Energy(), backend="manualgrad", options=EAGER),
    "a copy": lambda: copy.deepcopy(torch.compile(Energy(), backend="manualgrad", options=EAGER)),
    "module.compile": compiled_in_place,
}


@pytest.mark.parametrize("compiled, name", in_turn(COMPILED, TRANSFORMS), ids=label)
def test_transforms_run_compiled_graphs(compiled, name, monkeypatch):
    ran = []
    original = Function.primal
    monkeypatch.setattr(Function, "primal", lambda self, *values: ran.append(self) or original(self, *values))
    function = COMPILED[compiled]()
    with mg.override():
        expected = TRANSFORMS[name](energy if "compile" in compiled and compiled != "module.compile" else Energy())
        with warnings.catch_warnings(action="error", category=RuntimeWarning):
            torch.testing.assert_close(TRANSFORMS[name](function), expected)
        assert ran
        ran.clear()
        function(X, W)  # Dynamo gives functions up that it has refused once
        assert ran


@pytest.mark.filterwarnings("error:torch_manualgrad")
@pytest.mark.parametrize("mode", MODES)
def test_a_tensor_that_is_written_in_the_function_is_a_constant(mode):
    function = lambda x: (x.sin() * torch.tensor([0.5, 2.0, 3.0], dtype=x.dtype)).exp()  # noqa: E731
    inputs = (torch.tensor([0.3, 0.1, 0.2], dtype=torch.float64),)
    with mg.override():
        compiled = mg.compile(function, fullgraph=True, lowering="eager")
        found, expected = (modes.derivatives(f, inputs, mode) for f in (compiled, function))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_pytrees_and_views_under_a_transform():
    @mg.compile(lowering="eager")
    def f(inputs):
        return {"sin": inputs["x"].sin(), "same": (inputs["x"], inputs["x"][None])}

    found = vmap(f)({"x": W})
    torch.testing.assert_close(found, {"sin": W.sin(), "same": (W, W[:, None])})


def test_a_closure_over_a_tensor_of_the_transform_runs_uncompiled():
    def f(x):
        return mg.compile(lambda y: (x * y).sum(), lowering="eager")(x)

    with pytest.warns(RuntimeWarning, match="reads a tensor of the transform that is not an argument"):
        assert torch.equal(grad(f)(X), 2 * X)


def test_a_function_of_several_graphs_and_random_numbers_run_uncompiled():
    @mg.compile(lowering="eager")
    def broken(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return (y * x).sum()

    with pytest.warns(RuntimeWarning, match="a function runs uncompiled under torch.func"):
        torch.testing.assert_close(grad(broken)(X), X.cos() * X + X.sin())
    with warnings.catch_warnings(action="error", category=RuntimeWarning):  # not traced again
        torch.testing.assert_close(grad(broken)(X), X.cos() * X + X.sin())
    noisy = mg.compile(lambda x: x + torch.rand_like(x), lowering="eager")
    with pytest.warns(RuntimeWarning, match="draws random numbers"):
        a, b = vmap(noisy, randomness="different")(torch.zeros(2, 3))
    assert not torch.equal(a, b)
    with pytest.raises(Exception, match="graph_break"):
        grad(mg.compile(lambda x: broken(x), lowering="eager", fullgraph=True))(X)


KEPT = []


class Sine(torch.nn.Module):
    """A module that keeps or returns its square in various ways."""

    def __init__(self, way):
        super().__init__()
        self.way, self.squares, self.calls = way, {}, 0

    def forward(self, x):
        if self.way == "attribute":
            self.square = x * x
        elif self.way == "list":
            KEPT.append(x * x)
        elif self.way == "dictionary":
            self.squares["x"] = x * x
        elif self.way == "object":
            return types.SimpleNamespace(sine=x.sin(), square=x * x)
        elif self.way == "number":
            self.calls += 1
        return x.sin()


@pytest.mark.parametrize("way", ["attribute", "list", "dictionary", "object", "number"])
def test_a_function_that_keeps_a_tensor_runs_uncompiled(way):
    module = Sine(way)
    compiled = torch.compile(module, backend="manualgrad", options=EAGER)
    KEPT.clear()

    def f(x):
        y = compiled(x)
        if way == "object":
            return (y.sine + y.square).sum()
        squares = {
            "attribute": lambda: module.square,
            "list": lambda: KEPT[-1],
            "dictionary": lambda: module.squares["x"],
        }
        return (y + squares.get(way, lambda: x * x)()).sum()

    for _ in range(2):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", RuntimeWarning)
            torch.testing.assert_close(grad(f)(X), X.cos() + 2 * X)
        assert [w for w in seen if "uncompiled" in str(w.message)] == ([] if way == "number" else seen) and len(
            KEPT
        ) < 3
    assert module.calls == (2 if way == "number" else 0)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    ).double()


@pytest.mark.parametrize("hooks", [False, True], ids=["", "hooks"])
def test_parameters_of_a_module_under_a_transform(hooks, monkeypatch):
    """Gradients per example, and an ensemble."""
    net = network()
    if hooks:
        net.register_forward_hook(lambda module, inputs, output: output * 3)
    compiled = torch.compile(net, backend="manualgrad", options=EAGER)
    ran = []
    original = Function.primal
    monkeypatch.setattr(Function, "primal", lambda self, *values: ran.append(self) or original(self, *values))

    def results(model):
        parameters = {n: p.detach() for n, p in model.named_parameters()}

        def loss(parameters, x):
            return functional_call(model, parameters, (x,)).pow(2).sum()

        several = {n: torch.stack([p, 2 * p]) for n, p in parameters.items()}
        return (
            vmap(grad(loss), (None, 0))(parameters, BATCH),
            vmap(lambda p: functional_call(model, p, (X,)))(several),
            jvp(lambda p: loss(p, X), (parameters,), (parameters,)),
        )

    with mg.override(), warnings.catch_warnings(action="error", category=RuntimeWarning):
        expected, found = results(net), results(compiled)
    assert ran
    flat = [[*found[0].values(), found[1], *found[2]], [*expected[0].values(), expected[1], *expected[2]]]
    for a, b in zip(*flat):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("compiled", COMPILED)
def test_traces_contain_the_function_itself(compiled):
    function = COMPILED[compiled]()
    expected = energy if "compile" in compiled and compiled != "module.compile" else Energy()
    value, push = torch.func.linearize(lambda x: function(x, W), X)
    close = torch.testing.assert_close
    close((value, push(W[0])), jvp(lambda x: expected(x, W), (X,), (W[0],)))
    graph = make_fx(lambda x: grad(lambda x: function(x, W))(x))(X)
    close(graph(2 * X), grad(expected)(2 * X, W))


def test_errors_of_the_function_are_raised():
    def f(x):
        raise ValueError("not for this x")

    with pytest.raises(ValueError, match="not for this x"):
        grad(mg.compile(f, lowering="eager"))(X)
