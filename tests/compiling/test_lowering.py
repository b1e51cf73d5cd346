"""Rewrites of a graph before inductor compiles it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import torch_manualgrad as mg
from torch_manualgrad.core.rule import reached

F = torch.nn.functional


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_all_layouts(dtype: torch.dtype) -> None:
    """Narrow products are rewritten. Each is an output and has other readers."""
    pairs = []
    for (m, k, n), first, second in itertools.product(
        [(64, 32, 2), (70, 33, 8), (64, 1, 3), (64, 0, 3)],
        [False, True],
        [False, True],
    ):
        a, b = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
        pairs += [a.t().contiguous().t() if first else a, b.t().contiguous().t() if second else b]

    def products(pairs: list[Tensor]) -> list[Tensor]:
        found = [torch.mm(a, b) for a, b in zip(pairs[::2], pairs[1::2])]
        return found + [torch.exp(-(x**2)).sum(0) for x in found[:2]]

    found, expected = mg.compile(products, fullgraph=True)(pairs), products(pairs)
    assert [x.stride() for x in found] == [x.stride() for x in expected]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_silu_and_its_derivative(dtype: torch.dtype) -> None:
    """As accurate as uncompiled, in the tails too. Both share an exponential."""
    tail = [1e3, torch.inf, torch.nan, *range(720, 700, -1), 104, *[80 + i / 8 for i in range(80)], 60, 20]
    x = torch.tensor([0.0, *tail, *[-t for t in tail], *[i / 8 for i in range(-80, 80)]], dtype=dtype)

    def both(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        value = F.silu(x)
        (slope,) = torch.autograd.grad(value.sum(), x, retain_graph=True)
        return torch.stack([value, slope])

    compiled = mg.compile(both, fullgraph=reached("2.13"))  # before, Dynamo ends graphs at requires_grad_
    found, expected = compiled(x.requires_grad_()).double(), both(x).double()
    truth, s = both(x.double()), x.detach().double().sigmoid()
    terms = torch.stack([truth[0].abs(), s + (x.double() * s * (1 - s)).abs()])  # of a sum whose zero is at -1.28
    scale = torch.finfo(dtype).eps * (terms + torch.finfo(dtype).tiny)
    assert (found.isfinite() == expected.isfinite()).all()
    finite = expected.isfinite()
    assert ((found - truth).abs() <= 2 * scale + 2 * (expected - truth).abs())[finite].all()


def test_equal_results_share_no_memory() -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.sigmoid(x), torch.sigmoid(x), torch.sigmoid(x).sum()

    first, second, total = mg.compile(twice, fullgraph=True)(torch.zeros(4))
    first.zero_()
    assert second.tolist() == [0.5] * 4
    assert total == 2


def _sums_of_rows(x: Tensor) -> Tensor:
    first, second = torch.tensor([0, 2, 0]), torch.tensor([1, 1])
    return x[first].pow(2).sum() + x.index_add(0, second, x[:2] ** 2).pow(2).sum()


def _sorted(x: Tensor) -> Tensor:
    return x.sort(-1)[0].cumsum(-1).pow(2).sum() + x.topk(2)[0].pow(3).sum() + x.cumprod(1).sum()


@pytest.mark.parametrize("function", [_sums_of_rows, _sorted])
def test_fused_kernels_read_sums_after_their_terms(function: Callable[[Tensor], Tensor]) -> None:
    """Inductor put the scattered terms after a loop that reads the sum."""
    found = []
    for f in (function, mg.compile(function, fullgraph=True)):
        x = torch.linspace(-1, 2, 36, dtype=torch.float64).sin().view(6, 6).requires_grad_()
        (first,) = torch.autograd.grad(f(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        found.append((first, second))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not reached("2.13"), reason="graphs are called from Python with older versions")
def test_kernels_are_called_from_cpp() -> None:
    x, w = torch.randn(4, 3), torch.randn(3, 2)
    _, (code, *_) = run_and_get_code(mg.compile(lambda x, w: (x @ w).sin(), fullgraph=True), x, w)
    assert "aoti_torch_cpu_mm_out(" in code and "extern_kernels.mm(" not in code


@pytest.mark.parametrize("name", ["an operator in Python that returns a list", "complex numbers"])
def test_other_operators_are_called_from_python(name: str) -> None:
    root = mg.implicit.root(lambda x, a: x**3 + x - a, lambda f, x0, a: x0 + 1)
    functions = {
        "an operator in Python that returns a list": lambda x: root(x, 2 + 0 * x).sin(),
        "complex numbers": lambda x: torch.view_as_complex(x).exp(),
    }
    x = torch.zeros(3, 2, dtype=torch.float64)
    found, (code, *_) = run_and_get_code(mg.compile(functions[name], fullgraph=True), x)
    torch.testing.assert_close(found, functions[name](x))
    assert "inductor_entry_cpp" not in code
