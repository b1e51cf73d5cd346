"""The entries: each a sample of what an issue of pytorch/pytorch reports."""

from __future__ import annotations

import math
from math import inf, nan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_manualgrad as mg

from .programs import along, entry, path, total

linalg, special = torch.linalg, torch.special
STRONG = {"override": {"strong_zero": True}}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def vectors(t: Tensor, *shape: int, seed: int = 0) -> Tensor:
    """Points on a curve with curvature in every entry."""
    return draw(*shape, seed=seed) + t * draw(*shape, seed=seed + 50) + 0.3 * t * t * draw(*shape, seed=seed + 90)


def matrix(t: Tensor, n: int = 3, seed: int = 0) -> Tensor:
    return vectors(t, n, n, seed=seed) + 3 * torch.eye(n, dtype=t.dtype)


def definite(t: Tensor, n: int = 3) -> Tensor:
    a = matrix(t, n)
    return a @ a.mT


def gradient(f: Any, *inputs: Tensor) -> list[Tensor]:
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    found = torch.autograd.grad(f(*inputs), inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs)]


def second(f: Any, x: Tensor, v: Tensor) -> Tensor:
    """A Hessian times a vector, reverse over reverse."""
    x = x.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.autograd.grad((g * v).sum(), x)[0]


# -- forward mode and second orders that are wrong --------------------------------------------------------------------

path(198017, "the umbrella of wrong forward-mode and higher-order derivatives; here slogdet, jvp of the gradient of a jvp",
     lambda t: linalg.slogdet(matrix(t))[1], 0.3, "fwd-fwd")  # fmt: skip
path(196682, "jvp of cholesky_inverse multiplies in the wrong order",
     lambda t: total(torch.cholesky_inverse(matrix(t).tril())), 0.3, "fwd")  # fmt: skip
path(196694, "jvp of cholesky_solve in the factor is wrong",
     lambda t: total(torch.cholesky_solve(draw(3, 2, seed=4), matrix(t).tril())), 0.3, "fwd")  # fmt: skip
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


# -- missing derivatives ----------------------------------------------------------------------------------------------

path(
    83510,
    "cdist has no second derivative",
    lambda t: total(torch.cdist(vectors(t, 2, 3), draw(4, 3, seed=3))),
    0.3,
    "rev-rev",
)
path(34704, "grid_sample has no second derivative",
     lambda t: total(F.grid_sample(vectors(t, 1, 1, 4, 4), 0.4 * vectors(t, 1, 2, 2, 2, seed=3).tanh(), align_corners=True)),
     0.1, "fwd-func")  # fmt: skip
path(128971, "attention on the CPU has no forward mode",
     lambda t: total(F.scaled_dot_product_attention(*[vectors(t, 1, 1, 3, 4, seed=s) for s in range(3)])), 0.1, "fwd")  # fmt: skip
path(116348, "fused attention has no second derivative",
     lambda t: total(F.scaled_dot_product_attention(*[vectors(t, 1, 1, 3, 4, seed=s) for s in range(3)])), 0.1, "rev-rev")  # fmt: skip
path(80025, "gammainc has no derivative in its first argument",
     lambda t: special.gammainc(t, torch.tensor(1.7, dtype=torch.float64)), 2.5, "rev")  # fmt: skip
path(67763, "gammaincc has no derivative in its first argument",
     lambda t: special.gammaincc(t, torch.tensor(1.7, dtype=torch.float64)), 2.5, "rev")  # fmt: skip
path(93982, "lstsq in forward mode", lambda t: total(linalg.lstsq(matrix(t), vectors(t, 3, 2, seed=3))[0]), 0.3, "fwd")
path(
    77225,
    "backward of lstsq with a vector",
    lambda t: total(linalg.lstsq(matrix(t), vectors(t, 3, seed=3))[0]),
    0.3,
    "rev",
)
path(
    27036,
    "derivative of lstsq, tall",
    lambda t: total(linalg.lstsq(vectors(t, 4, 2), vectors(t, 4, 1, seed=3))[0]),
    0.3,
    "fwd-func",
)
path(95057, "forward mode over the gradient of logsigmoid", lambda t: F.logsigmoid(t * 2), 0.3, "fwd-func")
path(80928, "forward over reverse of complex abs", lambda t: total(torch.complex(t + 1, t * t).abs()), 0.3, "fwd-func")
path(
    80926,
    "forward over reverse of complex softsign",
    lambda t: total(F.softsign(torch.complex(t + 1, t * t))),
    0.3,
    "fwd-func",
)
path(80924, "forward mode of complex sgn", lambda t: total(torch.sgn(torch.complex(t + 1, t * t))), 0.3, "fwd-fwd")
path(77246, "forward mode of complex angle", lambda t: total(torch.angle(torch.complex(t + 1, t * t))), 0.3, "fwd-fwd")
path(65683, "second derivative of l1_loss of complex numbers",
     lambda t: F.l1_loss(torch.complex(t + 1, t * t), torch.complex(t, 2 * t) * 0.1), 0.3, "rev-rev")  # fmt: skip
