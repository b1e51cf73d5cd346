"""The sizes up to which kernels take matrices: those of Python are those of the kernels."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.core import libraries
from torch_manualgrad.core.libraries import kernel_limit
from torch_manualgrad.derivatives.elementwise.strong_times import strong_times

K = torch.ops.manualgrad
ROOT = Path(__file__).resolve().parents[2]
CALLS = {
    "lane_order": lambda A: K.cholesky_jvp.kernel(A, A, False),
    "cached_order": lambda A: K.cholesky_backward.kernel(A, A, False),
    "jacobi_rank": lambda A: K.eigh_jacobi(A, True),
    "jacobi_order": lambda A: K.svd_jacobi(A[:, :1]),
    "lu_small_order": K.lu_small,
    "tridiagonal_order": lambda A: K.eigh_tridiagonal(A, True),
    "elimination_order": lambda A: K.gaussian_elimination(A, A),
    "cholesky_order": lambda A: K.cholesky_factor(A, False),
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


def test_the_documents_list_the_kernels_of_each_device():
    if not (page := ROOT / "docs" / "kernels.md").exists():
        pytest.skip("not a source tree")
    text = page.read_text().split("## Which kernels there are")[1].split("##")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \| (.*) \|$", text, re.MULTILINE)
    listed = {kernel: gpu != "none" for kernels, _, gpu in rows for kernel in re.findall(r"`(\w+)`", kernels)}
    formulas = {**mg.ops, "strong_times": strong_times}
    assert listed == {name: "cuda" in one.kernels for name, one in formulas.items() if "cpu" in one.kernels}
