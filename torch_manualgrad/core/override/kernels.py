"""Our kernels for operators of other libraries: registered once, and kept for the life of the process.

The dispatcher frees a kernel as soon as it is unregistered, although another thread may be inside it, and Python cannot
see every thread (those of C++ and of the autograd engine). So kernels stay registered, and their effect is switched on
and off: while no rule is active for an operator, its kernel forwards the call to PyTorch's.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any

import torch

from ..engine.kernel import Mode, apply, differentiated
from ..engine.node import picker
from ..internals import (
    PLAIN,
    is_composite,
    is_recorded_by_jit,
    only_autograd,
    operators,
    own_kernel,
    release,
    skipped_by_dynamo,
)
from ..once import refuse_reload
from ..registry import defined
from ..rule.definition import Rule, rules
from ..rule.derivative import RuleDerivative, derivative_of
from ..schema import Signature, all_dense, is_dense, with_tensors
from . import compiled_calls
from .forward_mode import ForwardMode
from .in_place import InPlace, in_place_kernel, in_place_operator, reading_written
from .state import Layer, here, resolved

__all__ = [
    "Registration",
    "Suspension",
    "in_calls",
    "release_all_but",
    "without_overrides",
]

refuse_reload(globals())

Kernel = Callable[..., Any]


class Suspension(threading.local):
    """``with suspension():`` switches something off on this thread; blocks nest, and `depth` counts them."""

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
        compiled_calls.suspend(1)

    def __exit__(self, *exception: Any) -> None:
        compiled_calls.suspend(-1)
        super().__exit__(*exception)


without_overrides = _WithoutOverrides()  # eager calls inside are PyTorch's own, whatever is active, for comparisons


class Registration:
    """One operator's kernel at one dispatch key.

    Attributes:
        stock: PyTorch's own kernel, called as ``stock(keyset, *args, **kwargs)``.
        may_take_numbers: whether a Python number may be passed for a Tensor of the schema, as in ``x * 2``.

    Args:
        op: the ``OpOverload``.
        key: the dispatch key, or an alias of several such as "Autograd".
        at: the key of PyTorch's own kernel, if ``key`` is an alias.
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
        """Register ``kernel(keyset, *args, **kwargs)`` with the dispatcher.

        Only once per operator and key in the process: under a dispatch mode PyTorch calls the Python kernel registered
        last, even if another one is meant.
        """
        if (op := defined(self.name)) is not None:
            op.cover()
        self._library = _library(
            self.name
        )  # before anything is registered, so that everything can be released after an interrupt
        _register(self._library, self.name, kernel, self._key)
        if self._on_dense_numbers and not _before_functorch:
            _keep_numbers_from_functorch()

    def release(self) -> None:
        """Unregister the kernel, if there is one. A thread inside of it crashes."""
        if self._library is not None:
            release(self._library)
            self._library = None


_NUMBERS = (bool, int, float, complex, torch.SymBool, torch.SymInt, torch.SymFloat)


def _library(name: str) -> torch.library.Library:
    return torch.library.Library(name.partition("::")[0], "IMPL")


def _register(library: torch.library.Library, name: str, kernel: Kernel, key: str) -> None:
    short = name.partition("::")[2]
    with warnings.catch_warnings():  # PyTorch warns once per process that a kernel is overridden, which is intended
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
    """Whether it is a pointwise operator of several tensors. Aliases, such as subtract, are composite: not marked."""
    tensors = _tensors(op._schema)
    return len(tensors) > 1 and (torch.Tag.pointwise in op.tags or tensors == ["self", "other"] and is_composite(op))


def _tensors(schema: Any) -> list[str]:
    return [a.name for a in schema.arguments if "Tensor" in str(a.type) and not a.is_out]


def _may_be_pointwise(schema: Any) -> bool:
    name = schema.name
    if name.endswith("_backward") or name.startswith("aten::_foreach_"):
        return False
    arguments = schema.arguments
    return len(arguments) > 1 and not arguments[-1].is_out and len(_tensors(schema)) > 1


_FUNCTORCH = "FuncTorchDynamicLayerFrontMode"
_before_functorch: list[torch.library.Library] = []


