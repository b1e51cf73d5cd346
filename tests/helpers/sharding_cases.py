"""What runs on distributed tensors: a function, its inputs for a batch of any size, and what it needs to communicate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_manualgrad as mg
from helpers.tensors import random

PASSES = ("forward", "backward", "second", "tangent")
MANY = 1024  # ranks that do not exist
WHOLE = None  # in the place of a dim: the same on every rank


def labels(*shape: int, classes: int = 3) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(7))


def definite(*shape: int) -> Tensor:
    X = random(*shape)
    return X @ X.mT + torch.diag(torch.arange(1.0, shape[-1] + 1, dtype=torch.float64))


def square(*shape: int) -> Tensor:
    return random(*shape) + 3 * torch.eye(shape[-1], dtype=torch.float64)


def batched(
    make: Callable[..., Tensor], *shape: int, dim: int = 0, **options: Any
) -> Callable[[int], tuple[Tensor, int]]:
    """An input with a batch dim at ``dim``, which is sharded."""
    return lambda n: (make(*shape[:dim], n, *shape[dim:], **options), dim)


def whole(make: Callable[..., Tensor], *shape: int, **options: Any) -> Callable[[int], tuple[Tensor, None]]:
    """An input that every rank has, as weights."""
    return lambda n: (make(*shape, **options), WHOLE)


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        inputs: each gives, for the size of the batch, a tensor and the dim that is sharded.
        needs: collectives of each of `PASSES` that the mathematics, or PyTorch's own forward, asks for.
        partial: whether the output is a sum, or a mean, over ranks.
        even: whether PyTorch asks for parts of one size.
        gathered: whether PyTorch's forward gathers the inputs, so that each rank has the output.
        more: collectives of a pass that PyTorch's own derivative does without.
    """

    function: Callable[..., Tensor]
    inputs: Sequence[Callable[[int], tuple[Tensor, int | None]]]
    needs: Sequence[int] = (0, 0, 0, 0)
    partial: bool = False
    even: bool = False
    gathered: bool = False
    more: Mapping[str, int] = field(default_factory=dict)


X, Y = batched(random, 4), batched(random, 4, seed=1)
M, A, SPD, B = batched(random, 4, 3), batched(square, 3, 3), batched(definite, 3, 3), batched(random, 3, 2, seed=1)
PROBABILITY = batched(lambda *shape: random(*shape, seed=2).sigmoid(), 4)
CHECKED = (1, 0, 0, 1)  # PyTorch asks on all ranks whether a factorization has failed on one
NEWER = torch.__version__ >= "2.14"  # PyTorch's forwards communicate elsewhere
# the norm; the scale, the sum of powers, its cotangent, and the inner product; the scale and the sum. Since 2.14 the norm
# is made whole where it is saved, and every use of it saves one
NORM = (1, 1, 3, 3) if NEWER else (0, 1, 4, 2)
SCALE = {"second": 1} if NEWER else {}  # which keeps powers in range, and PyTorch's own does without

