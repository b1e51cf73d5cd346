"""One call of an operator: an example in a rule, a sample for the checker."""

from __future__ import annotations

from typing import Any

import torch

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex128: "c128",
    torch.complex64: "c64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
}


def describe(value: Any) -> str:
    """A tensor as ``f64[2, 3]``, anything else as its repr."""
    if isinstance(value, torch.Tensor):
        dtype = _SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}{list(value.shape)}"
    if type(value) in (tuple, list):
        inner = ", ".join(map(describe, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if type(value) is dict:
        return "{" + ", ".join(f"{k}: {describe(v)}" for k, v in value.items()) + "}"
    return repr(value)


class Sample:
    """``Sample(*args, **kwargs)``: the arguments of one call.

    A tensor anywhere in them (also inside lists, tuples and dictionaries) is an input. If any of them requires grad,
    exactly those are differentiated; otherwise every floating and complex one is.
    """

    __slots__ = ("args", "kwargs", "name")

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)
        object.__setattr__(self, "name", "")

    def named(self, name: str) -> Sample:
        """The same call under a name; a method, because every keyword belongs to the operator."""
        copy = Sample(*self.args, **self.kwargs)
        object.__setattr__(copy, "name", name)
        return copy

    def __setattr__(self, key: str, value: Any) -> None:
        raise AttributeError(f"a Sample is frozen: cannot set {key!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.args, self.kwargs, self.name)

    def __repr__(self) -> str:
        inner = [describe(a) for a in self.args] + [f"{k}={describe(v)}" for k, v in self.kwargs.items()]
        call = f"({', '.join(inner)})"
        return f"{self.name} {call}" if self.name else call


def _rebuild(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Sample:
    return Sample(*args, **kwargs).named(name)
