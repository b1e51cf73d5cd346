"""Calls as arguments of the checker: a `Sample`, or a tuple of positional arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from ...arguments import described
from ...core.rule import Sample

__all__ = ["as_sample", "as_samples"]


def as_sample(given: Any, name: str) -> Sample:
    """Convert one call to a `Sample`.

    Args:
        given: a `Sample`, or a tuple or list of positional arguments.
        name: its name in errors.

    Returns:
        The call as a `Sample`.

    Raises:
        TypeError: ``given`` is something else; a tensor alone is ambiguous, as a tensor can be iterated over.
    """
    if isinstance(given, Sample):
        return given
    if isinstance(given, (tuple, list)):
        return Sample(*given)
    hint = "; a call with one argument x is the tuple (x,)" if isinstance(given, Tensor) else ""
    raise TypeError(f"{name}: expected a Sample or a tuple of arguments, got {described(given)}{hint}")


def as_samples(given: Iterable[Any], name: str) -> Iterator[Sample]:
    """Convert several calls, one at a time.

    Args:
        given: an iterable of calls, each as `as_sample` takes it.
        name: its name in errors.

    Yields:
        The calls.

    Raises:
        TypeError: ``given`` is a tensor, or an entry is not a call.
    """
    if isinstance(given, Tensor):
        raise TypeError(f"{name}: expected an iterable of calls, got {described(given)}; one call f(x) is [(x,)]")
    for position, one in enumerate(given):
        yield as_sample(one, f"{name}[{position}]")
