"""Fixtures that several folders use."""

from __future__ import annotations

import pytest
import torch

from torch_manualgrad.core import kernels


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
