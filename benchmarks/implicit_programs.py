"""Gradients of five programs with a solver inside, next to an unrolled solver, torchopt's, and optimistix and lineax.

    python benchmarks/implicit_programs.py                # the table of docs/implicit.md
    python benchmarks/implicit_programs.py ours           # one contender, as JSON

For each program: the largest error of the gradient, relative to its largest entry, and the seconds of forward and
backward. The exact gradient is a closed form in NumPy. A contender that is not installed is skipped. Each runs in a
process of its own, on one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from processes import in_processes

CONTENDERS = ["ours", "unrolled", "torchopt", "optimistix"]
EPSILON, SIDE = 0.1, 320


class Program(NamedTuple):
    """loss(x, theta) at the x with residual(x, theta) = 0."""

    start: np.ndarray
    theta: np.ndarray
    residual: Callable[..., Any]
    loss: Callable[..., Any]
    exact: Callable[[np.ndarray], np.ndarray]  # the gradient, given x
    kind: str  # of the solver
    steps: int


class Library(NamedTuple):
    """torch, or jax.numpy with functions of torch's names."""

    np: Any
    number: Callable[[np.ndarray], Any]
    logsumexp: Callable[[Any, int], Any]
    pad: Callable[[Any], Any]  # a frame of zeros


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def regression(at: Library, predict: Callable[..., Any], slope: Callable[..., Any], steps: int) -> Program:
    """A penalty for each of 200 weights, and the loss on other data. y = predict(X w), whose derivative is ``slope``."""
    A, B, y = random(1000, 200), random(1000, 200, seed=1), np.sign(random(1000, seed=2)) / 2 + 0.5
    X, X2, t = at.number(A), at.number(B), at.number(y)

    def exact(w: np.ndarray) -> np.ndarray:
        H = A.T @ (slope(A @ w)[:, None] * A) + np.eye(200)
        return -np.linalg.solve(H, 2 * B.T @ (B @ w - y)) * w

    return Program(
        np.zeros(200),
        np.zeros(200),
        lambda w, p: X.T @ (predict(X @ w) - t) + at.np.exp(p) * w,
        lambda w, p: ((X2 @ w - t) ** 2).sum(),
        exact,
        "root",
        steps,
    )


def ridge(at: Library) -> Program:
    return regression(at, lambda z: z, np.ones_like, 1)


def logistic(at: Library) -> Program:
    return regression(at, lambda z: 1 / (1 + at.np.exp(-z)), lambda z: 1 / (2 + np.exp(z) + np.exp(-z)), 8)


def transport(at: Library) -> Program:
    """The cost of entropic transport between 100 points, by Sinkhorn's iteration for one potential, up to a constant."""
    C, log_a, log_b = np.abs(random(100, 100)), np.full(100, -np.log(100)), random(100, seed=1) / 4
    log_b = log_b - np.log(np.exp(log_b).sum())
    cost_of, a, b = at.number(C), at.number(log_a), at.number(log_b)

    def row(g: Any, cost: Any) -> Any:
        return EPSILON * (a - at.logsumexp((g - cost) / EPSILON, 1))

    def residual(g: Any, cost: Any) -> Any:
        new = EPSILON * (b - at.logsumexp((row(g, cost)[:, None] - cost) / EPSILON, 0))
        return new - new.mean() - g

    def exact(g: np.ndarray) -> np.ndarray:
        f = EPSILON * (log_a - np.log(np.exp((g - C) / EPSILON).sum(1)))
        P = np.exp((f[:, None] + g - C) / EPSILON)
        system = np.block([[np.diag(P.sum(1)), P], [P.T, np.diag(P.sum(0))]])
        sides = np.concatenate([(P * C).sum(1), (P * C).sum(0)])
        u, v = np.split(np.linalg.lstsq(system, sides, rcond=None)[0], 2)
        return -P * (C - u[:, None] - v) / EPSILON

    loss = lambda g, cost: (at.np.exp((row(g, cost)[:, None] + g - cost) / EPSILON) * cost_of).sum()  # noqa: E731
    return Program(np.zeros(100), C, residual, loss, exact, "fixed point", 200)


