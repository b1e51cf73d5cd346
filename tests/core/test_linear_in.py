"""Rules of linear operators: the tangent is the operator on the tangents."""

import pytest
import torch
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.testing import check


def samples(*more, count=1):
    return lambda dtype, device: [mg.Sample(*[random(3, 4, dtype=dtype, seed=i) for i in range(count)], *more)]


FLIP = mg.linear_in("aten::flip", {"self": lambda grad, dims: grad.flip(dims)}, samples=samples([0, 1]), register=False)
LERP = mg.linear_in(
    "aten::lerp.Scalar",
    {
        "self": lambda grad, weight: grad * (1 - weight.conjugate()),
        "end": lambda grad, weight: grad * weight.conjugate(),
    },
    samples=samples(0.25, count=2),
    register=False,
)
STACK = mg.linear_in(
    "aten::stack",
    {"tensors": lambda grad, dim: list(grad.unbind(dim))},
    samples=lambda dtype, device: [mg.Sample([random(3, dtype=dtype, seed=i) for i in range(2)], 1)],
    register=False,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("rule", [FLIP, LERP, STACK], ids=lambda r: r.name)
def test_every_mode(rule, dtype):
    assert rule.kind == "linear" and rule.source and not {"self", "end", "tensors"} & {*rule.residuals}
    with mg.override(rule):
        check(rule.aten, rule.samples(dtype, "cpu"))


def test_an_input_without_a_tangent():
    with mg.override(LERP):
        x, y = random(3), random(3, seed=1)
        tangent = torch.func.jvp(lambda y: torch.lerp(x, y, 0.25), (y,), (torch.ones_like(y),))[1]
    assert tangent.tolist() == [0.25] * 3


def test_several_outputs_are_refused():
    with pytest.raises(ValueError, match="linear_in aten::frexp.Tensor: the operator has 2 outputs"):
        mg.linear_in("aten::frexp.Tensor", {"self": lambda grad: grad})
    with pytest.raises(ValueError, match="no such operator"):
        mg.linear_in("aten::no_such_function", {"self": lambda grad: grad})
