"""Max pooling: the operators return the places of the maxima, and all their derivatives are gathers and scatters by these.

The backward operators and max_unpool are linear, and their transposes gather. At a tie the maximum that PyTorch chose has the
whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, bound_to, formula, linear_in, rule

from .common import laid_out, random
from .pooling import linear_backward

_aten = torch.ops.aten


@formula
def max_pool_double_backward(grad: Tensor, indices: Tensor, dim: int) -> Tensor:
    """Cotangent of the cotangent of the maxima, given that of their input: what is at their places.

    It is the tangent of the maxima, too, given that of the input.

    Args:
        grad: (*, ...), with ``dim`` last dims.
        indices: of the maxima, in these dims flattened, (*, ...), int64.
        dim: the number of dims that are pooled.

    Returns:
        The shape of ``indices``.

    Note:
        Where not differentiable: at ties, where one of the maxima is taken for the only one.

    References:
        ATen max_pool_double_backward.
    """
    found = _flat(grad, dim).gather(-1, _flat(indices, dim))
    return found.reshape(indices.shape)


def _flat(x: Tensor, dim: int) -> Tensor:
    """The last dims as one; not by flatten, which PyTorch's vmap of batched gradients refuses."""
    return x.reshape([*x.shape[:-dim], math.prod(x.shape[-dim:])])


# name -> the number of dims, the names of the arguments after self, and of those its backward takes; their values
_POOLS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...], tuple[tuple[Any, ...], ...]]] = {}
for _dims in (2, 3):
    _window = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    _values: tuple[tuple[Any, ...], ...] = (
        ([2] * _dims, [], [0] * _dims, [1] * _dims, False),
        ([2] * _dims, [1] * _dims, [1] * _dims, [1, 2, 1][:_dims], True),
    )
    _POOLS[f"max_pool{_dims}d_with_indices"] = (_dims, _window, _window, _values)
    _POOLS[f"adaptive_max_pool{_dims}d"] = (_dims, ("output_size",), (), (([2, 3, 1][:_dims],),))
    _fractions = ("kernel_size", "output_size")
    _POOLS[f"fractional_max_pool{_dims}d"] = (_dims, _fractions, _fractions, (([2, 2, 1][:_dims], [1, 2, 1][:_dims]),))


def _samples(name: str) -> Callable[..., Iterable[Sample]]:
    dims, *_, values = _POOLS[name]

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        x = random(1, 2, *(3, 4, 2)[:dims], dtype=dtype, device=device)
        for rest in values:
            if name.startswith("fractional"):
                rest = (*rest, random(1, 2, dims, dtype=dtype, device=device, seed=1).sigmoid())
            yield Sample(x, *rest)

    return samples


def _backward_samples(name: str) -> Callable[..., Iterable[Sample]]:
    *_, kept, _ = _POOLS[name]

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for sample in _samples(name)(dtype, device):
            maxima, indices = getattr(_aten, name)(*sample.args)
            yield Sample(maxima.cos(), sample.args[0], *sample.args[1 : 1 + len(kept)], indices)

    return samples


def _first(name: str) -> Callable[..., Tensor]:
    """The maxima, without their places; what is random in the choice of windows is no input."""

    def probe(*args: Any) -> Tensor:
        return getattr(_aten, name)(*args[:-1], args[-1].detach() if isinstance(args[-1], Tensor) else args[-1])[0]

    return probe


def _pool(name: str) -> None:
    """The rules of an operator and its backward."""
    dims, arguments, kept, _ = _POOLS[name]
    backward = getattr(_aten, f"{name}_backward")

    def vjp(grad: Tensor, x: Tensor, indices: Tensor, *rest: Any) -> Tensor:
        return backward(grad, x, *rest, indices)

    rule(
        f"aten::{name}",
        vjp={"self": bound_to(vjp, ["grad_result0", "self", "result1", *kept])},
        jvp={"result0": max_pool_double_backward.bind(grad="self_t", indices="result1", dim=dims)},
        not_differentiable="result1",
        source="ATen derivatives.yaml",
        samples=_samples(name),
        finite=True,
        probe=_first(name) if name.startswith("fractional") else None,
    )
    linear_backward(
        f"aten::{name}_backward",
        max_pool_double_backward.bind(dim=dims),
        arguments=(*kept, "indices"),
        samples=_backward_samples(name),
        kind="rule",
        finite=True,
        # PyTorch's reads other than contiguous indices wrongly
        probe=laid_out(backward) if name.startswith("fractional") or name == "adaptive_max_pool3d" else None,
    )


for _name in _POOLS:
    _pool(_name)


# -- unpooling --------------------------------------------------------------------------------------------------------


def _unpool_samples(dims: int) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        size = [2, 4, 3][:dims]
        found = getattr(_aten, f"max_pool{dims}d_with_indices")(
            random(1, 2, *size, dtype=dtype, device=device), [1, *[2] * (dims - 1)]
        )
        yield Sample(*found, size, *([[1, 2, 2], [0, 0, 0]] if dims == 3 else []))

    return samples


for _dims in (2, 3):
    linear_in(
        f"aten::max_unpool{_dims}d",
        {"self": max_pool_double_backward.bind(dim=_dims)},
        samples=_unpool_samples(_dims),
    )