path(79705, "second derivative of native_layer_norm with a bias and no weight",
     lambda t: total(torch.native_layer_norm(vectors(t, 2, 3), [3], None, vectors(t, 3, seed=4), 0.1)[0]), 0.3, "rev-rev")  # fmt: skip
path(59477, 'double backward of binary_cross_entropy with reduction="sum"',
     lambda t: F.binary_cross_entropy(torch.sigmoid(vectors(t, 3)), torch.tensor([0.2, 0.9, 0.5]).double(), reduction="sum"),
     0.3, "rev-rev")  # fmt: skip
path(91100, "Hessian of softmax", lambda t: total(torch.softmax(vectors(t, 4), 0)), 0.3, "fwd-func")
path(
    55370,
    "backward of cdist in four dims",
    lambda t: total(torch.cdist(vectors(t, 1, 2, 3, 2), draw(4, 2, seed=3))),
    0.3,
    "rev",
)
path(70362, "second derivative of LSTMCell", lambda t: _lstm_cell(t), 0.2, "rev-rev")


def _lstm_cell(t: Tensor) -> Tensor:
    w = [vectors(t, 8, 2, seed=s) for s in (1, 2)]
    gates = vectors(t, 1, 2) @ w[0].mT + vectors(t, 1, 2, seed=5) @ w[1].mT
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * vectors(t, 1, 2, seed=6) + i.sigmoid() * g.tanh()
    return total(o.sigmoid() * c.tanh(), c)


@entry(73541, "a tangent in the running statistics of batch_norm", lambda: _eval_batch_norm_truth())
def _() -> Tensor:
    return torch.func.jvp(_eval_batch_norm, (torch.tensor([1.0, 2.0]).double(),), (torch.ones(2).double(),))[1]


def _eval_batch_norm(mean: Tensor) -> Tensor:
    return F.batch_norm(draw(3, 2), mean, torch.tensor([1.5, 2.0]).double(), training=False, eps=0.1).sum()


def _eval_batch_norm_truth() -> float:
    return -3 * sum((v + 0.1) ** -0.5 for v in (1.5, 2.0))


path(70108, "ctc_loss has no second derivative", lambda t: _ctc(t), 0.3, "rev-rev")
path(18945, "binary_cross_entropy has no second derivative",
     lambda t: F.binary_cross_entropy(torch.sigmoid(vectors(t, 3)), torch.tensor([0.2, 0.9, 0.5]).double()), 0.3, "fwd-fwd")  # fmt: skip
path(2389, "derivative of a sparse matrix times a dense one", lambda t: _sparse_mm(t), 0.3, "rev-rev")


def _ctc(t: Tensor) -> Tensor:
    logits = vectors(t, 5, 1, 3).log_softmax(-1)
    return F.ctc_loss(logits, torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2]))


def _sparse_mm(t: Tensor) -> Tensor:
    indices = torch.tensor([[0, 1, 2], [1, 0, 2]])
    return total(torch.sparse.mm(torch.sparse_coo_tensor(indices, vectors(t, 3), (3, 3)), vectors(t, 3, 2, seed=3)))


@entry(94336, "gradient of scatter_add where the index is smaller than the source", [1.0, 1.0, 0.0])
def _() -> Tensor:
    return gradient(lambda x: torch.zeros(4).scatter_add(0, torch.tensor([0, 2]), x).sum(), torch.ones(3))[0]


@entry(27614, "gradient of scatter where the index is smaller than the source", [1.0, 1.0, 0.0])
def _() -> Tensor:
    return gradient(lambda x: torch.zeros(4).scatter(0, torch.tensor([0, 2]), x).sum(), torch.ones(3))[0]


# -- nan where there is a derivative, and conventions at kinks --------------------------------------------------------


