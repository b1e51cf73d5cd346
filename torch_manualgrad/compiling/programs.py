"""Selects the program of a graph for given inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from ..core.internals import compiler_lock, is_number_in_tensor, symbols_of
from .function import Options
from .program import Program

__all__ = ["Programs"]


class Programs:
    """The programs of one of Dynamo's graphs, made when no existing one fits the inputs.

    A program is for inputs of certain shapes, or for all sizes that Dynamo leaves open and that its assumptions allow. A number
    that varies, which Dynamo passes as a tensor, is a constant at first. After some values it stays a tensor.

    Args:
        graph: the graph.
        options: of the programs.
    """

    limit = 8  # of programs with open sizes per kind of inputs, and of values of numbers with their own program

    def __init__(self, graph: fx.GraphModule, options: Options) -> None:
        self.graph, self.options = graph, options
        inputs = graph.graph.find_nodes(op="placeholder")
        self._numbers = [i for i, n in enumerate(inputs) if is_number_in_tensor(n)]
        self._seen: set[tuple[Any, ...]] = set()
        self._always_constant = False  # numbers that vary
        self._symbols = [symbols_of(n.meta.get("example_value")) for n in inputs]
        free: dict[str, list[tuple[int, Any]]] = {}
        for i, symbols in enumerate(self._symbols):
            for d, symbol in [(None, symbols)] if isinstance(symbols, str) else enumerate(symbols or ()):
                if symbol is not None:
                    free.setdefault(symbol, []).append((i, d))
        self._free = tuple(free.values())
        # Dynamo guards the shapes that it knows
        self._is_one = not self._free and all(isinstance(n.meta.get("example_value"), Tensor) for n in inputs)
        self._closed: dict[Any, Program | None] = {}
        self._open: dict[Any, list[Program]] = {}

    def of(self, values: Sequence[Any]) -> tuple[Program | None, Sequence[Any]]:
        """The program for these inputs of the graph (None if it cannot be compiled), and the inputs of the program."""
        if self._is_one and self._closed and not self._numbers:
            (program,) = self._closed.values()
            return program, values
        if not self._numbers:
            return self._find(values), values
        numbers = [values[i].item() for i in self._numbers]
        seen = tuple(map(_constant, numbers))
        if len(self._seen) < self.limit:
            self._seen.add(seen)
        if not self._always_constant and seen not in self._seen:
            program = self._find(values, as_tensors=True)
            if program is not None:
                return program, values
            self._always_constant = True
        given = list(values)
        for i, n in zip(self._numbers, numbers):
            given[i] = n
        return self._find(given), given

    def _find(self, values: Sequence[Any], as_tensors: bool = False) -> Program | None:
        """The program. With tensors for numbers, None if it needs them as constants."""
        if not any(isinstance(v, Tensor) for v in values):
            return None  # nothing to differentiate
        if self._free:
            program = self._with_open_sizes(values, as_tensors)
            if program is not None:
                return program
        key = tuple((v.shape, v.dtype, v.device) if isinstance(v, Tensor) else _constant(v) for v in values)
        if key not in self._closed:
            with compiler_lock():
                try:
                    self._closed[key] = Program(self.graph, values, self.options, numbers=self._numbers)
                except Exception as error:
                    if not as_tensors:
                        self.options.report("a graph runs uncompiled", error)
                    self._closed[key] = None
        return self._closed[key]

    def _with_open_sizes(self, values: Sequence[Any], as_tensors: bool) -> Program | None:
        kind = self._kind(values)
        if kind is None:
            return None
        made = self._open.setdefault(kind, [])
        if any(program.sizes.refused for program in made):
            self._free = ()
            return None
        for program in made:
            if program.fits(values):
                return program
        if len(made) == self.limit:
            return None
        with compiler_lock():
            try:
                made.append(Program(self.graph, values, self.options, self._free, self._numbers))
            except Exception:  # each shape has a program then, or the error is reported there
                if not as_tensors:
                    self._free = ()
                return None
        return made[-1] if made[-1].fits(values) else None

    def _kind(self, values: Sequence[Any]) -> Any:
        """A key that all inputs of a program with open sizes share; None if these inputs cannot have open sizes."""
        for places in self._free:
            sizes = {values[i] if d is None else values[i].shape[d] for i, d in places}
            if len(sizes) != 1 or not all(type(n) is int and n > 1 for n in sizes):
                return None
        kind: list[Any] = []
        for v, symbols in zip(values, self._symbols):
            if isinstance(v, Tensor):
                kind.append((v.dtype, v.device, *[n for n, symbol in zip(v.shape, symbols or ()) if symbol is None]))
            elif symbols is None or isinstance(v, float):
                kind.append(_constant(v))
        return tuple(kind)


def _constant(value: Any) -> Any:
    """A key for a constant of a program: 0.0 and -0.0 differ, and so do 1, 1.0 and True; nan is itself."""
    if isinstance(value, complex):
        return complex, value.real.hex(), value.imag.hex()
    return type(value), value.hex() if isinstance(value, float) else value
