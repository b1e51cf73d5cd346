"""PyTorch's own table of derivatives, as far as tests ask: torchgen has it in its package data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

PATH = Path(torch.__file__).parents[1] / "torchgen" / "packaged" / "autograd" / "derivatives.yaml"


@dataclass(frozen=True)
class Entry:
    """One entry: the operator, its schema, and the lines below by their keys."""

    name: str
    schema: str
    lines: dict[str, str]

    @property
    def is_in_place(self) -> bool:
        return self.name.partition(".")[0].endswith("_")

    @property
    def formulas(self) -> list[str]:
        return [text for key, text in self.lines.items() if key not in ("dispatch", "output_differentiability")]

    @property
    def is_marked_nondifferentiable(self) -> bool:
        """No output is, or no input has a formula that says more than this."""
        if "output_differentiability" in self.lines:
            return self.lines["output_differentiability"].replace(" ", "") == "[False]"
        return bool(self.formulas) and all(text == "non_differentiable" for text in self.formulas)


def entries() -> list[Entry]:
    """All of them; without the YAML package, whose syntax the file uses little of."""
    found: list[Entry] = []
    for block in re.split(r"^- name: ", PATH.read_text(), flags=re.MULTILINE)[1:]:
        first, _, rest = block.partition("\n")
        lines = dict(re.findall(r"^  (\w[\w, ]*): (.+?) *$", rest, re.MULTILINE))
        found.append(Entry("aten::" + first.partition("(")[0].strip(), first.strip(), lines))
    return found
