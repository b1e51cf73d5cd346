"""What a rule says of its vjp where that is one compiled formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .formula import Formula

__all__ = ["CompiledVjp"]


class CompiledVjp(NamedTuple):
    """The compiled formula that gives what the rule's vjp gives, in plain calls: these need no Python.

    It stands for the vjp where all floating tensors among its arguments are of one precision, on a device of its
    kernels, and within ``largest``; elsewhere, and where the backward is differentiated, the vjp itself is called.

    Attributes:
        input: whose gradient it is.
        formula: one with a compiled kernel.
        bind: for parameters of the formula that are not called as in the rule: the name there, or a value that is not a
            string, or a pair of the name and what stands for None.
        largest: for matrices, the most rows or columns, of a dtype of linear algebra; 0: every shape and dtype.
    """

    input: str
    formula: Formula
    bind: Mapping[str, Any] = {}
    largest: int = 0
