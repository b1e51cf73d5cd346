"""Views, linear and piecewise linear operators on jets: term by term."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_manualgrad.core.rule import Rule, operator, parameters
from torch_manualgrad.core.rule.derivative import derivative_of

from .scaled import reshaped
from .tensor import Space, is_jet
from .vmap import each_direction, leaves, rebuilt

__all__ = [
    "PIECEWISE",
    "RULES",
    "VIEWS",
    "by_tangents",
    "constant",
    "linear",
    "packed",
    "primal_of",
    "refuse_dropped",
    "term_of",
]

# Linear where they are differentiable: the value determines the selection or the threshold.
PIECEWISE = frozenset(
    f"aten::{name}"
    for name in (
        "relu threshold threshold_backward leaky_relu leaky_relu_backward hardtanh hardtanh_backward hardshrink "
        "hardshrink_backward softshrink softshrink_backward hardsigmoid clamp clamp.Tensor clamp_min clamp_max "
        "clamp_min.Tensor clamp_max.Tensor maximum minimum fmax fmin ceil floor round trunc sign round.decimals frac "
        "fmod.Scalar remainder.Scalar div.Scalar_mode nan_to_num nextafter copysign.Scalar zero fill.Scalar fill.Tensor "
        "masked_fill.Scalar masked_fill.Tensor amax amin aminmax max min median nanmedian max.dim min.dim median.dim "
        "nanmedian.dim mode kthvalue sort sort.stable topk cummax cummin nansum max_pool2d_with_indices "
        "adaptive_max_pool2d fractional_max_pool2d max_pool3d_with_indices adaptive_max_pool3d fractional_max_pool3d "
        "native_dropout rrelu_with_noise_functional _pack_padded_sequence embedding_renorm deg2rad rad2deg real imag"
    ).split()
)


# Values that a forward has saved for a backward: functions of its other arguments, so the formulas recompute them.
_SAVED = {
    "aten::native_batch_norm_backward": ("save_mean", "save_invstd"),
    "aten::batch_norm_backward": ("save_mean", "save_var", "reserve"),
    "aten::native_layer_norm_backward": ("mean", "rstd"),
}


def primal_of(space: Space, x: Any) -> Any:
    """The value of an argument, without the series of this space."""
    if isinstance(x, (list, tuple)):
        return [primal_of(space, v) for v in x]
    return x.primal if is_jet(x) and x.space is space else x


def term_of(space: Space, x: Any, k: int) -> Any:
    """The k-th coefficient of an argument, from 1; None for zero."""
    if isinstance(x, (list, tuple)):
        found = [term_of(space, v, k) for v in x]
        return None if all(f is None for f in found) else found
    return x.terms[k - 1] if is_jet(x) and x.space is space else None


def refuse_dropped(space: Space, rule: Rule, values: Sequence[Any]) -> None:
    """Raise if an argument has a series, but the rule has no derivative in it."""
    known = {*_inputs_with_derivative(rule), *_SAVED.get(rule.name, ())}
    for name, value in zip(rule.signature.names, values):
        if name not in known and _has_term(space, value):
            raise NotImplementedError(
                f"{rule.name}: no Taylor series is known of it in {name!r}: its rule has no derivative in that argument. "
                "Call .detach() first to hold the value constant."
            )


def _inputs_with_derivative(rule: Rule) -> set[str]:
    read = {p.removesuffix("_t") for f in rule.jvp.values() for p in parameters(f) if p.endswith("_t")}
    return read.union(*rule.vjp)


def _has_term(space: Space, x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return any(_has_term(space, v) for v in x)
    return any(term_of(space, x, k) is not None for k in range(1, space.order + 1))


def _mapped(function: Callable[..., Any], tangents: list[Any], batched: bool) -> Any:
    """``function(tangents)``, or mapped over the first dimension of all of them."""
    if not batched:
        return function(tangents)
    flat = leaves(tangents)
    places = [i for i, t in enumerate(flat) if t is not None]
    shape: list[Any] = []

    def one(*given: Any) -> Any:
        full: list[Any] = [None] * len(flat)
        for i, t in zip(places, given):
            full[i] = t
        found = function(rebuilt(tangents, iter(full)))
        shape[:] = [found]
        return leaves(found)

    found = each_direction(one, *[flat[i] for i in places])
    return rebuilt(shape[0], iter(found))


def linear(rule: Rule) -> Callable[..., Any]:
    """The rule of an operator that is jointly linear in some inputs: the operator itself, on their coefficients."""
    places = [rule.signature.names.index(n) for key in rule.vjp for n in key]

    def run(space: Space, *args: Any, **kwargs: Any) -> Any:
        values = rule.signature.bind(args, kwargs)
        refuse_dropped(space, rule, values)
        primals = [primal_of(space, v) for v in values]

        def of(given: list[Any]) -> list[Any]:
            full = list(primals)
            for i, g in zip(places, given):
                full[i] = _zeros_for_none(primals[i], g)
            positional, named = rule.signature.split(full)
            found = operator(rule.name)(*positional, **named)
            return [*found] if rule.signature.output_lists else [found]

        rows = [of([primals[i] for i in places])]
        for k in range(1, space.order + 1):
            tangents = [term_of(space, values[i], k) for i in places]
            if all(t is None for t in tangents):
                rows.append([None] * len(rows[0]))
            else:
                rows.append(_mapped(of, tangents, space.directions is not None and k < space.order))
        jets = [space.jet(column) for column in zip(*rows)]
        return jets if rule.signature.output_lists else jets[0]

    return run


def _zeros_for_none(primal: Any, term: Any) -> Any:
    if isinstance(primal, (list, tuple)):
        return [_zeros_for_none(p, t) for p, t in zip(primal, term or [None] * len(primal))]
    return torch.zeros_like(primal) if term is None and primal is not None else term


def by_tangents(rule: Rule) -> Callable[..., Any]:
    """The rule of an operator that is linear around the value: its jvp, for each coefficient."""
    derivative = derivative_of(rule)  # made here, because a compiled graph cannot make one

    def run(space: Space, *args: Any, **kwargs: Any) -> Any:
        values = rule.signature.bind(args, kwargs)
        refuse_dropped(space, rule, values)
        primals = [primal_of(space, v) for v in values]
        given, named = rule.signature.split(primals)
        outputs = rule.signature.outputs(operator(rule.name)(*given, **named))
        found: list[list[Any]] = [[o] for o in outputs]
        for k in range(1, space.order + 1):
            tangents = [term_of(space, v, k) for v in values]
            terms: Sequence[Any] = [None] * len(outputs)
            if any(t is not None for t in tangents):
                batched = space.directions is not None and k < space.order
                terms = _mapped(lambda ts: _filled(derivative, primals, outputs, ts), tangents, batched)
            for series, term in zip(found, terms):
                series.append(term)
        return packed(space, rule.name, rule.signature.output_names, derivative.differentiable, found)

    return run


def _filled(derivative: Any, primals: Any, outputs: Any, tangents: Any) -> list[Any]:
    """The rule's jvp, with zeros instead of None for differentiable outputs, because vmap cannot return None."""
    full = [_zero_list(p, t) for p, t in zip(primals, tangents)]
    found = derivative.jvp(primals, outputs, full)
    return [
        torch.zeros_like(o)
        if f is None and differentiable and not isinstance(o, (list, tuple))
        else o
        if f is None
        else f
        for f, o, differentiable in zip(found, outputs, derivative.differentiable)
    ]


