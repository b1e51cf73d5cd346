"""Functions with a custom vjp; the jvp is its transpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..arguments import ArgumentError, described
from ..core.calls_in_graphs import marked
from ..core.closures import Copies
from ..core.schema import is_differentiable
from ..programs.functions import Values, placed, pull_back, push_forward
from ..programs.operator import filled
from .function import Call, CustomFunction
from .linear import transposed
from .tracing import marked_parts, moving
from .trees import Kept, Tree, check_leaf, distinct, of_structure, result_tree

__all__ = ["CustomVjp", "custom_vjp"]


class VjpCall(Call):
    """A call of a function with a vjp."""

    function: CustomVjp
    kept: Kept
    own_are_constants = False  # the residuals that fwd computes

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        (fwd, _), (_, self._what) = self.function.rules
        again, bwd = (rule for rule, _ in self.function.as_of_now(Copies()).rules)
        self._fwd, self._fwd_again, self._bwd = map(self.function.in_autocast, (fwd, again, bwd))

    def _pair(self, found: Any) -> tuple[Any, Any]:
        if not isinstance(found, tuple) or len(found) != 2:
            raise ArgumentError(
                f"{self.function.rules[0][1]}: expected a pair (out, residuals), got {described(found)}"
            )
        return found

    def run(self, tensors: Values) -> list[Tensor]:
        out, residuals = self._pair(self.first(self._fwd, self.function.rules[0][1], tensors))
        result = result_tree(out, self.function.name)
        results = result.tensors
        self.kept = Kept(residuals, tensors, results)
        own = [x.detach() for x in self.kept.own]
        made = distinct(results, tensors)
        result.release()
        self.kept.release()
        self.out = result
        return [*made, *own]

    def needed(self, count: int, inputs: int) -> tuple[Sequence[int], Sequence[int]]:
        own = range(self.outputs, count)
        # residuals that fwd computes are differentiated again by calling fwd
        given = range(inputs) if own and not self.own_are_constants else self.kept.read("input")
        return [*self.kept.read("result"), *own], given

    def _residuals(self, xs: Sequence[Any], tensors: Sequence[Any]) -> Any:
        n = self.outputs
        return self.kept.join(tensors, xs[:n], xs[n:])

    def _pulled(self, residuals: Any, grads: Sequence[Tensor | None], wanted: Sequence[Any]) -> list[Tensor | None]:
        """The result of bwd: a cotangent for each tensor argument; ``wanted`` has None if it is not needed."""
        cotangents = self.result.filled(grads, [None] * len(self.result.is_tensor))
        found = self._bwd(*self.nondiff, residuals, cotangents)
        count = len(self.names)
        if not isinstance(found, (tuple, list)) or len(found) != count:
            raise ArgumentError(
                f"{self._what}: expected a tuple of {count} cotangents, of {', '.join(self.names)}, got {described(found)}"
            )
        leaves: list[Any] = []
        names: list[str] = []
        for value, spec, name in zip(found, self.arguments.spec.children(), self.names):
            one = of_structure(value, spec, f"{self._what}: the cotangent of {name}")
            leaves += one
            names += [name] * len(one)
        picked = [(leaf, name) for leaf, name, yes in zip(leaves, names, self.arguments.is_tensor) if yes]
        return [
            None if x is None else check_leaf(leaf, x, f"{self._what}: the cotangent of {name}")
            for (leaf, name), x in zip(picked, wanted)
        ]

    def vjp(
        self, xs: Sequence[Any], tensors: Sequence[Any], places: Sequence[int], grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        n = self.outputs
        found: dict[int, Tensor | None] = dict.fromkeys(places)
        if any(g is not None for g in grads[:n]):
            wanted = [x if i in found else None for i, x in enumerate(tensors)]
            pulled = self._pulled(self._residuals(xs, tensors), filled(grads[:n], xs), wanted)
            found.update((i, pulled[i]) for i in places)
        own = [] if self.own_are_constants else [i for i in range(n, len(xs)) if grads[i] is not None]
        if own:
            read = self._recomputed(tensors, places, [i - n for i in own])
            given = [g for i in own if (g := grads[i]) is not None]
            for i, g in zip(places, pull_back(read, [tensors[i] for i in places])[1](given)):
                known = found[i]
                found[i] = g if known is None else known + g
        return [found[i] for i in places]

    def _recomputed(
        self, tensors: Sequence[Any], places: Sequence[int], wanted: Sequence[int]
    ) -> Callable[..., list[Tensor]]:
        """The residuals that fwd computes, as a function of the tensors at ``places``."""

        def read(*changed: Tensor) -> list[Tensor]:
            full = placed(tensors, places, changed)
            out, residuals = self._pair(self.again(self._fwd_again, *self.at(full)))
            own = Kept(residuals, full, Tree(out).tensors).own
            return [own[i] for i in wanted]

        return read

    def jvp(
        self, xs: Values, tensors: Values, places: Sequence[int], tangents: Values, keeps: bool
    ) -> Sequence[Tensor | None]:
        n = self.outputs
        moving = placed([None] * len(tensors), places, tangents)
        smooth = [i for i in range(n) if is_differentiable(xs[i])]
        residuals = self._residuals(xs, tensors)

        def pulled(cotangents: Sequence[Tensor]) -> Sequence[Tensor | None]:
            full = placed([None] * n, smooth, cotangents)
            wanted = [None if t is None else x for x, t in zip(tensors, moving)]
            return self.watched(lambda: self._pulled(residuals, full, wanted), self._what)

        names = self.tensor_names
        moved = transposed(pulled, [xs[i] for i in smooth], moving, self._what, names)
        found: list[Tensor | None] = placed([None] * len(xs), smooth, moved)
        own = [i for i in range(n, len(xs)) if is_differentiable(xs[i])] if keeps and not self.own_are_constants else []
        if own:
            read = self._recomputed(tensors, places, [i - n for i in own])
            found = placed(found, own, push_forward(read, [tensors[i] for i in places], tangents))
        return found if keeps else found[:n]


class CustomVjp(CustomFunction):
    """A function with the vjp of a rule, made by `custom_vjp`."""

    kind = "custom_vjp"
    fwd: Callable[..., Any] | None = None
    bwd: Callable[..., Any] | None = None

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Define the rule.

        Args:
            fwd: ``(*args) -> (out, residuals)``, with the arguments of the function. The residuals are any pytree.
            bwd: ``(*nondiff_args, residuals, cotangents) -> cotangents of the other arguments``, a tuple. The
                cotangents have the structure of the result, and None for leaves that are not floating point or complex
                tensors. None in the result of bwd, for an argument or a part of one, is zero. For forward mode bwd must
                be linear in the cotangents, and consist of differentiable operations.

        Raises:
            TypeError: one is not a function.
        """
        for name, function in (("fwd", fwd), ("bwd", bwd)):
            if not callable(function):
                raise TypeError(f"defvjp: {name}: expected a function, got {described(function)}")
        self.fwd, self.bwd = fwd, bwd

    @property
    def rules(self) -> list[tuple[Callable[..., Any], str]]:
        if self.fwd is None or self.bwd is None:
            raise AttributeError(
                f"{self.name}: no rule is defined for this custom_vjp; call {self.name}.defvjp(fwd, bwd)"
            )
        return [(self.fwd, f"the fwd of {self.name}"), (self.bwd, f"the bwd of {self.name}")]

    def traced_rule(self, arguments: Sequence[Any], nondiff: Sequence[Any], moved: Sequence[Any], result: Any) -> Any:
        (fwd, of_fwd), (bwd, of_bwd) = self.rules
        found = fwd(*arguments)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ArgumentError(f"{of_fwd}: expected a pair (out, residuals), got {described(found)}")
        out, residuals = marked(found[0], "out", self.number), marked(found[1], "residual", self.number)
        cotangents = moving(out, "cotangent", self.number)
        grads = bwd(*nondiff, residuals, cotangents)
        if not isinstance(grads, (tuple, list)) or len(grads) != len(moved):
            raise ArgumentError(f"{of_bwd}: expected a tuple of {len(moved)} cotangents, got {described(grads)}")
        return out, residuals, cotangents, marked_parts(grads, moved, of_bwd, "grad", self.number)

    def _made(
        self, names: Sequence[str], args: Sequence[Any], known: dict[int, tuple[Tensor, str]], compiled: bool
    ) -> Call:
        return VjpCall(self, names, args, known, compiled)


