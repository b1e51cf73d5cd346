"""Functions of torch along dims of a `Ragged`, layers, and einsum, next to those of its components."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from helpers.tensors import close, random
from torch import nn

import torch_manualgrad as mg
from torch_manualgrad.nested import Ragged
from torch_manualgrad.testing import check

LENGTHS = (4, 1, 0, 3)
WEIGHT, KERNEL, BIAS = random(6, 2, seed=20), random(2, 6, 3, seed=21), random(2, seed=22)
SQUARE = random(3, 6, 6, seed=23)


def batch(lengths=LENGTHS):
    return Ragged.from_components([random(n, 6, seed=i) for i, n in enumerate(lengths)])


def same(found, expected):
    """A `Ragged` with these components, or the dense tensor of these rows."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        close(a, b)


def places(x):
    """Indices from 0 to 5, in the same order in a batch and in its components."""
    return (10 * x).abs().long() % 6


# on a batch (B, *, 6) and on its components
ALONG = {
    "cumprod": (lambda x: x.cumprod(-1), lambda c: c.cumprod(-1)),
    "cummax": (lambda x: x.cummax(2).values, lambda c: c.cummax(1).values),
    "cummin": (lambda x: torch.cummin(x, dim=-1)[0], lambda c: c.cummin(-1)[0]),
    "flip": (lambda x: x.flip(-1), lambda c: c.flip(-1)),
    "flip, dims one by one": (lambda x: x.unflatten(-1, (2, 3)).flip(2, -1), lambda c: c.unflatten(-1, (2, 3)).flip(1, 2)),
    "flip of two": (lambda x: x.unflatten(-1, (2, 3)).flip((2, -1)), lambda c: c.unflatten(-1, (2, 3)).flip((1, 2))),
    "roll": (lambda x: torch.roll(x, 2, -1), lambda c: torch.roll(c, 2, -1)),
    "diff": (lambda x: x.diff(2), lambda c: c.diff(2)),
    "kthvalue": (lambda x: x.kthvalue(2).values, lambda c: c.kthvalue(2).values),
    "median": (lambda x: x.median(-1).values, lambda c: c.median(-1).values),
    "nanmedian": (lambda x: torch.nanmedian(x, -1, True)[0], lambda c: c.nanmedian(-1, True)[0]),
    "in front of the ragged dim": (lambda x: x.mT.median(1).values, lambda c: c.median(-1).values),
    "aminmax": (lambda x: torch.aminmax(x, dim=-1).max, lambda c: c.amax(-1)),
    "index_select": (
        lambda x: x.index_select(-1, torch.tensor([3, 0])), lambda c: c.index_select(-1, torch.tensor([3, 0]))
    ),
    "gather": (lambda x: x.gather(-1, places(x)[..., :2]), lambda c: c.gather(-1, places(c)[..., :2])),
    "take_along_dim": (
        lambda x: torch.take_along_dim(x, places(x), 2), lambda c: torch.take_along_dim(c, places(c), 1)
    ),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, -1), lambda c: c.repeat_interleave(2, -1)),
    "cosine_similarity": (
        lambda x: F.cosine_similarity(x, x.sin(), dim=-1), lambda c: F.cosine_similarity(c, c.sin(), dim=-1)
    ),
    "cosine_similarity by name": (
        lambda x: F.cosine_similarity(x1=x, x2=x.sin(), dim=-1), lambda c: F.cosine_similarity(c, c.sin(), dim=-1)
    ),
    "cosine similarity to a vector": (
        lambda x: F.cosine_similarity(WEIGHT[:, 0], x, -1), lambda c: F.cosine_similarity(WEIGHT[:, 0], c, -1)
    ),
    "vecdot": (lambda x: torch.linalg.vecdot(x, x.sin()), lambda c: torch.linalg.vecdot(c, c.sin())),
    "cross": (
        lambda x: torch.linalg.cross(x[..., :3], x[..., 3:]), lambda c: torch.linalg.cross(c[..., :3], c[..., 3:])
    ),
    "var_mean": (lambda x: torch.var_mean(x, -1)[0], lambda c: torch.var_mean(c, -1)[0]),
    "std_mean": (lambda x: torch.std_mean(x, 2, correction=0)[1], lambda c: c.mean(1)),
    "softmin": (lambda x: F.softmin(x, -1), lambda c: F.softmin(c, -1)),
    "tile of the last dim": (lambda x: x.tile(2), lambda c: c.tile(2)),
    "tile": (lambda x: torch.tile(x, dims=(1, 1, 2)), lambda c: c.repeat(1, 2)),
    "repeat": (lambda x: x.repeat(1, 1, 2), lambda c: c.repeat(1, 2)),
    "movedim": (
        lambda x: x.unflatten(-1, (2, 3)).movedim(-1, 1), lambda c: c.unflatten(-1, (2, 3)).movedim(-1, 0)
    ),
    "concat": (lambda x: torch.concat([x, x.sin()], -1), lambda c: torch.concat([c, c.sin()], -1)),
    "None last": (lambda x: x[..., None], lambda c: c[..., None]),
    "None between": (lambda x: x[:, :, None, 1:], lambda c: c[:, None, 1:]),
    "None and a number": (lambda x: x[:, None, ..., 1, None], lambda c: c[None, ..., 1, None]),
}  # fmt: skip
LAYERS = {
    "prelu": (lambda x: F.prelu(x, BIAS[:1]), lambda c: F.prelu(c, BIAS[:1])),
    "prelu of channels": (lambda x: F.prelu(x.mT, WEIGHT[:, 0]).mT, lambda c: F.prelu(c, WEIGHT[:, 0])),
    "bilinear": (lambda x: F.bilinear(x, x.sin(), SQUARE), lambda c: F.bilinear(c, c.sin(), SQUARE)),
    "pairwise_distance": (
        lambda x: F.pairwise_distance(x, x.sin()), lambda c: torch.linalg.vector_norm(c - c.sin() + 1e-6, dim=-1)
    ),
    "pad": (lambda x: F.pad(x, (1, 2)), lambda c: F.pad(c, (1, 2))),
    "pad in front": (lambda x: F.pad(x.mT, (0, 0, 1, 2), value=2.0).mT, lambda c: F.pad(c, (1, 2), value=2.0)),
    "einsum": (lambda x: torch.einsum("bnd,dk->bnk", x, WEIGHT), lambda c: c @ WEIGHT),
    "einsum, permuted": (lambda x: torch.einsum("bnd,dk->bkn", x, WEIGHT), lambda c: (c @ WEIGHT).mT),
    "einsum of batches": (lambda x: torch.einsum("bnd, bne -> bn", x, x.sin()), lambda c: c.sum(1) * c.sin().sum(1)),
    "einsum over the ragged dim": (lambda x: torch.einsum("bnd,bne->bde", x, x.sin()), lambda c: c.mT @ c.sin()),
    "conv1d": (lambda x: F.conv1d(x.mT, KERNEL, BIAS, padding=1), lambda c: F.conv1d(F.pad(c.mT, (1, 1)), KERNEL, BIAS)),
}  # fmt: skip
CALLS = {**ALONG, **LAYERS}