def _zero_list(primal: Any, tangent: Any) -> Any:
    return [None] * len(primal) if isinstance(primal, list) and tangent is None else tangent


# Outputs that are constant in every neighbourhood.
_CONSTANT = {
    "aten::linalg_lu": "P",
    "aten::lu_unpack": "P",
    "manualgrad::lu": "P",
    "aten::multilabel_margin_loss_forward": "is_target",
    "aten::nll_loss_forward": "total_weight",
    "aten::nll_loss2d_forward": "total_weight",
    "aten::rrelu_with_noise_functional": "noise_out",
}


def packed(
    space: Space, name: str, outputs: Sequence[str], differentiable: Sequence[bool], found: Sequence[list[Any]]
) -> Any:
    """The results of an operator, given the series of its ``outputs``; those without a derivative become
    `Space.lost`."""
    results: list[Any] = []
    for output, series, has_derivative in zip(outputs, found, differentiable):
        primal = series[0]
        if primal is None:
            results.append(None)
        elif isinstance(primal, (list, tuple)):
            columns = [[None if s is None else s[i] for s in series] for i in range(len(primal))]
            results.append([space.jet(c) for c in columns])
        elif not (primal.dtype.is_floating_point or primal.dtype.is_complex) or _CONSTANT.get(name) == output:
            results.append(primal)
        else:
            results.append(
                space.jet(series) if has_derivative else space.lost(primal, f"{name}: its output {output!r}")
            )
    return results[0] if len(results) == 1 else tuple(results)


