"""The equations behind all functions of this package, and their derivatives of every order.

A problem is an equation $F(x, t) = 0$ that determines $x$ by tensors $t$, with a solver. For a change of $t$,

    $J dx = -F_t dt$,   with   $J = dF/dx$,

which is a linear problem. So is $J^H u = g$, which gives the vjp $-F_t^H u$. Problems are programs that run their solver,
and rules run on tensors that are tracked at all other levels. So derivatives of higher order follow. A batch of problems,
under vmap, is a problem as well.

References:
    Blondel et al., Efficient and Modular Implicit Differentiation, NeurIPS 2022; ``jax.lax.custom_root`` and
    ``jax.lax.custom_linear_solve``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import explain
from ..core.override.override import under_active_rules
from ..programs.functions import Values, placed, pull_back, push_forward
from ..programs.operator import Batched, Program, filled, node_of as solution
from .operators import JacobianAdjoint, Operator
from .solving import Options, Report, chosen, solved
from .vectors import Layout

__all__ = ["Linear", "Problem", "Root", "solution"]

_ENTRIES = 2**24  # of the dense matrices in memory at the same time

_ESCAPED = (
    "torch_manualgrad.implicit calls the solver and the functions outside of all transforms. One of them reads a tensor of a "
    "transform that is not an argument: pass it as a parameter."
)


class Problem(Program):
    """An equation with a solver. It keeps no values for the backward.

    Attributes:
        count: how many tensors the solution has.
    """

    count: int
    is_solver = True

    @property
    def outputs(self) -> int:
        return self.count

    def needed(self, count: int, inputs: int) -> tuple[Sequence[int], Sequence[int]]:
        return range(count), range(inputs)

    def batched(self, dims: Sequence[int | None], size: int, randomness: str) -> Program:
        if size == 0:
            raise RuntimeError("torch_manualgrad.implicit: a batch of size 0 under vmap has no element to solve for")
        return _BatchedProblem(self, dims, size, randomness)

    def run(self, tensors: Values) -> list[Tensor]:
        try:
            xs, report = self.attempt(tensors, True)
        except RuntimeError as error:
            if any(text in str(error) for text in ("INTERNAL ASSERT", "escaped")):
                explain(error, _ESCAPED)
            raise
        self.announce(report)
        return self._as_traced(tensors, xs) if self.is_traced else [x.resolve_conj() for x in xs]

    def run_alone(self, tensors: Values) -> list[Tensor]:
        return self.run(tensors)  # also of a batch, which a solver does not run under vmap

    def _as_traced(self, tensors: Values, xs: Values) -> list[Tensor]:
        """The solution with the dtypes and strides that a graph expects."""
        made = []
        for x, like in zip(xs, self.like(tensors)):
            expected = torch.empty_like(like)
            same = x.dtype == expected.dtype and x.stride() == expected.stride()
            made.append(x if same else expected.copy_(x))
        return made

    def attempt(self, tensors: Values, readable: bool) -> tuple[list[Tensor], Report]:
        """The untracked solution, and its report; ``readable`` unless it is called under vmap."""
        raise NotImplementedError

    def direct_size(self, tensors: Values) -> int:
        """The order of the matrix for the direct solver, whose `attempt` can be called under vmap; else 0."""
        return 0

    def announce(self, report: Report) -> None:
        """Warn or raise if the attempt failed."""
        raise NotImplementedError


class Linear(Problem):
    """$A(t) x = b$. The tensors are those of $b$, then those of $t$."""

    def __init__(self, operator: Operator, count: int, options: Options, name: str, twin: Linear | None = None) -> None:
        super().__init__()
        self.operator, self.count, self.options, self.name = operator, count, options, name
        self.symmetric = operator.transposed is operator
        self.derivative = self  # the problem of its tangents
        self._twin = weakref.ref(twin) if twin is not None else None
        self._own: Linear | None = None

    @property
    def transposed(self) -> Linear:
        """The problem with the adjoint of $A$."""
        if self.symmetric:
            return self
        found = self._twin() if self._twin is not None else self._own
        if found is None:
            condition = self.options.preconditioner
            options = self.options._replace(preconditioner=None if condition is None else condition.transposed)
            found = Linear(self.operator.transposed, self.count, options, self.name, self)
            self._own, self._twin = found, None
        return found

    def like(self, tensors: Values) -> Values:
        return tensors[: self.count]

    def attempt(self, tensors: Values, readable: bool) -> tuple[list[Tensor], Report]:
        b, parameters = tensors[: self.count], tensors[self.count :]
        product = self.operator.at(parameters, b)
        condition = self.options.preconditioner
        precondition = None if condition is None else condition.at(parameters, b)
        return solved(product, b, self.options, self.operator.real, self.symmetric, precondition, readable)

    def direct_size(self, tensors: Values) -> int:
        size, solver = Layout(tensors[: self.count], self.operator.real).size, self.options.solver
        return size if solver == "direct" or solver == "auto" and chosen(size, self.symmetric) == "direct" else 0

    def announce(self, report: Report) -> None:
        advice = "Raise maxiter, or pass another solver or a preconditioner."
        report.announce(self.name, self.options.on_failure, advice)

    def jvp(self, xs: Values, tensors: Values, places: Sequence[int], tangents: Values, keeps: bool) -> Values:
        n = self.count
        right = [torch.zeros_like(x) for x in tensors[:n]]
        for i, t in zip(places, tangents):
            if i < n:
                right[i] = t
        moving = [(i, t) for i, t in zip(places, tangents) if i >= n]
        if moving:
            inner = [i for i, _ in moving]

            def product(*changed: Tensor) -> Values:
                return self.operator.at(placed(tensors, inner, changed)[n:], xs)(xs)

            change = push_forward(under_active_rules(product), [tensors[i] for i in inner], [t for _, t in moving])
            right = [r - c.to(r.dtype) for r, c in zip(right, change)]
        return solution(self.derivative, [*right, *tensors[n:]])

    def vjp(self, xs: Values, tensors: Values, places: Sequence[int], grads: Sequence[Tensor | None]) -> Values:
        n = self.count
        u = solution(self.derivative.transposed, [*filled(grads, xs), *tensors[n:]])
        inner = [i for i in places if i >= n]
        found = dict(enumerate(u))
        if inner:

            def product(*changed: Tensor) -> Values:
                return self.operator.at(placed(tensors, inner, changed)[n:], xs)(xs)

            found.update(
                zip(inner, pull_back(under_active_rules(product), [tensors[i] for i in inner])[1]([-x for x in u]))
            )
        return [found[i] for i in places]


class Root(Problem):
    """$F(x, t) = 0$. The tensors are those of a starting point, then those of $t$.

    Args:
        function: $F$, of lists of tensors.
        count: how many tensors $x$ has.
        solver: of a starting point and parameters.
        check: ``(xs, x0, parameters) -> Report``.
        announce: of the report.
        options: for the linear problems.
        symmetric: whether $J$ is.
        name: of the linear problems in messages.
    """

    def __init__(
        self,
        function: Callable[[Values, Values], Values],
        count: int,
        solver: Callable[[Values, Values], Values],
        check: Callable[[Values, Values, Values], Report],
        announce: Callable[[Report], None],
        options: Options,
        symmetric: bool,
        name: str,
    ) -> None:
        super().__init__()
        self.function, self.count, self.solver, self.check, self.announced = function, count, solver, check, announce
        adjoint = Linear(JacobianAdjoint(function, count, symmetric), count, options, f"the linear solve of {name}")
        self.adjoint, self.tangent = adjoint, adjoint.transposed

    def like(self, tensors: Values) -> Values:
        return tensors[: self.count]

    def attempt(self, tensors: Values, readable: bool) -> tuple[list[Tensor], Report]:
        x0, parameters = tensors[: self.count], tensors[self.count :]
        # a solver may return its starting point, or a parameter
        xs = [x.detach().clone() for x in self.solver(x0, parameters)]
        return xs, self.check(xs, x0, parameters)

    def announce(self, report: Report) -> None:
        self.announced(report)

    def jvp(self, xs: Values, tensors: Values, places: Sequence[int], tangents: Values, keeps: bool) -> Values:
        n = self.count
        inner = [i for i in places if i >= n]
        if not inner:
            return [torch.zeros_like(x) for x in xs]

        def residual(*changed: Tensor) -> Values:
            return self.function(xs, placed(tensors, inner, changed)[n:])

        given = [t for i, t in zip(places, tangents) if i >= n]
        right = push_forward(under_active_rules(residual), [tensors[i] for i in inner], given)
        return solution(self.tangent, [*[(-r).to(x.dtype) for r, x in zip(right, xs)], *xs, *tensors[n:]])

    def vjp(self, xs: Values, tensors: Values, places: Sequence[int], grads: Sequence[Tensor | None]) -> Values:
        n = self.count
        found = {i: torch.zeros_like(tensors[i]) for i in places if i < n}
        inner = [i for i in places if i >= n]
        if inner:
            u = solution(self.adjoint, [*filled(grads, xs), *xs, *tensors[n:]])

            def residual(*changed: Tensor) -> Values:
                return self.function(xs, placed(tensors, inner, changed)[n:])

            found.update(
                zip(inner, pull_back(under_active_rules(residual), [tensors[i] for i in inner])[1]([-x for x in u]))
            )
        return [found[i] for i in places]


class _BatchedProblem(Problem, Batched):
    """A problem for each element of a batch."""

    outputs = Batched.outputs

    def like(self, tensors: Values) -> Values:
        return [x.expand(self.size, *x.shape) for x in self.one.like(self._element(tensors, 0))]

    def _element(self, tensors: Values, k: int) -> list[Tensor]:
        return [x if d is None else x.select(d, k) for x, d in zip(tensors, self.dims)]

    def direct_size(self, tensors: Values) -> int:
        return self.one.direct_size(self._element(tensors, 0))

    def attempt(self, tensors: Values, readable: bool) -> tuple[list[Tensor], Report]:
        def one(*values: Tensor) -> Any:
            xs, report = self.one.attempt(values, False)
            return tuple(xs), tuple(report)

        size = self.direct_size(tensors) if readable else 0
        if not readable or size:
            chunk = max(1, _ENTRIES // size**2) if size else None
            xs, report = torch.vmap(one, self.dims, randomness=self.randomness, chunk_size=chunk)(*tensors)
            if not readable or not bool(Report(*report).singular.any()):
                return list(xs), Report(*report)
        made = [self.one.attempt(self._element(tensors, k), readable) for k in range(self.size)]
        xs = [torch.stack(column) for column in zip(*[xs for xs, _ in made])]
        return xs, Report(*[torch.stack(column) for column in zip(*[report for _, report in made])])

    def announce(self, report: Report) -> None:
        self.one.announce(report)
