"""Functions with a custom jvp; the vjp is its transpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import ArgumentError, described
from ..core.closures import Copies
from ..core.internals import constants_unwritten, pytree
from ..programs.functions import Values, placed
from ..programs.operator import filled
from .function import Call, CustomFunction
from .linear import transposed
from .tracing import marked_parts, moving
from .trees import check_leaf, distinct, matching_tree, of_structure, result_tree

__all__ = ["CustomJvp", "custom_jvp"]


class JvpCall(Call):
    """A call of a function with a jvp."""

    function: CustomJvp

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        ((rule, self._what),) = self.function.as_of_now(Copies()).rules
        self._fun, self._jvp = self.function.in_autocast(self.function.fun), self.function.in_autocast(rule)

    def run(self, tensors: Values) -> list[Tensor]:
        result = result_tree(self.first(self._fun, self.function.name, tensors), self.function.name)
        made = distinct(result.tensors, tensors)
        result.release()
        self.out = result
        return made

    def needed(self, count: int, inputs: int) -> tuple[Sequence[int], Sequence[int]]:
        return (), range(inputs)

    def _pushed(
        self, tensors: Sequence[Any], like: Sequence[Any], moving: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The result of the rule: a tangent for each result."""
        primals, tangents = self.arguments.join(tensors), self.arguments.tangents(moving)
        with constants_unwritten(tangents, self._what):
            found = self.again(self._jvp, *self.nondiff, primals, tangents)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise ArgumentError(f"{self._what}: expected a pair (out, tangent of out), got {described(found)}")
        out = matching_tree(found[0], self.result, f"{self._what}: out")
        for given, x in zip(out.tensors, like):  # its numbers are not read
            if given.shape != x.shape:
                raise ArgumentError(
                    f"{self._what}: out: expected a tensor of shape {list(x.shape)}, as the function returned, "
                    f"got {described(given)}"
                )
        leaves = of_structure(found[1], self.result.spec, f"{self._what}: the tangent of out")
        picked = [leaf for leaf, yes in zip(leaves, self.result.is_tensor) if yes]
        return [check_leaf(leaf, x, f"{self._what}: the tangent of out") for leaf, x in zip(picked, like)]

    def jvp(
        self, xs: Values, tensors: Values, places: Sequence[int], tangents: Values, keeps: bool
    ) -> Sequence[Tensor | None]:
        moving = filled(placed([None] * len(tensors), places, tangents), tensors)
        return self.watched(lambda: self._pushed(tensors, xs, moving), self._what)

    def vjp(
        self, xs: Sequence[Any], tensors: Sequence[Any], places: Sequence[int], grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        def pushed(tangents: Sequence[Tensor]) -> Sequence[Tensor | None]:
            return self._pushed(tensors, xs, filled(placed([None] * len(tensors), places, tangents), tensors))

        names = ["the result"] * len(xs)
        return transposed(pushed, [tensors[i] for i in places], grads, self._what, names)


class CustomJvp(CustomFunction):
    """A function with the jvp of a rule, made by `custom_jvp`."""

    kind = "custom_jvp"
    jvp: Callable[..., Any] | None = None

    def defjvp(self, jvp: Callable[..., Any]) -> Callable[..., Any]:
        """Define the rule. It can be a decorator.

        Args:
            jvp: ``(*nondiff_args, primals, tangents) -> (out, tangent of out)``, where primals is a tuple of the other
                arguments, and tangents has the same structure. The tangent of a Python float or complex number is zero;
                that of a leaf that is not a floating point or complex tensor is None. None in the tangent of out is
                zero. For reverse mode jvp must be linear in the tangents, and consist of differentiable operations.

        Returns:
            The function.

        Raises:
            TypeError: it is not a function.
        """
        if not callable(jvp):
            raise TypeError(f"defjvp: jvp: expected a function, got {described(jvp)}")
        self.jvp = jvp
        return jvp

    def defjvps(self, *jvps: Callable[..., Any] | None) -> None:
        """Define the rule by one function for each argument. The tangent of the result is their sum.

        Args:
            jvps: ``(tangent, out, *primals) -> tangent of out`` for each argument; None for zero.

        Raises:
            TypeError: one is not a function.
            ArgumentError: the function has ``nondiff_argnums``.
        """
        if self.nondiff_argnums:
            raise ArgumentError("defjvps: expected a function without nondiff_argnums; use defjvp")
        for i, one in enumerate(jvps):
            if one is not None and not callable(one):
                raise TypeError(f"defjvps: expected functions or None, got {described(one)} for argument {i}")

        def jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
            if len(jvps) != len(primals):
                raise ArgumentError(f"defjvps: {self.name} has {len(primals)} arguments, and {len(jvps)} functions")
            out = self(*primals)
            total: Any = None
            for one, t in zip(jvps, tangents):
                if one is None or all(x is None for x in pytree.tree_leaves(t)):
                    continue
                term = one(t, out, *primals)
                total = term if total is None else pytree.tree_map(torch.add, total, term)
            return out, total

        jvp.__name__ = f"jvps of {self.name}"
        self.jvp = jvp

    @property
    def rules(self) -> list[tuple[Callable[..., Any], str]]:
        if self.jvp is None:
            raise AttributeError(f"{self.name}: no rule is defined for this custom_jvp; call {self.name}.defjvp(jvp)")
        return [(self.jvp, f"the jvp of {self.name}")]

    def traced_rule(self, arguments: Sequence[Any], nondiff: Sequence[Any], moved: Sequence[Any], result: Any) -> Any:
        ((jvp, what),) = self.rules
        tangents = moving(moved, "tangent", self.number)
        found = jvp(*nondiff, moved, tangents)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise ArgumentError(f"{what}: expected a pair (out, tangent of out), got {described(found)}")
        return tangents, marked_parts([found[1]], [result], what, "moved", self.number)

    def _made(
        self, names: Sequence[str], args: Sequence[Any], known: dict[int, tuple[Tensor, str]], compiled: bool
    ) -> Call:
        return JvpCall(self, names, args, known, compiled)


def custom_jvp(fun: Any = None, *, nondiff_argnums: int | Sequence[int] = ()) -> Any:
    """Define the jvp of a function of tensors. All modes of differentiation use it, at every order.

    The names are those of ``jax.custom_jvp``. The vjp is the transpose of the jvp.

        @mg.custom_jvp
        def f(x, y):
            return torch.sin(x) * y

        @f.defjvp
        def f_jvp(primals, tangents):
            x, y = primals
            dx, dy = tangents
            return f(x, y), torch.cos(x) * dx * y + torch.sin(x) * dy

    Args:
        fun: the function, of pytrees; tensors among its leaves are differentiated. Without it, a decorator is returned.
        nondiff_argnums: positions of arguments that are not differentiated, such as functions. They are passed to the
            rule before the primals, and must not contain tensors tracked by autograd or a transform.

    Returns:
        `CustomJvp`, which is called like the function. Its methods ``defjvp(jvp)`` and ``defjvps(*jvps)`` define the rule.

    Raises:
        HiddenTensorError: in a call: the function reads a tracked tensor that is not an argument.
        ArgumentError: in a call or a backward: the rule returned a tree or tensor of another shape.
        NotImplementedError: in a call: an argument is a Taylor series.

    Note:
        The value of the result is that of the function, and its derivative that of the rule at every order, as if the
        rule called the function. A backward calls the rule again.

    References:
        ``jax.custom_jvp``.
    """
    if fun is None:
        return lambda fun: CustomJvp(fun, nondiff_argnums)
    return CustomJvp(fun, nondiff_argnums)
