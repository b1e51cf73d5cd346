"""Runs each launch of the kernels on the host twice, first as PTX (ptx.py), and compares what they write.

    python witness.py LIBRARY PTX...

LIBRARY is from build.py, PTX a unit from ptx.py, and edited versions of it. Prints a line for each: the first thing that differs,
or what was compared. All are equal to the bit but powers, which the libraries of the device and of the host round differently.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ptx
import torch

F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128
HALF, BF16, C32 = torch.float16, torch.bfloat16, torch.complex32
#: Units in the last place between sums of up to 200 powers.
ULPS_OF_POWERS = 64

WATCHER = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t, ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t),
)  # fmt: skip


def symbols(library: Path) -> dict[int, str]:
    """The address of each function in this process, and its name."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    base = min(int(line.split("-")[0], 16) for line in maps if line.endswith(str(library)))
    listed = subprocess.run(["nm", str(library)], capture_output=True, text=True, check=True).stdout
    found = [line.split() for line in listed.splitlines() if re.search(r" [tTwW] .*kernel", line)]
    return {base + int(at, 16): name for (at, _, name), name in zip(found, ptx.demangled([f[2] for f in found]))}


class Witness:
    """Runs launches as PTX, and collects how they differ from those on the host."""

    def __init__(self, library: Path, text: str) -> None:
        self.module = ptx.functions(text)
        self.entries = dict(zip(ptx.demangled(list(self.module)), self.module))
        self.names = symbols(library)
        self.memory = ptx.Memory()
        self.powers = False
        self.launched: set[str] = set()
        self.numbers = 0
        self.wrong: list[str] = []

    def watch(
        self, after: int, kernel: int, blocks: int, threads: int, shared: int, count: int, at: Any, sizes: Any
    ) -> None:
        name = self.names[kernel]
        try:
            if after:
                self._compare(name)
                return
            self.memory = ptx.Memory()
            given = [ctypes.string_at(at[i], sizes[i]) for i in range(count)]
            ptx.launch(self.module, self.entries[name], blocks, threads, shared, given, self.memory)
            self.launched.add(name)
        except Exception as error:  # which ctypes would only print
            self.wrong.append(f"{name}: {type(error).__name__}: {error}")

    def _compare(self, name: str) -> None:
        for address, kind in self.memory.numbers.items():
            size = kind.itemsize
            ours = np.frombuffer(bytes(self.memory.written[address + i] for i in range(size)), kind)[0]
            host = np.frombuffer(ctypes.string_at(address, size), kind)[0]
            self.numbers += 1
            if ours.tobytes() == host.tobytes() or ours != ours and host != host:
                continue
            near = self.powers and kind.kind == "f"  # else zeros of other signs differ, too
            if not near or not abs(ours - host) <= ULPS_OF_POWERS * np.spacing(max(abs(ours), abs(host))):
                self.wrong.append(f"{name}: the device writes {ours!r}, the host {host!r}")

    def whole(self, result: torch.Tensor) -> None:
        """That the last launch wrote all of this."""
        start = result.data_ptr()
        size = result.element_size() // (2 if result.is_complex() else 1)
        missing = [a for a in range(start, start + result.nbytes, size) if a not in self.memory.written]
        if missing:
            self.wrong.append(f"{len(missing)} numbers of the result are not written")


def numbers(*shape: int, seed: int, dtype: torch.dtype = F32) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
    made = torch.complex(made, made.flip(-1)) if dtype.is_complex else made
    return made.to(dtype)


def products(check: Callable[[torch.Tensor], None]) -> None:
    """Zeros, infinities and nan, strides, broadcasting, and more numbers than a block has threads."""
    call = torch.ops.manualgrad.strong_times
    hard = torch.tensor([0.0, -0.0, 1.5, float("inf"), float("nan"), -2.0])
    for dtype in (F32, F64, HALF, BF16, C64, C128, C32):
        a, b = hard.to(dtype), hard.to(dtype)[:, None] * 1
        check(call(a, b))
        check(call(numbers(3, 4, 5, seed=1, dtype=dtype).mT, numbers(5, 1, seed=2, dtype=dtype)))
    check(call(numbers(300, seed=3), numbers(2, 300, seed=4)))


