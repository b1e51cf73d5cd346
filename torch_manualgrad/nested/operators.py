"""PyTorch's own operators on its own nested tensors, as `override` replaces them: the family "nested".

One line an operator: the aten name, and the function of `mg.nested` that takes the place of the call, on both layouts.
A function has the operator's own parameters. It hands a call back (NotImplemented) where PyTorch's class holds what
`Ragged` does not: strided tensors without components or of numbers, a nested weight, attention with a mask or dropout.

What cannot be carried stands in `LIMITS`, and raises.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.families import Family, families
from ..core.internals import dual_jagged, has_tangent, jagged_dim, replace_jagged_attention, tangents_possible
from . import activations, arithmetic, attention, layers, matmul, reductions, structure
from .layouts import jagged_values, recorded, to_jagged, without_holes
from .ragged import Ragged

__all__ = ["LIMITS"]

# (kind, what) -> why it is not carried. Each raises, which tests/test_nested_probe.py proves, and docs/nested.md shows.
LIMITS: dict[tuple[str, str], str] = {
    ("strided", "jvp"): "PyTorch's strided class has no tangent, and is not made of dual components",
    ("strided", "complex"): "PyTorch's strided class has no gradient in complex dtypes",
    ("jagged", "several ragged dims"): "PyTorch's jagged class has one ragged dim",
    **{
        (kind, "pieces of a ragged dim"): "components of unequal sizes are not cut into the same pieces"
        for kind in ("Ragged", "strided", "jagged")
    },
}


def _taken(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, handing back the strided tensors that `Ragged.from_nested` does not take."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for x in args:
            if isinstance(x, Tensor) and x.is_nested and x.layout is torch.strided and (x.dim() < 2 or not x.size(0)):
                return NotImplemented
        return function(*args, **kwargs)

    return call


def _with_dtype(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of torch that converts to ``dtype`` first, if there is one."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        return function(self if dtype is None else self.to(dtype), *args, **kwargs)

    return call


def _some(dim: Sequence[int] | int | None) -> Sequence[int] | int | None:
    """aten's dims: none given means all."""
    return None if dim is not None and not isinstance(dim, int) and not len(dim) else dim


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, dim: Any = None, keepdim: bool = False) -> Any:
        return function(self, _some(dim), keepdim)

    return _with_dtype(call)


def _vector_norm(self: Any, ord: float = 2, dim: Any = None, keepdim: bool = False) -> Any:
    return reductions.vector_norm(self, 2 if ord is None else ord, _some(dim), keepdim)


