"""For griffe: the mathematics of the public API's docstrings, typeset as in the catalogue."""

from __future__ import annotations

from typing import Any

import griffe
from api import MODULES, public
from docstrings import markdown
from typeset import typeset

EXAMPLES = griffe.DocstringSectionKind.examples


class Mathematics(griffe.Extension):
    """Typesets what is prose in a docstring: its text, and the descriptions in its sections."""

    def __init__(self) -> None:
        self.public = {name for module in MODULES for name in public(module)}

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        shown = obj.path in self.public or (obj.parent is not None and obj.parent.path in self.public)
        for section in obj.docstring.parsed if shown and obj.docstring else []:
            if isinstance(section.value, str):
                section.value = markdown(section.value)
            elif section.kind is griffe.DocstringSectionKind.admonition:
                section.value.description = markdown(section.value.description)
            elif section.kind is not EXAMPLES:
                for element in section.value:
                    element.description = typeset(element.description)
