"""Samples of the rules of elementwise operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, Sampler, operator, probe_for, samples_for

from ..elementwise.fake_quantize import along, slopes
from .drawing import alike, both

# -- activations -------------------------------------------------------------------------------------------------------


aten = torch.ops.aten


@samples_for("aten::log_sigmoid_backward")
def log_sigmoid_backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for grad, x in (s.args for s in alike(Tensor, Tensor)(dtype, device)):
        yield Sample(grad, x, (-x.abs()).exp())


samples_for("aten::softplus_backward")(both(alike(Tensor, Tensor, 1.0, 20.0), alike(Tensor, Tensor, 2.0, 1.0)))
samples_for("aten::gelu_backward")(
    lambda dtype, device: [
        Sample(*s.args, approximate=a) for a in ("none", "tanh") for s in alike(Tensor, Tensor)(dtype, device)
    ]
)
samples_for("aten::log_sigmoid_forward")(alike(Tensor))
samples_for("aten::sigmoid_backward", "aten::tanh_backward")(alike(Tensor, Tensor, complex_too=True))
probe_for("aten::log_sigmoid_forward")(lambda self: torch.ops.aten.log_sigmoid_forward(self)[0])
probe_for("aten::log_sigmoid_backward")(
    lambda grad_output, self, buffer: torch.ops.aten.log_sigmoid_backward(
        grad_output, self, (-self.abs()).exp().detach()
    )
)


# -- arithmetic --------------------------------------------------------------------------------------------------------


@samples_for("aten::ldexp.Tensor")
def ldexp_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = torch.tensor([0.45, -1.7, 0.6], device="cpu").to(device, dtype)
    if not dtype.is_complex:
        yield Sample(x, torch.tensor([[-1.5], [0.4]], device="cpu").to(device, dtype))
    yield Sample(x, torch.tensor([-2, 3, 1], dtype=torch.int32, device=device))


# -- clamp -------------------------------------------------------------------------------------------------------------


@samples_for("aten::clamp.Tensor")
def clamp_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x = torch.tensor([[-2.1, -0.7, 0.2, 0.9], [2.3, 0.4, -1.4, 1.6]], dtype=dtype, device=device)
    low = torch.tensor([-1.0, -0.5, 0.5, 0.1], dtype=dtype, device=device)
    high = torch.tensor([[0.6], [0.8]], dtype=dtype, device=device)
    yield from (Sample(x, low, high), Sample(x, low), Sample(x, None, high), Sample(x, high + 0.1, low[:1]))


# -- copies ------------------------------------------------------------------------------------------------------------


@samples_for("aten::clone", "aten::_lazy_clone", "aten::_conj_physical")
def copies(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = torch.linspace(-2.3, 2.9, 6, dtype=torch.float64, device=device).reshape(2, 3)
    x = torch.complex(x, x.flip(-1)).to(dtype) if dtype.is_complex else x.to(dtype)
    yield from (Sample(x), Sample(x[0, 0]), Sample(x[:0]))


@samples_for("aten::_to_copy")
def to_copycopies(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x, number, _ = (s.args[0] for s in copies(dtype, device))
    yield from (Sample(x), Sample(number, dtype=torch.complex128), Sample(x.T, memory_format=torch.contiguous_format))


# -- dirichlet ---------------------------------------------------------------------------------------------------------


@samples_for("aten::_sample_dirichlet")
def dirichlet_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """A single component, which is always 1."""
    if not dtype.is_complex:
        yield Sample(torch.tensor([[0.7], [3.0]], dtype=dtype, device=device))


probe_for("aten::_sample_dirichlet")(lambda alpha: torch.ops.aten._sample_dirichlet(alpha))


# -- fake quantize -----------------------------------------------------------------------------------------------------


def _straight_through(name: str) -> Callable[..., Tensor]:
    """A probe whose derivative is the estimate: x in the range, and 0 outside."""

    def probe(self: Tensor, *others: Any) -> Tensor:
        # a scale is always float32
        plain = [o.detach().float() if isinstance(o, Tensor) and o.is_floating_point() else o for o in others]
        found, mask = operator(name)(self, *plain)
        return found + (self * mask - found).detach()

    return probe


def _constant_scale(*others: Any) -> Sampler:
    """Numbers inside and outside of the range, away from its ends; other tensor arguments are constant."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if not dtype.is_complex:
            x = torch.tensor([[-2.03, -0.71, 0.22], [0.93, 0.44, 3.07]], dtype=dtype, device=device).requires_grad_()
            yield Sample(x, *[o.to(device) if isinstance(o, Tensor) else o for o in others])

    return samples


