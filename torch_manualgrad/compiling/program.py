"""One of Dynamo's graphs as a function without side effects, and what has to be done around it.

The function takes the inputs and the random numbers, and returns the outputs and the new values of inputs that the program
writes to. Around it: random numbers are drawn, so that every derivative has the same; inputs are written to; outputs that are
views of inputs, or of each other, are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..core.internals import (
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    in_clean_state,
    is_autocast_enabled,
    pytree,
    switch_grad_mode,
    traced,
)
from ..core.schema import is_differentiable
from . import graphs
from .function import Function, Options

__all__ = ["Program", "Unsupported"]

aten = torch.ops.aten


class Unsupported(RuntimeError):
    """A program that cannot be compiled. It runs uncompiled."""


# Random operators whose results depend on the shape of the first argument only, and not on its values.
_OF_SHAPE = {
    aten.rand_like, aten.randn_like, aten.randint_like, aten.uniform, aten.normal_functional, aten.exponential,
    aten.log_normal, aten.cauchy, aten.geometric, aten.random,
}  # fmt: skip


class Program:
    """A graph of Dynamo's, for inputs of certain shapes.

    Args:
        graph: the graph.
        values: the inputs of the first call.
        options: of its functions.

    Raises:
        Unsupported: the graph cannot be compiled.
    """

    def __init__(self, graph: fx.GraphModule, values: Sequence[Any], options: Options) -> None:
        tracked = torch.is_grad_enabled()
        transforms = _refuse(graph, tracked)
        self.mode = FakeTensorMode()
        self.tensors = [i for i, v in enumerate(values) if isinstance(v, Tensor)]
        if not self.tensors:
            raise Unsupported("it has no tensors among its inputs")
        with in_clean_state(autocast=True):
            fakes = [self.mode.from_tensor(v.detach()) if isinstance(v, Tensor) else v for v in values]
            constants = {i: v for i, v in enumerate(values) if not isinstance(v, Tensor)}
            given = [fakes[i] for i in self.tensors]

            def of_tensors(*tensors: Any) -> Any:
                everything = dict(zip(self.tensors, tensors)) | constants
                return _Interpreted(graph, tracked, transforms).run(*[everything[i] for i in range(len(values))])

            plan = traced(lambda *xs: tuple(_flat(of_tensors(*xs))), given, self.mode, composites=True)
            if transforms:  # whose saved tensors are detached; the program's own detach is marked
                graphs.removed_detach(plan)
            _refuse_writes(plan)
            self.outputs, inner = _views(plan)
            graphs.set_outputs(plan, inner)
            functional = graphs.trace(plan, given, self.mode, keeps_writes=True, stops=not transforms)
            self.written = _writes(functional, len(inner))
            self.noise = _noise(functional)
            fakes = [n.meta["val"] for n in functional.graph.find_nodes(op="placeholder")]
            self.function = Function(functional, fakes, self.mode, "compiled", options)
            as_they_are: list[Any] = [("output", i, []) for i in range(self.function.outputs)]  # no views among them
            effects = self.written or self.noise or len(self.tensors) != len(values)
            self._only_function = not effects and self.outputs == as_they_are

    def takes(self, values: Sequence[Any]) -> bool:
        """Whether the program may be run for these inputs: those that it writes to share no memory with others."""
        for i in self.written:
            x = values[self.tensors[i]]
            if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
                return False
            others = [values[k] for k in self.tensors if k != self.tensors[i]]
            if any(o.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for o in others):
                return False
        return True

    def __call__(self, *values: Any) -> Sequence[Any]:
        """The outputs of the graph."""
        if self._only_function:
            return self.function(*values)
        inputs = [values[i] for i in self.tensors]
        arguments = list(inputs)
        for i in self.written:
            arguments[i] = inputs[i].clone()  # the residuals must not be written to
        found: Sequence[Tensor] = ()  # all outputs may be views of inputs
        if self.function.outputs:
            found = self.function(*arguments, *[draw() for draw in self.noise])
        for i, value in zip(self.written, found[len(found) - len(self.written) :]):
            inputs[i].copy_(value)
        return self._finished(inputs, found)

    def _finished(self, inputs: Sequence[Tensor], found: Sequence[Tensor]) -> list[Any]:
        results = []
        for base, place, chain in self.outputs:
            x = inputs[place] if base == "input" else found[place] if base == "output" else place
            for view in chain:
                x = view.target(x, *view.args[1:], **view.kwargs)
            results.append(x)
        return results

    def stand_ins(self, values: Sequence[Any]) -> list[Any]:
        """Outputs of the right shapes, not computed."""
        known = [n.meta["val"] for n in graphs.outputs_of(self.function.graph)]
        made = [torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device) for o in known]
        return self._finished([values[i] for i in self.tensors], made)


def _flat(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


# -- tracing ----------------------------------------------------------------------------------------------------------


class _Interpreted(fx.Interpreter):
    """Runs Dynamo's graph, and marks where the program ends a derivative.

    Args:
        graph: the graph.
        tracked: whether grad mode is on where the graph begins.
        marks_detach: mark ``detach``; otherwise the trace shows all of them.
    """

    def __init__(self, graph: fx.GraphModule, tracked: bool, marks_detach: bool) -> None:
        super().__init__(graph)
        self.tracked, self.marks_detach = tracked, marks_detach

    def run(self, *values: Any) -> Any:  # type: ignore[override]
        with torch.set_grad_enabled(self.tracked):
            return super().run(*values)

    def run_node(self, n: Any) -> Any:
        if n.op not in ("call_function", "call_method", "call_module"):
            return super().run_node(n)
        untracked = self.tracked and not torch.is_grad_enabled()
        before = _versions(self.fetch_args_kwargs_from_env(n)) if untracked else []
        result = super().run_node(n)
        if self.marks_detach and n.target in _DETACH:
            return _marked(graphs.stop, result)
        if not untracked or torch.is_grad_enabled():
            return result
        if any(is_differentiable(x) and x._version != version for x, version in before):
            raise Unsupported("it writes to a tensor under torch.no_grad()")
        return _marked(graphs.stop_reverse, result)


_DETACH = ("detach", torch.detach)


def _versions(arguments: Any) -> list[tuple[Tensor, int]]:
    return [(x, x._version) for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]


def _marked(op: Any, result: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: op(x) if is_differentiable(x) else x, result)


def _refuse(graph: fx.GraphModule, tracked: bool) -> bool:
    """Refuse operations that a trace would not show. Returns whether there are transforms of torch.func inside."""
    nodes = list(graph.graph.nodes)
    modules = [str(getattr(n.target, "__module__", "")) + str(n.target) for n in nodes if n.op == "call_function"]
    transforms = any("functorch" in m for m in modules)
    for node in nodes:
        if isinstance(node.target, HigherOrderOperator):
            raise Unsupported(f"it has the higher-order operator {node.target.name()}")
    for node in nodes:
        if node.op == "get_attr":
            raise Unsupported(f"it holds the tensor {node.target}, which is not among its inputs")
        if "out" in node.kwargs:
            raise Unsupported("it writes to an argument out=")
        if node.target in _OF_METADATA or transforms and _is_data(node):
            raise Unsupported(f"it calls {node.target}")
        if node.target is switch_grad_mode:
            if not tracked and node.args[0]:
                raise Unsupported("it switches grad mode on, and is called under torch.no_grad()")
            if transforms and not node.args[0]:
                raise Unsupported("it has transforms of torch.func and torch.no_grad()")
    if is_autocast_enabled() and any("autocast" in m for m in modules):
        raise Unsupported("it switches autocast, and is called under autocast")
    return transforms


# Methods that change a tensor's properties and not its values.
_OF_METADATA = ("detach_", "requires_grad_", "set_", "resize_", "resize_as_", "retain_grad", "register_hook")


def _is_data(node: Any) -> bool:
    return node.op == "call_function" and "data" in (getattr(node.target, "__name__", ""), *node.args[1:2])


def _refuse_writes(plan: fx.GraphModule) -> None:
    """Refuse writes to detached tensors and to copies in this trace, and operators that change a tensor's shape in place."""
    for node in plan.graph.nodes:
        if not graphs.writes(node):
            continue
        if torch.Tag.inplace_view in node.target.tags:
            raise Unsupported(f"{node.target} changes the shape of a tensor in place")
        for argument, about in zip(node.args, node.target._schema.arguments):
            if about.alias_info is not None and about.alias_info.is_write and isinstance(argument, fx.Node):
                chain = _chain(argument)
                if any(n.target is aten.detach.default or n.target in _STOPS for n in chain):
                    raise Unsupported("it writes to a tensor that is detached or computed under torch.no_grad()")


