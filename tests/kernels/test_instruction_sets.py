"""The CPU kernels in the vectors of narrower instruction sets, chosen as PyTorch's own are: ATEN_CPU_CAPABILITY."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_manualgrad.core import libraries

SCRIPT = """
import torch
import torch_manualgrad as mg

kernels = torch.ops.manualgrad
LOWER = (False, True, False)  # neither upper nor unitriangular

def twice(name):
    # the kernel, and what it stands for
    kernel = mg.ops[name].overloads["kernel"]
    return kernel.op, kernel.reference

def random(*shape, dtype):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape)))

for dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):
    tolerance = 1e-3 if dtype in (torch.float32, torch.complex64) else 1e-10
    def same(found, expected):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for n in (2, 3, 8, 40):
        A = random(21, n, n, dtype=dtype) + 2 * n**0.5 * torch.eye(n, dtype=dtype)
        G = random(21, n, n, dtype=dtype).roll(1, 0)
        factors = torch.linalg.lu(A)
        if n <= 32:
            same(kernels.linalg_lu_jvp.kernel(G, *factors, True), mg.ops.linalg_lu_jvp.reference(G, *factors, True))
            given = (G, A, A, *LOWER)
            expected = mg.ops.linalg_solve_triangular_backward.reference(*given)
            same(kernels.linalg_solve_triangular_backward.kernel(*given), expected)
            given = (G[..., :-1], G[..., :-1, :-1], *torch.linalg.qr(A[..., :-1]))
            same(*(f(*given) for f in twice("linalg_qr_backward")))
        if n <= 32 or not dtype.is_complex:
            given = (G, G, *torch.linalg.qr(A))
            same(*(f(*given) for f in twice("linalg_qr_backward")))
            given = (G, G, *factors, True)
            same(kernels.linalg_lu_backward.kernel(*given), mg.ops.linalg_lu_backward.reference(*given))
            same(kernels.linalg_inv_backward.kernel(G, A), mg.ops.linalg_inv_backward.reference(G, A))
        if not dtype.is_complex:
            L, V = mg.ops.eigh_tridiagonal(A @ A.mT)
            same(V * L.unsqueeze(-2) @ V.mT, A @ A.mT)
        if n > 8:
            continue
        U, S, Vh = mg.ops.svd_jacobi(A)
        same(U * S.unsqueeze(-2) @ Vh, A)
        same(mg.ops.eigh_jacobi(A @ A.mH)[0], torch.linalg.eigvalsh(A @ A.mH))
        same(mg.ops.lu_small(A)[0], factors.P)
        given = (G, S, G, U, S, Vh, None, 0.0, 0.0)
        same(*(f(*given)[0] for f in twice("svd_backward")))
    x, offsets = random(50, 7, dtype=dtype), torch.tensor([0, 3, 3, 40, 50])
    same(mg.ops.segment_sum(x, offsets, 0), mg.ops.segment_sum.reference(x, offsets, 0))
    norm = torch.linalg.vector_norm(x)
    same(mg.ops.norm_backward(torch.ones_like(norm), x, 2.0, norm, keepdim=False), x / norm)
    if not dtype.is_complex:
        same(mg.ops.segment_softmax(x, offsets, 0), mg.ops.segment_softmax.reference(x, offsets, 0))
        queries, keys = random(6, 1, 2, 50, 40, dtype=dtype).unbind()[:2], random(6, 1, 1, 70, 40, dtype=dtype).unbind()[:4]
        given = (*queries, *keys, random(50, 70, dtype=dtype), None, True, None)
        same(mg.ops.attention_jvp(*given), mg.ops.attention_jvp.reference(*given))
"""


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_kernels_equal_their_references(capability):
    cpu = next(library for library in libraries.load() if library.device == "cpu")
    if cpu.path is None:
        pytest.skip(cpu.reason)
    known = ["default", "avx2", "avx512"]
    if (here := torch.backends.cpu.get_cpu_capability().lower()) in known and known.index(capability) > known.index(
        here
    ):
        pytest.skip(f"this CPU has no {capability}: neither these kernels nor PyTorch's can run")
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert done.returncode == 0, done.stderr
