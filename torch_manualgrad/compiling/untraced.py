"""Functions that are nodes of Dynamo's graphs, because the program says ``torch._dynamo.allow_in_graph``.

A trace of operators shows what they compute, but not where they end a derivative or replace it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from ..core.internals import function_arguments_replaced, switch_grad_mode
from .function import Unsupported

__all__ = ["followed", "is_untraced"]


def is_untraced(node: fx.Node) -> bool:
    """Whether a node calls a function of Python that is not PyTorch's."""
    return isinstance(node.target, FunctionType) and not node.target.__module__.startswith(
        ("torch.", "torch_manualgrad.")
    )


class _Watch(TorchFunctionMode):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ENDS or func is switch_grad_mode and not args[0]:
            raise Unsupported(f"Dynamo does not trace {self.name}, which ends a derivative by {func.__name__}")
        return func(*args, **(kwargs or {}))


_ENDS = (torch.detach, Tensor.detach, Tensor.detach_, Tensor.data.__get__, Tensor.requires_grad_)  # type: ignore[attr-defined]


@contextmanager
def followed(node: fx.Node) -> Iterator[None]:
    """Context manager: the function of a node raises if it ends or replaces a derivative.

    Raises:
        Unsupported: it does.
    """
    name = node.target.__name__  # type: ignore[union-attr]

    def refuse(_: Any) -> None:
        raise Unsupported(f"Dynamo does not trace {name}, which applies an autograd.Function")

    with function_arguments_replaced(refuse), _Watch(name):
        yield
