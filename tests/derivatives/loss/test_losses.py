"""Losses beside the same made of elementwise operators, in every nesting, and at their special points."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers.tensors import random
from helpers.transforms import differentiated
from torch.func import grad, hessian

import torch_manualgrad as mg

aten = torch.ops.aten
F64 = torch.float64
NESTINGS = ["".join(n) for k in (1, 2, 3) for n in itertools.product("fr", repeat=k)]
X, Y = random(3, 4), random(3, 4, seed=1)
T = torch.tensor([1, 3, 0])
W = random(4, seed=2).abs()
LABELS = torch.tensor([[1, 3, -1, 0], [0, -1, -1, -1], [2, 1, -1, -1]])


def hinges(x, p):
    z = 1 - x.gather(1, T[:, None]) + x
    others = torch.arange(4) != T[:, None]
    return (torch.where(others & (z > 0), z**p, 0) * W[T][:, None]).sum(1) / 4


def pairs(x):
    total = []
    for row, labels in zip(x, ([1, 3], [0], [2, 1])):
        rest = [j for j in range(4) if j not in labels]
        total.append(sum((1 - row[k] + row[j]).clamp(min=0) for k in labels for j in rest) / 4)
    return torch.stack(total)


def entropy(p, t):
    return -t * p.log() - (1 - t) * (1 - p).log()


def huber(d):
    return torch.where(d.abs() < 0.7, d * d / 2, 0.7 * (d.abs() - 0.35))


def picked(x):
    return -(x.gather(1, T[:, None])[:, 0] * W[T]).sum() / W[T].sum()


CASES = {
    "mse": (lambda x, y: F.mse_loss(x, y), lambda x, y: (x - y).square().mean()),
    "huber": (lambda x, y: F.huber_loss(x, y, delta=0.7), lambda x, y: huber(x - y).mean()),
    "smooth l1": (lambda x, y: F.smooth_l1_loss(x, y, reduction="sum", beta=0.7), lambda x, y: (huber(x - y) / 0.7).sum()),
    "soft margin": (lambda x, y: F.soft_margin_loss(x, Y.sign()), lambda x, y: -F.logsigmoid(Y.sign() * x).mean()),
    "multi margin": (lambda x, y: F.multi_margin_loss(x, T, weight=W), lambda x, y: hinges(x, 1).mean()),
    "squared multi margin": (
        lambda x, y: F.multi_margin_loss(x, T, 2, weight=W, reduction="sum"), lambda x, y: hinges(x, 2).sum()
    ),
    "multilabel margin": (lambda x, y: F.multilabel_margin_loss(x, LABELS), lambda x, y: pairs(x).mean()),
    "binary cross entropy": (
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), W), lambda x, y: (entropy(x.sigmoid(), y.sigmoid()) * W).mean()
    ),
    "with logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), W),
        lambda x, y: (entropy(x.sigmoid(), y.sigmoid()) * W).mean(),
    ),
    "negative log likelihood": (lambda x, y: F.nll_loss(x * y, T, W), lambda x, y: picked(x * y)),
    "cross entropy": (lambda x, y: F.cross_entropy(x * y, T, W), lambda x, y: picked((x * y).log_softmax(1))),
}  # fmt: skip


def along_curve(loss, nesting):
    """By forward and reverse mode, the first letter outermost, of a function along a curve."""
    a, b, c = (0.3 * random(3, 4, seed=k) for k in (3, 4, 5))
    f = lambda t: loss(X + t * a + t * t * c, Y + t * b).sin()  # noqa: E731
    return differentiated(f, nesting, 0.01)


@pytest.mark.parametrize("name", CASES)
def test_every_nesting_to_third_order(name):
    f, reference = CASES[name]
    expected = {n: along_curve(reference, "r" * n) for n in (1, 2, 3)}
    with mg.override():
        for nesting in NESTINGS:
            torch.testing.assert_close(
                along_curve(f, nesting),
                expected[len(nesting)],
                rtol=1e-8,
                atol=1e-9,
                msg=lambda m, n=nesting: f"{n}: {m}",
            )


# Of scores and of their weights, which are broadcast, or labels.
WEIGHTED = {
    "binary cross entropy": lambda x, w, p, how: F.binary_cross_entropy(x.sigmoid(), Y.sigmoid(), w, reduction=how),
    "with logits": lambda x, w, p, how: F.binary_cross_entropy_with_logits(x, Y.sigmoid(), w, None, None, how, p),
    "cross entropy": lambda x, w, p, how: F.cross_entropy(x, T, p, ignore_index=2, reduction=how),
    "of images": lambda x, w, p, how: F.nll_loss(x.mT[None, ..., None], T[None, :, None], p, reduction=how),
    "of one": lambda x, w, p, how: F.nll_loss(x[0], T[0], p, reduction=how),
    "multi margin": lambda x, w, p, how: F.multi_margin_loss(x, T, 1, weight=p, reduction=how),
    "squares": lambda x, w, p, how: F.multi_margin_loss(x, T, 2, weight=p, reduction=how),
    "soft margin": lambda x, w, p, how: F.soft_margin_loss(x, p - w, reduction=how),
    "fewer labels": lambda x, w, p, how: F.soft_margin_loss(x, p, reduction=how),
}


@pytest.mark.parametrize("how", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_are_differentiable(name, how):
    """PyTorch has no gradient for them."""
    weights = random(3, 1, seed=6).exp(), random(4, seed=7).exp()
    with mg.override():
        mg.testing.check(lambda x, w, p: WEIGHTED[name](x, w, p, how), [(X, *weights)], checks=())


def test_weights_beside_masked_scores():
    """A score of $-inf$ has no hinge, and an infinite one with its own sign no slope."""
    x, w = torch.tensor([[1.0, -math.inf, 0.5], [2.0, 0.0, -math.inf]], dtype=F64), torch.ones(3, dtype=F64)
    finite, target = x.clamp(min=-1e3), torch.tensor([0, 1])
    scores, labels = torch.tensor([math.inf, -math.inf], dtype=F64), torch.tensor([1.0, -1.0], dtype=F64)
    with mg.override():
        for p in (1, 2):
            loss = lambda x, w: F.multi_margin_loss(x, target, p, weight=w)  # noqa: E731, B023
            torch.testing.assert_close(grad(loss, 1)(x, w), grad(loss, 1)(finite, w))
            found, expected = (torch.func.jvp(loss, (s, w), (finite.cos(), w))[1] for s in (x, finite))
            torch.testing.assert_close(found, expected)
        assert grad(lambda y: F.soft_margin_loss(scores, y))(labels).eq(0).all()


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("row", [(1, math.inf, 0), (-math.inf, 1, 2), (math.inf, math.inf, 0), (0, math.nan, 1)])
def test_weights_scale_the_loss_of_their_class(row, p):
    """The loss is linear in them, also where a score is infinite or ignored."""
    x, w = torch.tensor([row], dtype=F64), torch.ones(3, dtype=F64)
    for label in range(3):
        loss = lambda w: F.multi_margin_loss(x, torch.tensor([label]), p, weight=w)  # noqa: E731, B023
        with mg.override():
            torch.testing.assert_close(grad(loss)(w)[label], loss(w))


def test_a_loss_of_one_row_keeps_its_dim():
    x, w = random(5), torch.ones(5, dtype=F64)
    with mg.override():
        for target in (torch.tensor(2), torch.tensor([2])):
            f = lambda x: F.multi_margin_loss(x, target, reduction="none", weight=w)  # noqa: E731, B023
            value, tangent = torch.func.jvp(f, (x,), (x,))
            assert value.shape == tangent.shape


def test_weights_of_half_precision_have_sums_in_single():
    """A sum of ones in bfloat16 ends at 256."""
    x, target = -torch.ones(1000, 2, dtype=torch.bfloat16), torch.zeros(1000).long()
    weights = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    with mg.override():
        (gradient,) = torch.autograd.grad(F.nll_loss(x, target, weights, reduction="sum"), weights)
    assert gradient.tolist() == [1000, 0]


def test_scores_of_ignored_targets_may_be_infinite():
    x, target = X.clone(), torch.tensor([2, 1, 2])
    x[0] = x[2] = -torch.inf
    weights = random(4, seed=7).exp().requires_grad_()
    with mg.override():
        loss = F.nll_loss(x, target, weights, ignore_index=2)
        (gradient,) = torch.autograd.grad(loss, weights)
        tangent = torch.func.jvp(lambda w: F.nll_loss(x, target, w, ignore_index=2), (weights,), (weights,))[1]
    torch.testing.assert_close(
        (gradient, tangent), (torch.zeros_like(weights), torch.zeros_like(loss))
    )  # the mean of one loss


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has none")
def test_linear_cross_entropy_by_chunks(reduction):
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    x, weight, bias = random(5, 3), random(4, 3, seed=1), random(4, seed=2)
    target, classes = torch.tensor([0, 3, 1, 1, 2]), random(4, seed=3).abs()
    scale = random(5, seed=4) if reduction == "none" else 1.0

    def chunked(x, weight, bias):
        options = LinearCrossEntropyOptions(batch_chunk_size=2, allow_retain_graph=True)
        given = {"linear_bias": bias, "weight": classes, "reduction": reduction, "ignore_index": 2}
        return (scale * F.linear_cross_entropy(x, weight, target, **given, options=options)).sum().sin()

    def whole(x, weight, bias):
        z = F.linear(x, weight, bias)
        return (scale * F.cross_entropy(z, target, classes, reduction=reduction, ignore_index=2)).sum().sin()

    given, all_three = (x, weight, bias), (0, 1, 2)
    with mg.override():
        found = grad(chunked, all_three)(*given), hessian(chunked, all_three)(*given)
        leaves = [g.clone().requires_grad_() for g in given]
        plain = torch.autograd.grad(chunked(*leaves), leaves)
    expected = grad(whole, all_three)(*given), hessian(whole, all_three)(*given)
    torch.testing.assert_close((*found, plain), (*expected, expected[0]))


# -- special points ---------------------------------------------------------------------------------------------------


def at(f, x, order):
    for _ in range(order):
        f = grad(f)
    return f(torch.tensor(x, dtype=F64)).item()


def test_soft_margin_where_its_exponential_overflows():
    """PyTorch's gradient is nan."""
    f = lambda x: aten.soft_margin_loss(x, torch.ones((), dtype=F64))  # noqa: E731
    assert math.isnan(at(f, -1000.0, 1))
    with mg.override():
        assert [at(f, x, 1) for x in (-1000.0, 1000.0, -math.inf)] == [-1.0, 0.0, -1.0]
        assert at(f, -1000.0, 2) == 0.0


