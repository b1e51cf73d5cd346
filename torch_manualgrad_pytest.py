"""pytest plugin: the fixture `derivative_check` and the marker `derivatives`.

A module of its own beside the package: pytest imports it in every run, and importing the package imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch_manualgrad.testing import Report


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "derivatives: checks derivatives with torch_manualgrad.testing (select with -m derivatives)"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "derivative_check" in getattr(item, "fixturenames", ()):
            item.add_marker("derivatives")


@pytest.fixture
def derivative_check() -> Callable[..., Report]:
    """`torch_manualgrad.testing.check`: ``derivative_check(fn, samples)`` fails with a table of what does not hold."""
    from torch_manualgrad.testing import check

    return check
