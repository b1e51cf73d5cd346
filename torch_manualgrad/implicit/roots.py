"""Roots and fixed points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from ..arguments import checked
from ..core.internals import breaks_graphs
from ..programs.functions import Values, in_this_autocast
from .anderson import anderson
from .arguments import Unknown, listed
from .equations import GRAPH, Equation, equation_solver, options_of
from .vectors import Layout, Structure

__all__ = ["fixed_point", "root"]


@checked
@breaks_graphs(GRAPH)
def root(
    f: Callable[..., Any],
    solver: Callable[..., Any],
    *,
    tangent_solver: str | Callable[..., Any] = "auto",
    rtol: float | None = None,
    atol: float = 0.0,
    maxiter: int | None = None,
    on_failure: Literal["warn", "raise", "ignore"] = "warn",
) -> Callable[..., Any]:
    """A function that solves $f(x, params) = 0$ for $x$, with derivatives of every order in the parameters.

    The solver runs without a graph: the equation is differentiated, at its solution. A vjp solves one linear system
    with $(df/dx)^H$ and a jvp one with $df/dx$.

    Args:
        f: ``f(x, *params)``, differentiable; the result has the structure and the shapes of $x$. Tensors that it reads,
            other than arguments, must not require grad.
        solver: ``solver(f, x0, *params) -> x``. It need not be differentiable.
        tangent_solver: the solver of the linear systems: "direct", "gmres", "minres", "cg", "bicgstab", one of
            scipy's ("scipy.gmres"), or a function ``(matvec, b) -> x``. "auto" is direct up to 256 unknowns, with a
            dense Jacobian, and gmres above.
        rtol: relative tolerance. None: eps^(2/3) of the dtype for linear systems, and eps^(1/2) in the check of the
            solver's result: $||f(x)||$ is compared with $||f(x_0)||$ and with $||x||$, whichever is larger.
        atol: absolute tolerance.
        maxiter: the most products of a linear solve; None: ten for each unknown, and at most 20,000.
        on_failure: if a solve has not converged: "warn" with a `ConvergenceWarning`, "raise" a
            `ConvergenceError`, or "ignore", which also saves the evaluations of the check.

    Returns:
        ``solve(x0, *params) -> x``. $x_0$ is a tensor, or a tree of tensors, of any shape (*), real or complex;
        parameters are trees of anything. $x_0$ has no gradient: a root does not depend on where the search began.
        Under vmap the solver is called for each element of the batch.

    Raises:
        TypeError: an argument is not of its type, or $x_0$ is not floating point.
        ValueError: ``f`` or ``solver`` returns another structure, or a tolerance or name is invalid.
        HiddenTensorError: ``f`` reads a tensor that requires grad and is not an argument.

    Note:
        Where not differentiable: where $df/dx$ is singular. Derivatives are then those of a least-squares solution of the
        linear system, with a `ConvergenceWarning` or error.

    References:
        Krantz and Parks, The Implicit Function Theorem (2003), theorem 1.3.1; Blondel et al., Efficient and Modular
        Implicit Differentiation, NeurIPS 2022, equation 2.
    """
    options = options_of("tangent_solver", tangent_solver, rtol, atol, maxiter, on_failure)

    def make(functions: Any, wrapped: Any, x: Unknown, given: Structure, xs: Values, tensors: Values) -> Equation:
        here = in_this_autocast(functions[0])

        def run(xs: Values, tensors: Values) -> Values:
            return x.values(wrapped(solver)(here, x.join([t.clone() for t in xs]), *given.join(tensors)), "solver", xs)

        return Equation(x, listed(here, x, given, "f"), run)

    return equation_solver("root", [(f, "f")], make, options, (root, f, solver))


@checked
@breaks_graphs(GRAPH)
def fixed_point(
    f: Callable[..., Any],
    solver: Callable[..., Any] | None = None,
    *,
    tangent_solver: str | Callable[..., Any] = "auto",
    rtol: float | None = None,
    atol: float = 0.0,
    maxiter: int | None = None,
    on_failure: Literal["warn", "raise", "ignore"] = "warn",
) -> Callable[..., Any]:
    """A function that solves $x = f(x, params)$ for $x$, with derivatives of every order in the parameters.

    It is `root` of $f(x, params) - x$, with its own default solver.

    Args:
        f: ``f(x, *params)``, as in `root`.
        solver: ``solver(f, x0, *params) -> x``; None: Anderson acceleration with a memory of 5.
        tangent_solver: as in `root`.
        rtol: as in `root`; eps^(2/3) in Anderson acceleration too, relative to $||x||$.
        atol: as in `root`, and in Anderson acceleration.
        maxiter: as in `root`, and for Anderson acceleration, with None for 1,000.
        on_failure: as in `root`.

    Returns:
        ``solve(x0, *params) -> x``, as in `root`.

    Raises:
        TypeError: as in `root`.
        ValueError: as in `root`.
        HiddenTensorError: as in `root`.

    Note:
        Where not differentiable: where 1 is an eigenvalue of $df/dx$.

    References:
        Blondel et al., NeurIPS 2022, section 2; Walker and Ni, SIAM J. Numer. Anal. 49 (2011) 1715.
    """
    options = options_of("tangent_solver", tangent_solver, rtol, atol, maxiter, on_failure)

    def make(functions: Any, wrapped: Any, x: Unknown, given: Structure, xs: Values, tensors: Values) -> Equation:
        here = in_this_autocast(functions[0])
        image = listed(here, x, given, "f")

        def residual(xs: Values, tensors: Values) -> Values:
            return [new - old for new, old in zip(image(xs, tensors), xs)]

        def run(xs: Values, tensors: Values) -> Values:
            if solver is not None:
                return x.values(
                    wrapped(solver)(here, x.join([t.clone() for t in xs]), *given.join(tensors)), "solver", xs
                )
            # the image may have a wider dtype than the start, or under autocast a narrower one
            layout = Layout(
                [x.to(torch.promote_types(x.dtype, y.dtype)) for x, y in zip(xs, image(xs, tensors))], False
            )
            step = lambda v: layout.vector(image(layout.tensors(v), tensors))  # noqa: E731
            steps = 1000 if options.maxiter is None else options.maxiter
            found = anderson(step, layout.vector(xs), options.relative(layout.dtype), options.atol, steps)
            return layout.tensors(found)

        return Equation(x, residual, run)

    return equation_solver("fixed_point", [(f, "f")], make, options, (fixed_point, f, solver))
