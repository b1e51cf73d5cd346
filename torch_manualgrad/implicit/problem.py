"""The operator behind all functions of this package, and its derivatives of every order.

A problem is an equation $F(x, t) = 0$ that determines $x$ by tensors $t$, with a solver. For a change of $t$,

    $J dx = -F_t dt$,   with   $J = dF/dx$,

which is a linear problem. So is $J^H u = g$, which gives the vjp $-F_t^H u$. Both are problems again, solved by the
same operator, with tensors that are tracked at all other levels. So derivatives of higher order follow. A batch of
problems, under vmap, is a problem as well, whose jvp and vjp are those of one problem under vmap.

References:
    Blondel et al., Efficient and Modular Implicit Differentiation, NeurIPS 2022; ``jax.lax.custom_root`` and
    ``jax.lax.custom_linear_solve``.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import explain
from ..core.engine.derivative import Derivative, redispatch
from ..core.engine.kernel import Mode, apply, differentiated
from ..core.forward import apart_from_levels, jvps
from ..core.internals import (
    at_next_level,
    in_clean_state,
    in_functorch,
    innermost_is_jvp,
    inside_of_batched_gradients,
    is_traced_to_graph,
    outside_of_batched_gradients,
    saved_tensors_unhooked,
    skipped_by_dynamo,
    transforms_in_dual_level,
    unwrap_if_dead,
)
from ..core.schema import Signature
from .operators import JacobianAdjoint, Operator, Values, pull_back, push_forward
from .solving import Options, Report, chosen, solved
from .vectors import Layout

__all__ = ["Linear", "Problem", "Root", "placed", "solution"]

_numbers = itertools.count(1)
_problems: weakref.WeakValueDictionary[int, Problem] = weakref.WeakValueDictionary()

_ENTRIES = 2**24  # of the dense matrices in memory at the same time

_traced: list[Problem] = []  # kept for graphs, which have only the numbers of problems

_library = torch.library.Library("manualgrad_implicit", "FRAGMENT")
_library.define("solve(int problem, Tensor[] tensors) -> Tensor[]")
_solve: Any = torch.ops.manualgrad_implicit.solve.default
_signature = Signature(_solve._schema)


class Problem:
    """An equation with a solver.

    Attributes:
        count: how many tensors the solution has.
        number: identifies the problem to the operator.
        is_traced: whether it belongs to a graph. Its solution then has the dtypes of `like`.
    """

    count: int
    is_traced = False

    def __init__(self) -> None:
        self.number = next(_numbers)
        _problems[self.number] = self

    def like(self, tensors: Values) -> Values:
        """Tensors with the shapes and dtypes of the solution."""
        raise NotImplementedError

    def attempt(self, tensors: Values, readable: bool) -> tuple[list[Tensor], Report]:
        """The untracked solution, and its report; ``readable`` unless it is called under vmap."""
        raise NotImplementedError

    def direct_size(self, tensors: Values) -> int:
        """The order of the matrix for the direct solver, whose `attempt` can be called under vmap; else 0."""
        return 0

    def announce(self, report: Report) -> None:
        """Warn or raise if the attempt failed."""
        raise NotImplementedError

    def jvp(self, xs: Values, tensors: Values, places: Sequence[int], tangents: Values) -> Values:
        """The tangent of the solution, for tangents of the tensors at ``places``."""
        raise NotImplementedError

    def vjp(self, xs: Values, tensors: Values, places: Sequence[int], grads: Values) -> Values:
        """The cotangents of the tensors at ``places``."""
        raise NotImplementedError


def solution(problem: Problem, tensors: Values) -> list[Tensor]:
    """The solution of a problem, tracked at every level."""
    if is_traced_to_graph():
        problem.is_traced = True
        _traced.append(problem)
    return list(_solve(problem.number, list(tensors)))


def placed(values: Values, places: Sequence[int], changed: Values) -> list[Tensor]:
    """The values, with those at ``places`` replaced."""
    made = list(values)
    for i, x in zip(places, changed):
        made[i] = x
    return made


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

    def jvp(self, xs: Values, tensors: Values, places: Sequence[int], tangents: Values) -> Values:
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

            change = push_forward(product, [tensors[i] for i in inner], [t for _, t in moving])
            right = [r - c.to(r.dtype) for r, c in zip(right, change)]
        return solution(self.derivative, [*right, *tensors[n:]])

    def vjp(self, xs: Values, tensors: Values, places: Sequence[int], grads: Values) -> Values:
        n = self.count
        u = solution(self.derivative.transposed, [*grads, *tensors[n:]])
        inner = [i for i in places if i >= n]
        found = dict(enumerate(u))
        if inner:

            def product(*changed: Tensor) -> Values:
                return self.operator.at(placed(tensors, inner, changed)[n:], xs)(xs)

            found.update(zip(inner, pull_back(product, [tensors[i] for i in inner])[1]([-x for x in u])))
        return [found[i] for i in places]


class Root(Problem):
    """$F(x, t) = 0$. The tensors are those of a starting point, then those of $t$.

    Args:
        function: $F$, of lists of tensors.
        count: how many tensors $x$ has.
        run: the solver, of a starting point and parameters.
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
        run: Callable[[Values, Values], Values],
        check: Callable[[Values, Values, Values], Report],
        announce: Callable[[Report], None],
        options: Options,
        symmetric: bool,
        name: str,
    ) -> None:
        super().__init__()
        self.function, self.count, self.run, self.check, self.announced = function, count, run, check, announce
        adjoint = Linear(JacobianAdjoint(function, count, symmetric), count, options, f"the linear solve of {name}")
        self.adjoint, self.tangent = adjoint, adjoint.transposed

    def like(self, tensors: Values) -> Values:
        return tensors[: self.count]

    def attempt(self, tensors: Values, readable: bool) -> tuple[list[Tensor], Report]:
        x0, parameters = tensors[: self.count], tensors[self.count :]
        # a solver may return its starting point, or a parameter
        xs = [x.detach().clone() for x in self.run(x0, parameters)]
        return xs, self.check(xs, x0, parameters)

    def announce(self, report: Report) -> None:
        self.announced(report)

    def jvp(self, xs: Values, tensors: Values, places: Sequence[int], tangents: Values) -> Values:
        n = self.count
        inner = [i for i in places if i >= n]
        if not inner:
            return [torch.zeros_like(x) for x in xs]

        def residual(*changed: Tensor) -> Values:
            return self.function(xs, placed(tensors, inner, changed)[n:])

        given = [t for i, t in zip(places, tangents) if i >= n]
        right = push_forward(residual, [tensors[i] for i in inner], given)
        return solution(self.tangent, [*[(-r).to(x.dtype) for r, x in zip(right, xs)], *xs, *tensors[n:]])

    def vjp(self, xs: Values, tensors: Values, places: Sequence[int], grads: Values) -> Values:
        n = self.count
        found = {i: torch.zeros_like(tensors[i]) for i in places if i < n}
        inner = [i for i in places if i >= n]
        if inner:
            u = solution(self.adjoint, [*grads, *xs, *tensors[n:]])

            def residual(*changed: Tensor) -> Values:
                return self.function(xs, placed(tensors, inner, changed)[n:])

            found.update(zip(inner, pull_back(residual, [tensors[i] for i in inner])[1]([-x for x in u])))
        return [found[i] for i in places]


