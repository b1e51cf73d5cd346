"""Batches that are divided among threads: bitwise identical to PyTorch's on one thread, in its strides, with its errors."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.primal import DTYPES, hermitian, same_bits
from torch import Tensor
from torch.func import vmap

import torch_manualgrad as mg
from torch_manualgrad.derivatives.samples.drawing import random, random_conditioned
from torch_manualgrad.primal import eigh as primal_eigh, threads

NAMES = ("aten::_linalg_svd", "aten::_linalg_eigh")
CALLS = {
    "svd": lambda A: torch.linalg.svd(A, full_matrices=False),
    "svd, full": torch.linalg.svd,
    "svdvals": torch.linalg.svdvals,
    "eigh": torch.linalg.eigh,
    "eigh, upper": lambda A: torch.linalg.eigh(A, UPLO="U"),
    "eigvalsh": torch.linalg.eigvalsh,
}


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    """And a batch of any size is worth them; LAPACK has all that Jacobi's method does not take."""
    monkeypatch.setattr(threads, "_LEAST_WORK", {True: 1, False: 1})
    monkeypatch.setattr(primal_eigh, "_tridiagonal", lambda: (0, 0, 0))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    if threads._workers() is None:
        pytest.skip("PyTorch is built without OpenMP")
    yield
    torch.set_num_threads(before)


@pytest.fixture
def divided(monkeypatch):
    """How many parts each call was divided into."""
    found = []
    own = threads._divided

    def watched(workers, starts, *rest):
        found.append(len(starts))
        return own(workers, starts, *rest)

    monkeypatch.setattr(threads, "_divided", watched)
    return found


def listed(result) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def on_one_thread(call, A: Tensor) -> tuple[Tensor, ...]:
    torch.set_num_threads(1)
    try:
        return listed(call(A))
    finally:
        torch.set_num_threads(2)


def assert_same(found, expected) -> None:
    assert same_bits(found, expected)
    for x, y in zip(found, expected, strict=True):
        assert x.stride() == y.stride() and x.dtype == y.dtype and x.shape == y.shape
        assert x.is_inference() == y.is_inference()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_bitwise_identical_to_one_thread(name, dtype, divided):
    """Also where matrices are not aligned, and a batch cannot be divided anywhere."""
    call = CALLS[name]
    shapes = [(5, 20, 20), (2, 3, 48, 48), (33, 33, 33), (40, 35, 35)]
    shapes += [] if "eig" in name else [(18, 40, 33), (34, 33, 70)]
    for shape in shapes:
        A = random(*shape, dtype=dtype)
        expected = on_one_thread(call, A)
        with mg.override(*NAMES, forward=True):
            assert_same(listed(call(A)), expected)
            assert_same(listed(call(A.mT.contiguous().mT)), expected)
    assert divided == [2, 2] * len(shapes)


def test_other_memory(divided):
    """Batch dims that are permuted or expanded, conjugate matrices, inference tensors."""
    A = random(4, 6, 32, 32, dtype=torch.complex64)
    for given in (A.transpose(0, 1), A[:, ::2], A[:, :1].expand(4, 3, 32, 32), A.mH, A.conj(), A[..., ::2, :]):
        expected = on_one_thread(CALLS["svd"], given)
        with mg.override(*NAMES, forward=True):
            assert_same(listed(CALLS["svd"](given)), expected)
    assert divided == [2] * 6
    with torch.inference_mode():
        B = A.clone()
        expected = on_one_thread(torch.linalg.eigh, B)
        with mg.override(*NAMES, forward=True):
            assert_same(listed(torch.linalg.eigh(B)), expected)


def outcome(call, A: Tensor) -> tuple[str, str] | tuple[Tensor, ...]:
    try:
        return listed(call(A))
    except RuntimeError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("name", CALLS)
def test_errors_name_the_matrix(name, divided):
    call = CALLS[name]
    for at in (1, 6, 7):
        A = random(8, 32, 32, dtype=torch.float64)
        A[at:] = torch.nan
        expected = on_one_thread(lambda A: outcome(call, A), A)
        if "svd" in name:  # eigh has nan for results, for some sizes
            assert f"(Batch element {at})" in expected[1]
        with mg.override(*NAMES, forward=True):
            for given in (A, A.reshape(2, 4, 32, 32)):
                found = outcome(call, given)
                if isinstance(expected[0], str):
                    assert found == expected
                else:
                    for x, y in zip(found, expected, strict=True):
                        assert torch.equal(x.reshape(y.shape).nan_to_num(), y.nan_to_num())
            call(A[:at].repeat(2, 1, 1))
    assert divided


