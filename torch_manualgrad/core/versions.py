"""Versions of torch: since when an operator exists, until when a rule's claim holds."""

from __future__ import annotations

import re

import torch

__all__ = ["UNTRIED", "parse", "reached"]

UNTRIED = "2.16"  # the first release that the package was not tried with


def parse(version: str) -> tuple[int, int]:
    """The first two numbers of a version.

    Args:
        version: ``"2.15"``, ``"2.15.0+cu130"`` or ``"2.16.0a0+git1f2e"``.

    Returns:
        Such as (2, 15).

    Raises:
        ValueError: the text does not begin with two numbers.
    """
    found = re.match(r"(\d+)\.(\d+)(?![\d])", version) if isinstance(version, str) else None
    if found is None:
        raise ValueError(f"{version!r} is no version of torch; expected one such as '2.15'")
    return int(found[1]), int(found[2])


def reached(version: str) -> bool:
    """Whether this torch is ``version`` or newer; a build on the way to a release counts as that release."""
    return parse(torch.__version__) >= parse(version)
