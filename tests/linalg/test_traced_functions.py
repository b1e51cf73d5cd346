"""Every function of mg.linalg, traced to a graph and linearized: nothing reads values there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import jvp, linearize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import torch_manualgrad as mg
from torch_manualgrad.derivatives.samples.drawing import random, random_conditioned

B = random_conditioned(3, 3, dtype=torch.float64)
POINTS, WEIGHTS = random(5, 3, dtype=torch.float64), torch.rand(5, generator=torch.Generator().manual_seed(0)) + 0.1
L = mg.linalg


def positive(A: Tensor) -> Tensor:
    return A @ A.mT + torch.eye(3)


CALLS = {
    "eigh": lambda A: L.eigh(positive(A)).eigenvalues,
    "eigh_generalized": lambda A: L.eigh_generalized(positive(A), positive(B)).eigenvalues,
    "expm": L.expm,
    "expm_multiply": lambda A: L.expm_multiply(A, B, 0.3),
    "funm_hermitian": lambda A: L.funm_hermitian(positive(A), torch.exp),
    "kabsch": lambda A: L.kabsch(POINTS @ A, POINTS, WEIGHTS).rmsd,
    "logm": lambda A: L.logm(positive(A)),
    "lu": lambda A: L.lu(A).U,
    "nuclear_norm": L.nuclear_norm,
    "polar": lambda A: L.polar(A).U,
    "powm": lambda A: L.powm(positive(A), 0.3),
    "procrustes": lambda A: L.procrustes(POINTS @ A, POINTS),
    "rsqrtm": lambda A: L.rsqrtm(positive(A)),
    "schur": lambda A: L.schur(positive(A)).T,
    "solve_discrete_lyapunov": lambda A: L.solve_discrete_lyapunov(A / 10, B),
    "solve_lyapunov": lambda A: L.solve_lyapunov(A, B),
    "solve_sylvester": lambda A: L.solve_sylvester(positive(A), positive(B), B),
    "spectral_norm": L.spectral_norm,
    "sqrtm": lambda A: L.sqrtm(positive(A)),
    "svd": lambda A: L.svd(A).S,
}


def test_every_function_is_here():
    assert set(CALLS) == {name for name in L.__all__ if name[0].islower()}


@pytest.mark.parametrize("name", CALLS)
def test_traced_and_linearized(name):
    A = random_conditioned(3, 3, dtype=torch.float64)
    call = lambda A: tree_leaves(CALLS[name](A))  # noqa: E731
    torch.testing.assert_close(make_fx(call)(A)(A), call(A))
    value, tangent = jvp(call, (A,), (B,))
    found, along = linearize(call, A)
    torch.testing.assert_close(found, value)
    torch.testing.assert_close(along(B), tangent)
