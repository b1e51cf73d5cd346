"""Functions with custom rules in compiled functions: the code that Dynamo traces instead of a call.

A call becomes one node with one graph, in which the function is followed by the functions of its rule. Tensors that
these read by closure become inputs of the node. Marks in the graph separate its parts: see `bodies`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..arguments import ArgumentError, described
from ..core.calls_in_graphs import literal, mark, marked
from ..core.internals import OperatorOfGraphs, constant_in_graphs, is_node_open, pytree, traced_with_graph
from .trees import of_structure

__all__ = ["OUT_OF_CONSTANTS", "functions", "marked_parts", "moving", "name_of", "rule_node", "traced"]

#: The role of results of a ``fwd`` that computes without a derivative, as the forward of an autograd.Function does.
OUT_OF_CONSTANTS = "out constants"

functions: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # with rules, by number


def name_of(number: str) -> str:
    """The name of a function with a rule."""
    found = functions.get(number)
    return "a function" if found is None else str(found.name)


def _uncompiled(body: Any) -> Any:
    function, values = body.args[:2]
    return function.called(tuple(values), {}), None


rule_node = OperatorOfGraphs("manualgrad_rule", _uncompiled)


@constant_in_graphs
def _prepare(number: str) -> bool:
    """Whether Dynamo is inside of the rule of a function."""
    traced_with_graph(rule_node)
    return is_node_open(lambda node: node.target is mark and node.args[3] == number)


def moving(tree: Any, role: str, number: str) -> Any:
    """Marked cotangents or tangents of a pytree, numbered as its tensors. Floats have zero, other leaves None."""
    leaves, spec = pytree.tree_flatten(tree)
    made, count = [], 0
    for x in leaves:
        if isinstance(x, Tensor):
            made.append(mark(x, role, count, number, ()) if x.is_floating_point() or x.is_complex() else None)
            count += 1
        else:
            made.append(0.0 if isinstance(x, (float, complex)) and role == "tangent" else None)
    return pytree.tree_unflatten(made, spec)


def marked_parts(values: Sequence[Any], like: Sequence[Any], what: str, role: str, number: str) -> list[Any]:
    """Marks the results of a rule, numbered like the tensors of ``like``; None is zero.

    Raises:
        ArgumentError: the structure differs.
    """
    made, count = [], 0
    for value, one in zip(values, like):
        leaves, spec = pytree.tree_flatten(one)
        for found, x in zip(of_structure(value, spec, what), leaves):
            if isinstance(x, Tensor):
                if isinstance(found, Tensor):
                    made.append(mark(found, role, count, number, ()))
                elif found is not None and found != 0:
                    raise ArgumentError(
                        f"{what}: expected None or a tensor of shape {list(x.shape)}, got {described(found)}"
                    )
                count += 1
    return made


_COMPARED = (int, float, complex, str, bool, type(None))


def traced(
    function: Any,
    values: Sequence[Any],
    rest: Callable[[Sequence[Any], Sequence[Any], Any, Any], Any],
) -> Any:
    """A call of a function with a rule, in a graph.

    Args:
        function: the function.
        values: its arguments.
        rest: traces the rule, given the arguments, those that are not differentiated, those that are, as a tuple, and the
            result. It returns the marked values.
    """
    number, fixed = function.number, function.nondiff_argnums
    diff = tuple([v for i, v in enumerate(values) if i not in fixed])
    leaves, spec = pytree.tree_flatten(diff)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if not tensors:
        return function.fun(*values)
    constants = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    constants += [values[i] for i in fixed]
    key = ", ".join([literal(c) if isinstance(c, _COMPARED) else "?" for c in constants])
    again = _prepare(number)
    role = f"{'again' if again else 'argument'} {key} {spec}"
    return rule_node(functools.partial(_body, function, values, rest, leaves, spec, role, again), *tensors)[0]


def _body(
    function: Any, values: Sequence[Any], rest: Any, leaves: Any, spec: Any, role: str, again: bool, *given: Tensor
) -> Any:
    """The function that Dynamo traces for a node."""
    number, fixed = function.number, function.nondiff_argnums
    inputs = [mark(x, role, i, number, ()) for i, x in enumerate(given)]
    following = list(inputs)
    filled = [following.pop(0) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    moved = pytree.tree_unflatten(filled, spec)
    positions = list(moved)
    arguments = [v if i in fixed else positions.pop(0) for i, v in enumerate(values)]
    result = marked(function.fun(*arguments), "result", number, inputs)
    if again:
        return result, None
    return result, rest(arguments, [values[i] for i in fixed], moved, result)
