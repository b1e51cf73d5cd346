"""Calls on strided nested tensors that stay with PyTorch, as its own graph differentiates them.

PyTorch's nodes for these calls are right in first order where a cotangent lies in memory as PyTorch expects, and raise
where it does not. They compute by operators that are in our table too (`backward`), which take any cotangent and
have derivatives. So a graph that was made while ours were active is right in every order, if its backward finds them
active. Its nodes are marked, and in a marked node's backward they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.internals import current_node, only_autograd

__all__ = ["KERNELS", "continues", "is_one", "mark", "may_stay", "out_of_order", "puts_in_order", "tracks_silu"]

_MARK = "torch_manualgrad.nested"


def _in_order(x: Tensor) -> bool:
    """Whether the components of a nested tensor are strided, row-major, and fill the buffer, one after the other."""
    return x.layout is torch.strided and x.is_contiguous() and x.numel() > 0


def may_stay(args: Any, kwargs: Any, takes_dense: bool) -> bool:
    """Whether PyTorch's graph of this call will do.

    Args:
        args: of the call.
        kwargs: of the call.
        takes_dense: whether PyTorch differentiates the function in dense arguments, such as a weight.
    """
    if torch.compiler.is_compiling() or not only_autograd():
        return False
    dtype = None
    for x in (*args, *kwargs.values()) if kwargs else args:
        if not isinstance(x, Tensor):
            continue
        if not x.is_nested:
            if takes_dense or not (x.requires_grad or x.dim()):
                continue
            return False
        if not _in_order(x) or x.dtype is not (dtype or x.dtype) or not x.is_floating_point():
            return False
        dtype = x.dtype
    return True


def out_of_order(args: Any) -> bool:
    """Whether a strided tensor among the arguments is not in order: a result then is, if ours computes it."""
    return any(isinstance(x, Tensor) and x.is_nested and x.layout is torch.strided and not _in_order(x) for x in args)


def mark(result: Tensor) -> Tensor:
    """Let our functions be active in the backward of the node that made ``result``, whenever that comes."""
    node: Any = result.grad_fn
    if node is not None:
        node.metadata[_MARK] = True
        if node.name() == "SiluBackward0":
            node.register_prehook(_stop_tracking)
            node.register_hook(_track_again)
    return result


# A product with 1, whose backward is a product too, and so one of our calls: it puts a cotangent in order.
_ONE = 1.0


class _Product(threading.local):
    shares_memory = False


_product = _Product()


def puts_in_order(result: Tensor) -> Tensor:
    """The tensor, which nothing else has, behind a node that puts cotangents in order; it shares its memory."""
    _product.shares_memory = True
    try:
        return mark(torch.ops.aten.mul.Scalar(result, _ONE))
    finally:
        _product.shares_memory = False


def _mul(own: Callable[..., Tensor], self: Tensor, other: Any) -> Tensor:
    return self.detach() if _product.shares_memory else own(self, other)


def is_one(args: Any) -> bool:
    """Whether these are the arguments of a product with the number 1."""
    return len(args) == 2 and type(args[1]) is float and args[1] == _ONE


def continues() -> bool:
    """Whether this call is part of the backward of a marked node."""
    node = current_node()
    return node is not None and _MARK in node.metadata


# Where autograd tracks the backward, PyTorch's node of silu computes it by operators that strided tensors do not have,
# in place of silu_backward. So tracking is off while the node runs, and our silu_backward tracks what it does.
class _Silu(threading.local):
    tracked = False


_silu = _Silu()


def _stop_tracking(gradients: Any) -> None:
    _silu.tracked = torch.is_grad_enabled()
    if _silu.tracked:
        torch.set_grad_enabled(False)


def _track_again(gradients: Any, of_results: Any) -> None:
    if _silu.tracked:
        torch.set_grad_enabled(True)


def tracks_silu() -> bool:
    """Whether autograd tracks the backward of the node of silu that runs."""
    return _silu.tracked and continues()


# -- kernels on the whole buffer, where PyTorch has one per component ---------------------------------------------------


def _rows(x: Tensor) -> Tensor | None:
    """The rows along the last dim of all components, a view; None where they do not lie one after the other."""
    if not x.is_nested or not _in_order(x):
        return None
    try:
        size = x.size(-1)
    except RuntimeError:  # the components differ in it
        return None
    buffer = x.values()
    return buffer.view(-1, size) if buffer.numel() == x.numel() else None


def _is_last(x: Tensor, dim: int) -> bool:
    return dim in (-1, x.dim() - 1)


def _softmax(own: Callable[..., Tensor], self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    rows = None if half_to_float or not _is_last(self, dim) else _rows(self)
    if rows is None:
        return own(self, dim, half_to_float)
    found = torch.empty_like(self)
    torch.softmax(rows, 1, out=found.values().view(rows.shape))
    return found


def _softmax_backward_data(
    own: Callable[..., Tensor], grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    fits = _is_last(output, dim) and grad_output.dtype is output.dtype is input_dtype
    g, y = (_rows(grad_output), _rows(output)) if fits else (None, None)
    if g is None or y is None or g.shape != y.shape:
        return own(grad_output, output, dim, input_dtype)
    found = torch.empty_like(output)
    torch.ops.aten._softmax_backward_data.out(g, y, 1, input_dtype, grad_input=found.values().view(y.shape))
    return found


def _sum(
    own: Callable[..., Tensor], self: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    last = keepdim and dtype is None and self.is_floating_point() and dim is not None and len(dim) == 1
    rows = _rows(self) if last and _is_last(self, dim[0]) else None
    if rows is None or self.dim() != 3:
        return own(self, dim, keepdim, dtype=dtype)
    found: Tensor = torch.ops.aten.linear(self, rows.new_ones(1, rows.shape[1]))  # nothing else makes its sizes as fast
    torch.sum(rows, 1, True, out=found.values().view(-1, 1))
    return found


def _nested_sum_backward(
    own: Callable[..., Tensor], grad: Tensor, self: Tensor, dim: Any, keepdim: bool = False
) -> Tensor:
    last = keepdim and dim is not None and len(dim) == 1 and _is_last(self, dim[0])
    g, x = (_rows(grad), _rows(self)) if last else (None, None)
    if g is None or x is None or g.shape != (x.shape[0], 1):
        return own(grad, self, dim, keepdim)
    found = torch.empty_like(self)
    found.values().view(x.shape).copy_(g)
    return found


KERNELS: dict[str, Callable[..., Tensor]] = {
    "mul.Scalar": _mul,
    "_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward_data,
    "sum.dim_IntList": _sum,
    "_nested_sum_backward": _nested_sum_backward,
}
