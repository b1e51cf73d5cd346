"""Python expressions of elementwise derivatives as LaTeX: ``(1 - self * self).rsqrt()`` becomes ``1 / sqrt(1 - x^2)``."""

from __future__ import annotations

import ast
from collections.abc import Callable

from typeset import GREEK

__all__ = ["expression"]

NAMES = {"self": "x", "other": "y", "result": "r", "grad": "g", **GREEK}
SUM, PRODUCT, POWER, ATOM = range(4)  # how tightly an expression holds together
Typeset = tuple[str, int]


# whose argument needs no brackets if it holds together
FUNCTIONS = {name: rf"\{name}" for name in ("sin", "cos", "sinh", "cosh", "log")}
# functions of any argument, with the LaTeX around it
AROUND: dict[str, Callable[[str], str]] = {
    "digamma": lambda x: rf"\psi({x})",
    "sgn": lambda x: rf"\operatorname{{sgn}}({x})",
    "erfinv": lambda x: rf"\operatorname{{erf}}^{{-1}}({x})",
    "i1": lambda x: f"I_1({x})",
    "i1e": lambda x: rf"e^{{-\vert {x} \vert}} \, I_1({x})",
    "sqrt": lambda x: rf"\sqrt{{{x}}}",
    "rsqrt": lambda x: rf"\frac{{1}}{{\sqrt{{{x}}}}}",
    "exp": lambda x: rf"e^{{{x}}}",
    "exp2": lambda x: rf"2^{{{x}}}",
    "conj": lambda x: rf"\overline{{{x}}}",
}
OPERATORS = {ast.Add: "+", ast.Sub: "-"}


class _Unknown(Exception):
    """A function without a usual sign."""


def expression(node: ast.expr) -> str | None:
    """The LaTeX of an expression; None where something in it has no usual sign."""
    try:
        return _typeset(node)[0]
    except _Unknown:
        return None


def _typeset(node: ast.expr) -> Typeset:
    match node:
        case ast.Constant(value=1j):
            return "i", ATOM
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            text = {0.5: r"\tfrac{1}{2}", 0.6931471805599453: r"\log 2"}.get(value, str(value))
            return text, ATOM
        case ast.Name(id=name):
            return NAMES.get(name, name if len(name) == 1 else rf"\text{{{name.replace('_', ' ')}}}"), ATOM
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return f"-{_at_least(operand, PRODUCT)}", SUM
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            return _product([*_factors(left), *_factors(right)])
        case ast.BinOp(op=ast.Div(), left=ast.Constant(value=0.5), right=right):
            return rf"\frac{{1}}{{2 \, {_at_least(right, PRODUCT)}}}", POWER
        case ast.BinOp(op=ast.Div(), left=left, right=right):
            return rf"\frac{{{_typeset(left)[0]}}}{{{_typeset(right)[0]}}}", POWER
        case ast.BinOp(op=ast.Add() | ast.Sub() as op, left=left, right=right):
            return f"{_typeset(left)[0]} {OPERATORS[type(op)]} {_at_least(right, PRODUCT)}", SUM
        case ast.Call(func=ast.Attribute(value=argument, attr=name), args=[]):
            return _call(name, argument)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[argument]):
            return _call(name, argument)
        case ast.Call(func=ast.Attribute(attr="polygamma"), args=[order, argument]):
            return rf"\psi^{{({_typeset(order)[0]})}}({_typeset(argument)[0]})", POWER
        case ast.Call(func=ast.Attribute(attr="zeta"), args=[first, second]):
            return rf"\zeta({_typeset(first)[0]}, {_typeset(second)[0]})", ATOM
    raise _Unknown


def _call(name: str, argument: ast.expr) -> Typeset:
    if name == "detach":
        return _typeset(argument)
    if name == "square":
        return f"{{{_at_least(argument, ATOM)}}}^{{2}}", POWER
    if name in AROUND:
        return AROUND[name](_typeset(argument)[0]), POWER
    if name in FUNCTIONS:
        return f"{FUNCTIONS[name]} {_at_least(argument, ATOM)}", PRODUCT
    raise _Unknown


def _at_least(node: ast.expr, precedence: int) -> str:
    """In brackets where it does not hold together as tightly as that."""
    text, own = _typeset(node)
    return text if own >= precedence else f"({text})"


def _factors(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*_factors(node.left), *_factors(node.right)]
    return [node]


def _product(factors: list[ast.expr]) -> Typeset:
    """Equal factors are a power; a sign in front is that of the product."""
    sign = ""
    if isinstance(factors[0], ast.UnaryOp) and isinstance(factors[0].op, ast.USub):
        sign, factors = "-", [*_factors(factors[0].operand), *factors[1:]]
    counts: dict[str, int] = {}
    for factor in factors:
        text = _at_least(factor, PRODUCT)
        counts[text] = counts.get(text, 0) + 1
    parts = [text if count == 1 else f"{{{text}}}^{{{count}}}" for text, count in counts.items()]
    return sign + r" \, ".join(parts), SUM if sign else PRODUCT
