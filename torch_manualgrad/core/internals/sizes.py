"""Open sizes of traced graphs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["Sizes", "computed", "example_of", "is_number_in_tensor", "is_symbol", "symbols_in", "symbols_of"]


class Sizes:
    """Symbols for the open sizes of a graph, and the assumptions about them.

    Tracing and compiling a graph may make assumptions about its sizes, such as that one is even. They are collected
    here, and `allow` checks them.

    Args:
        examples: a value of each size, used for decisions.

    Attributes:
        mode: the fake mode of the trace.
        numbers: the symbols.
        refused: whether some operator takes no open sizes. Then nothing is allowed.
    """

    def __init__(self, examples: Sequence[int] = ()) -> None:
        self.refused = False
        self.mode: Any = FakeTensorMode()
        self.numbers: tuple[Any, ...] = ()
        if examples:
            from torch._dynamo.source import LocalSource  # importing the compiler is slow
            from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv  # importing the compiler is slow

            # values are refused, as in a trace without open sizes
            self._environment: Any = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
            self.mode = FakeTensorMode(shape_env=self._environment)
            made = []
            for i, n in enumerate(examples):
                source = LocalSource(f"size{i}")
                symbol = self._environment.create_symbol(n, source, dynamic_dim=DimDynamic.DYNAMIC)
                made.append((str(symbol), self._environment.create_symintnode(symbol, hint=n, source=source)))
            self._symbols, self.numbers = zip(*made)
        self._lock = threading.Lock()
        # the number of assumptions so far, their condition, and values for which it holds
        self._known: tuple[Any, str | None, set[tuple[int, ...]]] = (None, None, set())

    def allow(self, values: tuple[int, ...]) -> bool:
        """Whether these values of the sizes satisfy the assumptions so far."""
        if self.refused or not self.numbers:
            return not self.refused
        environment = self._environment
        count, condition, allowed = self._known
        if count != (len(environment.guards), len(environment.replacements)):
            with self._lock:  # counted before: assumptions of another thread meanwhile are seen at the next call
                count = len(environment.guards), len(environment.replacements)
                condition, allowed = environment.produce_guards_expression(self.numbers), set()
                self._known = count, condition, allowed
        if values in allowed:
            return True
        if condition is None or environment.evaluate_guards_expression(condition, values):
            allowed.add(values)
            return True
        return False

    def value(self, number: Any, values: tuple[int, ...]) -> Any:
        """The value of an expression of the sizes: a number, or a bool."""
        if not is_symbol(number):
            return number
        found = self.computed(number, values)
        return {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(number)](found)

    def computed(self, number: Any, values: Sequence[Any]) -> Any:
        """An expression of the sizes, computed from a node of a graph for each size."""
        return computed(number, self._symbols, values)

    def places(self, shapes: Sequence[Sequence[Any]]) -> list[tuple[int, int] | None]:
        """For each size the number and the dimension of the first of these shapes that has it."""
        found: dict[str, tuple[int, int]] = {}
        for i, shape in enumerate(shapes):
            for d, n in enumerate(shape):
                found.setdefault(str(n), (i, d))
        return [found.get(s) for s in self._symbols] if self.numbers else []


def computed(number: Any, names: Sequence[str], values: Sequence[Any]) -> Any:
    """An expression of a trace, computed from values for the symbols of these names."""
    from torch.utils._sympy.interp import sympy_interp  # importing the compiler is slow
    from torch.utils._sympy.reference import PythonReferenceAnalysis  # importing the compiler is slow

    known, expression = dict(zip(names, values)), number.node.expr
    return sympy_interp(PythonReferenceAnalysis, {s: known[str(s)] for s in expression.free_symbols}, expression)


def symbols_in(number: Any) -> set[str]:
    """The names of the symbols in a number of a trace."""
    return {str(s) for s in number.node.expr.free_symbols} if is_symbol(number) else set()


def example_of(number: Any) -> int:
    """A size as an integer: its own, or that of the example."""
    return number if isinstance(number, int) else int(number.node.hint)


def is_symbol(value: Any) -> bool:
    """Whether a number or a bool of a trace is open."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def is_number_in_tensor(placeholder: torch.fx.Node) -> bool:
    """Whether an input of Dynamo's graph is a number that varies, passed as a tensor, whose ``item`` the graph reads."""
    argument = placeholder.meta.get("grapharg")
    return argument is not None and argument.pass_arg_as_tensor and not argument.is_tensor  # an array is


def symbols_of(example: Any) -> tuple[str | None, ...] | str | None:
    """The names of the open sizes in an input of Dynamo: of each dimension of a tensor, or of a number."""
    if isinstance(example, torch.SymInt):
        return str(example.node.expr)
    if isinstance(example, torch.Tensor):
        return tuple(str(n.node.expr) if isinstance(n, torch.SymInt) else None for n in example.shape)
    return None
