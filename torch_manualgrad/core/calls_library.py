"""The library in csrc/calls: found, loaded, and asked for its errors."""

from __future__ import annotations

import ctypes
import sysconfig
from typing import Any

import torch

from . import kernels

__all__ = ["checked", "library"]

# each returns a number, which is negative where it fails
_RETURNING = (
    "activate", "attach", "detach", "table", "hold", "layer", "drop_layer", "ended", "thread", "scope", "scope_layers",
)  # fmt: skip
_RETURNING_NUMBERS = ("numbers_attach", "numbers_detach", "node_types")
_RETURNING_NESTED = ("before", "attach", "attach_buffers", "detach", "continues")
_RETURNING_CUSTOM = ("attach", "act", "detach", "count")


def _load() -> Any:
    path = kernels.library_path(f"calls_{'_'.join(torch.__version__.split('.')[:2])}")
    # without a GIL objects of Python are laid out otherwise
    if not path.exists() or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    try:
        torch.ops.load_library(path)
        found = ctypes.PyDLL(str(path))  # with the GIL held: a fork then meets no change that is half done
        found.manualgrad_calls_error.restype = ctypes.c_char_p
        found.manualgrad_calls_node_type.restype = ctypes.c_void_p
        found.manualgrad_calls_node_type.argtypes = (ctypes.c_int64,)
        nested, custom = (
            [f"{of}_{n}" for n in names] for of, names in (("nested", _RETURNING_NESTED), ("custom", _RETURNING_CUSTOM))
        )
        for name in (*_RETURNING, *_RETURNING_NUMBERS, *nested, *custom):
            getattr(found, f"manualgrad_calls_{name}").restype = ctypes.c_int64
    except (AttributeError, OSError, RuntimeError):  # of another build: the general kernel is as right
        return None
    return found


library: Any = _load()  # None: there is none for this torch


def checked(result: int) -> int:
    """What a function of the library has returned.

    Raises:
        RuntimeError: it has failed, and why.
    """
    if result < 0:
        raise RuntimeError(f"torch_manualgrad: {library.manualgrad_calls_error().decode()}")
    return result
