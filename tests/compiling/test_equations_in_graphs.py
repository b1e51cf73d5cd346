"""Solutions of equations in compiled functions: the solver runs as it is, and derivatives are those of the equation."""

import functools
import warnings

import pytest
import torch
from helpers import modes
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import torch_manualgrad as mg
from torch_manualgrad.implicit import ConvergenceWarning, eigsh, fixed_point, linear_solve, minimize, odeint, root, svds

pytestmark = pytest.mark.filterwarnings("error:torch_manualgrad")

F64 = torch.float64
GRAPHS = functools.partial(mg.compiling.backend, lowering="eager", fallback=False)
X, Y = torch.tensor([0.5, 0.9, 1.3], dtype=F64), torch.tensor([1.1, 0.7, 0.8], dtype=F64)
ONES, TABLE = torch.ones(3, dtype=F64), torch.tensor([0.1, 0.2, 0.3], dtype=F64)
MATRIX = 4 * torch.eye(3, dtype=F64) + torch.arange(9, dtype=F64).reshape(3, 3) / 9


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


def newton(f, x, *parameters):
    for _ in range(100):
        step = torch.linalg.solve(jacrev(f)(x, *parameters), f(x, *parameters))
        x = x - step
        if float(step.abs().max()) < 1e-15:
            break
    return x


def newton_of_gradient(f, x, *parameters):
    for _ in range(40):
        x = x - torch.linalg.solve(hessian(f)(x, *parameters), grad(f)(x, *parameters))
    return x


cubic = root(lambda x, a, b: x**3 + a * x - b * TABLE, newton)
settled = fixed_point(lambda x, a: {"z": torch.tanh(x["z"] * 0.3 + a["w"] * a["k"]) + TABLE}, rtol=1e-14)
lowest = minimize(lambda x, a: ((x - a) ** 4).sum() + (x * x).sum(), newton_of_gradient)


def on_the_line(f, x, a):
    """The minimum of |x - a|^2 where the sum of x is that of a^2."""
    return a + (a.square().sum() - a.sum()) / 3


def by_matrix(product, b):
    return torch.linalg.solve(torch.stack([product(e) for e in torch.eye(3, dtype=F64)], 1), b)


TIMES = torch.tensor([0.0, 0.4, 1.0], dtype=F64)


def swing(t, state, length, power):
    return {"angle": state["speed"] * (1 + t), "speed": -(torch.sin(state["angle"]) ** power) * length - TABLE}


def decay(t, y, pair):
    return -(y**2) * pair[0] * t.cos() + pair[1]


def runge_kutta(f, y, t):
    states = [y]
    for a, b in zip(t[:-1], t[1:]):
        h = (b - a) / 24
        for i in range(24):
            s = a + i * h
            k = f(s, y)
            middle = f(s + h / 2, y + h / 2 * f(s + h / 2, y + h / 2 * k))
            y = y + h / 4 * (k + 2 * middle + f(s + h, y + h * middle))
        states.append(y)
    return torch.stack(states)


def hessian_of_chain(v, a, b):
    ends = torch.cat([a, b[:2]])
    return ends * v - torch.roll(v, 1) * 0.3 - torch.roll(v, -1) * 0.3


def largest(product, n, k):
    L, V = torch.linalg.eigh(product(torch.eye(n, dtype=F64)))
    return L[-k:], V[:, -k:]


def _of_pairs(found):
    return (found.eigenvalues**2).sum() + (found.eigenvectors**4 * torch.arange(5, dtype=F64)[:, None]).sum()


def rectangular(v, a, b):
    return torch.cat([a * v, v.flip(0) * b, (v.sum() * a)[:1]])


def _of_triplets(found):
    return (found.S**3).sum() + (found.U**4 * torch.arange(7, dtype=F64)[:, None]).sum() + (found.Vh**4 * TABLE).sum()


constrained = minimize(lambda x, a: (x - a).square().sum(), on_the_line, lambda x, a: (x.sum() - a.square().sum(),))

