"""Linear systems whose matrix is a function that computes products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from ..arguments import checked
from ..programs.functions import in_this_autocast
from .arguments import Unknown, check_function, listed
from .equations import called, of_lists, options_of
from .graphs import Node, solvers
from .operators import Matvec
from .problem import Linear, solution
from .solving import known
from .vectors import Structure

__all__ = ["linear_solve"]


@checked
def linear_solve(
    matvec: Callable[..., Any],
    b: Any,
    *params: Any,
    solver: str | Callable[..., Any] = "gmres",
    symmetric: bool = False,
    preconditioner: Callable[..., Any] | None = None,
    tangent_solver: str | Callable[..., Any] | None = None,
    rtol: float | None = None,
    atol: float = 0.0,
    maxiter: int | None = None,
    on_failure: Literal["warn", "raise", "ignore"] = "warn",
) -> Any:
    """The solution of $A x = b$, given products with $A$; derivatives of every order in $b$ and params.

    A vjp solves one system with $A^H$, a jvp one with $A$, by the same solver. Products with $A^H$ are those of the
    vjp of ``matvec``.

    Args:
        matvec: ``matvec(x, *params)``, linear in $x$, and differentiable in both; the result has the structure of $b$.
            Tensors that it reads, other than arguments, must not require grad.
        b: a tensor, or a tree of tensors, of any shape (*), real or complex.
        params: trees of anything.
        solver: "cg" for a Hermitian positive definite $A$, "minres" for a Hermitian one, "gmres" and "bicgstab" for
            any, "direct" with a dense matrix, "auto"; "scipy.cg" and the like on the CPU; or ``(matvec, b) -> x``.
        symmetric: whether $A$ is Hermitian; the vjp then needs no $A^H$. Always True for cg and minres.
        preconditioner: ``preconditioner(v, *params)``, approximately $A^-1 v$, linear; positive definite for cg and
            minres. Not passed to a solver that is a function.
        tangent_solver: another solver for the derivatives.
        rtol: as $||A x - b|| <= rtol ||b||$; None: eps^(2/3) of the dtype.
        atol: absolute tolerance of the same.
        maxiter: the most products; None: ten for each unknown, and at most 20,000.
        on_failure: as in `root`.

    Returns:
        $x$, of the structure of $b$.

    Raises:
        TypeError: an argument is not of its type, or $b$ is not floating point.
        ValueError: ``matvec`` returns another structure, or a tolerance or name is invalid.
        HiddenTensorError: ``matvec`` reads a tensor that requires grad and is not an argument.

    Note:
        Where not differentiable: where $A$ is singular. The solve then does not converge, unless $b$ is in the range of
        $A$.

    References:
        Saad, Iterative Methods for Sparse Linear Systems (2003); Giles, An extended collection of matrix derivative
        results (2008), section 2.3.1.
    """
    options = dict(
        solver=solver,
        symmetric=symmetric,
        tangent_solver=tangent_solver,
        rtol=rtol,
        atol=atol,
        maxiter=maxiter,
        on_failure=on_failure,
    )

    others = [] if preconditioner is None else [preconditioner]
    functions = [matvec, *others]
    node = Node(_NUMBER, functions, ["x"] * len(functions), is_linear=True)
    return called(_solved, [(matvec, "matvec")], b, params, options, node, others)


def _solved(
    functions: Sequence[Callable[..., Any]],
    wrapped: Callable[[Any], Any],
    b: Any,
    params: Sequence[Any],
    *,
    solver: str | Callable[..., Any],
    symmetric: bool,
    tangent_solver: str | Callable[..., Any] | None,
    rtol: float | None,
    atol: float,
    maxiter: int | None,
    on_failure: str,
) -> Any:
    matvec, *conditions = functions
    options = options_of("solver", solver, rtol, atol, maxiter, on_failure)
    x, given = Unknown(b, "b"), Structure(params)
    right, tensors = x.split(b), given.split(params)
    product = listed(in_this_autocast(matvec), x, given, "matvec")
    check_function(product, "matvec", right, tensors)
    symmetric = symmetric or isinstance(solver, str) and solver.rpartition(".")[2] in ("cg", "minres")
    for preconditioner in conditions:
        condition = Matvec(listed(in_this_autocast(preconditioner), x, given, "preconditioner"), symmetric)
        options = options._replace(preconditioner=condition)
    options = options._replace(solver=of_lists(solver, x, "solver"))
    tangents = options
    if tangent_solver is not None:
        known(tangent_solver, "tangent_solver")
        tangents = options._replace(solver=of_lists(tangent_solver, x, "tangent_solver"))
    problem = Linear(Matvec(product, symmetric), len(right), options, "linear_solve")
    if tangents is not options:
        problem.derivative = Linear(problem.operator, len(right), tangents, "the derivative of linear_solve")
    return x.join(solution(problem, [*right, *tensors]))


_NUMBER = "linear_solve"
solvers[_NUMBER] = _solved
