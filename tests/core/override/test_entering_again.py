"""The cost of entering a block again, counted in calls of Python functions: it must not grow with the number of rules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

import torch_manualgrad as mg


def _python_calls(function: Callable[[], Any]) -> int:
    count = 0

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def _enter(*names: str) -> None:
    with mg.override(*names):
        pass


@pytest.mark.parametrize("names", [(), ("*",)], ids=["override()", "*"])
def test_entering_again_does_not_visit_the_rules(names: tuple[str, ...]) -> None:
    _enter(*names)
    _enter("aten::tanh")
    one, many = _python_calls(lambda: _enter("aten::tanh")), _python_calls(lambda: _enter(*names))
    # the replacements that are switched on and off are few
    assert many < one + 60, (one, many)
