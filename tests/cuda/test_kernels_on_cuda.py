"""CUDA kernels: the same results as on the CPU, on side streams, in CUDA graphs, from several threads and for large batches."""

from __future__ import annotations

import threading
import time

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from cuda_on_host.cases import CASES
from each_kernel import results

import torch_manualgrad as mg
from torch_manualgrad.core import libraries

TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5, torch.complex64: 2e-5}


@pytest.fixture(autouse=True, scope="module")
def kernels_are_loaded():
    (library,) = (x for x in libraries.load() if x.device == "cuda")
    if library.path is None:
        pytest.skip(library.reason)
    assert library.loaded, library.reason


@pytest.mark.parametrize("case", CASES)
def test_each_kernel_gives_what_the_cpus_does(case):
    # those without rounding between, as the steps of Jacobi's method: a singular vector has any phase
    found, expected = results(case, "cuda"), results(case, "cpu")
    assert [(x.shape, x.dtype, x.stride()) for x in found] == [(x.shape, x.dtype, x.stride()) for x in expected]
    if case.startswith(("svd_jacobi", "eigh_jacobi")):
        found, expected = (found[1:2], expected[1:2]) if case.startswith("svd") else (found[:1], expected[:1])
    for one, other in zip(found, expected):
        tolerance = TOLERANCES.get(one.dtype, 1e-12)
        scale = 1.0 if other.numel() == 0 or other.dtype == torch.bool else max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one.cpu(), other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
def test_each_kernel_twice_gives_the_same_bits(case):
    for one, other in zip(results(case, "cuda"), results(case, "cuda"), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def programs():
    """Functions of x, (64, 8, 8), that reach each family of kernels."""
    offsets = torch.tensor([0, 7, 7, 40, 64], device="cuda")

    def ragged(x):
        r = mg.nested.Ragged(x.reshape(64, -1), offsets, (4, None, x.numel() // 64))
        return r.softmax(1).values.square().sum()

    return {
        "norm": lambda x: torch.linalg.vector_norm(x, 1.5, dim=-1).sum(),
        "svd": lambda x: sum(o.abs().sin().sum() for o in torch.linalg.svd(x, full_matrices=False)),
        "eigh": lambda x: sum(o.abs().sin().sum() for o in torch.linalg.eigh(x + x.mT)),
        "lu": lambda x: sum(o.sin().sum() for o in torch.linalg.lu(x)[1:]),
        "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(8, device="cuda", dtype=x.dtype)).sin().sum(),
        "solve": lambda x: torch.linalg.solve(x, x.sin()).sin().sum(),
        "det": lambda x: torch.linalg.det(x).sin().sum(),
        "inv": lambda x: torch.linalg.inv(x).sin().sum(),
        "cdist": lambda x: torch.cdist(x[0], x[1]).sum(),
        "nested": ragged,
    }


def gradient(f, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x), x)[0]


@pytest.mark.parametrize("forward", [False, True], ids=["stock forward", "our forward"])
@pytest.mark.parametrize("name", programs())
def test_kernels_run_on_the_current_stream(name, forward):
    """The input is written late on the stream, behind a long wait: a kernel on another stream would read nan."""
    f = programs()[name]
    with mg.override(forward=forward):
        value = torch.randn(64, 8, 8, dtype=torch.float64, device="cuda")
        expected = gradient(f, value)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.full_like(value, torch.nan)
            torch.cuda._sleep(50_000_000)
            x.copy_(value)
            found = gradient(f, x)
        stream.synchronize()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["norm", "cdist", "nested"])
def test_a_training_step_in_a_graph_of_cuda(name):
    f = programs()[name]
    with mg.override():
        x = torch.randn(64, 8, 8, dtype=torch.float64, device="cuda")
        warm_up(lambda: gradient(f, x))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = gradient(f, x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(found, gradient(f, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["svd", "eigh", "lu", "cholesky", "solve", "det", "inv"])
def test_a_backward_in_a_graph_of_cuda(name):
    """cuSOLVER's forwards cannot be captured."""
    f = programs()[name]
    x = torch.randn(64, 8, 8, dtype=torch.float64, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with mg.override(), torch.cuda.stream(stream):
        value, factor = f(x), torch.ones((), dtype=x.dtype, device="cuda")
        for _ in range(3):
            (expected,) = torch.autograd.grad(value, x, factor, retain_graph=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            (found,) = torch.autograd.grad(value, x, factor, retain_graph=True)
        factor.fill_(2)
        graph.replay()
        torch.testing.assert_close(found, 2 * expected, rtol=1e-12, atol=1e-12)


def warm_up(run):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("name", programs())
def test_threads_with_streams_of_their_own(name):
    f = programs()[name]
    values = [torch.randn(64, 8, 8, dtype=torch.float64, device="cuda") for _ in range(4)]
    with mg.override():
        expected = [gradient(f, x) for x in values]
        found = [None] * len(values)

        def run(i):
            with mg.override(), torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(5):
                    found[i] = gradient(f, values[i])
                torch.cuda.current_stream().synchronize()

        torch.cuda.synchronize()
        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(values))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("n", [2, 5, 24])
def test_a_batch_larger_than_a_grid(n):
    """Compares the first, middle and last matrices."""
    batch = 1_200_000 if n < 24 else 1_100_000
    L = torch.randn(batch, n, n, device="cuda").tril(-1).mul_(0.1) + torch.eye(n, device="cuda")
    G = torch.randn_like(L)
    found = mg.ops.cholesky_backward(G, L, False)
    for part in (slice(0, 3), slice(batch // 2, batch // 2 + 3), slice(batch - 3, batch)):
        expected = mg.ops.cholesky_backward(G[part].cpu().double(), L[part].cpu().double(), False)
        torch.testing.assert_close(found[part].cpu().double(), expected, rtol=1e-3, atol=1e-3)


def test_more_elements_than_an_int_can_count():
    x = torch.ones(2**31 + 10, dtype=torch.float16, device="cuda")
    x[-3:] = 2
    norm = torch.linalg.vector_norm(x, float("inf")).detach()
    found = torch.ops.manualgrad.norm_backward(torch.ones_like(norm), x, float("inf"), norm, [], False)
    assert found[-3:].isfinite().all() and (found[-3:] > 0).all() and not found[:-3].any()


def test_memory_is_given_back():
    for name, f in programs().items():
        x = torch.randn(64, 8, 8, dtype=torch.float64, device="cuda")
        with mg.override():
            gradient(f, x)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            for _ in range(5):
                gradient(f, x)
        for _ in range(100):  # the engine's thread lets go of a graph after the gradients have come
            if torch.cuda.memory_allocated() <= before:
                break
            time.sleep(0.01)
        assert torch.cuda.memory_allocated() <= before, name
