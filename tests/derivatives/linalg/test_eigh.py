"""eigh in plain calls: the compiled backward, and what it leaves to the vjp in Python."""

from __future__ import annotations

import warnings

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.core import libraries
from torch_manualgrad.core.override import compiled_calls
from torch_manualgrad.derivatives.samples.drawing import random
from torch_manualgrad.linalg import GaugeWarning

CPU = libraries.load()[0]


def gradient(A, keep):
    """That of a loss of the eigenvalues, of the eigenvectors, or of both; and how many backwards were compiled."""
    A = A.detach().requires_grad_()
    outputs = [o for o, k in zip(torch.linalg.eigh(A), keep) if k]
    before = compiled_calls.counts()
    (grad,) = torch.autograd.grad(outputs, A, [random(*o.shape, dtype=o.dtype, seed=1) for o in outputs])
    after = compiled_calls.counts()
    return grad, (after.compiled - before.compiled, after.python - before.python)


@pytest.mark.skipif(not (compiled_calls.loaded() and CPU.loaded), reason="no library of calls, or no kernels")
@pytest.mark.parametrize("keep", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("shape", [(3, 3), (5, 4, 4), (2, 16, 16), (0, 3, 3), (2, 0, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_plain_backwards_need_no_python(dtype, shape, keep):
    A = random(*shape, dtype=dtype)
    with mg.override("aten::_linalg_eigh"):
        found, (compiled, _) = gradient(A, keep)
        with compiled_calls.in_python():
            expected, (never, _) = gradient(A, keep)
    assert (compiled, never) == (1, 0)
    assert torch.equal(found, expected) and found.stride() == expected.stride()


@pytest.mark.skipif(not (compiled_calls.loaded() and CPU.loaded), reason="no library of calls, or no kernels")
@pytest.mark.parametrize(
    "A", [torch.eye(3, dtype=torch.float64), random(3, 3, dtype=torch.complex128)], ids=["a group", "a phase"]
)
def test_reported_values_are_computed_once(A):
    with mg.override("aten::_linalg_eigh"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GaugeWarning)
        _, counted = gradient(A, (True, True))
    assert counted == (1, 0)
    assert [w.category for w in caught] == [GaugeWarning]
