"""Removes the operators of a backward graph whose results are zero because their cotangents are."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..core.internals import OpOverload, Sizes
from .graphs import numbers_in, outputs_of, set_outputs

__all__ = ["specialized"]

aten = torch.ops.aten

_ShapeOf = Callable[[torch.Tensor], list[Any]]

# Linear in the first argument, which may be a list.
_LINEAR = {
    aten.t, aten.view, aten._unsafe_view, aten.reshape, aten.expand, aten.permute, aten.transpose, aten.squeeze,
    aten.unsqueeze, aten.slice, aten.select, aten.narrow, aten.as_strided, aten.diagonal, aten.alias, aten.clone,
    aten.contiguous, aten._to_copy, aten.neg, aten.sum, aten.mean, aten.conj, aten._conj, aten.real, aten.view_as_real,
    aten.view_as_complex, aten.flip, aten.roll, aten.repeat, aten.cat, aten.stack, aten.index_select, aten.gather,
    aten.index, aten.tril, aten.triu, aten.diag_embed, aten.unfold, aten.cumsum, aten.split, aten.split_with_sizes,
    aten.unbind, aten.chunk, aten._reshape_alias, aten.resolve_conj, aten.resolve_neg, aten.imag, aten.movedim,
    aten.trace, aten.diag, aten.div, aten.detach, aten.sum_to_size, aten.expand_as, aten.view_as, aten.scalar_tensor,
    aten.upsample_nearest2d, aten.avg_pool2d, aten.im2col, aten.col2im, aten._fft_c2c, aten._fft_r2c, aten._fft_c2r,
}  # fmt: skip
# Zero if one of the factors is.
_BILINEAR = {
    aten.mul, aten.mm, aten.bmm, aten.mv, aten.dot, aten.vdot, aten.matmul, aten.outer, aten.ger, aten.kron,
    aten.convolution, aten.linear,
}  # fmt: skip
# Zero if the arguments at these places are; a number counts, too, and zeros that the graph makes.
_OF_ALL = {
    aten.where: (1, 2), aten.masked_fill: (0, 2), aten.constant_pad_nd: (0, 2), aten.scatter: (0, 3),
    aten.scatter_add: (0, 3), aten.index_add: (0, 3), aten.index_copy: (0, 3), aten.index_put: (0, 2),
    aten._unsafe_index_put: (0, 2), aten.masked_scatter: (0, 2), aten.slice_scatter: (0, 1), aten.select_scatter: (0, 1),
    aten.diagonal_scatter: (0, 1), aten.as_strided_scatter: (0, 1), aten.linalg_solve_triangular: (1,),
    aten.linalg_lu_solve: (2,), aten.linalg_solve: (1,), aten.cholesky_solve: (0,),
    torch.ops.manualgrad.solve_again: (3,),
}  # fmt: skip
_ZEROS = {aten.zeros, aten.zeros_like, aten.new_zeros}
_FILLED = {aten.full: 1, aten.full_like: 1, aten.new_full: 2, aten.scalar_tensor: 0}  # the place of the number


def specialized(
    graph: fx.GraphModule,
    first: int,
    given: Sequence[bool],
    wanted: Sequence[bool],
    sizes: Sizes,
    places: Sequence[tuple[int, int]],
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """A backward specialized to some cotangents and some gradients.

    Args:
        graph: whose placeholders from ``first`` on are the cotangents.
        first: the number of the first cotangent.
        given: for each cotangent, whether it is given. The others are zero, and not arguments of the result.
        wanted: for each output, whether it is wanted.
        sizes: the open sizes of the graph.
        places: for each of these the placeholder and dimension that has it.

    Returns:
        The graph, and the outputs that it returns, by number. The others are zero, or not wanted.
    """
    copy = fx.GraphModule(graph, _copied(graph.graph))
    placeholders = copy.graph.find_nodes(op="placeholder")
    zero = {n for n, yes in zip(placeholders[first:], given) if not yes}
    holders = [(placeholders[i], d) for i, d in places]
    shape_of = functools.partial(_shape_of, copy.graph, sizes, holders)
    for node in list(copy.graph.nodes):
        if node.op == "call_function" and any(x in zero for x in node.all_input_nodes):
            _propagate(copy.graph, node, zero, shape_of)
    outputs = outputs_of(copy)
    kept = tuple(i for i, (o, yes) in enumerate(zip(outputs, wanted)) if yes and o is not None and o not in zero)
    set_outputs(copy, [outputs[i] for i in kept])
    copy.graph.eliminate_dead_code()
    for node in placeholders[first:]:
        if node in zero:
            for user in list(node.users):
                _materialize(copy.graph, user, zero, shape_of)
            copy.graph.erase_node(node)
    copy.recompile()
    return copy, kept


def _copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    found: dict[Any, Any] = {}
    output = copy.graph_copy(graph, found)
    copy.output(output)
    return copy


def _propagate(graph: Any, node: Any, zero: set[Any], shape_of: _ShapeOf) -> None:
    """Mark a node as zero, drop a zero term, or pass a tensor of zeros if the argument cannot be dropped."""
    packet = getattr(node.target, "overloadpacket", None)
    arguments = node.args
    if node.target is operator.getitem:
        zero.add(node)
    elif packet in _LINEAR or _is_backward(node.target):
        heads = arguments[0] if isinstance(arguments[0], (list, tuple)) else [arguments[0]]
        if all(h in zero for h in heads if isinstance(h, fx.Node)) and any(isinstance(h, fx.Node) for h in heads):
            zero.add(node)
        else:
            _materialize(graph, node, zero, shape_of)
    elif packet in _BILINEAR and (arguments[0] in zero or arguments[1] in zero) and len(arguments) == 2:
        zero.add(node)
    elif packet in (aten.add, aten.sub) and not isinstance(arguments[1], (int, float, complex)):
        _without_term(graph, node, zero, shape_of)
    elif packet in _ZEROS or packet in _OF_ALL and all(_is_zero(x, zero) for x in _at(node, _OF_ALL[packet])):
        zero.add(node)
    else:
        _materialize(graph, node, zero, shape_of)


def _is_backward(op: Any) -> bool:
    """Whether an operator is linear in its first argument, the one cotangent that it takes."""
    if (
        not isinstance(op, OpOverload)
        or op.namespace not in ("aten", "manualgrad")
        or not op._schema.name.endswith(("_backward", "_backward_data"))
    ):
        return False
    cotangents = [i for i, a in enumerate(op._schema.arguments) if a.name.startswith("grad")]
    return cotangents == [0]


def _at(node: Any, places: Sequence[int]) -> list[Any]:
    """The arguments at these places, the default for one that is left out."""
    declared = node.target._schema.arguments
    known = [*node.args, *[a.default_value for a in declared[len(node.args) :]]]
    return [known[i] if i < len(known) else None for i in places]


def _is_zero(x: Any, zero: set[Any]) -> bool:
    if not isinstance(x, fx.Node):
        return isinstance(x, (int, float, complex)) and x == 0
    packet = getattr(x.target, "overloadpacket", None)
    return x in zero or packet in _ZEROS or packet in _FILLED and _is_zero(x.args[_FILLED[packet]], zero)


def _without_term(graph: Any, node: Any, zero: set[Any], shape_of: _ShapeOf) -> None:
    first, second = node.args[:2]
    if first in zero and second in zero:
        zero.add(node)
        return
    left = second if first in zero else first
    same = isinstance(left, fx.Node) and _alike(left.meta.get("val"), node.meta.get("val"))
    scaled = first in zero and (node.target.overloadpacket is aten.sub or "alpha" in node.kwargs)
    if same and not scaled:
        node.replace_all_uses_with(left)
    else:
        _materialize(graph, node, zero, shape_of)


def _alike(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.dtype != b.dtype:
        return False
    return [*map(str, a.shape)] == [*map(str, b.shape)]  # without assumptions about open sizes


def _shape_of(graph: Any, sizes: Sizes, holders: Sequence[tuple[fx.Node, int]], value: torch.Tensor) -> list[Any]:
    return numbers_in(graph, value.shape, sizes, holders)


def _materialize(graph: Any, node: Any, zero: set[Any], shape_of: _ShapeOf) -> None:
    """Give a node tensors of zeros for its arguments that are zero."""
    for x in node.all_input_nodes:
        if x in zero and isinstance(value := x.meta.get("val"), torch.Tensor):
            with graph.inserting_before(node):
                made = graph.call_function(
                    aten.full.default,
                    (shape_of(value), 0),
                    {"dtype": value.dtype, "device": value.device, "pin_memory": False},
                )
            made.meta["val"] = value
            node.replace_input_with(x, made)
