"""Functions made of a user's functions, such as a checkpoint of a module: copies of them are made of copies of these."""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .closures import Copies, as_of_now
from .internals import wrapped_attributes

__all__ = ["copied_with"]


class _Function:
    """A function that is copied and pickled with the arguments from which it was made.

    A closure would be its own copy, so a copied module that has one would compute with the parameters of the original.
    """

    def __init__(self, function: Callable[..., Any], make: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, function, wrapped_attributes(function), updated=())
        self._function, self._made_by = function, (make, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def as_of_now(self, copies: Copies) -> _Function:
        """For `closures.as_of_now`."""
        copy = object.__new__(_Function)
        copy.__dict__.update(self.__dict__)
        copies.add(self, copy)
        copy._function = as_of_now(self._function, copies)
        return copy

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        module, name = sys.modules.get(self._function.__module__), self._function.__qualname__
        try:
            decorated = operator.attrgetter(name)(module) is self
        except AttributeError:  # a name in a function
            decorated = False
        return name if decorated else (_remade, self._made_by)


def _remade(make: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return make(*args, **kwargs)


def copied_with(function: Callable[..., Any], make: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The function, whose copies are ``make(*args, **kwargs)`` of copies of the arguments.

    A function that is the decorator's result, and so has a name in its module, is copied and pickled by this name.
    """
    return function if torch.compiler.is_dynamo_compiling() else _Function(function, make, args, kwargs)
