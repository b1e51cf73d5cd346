"""Derivatives that PyTorch does not have, or did not have."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..programs import entry, path, total
from .samples import draw, gradient, matrix, second, vectors

linalg, special = torch.linalg, torch.special

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


path(154226, "jvp of attention, causal",
     lambda t: total(F.scaled_dot_product_attention(*[vectors(t, 1, 2, 3, 4, seed=s) for s in range(3)], is_causal=True)),
     0.1, "fwd")  # fmt: skip
path(33452, "im2col and col2im have no second derivative",
     lambda t: total(F.fold(F.unfold(vectors(t, 1, 1, 4, 4).square(), 2), (4, 4), 2).square()), 0.3, "rev-rev")  # fmt: skip
path(2210, "log_softmax can be differentiated once only", lambda t: total(vectors(t, 4).log_softmax(0)), 0.3, "rev-rev")


@entry(99413, "LSTM with oneDNN has no second derivative", lambda: _without_mkldnn(), tolerance=1e-3)
def _() -> Tensor:
    return _lstm_second_derivative()


def _lstm() -> Callable[[Tensor], Tensor]:
    layer = torch.nn.LSTM(2, 3)
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=i))
    return lambda x: layer(x)[0]  # type: ignore[no-any-return]


def _lstm_second_derivative() -> Tensor:
    layer = _lstm()
    return second(lambda x: total(layer(x)).float(), draw(3, 1, 2).float(), draw(3, 1, 2, seed=9).float())


def _without_mkldnn() -> Tensor:
    with torch.backends.mkldnn.flags(enabled=False):
        return _lstm_second_derivative()


@entry(105311, "vmap of the Jacobian of an LSTM", lambda: _lstm_jacobians(), tolerance=1e-4)
def _() -> Tensor:
    return torch.func.vmap(torch.func.jacrev(_lstm()))(draw(2, 3, 1, 2).float())


def _lstm_jacobians() -> Tensor:
    layer = _lstm()
    return torch.stack([torch.autograd.functional.jacobian(layer, x) for x in draw(2, 3, 1, 2).float()])


@entry(136457, "embedding_bag with a gradient of per_sample_weights alone", [1.0, 5.0, 9.0, 13.0])
def _() -> Tensor:
    table, offsets = torch.arange(8.0).reshape(4, 2), torch.tensor([0, 2])
    return gradient(
        lambda w: F.embedding_bag(torch.arange(4), table, offsets, mode="sum", per_sample_weights=w).sum(),
        torch.ones(4),
    )[0]


@entry(196680, "gradient of ldexp drops negative exponents", [2.0, 0.25])
def _() -> Tensor:
    return gradient(lambda x: torch.ldexp(x, torch.tensor([1, -2], dtype=torch.int32)).sum(), torch.tensor([0.7, 0.5]))[
        0
    ]
