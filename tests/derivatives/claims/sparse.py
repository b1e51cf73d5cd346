"""Sparse tensors. torch.func takes no compressed ones: their proofs are by plain autograd."""

import torch

from claims import F64, own, point
from torch_manualgrad.testing import check

C128 = torch.complex128


def eager(mode, dtype=F64):
    """The rule's own samples in one mode, without torch.func."""

    def outcome(rule):
        report = check(
            rule.probe, rule.samples(dtype, "cpu"), modes=(mode,), checks=(), raise_on_failure=False, diagnose=False
        )
        found = {r.outcome for r in report.results if r.check == mode and r.engine.startswith("eager")}
        return "wrong" if "wrong" in found else "raises" if "raises" in found else "ok"

    return outcome


def second(f, x):
    """A second derivative of a function of a matrix, sparse or dense: that of the sum of its squared gradient."""
    x = x.requires_grad_()
    y = dense(f(x))
    (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    first = dense(first)
    return dense(torch.autograd.grad((first * first).sum(), x)[0])


def dense(x):
    return x if x.layout is torch.strided else x.to_dense()


def of_a_full_matrix(of_sparse, of_dense):
    """Where a sparse matrix stores every entry, the derivative is that of the same function of a dense one."""
    x = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=F64)
    return [point(lambda: second(of_sparse, x.to_sparse()), second(of_dense, x.clone()))]


def by_columns():
    """The gradient in a complex matrix."""
    z = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.complex128).requires_grad_()
    y = z.to_sparse_bsc((1, 1)).to_dense(masked_grad=False)
    return torch.autograd.grad((y * y.conj()).sum().real, z)[0].real


PROOFS = {
    "aten::_sparse_coo_tensor_with_dims_and_tensors": {"values": [own("rev-rev")]},
    "aten::sparse_compressed_tensor.comp_plain_value_size": {"missing": [eager("rev", C128)]},
    "aten::_sparse_compressed_tensor_unsafe": {"values": [eager("rev")]},
    "aten::_to_sparse": {"missing": [eager("rev", C128)]},
    "aten::_to_sparse.sparse_dim": {"missing": [eager("rev", C128)]},
    "aten::_to_sparse_csr": {"missing": [eager("rev", C128)]},
    "aten::_to_sparse_csc": {"missing": [eager("rev", C128)]},
    "aten::_to_sparse_bsr": {"missing": [eager("rev", C128)]},
    "aten::_to_sparse_bsc": {"missing": [point(by_columns, [[2, -4], [1, 6]])]},
    "aten::sparse_mask": {"missing": [own("rev-rev")]},
    "aten::_sparse_addmm": {"missing": [own("fwd")], "values": [own("rev", C128)]},
    "aten::sparse_sampled_addmm": {"missing": [eager("rev-rev")]},
    "aten::_sparse_mm_reduce_impl": {"missing": [eager("fwd"), eager("rev-rev")]},
    "aten::_sparse_sum.dim": {"missing": of_a_full_matrix(lambda x: torch.sparse.sum(x, 0), lambda x: x.sum(0))},
    "aten::_sparse_softmax": {
        "missing": of_a_full_matrix(lambda x: torch.sparse.softmax(x, 1), lambda x: x.softmax(1))
    },
    "aten::_sparse_log_softmax": {
        "missing": of_a_full_matrix(lambda x: torch.sparse.log_softmax(x, 0), lambda x: x.log_softmax(0))
    },
    "aten::_sparse_sparse_matmul": {"missing": of_a_full_matrix(lambda x: torch.sparse.mm(x, x), lambda x: x @ x)},
}
