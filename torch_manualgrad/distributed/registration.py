"""Registration of strategies with ``DTensor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.engine.sharding import computed_by_body, lock, registered
from ..core.internals import forget_placements, prefer_registered_sharding, read_all_arguments, sizes_are_local
from ..core.registry import defined_ops
from ..core.rule import exists, operator
from ..core.schema import Signature
from .operators import sizes, strategies
from .placements import PARTIAL, REPLICATED, Body, Placed, Placement, Strategy

__all__ = ["register"]


def register() -> None:
    """Tell ``DTensor`` how the operators of `strategies` and every custom op are sharded.

    `override` calls it if ``torch.distributed.tensor`` has been imported, and so does the first distributed tensor that
    reaches one of our dispatcher kernels. An op without a strategy is replicated: each rank gathers the whole tensors
    and computes everything.
    """
    with lock:
        known = len(registered)
        for name, own in list(defined_ops.items()):
            if own.op not in registered and not own.transparent:
                _register(own.op, own.signature, strategies.get(name))
        for name, strategy in strategies.items():
            if not name.startswith("manualgrad::") and exists(name) and (op := operator(name)) not in registered:
                _register(op, Signature(op._schema), strategy)
        if len(registered) > known:
            forget_placements()


def _register(op: Any, signature: Signature, strategy: Strategy | Body | None) -> None:
    from torch.distributed.tensor.experimental import register_sharding

    registered.add(op)
    if isinstance(strategy, Body):
        computed_by_body.add(op)
        strategy = None

    def placements(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        values = dict(zip(signature.names, signature.bind(args, kwargs)))
        tensors = {name: values.pop(name) for name in signature.tensor_names}
        count = sum(1 if hasattr(x, "shape") else len(_of(x)) for x in tensors.values())
        found: list[Placed] = [([REPLICATED] * len(signature.returns), [REPLICATED] * count)]
        if strategy is not None:
            found += strategy(tensors, values)
        return [([_placement(p) for p in outputs], [_placement(p) for p in inputs]) for outputs, inputs in found]

    register_sharding(op)(placements)
    prefer_registered_sharding(op)
    read_all_arguments(op, signature)
    if (name := op.name()) in sizes:
        sizes_are_local(op, signature.names.index(sizes[name]))


def _of(value: Any) -> Sequence[Any]:
    """The tensors of a list; none, if it is None."""
    return [x for x in value or () if x is not None]


def _placement(placement: Placement) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if isinstance(placement, int):
        return Shard(placement)
    return {REPLICATED: Replicate(), PARTIAL: Partial()}.get(placement, placement)
