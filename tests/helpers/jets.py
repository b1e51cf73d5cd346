"""What tests of Taylor series compare with: nested forward mode, one level an order, and finite differences."""

import math

import torch

from torch_manualgrad.forward_ad import jet

ORDER = 4
POINTS = torch.arange(-4, 5, dtype=torch.float64)
WEIGHTS = torch.linalg.inv(torch.stack([POINTS**k for k in range(len(POINTS))], 1))  # row k: of the k-th coefficient
STEPS = (0.01, 0.003, 0.03, 0.001, 0.1, 0.0003)
EPS = torch.finfo(torch.float64).eps


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


def differences(f, h):
    """f^(k)(0) for k = 1, ..., ORDER of each output, and the size of the outputs."""
    values = [f(float(t) * h) for t in POINTS]
    found, sizes = [], []
    for column in zip(*values):
        y = torch.stack(column)
        terms = [torch.tensordot(WEIGHTS[k].to(y.dtype), y, 1) * math.factorial(k) / h**k for k in range(1, ORDER + 1)]
        found.append(terms)
        sizes.append(y.abs().max().item())
    return found, max(sizes, default=0.0)


def compare(f, x):
    """The orders in which the series of f differs from finite differences at every step, and those in which it agrees.

    Where the differences do not settle to the third order, the point is too close to one without derivatives.
    """
    v = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    v = v / v.norm()
    series = jet(f, (x,), ([v, *[None] * (ORDER - 1)],))[1]
    agreed, last = set(), None
    wrong = {}
    for h in STEPS:
        expected, size = differences(lambda t: f(x + t * v), h)  # noqa: B023
        for k in range(1, ORDER + 1):
            noise = 1e3 * EPS * (1 + size) / h**k
            if k in agreed or noise > 0.02:
                continue
            ones = [(a[k - 1], b[k - 1]) for a, b in zip(series, expected)]
            scale = max([1 + b.abs().max().item() for _, b in ones], default=1.0)
            if all((a - b).abs().max().item() <= max(1e-6, noise) * scale for a, b in ones):
                agreed.add(k)
            elif last is not None and all(
                (b[k - 1] - c[k - 1]).abs().max().item() <= max(1e-3, 10 * noise) * scale
                for b, c in zip(expected, last)
            ):
                wrong[k] = max((a - b).abs().max().item() for a, b in ones)
        last = expected
    smooth = {1, 2, 3} <= agreed | {*wrong}
    return {k: e for k, e in wrong.items() if smooth and k not in agreed}, agreed
