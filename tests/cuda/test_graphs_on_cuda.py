"""Each CUDA kernel in a graph of CUDA, captured once and replayed; and eager calls after that."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from cuda_on_host.cases import CASES
from each_kernel import call

import torch_manualgrad as mg
from torch_manualgrad.derivatives.elementwise.strong_times import strong_times


@pytest.mark.parametrize("case", CASES)
def test_each_kernel_is_captured_and_replayed(case):
    run = call(case, "cuda")
    expected = run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for one in found:
        one.zero_()
    graph.replay()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
@pytest.mark.parametrize("first", [True, False])
def test_a_number_on_the_cpu_times_a_tensor(first, dtype):
    """Its value is that of the capture."""
    number, x = (
        torch.tensor(2.5 - 1j if dtype.is_complex else 2.5, dtype=dtype),
        torch.randn(5, dtype=dtype, device="cuda"),
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = strong_times(number, x) if first else strong_times(x, number)
    graph.replay()
    torch.testing.assert_close(found, number.cuda() * x)


@pytest.mark.parametrize("name", ["svd", "eigh"])
def test_a_backward_after_a_captured_one(name):
    """The gauge check of a captured backward cannot be read. The next eager backward must not try to read it."""
    factors = torch.linalg.svd if name == "svd" else lambda x: torch.linalg.eigh(x + x.mT)
    x = torch.randn(4, 6, 6, dtype=torch.float64, device="cuda", requires_grad=True)

    def loss() -> torch.Tensor:
        return sum(o.abs().square().cos().sum() for o in factors(x))

    with mg.override("*"):
        value = loss()
        (expected,) = torch.autograd.grad(value, x, retain_graph=True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.autograd.grad(loss(), x)
            value, factor = loss(), torch.ones((), dtype=x.dtype, device="cuda")
            torch.autograd.grad(value, x, factor, retain_graph=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                (captured,) = torch.autograd.grad(value, x, factor, retain_graph=True)
        torch.cuda.current_stream().wait_stream(stream)
        graph.replay()
        (found,) = torch.autograd.grad(loss(), x)
    for one in (captured, found):
        torch.testing.assert_close(one, expected, rtol=1e-10, atol=1e-10)
