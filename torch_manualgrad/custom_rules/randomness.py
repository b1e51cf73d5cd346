"""The state of PyTorch's random number generators at a call, for its recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import get_device_states, set_device_states

from ..core.internals import (
    PLAIN,
    calls_seen,
    in_batched_gradients,
    in_functorch,
    is_batched,
    is_traced_to_graph,
    outside_of_transforms,
    value_of,
)

__all__ = ["RandomState"]


class _Dropout(TorchFunctionMode):
    """Makes dropout draw the same masks in a call of a function and in its recomputation.

    PyTorch fills a mask in the order of memory, and under ``torch.func`` in the order of the dimensions. Strides may differ
    there, too.

    Args:
        layouts: the strides of the mask for each call of dropout; None leaves the mask to PyTorch.
        is_again: whether this is the recomputation. The first call fills the list.
    """

    def __init__(self, layouts: list[tuple[int, ...] | None], is_again: bool) -> None:
        super().__init__()
        self.layouts, self._again = layouts, iter(layouts) if is_again else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._dropped(func, *args, **kwargs) if func in (*_DROPOUTS, *_OF_CHANNELS) else func(*args, **kwargs)

    def _dropped(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **by_name: Any
    ) -> Tensor:
        training = by_name.get("train", training)
        if not training or not 0 < p < 1:
            return self._as_pytorch(func, input, p, training, inplace)
        shape, strides = _mask(func, input)
        if self._again is None:
            layout = None if is_batched(input) else strides
            self.layouts.append(layout)
        else:
            layout = next(self._again, None)
        transformed = in_functorch() or in_batched_gradients()
        if layout is None or not transformed and (layout == input.stride() or func in _OF_CHANNELS):
            return self._as_pytorch(func, input, p, training, inplace)
        with outside_of_transforms() if transformed else nullcontext():  # one mask for all cotangents of a batch
            mask = torch.empty_strided(shape, layout, dtype=input.dtype, device=input.device)
            mask.bernoulli_(1 - p).div_(1 - p)
        return input.mul_(mask) if inplace or func == torch.dropout_ else input * mask

    @staticmethod
    def _as_pytorch(func: Any, input: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
        found: Tensor = func(input, p, training, *([] if func in (torch.dropout, torch.dropout_) else [inplace]))
        return found


def _mask(func: Any, x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape and the strides of the mask that PyTorch makes. It has no gaps, and the order of the strides of ``x``."""
    shape, order = tuple(x.shape), sorted(range(x.dim()), key=lambda d: (x.stride(d), -d))
    if func in _OF_CHANNELS:
        kept = 1 if x.dim() == _OF_CHANNELS[func] else 2
        shape, order = (*shape[:kept], *[1] * len(shape[kept:])), [*reversed(range(x.dim()))]
    strides, step = [0] * x.dim(), 1
    for d in order:
        strides[d], step = step, step * shape[d]
    return shape, tuple(strides)


_DROPOUTS = (functional.dropout, torch.dropout, torch.dropout_)

# Dropout of whole channels draws a number for each. The value: how many dims an input without a batch has.
_OF_CHANNELS = {functional.dropout1d: 2, functional.dropout2d: 0, functional.dropout3d: 4}


class RandomState:
    """The states of the generators of the CPU and of the devices of some tensors.

    Args:
        tensors: those of the call.
        what: the name of the function in errors.
        compiled: whether the function and its recomputation run the same compiled code, which draws in the same order.
    """

    def __init__(self, tensors: Sequence[Tensor], what: str, compiled: bool = False) -> None:
        self.what, self._lost, self._compiled = what, False, compiled
        self._cpu = torch.get_rng_state()
        found = [x for x in tensors if x.device.type not in ("cpu", "meta")]
        self._kind = found[0].device.type if found else None
        self._devices, self._states = get_device_states(*found) if found else ([], [])
        self._used = False
        self._layouts: list[tuple[int, ...] | None] = []
        self._abstract = any(type(value_of(x)) not in PLAIN for x in tensors)

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Wraps the call of the function, and detects whether it draws random numbers."""
        if is_traced_to_graph() or self._abstract:  # the generators of this process do not change
            with calls_seen(self._see):
                yield
            return
        with self._dropout(is_again=False):
            yield
        same = torch.equal(self._cpu, torch.get_rng_state())
        if same and self._kind is not None:
            module = torch.get_device_module(self._kind)
            same = all(torch.equal(s, module.get_rng_state(d)) for d, s in zip(self._devices, self._states))
        self._used = not same

    def _see(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._lost = self._lost or torch.Tag.nondeterministic_seeded in op.tags

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager: the same numbers are drawn again. The generators are restored at its end.

        Raises:
            RuntimeError: the call was traced to a graph, which cannot draw the same numbers again.
        """
        if self._lost:
            raise RuntimeError(
                f"{self.what} draws random numbers, and a derivative computes it again: a graph that is traced, as by make_fx, "
                "cannot draw the same numbers. Draw them outside, and pass them as an argument"
            )
        if not self._used:
            yield
            return
        with torch.random.fork_rng(self._devices, device_type=self._kind or "cuda"):
            torch.set_rng_state(self._cpu)
            if self._kind is not None:
                set_device_states(self._devices, self._states, device_type=self._kind)
            with self._dropout(is_again=True):
                yield

    def _dropout(self, is_again: bool) -> AbstractContextManager[object]:
        return nullcontext() if self._compiled else _Dropout(self._layouts, is_again)