CASES: dict[str, Case] = {
    # normalization
    "softmax": Case(lambda x: torch.softmax(x, -1), [X]),
    "log_softmax": Case(lambda x: torch.log_softmax(x, -1), [X]),
    "logsumexp": Case(lambda x: torch.logsumexp(x, -1), [X]),
    "layer_norm": Case(
        lambda x, w, b: F.layer_norm(x, (4,), w, b), [X, whole(random, 4, seed=1), whole(random, 4, seed=2)]
    ),
    "rms_norm": Case(lambda x, w: F.rms_norm(x, (4,), w), [X, whole(random, 4, seed=1)]),
    "group_norm": Case(
        lambda x, w, b: F.group_norm(x, 2, w, b),
        [batched(random, 4, 3), whole(random, 4, seed=1), whole(random, 4, seed=2)],
    ),
    # norms
    "norm of rows": Case(lambda x: torch.linalg.vector_norm(x, dim=-1), [X]),
    "norm of columns": Case(lambda x: torch.linalg.vector_norm(x, dim=0), [X], NORM, True, more=SCALE),
    "norm": Case(lambda x: torch.linalg.vector_norm(x), [X], NORM, True, more=SCALE),
    # ... and its power is PyTorch's own
    "norm of order 3": Case(
        lambda x: torch.linalg.vector_norm(x, 3), [X], NORM, True, more={p: 2 * n for p, n in SCALE.items()}
    ),
    "pdist of order 1": Case(lambda x: torch.pdist(x, 1.0), [batched(random, 4, dim=1)], (0, 1, 1, 0), True),
    "cdist": Case(torch.cdist, [M, batched(random, 5, 3, seed=1)]),
    # linear algebra
    "svd": Case(lambda A: torch.linalg.svd(A, full_matrices=False)[1], [M]),
    "nuclear norm": Case(lambda A: torch.linalg.matrix_norm(A, "nuc"), [M]),
    "projector of svd": Case(lambda A: (lambda U, S, V: U @ V)(*torch.linalg.svd(A, full_matrices=False)), [M]),
    "eigh": Case(lambda A: (lambda L, V: (V * L.exp().unsqueeze(-2)) @ V.mT)(*torch.linalg.eigh(A + A.mT)), [SPD]),
    "cholesky": Case(torch.linalg.cholesky, [SPD], CHECKED),
    "inverse": Case(torch.linalg.inv, [A], CHECKED),
    "solve": Case(torch.linalg.solve, [A, B], CHECKED),
    "solve vectors": Case(torch.linalg.solve, [A, batched(random, 3, seed=1)], CHECKED),
    "solve_triangular": Case(lambda A, B: torch.linalg.solve_triangular(A, B, upper=True), [A, B]),
    "cholesky_solve": Case(lambda B, A: torch.cholesky_solve(B, A), [B, A]),
    "cholesky_inverse": Case(torch.cholesky_inverse, [A]),
    "det": Case(torch.linalg.det, [A]),
    "slogdet": Case(lambda A: torch.linalg.slogdet(A)[1], [A]),
    "qr": Case(lambda A: torch.linalg.qr(A)[0], [M]),
    "lu": Case(lambda A: torch.linalg.lu(A)[1], [A]),
    "lu_factor": Case(lambda A: torch.linalg.lu_factor(A)[0], [A], CHECKED),
    "matrix_exp": Case(torch.linalg.matrix_exp, [A]),
    "pinv": Case(torch.linalg.pinv, [M]),
    "matmul": Case(torch.matmul, [X, whole(random, 4, 2)]),
    # losses
    "mse": Case(F.mse_loss, [X, Y], partial=True, even=True),
    "huber": Case(F.huber_loss, [X, Y], partial=True, even=True),
    "smooth_l1": Case(F.smooth_l1_loss, [X, Y], partial=True, even=True),
    "binary_cross_entropy": Case(
        F.binary_cross_entropy,
        [PROBABILITY, batched(lambda *shape: random(*shape, seed=3).sigmoid(), 4)],
        partial=True,
        even=True,
    ),
    "binary_cross_entropy_with_logits": Case(F.binary_cross_entropy_with_logits, [X, Y], partial=True, even=True),
    "kl_div": Case(lambda x, y: F.kl_div(x, y, reduction="batchmean"), [X, PROBABILITY], partial=True, even=True),
    "soft_margin_loss": Case(lambda x: F.soft_margin_loss(x, torch.ones_like(x)), [X], partial=True, even=True),
    "multi_margin_loss": Case(
        lambda x, y: F.multi_margin_loss(x, y, p=2), [X, batched(labels, classes=4)], partial=True, even=True
    ),
    "multilabel_margin_loss": Case(
        F.multilabel_margin_loss, [X, batched(labels, 4, classes=4)], partial=True, even=True
    ),
    # a mean over labels that are not ignored: before 2.14 PyTorch takes that of the ranks' means
    "cross_entropy": Case(
        F.cross_entropy, [X, batched(labels)], (2, 0, 0, 4) if NEWER else (0, 1, 0, 0), not NEWER, True, gathered=NEWER
    ),
    # elementwise, products and the rest
    "gelu": Case(F.gelu, [X]),
    "hardtanh": Case(F.hardtanh, [X]),
    "silu": Case(F.silu, [X]),
    "var": Case(lambda x: x.var(-1), [X]),
    "prod": Case(lambda x: x.prod(-1), [X]),
    "cumprod": Case(lambda x: x.cumprod(-1), [X]),
    "segment_reduce": Case(
        lambda x, lengths: torch.segment_reduce(x, "max", lengths=lengths).mT,
        [batched(random, 4, dim=1), whole(lambda: torch.tensor([1, 3]))],
    ),
    "linear": Case(F.linear, [X, whole(random, 3, 4), whole(random, 3)]),
    "convolution": Case(F.conv1d, [batched(random, 3, 6), whole(random, 4, 3, 2)]),
    "avg_pool2d": Case(lambda x: F.avg_pool2d(x, 2), [batched(random, 3, 4, 6)]),
    "avg_pool3d": Case(lambda x: F.avg_pool3d(x, 2), [batched(random, 2, 4, 4, 6)]),
    "adaptive_max_pool3d": Case(lambda x: F.adaptive_max_pool3d(x, 3), [batched(random, 2, 4, 4, 6)]),
    "adaptive_max_pool2d": Case(lambda x: F.adaptive_max_pool2d(x, 3), [batched(random, 3, 4, 6)]),
    "attention": Case(F.scaled_dot_product_attention, [batched(random, 2, 3, 4, seed=s) for s in range(3)]),
    "lgamma": Case(lambda a, x: torch.special.gammainc(a.exp(), x.exp()), [X, Y]),
    # ours
    "mg.linalg.svd": Case(lambda A: mg.linalg.svd(A).S, [M]),
    "mg.linalg.eigh": Case(lambda A: mg.linalg.eigh(A).eigenvalues, [SPD]),
}
