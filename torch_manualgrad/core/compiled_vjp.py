"""What a rule may say as data, so that plain calls can go by it without Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .formula import Formula
    from .op import CustomOp

__all__ = ["CompiledVjp"]


class CompiledVjp(NamedTuple):
    """The compiled formula that gives what the rule's vjp gives, in plain calls: these need no Python.

    It stands for the vjp where all floating tensors among its arguments are of one precision, on a device of its
    kernels, and within ``largest``; elsewhere, and where the backward is differentiated, the vjp itself is called.

    Attributes:
        inputs: whose gradients are its results, in their order: a name, or several.
        formula: one with a compiled kernel.
        bind: for parameters of the kernel that are not called as in the rule: the name there, or a value that is not a
            string, or a pair of the name and what stands for None. ``needs_<input>`` is whether that gradient is
            wanted; the result for one that is not is passed over.
        largest: for matrices, the most rows or columns, of a dtype of linear algebra; None: every shape and dtype.
        only: values that constants of the call must have, by their names.
        real: complex numbers are left to the vjp.
        contiguous: inputs and outputs that must be contiguous.
        one_batch: matrices or vectors that must have the batch dims of the first of these, which are matrices.
        square: inputs and outputs that must be square matrices.
        nonzero: inputs and outputs that must be on the CPU, where it costs little to ask, and have no zero.
        declines: the kernel has one more result, a 0-dim bool: true where it leaves the call to the vjp, or, if this is
            a function, where that is called and the results stand. For the CPU only: to read it would synchronize with
            a GPU.
    """

    inputs: str | tuple[str, ...]
    formula: Formula
    bind: Mapping[str, Any] = {}
    largest: int | None = None
    only: Mapping[str, Any] = {}
    real: bool = False
    contiguous: tuple[str, ...] = ()
    one_batch: tuple[str, ...] = ()
    square: tuple[str, ...] = ()
    nonzero: tuple[str, ...] = ()
    declines: bool | Callable[[], None] = False

    @property
    def names(self) -> tuple[str, ...]:
        """The inputs, as a tuple."""
        return (self.inputs,) if isinstance(self.inputs, str) else self.inputs

    @property
    def operator(self) -> CustomOp:
        """The opaque operator that has the compiled kernel."""
        return self.formula.overloads.get("kernel", self.formula)
