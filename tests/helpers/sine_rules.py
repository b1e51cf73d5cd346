"""Rules for sin that are wrong by a factor, and which of them is active."""

import torch

import torch_manualgrad as mg
from helpers.tensors import random, same


def sine_times(factor, **about):
    """A rule for sin that is wrong by a factor, by which it is told."""
    return mg.rule("aten::sin", vjp={"self": lambda grad, self: factor * grad * self.cos()}, register=False, **about)


DOUBLE, TRIPLE = sine_times(2), sine_times(3)


def factor(f=torch.sin):
    """The factor in front of the gradient of sin that is active."""
    x = random(3).requires_grad_()
    ratio = torch.autograd.grad(f(x).sum(), x)[0] / x.detach().cos()
    same(ratio, ratio[0].expand_as(ratio))
    return round(ratio[0].item(), 6)