PROGRAMS = {
    "root": lambda x, y: (cubic(ONES, x * x, y) ** 2).sum(),
    "fixed point": lambda x, y: (settled({"z": torch.zeros_like(x)}, {"w": x * y, "k": 2})["z"] ** 2).sum(),
    "minimize": lambda x, y: (lowest(torch.zeros_like(x), x * y) ** 2).sum(),
    "minimize under a constraint": lambda x, y: (constrained(torch.zeros_like(x), x * y) ** 2).sum(),
    "linear": lambda x, y: (linear_solve(lambda v, d: MATRIX @ v + d * v, y, x * x, rtol=1e-14) ** 2).sum(),
    "linear, of trees": lambda x, y: (
        linear_solve(lambda v, d: [v[0] * (2 + d)], [y], x * x, solver="cg", rtol=1e-14)[0] ** 2
    ).sum(),
    "preconditioned": lambda x, y: (
        linear_solve(
            lambda v, d: (2 + d) * v + MATRIX @ (MATRIX.mT @ v),
            y,
            x * x,
            solver="cg",
            rtol=1e-14,
            preconditioner=lambda v, d: v / (2 + d),
        )
        ** 2
    ).sum(),
    "linear, with solvers": lambda x, y: (
        linear_solve(lambda v, d: MATRIX @ v + d * v, y, x * x, solver=by_matrix, tangent_solver=by_matrix) ** 2
    ).sum(),
    "odeint": lambda x, y: (odeint(swing, {"angle": x, "speed": y}, TIMES, x * y, 2, rtol=1e-6)["angle"] ** 2).sum(),
    "odeint, at times": lambda x, y: (odeint(decay, x, x * x, (y, TABLE), rtol=1e-5) ** 2).sum(),
    "odeint, with a method": lambda x, y: (odeint(decay, x, TIMES, (y, TABLE), method=runge_kutta) ** 2).sum(),
    "eigsh": lambda x, y: _of_pairs(eigsh(hessian_of_chain, 5, 2, x * x, y, which="SA")),
    "eigsh, with a solver": lambda x, y: _of_pairs(eigsh(hessian_of_chain, 5, 2, x * x, y, solver=largest)),
    "svds": lambda x, y: _of_triplets(svds(rectangular, 3, 2, x, y, rtol=1e-13)),
    "in a checkpoint": lambda x, y: (mg.checkpoint(lambda x: cubic(ONES, x, y).sin())(x * x) ** 2).sum(),
}


def names(*fast):
    return [pytest.param(n, marks=() if n in fast else pytest.mark.slow) for n in PROGRAMS]


def compare(name, compiled, wanted):
    for mode in wanted:
        found, expected = modes.derivatives(compiled, (X, Y), mode), modes.derivatives(PROGRAMS[name], (X, Y), mode)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda m: f"{mode}: {m}")


