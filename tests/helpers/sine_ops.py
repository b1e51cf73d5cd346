"""Custom ops for sin with whatever is to be tried, and a loss of one with two outputs."""

import torch

from helpers.ops import define
from helpers.tensors import random, same


def sine(**implementations):
    """sin with whatever is to be tried; a gradient that is wrong by a factor is told by the factor."""
    return define("(Tensor x) -> Tensor", lambda x: x.sin(), **implementations)


def keep_x(inputs, output):
    return inputs.x


def times(factor):
    return lambda ctx, x, g: {"x": factor * g * x.cos()}


def factor_of(f, x=None):
    """The factor in front of cos in the gradient of a `sine`."""
    x = random(3).requires_grad_() if x is None else x
    ratio = torch.autograd.grad(f(x).sum(), x)[0] / x.detach().cos()
    same(ratio, ratio[0].expand_as(ratio))
    return round(ratio[0].item(), 6)


def loss_of(op):
    def loss(x):
        y, n = op(x)
        return (y.sin() * torch.arange(1, x.shape[-1] + 1)).sum() + (n * n * n).sum()

    return loss
