"""Sparse derivatives on CUDA against the same on the CPU."""

from __future__ import annotations

import pytest
import torch

import torch_manualgrad as mg

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


def f(x):
    out = torch.zeros_like(x)
    out[1:] = x[1:] * x[:-1] ** 2
    return out + x[torch.arange(len(x), device=x.device).flip(0)].sin()


@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_jacobian(mode):
    x = torch.randn(9, dtype=torch.float64)
    here = mg.sparse_jacobian(f, mode=mode, check=True)(x.cuda())
    assert here.is_cuda
    torch.testing.assert_close(here.to_dense().cpu(), mg.sparse_jacobian(f, mode=mode)(x).to_dense())
    csr = mg.sparse_jacobian(f, mode=mode, layout="csr")(x.cuda())
    torch.testing.assert_close(csr.to_dense(), here.to_dense())


@pytest.mark.parametrize("coloring", ["star", "acyclic", "columns"])
def test_hessian(coloring):
    x = torch.randn(9, dtype=torch.float64)
    g = lambda x: f(x).sum()  # noqa: E731
    found = mg.sparse_hessian(g, coloring=coloring, check=True)(x.cuda())
    torch.testing.assert_close(found.to_dense().cpu(), torch.func.hessian(g)(x))
