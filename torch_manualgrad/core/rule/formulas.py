"""Formulas: pure functions, each of which is also an operator, ``manualgrad::<its name>``.

A rule binds them by the names of their parameters: `ArgumentBinding`, `parameters`, `sources`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, overload

import torch

from .. import compile_cache, packages
from ..docstrings import documentation
from ..formula_calls import FormulaCalls, Requirement, is_outside
from ..internals import (
    PLAIN,
    are_finite,
    bits_unread,
    custom_op_overload,
    entry,
    is_below_autograd,
    is_distributed,
    is_functorch_wrapped,
    only_autograd,
    values_hidden,
    values_readable,
)
from ..libraries import looked_through, refuse_recording
from ..op.custom_op import CustomOp
from ..registry import Registry, defined
from ..schema import schema_of

__all__ = [
    "ArgumentBinding",
    "Formula",
    "Kernel",
    "Source",
    "bind",
    "bound_to",
    "called_formulas",
    "formula",
    "known_finite",
    "meets_nothing",
    "ops",
    "parameters",
    "readable",
    "sources",
]


EMPTY = inspect.Parameter.empty


class Source(NamedTuple):
    """The source of one parameter's value.

    Attributes:
        name: its name in the rule; None for a constant.
        value: the constant, or the default if that name is unknown; `EMPTY` if it must be known.
    """

    name: str | None
    value: Any = EMPTY


class ArgumentBinding:
    """A function whose parameters have other names in a rule, or are constants. Made by `bind`.

    Attributes:
        formula: the function: a formula, a Python function or an operator.
        renamed: its parameters, each with its name in the rule or its constant.
        renames_only: whether each parameter is bound to a different name.
    """

    def __init__(self, formula: Callable[..., Any], renamed: Mapping[str, Any]) -> None:
        known = parameters(formula)
        for name in renamed:
            if name not in known:
                label = formula.name if isinstance(formula, Formula) else formula.__name__
                raise ValueError(f"{label}: bind() is given {name!r}, which is not one of its parameters {known}")
        self.formula = formula
        self.renamed = dict(renamed)
        self.__name__ = formula.__name__
        self._sources = sources(self)
        self.parameter_names = list(dict.fromkeys(s.name for s in self._sources if s.name is not None))
        self.renames_only = len(self.parameter_names) == len(self._sources)

    def __call__(self, *values: Any) -> Any:
        """The function of the values of its ``parameter_names``."""
        if self.renames_only:
            return self.formula(*values)
        given = dict(zip(self.parameter_names, values))
        return self.formula(*[s.value if s.name is None else given[s.name] for s in self._sources])

    def __repr__(self) -> str:
        renamed = [f"{p}={s}" if isinstance(s, str) else f"{p}={s!r}" for p, s in self.renamed.items()]
        return f"{self.formula.__name__}({', '.join(renamed)})"


def bind(function: Callable[..., Any], /, **parameters: Any) -> ArgumentBinding:
    """A formula, a Python function or an operator for a rule, with other names for some of its parameters.

    ``bind(aten.threshold_backward.default, grad_output="grad", threshold=0)``: its ``grad_output`` is the rule's ``grad``.
    Keyword-only arguments of an operator keep their defaults.

    Args:
        function: a `Formula`, a function with named parameters, or an ``OpOverload``.
        parameters: for each parameter its name in the rule, or its value in every call, anything but a string. The
            others are bound by their own names.

    Returns:
        A function for `rule` and `elementwise`.

    Raises:
        ValueError: there is no such parameter.
    """
    made = ArgumentBinding(function, parameters)
    made.__module__ = sys._getframe(1).f_globals.get("__name__", "")  # its mistakes are checked at each call
    return made


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names to bind: those of all positional parameters.

    Keyword-only ones keep their defaults, so that a lambda may carry constants.

    Raises:
        TypeError, ValueError: the parameters are unknown.
    """
    return [name for name, _ in _by_place(function)]


def sources(function: Callable[..., Any]) -> list[Source]:
    """The sources of the parameters, in order."""
    if not isinstance(function, ArgumentBinding):
        return [Source(name, default) for name, default in _by_place(function)]
    return [_source(name, default, function.renamed) for name, default in _by_place(function.formula)]