@pytest.mark.parametrize("name", CALLS)
def test_values(name):
    ours, of_component = CALLS[name]
    lengths = (4, 1, 3) if name == "conv1d" else LENGTHS  # torch takes no empty signal
    x = batch(lengths)
    same(ours(x), [of_component(c) for c in x])


@pytest.mark.parametrize("name", CALLS)
def test_derivatives(name):
    ours, _ = CALLS[name]
    x = batch((2, 1, 0, 2))

    def of_values(values):
        found = ours(x.like(values))
        return found.values if isinstance(found, Ragged) else found

    # torch 2.10 has no derivative of aminmax
    with mg.override("aten::aminmax") if name == "aminmax" else nullcontext():
        check(of_values, [(x.values,)])


@pytest.mark.parametrize("name", ["argmax", "argmin", "any", "all", "count_nonzero"])
@pytest.mark.parametrize("keepdim", [False, True])
def test_along_the_ragged_dim(name, keepdim):
    x = batch((4, 1, 3) if name.startswith("arg") else LENGTHS)
    x = x if name.startswith("arg") else x > 0.5
    options = {} if name == "count_nonzero" else {"keepdim": keepdim}
    found = getattr(torch, name)(x, 1, **options)
    expected = torch.stack([getattr(torch, name)(c, 0, **options) for c in x])
    assert torch.equal(found, expected) and found.dtype == expected.dtype


