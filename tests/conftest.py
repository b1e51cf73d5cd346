"""Fixtures that several folders use."""

from __future__ import annotations

import pytest
import torch

from torch_manualgrad.core import internals, kernels


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Every device that has compiled kernels here."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    (library,) = (library for library in kernels.load() if library.device == request.param)
    if library.path is None:
        pytest.skip(library.reason)
    assert library.loaded, library.reason
    return request.param


@pytest.fixture(autouse=True)
def no_graph_has_tangents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a graph with dual numbers was compiled, by another test, no call takes the fast path any more."""
    monkeypatch.setattr(internals.functorch, "_tangents_in_graphs", False)
