"""Operators that only one backend implements: cuDNN, MIOpen, MPS, oneDNN, NNPACK, or another package.

Their formulas are those of aten::convolution and of grid sampling. A rule is registered if its backend is available; otherwise
the operator is an entry of the catalogue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import always, formula, linear_in, rule
from torch_manualgrad.core.rule.catalogue import gap

from .convolution import backward_like, convolution_jvp, convolution_like
from .grid_sampler import (
    double_vjps,
    grid_sampler_2d_backward,
    grid_sampler_2d_double_backward,
    grid_sampler_backward_jvp,
    grid_sampler_jvp,
)

__all__ = ["BACKENDS", "BACKEND_RULES"]

_aten = torch.ops.aten
_AVAILABLE = {
    "CUDA": torch.cuda.is_available(),
    "cuDNN": torch.backends.cudnn.is_available() and torch.cuda.is_available(),
    "MIOpen": torch.version.hip is not None,
    "MPS": torch.backends.mps.is_available(),
    "oneDNN": torch.backends.mkldnn.is_available(),
    "NNPACK": torch.backends.nnpack.is_available(),
    "another package": False,
}

BACKEND_RULES: dict[str, Any] = {}
BACKENDS: dict[str, str] = {}  # operator -> its backend


def _about(backend: str, name: str, **more: Any) -> dict[str, Any]:
    """The arguments of `rule` for a backend's operator, other than its formulas."""
    BACKENDS[name] = backend
    if not _AVAILABLE[backend]:
        gap(f"aten::{name}", reason=f"only {backend} implements it: the rule is registered where it is available")
    return {
        "register": _AVAILABLE[backend],
        "improves": "missing",
        "defer_to_stock": None if "backward" in name else always,
        **more,
    }


_ON_CPU: dict[str, Any] = {"gaps": {"fake": "the operator has no fake kernel"}}


# -- convolutions -----------------------------------------------------------------------------------------------------


@formula
def _cudnn_convolution_backward(
    self: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    output_padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Cotangents of the input and the weight of a convolution without a bias.

    Args:
        self: $x$, (N, C, *).
        grad_output: the cotangent of the result.
        weight: $w$, (D, C / groups, *), or (C, D / groups, *) if transposed.
        padding, output_padding, stride, dilation, transposed, groups: of aten::convolution.
        output_mask: which of the two are wanted; the other is returned empty.

    Returns:
        The shapes of ``self`` and ``weight``.
    """
    mask = [*[bool(m) for m in output_mask], False]
    rest = (stride, padding, dilation, transposed, output_padding, groups)
    found = _aten.convolution_backward(grad_output, self, weight, None, *rest, mask)
    return tuple(g if yes else self.new_zeros(0) for g, yes in zip(found, output_mask))  # type: ignore[return-value]


_PLAIN: dict[str, Any] = {"transposed": False, "output_padding": [0]}
_TRANSPOSED: dict[str, Any] = {"transposed": True}
# backend, operator, and arguments of `convolution_like`
_CONVOLUTIONS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("MIOpen", "miopen_convolution", _PLAIN),
    ("MIOpen", "miopen_depthwise_convolution", _PLAIN),
    ("MIOpen", "miopen_convolution_transpose", _TRANSPOSED),
    ("MPS", "_mps_convolution", _PLAIN),
    ("MPS", "_mps_convolution_transpose", {**_TRANSPOSED, "bias": False}),
    ("oneDNN", "mkldnn_convolution", {**_PLAIN, **_ON_CPU}),
    (
        "NNPACK",
        "_nnpack_spatial_convolution",
        {**_PLAIN, "input": "input", "dilation": [1, 1], "groups": 1, **_ON_CPU},
    ),
    ("another package", "convolution_overrideable", {"input": "input"}),
)


# A group for each channel of the input; PyTorch's formula has one group, and raises.
def _depthwise_vjp(
    grad: Tensor,
    self: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    rest = (stride, padding, dilation, False, [0], self.shape[1])
    return _aten.convolution_backward(grad, self, weight, [grad.shape[1]], *rest, output_mask)


def _depthwise_jvp(
    self_p: Tensor,
    self_t: Tensor | None,
    weight_p: Tensor,
    weight_t: Tensor | None,
    bias_t: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    rest = (stride, padding, dilation, False, [0], self_p.shape[1])
    return convolution_jvp(self_p, self_t, weight_p, weight_t, None, bias_t, *rest)


# Sampling of cuDNN: bilinear, zeros outside, aligned corners.
_BILINEAR: dict[str, Any] = {"interpolation_mode": 0, "padding_mode": 0, "align_corners": True}


# -- the rules --------------------------------------------------------------------------------------------------------

for _name, _fixed in (("cudnn_convolution", _PLAIN), ("cudnn_convolution_transpose", _TRANSPOSED)):
    BACKEND_RULES[_name] = convolution_like(
        f"aten::{_name}",
        bias=False,
        vjp={("self", "weight"): _cudnn_convolution_backward.bind(grad_output="grad", **_fixed)},
        **_fixed,
        **_about("cuDNN", _name),
    )
for _backend, _name, _fixed in _CONVOLUTIONS:
    BACKEND_RULES[_name] = convolution_like(f"aten::{_name}", **_fixed, **_about(_backend, _name))
for _backend, _name, _fixed in (
    ("MPS", "mps_convolution_backward", _PLAIN),
    ("MPS", "mps_convolution_transpose_backward", {**_TRANSPOSED, "bias": False}),
    ("another package", "convolution_backward_overrideable", {"input": "input"}),
):
    BACKEND_RULES[_name] = backward_like(f"aten::{_name}", **_fixed, **_about(_backend, _name))
for _name in ("_conv_depthwise2d", "conv_depthwise3d"):
    BACKEND_RULES[_name] = rule(
        f"aten::{_name}",
        vjp={("self", "weight", "bias"): _depthwise_vjp},
        jvp={"result": _depthwise_jvp},
        source="ATen convolution_backward, convolution_jvp",
        **{**_about("CUDA", _name), "defer_to_stock": None},
    )
BACKEND_RULES["cudnn_grid_sampler"] = rule(
    "aten::cudnn_grid_sampler",
    vjp={("self", "grid"): grid_sampler_2d_backward.bind(grad_output="grad", input="self", **_BILINEAR)},
    jvp={"output": grid_sampler_jvp.bind(input_p="self_p", input_t="self_t", **_BILINEAR)},
    source="ATen cudnn_grid_sampler_backward; the jvp is new",
    **_about("cuDNN", "cudnn_grid_sampler"),
)
BACKEND_RULES["cudnn_grid_sampler_backward"] = rule(
    "aten::cudnn_grid_sampler_backward",
    vjp=double_vjps(
        grid_sampler_2d_double_backward, ggI="grad_grad_self", ggGrid="grad_grad_grid", input="self", **_BILINEAR
    ),
    jvp={
        ("grad_self", "grad_grid"): grid_sampler_backward_jvp.bind(
            input_p="self_p", input_t="self_t", output_mask=[True, True], **_BILINEAR
        )
    },
    source="ATen grid_sampler_2d_double_backward; the jvp is new",
    **_about("cuDNN", "cudnn_grid_sampler_backward"),
)
BACKEND_RULES["cudnn_affine_grid_generator"] = linear_in(
    "aten::cudnn_affine_grid_generator",
    {"theta": lambda grad, N, C, H, W: _aten.affine_grid_generator_backward(grad, [N, C, H, W], True)},
    **_about("cuDNN", "cudnn_affine_grid_generator"),
)
