"""Fixtures: where the compiled kernels are."""

from __future__ import annotations

import pytest
import torch

from torch_manualgrad.core import libraries

LIBRARIES = {library.device: library for library in libraries.load()}


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    library = LIBRARIES[request.param]
    if library.path is None:
        pytest.skip(library.reason)
    assert library.loaded, library.reason
    return request.param


@pytest.fixture
def on_cpu() -> None:
    if not LIBRARIES["cpu"].loaded:
        pytest.skip(LIBRARIES["cpu"].reason)
