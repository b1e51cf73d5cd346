"""The common part of the public functions: options, the check of a root, and the call that solves an equation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import ArgumentError
from ..core.closures import as_of_now
from ..core.copies import copied_with
from ..core.forward import has_series, of_series
from ..core.internals import breaks_graphs, pytree
from ..programs.functions import Values
from .arguments import Unknown, check_function, watched
from .graphs import Node, Solve, solvers, traced
from .problem import Root, solution
from .solving import Options, Report, known
from .vectors import Layout, Structure

__all__ = ["GRAPH", "Equation", "called", "equation_solver", "of_lists", "options_of"]

_numbers = itertools.count(1)

GRAPH = "torch_manualgrad.implicit calls a solver, whose steps depend on values"


def options_of(
    argument: str, solver: Any, rtol: float | None, atol: float, maxiter: int | None, on_failure: str
) -> Options:
    """The options, checked.

    Raises:
        ArgumentError: an unknown solver, or a negative number.
    """
    known(solver, argument)
    for name, value, least in (("rtol", rtol, 0), ("atol", atol, 0), ("maxiter", maxiter, 1)):
        if value is not None and not value >= least:
            raise ArgumentError(f"{name}: expected at least {least}, got {value}")
    return Options(solver, rtol, atol, maxiter, on_failure)


def of_lists(solver: Any, x: Unknown, argument: str) -> Any:
    """A linear solver of trees, ``(matvec, b) -> x``, as a solver of lists; names are unchanged."""
    if not callable(solver):
        return solver

    def solve(product: Callable[[Values], Values], b: Values) -> Values:
        found = solver(lambda tree: x.join(product(x.values(tree, "matvec", b))), x.join(b))
        return x.values(found, argument, b)

    return solve


def _norm(values: Values) -> Tensor:
    return torch.linalg.vector_norm(Layout(values, True).vector(values))


def _check(
    residual: Callable[[Values, Values], Values], options: Options
) -> Callable[[Values, Values, Values], Report]:
    """The report of a root: the norm of the residual, relative to that at the start and to that of the root."""

    def check(xs: Values, x0: Values, parameters: Values) -> Report:
        if options.on_failure == "ignore":
            nothing = xs[0].new_zeros((), dtype=xs[0].dtype.to_real())
            return Report(nothing, nothing, nothing.bool())
        size, start = _norm(xs), _norm(residual(x0, parameters))
        scale = torch.maximum(size, torch.where(start.isfinite(), start, 0))
        bound = (options.relative(Layout(xs, True).coarsest, 1 / 2) * scale).clamp(min=options.atol)
        return Report(_norm(residual(xs, parameters)), bound, bound.new_zeros((), dtype=torch.bool))

    return check


class Equation:
    """An equation for one call, in terms of lists of tensors.

    Attributes:
        residual: $F$, ``(xs, parameters) -> values``.
        run: the solver, ``(x0, parameters) -> xs``.
        more: further unknowns, after those of $x$: zeros, which are not returned.
        symmetric: whether the Jacobian of $F$ is.
        unknown: the tree of all unknowns, for the tangent solver.
    """

    def __init__(
        self,
        unknown: Unknown,
        residual: Callable[[Values, Values], Values],
        run: Callable[[Values, Values], Values],
        more: Sequence[Tensor] = (),
        symmetric: bool = False,
    ) -> None:
        self.unknown, self.residual, self.run, self.more, self.symmetric = unknown, residual, run, more, symmetric


def equation_solver(
    name: str,
    users: Sequence[tuple[Callable[..., Any], str]],
    make: Callable[[Sequence[Callable[..., Any]], Any, Unknown, Structure, Values, Values], Equation],
    options: Options,
    made_by: Sequence[Callable[..., Any] | None],
    kinds: Sequence[str] = ("x",),
) -> Callable[..., Any]:
    """The function ``(x0, *params) -> x`` that a public function returns.

    Args:
        name: of the public function.
        users: the functions of the user, with their names in errors.
        make: the equation, from the functions or their graphs, the wrapper of the solver, the structures of $x$ and of
            the parameters, and their tensors.
        options: of the linear problems.
        made_by: the public function, and its arguments that are not options.
        kinds: of the functions' results, as in `graphs.traced`.
    """

    number = str(next(_numbers))

    def solved(functions: Sequence[Callable[..., Any]], wrapped: Any, x0: Any, params: Sequence[Any]) -> Any:
        x, given = Unknown(x0, "x0"), Structure(params)
        xs, tensors = [t.detach() for t in x.split(x0)], given.split(params)
        made = make(functions, wrapped, x, given, xs, tensors)
        start = [*xs, *made.more]
        check_function(made.residual, users[0][1], start, tensors)

        def announce(report: Report) -> None:
            report.announce(name, options.on_failure, "Derivatives at a point that is no solution are inaccurate.")

        here = options._replace(solver=of_lists(options.solver, made.unknown, "tangent_solver"))
        check = _check(made.residual, options)
        problem = Root(made.residual, len(start), made.run, check, announce, here, made.symmetric, name)
        return x.join(solution(problem, [*start, *tensors])[: len(xs)])

    def solve(x0: Any, *params: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            # a solution does not depend on the start, and its tangent in Dynamo's trace must not
            x0 = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, x0)
        return called(solved, users, x0, params, {}, Node(number, [f for f, _ in users], kinds))

    solvers[number] = solved
    return copied_with(
        solve,
        *made_by,
        tangent_solver=options.solver,
        rtol=options.rtol,
        atol=options.atol,
        maxiter=options.maxiter,
        on_failure=options.on_failure,
    )


def called(
    solve: Solve,
    users: Sequence[tuple[Callable[..., Any], str]],
    x: Any,
    params: Sequence[Any],
    options: Mapping[str, Any],
    node: Node,
    others: Sequence[Callable[..., Any]] = (),
) -> Any:
    """A call that solves an equation, inside or outside of a graph.

    Args:
        solve: solves it.
        users: the functions of the user, with their names in errors.
        x: the first argument, such as a starting point.
        params: the other arguments of the functions.
        options: of ``solve``.
        node: describes the call in a graph.
        others: further functions of the user that do not change the solution.
    """

    def eager(x: Any, *params: Any) -> Any:
        return _outside_of_graphs(solve, users, others, x, params, options)

    if torch.compiler.is_dynamo_compiling():
        found = traced(node, eager, x, params, options)
        if found is not None:
            return found
    return eager(x, *params)


@breaks_graphs(GRAPH)
def _outside_of_graphs(
    solve: Solve, users: Any, others: Any, x: Any, params: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    if has_series((x, params)):
        return of_series(lambda x, *params: _outside_of_graphs(solve, users, others, x, params, options), (x, *params))
    users, others = [(as_of_now(f), what) for f, what in users], map(as_of_now, others)  # derivatives call them later
    return solve([*watched(users, params), *others], lambda solver: solver, x, params, **options)
