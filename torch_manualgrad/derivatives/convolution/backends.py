"""The operators that only some backends have: cuDNN, MIOpen, MPS, oneDNN, NNPACK, and those that other packages implement.

Their formulas are those of aten::convolution and of grid sampling. A rule is in the registry where its backend is; elsewhere
the operator is an entry of the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, always, formula, linear_in, operator, rule
from torch_manualgrad.core.rule.catalogue import gap

from .common import laid_out, random
from .convolution import backward_like, convolution_jvp, convolution_like
from .grid_sampler import (
    grid_sampler_2d_backward,
    grid_sampler_2d_double_backward,
    grid_sampler_backward_jvp,
    grid_sampler_jvp,
)
from .grid_sampler_rules import double_vjps

__all__ = ["BACKEND_RULES", "arguments_of"]

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
_DEVICES = {"CUDA": "cuda", "cuDNN": "cuda", "MIOpen": "cuda", "MPS": "mps"}

BACKEND_RULES: dict[str, Any] = {}


def _about(backend: str, name: str, **more: Any) -> dict[str, Any]:
    """What the rule of a backend's operator has, besides its formulas."""
    if not _AVAILABLE[backend]:
        gap(f"aten::{name}", reason=f"only {backend} implements it: the rule is active where that is, and this is not")
    return {
        "register": _AVAILABLE[backend],
        "improves": "missing",
        "defer_to_stock": None if "backward" in name else always,
        "samples": _samples(name, _DEVICES.get(backend, "cpu")),
        **more,
    }


# -- samples ----------------------------------------------------------------------------------------------------------


