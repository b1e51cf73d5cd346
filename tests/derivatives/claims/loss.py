"""Losses."""

import math

import torch
import torch.autograd.forward_ad as fwAD
from helpers.tensors import random
from torch.func import grad, jvp

from claims import F64, derivatives, own, point, scalar

aten = torch.ops.aten


def of_the_target(x):
    """The gradient of binary_cross_entropy for its target at a probability, where the loss is finite."""
    return grad(lambda t: aten.binary_cross_entropy(scalar(x), t))(scalar(0.5))


def third_of_mse(t):
    """Of (t - t^2)^2: reverse over forward over reverse, which meets a zero that PyTorch writes to."""
    first = grad(lambda t: aten.mse_loss(t, t * t))
    return grad(lambda t: jvp(first, (t,), (torch.ones_like(t),))[1])(scalar(t))


def from_columns():
    """A gradient of log-probabilities that are not contiguous."""
    x, target = random(1, 2, 2, 3).movedim(3, 1), torch.zeros(1, 2, 2).long()
    return grad(lambda x: torch.nn.functional.nll_loss(x, target, reduction="sum"))(x)[:, 0]


def aligned(x):
    """The probability of "1" in two steps, of unnormalised exponentials of x: alignments 11, 01, 10."""
    return torch.nn.functional.ctc_loss(x[:, None], torch.tensor([[1]]), [2], [1], reduction="sum")


def of_weights(f):
    """The derivative along the direction (1, 0) of a function of the weights of two classes, at (1, 2)."""
    w, t = torch.tensor([1.0, 2.0], dtype=F64), torch.tensor([1.0, 0.0], dtype=F64)
    with fwAD.dual_level():
        found, tangent = fwAD.unpack_dual(f(fwAD.make_dual(w, t)))
    return torch.zeros_like(found) if tangent is None else tangent


def of_the_first_weight(f):
    """The same derivative in reverse mode."""
    w = torch.tensor([1.0, 2.0], dtype=F64, requires_grad=True)
    return torch.autograd.grad(f(w).sum(), w)[0][0]


SCORES, CLASSES = torch.tensor([[-1.0, -2.0], [-4.0, -3.0]], dtype=F64), torch.tensor([0, 1])
# the losses are 1 and 3, with weights 1 and 2: their mean is 7 / 3, and its derivative 1 / 3 - 7 / 9
WEIGHTED_MEAN = -4 / 9


def nll_gradient(backward, *shape):
    """The gradient for the first of the scores, -w0 / (w0 + w1), as a function of the weights."""
    x, y = SCORES.reshape(2, 2, *shape), CLASSES.reshape(2, *shape)
    total = torch.tensor(3.0, dtype=F64)
    return lambda w: backward(scalar(1.0), x, y, w, 1, -100, total).flatten()[0]


def mean_nll(forward, *shape):
    """The mean loss as a function of the weights."""
    x, y = SCORES.reshape(2, 2, *shape), CLASSES.reshape(2, *shape)
    return lambda w: forward(x, y, w, 1, -100)[0]


def in_both_modes(f, expected):
    return {
        "values": [point(lambda: of_weights(f), expected)],
        "missing": [point(lambda: of_the_first_weight(f), expected)],
    }


def at_a_half(f):
    """Of a weight of a loss, at the probability 1/2 and the target 1."""
    return [point(lambda: grad(lambda w: f(scalar(0.5), scalar(1.0), w))(scalar(2.0)), math.log(2))]


X = torch.tensor([[0.0, math.log(2.0)], [0.0, math.log(3.0)]], dtype=F64)
SLOPES = [[-3 / 11, -8 / 11], [-2 / 11, -9 / 11]]  # Z = 2 * 3 + 1 * 3 + 2 * 1 = 11

PROOFS = {
    "aten::binary_cross_entropy": {
        "values": [point(lambda: of_the_target(0.0), 100.0)],
        "missing": at_a_half(aten.binary_cross_entropy),
    },
    "aten::binary_cross_entropy_backward": {
        "values": [
            point(
                lambda: grad(lambda x: aten.binary_cross_entropy_backward(scalar(1.0), x, scalar(0.0)))(scalar(0.0)),
                1.0,
            )
        ],
        "missing": at_a_half(
            lambda x, t, w: -math.log(2) / 2 * aten.binary_cross_entropy_backward(scalar(1.0), x, t, w)
        ),
    },
    "aten::mse_loss_backward": {"missing": [point(lambda: third_of_mse(0.1), -9.6)]},
    "aten::huber_loss_backward": {"missing": [own("fwd")]},
    "aten::soft_margin_loss": {
        "values": derivatives(lambda x: aten.soft_margin_loss(x, scalar(1.0)), -1000.0, -1.0, 0.0),
        "missing": [own("fwd-rev"), own("fwd-fwd")],
    },
    "aten::soft_margin_loss_backward": {
        "values": derivatives(lambda x: aten.soft_margin_loss_backward(scalar(1.0), x, scalar(1.0), 1), -1000.0, 0.0),
        "missing": [own("fwd")],
    },
    "aten::multi_margin_loss": {"missing": [own("fwd"), own("rev-rev")]},
    "aten::multi_margin_loss_backward": {"missing": [own("rev")]},
    "aten::multilabel_margin_loss_forward": {"missing": [own("fwd"), own("rev-rev")]},
    "aten::multilabel_margin_loss_backward": {"missing": [own("rev")]},
    "aten::binary_cross_entropy_with_logits": in_both_modes(  # p log 2
        lambda p: aten.binary_cross_entropy_with_logits(0 * SCORES[0], SCORES[0] ** 0, None, p), math.log(2) / 2
    ),
    "aten::nll_loss_forward": in_both_modes(mean_nll(aten.nll_loss_forward), WEIGHTED_MEAN),
    "aten::nll_loss_backward": in_both_modes(nll_gradient(aten.nll_loss_backward), -2 / 9),
    "aten::nll_loss2d_backward": in_both_modes(nll_gradient(aten.nll_loss2d_backward, 1, 1), -2 / 9),
    "aten::nll_loss2d_forward": {
        "missing": [
            point(from_columns, torch.full((1, 2, 2), -1.0)),
            point(lambda: of_the_first_weight(mean_nll(aten.nll_loss2d_forward, 1, 1)), WEIGHTED_MEAN),
        ]
    },
    "aten::_ctc_loss": {
        "values": [point(lambda: grad(aligned)(X), SLOPES)],
        "missing": [own("fwd"), own("rev-rev")],
    },
    "aten::_ctc_loss.Tensor": {"values": [own("rev")], "missing": [own("fwd"), own("rev-rev")]},
    "torch_nn::_linear_cross_entropy_batch_chunked": {"values": [own("fwd")], "missing": [own("fwd-rev")]},
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": {"values": [own("fwd")], "missing": [own("fwd-rev")]},
}
