"""State of the process that a test must leave as it was: registries, overrides, torch's global settings, kernels."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from torch_manualgrad.core import activation
from torch_manualgrad.core.override import kernels
from torch_manualgrad.core.override.replacements import replacements
from torch_manualgrad.core.rule import catalogue, formulas, samples
from torch_manualgrad.core.rule.definition import rules

# Tables by name. An entry may be added by a test under a name that the package does not own, as "mgtest::sine".
TABLES: dict[str, Callable[[], Mapping[str, Any]]] = {
    "mg.rules": lambda: rules._entries,
    "the catalogue": lambda: catalogue.catalogue._entries,
    "mg.ops": lambda: formulas.ops._entries,
    "replacements": lambda: replacements._entries,
    "samples": lambda: samples._samplers,
    "probes": lambda: samples._probes,
}

# Settings of torch, and the depths of its stacks.
SETTINGS: dict[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "number of threads": torch.get_num_threads,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "anomaly mode": torch.is_anomaly_enabled,
    "precision of float32 matrix products": torch.get_float32_matmul_precision,
    "forward AD level": lambda: forward_ad._current_level,
    "dispatch modes": torch._C._len_torch_dispatch_stack,
    "function modes": torch._C._len_torch_function_stack,
    "functorch level": torch._C._functorch.maybe_current_level,
    "blocks without overrides": lambda: kernels.without_overrides.depth,
    "garbage collector": gc.isenabled,
}

samples._load()  # the package registers its own the first time that samples are read: before any test

_kernels: frozenset[str] = frozenset()


def _registered_kernels() -> frozenset[str]:
    """The kernels that are registered from Python, as "aten/sin/Autograd"."""
    global _kernels
    if len(_kernels) != len(torch.library._impls):  # nearly always equal, and copying takes a tenth of a millisecond
        _kernels = frozenset(torch.library._impls)
    return _kernels


def _is_left(kernel: str) -> bool:
    """Whether a kernel that is registered now is a test's own.

    The package keeps its kernels for the life of the process. PyTorch registers some of its own late, at other keys.
    """
    space, name, key = kernel.split("/")
    if space != "aten" or not key.startswith(("Autograd", "CPU")) or key == "AutogradNestedTensor":
        return False
    return f"{space}::{name}" not in kernels._operators.keys() | kernels._in_place.keys()


class _State:
    def __init__(self) -> None:
        self.tables = {what: dict(read()) for what, read in TABLES.items()}
        self.settings = {what: read() for what, read in SETTINGS.items()}
        self.active = activation.truth.entries
        self.kernels = _registered_kernels()

    def changes(self) -> Iterator[str]:
        """What is different now."""
        for what, old in self.tables.items():
            new = TABLES[what]()
            if new == old:
                continue
            yield from (f"{what}: {name} is gone" for name in old.keys() - new.keys())
            yield from (
                f"{what}: {name} is another entry" for name in old.keys() & new.keys() if old[name] is not new[name]
            )
            for name in new.keys() - old.keys():
                if name.startswith("aten::"):
                    yield f"{what}: {name} is left registered"
        for what, old in self.settings.items():
            if (new := SETTINGS[what]()) != old:
                yield f"{what}: {new} instead of {old}"
        active, kernels = activation.truth.entries, _registered_kernels()
        yield from (f"still active: {handle!r}" for handle in active if handle not in self.active)
        yield from (f"no longer active: {handle!r}" for handle in self.active if handle not in active)
        if kernels is not self.kernels:  # the difference of large sets takes a tenth of a millisecond
            yield from (
                f"kernel left in the dispatcher: {kernel}" for kernel in filter(_is_left, kernels - self.kernels)
            )


@contextlib.contextmanager
def leaving_nothing_behind() -> Iterator[None]:
    """Fails if the block changes global state that other tests depend on."""
    before = _State()
    yield
    if changes := sorted(before.changes()):
        pytest.fail("global state is left changed:\n" + "\n".join(changes), pytrace=False)
