"""Refuses a second import of modules whose state and operators belong to the process."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["imported_again", "refuse_reload"]


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


if hasattr(torch.ops.manualgrad, "norm_backward"):  # the package was imported before, or the import was begun
    raise imported_again(__name__.partition(".")[0])
