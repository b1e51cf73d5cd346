"""Convolutions with a kernel of their own on the CPU, and conv_tbc, whose dims are time, batch, channels.

PyTorch calls most of them below aten::convolution, where autograd does not see them. Called by their own names they have
no forward mode in PyTorch. Plain calls in reverse mode stay with PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, always, rule

from .common import as_function, laid_out, random
from .convolution import backward_like, convolution_jvp, convolution_like

_aten = torch.ops.aten
_ABOUT: dict[str, Any] = {"improves": "missing", "defer_to_stock": always}


def _tensors(x: Sequence[int], w: Sequence[int], dtype: torch.dtype, device: Any, channels: int) -> list[Tensor]:
    return [random(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate((x, w, (channels,)))]


def _samples(dims: int, *cases: Sequence[Any], transposed: bool = False) -> Callable[..., Iterable[Sample]]:
    """Of an operator that takes the size of the kernel before the bias; ``cases`` are what comes after the bias."""
    x, w = (1, 2, *(3, 4, 2)[:dims]), (2, 3 if transposed else 2, *(2, 2, 1)[:dims])

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        for number, rest in enumerate(cases):
            *tensors, bias = _tensors(x, w, dtype, device, 3 if transposed else 2)
            yield Sample(*tensors, list(w[2:]), None if number else bias, *rest)

    return samples


def _slow_backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for sample in _IN_2D(dtype, device):
        x, w, kernel, bias, *rest = sample.args
        g = _aten._slow_conv2d_forward(*sample.args).cos()
        yield Sample(g, x, w, kernel, *rest, [True, True, bias is not None])


_IN_2D = _samples(2, ([1, 1], [0, 0]), ([2, 1], [1, 0]))
_IN_3D = _samples(3, ([1, 1, 1], [0, 0, 0]), ([1, 2, 1], [0, 1, 0]))
_DILATED = {
    2: _samples(2, ([1, 1], [0, 1], [1, 2]), ([2, 1], [1, 0], [2, 1])),
    3: _samples(3, ([1, 1, 1], [0, 1, 0], [1, 2, 1])),
}
_TRANSPOSED = {
    2: _samples(2, ([2, 1], [0, 1], [1, 0], [1, 1]), ([1, 1], [0, 0], [0, 0], [2, 1]), transposed=True),
    3: _samples(3, ([2, 1, 1], [0, 1, 0], [1, 0, 0], [1, 1, 1]), transposed=True),
}
_PLAIN: dict[str, Any] = {"transposed": False, "output_padding": [0], "groups": 1}


def _rule(name: str, samples: Callable[..., Iterable[Sample]], **constants: Any) -> None:
    about = {**_ABOUT, "probe": as_function(getattr(_aten, name)), **constants}
    convolution_like(f"aten::{name}", samples=samples, **about)


def _is_contiguous(self: Tensor, weight: Tensor, *_: Any) -> bool:
    """PyTorch's backward reads other tensors as if they were."""
    return self.is_contiguous() and weight.is_contiguous()


_rule(
    "_slow_conv2d_forward",
    _IN_2D,
    dilation=[1, 1],
    defer_to_stock=_is_contiguous,
    improves=("values", "missing"),
    **_PLAIN,
)
_rule("slow_conv3d_forward", _IN_3D, dilation=[1, 1, 1], **_PLAIN)
for _dims in (2, 3):
    _rule(f"slow_conv_dilated{_dims}d", _DILATED[_dims], **_PLAIN)
    _rule(f"slow_conv_transpose{_dims}d", _TRANSPOSED[_dims], transposed=True, groups=1)
backward_like(
    "aten::_slow_conv2d_backward.output_mask",
    samples=_slow_backward_samples,
    probe=laid_out(_aten._slow_conv2d_backward.output_mask),
    dilation=[1, 1],
    improves="missing",
    **_PLAIN,
)


# -- time, batch, channels --------------------------------------------------------------------------------------------


def _to_bct(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0)


def _conv_tbc_vjp(
    grad: Tensor, self: Tensor, weight: Tensor, pad: int, output_mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    found = _aten.convolution_backward(
        _to_bct(grad),
        _to_bct(self),
        weight.permute(2, 1, 0),
        [grad.shape[2]],
        [1],
        [pad],
        [1],
        False,
        [0],
        1,
        output_mask,
    )
    x, w, b = (g if yes else None for g, yes in zip(found, output_mask))
    return None if x is None else x.permute(2, 0, 1), None if w is None else w.permute(2, 1, 0), b


def _conv_tbc_jvp(
    self_p: Tensor,
    self_t: Tensor | None,
    weight_p: Tensor,
    weight_t: Tensor | None,
    bias_p: Tensor,
    bias_t: Tensor | None,
    pad: int,
) -> Tensor:
    x, dx = (None if t is None else _to_bct(t) for t in (self_p, self_t))
    w, dw = (None if t is None else t.permute(2, 1, 0) for t in (weight_p, weight_t))
    return convolution_jvp(x, dx, w, dw, bias_p, bias_t, [1], [pad], [1], False, [0], 1).permute(2, 0, 1)


def _tbc_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if not dtype.is_complex:
        for length, pad in ((2, 0), (3, 1)):
            yield Sample(*_tensors((4, 2, 2), (length, 2, 3), dtype, device, 3), pad)


rule(
    "aten::conv_tbc",
    vjp={("self", "weight", "bias"): _conv_tbc_vjp},
    jvp={"result": _conv_tbc_jvp},
    source="ATen conv_tbc_backward, which is a convolution of permuted dims; the jvp is new",
    samples=_tbc_samples,
    probe=laid_out(_aten.conv_tbc),
    **_ABOUT,
)
