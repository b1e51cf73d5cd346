"""Nestings of transforms: forward and reverse mode in every order."""

import itertools

import torch
from torch.func import grad, jacfwd, jacrev, jvp, vjp

NESTINGS = [c for k in (1, 2, 3) for c in itertools.product((jacrev, jacfwd), repeat=k)]


def nested(transforms, f):
    for transform in transforms:
        f = transform(f)
    return f


def name_of(transforms):
    return "-".join(t.__name__ for t in transforms)


def along(f, direction, mode):
    """The derivative of a scalar function along a direction, as a function."""
    if mode == "f":
        return lambda x: jvp(f, (x,), (direction,))[1]
    return lambda x: (grad(f)(x) * direction).sum()


def third_derivatives(f, x, directions):
    """Of f at x, by nesting: "frf" is forward over reverse over forward."""
    found = {}
    for nesting in map("".join, itertools.product("fr", repeat=3)):
        g = f
        for direction, mode in zip(directions, reversed(nesting), strict=True):
            g = along(g, direction, mode)
        found[nesting] = g(x)
    return found


def assert_all_close(found, expected):
    for nesting, value in found.items():
        torch.testing.assert_close(value, expected, msg=lambda m, n=nesting: f"{n}: {m}")


def differentiated(loss, nesting, at):
    """The derivative of a function of one number at a point, by jvp ("f") and vjp ("r"), the first letter outermost."""
    for mode in reversed(nesting):
        if mode == "f":
            loss = lambda t, f=loss: jvp(f, (t,), (torch.ones_like(t),))[1]  # noqa: E731
        else:
            loss = lambda t, f=loss: vjp(f, t)[1](torch.ones_like(t))[0]  # noqa: E731
    return loss(torch.tensor(at, dtype=torch.float64))
