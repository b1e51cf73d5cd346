"""The replacement "nested" of `override`: PyTorch's own operators on its own nested tensors.

One line per operator: the aten name, and the function of `mg.nested` that replaces the call, on both layouts. A
function takes the operator's own parameters. For arguments that only PyTorch's class represents, it returns
NotImplemented, and PyTorch computes the call: strided tensors without components or of numbers, a nested weight,
attention with a mask or dropout.

`LIMITS` lists the unsupported calls, which raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.internals import jagged_dim, replace_jagged_attention
from ..core.override.replacements import Replacements, replacements, stock
from . import activations, arithmetic, attention, extrema, layout_calls, maps, matmul, reductions, selection, structure
from .backward import BACKWARD
from .choice import REFUSALS, choose
from .conversion import on_nested
from .jagged import JAGGED, jagged_call
from .jagged_stock import stays
from .layer_normalization import layer_norm
from .ragged import Ragged
from .rms_normalization import rms_norm
from .slices import require_inexact
from .strided import ARITHMETIC, CALLS

__all__ = ["LIMITS"]

# (kind, what) -> why it is not supported. Each raises: see tests/nested/test_nested_probe.py and docs/nested.md.
LIMITS: dict[tuple[str, str], str] = {
    ("strided", "jvp"): "PyTorch's strided class has no tangent, and is not made of dual components",
    ("strided", "complex"): "PyTorch's strided class has no gradient in complex dtypes",
    ("jagged", "several ragged dims"): "PyTorch's jagged class has one ragged dim",
    **{
        (kind, "pieces of a ragged dim"): "components of unequal sizes are not cut into the same pieces"
        for kind in ("Ragged", "strided", "jagged")
    },
}


def _with_dtype(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, with torch's parameter ``dtype``, to which the argument is converted first."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        return function(self if dtype is None else self.to(dtype), *args, **kwargs)

    return call


def _some(dim: Sequence[int] | int | None) -> Sequence[int] | int | None:
    """aten's dims: an empty list means all."""
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
    return layer_norm(input, normalized_shape, weight, bias, eps)


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


@on_nested
def _reciprocal(self: Ragged) -> Ragged:
    return self.like(self.values.reciprocal())


@on_nested
def _nansum(self: Ragged, dim: Any = None, keepdim: bool = False) -> Any:
    counted = self.like(self.values.masked_fill(self.values.isnan(), 0))
    return reductions.sum(counted, reductions.all_dims(self, _some(dim)), keepdim)


@on_nested
def _nanmean(self: Ragged, dim: Any = None, keepdim: bool = False) -> Any:
    """nanmean, which PyTorch computes from sums that count holes if no dims are given."""
    require_inexact(self)
    present = self.like(self.values.isnan().logical_not().to(self.values.dtype))
    counts = reductions.sum(present, reductions.all_dims(self, _some(dim)), keepdim)
    return _nansum(self, dim, keepdim) / counts


@on_nested(views=True)
def _view_as_real(self: Ragged) -> Ragged:
    """Part of the backward of a conversion to complex numbers."""
    return self.like(torch.view_as_real(self.values), (*self.shape, 2))


def _on_values(name: str) -> Callable[..., Any]:
    """Apply the operator to every entry with its rule for dense tensors, which PyTorch's jagged class bypasses."""
    op = getattr(torch.ops.aten, name)

    @on_nested
    def call(self: Ragged, *args: Any, **kwargs: Any) -> Ragged:
        return self.like(op(self.values, *args, **kwargs))

    call.__name__ = name
    return call


_ON_VALUES = """
    hardsigmoid i0 logit sgn sinc special_erfcx special_i0e special_i1 special_i1e special_log_ndtr
""".split()


def _on_pairs(name: str) -> Callable[..., Any]:
    """`_on_values` for an operator of two arguments, each of them nested, dense or a number."""
    op = getattr(torch.ops.aten, name.partition(".")[0])

    @on_nested
    def call(self: arithmetic.Operand, other: arithmetic.Operand) -> Ragged:
        return arithmetic.elementwise(op, self, other)

    call.__name__ = name
    return call


_ON_PAIRS = """
    atan2 copysign.Scalar copysign.Tensor hypot logaddexp logaddexp2 nextafter
    special_xlog1py special_xlog1py.other_scalar special_xlog1py.self_scalar
    xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor
""".split()


def _with_alpha(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, other: Any, alpha: float = 1) -> Any:
        return function(self, other, alpha=alpha)

    return call


def _sum(self: Any, dim: Any, keepdim: bool = False) -> Any:
    found = reductions.sum(self, _some(dim), keepdim)
    last = dim is not None and list(dim) in ([-1], [self.dim() - 1])
    return layout_calls.as_strided(self, found) if last and keepdim else found


def _matmul(self: Any, other: Any) -> Any:
    nested = self if self.is_nested else other
    return layout_calls.as_strided(nested, matmul.matmul(self, other))


