"""Programs that use implicit functions: hyperparameters, equilibrium layers, transport, constraints; and memory."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from helpers.tensors import close, random
from torch.func import grad, hessian
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torch_manualgrad as mg
from torch_manualgrad.implicit import fixed_point, linear_solve, minimize, root
from torch_manualgrad.programs import operator

F64 = torch.float64
ONE = torch.ones((), dtype=F64)
heron = fixed_point(lambda x, a: (x + a / x) / 2, rtol=1e-14)


def newton(f, x, *params):
    for _ in range(7):
        x = x - torch.linalg.solve(hessian(f)(x, *params), grad(f)(x, *params))
    return x


def test_the_hyperparameter_of_ridge_regression():
    X, y, X2, y2 = random(20, 4), random(20, seed=1), random(20, 4, seed=2), random(20, seed=3)
    f = lambda w, p: (X @ w - y).square().sum() + p.exp() * w.square().sum()  # noqa: E731
    loss = lambda p: (X2 @ minimize(f, newton)(torch.zeros(4, dtype=F64), p) - y2).square().sum()  # noqa: E731

    def closed(p):
        w = torch.linalg.inv(X.mT @ X + p.exp() * torch.eye(4, dtype=F64)) @ X.mT @ y
        return (X2 @ w - y2).square().sum()

    p = torch.tensor(0.5, dtype=F64)
    close([grad(loss)(p), hessian(loss)(p)], [grad(closed)(p), hessian(closed)(p)])


def test_the_hyperparameters_of_logistic_regression():
    X, y = random(30, 2), (random(30, seed=1) > 0).double()

    def f(w, penalties):
        return torch.nn.functional.binary_cross_entropy_with_logits(X @ w, y) + (penalties.exp() * w**2).sum()

    def loss(penalties):
        w = minimize(f, newton)(torch.zeros(2, dtype=F64), penalties)
        return torch.nn.functional.softplus(X.flip(0) @ w).mean()

    def unrolled(penalties):
        return torch.nn.functional.softplus(X.flip(0) @ newton(f, torch.zeros(2, dtype=F64), penalties)).mean()

    penalties = torch.tensor([-2.0, -1.0], dtype=F64)
    close(grad(loss)(penalties), grad(unrolled)(penalties))
    torch.autograd.gradgradcheck(loss, penalties.requires_grad_(), check_fwd_over_rev=True)


def test_an_optimizer_as_the_solver():
    def lbfgs(f, x, *params):
        x = torch.nn.Parameter(x.clone())
        optimizer = torch.optim.LBFGS(
            [x], max_iter=100, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def closure():
            optimizer.zero_grad()
            loss = f(x, *params)
            loss.backward()
            return loss

        optimizer.step(closure)
        return x

    f = lambda x, a: ((x - a) ** 2 * (1 + a**2)).sum() + (x**4).sum()  # noqa: E731
    solve = minimize(f, lbfgs, on_failure="raise")
    by_newton = minimize(f, newton, on_failure="raise")
    a, start = random(3), torch.zeros(3, dtype=F64)
    close(
        torch.func.jacrev(lambda a: solve(start, a))(a), torch.func.jacrev(lambda a: by_newton(start, a))(a), rtol=1e-6
    )


def equilibrium(z, weights, u):
    return torch.tanh(z @ weights["W"].mT + u @ weights["U"].mT)


def test_an_equilibrium_layer_learns():
    """With more unknowns than a dense Jacobian is made for."""
    generator = torch.Generator().manual_seed(0)
    weights = {"W": 0.1 * torch.randn(16, 16, generator=generator), "U": torch.randn(16, 4, generator=generator)}
    weights = {name: w.requires_grad_() for name, w in weights.items()}
    u, target = torch.randn(32, 4, generator=generator), torch.randn(32, 16, generator=generator).tanh() / 2
    layer, losses = fixed_point(equilibrium), []
    optimizer = torch.optim.Adam(weights.values(), 0.01)
    for _ in range(30):
        optimizer.zero_grad()
        loss = (layer(torch.zeros(32, 16), weights, u) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_an_equilibrium_layer_has_the_gradient_of_the_unrolled_iteration():
    weights = {"W": 0.1 * random(8, 8), "U": random(8, 4, seed=1)}
    weights = {name: w.requires_grad_() for name, w in weights.items()}
    u = random(40, 4, seed=2)
    z = torch.zeros(40, 8, dtype=F64)
    ours = fixed_point(equilibrium, rtol=1e-13)(z, weights, u)
    for _ in range(100):
        z = equilibrium(z, weights, u)
    found, expected = (torch.autograd.grad(x.square().sum(), weights.values()) for x in (ours, z))
    close(found, expected, rtol=1e-8)


def test_autocast():
    """The functions run under it, in the backward too; the solvers do not."""
    weights = {"W": 0.1 * random(8, 8, dtype=torch.float32), "U": random(8, 4, dtype=torch.float32, seed=1)}
    weights = {name: w.requires_grad_() for name, w in weights.items()}
    u, z, gradients = random(40, 4, dtype=torch.float32, seed=2), torch.zeros(40, 8), []
    for enabled in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            x = fixed_point(equilibrium, rtol=1e-2)(z, weights, u)
        assert x.dtype == torch.float32
        gradients.append(torch.autograd.grad(x.square().sum(), weights["W"])[0])
    error = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    assert 0 < error < 0.02
    A, b = (weights["W"] @ weights["W"].mT + torch.eye(8)).detach(), torch.ones(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = linear_solve(lambda x, A: (x[None] @ A)[0], b, A, solver="cg", rtol=1e-2, on_failure="raise")
    assert (A @ x - b).norm() < 0.1


def test_sinkhorn():
    """The potentials of entropic transport, a constant fixed by the sum, and its derivative in the cost."""
    cost = random(5, 5).abs().requires_grad_()
    a, b = torch.full((5,), 0.2, dtype=F64), torch.softmax(random(5, seed=1), 0)
    epsilon = 0.5

    def step(g, cost):
        f = epsilon * (a.log() - torch.logsumexp((g - cost) / epsilon, 1))
        g = epsilon * (b.log() - torch.logsumexp((f[:, None] - cost) / epsilon, 0))
        return g - g.mean()

    def plan(g, cost):
        f = epsilon * (a.log() - torch.logsumexp((g - cost) / epsilon, 1))
        return ((f[:, None] + g - cost) / epsilon).exp()

    def transport(cost):
        return (plan(fixed_point(step, rtol=1e-14)(torch.zeros(5, dtype=F64), cost), cost) * cost.detach()).sum()

    def unrolled(cost):
        g = torch.zeros(5, dtype=F64)
        for _ in range(200):
            g = step(g, cost)
        return (plan(g, cost) * cost.detach()).sum()

    P = plan(fixed_point(step)(torch.zeros(5, dtype=F64), cost.detach()), cost.detach())
    close([P.sum(0), P.sum(1)], [b, a], rtol=1e-8)
    close(torch.autograd.grad(transport(cost), cost), torch.autograd.grad(unrolled(cost), cost), rtol=1e-8)
    close(hessian(transport)(cost.detach()), hessian(unrolled)(cost.detach()), rtol=1e-7)


def test_a_projection_onto_the_intersection_of_planes_and_a_sphere():
    """Two constraints of different shapes, next to differentiating Newton's method on the Lagrangian."""
    f = lambda x, c, n: (x - c).square().sum()  # noqa: E731
    h = lambda x, c, n: {"plane": n @ x, "sphere": (x @ x - 1)[None]}  # noqa: E731

    def circle(c, n):
        inside = c - (c @ n) / (n @ n) * n
        return inside / inside.norm()

    solve = minimize(f, lambda f, x, c, n: circle(c, n), h)
    c, n = random(3), random(3, seed=1)
    for transform in (torch.func.jacrev, torch.func.jacfwd, lambda g, k: torch.func.jacfwd(torch.func.jacfwd(g, k), k)):
        for k in (0, 1):
            close(transform(lambda c, n: solve(c, c, n), k)(c, n), transform(circle, k)(c, n), rtol=1e-8)


