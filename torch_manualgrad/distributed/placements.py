"""The dims of an operator's tensors that may be sharded alike, so that each rank computes its part alone.

A strategy is a function of the tensors and of the other arguments of a call, by name. A tensor is
represented by an object of ``DTensor`` with ``shape`` and ``ndim``, or None. The strategy yields ways to place all
tensors on one dim of the mesh: the placements of the outputs, and those of the given tensors. ``DTensor`` selects the
one that moves the least data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["PARTIAL", "REPLICATED", "Batched", "Body", "Lines", "Placed", "Placement", "Strategy", "aligned"]

# A placement is the dim that is sharded, or one of these, or ``DTensor``'s own object.
REPLICATED, PARTIAL = "replicated", "partial"
Placement = Any
Placed = tuple[Sequence[Placement], Sequence[Placement]]
Strategy = Callable[[Mapping[str, Any], Mapping[str, Any]], Iterator[Placed]]


@dataclass(frozen=True)
class Batched:
    """An operator that does the same for each element of a batch.

    ``Batched("mn, m, -> mn")`` says which dims are the last of each tensor and belong together, a letter each, as NumPy's
    generalized ufuncs do. All before them are batch dims, the same in every tensor, and any one of them may be sharded.

    Args:
        dims: those of the tensor arguments, in the order of the schema, then those of the outputs.
        shared: arguments without batch dims, such as weights; they are replicated.
        broadcast: arguments that may lack batch dims, or have one entry in their place, as masks do.
        summed: numbers of the outputs that are sums over the batch, such as gradients of weights: the ranks' parts are
            still to be added.
        wanted: says of the other arguments which outputs are computed; the others come back empty.
    """

    dims: str
    shared: Sequence[str] = ()
    summed: Sequence[int] = ()
    broadcast: Sequence[str] = ()
    wanted: Callable[[Mapping[str, Any]], Sequence[bool]] | None = None

    def __call__(self, tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> Iterator[Placed]:
        inputs, outputs = ([len(core.strip()) for core in side.split(",")] for side in self.dims.split("->"))
        given = [(name, x, core) for (name, x), core in zip(tensors.items(), inputs, strict=True) if x is not None]
        loose = (*self.shared, *self.broadcast)
        batches = {tuple(x.shape[: x.ndim - core]) for name, x, core in given if name not in loose}
        if len(batches) != 1:  # where one is broadcast, a rank may need more of it than its part
            return
        (batch,) = batches
        wanted = [True] * len(outputs) if self.wanted is None else self.wanted(constants)
        for dim in range(len(batch)):
            yield (
                [REPLICATED if not w else PARTIAL if i in self.summed else dim for i, w in enumerate(wanted)],
                [REPLICATED if name in self.shared else aligned(x, core, dim, batch) for name, x, core in given],
            )


def aligned(x: Any, core: int, dim: int, batch: Sequence[int]) -> Placement:
    """Where a dim of the batch is among the dims of one tensor that may be broadcast to it."""
    at = dim - len(batch) + x.ndim - core
    return at if at >= 0 and x.shape[at] == batch[dim] else REPLICATED


@dataclass(frozen=True)
class Lines:
    """An operator along some dims of a tensor, as a norm is; every output has the tensor's shape.

    A tensor with one entry for a whole line, with size 1 in these dims or without them, is sharded
    with the others.

    Args:
        like: the tensor argument with all dims.
        along: the argument that says which dims: a number, several, or None for all.
        shared: tensor arguments that are replicated, as those that divide a dim into segments.
        within: whether a line may be divided, too: all that was reduced is among the arguments.
        outputs: how many there are.
    """

    like: str
    along: str
    shared: Sequence[str] = ()
    within: bool = False
    outputs: int = 1

    def __call__(self, tensors: Mapping[str, Any], constants: Mapping[str, Any]) -> Iterator[Placed]:
        shape = tensors[self.like].shape
        given, along = len(shape), constants[self.along]
        dims = range(given) if along is None or along == [] else [along] if isinstance(along, int) else along
        lines = {d % given for d in dims} if given else set()
        for dim in range(given):
            if self.within or dim not in lines:
                yield (
                    [dim] * self.outputs,
                    [
                        REPLICATED if name in self.shared else _place(x, dim, shape, lines)
                        for name, x in tensors.items()
                        if x is not None
                    ],
                )


def _place(x: Any, dim: int, shape: Sequence[int], lines: set[int]) -> Placement:
    """The placement of one tensor next to another of ``shape`` that is sharded along ``dim``."""
    if x.ndim == len(shape):
        return dim if x.shape[dim] == shape[dim] else REPLICATED
    if dim in lines or x.ndim == 0:
        return REPLICATED
    return dim - sum(d < dim for d in lines)


class Body:
    """Replaces a strategy: distributed tensors run the operator's body, whose own operators have strategies.

    For operators with a sum in the middle, such as the derivative of a batch normalization.
    """
