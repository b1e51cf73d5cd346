"""Forward mode for operators that lack it, for PyTorch's dual numbers and torch.func, compiled or not.

An operator without a formula for forward mode raises under `torch.autograd.forward_ad` and `torch.func.jvp`; for one of
`torch.library.custom_op` the tangent is silently zero. An entry of `decomposition_table` replaces calls with a tangent
on an input; all other calls are unchanged. It consists of differentiable operators, so forward over reverse mode and
reverse over forward mode work, to any order.

Decompositions act on the whole process, on every thread, like `torch_manualgrad.override`. A rule that is active on an
operator takes precedence over its decomposition. Each set of decompositions has its own compiled graph. Plain calls of
an operator with an active decomposition cost a few microseconds more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...arguments import checked
from ...core.activation import Block
from ...core.internals import custom_op_overload
from ...core.op.custom_op import CustomOp
from ...core.override.forward_mode import ForwardMode, by_decomposition, by_derivative, by_transposition
from ...core.override.names import Chosen
from ...core.override.override import Handle
from ...core.registry import Registry, defined
from ...core.rule import check_functional, operator, rules
from ...core.rule.derivative import derivative_of
from . import functions

__all__ = [
    "Decomposition",
    "Scope",
    "decomposition_table",
    "decompositions",
    "enable",
    "register_decomposition",
    "unregister_decomposition",
]

Function = Callable[..., Any]
WAYS = ("decomposition", "rule", "transposition")  # in the order that `enable` tries them


class Decomposition:
    """A function that gives an operator forward mode; an entry of `decomposition_table`.

    Attributes:
        name: the operator, ``"aten::trace"``.
        function: runs instead of the operator.
        replace: whether it also replaces a formula of PyTorch.
        shares: the formulas of ``mg.ops`` that the function is made of.
    """

    def __init__(self, name: str, function: Function, replace: bool = False, shares: Sequence[str] = ()) -> None:
        self.name, self.function, self.replace, self.shares = name, function, replace, tuple(shares)
        self.handle: Handle | None = None

    def __repr__(self) -> str:
        return f"<Decomposition {self.name} by {self.function.__module__}.{self.function.__qualname__}>"

    @property
    def is_active(self) -> bool:
        """Whether it was registered to act, and takes precedence over PyTorch; the package's own act in scopes."""
        return self.handle is not None


NO_RULES = Chosen((), ())

decomposition_table: Registry[Decomposition] = Registry("decomposition")


def _own(name: str, function: Function, *shares: str) -> None:
    decomposition_table.add(f"aten::{name}", Decomposition(f"aten::{name}", function, shares=shares))


# The package's decompositions, and the formulas that the functions share with the rules of the same operators.
_own("trace", functions.trace)
_own("log_sigmoid_forward", functions.log_sigmoid_forward, "constant")
_own("nll_loss_backward", functions.nll_loss_backward)
_own("nll_loss2d_backward", functions.nll_loss_backward)
_own("_log_softmax_backward_data", functions.log_softmax_backward_data)
_own("_softmax_backward_data", functions.softmax_backward_data, "softmax_differential")
_own("native_layer_norm_backward", functions.native_layer_norm_backward, "native_layer_norm_backward")
_own("native_batch_norm_backward", functions.native_batch_norm_backward, "native_batch_norm_backward")
_own("batch_norm_backward", functions.batch_norm_backward, "native_batch_norm_backward")
_own("cudnn_batch_norm_backward", functions.cudnn_batch_norm_backward, "native_batch_norm_backward")
_own("miopen_batch_norm_backward", functions.miopen_batch_norm_backward, "native_batch_norm_backward")


@checked
def register_decomposition(op: Any, *, replace: bool = False) -> Callable[[Function], Function]:
    """Give an operator forward mode: the decorated function runs instead of it if an input has a tangent.

    It acts at once, on the whole process, until `unregister_decomposition`. The function takes every argument of the
    operator's schema, keyword-only ones by name, and returns the operator's results, None for an undefined output. It
    is ordinary Python that calls differentiable operators, but not the operator itself. In forward mode, a tensor saved
    by an earlier call is a constant: recompute values that depend on an input.

    Args:
        op: ``"mylib::wave"``, ``torch.ops.mylib.wave``, or a result of `torch.library.custom_op`. Any operator that
            neither writes to an argument nor returns a view of one.
        replace: also replace a formula of PyTorch. By default PyTorch's formula is used.

    Returns:
        A decorator, which returns the function.

    Raises:
        ValueError: the operator has a decomposition already, writes to an argument, returns a view, or is composite, so
            that its derivative follows from the operators that it calls.
        TypeError: not an operator, or not a function.
    """
    overload = _operator(op)
    name = _name(overload)

    def register(function: Function) -> Function:
        _check(function, name)
        entry = decomposition_table.add(name, Decomposition(name, function, replace))
        if _may_act(overload, replace):
            entry.handle = Handle(NO_RULES, False, (name,), forward_modes=[by_decomposition(overload, function)])
            entry.handle.activate()
        return function

    return register


@checked
def unregister_decomposition(op: Any) -> None:
    """Undo `register_decomposition`.

    Args:
        op: as in `register_decomposition`.

    Raises:
        KeyError: the operator has no decomposition.
        ValueError: it is one of the package's own.
    """
    name = _name(_operator(op))
    if decomposition_table[name].function.__module__ == functions.__name__:
        raise ValueError(f"the decomposition of {name} is part of torch_manualgrad")
    handle = decomposition_table.remove(name).handle
    if handle is not None:
        handle.remove()


