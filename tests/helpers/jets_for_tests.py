"""What tests of Taylor series compare with: nested forward mode, one level an order."""

import torch


def nested_derivatives(f, primals, directions, order):
    """d^k/dt^k of f(x + t v) at 0, k = 1, ..., order, for each output; f returns a list."""
    derivative, found = lambda t: f(*[x + t * v for x, v in zip(primals, directions)]), []
    for _ in range(order):
        derivative = _derivative(derivative)
        found.append(derivative(torch.zeros((), dtype=torch.float64)))
    return list(zip(*found))


def _derivative(f):
    return lambda t: torch.func.jvp(f, (t,), (torch.ones_like(t),))[1]


def largest_error(found, expected):
    """Relative to the largest of the expected values, or 1; nan if any is."""
    errors = [
        ((a - b).abs().max() / (1 + b.abs().max())).detach() if b.numel() else torch.zeros(())
        for x, y in zip(found, expected, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    return torch.stack([e.double() for e in errors]).max().item() if errors else 0.0
