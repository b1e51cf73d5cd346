"""Functions whose derivatives are given, and which checks fail on them."""

from __future__ import annotations

import torch

from torch_manualgrad.testing import check

DOUBLE, COMPLEX = torch.float64, torch.complex128
FIRST = ("rev", "fwd")


def columns(report) -> set[str]:
    return {r.check for r in report.failures}


def function(forward, vjp=None, jvp=None):
    """An autograd.Function of one tensor, x -> forward(x), with derivatives vjp(g, x) and jvp(t, x)."""

    class Planted(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

    Planted.forward = staticmethod(forward)
    if vjp is not None:
        Planted.backward = staticmethod(lambda ctx, *g: vjp(*g, *ctx.saved_tensors))
    if jvp is not None:
        Planted.jvp = staticmethod(lambda ctx, *t: jvp(*t, *ctx.saved_tensors))
    return Planted.apply


def only(name: str, fn, *args, **options):
    """The report of one check at one sample, without the diagnosis of failures, which has tests of its own."""
    options = {"diagnose": False, **options}
    return check(fn, [args], modes=(), checks=(name,), raise_on_failure=False, **options)


def engines(report) -> set[str]:
    """Of the failures."""
    return {r.engine for r in report.failures}