# -- views ---------------------------------------------------------------------------------------------------------------


def view(name: str) -> Callable[..., Any]:
    """The rule of an operator that is linear in only its first argument."""

    def run(space: Space, self: Any, *rest: Any, **others: Any) -> Any:
        op = operator(name)
        primal = op(self.primal, *rest, **others)
        several = isinstance(primal, (list, tuple))

        def parted(x: Any) -> Any:
            found = op(x, *rest, **others)
            return found if several else [found]

        columns = [[p] for p in (primal if several else [primal])]
        for k, term in enumerate(self.terms, start=1):
            parts: Any = [None] * len(columns)
            if term is not None:
                batched = space.directions is not None and k < space.order
                parts = each_direction(parted, term) if batched else parted(term)
            for column, part in zip(columns, parts):
                column.append(part)
        found = [space.jet(c) for c in columns]
        return found if several else found[0]

    return run


def _converted(space: Space, self: Any, **others: Any) -> Any:
    """A copy with another dtype; integers are constant."""
    dtype = others.get("dtype") or self.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return view("aten::_to_copy")(space, self, **others)
    return operator("aten::_to_copy")(self.primal, **others)


def _bits(space: Space, self: Any, dtype: torch.dtype) -> Any:
    """The bits of numbers, as integers: constant."""
    if dtype.is_floating_point or dtype.is_complex:
        raise NotImplementedError(f"aten::view.dtype: no Taylor series is known of bits that are read as {dtype}")
    return self.primal.view(dtype)


def _shaped(space: Space, self: Any, size: Any, *_: Any, **__: Any) -> Any:
    """``view`` and similar ones, as a reshape: the coefficients may have different strides than in the trace."""
    return _reshaped(space, self, self.primal.reshape(size))


def _reshaped(space: Space, self: Any, primal: Any) -> Any:
    shape = tuple(primal.shape)
    terms = [
        None if t is None else reshaped(t, shape) if _batched(space, k) else t.reshape(shape)
        for k, t in enumerate(space.factored(self)[1:], start=1)
    ]
    return space.jet([primal, *terms])


def _batched(space: Space, k: int) -> bool:
    return space.directions is not None and k < space.order


def _permuted(space: Space, self: Any, order: Callable[[int], list[int]]) -> Any:
    dims = order(self.ndim)
    terms = [
        None if t is None else t.permute(0, *[d + 1 for d in dims]) if _batched(space, k) else t.permute(dims)
        for k, t in enumerate(self.terms, start=1)
    ]
    return space.jet([self.primal.permute(dims), *terms])


def _swapped(ndim: int, a: int, b: int) -> list[int]:
    dims = list(range(ndim))
    dims[a], dims[b] = dims[b], dims[a]
    return dims


def _unsqueezed(space: Space, self: Any, *args: Any) -> Any:
    return _reshaped(space, self, self.primal.unsqueeze(*args))


