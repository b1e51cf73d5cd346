"""The sizes up to which kernels take matrices: those of Python are those of the kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import torch_manualgrad as mg  # noqa: F401  defines the operators
from torch_manualgrad.core import libraries
from torch_manualgrad.core.libraries import kernel_limit

K = torch.ops.manualgrad
ROOT = Path(__file__).resolve().parents[2]
CALLS = {
    "lane_order": lambda A: K.cholesky_jvp.kernel(A, A, False),
    "cached_order": lambda A: K.cholesky_backward.kernel(A, A, False),
    "jacobi_rank": lambda A: K.eigh_jacobi(A, True),
    "jacobi_order": lambda A: K.svd_jacobi(A[:, :1]),
    "lu_small_order": K.lu_small,
    "tridiagonal_order": lambda A: K.eigh_tridiagonal(A, True),
}


@pytest.fixture(autouse=True)
def built() -> None:
    (library,) = (library for library in libraries.load() if library.device == "cpu")
    if not library.loaded:
        pytest.skip(library.reason)


@pytest.mark.parametrize("name", CALLS)
def test_a_limit_is_where_the_kernel_ends(name):
    n = kernel_limit(name)
    CALLS[name](torch.eye(n))
    with pytest.raises(RuntimeError, match="expected si"):
        CALLS[name](torch.eye(n + 1))


def test_the_sizes_of_python_are_current(monkeypatch):
    if not (ROOT / "csrc").exists():
        pytest.skip("not a source tree")
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    from tools import limits

    assert limits.PATH.read_text() == limits.module(limits.HEADER.read_text()), "python -m tools.limits writes the file"


def test_an_unknown_name():
    with pytest.raises(KeyError, match="no_such_limit"):
        kernel_limit("no_such_limit")


def test_without_a_library(monkeypatch):
    kernel_limit.cache_clear()
    monkeypatch.setattr(libraries, "load", list)
    assert kernel_limit("lane_order") == 0
    kernel_limit.cache_clear()
