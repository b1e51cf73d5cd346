"""The CUDA kernels that were built stay within tests/kernels/cuda_limits.csv, and tools/cuda_kernels.py counts correctly."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "tools").exists():
    pytest.skip("not a source tree", allow_module_level=True)
sys.path.insert(0, str(ROOT))
from tools import cuda_kernels  # noqa: E402
from tools.cuda_kernels import Costs  # noqa: E402


def test_kernels_stay_within_their_limits():
    """After a change that is meant, `python tools/cuda_kernels.py --write` takes what there is for the limits."""
    if why := cuda_kernels.obstacle():
        pytest.skip(why)
    limits, table = cuda_kernels.read_limits(), cuda_kernels.measured()
    if not {architecture for _, architecture in table} & {architecture for _, architecture in limits}:
        pytest.skip("the library has none of the architectures that have limits")
    found = cuda_kernels.excesses(table, limits)
    assert not found, "\n".join(found)


def test_the_page_shows_limits_and_budgets():
    page = cuda_kernels.PAGE.read_text()
    assert cuda_kernels.current(page) == page
    assert cuda_kernels.rows(cuda_kernels.read_limits()) and cuda_kernels.traffic_rows()


ONE = Costs(registers=40, stack=0, local_loads=0, local_stores=0, generic=0, fused=3)


@pytest.mark.parametrize(
    "table, found",
    [
        ({("f", 75): ONE}, []),
        ({("f", 75): ONE._replace(registers=33)}, []),
        ({("f", 75): ONE._replace(registers=41)}, ["f, sm_75: registers 41, allowed 40"]),
        (
            {("f", 75): ONE._replace(stack=8, generic=1)},
            ["f, sm_75: stack 8, allowed 0", "f, sm_75: generic 1, allowed 0"],
        ),
        ({("f", 75): ONE, ("g", 75): ONE}, ["g, sm_75: has no limits"]),
        ({("g", 75): ONE}, ["g, sm_75: has no limits", "f, sm_75: has limits, and is no kernel"]),
        ({("f", 75): Costs(*ONE[:2])}, []),  # not disassembled
        ({("f", 90): ONE}, []),  # an architecture without limits
    ],
)
def test_what_exceeds_the_limits(table, found):
    assert cuda_kernels.excesses(table, {("f", 75): ONE}) == found


FAULTS = """
namespace manualgrad { namespace {
template <class T> __global__ void plain(T* x) { x[threadIdx.x] = x[threadIdx.x] * 3 + 1; }
template <class T> __global__ void indexed(T* x, const int* at) {
  T kept[64];
  for (int i = 0; i < 64; ++i) kept[i] = x[i];
  for (int i = 0; i < 64; ++i) kept[at[i]] += kept[i];
  x[threadIdx.x] = kept[at[64]];
}
template <class T> __global__ void generic(T* x, int which) {
  __shared__ T shared[32];
  shared[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  T* from = which ? shared : x;
  for (int i = 0; i < which; ++i) from[threadIdx.x] += from[i];
}
template <class T> __global__ void fused(T* x) { x[threadIdx.x] = fma(x[threadIdx.x], x[0], x[1]); }
template __global__ void plain<float>(float*);
template __global__ void indexed<float>(float*, const int*);
template __global__ void generic<float>(float*, int);
template __global__ void fused<float>(float*);
}}
"""


def test_what_is_counted(tmp_path):
    """On four kernels: one without a fault, and one with each."""
    nvcc = cuda_kernels.tool("nvcc")
    if nvcc is None or any(cuda_kernels.tool(name) is None for name in cuda_kernels.TOOLS):
        pytest.skip("needs nvcc, cuobjdump and nvdisasm")
    assert shutil.which("c++filt") is not None
    source = tmp_path / "faults.cu"
    source.write_text(FAULTS)
    made = source.with_suffix(".o")
    subprocess.run([nvcc, "-arch=sm_75", "-fmad=false", "-c", str(source), "-o", str(made)], check=True)
    table = {name: costs for (name, _), costs in cuda_kernels.measured(made).items()}
    assert set(table) == {"plain<float>", "indexed<float>", "generic<float>", "fused<float>"}
    assert table["plain<float>"][1:] == (0, 0, 0, 0, 0) and table["plain<float>"].registers > 0
    assert table["fused<float>"][1:] == (0, 0, 0, 0, 1)
    indexed = table["indexed<float>"]
    assert indexed.stack == 256 and indexed.local_loads and indexed.local_stores and not indexed.generic
    assert table["generic<float>"].generic and not table["generic<float>"].stack
