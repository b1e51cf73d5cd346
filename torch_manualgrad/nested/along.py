"""Functions of torch along regular dims of a `Ragged`: sort, gather, cumprod, flip and others.

They apply torch's own functions to the values, with torch's derivatives. Those that count or select entries also act
along the ragged dim, by the reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import extrema, reductions
from .arithmetic import aligned
from .conversion import require_same_structure
from .ragged import Ragged
from .reshaping import batch, one_ragged_dim, regular_dim

__all__ = ["ALONG", "linalg_cross", "normalize", "of_values", "pairwise_distance"]

_REQUIRED = object()


class _Parameters(NamedTuple):
    """Those of one function after its first argument, in torch's order.

    Attributes:
        names: of them all.
        default: of the dim. None: of all values.
    """

    names: str
    default: Any = _REQUIRED

    def dim(self) -> str:
        """The name of the dim."""
        return next(n for n in self.names.split() if n in ("dim", "dims"))


_ALONG = {
    **dict.fromkeys(("all", "any", "argmax", "argmin", "median", "nanmedian"), _Parameters("dim keepdim", None)),
    **dict.fromkeys(("cummax", "cummin", "cumprod"), _Parameters("dim")),
    "aminmax": _Parameters("dim keepdim", None),
    "argsort": _Parameters("dim descending stable", -1),
    "cosine_similarity": _Parameters("x2 dim eps", 1),
    "count_nonzero": _Parameters("dim", None),
    "cross": _Parameters("other dim"),
    "diff": _Parameters("n dim", -1),
    "flip": _Parameters("dims"),
    "gather": _Parameters("dim index"),
    "gumbel_softmax": _Parameters("tau hard eps dim", -1),
    "index_select": _Parameters("dim index"),
    "kthvalue": _Parameters("k dim keepdim", -1),
    "mode": _Parameters("dim keepdim", -1),
    "repeat_interleave": _Parameters("repeats dim"),
    "roll": _Parameters("shifts dims"),
    "sort": _Parameters("dim descending", -1),
    "take_along_dim": _Parameters("indices dim"),
    "topk": _Parameters("k dim largest sorted", -1),
    "vecdot": _Parameters("y dim", -1),
}
_OPERANDS = ("other", "x2", "y")  # the names of second arguments, which broadcast with the first
# arguments that differ from component to component
_OF_ENTRIES = {"diff": ("prepend", "append"), "gather": ("index",), "take_along_dim": ("indices",)}

# name -> (x, dim, keepdim) -> the same along the ragged dim
_ALONG_RAGGED: dict[str, Callable[[Ragged, int, bool], Any]] = {
    "all": lambda x, dim, keepdim: _truth(x, reductions.sum(x.like(x.values == 0), dim, keepdim) == 0),
    "any": lambda x, dim, keepdim: _truth(x, reductions.sum(x.like(x.values != 0), dim, keepdim) > 0),
    "argmax": lambda x, dim, keepdim: extrema.max(x, dim, keepdim).indices,
    "argmin": lambda x, dim, keepdim: extrema.min(x, dim, keepdim).indices,
    "count_nonzero": lambda x, dim, keepdim: reductions.sum(x.like(x.values != 0), dim, keepdim),
}


def _truth(x: Ragged, found: Tensor) -> Tensor:
    return found.to(torch.uint8) if x.dtype == torch.uint8 else found


def of_values(x: Ragged, values: Tensor, packed_dim: int) -> Ragged:
    """Values in the components of ``x``, which lie along ``packed_dim``."""
    return x.like(values, [x.batch, *(None if d == packed_dim else n for d, n in enumerate(values.shape))])


def _along(name: str, parameters: _Parameters) -> Callable[..., Any]:
    """Apply torch's function along regular dims."""
    places = torch, torch.linalg, F, Tensor
    function = next(getattr(place, name) for place in places if hasattr(place, name))
    names, place = parameters.names.split(), parameters.dim()

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        if names == ["dims"] and len(args) > 1:
            args = (args,)
        if len(args) > len(names):
            raise TypeError(f"{name}: expected at most {', '.join(names)}, got {len(args)} arguments")
        options = dict(zip(names, args))
        if twice := options.keys() & kwargs.keys():
            raise TypeError(f"{name}: got two values of {', '.join(sorted(twice))}")
        options |= kwargs
        given = options.pop(place, parameters.default)
        if given is _REQUIRED:
            raise TypeError(f"{place}: {name} of a Ragged takes a regular dim, and none is given")
        operand = next((key for key in options if key in _OPERANDS), None)
        if operand is not None:
            x, (first, options[operand]) = aligned((x, options[operand]), ("input", operand))
        else:
            first = batch(x, name).values
        for key, value in options.items():
            if isinstance(value, Ragged) or value is not None and key in _OF_ENTRIES.get(name, ()):
                require_same_structure(x, value, name=key)
                options[key] = value.values
        if given is None:
            return function(first, **options)
        several = place == "dims" and isinstance(given, (tuple, list))
        if not several and not isinstance(given, int):
            raise TypeError(f"{place}: {name} of a Ragged takes one dim, got {given}")
        if not several and name in _ALONG_RAGGED and x.wrapped(given) == one_ragged_dim(x, name):
            keepdim = options.pop("keepdim", False)
            if options:
                raise TypeError(f"{name}: got an unexpected keyword argument {next(iter(options))!r}")
            return _ALONG_RAGGED[name](x, given, keepdim)
        dims = [regular_dim(x, d, name, place) - 1 for d in (given if several else (given,))]
        return _batches(x, dims, function(first, **{place: dims if place == "dims" else dims[0]}, **options))

    call.__name__ = name
    call.__doc__ = f"``torch.{name}`` along a regular dim."
    return call


