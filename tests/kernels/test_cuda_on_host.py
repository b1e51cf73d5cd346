"""The CUDA kernels on the host (tests/kernels/cuda_on_host): what its device finds, that it finds what is planted, and that the tests
of the kernels pass on it."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_on_host.build import COMPILER, ROOT, build, build_samples
from cuda_on_host.run import environment, run
from helpers.interpreters import run_python
from helpers.thinning import every

pytestmark = [
    pytest.mark.skipif(shutil.which(COMPILER) is None or platform.system() != "Linux", reason="g++ on Linux is needed"),
    pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="not a source tree"),
]
ORDERS = ["forward", "reverse", "1", "2"]


@pytest.fixture(scope="module")
def samples() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_samples()))
    library.cuda_on_host_sample.restype = ctypes.c_char_p
    return library


RACE = r"a race in values: thread \d+ of block 0 \w+ at samples.cu:\d+ what thread \d+ of block 0 \w+, with no barrier"
GLOBAL_RACE = r"a race in global memory: thread \d+ of block \d (reads|writes) at samples.cu"
SAMPLES = {
    "reduction": "$",
    "votes": "$",
    "grid": "$",
    "dynamic": "$",
    "unwritten": "$",  # is nan
    "missing_barrier": RACE,
    "missing_barrier_before_writing": RACE,
    "missing_barrier_between_warps": RACE,
    "missing_syncwarp": RACE,
    "barrier_of_some": r"threads wait for ever: thread 0 .* waits at __syncthreads, .*; thread 40 .* has left",
    "barrier_after_leaving": r"threads wait for ever: thread 0 .* waits at __syncthreads, .*; thread 7 .* has left",
    "two_barriers": r"not all threads meet at one barrier: thread 0 .*; thread 32 ",
    "two_kinds_of_barrier": "not all threads meet at one barrier: .*__syncthreads_or, .*__syncthreads, ",
    "shuffle_after_leaving": r"threads wait for ever: .*__shfl_xor_sync.*; thread 3 .* has left",
    "shuffle_from_outside_of_the_mask": "lane 20, from which a value is wanted, takes no part",
    "mask_without_oneself": r"a lane is not in its own mask: .*__syncwarp\(0x0000ffff\)",
    "two_masks": r"lanes ask for different things: .*__syncwarp",
    "two_kinds_of_meeting": r"lanes ask for different things: .*(__syncwarp.*__shfl|__shfl.*__syncwarp)",
    "beyond_the_end": "thread 63 of block 0 writes shared memory that is in no array, at samples.cu",
    "before_the_start": "thread 0 of block 0 reads shared memory that is in no array, at samples.cu",
    "beyond_dynamic_memory": "thread 9 of block 0 writes shared memory that is in no array, at samples.cu",
    "one_place_for_all_blocks": GLOBAL_RACE,
    "one_place_for_two_threads": GLOBAL_RACE,
    "missing_grid_sync": GLOBAL_RACE,
    "grid_sync": "grid.sync in a launch that is not cooperative",
    "grid_sync_of_some": r"threads wait for ever: .*grid.sync.* of block 1 has left",
    "much_static_memory": "more static shared memory than there is",
    "too_many_threads": "an invalid size",
    "memory_not_asked_for": "more shared memory than was asked for",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", SAMPLES)
def test_faults_that_the_device_finds(name, order, samples):
    samples.cuda_on_host_order(order.encode())
    found = samples.cuda_on_host_sample(name.encode()).decode()
    assert re.match(SAMPLES[name], found), found


@pytest.mark.parametrize("step, wavefronts", [(1, 1), (2, 2), (3, 1), (32, 32), (33, 1)])
def test_wavefronts_and_sectors(step, wavefronts, samples):
    """A warp writes and reads 32 numbers of 4 bytes in shared memory, and writes as many of 8 bytes side by side."""
    found = (ctypes.c_uint64 * 4)()
    samples.cuda_on_host_count(1, found)
    assert samples.cuda_on_host_sample(f"strided {step}".encode()) == b""
    samples.cuda_on_host_count(0, found)
    assert list(found[:2]) == [2 * wavefronts, 2]
    assert found[2] == found[3] >= 8  # and what the kernel was given


# fault -> the unit, the source, what is replaced in it and by what, what shows it
PLANTED = {
    "missing barrier": (
        "distance",
        "csrc/reduction/distance.cu",
        "        __syncthreads();\n#pragma unroll",
        "#pragma unroll",
        "a race in",
    ),
    "wrong lane": (
        "distance",
        "csrc/reduction/distance.cu",
        "found += __shfl_xor_sync(together, found, step);",
        "found += __shfl_xor_sync(together, found, step ^ 1);",
        "lanes ask for different things",  # they find different numbers, and do not stay together
    ),
    "index off by one": (
        "distance",
        "csrc/reduction/distance.cu",
        "x2[j * plan.columns + k]",
        "x2[j * plan.columns + k - 1]",
        "wrong values",
    ),
    "unwritten element": (
        "distance",
        "csrc/reduction/distance.cu",
        "if (group == 0 && k < plan.columns)",
        "if (group == 0 && k + 1 < plan.columns)",
        "nan",
    ),
    "write beyond shared memory": (
        "distance",
        "csrc/reduction/distance.cu",
        "partial[thread] = sum[c];",
        "partial[thread + 1] = sum[c];",
        "writes shared memory that is in no array",
    ),
    "missing barrier of a warp": ("triangular", "csrc/linalg/run_on_cuda.h", "    __syncwarp();\n", "", "a race in"),
}
LOADED = """
import torch
torch.ops.load_library({library!r})
library = torch.library.Library("manualgrad", "FRAGMENT")
def number(*shape, k):
    return torch.arange(1, 1 + torch.Size(shape).numel()).mul(k).sin().double().view(shape)
