"""PyTorch's own table of derivatives, derivatives.yaml, and what this package says of each of its entries.

Every wheel of torch has the table, in the package data of torchgen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core.catalogue import catalogue
from ..core.rule import rules

__all__ = ["PATH", "Entry", "entries"]

PATH = Path(torch.__file__).parents[1] / "torchgen" / "packaged" / "autograd" / "derivatives.yaml"


@dataclass(frozen=True)
class Entry:
    """One entry of the table.

    Attributes:
        name: the operator, ``"aten::sum.dim_IntList"``.
        schema: as the table has it.
        lines: the lines below, by their keys: inputs, ``result``, ``output_differentiability``, ``dispatch``.
    """

    name: str
    schema: str
    lines: dict[str, str]

    @property
    def is_in_place(self) -> bool:
        return self.name.partition(".")[0].endswith("_")

    @property
    def functional(self) -> str:
        """The operator that does not write to its argument, and has the same derivative."""
        base, dot, overload = self.name.partition(".")
        name = base.removesuffix("_") + dot + overload
        return {"aten::transpose": "aten::transpose.int"}.get(name, name)  # the one whose overload has another name

    @property
    def formulas(self) -> list[str]:
        return [text for key, text in self.lines.items() if key not in ("dispatch", "output_differentiability")]

    @property
    def is_marked_nondifferentiable(self) -> bool:
        """No output is, or no input has a formula that says more than this."""
        if "output_differentiability" in self.lines:
            return self.lines["output_differentiability"].replace(" ", "") == "[False]"
        return bool(self.formulas) and all(text == "non_differentiable" for text in self.formulas)

    @property
    def kind(self) -> str:
        """What the registry says of the operator: "rule", "elementwise", "linear", a kind of entry of the catalogue, "absent"
        (declared as not in this torch), or "" where it says nothing."""
        for name in dict.fromkeys((self.name, self.functional)):
            if name in rules:
                return rules[name].kind
            if name in catalogue:
                return catalogue[name].kind
            if name in rules.absent:
                return "absent"
        return ""


def entries() -> list[Entry]:
    """All entries of the installed torch; without the YAML package, whose syntax the table uses little of.

    Raises:
        FileNotFoundError: this torch comes without its table.
    """
    found: list[Entry] = []
    for block in re.split(r"^- name: ", PATH.read_text(), flags=re.MULTILINE)[1:]:
        first, _, rest = block.partition("\n")
        lines = dict(re.findall(r"^  (\w[\w, ]*): (.+?) *$", rest, re.MULTILINE))
        found.append(Entry("aten::" + first.partition("(")[0].strip(), first.strip(), lines))
    return found
