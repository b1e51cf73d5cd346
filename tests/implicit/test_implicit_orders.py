"""Derivatives of implicit functions in every mode up to the third order, next to closed forms."""

from __future__ import annotations

import pytest
import torch
from helpers.modes import MODES, derivatives
from helpers.tensors import close, random
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from torch_manualgrad.implicit import fixed_point, linear_solve, minimize, problem, root
from torch_manualgrad.testing import check

F64, C128 = torch.float64, torch.complex128
ONES = torch.ones(3, dtype=F64)
POSITIVE = random(3).abs() + 0.5


def newton(f, x, *params):
    """For functions of one element."""
    for _ in range(40):
        x = x - f(x, *params) / vjp(lambda x: f(x, *params), x)[1](torch.ones_like(x))[0]
    return x


def cube_root(a, start=ONES):
    return root(lambda x, a: x**3 - a, newton)(start, a)


def square_root(a):
    return fixed_point(lambda x, a: (x + a / x) / 2, rtol=1e-15)(torch.ones_like(a), a)


def squares(x, X, y, penalty):
    return (X @ x - y).square().sum() + penalty.exp() * x.square().sum()


def solved(A, b):
    """Not torch.linalg.solve, whose derivatives in forward over forward mode and reverse over forward mode are wrong."""
    return torch.linalg.inv(A) @ b


def ridge(X, y, penalty):
    return solved(X.mT @ X + penalty.exp() * torch.eye(3, dtype=F64), X.mT @ y)


def projected(c, a):
    return c - (a @ c - 1) / (a @ a) * a


def on_sphere(c, r):
    return -c / (c @ c).sqrt() * r.sqrt()


def fitted(X, y, penalty):
    return minimize(squares, lambda f, x, *params: ridge(*params))(ONES, X, y, penalty)


def nearest(c, a):
    solver = lambda f, x, c, a: projected(c, a)  # noqa: E731
    return minimize(lambda x, c, a: (x - c).square().sum(), solver, lambda x, c, a: a @ x - 1)(ONES, c, a)


def lowest(c, r):
    solver = lambda f, x, c, r: on_sphere(c, r)  # noqa: E731
    return minimize(lambda x, c, r: c @ x, solver, lambda x, c, r: {"r": x @ x - r})(ONES, c, r)