def contact(at: Library) -> Program:
    """A step of a chain of 200 nodes with stiffening springs, every tenth node on the ground: a minimum with constraints."""
    free, D, E = random(200), np.diff(np.eye(200), axis=0), np.eye(200)[::10]
    c, differences, hold = at.number(free), at.number(D), at.number(E)

    def slope(x: Any, k: Any) -> Any:
        return x - c + differences.T @ (k * (differences @ x) ** 3)

    def exact(z: np.ndarray) -> np.ndarray:
        x = z[:200]
        H = np.eye(200) + D.T @ (3 * (D @ x)[:, None] ** 2 * D)
        K = np.block([[H, E.T], [E, np.zeros((20, 20))]])
        adjoint = np.linalg.solve(K, np.concatenate([4 * x**3, np.zeros(20)]))[:200]
        return -(D @ adjoint) * (D @ x) ** 3

    return Program(
        np.zeros(220),
        np.ones(199),
        lambda z, k: at.np.concatenate([slope(z[:200], k) + hold.T @ z[200:], hold @ z[:200]]),
        lambda z, k: (z[:200] ** 4).sum(),
        exact,
        "root",
        12,
    )


def poisson(at: Library) -> Program:
    """102,400 unknowns, and their coefficients."""
    K, source = 1 + random(SIDE, SIDE) ** 2, random(SIDE, SIDE, seed=1)
    b = at.number(source)

    def matvec(u: Any, k: Any) -> Any:
        p = at.pad(u)
        return 4 * u - p[2:, 1:-1] - p[:-2, 1:-1] - p[1:-1, 2:] - p[1:-1, :-2] + k * u

    def exact(u: np.ndarray) -> np.ndarray:
        from scipy.sparse import diags, eye, kron
        from scipy.sparse.linalg import spsolve

        line = diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(SIDE, SIDE))
        matrix = kron(line, eye(SIDE)) + kron(eye(SIDE), line) + diags(K.ravel())
        x = spsolve(matrix.tocsc(), source.ravel())
        return -(spsolve(matrix.tocsc(), 2 * x) * x).reshape(SIDE, SIDE)

    return Program(
        np.zeros((SIDE, SIDE)), K, lambda u, k: matvec(u, k) - b, lambda u, k: (u * u).sum(), exact, "linear", 0
    )


PROGRAMS = {f.__name__: f for f in (ridge, logistic, transport, contact, poisson)}


def measured(gradient: Callable[[Any], Any], x: np.ndarray, program: Program, theta: Any) -> list[float]:
    """The error and the seconds of a gradient, the least of three after a first call."""
    found, exact, times = np.asarray(gradient(theta)), program.exact(x), []
    for _ in range(3):
        start = time.perf_counter()
        np.asarray(gradient(theta))
        times.append(time.perf_counter() - start)
    return [float(abs(found - exact).max() / abs(exact).max()), min(times)]


# -- torch ------------------------------------------------------------------------------------------------------------


def conjugate_gradients(matvec: Any, b: Any) -> Any:
    """As a user writes it. PyTorch can differentiate it, step by step."""
    import torch

    x, r, p = torch.zeros_like(b), b, b
    rr, limit = (r * r).sum(), 1e-24 * (b * b).sum()
    while rr > limit:
        q = matvec(p)
        step = rr / (p * q).sum()
        x, r = x + step * p, r - step * q
        rr, old = (r * r).sum(), rr
        p = r + rr / old * p
    return x


def solver_of(program: Program) -> Callable[..., Any]:
    import torch

    f = program.residual

    def newton(x: Any, theta: Any) -> Any:
        for _ in range(program.steps):
            x = x - torch.linalg.solve(torch.func.jacrev(f)(x, theta), f(x, theta))
        return x

    def iterate(x: Any, theta: Any) -> Any:
        for _ in range(program.steps):
            x = x + f(x, theta)
        return x

    def linear(x: Any, theta: Any) -> Any:
        b = -f(x, theta)
        return conjugate_gradients(lambda u: f(u, theta) + b, b)

    return {"root": newton, "fixed point": iterate, "linear": linear}[program.kind]


