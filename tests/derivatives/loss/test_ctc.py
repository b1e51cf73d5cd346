"""ctc_loss beside the sum over all alignments, written out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers.tensors import random
from helpers.transforms import differentiated
from torch.func import grad, hessian, jacrev

import torch_manualgrad as mg

F64 = torch.float64
NESTINGS = ["".join(n) for n in itertools.product("fr", repeat=3)]


def summed(lp, labels, steps, blank=0):
    """-log of the sum over all alignments of exp of the sum of log-probabilities; lp is (T, C)."""
    terms = []
    for path in itertools.product(range(lp.shape[1]), repeat=steps):
        runs = [symbol for symbol, _ in itertools.groupby(path)]
        if [s for s in runs if s != blank] == list(labels):
            terms.append(sum((lp[t, c] for t, c in enumerate(path)), lp.new_zeros(())))
    return -torch.logsumexp(torch.stack(terms), 0)


# targets in both layouts, input lengths, target lengths; labels that repeat, none, and inputs that end early
PADDED = torch.tensor([[1, 2], [2, 0], [2, 2], [0, 0]])
TIMES, SIZES = [4, 3, 4, 2], [2, 1, 2, 0]
JOINED = torch.tensor([1, 2, 2, 2, 2])
LP = random(4, 4, 3)


def reference(lp):
    pairs = zip(PADDED.tolist(), TIMES, SIZES)
    return sum((k + 1) * summed(lp[:, k], labels[:n], t) for k, (labels, t, n) in enumerate(pairs))


WEIGHTS = torch.arange(1.0, 5.0, dtype=F64)
FORMS = {
    "padded": lambda lp: F.ctc_loss(lp, PADDED, TIMES, SIZES, reduction="none") @ WEIGHTS,
    "joined": lambda lp: F.ctc_loss(lp, JOINED, TIMES, SIZES, reduction="none") @ WEIGHTS,
    "tensors": lambda lp: F.ctc_loss(lp, PADDED, torch.tensor(TIMES), torch.tensor(SIZES), reduction="none") @ WEIGHTS,
}


def along_curve(loss, nesting, x, v):
    """By forward and reverse mode, the first letter outermost, of a function along a line."""
    f = lambda t: loss(x + t * v + t * t * v.flip(0) / 2)  # noqa: E731
    return differentiated(f, nesting, 0.1)


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_is_the_sum_over_alignments(form):
    torch.testing.assert_close(FORMS[form](LP), reference(LP))


@pytest.mark.parametrize("form", FORMS)
def test_gradient_and_hessian_of_log_probabilities_that_are_not_normalised(form):
    f = FORMS[form]
    with mg.override():
        found = grad(f)(LP), hessian(f)(LP), jacrev(jacrev(f))(LP)
    second = jacrev(jacrev(reference))(LP)
    torch.testing.assert_close(found, (grad(reference)(LP), second, second))
    assert not torch.allclose(grad(f)(LP), found[0], rtol=0.1)  # PyTorch's


@pytest.mark.parametrize("nesting", NESTINGS)
def test_third_order(nesting):
    v = random(4, 4, 3, seed=1)
    expected = along_curve(reference, "rrr", LP, v)
    with mg.override():
        torch.testing.assert_close(along_curve(FORMS["padded"], nesting, LP, v), expected)


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_behind_log_softmax_it_is_pytorchs(dtype):
    x = (5 * random(30, 4, 6)).to(dtype).requires_grad_()
    targets = torch.arange(24).reshape(4, 6) % 5 + 1
    seen = []
    for scope in (mg.override("linalg.det"), mg.override()):
        with scope:
            loss = F.ctc_loss(x.log_softmax(2), targets, [30, 20, 25, 30], [6, 3, 6, 1])
            seen.append(torch.autograd.grad(loss, x)[0])
    torch.testing.assert_close(*seen, rtol=0, atol=1e-4 if dtype is torch.float32 else 1e-12)


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_without_an_alignment_the_derivatives_are_zero(zero_infinity):
    targets = torch.tensor([[1, 1], [1, 2]])
    x = random(2, 2, 3)

    def f(x):
        loss = F.ctc_loss(x, targets, [2, 2], [2, 2], reduction="none", zero_infinity=zero_infinity)
        return loss[1] + torch.where(loss[0].isinf(), 0, loss[0])

    with mg.override():
        G, H = grad(f)(x), hessian(f)(x)
    assert not G[:, 0].any() and not H[:, 0].any() and H.isfinite().all()
    torch.testing.assert_close(G[:, 1], grad(lambda x: summed(x, [1, 2], 2))(x[:, 1]))


def test_a_symbol_of_probability_zero():
    """PyTorch's gradient is nan there."""
    x = random(3, 1, 3).index_fill(2, torch.tensor([2]), -math.inf)
    f = lambda x: F.ctc_loss(x, torch.tensor([[1]]), [3], [1], reduction="sum")  # noqa: E731
    with mg.override():
        G, H = grad(f)(x), hessian(f)(x)
    assert not G[..., 2].any() and H.isfinite().all()
    torch.testing.assert_close(G[:, 0, :2], grad(lambda x: summed(x, [1], 3))(x[:, 0, :2]))
    assert grad(f)(x).isnan().any()


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_far_from_normalised(shift):
    with mg.override():
        found = grad(FORMS["padded"])(LP + shift)
    torch.testing.assert_close(found, grad(reference)(LP), rtol=1e-6, atol=1e-9)
