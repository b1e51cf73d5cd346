"""Samples of the rules of convolution, pooling and sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, Sampler, operator, probe_for, reached, rules, samples_for

from ..convolution.backends import BACKENDS
from .drawing import random
from .probes import as_function, laid_out

# -- backends ----------------------------------------------------------------------------------------------------------


_aten = torch.ops.aten
_DEVICES = {"CUDA": "cuda", "cuDNN": "cuda", "MIOpen": "cuda", "MPS": "mps"}


def arguments_of(name: str, dtype: torch.dtype, device: str = "cpu") -> list[Any]:
    """Small arguments of an operator that is a convolution or the gradient of one, by the names in its schema."""
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


def _backends_samples(name: str, device: str) -> Sampler:
    single = device != "cuda"  # none of the others takes double precision

    def samples(dtype: torch.dtype, _: torch.device | str) -> Iterable[Sample]:
        if not dtype.is_complex:
            yield Sample(*arguments_of(name, torch.float32 if single else dtype, device))

    return samples


def _probe(name: str) -> Callable[..., Any]:
    """The operator on contiguous tensors, as it misreads others; in double precision, its definition."""
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


def _image_and_grid(backward: bool) -> Sampler:
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


_OTHERS: dict[str, Sampler] = {
    "cudnn_grid_sampler": _image_and_grid(False),
    "cudnn_grid_sampler_backward": _image_and_grid(True),
    "cudnn_affine_grid_generator": _maps,
}
for _name, _backend in BACKENDS.items():
    if f"aten::{_name}" in rules:  # its backend is here
        samples_for(f"aten::{_name}")(_OTHERS.get(_name) or _backends_samples(_name, _DEVICES.get(_backend, "cpu")))
        if _backend in ("oneDNN", "NNPACK"):
            probe_for(f"aten::{_name}")(_probe(_name))


# -- convolution -------------------------------------------------------------------------------------------------------


# Sizes of the input and of the weight; stride, padding, dilation, transposed, output_padding, groups; whether with a bias.
_CASES: tuple[tuple[tuple[int, ...], tuple[int, ...], list[Any], bool], ...] = (
    ((2, 2, 5), (3, 2, 2), [[2], [1], [1], False, [0], 1], True),
    ((1, 2, 3, 4), (2, 1, 2, 2), [[1, 2], [0, 1], [2, 1], False, [0, 0], 2], True),
    ((1, 2, 3, 2), (2, 1, 2, 2), [[2, 2], [0, 1], [1, 1], True, [1, 0], 1], False),
    ((1, 1, 2, 3, 2), (2, 1, 1, 2, 2), [[1, 1, 1], [0, 0, 0], [1, 1, 1], False, [0, 0, 0], 1], True),
)


def _convolution_samples(*flags: bool) -> Sampler:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        for x_sizes, w_sizes, rest, with_bias in _CASES:
            channels = w_sizes[1] * rest[5] if rest[3] else w_sizes[0]
            x, w, bias = _tensors(x_sizes, w_sizes, dtype, device, channels)
            yield Sample(x, w, bias if with_bias else None, *rest, *flags)
        x, w, bias = _tensors((0, 2, 5), (3, 2, 2), dtype, device, 3)
        yield Sample(x, w, bias, *_CASES[0][2], *flags)

    return samples


def _tensors(x: Sequence[int], w: Sequence[int], dtype: torch.dtype, device: Any, channels: int) -> list[Tensor]:
    return [random(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate((x, w, (channels,)))]


@samples_for("aten::convolution_backward")
def backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for sample in _convolution_samples()(dtype, device):
        x, w, bias, *rest = sample.args
        result = _aten.convolution(x, w, bias, *rest)
        g = random(*result.shape, dtype=dtype, device=device, seed=3)
        yield Sample(g, x, w, [result.shape[1]], *rest, [True, bias is not None, bias is not None])


@probe_for("aten::convolution_backward")
def wanted(*args: Any) -> list[Tensor]:
    return [g for g in _aten.convolution_backward(*args) if g is not None]


def _slow_samples(dims: int, *cases: Sequence[Any], transposed: bool = False) -> Sampler:
    """For an operator that takes the size of the kernel before the bias; ``cases`` are its arguments after the bias."""
    x, w = (1, 2, *(3, 4, 2)[:dims]), (2, 3 if transposed else 2, *(2, 2, 1)[:dims])

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        for number, rest in enumerate(cases):
            *tensors, bias = _tensors(x, w, dtype, device, 3 if transposed else 2)
            yield Sample(*tensors, list(w[2:]), None if number else bias, *rest)

    return samples


_SLOW_IN_2D = _slow_samples(2, ([1, 1], [0, 0]), ([2, 1], [1, 0]))
_SLOW = {
    "_slow_conv2d_forward": _SLOW_IN_2D,
    "slow_conv3d_forward": _slow_samples(3, ([1, 1, 1], [0, 0, 0]), ([1, 2, 1], [0, 1, 0])),
    "slow_conv_dilated2d": _slow_samples(2, ([1, 1], [0, 1], [1, 2]), ([2, 1], [1, 0], [2, 1])),
    "slow_conv_dilated3d": _slow_samples(3, ([1, 1, 1], [0, 1, 0], [1, 2, 1])),
    "slow_conv_transpose2d": _slow_samples(
        2, ([2, 1], [0, 1], [1, 0], [1, 1]), ([1, 1], [0, 0], [0, 0], [2, 1]), transposed=True
    ),
    "slow_conv_transpose3d": _slow_samples(3, ([2, 1, 1], [0, 1, 0], [1, 0, 0], [1, 1, 1]), transposed=True),
}
for _name, _sampler in _SLOW.items():
    samples_for(f"aten::{_name}")(_sampler)
    probe_for(f"aten::{_name}")(as_function(getattr(_aten, _name)))


@samples_for("aten::_slow_conv2d_backward.output_mask")
def slow_backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for sample in _SLOW_IN_2D(dtype, device):
        x, w, kernel, bias, *rest = sample.args
        g = _aten._slow_conv2d_forward(*sample.args).cos()
        yield Sample(g, x, w, kernel, *rest, [True, True, bias is not None])


@samples_for("aten::conv_tbc")
def tbc_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if not dtype.is_complex:
        for length, pad in ((2, 0), (3, 1)):
            yield Sample(*_tensors((4, 2, 2), (length, 2, 3), dtype, device, 3), pad)


samples_for("aten::convolution")(_convolution_samples())
samples_for("aten::_convolution")(_convolution_samples(False, False, True, True))
probe_for("aten::_slow_conv2d_backward.output_mask")(laid_out(_aten._slow_conv2d_backward.output_mask))
probe_for("aten::conv_tbc")(laid_out(_aten.conv_tbc))


# -- grid sampler ------------------------------------------------------------------------------------------------------


def _inputs(
    dims: int, *modes: tuple[int, int, bool], dtype: torch.dtype | None = None
) -> Callable[..., Iterable[tuple[Any, ...]]]:
    """Image, grid and modes; some points outside of the image, and none next to the edge of a pixel."""

    def inputs(given: torch.dtype, device: torch.device | str) -> Iterable[tuple[Any, ...]]:
        if given.is_complex:
            return
        for interpolation, padding, align_corners in modes:
            # as wide as the batches in the check of vmap: PyTorch's batching rule mistakes this for the size of the batch
            sizes = (4, 3) if dims == 2 else (2, 2, 3)
            image = random(1, 2, *sizes, dtype=dtype or given, device=device)
            points = [[-0.53, 0.37], [0.28, -0.81], [1.39, -0.17], [-1.22, 1.45]]
            coordinates = torch.tensor(points, dtype=dtype or given, device=device)
            if dims == 3:
                coordinates = torch.cat([coordinates, 0.7 * coordinates.flip(0)[:, :1] + 0.04], 1)
            grid = coordinates.reshape(1, *[1] * (dims - 1), 4, dims)
            yield image, grid, interpolation, padding, align_corners

    return inputs


def _backward(inputs: Callable[..., Any], *rest: Any) -> Sampler:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for image, grid, *modes in inputs(dtype, device):
            shape = (*image.shape[:2], *grid.shape[1:-1])
            yield Sample(random(*shape, dtype=image.dtype, device=device, seed=3), image, grid, *modes, *rest)

    return samples


def _forward(inputs: Callable[..., Any]) -> Sampler:
    return lambda dtype, device: [Sample(*given) for given in inputs(dtype, device)]


_GRID_IN_2D = _inputs(2, (0, 0, False), (0, 2, True), (1, 1, False), (2, 0, False), (2, 2, False))
_GRID_IN_3D = _inputs(3, (0, 0, True), (0, 1, False), (1, 2, False))
_IN_SINGLE = _inputs(2, (0, 0, False), (1, 1, True), dtype=torch.float32)
_FALLBACK = "_grid_sampler_2d_cpu_fallback"

for _name, _given in (("grid_sampler_2d", _GRID_IN_2D), ("grid_sampler_3d", _GRID_IN_3D)):
    samples_for(f"aten::{_name}")(_forward(_given))
    samples_for(f"aten::{_name}_backward")(_backward(_given, [True, True]))


samples_for(f"aten::{_FALLBACK}")(_forward(_IN_SINGLE))


@probe_for(f"aten::{_FALLBACK}")
def fallback(*args: Any) -> Any:
    """The fallback; in double precision, which it does not take, the operator itself."""
    return getattr(torch.ops.aten, "grid_sampler_2d" if args[0].dtype == torch.float64 else _FALLBACK)(*args)


if reached("2.12"):  # composite before
    samples_for(f"aten::{_FALLBACK}_backward")(_backward(_IN_SINGLE))

    @probe_for(f"aten::{_FALLBACK}_backward")
    def fallback_backward(*args: Any) -> Any:
        if args[0].dtype == torch.float64:
            return torch.ops.aten.grid_sampler_2d_backward(*args, [True, True])
        return getattr(torch.ops.aten, f"{_FALLBACK}_backward")(*args)


# -- pooling -----------------------------------------------------------------------------------------------------------


def _averages(dims: int) -> Sampler:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        x = random(1, 2, *(3, 4, 2)[:dims], dtype=dtype, device=device)
        yield Sample(x, [2] * dims, [], [0] * dims, False, True, None)
        yield Sample(x[0], [2] * dims, [1] * dims, [1] * dims, True, False, None)
        yield Sample(x, [2] * dims, [2] * dims, [1] * dims, True, True, 3)

    return samples


def _averages_backward(dims: int) -> Sampler:
    forward = getattr(_aten, f"avg_pool{dims}d")

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for sample in _averages(dims)(dtype, device):
            yield Sample(forward(*sample.args).cos(), *sample.args)

    return samples


def _adaptive(dims: int) -> Sampler:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if not dtype.is_complex:
            x = random(1, 2, *(3, 4, 2)[:dims], dtype=dtype, device=device)
            yield Sample(x, [2, 3, 1][:dims])
            yield Sample(x[0], [1] * dims)

    return samples


def _adaptive_backward(dims: int) -> Sampler:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for sample in _adaptive(dims)(dtype, device):
            x, size = sample.args
            yield Sample(random(*x.shape[:-dims], *size, dtype=dtype, device=device, seed=1), x)

    return samples


# name -> the number of dims, how many arguments its backward takes, and values of the arguments after self
_POOLS: dict[str, tuple[int, int, tuple[tuple[Any, ...], ...]]] = {}
for _dims in (2, 3):
    _values: tuple[tuple[Any, ...], ...] = (
        ([2] * _dims, [], [0] * _dims, [1] * _dims, False),
        ([2] * _dims, [1] * _dims, [1] * _dims, [1, 2, 1][:_dims], True),
    )
    _POOLS[f"max_pool{_dims}d_with_indices"] = (_dims, 5, _values)
    _POOLS[f"adaptive_max_pool{_dims}d"] = (_dims, 0, (([2, 3, 1][:_dims],),))
    _POOLS[f"fractional_max_pool{_dims}d"] = (_dims, 2, (([2, 2, 1][:_dims], [1, 2, 1][:_dims]),))


def _maxima(name: str) -> Sampler:
    dims, _, values = _POOLS[name]

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        x = random(1, 2, *(3, 4, 2)[:dims], dtype=dtype, device=device)
        for rest in values:
            if name.startswith("fractional"):
                rest = (*rest, random(1, 2, dims, dtype=dtype, device=device, seed=1).sigmoid())
            yield Sample(x, *rest)

    return samples


def _maxima_backward(name: str) -> Sampler:
    count = _POOLS[name][1]

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for sample in _maxima(name)(dtype, device):
            maxima, indices = getattr(_aten, name)(*sample.args)
            yield Sample(maxima.cos(), sample.args[0], *sample.args[1 : 1 + count], indices)

    return samples


def _first(name: str) -> Callable[..., Tensor]:
    """The maxima, without their indices; the random numbers that choose the windows are constant."""

    def probe(*args: Any) -> Tensor:
        return getattr(_aten, name)(*args[:-1], args[-1].detach() if isinstance(args[-1], Tensor) else args[-1])[0]

    return probe


def _unpooling(dims: int) -> Sampler:
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
    samples_for(f"aten::avg_pool{_dims}d")(_averages(_dims))
    samples_for(f"aten::avg_pool{_dims}d_backward")(_averages_backward(_dims))
    samples_for(f"aten::_adaptive_avg_pool{_dims}d")(_adaptive(_dims))
    samples_for(f"aten::_adaptive_avg_pool{_dims}d_backward")(_adaptive_backward(_dims))
    samples_for(f"aten::max_unpool{_dims}d")(_unpooling(_dims))
for _name in _POOLS:
    samples_for(f"aten::{_name}")(_maxima(_name))
    samples_for(f"aten::{_name}_backward")(_maxima_backward(_name))
    if _name.startswith("fractional"):
        probe_for(f"aten::{_name}")(_first(_name))
    if _name.startswith("fractional") or _name == "adaptive_max_pool3d":
        probe_for(f"aten::{_name}_backward")(laid_out(getattr(_aten, f"{_name}_backward")))


# -- unfold ------------------------------------------------------------------------------------------------------------


_WINDOWS = (([2, 2], [1, 1], [0, 0], [1, 1]), ([2, 1], [1, 2], [1, 0], [2, 1]))  # kernel, dilation, padding, stride


@samples_for("aten::im2col")
def images(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for window in _WINDOWS:
        yield Sample(random(1, 2, 3, 4, dtype=dtype, device=device), *window)


@samples_for("aten::col2im")
def columns(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for window in _WINDOWS:
        columns = _aten.im2col(random(1, 2, 3, 4, dtype=dtype, device=device), *window)
        yield Sample(columns.cos(), [3, 4], *window)


@samples_for("aten::affine_grid_generator")
def maps(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if not dtype.is_complex:
        yield Sample(random(2, 2, 3, dtype=dtype, device=device), [2, 1, 2, 3], False)
        yield Sample(random(1, 3, 4, dtype=dtype, device=device), [1, 2, 2, 3, 2], True)


# -- upsample ----------------------------------------------------------------------------------------------------------


_SIZES = ((3,), (3, 2), (2, 3, 2))  # of the input, in one to three dims
_LARGER = ((5,), (4, 3), (3, 4, 3))
_SMALLER = ((2,), (2, 3), (3, 2, 1))


def _upsample_samples(dims: int, corners: bool) -> Sampler:
    """To a larger size and a smaller one, by sizes and by scales."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        x = random(1, 2, *_SIZES[dims - 1], dtype=dtype, device=device)
        yield Sample(x, list(_LARGER[dims - 1]), *[True] * corners, *[None] * dims)
        yield Sample(x, list(_SMALLER[dims - 1]), *[False] * corners, *[None] * dims)
        scaled = [int(1.7 * n) for n in _SIZES[dims - 1]]
        yield Sample(x, scaled, *[False] * corners, *[1.7] * dims)

    return samples


def _backward_samples(dims: int, corners: bool) -> Sampler:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for sample in _upsample_samples(dims, corners)(dtype, device):
            x, size, *rest = sample.args
            g = random(*x.shape[:2], *size, dtype=dtype, device=device)
            yield Sample(g, size, list(x.shape), *rest)

    return samples


def _register(name: str, dims: int, corners: bool) -> None:
    samples_for(f"aten::{name}")(_upsample_samples(dims, corners))
    samples_for(f"aten::{name}_backward")(_backward_samples(dims, corners))


for _dims in (1, 2, 3):
    _register(f"upsample_nearest{_dims}d", _dims, False)
    _register(f"_upsample_nearest_exact{_dims}d", _dims, False)
for _dims, _name in enumerate(("linear1d", "bilinear2d", "trilinear3d"), 1):
    _register(f"upsample_{_name}", _dims, True)
for _name in ("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"):
    _register(_name, 2, True)
for _name in ("upsample_linear1d", "upsample_trilinear3d", "_upsample_bicubic2d_aa"):
    probe_for(f"aten::{_name}")(as_function(getattr(torch.ops.aten, _name)))
