"""Third derivatives along given directions, in all eight nestings of forward and reverse mode."""

import itertools

import torch
from torch.func import grad, jvp


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
