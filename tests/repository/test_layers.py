"""How many frames of this package are between a call and its kernel, where Python serves it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers.rules import local

import torch_manualgrad as mg
from torch_manualgrad.core.override import compiled_calls

PACKAGE = str(Path(mg.__file__).parent)
AT_MOST = 4


def stacks(function):
    """For each frame of the package that is entered, the frames of the package that it is inside of, and itself."""
    found = []

    def entered(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            stack, inner = [], frame
            while inner is not None:
                code = inner.f_code
                if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
                    stack.append(
                        f"{Path(code.co_filename).stem}.{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}"
                    )
                inner = inner.f_back
            found.append(stack[::-1])

    before = sys.getprofile()
    sys.setprofile(entered)
    try:
        result = function()
    finally:
        sys.setprofile(before)
    return found, result


def deepest(found):
    stack = max(found, key=len)
    print(f"\n{len(stack)} layers: {' > '.join(stack)}")
    return len(stack)


def test_from_a_call_to_its_kernel_are_few_layers():
    A = torch.randn(3, 3, dtype=torch.float64).requires_grad_()
    with mg.override("linalg_lu"), compiled_calls.in_python():
        torch.linalg.lu(A)  # what is made at the first call is made
        found, (_, L, _) = stacks(lambda: torch.linalg.lu(A))
        assert deepest(found) <= AT_MOST
        loss = L.sum()
        found, _ = stacks(lambda: torch.autograd.grad(loss, A))
        assert deepest(found) <= AT_MOST + 1  # and what asks whether a kernel takes the call


def test_a_plain_call_enters_no_python():
    if not compiled_calls.loaded():
        return
    x = torch.randn(5).requires_grad_()
    with mg.override("linalg_vector_norm"):
        torch.autograd.grad(torch.linalg.vector_norm(x), x)
        found, _ = stacks(lambda: torch.autograd.grad(torch.linalg.vector_norm(x), x))
    assert not found


def test_an_untracked_write_enters_no_python_where_the_rule_does():
    def vjp(grad, self_storage_offset):  # a fact that C++ does not save
        return 2 * grad

    with mg.override(local("aten::sin", vjp={"self": vjp})):
        found, _ = stacks(lambda: torch.ones(3).sin_())
        assert not found or not compiled_calls.loaded()
        x = torch.ones(3, requires_grad=True)
        (g,) = torch.autograd.grad((x * 1).sin_().sum(), x)
    assert torch.equal(g, torch.full_like(g, 2))


@pytest.mark.parametrize("write", [lambda x, y: x.zero_(), lambda x, y: x.add_(y), lambda x, y: x.mul_(2).div_(y)])
def test_a_write_enters_no_python(write):
    if not compiled_calls.loaded():
        return
    parameter = torch.randn(5, requires_grad=True)
    with mg.override("*"):
        write(torch.ones(5), torch.ones(5))
        found, _ = stacks(lambda: write(torch.ones(5), torch.ones(5)))
        assert not found
        with torch.no_grad():
            found, _ = stacks(lambda: write(parameter, torch.ones(5)))
        assert not found
        found, _ = stacks(lambda: write(parameter * 1, torch.ones(5)))
        assert not found