def custom_vjp(fun: Any = None, *, nondiff_argnums: int | Sequence[int] = ()) -> Any:
    """Define the vjp of a function of tensors. All modes of differentiation use it, at every order.

    The names are those of ``jax.custom_vjp``. Forward mode is supported too: the jvp is the transpose of the vjp.

        @mg.custom_vjp
        def f(x, y):
            return torch.sin(x) * y

        def fwd(x, y):
            return f(x, y), (torch.cos(x), torch.sin(x), y)

        def bwd(residuals, g):
            cos_x, sin_x, y = residuals
            return cos_x * g * y, sin_x * g

        f.defvjp(fwd, bwd)

    Args:
        fun: the function, of pytrees; tensors among its leaves are differentiated. Without it, a decorator is returned.
        nondiff_argnums: positions of arguments that are not differentiated, such as functions. They are passed to bwd
            before the residuals, and must not contain tensors tracked by autograd or a transform.

    Returns:
        `CustomVjp`, which is called like the function. Its method ``defvjp(fwd, bwd)`` defines the rule.

    Raises:
        HiddenTensorError: in a call: the function, or fwd, reads a tracked tensor that is not an argument.
        ArgumentError: in a call or a backward: fwd or bwd returned a tree or tensor of another shape.
        NotImplementedError: in a call: an argument is a Taylor series.

    Note:
        The result has the derivative of the rule at every order, as if fwd called the function. Residuals that fwd
        computes have the derivatives of fwd's operations. A complex cotangent is the conjugate of JAX's, as in PyTorch.

    References:
        ``jax.custom_vjp``.
    """
    if fun is None:
        return lambda fun: CustomVjp(fun, nondiff_argnums)
    return CustomVjp(fun, nondiff_argnums)
