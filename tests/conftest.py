"""Fixtures that several folders use, the guard of global state, and the garbage collector during collection."""

from __future__ import annotations

import gc
from collections.abc import Generator
from typing import Any

import pytest
import torch
from helpers.isolation import leaving_nothing_behind

from torch_manualgrad.core import internals, libraries


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Tests live until the end: a collection that went through them, or a search for referrers, would take seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Every device that has compiled kernels here."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    (library,) = (library for library in libraries.load() if library.device == request.param)
    if library.path is None:
        pytest.skip(library.reason)
    assert library.loaded, library.reason
    return request.param


@pytest.fixture(autouse=True, scope="module")
def modules_leave_nothing_behind() -> Generator[None, Any, Any]:
    """The module fixtures of a file undo their changes of global state. The file's last test has the error."""
    with leaving_nothing_behind():
        yield


@pytest.fixture(autouse=True)
def tests_leave_nothing_behind(modules_leave_nothing_behind: None) -> Generator[None, Any, Any]:
    """A test that leaves global state changed fails, instead of those that run after it."""
    with leaving_nothing_behind():
        yield


@pytest.fixture(autouse=True)
def no_graph_has_tangents(tests_leave_nothing_behind: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a graph with dual numbers was compiled, by another test, no call takes the fast path any more."""
    monkeypatch.setattr(internals.functorch, "_tangents_in_graphs", False)
