"""Solves that do not converge, singular Jacobians, hidden tensors, and arguments that do not fit."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers.tensors import close, random
from torch.func import functional_call, grad, jvp, vmap

import torch_manualgrad as mg
from torch_manualgrad.arguments import ArgumentError
from torch_manualgrad.implicit import (
    ConvergenceError,
    ConvergenceWarning,
    HiddenTensorError,
    eigsh,
    fixed_point,
    linear_solve,
    minimize,
    odeint,
    root,
    svds,
)

F64 = torch.float64
ONE = torch.ones((), dtype=F64)
SINGULAR = torch.diag(torch.tensor([1.0, 2.0, 0.0], dtype=F64))
heron = fixed_point(lambda x, a: (x + a / x) / 2)


def test_an_iteration_that_does_not_converge_warns_with_its_residual():
    with pytest.warns(ConvergenceWarning, match="fixed_point did not converge: the norm of the residual is 1, and"):
        fixed_point(lambda x: x + 1, maxiter=20)(ONE)
    with pytest.raises(ConvergenceError, match="fixed_point did not converge"):
        fixed_point(lambda x, a: x * x + a, on_failure="raise", maxiter=20)(torch.ones(3), 2.0)
    with pytest.raises(ConvergenceError, match="root did not converge"):
        root(lambda x, a: x * x - a, lambda f, x, a: x, on_failure="raise")(ONE, torch.tensor(2.0))
    with pytest.raises(ConvergenceError, match="minimize did not converge"):
        minimize(lambda x: (x - 2) ** 2, lambda f, x: x, on_failure="raise")(ONE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fixed_point(lambda x: x + 1, maxiter=20, on_failure="ignore")(ONE)


def test_an_iteration_that_overflows_has_not_converged():
    with pytest.raises(ConvergenceError, match="is inf"):
        fixed_point(lambda x: x * x + 2, on_failure="raise")(torch.ones(3))


def test_a_batch_says_how_many_did_not_converge():
    f = fixed_point(lambda x, a: torch.where(a > 1.3, x + 1, x / 2 + a), maxiter=20)
    with pytest.warns(ConvergenceWarning, match="for 2 of 4 samples"):
        vmap(lambda a: f(torch.ones(()), a))(torch.tensor([1.0, 2.0, 1.1, 5.0]))


@pytest.mark.parametrize("solver", ["gmres", "minres", "cg", "bicgstab", "direct", "auto"])
def test_a_singular_system_fails_loudly(solver):
    with pytest.raises(ConvergenceError):
        linear_solve(lambda x, A: A @ x, torch.ones(3, dtype=F64), SINGULAR, solver=solver, on_failure="raise")
    with pytest.raises(ConvergenceError):
        linear_solve(lambda x: 0 * x, torch.ones(3, dtype=F64), solver=solver, on_failure="raise")
    zero = linear_solve(lambda x, A: A @ x, torch.zeros(3, dtype=F64), 2 * SINGULAR.exp(), solver=solver)
    assert zero.eq(0).all()


@pytest.mark.parametrize("tangent_solver", ["auto", "gmres"])
def test_a_singular_jacobian_fails_loudly(tangent_solver):
    """x^2 = a at 0."""
    a = torch.zeros((), dtype=F64, requires_grad=True)
    f, solver = lambda x, a: x * x - a, lambda f, x, a: a.sqrt()
    x = root(f, solver, tangent_solver=tangent_solver)(ONE, a)
    with pytest.warns(ConvergenceWarning, match="the linear solve of root"):
        assert torch.autograd.grad(x, a)[0].isfinite()
    x = root(f, solver, tangent_solver=tangent_solver, on_failure="raise")(ONE, a)
    with pytest.raises(ConvergenceError):
        torch.autograd.grad(x, a)
    with pytest.raises(ConvergenceError):
        jvp(lambda a: root(f, solver, tangent_solver=tangent_solver, on_failure="raise")(ONE, a), (a,), (ONE,))


def test_a_batch_with_one_singular_system():
    matrices = torch.stack([torch.eye(3, dtype=F64), SINGULAR])
    solve = lambda A: linear_solve(lambda x, A: A @ x, torch.ones(3, dtype=F64), A, solver="direct")  # noqa: E731
    with pytest.warns(ConvergenceWarning, match="singular matrix for 1 of 2 samples"):
        x = vmap(solve)(matrices)
    close(x, torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.5, 0.0]], dtype=F64))


def test_nan_is_a_failure():
    with pytest.raises(ConvergenceError):
        linear_solve(lambda x: x, torch.full((3,), torch.nan), on_failure="raise")


@pytest.mark.parametrize(
    "options", [{"symmetric": True}, {"solver": "cg"}, {"solver": "minres"}, {"solver": "scipy.cg"}]
)
def test_a_matrix_that_is_not_hermitian_raises(options):
    if "scipy" in options.get("solver", ""):
        pytest.importorskip("scipy")
    A = random(4, 4) + 9 * torch.eye(4, dtype=F64)
    with pytest.raises(ArgumentError, match="matvec: expected a Hermitian matrix"):
        linear_solve(lambda x, A: A @ x, torch.ones(4, dtype=F64), A, on_failure="warn", **options)


# -- tensors that are not arguments -----------------------------------------------------------------------------------


class Layer:
    def __init__(self, a):
        self.a = a

    def __call__(self, x):
        return (x + self.a / x) / 2


WEIGHT = torch.tensor(2.0, dtype=F64, requires_grad=True)


def test_tensors_that_are_not_arguments_raise_by_name():
    hidden = torch.tensor(2.0, dtype=F64, requires_grad=True)
    nested = [{"here": hidden}]
    module = torch.nn.Linear(2, 2)
    calls = {
        "hidden": lambda: fixed_point(lambda x: (x + hidden / x) / 2)(ONE),
        "WEIGHT": lambda: fixed_point(lambda x: (x + WEIGHT / x) / 2)(ONE),
        r"nested\[0\]\['here'\]": lambda: fixed_point(lambda x: (x + nested[0]["here"] / x) / 2)(ONE),
        "f.a": lambda: fixed_point(Layer(hidden))(ONE),
        "f.bias, f.weight": lambda: fixed_point(module)(torch.zeros(2)),
        "module.bias, module.weight": lambda: fixed_point(lambda x: module(x).tanh())(torch.zeros(2)),
    }
    for names, call in calls.items():
        with pytest.raises(HiddenTensorError, match=f"that is not an argument: {names}. Its derivative would be lost"):
            call()
    for call in (
        lambda: linear_solve(lambda x: hidden * x, ONE),
        lambda: minimize(lambda x: (x - hidden) ** 2, lambda f, x: x)(ONE),
        lambda: minimize(lambda x: x.square().sum(), lambda f, x: x, lambda x: x.sum() - hidden)(torch.ones(2)),
        lambda: root(lambda x: x - hidden, lambda f, x: x)(ONE),
    ):
        with pytest.raises(HiddenTensorError, match="hidden"):
            call()
    with torch.no_grad():
        close(fixed_point(lambda x: (x + hidden / x) / 2)(ONE), hidden.sqrt())
    hidden.requires_grad_(False)
    close(fixed_point(lambda x: (x + hidden / x) / 2)(ONE), hidden.sqrt())


class Holder:
    def __init__(self, w):
        self.w = w


# Functions that read a tensor which is no argument; the last ones at a point only that is not that of the first call.
READERS = {
    "root": lambda read, x, *p: root(lambda z, a, *p: z - a * read(*p), lambda f, z, a, *p: z - f(z, a, *p))(x, x, *p),
    "root, at the solution": lambda read, x, *p: root(
        lambda z, a, *p: z - a * (read(*p) if float(z.detach().sum()) > 0 else 2), lambda f, z, a, *p: z - f(z, a, *p)
    )(x - 10, x, *p),
    "fixed_point": lambda read, x, *p: fixed_point(lambda z, a, *p: a * read(*p) + z / 2)(x, x, *p),
    "minimize": lambda read, x, *p: minimize(lambda z, a, *p: ((z - a * read(*p)) ** 2).sum(), lambda f, z, a, *p: a)(
        x, x, *p
    ),
    "equality": lambda read, x, *p: minimize(
        lambda z, a, *p: ((z - a) ** 2).sum(), lambda f, z, a, *p: a, lambda z, a, *p: z - a * read(*p)
    )(x, x, *p),
    "linear_solve": lambda read, x, *p: linear_solve(lambda z, a, *p: read(*p) * z, x, x, *p, solver="direct"),
    "odeint": lambda read, x, *p: odeint(lambda t, y, a, *p: y * a * read(*p), x, x, x, *p),
    "odeint, later": lambda read, x, *p: odeint(
        lambda t, y, a, *p: y * a * (read(*p) if 0.6 < t < 0.8 else 1), x, x, x, *p
    ),
    "eigsh": lambda read, x, *p: eigsh(lambda v, a, *p: a * v * read(*p), 3, 1, x, *p)[0],
    "svds": lambda read, x, *p: svds(lambda v, a, *p: a * v * read(*p), 3, 1, x, *p)[1],
}


def _tangent_at_level(f):
    def call(w):
        with mg.forward_ad.dual_level():
            return mg.forward_ad.unpack_dual(f(mg.forward_ad.make_dual(w, w))).tangent

    return call


MODES = {
    "rev": lambda f: lambda w: torch.autograd.grad(f(w.clone().requires_grad_()).sum(), w, allow_unused=True),
    "grad": lambda f: grad(lambda w: f(w).sum()),
    "jvp": lambda f: lambda w: jvp(f, (w,), (w,)),
    "vmap": lambda f: lambda w: vmap(f)(torch.stack([w, w])),
    "level": _tangent_at_level,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("with_x", [False, True])
def test_a_tensor_that_is_read_anywhere_raises_by_name(name, mode, with_x):
    at, X = torch.tensor(1.5, dtype=F64), torch.tensor([0.5, 0.9, 1.3], dtype=F64)

    def by_closure(w):
        return READERS[name](lambda: w, X * w if with_x else X)

    def in_an_object(w):
        return READERS[name](lambda holder: holder.w, X * w if with_x else X, Holder(w))

    for f, found in ((by_closure, "w"), (in_an_object, "Holder.w")):
        message = f"that is not an argument: {found}. Its derivative would be lost"
        if mode == "vmap" and with_x and "," in name:  # which reads numbers of a batch
            message = "data-dependent control flow|item\\(\\) on a Tensor"
        if mode == "level" and with_x and name in ("minimize", "equality"):  # which raise there in any case
            message = "cannot run at a dual level"
        with pytest.raises(RuntimeError, match=message):
            MODES[mode](f)(at)


def test_a_preconditioner_may_read_anything():
    w = torch.tensor(1.5, dtype=F64, requires_grad=True)
    b = torch.ones(3, dtype=F64, requires_grad=True)
    x = linear_solve(lambda z: 2 * z, b, solver="cg", preconditioner=lambda z: w * z)
    close(torch.autograd.grad(x.sum(), b)[0], torch.full_like(b, 0.5))


def test_reading_without_a_derivative_is_no_obstacle():
    w = torch.tensor(1.5, dtype=F64, requires_grad=True)
    a = torch.tensor([0.5, 0.9], dtype=F64, requires_grad=True)
    x = fixed_point(lambda x, a: a * w.detach() + x / 2 + 0 * w.dim())(torch.zeros_like(a), a)
    close(torch.autograd.grad(x.sum(), a)[0], torch.full_like(a, 3.0))


@pytest.mark.parametrize("transform", [grad, lambda f: lambda a: jvp(f, (a,), (a,)), vmap])
def test_tensors_of_a_transform_raise(transform):
    at = torch.tensor([2.0, 3.0], dtype=F64) if transform is vmap else torch.tensor(2.0, dtype=F64)
    with pytest.raises(HiddenTensorError, match="argument: a"):
        transform(lambda a: fixed_point(lambda x: (x + a / x) / 2)(ONE))(at)
    if transform is vmap:
        with pytest.raises(HiddenTensorError, match="argument: a"):
            vmap(lambda a, b: fixed_point(lambda x, b: (x + a / x) / 2 + 0 * b)(ONE, b))(at, at)


def test_a_tensor_of_a_transform_that_cannot_be_found_says_what_to_do():
    box = [[[[[[[[None]]]]]]]]

    def solve(a, b):
        box[0][0][0][0][0][0][0] = [Layer(a)]
        return fixed_point(lambda x, b: box[0][0][0][0][0][0][0][0](x) + 0 * b)(ONE, b)

    at = torch.tensor([2.0, 3.0], dtype=F64)
    with pytest.raises(RuntimeError, match="a tensor of a transform that is not an argument"):
        vmap(solve)(at, at)


def test_tensors_of_an_outer_transform_raise():
    a, b = torch.tensor(2.0, dtype=F64), torch.tensor(3.0, dtype=F64)

    def inner(b, a):
        return fixed_point(lambda x, a: (x + a * b / x) / 2)(ONE, a)

    for transform in (
        lambda b: grad(lambda a: inner(b, a))(a),
        lambda b: jvp(lambda a: inner(b, a), (a,), (a,))[1],
        lambda b: vmap(lambda a: inner(b, a))(a[None]).sum(),
    ):
        for outer in (grad, lambda f: lambda b: jvp(f, (b,), (b,))):
            with pytest.raises(HiddenTensorError, match="argument: b"):
                outer(transform)(b)
        with pytest.raises(HiddenTensorError, match="argument: b"):
            transform(b.clone().requires_grad_())


def test_a_module_by_functional_call():
    module = torch.nn.Linear(3, 3, dtype=F64)
    with torch.no_grad():
        module.weight.mul_(0.5)
    parameters, u = dict(module.named_parameters()), random(3)
    layer = fixed_point(lambda x, p, u: torch.tanh(functional_call(module, p, (x,)) + u), rtol=1e-13)
    loss = layer(torch.zeros(3, dtype=F64), parameters, u).square().sum()
    loss.backward()
    x = torch.zeros(3, dtype=F64)
    for _ in range(200):
        x = torch.tanh(functional_call(module, parameters, (x,)) + u)
    expected = torch.autograd.grad(x.square().sum(), module.parameters())
    close([p.grad for p in module.parameters()], list(expected), rtol=1e-8)


# -- dtypes, gradients that are zero, and arguments -------------------------------------------------------------------


def test_parameters_without_influence_have_a_gradient_of_zero():
    a, c = torch.tensor(2.0, dtype=F64, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    x = fixed_point(lambda x, a, c: (x + a / x) / 2)(ONE, a, c)
    close(torch.autograd.grad(x, (a, c)), (0.5 / a.detach().sqrt(), torch.zeros(2, 3)))
    x = fixed_point(lambda x, c: x / 2 + 1)(ONE, c)
    assert torch.autograd.grad(x, c)[0].eq(0).all()
    assert jvp(lambda c: fixed_point(lambda x, c: x / 2 + 1)(ONE, c), (c,), (c,))[1] == 0


def test_the_start_has_no_gradient():
    start = torch.ones((), dtype=F64, requires_grad=True)
    assert not heron(start, torch.tensor(2.0, dtype=F64)).requires_grad
    a = torch.tensor(2.0, dtype=F64, requires_grad=True)
    assert torch.autograd.grad(heron(start, a), (a, start), allow_unused=True)[1] is None


@pytest.mark.parametrize("start, of_a", [(torch.float32, F64), (F64, torch.float32), (torch.float32, torch.float32)])
def test_dtypes(start, of_a):
    a = torch.tensor([2.0, 3.0], dtype=of_a, requires_grad=True)
    x = heron(torch.ones(2, dtype=start), a)
    assert x.dtype == torch.promote_types(start, of_a)
    (g,) = torch.autograd.grad(x.sum(), a)
    assert g.dtype == of_a
    close(g.double(), 0.5 / a.detach().double().sqrt(), rtol=1e-5)


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision(dtype):
    """It counts as converged where the residual has its few digits, in the derivative too."""
    a = torch.tensor([2.0, 3.0], dtype=dtype, requires_grad=True)
    (g,) = torch.autograd.grad(heron(torch.ones_like(a), a).sum(), a)
    close(g.float(), 0.5 / a.detach().float().sqrt(), rtol=0.02)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("solver", ["direct", "cg", "minres", "gmres", "bicgstab"])
@pytest.mark.parametrize("dtype", HALVES)
def test_linear_solvers_in_half_precision(dtype, solver):
    exact = 4 * torch.eye(20) + torch.arange(20.0).outer(torch.arange(20.0)).sin() / 2
    A, b = exact.to(dtype), torch.arange(20.0).cos().to(dtype).requires_grad_()
    x = mg.implicit.linear_solve(lambda v, A: A @ v, b, A, solver=solver)
    (g,) = torch.autograd.grad(x.sum(), b)
    close(x.float(), torch.linalg.solve(A.float(), b.detach().float()), rtol=0, atol=0.02)
    close(g.float(), torch.linalg.solve(A.float(), torch.ones(20)), rtol=0, atol=0.02)


def test_nothing_requires_grad():
    assert not heron(ONE, torch.tensor(2.0)).requires_grad
    a = torch.tensor(2.0, dtype=F64, requires_grad=True)
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            x = heron(ONE, a)
            assert not x.requires_grad
            close(x, torch.tensor(2.0**0.5, dtype=F64))


TALL = torch.arange(20, dtype=F64).reshape(5, 4).sin()


def nearest(f, x, a):
    """Without torch.func.grad, which is zero in the inference mode of torch 2.10."""
    return a - a.mean()


@pytest.mark.parametrize(
    "call",
    [
        lambda A: svds(lambda x, A: A @ x, 4, 2, A).S,
        lambda A: eigsh(lambda x, A: A.mT @ (A @ x), 4, 2, A).eigenvalues,
        lambda A: linear_solve(lambda x, A: A.mT @ (A @ x) + x, A[0], A),
        lambda A: odeint(lambda t, y, A: A.mT @ (A @ y) * t, A[0], A[:2, 1], A),
        lambda A: minimize(lambda x, a: (x - a).square().sum(), nearest, lambda x, a: x.sum())(A[0] * 0, A[1]),
    ],
    ids=["svds", "eigsh", "linear_solve", "odeint", "minimize"],
)
def test_inference_mode(call):
    expected = call(TALL)
    with torch.inference_mode():
        close(call(TALL), expected)
        close(call(TALL.clone()), expected)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: heron(torch.ones(3, dtype=torch.int64), 2.0), TypeError, "x0: expected floating point or complex"),
        (lambda: heron(1.0, 2.0), TypeError, "x0: expected .* got 1.0"),
        (lambda: heron({}, 2.0), ArgumentError, "x0: expected a tensor, or a tree of tensors"),
        (lambda: root(lambda x: x.sum(), lambda f, x: x)(torch.ones(3)), ArgumentError, r"f: expected .* \[3\]"),
        (lambda: root(lambda x: [x], lambda f, x: x)(torch.ones(3)), ArgumentError, "f: expected a tree like"),
        (lambda: root(lambda x: x, lambda f, x: x[1:])(torch.ones(3)), ArgumentError, r"solver: expected .* \[3\]"),
        (
            lambda: root(lambda x: x, lambda f, x: x + 0j)(torch.ones(3)),
            ArgumentError,
            "solver: expected a real tensor",
        ),
        (
            lambda: minimize(lambda x: x, lambda f, x: x)(torch.ones(3)),
            ArgumentError,
            "f: expected a real tensor without",
        ),
        (lambda: minimize(lambda x: x.sum(), lambda f, x: x, lambda x: 1)(ONE), TypeError, "equality: expected a tree"),
        (lambda: root(lambda x: x, lambda f, x: x, tangent_solver="lu"), ArgumentError, "tangent_solver: expected one"),
        (lambda: linear_solve(lambda x: x, ONE, solver="lu"), ArgumentError, "solver: expected one of 'auto'"),
        (lambda: root(lambda x: x, None), TypeError, "solver: expected a function, got None"),
        (lambda: root(lambda x: x, lambda f, x: x, rtol=-1.0), ArgumentError, "rtol: expected at least 0, got -1.0"),
        (lambda: root(lambda x: x, lambda f, x: x, maxiter=0), ArgumentError, "maxiter: expected at least 1, got 0"),
        (lambda: root(lambda x: x, lambda f, x: x, on_failure="no"), ArgumentError, "on_failure: expected 'warn' or"),
        (lambda: linear_solve(lambda x: x[:1], torch.ones(3)), ArgumentError, r"matvec: expected .* \[3\]"),
    ],
)
def test_arguments_that_do_not_fit(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_duals_made_inside_of_a_reverse_transform_raise():
    def f(a):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
            return torch.autograd.forward_ad.unpack_dual(heron(ONE, dual)).tangent

    with pytest.raises(RuntimeError, match="use torch.func.jvp"):
        grad(f)(torch.tensor(2.0, dtype=F64))