MATRIX = random(3, 3) + 3 * torch.eye(3, dtype=F64)
CASES = {
    "root": (cube_root, lambda a: a ** (1 / 3), (POSITIVE,)),
    "root of no dims": (lambda a: cube_root(a, ONES[0]), lambda a: a ** (1 / 3), (POSITIVE[0],)),
    "fixed point": (square_root, torch.sqrt, (POSITIVE,)),
    "linear system": (
        lambda A, b: linear_solve(lambda x, A: A @ x, b, A, rtol=1e-14), solved, (MATRIX, ONES)
    ),
    "minimum": (fitted, ridge, (random(5, 3), random(5, seed=1), torch.tensor(0.3, dtype=F64))),
    "linear constraint": (nearest, projected, (random(3), random(3, seed=1))),
    "quadratic constraint": (lowest, on_sphere, (random(3), torch.tensor(2.0, dtype=F64))),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_every_mode(name, mode):
    ours, closed, inputs = CASES[name]
    close(ours(*inputs), closed(*inputs))
    close(derivatives(ours, inputs, mode), derivatives(closed, inputs, mode), rtol=1e-8)


def complex_cube_root(a):
    return root(lambda x, a: x**3 - a, lambda f, x, a: a ** (1 / 3))(torch.ones_like(a), a)


def reflected(a, w):
    """Linear over the real numbers only."""
    f = lambda x, a, w: 0.3 * w * x.conj() + a + 0.1 * torch.sin(x.abs())  # noqa: E731
    return fixed_point(f, rtol=1e-14)(torch.zeros_like(a), a, w)


def of_trees(a, c):
    def f(x, p):
        u, (v,) = x["u"], x["v"]
        first = p["scale"] * u[p["order"]] + 0.3 * p["a"] * torch.cos(v.abs())
        return {"u": first, "v": (0.2 * v + p["c"] + u.sum(),)}

    start = {"u": torch.zeros(2, dtype=F64), "v": (torch.zeros((), dtype=C128),)}
    params = {"a": a, "c": c, "scale": 0.1, "order": torch.tensor([1, 0]), "name": "no tensor", "nothing": None}
    x = fixed_point(f, rtol=1e-14)(start, params)
    return x["u"] * x["v"][0]


CHECKED = {
    "holomorphic": (complex_cube_root, (random(2, dtype=C128) + 2,)),
    "not holomorphic": (reflected, (random(2, dtype=C128), 0.5 * random(2, dtype=C128, seed=1))),
    "trees": (of_trees, (random(2), random(dtype=C128, seed=1))),
    "a constraint on complex numbers": (
        lambda c, r: minimize(
            lambda x, c, r: (x * c.conj()).real.sum(),
            lambda f, x, c, r: -c * (r / c.abs().square().sum()).sqrt(),
            lambda x, c, r: (x * x.conj()).real.sum() - r,
        )(torch.ones(2, dtype=C128), c, r),
        (random(2, dtype=C128), torch.tensor(2.0, dtype=F64)),
    ),
    "a constraint": (lowest, (random(3), torch.tensor(2.0, dtype=F64))),
}


@pytest.mark.parametrize("name", CHECKED)
def test_by_finite_differences(name):
    """And vmap, fake tensors, checkpoints and more."""
    f, inputs = CHECKED[name]
    check(f, [inputs])


@pytest.mark.parametrize("solver", ["direct", "gmres", "bicgstab"])
def test_tangent_solvers_agree(solver):
    f = lambda x, a, w: 0.3 * w * x.conj() + a  # noqa: E731
    a, w = random(3, dtype=C128), 0.5 * random(3, dtype=C128, seed=1)

    def pulled(solver):
        solve = fixed_point(f, tangent_solver=solver, rtol=1e-14)
        return vjp(lambda w: torch.view_as_real(solve(0 * a, a, w)), w)[1](random(3, 2))[0]

    close(pulled(solver), pulled("auto"))


# -- transforms -------------------------------------------------------------------------------------------------------


def total(f):
    return lambda *args: f(*args).sum()


BATCH = random(4, 3).abs() + 0.5


def test_vmap_and_transforms_in_any_order():
    closed = lambda a: a ** (1 / 3)  # noqa: E731
    for transform in (grad, hessian, lambda f: jacfwd(jacfwd(f)), lambda f: grad(lambda a: (hessian(f)(a) ** 2).sum())):
        close(vmap(transform(total(cube_root)))(BATCH), vmap(transform(total(closed)))(BATCH))
        close(transform(total(vmap(cube_root)))(BATCH), transform(total(vmap(closed)))(BATCH))
    twice = BATCH.reshape(2, 2, 3)
    close(vmap(vmap(hessian(total(cube_root))))(twice), vmap(vmap(hessian(total(closed))))(twice))
    close(jacrev(vmap(vmap(cube_root)))(twice), jacrev(closed)(twice))
    close(vmap(cube_root, in_dims=1, out_dims=1)(BATCH.mT.contiguous()), closed(BATCH.mT))


def test_a_batch_of_starts_with_parameters_that_are_not_batched():
    solve = lambda a: vmap(lambda start: cube_root(a, start))(BATCH).sum()  # noqa: E731
    closed = lambda a: 4 * (a ** (1 / 3)).sum()  # noqa: E731
    for transform in (grad, hessian, lambda f: jacfwd(jacfwd(f))):
        close(transform(solve)(POSITIVE), transform(closed)(POSITIVE))


def test_a_batch_of_linear_systems():
    matrices = random(4, 3, 3) + 3 * torch.eye(3, dtype=F64)
    for solver in ("direct", "gmres"):
        solve = lambda A, b: linear_solve(lambda x, A: A @ x, b, A, solver=solver, rtol=1e-14)  # noqa: E731
        for dims in ((0, None), (None, 0), (0, 0)):
            arguments = [matrices if dims[0] == 0 else matrices[0], BATCH if dims[1] == 0 else BATCH[0]]
            ours, theirs = (vmap(f, in_dims=dims) for f in (solve, solved))
            close(ours(*arguments), theirs(*arguments))
            close(hessian(total(ours), (0, 1))(*arguments), hessian(total(theirs), (0, 1))(*arguments))


def test_a_large_batch_of_direct_solves_is_split(monkeypatch):
    monkeypatch.setattr(problem, "_ENTRIES", 20)
    matrices = random(7, 3, 3) + 3 * torch.eye(3, dtype=F64)
    solve = lambda A: linear_solve(lambda x, A: A @ x, ONES, A, solver="direct")  # noqa: E731
    close(vmap(solve)(matrices), torch.linalg.solve(matrices, ONES))


def test_batched_gradients():
    """Those of PyTorch, ``is_grads_batched``."""
    A = BATCH[0].clone().requires_grad_()
    torch.autograd.gradcheck(square_root, A, check_forward_ad=True, check_batched_grad=True)
    torch.autograd.gradgradcheck(square_root, A, check_fwd_over_rev=True, check_batched_grad=True)
    for strategy in ("reverse-mode", "forward-mode"):
        found = torch.autograd.functional.jacobian(square_root, A, vectorize=True, strategy=strategy)
        close(found, jacrev(torch.sqrt)(A))
    f = lambda a: square_root(a).sum()  # noqa: E731
    found = torch.autograd.functional.hessian(f, A, vectorize=True, outer_jacobian_strategy="forward-mode")
    close(found.detach(), hessian(total(torch.sqrt))(A.detach()))


def test_one_root_inside_of_another():
    inner = lambda a: fixed_point(lambda x, a: (x + a / x) / 2, rtol=1e-15)(ONES[0], a)  # noqa: E731
    outer = lambda a: fixed_point(lambda y, a: inner(y + a) / 2, rtol=1e-15)(ONES[0], a)  # noqa: E731
    closed = lambda a: (1 + (1 + 16 * a).sqrt()) / 8  # noqa: E731
    a = torch.tensor(0.7, dtype=F64)
    for mode in ("rev", "fwd", "revrev", "fwdfwd", "revfwd", "fwdrev"):
        close(derivatives(outer, [a], mode), derivatives(closed, [a], mode))


def test_a_linear_system_inside_of_a_fixed_point():
    def f(x, A, b):
        return 0.3 * linear_solve(lambda v, A, x: A @ v + 0.1 * x * v, b, A, x, rtol=1e-14) + 0.1 * x

    def unrolled(A, b):
        x = torch.zeros(3, dtype=F64)
        for _ in range(40):
            x = 0.3 * solved(A + torch.diag(0.1 * x), b) + 0.1 * x
        return (x**3).sum()

    A, b = random(3, 3) + 4 * torch.eye(3, dtype=F64), random(3)
    ours = lambda A, b: (fixed_point(f, rtol=1e-14)(torch.zeros(3, dtype=F64), A, b) ** 3).sum()  # noqa: E731
    for transform in (grad, hessian, lambda g: jacfwd(jacfwd(g))):
        close(transform(ours)(A, b), transform(unrolled)(A, b))


def test_a_batch_of_hessians_is_that_of_its_elements():
    """The functions use vmap themselves."""
    X, signs = random(12, 3), random(12, seed=1).sign()

    def f(w, p):
        losses = vmap(lambda x, s: torch.nn.functional.softplus(-s * (x @ w)))(X, signs)
        return losses.mean() + (p.exp() * w**2).sum()

    def solver(f, w, p):
        for _ in range(8):
            w = w - torch.linalg.solve(hessian(f)(w, p), grad(f)(w, p))
        return w

    loss = lambda p: (minimize(f, solver)(torch.zeros(3, dtype=F64), p) ** 2).sum()  # noqa: E731
    unrolled = lambda p: (solver(f, torch.zeros(3, dtype=F64), p) ** 2).sum()  # noqa: E731
    batch = random(2, 3)
    close(vmap(hessian(loss))(batch), torch.stack([hessian(unrolled)(p) for p in batch]))


def test_gradients_through_an_implicit_gradient():
    """A root of the gradient of a function, itself differentiated with torch.func."""
    potential = lambda x, a: (x**4 / 4 - a * x).sum()  # noqa: E731
    solve = root(grad(potential), newton)
    f = lambda a: solve(ONES, a)  # noqa: E731
    for mode in ("rev", "fwd", "revrev", "fwdfwd"):
        close(derivatives(f, [POSITIVE], mode), derivatives(lambda a: a ** (1 / 3), [POSITIVE], mode))


def test_forward_mode_needs_no_forward_derivative():
    """An operator of the user with a backward only."""

    class Cube(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            return 3 * g * ctx.saved_tensors[0] ** 2

    solve = lambda a: root(lambda x, a: Cube.apply(x) - a, newton)(ONES, a)  # noqa: E731
    close(jvp(solve, (POSITIVE,), (ONES,))[1], POSITIVE ** (-2 / 3) / 3)
