"""Derivatives through sparse tensors, in the values that they are made of, and through products with compressed ones."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.derivatives.sparse.entries import product_of_entries, to_dense_at
from torch_manualgrad.testing import Sample, check

COO, CSR, CSC = torch.sparse_coo, torch.sparse_csr, torch.sparse_csc
PATTERN = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 1]])
pytestmark = pytest.mark.filterwarnings("ignore")

# What torch.func cannot wrap is proven to raise.
ONLY_EAGER = dict.fromkeys(("rev/func", "rev-rev/func"), "torch.func wraps tensors that have strides")


def matrix(values, layout=COO):
    """A 3 x 3 matrix of 4 entries, made of its values."""
    p = PATTERN.to_sparse(layout=layout)
    if layout is COO:
        return torch.sparse_coo_tensor(p.indices(), values, (3, 3), is_coalesced=True)
    parts = (p.crow_indices(), p.col_indices()) if layout is CSR else (p.ccol_indices(), p.row_indices())
    return torch.sparse_compressed_tensor(*parts, values, (3, 3), layout=layout)


def full(values):
    """The same, dense."""
    at = PATTERN.nonzero().unbind(1)
    return torch.zeros(3, 3, dtype=values.dtype).index_put(at, values)


def twice(values):
    """Stores one entry twice."""
    return torch.sparse_coo_tensor(torch.tensor([[0, 0, 1, 0], [1, 2, 2, 1]]), values, (3, 3))


B = random(3, 2, seed=1)
BIAS = random(3, 2, seed=2)
OF_COO = {
    "mm": lambda v, b: torch.sparse.mm(matrix(v), b),
    "matmul": lambda v, b: matrix(v) @ b,
    "addmm": lambda v, b: torch.sparse.addmm(BIAS.to(b.dtype), matrix(v), b, beta=2, alpha=0.5),
    "uncoalesced": lambda v, b: torch.sparse.mm(twice(v), b),
    "to_dense": lambda v, b: matrix(v).to_dense() @ b,
    "values": lambda v, b: matrix(v).values() * b.sum(),
    "coalesce": lambda v, b: twice(v).coalesce().values() * b.sum(),
    "sum": lambda v, b: torch.sparse.sum(matrix(v), 0).to_dense() @ b,
    "sum of all": lambda v, b: torch.sparse.sum(matrix(v)) * b,
    "sum of sparse dims": lambda v, b: torch.sparse.sum(matrix(v), [0, 1]) * b,
    "sparse_mask": lambda v, b: matrix(v).sparse_mask(PATTERN.tril().to(v.dtype).to_sparse()).to_dense() @ b,
    "dense sparse_mask": lambda v, b: (full(v) @ full(v)).sparse_mask(PATTERN.to(v.dtype).to_sparse()).to_dense() @ b,
    "sparse product": lambda v, b: torch.sparse.mm(matrix(v), matrix(v * v)).to_dense() @ b,
    "to_csr": lambda v, b: matrix(v).to_sparse_csr().to_sparse() @ b,
}
OF_REALS = {
    "softmax": lambda v, b: torch.sparse.softmax(matrix(v), 1).to_dense() @ b,
    "softmax of columns": lambda v, b: torch.sparse.softmax(matrix(v), 0).to_dense() @ b,
    "log_softmax": lambda v, b: torch.sparse.log_softmax(matrix(v), 1).to_dense() @ b,
}
OF_COMPRESSED = {
    "values": lambda v, b, layout: matrix(v, layout).values() * v * b.sum(),
    "values of a conversion": lambda v, b, layout: full(v * v).to_sparse(layout=layout).values() * b.sum(),
    "mm": lambda v, b, layout: torch.sparse.mm(matrix(v, layout), b),
    "matmul": lambda v, b, layout: matrix(v, layout) @ b,
    "addmm": lambda v, b, layout: torch.sparse.addmm(BIAS.to(b.dtype), matrix(v, layout), b, beta=2, alpha=0.5),
    "to_dense": lambda v, b, layout: matrix(v, layout).to_dense() @ b,
    "sparse_mask": lambda v, b, layout: (
        full(v).sparse_mask(PATTERN.to(v.dtype).to_sparse(layout=layout)).to_dense() @ b
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", [*OF_COO, *OF_REALS])
def test_reverse_mode_of_both_orders(name, dtype):
    if name in OF_REALS and dtype.is_complex:
        return
    function = {**OF_COO, **OF_REALS}[name]
    gaps = ONLY_EAGER if name == "to_csr" else None
    with mg.override():
        check(function, [Sample(random(4, dtype=dtype), B.to(dtype))], modes=("rev", "rev-rev"), checks=(), gaps=gaps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("layout", [CSR, CSC], ids=str)
@pytest.mark.parametrize("name", OF_COMPRESSED)
def test_reverse_mode_of_compressed_layouts(name, layout, dtype):
    if layout is CSC and name in ("mm", "addmm"):
        gaps = ONLY_EAGER | {"rev-rev": "PyTorch cannot add two gradients of layout CSC"}
    elif name.startswith("values") and dtype.is_complex:
        gaps = dict.fromkeys(("rev", "rev-rev"), "PyTorch cannot conjugate a view of a compressed tensor")
    else:
        gaps = ONLY_EAGER
    sample = Sample(random(4, dtype=dtype), B.to(dtype), layout)
    with mg.override():
        check(OF_COMPRESSED[name], [sample], modes=("rev", "rev-rev"), checks=(), gaps=gaps)


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_reduced_products(reduce):
    with mg.override():
        check(
            lambda v, b: torch.sparse.mm(matrix(v, CSR), b, reduce),
            [Sample(random(4), B)],
            modes=("rev", "rev-rev"),
            checks=(),
            gaps=ONLY_EAGER,
        )


def test_sampled_products():
    with mg.override():
        check(
            lambda v, a, b: torch.sparse.sampled_addmm(matrix(v, CSR), a, b, beta=2, alpha=0.5).to_dense(),
            [Sample(random(4), random(3, 2, seed=3), random(2, 3, seed=4))],
            modes=("rev", "rev-rev"),
            checks=(),
            gaps=ONLY_EAGER,
        )


def third(f, v):
    """The third derivative along three directions, by nested gradients."""
    v = v.clone().requires_grad_()
    value = f(v).square().sum()
    for seed in (5, 6, 7):
        (value,) = torch.autograd.grad(value, v, create_graph=True)
        value = (value * random(4, seed=seed)).sum()
    return value


@pytest.mark.parametrize(
    "sparse, dense",
    [
        (lambda v: torch.sparse.mm(matrix(v), full(v)), lambda v: full(v) @ full(v)),
        (lambda v: torch.sparse.mm(matrix(v, CSR), full(v)), lambda v: full(v) @ full(v)),
        (lambda v: torch.sparse.mm(matrix(v), matrix(v)).to_dense(), lambda v: full(v) @ full(v)),
        (lambda v: torch.sparse.mm(matrix(v, CSR), full(v), "sum"), lambda v: full(v) @ full(v)),
        (lambda v: torch.sparse.sum(matrix(v.exp()), 0).to_dense(), lambda v: full(v.exp()).sum(0)),
        (
            lambda v: torch.sparse.softmax(matrix(v), 1).to_dense(),
            lambda v: torch.where(PATTERN.bool(), full(v), -torch.inf).softmax(1).nan_to_num(),
        ),
    ],
    ids=["mm", "csr mm", "sparse product", "reduced", "sum", "softmax"],
)
def test_third_order(sparse, dense):
    v = random(4)
    with mg.override():
        torch.testing.assert_close(third(sparse, v), third(dense, v))


def test_pytorchs_second_derivative_is_silently_wrong():
    v = random(4).requires_grad_()

    def second():
        (first,) = torch.autograd.grad(matrix(v).to_dense().pow(3).sum(), v, create_graph=True)
        return torch.autograd.grad(first.sum() + v.sum(), v)[0]

    assert torch.equal(second(), torch.ones(4, dtype=torch.float64))
    with mg.override():
        torch.testing.assert_close(second(), 6 * v.detach() + 1)


@pytest.mark.parametrize("layout", [COO, CSR], ids=str)
@pytest.mark.parametrize("dual", [True, False], ids=["dual numbers", "torch.func"])
def test_forward_mode_through_a_constant_sparse_matrix(layout, dual):
    S, t = matrix(random(4), layout), random(3, 2, seed=3)
    if layout is CSR and not dual:
        return  # torch.func wraps tensors that have strides
    with mg.override():
        if not dual:
            tangent = torch.func.jvp(lambda b: torch.sparse.mm(S, b).sin(), (B,), (t,))[1]
        else:
            with fwAD.dual_level():
                tangent = fwAD.unpack_dual(torch.sparse.mm(S, fwAD.make_dual(B, t)).sin()).tangent
    torch.testing.assert_close(tangent, (S.to_dense() @ B).cos() * (S.to_dense() @ t))


@pytest.mark.parametrize(
    "f",
    [
        lambda v: matrix(v),
        lambda v: matrix(v, CSR),
        lambda v: full(v).to_sparse(),
        lambda v: full(v).sparse_mask(PATTERN.to(v.dtype).to_sparse()),
    ],
)
def test_a_sparse_result_has_no_tangent(f):
    with mg.override(), fwAD.dual_level():
        with pytest.raises(NotImplementedError, match="dual tensors cannot be sparse"):
            f(fwAD.make_dual(random(4), random(4, seed=1)))


def test_the_first_of_equal_products_has_the_gradient():
    A = torch.tensor([[2.0, 2.0, 0.0]], dtype=torch.float64).to_sparse_csr().requires_grad_()
    b = torch.ones(3, 1, dtype=torch.float64).requires_grad_()
    for names in (("aten::_sparse_addmm",), ()):  # PyTorch's and ours
        with mg.override(*names):
            of_A, of_b = torch.autograd.grad(torch.sparse.mm(A, b, "amax").sum(), (A, b))
        assert of_A.to_dense().tolist() == [[1, 0, 0]] and of_b.tolist() == [[2], [0], [0]]


def test_without_entries():
    b = B.clone().requires_grad_()
    with mg.override():
        for S in (torch.zeros(2, 3, dtype=torch.float64).to_sparse(layout=layout) for layout in (COO, CSR)):
            S.requires_grad_()
            of_S, of_b = torch.autograd.grad(torch.sparse.mm(S, b).exp().sum(), (S, b), create_graph=True)
            assert of_S._nnz() == 0 and of_S.shape == S.shape and of_b.eq(0).all()
        for reduce in ("sum", "amax"):
            of_S, of_b = torch.autograd.grad(torch.sparse.mm(S, b, reduce).exp().sum(), (S, b))
            assert of_S._nnz() == 0 and of_b.eq(0).all()


SUMS_OVER_EQUAL_INDICES = {
    "sparse_mm_reduce_backward": lambda: mg.ops.sparse_mm_reduce_backward(
        torch.rand(4000, 3).to_sparse_csr(), torch.randn(4000, 20), torch.rand(3, 20), "amax", [True, True]
    ),
    "to_dense_at": lambda: (to_dense_at(torch.randn(90000), (torch.randint(0, 50, (90000,)),), (50,)),),
    "product_of_entries": lambda: (
        product_of_entries(torch.randn(9000), *torch.randint(0, 5, (2, 9000)), torch.randn(5, 20), 5),
    ),
}


@pytest.mark.parametrize("name", SUMS_OVER_EQUAL_INDICES)
def test_sums_do_not_depend_on_the_order_of_threads(name):
    def result():
        torch.manual_seed(0)
        found = SUMS_OVER_EQUAL_INDICES[name]()
        return [x.values() if x.layout is CSR else x for x in found]

    threads = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        first = result()
        for _ in range(10):
            assert all(map(torch.equal, result(), first))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dense", [(), (2,), (2, 3), (0,)])
def test_to_dense_at(dense):
    sizes, values = (3, 4, *dense), random(5, *dense)
    at = (torch.tensor([0, 2, 2, 1, 0]), torch.tensor([1, 3, 3, 0, 1]))
    expected = torch.zeros(sizes, dtype=values.dtype).index_put(at, values, accumulate=True)
    torch.testing.assert_close(to_dense_at(values, at, sizes), expected)


@pytest.mark.parametrize("dims", [[0], [2], [0, 1], [0, 2], [1, 2]], ids=str)
def test_sums_of_hybrid_tensors(dims):
    def f(v):
        x = torch.sparse_coo_tensor(torch.tensor([[0, 1, 0], [1, 1, 0]]), v, (2, 2, 2))
        y = torch.sparse.sum(x, dims)
        return (y if y.layout is torch.strided else y.to_dense()).sin()

    with mg.override():
        check(f, [Sample(random(3, 2))], modes=("rev", "rev-rev"), checks=())


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_softmax_of_hybrid_tensors(dim):
    def f(v):
        x = torch.sparse_coo_tensor(torch.tensor([[0, 1, 0], [1, 1, 0]]), v, (2, 2, 2))
        return torch.sparse.softmax(x, dim).to_dense().sin()

    with mg.override():
        check(f, [Sample(random(3, 2))], modes=("rev", "rev-rev"), checks=())


@pytest.mark.parametrize("layout", [torch.sparse_bsr, torch.sparse_bsc], ids=str)
def test_blocks(layout):
    shape, size = ((2, 2, 1), (4, 2)) if layout is torch.sparse_bsr else ((2, 1, 2), (2, 4))

    def f(v):
        ends, at = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
        return torch.sparse_compressed_tensor(ends, at, v, size, layout=layout).to_dense().sin()

    with mg.override():
        check(f, [Sample(random(*shape))], modes=("rev", "rev-rev"), checks=(), gaps=ONLY_EAGER)


def test_a_product_of_two_matrices_in_rows():
    v = random(4).requires_grad_()
    with mg.override():
        y = torch.sparse.mm(matrix(v, CSR), matrix(v * v, CSR)).to_dense()
        (found,) = torch.autograd.grad(y.square().sum(), v)
    (expected,) = torch.autograd.grad((full(v) @ full(v * v)).square().sum(), v)
    torch.testing.assert_close(found, expected)


NO_INDICES = torch.zeros(0, 3, dtype=torch.long)
WITHOUT_SPARSE_DIMS = {
    "to_dense": lambda v: torch.sparse_coo_tensor(NO_INDICES, v, (2,)).to_dense().pow(3),
    "values": lambda v: torch.sparse_coo_tensor(NO_INDICES, v, (2,)).coalesce().values().pow(2),
    "sum": lambda v: torch.sparse.sum(torch.sparse_coo_tensor(NO_INDICES, v, (2,)) * 2),
    "sum over a dim": lambda v: torch.sparse.sum(torch.sparse_coo_tensor(NO_INDICES, v, (2,)) * 2, 0),
    "plus dense": lambda v: (v[0] + torch.sparse_coo_tensor(NO_INDICES, v, (2,))).pow(3),
    "sparse_mask": lambda v: v[0].sparse_mask(torch.sparse_coo_tensor(NO_INDICES, v.detach(), (2,))).to_dense().pow(3),
    "no entries": lambda v: torch.sparse_coo_tensor(NO_INDICES[:, :0], v[:0], (2,)).to_dense().pow(3) + v[0] ** 3,
}


@pytest.mark.parametrize("name", WITHOUT_SPARSE_DIMS)
@pytest.mark.parametrize("names", [(), ("*",)], ids=["override()", "all"])
def test_coo_without_sparse_dims(name, names):
    """Each entry is a whole tensor, and the sparse tensor is their sum."""
    f = WITHOUT_SPARSE_DIMS[name]

    def gradient():
        v = torch.linspace(-1, 2, 6, dtype=torch.float64).reshape(3, 2).requires_grad_()
        return torch.autograd.grad(f(v).sum(), v)[0]

    expected = gradient()
    with mg.override(*names):
        torch.testing.assert_close(gradient(), expected)


LAYOUTS = {
    "COO": {"layout": torch.sparse_coo},
    "CSR": {"layout": torch.sparse_csr},
    "CSC": {"layout": torch.sparse_csc},
    "BSR": {"layout": torch.sparse_bsr, "blocksize": (2, 2)},
    "BSR of others": {"layout": torch.sparse_bsr, "blocksize": (1, 2)},
    "BSC": {"layout": torch.sparse_bsc, "blocksize": (2, 2)},
}


@pytest.mark.parametrize("given", LAYOUTS)
@pytest.mark.parametrize("made", LAYOUTS)
def test_conversion_keeps_the_layout_of_the_gradient(given, made):
    dense = torch.arange(1.0, 17).reshape(4, 4).double()
    x = dense.to_sparse(**LAYOUTS[given]).requires_grad_()
    grad = (2 * dense).to_sparse(**LAYOUTS[made])
    with mg.override():
        try:
            y = x.to_sparse(**LAYOUTS[made])
        except RuntimeError:
            pytest.skip("PyTorch has no such conversion")
        (found,) = torch.autograd.grad(y, x, grad)
    assert found.layout is x.layout
    if "blocksize" in LAYOUTS[given]:
        assert found.values().shape == x.values().shape
    torch.testing.assert_close(found.to_dense(), 2 * dense)


# -- compressed tensors: by autograd to second order; PyTorch cannot wrap them for torch.func -------------------------

F64 = torch.float64
DENSE = torch.tensor([[0.0, 1.5, 0.0, -2.0], [0.5, 0.0, 0.0, 1.0], [0.0, 0.0, 3.0, 0.0]], dtype=F64)
COMPRESSED = DENSE.to_sparse_csr()
LEFT = torch.arange(1.0, 7.0, dtype=F64).reshape(3, 2)
RIGHT = torch.arange(8.0, dtype=F64).reshape(2, 4) - 3
D = torch.arange(12.0, dtype=F64).reshape(4, 3) - 5

CASES = {
    "sampled_addmm": (
        lambda b: torch.sparse.sampled_addmm(COMPRESSED, LEFT, b).to_dense().pow(3).sum(),
        lambda b: ((DENSE + LEFT @ b) * (DENSE != 0)).pow(3).sum(),
        RIGHT,
    ),
    "mm, mean": (
        lambda d: torch.sparse.mm(COMPRESSED, d, "mean").pow(3).sum(),
        lambda d: ((DENSE @ d) / (DENSE != 0).sum(1, keepdim=True)).pow(3).sum(),
        D,
    ),
    "mm, amax": (
        lambda d: torch.sparse.mm(COMPRESSED, d, "amax").pow(3).sum(),
        lambda d: (DENSE[:, :, None] * d).where((DENSE != 0)[:, :, None], -torch.inf).amax(1).pow(3).sum(),
        D,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_both_orders_by_autograd(name):
    sparse, dense, x = CASES[name]

    def derivatives(f):
        y = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(y), y, create_graph=True)
        return first.detach(), torch.autograd.grad(first.square().sum(), y)[0]

    with mg.override():
        found = derivatives(sparse)
    torch.testing.assert_close(found, derivatives(dense))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian])
def test_torch_func_raises_before_any_rule(name, transform):
    sparse, _, x = CASES[name]
    for rules in ((), ("*",)):
        with mg.override(*rules), pytest.raises(RuntimeError, match="Sparse CSR tensors do not have strides"):
            transform(sparse)(x)
    with pytest.raises(RuntimeError, match="Sparse CSR tensors do not have strides"):
        transform(sparse)(x)  # PyTorch alone


# -- formulas called by themselves -------------------------------------------------------------------------------------

EVERY_LAYOUT = [COO, CSR, CSC, torch.sparse_bsr, torch.sparse_bsc]


def stored(layout, dtype):
    """A sparse tensor of the pattern, and one dense dim if its layout has any."""
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    dense = torch.block_diag(random(2, 2, dtype=dtype), random(2, 2, dtype=dtype, seed=1))
    return dense.to_sparse(layout=layout, blocksize=blocks).detach()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("layout", EVERY_LAYOUT, ids=str)
def test_values_backward_next_to_stock(layout, dtype):
    x = stored(layout, dtype).requires_grad_()
    values = x.values()
    g = random(*values.shape, dtype=dtype, seed=2)
    (stock,) = torch.autograd.grad(values, x, g)
    found = mg.ops.values_backward(g, x.detach())
    assert found.layout is layout and found.shape == x.shape
    torch.testing.assert_close(found.to_dense(), stock.to_dense(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_values_backward_is_differentiable_again(dtype):
    x, weights = stored(COO, dtype), random(4, 4, dtype=dtype, seed=3)

    def f(g):
        return mg.ops.values_backward(g, x).to_dense() * weights

    g = random(x._nnz(), dtype=dtype, seed=2)
    no_tangent = "a sparse tensor has none"
    with mg.override():
        check(f, [(g,)], gaps=dict.fromkeys(("fwd", "fwd-rev", "fwd-fwd", "rev-fwd"), no_tangent), checks=())
    of_nothing = torch.zeros(3, 3, dtype=dtype).to_sparse()
    assert mg.ops.values_backward(torch.zeros(0, dtype=dtype), of_nothing)._nnz() == 0


@pytest.mark.parametrize("layout", EVERY_LAYOUT, ids=str)
def test_to_sparse_backward_next_to_stock(layout):
    """Of a dense tensor that was made sparse, and of the same with a sparse cotangent of another layout."""
    x = torch.block_diag(random(2, 2), random(2, 2, seed=1)).requires_grad_()
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    y = x.to_sparse(layout=layout, blocksize=blocks)
    g = stored(layout, torch.float64)
    (stock,) = torch.autograd.grad(y, x, g)
    found = mg.ops.to_sparse_backward(g, torch.strided, None)
    torch.testing.assert_close(found, stock, rtol=0, atol=0)
    same = mg.ops.to_sparse_backward(g, layout, blocks)
    assert same.layout is layout
    torch.testing.assert_close(same.to_dense(), g.to_dense(), rtol=0, atol=0)
    torch.testing.assert_close(mg.ops.to_sparse_backward(g, COO, None).to_dense(), g.to_dense(), rtol=0, atol=0)
