"""Jets replace tensors while a function runs on truncated Taylor series.

A `Jet` is a value and its Taylor coefficients along a curve. Through ``__torch_function__``, every function of torch
that receives one calls `call`, above autograd, vmap, functorch and the compiler, which all see the arithmetic on the
coefficients. A jet has no memory: code that does not support jets raises, and cannot treat one as a constant.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torch_manualgrad.core.forward import Series
from torch_manualgrad.core.internals import (
    fwd_grad_is_enabled,
    outside_of_compiler,
    tensor_without_memory,
    transform_depth,
)

from .functions import FUNCTIONS
from .scaled import BLOCK, Scaled, whole
from .table import known
from .trace import Trace, encode, traced

__all__ = ["Jet", "Space", "call", "is_jet", "refuse_inside", "transforms_seen"]


class _Depth(threading.local):
    """The number of open spaces on this thread, and the torch.func transforms that see jets."""

    def __init__(self) -> None:
        self.now = 0
        self.transforms = 0


_depth = _Depth()


@contextmanager
def transforms_seen() -> Iterator[None]:
    """Context manager: all running torch.func transforms are the package's own, or enclose a space."""
    before = _depth.transforms
    _depth.transforms = transform_depth()
    try:
        yield
    finally:
        _depth.transforms = before


def refuse_inside(what: str) -> None:
    """Raise if a function runs on Taylor series on this thread: ``what`` would lose them."""
    if _depth.now:
        raise NotImplementedError(
            f"{what} inside of a function that runs on Taylor series, which would be lost there; use the functions of "
            "mg.forward_ad for such derivatives, which nest"
        )


