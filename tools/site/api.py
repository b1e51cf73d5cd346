"""The public names of the package's modules."""

from __future__ import annotations

import importlib
import inspect

__all__ = ["MODULES", "public"]

MODULES = tuple(f"torch_manualgrad{name}" for name in ("", ".linalg", ".nested", ".forward_ad", ".testing"))


def public(module: str) -> list[str]:
    """The classes and functions that a module exports, by the names of where they are written.

    A module may have the name of a function, as `torch_manualgrad.linalg.lu`.
    """
    found = importlib.import_module(module)
    things = [getattr(found, name) for name in found.__all__]
    modules = [t.__name__ for t in things if inspect.ismodule(t) and hasattr(t, "__all__")]
    elsewhere = {name for inner in modules for name in public(inner)}
    names = [f"{t.__module__}.{t.__qualname__}" for t in things if inspect.isclass(t) or inspect.isroutine(t)]
    return [name for name in names if name not in elsewhere]  # each has one place
