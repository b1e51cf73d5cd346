"""The state of PyTorch's random number generators at a call, for a function that is computed again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from ..core.internals import PLAIN, calls_seen, is_traced_to_graph, value_of

__all__ = ["RandomState"]


class RandomState:
    """The states of the generators of the CPU and of the devices of some tensors.

    Args:
        tensors: those of the call.
        what: the function, in errors.
    """

    def __init__(self, tensors: Sequence[Tensor], what: str) -> None:
        self.what, self._lost = what, False
        self._cpu = torch.get_rng_state()
        found = [x for x in tensors if x.device.type not in ("cpu", "meta")]
        self._kind = found[0].device.type if found else None
        self._devices, self._states = get_device_states(*found) if found else ([], [])
        self._used = False
        self._abstract = any(type(value_of(x)) not in PLAIN for x in tensors)

    @contextmanager
    def seen(self) -> Iterator[None]:
        """The call of the function, after which it is known whether it draws random numbers."""
        if is_traced_to_graph() or self._abstract:  # the generators of this process stay as they are
            with calls_seen(self._see):
                yield
            return
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
        """In the context the same numbers are drawn again; after it the generators go on as if it had not been.

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
            yield