class _Handler(TorchFunctionMode):
    """The handler for Dynamo, which does not find the jets' own handler in every call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors: list[Any] = []
        encode((args, kwargs or {}), tensors)
        if any(is_jet(x) for x in tensors):
            return call(func, args, kwargs or {})
        if func is not Tensor.as_subclass:  # as_subclass makes a jet
            for x in tensors:
                check_kept(x)
        return func(*args, **(kwargs or {}))


def check_kept(x: Any) -> None:
    """Raise if Dynamo has put a call on a jet into its graph without the handler: the result replaces a `GraphJet`."""
    if torch.compiler.is_dynamo_compiling() and isinstance(x, Tensor) and not is_jet(x) and x.device.type == "meta":
        raise NotImplementedError(
            "torch.compile has called a function on a Taylor series past its handler, as it does with abs(x), F.hardswish, "
            "F.hardsigmoid, F.tanh, F.sigmoid, and functions such as torch.exp_: use the method, x.abs(), or torch.ops.aten"
        )


class Space:
    """The jets of one call.

    Attributes:
        order: of the last coefficient.
        directions: None, or the number of curves. All coefficients but the last then have a first dimension of that
            size, and the last is the sum over the curves (a collapsed jet).
        weights: of that sum, (directions,); None for ones.
        batch_of: the name, in errors, of the function whose argument is a batch of examples; None without a batch.
        level: the number of enclosing spaces, including itself. Coefficients may be jets of an enclosing space.
    """

    def __init__(self, order: int, directions: int | None = None, weights: Tensor | None = None) -> None:
        self.order, self.directions, self.weights = order, directions, weights
        self.batch_of: str | None = None
        self.level: float = 0
        self.in_inference_mode = False
        self.has_forward_mode = True
        self.memory: Any = None  # the tensor behind the jets in a compiled graph

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, inside of this space, the only place where its jets may be used."""
        _depth.now += 1
        self.level = _depth.now
        try:
            if torch.compiler.is_dynamo_compiling():
                # on no device, to detect calls that bypass the handler; in inference mode, so that none writes to it
                with torch.inference_mode():
                    self.memory = torch.empty((), device="meta")
                with _Handler():
                    return function(*args)
            self.in_inference_mode = torch.is_inference_mode_enabled()
            self.has_forward_mode = fwd_grad_is_enabled()
            with (
                transforms_seen(),
                outside_of_compiler(),
            ):  # which may be here as it has no graph of all of this: then of no part of it
                return function(*args)
        finally:
            _depth.now -= 1

    def has(self, x: Any) -> bool:
        """Whether ``x`` is a jet of this space."""
        return is_jet(x) and x.space is self

    def coefficients(self, x: Any) -> list[Any]:
        """All coefficients of ``x``, a jet of this space or a constant; None for zero."""
        check_kept(x)
        if is_jet(x) and x.lost is not None:
            raise NotImplementedError(f"{x.lost} has no Taylor series")
        return [x.primal, *x.terms] if self.has(x) else [x, *[None] * self.order]

    def factored(self, x: Any) -> list[Any]:
        """`coefficients`, with Jacobians stored as products: see `scaled`."""
        return [x.primal, *x.factored] if type(x) is Jet and x.space is self and not x.lost else self.coefficients(x)

    def jet(self, coefficients: Sequence[Any]) -> Any:
        """The jet with these coefficients, each expanded to the shape, and cast to the dtype, of the first."""
        primal, *terms = coefficients
        shape = tuple(primal.shape)
        for k, term in enumerate(terms):
            if term is not None:
                shape_of_term = shape if self.directions is None or k == self.order - 1 else (self.directions, *shape)
                if not isinstance(term, Scaled) and tuple(term.shape) != shape_of_term:
                    term = terms[k] = term.expand(shape_of_term)
                if not isinstance(term, Scaled) and term.dtype != primal.dtype:  # from a real summand in a complex sum
                    terms[k] = term.to(primal.dtype)
        if not torch.compiler.is_dynamo_compiling():
            return Jet(self, primal, tuple(terms))
        found = self.memory.as_subclass(GraphJet)
        found.space, found.primal, found.terms, found.aliases = self, primal, tuple(terms), [1]
        found.examples = found.lost = None
        return found

    def lost(self, primal: Any, what: str) -> Any:
        """A result that depends on jets, but has no series. Its use raises an error that calls it ``what``."""
        found = self.jet([primal, *[None] * self.order])
        found.lost = what
        return found

    def collapse(self, x: Tensor) -> Tensor:
        """The weighted sum over the directions."""
        return x.sum(0) if self.weights is None else torch.tensordot(self.weights.to(x.dtype), x, 1)

    def collapsed_product(self, x: Tensor, y: Tensor) -> Tensor:
        """The weighted sum over the directions of x y, a few directions at a time, whose products stay in the cache."""
        if x is y and isinstance(x, Scaled):
            return x.factor * x.factor * self.collapsed_product(x.term, x.term)
        if x is y and x.ndim > 2 and x.shape[1] > 1 and x.stride(1) == 0:  # equal rows, as in a basis
            row = x[:, :1]
            return self.collapsed_product(row, row).expand(x.shape[1:])
        count = x.shape[0]
        size = max(1, BLOCK * count // max(1, x.numel(), y.numel()))
        if size >= count or is_jet(x) or is_jet(y):
            return self.collapse(x * y)
        weights = [None] * count if self.weights is None else self.weights.to(x.dtype).split(size)
        total: Any = None
        for a, b, w in zip(x.split(size), y.split(size), weights):
            part = (a * b).sum(0) if w is None else torch.tensordot(w, a * b, 1)
            total = part if total is None else total + part
        return total


def _refuse(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"Tensor.{name} in a function that runs on Taylor series: numbers would lose the derivatives. Compute with "
            "tensors, or call .detach() first to hold the value constant."
        )

    return method


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return method


class _Series(Series):
    """The base of both kinds of jet: a value and its Taylor coefficients, None for zero."""

    space: Space
    primal: Any
    terms: tuple[Any, ...]
    examples: int | None = None  # that its entries depend on: see `examples`
    lost: str | None = None  # describes a tensor without a series
    rows: Any = None  # for a jet with a block-diagonal Jacobian: see `rows`
    aliases: list[int]  # the number of jets that share memory through views; one list for all of them

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})

    @property
    def shape(self) -> Any:
        return self.primal.shape

    @property
    def dtype(self) -> Any:
        return self.primal.dtype

    @property
    def device(self) -> Any:
        return self.primal.device

    @property
    def ndim(self) -> int:
        return self.primal.ndim

    def __len__(self) -> int:
        return len(self.primal)

    def __bool__(self) -> bool:
        return bool(self.primal)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))  # type: ignore[attr-defined]

    def __repr__(self, **_: Any) -> str:
        return f"Jet(order={self.space.order}, {self.primal!r})"

    def __hash__(self) -> int:
        return id(self)

    def detach(self) -> Any:
        return self.primal.detach()

    item, tolist, numpy, __float__, __int__, __complex__, __index__, __array__, backward, requires_grad_ = (
        _refuse(name)
        for name in (
            "item", "tolist", "numpy", "__float__", "__int__", "__complex__", "__index__", "__array__", "backward",
            "requires_grad_",
        )
    )  # fmt: skip
    data_ptr, untyped_storage, storage, __dlpack__, __dlpack_device__, __reduce_ex__ = (
        _refuse(name)
        for name in ("data_ptr", "untyped_storage", "storage", "__dlpack__", "__dlpack_device__", "__reduce_ex__")
    )