def _spread(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The overloads of var and of std."""

    def of_all(self: Any, unbiased: bool = True) -> Any:
        return function(self, correction=int(unbiased))

    def of_dim(self: Any, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
        return function(self, _some(dim), correction=int(unbiased), keepdim=keepdim)

    def corrected(self: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
        return function(self, _some(dim), correction=1 if correction is None else correction, keepdim=keepdim)

    name = function.__name__
    return {name: of_all, f"{name}.dim": of_dim, f"{name}.correction": corrected}


def _linear(input: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    dense = input.is_nested and not weight.is_nested and not (bias is not None and bias.is_nested)
    return matmul.linear(input, weight, bias) if dense else NotImplemented


def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enable: Any = None
) -> Any:
    return layers.layer_norm(input, normalized_shape, weight, bias, eps)


def _elu(self: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    return activations.elu(self, alpha) if scale == input_scale == 1 else NotImplemented


def _gelu(self: Any, *, approximate: str = "none") -> Any:
    return activations.gelu(self, approximate)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **rest: Any,
) -> Any:
    nested = query.is_nested and key.is_nested and value.is_nested
    if attn_mask is not None or dropout_p or not nested:
        return NotImplemented
    return attention.scaled_dot_product_attention(query, key, value, None, 0.0, is_causal, **rest)


def _rsub(self: Any, other: Any, alpha: float = 1) -> Any:
    return arithmetic.sub(other, self, alpha=alpha)


def _reciprocal(self: Any) -> Any:
    return arithmetic.div(1, self)


def _with_alpha(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, other: Any, alpha: float = 1) -> Any:
        return function(self, other, alpha=alpha)

    return call


def _unbind(self: Any, dim: int = 0) -> Any:
    if self.layout is torch.strided and dim in (0, -self.dim()):
        return NotImplemented  # PyTorch's own is right there, and gives views
    return structure.unbind(self, dim)


def _select(self: Any, dim: int, index: int) -> Any:
    if self.layout is not torch.strided or dim not in (0, -self.dim()):
        return _as_strided(self, structure.select(self, dim, index))
    components = self.unbind()
    if not -len(components) <= index < len(components):
        raise IndexError(f"index: {index} is out of range for {len(components)} components")
    return components[index]


def _sum(self: Any, dim: Any, keepdim: bool = False) -> Any:
    found = reductions.sum(self, _some(dim), keepdim)
    last = dim is not None and list(dim) in ([-1], [self.dim() - 1])
    return _as_strided(self, found) if last and keepdim else found


def _as_strided(self: Any, found: Any) -> Any:
    """What PyTorch's strided class keeps nested: there, the entries of a tensor (B, ...) as components."""
    if self.layout is torch.strided and not found.is_nested:
        return torch.nested.as_nested_tensor(list(found.unbind()))
    return found


def _contiguous(self: Any, *, memory_format: Any = torch.contiguous_format) -> Any:
    if self.layout is torch.jagged or self.is_contiguous():
        return NotImplemented
    return Ragged.from_nested(self).to_nested(torch.strided)


def _reshape(self: Any, size: Sequence[Any]) -> Any:
    """Of jagged tensors with a tangent, dense dims only: of all others PyTorch's own is right, and gives views."""
    values = dual_jagged(self)
    symbolic = [d for d, n in enumerate(size) if not isinstance(n, int)]  # the ragged size is no number
    if values is None or len(symbolic) != 1:
        return NotImplemented
    (ragged,), now = symbolic, jagged_dim(self)
    if ragged == 0 or math.prod(size[1:ragged]) != math.prod(values.shape[: now - 1]):
        return NotImplemented
    shape = [*size[1:ragged], values.shape[now - 1], *size[ragged + 1 :]]
    return to_jagged(values.reshape(shape), self.offsets(), ragged)


def _values(self: Any) -> Any:
    if self.layout is torch.jagged:
        return jagged_values(self)
    return Ragged.from_nested(self).flat() if self.is_contiguous() else NotImplemented


def _view_from_jagged(
    self: Tensor,
    offsets: Tensor,
    dummy: Tensor,
    lengths: Tensor | None = None,
    ragged_idx: int = 1,
    min_seqlen: Tensor | None = None,
    max_seqlen: Tensor | None = None,
) -> Any:
    tangent = tangents_possible([self]) and has_tangent(self)
    if lengths is not None and tangent:
        return to_jagged(*without_holes(self, offsets, lengths, ragged_idx), ragged_idx)
    if lengths is not None or not (tangent or recorded(self)):
        return NotImplemented
    # PyTorch hands these numbers on as the sizes of empty tensors
    known = [None if n is None else n.shape[0] for n in (min_seqlen, max_seqlen)]
    return to_jagged(self, offsets, ragged_idx, (known[0], known[1]))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    # products
    "matmul": matmul.matmul,
    "bmm": matmul.matmul,
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    # reductions
    "sum": _with_dtype(reductions.sum),
    "sum.dim_IntList": _with_dtype(_sum),
    "mean": _with_dtype(reductions.mean),
    "mean.dim": _reduction(reductions.mean),
    "amax": _reduction(reductions.amax),
    "amin": _reduction(reductions.amin),
    "max": reductions.max,
    "max.dim": reductions.max,
    "min": reductions.min,
    "min.dim": reductions.min,
    "prod": _with_dtype(reductions.prod),
    "prod.dim_int": _with_dtype(reductions.prod),
    "logsumexp": _reduction(reductions.logsumexp),
    "linalg_vector_norm": _with_dtype(_vector_norm),
    "norm.Scalar": _vector_norm,
    "norm.ScalarOpt_dim": _vector_norm,
    **_spread(reductions.var),
    **_spread(reductions.std),
    "cumsum": _with_dtype(reductions.cumsum),
    "softmax.int": reductions.softmax,
    "log_softmax.int": reductions.log_softmax,
    # norms and activations
    "layer_norm": _layer_norm,
    "rms_norm": layers.rms_norm,
    "gelu": _gelu,
    "relu": activations.relu,
    "threshold": activations.threshold,
    "silu": activations.silu,
    "leaky_relu": activations.leaky_relu,
    "hardtanh": activations.hardtanh,
    "elu": _elu,
    "selu": activations.selu,
    "celu": activations.celu,
    "softplus": activations.softplus,
    "mish": activations.mish,
    "glu": reductions.glu,
    "dropout": structure.dropout,
    # two arguments
    "add.Tensor": arithmetic.add,
    "sub.Tensor": arithmetic.sub,
    "mul.Tensor": arithmetic.mul,
    "div.Tensor": arithmetic.div,
    "div.Tensor_mode": arithmetic.div,
    "add.Scalar": _with_alpha(arithmetic.add),
    "sub.Scalar": _with_alpha(arithmetic.sub),
    "mul.Scalar": arithmetic.mul,
    "div.Scalar": arithmetic.div,
    "div.Scalar_mode": arithmetic.div,
    "reciprocal": _reciprocal,  # 2 / x is 2 * x.reciprocal()
    "rsub.Tensor": _rsub,
    "rsub.Scalar": _rsub,
    "pow.Tensor_Tensor": arithmetic.pow,
    "pow.Tensor_Scalar": arithmetic.pow,
    "pow.Scalar": arithmetic.pow,
    "maximum": arithmetic.maximum,
    "minimum": arithmetic.minimum,
    "max.other": arithmetic.maximum,
    "min.other": arithmetic.minimum,
    # taking apart
    "select.int": _select,
    "slice.Tensor": structure.slice,
    "narrow": structure.narrow,
    "split.Tensor": structure.split,
    "split.sizes": structure.split_with_sizes,
    "split_with_sizes": structure.split_with_sizes,
    "chunk": structure.chunk,
    "unbind.int": _unbind,
    "transpose.int": structure.transpose,
    "contiguous": _contiguous,
    "view": _reshape,
    "reshape": _reshape,
    # layouts
    "to_padded_tensor": structure.to_padded_tensor,
    "values": _values,
    "_nested_get_values": _values,  # values() of the jagged layout
    "_nested_view_from_jagged": _view_from_jagged,
}


def _jagged_attention(own: Callable[..., Any], query: Any, *args: Any, **kwargs: Any) -> Any:
    """PyTorch sees to autocast here; and where the ragged dim is not that of the sequences, it is a second batch."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        found = [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in (query, *args)]
        query, args = found[0], tuple(found[1:])
    sequences = isinstance(query, Tensor) and query.is_nested and jagged_dim(query) == query.dim() - 2
    made = _attention(query, *args, **kwargs) if sequences else NotImplemented
    return own(query, *args, **kwargs) if made is NotImplemented else made


families.add(
    "nested",
    Family(
        "nested",
        "AutogradNestedTensor",
        {f"aten::{name}": _taken(function) for name, function in _FUNCTIONS.items()},
        besides=[functools.partial(replace_jagged_attention, _jagged_attention)],
    ),
)
