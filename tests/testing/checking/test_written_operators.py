"""The checker and the composition table on operators that write to arguments."""

import pytest
import torch
from helpers.ops import define
from helpers.tensors import random, same

import torch_manualgrad as mg
from torch_manualgrad.testing.inputs.written import Unwritten, without_writes


def scale(x, buffer):
    buffer.mul_(x)


def scale_op(backward=lambda g, x, old: {"x": g * old, "buffer": g * x}, body=scale):
    return define(
        "(Tensor x, Tensor(a!) buffer) -> ()",
        body,
        save_for_backward=lambda inputs, output: (inputs.x, inputs.buffer),
        backward=lambda ctx, saved, grad: backward(grad, *saved),
    )


def sample():
    return random(3), random(3, seed=1)


def test_operators_that_write_are_called_on_copies():
    op, (x, b) = scale_op(), sample()
    kept = b.clone()
    for fn in (op, op.op, torch.ops.aten.mul_.Tensor, torch.ops.aten.add.out):
        assert isinstance(without_writes(fn), Unwritten)
    same(without_writes(op)(x, b), x * kept)
    same(without_writes(op)(x, buffer=b), x * kept)
    same(without_writes(torch.ops.aten.add.out)(x, x, out=b), 2 * x)
    same(b, kept)
    for fn in (torch.sin, op.functional, torch.ops.aten.mul.Tensor, torch.nn.Linear(2, 2)):
        assert without_writes(fn) is fn


def test_a_right_operator_passes():
    op, args = scale_op(), sample()
    assert mg.testing.check(op, [args]).ok
    assert mg.testing.check(torch.ops.aten.mul_.Tensor, [args], checks=("vmap", "opcheck")).ok
    table = mg.testing.composition(op.op, torch.mul, args, compile=False)
    assert not table.failures and table.outcome("opcheck") == "ok"


@pytest.mark.parametrize(
    "op",
    [
        scale_op(lambda g, x, old: {"x": g * old, "buffer": None}),
        scale_op(lambda g, x, old: {"x": g * old * x, "buffer": g * x}),
    ],
    ids=["no gradient of the old value", "a new value for the old one"],
)
def test_a_wrong_derivative_is_found(op):
    report = mg.testing.check(op, [sample()], checks=(), raise_on_failure=False, diagnose=False)
    assert {"rev", "fwd", "rev-rev"} <= {r.check for r in report.failures}


def test_an_undeclared_write_is_found():
    def body(x, buffer):
        buffer.mul_(x)
        x.add_(1)

    report = mg.testing.check(
        scale_op(body=body), [sample()], modes=(), checks=("opcheck",), raise_on_failure=False, diagnose=False
    )
    assert any(r.check == "opcheck" and "test_schema" in r.detail for r in report.failures)