class Jet(_Series, Tensor):  # type: ignore[misc, override]
    """A jet, made by `Space.jet`: a tensor without memory, so that functions that require tensors accept it."""

    @staticmethod
    def __new__(cls, space: Space, primal: Tensor, terms: tuple[Any, ...]) -> Jet:
        return tensor_without_memory(cls, primal)

    def __init__(self, space: Space, primal: Tensor, terms: tuple[Any, ...]) -> None:
        self.space, self.primal, self.factored, self.aliases = space, primal, terms, [1]

    @property
    def terms(self) -> tuple[Any, ...]:
        """The coefficients, multiplied out at the first read."""
        self.factored = tuple([whole(t) for t in self.factored])
        return self.factored

    @terms.setter
    def terms(self, terms: tuple[Any, ...]) -> None:
        self.factored = terms

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(
            f"{func.name()}: reached by a Taylor series below torch's functions, from a transform of torch.func, an "
            "autograd.Function or compiled code, where it would be lost"
        )


class GraphJet(_Series, Tensor):  # type: ignore[misc, override]
    """A jet while Dynamo traces, which recognizes a tensor class by ``as_subclass``, and its attributes.

    For Dynamo, torch methods written in Python are functions without a source when they reach the handler.
    """

    norm, split, stft, istft, unflatten = (
        _as_method(f) for f in (torch.norm, torch.split, torch.stft, torch.istft, torch.unflatten)
    )


def is_jet(x: Any) -> bool:
    """Whether ``x`` is a jet, of any space."""
    return isinstance(x, Series)


def call(func: Any, args: Any, kwargs: Any) -> Any:
    """A function of torch whose arguments have jets among them."""
    if getattr(func, "__name__", "") in ("_make_dual", "_unpack_dual", "_make_dual_copy", "_unpack_dual_copy"):
        refuse_inside("torch.func.jvp, torch.func.linearize or torch.autograd.forward_ad")
    if func is Tensor.new_tensor and any(is_jet(x) for x in [*args[1:], *kwargs.values()]):
        raise NotImplementedError("Tensor.new_tensor would copy the value of a Taylor series alone; use .clone()")
    if not torch.compiler.is_dynamo_compiling() and transform_depth() > _depth.transforms:
        refuse_inside("A transform of torch.func")
    tensors: list[Any] = []
    template = encode((args, kwargs), tensors)
    space: Any = None
    for x in tensors:
        check_kept(x)
        if is_jet(x) and x.lost is not None:
            raise NotImplementedError(f"{x.lost} has no Taylor series; call .detach() to hold it constant")
        if is_jet(x) and (space is None or x.space.level > space.level):
            space = x.space
    _refuse_surroundings(space)
    # Dynamo cannot look them up
    if not torch.compiler.is_dynamo_compiling() and func in FUNCTIONS:
        return FUNCTIONS[func](*args, **kwargs)
    found: Trace = traced(func, template, tensors)
    if torch.compiler.is_dynamo_compiling():  # Dynamo disables the handlers of classes inside of one, but not modes
        with _Handler():
            return known.run(space, found, tensors)
    return known.run(space, found, tensors)


def _refuse_surroundings(space: Space) -> None:
    """Raise if the call is inside of something that does not support jets, although the space is open."""
    if torch.compiler.is_dynamo_compiling():
        if space.memory is None:
            raise NotImplementedError(
                "torch.compile inside of a function that runs on Taylor series; compile the function before, or around it"
            )
        return
    if torch.is_inference_mode_enabled() and not space.in_inference_mode:
        raise NotImplementedError(
            "torch.inference_mode() inside of a function that runs on Taylor series, where forward mode has no derivatives; "
            "call .detach() to hold a value constant, or enter it around the call"
        )
    if space.has_forward_mode and not fwd_grad_is_enabled():  # as in the forward of an autograd.Function
        raise NotImplementedError(
            "torch.autograd.Function inside of a function that runs on Taylor series, which do not see its derivative; "
            "write it with mg.custom_op, or call .detach() to hold its arguments constant"
        )
