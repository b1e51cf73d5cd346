"""Compiled functions under torch.func, where Dynamo compiles nothing.

Dynamo is called with stand-ins, plain tensors of the same shapes, to find or make the graph. The graph's function, an
operator, then runs with the real arguments, at the levels of the transforms.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..core.internals import is_functorch_wrapped, outside_of_transforms, pytree
from .program import Program

__all__ = ["call", "recorded"]

_here = threading.local()


@contextmanager
def _recording() -> Iterator[list[tuple[Program, Sequence[Any], list[Any]]]]:
    before, _here.seen = getattr(_here, "seen", None), []
    try:
        yield _here.seen
    finally:
        _here.seen = before


def recorded(program: Program, values: Sequence[Any]) -> list[Any] | None:
    """Stand-ins for the outputs of a graph, which is not run; None if the call must run."""
    seen = getattr(_here, "seen", None)
    if seen is None:
        return None
    outputs = program.stand_ins(values)
    seen.append((program, values, outputs))
    return outputs


def call(function: Callable[..., Any], compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a compiled function inside of a transform.

    Args:
        function: the function itself, which runs if it is not one graph.
        compiled: the function, compiled as one graph.
        args: of the call.
        kwargs: of the call.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    with outside_of_transforms():
        stand_ins = [_stand_in(x) if isinstance(x, Tensor) else x for x in leaves]
        places = {id(x): i for i, x in enumerate(stand_ins) if isinstance(x, Tensor)}
        given, named = pytree.tree_unflatten(stand_ins, structure)
        with _recording() as seen:
            try:
                result = compiled(*given, **named)
            except Exception:  # it is not one graph, or it raises: the call below raises again
                seen.clear()
    if len(seen) != 1 or seen[0][0].noise or any(_is_foreign(v, places) for v in seen[0][1]):
        return function(*args, **kwargs)
    program, values, outputs = seen[0]
    found = program(*[leaves[places[id(v)]] if id(v) in places else v for v in values])
    made = {id(o): f for o, f in zip(outputs, found)}

    def real(x: Tensor) -> Any:
        return made[id(x)] if id(x) in made else leaves[places[id(x)]] if id(x) in places else x

    return pytree.tree_map_only(Tensor, real, result)


def _stand_in(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _is_foreign(value: Any, places: dict[int, int]) -> bool:
    """Whether a graph reads a tensor of a transform that is not an argument, as a closure does."""
    return isinstance(value, Tensor) and id(value) not in places and is_functorch_wrapped(value)
