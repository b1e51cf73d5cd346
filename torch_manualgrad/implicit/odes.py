"""Initial value problems of ordinary differential equations.

$dy/dt = f(t, y, p)$ with $y(t_0) = y_0$. A tangent and a cotangent are solutions of such equations too,

    $d y^. / dt = f_y y^. + f_p p^.$    from $t_0$ to $t$,
    $da / dt = -f_y^H a$,   $dq / dt = -f_p^H a$    from $t$ back to $t_0$, where $a = dL/dy_0$ and $q = dL/dp$,

each solved together with $y$, by the same operator: derivatives of higher order follow.

The cotangent needs $y$ backward in time. If a system forgets its start, this integration is unstable: errors grow as
much as they shrink forward. So $y$ is first integrated forward once more, from its known start. Its states at up to
`KNOTS` of the steps are kept. The backward integration restarts $y$ from each of them, and checks its error there.

References:
    Pontryagin et al., The Mathematical Theory of Optimal Processes (1962); Chen et al., Neural Ordinary Differential
    Equations, NeurIPS 2018, appendix B; for the states that are kept, Gholami, Keutzer and Biros, ANODE, IJCAI 2019.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..arguments import ArgumentError, checked, described
from ..core.internals import pytree
from ..programs.functions import Values, in_this_autocast, placed, pull_back, push_forward
from ..programs.operator import filled
from .arguments import Unknown, check_function
from .equations import called
from .graphs import Node, solvers
from .problem import Problem, solution
from .runge_kutta import SCIPY, Path, dormand_prince, of_scipy
from .solving import Options, Report
from .vectors import Layout, Structure

__all__ = ["METHODS", "Ode", "odeint"]

METHODS = ("dopri5", *[f"scipy.{name}" for name in SCIPY])

KNOTS = 128  # states that a backward integration keeps; up to twice as many
_OFF = 1000  # times the tolerance: by how much it may miss them
_FADED = 1e-6  # of the largest tangent or cotangent at the start: below, accuracy is absolute

Function = Callable[[Tensor, Values, Values], Values]


class Ode(Problem):
    """An initial value problem. The tensors are the times, the start, what `known` has at the last time, and parameters.

    Args:
        function: $f$, ``(t, ys, parameters) -> slopes``.
        count: how many tensors $y$ has.
        options: ``solver`` is one of `METHODS`, or a function.
        name: in messages.
        plain: how many of the first tensors of $y$ are the user's own, with absolute tolerances. The others are tangents
            and cotangents, whose scale is their own.
        known: the places of tensors of $y$ that are unstable in this direction, known at the last time, and do not
            depend on the others. There are two times then.
        inner: the problem of these alone.
    """

    def __init__(
        self,
        function: Function,
        count: int,
        options: Options,
        name: str,
        plain: int,
        known: Sequence[int] = (),
        inner: Ode | None = None,
    ) -> None:
        super().__init__()
        self.function, self.count, self.options, self.name, self.plain = function, count, options, name, plain
        self.known, self.inner = tuple(known), inner
        self._others: dict[tuple[str, tuple[int, ...]], Ode] = {}

    def _split(self, tensors: Values) -> tuple[Tensor, Values, Values, Values]:
        m, c = self.count, len(self.known)
        return tensors[0], tensors[1 : 1 + m], tensors[1 + m : 1 + m + c], tensors[1 + m + c :]

    def like(self, tensors: Values) -> Values:
        t, ys, _, _ = self._split(tensors)
        return [y.expand(t.shape[0], *y.shape) for y in ys]

    # -- the solution -------------------------------------------------------------------------------------------------

    def attempt(self, tensors: Values, readable: bool) -> tuple[list[Tensor], Report]:
        t, ys, ends, parameters = self._split(tensors)
        times = t.tolist()
        steps = [b - a for a, b in itertools.pairwise(times)]
        if not all(s > 0 for s in steps) and not all(s < 0 for s in steps):
            raise ArgumentError(f"t: expected strictly increasing or strictly decreasing times, got {described(times)}")
        path, off = self._path(times, ys, ends, parameters, t.dtype)
        layout = Layout(ys, True)
        rows = [layout.tensors(state) for state in path.states]
        xs = [torch.stack([y, *rest]) for y, *rest in zip(ys, *rows[1:])]
        # as relative errors: for steps they are at most rtol by construction
        tolerance = _OFF * self.options.relative(layout.dtype, 1 / 2)
        report = [torch.inf if path.failed else off * tolerance / _OFF, tolerance, False]
        return xs, Report(*[torch.as_tensor(x, device=t.device) for x in report])

    def _path(
        self, times: Sequence[float], ys: Values, ends: Values, ps: Values, dtype: torch.dtype, keep: int = 0
    ) -> tuple[Path, float]:
        """The solution with ``keep`` knots or more, and the error at known states, in units of the tolerance."""
        layout = Layout(ys, True)

        def slope(t: Any, y: Tensor) -> Tensor:
            time = torch.as_tensor(t, dtype=dtype, device=y.device)
            return layout.vector(self.function(time, layout.tensors(y), ps))

        y = layout.vector(ys)
        if self.inner is None:
            return self._integrated(slope, y, times, layout, self._sizes(y, layout), 0.0, keep), 0.0
        starts = [ys[i] for i in self.known]
        other, off = self.inner._path(times[::-1], ends, [starts[i] for i in self.inner.known], ps, dtype, KNOTS)
        if other.failed:
            return Path([torch.full_like(y, torch.nan)] * len(times), [], 0.0, True), off
        part = Layout(starts, True)
        sizes, part_sizes = self._sizes(y, layout), self._sizes(part.vector(starts), part)
        taken = other.knots[:: -(-len(other.knots) // (2 * KNOTS))]  # scipy's methods show all
        largest = torch.stack([state.abs() for _, state in taken]).amax(0)
        knots, step = [(times[0], y)], 0.0
        for time, state in reversed(taken):
            if time == knots[-1][0]:
                continue
            path = self._integrated(slope, y, [knots[-1][0], time], layout, sizes, step, min(keep, 2))
            if path.failed:
                return path, off
            step, found = path.step, layout.tensors(path.states[-1])
            here = part.vector([found[i] for i in self.known])
            off = max(off, part_sizes(here - state, largest, largest))
            y = layout.vector(placed(found, self.known, part.tensors(state)))
            between = [(s, x) for s, x in path.knots[1:] if s != time]
            knots = [*knots, *between, (time, y)] if keep else [knots[0], (time, y)]
        return Path([knots[0][1], y], knots, step, False), off

    def _integrated(
        self, slope: Any, y: Tensor, times: Sequence[float], layout: Layout, sizes: Any, step: float, keep: int
    ) -> Path:
        method, rtol = self.options.solver, self.options.relative(layout.dtype, 1 / 2)
        if callable(method):
            states = method(slope, y, torch.tensor(times, dtype=y.dtype, device=y.device))
            if not isinstance(states, Tensor) or states.shape != (len(times), *y.shape):
                raise ArgumentError(
                    f"method: expected states of shape {[len(times), *y.shape]}, got {described(states)}"
                )
            failed = not bool(states.isfinite().all())
            return Path([y, *states.to(y.dtype)[1:]], list(zip(times, states.to(y.dtype))), 0.0, failed)
        if method == "dopri5":
            maxiter = 10_000 if self.options.maxiter is None else self.options.maxiter
            return dormand_prince(slope, y, times, sizes, maxiter, step, keep)
        absolute, own = torch.full_like(y, self.options.atol), sum(layout.sizes[: self.plain])
        if y[own:].count_nonzero():
            absolute[own:] = rtol * y[own:].abs().max()
        return of_scipy(method.partition(".")[2], slope, y, times, rtol, absolute)

    def _sizes(self, y: Tensor, layout: Layout) -> Callable[[Tensor, Tensor, Tensor], float]:
        """The size of an error in units of the tolerance: the largest over the tensors.

        For the user's own tensors it is the root mean square over the elements, each relative to its own tolerance; for
        tangents and cotangents it is relative to the root mean square of the tensor.
        """
        options, parts, plain = self.options, layout.sizes, self.plain
        rtol = options.relative(layout.dtype, 1 / 2)
        faded = max([float(p.square().mean()) for p in y.split(parts)[plain:] if p.numel()], default=0.0) * _FADED**2

        def size(error: Tensor, before: Tensor, after: Tensor) -> float:
            found = []
            scale = torch.maximum(before.abs(), after.abs())
            for i, (e, s) in enumerate(zip(error.split(parts), scale.split(parts))):
                if e.numel() and i < plain:
                    found.append((e / (options.atol + rtol * s)).square().mean())
                elif e.numel():
                    ratio = e.square().mean() / (rtol**2 * (s.square().mean() + faded))
                    found.append(torch.where((e == 0).all(), 0, ratio))
            return float(torch.stack(found).max().sqrt()) if found else 0.0

        return size

    def announce(self, report: Report) -> None:
        advice = (
            "Loosen rtol, raise maxiter, choose a method for stiff equations, such as 'scipy.LSODA', or ask for the state "
            "at more times."
        )
        report.announce(self.name, self.options.on_failure, advice)

    # -- its derivatives ----------------------------------------------------------------------------------------------

    def _slopes(self, t: Tensor, xs: Values, parameters: Values) -> list[Tensor]:
        """$f$ at all times."""
        rows = [self.function(t[i], [x[i] for x in xs], parameters) for i in range(len(t))]
        return [torch.stack(list(column)) for column in zip(*rows)]

    def _tangent(self, moving: tuple[int, ...]) -> Ode:
        """The problem of $y$ and its tangent. Its parameters are followed by the tangents of those at ``moving``."""
        key, m = ("tangent", moving), self.count
        if key not in self._others:

            def function(t: Tensor, state: Values, tensors: Values) -> list[Tensor]:
                split = len(tensors) - len(moving)
                ps, tangents = tensors[:split], tensors[split:]

                def slopes(*changed: Tensor) -> Values:
                    return self.function(t, changed[:m], placed(ps, moving, changed[m:]))

                primals = [*state[:m], *[ps[i] for i in moving]]
                change = push_forward(slopes, primals, [*state[m:], *tangents])
                return [*self.function(t, state[:m], ps), *change]

            known = [*self.known, *[m + i for i in self.known]]
            inner = None if self.inner is None else self.inner._tangent(moving)
            name = f"the derivative of {self.name}"
            self._others[key] = Ode(function, 2 * m, self.options, name, self.plain, known, inner)
        return self._others[key]

    def _adjoint(self, moving: tuple[int, ...]) -> Ode:
        """The problem of $y$, its cotangent, and those of the parameters at ``moving``, backward in time."""
        key, m = ("adjoint", moving), self.count
        if key not in self._others:

            def function(t: Tensor, state: Values, ps: Values) -> list[Tensor]:
                def slopes(*changed: Tensor) -> Values:
                    return self.function(t, changed[:m], placed(ps, moving, changed[m:]))

                values, pull = pull_back(slopes, [*state[:m], *[ps[i] for i in moving]])
                return [*values, *[-x for x in pull(state[m : 2 * m])]]

            name = f"the derivative of {self.name}"
            count = 2 * m + len(moving)
            self._others[key] = Ode(function, count, self.options, name, self.plain, range(m), self)
        return self._others[key]

    def jvp(self, xs: Values, tensors: Values, places: Sequence[int], tangents: Values, keeps: bool) -> Values:
        t, ys, ends, ps = self._split(tensors)
        given, m, c = dict(zip(places, tangents)), self.count, len(self.known)
        changes = [given[i] if i in given else torch.zeros_like(x) for i, x in enumerate(tensors[: 1 + m + c])]
        time, start, end = changes[0], changes[1 : 1 + m], changes[1 + m :]
        if 0 in given:  # the tangents of the path are for fixed times
            start = [d - f * time[0] for d, f in zip(start, self.function(t[0], ys, ps))]
            if self.inner is not None:
                end = [d - f * time[-1] for d, f in zip(end, self.inner.function(t[-1], ends, ps))]
        moving = tuple(i for i in range(len(ps)) if 1 + m + c + i in given)
        moved = [given[1 + m + c + i] for i in moving]
        found = solution(self._tangent(moving), [t, *ys, *start, *ends, *end, *ps, *moved])[m:]
        if 0 in given:
            slopes = self._slopes(t, xs, ps)
            found = [d + f * time.reshape(-1, *[1] * (f.dim() - 1)) for d, f in zip(found, slopes)]
        return [d.to(x.dtype) for d, x in zip(found, xs)]

    def vjp(self, xs: Values, tensors: Values, places: Sequence[int], grads: Sequence[Tensor | None]) -> Values:
        t, ys, ends, ps = self._split(tensors)
        m, first = self.count, 1 + self.count + len(self.known)
        moving = tuple(i - first for i in places if i >= first)
        adjoint = self._adjoint(moving)
        full = filled(grads, xs)
        a, q = [g[-1] for g in full], [torch.zeros_like(ps[i]) for i in moving]
        for i in range(len(t) - 1, 0, -1):
            here, before = [x[i] for x in xs], ys if i == 1 else [x[i - 1] for x in xs]
            state = solution(adjoint, [torch.stack([t[i], t[i - 1]]), *here, *a, *q, *before, *ps])
            last = [x[-1] for x in state]
            a, q = last[m : 2 * m], last[2 * m :]
            if i > 1:
                a = [x + g[i - 1] for x, g in zip(a, full)]
        found: dict[int, Tensor] = dict(enumerate(torch.zeros_like(x) for x in tensors[:first]))
        if len(t) > 1:
            found.update((1 + k, x + g[0]) for k, (x, g) in enumerate(zip(a, full)))
        else:
            found.update((1 + k, x) for k, x in enumerate(a))
        if 0 in places and len(t) > 1:
            rows = [_dot(g[1:], f[1:]) for g, f in zip(full, self._slopes(t, xs, ps))]
            start = [_dot(x[None], f[None]) for x, f in zip(a, self.function(t[0], ys, ps))]
            found[0] = torch.cat([-torch.stack(start).sum(0), torch.stack(rows).sum(0)]).to(t.dtype)
        found.update(zip([first + i for i in moving], q))
        return [found[i] for i in places]


def _dot(g: Tensor, f: Tensor) -> Tensor:
    """The real part of the dot product in all dims but the first."""
    product = (g.conj() * f).real if g.is_complex() else g * f
    return product if product.dim() == 1 else product.sum(tuple(range(1, product.dim())))


@checked
def odeint(
    f: Callable[..., Any],
    y0: Any,
    t: Tensor,
    *params: Any,
    method: str | Callable[..., Any] = "dopri5",
    rtol: float | None = None,
    atol: float | None = None,
    maxiter: int | None = None,
    on_failure: Literal["warn", "raise", "ignore"] = "warn",
) -> Any:
    """The solution of $dy/dt = f(t, y, params)$ with $y(t_0) = y_0$ at the times $t$; derivatives of every order.

    The solver runs without a graph. A vjp solves the adjoint equation backward in time, a jvp the equation of the tangent.
    Derivatives are as accurate as the solution.

    Args:
        f: ``f(t, y, *params)``, differentiable; $t$ has no dims, and the result has the structure and the shapes of
            $y$. Tensors that it reads, other than arguments, must not require grad.
        y0: a tensor, or a tree of tensors, of any shape (*), real or complex.
        t: (n,), strictly increasing or strictly decreasing; $y_0$ is at the first.
        params: trees of anything.
        method: "dopri5", the method of Dormand and Prince; "scipy.RK45", "scipy.RK23", "scipy.DOP853", "scipy.Radau",
            "scipy.BDF" and "scipy.LSODA" on the CPU, the last three also for stiff equations; or ``(f, y0, t) ->
            states`` with ``f(t, y)`` and states of vectors of real numbers, such as torchdiffeq's.
        rtol: relative tolerance of a step; None: eps^(1/2) of the dtype.
        atol: absolute tolerance of a step; None: as rtol. Tangents and cotangents have their own scale.
        maxiter: the most steps from one time to the next, of dopri5; None: 10,000.
        on_failure: as in `root`, if the solver gave up, or $y$ cannot be integrated backward in time.

    Returns:
        The states, of the structure of $y_0$: (n, *). The first is $y_0$. Under vmap the solver is called for each element
        of the batch.

    Raises:
        TypeError: an argument is not of its type, or $y_0$ or $t$ is not floating point.
        ValueError: ``f`` returns another structure, the times are not monotone, or a tolerance or name is invalid.
        HiddenTensorError: ``f`` reads a tensor that requires grad and is not an argument.

    Note:
        Where not differentiable: in the time of an event, such as a bounce. Across points where ``f`` is not
        differentiable the derivative exists, but is less accurate.

    References:
        Dormand and Prince, J. Comput. Appl. Math. 6 (1980) 19; Chen et al., Neural Ordinary Differential Equations,
        NeurIPS 2018.
    """
    options = dict(method=method, rtol=rtol, atol=atol, maxiter=maxiter, on_failure=on_failure)

    def at(y: Any, t: Tensor, *params: Any) -> Any:
        return f(t[0], y, *params)

    return called(_solved, [(f, "f")], y0, (t, *params), options, Node(_NUMBER, (at,), ("x",), _states))


def _states(y0: Any, params: Sequence[Any], results: Sequence[Any]) -> Any:
    """Tensors like the states at all times."""
    return pytree.tree_map(lambda y: y.new_empty(params[0].shape[0], *y.shape), y0)


def _solved_in_graph(functions: Sequence[Any], wrapped: Any, y0: Any, params: Sequence[Any], **options: Any) -> Any:
    (at,) = functions
    return _solved([lambda t, y, *params: at(y, t.reshape(1), *params)], wrapped, y0, params, **options)


_NUMBER = "odeint"
solvers[_NUMBER] = _solved_in_graph


def _solved(
    functions: Sequence[Callable[..., Any]],
    wrapped: Callable[[Any], Any],
    y0: Any,
    params: Sequence[Any],
    *,
    method: str | Callable[..., Any],
    rtol: float | None,
    atol: float | None,
    maxiter: int | None,
    on_failure: str,
) -> Any:
    (f,), (t, *rest) = functions, params
    if isinstance(method, str):
        if method not in METHODS:
            names = ", ".join(map(repr, METHODS))
            raise ArgumentError(f"method: expected one of {names} or a function, got {method!r}")
        if method.startswith("scipy.") and importlib.util.find_spec("scipy") is None:
            raise ModuleNotFoundError(f"method={method!r} needs scipy, which is not installed")
    for name, value, least in (("rtol", rtol, 0), ("atol", atol, 0), ("maxiter", maxiter, 1)):
        if value is not None and not value >= least:
            raise ArgumentError(f"{name}: expected at least {least}, got {value}")
    if not t.is_floating_point():
        raise TypeError(f"t: expected floating point times, got {described(t)}")
    if t.dim() != 1 or not len(t):
        raise ArgumentError(f"t: expected a vector of at least one time, got shape {list(t.shape)}")
    y, given = Unknown(y0, "y0"), Structure(rest)
    start, tensors = y.split(y0), given.split(rest)
    here = in_this_autocast(f)

    def function(time: Tensor, ys: Values, ps: Values) -> list[Tensor]:
        return y.values(here(time, y.join(ys), *given.join(ps)), "f", ys)

    ends = lambda xs, ps: [s for i in (0, -1) for s in function(ps[0][i], xs, ps[1:])]  # noqa: E731
    check_function(ends, "f", start, [t, *tensors])
    options = Options(method, rtol, 0.0, maxiter, on_failure)
    tolerance = options.relative(Layout(start, True).dtype, 1 / 2) if atol is None else atol
    problem = Ode(function, len(start), options._replace(atol=tolerance), "odeint", len(start))
    return y.join(solution(problem, [t, *start, *tensors]))
