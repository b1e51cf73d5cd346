"""Implicit functions on CUDA against the same on the CPU."""

from __future__ import annotations

import pytest
import torch

import torch_manualgrad as mg

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


def newton(f, x, a):
    for _ in range(30):
        x = x - f(x, a) / (3 * x**2)
    return x


def roots(a):
    return mg.implicit.root(lambda x, a: x**3 - a, newton)(torch.ones_like(a), a)


def equilibrium(W):
    return mg.implicit.fixed_point(lambda z, W: torch.tanh(W @ z / 4 + 1))(W.new_zeros(len(W)), W)


def solved(solver):
    def function(A):
        matrix = A @ A.mT + torch.eye(len(A), dtype=A.dtype, device=A.device)
        return mg.implicit.linear_solve(lambda x, M: M @ x, A[0], matrix, solver=solver)

    return function


def closest(c):
    plane = lambda x, c: x.sum() - 1  # noqa: E731
    projected = lambda f, x, c: c - (c.sum() - 1) / c.numel()  # noqa: E731
    return mg.implicit.minimize(lambda x, c: (x - c).square().sum(), projected, plane)(c, c)


FUNCTIONS = {
    "root": (roots, (3,)),
    "fixed point": (equilibrium, (4, 4)),
    "minimum": (closest, (4,)),
    **{solver: (solved(solver), (4, 4)) for solver in ("cg", "minres", "gmres", "bicgstab", "direct")},
}
TRANSFORMS = {
    "values": lambda f, x: f(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sin().sum())(x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda x: f(x).sin().sum()))(torch.stack([x, x + 0.5])),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_on_the_cpu(name, transform):
    function, shape = FUNCTIONS[name]
    torch.manual_seed(0)
    x = torch.rand(shape, dtype=torch.float64) + 0.5
    found, expected = (TRANSFORMS[transform](function, v) for v in (x.cuda(), x))
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-7, atol=1e-7)
