"""Transforms of compiled functions: compiled as a whole, because the function alone cannot run on Taylor series."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from torch_manualgrad.core.forward import compilers

__all__ = ["called_as_f_is", "compiled_if_f_is"]

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled_if_f_is(transform: _F) -> _F:
    """A decorator of ``transform(f, ...)``, a function: if ``f`` is compiled by this package, it is compiled in the same way."""

    @functools.wraps(transform)
    def of(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        compile = _compiler_of(f)
        if compile is None:
            return transform(f, *args, **kwargs)
        return compile(lambda f: transform(f, *args, **kwargs), (transform, *_numbers(args, kwargs)))

    return of  # type: ignore[return-value]


def called_as_f_is(function: _F) -> _F:
    """A decorator of a function of ``f`` and further arguments: if ``f`` is compiled by this package, so is the call."""

    @functools.wraps(function)
    def call(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        compile = _compiler_of(f)
        if compile is None:
            return function(f, *args, **kwargs)
        compiled = compile(lambda f: functools.partial(function, f), (function, *_numbers(args, kwargs)))
        return compiled(*args, **kwargs)

    return call  # type: ignore[return-value]


def _numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    return [(name, x) for name, x in [*enumerate(args), *kwargs.items()] if isinstance(x, (bool, int))]


def _compiler_of(f: Any) -> Callable[..., Any] | None:
    if torch.compiler.is_dynamo_compiling():
        return None
    if isinstance(f, nn.Module):
        if f._compiled_call_impl is not None:  # by f.compile()
            f = f._compiled_call_impl
        elif f._forward_hooks or f._forward_pre_hooks or f._backward_hooks or f._backward_pre_hooks:
            return None  # hooks of what torch.compile returned, not of the module inside
        else:
            f = f.__dict__.get("forward")
    return compilers.get(f) if isinstance(f, FunctionType) else None