_STOPS = (graphs.stop, graphs.stop_reverse)


# -- outputs that are views -------------------------------------------------------------------------------------------


def _views(graph: fx.GraphModule) -> tuple[list[tuple[str, Any, list[Any]]], list[Any]]:
    """How each output is made, and the nodes that the function has to return."""
    outputs = graphs.outputs_of(graph)
    chains = [_chain(node) if isinstance(node, fx.Node) else [] for node in outputs]
    roots = [chain[-1] for chain in chains if chain]
    places = {n: i for i, n in enumerate(graph.graph.find_nodes(op="placeholder"))}
    made: list[tuple[str, Any, list[Any]]] = []
    inner: list[Any] = []
    for node, chain in zip(outputs, chains):
        if not chain:
            made.append(("constant", node, []))
            continue
        root = chain[-1]
        if root.target is graphs.stop_reverse and graphs.is_alias(root.args[0]):
            raise Unsupported("it returns a view that is made under torch.no_grad()")
        views = [n for n in reversed(chain[:-1]) if not graphs.writes(n)]
        if root in places:
            made.append(("input", places[root], views))
            continue
        if roots.count(root) == 1:
            root, views = node, []
        if root not in inner:
            inner.append(root)
        made.append(("output", inner.index(root), views))
    return made, inner