@pytest.mark.parametrize("name", names("root", "linear"))
def test_graphs_have_the_derivatives(name):
    compare(name, torch.compile(PROGRAMS[name], backend=GRAPHS, fullgraph=True), ("", "rev", "revrev", "fwd", "fwdrev"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_inductor_has_the_derivatives(name):
    compare(name, mg.compile(PROGRAMS[name], fullgraph=True), ("rev", "revrev", "fwd", "fwdfwd", "revrevrev"))
    compare(name, torch.compile(PROGRAMS[name], fullgraph=True), ("", "rev"))


@pytest.mark.parametrize("name", names("fixed point", "minimize under a constraint", "eigsh", "odeint, at times"))
def test_graphs_of_pytorch_have_the_derivatives(name):
    compare(name, torch.compile(PROGRAMS[name], backend="aot_eager", fullgraph=True), ("", "rev"))


@pytest.mark.parametrize("backend", [GRAPHS, "aot_eager"])
def test_tensors_that_are_read_by_closure_are_parameters(backend):
    linear = nn.Linear(3, 3, dtype=F64)
    solve = fixed_point(lambda x, a: torch.tanh(linear(x) * 0.3 + a), rtol=1e-14)
    given = fixed_point(lambda x, a, w, b: torch.tanh(torch.nn.functional.linear(x, w, b) * 0.3 + a), rtol=1e-14)
    x = X.clone().requires_grad_()
    compiled = torch.compile(lambda x: solve(torch.zeros_like(x), x * 2).sum(), backend=backend, fullgraph=True)
    found = torch.autograd.grad(compiled(x), [x, *linear.parameters()])
    expected = torch.autograd.grad(
        given(torch.zeros_like(x), x * 2, *linear.parameters()).sum(), [x, *linear.parameters()]
    )
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)
    with pytest.raises(mg.implicit.HiddenTensorError):
        solve(torch.zeros_like(x), x * 2)


@pytest.mark.parametrize("backend", [GRAPHS, "aot_eager"])
def test_a_solver_that_does_not_converge_warns(backend):
    solve = root(lambda x, a: x - a, lambda f, x, a: x)
    compiled = torch.compile(lambda a: solve(torch.zeros_like(a), a), backend=backend, fullgraph=True)
    for _ in range(2):
        with pytest.warns(ConvergenceWarning, match="root did not converge"):
            assert compiled(X).tolist() == [0, 0, 0]


@pytest.mark.parametrize("backend", [GRAPHS, pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_solution_has_the_dtype_and_the_strides_of_the_start(backend):
    solve = root(lambda x, a: x - a, lambda f, x, a: a.double().mT.contiguous().mT, on_failure="ignore")
    a = torch.arange(6.0).reshape(2, 3)
    found = torch.compile(lambda a: solve(torch.zeros_like(a), a + 1) * 2, backend=backend, fullgraph=True)(a)
    assert found.dtype == torch.float32 and torch.equal(found, 2 * (a + 1))


def test_a_solver_is_not_taken_for_another_of_the_same_code():
    def solver(scale):
        return lambda product, b: by_matrix(product, b) * scale

    def by_default(scale):
        return lambda product, b, scale=scale: by_matrix(product, b) * scale

    f = lambda x, solver: linear_solve(lambda v: MATRIX @ v, x, solver=solver, on_failure="ignore") * 1  # noqa: E731
    for make in (solver, by_default):
        compiled = torch.compile(f, backend="aot_eager")
        for scale in (1.0, 2.0):
            torch.testing.assert_close(compiled(X, make(scale)), torch.linalg.solve(MATRIX, X) * scale)


def test_a_change_of_what_a_function_reads_compiles_it_again():
    state = {"factor": 2.0}
    solve = root(lambda x, a: x - a * state["factor"], lambda f, x, a: x - f(x, a))
    x = X.clone().requires_grad_()
    compiled = torch.compile(lambda x: solve(torch.zeros_like(x), x).sum(), backend="aot_eager", fullgraph=True)
    for factor in (2.0, 5.0):
        state["factor"] = factor
        assert torch.autograd.grad(compiled(x), x)[0].tolist() == [factor] * 3


def test_sizes_may_be_open():
    solve = fixed_point(lambda x, a: torch.tanh(x * 0.3 + a) / x.shape[0], rtol=1e-14)
    program = lambda x, y: (solve(torch.zeros_like(x), x * y) ** 2).sum()  # noqa: E731
    compiled = torch.compile(program, backend=GRAPHS, fullgraph=True, dynamic=True)
    for n in (3, 4, 7):
        values = torch.linspace(0.2, 0.9, n, dtype=F64), torch.linspace(-0.4, 0.8, n, dtype=F64)
        for mode in ("rev", "revrev"):
            found, expected = (modes.derivatives(f, values, mode) for f in (compiled, program))
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "backend", ["aot_eager", functools.partial(mg.compiling.backend, lowering="eager", fallback=False)]
)
def test_a_number_may_vary(backend):
    solve = root(lambda x, a, n: x - a * n, lambda f, x, a, n: a * n)
    compiled = torch.compile(lambda a, n: solve(torch.zeros_like(a), a, n).sum(), backend=backend, fullgraph=True)
    x = X.clone().requires_grad_()
    for n in (2, 3, 4, 2.5, 3.5):
        assert torch.autograd.grad(compiled(x, n), x)[0].tolist() == [n] * 3


def test_vmap_in_a_graph():
    def f(x, y):
        return (vmap(lambda x: cubic(ONES, x, y))(torch.stack([x, x * x])) ** 2).sum()

    compiled = torch.compile(f, backend=GRAPHS, fullgraph=True)
    for mode in ("rev", "fwd"):
        for a, b in zip(modes.derivatives(compiled, (X, Y), mode), modes.derivatives(f, (X, Y), mode), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def along(f, x, y):
    return jvp(f, (x, y), (Y, X))[1]


def slopes_along(f, x, y):
    return torch.cat(jvp(grad(f, (0, 1)), (x, y), (Y, X))[1])


TRANSFORMS = {
    "jvp": along,
    "jvp of the start of an equation": lambda f, x, y: jvp(lambda x: f(x, Y), (x,), (y,))[1],
    "jacfwd": lambda f, x, y: torch.stack(jacfwd(f, (0, 1))(x, y)),
    "grad of jvp": lambda f, x, y: torch.cat(grad(lambda x, y: along(f, x, y), (0, 1))(x, y)),
    "jvp of grad": slopes_along,
    "jvp of vmap": lambda f, x, y: along(
        lambda x, y: vmap(f)(torch.stack([x, x * x]), torch.stack([y, y])).sum(), x, y
    ),
}


@pytest.mark.parametrize("name", names("root", "linear"))
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_in_a_graph(name, transform):
    f = functools.partial(TRANSFORMS[transform], PROGRAMS[name])
    found = torch.compile(f, backend=GRAPHS, fullgraph=True)(X, Y)
    torch.testing.assert_close(found, f(X, Y), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("transform", ["jvp of the start of an equation", "jvp of grad"])
@pytest.mark.parametrize(
    "name", ["start", "right-hand side", "matrix", "times", "first state", "first state that the function ignores"]
)
def test_transforms_in_a_graph_of_one_argument(name, transform):
    program = {
        "start": lambda x, y: (cubic(x, ONES, ONES) * y).sum(),
        "right-hand side": lambda x, y: (linear_solve(lambda v: MATRIX @ v, x, rtol=1e-14) * y).sum(),
        "matrix": lambda x, y: (linear_solve(lambda v, x: x * v, ONES, x, rtol=1e-14) * y).sum(),
        "times": lambda x, y: (odeint(lambda t, s: s * TABLE, ONES, x.exp()) * y).sum(),
        "first state": lambda x, y: (odeint(lambda t, s: s * TABLE, x, TIMES) * y).sum(),
        "first state that the function ignores": lambda x, y: (odeint(lambda t, s: TABLE, x, TIMES) * y).sum(),
    }[name]
    f = functools.partial(TRANSFORMS[transform], program)
    found = torch.compile(f, backend=GRAPHS, fullgraph=True)(X, Y)
    torch.testing.assert_close(found, f(X, Y), rtol=1e-6, atol=1e-7)


def test_arguments_without_a_literal_run_outside_of_graphs():
    solve = root(lambda x, a, g: x - g(a), lambda f, x, a, g: g(a))
    f = lambda a: solve(torch.zeros_like(a), a * 1, torch.sin).sum()  # noqa: E731
    x = X.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(torch.compile(f, backend="aot_eager")(x), x)[0], x.cos())
    torch.compiler.reset()
    with pytest.raises(Exception, match="whose steps depend on values"):
        torch.compile(f, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.slow
def test_nothing_runs_uncompiled():
    with mg.compiling.watching.watch() as report, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        modes.derivatives(torch.compile(PROGRAMS["root"], backend="manualgrad"), (X, Y), "rev")
    assert not report.refused and not report.breaks and report.graphs