@entry(2421, "gradient of a norm at zero; its second derivative is nan", [0.0, 0.0, 0.0])
def _() -> Tensor:
    return second(lambda x: x.norm(), torch.zeros(3), torch.ones(3))


@entry(
    44452,
    "gradient of a norm with 0 < p < 1 at a zero entry is nan",
    lambda: [0.0, 1.0 + math.sqrt(2), 1 + 1 / math.sqrt(2)],
)
def _() -> Tensor:
    return gradient(lambda x: torch.linalg.vector_norm(x, 0.5), torch.tensor([0.0, 1.0, 2.0]).double())[0]


@entry(3264, "gradient of F.normalize with p = 1 at zeros is nan", [5.0, 5.0, 0.0])
def _() -> Tensor:
    return gradient(lambda x: F.normalize(x, p=1, dim=0).sum(), torch.tensor([0.0, 0.0, 0.2]).double())[0]


@entry(4320, "gradient of std of equal numbers; its second derivative is nan", [0.0, 0.0, 0.0])
def _() -> Tensor:
    return second(lambda x: x.std(), torch.full((3,), 2.0), torch.tensor([1.0, 2.0, 3.0]))


@entry(27134, "second derivative of a ** b at a = 0 in b is nan", 0.0)
def _() -> Tensor:
    b = torch.tensor(1.0, requires_grad=True)
    (g,) = torch.autograd.grad(torch.zeros(()) ** b, b, create_graph=True)
    return torch.autograd.grad(g, b)[0]


@entry(98276, "gradients of atan2 and angle at zero", [0.0, 0.0])
def _() -> Tensor:
    return torch.stack(gradient(lambda y, x: torch.atan2(y, x), torch.zeros(()), torch.zeros(())))


@entry(31829, "gradients of logsumexp, softmax and logsigmoid at -inf", [0.0, 0.0])
def _() -> Tensor:
    return gradient(lambda x: torch.logsumexp(x, 0), torch.full((2,), -inf))[0]


@entry(49724, "gradient of logaddexp of two -inf", [0.5, 0.5])
def _() -> Tensor:
    return torch.stack(gradient(torch.logaddexp, torch.tensor(-inf), torch.tensor(-inf)))


@entry(49886, "backward of SVD with several zero singular values", lambda: torch.ones(4, 4, dtype=torch.float64))
def _() -> Tensor:
    def rebuilt(x: Tensor) -> Tensor:
        u, s, vh = linalg.svd(x)
        return (u * s @ vh).sum()

    return gradient(rebuilt, draw(4, 1) @ draw(1, 4, seed=1))[0]


@entry(
    47599,
    "gradient through degenerate eigenvectors where the loss is well defined",
    lambda: _projector_truth(),
    tolerance=1e-5,
)
def _() -> Tensor:
    return gradient(_projector_loss, torch.diag(torch.tensor([1.0, 1.0, 3.0]).double()))[0]


def _projector_loss(a: Tensor) -> Tensor:
    _, v = linalg.eigh((a + a.mT) / 2)
    return total(v[:, :2] @ v[:, :2].mT)


def _projector_truth() -> Tensor:
    a, h = torch.diag(torch.tensor([1.0, 1.0, 3.0]).double()), 1e-5
    steps = [h * e.reshape(3, 3) for e in torch.eye(9, dtype=torch.float64)]
    return torch.stack([(_projector_loss(a + e) - _projector_loss(a - e)) / (2 * h) for e in steps]).reshape(3, 3)


@entry(
    23133,
    "gradient through symmetric eigenvectors of repeated eigenvalues is nan",
    lambda: torch.eye(3).double() * math.e,
)
def _() -> Tensor:
    def trace_exp(a: Tensor) -> Tensor:
        w, v = linalg.eigh((a + a.mT) / 2)
        return ((v * w.exp()) @ v.mT).trace()

    return gradient(trace_exp, torch.eye(3).double())[0]


@entry(76531, "nan in the backward of eigh at close eigenvalues", lambda: torch.ones(3, 3).double())
def _() -> Tensor:
    def rebuilt(a: Tensor) -> Tensor:
        w, v = linalg.eigh(a)
        return ((v * w) @ v.mT).sum()

    return gradient(lambda a: rebuilt((a + a.mT) / 2), torch.diag(torch.tensor([1.0, 1.0, 2.0]).double()))[0]