@pytest.mark.parametrize("options", [
    {}, {"stride": 2}, {"padding": 2}, {"padding": "same"}, {"padding": "valid"}, {"dilation": 2, "padding": 1},
    {"stride": (3,), "padding": (1,)}, {"kernel_size": 4, "padding": "same"}, {"groups": 2},
])  # fmt: skip
@pytest.mark.parametrize("lengths", [(7, 5, 6), (9, 5, 9)])
def test_convolutions(options, lengths):
    """Each component by itself, with its own zeros around it."""
    x = batch(lengths)
    conv = nn.Conv1d(6, 2, **{"kernel_size": 3, **options}, dtype=torch.float64)
    same(conv(x.mT), [conv(c.mT[None])[0] for c in x])


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_reads_only_the_windows_of_its_outputs(stride):
    values, edges = (
        [torch.tensor(v, dtype=torch.float64) for v in ([1, 1, 1, math.inf], [1, 2, 3, 4, 5, 6])],
        [[1, math.inf]],
    )
    x = Ragged.from_components(
        [v[None] for v in (*values, torch.tensor(edges[0], dtype=torch.float64))], ragged_dims=[2]
    )
    ours, each = (torch.ones(1, 1, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    F.conv1d(x, ours, stride=stride).values.sum().backward()
    sum(F.conv1d(v[None], each, stride=stride).sum() for v in values).backward()
    close(ours.grad, each.grad)


def test_a_signal_shorter_than_the_kernel_becomes_empty():
    assert F.conv1d(batch((4, 1, 0)).mT, KERNEL).lengths.tolist() == [2, 0, 0]
    assert F.conv1d(batch((1, 0)).mT, KERNEL).values.shape == (2, 0)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_counts_the_entries(training):
    x = batch()
    ours, dense = (nn.BatchNorm1d(6, dtype=torch.float64).train(training) for _ in range(2))
    close(ours(x.mT).values.mT, dense(x.values))
    close(ours.running_var, dense.running_var)


def test_integers():
    x, edges = batch(), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    same(torch.bucketize(x, edges, right=True), [torch.bucketize(c, edges, right=True) for c in x])
    same(x.count_nonzero(-1), [c.count_nonzero(-1) for c in x])
    assert F.gumbel_softmax(x, hard=True).sum(-1).values.tolist() == [1.0] * 8


def test_dim_of_a_cross_product():
    x = Ragged.from_components([random(3, n, 3, seed=n) for n in (2, 4)], ragged_dims=[2])
    y = x.like(x.values.sin())
    same(torch.linalg.cross(x, y), [torch.linalg.cross(c, c.sin()) for c in x])
    same(torch.cross(x, y, dim=1), [torch.cross(c, c.sin(), dim=0) for c in x])
    with pytest.raises(TypeError, match="dim: cross of a Ragged takes a regular dim, and none is given"):
        torch.cross(x, y)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32])
def test_einsum_keeps_the_dtype(dtype):
    x = Ragged.from_components([torch.ones(n, 3, dtype=dtype) for n in (2, 1)])
    for result in ("b", "bd", "bn", ""):
        assert torch.einsum(f"bnd,bnd->{result}", x, x).dtype == dtype


@pytest.mark.parametrize("name", ["movedim", "gather", "einsum", "None between"])
def test_one_graph(name):
    torch.compiler.reset()
    f, x = CALLS[name][0], batch()
    same(torch.compile(f, backend="eager", fullgraph=True)(x), list(f(x)))


def test_padding_of_nothing():
    x = batch()
    same(F.pad(x, (1, 2, 0, 0, 0, 0)), [F.pad(c, (1, 2, 0, 0)) for c in x])


def test_bytes_stay_bytes():
    x = (batch() > 0.5).to(torch.uint8)
    for function in (torch.any, torch.all):
        expected = torch.stack([function(c, 0) for c in x])
        assert torch.equal(function(x, 1), expected) and function(x, 1).dtype == expected.dtype


def test_methods_have_the_names_of_torch():
    for name in ("conv1d", "pad", "vecdot", "gumbel_softmax", "softmin", "var_mean", "einsum", "embedding"):
        with pytest.raises(AttributeError):
            getattr(batch(), name)
    assert batch().prelu(BIAS[:1]).shape == batch().roll(1, -1).shape == (4, None, 6)


