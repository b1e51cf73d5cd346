"""Graphs of ATen operators: traced, differentiated, batched. All are flat and functional.

A graph keeps the operators that have derivatives: they are decomposed only when the graph is compiled. Autograd passes
each saved tensor through ``detach``, which would end the next derivative. So every ``detach`` is removed from a trace.
Those of the program itself are written as `stop` before.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import get_gradient_edge

from ..core.engine.derivative import redispatch
from ..core.internals import (
    OpOverload,
    Sizes,
    dual,
    has_tangent,
    is_symbol,
    partitioned,
    some_dual_level,
    tangent,
    traced,
    unattached,
)
from ..core.schema import Signature, is_differentiable
from .mixed_precision import in_float32
from .regions import runner

__all__ = [
    "Partition",
    "batchable",
    "batched",
    "carrier",
    "constant",
    "expanded_apart",
    "is_alias",
    "is_piece",
    "joint",
    "numbers_in",
    "outputs_of",
    "pushed_forward",
    "removed_detach",
    "reshaping",
    "residuals_of",
    "set_outputs",
    "stop",
    "stop_reverse",
    "trace",
    "views_of_inputs",
    "without_stops",
    "writes",
]

aten = torch.ops.aten

_library = torch.library.Library("manualgrad_compiled", "DEF")


def _identity(name: str, keeps_tangent: bool) -> Any:
    """An operator that returns its argument without its history."""
    _library.define(f"{name}(Tensor x) -> Tensor")
    op = getattr(torch.ops.manualgrad_compiled, name).default
    signature = Signature(op._schema)

    def autograd(keyset: Any, x: Tensor) -> Tensor:
        result: Tensor = redispatch(op, signature, keyset, [x])
        moving = tangent(x) if keeps_tangent else None
        return result if moving is None else dual(result, op(moving))

    _library.impl(name, lambda x: x.clone(), "CompositeExplicitAutograd")
    _library.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_vmap(f"manualgrad_compiled::{name}", lambda _, dims, x: (op(x), dims[0]), lib=_library)
    return op


stop = _identity("stop", keeps_tangent=False)  # like x.detach()
stop_reverse = _identity("stop_reverse", keeps_tangent=True)  # like values computed under torch.no_grad()
constant = _identity(
    "constant", keeps_tangent=True
)  # like a gradient without create_graph=True; not a view of another result


def _fill_by_mask(x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False) -> Any:
    """``x[mask] = number``: its derivative would need the number of places, which depends on values."""
    mask = indices[0] if len(indices) == 1 and not accumulate and values.numel() == 1 else None
    if mask is None or mask.dtype is not torch.bool or not (x.is_contiguous() and mask.is_contiguous()):
        return NotImplemented  # in other layouts the result would have other strides
    return x.masked_fill(mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim())), values.reshape(()))


def _fill_slices(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Any:
    """``index_fill``: under vmap PyTorch writes the last of a batch of values to all results if ``x`` has no batch."""
    if not x.dim():
        return NotImplemented
    filled = torch.zeros(x.shape[dim], dtype=torch.bool, device=x.device).index_fill(0, index, True)
    return torch.where(filled.reshape(-1, *[1] * (x.dim() - 1 - dim % x.dim())), value.to(x.dtype), x)


def trace(
    function: Callable[..., Any],
    fakes: Sequence[Any],
    mode: Any,
    *,
    like_inductor: Mapping[Any, Callable[..., Any]] | None = None,
    keeps_writes: bool = False,
    stops: bool = False,
) -> fx.GraphModule:
    """The functional graph of a function of flat arguments.

    Args:
        function: returns a flat sequence.
        fakes: the arguments, fake tensors.
        mode: their fake mode.
        like_inductor: decompose operators like inductor, and also these; only to compile the graph.
        keeps_writes: the function may write to its arguments: ``copy_`` at the end of the graph.
        stops: each ``detach`` is the program's own.

    Raises:
        NotImplementedError: a value is not a dense tensor.
    """
    if isinstance(function, fx.GraphModule):
        function = runner(function)
    filling = {aten.index_put.default: _fill_by_mask, aten.index_fill.int_Tensor: _fill_slices}
    table: dict[str, Any] = {"decompose": {**in_float32, **filling}}
    if like_inductor is not None:
        table = {"decompose": like_inductor, "like_inductor": True}
    graph = traced(function, fakes, mode, **table)
    layouts: list[Any] = []
    if any(writes(n) for n in graph.graph.nodes):
        layouts = [n.meta["val"] if isinstance(n, fx.Node) else None for n in outputs_of(graph)]
        run = runner(_written_in_layout(graph, mode))
        functional = torch.func.functionalize(lambda *xs: tuple(run(*xs)), remove="mutations")
        graph = traced(functional, fakes, mode, **table)
        if not keeps_writes and any(writes(n) for n in graph.graph.nodes):
            raise NotImplementedError("a derivative writes to its arguments")
    for node in graph.graph.nodes:
        if isinstance(x := node.meta.get("val"), Tensor) and x.layout is not torch.strided:
            raise NotImplementedError(f"{node.target} returns a tensor of layout {x.layout}")
    by_place = any(n.target in _BY_PLACE for n in graph.graph.nodes)
    for node in graph.graph.find_nodes(op="call_function", target=aten.copy.default):
        _copied(graph.graph, node, by_place)
    _restore_layouts(graph, layouts)
    if stops:
        for node in graph.graph.find_nodes(op="call_function", target=aten.detach.default):
            if is_differentiable(node.meta["val"]):
                node.target = stop
    removed_detach(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _written_in_layout(graph: fx.GraphModule, mode: Any) -> fx.GraphModule:
    """The graph, where an operator that writes to a tensor also writes in its layout after functionalization.

    Functionalization replaces ``masked_fill_`` by ``masked_fill``, whose result is always contiguous. A view of another
    layout would then fail, or read other elements.
    """
    for node in graph.graph.nodes:
        to, functional = returned_argument(node), _out_of_place(node.target)
        if to is None or functional is None or to.meta["val"].is_contiguous():
            continue
        with mode:
            value = functional(*fx.map_arg(node.args, _value), **fx.map_arg(node.kwargs, _value))
        if not isinstance(value, Tensor) or _strides(value) == _strides(to.meta["val"]):
            continue
        with graph.graph.inserting_before(node):
            result = graph.graph.call_function(functional, node.args, node.kwargs)
        result.meta = {**node.meta, "val": value}
        node.target, node.args, node.kwargs = aten.copy_.default, (to, result), {}
    graph.recompile()
    return graph


def _out_of_place(op: Any) -> Any:
    """The operator that returns what an operator of ATen in place writes; None if there is none."""
    if not isinstance(op, OpOverload) or op.namespace != "aten" or not (name := op._opname).endswith("_"):
        return None
    return getattr(getattr(aten, name[:-1], None), op._overloadname, None)


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _strides(x: Tensor) -> list[str]:
    return [*map(str, x.stride())]  # without assumptions about open sizes


def _restore_layouts(graph: fx.GraphModule, layouts: Sequence[Any]) -> None:
    """Copy outputs that have lost their strides, such as the source of ``copy_``, into the layouts of these values."""
    outputs = outputs_of(graph)
    for i, like in enumerate(layouts):
        node = outputs[i]
        if not isinstance(like, Tensor) or not isinstance(node, fx.Node):
            continue
        if _strides(node.meta["val"]) == _strides(like):
            continue
        order = sorted(range(like.dim()), key=like.stride, reverse=True)
        if not like.permute(order).is_contiguous():
            continue
        with graph.graph.inserting_before(graph.graph.output_node()):
            node = _ordered(graph.graph, node, order)
        outputs[i] = node
    if layouts:
        set_outputs(graph, outputs)


def _ordered(graph: fx.Graph, node: fx.Node, order: Sequence[int]) -> fx.Node:
    """A copy of a node's value at the insertion point, without gaps, whose strides fall in this order of dimensions."""
    steps: list[tuple[Any, Any, Any]] = [
        (aten.permute.default, (order,), {}),
        (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
        (aten.permute.default, (sorted(range(len(order)), key=order.__getitem__),), {}),
    ]
    for target, args, kwargs in steps if [*order] != sorted(order) else steps[1:2]:
        value = target(node.meta["val"], *args, **kwargs)
        node = graph.call_function(target, (node, *args), kwargs)
        node.meta["val"] = value
    return node


def writes(node: Any) -> bool:
    """Whether the operator writes to an argument."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def returned_argument(node: Any) -> Any:
    """The argument that an operator writes to and returns; None if it returns none, or writes to none."""
    if not writes(node) or not (returns := node.target._schema.returns) or returns[0].alias_info is None:
        return None
    arguments = node.target._schema.arguments
    place = next(
        i
        for i, a in enumerate(arguments)
        if a.alias_info and a.alias_info.before_set & returns[0].alias_info.before_set
    )
    return node.args[place] if place < len(node.args) else node.kwargs[arguments[place].name]


def removed_detach(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph without ``detach`` and ``alias``, which autograd itself adds to a trace."""
    for target in (aten.detach.default, aten.alias.default):
        for node in graph.graph.find_nodes(op="call_function", target=target):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


# Operators whose result depends on the strides of an argument.
_BY_PLACE = (aten.as_strided.default, aten.as_strided_scatter.default, aten.as_strided_copy.default)


def _copied(graph: Any, node: Any, by_place: bool) -> None:
    """Replace functionalization's form of ``copy_`` by differentiable operators that return new memory.

    Args:
        graph: of the node.
        node: ``copy(to, source)``.
        by_place: whether strides matter in the graph.
    """
    to, source = node.meta["val"], node.args[1]
    value = source.meta["val"]
    casts, expands = value.dtype != to.dtype, value.shape != to.shape
    same_places = not expands and _strides(value) == _strides(to)
    if by_place and not same_places and not to.is_contiguous():
        raise NotImplementedError(f"a tensor with strides {to.stride()} is written to, and read by its strides")
    with graph.inserting_before(node):
        for differs, target, args, kwargs in (
            (casts, aten._to_copy.default, (), {"dtype": to.dtype}),
            (expands, aten.expand.default, (_shape_of(graph, node.args[0]),), {}),
        ):
            if differs:
                source = graph.call_function(target, (source, *args), kwargs)
                source.meta["val"] = value = to
        if not same_places:
            order = range(to.dim()) if to.is_contiguous() else sorted(range(to.dim()), key=to.stride, reverse=True)
            source = _ordered(graph, source, order)
        elif not casts:
            source = graph.call_function(aten.clone.default, (source,))
            source.meta["val"] = torch.empty_like(value)
        node.replace_all_uses_with(source)
    graph.erase_node(node)


def _shape_of(graph: Any, node: Any) -> list[Any]:
    """The shape of a node's value: numbers, and nodes for open sizes."""
    shape: list[Any] = []
    for d, n in enumerate(node.meta["val"].shape):
        shape.append(_size(graph, node, d) if is_symbol(n) else n)
    return shape


def _size(graph: Any, node: Any, dim: int) -> fx.Node:
    made: fx.Node = graph.call_function(aten.sym_size.int, (node, dim))
    made.meta["val"] = node.meta["val"].shape[dim]
    return made


def numbers_in(graph: Any, numbers: Sequence[Any], sizes: Sizes, holders: Sequence[tuple[fx.Node, int]]) -> list[Any]:
    """Numbers for a graph at its insertion point: nodes if they depend on open sizes.

    Args:
        graph: the graph.
        numbers: integers, and symbols of a trace.
        sizes: of the trace.
        holders: for each size a node whose value has it, and the dimension.
    """
    if not any(is_symbol(n) for n in numbers):
        return list(numbers)
    tracer = fx.proxy.GraphAppendingTracer(graph)  # one for all: a minimum of two sizes takes no proxies of two
    known = [fx.Proxy(_size(graph, node, d), tracer) for node, d in holders]
    made = []
    for n in numbers:
        node = sizes.computed(n, known) if is_symbol(n) else n
        if isinstance(node, fx.Proxy):
            node = node.node
            node.meta["val"] = n
        made.append(node)
    return made


def reshaping(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with ``reshape`` instead of ``view``: when it is traced again, a tensor may have other strides."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
    graph.recompile()
    return graph


def without_stops(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph without `stop` and the like: the same values, without derivatives."""
    for target in (stop, stop_reverse, constant):
        for node in graph.graph.find_nodes(op="call_function", target=target):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


# Operators that write to a part of a copy of their first argument.
_PARTIAL = {
    aten.index_put, aten._unsafe_index_put, aten.index_add, aten.index_copy, aten.index_fill, aten.scatter,
    aten.scatter_add, aten.scatter_reduce, aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter,
    aten.as_strided_scatter, aten.masked_scatter, aten.put, aten.fill,
}  # fmt: skip


def expanded_apart(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with copies of expanded tensors that are partly written: inductor would copy them with strides of 0."""
    for node in list(graph.graph.nodes):
        if getattr(node.target, "overloadpacket", None) in _PARTIAL and isinstance(node.args[0], fx.Node):
            value = node.args[0].meta["val"]
            if any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape)):
                with graph.graph.inserting_before(node):
                    copy = graph.graph.call_function(
                        aten.clone.default, (node.args[0],), {"memory_format": torch.contiguous_format}
                    )
                copy.meta["val"] = torch.empty_like(value, memory_format=torch.contiguous_format)
                node.args = (copy, *node.args[1:])
    graph.recompile()
    return graph


class Partition:
    """The forward and the backward of a graph, for the gradients of some of its inputs.

    Attributes:
        forward: the graph, whose further outputs are residuals.
        backward: of the tensors ``saved``, then the cotangents of ``smooth``.
        smooth: the outputs that are differentiable, by number.
        wanted: the inputs whose gradients the backward returns, in its order. Others have none.
        reached: for each output in ``smooth`` the inputs on which it depends in autograd's graph.
        saved: for each tensor that the backward reads ``("input", i)`` or ``("output", i)`` of the forward.
        places: for each open size the argument of the backward and the dimension that has it.
        carried: these sizes, by number, if no tensor in ``saved`` has them. The last arguments of the backward carry them:
            for each an empty tensor of shape ``(size, 0)``.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    smooth: tuple[int, ...]
    wanted: tuple[int, ...]
    reached: tuple[frozenset[int], ...]
    saved: tuple[tuple[str, int], ...]
    places: tuple[tuple[int, int], ...]
    carried: tuple[int, ...]


def joint(graph: fx.GraphModule, fakes: Sequence[Any], sizes: Sizes, needs: Sequence[bool]) -> Partition | None:
    """Differentiate a graph in reverse mode.

    Args:
        graph: a functional graph.
        fakes: its arguments.
        sizes: their open sizes.
        needs: for each argument, whether its gradient is needed.

    Returns:
        The partition; None if no output depends differentiably on these inputs.
    """
    mode = sizes.mode
    found = _Differentiated(graph, fakes, mode, needs)
    if not found.smooth:
        return None
    n = len(fakes)
    with mode:
        tangents = [torch.empty_like(o) for o in found.cotangents]
    both = trace(found.both, [*fakes, *tangents], mode)
    placeholders = both.graph.find_nodes(op="placeholder")
    for i, node in enumerate(placeholders):  # the partitioner recognizes them by these names
        node.name = node.target = f"primals_{i + 1}" if i < n else f"tangents_{i - n + 1}"
    both.recompile()
    count = len(outputs_of(graph))
    gradients = outputs_of(both)[count:]
    result = Partition()
    result.reached = tuple(found.reached)
    result.smooth, wanted = tuple(found.smooth), [i for i, yes in enumerate(needs) if yes]
    result.wanted = tuple(i for i, g in zip(wanted, gradients) if g is not None)
    set_outputs(both, [*outputs_of(both)[:count], *[g for g in gradients if g is not None]])
    forward, backward = partitioned(both, count)
    _separate(forward, backward, result, count, sizes)
    return result


class _Differentiated:
    def __init__(self, graph: fx.GraphModule, fakes: Sequence[Any], mode: Any, needs: Sequence[bool]) -> None:
        self.run, self.needs, self.n = runner(graph), tuple(needs), len(fakes)
        with mode:
            variables = self._variables(fakes)
            outputs = self.run(*variables)
        self.smooth = [i for i, o in enumerate(outputs) if isinstance(o, Tensor) and o.requires_grad]
        self.cotangents = [outputs[i].detach() for i in self.smooth]
        self.reached = _reached([outputs[i] for i in self.smooth], variables)

    def _variables(self, inputs: Sequence[Any]) -> list[Any]:
        return [x.detach().requires_grad_() if need else x for x, need in zip(inputs, self.needs)]

    def both(self, *flat: Any) -> Any:
        """The outputs, then the gradients."""
        variables = self._variables(flat[: self.n])
        outputs = self.run(*variables)
        gradients = torch.autograd.grad(
            [outputs[i] for i in self.smooth],
            [x for x, need in zip(variables, self.needs) if need],
            flat[self.n :],
            create_graph=True,
            allow_unused=True,
        )
        return (*[o.detach() if isinstance(o, Tensor) else o for o in outputs], *gradients)


def _reached(outputs: Sequence[Tensor], variables: Sequence[Any]) -> list[frozenset[int]]:
    """For each output the variables, by number, that autograd reaches from it. To others it gives no gradient, not zeros."""
    known: dict[Any, frozenset[int]] = {}
    for i, x in enumerate(variables):
        if x.requires_grad:
            known[get_gradient_edge(x).node] = frozenset([i])
    ends = [get_gradient_edge(o).node for o in outputs]
    waiting: list[Any] = list(ends)
    while waiting:
        below = [n for n, _ in waiting[-1].next_functions if n is not None]
        unknown = [n for n in below if n not in known]
        if not unknown:
            node = waiting.pop()
            known.setdefault(node, frozenset().union(*[known[n] for n in below]))
        waiting += unknown
    return [known[node] for node in ends]


def outputs_of(graph: Any) -> list[Any]:
    """The nodes that a graph returns."""
    return list(graph.graph.output_node().args[0])


def set_outputs(graph: Any, nodes: Iterable[Any]) -> None:
    """Make a graph return these nodes."""
    graph.graph.output_node().args = (tuple(nodes),)
    graph.recompile()


def _separate(forward: fx.GraphModule, backward: fx.GraphModule, result: Partition, count: int, sizes: Sizes) -> None:
    """Remove residuals that are inputs, and duplicates, from the forward's outputs; note where the backward finds each."""
    _views_again(forward, backward, count)
    _sizes_again(forward, backward, result, count, sizes)
    outputs = outputs_of(forward)
    inputs = {node.name: i for i, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
    kept: dict[str, int] = {}
    for i, node in enumerate(outputs[:count]):
        if isinstance(node, fx.Node):
            kept.setdefault(node.name, i)
    residuals: list[Any] = []
    for node in outputs[count:]:
        if node.name not in inputs and node.name not in kept:
            kept[node.name] = count + len(residuals)
            residuals.append(node)
    own = [_apart(forward.graph, node, kept) for node in outputs[:count]]
    set_outputs(forward, [*own, *residuals])
    saved = []
    for node in backward.graph.find_nodes(op="placeholder"):
        if not node.name.startswith(("tangents", "carried")):
            saved.append(("input", inputs[node.name]) if node.name in inputs else ("output", kept[node.name]))
    result.forward, result.backward, result.saved = forward, backward, tuple(saved)


def _sizes_again(
    forward: fx.GraphModule, backward: fx.GraphModule, result: Partition, count: int, sizes: Sizes
) -> None:
    """Make the backward read the sizes that it needs from its arguments: residuals are tensors."""
    outputs = outputs_of(forward)
    set_outputs(forward, [n for i, n in enumerate(outputs) if i < count or not is_symbol(n.meta["val"])])
    arguments = backward.graph.find_nodes(op="placeholder")
    tensors = [n for n in arguments if not is_symbol(n.meta["val"])]
    saved = [n for n in tensors if not n.name.startswith("tangents")]
    places = sizes.places([n.meta["val"].shape for n in saved])
    result.carried = tuple(k for k, place in enumerate(places) if place is None)
    last = arguments[-1]
    for i, k in enumerate(result.carried):
        places[k] = len(tensors) + i, 0
        with backward.graph.inserting_after(last):
            last = backward.graph.placeholder(f"carried_{k}")
        with sizes.mode:
            last.meta["val"] = carrier(sizes.numbers[k])
    result.places = tuple(place for place in places if place is not None)
    symbolic = [n for n in arguments if is_symbol(n.meta["val"])]
    tensors = [n for n in backward.graph.find_nodes(op="placeholder") if n not in symbolic]
    with backward.graph.inserting_before(next(n for n in backward.graph.nodes if n.op != "placeholder")):
        made = numbers_in(
            backward.graph, [n.meta["val"] for n in symbolic], sizes, [(tensors[i], d) for i, d in result.places]
        )
    for node, number in zip(symbolic, made):
        node.replace_all_uses_with(number)
        backward.graph.erase_node(node)
    backward.recompile()


def carrier(size: Any) -> Tensor:
    """An empty tensor that has a size."""
    return torch.empty((size, 0), dtype=torch.uint8, device="cpu")


def residuals_of(partition: Partition) -> list[Any]:
    """The fake tensors that are saved for the backward."""
    nodes = partition.backward.graph.find_nodes(op="placeholder")
    return [n.meta["val"] for n in nodes[: len(partition.saved)]]


def _apart(graph: fx.Graph, node: Any, kept: dict[str, int]) -> Any:
    """An output, copied if it is a view of another: a write to it must not change a residual."""
    root = node
    while isinstance(root, fx.Node) and root.op != "placeholder" and is_view_of_first(root):
        root = root.args[0]
    if root is node or root.op == "placeholder" or root.name not in kept:
        return node
    with graph.inserting_after(node):
        copy = graph.call_function(aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    return copy


def _views_again(forward: fx.GraphModule, backward: fx.GraphModule, count: int) -> None:
    """Make the backward recompute its views from their base: each further output of the forward costs time."""
    places = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    first = next(n for n in backward.graph.nodes if n.op != "placeholder")
    outputs = outputs_of(forward)
    kept = {n.name: n for n in outputs[count:]}
    for node in outputs[count:]:
        chain = [node]
        while (
            chain[-1].op != "placeholder"
            and is_view_of_first(chain[-1])
            and chain[-1].all_input_nodes == [chain[-1].args[0]]
            and _is_no_larger(chain[-1].args[0], node)
        ):
            chain.append(chain[-1].args[0])
        base = chain[-1]
        if base is node or is_symbol(node.meta["val"]):
            continue
        if base.name not in places:
            again = next((n for n in backward.graph.nodes if n.name == base.name), None)
            if again is not None:  # the recomputation in the backward is no longer needed
                again.name = f"{base.name}_again"
            with backward.graph.inserting_before(next(iter(backward.graph.nodes))):
                places[base.name] = backward.graph.placeholder(base.name)
            places[base.name].name = base.name
            places[base.name].meta = dict(base.meta)
            if again is not None:
                again.replace_all_uses_with(places[base.name])
        made = places[base.name]
        with backward.graph.inserting_before(first):
            for view in reversed(chain[:-1]):
                following = backward.graph.call_function(view.target, (made, *view.args[1:]), view.kwargs)
                following.meta = dict(view.meta)
                made = following
        old = places.pop(node.name)
        old.replace_all_uses_with(made)
        backward.graph.erase_node(old)
        del kept[node.name]
        kept.setdefault(base.name, base)
    set_outputs(forward, [*outputs[:count], *kept.values()])
    forward.graph.eliminate_dead_code()
    forward.recompile()
    backward.graph.eliminate_dead_code()
    backward.graph.lint()
    backward.recompile()


def _is_no_larger(base: Any, view: Any) -> bool:
    return base.meta["val"].numel() <= view.meta["val"].numel()


def views_of_inputs(graph: fx.GraphModule) -> tuple[int, ...]:
    """The outputs that are inputs, or views of inputs, by number."""
    found = []
    for i, node in enumerate(outputs_of(graph)):
        while isinstance(node, fx.Node) and node.op != "placeholder" and is_view_of_first(node):
            node = node.args[0]
        if isinstance(node, fx.Node) and node.op == "placeholder":
            found.append(i)
    return tuple(found)


def is_alias(node: Any) -> bool:
    """Whether a node is a view of its first argument, or a list of such views, and depends on no other tensor."""
    if not isinstance(node.target, OpOverload):
        return False
    if [n for n in node.all_input_nodes if not is_symbol(n.meta["val"])] != [node.args[0]]:
        return False
    returns = node.target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def is_piece(node: Any) -> bool:
    """Whether a node is one of a list of views, as ``chunk`` returns it."""
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and is_alias(node.args[0])


def is_view_of_first(node: Any) -> bool:
    """`is_alias`, or will be when the graph is compiled."""
    return node.target in (stop, stop_reverse, constant) or is_alias(node)


def pushed_forward(
    graph: fx.GraphModule, fakes: Sequence[Any], mode: Any, moving: Sequence[int]
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Differentiate a graph in forward mode.

    Args:
        graph: a functional graph.
        fakes: its arguments.
        mode: their fake mode.
        moving: the arguments that have tangents.

    Returns:
        The graph of the arguments, then their tangents, and the outputs, by number, whose tangents it returns. Others are zero.
    """

    def tangents_of(*flat: Any) -> Any:
        inputs, tangents = list(flat[: len(fakes)]), flat[len(fakes) :]
        with some_dual_level():
            for i, t in zip(moving, tangents):
                inputs[i] = dual(unattached(inputs[i]), t)
            outputs = run(*inputs)
            found = [tangent(o) if isinstance(o, Tensor) else None for o in outputs]
        moved[:] = [i for i, t in enumerate(found) if t is not None]
        return tuple(found[i] for i in moved)

    moved: list[int] = []
    run = runner(_with_zero_tangents(graph))
    with mode:
        tangents = [torch.empty_like(fakes[i]) for i in moving]
    return trace(tangents_of, [*fakes, *tangents], mode), tuple(moved)


# The jvps of PyTorch make zeros for weights without a tangent, which are no fake tensors.
_AFFINE = {
    aten.native_group_norm, aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training, aten._batch_norm_with_update, aten._batch_norm_with_update_functional,
}  # fmt: skip
_WEIGHTS = ("weight", "bias")


def _with_zero_tangents(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph, where the weights of normalizations have tangents, of zero if no others."""
    if not any(getattr(node.target, "overloadpacket", None) in _AFFINE for node in graph.graph.nodes):
        return graph
    made = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for node in list(made.graph.nodes):
        if getattr(node.target, "overloadpacket", None) in _AFFINE:
            with made.graph.inserting_before(node):
                node.args = tuple(
                    made.graph.call_function(_with_tangent, (a,))
                    if isinstance(a, fx.Node) and known.name in _WEIGHTS
                    else a
                    for a, known in zip(node.args, node.target._schema.arguments)
                )
    made.recompile()
    return made


def _with_tangent(x: Tensor) -> Tensor:
    return x if has_tangent(x) else dual(unattached(x), torch.zeros_like(x))


def batchable(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph without the writes to parts of a tensor that PyTorch cannot batch, or batches with a wrong derivative."""
    if not any(node.target in _WRITES for node in graph.graph.nodes):
        return graph
    made = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for node in made.graph.nodes:
        if node.target not in _WRITES or len(node.all_input_nodes) > 2:  # a bound that depends on open sizes
            continue
        value = node.args[0].meta["val"]
        if any(map(is_symbol, (*value.shape, *value.stride()))):  # reading one would close it
            continue
        if node.target is aten.as_strided_scatter.default:
            if torch.empty_like(value).stride() != value.stride():
                continue
            node.kwargs = {**node.kwargs, "layout": value.stride()}
        node.target = _WRITES[node.target]
    made.recompile()
    return made


def _write_at_places(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0, *, layout: Sequence[int]
) -> Tensor:
    """``as_strided_scatter`` of a tensor that has these strides if it is not batched."""
    order = sorted(range(x.dim()), key=lambda d: -layout[d])
    back = sorted(range(x.dim()), key=order.__getitem__)
    ordered = x.permute(order)
    places = torch.full(tuple(size), offset or 0, device=x.device)
    for d, (n, step) in enumerate(zip(size, stride)):
        places = places + torch.arange(n, device=x.device).reshape(-1, *[1] * (len(size) - 1 - d)) * step
    written = ordered.reshape(-1).index_copy(0, places.reshape(-1), source.reshape(-1))
    return written.reshape(ordered.shape).permute(back)


def _write_slice(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """``slice_scatter``, whose batch has as many indices as ``end``, which may be 2**63 - 1."""
    start, end, _ = slice(start, end, step).indices(x.shape[dim])
    return x.slice_scatter(source, dim, start, max(start, end), step)


def _write_one(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """``select_scatter``. The batched one writes each number several times, and its derivative counts it as often."""
    index %= x.shape[dim]
    return x.slice_scatter(source.unsqueeze(dim), dim, index, index + 1)


_WRITES = {
    aten.as_strided_scatter.default: _write_at_places,
    aten.slice_scatter.default: _write_slice,
    aten.select_scatter.default: _write_one,
}


def batched(
    graph: fx.GraphModule, fakes: Sequence[Any], mode: Any, dims: Sequence[int | None], randomness: str
) -> fx.GraphModule:
    """vmap of a graph. All outputs have the batch first."""

    run = runner(batchable(graph))

    def over(*flat: Any) -> Any:
        return torch.func.vmap(lambda *xs: tuple(run(*xs)), in_dims=tuple(dims), randomness=randomness)(*flat)

    return trace(over, fakes, mode)
