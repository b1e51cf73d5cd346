"""Which calls a rule leaves to PyTorch under an `override` without names, where a rule can say so as data.

The library of calls reads these, so that such a call never enters Python; it has to call any other function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ButManySmall", "always", "real", "where_finite"]


def always(*_: Any) -> bool:
    """``defer_to_stock`` of a rule whose operator PyTorch differentiates rightly in reverse mode, in every order: all calls."""
    return True


def where_finite(*_: Any) -> bool:
    """``defer_to_stock`` of a rule whose operator PyTorch differentiates rightly in first order, where that is finite.

    The node of a plain call first runs PyTorch's derivative, in C++. It calls the rule if a gradient is not finite, or is
    differentiated again. Any other call is the rule's, as this function says; without the library of calls, all are.
    """
    return False


def real(self: Tensor, *_: Any) -> bool:
    """``defer_to_stock`` of a rule that is better for complex numbers only: calls whose first argument is real."""
    return not self.is_complex()


class ButManySmall(NamedTuple):
    """``defer_to_stock`` of a rule for batches of square matrices: on the CPU, all calls but many small ones.

    Attributes:
        order: the largest real matrices that the rule takes.
        complex_order: the largest complex ones.
        entries: the fewest that these have in all.
    """

    order: int
    complex_order: int
    entries: int

    def __call__(self, A: Tensor, *others: Any) -> bool:
        if A.dim() < 2:
            return True  # it raises
        largest = self.complex_order if A.is_complex() else self.order
        return A.is_cpu and (A.shape[-1] > largest or A.numel() < self.entries)