def _squeezed(space: Space, self: Any, *args: Any) -> Any:
    return _reshaped(space, self, self.primal.squeeze(*args))


def _expanded(space: Space, self: Any, size: Any, **others: Any) -> Any:
    primal = self.primal.expand(size)
    missing = primal.ndim - self.ndim
    terms = [
        t.reshape(t.shape[0], *[1] * missing, *t.shape[1:]) if t is not None and missing and _batched(space, k) else t
        for k, t in enumerate(self.terms, start=1)
    ]
    return space.jet([primal, *terms])


def _resolved(space: Space, self: Any) -> Any:
    """The tensor without conjugate bits, which a trace does not show."""
    return space.jet([None if c is None else c.resolve_conj() for c in space.coefficients(self)])


def _in_pairs(space: Space, self: Any) -> Any:
    """The tensor with pairs of numbers adjacent in memory, like the value: coefficients may have another layout."""
    value, *terms = space.coefficients(self)
    return space.jet([value, *[None if t is None else t.contiguous() for t in terms]])


def _strided(space: Space, self: Any, size: Sequence[int], stride: Sequence[int], storage_offset: Any = None) -> Any:
    """Entries selected by their places in memory; the tensor must fill its memory, in order."""
    value = self.primal
    first = 0 if storage_offset is None else storage_offset - value.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(size, stride)) if all(size) else first
    if not value.is_contiguous() or first < 0 or last >= value.numel() and all(size):
        raise NotImplementedError(
            "aten::as_strided: a Taylor series is known only of a contiguous tensor, and within it; use views or indexing"
        )
    places = torch.arange(value.numel(), device=value.device).as_strided(tuple(size), tuple(stride), first)
    return self.reshape(-1).index_select(0, places.reshape(-1)).reshape(tuple(size))


def constant(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule whose results are not jets."""
    rule.constant = True  # type: ignore[attr-defined]
    return rule


_BY_VMAP = (
    "_conj _neg_view _reshape_alias alias diagonal select.int slice.Tensor split.Tensor split_with_sizes unbind.int unfold "
    "view_as_real view_as_complex lift_fresh"
).split()
RULES: dict[str, Callable[..., Any]] = {
    **{f"aten::{name}": view(f"aten::{name}") for name in _BY_VMAP},
    "aten::view_as_real": lambda space, self: view("aten::view_as_real")(space, _resolved(space, self)),
    "aten::view_as_complex": lambda space, self: view("aten::view_as_complex")(space, _in_pairs(space, self)),
    "aten::view": _shaped,
    "aten::_unsafe_view": _shaped,
    "aten::_reshape_alias": _shaped,
    "aten::permute": lambda space, self, dims: _permuted(space, self, lambda n: [d % n for d in dims]),
    "aten::transpose.int": lambda space, self, a, b: (
        _permuted(space, self, lambda n: _swapped(n, a % n, b % n)) if self.ndim else self
    ),
    "aten::t": lambda space, self: _permuted(space, self, lambda n: list(range(n))[::-1]),
    "aten::unsqueeze": _unsqueezed,
    "aten::squeeze": _squeezed,
    "aten::squeeze.dim": _squeezed,
    "aten::squeeze.dims": _squeezed,
    "aten::expand": _expanded,
    "aten::as_strided": _strided,
    "aten::detach": constant(lambda space, self: self.primal.detach()),
    "manualgrad::constant": constant(lambda space, self: self.primal),
    "aten::_to_copy": _converted,
    "aten::view.dtype": constant(_bits),
    "aten::clone": view("aten::clone"),
    "aten::unsafe_split.Tensor": view("aten::split.Tensor"),
    "aten::unsafe_split_with_sizes": view("aten::split_with_sizes"),
}
_COPIES = ("_unsafe_view", "detach", "_to_copy", "clone", "unsafe_split.Tensor", "unsafe_split_with_sizes")
VIEWS = frozenset({*RULES} - {"manualgrad::constant", "aten::view.dtype"} - {f"aten::{name}" for name in _COPIES})
