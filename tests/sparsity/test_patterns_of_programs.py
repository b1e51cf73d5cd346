"""Patterns of random programs, of views, writes in place and products, next to their dense derivatives."""

from __future__ import annotations

import random

import pytest
import torch

from torch_manualgrad.sparsity.detection import detect


def view(draw, x):
    """A view of a tensor."""
    kinds = [lambda: x.reshape(-1)[draw.randrange(2) :: 1 + draw.randrange(2)]]
    if x.dim() == 2:
        kinds += [x.t, lambda: x[draw.randrange(len(x))], lambda: x[:, : 1 + draw.randrange(x.shape[1])]]
    if x.dim() == 1 and len(x) % 2 == 0:
        kinds += [lambda: x.view(2, -1), lambda: x.unfold(0, 2, 1), lambda: x.as_strided((len(x) // 2, 2), (1, 1))]
    if x.dim() == 1:
        kinds += [lambda: x[None].expand(2, -1), lambda: x.narrow(0, 0, 1 + draw.randrange(len(x)))]
    return draw.choice(kinds)()


def fitted(x, shape):
    """The elements of a tensor, repeated or cut to a shape."""
    count = torch.Size(shape).numel()
    return x.reshape(-1).repeat(-(-count // x.numel()))[:count].reshape(shape)


def made(draw, x, y):
    """A new tensor of two others."""
    other = fitted(y, x.shape)
    index = torch.tensor([draw.randrange(len(x)) for _ in range(1 + draw.randrange(3))])
    kinds = [
        lambda: x * other, lambda: x + other, lambda: x.sin(), lambda: torch.where(x > 0, x, other), lambda: x / (2 + other**2),
        lambda: torch.cat([x, other]), lambda: x[index], lambda: x.flip(0), lambda: torch.roll(x, 1, 0), lambda: x.sum(0, keepdim=True),
        lambda: x.index_add(0, index, other[index]), lambda: x.cumsum(0), lambda: torch.outer(x.reshape(-1)[:3], y.reshape(-1)[:2]),
        lambda: x.index_put((index,), other[index]), lambda: x * 0, lambda: torch.zeros_like(x), lambda: x.clone().reshape(-1),
        lambda: torch.nn.functional.pad(x, (1, 0)), lambda: torch.diag_embed(x.reshape(-1)[:3]), lambda: x.relu(),
        lambda: torch.view_as_real(torch.complex(x, other).conj() * (1 + 2j)).reshape(-1),
    ]  # fmt: skip
    return draw.choice(kinds)()


def write(draw, x, y):
    """Change a tensor in place."""
    other = fitted(y, x.shape).clone()  # which may share its memory
    index = torch.tensor([draw.randrange(len(x))])
    kinds = [
        lambda: x.copy_(other), lambda: x.mul_(other), lambda: x.add_(other, alpha=2), lambda: x.zero_(), lambda: x.sin_(),
        lambda: x.index_add_(0, index, other[index]), lambda: x.index_fill_(0, index, 3.0), lambda: x.index_copy_(0, index, other[:1]),
        lambda: x.masked_fill_(torch.zeros_like(x, dtype=torch.bool), 2.0), lambda: x[:1].copy_(other[-1:]), lambda: x.fill_(2.0),
        lambda: x.clamp_(-1, 1), lambda: x.addcmul_(other, other), lambda: x.index_put_((index,), other[index], accumulate=True),
    ]  # fmt: skip
    draw.choice(kinds)()


def program(seed):
    """A function whose steps depend on the seed alone, and the list of those that its last run has refused."""
    refused = []

    def f(x):
        draw = random.Random(seed)
        known = [x.clone(), (x * 1).reshape(2, -1)]
        refused.clear()
        for step in range(9):
            a, b = draw.choice(known), draw.choice(known)
            action = draw.random()
            if action < 0.35:
                found = view(draw, a)
            elif action < 0.7:
                found = made(draw, a, b)
            else:
                try:
                    write(draw, a, b)
                except RuntimeError:  # into a view whose elements share memory
                    refused.append(step)
                continue
            if 0 < found.numel() <= 40:
                known.append(found)
        return torch.cat([t.reshape(-1) for t in known[2:] or known])

    return f, refused


def changes(f, x):
    """Which elements of the result change with which of the input."""
    here = f(x.clone().requires_grad_())  # PyTorch refuses more writes if it tracks them
    steps = 1e-6 * torch.eye(x.numel(), dtype=x.dtype)
    return torch.stack([f((x + step).requires_grad_()) != here for step in steps], 1)


def check(seed) -> tuple[float, bool]:
    """How much of the pattern is nonzero at two points, and whether there was a second derivative to compare with."""
    f, refused = program(seed)
    generator = torch.Generator().manual_seed(seed)
    points = [torch.randn(6, dtype=torch.float64, generator=generator) for _ in range(2)]
    nonzero = torch.stack([changes(f, p) for p in points]).any(0)
    expected = [*refused]
    found = detect(f, points[0], ()).pattern.dense()
    assert refused == expected
    assert not (nonzero & ~found).any(), f"seed {seed}"
    weights = torch.linspace(1, 2, len(found), dtype=torch.float64)
    g = lambda x: (f(x) * weights).sum()  # noqa: E731
    try:
        hessians = [torch.func.jacfwd(torch.func.jacfwd(g))(p) for p in points]
    except RuntimeError:  # of PyTorch, where it differentiates what was written
        hessians = []
    if refused == expected:
        second = detect(g, points[0], (), second=True).pattern.dense()
        for hessian in hessians:
            assert not ((hessian != 0) & hessian.isfinite() & ~second).any(), f"seed {seed}, second derivative"
    return float(nonzero.sum() / found.sum().clamp(min=1)), bool(hessians) and refused == expected


def test_random_programs():
    density, second = zip(*[check(seed) for seed in range(60)])
    assert sum(density) > 0.75 * 60 and sum(second) > 20  # the patterns are not merely full


@pytest.mark.slow
@pytest.mark.parametrize("start", range(60, 2060, 500))
def test_many_random_programs(start):
    for seed in range(start, start + 500):
        check(seed)
