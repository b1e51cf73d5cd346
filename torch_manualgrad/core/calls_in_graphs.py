"""Calls with custom derivatives in Dynamo's graphs: nodes with a graph of the user's functions.

A node's graph has the computations of several functions of the user in sequence, with marks between them. Each segment
between marks is a function. Tensors that the functions read by closure are inputs of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .internals import (
    OperatorOfGraphs,
    computed,
    is_symbol,
    level_in_node,
    pytree,
    symbols_in,
    transform_depth,
    transforms_ended,
    with_level_moved,
)
from .schema import is_differentiable

__all__ = ["CallInGraph", "Interpreter", "Segment", "Sizes", "bodies", "literal", "mark", "marked", "marks"]

_library = torch.library.Library("manualgrad_graphs", "DEF")
_library.define("mark(Tensor x, str role, int place, str function, Tensor[] of) -> Tensor")


def _mark(x: Tensor, role: str, place: int, function: str, of: Sequence[Tensor]) -> Tensor:
    """What Dynamo sees of a mark, which is not called later: a function of the tensors ``of``.

    From its result Dynamo learns whether the mark requires grad, and which of its derivatives are zero. No derivative of a
    quotient is. The product with a constant would not do: its jvp of a jvp raises in Dynamo.
    """
    read = [y.real.sum() for y in of if is_differentiable(y)]
    if not read or not is_differentiable(x):
        return x.view_as(x)
    divisor: Any = sum(read)
    return x / divisor.exp().to(device=x.device, dtype=x.dtype)


for _key in ("CompositeImplicitAutograd", "FuncTorchBatched"):  # torch.func.vmap does not find the first
    _library.impl("mark", _mark, _key)
mark: Any = torch.ops.manualgrad_graphs.mark.default


#: The functions of operators that stay nodes of a trace until it is compiled.
bodies: dict[Any, Callable[..., Any]] = {}


def marked(tree: Any, role: str, number: str, of: Sequence[Tensor] = ()) -> Any:
    """A pytree with a mark on each tensor, numbered.

    Args:
        tree: the pytree.
        role: a word, and further data for readers of the graph.
        number: of the called function, as a string: Dynamo may leave an integer open.
        of: the tensors whose function they are, even if their computation does not show it.
    """
    leaves, spec = pytree.tree_flatten(tree)
    made, count = [], 0
    for x in leaves:
        if isinstance(x, Tensor):
            x, count = mark(x, role, count, number, of), count + 1
        made.append(x)
    return pytree.tree_unflatten(made, spec)


def literal(value: Any) -> str:
    """``repr`` of a number or string, even if Dynamo leaves it open: it closes keys."""
    return repr(list({value: None}))[1:-1]


def marks(graph: fx.Graph, role: str) -> list[Any]:
    """The marks of a graph whose role begins with this word."""
    return [n for n in graph.find_nodes(op="call_function", target=mark) if n.args[1].partition(" ")[0] == role]


class Interpreter(fx.Interpreter):
    """Runs one of Dynamo's graphs, or a segment of a call's.

    Args:
        module: has the attributes of the graph.
        graph: the graph; None for that of the module.
        enclosing: the calls that the graph is a segment of.

    Attributes:
        stays: whether calls become nodes of a trace; otherwise the operators that they call do.
    """

    stays = False

    def __init__(self, module: Any, graph: fx.Graph | None = None, enclosing: Sequence[CallInGraph] = ()) -> None:
        super().__init__(module, graph=graph)
        self.enclosing, self._deeper = tuple(enclosing), 0

    def run(self, *values: Any) -> Any:  # type: ignore[override]
        """Run the graph."""
        if self.enclosing:  # the transforms around a segment differ from those of the trace
            levels = [level for n in self.graph.nodes if (level := level_in_node(n)) is not None]
            self._deeper = transform_depth() - (min(levels) - 1) if levels else 0
        with transforms_ended():
            return super().run(*values)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a node."""
        if isinstance(target, OperatorOfGraphs):
            assert target.kind is not None
            return target.kind(args[0], type(self), self.enclosing)(args[1:])
        return super().call_function(
            target, with_level_moved(target, args, self._deeper) if self._deeper else args, kwargs
        )


class CallInGraph:
    """A node's graph.

    Args:
        body: the graph.
        interpreter: runs segments of it.
        enclosing: the calls that this one is a segment of.

    Attributes:
        number: of the called function.
        arguments: the marks of its tensors, in order.
        closure: the inputs for tensors that it reads by closure.
        sizes: the inputs for sizes, and for other numbers that are left open.
        numbers: the nodes that compute numbers of these, with the numbers.
        inputs: the nodes whose values segments receive first: the arguments, tensors read by closure, sizes.
    """

    def __init__(
        self, body: fx.GraphModule, interpreter: type[Interpreter] = Interpreter, enclosing: Sequence[CallInGraph] = ()
    ) -> None:
        self.body, self.interpreter, self.enclosing = body, interpreter, tuple(enclosing)
        self.arguments = self.marks("again") or self.marks("argument")
        _, role, _, self.number, _ = self.arguments[0].args
        self.key = role.partition(" ")[2]
        self._holders = body.graph.find_nodes(op="placeholder")
        symbols = {
            str(n.meta["example_value"].node.expr): n for n in self._holders if is_symbol(n.meta["example_value"])
        }
        self.numbers = {n: value for n in body.graph.nodes if (value := _number(n, symbols)) is not None}
        read = {name for value in self.numbers.values() for x in _flat(value) for name in symbols_in(x)}
        others = [n for n in self._holders if any(user not in self.arguments for user in n.users)]
        self.sizes = [n for name, n in symbols.items() if n in others or name in read]
        self.closure = [n for n in others if n not in self.sizes]
        self.inputs = [*self.arguments, *self.closure, *self.sizes]

    def marks(self, role: str) -> list[Any]:
        """The marks whose role begins with this word."""
        return marks(self.body.graph, role)

    def given(self, values: Sequence[Any]) -> tuple[list[Tensor], Sizes]:
        """The tensors of a call, and the sizes that its graph reads, from the values of the graph's inputs."""
        known = dict(zip(self._holders, values))
        tensors = [*[known[n.args[0]] for n in self.arguments], *[known[n] for n in self.closure]]
        sizes = Sizes([known[n] for n in self.sizes], tensors)
        if self.interpreter.stays and not sizes.are_known:
            raise NotImplementedError("a call with a derivative of its own reads a number that is left open")
        return tensors, sizes

    def returned(self, results: dict[Any, Any]) -> tuple[Any, ...]:
        """The outputs of the node: the values of known marks, otherwise None."""
        nodes: Any = self.body.graph.output_node().args[0]
        return tuple(results.get(n) for n in nodes)


