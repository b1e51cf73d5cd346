"""LaTeX as MathML, which browsers typeset without a script."""

from __future__ import annotations

from functools import cache
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert

__all__ = ["mathml"]

NAMESPACE = "http://www.w3.org/1998/Math/MathML"
ROWS = {"math", "mrow", "mstyle", "msqrt"}
SCRIPTED = {"msub", "msup", "msubsup", "munder", "munderover"}
THIN = "0.167em"
MINUS = "\N{MINUS SIGN}"
# A minus after one of these is a sign, no difference: browsers know that only at the start of a row.
BEFORE_SIGN = set("=,([<>≤≥")
ElementTree.register_namespace("", NAMESPACE)


@cache
def mathml(latex: str, display: str = "inline") -> str:
    """MathML with the spaces, signs and bars that latex2mathml leaves out."""
    tree = ElementTree.fromstring(convert(latex, display=display))
    for element in [*tree.iter()]:
        if _tag(element) == "mover" and element[1].text == "\N{HORIZONTAL BAR}":
            element[1].text = "\N{OVERLINE}"  # which browsers stretch
            element[1].set("stretchy", "true")
        if _tag(element) == "mo" and _is_function(element):
            element.tag = f"{{{NAMESPACE}}}mi"  # as an operator it has wide spaces on both sides
        if _tag(element) in ROWS:
            _space(element)
    return ElementTree.tostring(tree, encoding="unicode")


def _tag(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _is_function(element: Element) -> bool:
    """A name such as log, perhaps with an index or exponent."""
    if _tag(element) in SCRIPTED:
        return _is_function(element[0])
    text = element.text or ""
    return _tag(element) in ("mi", "mo") and len(text) > 1 and text.isalpha() and text.isascii()


def _space(row: Element) -> None:
    """Thin spaces around the names of functions, except at brackets and operators; and which minus is a sign."""
    children = [*row]
    added = 0
    for k, element in enumerate(children):
        before = children[k - 1] if k else None
        if element.text == MINUS and before is not None and _tag(before) == "mo" and before.text in BEFORE_SIGN:
            element.set("form", "prefix")
        if before is None or "mspace" in (_tag(element), _tag(before)):
            continue
        left = _is_function(before) and _tag(element) != "mo"
        right = _is_function(element) and (_tag(before) != "mo" or before.text in ")]")
        if left or right:
            row.insert(k + added, Element(f"{{{NAMESPACE}}}mspace", width=THIN))
            added += 1