# -- memory and graphs ------------------------------------------------------------------------------------------------


def graph_bytes(solve):
    """What autograd saves in a call."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x, lambda x: x):
        x = solve()
    assert x.requires_grad
    return sum(saved)


def iterated(steps):
    def solver(f, x, *params):
        for _ in range(steps):
            x = f(x, *params)
        return x

    return solver


def test_the_graph_does_not_grow_with_the_iterations():
    W = (0.02 * random(100, 100)).requires_grad_()
    f, x0 = lambda x, W: torch.tanh(W @ x + 1), torch.zeros(100, 50, dtype=F64)
    sizes = [graph_bytes(lambda n=n: fixed_point(f, iterated(n))(x0, W)) for n in (20, 200)]
    unrolled = [graph_bytes(lambda n=n: iterated(n)(f, x0, W)) for n in (20, 200)]
    assert sizes[0] == sizes[1] <= 3 * W.nbytes
    assert unrolled[1] > 9 * unrolled[0] > 100 * sizes[0] / 20


def test_nothing_is_kept_after_the_graph():
    gc.collect()
    before = len(operator._programs)
    a = torch.tensor(2.0, dtype=F64, requires_grad=True)
    for _ in range(5):
        heron(ONE, a).backward()
        grad(grad(lambda a: heron(ONE, a)))(a.detach())
        torch.vmap(lambda a: linear_solve(lambda x, a: a * x, ONE, a))(torch.ones(3, dtype=F64))
    gc.collect()
    assert len(operator._programs) == before


def test_a_graph_is_run_twice():
    a = torch.tensor(2.0, dtype=F64, requires_grad=True)
    x = heron(ONE, a)
    close(torch.autograd.grad(x, a, retain_graph=True), torch.autograd.grad(x, a))


def test_writes_are_noticed():
    a = torch.tensor(2.0, dtype=F64, requires_grad=True)
    b = a * 1
    heron(ONE, b)
    x = heron(ONE, b)
    b.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(x, a)
    x = heron(ONE, a)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(x, a)


def test_a_solver_may_return_its_arguments():
    a = torch.tensor(2.0, dtype=F64, requires_grad=True)
    x = root(lambda x, a: x - a, lambda f, x, a: a)(ONE, a)
    x = x * 1
    x.mul_(3)
    assert a == 2 and torch.autograd.grad(x, a)[0] == 3


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    a = torch.tensor(2.0, dtype=F64, requires_grad=True)
    for f in (
        lambda a: heron(ONE, a * 1),
        lambda a: minimize(lambda x, a: (x - a) ** 2, lambda f, x, a: a)(ONE, a * 1),
    ):
        a.grad = None
        checkpoint(lambda a: f(a) * 2, a, use_reentrant=reentrant).backward()  # noqa: B023
        close(a.grad, torch.autograd.grad(f(a) * 2, a)[0])


@pytest.mark.parametrize("options", [{}, {"strong_zero": True}])
def test_under_every_rule_of_the_package(options):
    a = torch.tensor(2.0, dtype=F64)
    f = lambda a: heron(ONE, a)  # noqa: E731
    with mg.override("*", **options):
        found = [grad(f)(a), grad(grad(f))(a), hessian(f)(a)]
    close(found, [grad(torch.sqrt)(a), grad(grad(torch.sqrt))(a), hessian(torch.sqrt)(a)])


def test_a_compiled_program_that_makes_a_solver_does_so_eagerly():
    torch._dynamo.reset()
    make = lambda a: root(lambda x, a: x * x - a, lambda f, x, a: a.sqrt())(ONE, a * 1) * 2  # noqa: E731
    a = torch.tensor(2.0, dtype=F64, requires_grad=True)
    close(torch.autograd.grad(torch.compile(make, backend="aot_eager")(a), a), torch.autograd.grad(make(a), a))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="whose steps depend on values"):
        torch.compile(make, backend="aot_eager", fullgraph=True)(a)
    torch._dynamo.reset()


def test_dispatch_modes_see_one_operator():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen, solver = [], lambda f, x, a: a.sqrt()
    for tracked in (False, True):
        with Seen(), Seen():
            root(lambda x, a: x * x - a, solver)(ONE, torch.tensor(2.0, dtype=F64, requires_grad=tracked))
    assert "aten.sqrt.default" not in seen
    assert seen.count("manualgrad_programs.node.default") == 4  # each mode sees both


def test_linearize():
    a = torch.tensor(2.0, dtype=F64)
    value, push = torch.func.linearize(lambda a: heron(ONE, a), a)
    close([value, push(torch.ones_like(a))], [a.sqrt(), 0.5 / a.sqrt()])
    gc.collect()
    close(push(torch.ones_like(a)), 0.5 / a.sqrt())


def test_a_solver_that_differentiates_inside_of_a_dual_level():
    def newton_forward(f, x, a):
        for _ in range(30):
            x = x - f(x, a) / torch.func.jacfwd(f)(x, a)
        return x

    a = torch.tensor(2.0, dtype=F64)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
        x = root(lambda x, a: x**3 - a, newton_forward)(ONE, dual)
        close(torch.autograd.forward_ad.unpack_dual(x).tangent, a ** (-2 / 3) / 3)


class Equilibrium(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((3,), 0.5, dtype=F64))
        self.solve = fixed_point(self.step, rtol=1e-12)

    def step(self, z, u):
        return (self.scale * z).cos() + u


def image(x, a):
    return (x + a / x) / 2


def square(x, a):
    return x**2 - a


def distance(x, a):
    return ((x - a) ** 2).sum()


def answer(f, x, a):
    return a.sqrt()


def nearest(f, x, a):
    return a.clone()


@pytest.mark.parametrize("made", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies(made):
    a = torch.tensor([0.7, 1.3], dtype=F64)
    for f in (fixed_point(image), root(square, answer, on_failure="raise"), minimize(distance, nearest)):
        close(made(f)(torch.ones_like(a), a), f(torch.ones_like(a), a))
    model = Equilibrium()
    other = made(model)
    other.scale.fill_(0.25)
    z = other.solve(torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64))
    close(z, (0.25 * z).cos() + 1)


def test_a_solver_may_write_to_its_start():
    def solver(f, x, a):
        for _ in range(60):
            x -= f(x, a) / (2 * x)
        return x

    a = torch.tensor([0.7, 1.3], dtype=F64)
    solve = root(square, solver)
    start = torch.ones_like(a)
    close(solve(start, a), a.sqrt())
    assert start.eq(1).all()
    close(grad(lambda a: solve(a, a).sum())(a), 0.5 / a.sqrt())


def test_an_equation_whose_derivative_pytorch_batches_wrongly():
    points, p = random(4, 2), random(3, 2, seed=1)

    def step(x, p):
        return p + 0.1 * torch.cdist(x, points)[:, :2]

    def repeated(p):
        x = torch.zeros_like(p)
        for _ in range(60):
            x = step(x, p)
        return x

    def solved(p):
        return mg.implicit.fixed_point(step, lambda f, x0, p: repeated(p))(torch.zeros_like(p), p)

    close(torch.func.jacrev(solved)(p), torch.autograd.functional.jacobian(repeated, p))
    assert not mg.active()
