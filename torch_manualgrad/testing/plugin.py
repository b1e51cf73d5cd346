"""pytest plugin: the fixture `derivative_check` and the marker `derivatives`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .report import Report


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
    # imported on use, so that the plugin costs a session nothing where nobody asks for it
    from .check import check

    return check
