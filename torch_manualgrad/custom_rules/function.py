"""The common part of `custom_vjp` and `custom_jvp`: turns a call into a program if it needs one."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import ArgumentError, described
from ..core.captures import Watch, is_differentiated, substituted, suspects
from ..core.closures import Copies, as_of_now
from ..core.forward import has_series, of_series
from ..core.internals import (
    breaks_graphs,
    is_compiled,
    is_exporting,
    only_autograd,
    own_levels_are_open,
    pytree,
    run_uncompiled,
    value_of,
    version_of,
    wrapped_attributes,
)
from ..programs.functions import Values, in_this_autocast
from ..programs.operator import Program, call
from .randomness import RandomState
from .tracing import functions, traced
from .trees import Tree

__all__ = ["Call", "CustomFunction", "advice", "argnums"]

_numbers = itertools.count(1)

_GRAPH = "torch_manualgrad: a function with a custom rule runs outside of compiled graphs"


def argnums(given: Any) -> tuple[int, ...]:
    """``nondiff_argnums``, checked.

    Raises:
        TypeError: not a number, or numbers.
        ArgumentError: a negative number, or one twice.
    """
    numbers = (given,) if isinstance(given, int) and not isinstance(given, bool) else given
    if not isinstance(numbers, (tuple, list)) or not all(type(i) is int for i in numbers):
        raise TypeError(f"nondiff_argnums: expected a number, or a tuple of numbers, got {given!r}")
    if any(i < 0 for i in numbers) or len(set(numbers)) < len(numbers):
        raise ArgumentError(f"nondiff_argnums: expected different numbers that are not negative, got {given!r}")
    return tuple(numbers)


def advice(kind: str) -> str:
    """The advice of errors about a tensor that a function with a rule reads by closure."""
    return (
        f"A {kind} rule has no derivative for it. Pass it as an argument that is not in nondiff_argnums; for an nn.Module, pass "
        "dict(module.named_parameters()) and call torch.func.functional_call"
    )


class Call(Program):
    """One call of a function with a custom rule.

    Args:
        function: called.
        names: of its differentiable arguments.
        args: all arguments.
        known: tracked tensors that the functions might read.
        compiled: whether the functions might call one that ``torch.compile`` has made.
    """

    def __init__(
        self,
        function: CustomFunction,
        names: Sequence[str],
        args: Sequence[Any],
        known: dict[int, tuple[Tensor, str]],
        compiled: bool,
    ) -> None:
        super().__init__()
        self.function, self.names, self._known, self._compiled = function, names, known, compiled
        self.rule_of_its_own = f"{function.kind} {function.name}"
        self.nondiff = [args[i] for i in function.nondiff_argnums]
        diff = tuple(a for i, a in enumerate(args) if i not in function.nondiff_argnums)
        self.arguments = Tree(diff)
        self.arguments.release()
        self.tensor_names = [name for name, a in zip(names, diff) for _ in Tree(a).tensors]
        self.differentiated: Sequence[int] = ()  # the places of tensors that must not be written to
        self.out: Tree | None = None
        self.random: RandomState | None = None
        self._count = len(args)

    @property
    def outputs(self) -> int:
        assert self.out is not None
        return sum(self.out.is_tensor)

    @property
    def result(self) -> Tree:
        """The structure of the result."""
        assert self.out is not None, "the function has not run"
        return self.out

    def at(self, tensors: Sequence[Any]) -> list[Any]:
        """All arguments, with other tensors."""
        given = iter(self.arguments.join(tensors))
        fixed = dict(zip(self.function.nondiff_argnums, self.nondiff))
        return [fixed[i] if i in fixed else next(given) for i in range(self._count)]

    def forget(self) -> None:
        """Release the tensors that the functions must not read; the call is over."""
        self._known = {}

    def watched(self, function: Callable[..., Any], what: str) -> Any:
        """Call a rule, which must not read tracked tensors except its arguments."""
        with run_uncompiled(self._compiled):
            if not self._known:
                return function()
            with Watch(what, self._known, self.function.advice, detached=False):
                return function()

    def first(self, function: Callable[..., Any], what: str, tensors: Values) -> Any:
        """Call the function with these tensors for the first time: later calls draw the same random numbers."""
        random = RandomState(tensors, what)
        versions = [(i, x := value_of(tensors[i]), version_of(x)) for i in self.differentiated]
        with run_uncompiled(self._compiled), random.seen(), Watch(what, self._known, self.function.advice):
            result = function(*self.at(tensors))
        for i, x, version in versions:
            if version_of(x) != version:
                raise RuntimeError(
                    f"{what} writes to its argument {self.tensor_names[i]}, of shape {list(tensors[i].shape)}, which is differentiated: the "
                    "rule is for the value before. Write to a copy"
                )
        self.random = random
        return result

    def again(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function with the random numbers of the first call."""
        assert self.random is not None
        with run_uncompiled(self._compiled), self.random.restored():
            return function(*args)


