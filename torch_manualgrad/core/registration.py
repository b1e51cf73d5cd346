"""Kernels of ours at the operators of others: registered once, and kept for the life of the process.

The dispatcher frees a kernel the moment its registration goes, although another thread may be inside it, and nothing in
Python sees every thread (those of C++ and of the autograd engine). So what is switched on and off is what a kernel does,
not whether it is there: while nothing is active at an operator, its kernel passes the call on to PyTorch's.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from . import calls
from .internals import is_composite, operators, own_kernel, release, skipped_by_dynamo
from .op_registry import defined
from .schema import Signature, with_tensors

__all__ = ["Registration", "Suspension", "release_numbers", "without_overrides"]

Kernel = Callable[..., Any]


class Suspension(threading.local):
    """``with suspension():`` something is off inside the block, on this thread; blocks nest, and `depth` counts them."""

    depth = 0

    def __call__(self) -> Suspension:
        return self

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.depth -= 1


class _WithoutOverrides(Suspension):
    def __enter__(self) -> None:
        super().__enter__()
        calls.suspend(1)

    def __exit__(self, *exception: Any) -> None:
        calls.suspend(-1)
        super().__exit__(*exception)


without_overrides = _WithoutOverrides()  # eager calls inside are PyTorch's own, whatever is active: to compare with


class Registration:
    """One operator's kernel at one dispatch key.

    Attributes:
        stock: PyTorch's own kernel, called as ``stock(keyset, *args, **kwargs)``.
        may_take_numbers: an argument that the schema calls a Tensor may come as a Python number, as in ``x * 2``.

    Args:
        op: the ``OpOverload``.
        key: the dispatch key, or an alias of several such as "Autograd".
        at: the key at which PyTorch's own kernel is found, if ``key`` is an alias.
    """

    def __init__(self, op: Any, signature: Signature, key: str, at: str | None = None) -> None:
        self.name: str = op.name()
        self.may_take_numbers = bool(signature.tensor_like)
        self._key = key
        own = own_kernel(op, at or key)
        self.stock: Kernel = _with_tensors(signature, own) if self.may_take_numbers else own
        self._on_dense_numbers = key == "Autograd" and _is_pointwise(op)
        self._library: Any = None

    def register(self, kernel: Kernel) -> None:
        """Put ``kernel(keyset, *args, **kwargs)`` into the dispatcher.

        Only once for an operator and key, in all of the process: under a dispatch mode PyTorch calls the Python kernel
        that was registered last, whichever of several was meant.
        """
        if (op := defined(self.name)) is not None:
            op.cover()
        self._library = _library(
            self.name
        )  # before anything is registered: an interrupt then leaves what can be released
        _register(self._library, self.name, kernel, self._key)
        if self._on_dense_numbers and not _before_functorch:
            _keep_numbers_from_functorch()

    def release(self) -> None:
        """Take the kernel away, if there is one. A thread that is inside of it crashes."""
        if self._library is not None:
            release(self._library)
            self._library = None


_NUMBERS = (bool, int, float, complex, torch.SymBool, torch.SymInt, torch.SymFloat)


def _library(name: str) -> torch.library.Library:
    return torch.library.Library(name.partition("::")[0], "IMPL")


def _register(library: torch.library.Library, name: str, kernel: Kernel, key: str) -> None:
    short = name.partition("::")[2]
    with warnings.catch_warnings():  # PyTorch says once a process that a kernel is overridden: that is the point
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        library.impl(short, skipped_by_dynamo(kernel), key, with_keyset=True, allow_override=True)


def _with_tensors(signature: Signature, own: Kernel) -> Kernel:
    places = signature.tensor_like

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for i in places:
            if i < len(args) and isinstance(args[i], _NUMBERS):
                args, kwargs = signature.split(with_tensors(signature, signature.bind(args, kwargs)))
                break
        return own(keyset, *args, **kwargs)

    return call


def _is_pointwise(op: Any) -> bool:
    """Of several tensors; other names of such operators, as subtract of sub, are composite, and not marked as pointwise."""
    tensors = [a.name for a in op._schema.arguments if "Tensor" in str(a.type) and not a.is_out]
    alias = tensors == ["self", "other"] and is_composite(op)
    return len(tensors) > 1 and (torch.Tag.pointwise in op.tags or alias)


_FUNCTORCH = "FuncTorchDynamicLayerFrontMode"
_before_functorch: list[torch.library.Library] = []


def _keep_numbers_from_functorch() -> None:
    """Make numbers among tensors plain tensors before functorch has them, in every pointwise operator.

    To functorch such a number is a tensor, which it wraps. No Python kernel can be given that one: it is to be read as a
    number again, and has no data. It may have entered by another operator, and come to ours in that one's derivative.
    """
    for op in operators("aten"):
        if (
            _is_pointwise(op)
            and not op._schema.name.endswith("_backward")
            and not any(a.is_out for a in op._schema.arguments)
        ):
            own = torch.library.get_kernel(op, _FUNCTORCH).call_boxed
            call = _with_tensors(Signature(op._schema), own)
            calls.before_functorch(op)
            _before_functorch.append(_library(op.name()))
            _register(_before_functorch[-1], op.name(), call, _FUNCTORCH)
            calls.attach_before_functorch(op)


def release_numbers() -> None:
    """Undo what the first rule of a pointwise operator has done to numbers, where none is registered any more."""
    calls.detach_before_functorch()
    while _before_functorch:
        release(_before_functorch.pop())
