"""Forward mode, orders beyond the first and transforms: wrong, nan or dropped derivatives."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor

import torch_manualgrad as mg

from ..programs import along, entry, path, total
from .samples import draw, matrix, second, vectors

linalg = torch.linalg

path(198017, "the umbrella of wrong forward-mode and higher-order derivatives; here slogdet, jvp of the gradient of a jvp",
     lambda t: linalg.slogdet(matrix(t))[1], 0.3, "fwd-fwd")  # fmt: skip
path(196682, "jvp of cholesky_inverse multiplies in the wrong order",
     lambda t: total(torch.cholesky_inverse(matrix(t).tril())), 0.3, "fwd")  # fmt: skip
path(196694, "jvp of cholesky_solve of a matrix and as many factors takes it for a batch of vectors",
     lambda t: total(torch.cholesky_solve(draw(2, 2, seed=4), torch.stack([matrix(t, 2), matrix(t, 2, seed=6)]).tril())),
     0.3, "fwd")  # fmt: skip
path(196707, "jvp of triangular_solve with a unit diagonal differentiates the diagonal",
     lambda t: total(torch.triangular_solve(draw(3, 2, seed=4), matrix(t), unitriangular=True)[0]), 0.3, "fwd")  # fmt: skip
path(
    196695,
    "second jvp of linalg.solve is wrong",
    lambda t: total(linalg.solve(matrix(t), draw(3, 2, seed=4))),
    0.3,
    "fwd-fwd",
)
path(196696, "second jvp of det is wrong", lambda t: torch.det(matrix(t)), 0.7, "fwd-fwd")
path(196697, "second jvp of slogdet is wrong", lambda t: torch.slogdet(matrix(t))[1], 0.7, "fwd-fwd")
path(196698, "second jvp of householder_product is wrong",
     lambda t: total(linalg.householder_product(vectors(t, 3, 2), vectors(t, 2, seed=7))), 0.3, "fwd-fwd")  # fmt: skip
path(196699, "second jvp of batch_norm is wrong",
     lambda t: total(F.batch_norm(vectors(t, 4, 2, 3), None, None, training=True, eps=0.1)), 0.3, "fwd-fwd")  # fmt: skip
path(
    196700,
    "second jvp of layer_norm is wrong",
    lambda t: total(F.layer_norm(vectors(t, 2, 4), [4], eps=0.1)),
    0.3,
    "fwd-fwd",
)
path(196701, "second jvp of cumprod at a zero is wrong",
     lambda t: total(torch.cumprod(torch.stack([t + 1, t, 2 - t, t * t + 1]), 0)), 0.0, "fwd-fwd")  # fmt: skip
path(196702, 'jvp of scatter_reduce with "prod" is zero',
     lambda t: total(vectors(t, 3).scatter_reduce(0, torch.tensor([0, 0, 2]), vectors(t, 3, seed=5), "prod")), 0.3, "fwd")  # fmt: skip
path(192540, "reverse over the jvp of det, slogdet and solve is wrong", lambda t: torch.det(matrix(t)), 0.3, "func-fwd")
path(106789, "double backward of prod with two zeros is zero",
     lambda t: torch.stack([t, t * 2, t + 2]).prod(), 0.0, "rev-rev")  # fmt: skip


@entry(
    192521, "second order of det under torch.func is nan or wrong at clustered singular values", lambda: _det_hessian()
)
def _() -> Tensor:
    return torch.func.hessian(torch.det)(torch.eye(3, dtype=torch.float64))


def _det_hessian() -> Tensor:
    eye = torch.eye(3, dtype=torch.float64)
    return torch.einsum("ij,kl->ijkl", eye, eye) - torch.einsum("il,jk->ijkl", eye, eye)


@entry(149694, "torch.func.hessian of det is nan", lambda: _det_hessian_2())
def _() -> Tensor:
    return torch.func.hessian(torch.det)(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]).double())


def _det_hessian_2() -> Tensor:
    found = torch.zeros(2, 2, 2, 2).double()
    found[0, 0, 1, 1] = found[1, 1, 0, 0] = 1
    found[0, 1, 1, 0] = found[1, 0, 0, 1] = -1
    return found


@entry(149804, "torch.func.grad of a vmap of a Hessian of linalg.norm raises", lambda: _third_of_norm())
def _() -> Tensor:
    def curvature(x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.hessian(lambda v: linalg.norm(v)))(x).sum()

    return torch.func.grad(curvature)(_NORM_POINT)


_NORM_POINT = torch.tensor([[1.0, 2.0], [0.5, -1.0]]).double()


def _third_of_norm() -> Tensor:
    x = _NORM_POINT.clone().requires_grad_()
    r = x.square().sum(1).sqrt()
    # the sum of the entries of (I - u u^T) / r
    total_ = (2 / r - x.sum(1).square() / r**3).sum()
    return torch.autograd.grad(total_, x)[0]


@entry(69855, "in-place operators refuse a tangent in their source: ZeroTensors are immutable", [1.0, 2.0])
def _() -> Tensor:
    def add(x: Tensor) -> Tensor:
        return torch.ones(3, dtype=x.dtype).index_add_(0, torch.tensor([0, 2]), x)[[0, 2]]

    return torch.func.jvp(add, (draw(2),), (torch.tensor([1.0, 2.0]).double(),))[1]


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * dx


def _square_op() -> Any:
    name = "ledger::square"
    op = mg.custom_op(f"{name}(Tensor x) -> Tensor")(lambda x: x * x)
    op.impl_fake(lambda x: torch.empty_like(x))
    op.impl_jvp(lambda inputs, output, tangents: 2 * inputs.x * tangents.x)
    op.impl_save_for_backward(lambda inputs, output: inputs.x)
    op.impl_backward(lambda ctx, saved, grad: {"x": 2 * saved * grad})
    return op


def _with_op(f: Any) -> Any:
    def run() -> Any:
        op = _square_op()
        try:
            return f(op)
        finally:
            op.undefine()

    return run


@entry(192985, "a compiled jvp of an autograd.Function drops its jvp", [0.0, 0.0], override=None,
       ours=_with_op(lambda op: _compiled_jvp(lambda x: op(x) - op(x))))  # fmt: skip
def _() -> Tensor:
    class Zero(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return torch.sin(x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def jvp(ctx: Any, dx: Tensor) -> Tensor:
            return torch.zeros_like(dx)

    return _compiled_jvp(Zero.apply)


def _compiled_jvp(f: Any) -> Tensor:
    run = torch.compile(lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1], backend="aot_eager")
    return run(torch.tensor([1.0, 2.0]))


@entry(197867, "nested jacfwd through an autograd.Function is zero", 12.0 * 9, override=None,
       ours=_with_op(lambda op: along(lambda t: op(op(t)), 3.0, "fwd-fwd")))  # fmt: skip
def _() -> Tensor:
    return along(lambda t: _Square.apply(_Square.apply(t)), 3.0, "fwd-fwd")


def _library_op() -> Any:
    @torch.library.custom_op("ledger::stock_square", mutates_args=())
    def square(x: Tensor) -> Tensor:
        return x * x

    square.register_fake(lambda x: torch.empty_like(x))
    square.register_autograd(
        lambda ctx, grad: 2 * ctx.saved_tensors[0] * grad,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return square


@entry(168393, "torch.func.grad of a torch.library.custom_op raises", 6.0, override=None,
       ours=_with_op(lambda op: torch.func.grad(lambda x: op(x))(torch.tensor(3.0))))  # fmt: skip
def _() -> Tensor:
    square = _library_op()
    return torch.func.grad(lambda x: square(x))(torch.tensor(3.0))


@entry(179652, "jacrev of a torch.library.custom_op raises", lambda: 2 * torch.diag(torch.tensor([1.0, 2.0])), override=None,
       ours=_with_op(lambda op: torch.func.jacrev(op)(torch.tensor([1.0, 2.0]))))  # fmt: skip
def _() -> Tensor:
    square = _library_op()
    return torch.func.jacrev(lambda x: square(x))(torch.tensor([1.0, 2.0]))


@entry(76185, "what an autograd.Function computes in its forward is a constant to the second derivative", 6.0, override=None,
       ours=_with_op(lambda op: along(lambda t: op(t) * t, 1.0, "rev-rev")))  # fmt: skip
def _() -> Tensor:
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.square = x * x
            return ctx.square * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * 3 * ctx.square

    x = torch.ones((), requires_grad=True)
    (g,) = torch.autograd.grad(Kept.apply(x), x, create_graph=True)
    return torch.autograd.grad(g * x, x)[0] - 3 if g.requires_grad else torch.zeros(())


# -- third orders, in-place operators, compiled and nested transforms --------------------------------------------------

path(186256, "third derivative of batch_norm in training is wrong",
     lambda t: total(F.batch_norm(vectors(t, 4, 2, 3), None, None, training=True, eps=0.1)), 0.3, "rev-rev-rev")  # fmt: skip
path(175754, "third derivative of layer_norm is wrong",
     lambda t: total(F.layer_norm(vectors(t, 2, 4), [4], eps=0.1)), 0.3, "rev-rev-rev")  # fmt: skip
path(196703, "second derivative of sinc at zero is nan", lambda t: torch.sinc(t), 0.0, "rev-rev")


@entry(196704, "second derivative of logaddexp of finite numbers that are far apart is nan", 0.0)
def _() -> Tensor:
    return along(lambda t: torch.logaddexp(t + 2, -2 * t), -800.0, "rev-rev")


@entry(196705, "jvp of logcumsumexp loses the first element where a later one is far larger", 1.0 - 2.0 - 3.0)
def _() -> Tensor:
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    return along(lambda t: torch.logcumsumexp(torch.stack([t, 1 - t, t + 2]), 0) @ weights, -400.0, "fwd")


@entry(123996, "forward mode over the gradient of mse_loss: ZeroTensors are immutable", [1.0, 4.0])
def _() -> Tensor:
    gradient_of = torch.func.grad(lambda w: F.mse_loss(w * torch.tensor([1.0, 2.0]), torch.ones(2)))
    return torch.func.jvp(gradient_of, (torch.tensor([1.0, 2.0]),), (torch.ones(2),))[1]


@entry(193012, "double backward of prod overflows in float16", [0.0, 4000.0, 4000.0, 4000.0], tolerance=1e-2)
def _() -> Tensor:
    x = torch.tensor([0.03, 1.0, 1.0, 1.0], dtype=torch.float16)
    return second(lambda x: 4000.0 * torch.prod(x), x, torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float16))


@entry(85535, "jvp of leaky_relu in place: an internal assert", [0.2, 1.0])
def _() -> Tensor:
    layer = torch.nn.LeakyReLU(0.2, inplace=True)
    return torch.func.jvp(layer, (torch.tensor([-1.0, 2.0]),), (torch.ones(2),))[1]


@entry(67800, "in-place operator on a transposed view leaves the tangent of the base behind", [[2.0, 4.0], [6.0, 8.0]])
def _() -> Tensor:
    base = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    view = base.mT
    with fwAD.dual_level():
        view.mul_(fwAD.make_dual(torch.full((2, 2), 3.0), torch.ones(2, 2)))
        view *= 2
        return fwAD.unpack_dual(base).tangent


@entry(18619, "a second derivative of an autograd.Function is wrong when it is computed again", [1.0, 1.0], override=None,
       ours=_with_op(lambda op: _twice(lambda x: op(x).prod())))  # fmt: skip
def _() -> Tensor:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.prod()
            ctx.save_for_backward(x, y)
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            x, y = ctx.saved_tensors
            return grad * y / x

    return _twice(Product.apply)


def _twice(f: Any) -> Tensor:
    x = torch.ones(3, requires_grad=True)
    y = f(x)
    found = []
    for _ in range(2):
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        found.append(torch.autograd.grad(g[0], x, retain_graph=True)[0][1])
    return torch.stack(found) / found[0].detach()


@entry(
    187284,
    "a function that inductor has compiled drops the tangent of a dual number",
    [2.0, 4.0],
    slow=True,
    open="compiled code runs no rule, and inductor returned no tangent before torch 2.15",
)
def _() -> Tensor:
    run = torch.compile(lambda x: x**2, backend="inductor")
    with fwAD.dual_level():
        tangent = fwAD.unpack_dual(run(fwAD.make_dual(torch.tensor([1.0, 2.0]), torch.ones(2)))).tangent
    return torch.zeros(2) if tangent is None else tangent