path(55676, "eigenvectors of complex Hermitian matrices, by their absolute values",
     lambda t: total(linalg.eigh(_hermitian(t))[1].abs()), 0.3, "rev-rev")  # fmt: skip


def _hermitian(t: Tensor) -> Tensor:
    a = torch.complex(vectors(t, 3, 3), vectors(t, 3, 3, seed=4))
    return a + a.mH


@entry(193006, "gradient of a norm whose square overflows is zero", [1.0, 1e-20])
def _() -> Tensor:
    return gradient(lambda x: linalg.norm(x), torch.tensor([1e20, 1.0]))[0]


@entry(41779, "gradient of the maximum norm at ties", [0.5, 0.0, -0.5])
def _() -> Tensor:
    return gradient(lambda x: x.norm(p=inf), torch.tensor([9.0, 2.0, -9.0]))[0]


@entry(
    194705, "Hessian of singular values at large scales is nan", lambda: _svdvals_hessian(1.0) / 1e19, tolerance=1e-3
)
def _() -> Tensor:
    return _svdvals_hessian(1e19)


def _svdvals_hessian(scale: float) -> Tensor:
    a = torch.tensor([[4.0, 1.0, 0.0], [1.0, 3.0, 1.0], [0.0, 1.0, 2.0]]) * scale
    return torch.func.hessian(lambda x: linalg.svdvals(x)[0])(a)


@entry(194699, "gradient of prod with zeros under torch.func overflows to nan", lambda: torch.zeros(3, 3))
def _() -> Tensor:
    x = torch.tensor([[1e13, 0.0, 0.0], [1e13, 1e13, 0.0], [1e13, 1e13, 1e13]])
    return torch.func.grad(torch.prod)(x)


def _at_nan(f: Any) -> Tensor:
    g = gradient(lambda x: f(x).sum(), torch.full((35,), nan))[0]
    return (g.isnan() != g.isnan()[0]).sum() + ((g != g[0]) & ~g.isnan()).sum()


@entry(
    195075,
    "backward of logit and activations at nan depends on the length of the tensor",
    [0] * 7,
    override={"names": "*"},
)
def _() -> Tensor:
    functions = (lambda x: torch.logit(x, eps=0.1), F.hardtanh, F.hardshrink, F.softshrink, F.elu, F.celu, F.hardswish)
    return torch.stack([_at_nan(f) for f in functions])


# -- zeros that are not strong ----------------------------------------------------------------------------------------


def _where(number: int, title: str, f: Any, points: list[float], expected: list[float]) -> None:
    entry(number, title, expected, **STRONG)(lambda: gradient(lambda x: f(x).sum(), torch.tensor(points))[0])


_where(
    68425,
    "where: exp overflows in the branch that is not taken",
    lambda x: torch.where(x <= 0, x.exp(), 1 + x),
    [100.0],
    [1.0],
)
_where(108618, "where: log2 in the branch that is not taken",
       lambda x: torch.where(x > 2, torch.log2(x), 2 * x), [0.0, 2.0, 3.0], [2.0, 2.0, 1 / (3 * math.log(2))])  # fmt: skip
_where(
    52248,
    "where leads to unexpected gradients",
    lambda x: torch.where(x < 1, x, (x - 1).sqrt()),
    [0.5, 1.25],
    [1.0, 1.0],
)
_where(156212, "where with nan and overflow in the branch that is not taken",
       lambda x: torch.where(x <= 10, x.exp(), 1), [1.0, 1e10], [math.e, 0.0])  # fmt: skip
_where(18287, "where: cos of inf in the branch that is not taken",
       lambda x: torch.where(x < 1, x.cos(), torch.zeros_like(x)), [0.0, inf], [0.0, 0.0])  # fmt: skip
_where(23395, "where: a gradient of inf in the branch that is not taken",
       lambda x: torch.where(x == 0, x / 2, x.sqrt() + 1), [16.0, 0.0], [0.125, 0.5])  # fmt: skip
_where(187297, "where: sqrt of a negative number in the branch that is not taken",
       lambda x: torch.where(x > 0, x.sqrt(), x), [-1.0, -4.0], [1.0, 1.0])  # fmt: skip

# -- linear algebra ---------------------------------------------------------------------------------------------------

path(20678, 'backward of QR with mode "r"', lambda t: total(linalg.qr(vectors(t, 3, 3), "r")[1].abs()), 0.3, "rev")


