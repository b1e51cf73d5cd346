"""Threads: the number that PyTorch and BLAS use for one call."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

__all__ = ["stay_on_this_thread"]


def stay_on_this_thread() -> None:
    """Let PyTorch, BLAS and LAPACK use one thread for calls from this thread; others are not affected.

    ``torch.set_num_threads`` would also change the number of threads that later threads start with. It has no effect if
    PyTorch is built without OpenMP: then ``torch.get_num_threads()`` is unchanged.
    """
    torch.get_num_threads()  # PyTorch initializes a new thread at first use: force that now
    try:
        library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
    except (StopIteration, OSError):
        return
    for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):  # of MKL, the name in C
        setter = getattr(library, name, None)
        if setter is not None:
            setter(1)
