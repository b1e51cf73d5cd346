"""Minima, without constraints or with equality constraints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ..arguments import ArgumentError, checked, described
from ..core.forward import is_in_forward_ad
from ..core.internals import breaks_graphs, pytree
from ..programs.functions import Values, in_this_autocast, pull_back
from .arguments import Unknown
from .equations import GRAPH, Equation, equation_solver, options_of
from .vectors import Layout, Structure

__all__ = ["minimize"]


@checked
@breaks_graphs(GRAPH)
def minimize(
    f: Callable[..., Any],
    solver: Callable[..., Any],
    equality: Callable[..., Any] | None = None,
    *,
    tangent_solver: str | Callable[..., Any] = "auto",
    rtol: float | None = None,
    atol: float = 0.0,
    maxiter: int | None = None,
    on_failure: Literal["warn", "raise", "ignore"] = "warn",
) -> Callable[..., Any]:
    """A function that minimizes $f(x, params)$ over $x$, with derivatives of every order in the parameters.

    Without constraints it is `root` of the gradient, and the linear systems have the Hessian. With the constraint
    $h(x, params) = 0$ it is the root of

        $(f_x + h_x^H lambda, h) = 0$

    in $x$ and $lambda$. The multipliers are those of least squares at the solution.

    Args:
        f: ``f(x, *params)``, twice differentiable, real and without dims.
        solver: ``solver(f, x0, *params) -> x``, a minimum, or with ``equality`` a minimum under it.
        equality: ``equality(x, *params)``, a tree of tensors that are 0 at a solution.
        tangent_solver: as in `root`; "auto" is direct up to 256 unknowns, and minres above.
        rtol: as in `root`, of the gradient.
        atol: as in `root`.
        maxiter: as in `root`.
        on_failure: as in `root`.

    Returns:
        ``solve(x0, *params) -> x``, as in `root`.

    Raises:
        TypeError: as in `root`.
        ValueError: as in `root`.
        HiddenTensorError: as in `root`, for ``f`` and ``equality``.

    Note:
        Where not differentiable: where the Hessian, or the matrix of the system with constraints, is singular: at a
        minimum that is not isolated, or with dependent constraints. Inequalities are not supported; pass the active
        ones as equalities.

    References:
        Nocedal and Wright, Numerical Optimization (2006), section 12.1 and equation 16.4; Blondel et al., NeurIPS 2022,
        equations 5 and 6.
    """
    options = options_of("tangent_solver", tangent_solver, rtol, atol, maxiter, on_failure)

    def make(functions: Any, wrapped: Any, x: Unknown, given: Structure, xs: Values, tensors: Values) -> Equation:
        if any(map(is_in_forward_ad, tensors)):
            raise NotImplementedError(
                "minimize: the gradient of f is taken by torch.func.grad, which cannot run at a dual level; use root, of a gradient "
                "that you write"
            )
        n, here = len(xs), in_this_autocast(functions[0])

        def objective(xs: Values, values: Values) -> Tensor:
            found = here(x.join(xs), *given.join(values))
            if not isinstance(found, Tensor) or found.dim() or found.is_complex():
                raise ArgumentError(f"f: expected a real tensor without dims, got {described(found)}")
            return found

        def run(xs: Values, values: Values) -> Values:
            return x.values(wrapped(solver)(here, x.join([t.clone() for t in xs]), *given.join(values)), "solver", xs)

        if equality is None:
            return Equation(x, lambda xs, values: _gradient(objective, xs, values), run, symmetric=True)

        held = in_this_autocast(functions[1])

        def constraint(xs: Values, values: Values) -> Values:
            return _constraints(held(x.join(xs), *given.join(values)))

        def lagrangian(xs: Values, multipliers: Values, values: Values) -> Tensor:
            found = objective(xs, values)
            for m, h in zip(multipliers, constraint(xs, values)):
                found = found + (m.conj() * h).real.sum() if h.is_complex() else found + (m * h).sum()
            return found

        def conditions(unknowns: Values, values: Values) -> Values:
            xs, multipliers = unknowns[:n], unknowns[n:]
            slope = _gradient(lambda xs, values: lagrangian(xs, multipliers, values), xs, values)
            return [*slope, *constraint(xs, values)]

        def with_multipliers(unknowns: Values, values: Values) -> Values:
            found = run(unknowns[:n], values)
            return [*found, *_multipliers(objective, constraint, found, values)]

        zeros = [torch.zeros_like(h) for h in constraint(xs, [t.detach() for t in tensors])]
        both = Unknown((x.join(xs), zeros), "x0")
        return Equation(both, conditions, with_multipliers, [z.detach() for z in zeros], symmetric=True)

    users = [(f, "f")] if equality is None else [(f, "f"), (equality, "equality")]
    made_by, kinds = (minimize, f, solver, equality), ("tensor", "tensors")[: len(users)]
    return equation_solver("minimize", users, make, options, made_by, kinds)


def _gradient(function: Callable[[Values, Values], Tensor], xs: Values, values: Values) -> Values:
    """The gradient in ``xs``, differentiable."""
    found: Values = torch.func.grad(lambda *xs: function(xs, values), argnums=tuple(range(len(xs))))(*xs)
    return found


def _constraints(tree: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(tree)
    for h in leaves:
        if not isinstance(h, Tensor) or not (h.is_floating_point() or h.is_complex()):
            raise TypeError(f"equality: expected a tree of floating point or complex tensors, got {described(h)}")
    return leaves


def _multipliers(
    objective: Callable[[Values, Values], Tensor],
    constraint: Callable[[Values, Values], Values],
    xs: Values,
    values: Values,
) -> Values:
    """The least-squares solution of $h_x^H lambda = -f_x$."""
    held, pull = pull_back(lambda *xs: constraint(xs, values), xs)
    below, across = Layout(held, True), Layout(xs, True)
    if not below.size:
        return held
    rows = torch.eye(below.size, dtype=below.dtype, device=xs[0].device)
    matrix = torch.stack([across.vector(pull(below.tensors(row))) for row in rows])
    slope = across.vector(_gradient(objective, xs, values)).to(matrix.dtype)
    return below.tensors((-(torch.linalg.pinv(matrix.mT) @ slope)).to(below.dtype))