_RANGE = (-8, 7)
_SCALES, _ZEROS = torch.tensor([0.25, 0.5, 0.3], device="cpu"), torch.tensor([0, 1, 0], dtype=torch.int32, device="cpu")

for _name, _others in (
    ("fake_quantize_per_tensor_affine_cachemask", (0.25, 1, *_RANGE)),
    ("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", (_SCALES[:1], _ZEROS[1:2], _ZEROS[1:2], *_RANGE)),
    ("fake_quantize_per_channel_affine_cachemask", (_SCALES, _ZEROS, 1, *_RANGE)),
):
    samples_for(f"aten::{_name}")(_constant_scale(*_others))
    probe_for(f"aten::{_name}")(_straight_through(f"aten::{_name}"))


def _straight_through_learned(name: str, axes: Sequence[int]) -> Callable[..., Tensor]:
    """A probe whose derivative is the estimate where rounding adds nothing, as in the samples: x, or s (q - z)."""

    def probe(self: Tensor, scale: Tensor, zero_point: Tensor, *others: Any) -> Tensor:
        narrow = [p.float() if axes else p for p in (scale, zero_point)]  # per channel, they are always float32
        found: Tensor = operator(name)(self, *narrow, *others)
        with torch.no_grad():
            s, z = (along(p, self, axes[0] if axes else None) for p in (scale, zero_point))
            low, high = others[len(axes) : len(axes) + 2]
            bound = torch.where(self > 0, high, low)
            value = torch.where(slopes(self, s, z, low, high)[0], self, s * (bound - z))
        return found + (value - found).detach()

    return probe


def _learned_scale(*axes: int) -> Sampler:
    """Multiples of the scale, inside and outside of the range; scales per channel are float32 and constant."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        of_scale = torch.float32 if axes else dtype
        scale = torch.tensor([0.25, 0.5, 0.125], dtype=of_scale, device=device)
        zero_point = torch.tensor([1.0, -2.0, 0.0], dtype=of_scale, device=device)
        steps = torch.tensor([[-30.0, 2.0, -3.0], [4.0, 25.0, 1.0]], dtype=dtype, device=device)
        if axes:
            yield Sample((steps * scale.to(dtype)).requires_grad_(), scale, zero_point, *axes, -8, 7)
        else:
            yield Sample(steps * scale[0], scale[:1], zero_point[:1], -8, 7)

    return samples


for _name, _axes in (
    ("aten::_fake_quantize_learnable_per_tensor_affine", ()),
    ("aten::_fake_quantize_learnable_per_channel_affine", (1,)),
):
    samples_for(_name)(_learned_scale(*_axes))
    probe_for(_name)(_straight_through_learned(_name, _axes))


# -- foreach -----------------------------------------------------------------------------------------------------------


def _from(f: Callable[[Tensor, Tensor], tuple[Any, ...]], real_only: bool = False) -> Sampler:
    """Samples made of two lists of matrices with positive entries; one matrix has a single column."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex and real_only:
            return
        x = torch.linspace(0.4, 2.3, 6, dtype=torch.float64, device=device).reshape(2, 3)
        y = x.flip(1) + 0.3
        if dtype.is_complex:
            x, y = torch.complex(x, y / 3), torch.complex(y, x / 4)
        yield Sample(*f([x.to(dtype), x[:, 1].to(dtype)], [y.to(dtype), y[1, 1].to(dtype)]))

    return samples


