"""The interface of a derivative: the residuals of a call, and the vjp and jvp that read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..internals import below_autograd, below_autograd_keys, entry, python_function
from ..schema import Signature
from . import sharding

__all__ = ["Derivative", "redispatch"]


def redispatch(op: Any, signature: Signature, keyset: Any, values: Sequence[Any]) -> Any:
    """Call the operator below autograd, with the remaining dispatch keys of the call."""
    args, kwargs = signature.split(values)
    sharding.ensure_registered(op)
    with below_autograd():
        return op.redispatch(keyset & below_autograd_keys, *args, **kwargs)


class Derivative:
    """The derivative of one operator: residuals, vjp and jvp, all in terms of ``values`` (see `schema`).

    Attributes:
        differentiable: for each output, whether it is differentiable; integer outputs never are.
        pure: the vjp uses no autograd inside, and may run below it.
        foreign: the vjp or jvp is not the package's own. It may call `torch.func`.
    """

    pure = True
    foreign = False
    selective = False  # whether `kept` omits some tensors
    run: Any = None  # the forward of a plain call, below autograd; by default the operator
    # if one tensor has a gradient, and `vjp` is just the formula: (*tensors, *static, *grads, mask) -> gradient
    one_vjp: Callable[[Sequence[Any]], Any] | None = None
    functions: Any = None  # the cache of `node.functions`

    def __init__(self, op: Any, signature: Signature, differentiable: Sequence[bool] | None = None) -> None:
        self.op = op
        self.signature = signature
        self.differentiable = tuple(differentiable or [True] * len(signature.returns))
        if self.run is None:
            self.run = python_function(op) or entry(op)

    @property
    def pushed_places(self) -> Sequence[int]:
        """The places of the non-tensor arguments that the jvp reads; by default all."""
        return [i for i in range(len(self.signature.names)) if i not in self.signature.tensor_like]

    @property
    def has_own_jvp(self) -> bool:
        """Whether there is a jvp that is not derived from the vjp."""
        return False

    @property
    def saved_names(self) -> tuple[tuple[str, ...], list[int], tuple[str, ...]]:
        """Attributes of nodes: the names of saved tensors, the indices of those that are lists, the names of constants."""
        return (), [], ()

    def plain_bodies(self) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
        """A faster forward and backward for plain calls than those of `node.plain_function`, if any."""
        return None

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        """The residuals of the backward: tensors, which autograd saves, and anything else."""
        raise NotImplementedError

    def kept(self, tensors: Sequence[Any], needs: tuple[bool, ...]) -> Sequence[Any]:
        """The tensors, with None for those that no gradient needs; ``needs`` has a bool for each tensor input."""
        return tensors

    def is_narrowed(self, tensors: Sequence[Any], grads: Sequence[Any]) -> bool:
        """Whether autocast may have made the outputs narrower than the inputs; the vjp then receives one precision."""
        return False

    def vjp(
        self, needed: Sequence[Any], tensors: Sequence[Tensor | None], static: Any, grads: Sequence[Any]
    ) -> Sequence[Any]:
        """One gradient for each value; ``needed`` and the result have a list for an argument that is a list."""
        raise NotImplementedError

    def jvp(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        """One tangent for each output."""
        raise NotImplementedError

    def redispatch(self, keyset: Any, values: Sequence[Any]) -> Any:
        """The forward, below autograd."""
        return redispatch(self.op, self.signature, keyset, values)

    def run_below(self, values: Sequence[Any]) -> Any:
        """The forward of a plain call, below autograd.

        All values are passed, because the defaults of the schema and of ``torch.<name>`` may differ.
        """
        args, kwargs = self.signature.split(values)
        with below_autograd():
            return self.run(*args, **kwargs)
