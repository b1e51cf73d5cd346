"""Samples of the operators of backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_manualgrad.core.rule import (
    Sample,
    Sampler,
    operator,
    probe_for,
    rules,
    samples_for,
)

from ...convolution.backends import BACKENDS
from ..drawing import random
from ..probes import laid_out

__all__ = ["arguments_of"]

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


def _samples(name: str, device: str) -> Sampler:
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
        samples_for(f"aten::{_name}")(_OTHERS.get(_name) or _samples(_name, _DEVICES.get(_backend, "cpu")))
        if _backend in ("oneDNN", "NNPACK"):
            probe_for(f"aten::{_name}")(_probe(_name))
