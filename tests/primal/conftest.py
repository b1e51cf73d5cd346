"""Fixtures: where the compiled kernels are."""

from __future__ import annotations

import pytest

from torch_manualgrad.core import libraries

LIBRARIES = {library.device: library for library in libraries.load()}


@pytest.fixture
def on_cpu() -> None:
    if not LIBRARIES["cpu"].loaded:
        pytest.skip(LIBRARIES["cpu"].reason)