def _source(name: str, default: Any, renamed: Mapping[str, Any]) -> Source:
    if name not in renamed:
        return Source(name, default)
    given = renamed[name]
    return Source(given) if isinstance(given, str) else Source(None, given)


def bound_to(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """The function itself, with these names for its parameters."""
    made: Any = function
    made.parameter_names = list(dict.fromkeys(names))
    return function


def _by_place(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Name and default of each positional parameter."""
    if (names := getattr(function, "parameter_names", None)) is not None:
        return [(name, EMPTY) for name in names]
    plain = function if type(function) is FunctionType and not function.__dict__ else inspect.unwrap(function)
    if isinstance(plain, FunctionType) and not plain.__code__.co_flags & inspect.CO_VARARGS:
        # like inspect, in a twentieth of the time: a thousand functions are bound at import
        code, defaults = plain.__code__, plain.__defaults__ or ()
        given = (EMPTY,) * (code.co_argcount - len(defaults)) + defaults
        return list(zip(code.co_varnames, given))
    if (overload := custom_op_overload(plain)) is not None:
        return [(a.name, EMPTY) for a in overload._schema.arguments if not a.kwarg_only]
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in found if p.kind is not p.KEYWORD_ONLY]


# -- formulas --------------------------------------------------------------------------------------------------------------

NAMESPACE = "manualgrad"


@dataclass(frozen=True, init=False)
class Kernel:
    """Code that computes a formula, and the calls that it takes.

    Args:
        devices: the types of device that it runs on; none for a Python kernel, which runs on all.
        when: selects its calls: a function of some of the formula's arguments, by name, that reads sizes, dtypes and
            devices, but never values. Without it, all calls on these devices.
        python: the kernel, if it is in Python; else it is in ``csrc/``, and its results are contiguous. If it returns
            None, the body runs.
        compiled: if the kernel in ``csrc/`` has other arguments or results than the formula: a function that computes
            the same, for other devices. ``python`` then takes calls on all devices, receives the kernel before the
            arguments, and converts the kernel's results to the formula's.
        tracked: whether it also takes calls that autograd tracks, because its derivative is the body's: for a kernel
            that does more than the body, such as a warning.

    Raises:
        ValueError: ``compiled`` without ``python``.
    """

    devices: tuple[str, ...]
    when: Callable[..., bool] | None
    python: Callable[..., Any] | None
    compiled: Callable[..., Any] | None
    tracked: bool

    def __init__(
        self,
        *devices: str,
        when: Callable[..., bool] | None = None,
        python: Callable[..., Any] | None = None,
        compiled: Callable[..., Any] | None = None,
        tracked: bool = False,
    ) -> None:
        if compiled is not None and python is None:
            raise ValueError("compiled= is for a kernel that python= calls")
        given = {"devices": devices, "when": when, "python": python, "compiled": compiled, "tracked": tracked}
        for name, value in given.items():
            object.__setattr__(self, name, value)


class _Route(NamedTuple):
    """How a kernel is reached."""

    devices: tuple[str, ...]
    when: Callable[..., bool] | None
    places: tuple[int, ...]  # of its `when` arguments, among the formula's arguments
    op: Any  # the overload
    run: Callable[..., Any]  # the same, with a faster entry
    python: Callable[..., Any] | None
    tracked: bool


class Formula(CustomOp):
    """A mathematical function, and the operator made from it.

    It is transparent: autograd, vmap, fake tensors and the compiler see its body, and calling it runs the body at once.
    If a kernel takes the call and autograd does not track it, the kernel runs instead: an overload of the operator,
    ``manualgrad::<name>.kernel`` or ``.python``, which is opaque. The body is its reference, its fake kernel, its vmap
    rule, and the fallback on devices without the kernel. It is also differentiated for the next order.

    With ``kernel`` the formula itself is opaque in this way, for any call.

    Attributes:
        kernels: types of device for which a compiled kernel exists.
        overloads: the opaque operators of a transparent formula, by the names of the overloads.
        run: called by rules: the body, or the kernel that takes the call.
        in_python: whether it has a kernel in Python.
        calls: checks calls from outside.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        kernel: Sequence[str] = (),
        namespace: str = NAMESPACE,
        kernels: Sequence[Kernel] = (),
        requires: Requirement | None = None,
        batched: bool = False,
    ) -> None:
        if kernel and kernels:
            raise ValueError(f"{function.__name__}: kernel= makes it opaque, and kernels= takes only some of the calls")
        if sum(k.python is not None for k in kernels) > 1:
            raise ValueError(f"{function.__name__}: there is more than one kernel in Python")
        compiled = [device for k in kernels if k.python is None or k.compiled is not None for device in k.devices]
        self.kernels = tuple(dict.fromkeys((*kernel, *compiled)))
        self.overloads: dict[str, CustomOp] = {}
        self._routes: tuple[_Route, ...] = ()
        schema = schema_of(function)
        plain = schema.replace("SymInt", "int")  # a stable-ABI kernel takes plain integers
        name = f"{namespace}::{function.__name__}"
        self.run = self._chosen if kernels else function
        self.calls = FormulaCalls(name, function, requires)
        super().__init__(
            name + (plain if kernel else schema),
            function,
            transparent=None if kernel else self.calls.checking(self.run),
            differentiable=bool(kernel),
            calls=self.calls,
            batched=batched,
        )
        del self.__doc__  # `_Documentation` has it
        self._run = self.run
        if kernel:
            self.run, self._run = self.op, entry(self.op)
        self.in_python = self.kernels == ("default",) or any(k.python is not None for k in kernels)
        if kernel == ("default",):
            looked_through(self.op)
        if (kernel or kernels) and (self.signature.lists or self.signature.positional < len(self.signature.names)):
            raise ValueError(
                f"{self.name}: a formula with a kernel takes no lists of tensors and no keyword-only arguments"
            )
        for k in kernels:
            self._add(k, plain)

    def _add(self, kernel: Kernel, schema: str) -> None:
        python = kernel.python
        if python is None:
            made = self._overload("kernel", schema, _contiguous(self.reference))
        else:
            given = []
            if kernel.compiled is not None:
                own = schema_of(kernel.compiled)
                given.append(entry(self._overload("kernel", own, kernel.compiled).op))
            made = self._overload("python", schema, self.reference)
            made.impl("default")(python := self._completed(python, given))
        names = inspect.signature(kernel.when).parameters if kernel.when is not None else ()
        unknown = [n for n in names if n not in self.signature.names]
        if unknown:
            raise ValueError(f"{self.name}: when= asks for {unknown[0]!r}, which is not one of {self.signature.names}")
        places = tuple(self.signature.names.index(n) for n in names)
        devices = kernel.devices if kernel.compiled is None else ()
        self._routes += (_Route(devices, kernel.when, places, made.op, entry(made.op), python, kernel.tracked),)
        compile_cache.remember(f"{self.name} {len(self._routes)}", kernel.when)

    def _overload(self, name: str, schema: str, reference: Callable[..., Any]) -> CustomOp:
        if name not in self.overloads:
            schema = f"{self.name}.{name}{schema}"
            calls = FormulaCalls(f"{self.name}.{name}", reference, self.calls.requires)
            self.overloads[name] = CustomOp(schema, reference, differentiable=True, may_be_overload=True, calls=calls)
        return self.overloads[name]

    def _completed(self, python: Callable[..., Any], given: Sequence[Any]) -> Callable[..., Any]:
        """The Python kernel, with the given values and every argument; the body if it returns None."""
        body, signature, count = self.reference, self.signature, len(self.signature.names)

        @functools.wraps(python)
        def completed(*args: Any) -> Any:
            if len(args) < count:  # the dispatcher omits arguments that equal the default
                args = tuple(signature.bind(args, {}))
            result = python(*given, *args)
            return body(*args) if result is None else result

        return completed

    def _chosen(self, *args: Any, **kwargs: Any) -> Any:
        """Run the first kernel that takes the call, or the body."""
        if len(args) < len(self.signature.names):
            args = tuple(self.signature.bind(args, kwargs))
        tracked, distributed, may_be_tracked, device = False, False, torch.is_grad_enabled(), None
        for i in self.signature.tensor_like:
            if (x := args[i]) is not None:
                device = device or x.device.type
                if not may_be_tracked:
                    break
                if x.requires_grad:
                    tracked, distributed = True, is_distributed(x)  # these reach the body through the op's derivative
                    break
        for route in self._routes:
            if (
                (device in route.devices or not route.devices)
                and (route.tracked or not tracked or distributed)
                and (route.when is None or route.when(*[args[i] for i in route.places]))
            ):
                if torch.compiler.is_dynamo_compiling():
                    return route.op(*args)
                if route.python is not None and meets_nothing(args):
                    return route.python(*args)
                return route.run(*args)
        return self.reference(*args)

    def bind(self, /, **parameters: Any) -> ArgumentBinding:
        """`bind` of this formula.

        ``cholesky_backward.bind(grad_L="grad", L="result")``: its ``L`` is the rule's ``result``.

        Args:
            parameters: as in `bind`; a parameter with a default whose name is unknown in the rule keeps its default.

        Returns:
            A function that `rule` takes instead of the formula.

        Raises:
            ValueError: there is no such parameter.
        """
        return ArgumentBinding(self, parameters)

    def undefine(self) -> None:
        for op in self.overloads.values():
            op.undefine()
        super().undefine()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self.run(*args, **kwargs)
        if is_outside():
            return self.calls.call(self._run, args, kwargs)
        if self.in_python and not self.transparent and meets_nothing((*args, *kwargs.values())):
            return self._current["default"].function(*args, **kwargs)
        return self._run(*args, **kwargs)

    def __repr__(self) -> str:
        kernels = f", kernels: {', '.join(self.kernels)}" if self.kernels else ""
        return f"<Formula {self.signature.schema}{kernels}>"


def meets_nothing(values: Sequence[Any]) -> bool:
    """Whether the dispatcher would pass a call with these values to the kernel unchanged.

    The kernel is then called directly, which saves a third of a small formula's time.
    """
    if not is_below_autograd() or not only_autograd() or values_hidden() or bits_unread():
        return False
    return all(type(x) in PLAIN or not isinstance(x, torch.Tensor) for x in values)


def _contiguous(body: Callable[..., Any]) -> Callable[..., Any]:
    """The body with the strides of a compiled kernel's results."""

    @functools.wraps(body)
    def contiguous(*args: Any, **kwargs: Any) -> Any:
        result = body(*args, **kwargs)
        return tuple(x.contiguous() for x in result) if isinstance(result, tuple) else result.contiguous()

    return contiguous


class _Documentation:
    """The docstring of a formula, completed when it is first read."""

    def __init__(self, of_class: str | None) -> None:
        self._of_class = of_class

    def __get__(self, formula: Formula | None, owner: type) -> str | None:
        if formula is None:
            return self._of_class
        found = documentation(formula.reference) if formula.reference.__doc__ else self._of_class
        formula.__dict__["__doc__"] = found
        return found


Formula.__doc__ = _Documentation(Formula.__doc__)  # type: ignore[assignment]

ops: Registry[Formula] = Registry("formula", packages.load)


@overload
def formula(function: Callable[..., Any], /) -> Formula: ...
@overload
def formula(
    *,
    kernels: Kernel | Sequence[Kernel] = (),
    kernel: Sequence[str] = (),
    namespace: str = NAMESPACE,
    requires: Requirement | None = None,
    batched: bool = False,
) -> Callable[[Callable[..., Any]], Formula]: ...
def formula(
    function: Callable[..., Any] | None = None,
    /,
    *,
    kernels: Kernel | Sequence[Kernel] = (),
    kernel: Sequence[str] = (),
    namespace: str = NAMESPACE,
    requires: Requirement | None = None,
    batched: bool = False,
) -> Any:
    """Make a function the operator ``manualgrad::<its name>``, also ``mg.ops.<its name>``.

    Args:
        function: the mathematics, with annotations for ``torch.library.infer_schema``.
        kernels: run instead of the body, for the calls that they take; of several, the first that takes a call.
        kernel: types of device for which ``csrc/`` has a kernel that takes any call; the formula is then opaque.
        namespace: of the operator, instead of ``manualgrad``: another package's own. The formula is then
            ``mg.ops["<namespace>::<its name>"]`` and ``torch.ops.<namespace>.<its name>``.
        requires: checks that the docstring cannot declare: a function of some of the arguments, by name, that returns
            an error, ``"offsets: ..."``, or an empty string. It runs for calls from outside.
        batched: the function under ``@f.impl("default")`` also runs under vmap, instead of the body, if nothing is
            differentiated again. It calls operators with vmap rules, and reads no values.

    Returns:
        The `Formula`; without a function, a decorator.

    Raises:
        ValueError: the name is taken, the types cannot be read, or a kernel's ``when`` has an unknown argument.
    """
    kernels = (kernels,) if isinstance(kernels, Kernel) else tuple(kernels)

    def make(f: Callable[..., Any]) -> Formula:
        made = Formula(f, kernel, namespace, kernels, requires, batched)
        return ops.add(made.name.removeprefix(f"{NAMESPACE}::"), made)

    return make if function is None else make(function)


def known_finite(x: torch.Tensor) -> bool:
    """Whether the values of x may be read here, and none is infinite or nan. Synchronizes."""
    refuse_recording("values are read where they may be")
    return values_readable((x,)) and are_finite((x,))


def readable(x: torch.Tensor) -> bool | None:
    """Whether a formula may depend on the values of x; None if they are batched, or need a synchronization."""
    refuse_recording("values are read where they may be")
    if not values_readable([x]):
        return False
    return True if type(x) in PLAIN and x.is_cpu and not is_functorch_wrapped(x) else None


# -- the formulas that a function calls, read from its code: no separate list must be maintained
# -----------------------------

_CORE = __name__.rpartition(".rule.")[0]


def called_formulas(functions: Iterable[Callable[..., Any] | None]) -> tuple[Formula, ...]:
    """The formulas that the functions are, bind or call, in order of discovery.

    Follows the names that the code of a function reads, its closures, defaults and wrapped functions, through helper
    functions and tables, and stops at a formula. A formula that is reached by a name
    made at run time (``getattr``) is not found.

    Args:
        functions: functions, formulas, bindings or partial functions; None is skipped.

    Returns:
        Each formula once.
    """
    found: dict[Formula, None] = {}
    seen: dict[int, Any] = {}  # by identity; kept alive, so that identities stay unique
    waiting = [f for f in reversed([*functions]) if f is not None]
    while waiting:
        value = waiting.pop()
        if (formula := _formula(value)) is not None:
            found[formula] = None
        elif id(value) not in seen:
            seen[id(value)] = value
            waiting += reversed([*_referenced(value)])
    return tuple(found)


def _formula(value: Any) -> Formula | None:
    """The formula that is this value, or has it as its operator."""
    overload = None if isinstance(value, Formula) else custom_op_overload(value)
    op = value if overload is None else defined(overload.name())
    return op if isinstance(op, Formula) else None


def _referenced(value: Any) -> Iterator[Any]:
    """The objects that a function, or a table of functions, refers to."""
    if isinstance(value, ArgumentBinding):
        yield value.formula
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (tuple, list)):
        yield from value
    elif inspect.ismethod(value):
        yield value.__func__
    elif isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if compile_cache.is_filled(cell))
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        if (wrapped := getattr(value, "__wrapped__", None)) is not None:
            yield wrapped
        if _is_derivative_code(value):
            yield from _named(value.__code__, value.__globals__)


def _is_derivative_code(function: FunctionType) -> bool:
    """False for the machinery that every rule shares: its names would be found for each rule."""
    module = function.__module__ or ""
    return module.split(".")[0] != "torch" and not module.startswith(f"{_CORE}.")


def _named(code: CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    """The globals that code reads, including nested functions, and the attributes that it reads of modules."""
    for name in code.co_names:
        value = names.get(name)
        if isinstance(value, ModuleType):
            if value.__name__.split(".")[0] != "torch":
                yield from (vars(value)[n] for n in code.co_names if n in vars(value))
        else:
            yield value
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant, names)