class Segment:
    """The part of a call's graph between two groups of marks, as a function.

    Args:
        call: whose graph it is.
        after: the marks before the segment.
        before: the marks after it.
        inputs: the nodes whose values are its arguments.
        outputs: the marks of its results.

    Attributes:
        reads: the inputs on which its results may depend differentiably.
    """

    def __init__(
        self,
        call: CallInGraph,
        after: Sequence[Any],
        before: Sequence[Any],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
    ) -> None:
        nodes = [n for n in call.body.graph.nodes if n.op not in ("placeholder", "output")]
        first = max(map(nodes.index, after), default=-1) + 1
        last = min(map(nodes.index, before), default=len(nodes))
        self.call, self.inputs, self.graph = call, inputs, fx.Graph()
        known = {n: self.graph.placeholder(f"input_{i}") for i, n in enumerate(inputs)}

        def value(node: fx.Node) -> Any:
            return self._written(call.numbers[node], known) if node in call.numbers else known[node]

        for n in nodes[first:last]:
            if n not in call.numbers:
                known[n] = self.graph.node_copy(n, value)
        self.graph.output(tuple(known[n.args[0]] for n in outputs))
        self.reads = {n for n in inputs if _is_read(known[n], call.body)}

    def _written(self, value: Any, known: Mapping[fx.Node, Any]) -> Any:
        """A number of the trace, computed in this graph from the sizes: other segments have what computed it."""
        if isinstance(value, (tuple, list)):
            return tuple([self._written(x, known) for x in value])
        if not is_symbol(value):
            return value
        names = [str(n.meta["example_value"].node.expr) for n in self.call.sizes]

        def number(*sizes: Any) -> Any:
            return computed(value, names, sizes)

        return self.graph.call_function(number, tuple(known[n] for n in self.call.sizes))

    def __call__(self, *values: Any) -> Any:
        call = self.call
        with torch.enable_grad():  # as in the trace; values are tracked only if a derivative will be differentiated
            return call.interpreter(call.body, self.graph, (*call.enclosing, call)).run(*values)


def _flat(value: Any) -> list[Any]:
    return [x for one in value for x in _flat(one)] if isinstance(value, (tuple, list)) else [value]


def _number(node: fx.Node, symbols: Mapping[str, fx.Node]) -> Any:
    """The number, or tuple of numbers, that a node computes from sizes; None if it computes anything else."""
    value = node.meta.get("example_value")
    if node.op in ("placeholder", "output") or value is None:
        return None
    numbers = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    return value if all(isinstance(x, numbers) and symbols.keys() >= symbols_in(x) for x in _flat(value)) else None


_CUTS = ("detach", torch.detach, "size", "dim", "numel", "stride")


def _is_read(value: Any, body: fx.GraphModule) -> bool:
    """Whether a result may depend differentiably on the value of a node; ``body`` has the attributes of its graph."""
    for user in value.users:
        if isinstance(user.target, OperatorOfGraphs):
            inner = getattr(body, user.args[0].target)
            holders = zip(user.args[1:], inner.graph.find_nodes(op="placeholder"))
            if any(_is_read(holder, inner) for given, holder in holders if given is value):
                return True
        elif user.target not in _CUTS:
            return True
    return False


class Sizes:
    """The values of the sizes that a graph reads, found in the tensors of a call.

    Args:
        values: of the sizes.
        tensors: of the call.
    """

    def __init__(self, values: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        places = {str(n): (i, d) for i, x in enumerate(tensors) for d, n in enumerate(x.shape)}
        self._values, self._places = list(values), [places.get(str(n)) if is_symbol(n) else None for n in values]

    @property
    def are_known(self) -> bool:
        """Whether they are integers, or sizes of the tensors."""
        return not any(is_symbol(n) and place is None for n, place in zip(self._values, self._places))

    def close(self) -> None:
        """Fix the sizes that are not found at their values in this call; for functions that run outside of a trace."""
        for i, (n, place) in enumerate(zip(self._values, self._places)):
            if is_symbol(n) and place is None:
                self._values[i] = float(n) if isinstance(n, torch.SymFloat) else int(n)

    def of(self, tensors: Sequence[Any]) -> list[Any]:
        """The sizes, for these tensors."""
        found = zip(self._values, self._places)
        return [n if place is None else tensors[place[0]].shape[place[1]] for n, place in found]