class Scope(Handle, Block):  # type: ignore[misc]
    """The handle of `decompositions` and `enable`: active until `remove`, or until the ``with`` block ends.

    Attributes:
        forward_modes: the active `ForwardMode` of each operator.
    """

    def __init__(self, chosen: Sequence[ForwardMode], names: Sequence[Any]) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError("forward mode cannot be extended inside a compiled function; do so around the call")
        super().__init__(NO_RULES, False, names, forward_modes=chosen, installed=True)
        self._entered: list[Scope] = []
        self.activate()

    def __enter__(self) -> Scope:
        if not self.is_active:
            raise RuntimeError("this was removed; make a new one for each `with` block")
        self._entered.append(self)
        self.installed = False
        return self

    def _not_entered(self) -> None:
        raise RuntimeError("this block was left more often than it was entered")


@checked
def decompositions(*given: Any, replace: bool = False) -> Scope:
    """Switch decompositions on: for a ``with`` block, or until ``.remove()``.

    They act at once and on the whole process, on every thread; blocks nest, and may end in any order. If an operator
    has several, the last one activated acts. Graphs compiled with a function are reused with it.

    Args:
        given: names of entries of `decomposition_table`, or operators; or dictionaries from an operator to a function
            outside the table. None given: the whole table.
        replace: also replace PyTorch's formulas. By default these stay.

    Returns:
        A handle whose ``remove()`` deactivates them.

    Raises:
        KeyError: there is no decomposition of that operator.
        ValueError, TypeError: as `register_decomposition`.
        RuntimeError: inside of a compiled function.
    """
    pairs: list[tuple[Any, Function, bool]] = []
    for one in given or decomposition_table:
        if isinstance(one, Mapping):
            for op, function in one.items():
                overload = _operator(op)
                _check(function, _name(overload))
                pairs.append((overload, function, replace))
        else:
            overload = _operator(one)
            entry = decomposition_table[_name(overload)]
            pairs.append((overload, entry.function, replace or entry.replace))
    return Scope([by_decomposition(op, f) for op, f, force in pairs if _may_act(op, force)], given)


@checked
def enable(*ops: Any, by: Sequence[str] = WAYS) -> Scope:
    """Give forward mode to every operator that lacks it, for a ``with`` block or until ``.remove()``.

    An operator with a formula in PyTorch keeps it, unless reverse mode over that formula raises, as for softmax and
    norms. Any other operator gets the first of these that exists: its decomposition; the jvp of its rule; the transpose
    of its backward: $u -> vjp(u)$ is linear, and $jvp(t) = d/du <vjp(u), t>$. The transpose costs two reverse passes,
    is exact, and is differentiable as often as the backward. It acts at once and on the whole process, on every thread.

    Args:
        ops: operators, as in `register_decomposition`. None given: every operator of this torch that lacks forward mode,
            every custom op of `torch.library.custom_op` whose backward is already defined, and those of
            `decomposition_table` and of ``mg.rules``.
        by: the allowed ways, from "decomposition", "rule" and "transposition".

    Returns:
        A handle whose ``remove()`` undoes it; its ``forward_modes`` list the way of each operator.

    Raises:
        ValueError: the operator writes to an argument, returns a view, or is composite; ``by`` names an unknown way.
        TypeError: no operator.
        RuntimeError: inside of a compiled function. When the call is made: the backward is not differentiable.
    """
    # here, as it reads PyTorch's table of derivatives
    from .coverage import FIRST_ORDER_ONLY, has_formula, lacking

    for way in by:
        if way not in WAYS:
            raise ValueError(f"by: unknown way {way!r} to forward mode; expected some of {WAYS}")
    known = {_name(one.op): one for one in lacking()}
    if ops:
        chosen = {_name(op): op for op in map(_operator, ops)}
    else:
        chosen = {name: one.op for name, one in known.items()} | {name: rule.aten for name, rule in rules.items()}
        chosen |= {name: operator(name) for name in decomposition_table}
    found = []
    for name, op in chosen.items():
        entry = decomposition_table[name] if name in decomposition_table else None
        if has_formula(op) and name not in FIRST_ORDER_ONLY and not (entry is not None and entry.replace):
            continue
        if entry is not None and "decomposition" in by:
            found.append(by_decomposition(op, entry.function))
        elif name in rules and "rule" in by:
            found.append(by_derivative(derivative_of(rules[name])))
        elif (name not in known or known[name].has_backward) and "transposition" in by:
            found.append(by_transposition(op, known[name].differentiable if name in known else None))
    return Scope(found, ops)


def _operator(given: Any) -> Any:
    """The ``OpOverload`` of an operator or its name."""
    if isinstance(given, CustomOp):
        given = given.op
    found = operator(given) if isinstance(given, str) else custom_op_overload(given)
    if found is None:
        raise TypeError(f"expected an operator, its name, or what torch.library.custom_op returns, got {given!r}")
    check_functional(f"decomposition {found.name()}", found)
    if defined(found.name()) is not None:
        raise ValueError(f"{found.name()} is a custom op of torch_manualgrad: give it its forward mode with impl_jvp")
    return found


def _name(op: Any) -> str:
    name: str = op.name()
    return name


def _check(function: Any, name: str) -> None:
    if not callable(function):
        raise TypeError(f"the decomposition of {name} must be a function, got {type(function).__name__}")


def _may_act(op: Any, replace: bool) -> bool:
    # here, as it reads PyTorch's table of derivatives
    from .coverage import has_formula

    return replace or not has_formula(op)
