"""Custom ops that several test files use: one function, its derivative written in every way the package offers."""

import itertools

import torch

import torch_manualgrad as mg

_count = itertools.count()


def define(schema, reference, **implementations):
    """A custom op of a name that no other test has: ``define("(Tensor x) -> Tensor", f, backward=..., ...)``."""
    op = mg.custom_op(f"mgtest::op{next(_count)}{schema}")(reference)
    marks = implementations.pop("output_differentiability", None)
    for kind, function in implementations.items():
        if kind == "backward":
            op.impl_backward(function, output_differentiability=marks)
        else:
            getattr(op, f"impl_{kind}")(function)
    return op


# -- y = x / n, n = |x|: two outputs, both of which the backward uses -------------------------------------------------


def unit(x):
    n = x.square().sum(-1, keepdim=True).sqrt()
    return x / n, n


def unit_backward(ctx, saved, gy, gn):
    y, n = saved
    gx = None
    if gy is not None:
        gx = (gy - y * (gy * y).sum(-1, keepdim=True)) / n
    if gn is not None:
        gx = gn * y if gx is None else gx + gn * y
    return {"x": gx}


def unit_jvp(inputs, output, tangents):
    y, n = unit(inputs.x)
    n_t = (y * tangents.x).sum(-1, keepdim=True)
    return (tangents.x - y * n_t) / n, n_t


class _Unit(mg.SingleLevelFunction):
    @staticmethod
    def forward(ctx, x):
        y, n = single_level.below_autograd(x)
        ctx.save_for_backward(x, y, n)
        ctx.save_for_forward(x, y, n)
        return y, n

    @staticmethod
    def backward(ctx, gy, gn):
        return unit_backward(None, ctx.saved_tensors[1:], gy, gn)["x"]

    @staticmethod
    def jvp(ctx, x_t):
        x, _, _ = ctx.saved_tensors
        y, n = unit(x)
        n_t = (y * x_t).sum(-1, keepdim=True)
        return (x_t - y * n_t) / n, n_t


_SCHEMA = "(Tensor x) -> (Tensor y, Tensor n)"
saved_outputs = define(
    _SCHEMA, unit, save_for_backward=lambda inputs, output: tuple(output), backward=unit_backward, jvp=unit_jvp
)
derived = define(_SCHEMA, unit, save_for_backward=lambda inputs, output: (output.y, output.n), backward=unit_backward)
computed = define(_SCHEMA, unit, save_for_backward=lambda inputs, output: unit(inputs.x), backward=unit_backward)
computed_with_jvp = define(
    _SCHEMA, unit, save_for_backward=lambda inputs, output: unit(inputs.x), backward=unit_backward, jvp=unit_jvp
)
single_level = define(_SCHEMA, unit, autograd=_Unit.apply)

UNIT = {
    "jvp written": saved_outputs,
    "jvp derived": derived,
    "residuals computed": computed,
    "residuals computed, jvp written": computed_with_jvp,
    "whole autograd kernel": single_level,
}


def inside_kernel(probe, x, schema="(Tensor x) -> Tensor"):
    """The result of ``probe(keyset, x)`` as the kernel at the key Autograd of an operator."""
    with torch.library._scoped_library("mginternals", "FRAGMENT") as library:
        library.define(f"probe{schema}")
        op = torch.ops.mginternals.probe.default
        library.impl("probe", lambda x: x.clone(), "CompositeExplicitAutograd")
        library.impl("probe", lambda keyset, x: probe(op, keyset, x), "Autograd", with_keyset=True)
        return op(x)
