"""Products of batches and of vectors: what is added is broadcast, numbers may be 0 or complex."""

import math

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.derivatives.samples.drawing import random

F64, C128 = torch.float64, torch.complex128
OURS = (
    "aten::bmm",
    "aten::baddbmm",
    "aten::addbmm",
    "aten::mv",
    "aten::addmv",
    "aten::addr",
    "aten::dot",
    "aten::vdot",
)

# the shapes of the two factors and of the result
ADDED = {
    torch.baddbmm: ((2, 3, 2), (2, 2, 4), (2, 3, 4)),
    torch.addbmm: ((2, 3, 2), (2, 2, 4), (3, 4)),
    torch.addmv: ((3, 2), (2,), (3,)),
    torch.addr: ((3,), (2,), (3, 2)),
}


def gradients(f, inputs, *names):
    with mg.override(*names):
        x = [i.clone().requires_grad_() for i in inputs]
        y = f(*x)
        return torch.autograd.grad((y * y.conj()).sum().real, x)


@pytest.mark.parametrize("dtype", [F64, C128], ids=str)
@pytest.mark.parametrize("numbers", [(1, 1), (0, 2), (0.5, 0), (2, 1.5)], ids=str)
@pytest.mark.parametrize("f", ADDED, ids=lambda f: f.__name__)
def test_the_added_tensor_is_broadcast(f, numbers, dtype):
    first, second, result = ADDED[f]
    beta, alpha = numbers if not dtype.is_complex else [n * (1 - 2j) if n not in (0, 1) else n for n in numbers]
    factors = [random(*s, dtype=dtype, seed=i) for i, s in enumerate((first, second))]
    for shape in (result, (1, *result[1:]), result[1:], (1,), ()):
        inputs = (random(24, dtype=dtype, seed=2)[: math.prod(shape)].reshape(shape), *factors)

        def call(*x):
            return f(*x, beta=beta, alpha=alpha)

        torch.testing.assert_close(gradients(call, inputs, *OURS), gradients(call, inputs, "aten::linalg_qr"))


@pytest.mark.parametrize("dtype", [F64, C128], ids=str)
@pytest.mark.parametrize("empty", ["batch", "rows", "inner"])
def test_empty(empty, dtype):
    b, m, k = (0, 2, 3) if empty == "batch" else (2, 0, 3) if empty == "rows" else (2, 2, 0)
    inputs = (random(b, m, k, dtype=dtype), random(b, k, 2, dtype=dtype))
    torch.testing.assert_close(gradients(torch.bmm, inputs, *OURS), gradients(torch.bmm, inputs, "aten::linalg_qr"))
    inputs = (inputs[0].sum(0), inputs[1].sum((0, 2)))
    torch.testing.assert_close(gradients(torch.mv, inputs, *OURS), gradients(torch.mv, inputs, "aten::linalg_qr"))


def test_a_matrix_that_is_not_read_has_no_nan():
    with mg.override(*OURS):
        x = torch.full((2, 2), torch.nan).requires_grad_()
        A = torch.ones(1, 2, 2).requires_grad_()
        of_x, of_A = torch.autograd.grad(torch.addbmm(x, A, A.detach(), beta=0).sum(), (x, A))
    assert of_x.eq(0).all() and of_A.eq(2).all()