def test_errors_of_arguments():
    with mg.override(*NAMES, forward=True):
        with pytest.raises(RuntimeError, match="square"):
            torch.linalg.eigh(random(8, 32, 33, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="UPLO"):
            torch.linalg.eigh(random(8, 32, 32, dtype=torch.float64), UPLO="X")
        with pytest.raises(RuntimeError):
            torch.linalg.svd(torch.ones(8, 32, 32, dtype=torch.float16))
        with pytest.raises(RuntimeError, match="driver"):
            torch.linalg.svd(torch.ones(8, 32, 32), driver="gesvd")


def test_several_user_threads(divided):
    """Each has its own results, and what PyTorch's threads are does not change for any, nor for threads made later."""
    inputs = [random(6, 40, 40, dtype=torch.float64) + i for i in range(4)]
    expected = [(on_one_thread(CALLS["svd"], A), on_one_thread(torch.linalg.eigh, hermitian(A))) for A in inputs]
    barrier = threading.Barrier(len(inputs))

    def work(A: Tensor):
        barrier.wait()
        found = []
        for _ in range(5):
            found.append((listed(CALLS["svd"](A)), listed(torch.linalg.eigh(hermitian(A)))))
            with pytest.raises(RuntimeError):
                torch.linalg.svd(torch.full_like(A, torch.nan))
        return found, torch.get_num_threads()

    with mg.override(*NAMES, forward=True), ThreadPoolExecutor(len(inputs)) as users:
        found = list(users.map(work, inputs))
    for (results, count), wanted in zip(found, expected):
        assert count == 2
        for svd, eigh in results:
            assert_same(svd, wanted[0])
            assert_same(eigh, wanted[1])
    assert torch.get_num_threads() == 2
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == 2
    assert len(divided) == 4 * 5 * 3


def test_workers_take_one_thread_each():
    workers = threads._workers()
    assert set(workers.map(lambda _: torch.get_num_threads(), range(20))) == {1}
    assert torch.get_num_threads() == 2


def test_calls_that_stay_with_pytorch(divided, monkeypatch):
    A = random(6, 32, 32, dtype=torch.float32)
    expected = on_one_thread(torch.linalg.svd, A)
    with mg.override(*NAMES, forward=True):
        assert_same(on_one_thread(torch.linalg.svd, A), expected)
        torch.linalg.svd(A[0])
        torch.linalg.svd(A[:1])
        torch.linalg.eigh(A[:0])
        with fwAD.dual_level():
            torch.linalg.svdvals(A)
        torch.linalg.svd(A.to("meta"))
        monkeypatch.setattr(threads, "_process", os.getpid() + 1)
        torch.linalg.svd(A)
        monkeypatch.setattr(threads, "_process", os.getpid())
        monkeypatch.setattr(threads, "_workers", lambda: None)
        torch.linalg.svd(A)
        monkeypatch.setattr(threads, "_LEAST_WORK", {True: 2**30, False: 2**30})
        torch.linalg.svd(A)
    assert not divided


def test_transforms_and_graphs():
    """Which come down to calls on plain tensors in the end."""
    A = random(6, 4, 32, 32, dtype=torch.float64)
    expected = on_one_thread(torch.linalg.eigvalsh, A)[0]
    with mg.override(*NAMES, forward=True):
        compiled = torch.compile(torch.linalg.eigvalsh, backend="aot_eager", fullgraph=True)
        for found in (
            vmap(torch.linalg.eigvalsh)(A),
            compiled(A),
            torch.func.jvp(torch.linalg.eigvalsh, (A,), (A,))[0],
            torch.func.vjp(torch.linalg.eigvalsh, A)[0],
        ):
            torch.testing.assert_close(found, expected)


def test_a_worker_does_not_divide_again(divided):
    """What a worker calls is PyTorch's kernel, below the override."""
    with mg.override(*NAMES, forward=True):
        torch.linalg.svd(random(64, 32, 32, dtype=torch.float32))
    assert divided == [2]


@pytest.mark.parametrize("call", [torch.linalg.svdvals, lambda A: torch.linalg.eigh(hermitian(A)).eigenvectors.abs()])
def test_gradients(call, divided):
    A = random_conditioned(6, 32, 32, dtype=torch.float64).requires_grad_()

    def second(A: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(call(A).sin().sum(), A, create_graph=True)
        return torch.autograd.grad(g.sin().sum(), A)[0]

    with mg.override(*NAMES):
        expected = second(A)
    with mg.override(*NAMES, forward=True):
        found = second(A)
    assert divided
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())
