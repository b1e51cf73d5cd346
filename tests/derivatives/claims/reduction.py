"""Norms and distances."""

import math

import torch
from ops_for_tests import random
from torch.func import grad, jacrev

from claims import F64, own, point, tangent

aten = torch.ops.aten
EYE = torch.eye(2, dtype=F64)


def second_at_zero(norm):
    """A norm at zero, differentiated twice, is 0 by convention; nan spoils every sum that it is in."""
    return [point(lambda: grad(lambda x: grad(norm)(x).sum())(torch.zeros(3, dtype=F64)), [0.0] * 3)]


def distances(x, y):
    return (x[:, None] - y).square().sum(-1).sqrt()


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
}  # fmt: skip
