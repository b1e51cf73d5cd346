"""Linear operators that depend on parameters: products, their adjoints, and the Jacobian of a function.

An operator acts on lists of tensors. `Operator.at` fixes its parameters and does the work common to all products; the
products are differentiable in the parameters at every outer level.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..core.override.override import under_active_rules
from ..programs.functions import Values, pull_back

__all__ = ["Adjoint", "JacobianAdjoint", "Matvec", "Operator"]


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
        return pull_back(under_active_rules(lambda *values: self.function(values, rest)), xs)[1]