def check(found, expected):
    assert not found.isnan().any(), "nan"
    assert torch.allclose(found, expected), "wrong values"
"""
CALLED = {
    "distance": """
library.define("cdist_backward(Tensor grad, Tensor x1, Tensor x2, float p, Tensor cdist) -> Tensor")
x2, grad = number(70, 9, k=2), number(2, 70, k=3)
for p in (1.0, float("inf")):
    x1 = number(2, 9, k=1).requires_grad_()
    d = torch.cdist(x1, x2, p)
    (expected,) = torch.autograd.grad(d, x1, grad)
    check(torch.ops.manualgrad.cdist_backward(grad, x1.detach(), x2, p, d.detach()), expected)
""",
    "triangular": """
library.define(
    "linalg_solve_triangular_backward.kernel(Tensor grad, Tensor A, Tensor X, bool upper, bool left, bool unitriangular)"
    " -> (Tensor gA, Tensor gB)")
A, X, grad = number(6, 6, k=1).triu() + 3 * torch.eye(6), number(6, 4, k=2), number(6, 4, k=3)
gA, gB = torch.ops.manualgrad.linalg_solve_triangular_backward.kernel(grad, A, X, True, True, False)
check(gB, torch.linalg.solve(A.mT, grad))
check(gA, -(gB @ X.mT).triu())
""",
}


def outcome(unit: str, library: Path, folder: Path) -> str:
    """What a process says that calls the kernels of this unit, without the package, which defines the operators too."""
    program = folder / "program.py"
    program.write_text(LOADED.format(library=str(library)) + CALLED[unit])
    done = run_python(program, folder=folder, imported=("torch",))
    assert done.returncode in (0, 1), done.stderr
    return done.stderr.strip().splitlines()[-1] if done.returncode else "right"


@pytest.mark.parametrize("unit", CALLED)
def test_without_a_fault(unit, tmp_path):
    assert outcome(unit, build(only=[unit]), tmp_path) == "right"


@pytest.mark.parametrize("fault", every(3, PLANTED))  # each compiles a unit
def test_planted_faults_are_found(fault, tmp_path):
    """In a copy of the sources, one at a time."""
    unit, source, old, new, shown = PLANTED[fault]
    found = outcome(unit, build(only=[unit], edits={source: [(old, new)]}), tmp_path)
    assert shown in found, found


def test_kernels():
    """Some of the cases of the kernels' tests, and all of cases.py in four orders of the threads."""
    assert run(every=40) == 0


@pytest.mark.slow
@pytest.mark.parametrize("order", ["forward", "reverse", "1"])
def test_all_cases(order):
    assert run(order=order) == 0


SANITIZED = {
    **dict.fromkeys(("reduction", "votes", "grid", "dynamic"), "^$"),
    **dict.fromkeys(("beyond_the_end", "before_the_start"), "index -?[0-9]+ out of bounds"),
    "beyond_dynamic_memory": "AddressSanitizer: use-after-poison",
    "two_barriers": "not all threads meet at one barrier",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SANITIZED)
def test_faults_that_the_sanitizers_find(name, tmp_path):
    library = build_samples("sanitizers")
    script = "import ctypes, sys\nsample = ctypes.CDLL(sys.argv[1]).cuda_on_host_sample\n"
    script += "sample.restype = ctypes.c_char_p\nprint(sample(sys.argv[2].encode()).decode(), end='')"
    command = [sys.executable, "-c", script, str(library), name]
    variables = environment(tmp_path, "sanitizers", "mixed")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert re.search(SANITIZED[name], done.stdout + done.stderr), done.stdout + done.stderr


@pytest.mark.slow
def test_under_sanitizers():
    assert run("sanitizers", every=6) == 0
