"""Custom ops from functions: what ``mg.custom_op`` is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .op import CustomOp
from .op_registry import defined_ops

__all__ = ["custom_op"]


def custom_op(schema: str, *, redefine: bool = False) -> Callable[[Callable[..., Any]], CustomOp]:
    """Define an operator whose reference implementation is the decorated function.

    Args:
        schema: ``"namespace::name(Tensor x, Tensor? bias=None, *, float scale=1.0) -> (Tensor, Tensor)"``, in PyTorch's
            schema language; or ``"namespace::name"`` alone, with the types read from the function's annotations.
            Tensors, optional tensors and lists of tensors may stand anywhere, results may be tensors, lists of
            tensors or numbers. It must be functional: no argument is written to or returned.
        redefine: replace the custom op of that name, if there is one, with everything registered for it; the schema may
            be another. For notebooks, whose cells run again: no other thread may be inside a call of it. The new op is
            at ``torch.ops``; the old `CustomOp` is not to be used any more.

    Returns:
        A decorator that makes a `CustomOp`; the function is its implementation on every device until another is
        registered.

    Raises:
        ValueError: the schema cannot be read, mutates or aliases an argument, has no namespace, or the name is taken.
        TypeError: no schema is given, or what is decorated is not a function.
    """
    if not isinstance(schema, str):
        raise TypeError(f"custom_op takes a schema, 'namespace::name(...) -> ...', got {type(schema).__name__}")

    def define(function: Callable[..., Any]) -> CustomOp:
        text = schema
        if "(" not in schema:
            if not hasattr(function, "__globals__"):
                raise TypeError(
                    f"schema {schema!r} has no arguments, and reference: expected a Python function that has annotations, got {function!r}"
                )
            text = schema + torch.library.infer_schema(function, mutates_args=())
        if redefine and (old := defined_ops.get(text.partition("(")[0].strip())) is not None:
            old.undefine()
        return CustomOp(text, function)

    return define
