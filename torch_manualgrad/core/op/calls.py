"""Conditions that every call of a custom op must meet: devices, and determinism."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..schema import Signature, tensors_in
from .implementation import DEVICE_KEYS

__all__ = ["CallRules"]


class CallRules(NamedTuple):
    """Conditions on a call of a custom op.

    Attributes:
        device_types: the types of device that the decorated function supports; None for any.
        same_device: whether all tensors must be on one device, except CPU tensors without dimensions.
        deterministic: whether equal calls give bitwise identical results.
    """

    device_types: tuple[str, ...] | None = None
    same_device: bool = False
    deterministic: bool = True

    def check(
        self, signature: Signature, values: Sequence[Any], implementations: Mapping[str, Any], fake: bool = False
    ) -> None:
        """Raise if the call breaks a condition.

        Args:
            signature: of the op.
            values: the arguments in schema order.
            implementations: the registered ones, by kind; a type of device among them is accepted.
            fake: whether the tensors have no data.

        Raises:
            RuntimeError: the call breaks a condition. The message names the argument.
        """
        name = signature.full_name
        if not (self.deterministic or fake):
            self._refuse_nondeterministic(name)
        if self.device_types is None and not self.same_device:
            return
        given = [(argument, x) for argument, value in zip(signature.names, values) for x in tensors_in([value])]
        sized = [(argument, x) for argument, x in given if x.dim() or x.device.type != "cpu"]
        if self.device_types is not None:
            known = {*self.device_types, "meta", *(k for k in implementations if k in DEVICE_KEYS)}
            for argument, x in sized or given:
                if x.device.type not in known:
                    raise RuntimeError(
                        f"{name}: argument {argument!r} is on device {str(x.device)!r}, but the op is implemented for "
                        f"{', '.join(sorted(known - {'meta'}))} only. Register a kernel with impl({x.device.type!r})."
                    )
        if self.same_device and sized:
            first, expected = sized[0]
            for argument, x in sized[1:]:
                if x.device != expected.device:
                    raise RuntimeError(
                        f"{name}: argument {argument!r} is on device {str(x.device)!r}, but {first!r} is on "
                        f"{str(expected.device)!r}. All tensors must be on one device."
                    )

    def _refuse_nondeterministic(self, name: str) -> None:
        if not torch.are_deterministic_algorithms_enabled():
            return
        text = (
            f"{name} is declared as nondeterministic (deterministic=False), but you set "
            "'torch.use_deterministic_algorithms(True)'."
        )
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(text)
        warnings.warn(text, stacklevel=3)
