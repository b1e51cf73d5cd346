"""`env`: versions, and which kernels are loaded."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from .. import __version__
from ..core import libraries
from ..core.override import compiled_calls
from ..core.rule import ops, rules
from .answer import Answer, Fields
from .registry import ended_claims

__all__ = ["environment"]


def environment() -> Answer:
    """The versions and libraries that a bug report should include."""
    cuda = torch.version.cuda or "none"
    if torch.version.cuda:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        cuda += f", devices: {', '.join(names) or 'none'}"
    pairs = [
        ("torch_manualgrad", f"{__version__} ({Path(__file__).parents[1]})"),
        ("torch", torch.__version__),
        ("CUDA of torch", cuda),
        ("Python", platform.python_version()),
        ("platform", platform.platform()),
        ("CPU", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"),
        ("rules, formulas", f"{len(rules)}, {len(ops)}"),
    ]
    for library in libraries.status():
        state = f"loaded from {library.path}" if library.loaded else f"not loaded: {library.reason}"
        pairs.append((f"{library.device} kernels", state))
    pairs.append(
        ("calls", "in C++" if compiled_calls.loaded() else "in Python: csrc/calls was not built for this torch")
    )
    pairs += [("absent", reason) for reason in rules.absent.values()]
    pairs += [("claim ended", f"{rule.name}: {ended}") for rule in rules.values() for ended in ended_claims(rule)]
    return Answer([Fields("environment", pairs)])
