"""Decompositions of a batch by LAPACK, with the matrices divided among threads.

PyTorch passes the matrices to LAPACK one after the other, and LAPACK gains little from several threads for a matrix of
order 100. Here each thread decomposes a part of them with PyTorch's own operator. The results of a matrix are bitwise
identical to PyTorch's own on one thread; PyTorch's results on several threads differ from those in the last bits.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ..core.internals import (
    PLAIN,
    below_autograd,
    bits_unread,
    is_autocast_enabled,
    only_autograd,
    stay_on_this_thread,
    values_hidden,
)

# Batches with a smaller sum of m n min(m, n), with and without vectors, are not worth the threads: LAPACK needs a few
# milliseconds for them on one thread.
_LEAST_WORK = {True: 2**20, False: 2**22}

_ALIGNMENT = 64  # bytes, of PyTorch's memory; the last bits of LAPACK's results depend on the alignment of a matrix

_process = os.getpid()


@functools.cache
def _workers() -> ThreadPoolExecutor | None:
    """Threads that each run LAPACK on one thread; None if that is impossible here."""
    workers = ThreadPoolExecutor(os.cpu_count(), "torch_manualgrad", stay_on_this_thread)
    return workers if workers.submit(torch.get_num_threads).result() == 1 else None


@functools.lru_cache(100)
def _kinds(op: Any, shape: Sequence[int], dtype: torch.dtype, options: Sequence[Any]) -> list[dict[str, Any]]:
    """Size, strides and dtype of the operator's results: matrices are column-major, as LAPACK writes them."""
    kinds = []
    for x in op(torch.empty(shape, dtype=dtype, device="meta"), *options):
        column_major = x.dim() == len(shape)
        stride = (
            torch.empty_like(x.mT, memory_format=torch.contiguous_format).mT.stride() if column_major else x.stride()
        )
        kinds.append({"size": x.shape, "stride": stride, "dtype": x.dtype})
    return kinds


def on_threads(op: Any, names: Sequence[str], vectors: bool, A: Tensor, *options: Any) -> tuple[Tensor, ...]:
    """Decompose a batch of matrices.

    Args:
        op: the operator, called as ``op(A, *options)``, or with the arguments ``names`` too.
        names: the arguments of the operator that its results are written to.
        vectors: whether to compute vectors.
        A: (*, m, n).
        options: further arguments of the operator.

    Returns:
        The operator's results, with the same strides.

    Raises:
        RuntimeError: as the operator.
    """
    starts = _starts(A, vectors)
    workers = _workers() if len(starts) > 1 else None
    if workers is not None:
        try:
            return _divided(workers, starts, op, names, A, options)
        # torch 2.10 asserts the types of arguments when only shapes are needed; the operator itself raises the right
        # error
        except (RuntimeError, AssertionError):
            pass  # if LAPACK refuses a matrix, the call below reports its number in the whole batch
    found: tuple[Tensor, ...] = op(A, *options)
    return found


def _starts(A: Tensor, vectors: bool) -> list[int]:
    """The first matrix of each thread's part; empty if one thread takes all."""
    threads = torch.get_num_threads()
    if threads == 1 or A.dim() < 3 or A.device.type != "cpu" or type(A) not in PLAIN or os.getpid() != _process:
        return []
    if not only_autograd() or is_autocast_enabled() or values_hidden() or bits_unread():
        return []
    if A.numel() * min(A.shape[-2:]) < _LEAST_WORK[vectors]:
        return []
    count, singular = math.prod(A.shape[:-2]), min(A.shape[-2:]) * A.dtype.to_real().itemsize
    step = _ALIGNMENT // math.gcd(_ALIGNMENT, singular)  # matrices, so that each is aligned as in the whole batch
    step *= -(-count // (step * threads))
    return list(range(0, count, step))


def _divided(
    workers: ThreadPoolExecutor, starts: list[int], op: Any, names: Sequence[str], A: Tensor, options: Sequence[Any]
) -> tuple[Tensor, ...]:
    batch = A.shape[:-2]
    matrices = A.reshape(-1, *A.shape[-2:])
    results = tuple(torch.empty_strided(**kind) for kind in _kinds(op, A.shape, A.dtype, options))
    # a result that is not requested has no entries
    whole = [x.view(-1, *x.shape[len(batch) :]) if x.numel() else None for x in results]

    def decompose(part: slice) -> None:
        with below_autograd():
            out = [A.new_empty(0) if x is None else x[part] for x in whole]
            op(matrices[part], *options, **dict(zip(names, out)))

    parts = [slice(start, end) for start, end in zip(starts, [*starts[1:], len(matrices)])]
    for done in [workers.submit(decompose, part) for part in parts]:
        done.result()
    return results