def _keep_numbers_from_functorch() -> None:
    """Turn numbers among tensors into plain tensors before functorch sees them, in every pointwise operator.

    functorch wraps such a number as a tensor, which cannot be passed to a Python kernel: it would be read as a number,
    but has no data. It may reach our operators through the derivative of another one.
    """
    for op in operators("aten", _may_be_pointwise, out=False):
        if _is_pointwise(op):
            own = torch.library.get_kernel(op, _FUNCTORCH).call_boxed
            call = _with_tensors(Signature(op._schema), own)
            compiled_calls.before_functorch(op)
            _before_functorch.append(_library(op.name()))
            _register(_before_functorch[-1], op.name(), call, _FUNCTORCH)
            compiled_calls.attach_before_functorch(op)


def _release_numbers() -> None:
    """Undo `_keep_numbers_from_functorch` if no rule of a pointwise operator is registered any more."""
    compiled_calls.detach_before_functorch()
    while _before_functorch:
        release(_before_functorch.pop())


# -- the operators of rules ------------------------------------------------------------------------------------------------

_operators: dict[str, _Operator] = {}  # every operator that a rule has ever acted on
_in_place: dict[str, _InPlaceOperator] = {}  # every in-place operator with a kernel of ours


@functools.lru_cache(maxsize=128)  # so that entering again is a look-up
def in_calls(layer: Layer, _rules: int) -> compiled_calls.CallsLayer:
    """The layer in the library of calls, with its operators registered. ``_rules`` is the version of `rules`."""
    _ensure_registered(layer)
    by_rule: list[compiled_calls.Served] = []
    others: list[compiled_calls.Served] = []  # if no layer has a rule for the operator
    table = resolved((layer,)).table
    for name, acting in table.items():
        derivative = acting.derivative
        if derivative is None or derivative.rule.sparse:
            way: compiled_calls.Way = compiled_calls.IN_PYTHON
        elif derivative.forward is not None and (left := derivative.rule.left_by_forward) is not None:
            way = compiled_calls.ByRule(derivative_of(derivative.rule), None, but=left)
        else:
            way = compiled_calls.ByRule(derivative, acting.defer_to_stock)
        (others if derivative is None else by_rule).append(compiled_calls.Served(name, way))
    for name, one in _in_place.items():
        places = tuple(one.signature.tensor_like)
        if one.functional in table:
            derivative = table[one.functional].derivative
            if derivative is None or derivative.rule.sparse or derivative.forward is not None:
                way = compiled_calls.UnlessPlain(places, untracked=True)
            else:
                way = compiled_calls.InPlaceByRule(derivative)
            (others if derivative is None else by_rule).append(compiled_calls.Served(name, way))
        elif layer.copies_operands:
            others.append(compiled_calls.Served(name, compiled_calls.UnlessPlain(places)))
    nested = any(one.name == "nested" for one in layer.replacements)
    return compiled_calls.CallsLayer(layer, by_rule, others, nested)


class _Registered:
    """An operator with a kernel of ours at the dispatcher key Autograd.

    `release` undoes a `register` that was interrupted after any step.
    """

    def __init__(self, op: Any, signature: Signature) -> None:
        self.signature, self._op = signature, op
        # PyTorch's kernel of a composite operator is at each device's key, before the common one
        self._composite = is_composite(op)
        key = "AutogradCPU" if self._composite else "Autograd"
        self.registration = Registration(op, signature, key, at="AutogradCPU")
        self.complete = False

    def register(self) -> None:
        if not self._composite:
            compiled_calls.before(self._op)
        self.registration.register(self._kernel())
        if not self._composite:
            compiled_calls.attach(self._op)
        self.complete = True

    def release(self) -> None:
        self.complete = False
        if not self._composite:
            compiled_calls.detach(self._op)
        self.registration.release()

    def _kernel(self) -> Callable[..., Any]:
        raise NotImplementedError


