"""Products of matrices and vectors: layouts, complex numbers, broadcasting, missing parts, and what PyTorch cannot differentiate."""

import math

import pytest
import torch
from helpers.tensors import same
from torch.func import jvp

import torch_manualgrad as mg
from torch_manualgrad.derivatives.linalg.matmul import mm_mat1_backward, mm_mat2_backward
from torch_manualgrad.derivatives.samples.drawing import random

F32, F64, C128 = torch.float32, torch.float64, torch.complex128


def gradients(out, inputs, weight):
    return torch.autograd.grad(out, inputs, weight, allow_unused=True, materialize_grads=True)


# -- mm and addmm -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("expanded", [False, True])
def test_mm_has_stocks_values_and_layouts(first, second, expanded, dtype):
    def matrix(m, n, column_major, seed):
        return random(n, m, dtype=dtype, seed=seed).mT if column_major else random(m, n, dtype=dtype, seed=seed)

    A, B = matrix(3, 2, first, 0).requires_grad_(), matrix(2, 4, second, 1).requires_grad_()
    G = random(1, 1, dtype=dtype, seed=2).expand(3, 4) if expanded else random(3, 4, dtype=dtype, seed=2)
    expected = gradients(A @ B, (A, B), G)
    with mg.override("aten::mm"):
        found = gradients(A @ B, (A, B), G)
    for g, x in zip(found, expected, strict=True):
        same(g, x)
        assert g.stride() == x.stride()


@pytest.mark.parametrize("alpha, beta", [(1, 1), (2, 0), (0.5 - 1j, 1j), (0, 3.5)])
@pytest.mark.parametrize("shape", [(3, 4), (4,), (3, 1), ()])
def test_addmm_equals_stock(shape, alpha, beta):
    dtype = C128 if isinstance(alpha, complex) else F64
    bias = torch.ones(shape, dtype=dtype).requires_grad_()
    A, B = random(3, 2, dtype=dtype).requires_grad_(), random(2, 4, dtype=dtype, seed=1).requires_grad_()
    G = random(3, 4, dtype=dtype, seed=2)

    def f(bias, A, B):
        return torch.addmm(bias, A, B, alpha=alpha, beta=beta)

    def run():
        x = (bias, A, B)
        parts = tuple(t.detach() for t in x)
        tangents = [
            jvp(lambda y, i=i: f(*parts[:i], y, *parts[i + 1 :]), (parts[i],), (parts[i],))[1] for i in range(3)
        ]
        return (*gradients(f(*x), x, G), *tangents)

    expected = run()
    with mg.override("aten::addmm"):
        for g, x in zip(run(), expected, strict=True):
            same(g, x)


def test_mm_formulas_take_complex_numbers():
    A, B = random(3, 2, dtype=C128).requires_grad_(), random(2, 4, dtype=C128, seed=1).requires_grad_()
    G, alpha = random(3, 4, dtype=C128, seed=2), 0.5 - 2j
    gA, gB = gradients(alpha * (A @ B), (A, B), G)
    for strides in (None, (1, 3), (2, 1)):
        same(mm_mat1_backward(G, B, strides, alpha), gA)
    for strides in (None, (1, 2), (4, 1)):
        same(mm_mat2_backward(G, A, strides, alpha), gB)


# -- _trilinear -------------------------------------------------------------------------------------------------------


def test_bilinear_equals_stock_and_has_complex_derivatives():
    def inputs(dtype):
        shapes = ((5, 3), (5, 2), (4, 3, 2))
        return [random(*s, dtype=dtype, seed=i).requires_grad_() for i, s in enumerate(shapes)]

    x, G = inputs(F64), random(5, 4, dtype=F64, seed=7)
    expected = gradients(torch.nn.functional.bilinear(*x), x, G)
    with mg.override():
        for g, e in zip(gradients(torch.nn.functional.bilinear(*x), x, G), expected, strict=True):
            same(g, e)

    z, H = inputs(C128), random(5, 4, dtype=C128, seed=7)
    with pytest.raises(RuntimeError, match="does not support automatic differentiation"):
        torch.nn.functional.bilinear(*z)
    expected = gradients(torch.einsum("bi,oij,bj->bo", z[0], z[2], z[1]), z, H)
    with mg.override():
        for g, e in zip(gradients(torch.nn.functional.bilinear(*z), z, H), expected, strict=True):
            same(g, e)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)])