def test_a_model_of_these_trains():
    net = nn.Sequential(nn.Conv1d(6, 4, 3, padding=1), nn.BatchNorm1d(4), nn.PReLU(4), nn.Conv1d(4, 2, 1)).double()
    net(batch((4, 2, 3)).mT).mean(-1).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: x.cumprod(1), ValueError, "dim: cumprod takes a regular dim; dim 1 .* is ragged"),
        (lambda x: x.flip((0, 2)), ValueError, "dims: flip takes a regular dim; dim 0 .* is the batch"),
        (lambda x: x.any(0), ValueError, "dim: any takes a regular dim; dim 0 .* is the batch"),
        (lambda x: torch.roll(x, 1), TypeError, "dims: roll of a Ragged takes a regular dim, and none is given"),
        (lambda x: x.cumprod((1, 2)), TypeError, r"dim: cumprod of a Ragged takes one dim, got \(1, 2\)"),
        (lambda x: x.gather(-1, places(batch((1, 1, 1, 5)))), ValueError, "index: the (lengths|offsets) differ"),
        (lambda x: x.repeat(1, 2, 1), ValueError, r"sizes: expected 3, and 1 for .*, got \[1, 2, 1\]"),
        (lambda x: x.movedim(0, 1), ValueError, "dims: expected 0 and then every other dim"),
        (lambda x: F.pad(x, (0, 0, 1, 0)), ValueError, "pad: pad takes a regular dim; dim 1 .* is ragged"),
        (lambda x: nn.BatchNorm1d(6)(x), ValueError, "dim: batch_norm takes a regular dim; dim 1 .* is ragged"),
        (lambda x: F.prelu(x, WEIGHT[:, 0]), ValueError, "dim: prelu takes a regular dim; dim 1 .* is ragged"),
        (lambda x: F.conv1d(x, KERNEL), ValueError, r"input: expected shape \(B, C, \*\), got Ragged\(\(4, \*, 6\)"),
        (lambda x: F.conv1d(x.mT, KERNEL, padding="same", stride=2), RuntimeError, "padding='same' is not supported"),
        (lambda x: F.conv1d(x.mT, KERNEL, padding="wide"), RuntimeError, "Invalid padding string: 'wide'"),
        (lambda x: F.conv1d(x.mT, KERNEL, stride=0), RuntimeError, "non-positive stride"),
        (lambda x: F.conv1d(x.mT, WEIGHT), RuntimeError, "weight"),
        (lambda x: F.conv1d(x.mT, KERNEL, BIAS[:1]), RuntimeError, "bias"),
        (lambda x: torch.gather(WEIGHT, -1, places(x)), TypeError, "gather: expected a Ragged as the first argument, got"),
        (lambda x: x.gather(-1, torch.zeros(8, 2).long()), TypeError, "index: expected a Ragged, got a Tensor of shape"),
        (lambda x: x.diff(prepend=torch.zeros(8, 1)), TypeError, "prepend: expected a Ragged, got a Tensor of shape"),
        (lambda x: x.all(1, axis=3), TypeError, "all: got an unexpected keyword argument 'axis'"),
        (lambda x: x.cumprod(2, dim=1), TypeError, "cumprod: got two values of dim"),
        (lambda x: x.to(torch.complex128).argmax(1), TypeError, "x: expected real values, which have an order, got"),
        (lambda x: x[:, :, torch.tensor([0, 1])], TypeError, "index: expected numbers, slices and an ellipsis, got a Tensor"),
        (lambda x: torch.einsum("bnn->bn", x), ValueError, "term 0 of 'bnn->bn' does not fit"),
        (lambda x: F.prelu(WEIGHT, x), TypeError, "prelu: expected a Ragged as the first argument, got a Tensor"),
        (lambda x: F.conv1d(WEIGHT, x), TypeError, "conv1d: expected a Ragged as the first argument, got a Tensor"),
        (lambda x: torch.bucketize(WEIGHT, x), TypeError, "bucketize: expected a Ragged as the first argument, got"),
        (lambda x: F.bilinear(x, WEIGHT, SQUARE), TypeError, "input2: expected a Ragged, got a Tensor of shape"),
        (lambda x: torch.einsum("bnd,dk", x, WEIGHT), ValueError, "equation: expected terms of 2 operands, '->'"),
        (lambda x: torch.einsum("bn,dk->bnk", x, WEIGHT), ValueError, r"equation: operands have \[3, 2\] dims"),
        (lambda x: torch.einsum("bnd,nk->bdk", x, WEIGHT), ValueError, "'n' the ragged dim, once .*; term 1 of .* does not fit"),
        (lambda x: torch.einsum("bnd,dk->nbk", x, WEIGHT), ValueError, "has to begin with 'b', the batch"),
        (lambda x: torch.einsum("bnd,dk->nk", x, WEIGHT), ValueError, "has to begin with 'b', the batch"),
    ],
)  # fmt: skip
def test_what_does_not_fit(call, error, message):
    with pytest.raises(error, match=message):
        call(batch())