class CustomFunction:
    """A function with a rule for its derivative."""

    kind: str

    def __init__(self, fun: Callable[..., Any], nondiff_argnums: int | Sequence[int] = ()) -> None:
        if not callable(fun):
            raise TypeError(f"{self.kind}: expected a function, got {described(fun)}")
        self.fun, self.nondiff_argnums = fun, argnums(nondiff_argnums)
        functools.update_wrapper(self, fun, wrapped_attributes(fun), updated=())
        self.name = getattr(fun, "__name__", type(fun).__name__)
        try:
            self._signature: inspect.Signature | None = inspect.signature(fun)
        except (TypeError, ValueError):
            self._signature = None
        self.number = str(next(_numbers))
        functions[self.number] = self
        self.advice = advice(self.kind)

    def as_of_now(self, copies: Copies) -> CustomFunction:
        """For `core.closures.as_of_now`: the same with functions that later writes to closure variables do not change."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copies.add(self, copy)
        for name in ("fun", "fwd", "bwd", "jvp"):
            if name in self.__dict__:
                setattr(copy, name, as_of_now(self.__dict__[name], copies))
        return copy

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> str:
        return str(getattr(self.fun, "__qualname__", self.name))  # like a function: copies are the function itself

    def __repr__(self) -> str:
        return f"<{self.kind} of {self.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The value of the function, with the derivatives of its rule."""
        if is_exporting():  # an exported program has only operators
            return self.fun(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return traced(self, self._bound(args, kwargs)[0], self.traced_rule)
        return self.called(args, kwargs)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], list[str]]:
        """All arguments by position, and their names."""
        if self._signature is None:
            if kwargs:
                raise TypeError(f"{self.name}: pass all arguments by position; its signature is not known")
            return args, [f"argument {i}" for i in range(len(args))]
        bound = self._signature.bind(*args, **kwargs)
        if bound.kwargs:
            raise TypeError(
                f"{self.name}: rules receive arguments by position, and {', '.join(bound.kwargs)} can be passed by name only"
            )
        bound.apply_defaults()
        names = []
        for p in self._signature.parameters.values():
            if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD):
                continue
            if p.kind is p.VAR_POSITIONAL:
                names += [f"{p.name}[{i}]" for i in range(len(bound.arguments[p.name]))]
            else:
                names.append(p.name)
        return bound.args, names

    @property
    def rules(self) -> list[tuple[Callable[..., Any], str]]:
        """The functions of the rule, with their names in errors.

        Raises:
            AttributeError: there is no rule yet.
        """
        raise NotImplementedError

    def traced_rule(self, arguments: Sequence[Any], nondiff: Sequence[Any], moved: Sequence[Any], result: Any) -> Any:
        """Trace the rule: see `tracing.traced`."""
        raise NotImplementedError

    def _made(
        self, names: Sequence[str], args: Sequence[Any], known: dict[int, tuple[Tensor, str]], compiled: bool
    ) -> Call:  # pragma: no cover
        raise NotImplementedError

    @breaks_graphs(_GRAPH)
    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of the function, outside of compiled graphs."""
        rules = self.rules
        values, names = self._bound(args, kwargs)
        if any(i >= len(values) for i in self.nondiff_argnums):
            raise ArgumentError(f"nondiff_argnums: {self.name} got {len(values)} arguments, and {self.nondiff_argnums}")
        for leaf in pytree.tree_leaves(values):
            if not isinstance(leaf, Tensor) and hasattr(type(leaf), "__torch_function__"):
                raise NotImplementedError(
                    f"{self.name}: an argument is a {type(leaf).__name__}; no {self.kind} rule is known of it"
                )
        if has_series(values):
            return of_series(lambda *values: self.called(values, {}), values)
        plain = only_autograd()
        known: dict[int, tuple[Tensor, str]] = {}
        reached: dict[int, Any] = {}
        if not plain or torch.is_grad_enabled() or own_levels_are_open():
            fixed = [(values[i], f"the argument {names[i]}") for i in self.nondiff_argnums]
            inner = [
                (leaf, f"the argument {n}")
                for i, (v, n) in enumerate(zip(values, names))
                if i not in self.nondiff_argnums
                for leaf in pytree.tree_leaves(v)
                if callable(leaf)
            ]
            known = suspects([(self.fun, self.name), *rules, *fixed, *inner], reached)
        compiled = any(map(is_compiled, reached.values()))
        diff = [n for i, n in enumerate(names) if i not in self.nondiff_argnums]
        tensors = [
            substituted(x)
            for i, v in enumerate(values)
            if i not in self.nondiff_argnums
            for x in pytree.tree_leaves(v)
            if isinstance(x, Tensor)
        ]
        for i in self.nondiff_argnums:
            for x, name in known.values():
                if any(x is leaf for leaf in pytree.tree_leaves(values[i])):
                    raise Watch(self.name, known, self.advice).error(name)
        if not any(map(is_differentiated, tensors)):
            if plain and not torch.is_grad_enabled() and not own_levels_are_open():
                return self.fun(*values)
            known = {key: pair for key, pair in known.items() if is_differentiated(substituted(pair[0]))}
            with run_uncompiled(compiled), Watch(self.name, known, self.advice):
                return self.fun(*values)
        made = self._made(diff, values, known, compiled)
        made.differentiated = [i for i, x in enumerate(tensors) if is_differentiated(x)]
        found = call(made, tensors)
        made.forget()
        return made.result.join(found)

    def in_autocast(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function under the autocast of this call, even if it is called later."""
        return in_this_autocast(function)