class Batched(Problem):
    """A problem for each element of a batch.

    Args:
        one: the problem.
        dims: of the batch in each tensor, or None.
        size: of the batch.
        randomness: as in ``torch.vmap``.
    """

    def __init__(self, one: Problem, dims: Sequence[int | None], size: int, randomness: str) -> None:
        super().__init__()
        self.one, self.dims, self.size, self.randomness, self.count = one, tuple(dims), size, randomness, one.count

    def like(self, tensors: Values) -> Values:
        made = self.one.like([self._element(x, d, 0) for x, d in zip(tensors, self.dims)])
        return [x.expand(self.size, *x.shape) for x in made]

    @staticmethod
    def _element(x: Tensor, dim: int | None, k: int) -> Tensor:
        return x if dim is None else x.select(dim, k)

    def _map(self, function: Callable[..., Any], dims: Sequence[int | None], **options: Any) -> Callable[..., Any]:
        return torch.vmap(function, in_dims=tuple(dims), randomness=self.randomness, **options)

    def direct_size(self, tensors: Values) -> int:
        return self.one.direct_size([self._element(x, d, 0) for x, d in zip(tensors, self.dims)])

    def attempt(self, tensors: Values, readable: bool) -> tuple[list[Tensor], Report]:
        size = self.direct_size(tensors) if readable else 0
        if not readable or size:
            chunk = max(1, _ENTRIES // size**2) if size else None
            run = self._map(lambda *values: _attempt_as_tuple(self.one, values), self.dims, chunk_size=chunk)
            xs, report = run(*tensors)
            if not readable or not bool(Report(*report).singular.any()):
                return list(xs), Report(*report)
        made = [
            self.one.attempt([self._element(x, d, k) for x, d in zip(tensors, self.dims)], readable)
            for k in range(self.size)
        ]
        xs = [torch.stack(column) for column in zip(*[xs for xs, _ in made])]
        return xs, Report(*[torch.stack(column) for column in zip(*[report for _, report in made])])

    def announce(self, report: Report) -> None:
        self.one.announce(report)

    def jvp(self, xs: Values, tensors: Values, places: Sequence[int], tangents: Values) -> Values:
        n, m = len(xs), len(tensors)

        def rule(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.one.jvp(values[:n], values[n : n + m], places, values[n + m :]))

        found: Any = self._map(rule, [*[0] * n, *self.dims, *[self.dims[i] for i in places]])(*xs, *tensors, *tangents)
        return found

    def vjp(self, xs: Values, tensors: Values, places: Sequence[int], grads: Values) -> Values:
        n, m = len(xs), len(tensors)

        def rule(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.one.vjp(values[:n], values[n : n + m], places, values[n + m :]))

        dims = [self.dims[i] for i in places]
        out_dims = tuple(0 if d is None else d for d in dims)
        found = self._map(rule, [*[0] * n, *self.dims, *[0] * n], out_dims=out_dims)(*xs, *tensors, *grads)
        return [g.sum(0) if d is None else g for g, d in zip(found, dims)]


def _attempt_as_tuple(problem: Problem, tensors: Values) -> Any:
    xs, report = problem.attempt(tensors, False)
    return tuple(xs), tuple(report)


# -- the operator -----------------------------------------------------------------------------------------------------


class _Rule(Derivative):
    """The derivative of the operator, for so many tensors and results; the first value is the problem's number."""

    pure = False

    def __init__(self, inputs: int, outputs: int) -> None:
        self.outputs, self.run = outputs, self._run
        arguments = ", ".join(f"Tensor t{i}" for i in range(inputs))
        returns = ", ".join(f"Tensor x{i}" for i in range(outputs))
        super().__init__(_solve, Signature(f"manualgrad_implicit::solve(int problem, {arguments}) -> ({returns})"))

    def _packed(self, found: Sequence[Tensor]) -> Any:
        return tuple(found) if self.outputs > 1 else found[0]

    def _run(self, number: int, *tensors: Tensor) -> Any:
        return self._packed(_solve(number, list(tensors)))

    def redispatch(self, keyset: Any, values: Sequence[Any]) -> Any:
        return self._packed(redispatch(_solve, _signature, keyset, [values[0], list(values[1:])]))

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        return [*outputs, *inputs[1:]], _problems[inputs[0]]

    def vjp(
        self, needed: Sequence[Any], tensors: Sequence[Tensor | None], static: Any, grads: Sequence[Any]
    ) -> Sequence[Any]:
        saved = [unwrap_if_dead(x) for x in tensors]  # type: ignore[arg-type]
        xs, given = saved[: self.outputs], saved[self.outputs :]
        places = [i for i, yes in enumerate(needed[1:]) if yes]
        full = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, xs)]
        found: list[Any] = [None] * len(needed)
        with saved_tensors_unhooked():
            for i, g in zip(places, _over_batches(lambda grads: static.vjp(xs, given, places, grads), full)):
                found[i + 1] = g
        return found

    def jvp(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        places = [i for i, t in enumerate(tangents[1:]) if isinstance(t, Tensor)]
        if in_functorch() and not innermost_is_jvp():
            raise RuntimeError(
                "torch_manualgrad.implicit: a dual number that was made inside of torch.func.grad or vjp, with "
                "forward_ad.make_dual, has no derivative here; use torch.func.jvp in place of it"
            )
        problem, moving = _problems[inputs[0]], [tangents[i + 1] for i in places]

        def rule(xs: Values, tensors: Values, tangents: Values) -> Values:
            return _over_batches(lambda tangents: problem.jvp(xs, tensors, places, tangents), tangents)

        with saved_tensors_unhooked():
            # the rule starts transforms, which is impossible at this level, in the middle of the call
            found: Sequence[Any] = at_next_level(rule, list(outputs), list(inputs[1:]), moving)
        return found


def _over_batches(rule: Callable[[Values], Values], values: Values) -> Values:
    """``rule(values)``; for gradients batched by PyTorch (``is_grads_batched``), by torch.func.vmap."""
    outside, dims, level = outside_of_batched_gradients(values)
    if not level:
        return rule(values)
    return inside_of_batched_gradients(
        torch.vmap(lambda *values: tuple(rule(values)), in_dims=tuple(dims))(*outside), level
    )


_rule = functools.cache(_Rule)


def _autograd(keyset: Any, number: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    values = [number, *tensors]
    rule = _rule(len(tensors), _problems[number].count)
    mode = differentiated(rule.signature, values)
    if mode in (Mode.NOTHING, Mode.PLAIN_NOTHING):
        return redispatch(_solve, _signature, keyset, [number, list(tensors)])
    found = apply(rule, keyset, mode, values)
    return [found] if isinstance(found, Tensor) else list(found)


_ESCAPED = (
    "torch_manualgrad.implicit calls the solver and the functions outside of all transforms. One of them reads a tensor of a "
    "transform that is not an argument: pass it as a parameter."
)


def _kernel(number: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    problem = _problems[number]
    # the solver runs outside of all transforms and tangents, and untracked
    with in_clean_state(), transforms_in_dual_level(), torch.no_grad():
        try:
            xs, report = problem.attempt([apart_from_levels(x.detach()) for x in tensors], True)
        except RuntimeError as error:
            if any(text in str(error) for text in ("INTERNAL ASSERT", "escaped")):
                explain(error, _ESCAPED)
            raise
        problem.announce(report)
    return _as_traced(problem, tensors, xs) if problem.is_traced else xs


def _as_traced(problem: Problem, tensors: Sequence[Tensor], xs: list[Tensor]) -> list[Tensor]:
    """The solution with the dtypes and strides that a graph expects."""
    made = []
    for x, like in zip(xs, problem.like(tensors)):
        expected = torch.empty_like(like)
        same = x.dtype == expected.dtype and x.stride() == expected.stride()
        made.append(x if same else expected.copy_(x))
    return made


def _batch(info: Any, in_dims: Any, number: int, tensors: Sequence[Tensor]) -> Any:
    if info.batch_size == 0:
        raise RuntimeError("torch_manualgrad.implicit: a batch of size 0 under vmap has no element to solve for")
    batched = Batched(_problems[number], in_dims[1], info.batch_size, info.randomness)
    found = solution(batched, tensors)
    return found, [0] * len(found)


def _fake(number: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(x) for x in _problems[number].like(tensors)]


def _jvp(inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
    rule = _rule(len(inputs[1]), len(outputs[0]))
    return [rule.jvp([inputs[0], *inputs[1]], outputs[0], [None, *tangents[1]])]


jvps[_solve.name()] = _jvp
_library.impl("solve", skipped_by_dynamo(_autograd), "Autograd", with_keyset=True)
_library.impl("solve", skipped_by_dynamo(_kernel), "CompositeExplicitAutograd")
torch.library.register_fake("manualgrad_implicit::solve", _fake, lib=_library)
torch.library.register_vmap("manualgrad_implicit::solve", _batch, lib=_library)