@entry(89761, "gradient of solve where a vector and a batch look alike", lambda: torch.full((2, 2), 0.5))
def _() -> Tensor:
    a = 2 * torch.eye(2).expand(2, 2, 2)
    return gradient(lambda b: linalg.solve(a, b).sum(), torch.ones(2, 2))[0]


path(42216, "backward of QR of a wide matrix", lambda t: total(linalg.qr(vectors(t, 2, 4))[1].abs()), 0.3, "rev-rev")
path(28831, "derivative of cholesky_solve", lambda t: total(torch.cholesky_solve(vectors(t, 3, 1), matrix(t, seed=3).tril())),
     0.3, "rev-rev")  # fmt: skip
path(110009, "gradients of pinv and of an SVD by hand",
     lambda t: total(linalg.pinv(vectors(t, 4, 3))), 0.3, "rev-rev")  # fmt: skip


@entry(42792, "gradient of the leading columns of QR at a rank-deficient matrix", lambda: _qr_truth(), tolerance=1e-4)
def _() -> Tensor:
    return gradient(_qr_product, _deficient())[0]


def _deficient() -> Tensor:
    return torch.cat([draw(4, 2), draw(4, 2) @ draw(2, 1, seed=1)], 1)


def _qr_product(a: Tensor) -> Tensor:
    q, r = linalg.qr(a)
    return total(q[:, :2] @ r[:2, :2])


def _qr_truth() -> Tensor:
    weights = torch.arange(1.0, 9, dtype=torch.float64).reshape(4, 2).cos()
    return torch.cat([weights, torch.zeros(4, 1, dtype=torch.float64)], 1)


# -- nested tensors ---------------------------------------------------------------------------------------------------


def _jagged(*lengths: int, width: int = 4, seed: int = 0) -> tuple[list[Tensor], Any]:
    parts = [draw(n, width, seed=seed + i).requires_grad_() for i, n in enumerate(lengths)]
    return parts, lambda: torch.nested.as_nested_tensor(parts, layout=torch.jagged)


@entry(132695, "backward of a jagged tensor times a tensor of shape (batch, 1, 1)", lambda: _per_batch_truth())
def _() -> Tensor:
    _, make = _jagged(5, 3)
    w = torch.tensor([10.0, 100.0]).double().reshape(2, 1, 1).requires_grad_()
    product = make() * w
    return torch.autograd.grad(product, w, torch.ones_like(product))[0].flatten()


def _per_batch_truth() -> list[float]:
    return [float(draw(5, 4).sum()), float(draw(3, 4, seed=1).sum())]


@entry(145256, "backward of a jagged tensor scaled and shifted for each component", lambda: _modulated_truth())
def _() -> Tensor:
    _, make = _jagged(5, 3)
    scale = torch.ones(2, 1, 4, dtype=torch.float64, requires_grad=True)
    y = make() * (1 + scale)
    return torch.autograd.grad(y, scale, torch.ones_like(y))[0].squeeze(1)


def _modulated_truth() -> Tensor:
    return torch.stack([draw(5, 4).sum(0), draw(3, 4, seed=1).sum(0)])


@entry(118107, "reductions of jagged tensors have no backward", lambda: [1.0] * 12)
def _() -> Tensor:
    parts, make = _jagged(2, 1)
    y = make().sum(1).sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(y, parts)])


@entry(145257, "backward of an embedding of jagged indices", lambda: [2.0, 1.0, 1.0])
def _() -> Tensor:
    weight = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    x = torch.nested.nested_tensor([torch.tensor([0, 1]), torch.tensor([0, 2])], layout=torch.jagged)
    y = F.embedding(x, weight)
    return torch.autograd.grad(y.values().sum(), weight)[0][:, 0]


# -- replacing a derivative -------------------------------------------------------------------------------------------


@entry(
    139707,
    "no way to replace the derivative of an operator for a while",
    [7.0, 1.0],
    override=None,
    ours=lambda: _replaced(),
)
def _() -> Tensor:
    raise NotImplementedError("torch.library has no scoped override of a derivative")


def _replaced() -> Tensor:
    rule = mg.elementwise("aten::sin", lambda self: 7.0, register=False)
    x = torch.zeros((), requires_grad=True)
    with mg.override(rule):
        (inside,) = torch.autograd.grad(x.sin(), x)
    return torch.stack([inside, torch.autograd.grad(x.sin(), x)[0]])
