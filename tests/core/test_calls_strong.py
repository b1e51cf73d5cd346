"""Strong zeros in plain calls: PyTorch's gradients where they are finite, else the rule's."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref

import pytest
import torch
from helpers.calls import is_pytorchs, made, needs_library, vector
from torch.nn import functional as F

import torch_manualgrad as mg
from torch_manualgrad.core.override import compiled_calls
from torch_manualgrad.core.override.kernels import without_overrides
from torch_manualgrad.core.schema import is_differentiable, tensors_in

pytestmark = needs_library
PYTORCH, RULE = (1, 0, 0), (1, 0, 1)  # whose gradient it is, of one call


@pytest.fixture(autouse=True)
def zeros_are_strong():
    with mg.override(strong_zero=True):
        yield


def gradients(f, inputs, cotangent=None):
    y = f(*inputs)
    cotangent = torch.ones_like(y) if cotangent is None else cotangent
    return torch.autograd.grad(y, [x for x in inputs if x.requires_grad], cotangent)


def matrices(*grad):
    return [vector(i, 9).detach().view(3, 3).requires_grad_(yes) for i, yes in enumerate(grad)]


@pytest.mark.parametrize("grad", [(True, True, True), (False, True, True), (True, False, True), (False, True, False)])
def test_finite_gradients_are_pytorchs_without_python(grad):
    inputs = matrices(*grad)
    found, count = made(lambda: gradients(torch.addmm, inputs))
    assert count == PYTORCH
    with mg.override("aten::addmm"):  # by the rule, without strong zeros
        expected, count = made(lambda: gradients(torch.addmm, inputs))
    assert count == RULE
    torch.testing.assert_close(found, expected)


def test_one_tensor_in_two_places():
    (x,) = matrices(True)
    (found,), count = made(lambda: gradients(lambda x: x @ x, [x]))
    ones = torch.ones(3, 3, dtype=x.dtype)
    assert count == PYTORCH and torch.equal(found, x.mT @ ones + ones @ x.mT)


def test_each_cotangent_is_that_of_its_output():
    x = vector(n=12).detach().view(4, 3).requires_grad_()

    def call():
        low, high = torch.aminmax(x, dim=1)
        return torch.autograd.grad(2 * low.sum() + 3 * high.square().sum(), x)

    (found,), count = made(call)
    with compiled_calls.in_python():
        (expected,) = call()
    # 2.10 has no derivative of it, so the gradient is the rule's
    assert count[2] == ("missing" in mg.rules["aten::aminmax"].improves)
    torch.testing.assert_close(found, expected)


def test_a_part_of_the_gradients():
    a, b = matrices(True, True)
    y = a @ b
    (found,), count = made(lambda: torch.autograd.grad(y, b, torch.ones_like(y)))
    assert count == (0, 0, 0) and torch.equal(found, a.mT @ torch.ones_like(y))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("size", [1, 7, 16, 77, 40_000])
def test_one_number_that_is_not_finite_is_found(size, dtype):
    for bad in (float("inf"), float("nan")):
        for at in {0, size - 1}:
            x = torch.ones(size).to(dtype)
            x[at] = bad
            cotangent = torch.full((size,), 2.0).to(dtype)
            cotangent[at] = 0
            x.requires_grad_()
            with compiled_calls.recording_after(-1):
                (found,), count = made(lambda x=x, g=cotangent: gradients(torch.exp, [x], g))
            assert count == RULE and found[at] == 0 and found.isfinite().all(), (bad, at)


def test_matrices_that_are_not_contiguous():
    a, b = matrices(True, True)
    with torch.no_grad():
        a[0, 0] = float("inf")
    row = torch.tensor([0.0, 1.0, 1.0], dtype=a.dtype)
    cotangent = row.expand(3, 3).mT  # the first row of the product has no part
    found, count = made(lambda: gradients(torch.mm, [a, b.mT], cotangent))
    assert count[2] == 1 and all(g.isfinite().all() for g in found)
    clean = a.detach().clone()
    clean[0, 0] = 1.0
    torch.testing.assert_close(found[1], clean.mT @ cotangent)


def test_a_sum_out_of_range_is_not_an_error():
    x = torch.full((4,), 1e38, requires_grad=True)
    (found,), count = made(lambda: gradients(torch.square, [x]))
    assert count == RULE and torch.equal(found, 2 * x)


def test_second_derivatives_are_those_of_the_rule():
    x, g = vector(), torch.zeros(5, dtype=torch.float64, requires_grad=True)
    (first,), count = made(lambda: torch.autograd.grad(torch.exp(x), x, g, create_graph=True))
    assert count[2] == 1
    assert torch.equal(torch.autograd.grad(first.sum(), g)[0], x.exp())
    assert torch.autograd.gradgradcheck(torch.mm, matrices(True, True))


def test_calls_that_are_left_to_pytorch_by_their_arguments():
    x = vector(n=24).detach().view(2, 3, 4)
    norm = torch.nn.BatchNorm1d(3).double()
    _, count = made(lambda: norm(x).sum().backward())
    assert count == PYTORCH and norm.weight.grad is not None
    without = torch.nn.BatchNorm1d(3, affine=False, track_running_stats=False)  # tensors that are not defined
    _, count = made(lambda: without(x.clone().requires_grad_()).sum().backward())
    assert count == PYTORCH
    _, count = made(lambda: F.conv1d(x, torch.ones(2, 3, 2, dtype=x.dtype, requires_grad=True)).sum().backward())
    assert count == PYTORCH
    with mg.override():  # without strong zeros it is asked as well
        y = without(x.clone().requires_grad_())
    assert is_pytorchs(y.grad_fn)


def test_calls_that_pytorch_rejects_reach_the_rule():
    g, x, buffer = matrices(True, True, True)  # of the last PyTorch has no derivative
    y, count = made(lambda: torch.ops.aten.log_sigmoid_backward(g, x, buffer))
    assert count == PYTORCH
    assert made(lambda: y.sum().backward())[1] == (0, 0, 1)
    x, bias = vector(n=8).detach().view(2, 4).requires_grad_(), vector(2, 4)  # and here an error in the backward
    y = torch.ops.aten.native_group_norm(x, None, bias, 2, 4, 1, 2, 0.1)[0]
    assert torch.autograd.grad(y.sum(), bias)[0].tolist() == [2.0] * 4


def test_errors_of_a_call_are_its_own():
    a, b = matrices(True, True)
    for f, error in (
        (lambda: torch.mm(a, b[:2]), "shapes cannot be multiplied"),
        (lambda: torch.mm(a, b[0]), "matrix"),
    ):
        with pytest.raises(RuntimeError, match=error):
            f()


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_the_rule_keeps_no_tensor_that_pytorch_does_not():
    """So that both together hold on to no more memory than PyTorch alone."""
    tried = 0
    for rule in mg.rules.values():
        if not rule.has_strong_zero or rule.improves and rule.defer_to_stock is None:
            continue
        for sample in itertools.islice(rule.samples(torch.float64, "cpu"), 1):
            args = [x.clone().requires_grad_() if differentiable(x) else x for x in sample.args]
            with without_overrides():
                try:
                    stock = storages(lambda: rule.aten(*args, **sample.kwargs))  # noqa: B023
                except RuntimeError:  # PyTorch has no derivative in one of these
                    continue
            assert storages(lambda: rule.aten(*args, **sample.kwargs)) <= stock, rule.name  # noqa: B023
            tried += 1
    assert tried > 100


def differentiable(x):
    return isinstance(x, torch.Tensor) and is_differentiable(x)


def storages(call):
    """Memory that the backward of ``call()`` holds on to: inputs by their addresses, and how much else."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        results = call()
    made = {x.untyped_storage().data_ptr(): i for i, x in enumerate(tensors_in([results]))}
    found = [x.untyped_storage().data_ptr() for x in kept if x.numel()]
    return {made.get(address, address) for address in found}