def _chain(node: Any) -> list[Any]:
    """The node, what it is a view of, and so on."""
    chain = [node]
    while chain[-1].op != "placeholder" and (graphs.writes(chain[-1]) or graphs.is_alias(chain[-1])):
        chain.append(chain[-1].args[0])
    return chain


# -- inputs that are written to, and random numbers --------------------------------------------------------------------


def _writes(graph: fx.GraphModule, count: int) -> list[int]:
    """Make the new values of inputs outputs; the inputs, by number."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    values = {}
    for node in graph.graph.find_nodes(op="call_function", target=aten.copy_.default):
        place = placeholders.index(node.args[0])
        values[place] = node.args[1]
        node.replace_all_uses_with(node.args[1])
        graph.graph.erase_node(node)
    graphs.set_outputs(graph, [*graphs.outputs_of(graph)[:count], *values.values()])
    return list(values)


def _noise(graph: fx.GraphModule) -> list[Callable[[], Tensor]]:
    """Make random numbers inputs; the functions that draw them, in the program's order."""
    draws: list[Callable[[], Tensor]] = []
    last = graph.graph.find_nodes(op="placeholder")[-1]
    for node in list(graph.graph.nodes):
        op = node.target
        if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
            continue
        if _drops_nothing(node):
            continue
        if op is aten.native_dropout.default and node.args[2] is not False:
            node = _dropout(graph.graph, node)
            op = node.target
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if first is not None and op.overloadpacket not in _OF_SHAPE and op is not aten.bernoulli.p:
            raise Unsupported(f"{op} draws random numbers from a distribution that is computed")
        if any(isinstance(a, fx.Node) for a in (*node.args[1:], *node.kwargs.values())):
            raise Unsupported(f"{op} draws random numbers from a distribution that is computed")
        draws.append(_draw(op, None if first is None else first.meta["val"], node.args, node.kwargs))
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"noise_{len(draws)}")
        last.meta = dict(node.meta)
        node.replace_all_uses_with(last)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return draws


def _drops_nothing(node: Any) -> bool:
    """Whether an operator draws numbers only to drop entries, and is called to drop none, as attention often is."""
    given = node.normalized_arguments(node.graph.owning_module, normalize_to_only_use_kwargs=True)
    return given is not None and given.kwargs.get("dropout_p") == 0


def _draw(op: Any, like: Tensor | None, args: Any, kwargs: Any) -> Callable[[], Tensor]:
    if like is None:
        return lambda: op(*args, **kwargs)
    shape, strides, dtype, device = tuple(like.shape), like.stride(), like.dtype, like.device
    if op is aten.bernoulli.p:  # which the program calls in place: the strides are its own
        return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device).bernoulli_(*args[1:], **kwargs)
    return lambda: op(torch.empty_strided(shape, strides, dtype=dtype, device=device), *args[1:], **kwargs)


def _dropout(graph: Any, node: Any) -> fx.Node:
    """Write native_dropout(x, p, train) in operators that have derivatives, one of which draws the mask."""
    x, p = node.args[:2]
    value = x.meta["val"]
    with graph.inserting_before(node):
        drawn = graph.call_function(aten.bernoulli.p, (x, 1 - p))
        drawn.meta["val"] = value
        mask = graph.call_function(aten._to_copy.default, (drawn,), {"dtype": torch.bool})
        kept = graph.call_function(aten.mul.Tensor, (x, drawn))
        result = graph.call_function(aten.mul.Tensor, (kept, 0.0 if p == 1 else 1 / (1 - p)))
        kept.meta["val"] = result.meta["val"] = value
        mask.meta["val"] = node.meta["val"][1]
    for user in list(node.users):
        user.replace_all_uses_with(mask if user.args[1] else result)
        graph.erase_node(user)
    graph.erase_node(node)
    return drawn
