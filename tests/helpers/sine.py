"""Custom ops and rules for sin whose gradient is wrong by a factor, and the factor that is active."""

import torch

import torch_manualgrad as mg
from helpers.ops import define
from helpers.tensors import random, same

# -- custom ops -------------------------------------------------------------------------------------------------------


def sine(**implementations):
    """sin with whatever is to be tried; a gradient that is wrong by a factor is told by the factor."""
    return define("(Tensor x) -> Tensor", lambda x: x.sin(), **implementations)


def keep_x(inputs, output):
    return inputs.x


def times(factor):
    return lambda ctx, x, g: {"x": factor * g * x.cos()}


def loss_of(op):
    """A loss of an op with two outputs."""

    def loss(x):
        y, n = op(x)
        return (y.sin() * torch.arange(1, x.shape[-1] + 1)).sum() + (n * n * n).sum()

    return loss


# -- rules ------------------------------------------------------------------------------------------------------------


def sine_times(factor, **about):
    """A rule for sin that is wrong by a factor, by which it is told."""
    return mg.rule("aten::sin", vjp={"self": lambda grad, self: factor * grad * self.cos()}, register=False, **about)


DOUBLE, TRIPLE = sine_times(2), sine_times(3)


def factor(f=torch.sin, x=None):
    """The factor in front of cos in the gradient of ``f``, a function that computes sin."""
    x = random(3).requires_grad_() if x is None else x
    ratio = torch.autograd.grad(f(x).sum(), x)[0] / x.detach().cos()
    same(ratio, ratio[0].expand_as(ratio))
    return round(ratio[0].item(), 6)