def test_hooks_are_given_each_tensor_once():
    def kept():
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
            gradients(torch.addmm, matrices(True, True, True))
        return seen

    with compiled_calls.in_python():
        expected = kept()
    assert kept() == expected


@pytest.mark.parametrize("bad", [False, True])
def test_a_backward_frees_saved_tensors(bad):
    kept = [vector() * (float("inf") if bad else 1.0)]
    y, count = made(lambda: torch.sin(kept[0]))
    left = weakref.ref(kept.pop())
    gc.collect()
    assert left() is not None and count == PYTORCH
    y.backward(torch.zeros_like(y))
    gc.collect()
    assert left() is None
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(torch.zeros_like(y))


def test_a_change_in_place_is_seen():
    x = vector() * 1
    y = torch.sin(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_graph_deeper_than_the_stack():
    x = vector()
    y = x
    for _ in range(50_000):
        y = torch.tanh(y)
    del y
    gc.collect()
    assert torch.autograd.grad(torch.tanh(x).sum(), x)[0].isfinite().all()


def test_one_graph_on_several_threads():
    x = vector()
    y = torch.exp(x)
    found = []

    def work(scale):
        g = torch.full_like(x, scale)
        found.append(torch.equal(torch.autograd.grad(y, x, g, retain_graph=True)[0], y.detach() * g))

    threads = [threading.Thread(target=work, args=(scale,)) for scale in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8