class _InPlaceOperator(_Registered):
    """The in-place form of an operator."""

    def __init__(self, one: InPlace) -> None:
        super().__init__(one.op, Signature(one.op._schema))
        self.functional: str = one.functional.name()
        self._functional = one.functional

    def _kernel(self) -> Callable[..., Any]:
        return in_place_kernel(
            self._functional,
            self._op,
            self.registration.stock,
            self._active,
            lambda: here().copies_operands and not without_overrides.depth,
        )

    def _active(self) -> RuleDerivative | ForwardMode | None:
        active = here().table.get(self.functional)
        if active is None or without_overrides.depth:
            return None
        if active.derivative is None:
            return None if only_autograd() else active.forward_mode
        return active.derivative


class _Operator(_Registered):
    """An operator that rules have acted on."""

    def __init__(self, rule: Rule | ForwardMode) -> None:
        super().__init__(rule.aten, rule.signature)
        self.name = rule.name

    def _kernel(self) -> Callable[..., Any]:
        signature = self.signature
        stock, may_take_numbers = self.registration.stock, self.registration.may_take_numbers
        bind, split = signature.bind, signature.split
        places, size, name = signature.tensor_like, len(signature.names), self.name
        tensors, no_lists = picker(places), not signature.lists

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            active = here().table.get(name)
            if active is None or without_overrides.depth or is_recorded_by_jit():
                return stock(keyset, *args, **kwargs)
            derivative = active.derivative
            if derivative is None:
                assert active.forward_mode is not None
                return active.forward_mode(stock, keyset, args, kwargs)
            values = args if len(args) == size else bind(args, kwargs)
            derivative = derivative.of_call(values)
            if no_lists and only_autograd():
                tracking = torch.is_grad_enabled()
                grad = False if not tracking and derivative.forward is None else _differentiable(values, places)
                if grad is False or grad and not tracking:
                    return derivative.run_below(values)
                if grad and active.defers(values):
                    return stock(keyset, *args, **kwargs)
                if grad and derivative.plain_call is not None:
                    return derivative.plain_call(values, *tensors(values))
            if derivative.forward is not None and not all_dense(values):
                return stock(keyset, *args, **kwargs)
            if may_take_numbers:
                values = with_tensors(signature, list(values))
            mode = differentiated(signature, values)
            if mode is Mode.PLAIN_NOTHING:
                return derivative.run_below(values)
            if mode is Mode.NOTHING:
                return derivative.redispatch(keyset, values)
            if not derivative.takes(values):
                args, kwargs = split(values)
                return stock(keyset, *args, **kwargs)
            return apply(derivative, keyset, mode, values)

        return kernel


def _differentiable(values: Sequence[Any], places: Sequence[int]) -> bool | None:
    """Whether one requires grad, if all are plain dense tensors or absent; otherwise None."""
    grad = False
    for i in places:
        x = values[i]
        if type(x) in PLAIN:
            if x.requires_grad:
                grad = True
            if not is_dense(x):
                return None
        elif x is not None:
            return None
    return grad


def _ensure_registered(layer: Layer) -> None:
    """Register the kernels of a layer. They forward calls until it is active."""
    acting: tuple[Rule | ForwardMode, ...] = (*layer.rules, *layer.forward_modes)
    for one in acting:
        _register_once(_operators, one.name, functools.partial(_Operator, one))
        if (op := in_place_operator(one)) is not None:
            form = InPlace(op, one.aten)
            _register_once(_in_place, op.name(), functools.partial(_InPlaceOperator, form))
    if layer.copies_operands:
        for form in reading_written(rules.values()):
            _register_once(_in_place, form.op.name(), functools.partial(_InPlaceOperator, form))
    for replacement in layer.replacements:
        replacement.ensure_registered()


def _register_once(table: dict[str, Any], name: str, make: Callable[[], _Registered]) -> None:
    found = table.get(name)
    if found is None or not found.complete:
        if found is not None:  # an interrupt left it half registered
            found.release()
        table[name] = found = make()
        found.register()


def release_all_but(kept: Collection[str], *, in_place: bool) -> None:
    """Give operators back to PyTorch.

    Args:
        kept: the operators that keep their kernels.
        in_place: all in-place operators keep them too.
    """
    in_calls.cache_clear()
    for name in [n for n in _operators if n not in kept]:
        _operators[name].release()
        del _operators[name]
    for name in [n for n, one in _in_place.items() if one.functional not in kept and not in_place]:
        _in_place[name].release()
        del _in_place[name]
    if not _operators and not _in_place:
        _release_numbers()