def in_torch(contender: str, program: Program) -> list[float]:
    import torch

    f, solver, start = program.residual, solver_of(program), torch.tensor(program.start)
    if contender == "unrolled":
        solve = lambda theta: solver(start, theta)  # noqa: E731
    elif contender == "torchopt":
        import torchopt

        linear = torchopt.linear_solve.solve_normal_cg(maxiter=1000, rtol=1e-12, atol=0.0)
        decorated = torchopt.diff.implicit.custom_root(f, argnums=1, solve=linear)(solver)
        solve = lambda theta: decorated(start, theta)  # noqa: E731
    else:
        import torch_manualgrad as mg

        if program.kind == "linear":
            b = -f(start, torch.tensor(program.theta))
            matvec = lambda u, k: f(u, k) + b  # noqa: E731
            solve = lambda k: mg.implicit.linear_solve(matvec, b, k, solver="cg", rtol=1e-12)  # noqa: E731
        elif program.kind == "fixed point":
            found = mg.implicit.fixed_point(lambda x, theta: x + f(x, theta), rtol=1e-13)
            solve = lambda theta: found(start, theta)  # noqa: E731
        else:
            found = mg.implicit.root(f, lambda f, x, theta: solver(x, theta))
            solve = lambda theta: found(start, theta)  # noqa: E731

    def gradient(theta: Any) -> Any:
        theta = theta.clone().requires_grad_()
        return torch.autograd.grad(program.loss(solve(theta), theta), theta)[0]

    theta = torch.tensor(program.theta)
    with torch.no_grad():
        x = solver(start, theta).numpy()
    return measured(gradient, x, program, theta)


# -- JAX --------------------------------------------------------------------------------------------------------------


def in_jax(program: Program) -> list[float]:
    import jax
    import jax.numpy as jnp
    import lineax
    import optimistix

    f, start = program.residual, jnp.array(program.start)
    if program.kind == "linear":
        b = -f(start, jnp.array(program.theta))

        def solve(k: Any) -> Any:
            shape = jax.ShapeDtypeStruct(b.shape, b.dtype)
            matrix = lineax.FunctionLinearOperator(lambda u: f(u, k) + b, shape, lineax.positive_semidefinite_tag)
            return lineax.linear_solve(matrix, b, lineax.CG(1e-12, 1e-12)).value
    elif program.kind == "fixed point":
        iterate = optimistix.FixedPointIteration(1e-13, 1e-13)
        step = lambda x, theta: x + f(x, theta)  # noqa: E731
        solve = lambda theta: optimistix.fixed_point(step, iterate, start, theta, max_steps=2000).value  # noqa: E731
    else:
        newton = optimistix.Newton(1e-13, 1e-13)
        solve = lambda theta: optimistix.root_find(f, newton, start, theta).value  # noqa: E731
    theta = jnp.array(program.theta)
    gradient = jax.jit(jax.grad(lambda theta: program.loss(solve(theta), theta)))
    return measured(gradient, np.asarray(solve(theta)), program, theta)


# ---------------------------------------------------------------------------------------------------------------------


def library(contender: str) -> Library:
    if contender == "optimistix":
        import jax

        jax.config.update("jax_enable_x64", True)
        jnp = jax.numpy
        return Library(jnp, jnp.array, jax.scipy.special.logsumexp, lambda u: jnp.pad(u, 1))
    import torch

    torch.set_num_threads(1)
    return Library(torch, torch.tensor, torch.logsumexp, lambda u: torch.nn.functional.pad(u, (1, 1, 1, 1)))


def measure(contender: str) -> dict[str, Any]:
    at = library(contender)
    run = in_jax if contender == "optimistix" else lambda program: in_torch(contender, program)
    return {name: run(make(at)) for name, make in PROGRAMS.items()}


def main() -> None:
    results = in_processes(CONTENDERS, measure)
    print("| |", " | ".join(results), "|\n|", "--- | " * (len(results) + 1))
    for name in PROGRAMS:
        print(f"| {name} |", " | ".join("{:.0e}, {:.3g}".format(*results[c][name]) for c in results), "|")


if __name__ == "__main__":
    main()
