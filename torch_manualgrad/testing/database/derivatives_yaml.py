"""PyTorch's own table of derivatives, derivatives.yaml, and how this package covers each of its entries.

Every wheel of torch has the table, in the package data of torchgen.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.internals import DERIVATIVES_TABLE, table_blocks
from ...core.rule import rules
from ...core.rule.catalogue import catalogue

__all__ = ["PATH", "Entry", "entries"]

PATH = DERIVATIVES_TABLE


@dataclass(frozen=True)
class Entry:
    """One entry of the table.

    Attributes:
        name: the operator, ``"aten::sum.dim_IntList"``.
        schema: as in the table.
        lines: the lines below the schema, by their keys: inputs, ``result``, ``output_differentiability``, ``dispatch``.
    """

    name: str
    schema: str
    lines: dict[str, str]

    @property
    def is_in_place(self) -> bool:
        return self.name.partition(".")[0].endswith("_")

    @property
    def functional(self) -> str:
        """The operator with the same derivative that does not write to its argument."""
        base, dot, overload = self.name.partition(".")
        name = base.removesuffix("_") + dot + overload
        return {"aten::transpose": "aten::transpose.int"}.get(name, name)  # the one whose overload has another name

    @property
    def formulas(self) -> list[str]:
        return [text for key, text in self.lines.items() if key not in ("dispatch", "output_differentiability")]

    @property
    def is_marked_nondifferentiable(self) -> bool:
        """Whether the only output is marked non-differentiable, or every formula is ``non_differentiable``."""
        if "output_differentiability" in self.lines:
            return self.lines["output_differentiability"].replace(" ", "") == "[False]"
        return bool(self.formulas) and all(text == "non_differentiable" for text in self.formulas)

    @property
    def kind(self) -> str:
        """The operator's status in the registry: "rule", "elementwise", "linear", a kind of catalogue entry, "absent"
        (declared as not in this torch), or "" if there is none."""
        for name in dict.fromkeys((self.name, self.functional)):
            if name in rules:
                return rules[name].kind
            if name in catalogue:
                return catalogue[name].kind
            if name in rules.absent:
                return "absent"
        return ""


def entries() -> list[Entry]:
    """All entries of the installed torch, read without the YAML package: the table uses little of its syntax.

    Raises:
        FileNotFoundError: this torch comes without its table.
    """
    return [Entry("aten::" + schema.partition("(")[0].strip(), schema, lines) for schema, lines in table_blocks()]
