"""The compiled kernels: found, loaded, and accounted for. A missing or broken library never stops the import."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["KernelLibrary", "library_path", "load", "status"]

_FOLDER = Path(__file__).resolve().parents[1] / "lib"
_lock = threading.Lock()
_libraries: list[KernelLibrary] = []


@dataclass(frozen=True)
class KernelLibrary:
    """One device's kernels: where they are, whether they act, and why not."""

    device: str
    path: Path | None
    loaded: bool
    reason: str


def library_path(name: str) -> Path:
    """Where the build puts the library of this name."""
    return _FOLDER / f"libmanualgrad_{name}.so"


def load() -> list[KernelLibrary]:
    """Load what was built and can run here; once for each process. Returns `status()`."""
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
