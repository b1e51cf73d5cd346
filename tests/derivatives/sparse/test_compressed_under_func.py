"""Compressed sparse tensors: torch.autograd differentiates them to second order; PyTorch cannot wrap them for torch.func."""

from __future__ import annotations

import pytest
import torch

import torch_manualgrad as mg

F64 = torch.float64
DENSE = torch.tensor([[0.0, 1.5, 0.0, -2.0], [0.5, 0.0, 0.0, 1.0], [0.0, 0.0, 3.0, 0.0]], dtype=F64)
S = DENSE.to_sparse_csr()
A = torch.arange(1.0, 7.0, dtype=F64).reshape(3, 2)
B = torch.arange(8.0, dtype=F64).reshape(2, 4) - 3
D = torch.arange(12.0, dtype=F64).reshape(4, 3) - 5

CASES = {
    "sampled_addmm": (
        lambda B: torch.sparse.sampled_addmm(S, A, B).to_dense().pow(3).sum(),
        lambda B: ((DENSE + A @ B) * (DENSE != 0)).pow(3).sum(),
        B,
    ),
    "mm, mean": (
        lambda D: torch.sparse.mm(S, D, "mean").pow(3).sum(),
        lambda D: ((DENSE @ D) / (DENSE != 0).sum(1, keepdim=True)).pow(3).sum(),
        D,
    ),
    "mm, amax": (
        lambda D: torch.sparse.mm(S, D, "amax").pow(3).sum(),
        lambda D: (DENSE[:, :, None] * D).where((DENSE != 0)[:, :, None], -torch.inf).amax(1).pow(3).sum(),
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
