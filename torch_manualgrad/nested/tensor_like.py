"""Make a `Ragged` behave like a tensor: torch's functions, the same functions as methods, operators, indexing.

One table is keyed by the names of the functions in torch. ``torch.softmax(r, 1)``, ``F.softmax(r, 1)`` and
``r.softmax(1)`` all call `nested.softmax`; modules such as ``nn.Linear`` work too, as they call these functions.
Elementwise functions of one argument act on the values; those of two arguments use `arithmetic.elementwise`.
"""

from __future__ import annotations

import functools
import numbers
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..arguments import described
from . import (
    activations,
    along,
    arithmetic,
    attention,
    batching,
    extrema,
    layers,
    losses,
    maps,
    matmul,
    reductions,
    reshaping,
    selection,
    structure,
)
from .conversion import on_nested, require_same_structure
from .layer_normalization import layer_norm
from .multi_head_attention import SequencesFirst
from .ragged import Ragged
from .rms_normalization import rms_norm

__all__: list[str] = []

Function = Callable[..., Any]


# -- torch's parameters -----------------------------------------------------------------------------------------------


def _with_dtype(function: Function) -> Function:
    """``function``, with torch's parameter ``dtype``, to which the argument is converted first."""

    @functools.wraps(function)
    def call(x: Ragged, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        return function(x if dtype is None else x.to(dtype), *args, **kwargs)

    return call


def _spread(function: Function) -> Function:
    """var and std: ``(x, unbiased)``, ``(x, dim, unbiased, keepdim)`` and ``(x, dim, *, correction, keepdim)``."""

    @functools.wraps(function)
    def call(x: Ragged, *args: Any, unbiased: bool | None = None, **kwargs: Any) -> Any:
        if args and isinstance(args[0], bool):
            unbiased, *args = args  # type: ignore[assignment]
        elif len(args) > 1:
            dim, unbiased, *rest = args
            args, kwargs = (dim,), {**kwargs, **dict(zip(("keepdim",), rest))}
        if unbiased is not None:
            kwargs["correction"] = int(unbiased)
        elif kwargs.get("correction", 1) is None:
            kwargs["correction"] = 1
        return function(x, *args, **kwargs)

    return call


def _and_mean(name: str) -> Function:
    """var_mean and std_mean."""

    def call(x: Ragged, dim: Any = None, *, keepdim: bool = False, **kwargs: Any) -> tuple[Any, Any]:
        return getattr(reductions, name)(x, dim, keepdim=keepdim, **kwargs), reductions.mean(x, dim, keepdim)

    return call


def _tile(x: Ragged, dims: Any, *more: int) -> Ragged:
    """Copies along regular dims, as `torch.tile`: with fewer numbers than dims those of the last ones; `repeat`."""
    given = (dims, *more) if isinstance(dims, int) else tuple(dims)
    found: Ragged = reshaping.repeat(x, *(1,) * (x.dim() - len(given)), *given)
    return found


def _softmin(x: Ragged, dim: int, dtype: torch.dtype | None = None) -> Ragged:
    """The softmax of $-x$ along a dim of the components, as ``torch.nn.functional.softmin``."""
    found: Ragged = maps.softmax(x.like(-x.values), dim, dtype)
    return found


def _extremum(function: Function, pairwise: Function) -> Function:
    """max and min, whose second argument may be another tensor."""

    @functools.wraps(function)
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        other = args[0] if args else kwargs.get("other")
        return (pairwise if isinstance(other, (Ragged, Tensor)) else function)(x, *args, **kwargs)

    return call


def _norm(x: Ragged, p: Any = "fro", dim: Any = None, keepdim: bool = False) -> Any:
    """The vector norm over ``dim``, as `torch.norm`; `vector_norm`."""
    return reductions.vector_norm(x, 2 if p is None or p == "fro" else p, dim, keepdim)


def _split(x: Ragged, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None) -> Any:
    """Pieces along ``dim``, as `torch.split`; `split`."""
    return structure.split(x, split_size if split_size_or_sections is None else split_size_or_sections, dim)


def _transpose(x: Ragged, dim0: int, dim1: int) -> Ragged | SequencesFirst:
    """`transpose`: exchange two dims of every component; for nn.MultiheadAttention, also the first two of (B, *, D)."""
    if x.ragged_dims == (1,) and x.dim() == 3 and {dim0 % 3, dim1 % 3} == {0, 1}:
        return SequencesFirst(x)
    found: Ragged = structure.transpose(x, dim0, dim1)
    return found


def _with_batch_second(query: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse the call that nn.MultiheadAttention makes only without batch_first=True."""
    raise TypeError("MultiheadAttention: a Ragged has the batch in dim 0: make the module with batch_first=True")


@on_nested
def masked_fill(x: Ragged, mask: Ragged | Tensor, value: Any) -> Ragged:
    """``value`` where ``mask`` is True, as ``Tensor.masked_fill``; the mask broadcasts like a dense operand of
    `elementwise`.
    """
    return arithmetic.together(lambda x, mask: x.masked_fill(mask, value), (x, mask), ("x", "mask"))


def _agree(name: str) -> Function:
    def call(x: Any, other: Any, **kwargs: Any) -> bool:
        if not (isinstance(x, Ragged) and isinstance(other, Ragged)):
            return False
        try:
            require_same_structure(x, other)
        except ValueError:
            return False
        return bool(getattr(torch, name)(x.values, other.values, **kwargs))

    call.__name__ = name
    call.__doc__ = f"Whether both have the same structure and torch.{name} is True of the values."
    return call


# -- elementwise ------------------------------------------------------------------------------------------------------

_OF_ONE = """
    abs absolute acos acosh airy_ai angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh bessel_j0
    bessel_j1 bessel_y0 bessel_y1 bitwise_not ceil clamp clip clone conj conj_physical contiguous cos cosh deg2rad detach
    digamma empty_like entr erf erfc erfcx erfinv exp exp2 expit expm1 fix floor frac full_like gammaln hardshrink
    hardsigmoid hardswish i0 i0e i1 i1e imag isfinite isinf isnan isneginf isposinf isreal lgamma log log10 log1p log2
    log_ndtr logical_not logit logsigmoid modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1
    multigammaln mvlgamma nan_to_num ndtr ndtri neg negative ones_like pin_memory positive psi rad2deg rand_like
    randn_like real reciprocal relu6 round rrelu rsqrt scaled_modified_bessel_k0 scaled_modified_bessel_k1 sgn sigmoid
    sign signbit sin sinc sinh softshrink softsign spherical_bessel_j0 sqrt square tan tanh tanhshrink trunc zeros_like
    double float half bfloat16 long int short char byte bool cdouble cfloat chalf
""".split()
_OF_TWO = """
    arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor chebyshev_polynomial_t
    chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w clamp_max clamp_min complex copysign eq
    float_power floor_divide fmax fmin fmod gammainc gammaincc gcd ge greater greater_equal gt heaviside
    hermite_polynomial_h hermite_polynomial_he hypot igamma igammac isclose laguerre_polynomial_l lcm ldexp le
    legendre_polynomial_p less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor lt ne nextafter
    not_equal polar remainder rsub shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
    shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w xlog1py xlogy zeta
""".split()
_OF_THREE = {
    "addcdiv": ("input", "tensor1", "tensor2"),
    "addcmul": ("input", "tensor1", "tensor2"),
    "lerp": ("input", "end", "weight"),
}
_NUMBERS_OF = ["element_size", "is_complex", "is_floating_point", "numel"]


def _torch(name: str) -> Function:
    """The function of torch of this name, or the method."""
    places = (torch, torch.nn.functional, torch.special, Tensor)
    found: Function = next(getattr(place, name) for place in places if hasattr(place, name))
    return found


def _of_one(name: str) -> Function:
    function = _torch(name)
    if isinstance(getattr(torch, name, None), torch.dtype):  # torch.float, and Tensor.float()
        function = getattr(Tensor, name)

    def call(x: Ragged, *args: Any, **kwargs: Any) -> Ragged:
        for value in (*args, *kwargs.values()):
            if isinstance(value, (Ragged, Tensor)) and not (isinstance(value, Tensor) and value.dim() == 0):
                raise TypeError(f"{name}: expected numbers as further arguments, got {described(value)}")
        return x.like(function(x.values, *args, **kwargs))

    call.__name__ = name
    call.__doc__ = f"``{name}`` of torch, on the values."
    return call


def _of_two(name: str) -> Function:
    function = _torch(name)

    @on_nested
    def call(x: arithmetic.Operand, other: arithmetic.Operand, **options: Any) -> Ragged:
        return arithmetic.elementwise(function, arithmetic._tensor(x, other), other, **options)

    call.__name__ = name
    call.__doc__ = f"``{name}`` of torch, entry by entry; arguments as in `add`."
    return call


def _of_three(name: str) -> Function:
    function, names = _torch(name), _OF_THREE[name]

    def call(*args: Any, **kwargs: Any) -> Ragged:
        operands = [*args, *(kwargs.pop(n) for n in names[len(args) :] if n in kwargs)]
        return arithmetic.together(function, operands, names, **kwargs)

    call.__name__ = name
    call.__doc__ = f"``{name}`` of torch, entry by entry; arguments as in `add`."
    return call


def _polygamma(n: Any, x: Any) -> Ragged:
    """``torch.polygamma``, and the method, whose first argument is the batch."""
    x, n = (n, x) if isinstance(n, Ragged) else (x, n)
    found: Ragged = x.like(torch.polygamma(n, x.values))
    return found


def _number_of(name: str) -> Function:
    def call(x: Ragged) -> Any:
        return getattr(x.values, name)()

    call.__name__ = name
    call.__doc__ = f"``Tensor.{name}`` of the values."
    return call


# -- the table --------------------------------------------------------------------------------------------------------

_TABLE: dict[str, Function] = {
    **{name: _of_one(name) for name in _OF_ONE},
    **{name: _of_two(name) for name in _OF_TWO},
    **{name: _of_three(name) for name in _OF_THREE},
    "polygamma": _polygamma,
    **{name: _number_of(name) for name in _NUMBERS_OF},
    **{name: _agree(name) for name in ("equal", "allclose")},
    **{name: getattr(activations, name) for name in activations.__all__},
    **{name: getattr(arithmetic, name) for name in ("add", "div", "maximum", "minimum", "mul", "pow", "sub", "where")},
    "divide": arithmetic.div,
    "multiply": arithmetic.mul,
    "subtract": arithmetic.sub,
    "true_divide": arithmetic.div,
    "masked_fill": masked_fill,
    **{name: getattr(structure, name) for name in structure.__all__},
    **{name: getattr(selection, name) for name in ("select", "slice", "narrow")},
    "split": _split,
    **dict.fromkeys(("swapaxes", "swapdims", "transpose"), _transpose),
    **{name: getattr(reshaping, name) for name in reshaping.SHAPES},
    "view": reshaping.reshape,
    **dict.fromkeys(("concat", "concatenate"), reshaping.cat),
    "moveaxis": reshaping.movedim,
    "tile": _tile,
    **along.ALONG,
    "normalize": along.normalize,
    "pairwise_distance": along.pairwise_distance,
    **{name: getattr(layers, name) for name in layers.__all__},
    **losses.LOSSES,
    "to_packed": batching.to_packed,
    "matmul": matmul.matmul,
    "bmm": matmul.matmul,
    "linear": matmul.linear,
    "einsum": matmul.einsum,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "scaled_dot_product_attention": attention.scaled_dot_product_attention,
    **{name: getattr(reductions, name) for name in reductions.__all__},
    **{name: getattr(extrema, name) for name in ("amax", "amin")},
    **{name: getattr(maps, name) for name in maps.__all__},
    **{name: _with_dtype(getattr(reductions, name)) for name in ("sum", "mean", "prod", "vector_norm")},
    "cumsum": _with_dtype(maps.cumsum),
    **{name: _spread(getattr(reductions, name)) for name in ("var", "std")},
    **{f"{name}_mean": _spread(_and_mean(name)) for name in ("var", "std")},
    "softmin": _softmin,
    "max": _extremum(extrema.max, arithmetic.maximum),
    "min": _extremum(extrema.min, arithmetic.minimum),
    "norm": _with_dtype(_norm),
}
_FIRST = ("input", "self", "tensor", "x1")  # torch's names of the first argument
_WITHOUT_MEANING = ("inplace", "out", "_stacklevel", "memory_format")


def call_torch_function(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch, or a method of Tensor, with a `Ragged` among its arguments.

    Args:
        func: torch's function.
        args: its arguments.
        kwargs: its arguments.

    Returns:
        The result of the function in the table.

    Raises:
        TypeError: ``func`` is not in the table, or would write to one of its arguments.
    """
    if isinstance(func, types.FunctionType):  # unwrapped: the compiler of torch 2.15 takes the decorator's name
        name = getattr(func, "__wrapped__", func).__name__
        function = _IN_PYTHON.get(name)
        # torch's own Python code passes options by keyword, the compiler as the caller wrote them
        named = dict(zip(_PARAMETERS.get(name, ())[1:], args[1:]))
        args, kwargs = (args[:1], {**named, **kwargs}) if named else (args, kwargs)
    else:
        function = _BY_TORCH.get(func)
    if function is None:
        raise _not_covered(getattr(func, "__name__", str(func)))
    if function is matmul.matmul and torch.compiler.is_compiling() and func is Tensor.matmul:
        # the compiler also calls it for r @ tensor, with the arguments exchanged
        raise TypeError("matmul: in a graph, a product of a Ragged and a tensor is written torch.matmul(a, b)")
    for option in ("inplace", "out"):
        if not (kwargs.get(option) is None or kwargs[option] is False):
            raise TypeError(
                f"{function.__name__}: {option}: a Ragged cannot be written to, got {described(kwargs[option])}"
            )
    kwargs = {k: v for k, v in kwargs.items() if k not in _WITHOUT_MEANING and not (k == "dtype" and v is None)}
    if not args:
        first = [kwargs.pop(k) for k in _FIRST if k in kwargs]
        args = tuple(first)
    return function(*args, **kwargs)


def _not_covered(name: str) -> TypeError:
    if name.endswith("_") and not name.endswith("__"):
        return TypeError(f"{name}: in-place functions do not take a Ragged; use {name[:-1]}")
    return TypeError(
        f"{name}: not a function of a Ragged. Use a function of torch_manualgrad.nested, an elementwise function, or "
        "its values, components(), to_padded() or to_nested()"
    )


# -- operators and indexing -------------------------------------------------------------------------------------------


def _floor_divide(x: Any, other: Any) -> Any:
    return arithmetic.div(x, other, rounding_mode="floor")


# Methods have torch's names: those of Tensor, of torch_manualgrad.nested, and a Ragged's own.
_FUNCTIONS_ONLY = {
    *(name for name in (*along.ALONG, *layers.__all__) if not hasattr(Tensor, name)),
    *(
        "cat",
        "concat",
        "concatenate",
        "einsum",
        "normalize",
        "pairwise_distance",
        "softmin",
        "stack",
        "std_mean",
        "var_mean",
    ),
    *losses.LOSSES,
} - {"positions"}

_OPERATORS: dict[str, Function] = {
    **{name: getattr(arithmetic, name) for name in ("add", "sub", "mul", "pow")},
    "truediv": arithmetic.div,
    "floordiv": _floor_divide,
    "mod": _TABLE["remainder"],
    "matmul": matmul.matmul,
    "and": _TABLE["bitwise_and"],
    "or": _TABLE["bitwise_or"],
    "xor": _TABLE["bitwise_xor"],
}
_TABLE["floor_divide"] = _floor_divide
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY = {"neg": "neg", "pos": "positive", "abs": "abs", "invert": "bitwise_not"}


def _operand(value: Any) -> bool:
    return isinstance(value, (Ragged, Tensor, numbers.Number))


def _forward(function: Function) -> Function:
    def call(self: Ragged, other: Any) -> Any:
        return function(self, other) if _operand(other) else NotImplemented

    return call


def _reflected(function: Function) -> Function:
    def call(self: Ragged, other: Any) -> Any:
        return function(other, self) if _operand(other) else NotImplemented

    return call


def _getitem(self: Ragged, key: Any) -> Any:
    """``r[i]`` is a component, ``r[a:b]`` several of them; further numbers and slices index inside of components.

    Along a ragged dim, numbers and slices count within each component. None behind the first dim adds a dim.

    Raises:
        IndexError: a number out of range.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(k is None for k in keys):
        return _with_dims(self, keys)
    if not keys:
        return self
    for k in keys:
        if (
            k is not Ellipsis
            and not isinstance(k, slice)
            and (isinstance(k, bool) or not hasattr(k, "__index__") or isinstance(k, Tensor) and k.dim() > 0)
        ):
            raise TypeError(f"index: expected numbers, slices and an ellipsis, got {described(k)}")
    if any(k is Ellipsis for k in keys):
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        keys[at : at + 1] = [slice(None)] * (self.dim() - len(keys) + 1)
    if len(keys) > self.dim() or any(k is Ellipsis for k in keys):
        raise IndexError(f"index: too many for {self.dim()} dims, got {described(key)}")
    if not isinstance(keys[0], slice):
        component = selection.select(self, 0, operator.index(keys[0]))
        return component[tuple(keys[1:])] if len(keys) > 1 else component
    found: Any = self
    for dim, k in reversed(list(enumerate(keys))):  # from the last, so that the dims in front keep their numbers
        if not isinstance(found, Ragged):
            found = found[(slice(None),) * dim + (k,)]
        elif not isinstance(k, slice):
            found = selection.select(found, dim, operator.index(k))
        elif k != slice(None):
            found = selection.slice(found, dim, k.start, k.stop, 1 if k.step is None else k.step)
    return found


def _with_dims(self: Ragged, keys: list[Any]) -> Any:
    """Indexing with None among the keys."""
    if keys[0] is None:
        raise TypeError("index: None adds a dim of the components, behind the batch; got it first")
    found = self[tuple(k for k in keys if k is not None)]
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    for i, k in enumerate(keys):
        if k is None and i < at:
            found = found.unsqueeze(sum(j is None or isinstance(j, slice) for j in keys[:i]))
    for i, k in reversed(list(enumerate(keys))):
        if k is None and i > at:
            found = found.unsqueeze(-1 - sum(j is None or isinstance(j, slice) for j in keys[i + 1 :]))
    return found


def _getattr(self: Ragged, name: str) -> Any:
    """Say what to use instead of a method of Tensor that a Ragged does not have."""
    own = getattr(Ragged, name, None)
    if isinstance(own, property) and own.fget:  # it raised an AttributeError, which Python drops: raise it again
        return own.fget(self)
    if hasattr(Tensor, name) and not name.startswith("__"):
        raise AttributeError(str(_not_covered(name)))
    raise AttributeError(f"'Ragged' object has no attribute {name!r}")


def _mT(self: Ragged) -> Ragged:
    """The last two dims of every component exchanged."""
    return structure.transpose(self, -2, -1)


def _exchanged(function: Function) -> Function:
    def call(x: Any, other: Any) -> Any:
        return function(other, x)

    return call


def _as_method(name: str, function: Function) -> Function:
    def method(self: Ragged, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    method.__name__, method.__qualname__ = name, f"Ragged.{name}"
    method.__doc__ = function.__doc__
    return method


def _torch_function(cls: type, func: Function, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
    if not all(issubclass(t, (Ragged, Tensor)) for t in classes):
        return NotImplemented
    return call_torch_function(func, args, kwargs or {})


_PLACES = (torch, torch.nn.functional, torch.linalg, torch.special, torch.nested, Tensor)
# callables only: torch.float is a dtype; Tensor.real is an attribute, which the compiler of torch 2.10 cannot look up
_BY_TORCH: dict[Any, Function] = {
    getattr(place, name): function
    for name, function in _TABLE.items()
    for place in _PLACES
    if callable(getattr(place, name, None))
}
for _name, _function in _OPERATORS.items():
    _BY_TORCH[getattr(Tensor, f"__{_name}__")] = _function
    if hasattr(Tensor, f"__r{_name}__"):
        _BY_TORCH[getattr(Tensor, f"__r{_name}__")] = _exchanged(_function)
_BY_TORCH[torch.linalg.cross] = along.linalg_cross  # torch.cross takes another dim if none is given
_BY_TORCH[Tensor.__rdiv__] = _exchanged(arithmetic.div)
_BY_TORCH.update({getattr(Tensor, f"__{name}__"): _TABLE[name] for name in _COMPARISONS})
_BY_TORCH[Tensor.__invert__] = _TABLE["bitwise_not"]
_BY_TORCH[torch.nn.functional.multi_head_attention_forward] = _with_batch_second
# by name: the compiler does not find Python functions among the keys of a dictionary
_IN_PYTHON = {f.__name__: function for f, function in _BY_TORCH.items() if isinstance(f, types.FunctionType)}
_PARAMETERS = {
    f.__name__: f.__code__.co_varnames[: f.__code__.co_argcount]
    for f in _BY_TORCH
    if isinstance(f, types.FunctionType) and not hasattr(f, "__wrapped__")
}


def _attach() -> None:
    for name, function in _TABLE.items():
        if not hasattr(Ragged, name) and name not in _FUNCTIONS_ONLY:
            setattr(Ragged, name, _as_method(name, function))
    for name, function in _OPERATORS.items():
        setattr(Ragged, f"__{name}__", _forward(function))
        setattr(Ragged, f"__r{name}__", _reflected(function))
    for name in _COMPARISONS:
        setattr(Ragged, f"__{name}__", _forward(_TABLE[name]))
    for operator_name, name in _UNARY.items():
        setattr(Ragged, f"__{operator_name}__", getattr(Ragged, name))
    others = {
        "__getattr__": _getattr,
        "__getitem__": _getitem,
        "__torch_function__": classmethod(_torch_function),
        "mT": property(_mT),
        "from_packed": staticmethod(batching.from_packed),
    }
    for name, method in others.items():
        setattr(Ragged, name, method)


_attach()
