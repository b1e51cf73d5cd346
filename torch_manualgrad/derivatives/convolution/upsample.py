"""Upsampling, which is linear: its transpose is its backward operator, and the transpose of that is the upsampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, bound_to, linear_in

from .common import as_function, random

_SIZES = ((3,), (3, 2), (2, 3, 2))  # of the input, in one to three dims
_LARGER = ((5,), (4, 3), (3, 4, 3))
_SMALLER = ((2,), (2, 3), (3, 2, 1))
_FAIL_OPCHECK = ("upsample_linear1d", "upsample_trilinear3d", "_upsample_bicubic2d_aa")


def _samples(dims: int, corners: bool) -> Callable[..., Iterable[Sample]]:
    """Of the operator: to a larger size and a smaller one, by sizes and by scales."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        x = random(1, 2, *_SIZES[dims - 1], dtype=dtype, device=device)
        yield Sample(x, list(_LARGER[dims - 1]), *[True] * corners, *[None] * dims)
        yield Sample(x, list(_SMALLER[dims - 1]), *[False] * corners, *[None] * dims)
        scaled = [int(1.7 * n) for n in _SIZES[dims - 1]]
        yield Sample(x, scaled, *[False] * corners, *[1.7] * dims)

    return samples


def _backward_samples(dims: int, corners: bool) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for sample in _samples(dims, corners)(dtype, device):
            x, size, *rest = sample.args
            g = random(*x.shape[:2], *size, dtype=dtype, device=device)
            yield Sample(g, size, list(x.shape), *rest)

    return samples


def _upsampling(name: str, dims: int, corners: bool, **about: Any) -> None:
    """The rules of an operator and its backward.

    Args:
        name: the operator.
        dims: of space.
        corners: whether it has an argument align_corners.
        about: arguments of `rule`.
    """
    probe = as_function(getattr(torch.ops.aten, name)) if name in _FAIL_OPCHECK else None
    scales = ["scales"] if dims == 1 else [f"scales_{d}" for d in "dhw"[-dims:]]
    rest = ["align_corners"] * corners + scales
    forward, backward = (getattr(torch.ops.aten, n, None) for n in (name, f"{name}_backward"))

    def vjp(grad: Tensor, size: Sequence[int], sizes: Sequence[int], *given: Any) -> Tensor:
        return backward(grad, size, sizes, *given)  # type: ignore[misc]

    def backward_vjp(grad: Tensor, size: Sequence[int], *given: Any) -> Tensor:
        return forward(grad, size, *given)  # type: ignore[misc]

    linear_in(
        f"aten::{name}",
        {"self": bound_to(vjp, ["grad", "output_size", "self_sizes", *rest])},
        samples=_samples(dims, corners),
        probe=probe,
        **about,
    )
    linear_in(
        f"aten::{name}_backward",
        {"grad_output": bound_to(backward_vjp, ["grad", "output_size", *rest])},
        samples=_backward_samples(dims, corners),
        **about,
    )


for _dims in (1, 2, 3):
    _upsampling(f"upsample_nearest{_dims}d", _dims, False)
    _upsampling(f"_upsample_nearest_exact{_dims}d", _dims, False)
for _dims, _name in enumerate(("linear1d", "bilinear2d", "trilinear3d"), 1):
    _upsampling(f"upsample_{_name}", _dims, True)
for _name in ("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
    _upsampling(_name, 2, True)
_upsampling("_upsample_lanczos2d_aa", 2, True, since="2.13")