def norms(check: Callable[[torch.Tensor], None], *powers: float) -> None:
    call = torch.ops.manualgrad.norm_backward
    for dtype in (F32, F64, HALF, BF16, C64, C128):
        for p in powers:
            for shape, dim in (((4, 7), [1]), ((3, 5, 2), [0, 2]), ((2, 40), [])):
                x = numbers(*shape, seed=5, dtype=dtype)
                x.view(-1)[::3] = 0
                if p == float("inf"):
                    x.view(-1)[1] = x.view(-1)[4]
                norm = torch.linalg.vector_norm(x, p, dim or None)
                grad = numbers(*norm.shape, seed=6).to(norm.dtype)
                check(call(grad, x, p, norm, dim or None, False))


def distances(check: Callable[[torch.Tensor], None], *powers: float) -> None:
    call = torch.ops.manualgrad.cdist_backward
    for dtype in (F32, F64):
        for p in powers:
            for rows, columns in ((6, 3), (70, 9), (3, 200)):
                x1, x2 = numbers(2, columns, seed=7, dtype=dtype), numbers(rows, columns, seed=8, dtype=dtype)
                check(call(numbers(2, rows, seed=9, dtype=dtype), x1, x2, p, torch.cdist(x1, x2, p)))


def triangles(check: Callable[[torch.Tensor], None]) -> None:
    """A thread for each matrix, and a group of lanes."""
    call = torch.ops.manualgrad.linalg_solve_triangular_backward.kernel
    for dtype in (F32, F64, C64, C128):
        for n, batch in ((2, 70), (3, 3), (4, 3), (6, 2), (20, 1)):
            a = numbers(batch, n, n, seed=10, dtype=dtype).triu() + 3 * torch.eye(n)
            for columns in (n, 3):
                x, grad = (numbers(batch, n, columns, seed=seed, dtype=dtype) for seed in (11, 12))
                for result in call(grad, a.to(dtype), x, True, True, False):
                    check(result)


def factors(check: Callable[[torch.Tensor], None]) -> None:
    for dtype in (F32, F64, C64, C128):
        for n, batch in ((2, 70), (3, 3), (4, 3), (6, 2), (20, 1)):
            lower = (numbers(batch, n, n, seed=13, dtype=dtype).tril() + 3 * torch.eye(n)).to(dtype)
            other = numbers(batch, n, n, seed=14, dtype=dtype)
            check(torch.ops.manualgrad.cholesky_backward.kernel(other, lower, False))
            check(torch.ops.manualgrad.cholesky_jvp.kernel(other + other.mH, lower, False))


INF = float("inf")
#: unit -> the operators' definitions, calls that are the same to the bit, and calls with powers
UNITS: dict[str, tuple[list[str], Callable[..., None], Callable[..., None] | None]] = {
    "strong_times": (["strong_times(Tensor factor, Tensor other) -> Tensor"], products, None),
    "triangular": (
        [
            "linalg_solve_triangular_backward.kernel(Tensor grad, Tensor A, Tensor X, bool upper, bool left, "
            "bool unitriangular) -> (Tensor, Tensor)"
        ],
        triangles,
        None,
    ),
    "cholesky": (
        [
            "cholesky_backward.kernel(Tensor grad_L, Tensor L, bool upper) -> Tensor",
            "cholesky_jvp.kernel(Tensor self_t, Tensor L, bool upper) -> Tensor",
        ],
        factors,
        None,
    ),
    "norm": (
        ["norm_backward(Tensor grad, Tensor self, float p, Tensor norm, int[]? dim=None, bool keepdim=True) -> Tensor"],
        lambda check: norms(check, 1.0, 2.0, INF),
        lambda check: norms(check, 3.0, 1.5, 0.5),
    ),
    "distance": (
        ["cdist_backward(Tensor grad, Tensor x1, Tensor x2, float p, Tensor cdist) -> Tensor"],
        lambda check: distances(check, 1.0, 2.0, INF),
        lambda check: distances(check, 3.0, 1.5, 0.5),
    ),
}


def main(library: Path, texts: list[Path]) -> None:
    definitions, exact, powers = UNITS[texts[0].stem]
    torch.ops.load_library(str(library))
    operators = torch.library.Library("manualgrad", "FRAGMENT")
    for definition in definitions:
        operators.define(definition)
    for text in texts:
        witness = Witness(library, text.read_text())
        watcher = WATCHER(witness.watch)
        ctypes.CDLL(str(library)).cuda_on_host_watch_launches(watcher)
        exact(witness.whole)
        if powers is not None:
            witness.powers = True
            powers(witness.whole)
        print(next(iter(witness.wrong), f"{len(witness.launched)} kernels, {witness.numbers} numbers"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
