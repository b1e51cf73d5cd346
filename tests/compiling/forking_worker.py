"""A program whose forked processes differentiate a function that it has compiled, and compile another."""

import torch
from helpers.processes import forked

import torch_manualgrad as mg

X = torch.linspace(-1, 1, 5, dtype=torch.float64)


def f(x):
    return torch.tanh(x).square().sum()


def curvature(function):
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(x), x, create_graph=True)
    return torch.autograd.grad(first.sin().sum(), x)[0]


def work():
    torch.testing.assert_close(curvature(compiled), curvature(f))
    torch.testing.assert_close(
        curvature(mg.compile(lambda x: f(x.exp()), dynamic=False, lowering="eager")), curvature(lambda x: f(x.exp()))
    )


compiled = mg.compile(f, dynamic=False)
work()
forked([work, work])
