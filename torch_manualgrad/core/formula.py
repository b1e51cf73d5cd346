"""Formulas: pure functions, each of which is also the operator ``manualgrad::<its name>``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from . import packages
from .internals import entry, values_hidden
from .op import CustomOp
from .registry import Registry

__all__ = ["Formula", "formula", "ops"]

NAMESPACE = "manualgrad"


class _Direct(threading.local):
    """While `now` is set, formulas with a Python kernel run it at once, on this thread.

    For plain tensors of which nothing is recorded, and whose values may be read: it saves the way through the dispatcher
    back into Python, which is a third of a small formula's time.
    """

    now = False


direct = _Direct()


class Formula(CustomOp):
    """A function of the mathematics, and the operator made of it.

    Without a kernel it is transparent: autograd, vmap, fake tensors and the compiler see its body, and calling it runs
    the body at once. With a kernel it is one opaque operator: the body is the reference, the fake kernel, the vmap rule,
    what runs on devices without the kernel, and what is differentiated when someone asks for the next order.

    Attributes:
        kernels: types of device for which a compiled kernel exists.
        in_python: whether it is opaque with a kernel in Python.
    """

    def __init__(self, function: Callable[..., Any], kernels: Sequence[str] = (), namespace: str = NAMESPACE) -> None:
        self.kernels = tuple(kernels)
        text = f"{namespace}::{function.__name__}{torch.library.infer_schema(function, mutates_args=())}"
        if kernels:
            text = text.replace("SymInt", "int")  # a stable-ABI kernel takes plain integers
        super().__init__(text, function, transparent=not kernels, differentiable=bool(kernels))
        self._run = entry(self.op) if kernels else function
        self.in_python = self.kernels == ("default",)
        if kernels and self.signature.lists:
            raise ValueError(f"{self.name}: a formula with a kernel takes no lists of tensors; make it transparent")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self.reference(*args, **kwargs) if self.transparent else self.op(*args, **kwargs)
        if self.in_python and direct.now and not values_hidden():
            return self._current["default"].function(*args, **kwargs)
        return self._run(*args, **kwargs)

    def __repr__(self) -> str:
        kernels = f", kernels: {', '.join(self.kernels)}" if self.kernels else ""
        return f"<Formula {self.signature.schema}{kernels}>"


ops: Registry[Formula] = Registry("formula", packages.load)


@overload
def formula(function: Callable[..., Any], /) -> Formula: ...
@overload
def formula(*, kernel: Sequence[str] = (), namespace: str = NAMESPACE) -> Callable[[Callable[..., Any]], Formula]: ...
def formula(
    function: Callable[..., Any] | None = None, /, *, kernel: Sequence[str] = (), namespace: str = NAMESPACE
) -> Any:
    """Make a function the operator ``manualgrad::<its name>``; it is found as ``mg.ops.<its name>``.

    Args:
        function: typed with what ``torch.library.infer_schema`` reads.
        kernel: types of device for which ``csrc/`` has a kernel; empty: none, and the formula is transparent.
        namespace: of the operator, in place of ``manualgrad``: another package's own. The formula is then
            ``mg.ops["<namespace>::<its name>"]`` and ``torch.ops.<namespace>.<its name>``.

    Raises:
        ValueError: the name is taken, or the types cannot be read.
    """

    def make(f: Callable[..., Any]) -> Formula:
        made = Formula(f, kernel, namespace)
        return ops.add(made.name.removeprefix(f"{NAMESPACE}::"), made)

    return make if function is None else make(function)
