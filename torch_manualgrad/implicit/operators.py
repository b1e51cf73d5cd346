"""Linear operators that depend on parameters: products, their adjoints, and the Jacobian of a function.

An operator acts on lists of tensors. `Operator.at` fixes its parameters and does the work common to all products; the
products are differentiable in the parameters at every outer level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.forward import is_in_forward_ad
from ..core.internals import only_autograd_and_own_levels

__all__ = ["Adjoint", "JacobianAdjoint", "Matvec", "Operator", "matching", "pull_back", "push_forward"]

Values = Sequence[Tensor]


class Operator:
    """A linear operator on lists of tensors.

    Attributes:
        real: whether it may be linear over the real numbers only, although the tensors are complex.
    """

    real = False
    transposed: Operator  # the adjoint

    def at(self, parameters: Values, like: Values) -> Callable[[Values], Values]:
        """The products with these parameters, for tensors with the shapes and dtypes of ``like``."""
        raise NotImplementedError


class Matvec(Operator):
    """The products that a function ``(values, parameters)`` computes."""

    def __init__(self, function: Callable[[Values, Values], Values], symmetric: bool = False) -> None:
        self.function = function
        self.transposed = self if symmetric else Adjoint(self)

    def at(self, parameters: Values, like: Values) -> Callable[[Values], Values]:
        return lambda values: self.function(values, parameters)


class Adjoint(Operator):
    """The adjoint of an operator, by reverse mode."""

    def __init__(self, of: Operator) -> None:
        self.transposed, self.real = of, of.real

    def at(self, parameters: Values, like: Values) -> Callable[[Values], Values]:
        # the same at every point: the operator is linear
        point = [torch.ones_like(x) for x in like]
        product = self.transposed.at(parameters, like)
        return pull_back(lambda *values: product(values), point)[1]


class JacobianAdjoint(Operator):
    """The adjoint of the Jacobian of ``function(xs, parameters)`` in ``xs``; its parameters are ``xs`` and the others."""

    real = True

    def __init__(self, function: Callable[[Values, Values], Values], count: int, symmetric: bool = False) -> None:
        self.function, self.count = function, count
        self.transposed = self if symmetric else Adjoint(self)

    def at(self, parameters: Values, like: Values) -> Callable[[Values], Values]:
        xs, rest = parameters[: self.count], parameters[self.count :]
        return pull_back(lambda *values: self.function(values, rest), xs)[1]


def matching(values: Values, like: Values) -> list[Tensor]:
    """The values in the dtypes of other tensors."""
    return [v if v.dtype == x.dtype else v.to(x.dtype) for v, x in zip(values, like)]


def pull_back(function: Callable[..., Values], primals: Values) -> tuple[Values, Callable[[Values], Values]]:
    """The results of a function, and its vjp, which can be called repeatedly."""
    if only_autograd_and_own_levels():
        return _plain_pull_back(function, primals)
    pair: Any = torch.func.vjp(lambda *values: tuple(function(*values)), *primals)
    results, pull = pair

    def vjp(cotangents: Values) -> Values:
        found: Any = pull(tuple(matching(cotangents, results)))
        return found

    return results, vjp


def _plain_pull_back(function: Callable[..., Values], primals: Values) -> tuple[Values, Callable[[Values], Values]]:
    """`pull_back` in plain autograd: faster, and also for compressed sparse tensors, which torch.func cannot wrap."""
    tracked = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [x.view_as(x) if tracked and x.requires_grad else _untracked(x).requires_grad_() for x in primals]
        results = tuple(function(*inputs))

    def vjp(cotangents: Values) -> Values:
        pairs = [(r, c) for r, c in zip(results, matching(cotangents, results)) if r.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if pairs:
            outputs, given = zip(*pairs)
            create = torch.is_grad_enabled()
            found = torch.autograd.grad(
                outputs, inputs, given, retain_graph=True, create_graph=create, allow_unused=True
            )
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs)]

    return results, vjp


def _untracked(x: Tensor) -> Tensor:
    """The tensor without a history, and with its tangents."""
    if not is_in_forward_ad(x):
        return x.detach()
    with torch.no_grad():
        return x.clone()


def push_forward(function: Callable[..., Values], primals: Values, tangents: Values) -> Values:
    """The jvp, as the vjp of the vjp, so that no operator needs forward mode."""
    results, pull = pull_back(function, primals)
    point = [torch.ones_like(r) for r in results]  # the same at every point: the vjp is linear
    return pull_back(lambda *cotangents: pull(cotangents), point)[1](matching(tangents, primals))
