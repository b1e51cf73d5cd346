"""Norms, distances and reductions."""

import math

import torch
from helpers.tensors import random
from torch.func import grad, jacrev, jvp

from claims import F64, own, point, tangent

aten = torch.ops.aten
EYE = torch.eye(2, dtype=F64)


def second_at_zero(norm):
    """A norm at zero, differentiated twice, is 0 by convention; nan spoils every sum that it is in."""
    return [point(lambda: grad(lambda x: grad(norm)(x).sum())(torch.zeros(3, dtype=F64)), [0.0] * 3)]


def distances(x, y):
    return (x[:, None] - y).square().sum(-1).sqrt()


def of_underflowing(product):
    """The gradient of 1e-200 * 2e-200 by autograd, which divides the product, 0, by its factors."""
    x = torch.tensor([1e-200, 2e-200], dtype=F64, requires_grad=True)
    return point(lambda: torch.autograd.grad(product(x), x)[0] * 1e200, [2.0, 1.0])


def at_equal_entries(deviation):
    """Reverse over forward mode, where all entries are equal; the convention is 0."""
    x, t = torch.ones(3, dtype=F64), torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    return point(lambda: grad(lambda x: jvp(deviation, (x,), (t,))[1])(x), [0.0] * 3)


def large_and_complex():
    """The tangent of log cumsum exp where the exponentials overflow."""
    x = torch.tensor([1e4, 0.0], dtype=torch.complex128)
    return jvp(lambda x: torch.logcumsumexp(x, 0), (x,), (torch.ones_like(x),))[1].real


def over_an_empty_list_of_dims(deviation):
    """It means all dims."""
    x = random(2, 3)
    return point(lambda: grad(lambda x: deviation(x, []))(x), grad(lambda x: deviation(x, [0, 1]))(x))


NOTHING = torch.full((2,), -math.inf, dtype=F64)
PROOFS = {
    "aten::linalg_vector_norm": {"values": second_at_zero(torch.linalg.vector_norm)},
    "aten::norm.Scalar": {"values": second_at_zero(lambda x: aten.norm(x, 2.0))},
    "aten::norm.ScalarOpt_dim": {"values": second_at_zero(lambda x: aten.norm(x, 2.0, [0]))},
    "aten::norm.ScalarOpt_dtype": {"values": second_at_zero(lambda x: aten.norm(x, 2.0, dtype=F64))},
    "aten::norm.ScalarOpt_dim_dtype": {"values": second_at_zero(lambda x: aten.norm(x, 2.0, [0], False, dtype=F64))},
    "aten::dist": {"values": second_at_zero(lambda x: torch.dist(x, torch.zeros(3, dtype=F64)))},
    "aten::renorm": {"values": second_at_zero(lambda x: torch.renorm(x[None], 2, 0, 1.0).sum())},
    "aten::_cdist_forward": {
        "values": [point(lambda: jacrev(torch.cdist)(EYE, EYE + 1) - jacrev(distances)(EYE, EYE + 1), 0.0)],
        "missing": tangent(lambda x: torch.cdist(x, random(2, 2, seed=2), 3.0), 3, 2),
    },
    "aten::_pdist_forward": {
        "values": [
            point(lambda: grad(lambda x: torch.pdist(x, math.inf)[0])(torch.tensor([[0.0, 0.0], [3.0, 3.0]]).double()),
                  [[-0.5, -0.5], [0.5, 0.5]]),
            point(lambda: grad(lambda x: torch.pdist(x, 3.0)[0])(1e200 * EYE), [[2 ** (-2 / 3), -(2 ** (-2 / 3))],
                                                                        [-(2 ** (-2 / 3)), 2 ** (-2 / 3)]]),
        ],
        "missing": tangent(lambda x: torch.pdist(x, 3.0), 3, 2),
    },
    "aten::segment_reduce": {"missing": [own("fwd"), own("rev-rev")]},
    "aten::_euclidean_dist": {"missing": tangent(lambda x: aten._euclidean_dist(x, random(2, 2, seed=2)), 3, 2)},
    "aten::_cdist_backward": {"missing": [own("rev"), own("fwd")]},
    "aten::_pdist_backward": {"missing": [own("rev"), own("fwd")]},
    "aten::prod": {"values": [of_underflowing(torch.prod)]},
    "aten::prod.dim_int": {"values": [of_underflowing(lambda x: torch.prod(x, 0))]},
    "aten::cumprod": {
        "values": [own("fwd-fwd"), own("rev-fwd"), of_underflowing(lambda x: torch.cumprod(x, 0)[1])]
    },
    "aten::logcumsumexp": {
        "values": [
            point(lambda: grad(lambda x: torch.logcumsumexp(x, 0)[2])(torch.cat([NOTHING, EYE[0]]))[:3], [0.0, 0.0, 1.0]),
            point(large_and_complex, [1.0, 1.0]),
        ]
    },
    "aten::aminmax": {"missing": [own("rev"), own("fwd")]},
    "aten::logsumexp": {"values": [point(lambda: grad(lambda x: torch.logsumexp(x, 0))(NOTHING), [0.0, 0.0])]},
    "aten::var.correction": {"values": [over_an_empty_list_of_dims(lambda x, dim: torch.var(x, dim))]},
    "aten::var_mean.correction": {"values": [over_an_empty_list_of_dims(lambda x, dim: torch.var_mean(x, dim)[0])]},
    "aten::std.correction": {
        "values": [at_equal_entries(torch.std), over_an_empty_list_of_dims(lambda x, dim: torch.std(x, dim))]
    },
    "aten::std_mean.correction": {
        "values": [
            at_equal_entries(lambda x: torch.std_mean(x)[0]),
            over_an_empty_list_of_dims(lambda x, dim: torch.std_mean(x, dim)[0]),
        ]
    },
}  # fmt: skip
