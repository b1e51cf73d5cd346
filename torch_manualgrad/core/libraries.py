"""Finds and loads the compiled libraries, and reads their limits. A missing or broken library never stops the import."""

from __future__ import annotations

import ctypes
import functools
import sysconfig
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .limits import LIMITS

__all__ = [
    "KernelLibrary",
    "calls_library",
    "checked",
    "forget_recordings",
    "is_playing",
    "kernel_limit",
    "library_path",
    "load",
    "looked_through",
    "refuse_recording",
    "status",
]


_FOLDER = Path(__file__).resolve().parents[1] / "lib"
_lock = threading.Lock()
_libraries: list[KernelLibrary] = []


@dataclass(frozen=True)
class KernelLibrary:
    """The kernels for one device: the file, whether it is loaded, and the reason if not."""

    device: str
    path: Path | None
    loaded: bool
    reason: str


def library_path(name: str) -> Path:
    """The path of the library of this name."""
    return _FOLDER / f"libmanualgrad_{name}.so"


def load() -> list[KernelLibrary]:
    """Load the built libraries that can run here; once per process. Returns `status()`."""
    with _lock:
        if not _libraries:
            _libraries.extend(_load(device) for device in ("cpu", "cuda"))
        return list(_libraries)


def status() -> list[KernelLibrary]:
    """The libraries as `load()` found them: empty before the first `load()`."""
    return list(_libraries)


def _load(device: str) -> KernelLibrary:
    path = library_path(device)
    if not path.exists():
        cause = "no compiler" if device == "cpu" else "MANUALGRAD_CUDA=0, torch without CUDA, or no nvcc"
        return KernelLibrary(
            device, None, False, f"not built: MANUALGRAD_BUILD=none or {cause} ({path} does not exist)"
        )
    if device == "cuda" and torch.version.cuda is None:
        return KernelLibrary(device, path, False, "torch has no CUDA")
    try:
        torch.ops.load_library(path)
        reason = _cuda_obstacle(path) if device == "cuda" else ""
    except (OSError, RuntimeError, AttributeError) as error:
        return KernelLibrary(device, path, False, str(error))
    return KernelLibrary(device, path, not reason, reason or "loaded")


def _cuda_obstacle(path: Path) -> str:
    """Why the CUDA library registered no kernel (the driver is older than its runtime); empty if it did."""
    ask = ctypes.CDLL(str(path)).manualgrad_cuda_obstacle
    ask.restype = ctypes.c_char_p
    answer = ask()
    return answer.decode() if answer else ""


# -- the library in csrc/calls, built for one release of torch ---------------------------------------------------------

# each returns a number, negative on failure
_RETURNING = (
    "activate", "attach", "detach", "define_rule", "define_layer", "hold", "drop_layer", "ended", "thread", "scope",
    "scope_layers", "layout", "followed", "graph_define", "graph_define_rule", "graph_drop",
)  # fmt: skip
_RETURNING_NUMBERS = ("numbers_attach", "numbers_detach", "node_types")
_RETURNING_NESTED = ("before", "attach", "attach_buffers", "detach", "continues")
_RETURNING_CUSTOM = ("attach", "act", "detach", "count")


def _load_calls() -> Any:
    path = library_path(f"calls_{'_'.join(torch.__version__.split('.')[:2])}")
    # without a GIL, Python objects have a different layout
    if not path.exists() or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    try:
        torch.ops.load_library(path)
        found = ctypes.PyDLL(str(path))  # with the GIL held: a fork then copies no unfinished change
        found.manualgrad_calls_error.restype = ctypes.c_char_p
        found.manualgrad_calls_refusal.restype = ctypes.c_char_p
        found.manualgrad_calls_node_type.restype = ctypes.c_void_p
        found.manualgrad_calls_node_type.argtypes = (ctypes.c_int64,)
        nested, custom = (
            [f"{of}_{n}" for n in names] for of, names in (("nested", _RETURNING_NESTED), ("custom", _RETURNING_CUSTOM))
        )
        for name in (*_RETURNING, *_RETURNING_NUMBERS, *nested, *custom):
            getattr(found, f"manualgrad_calls_{name}").restype = ctypes.c_int64
    except (AttributeError, OSError, RuntimeError):  # from another build: the general kernel gives the same results
        return None
    return found


calls_library: Any = _load_calls()  # None: there is none for this torch


def checked(result: int) -> int:
    """The result of a function of the library.

    Raises:
        RuntimeError: the function failed; the message says why.
    """
    if result < 0:
        raise RuntimeError(f"torch_manualgrad: {calls_library.manualgrad_calls_error().decode()}")
    return result


def looked_through(op: Any) -> None:
    """Let recordings have the calls of this operator's kernel, which is in Python, instead of the operator."""
    if calls_library is not None:
        name, overload = op._schema.name.encode(), op._schema.overload_name.encode()
        calls_library.manualgrad_calls_in_python_op(name, overload)


def refuse_recording(why: str) -> None:
    """Do not record the vjp that runs on this thread: it depends on state that the library does not see."""
    if calls_library is not None:
        calls_library.manualgrad_calls_refuse(why.encode())


def is_playing() -> bool:
    """Whether this thread replays a recording."""
    return calls_library is not None and calls_library.manualgrad_calls_playing() > 0


def forget_recordings() -> None:
    """Forget the recordings of vjps (csrc/calls/recorded.h): they may call other operators from now on."""
    if calls_library is not None:
        calls_library.manualgrad_calls_forget()


# -- limits -------------------------------------------------------------------------------------------------------------


@functools.cache
def kernel_limit(name: str) -> int:
    """The largest order n of matrices for which a compiled kernel is called; 0 without the library.

    Args:
        name: a size of ``csrc/linalg/limits.h``, for instance ``"lane_order"``.

    Raises:
        KeyError: there is no such size.
    """
    order = LIMITS[name]
    return order if any(library.loaded for library in load() if library.device == "cpu") else 0
