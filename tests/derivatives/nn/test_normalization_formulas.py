"""The formulas of normalizations that no operator of the CPU reaches."""

from __future__ import annotations

import pytest
import torch
from helpers.normalizations import EPS, F64, composite
from helpers.tensors import random
from torch.func import jacrev, jvp, vjp

import torch_manualgrad as mg
from torch_manualgrad.core.rule.derivative import derivative_of
from torch_manualgrad.derivatives.nn import batch_norm, rms_norm


def test_the_formulas_of_rms_norm():
    x, w, g, gr = random(2, 3), random(3, seed=1), random(2, 3, seed=2), random(2, 1, seed=3)
    dx, dw = random(2, 3, seed=4), random(3, seed=5)

    def forward(x, w):
        r = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return x * r * w, r

    def backward(g, x, w):
        return mg.ops.infinitely_differentiable_native_rms_norm_backward(g, None, x, [3], forward(x, w)[1].detach(), w)

    r = forward(x, w)[1]
    found = mg.ops.infinitely_differentiable_native_rms_norm_backward(g, gr, x, [3], r, w)
    torch.testing.assert_close(found, vjp(forward, x, w)[1]((g, gr)))
    tangents = jvp(forward, (x, w), (dx, dw))[1]
    torch.testing.assert_close(mg.ops.rms_norm_jvp(x, dx, w, dw, r, [3]), tangents[0])
    torch.testing.assert_close(mg.ops.rms_norm_rstd_jvp(x, dx, r, [3]), tangents[1])

    def exact(g, x, w):
        return vjp(lambda x, w: forward(x, w)[0], x, w)[1](g)

    expected = vjp(exact, g, x, w)[1]((dx, dw))
    of_x, of_w, of_g = mg.ops.rms_norm_double_backward(x, w, dx, dw, g, [3], r)
    torch.testing.assert_close((of_g, of_x, of_w), expected)
    given = [t.clone().requires_grad_() for t in (g, x, w)]
    assert torch.autograd.gradcheck(
        lambda *t: jacrev(lambda s: backward(t[0] * s, t[1], t[2])[0])(torch.ones((), dtype=F64)), given
    )
    torch.testing.assert_close(vjp(backward, g, x, w)[1]((dx, dw)), expected)


@pytest.mark.parametrize("rule", [*batch_norm.GPU_RULES, *rms_norm.GPU_RULES], ids=lambda r: r.name)
def test_the_rules_of_gpus_bind(rule):
    """Their formulas, given what the CPU's operator saves in the place of the GPU's."""
    if "rms" in rule.name:
        return
    x, w, b, g = random(4, 3), random(3, seed=1), random(3, seed=2), random(4, 3, seed=3)
    y, *saved = torch.native_batch_norm(x, w, b, None, None, True, 0.1, EPS)
    rest = [None] * (len(rule.signature.returns) - 3)
    if rule.name.endswith("backward"):
        values = (x, g, w, None, None, *saved, EPS, *[torch.empty(0)] * ("cudnn" in rule.name))
        outputs: tuple = (None, None, None)
        cotangents = (random(4, 3, seed=4), random(3, seed=5), random(3, seed=6))
        expected = vjp(lambda x, g, w: vjp(lambda x, w: composite(x, (0,), w, 0.0), x, w)[1](g), x, g, w)[1](
            cotangents[:2]
        )
        expected = (expected[0], expected[1] + cotangents[2], expected[2])
        needed = (True, True, True)
    else:
        values = (x, w, b, None, None, True, 0.1, EPS)
        outputs, cotangents = (y, *saved, *rest), (g, None, None, *rest)
        expected = vjp(lambda x, w, b: composite(x, (0,), w, b), x, w, b)[1](g)
        needed = (True, True, True)
    needed = (*needed, *[False] * (len(values) - 3))
    tensors, static = derivative_of(rule).residuals(values, outputs)
    found = derivative_of(rule).vjp(needed, tensors, static, cotangents)[:3]
    torch.testing.assert_close(tuple(found), tuple(expected))
    tangents = (random(4, 3, seed=7), random(*values[1].shape, seed=8), random(3, seed=9), *[None] * (len(values) - 3))
    found = derivative_of(rule).jvp(values, outputs, tangents)
    assert found[0].shape == x.shape and found[0].isfinite().all()