def test_binary_cross_entropy_at_the_ends():
    """The first derivative for the probability is PyTorch's; that for the target is finite, as the loss is."""
    one = torch.ones((), dtype=F64)
    with mg.override():
        for x, slope in ((0.0, 100.0), (1.0, -100.0)):
            p = torch.tensor(x, dtype=F64)
            assert grad(lambda t: aten.binary_cross_entropy(p, t))(one / 2).item() == slope  # noqa: B023
            for t in (0.0, 1.0):
                f = lambda x: aten.binary_cross_entropy(x, t * one)  # noqa: E731, B023
                assert math.isfinite(at(f, x, 2))
        assert at(lambda x: aten.binary_cross_entropy(x, 0 * one), 0.0, 2) == 1.0


def test_kinks():
    """Zero second derivatives at the end of the parabola, as PyTorch has them, and slope zero where a hinge begins."""
    with mg.override("*"):
        for f in (lambda x: F.huber_loss(x, 0 * x, delta=0.5), lambda x: F.smooth_l1_loss(x, 0 * x, beta=0.5)):
            assert [at(f, x, 2) for x in (0.5, -0.5)] == [0.0, 0.0]
        tie = torch.tensor([[1.0, 0.0]], dtype=F64)
        for p in (1, 2):
            f = lambda x: F.multi_margin_loss(x, torch.tensor([0]), p)  # noqa: E731, B023
            assert not grad(f)(tie).any() and not hessian(f)(tie).any()


def test_losses_of_broadcast_inputs():
    """PyTorch divides by the number of entries of one of the two, where they are given to the operator so."""
    x, y = random(4), random(3, 1, seed=1)
    with mg.override("*"):
        found = grad(lambda x, y: aten.mse_loss(x, y), (0, 1))(x, y)
    torch.testing.assert_close(found, grad(lambda x, y: (x - y).square().mean(), (0, 1))(x, y))


def test_empty_batches():
    x = torch.zeros(0, 4, dtype=F64)
    with mg.override("*"):
        for f in (F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.soft_margin_loss, F.binary_cross_entropy):
            assert grad(lambda x, f=f: f(x, x.detach()))(x).shape == (0, 4)
