"""Runs each CUDA kernel once, on small arguments. compute-sanitizer runs this file, and test_kernels_on_cuda.py imports it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from cuda_on_host.cases import CASES
from helpers.factors import moved, outputs
from torch import Tensor


def call(case: str, device: str) -> Callable[[], tuple[Tensor, ...]]:
    """Calls the kernel of this case on arguments that are there."""
    packet: Any = getattr(torch.ops.manualgrad, case.split()[0])
    op = packet.kernel if "kernel" in packet.overloads() else packet.default
    given = moved(CASES[case](), lambda x: x.to(device))
    return lambda: outputs(op(*given))


def results(case: str, device: str) -> tuple[Tensor, ...]:
    return call(case, device)()


if __name__ == "__main__":
    begin = time.perf_counter()
    for case in CASES:
        results(case, "cuda")
        torch.cuda.synchronize()
    print(f"{len(CASES)} calls in {time.perf_counter() - begin:.0f} s")