def _batches(x: Ragged, dims: Sequence[int], found: Any) -> Any:
    """The results as a `Ragged` each; ``dims`` of the values are gone if there are fewer than before."""
    if not isinstance(found, Tensor):
        return type(found)([_batches(x, dims, part) for part in found])
    gone = sum(d < x.packed_dim for d in dims) if found.dim() < x.values.dim() else 0
    return of_values(x, found, x.packed_dim - gone)


ALONG = {name: _along(name, parameters) for name, parameters in _ALONG.items()}
linalg_cross = _along("cross", _Parameters("other dim", -1))


# -- vectors ----------------------------------------------------------------------------------------------------------


def normalize(input: Ragged, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Ragged:
    """Vectors divided by their norms, as ``torch.nn.functional.normalize``.

    Args:
        input: the batch.
        p: the order of the norm.
        dim: the dim of the vectors, not the batch.
        eps: the smallest divisor.
        out: None.

    Returns:
        The kind and shape of ``input``.

    Raises:
        IndexError: no such dim.
        ValueError: ``dim`` is the batch.
    """
    norms = reductions.vector_norm(input, p, dim, True)
    return input / (norms.clamp_min(eps) if isinstance(norms, Tensor) else norms.clamp(min=eps))


def pairwise_distance(
    x1: Ragged | Tensor, x2: Ragged | Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Ragged:
    """The norms of differences along the last dim, as ``torch.nn.functional.pairwise_distance``.

    Args:
        x1: a `Ragged`, or dense as in `add`.
        x2: the same.
        p: as in torch.
        eps: as in torch.
        keepdim: as in torch.

    Returns:
        A `Ragged` without the last dim.

    Raises:
        ValueError: arguments that do not fit, or a ragged last dim.
    """
    nested, (a, b) = aligned((x1, x2), ("x1", "x2"))
    regular_dim(nested, -1, "pairwise_distance")
    return of_values(nested, F.pairwise_distance(a, b, p, eps, keepdim), nested.packed_dim)
