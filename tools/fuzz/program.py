"""A program: straight-line code over tensors, as text that is compiled, run, cut and printed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.testing.inputs import tree

HEADER = """import torch
import torch.nn.functional as F
import torch_manualgrad as mg

aten = torch.ops.aten
rules = mg.rules
"""


@dataclass(frozen=True)
class Line:
    """One statement.

    Attributes:
        targets: the names that it binds; "_" for a result that nothing uses.
        template: its right-hand side, with {0}, {1}, ... for the names that it uses.
        uses: these names, of earlier lines, inputs and constants.
        operator: the entry of the pool that it is from.
    """

    targets: tuple[str, ...]
    template: str
    uses: tuple[str, ...]
    operator: str = ""

    @property
    def results(self) -> tuple[str, ...]:
        """The targets that are names."""
        return tuple(t for t in self.targets if t not in ("_", "*_"))

    @property
    def writes(self) -> bool:
        """Whether it writes to one of its arguments."""
        return self.operator.startswith("write: ") or re.match(r"aten\.\w+_\.", self.template) is not None

    @property
    def text(self) -> str:
        right = self.template.format(*self.uses)
        return f"{', '.join(self.targets)} = {right}" if self.targets else right


@dataclass(frozen=True)
class Program:
    """Inputs, constants, lines, and the names that are returned."""

    inputs: dict[str, Tensor]
    constants: dict[str, Any]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    #: constant -> an expression for it, where it cannot be written as a literal
    origins: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        body = "".join(f"    {line.text}\n" for line in self.lines)
        ending = "," if len(self.outputs) == 1 else ""
        return f"def program({', '.join(self.inputs)}):\n{body}    return {', '.join(self.outputs)}{ending}\n"

    @cached_property
    def function(self) -> Any:
        """The program as a function of its inputs."""
        names = {"torch": torch, "F": F, "mg": mg, "aten": torch.ops.aten, "rules": mg.rules, "tensors": tree.tensors}
        names |= self.constants
        exec(compile(self.text, "<program>", "exec"), names)
        return names["program"]

    @property
    def operators(self) -> list[str]:
        return [line.operator for line in self.lines if line.operator]

    @property
    def literals(self) -> str:
        """The assignments that make inputs and constants."""
        values = {**self.constants, **self.inputs}
        return "".join(f"{name} = {self.origins.get(name) or literal(x)}\n" for name, x in values.items())

    @property
    def script(self) -> str:
        """The program as a file: imports, inputs, the function."""
        tensors = "from torch_manualgrad.testing.inputs.tree import tensors\n" if "tensors(" in self.text else ""
        return f"{HEADER}{tensors}\n{self.literals}\n\n{self.text}"

    def values(self) -> dict[str, Any]:
        """The value of each name, before any later line writes to it."""
        known: dict[str, Any] = {**self.inputs, **self.constants}
        probe = replace(self, lines=(), outputs=())
        for line in self.lines:
            outputs = line.results or line.uses[:1]
            part = replace(probe, inputs={u: known[u] for u in line.uses}, lines=(line,), outputs=outputs)
            with torch.no_grad():
                found = part.function(*part.inputs.values())
            known.update(zip(outputs, found, strict=True))
        return known

    def pruned(self) -> Program:
        """Without inputs and constants that nothing uses."""
        used = {u for line in self.lines for u in line.uses} | set(self.outputs)
        return replace(
            self,
            inputs={k: x for k, x in self.inputs.items() if k in used},
            constants={k: x for k, x in self.constants.items() if k in used},
        )

    def unused(self) -> Iterable[int]:
        """The lines whose results nothing uses; these may still write to what others use."""
        used = set(self.outputs) | {u for line in self.lines for u in line.uses}
        return [i for i, line in enumerate(self.lines) if not used & set(line.targets)]


def literal(x: Any) -> str:
    """An expression that makes an equal value."""
    if not isinstance(x, Tensor):
        return repr(x)
    if x.layout is not torch.strided:
        return f"{literal(x.to_dense())}.to_sparse(layout={x.layout})"
    return f"torch.tensor({x.resolve_conj().resolve_neg().tolist()!r}, dtype={x.dtype})"
