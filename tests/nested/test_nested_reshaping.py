"""Other shapes of a `Ragged`, next to those of its components."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.tensors import close, random

from torch_manualgrad.nested import Ragged
from torch_manualgrad.testing import check

LENGTHS = (4, 1, 0, 3)


def batch(*shape, lengths=LENGTHS, ragged=1, seed=0):
    """(B, ..., *, ...) with the ragged dim at a place."""
    sizes = [[*shape[: ragged - 1], n, *shape[ragged - 1 :]] for n in lengths]
    return Ragged.from_components([random(*s, seed=seed + i) for i, s in enumerate(sizes)], ragged_dims=[ragged])


def same(found, expected):
    assert isinstance(found, Ragged) and len(found) == len(expected)
    assert list(found.shape[1:]) == [None if d + 1 in found.ragged_dims else n for d, n in enumerate(expected[0].shape)]
    for a, b in zip(found, expected):
        close(a, b)


CALLS = {
    "reshape, heads": (lambda x: x.reshape(4, -1, 2, 3), lambda c: c.reshape(len(c), 2, 3)),
    "view, by the shape": (lambda x: x.view(*x.shape[:2], 2, -1), lambda c: c.reshape(len(c), 2, 3)),
    "torch.reshape": (lambda x: torch.reshape(x, (-1, None, 6, 1)), lambda c: c[..., None]),
    "unflatten": (lambda x: x.unflatten(-1, (2, -1)), lambda c: c.unflatten(-1, (2, 3))),
    "torch.unflatten": (lambda x: torch.unflatten(x, 2, (3, 2)), lambda c: c.unflatten(-1, (3, 2))),
    "flatten": (lambda x: x.unflatten(-1, (2, 3)).flatten(2), lambda c: c),
    "flatten of one dim": (lambda x: x.flatten(1, 1), lambda c: c),
    "unsqueeze": (lambda x: x.unsqueeze(-1), lambda c: c.unsqueeze(-1)),
    "unsqueeze in front": (lambda x: x.unsqueeze(1), lambda c: c.unsqueeze(0)),
    "squeeze": (lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(), lambda c: c),
    "squeeze one": (lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(1), lambda c: c.unsqueeze(-1)),
    "permute": (lambda x: x.unflatten(-1, (2, 3)).permute(0, 2, 3, 1), lambda c: c.unflatten(-1, (2, 3)).permute(1, 2, 0)),
    "movement of heads": (
        lambda x: x.view(*x.shape[:2], 2, 3).transpose(1, 2).transpose(1, 2).flatten(-2), lambda c: c
    ),
    "expand": (lambda x: x.unsqueeze(-1).expand(4, None, -1, 2), lambda c: c.unsqueeze(-1).expand(-1, -1, 2)),
    "cat of features": (lambda x: torch.cat([x, x.sin()], -1), lambda c: torch.cat([c, c.sin()], -1)),
    "cat of positions": (lambda x: torch.cat([x, x.sin()], 1), lambda c: torch.cat([c, c.sin()], 0)),
    "stack": (lambda x: torch.stack([x, x.sin()], 1), lambda c: torch.stack([c, c.sin()])),
    "stack last": (lambda x: torch.stack([x, x.sin()], -1), lambda c: torch.stack([c, c.sin()], -1)),
    "where": (lambda x: torch.where(x > 0, x, x.sin()), lambda c: torch.where(c > 0, c, c.sin())),
    "where, number": (lambda x: torch.where(x > 0, 0.0, x), lambda c: torch.where(c > 0, 0.0, c)),
    "normalize": (lambda x: F.normalize(x, dim=-1), lambda c: F.normalize(c, dim=-1)),
    "topk": (lambda x: x.topk(2)[0], lambda c: c.topk(2)[0]),
    "sort": (lambda x: torch.sort(x, dim=-1, descending=True).values, lambda c: c.sort(-1, descending=True).values),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_shapes(name):
    ours, of_component = CALLS[name]
    x = batch(6)
    same(ours(x), [of_component(c) for c in x])


@pytest.mark.parametrize("name", CALLS)
def test_derivatives(name):
    ours, _ = CALLS[name]
    x = batch(6, lengths=(2, 1, 0, 2))
    check(lambda values: ours(x.like(values)).values, [(x.values,)])


def test_batch_and_ragged_dim_together_are_the_values():
    x = batch(6)
    for found in (x.flatten(0, 1), x.reshape(-1, 6), x.view(-1, 6), torch.flatten(x, 0, 1), x.view(8, 6)):
        assert found.data_ptr() == x.values.data_ptr() and found.shape == (8, 6)
    assert x.flatten().shape == (48,) and x.reshape(-1, 2, 3).shape == (8, 2, 3)
    assert batch().reshape(-1).shape == batch().flatten().shape == (8,)


def test_dims_in_front_of_the_ragged_one():
    x = batch(4, 6, ragged=2)
    same(x.reshape(4, 2, 2, -1, 3, 2), [c.reshape(2, 2, -1, 3, 2) for c in x])
    same(x.unflatten(1, (2, 2)).flatten(1, 2), list(x))
    same(torch.cat([x, x], 1), [torch.cat([c, c]) for c in x])
    same(torch.cat([x, x], 2), [torch.cat([c, c], 1) for c in x])


def test_cat_of_batches():
    x, y = batch(6), batch(6, lengths=(2, 5), seed=7)
    same(torch.cat([x, y]), [*x, *y])
    same(torch.cat((x, y, x), dim=0), [*x, *y, *x])


BY_POSITION = {
    "sort": lambda x: x.sort(-1, True)[0],
    "sort, stable": lambda x: x.sort(stable=True, descending=True)[1],
    "argsort": lambda x: x.argsort(-1, True),
    "topk": lambda x: x.topk(2, -1, False, True)[0],
    "argmax": lambda x: x.argmax(-1, True),
    "any": lambda x: (x > 1).any(-1, True),
}


@pytest.mark.parametrize("name", BY_POSITION)
def test_options_by_position(name):
    x = batch(6)
    for found, expected in zip(BY_POSITION[name](x), map(BY_POSITION[name], x), strict=True):
        assert torch.equal(found, expected)


def test_wrong_options():
    x = batch(6)
    with pytest.raises(TypeError, match="topk: expected at most k, dim, largest, sorted, got 5"):
        x.topk(2, -1, True, True, 1)
    with pytest.raises(TypeError, match=r"dim: any of a Ragged takes one dim, got \(1, 2\)"):
        x.any(dim=(1, 2))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_batches_without_components_are_concatenated(dim):
    x = batch(6)[:0]
    assert torch.cat([x, x], dim).shape == (0, None, 12 if dim == 2 else 6)


@pytest.mark.parametrize("name", ["argmax", "argmin", "any", "all"])
def test_reductions_along_a_regular_dim(name):
    x = batch(6) if name.startswith("arg") else batch(6) > 0
    for function in (getattr(torch, name), getattr(Ragged, name)):
        same(function(x, -1), [getattr(torch, name)(c, -1) for c in x])
        same(function(x, dim=2, keepdim=True), [getattr(torch, name)(c, dim=1, keepdim=True) for c in x])
        assert torch.equal(function(x), getattr(torch, name)(x.values))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.reshape(4, 6, -1), r"shape: \(4, 6, -1\) does not fit Ragged\(\(4, \*, 6\)"),
        (lambda x: x.reshape(3, -1, 6), "shape: .* does not fit"),
        (lambda x: x.reshape(-1, 5), "shape: .* does not fit"),
        (lambda x: x.reshape(4, 8, 6), "shape: .* does not fit"),
        (lambda x: x.reshape(4, None, None, 6), "shape: .* does not fit"),
        (lambda x: x.flatten(1, 2), "start_dim, end_dim: dims 1 to 2 of .* are not all regular"),
        (lambda x: x.transpose(1, 2).flatten(0, 1), "start_dim, end_dim: dims 0 to 1"),
        (lambda x: x.unflatten(1, (2, 2)), "dim: unflatten takes a regular dim; dim 1 .* is ragged"),
        (lambda x: x.unflatten(0, (2, 2)), "dim: unflatten takes a regular dim; dim 0 .* is the batch"),
        (lambda x: x.unsqueeze(0), "dim: expected 1 or more, got 0"),
        (lambda x: x.permute(1, 0, 2), "dims: expected 0 and then every other dim"),
        (lambda x: x.expand(4, 5, 6), "sizes: .* whose batch and ragged dim stay"),
        (lambda x: torch.cat([x, x.transpose(1, 2)]), r"tensors\[1\]: .* does not fit"),
        (lambda x: torch.cat([x, batch(6, lengths=(1, 2, 3, 2))], -1), r"tensors\[1\]: the lengths differ"),
        (lambda x: torch.stack([x, x]), "dim: expected 1 or more"),
        (lambda x: x.argmax(0), "dim: argmax takes a regular dim"),
        (lambda x: x + random(4, 9, 6), r"other: shape \[4, 9, 6\] does not broadcast"),
        (lambda x: x + random(1, 3, 6), r"other: shape \[1, 3, 6\] does not broadcast"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call(batch(6))


def test_several_ragged_dims_are_refused():
    x = Ragged.from_components([random(2, 3), random(3, 2)])
    for call in (lambda: x.reshape(2, -1), lambda: x.unsqueeze(1), lambda: torch.cat([x, x]), lambda: x.flatten()):
        with pytest.raises(ValueError, match="expected one ragged dim"):
            call()


def test_what_is_printed():
    x = Ragged.from_components([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    assert repr(x) == "Ragged((2, *), torch.float32, [\n  tensor([1., 2.]),\n  tensor([3.])\n])"
    assert repr(batch(2, lengths=(1,) * 20)).count("tensor(") == 6
    assert "..." in repr(batch(2, lengths=(1,) * 20))
    assert "grad_fn" not in repr(x.requires_grad_() * 2)
    assert repr(x.to("meta")) == x.to("meta").summary() and "\n" not in x.summary()
    torch.func.grad(lambda v: repr(x.like(v)) and v.sum())(x.values.detach())
    assert repr(Ragged(torch.zeros(0, 2), torch.zeros(1, dtype=torch.int64), (0, None, 2)))
    assert repr(Ragged.trusted(x.values, None, x.shape))  # a cotangent, in a custom rule
