"""Mutation operators on syntax trees: each yields wrong replacements of a node."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator

Operator = Callable[[ast.AST], Iterator[ast.AST]]
OPERATORS: dict[str, Operator] = {}
#: The names of inputs and outputs in formulas.
RESIDUALS = {
    *("self", "other", "result", "input", "target", "weight", "output", "x", "y", "x1", "x2", "mean", "rstd", "invstd"),
    *("A", "B", "X", "L", "U", "S", "V", "Vh", "Q", "R", "LU", "norm", "self_p", "solution", "inverse"),
}


def operator(kind: str) -> Callable[[Operator], Operator]:
    def add(function: Operator) -> Operator:
        OPERATORS[kind] = function
        return function

    return add


def expression(text: str, **parts: ast.AST) -> ast.expr:
    """The expression of this text, with nodes instead of names."""

    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return copy.deepcopy(parts[node.id]) if node.id in parts else node

    filled: ast.expr = Fill().visit(ast.parse(text, mode="eval").body)
    return filled


def _whole(node: ast.AST, text: str) -> Iterator[ast.AST]:
    """The value of a lambda or of a return statement, changed."""
    if isinstance(node, ast.Lambda):
        yield ast.Lambda(node.args, expression(text, value=node.body))
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Tuple):
        yield ast.Return(expression(text, value=node.value))


def _called(node: ast.AST, *names: str) -> bool:
    """Whether the node is a call of a function or method of one of these names."""
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "attr", getattr(node.func, "id", None)) in names


@operator("sign")
def sign(node: ast.AST) -> Iterator[ast.AST]:
    """Another sign: of a term, or of the whole."""
    match node:
        case ast.BinOp(op=ast.Add()):
            yield ast.BinOp(node.left, ast.Sub(), node.right)
        case ast.BinOp(op=ast.Sub()):
            yield ast.BinOp(node.left, ast.Add(), node.right)
        case ast.UnaryOp(op=ast.USub()) if not isinstance(node.operand, ast.Constant):
            yield node.operand
    yield from _whole(node, "-value")


@operator("factor")
def factor(node: ast.AST) -> Iterator[ast.AST]:
    """A factor: 2, 1/2, a divisor that is left out, or another exponent."""
    match node:
        case ast.BinOp(op=ast.Div()):
            yield node.left
        case ast.BinOp(op=ast.Mult() | ast.Pow(), left=ast.Constant(value=int() | float() as n)):
            yield ast.BinOp(ast.Constant(n + 1), node.op, node.right)
        case ast.BinOp(op=ast.Mult() | ast.Pow(), right=ast.Constant(value=int() | float() as n)):
            yield ast.BinOp(node.left, node.op, ast.Constant(n + 1))
    yield from _whole(node, "2 * value")
    yield from _whole(node, "value / 2")


@operator("term")
def term(node: ast.AST) -> Iterator[ast.AST]:
    """One term of a sum is dropped."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        yield node.left
        yield node.right if isinstance(node.op, ast.Add) else ast.UnaryOp(ast.USub(), node.right)


@operator("transpose")
def transpose(node: ast.AST) -> Iterator[ast.AST]:
    """A transpose is dropped, or there is one more."""
    match node:
        case ast.Attribute(attr="mT" | "mH" | "T"):
            yield node.value
        case ast.BinOp(op=ast.MatMult()):
            yield ast.BinOp(expression("value.mT", value=node.left), node.op, node.right)
            yield ast.BinOp(node.left, node.op, expression("value.mT", value=node.right))
    if _called(node, "transpose") and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield node.func.value


@operator("conjugate")
def conjugate(node: ast.AST) -> Iterator[ast.AST]:
    """A conjugate is missing, or there is one more."""
    match node:
        case ast.Attribute(attr="mH"):
            yield expression("value.mT", value=node.value)
        case ast.Call(func=ast.Attribute(attr="conj"), args=[]):
            yield node.func.value
        case ast.Lambda() | ast.Return():
            yield from _whole(node, "value.conj()")


@operator("residual")
def residual(node: ast.AST) -> Iterator[ast.AST]:
    """A residual is taken for a constant, so that first derivatives are right and second ones are not."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in RESIDUALS:
        yield expression("value.detach()", value=node)


@operator("ties")
def ties(node: ast.AST) -> Iterator[ast.AST]:
    """Every one of several equal entries gets the whole gradient."""
    match node:
        case ast.BinOp(op=ast.Div(), right=ast.Call(func=ast.Attribute(attr="sum"))):
            yield node.left
        case ast.Call(func=ast.Name("part"), args=[grad, whole, half]):
            yield ast.Call(node.func, [grad, expression("whole | half", whole=whole, half=half)], [])


@operator("broadcast")
def broadcast(node: ast.AST) -> Iterator[ast.AST]:
    """A wrong reduction of what was broadcast or reduced: the first, the mean, other dims."""
    if not isinstance(node, ast.Call):
        return
    if _called(node, "sum_to_size", "summed_to"):
        owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        yield ast.Call(expression("helpers.first_of"), [*owner, *node.args], node.keywords)
    elif _called(node, "sum") and isinstance(node.func, ast.Attribute):
        yield ast.Call(ast.Attribute(node.func.value, "mean", ast.Load()), node.args, node.keywords)
    elif _called(node, "mean") and isinstance(node.func, ast.Attribute):
        yield ast.Call(ast.Attribute(node.func.value, "sum", ast.Load()), node.args, node.keywords)


@operator("index")
def index(node: ast.AST) -> Iterator[ast.AST]:
    """Off by one: a dim, a position, a shift, a diagonal."""
    if isinstance(node, ast.Call):
        for i, given in enumerate(node.args):
            if _is_integer(given):
                args = [*node.args[:i], expression("value + 1", value=given), *node.args[i + 1 :]]
                yield ast.Call(node.func, args, node.keywords)
    elif isinstance(node, ast.Subscript) and _is_integer(node.slice):
        yield ast.Subscript(node.value, expression("value + 1", value=node.slice), node.ctx)
    yield from _whole(node, "value.roll(1, -1)")


def _is_integer(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    named = isinstance(node, ast.Name) and node.id in ("dim", "dim0", "dim1", "offset", "start", "diagonal", "index")
    return named or isinstance(node, ast.Constant) and type(node.value) is int


@operator("third order")
def third_order(node: ast.AST) -> Iterator[ast.AST]:
    """Right in first and second order: a product has lost its second derivative, or a derivative has a wrong one."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.MatMult)):
        name = "linearized" if isinstance(node.op, ast.Mult) else "linearized_matmul"
        yield ast.Call(expression(f"helpers.{name}"), [node.left, node.right], [])
    elif isinstance(node, ast.Lambda) and (names := [a.arg for a in node.args.args]) and "grad" not in names:
        yield ast.Lambda(node.args, expression(f"helpers.bent(value, {names[0]})", value=node.body))
