"""Huge and tiny numbers, empty and sparse inputs."""

from __future__ import annotations

from functools import partial

import torch
from rows import Call
from torch import Tensor

from .base import Numbers, named, variables, way
from .batched import pullback


def scaled(c: Call, factor: float) -> Numbers:
    p = c.problem
    other = p.but(primals=tuple(x * factor for x in p.primals))
    xs = variables(other)
    out = other.call(*xs)
    grads = pullback(out, xs, [torch.ones_like(o) for o in out])
    return named("forward", [o.detach().clone() for o in out]) | named("gradient", grads)


def scaled_in_double(c: Call, factor: float) -> Numbers:
    """The same in double precision, where the factor is no extreme."""
    return scaled(Call(c.row, c.dtype, c.position, c.problem.wide()), factor)


for exponent in (-120, -62, -40, -15, 15, 40, 62, 120):
    way(
        f"float32, scale 2^{exponent}",
        partial(scaled_in_double, factor=2.0**exponent),
        dtypes=(torch.float32, torch.complex64),
    )(partial(scaled, factor=2.0**exponent))


def scaled_by_degree(c: Call, exponent: int) -> Numbers:
    """The same for a homogeneous function, from the sample as it is; nan for what is not homogeneous."""
    one, two = scaled(c, 1.0), scaled(c, 2.0)
    found = {}
    for name, x in one.items():
        ratios = (two[name] / x).abs()[x != 0]
        degree = round(float(ratios.median().log2())) if ratios.numel() else 0
        homogeneous = torch.allclose(two[name], x * 2.0**degree, rtol=1e-9, atol=0)
        power = degree * exponent
        found[name] = x * 2.0**power if homogeneous and abs(power) < 1020 else x * torch.nan
    return found


for exponent in (-1000, -600, -510, -300, 300, 510, 600, 1000):
    way(f"float64, scale 2^{exponent}", partial(scaled_by_degree, exponent=exponent))(
        partial(scaled, factor=2.0**exponent)
    )


# PyTorch's kernels divide by zero there, which ends the process.
FATAL_WHEN_EMPTY = ("aten::_pdist_forward", "aten::_weight_norm_interface", "aten::_weight_norm_interface_backward")


@way("empty batch", None)
def empty_batch(c: Call) -> Numbers:
    p = c.problem
    if c.row.name in FATAL_WHEN_EMPTY:
        raise RuntimeError("ends the process")
    leaves = [x.new_empty((0, *x.shape)) if isinstance(x, Tensor) and x.dim() else x for x in p.leaves]
    other = p.at(leaves)
    xs = variables(other)
    args = other.flat(*xs)
    out = [o for o in args if o.is_floating_point() or o.is_complex()]
    grads = pullback(out, xs, [torch.ones_like(o) for o in out])
    return named("output", [o.detach() for o in out]) | named("gradient", grads)


@way("sparse inputs", None)
def sparse(c: Call) -> Numbers:
    p = c.problem
    if not p.primals[0].dim():
        raise RuntimeError("no dims")
    other = p.at([x.to_sparse() if i == p.index[0] else x for i, x in enumerate(p.leaves)])
    xs = [x.detach().requires_grad_() for x in other.primals]
    out = other.call(*xs)
    grads = pullback(out, xs, [torch.ones_like(o) for o in out])
    dense = [g.to_dense() if g.layout is not torch.strided else g for g in grads]
    return named("output", [(o.to_dense() if o.layout is not torch.strided else o).detach() for o in out]) | named(
        "gradient", dense
    )
