"""The import of this package: its own definitions, which tests check, and the error for a second import."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["defining", "imported_again", "is_defining", "refuse_reload"]

_defining = False


@contextmanager
def defining() -> Iterator[None]:
    """The import of this package's own derivatives: their checks and consequences are deferred to its end.

    The garbage collector is off: nothing made here becomes garbage, and collection would take a quarter of the time.
    """
    global _defining
    collects = gc.isenabled()
    gc.disable()
    _defining = True
    try:
        yield
    finally:
        _defining = False
        if collects:
            gc.enable()


def is_defining() -> bool:
    """Whether this package's own derivatives are being imported. Tests do the checks that definitions skip then."""
    return _defining


def imported_again(module: str) -> ImportError:
    """The error for a module that is imported a second time."""
    return ImportError(
        f"{module} is imported a second time in this process, where its operators exist already. PyTorch keeps operators "
        "for the life of a process: restart Python instead of reloading the module"
    )


def refuse_reload(namespace: dict[str, Any]) -> None:
    """Raise ImportError if the module with these globals runs a second time."""
    if namespace.setdefault("_imported", False):
        raise imported_again(namespace["__name__"])
    namespace["_imported"] = True


if hasattr(torch.ops.manualgrad, "norm_backward"):  # the package was imported before, or its import was started
    raise imported_again(__name__.partition(".")[0])
