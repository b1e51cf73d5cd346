"""Selects the solver of a linear system, and reports how well it has solved it."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import ArgumentError
from . import krylov
from .operators import Operator
from .vectors import Layout

__all__ = ["DIRECT_UP_TO", "NAMES", "ConvergenceError", "ConvergenceWarning", "Options", "Report", "known", "solved"]

DIRECT_UP_TO = 256  # unknowns; a dense matrix of that order takes a few milliseconds

#: The names of solvers; "auto" is direct for small systems, and gmres or minres for large ones.
NAMES = ("auto", "direct", *krylov.SOLVERS, *[f"scipy.{name}" for name in ("cg", "minres", "gmres", "bicgstab")])


class ConvergenceWarning(UserWarning):
    """A solve did not converge. Its result, or a derivative, is inaccurate."""


class ConvergenceError(RuntimeError):
    """A solve did not converge, with ``on_failure="raise"``."""


class Options(NamedTuple):
    """How the systems of one call are solved.

    Attributes:
        solver: one of `NAMES`, or ``(matvec, b) -> x`` on lists of tensors.
        rtol: relative tolerance; None: ``eps ** (2 / 3)`` of the dtype.
        atol: absolute tolerance.
        maxiter: the largest number of products; None: ten for each unknown, and at most 20,000.
        on_failure: "warn", "raise" or "ignore".
        preconditioner: an approximate inverse, or None.
    """

    solver: str | Callable[..., Any] = "auto"
    rtol: float | None = None
    atol: float = 0.0
    maxiter: int | None = None
    on_failure: str = "warn"
    preconditioner: Operator | None = None

    def relative(self, dtype: torch.dtype, power: float = 2 / 3) -> float:
        """The relative tolerance for a dtype."""
        return torch.finfo(dtype).eps ** power if self.rtol is None else self.rtol


class Report(NamedTuple):
    """How well a solve went: tensors without dims, or with one for each batch.

    Attributes:
        residual: its norm.
        bound: the largest accepted norm.
        singular: whether a direct solver found a zero pivot.
    """

    residual: Tensor
    bound: Tensor
    singular: Tensor

    def failed(self) -> Tensor:
        """Where the solve did not converge, including inf and nan."""
        return ~(self.residual <= self.bound) | ~self.residual.isfinite() | self.singular

    def announce(self, name: str, on_failure: str, advice: str) -> None:
        """Warn or raise if the solve failed."""
        if on_failure == "ignore" or not bool((failed := self.failed()).any()):
            return
        residual, bound = (x.expand(failed.shape)[failed] for x in (self.residual, self.bound))
        excess = residual / bound
        worst = int(torch.where(excess.isnan(), torch.inf, excess).argmax())
        batch = f" for {int(failed.sum())} of {failed.numel()} samples" if failed.dim() else ""
        if bool(self.singular.any()):
            what, advice = "has a singular matrix", "This is a least-squares solution."
        else:
            what = "did not converge"
        text = (
            f"torch_manualgrad.implicit: {name} {what}{batch}: the norm of the residual is {float(residual[worst]):.3g}, "
            f"and the tolerance {float(bound[worst]):.3g}. {advice}"
        )
        if on_failure == "raise":
            raise ConvergenceError(text)
        warnings.warn(text, ConvergenceWarning, stacklevel=2)


def known(solver: Any, argument: str) -> None:
    """Raise if ``solver`` is not the name of a solver.

    Raises:
        ArgumentError: another name.
        ModuleNotFoundError: scipy is needed and not installed.
    """
    if not isinstance(solver, str):
        return
    if solver not in NAMES:
        raise ArgumentError(f"{argument}: expected one of {', '.join(map(repr, NAMES))} or a function, got {solver!r}")
    if solver.startswith("scipy.") and importlib.util.find_spec("scipy") is None:
        raise ModuleNotFoundError(f"{argument}={solver!r} needs scipy, which is not installed")


def solved(
    product: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    b: Sequence[Tensor],
    options: Options,
    real: bool,
    symmetric: bool,
    preconditioner: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None,
    readable: bool,
) -> tuple[list[Tensor], Report]:
    """Solve $A x = b$.

    Args:
        product: $x -> A x$, on lists of tensors.
        b: the right-hand side.
        options: the solver and its tolerances.
        real: whether $A$ may be linear over the real numbers only.
        symmetric: whether $A$ is Hermitian.
        preconditioner: an approximate inverse of $A$.
        readable: whether values can be read; not under vmap, where only the direct solver works.

    Returns:
        The solution, and the report.
    """
    layout = Layout(b, real or options.solver == "scipy.minres")  # it takes only real numbers

    def on_vectors(function: Any) -> Callable[[Tensor], Tensor]:
        return lambda vector: layout.vector(function(layout.tensors(vector)))

    A, M = on_vectors(product), None if preconditioner is None else on_vectors(preconditioner)
    vector, solver = layout.vector(b), options.solver
    singular = torch.zeros((), dtype=torch.bool, device=vector.device)
    rtol = options.relative(layout.coarsest)
    if solver == "auto":
        solver = chosen(layout.size, symmetric)
    if callable(solver):
        x = layout.vector(solver(product, b))
    elif layout.size == 0:
        x = vector
    elif solver == "direct":
        x, singular = _direct(A, vector, readable)
        rtol = max(rtol, torch.finfo(layout.dtype).eps ** 0.5 / 10)  # as large as in a nearly singular system
    else:
        maxiter = min(10 * layout.size, 20_000) if options.maxiter is None else options.maxiter
        run = _scipy(solver) if solver.startswith("scipy.") else krylov.SOLVERS[solver]
        x, _ = run(A, vector, M, rtol, options.atol, maxiter)
    found = layout.tensors(x)
    if options.on_failure == "ignore":
        nothing = vector.new_zeros((), dtype=layout.dtype.to_real())
        return found, Report(nothing, nothing, singular)
    image = layout.vector(product(found))
    if symmetric and readable and not real:
        _check_symmetry(A, layout.vector(found), image, rtol)
    residual = torch.linalg.vector_norm(vector - image)
    size, eps = torch.linalg.vector_norm(vector), torch.finfo(layout.coarsest).eps
    # rounding of b - A x at a large x is not a failure; that of a nearly singular A is
    rounding = torch.minimum(100 * eps * torch.linalg.vector_norm(x), eps**0.5 * size)
    bound = torch.maximum((10 * rtol * size).clamp(min=options.atol), rounding)
    return found, Report(residual, bound, singular)


def _check_symmetry(A: Callable[[Tensor], Tensor], x: Tensor, image: Tensor, rtol: float) -> None:
    """Raise if $<u, A x>$ and $<A u, x>$ differ for one $u$; without it a wrong ``symmetric`` makes a wrong gradient."""
    u = torch.cos(torch.arange(len(x), device=x.device)).to(x.dtype)
    other = A(u)
    difference = (torch.vdot(u, image) - torch.vdot(other, x)).abs()
    sizes = [torch.linalg.vector_norm(v) for v in (u, image, other, x)]
    tolerance = max(torch.finfo(x.dtype).eps ** 0.5, rtol)
    if bool(difference > tolerance * (sizes[0] * sizes[1] + sizes[2] * sizes[3])):
        raise ArgumentError(
            "matvec: expected a Hermitian matrix, for which <u, A x> = <A u, x>, as symmetric=True or the solver says; the "
            f"two differ by {float(difference):.3g}"
        )


def chosen(size: int, symmetric: bool) -> str:
    """The solver that "auto" selects."""
    return "direct" if size <= DIRECT_UP_TO else "minres" if symmetric else "gmres"


def _direct(A: Callable[[Tensor], Tensor], b: Tensor, readable: bool) -> tuple[Tensor, Tensor]:
    unit = torch.eye(b.shape[0], dtype=b.dtype, device=b.device)
    try:
        columns = torch.vmap(A)(unit)
    except RuntimeError:  # of a function that reads values, or has no batching rule: column by column
        if not readable:
            raise
        columns = torch.stack([A(column) for column in unit])
    x, info = torch.linalg.solve_ex(columns.mT, b)
    if readable and bool(info > 0) and bool(columns.isfinite().all()):  # the least-squares solution of smallest norm
        x = torch.linalg.pinv(columns.mT) @ b
    return x, info > 0


def _scipy(name: str) -> Callable[..., tuple[Tensor, int]]:
    def run(A: Any, b: Tensor, M: Any, rtol: float, atol: float, maxiter: int) -> tuple[Tensor, int]:
        linalg = importlib.import_module("scipy.sparse.linalg")  # optional
        if b.device.type != "cpu":
            raise ArgumentError(f"solver='{name}' runs on the CPU, and the tensors are on {b.device}")
        values = b.resolve_conj().numpy()

        def operator(function: Any) -> Any:
            products = lambda v: function(torch.from_numpy(v.astype(values.dtype))).numpy()  # noqa: E731
            return linalg.LinearOperator((b.numel(), b.numel()), matvec=products, dtype=values.dtype)

        options: dict[str, Any] = {"rtol": rtol, "maxiter": maxiter}
        if not name.endswith("minres"):
            options["atol"] = atol
        if name.endswith("gmres"):
            options["restart"] = min(krylov.RESTART, b.numel())
            options["maxiter"] = -(-maxiter // options["restart"])
        solve = getattr(linalg, name.partition(".")[2])
        x, _ = solve(operator(A), values, M=None if M is None else operator(M), **options)
        return torch.from_numpy(x).to(b.dtype), maxiter

    return run
