"""Equations in compiled functions: a call is one node, which has the graph of the user's functions and runs the solver.

Tensors that the functions read by closure are parameters of the equation. The solver calls the functions as their graphs.
"""

from __future__ import annotations

import ast
import functools
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..core.calls_in_graphs import CallInGraph, Segment, Sizes, literal, mark, marked
from ..core.internals import OperatorOfGraphs, constant_in_graphs, pytree, traced_with_graph

__all__ = ["Node", "Solve", "solvers", "traced"]

# Solvers that take the user's functions: ``(functions, wrapped, x, parameters, **options) -> x``, by number.
Solve = Callable[..., Any]
solvers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def _uncompiled(body: Any) -> Any:
    eager, x, parameters = body.args[:3]
    return eager(x, *parameters), None


equation_node = OperatorOfGraphs("manualgrad_equation", _uncompiled)


@constant_in_graphs
def _prepare() -> bool:
    traced_with_graph(equation_node)
    return True


_functions: dict[str, Any] = {}  # the solvers, by number


@constant_in_graphs
def _number_of(function: Any) -> str:
    """The number of a function; empty if its code alone does not identify it, because Dynamo compares only that."""
    if function.__closure__ or function.__defaults__ or function.__kwdefaults__:
        return ""
    number = next((n for n, f in _functions.items() if f is function), str(len(_functions)))
    _functions[number] = function
    return number


_PLAIN = (int, float, complex, str, bool, type(None))


def _written(tree: Any, tensors: list[Tensor]) -> str | None:
    """A pytree as a literal, or None. Tensors are appended to ``tensors``, and have their numbers in the literal."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return f"('tensor', {len(tensors) - 1})"
    if type(tree) in _PLAIN:
        return f"('constant', {literal(tree)})"
    if isinstance(tree, types.FunctionType):
        number = _number_of(tree)
        return f"('function', {number!r})" if number else None
    if type(tree) is dict:
        keys = list(tree)
        if not all(type(key) in _PLAIN for key in keys):
            return None
        parts = [_written(tree[key], tensors) for key in keys]
        return None if None in parts else f"('dict', {keys!r}, [{', '.join(parts)}])"  # type: ignore[arg-type]
    if type(tree) in (tuple, list):
        parts = [_written(value, tensors) for value in tree]
        kind = "tuple" if type(tree) is tuple else "list"
        return None if None in parts else f"('{kind}', [{', '.join(parts)}])"  # type: ignore[arg-type]
    return None


def _read(found: Any, tensors: Sequence[Any]) -> Any:
    """The pytree of a literal, with these tensors."""
    kind, *rest = found
    if kind == "tensor":
        return tensors[rest[0]]
    if kind == "constant":
        return rest[0]
    if kind == "function":
        return _functions[rest[0]]
    if kind == "dict":
        return {key: _read(value, tensors) for key, value in zip(*rest)}
    values = [_read(value, tensors) for value in rest[0]]
    return tuple(values) if kind == "tuple" else values


def _like_start(x: Any, parameters: Sequence[Any], results: Sequence[Any]) -> Any:
    return x


class Node(NamedTuple):
    """The description of a call in a graph.

    Attributes:
        number: of the solver.
        functions: of the user, as ``f(x, *parameters)``.
        kinds: of their results: "x" for a pytree like ``x``, "tensor", or "tensors" for any pytree.
        like: tensors of the shapes and dtypes of the solution, from ``x``, the parameters and the results of the functions.
        is_linear: whether the solution is linear in ``x``.
    """

    number: str
    functions: Sequence[Callable[..., Any]]
    kinds: Sequence[str]
    like: Callable[[Any, Sequence[Any], Sequence[Any]], Any] = _like_start
    is_linear: bool = False


def traced(node: Node, eager: Callable[..., Any], x: Any, parameters: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """A call in a graph; None if its arguments have no literals.

    Args:
        node: describes the call in the graph.
        eager: ``eager(x, *parameters)``, the same outside of graphs.
        x: the starting point.
        parameters: of the functions.
        options: constants, for the solver.
    """
    _prepare()
    tensors: list[Tensor] = []
    start = _written(x, tensors)
    rest = _written(tuple(parameters), tensors)
    constants = _written(dict(options), [])
    if start is None or rest is None or constants is None:
        return None
    key = f"[{list(node.kinds)!r}, {start}, {rest}, {constants}]"
    body = functools.partial(_body, eager, x, tuple(parameters), node, key)
    return equation_node(body, *tensors)[0]


def _body(eager: Any, x: Any, parameters: Any, node: Node, key: str, *given: Tensor) -> Any:
    """The function that Dynamo traces for a node."""
    number = node.number
    leaves, spec = pytree.tree_flatten((x, parameters))
    inputs = [mark(value, f"argument {key}", i, number, ()) for i, value in enumerate(given)]
    filled = [inputs.pop(0) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    start, rest = pytree.tree_unflatten(filled, spec)
    results = [marked(f(start, *rest), f"result{i}", number) for i, f in enumerate(node.functions)]
    solution = node.like(start, rest, results)
    factors: Any = (start, rest, results)
    if node.is_linear:
        still = pytree.tree_map(lambda x: x.detach(), start)
        factors = (rest, [f(still, *rest) for f in node.functions])
    read = [x for x in pytree.tree_leaves(factors) if isinstance(x, Tensor)]
    return marked(solution, "solution", number, read), results


def _called(segment: Segment, sizes: Sizes, kind: str, spec: Any, *arguments: Any) -> Any:
    """The result of a user's function, by its graph."""
    given = [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]
    found = segment(*given, *sizes.of(given))
    return pytree.tree_unflatten(found, spec) if kind == "x" else found[0] if kind == "tensor" else list(found)


class Equations(CallInGraph):
    """The graph of a call that solves an equation."""

    def __call__(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The results of the call's node: the solution, and None for other marks.

        Args:
            values: of the graph's inputs.
        """
        tensors, sizes = self.given(values)
        sizes.close()
        kinds, start, rest, constants = ast.literal_eval(self.key)
        own, closure = tensors[: len(self.arguments)], tuple(tensors[len(self.arguments) :])
        x, parameters = _read(start, own), _read(rest, own)
        spec = pytree.tree_structure(x)
        solution = self.marks("solution")
        before, functions = self.arguments, []
        for i, kind in enumerate(kinds):
            results = self.marks(f"result{i}")
            segment = Segment(self, before, results, self.inputs, results)
            functions.append(functools.partial(_called, segment, sizes, kind, spec))
            before = results

        def without_closure(solver: Any) -> Any:
            def solve(f: Callable[..., Any], x: Any, *parameters: Any) -> Any:
                return solver(lambda x, *given: f(x, *given, parameters[-1]), x, *parameters[:-1])

            return solve

        solve = solvers[self.number]
        found = solve(functions, without_closure, x, (*parameters, closure), **_read(constants, []))
        return self.returned(dict(zip(solution, pytree.tree_leaves(found))))


equation_node.kind = Equations
