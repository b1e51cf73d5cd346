"""Runs graphs: compiled by inductor, or operator by operator. Rewrites what inductor or BLAS would compute slowly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from ..core.calls_in_graphs import bodies
from ..core.internals import Sizes, compiled, inductors, is_symbol
from ..core.rule import ops
from ..core.versions import reached
from . import graphs

__all__ = ["by_inductor", "by_operators"]

Run = Callable[[list[Any]], Sequence[Any]]
aten = torch.ops.aten


class Lowered(Protocol):
    """The attributes of a `function.Function` that are needed to run it.

    Attributes:
        graph: of ATen operators.
        fakes: its arguments.
        sizes: the open sizes, if the graph has ``places`` for them.
        places: their places in the arguments.
    """

    graph: fx.GraphModule
    fakes: list[Tensor]
    sizes: Sizes
    places: tuple[tuple[int, int], ...]


def by_inductor(function: Lowered) -> Run:
    """Compile a graph: a function of a list of the open sizes and the tensors. It empties the list."""
    fused = {formula.op: formula.reference for name in _FUSED if (formula := ops.get(name))}
    graph, sizes = function.graph, function.sizes
    numbers = sizes.numbers if function.places else ()
    arguments = [*numbers, *function.fakes]
    plain = graphs.trace(
        lambda *flat: graph(*flat[len(numbers) :]),
        arguments,
        sizes.mode,
        like_inductor={**fused, **_FASTER, **bodies},
    )
    _computed_once(plain)
    _mark_residuals(plain, graph, len(numbers))
    # A small graph spends much of its time between its kernels. C++ is not tried with older versions, nor on other devices.
    in_cpp = reached("2.13") and all(fake.device.type == "cpu" for fake in function.fakes)
    return compiled(graphs.expanded_apart(graphs.without_stops(plain)), arguments, sizes.mode, in_cpp=in_cpp)


def by_operators(function: Lowered) -> Run:
    """Run a graph operator by operator. The list stays unchanged."""
    graph, count = function.graph, len(function.places)

    def run(values: list[Any]) -> Sequence[Any]:
        with torch.no_grad():
            return graph(*values[count:])

    return run


# Formulas whose kernels save memory traffic, if each operator runs separately. Inductor fuses their bodies instead.
_FUSED = (
    "complex_sign", "constant", "native_batch_norm_backward", "native_layer_norm_backward", "norm_backward",
    "weight_norm_backward",
)  # fmt: skip


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """Products rewritten for shapes that are slow in BLAS."""
    (m, k), n = a.shape, b.shape[1]
    if not _is_wide(a) or a.device.type != "cpu" or any(map(is_symbol, (m, k, n))):
        return inductors("mm")(a, b)
    if k == 1:  # fused with its readers
        return a * b
    # MKL multiplies by a few columns up to 30 times slower than by a few rows, unless both matrices are read along k.
    if 1 < n <= 8 and m >= 64 and k >= 32 and not (a.stride(1) == 1 and b.stride(0) == 1):
        return torch.mm(b.t(), a.t()).t().contiguous()
    return inductors("mm")(a, b)


def _sigmoid(x: Tensor) -> Any:
    """As inductor computes it on the CPU, with the exponential that `aten.silu` needs, too."""
    return (1 + x.neg().exp()).reciprocal() if _is_wide(x) and x.device.type == "cpu" else NotImplemented


_FASTER: dict[Any, Callable[..., Any]] = {aten.mm.default: _mm, aten.sigmoid.default: _sigmoid}


def _computed_once(graph: fx.GraphModule) -> None:
    """Compute equal exponentials once. Inductor stores one with several readers, and would recompute the others."""
    known: dict[Any, fx.Node] = {}
    for node in graph.graph.nodes:
        if node.target in (aten.neg.default, aten.exp.default) and _is_wide(node.meta["val"]):
            first = known.setdefault((node.target, node.args[0]), node)
            if first is not node:  # outputs share no memory
                node.replace_all_uses_with(first, delete_user_cb=lambda user: user.op != "output")
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _mark_residuals(graph: fx.GraphModule, partitioned: fx.GraphModule, first: int) -> None:
    """Name the residuals among the arguments, as PyTorch's partitioner does.

    Inductor runs the operators in the order that frees them early. It assumes by their names that primals, tangents and
    arguments of other names are not freed.

    Args:
        graph: to be compiled.
        partitioned: the same before the last trace.
        first: the number of the first tensor among the arguments of ``graph``.
    """
    arguments = graph.graph.find_nodes(op="placeholder")[first:]
    for i, (node, origin) in enumerate(zip(arguments, partitioned.graph.find_nodes(op="placeholder"), strict=True)):
        if not origin.name.startswith(("primals", "tangents", "arg")):
            node.target = f"residual_{i}"


def _is_wide(x: Tensor) -> bool:
    """Whether storing a value loses no accuracy: inductor keeps half precision in float32 inside of a kernel."""
    return x.dtype in (torch.float32, torch.float64)
