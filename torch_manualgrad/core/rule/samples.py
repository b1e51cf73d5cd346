"""Samples and probes of rules, in separate modules that are imported when a sample is first read."""

from __future__ import annotations

import importlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..sample import Sample
from ..schema import Signature

__all__ = [
    "LINE",
    "Interval",
    "Sampler",
    "drawn",
    "find_probe",
    "find_sampler",
    "probe_for",
    "samples_for",
    "samples_in",
]

Interval = tuple[float, float]
LINE: Interval = (-math.inf, math.inf)

Sampler = Callable[[torch.dtype, "torch.device | str"], Iterable[Sample]]

_samplers: dict[str, Sampler] = {}
_probes: dict[str, Callable[..., Any]] = {}
_unloaded: list[str] = []


def samples_in(module: str) -> None:
    """Register a module that calls `samples_for`. It is imported the first time that samples of a rule are read."""
    _unloaded.append(module)


def samples_for(*operators: str) -> Callable[[Sampler], Sampler]:
    """Decorate the function that yields the samples of the rules for these operators.

    Args:
        operators: names as in ``mg.rules``, such as ``"aten::linalg_lu"``.

    Raises:
        ValueError: an operator has samples already.
    """
    return _registering(_samplers, "samples", operators)


def probe_for(*operators: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the function that checks differentiate instead of these operators; see `Rule`.

    Raises:
        ValueError: an operator has a probe already.
    """
    return _registering(_probes, "a probe", operators)


def _registering(table: dict[str, Any], what: str, operators: tuple[str, ...]) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        for name in operators:
            if name in table:
                raise ValueError(f"{name} has {what} already: {table[name].__module__}.{table[name].__qualname__}")
            table[name] = function
        return function

    return register


def find_sampler(operator: str) -> Sampler | None:
    """The sampler registered for an operator."""
    _load()
    return _samplers.get(operator)


def find_probe(operator: str) -> Callable[..., Any] | None:
    """The probe registered for an operator."""
    _load()
    return _probes.get(operator)


def _load() -> None:
    while _unloaded:
        module = _unloaded.pop(0)
        try:
            importlib.import_module(module)
        except Exception as error:
            warnings.warn(
                f"the samples of {module} are missing: it could not be imported ({type(error).__name__}: {error})",
                RuntimeWarning,
                stacklevel=3,
            )


# -- samples drawn from a domain -----------------------------------------------------------------------------------------

# For one tensor; with several, the second shapes broadcast with the first, and further tensors have the first again.
_SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((3, 4), (3, 4)),
    ((2, 1, 3), (4, 1)),
    ((3,), ()),
    ((), ()),
    ((0, 2), (2,)),
)


def drawn(
    signature: Signature,
    domains: Mapping[str, Interval],
    real_only: bool,
    arguments: Sequence[Mapping[str, Any]],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Iterable[Sample]:
    """Samples of an elementwise operator, drawn from the domain of each tensor.

    Args:
        signature: of the operator.
        domains: tensor -> its interval; the real line by default.
        real_only: whether the operator takes no complex tensors.
        arguments: values of the other arguments by name. There are samples with each.
        dtype: of the tensors.
        device: of the tensors.
    """
    if dtype.is_complex and real_only:
        return
    for others in arguments:
        for position, shapes in enumerate(_SHAPES):
            tensors = {
                name: _points(shapes[i % 2], domains.get(name, LINE), dtype, device, seed=10 * position + i)
                for i, name in enumerate(signature.tensor_names)
            }
            given = tensors | dict(others)
            leading = list(itertools.takewhile(given.__contains__, signature.names[: signature.positional]))
            yield Sample(*[given.pop(name) for name in leading], **given)


def _points(
    shape: tuple[int, ...], interval: Interval, dtype: torch.dtype, device: torch.device | str, seed: int
) -> Tensor:
    """Numbers in the interval, away from its ends and from zero; complex ones are slightly off the real line."""
    generator = torch.Generator().manual_seed(seed)
    unit = 0.08 + 0.84 * torch.rand(shape, dtype=torch.float64, generator=generator, device="cpu")
    low, high = interval
    if math.isinf(low) and math.isinf(high):
        points = 6 * unit - 3
    elif math.isinf(high):
        points = low + 0.1 + 3 * unit
    elif math.isinf(low):
        points = high - 0.1 - 3 * unit
    else:
        points = low + (high - low) * unit
    if low < 0 < high:
        clear = 0.08 * min(1.0, high, -low)
        points = torch.where(points.abs() < clear, clear, points)
    if dtype.is_complex:
        points = torch.complex(
            points, 0.3 + 0.4 * torch.rand(shape, dtype=torch.float64, generator=generator, device="cpu")
        )
    return points.to(device, dtype)