def arguments_of(name: str, dtype: torch.dtype, device: str = "cpu") -> list[Any]:
    """Small ones for an operator that is a convolution or the gradient of one, by the names in its schema."""
    transposed, depthwise = "transpose" in name, "depthwise" in name
    dims = 3 if "3d" in name else 2
    x, w = (1, 2, *(3, 4, 2)[:dims]), (2, 1 if depthwise else 2, *(2, 2, 1)[:dims])
    geometry: dict[str, Any] = {
        "kernel_size": list(w[2:]),
        "stride": [2, *[1] * (dims - 1)],
        "padding": [1, *[0] * (dims - 1)],
        "output_padding": [1 if transposed else 0, *[0] * (dims - 1)],
        "dilation": [1] * dims,
        "transposed": transposed,
        "groups": 2 if depthwise else 1,
    }
    tensors = [random(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate((x, w, (2,)))]
    called = [geometry[a] for a in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")]
    shape = _aten.convolution(*[t.cpu() for t in tensors], *called).shape
    named = {
        "self": tensors[0],
        "input": tensors[0],
        "weight": tensors[1],
        "bias": tensors[2],
        "grad_output": random(*shape, dtype=dtype, device=device, seed=3),
        **geometry,
    }
    schema = operator(f"aten::{name}")._schema
    mask = [True] * len(schema.returns)
    return [named.get(a.name, mask if a.name == "output_mask" else False) for a in schema.arguments]


def _samples(name: str, device: str) -> Callable[..., Iterable[Sample]]:
    single = device != "cuda"  # none of the others takes double precision

    def samples(dtype: torch.dtype, _: torch.device | str) -> Iterable[Sample]:
        if not dtype.is_complex:
            yield Sample(*arguments_of(name, torch.float32 if single else dtype, device))

    return samples


def _probe(name: str) -> Callable[..., Any]:
    """The operator, on contiguous tensors, as it reads others wrongly; in double precision its definition."""
    names = [a.name for a in operator(f"aten::{name}")._schema.arguments]

    def probe(*args: Any) -> Any:
        if not args[0].numel():
            raise RuntimeError(f"{name} of an empty batch ends the process")
        if args[0].dtype != torch.float64:
            return laid_out(getattr(_aten, name))(*args)
        given = dict(zip(names, args))
        x, w, bias = given.get("self", given.get("input")), given["weight"], given["bias"]
        rest = (given.get("dilation", [1]), False, [0], given.get("groups", 1))
        return _aten.convolution(x, w, bias, given["stride"], given["padding"], *rest)

    return probe


def _on_cpu(name: str) -> dict[str, Any]:
    return {"probe": _probe(name), "gaps": {"fake": "the operator has no fake kernel"}}


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
        self: x, (N, C, *).
        grad_output: the cotangent of the result.
        weight: w, (D, C / groups, *), or (C, D / groups, *) if transposed.
        padding, output_padding, stride, dilation, transposed, groups: of aten::convolution.
        output_mask: which of the two are wanted; the other comes back empty.

    Returns:
        The shapes of ``self`` and ``weight``.

    References:
        ATen _cudnn_convolution_backward.
    """
    mask = [*[bool(m) for m in output_mask], False]
    rest = (stride, padding, dilation, transposed, output_padding, groups)
    found = _aten.convolution_backward(grad_output, self, weight, None, *rest, mask)
    return tuple(g if yes else self.new_zeros(0) for g, yes in zip(found, output_mask))  # type: ignore[return-value]


def _without_bias(*args: Any) -> tuple[Tensor | None, ...]:
    return tuple(g if yes else None for g, yes in zip(_cudnn_convolution_backward(*args), args[-1]))


_CUDNN: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "cudnn_convolution": (
        lambda grad, self, weight, padding, stride, dilation, groups, output_mask: _without_bias(
            self, grad, weight, padding, [0], stride, dilation, False, groups, output_mask
        ),
        {"transposed": False, "output_padding": [0]},
    ),
    "cudnn_convolution_transpose": (
        lambda grad, self, weight, padding, output_padding, stride, dilation, groups, output_mask: _without_bias(
            self, grad, weight, padding, output_padding, stride, dilation, True, groups, output_mask
        ),
        {"transposed": True},
    ),
}
for _name, (_vjp, _fixed) in _CUDNN.items():
    BACKEND_RULES[_name] = convolution_like(
        f"aten::{_name}",
        bias=False,
        vjp={("self", "weight"): _vjp},
        **_fixed,
        **_about("cuDNN", _name),
    )

_PLAIN: dict[str, Any] = {"transposed": False, "output_padding": [0]}
_TRANSPOSED: dict[str, Any] = {"transposed": True}
# backend, operator, and what `convolution_like` is to know of it
_CONVOLUTIONS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("MIOpen", "miopen_convolution", _PLAIN),
    ("MIOpen", "miopen_depthwise_convolution", _PLAIN),
    ("MIOpen", "miopen_convolution_transpose", _TRANSPOSED),
    ("MPS", "_mps_convolution", _PLAIN),
    ("MPS", "_mps_convolution_transpose", {**_TRANSPOSED, "bias": False}),
    ("oneDNN", "mkldnn_convolution", {**_PLAIN, **_on_cpu("mkldnn_convolution")}),
    (
        "NNPACK",
        "_nnpack_spatial_convolution",
        {
            **_PLAIN,
            "input": "input",
            "dilation": [1, 1],
            "groups": 1,
            **_on_cpu("_nnpack_spatial_convolution"),
        },
    ),
    ("another package", "convolution_overrideable", {"input": "input"}),
)
for _backend, _name, _fixed in _CONVOLUTIONS:
    BACKEND_RULES[_name] = convolution_like(f"aten::{_name}", **_fixed, **_about(_backend, _name))
for _backend, _name, _fixed in (
    ("MPS", "mps_convolution_backward", _PLAIN),
    ("MPS", "mps_convolution_transpose_backward", {**_TRANSPOSED, "bias": False}),
    ("another package", "convolution_backward_overrideable", {"input": "input"}),
):
    BACKEND_RULES[_name] = backward_like(f"aten::{_name}", **_fixed, **_about(_backend, _name))


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
    found = _aten.convolution_backward(grad, self, weight, [grad.shape[1]], *rest, output_mask)
    return tuple(g if yes else None for g, yes in zip(found, output_mask))


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


for _name in ("_conv_depthwise2d", "conv_depthwise3d"):
    BACKEND_RULES[_name] = rule(
        f"aten::{_name}",
        vjp={("self", "weight", "bias"): _depthwise_vjp},
        jvp={"result": _depthwise_jvp},
        source="ATen convolution_backward, convolution_jvp",
        **{**_about("CUDA", _name), "defer_to_stock": None},
    )


# -- sampling of cuDNN: bilinear, zeros outside, aligned corners --------------------------------------------------------


def _grid_vjp(grad: Tensor, self: Tensor, grid: Tensor, output_mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    found = grid_sampler_2d_backward(grad, self, grid, 0, 0, True, list(output_mask))
    return tuple(g if yes else None for g, yes in zip(found, output_mask))


def _image_and_grid(backward: bool) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, _: torch.device | str) -> Iterable[Sample]:
        if not dtype.is_complex:
            image = random(1, 2, 4, 3, dtype=dtype, device="cuda")
            grid = random(1, 2, 2, 2, dtype=dtype, device="cuda", seed=1).tanh()
            g = random(1, 2, 2, 2, dtype=dtype, device="cuda", seed=2)
            yield Sample(image, grid, g) if backward else Sample(image, grid)

    return samples


def _maps(dtype: torch.dtype, _: torch.device | str) -> Iterable[Sample]:
    if not dtype.is_complex:
        yield Sample(random(2, 2, 3, dtype=dtype, device="cuda"), 2, 1, 2, 3)


_BILINEAR: dict[str, Any] = {"interpolation_mode": 0, "padding_mode": 0, "align_corners": True}
BACKEND_RULES["cudnn_grid_sampler"] = rule(
    "aten::cudnn_grid_sampler",
    vjp={("self", "grid"): _grid_vjp},
    jvp={"output": grid_sampler_jvp.bind(input_p="self_p", input_t="self_t", **_BILINEAR)},
    source="ATen cudnn_grid_sampler_backward; the jvp is new",
    **_about("cuDNN", "cudnn_grid_sampler", samples=_image_and_grid(False)),
)
BACKEND_RULES["cudnn_grid_sampler_backward"] = rule(
    "aten::cudnn_grid_sampler_backward",
    vjp=double_vjps(grid_sampler_2d_double_backward, "self", ("grad_grad_self", "grad_grad_grid"), **_BILINEAR),
    jvp={
        ("grad_self", "grad_grid"): grid_sampler_backward_jvp.bind(
            input_p="self_p", input_t="self_t", output_mask=[True, True], **_BILINEAR
        )
    },
    source="ATen grid_sampler_2d_double_backward; the jvp is new",
    **_about("cuDNN", "cudnn_grid_sampler_backward", samples=_image_and_grid(True)),
)
BACKEND_RULES["cudnn_affine_grid_generator"] = linear_in(
    "aten::cudnn_affine_grid_generator",
    {"theta": lambda grad, N, C, H, W: _aten.affine_grid_generator_backward(grad, [N, C, H, W], True)},
    **_about("cuDNN", "cudnn_affine_grid_generator", samples=_maps),
)