def test_trilinear_with_constant_factors(needed):
    x = [random(2, 3, dtype=F64, seed=i).requires_grad_(i in needed) for i in range(3)]
    wanted = [x[i] for i in needed]
    with mg.override("aten::_trilinear"):
        out = torch.ops.aten._trilinear(*x, [], [], [], [1])
        found = torch.autograd.grad(out, wanted, torch.ones(2, dtype=F64))
    expected = torch.autograd.grad((x[0] * x[1] * x[2]).sum(), wanted)
    for g, e in zip(found, expected, strict=True):
        same(g, e)


def test_trilinear_backward_gives_one_cotangent():
    x = [random(2, 3, dtype=F64, seed=i) for i in range(3)]
    for factors, missing in ((x, 0), ((None, None, x[2]), 2)):
        with pytest.raises(ValueError, match=f"i1, i2, i3: expected one of them to be None, got {missing}"):
            mg.ops["_trilinear_backward"](x[0], *factors, [], [], [], [1])


def test_the_unrolled_dim_is_the_callers_where_stock_has_no_such_dim():
    x = [random(3, dtype=F64, seed=i).requires_grad_() for i in range(3)]

    def f(*x):
        return torch.ops.aten._trilinear(*x, [], [], [], [0], unroll_dim=0)

    with pytest.raises((RuntimeError, IndexError)):
        torch.autograd.grad(f(*x), x)
    with mg.override():
        same(torch.autograd.grad(f(*x), x)[0], (x[1] * x[2]).detach())


# -- _grouped_mm ------------------------------------------------------------------------------------------------------

GROUPED = [((8, 4), (2, 4, 8)), ((2, 4, 4), (4, 8)), ((4, 8), (8, 4)), ((2, 4, 4), (2, 4, 8))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first, second", GROUPED)
def test_grouped_mm_equals_stock_and_has_tangents(first, second, dtype):
    k = 16 // dtype.itemsize // 4  # so that every row is of a multiple of 16 bytes
    A, B = (random(*(n if i < len(s) - 2 else n * k for i, n in enumerate(s)), dtype=F32, seed=len(s)).to(dtype)
            for s in (first, second))  # fmt: skip
    offs = None if A.dim() == B.dim() == 3 else torch.tensor([4 * k, 8 * k], dtype=torch.int32)

    def f(A, B):
        return torch.ops.aten._grouped_mm(A, B, offs)

    def gradient():
        x, y = A.clone().requires_grad_(), B.clone().requires_grad_()
        out = f(x, y)
        return torch.autograd.grad(out, (x, y), torch.ones_like(out))

    expected = gradient()
    with pytest.raises(NotImplementedError):
        jvp(f, (A, B), (A, B))
    with mg.override():
        for g, e in zip(gradient(), expected, strict=True):
            same(g, e)
        same(jvp(f, (A, B), (A, B))[1], 2 * f(A, B))  # bilinear
        same(jvp(lambda A: f(A, B), (A,), (A.mT.contiguous().mT,))[1], f(A, B))


# -- batches and vectors: what is added is broadcast, numbers may be 0 or complex -------------------------------------

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


def gradients_under(f, inputs, *names):
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

        torch.testing.assert_close(
            gradients_under(call, inputs, *OURS), gradients_under(call, inputs, "aten::linalg_qr")
        )


@pytest.mark.parametrize("dtype", [F64, C128], ids=str)
@pytest.mark.parametrize("empty", ["batch", "rows", "inner"])
def test_empty(empty, dtype):
    b, m, k = (0, 2, 3) if empty == "batch" else (2, 0, 3) if empty == "rows" else (2, 2, 0)
    inputs = (random(b, m, k, dtype=dtype), random(b, k, 2, dtype=dtype))
    torch.testing.assert_close(
        gradients_under(torch.bmm, inputs, *OURS), gradients_under(torch.bmm, inputs, "aten::linalg_qr")
    )
    inputs = (inputs[0].sum(0), inputs[1].sum((0, 2)))
    torch.testing.assert_close(
        gradients_under(torch.mv, inputs, *OURS), gradients_under(torch.mv, inputs, "aten::linalg_qr")
    )


def test_a_matrix_that_is_not_read_has_no_nan():
    with mg.override(*OURS):
        x = torch.full((2, 2), torch.nan).requires_grad_()
        A = torch.ones(1, 2, 2).requires_grad_()
        of_x, of_A = torch.autograd.grad(torch.addbmm(x, A, A.detach(), beta=0).sum(), (x, A))
    assert of_x.eq(0).all() and of_A.eq(2).all()