def _dropout(input: Any, p: float, train: bool) -> Any:
    if not train:  # PyTorch does not return a view either
        return arithmetic.mul(input, 1) if input.layout is torch.jagged else NotImplemented
    if input.layout is torch.jagged:
        return structure.dropout(input, p, train)
    with stock():  # PyTorch's strided class draws in the order of its memory; this way the draws are the same
        mask = torch.dropout(torch.ones_like(input.detach()), p, train)
    return arithmetic.mul(input, mask)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    # products
    "matmul": _matmul,
    "bmm": _matmul,
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    # reductions
    "sum": _with_dtype(reductions.sum),
    "sum.dim_IntList": _with_dtype(_sum),
    "nansum": _with_dtype(_nansum),
    "nanmean": _with_dtype(_nanmean),
    "mean": _with_dtype(reductions.mean),
    "mean.dim": _reduction(reductions.mean),
    "amax": _reduction(extrema.amax),
    "amin": _reduction(extrema.amin),
    "max": extrema.max,
    "max.dim": extrema.max,
    "min": extrema.min,
    "min.dim": extrema.min,
    "prod": _with_dtype(reductions.prod),
    "prod.dim_int": _with_dtype(reductions.prod),
    "logsumexp": _reduction(reductions.logsumexp),
    "linalg_vector_norm": _with_dtype(_vector_norm),
    "norm.Scalar": _vector_norm,
    "norm.ScalarOpt_dim": _vector_norm,
    **_spread(reductions.var),
    **_spread(reductions.std),
    "cumsum": _with_dtype(maps.cumsum),
    "softmax.int": maps.softmax,
    "log_softmax.int": maps.log_softmax,
    # norms and activations
    "layer_norm": _layer_norm,
    "rms_norm": rms_norm,
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
    "glu": maps.glu,
    "dropout": _dropout,
    **{name: _on_values(name) for name in _ON_VALUES},
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
    **{name: _on_pairs(name) for name in _ON_PAIRS},
    "max.other": arithmetic.maximum,
    "min.other": arithmetic.minimum,
    # structure
    "select.int": layout_calls.select,
    "slice.Tensor": selection.slice,
    "narrow": layout_calls.narrow,
    "split.Tensor": structure.split,
    "split.sizes": layout_calls.split_with_sizes,
    "split_with_sizes": layout_calls.split_with_sizes,
    "chunk": layout_calls.chunk,
    "unbind.int": layout_calls.unbind,
    "transpose.int": layout_calls.transpose,
    "contiguous": layout_calls.contiguous,
    "clone": layout_calls.clone,
    "view_as_real": _view_as_real,
    "view": layout_calls.reshape,
    "reshape": layout_calls.reshape,
    # layouts
    "to_padded_tensor": layout_calls.to_padded,
    "values": layout_calls.values,
    "_nested_get_values": layout_calls.values,  # values() of the jagged layout
    "_nested_view_from_jagged": layout_calls.view_from_jagged,
    # the backward of PyTorch's own graphs
    **BACKWARD,
}

# Calls on jagged tensors by function: those with one node of ours, and those that stay with PyTorch.
_JAGGED = {_FUNCTIONS[name]: name for name in JAGGED}
_TO_STOCK = {_FUNCTIONS[name]: name for name in ("relu", "silu", "linear", *ARITHMETIC)}

# These take the size of a ragged dim as an argument.
_TAKE_NESTED_INTS = (layout_calls.reshape, BACKWARD["new_empty_strided"])


def _choose(function: Callable[..., Any], own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Take a fast path for a call on jagged tensors, with one node on the buffer (`jagged`) or PyTorch's; else `choose`."""
    try:
        if (name := _TO_STOCK.get(function)) is not None:
            if stays(name, *args, **kwargs):
                return CALLS.mark(f"aten::{name}", own(*args, **kwargs))
        elif (name := _JAGGED.get(function)) is not None:
            if (found := jagged_call(name, *args, **kwargs)) is not None:
                return found
    except REFUSALS:
        pass  # the code below takes the call, or raises the reason
    if _stock_reads_out_of_bounds(function, args):
        return function(*args, **kwargs)
    if function is _FUNCTIONS["nanmean"]:
        own = _on_stock(own)
    return choose(function, own, args, kwargs, function in _TAKE_NESTED_INTS)


def _on_stock(own: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's call with PyTorch's inner calls. Otherwise nanmean divides our nansum by a count that includes holes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with stock():
            return own(*args, **kwargs)

    return call


def _stock_reads_out_of_bounds(function: Callable[..., Any], args: Any) -> bool:
    """Whether PyTorch's own function reads out of bounds: select within components of strided tensors."""
    if function is not layout_calls.select or args[0].layout is torch.jagged:
        return False
    return args[0].dim() > 1 and args[0].size(0) > 0 and args[1] not in (0, -args[0].dim())


def _jagged_attention(own: Callable[..., Any], query: Any, *args: Any, **kwargs: Any) -> Any:
    """Attention of jagged tensors, with autocast applied here. A ragged dim other than the sequence dim stays with PyTorch,
    for which it is a second batch dim.
    """
    given = (query, *args)
    if not (isinstance(query, Tensor) and query.is_nested and jagged_dim(query) == query.dim() - 2):
        return own(*given, **kwargs)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        given = tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in given)
    return _choose(_attention, own, given, kwargs)


replacements.add(
    "nested",
    Replacements(
        "nested",
        "AutogradNestedTensor",
        {f"aten::{name}": function for name, function in _FUNCTIONS.items()},
        besides=[functools.partial(replace_jagged_attention, _jagged_attention)],
        calls=CALLS,
        choose=_choose,
    ),
)