samples_for("aten::_foreach_div.List", "aten::_foreach_pow.List")(_from(lambda x, y: (x, y)))
samples_for("aten::_foreach_pow.ScalarList")(_from(lambda x, y: (x, [2.5, 3])))
samples_for("aten::_foreach_pow.ScalarAndTensor")(_from(lambda x, y: (2.5, x)))
samples_for("aten::_foreach_norm.Scalar")(both(_from(lambda x, y: (x, 3)), _from(lambda x, y: (x,))))
samples_for("aten::_foreach_mm")(_from(lambda x, y: ([x[0], x[0].mT], [y[0].mT, y[0]])))
samples_for("aten::_foreach_maximum.Scalar", "aten::_foreach_minimum.Scalar")(
    _from(lambda x, y: (x, 1.3), real_only=True)
)
samples_for("aten::_foreach_maximum.ScalarList", "aten::_foreach_minimum.ScalarList")(
    _from(lambda x, y: (x, [1.3, 0.9]), real_only=True)
)


# -- glu ---------------------------------------------------------------------------------------------------------------


@samples_for("aten::glu")
def glu_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x = torch.linspace(-2.3, 2.9, 24, dtype=dtype, device=device).reshape(2, 4, 3) * 0.7
    yield from (Sample(x, 1), Sample(x, 0), Sample(x[0, :, 0], -1))


@samples_for("aten::glu_backward")
def glu_backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, dim in (s.args for s in glu_samples(dtype, device)):
        yield Sample(x.chunk(2, dim)[1].cos(), x, dim)


# -- incomplete gamma --------------------------------------------------------------------------------------------------


@samples_for("aten::igamma", "aten::igammac")
def incomplete_gamma_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if not dtype.is_complex:
        x = torch.tensor([[0.7, 1.3, 2.5], [0.4, 3.1, 14.0]], dtype=dtype, device=device)
        yield Sample(x.flip(0) + 0.4, x)
        yield Sample(torch.tensor([[2.2], [12.5]], dtype=dtype, device=device), x[1])
        yield Sample(torch.tensor(3, device=device), x[1, 1])


@samples_for("aten::_standard_gamma")
def certain_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """Without randomness: for such a large shape, the sample is the rounded shape."""
    if not dtype.is_complex:
        yield Sample(torch.tensor([[1e34, 3e34], [2e35, 1e35]], dtype=dtype, device=device))


# -- piecewise ---------------------------------------------------------------------------------------------------------


@samples_for("aten::_prelu_kernel_backward")
def prelu_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for s in alike(Tensor, Tensor, Tensor)(dtype, device):
        grad, x, weight = s.args
        yield from (s, Sample(grad, x, weight[:1])) if x.dim() else (s,)


samples_for("aten::threshold_backward", "aten::hardshrink_backward", "aten::softshrink_backward")(
    alike(Tensor, Tensor, 0.5)
)
samples_for("aten::leaky_relu_backward")(alike(Tensor, Tensor, 0.25, False))
samples_for("aten::elu_backward")(
    both(alike(Tensor, 1.5, 1.2, 0.7, False, Tensor), alike(Tensor, 1.5, 1.2, 0.7, True, Tensor, spread=0.5))
)
samples_for("aten::hardswish_backward")(alike(Tensor, Tensor, spread=2.0))
samples_for("aten::hardtanh_backward")(alike(Tensor, Tensor, -1.1, 1.3))
samples_for("aten::_prelu_kernel")(alike(Tensor, Tensor))
# functions, because opcheck finds that the operators themselves do not take symbolic sizes
probe_for("aten::hardshrink_backward")(lambda grad, self, lambd: aten.hardshrink_backward(grad, self, lambd))
probe_for("aten::softshrink_backward")(lambda grad, self, lambd: aten.softshrink_backward(grad, self, lambd))


