"""The state of PyTorch's random number generators at a call, for a function that is computed again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

__all__ = ["RandomState"]


class RandomState:
    """The states of the generators of the CPU and of the devices of some tensors.

    Args:
        tensors: those of the call.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._cpu = torch.get_rng_state()
        found = [x for x in tensors if x.device.type not in ("cpu", "meta")]
        self._kind = found[0].device.type if found else None
        self._devices, self._states = get_device_states(*found) if found else ([], [])
        self._used = True

    def settle(self) -> None:
        """Compare with the states now, after the call: if it drew no numbers, there is nothing to restore."""
        same = torch.equal(self._cpu, torch.get_rng_state())
        if same and self._kind is not None:
            module = torch.get_device_module(self._kind)
            same = all(torch.equal(s, module.get_rng_state(d)) for d, s in zip(self._devices, self._states))
        self._used = not same

    @contextmanager
    def restored(self) -> Iterator[None]:
        """In the context the same numbers are drawn again; after it the generators go on as if it had not been."""
        if not self._used:
            yield
            return
        with torch.random.fork_rng(self._devices, device_type=self._kind or "cuda"):
            torch.set_rng_state(self._cpu)
            if self._kind is not None:
                set_device_states(self._devices, self._states, device_type=self._kind)
            yield
