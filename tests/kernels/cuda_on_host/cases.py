"""What the kernels' own tests do not say of the CUDA kernels, in a process where its host build is loaded (run.py)."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import helpers.factors as factor
import pytest
import test_spectrum_kernels as spectrum
import torch
from helpers.tensors import random
from traffic import read_traffic

from torch_manualgrad.core import libraries

# once forward, backward and at random
ORDERS = ["forward", "reverse", "1", "2"]
DOUBLES = [torch.float64, torch.complex128]


def ops() -> torch._ops._OpNamespace:
    return torch.ops.manualgrad


def machine() -> ctypes.CDLL:
    (library,) = (library for library in libraries.status() if library.loaded)
    return ctypes.CDLL(str(library.path))


def set_order(order: str) -> None:
    machine().cuda_on_host_order(order.encode())


def norm(dtype: torch.dtype, p: float, dim: int) -> tuple:
    x = random(5, 70, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)
    stored = torch.linalg.vector_norm(x, p, dim=dim, keepdim=True)
    # a norm of zero cannot be: it is computed again
    return torch.ones_like(stored), x, p, torch.zeros_like(stored) if p == 3 else stored, [dim], True


def cdist(dtype: torch.dtype, p: float) -> tuple:
    x1, x2 = random(3, 7).to(dtype), random(300, 7, seed=1).to(dtype)
    return random(3, 300, seed=2).to(dtype), x1, x2, p, torch.cdist(x1.double(), x2.double(), p).to(dtype)


def strong_times(dtype: torch.dtype, contiguous: bool) -> tuple:
    x, y = random(300, 5).to(dtype), random(300, 5, seed=1).to(dtype)
    return (x, torch.where(y.abs() < 0.5, 0, y)) if contiguous else (x[:, :1], y.T.contiguous().T[::2].repeat(2, 1))


def gamma(dtype: torch.dtype) -> tuple:
    a = torch.linspace(0.05, 40, 300).to(dtype)
    return a, a.flip(0)


def segments(name: str, dtype: torch.dtype) -> tuple:
    offsets, x = torch.tensor([0, 3, 3, 203, 204, 290]), random(290, 2).to(dtype)
    if name == "_nested_sum_backward":
        return random(5, 2).to(dtype), offsets, 290, 0
    return (random(290, 2, seed=1).to(dtype), x, offsets, 0) if name.endswith("backward") else (x, offsets, 0)


SEGMENTS = ("segment_sum", "segment_amax", "segment_softmax", "segment_log_softmax")
SEGMENTS_BACKWARD = ("nested_softmax_backward", "nested_log_softmax_backward", "_nested_sum_backward")
CASES: dict[str, Callable[[], tuple]] = {}
for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128):
    of = str(dtype)[6:]
    for p, dim in ((1.0, 0), (1.5, 1), (3.0, 1), (float("inf"), 0), (float("-inf"), 1)):
        CASES[f"norm_backward {of} {p} {dim}"] = lambda dtype=dtype, p=p, dim=dim: norm(dtype, p, dim)
    for contiguous in (True, False):
        CASES[f"strong_times {of} {contiguous}"] = lambda dtype=dtype, c=contiguous: strong_times(dtype, c)
    if dtype.is_complex:
        continue
    if dtype in (torch.float32, torch.float64):
        CASES[f"standard_gamma_grad {of}"] = lambda dtype=dtype: gamma(dtype)
    for p in (1.0, 2.5, float("inf")):
        CASES[f"cdist_backward {of} {p}"] = lambda dtype=dtype, p=p: cdist(dtype, p)
    for name in SEGMENTS + SEGMENTS_BACKWARD:
        CASES[f"{name} {of}"] = lambda name=name, dtype=dtype: segments(name, dtype)
for dtype, n in itertools.product(DOUBLES, (3, 6)):
    of = f"{str(dtype)[6:]} {n}"
    for name in factor.OPERATORS:
        CASES[f"{name} {of}"] = lambda name=name, dtype=dtype, n=n: factor.OPERATORS[name](3, n=n, dtype=dtype)
    for p in (1, n - 1):
        CASES[f"linalg_qr_backward {of} rank {p}"] = lambda dtype=dtype, n=n, p=p: factor.deficient_qr(
            3, m=n + 1, n=n, dtype=dtype, rank=p
        )
    CASES[f"svd_jacobi {of}"] = lambda dtype=dtype, n=n: (random(3, n + 2, n, dtype=dtype),)
    CASES[f"eigh_jacobi {of}"] = lambda dtype=dtype, n=n: (random(3, n, n, dtype=dtype), True)
    CASES[f"lu_small {of}"] = lambda dtype=dtype, n=n: (random(3, n, n + 1, dtype=dtype),)
for dtype, (m, n) in itertools.product(DOUBLES, ((6, 4), (4, 6), (36, 33))):
    for name in ("svd_backward", "linalg_svd_jvp"):

        def arguments(name: str = name, dtype: torch.dtype = dtype, m: int = m, n: int = n) -> tuple:
            given = spectrum.arguments(2, m=m, n=n, dtype=dtype, device="cpu", spectrum="mixed")
            U, S, Vh, gU, gS, gVh, dA = given
            return (gU, gS, gVh, U, S, Vh, None, 0.0, 0.0) if name == "svd_backward" else (dA, U, S, Vh, None, 0.0, 0.0)

        CASES[f"{name} {str(dtype)[6:]} {m} {n}"] = arguments


@pytest.mark.parametrize("case", CASES)
def test_the_order_of_threads_does_not_change_a_bit(case):
    """In any order, what each thread does is the same: a race shows, and so does what is not written."""
    name, given = case.split()[0], CASES[case]()
    packet = getattr(ops(), name)
    op = packet.kernel if "kernel" in packet.overloads() else packet.default
    found = []
    try:
        for order in ORDERS:
            set_order(order)
            found.append(factor.outputs(op(*given)))
    finally:
        set_order("mixed")
    for others in found[1:]:
        for one, other in zip(found[0], others):
            torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
    assert not any(x.isnan().any() for x in found[0])


def from_two_threads(device: str) -> None:
    """Kernels whose shared memory has to be asked for, of two sizes, from two threads of the host: the same bits as from one."""
    op = ops().linalg_solve_backward.kernel
    arguments = [factor.OPERATORS["linalg_solve_backward"](3, n=n, dtype=torch.complex128) for n in (26, 32)]
    given = [factor.moved(arguments_of, lambda x: x.to(device)) for arguments_of in arguments]
    expected = [factor.outputs(op(*arguments_of)) for arguments_of in given]

    def differs(i: int) -> bool:
        return any(
            not torch.equal(one, other)
            for _ in range(3)
            for one, other in zip(factor.outputs(op(*given[i])), expected[i], strict=True)
        )

    with ThreadPoolExecutor(2) as pool:
        assert not any(pool.map(differs, range(2)))


def test_two_threads_with_much_shared_memory():
    from_two_threads("cpu")


@pytest.mark.parametrize(
    "offsets", [[1, 4, 9], [-1, 4, 9], [0, 5, 4, 9], [0, -5, 9], [0, 4, 8], [0, 12], [0, 2**40, 9]]
)
@pytest.mark.parametrize("name", SEGMENTS + SEGMENTS_BACKWARD)
def test_bad_offsets_give_nan(name, offsets):
    """A device cannot raise without being waited for: nothing else is read, and the result is nan.

    Rows that decreasing offsets give to two segments are written by two threads; after the grid has waited for itself,
    nan is, in their place.
    """
    given, x = torch.tensor(offsets), random(2, 9, 3)
    args = (x, x, given, 1) if name.endswith("backward") else (x, given, 1)
    if name == "_nested_sum_backward":
        args = random(2, len(offsets) - 1, 3), given, 9, 1
    try:
        machine().cuda_on_host_watch_global(int(offsets != [0, 5, 4, 9]))
        assert getattr(ops(), name).default(*args).isnan().all()
    finally:
        machine().cuda_on_host_watch_global(1)


def test_a_batch_of_several_warps_in_a_block():
    """Each matrix gives the bits that it gives in a small batch, where a block is one warp; the last block has one to spare."""
    op, small = ops().cholesky_jvp.kernel, 7
    tangents, L, upper = factor.OPERATORS["cholesky_jvp"](small, n=5, dtype=torch.float32)
    expected = op(tangents, L, upper)
    batch = 4 * 1024 + 1  # four matrices in a warp, two warps in a block
    found = op(*(x.repeat(-(-batch // small), 1, 1)[:batch] for x in (tangents, L)), upper)
    assert torch.equal(found, expected.repeat(-(-batch // small), 1, 1)[:batch])


def traffic(op: Callable[..., object], given: tuple) -> tuple[int, int, int, int]:
    """Wavefronts of shared memory and the least number of them, sectors of global memory and the least number of them."""
    found = (ctypes.c_uint64 * 4)()
    count = machine().cuda_on_host_count
    count(1, found)
    try:
        op(*given)
    finally:
        count(0, found)
    wavefronts, fewest_wavefronts, sectors, fewest_sectors = found
    return wavefronts, fewest_wavefronts, sectors, fewest_sectors


# they read parts of matrices: lanes outside skip an access, and their later ones are counted at another time
OF_TRIANGLES = ("cholesky_backward", "linalg_lu_backward", "linalg_lu_jvp", "linalg_qr_backward")


def traffic_of(name: str, n: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """The traffic of a warp full of matrices of order n: up to eight."""
    set_order("forward")
    try:
        batch = max(1, min(8, 32 // n))
        return traffic(getattr(ops(), name).kernel, factor.OPERATORS[name](batch, n=n, dtype=dtype))
    finally:
        set_order("mixed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("n", [8, 16, 32])
@pytest.mark.parametrize("name", factor.OPERATORS)
def test_memory_is_used_as_few_times_as_can_be(name, n, dtype):
    """Nearly as few wavefronts as the bytes need: no conflicts of banks between the rows of a matrix. And as few sectors of
    global memory, whether matrices are row-major or, like those of LAPACK, column-major.

    The parts of a complex number are read one at a time here, and both at once on a GPU. Where a warp has several matrices,
    numbers of 8 bytes that are read by all lanes of a matrix can be in the same bank as those of another matrix.
    """
    wavefronts, fewest_wavefronts, sectors, fewest_sectors = traffic_of(name, n, dtype)
    several, wide = n < 32, dtype != torch.float32
    assert wavefronts <= (2.1 if several and wide else 1.7 if dtype.is_complex else 1.2) * fewest_wavefronts
    assert sectors <= ((2.9, 1.4) if several else (2.6, 1.3))[name not in OF_TRIANGLES] * fewest_sectors


@pytest.mark.parametrize("key", read_traffic(), ids=str)
def test_memory_is_used_no_more_often_than_it_was(key):
    """After a change that is meant, `python tests/kernels/cuda_on_host/run.py --write-traffic` takes what there is."""
    wavefronts, _, sectors, _ = traffic_of(*key)
    budget = read_traffic()[key]
    assert wavefronts <= budget.wavefronts and sectors <= budget.sectors