# -- rounding and sign -------------------------------------------------------------------------------------------------


@samples_for("aten::abs", "aten::sgn", "aten::angle")
def rounding_and_sign_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = torch.tensor([[0.7, -1.3, 2.5], [-0.4, 3.1, -1.9]], dtype=torch.float64, device=device)
    x = torch.complex(x, x.flip(-1)).to(dtype) if dtype.is_complex else x.to(dtype)
    yield from (Sample(x), Sample(x[0, 1]), Sample(x[:0]))


samples_for("aten::frexp.Tensor")(
    lambda dtype, device: [] if dtype.is_complex else rounding_and_sign_samples(dtype, device)
)
probe_for("aten::frexp.Tensor")(lambda self: torch.frexp(self).mantissa)


# -- selection ---------------------------------------------------------------------------------------------------------


def _points(dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Numbers, and a mask."""
    x = torch.linspace(-2.3, 2.9, 6, dtype=torch.float64, device=device).reshape(2, 3)
    mask = torch.tensor([[True, False, True], [False, False, True]], device=device)
    return torch.complex(x, x.flip(-1)).to(dtype) if dtype.is_complex else x.to(dtype), mask


@samples_for("aten::where.self")
def where_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x, mask = _points(dtype, device)
    yield from (Sample(mask, x, x.flip(0)), Sample(mask[:, :1], x[0], x[1, 1]), Sample(mask[0, 0], x[0, 0], x[1, 1]))


@samples_for("aten::fill.Tensor")
def fill_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x, _ = _points(dtype, device)
    yield from (Sample(x, x[1, 1]), Sample(x[0, 0], x[1, 1]), Sample(x[:0], x[1, 1]))


def _masked(x: Tensor, mask: Tensor, value: Tensor | float) -> Iterable[Sample]:
    for self, places in ((x, mask), (x, mask[0]), (x[0], mask), (x[0, 0], mask[0, 0])):
        yield Sample(self, places, value)


@samples_for("aten::masked_fill.Tensor")
def masked_fill(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x, mask = _points(dtype, device)
    return _masked(x, mask, x[1, 1])


@samples_for("aten::masked_fill.Scalar")
def masked_fill_number(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    return _masked(*_points(dtype, device), 2.5)


# -- softmax -----------------------------------------------------------------------------------------------------------


@samples_for("aten::_softmax", "aten::_log_softmax")
def softmax_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x = torch.linspace(-2.3, 2.9, 24, dtype=dtype, device=device).reshape(2, 4, 3).sin() * 2
    yield from (Sample(x, 1, False), Sample(x, -1, False), Sample(x[0, :, 0], 0, False), Sample(x[0, 0, 0], 0, False))


@samples_for("aten::_safe_softmax")
def safe_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, dim, _ in (s.args for s in softmax_samples(dtype, device)):
        yield Sample(x, dim)


@samples_for("aten::_softmax_backward_data")
def softmax_backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, dim, _ in (s.args for s in softmax_samples(dtype, device)):
        if x.dim():  # PyTorch's vmap of the backward operators is wrong for tensors without dimensions
            yield Sample(x.cos(), x.softmax(dim), dim, dtype)


@samples_for("aten::_log_softmax_backward_data")
def log_backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, dim, _ in (s.args for s in softmax_samples(dtype, device)):
        if x.dim():
            yield Sample(x.cos(), x.log_softmax(dim), dim, dtype)


# -- zeta --------------------------------------------------------------------------------------------------------------


@samples_for("aten::special_zeta")
def zeta_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if not dtype.is_complex:
        x = torch.tensor([[0.7, 1.3, 2.5], [0.4, 3.1, 1.9]], dtype=dtype, device=device)
        for s in (x.flip(0) + 1.2, x[0] + 0.9, x[1, 1]):
            yield Sample(s, x)
        yield Sample(torch.tensor(3, device=device), x[1, 1])
