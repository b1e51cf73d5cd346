"""The pattern of a function's first or second derivative, from one run of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..arguments import described
from ..core.internals import function_of, outside_of_compiler, pytree
from .pattern import Pattern
from .structure import rule_for
from .trace import PatternError, Trace

__all__ = ["Detected", "detached", "detect"]


@dataclass(frozen=True)
class Detected:
    """The findings of a run.

    Attributes:
        pattern: of the Jacobian, or of the Hessian.
        output: the result of the function.
        conservative: the operators whose results were taken to depend on everything, and how often.
        bytes: the size of all values computed from the input.
    """

    pattern: Pattern
    output: Tensor
    conservative: dict[str, int]
    bytes: int


class _Readings(TorchFunctionMode):
    """Refuses functions that bypass operators to read values of a tensor that depends on the input."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "__array__", "__dlpack__") and isinstance(args[0], Tensor):
            if self.trace.is_followed(args[0]):
                raise PatternError(
                    f"f: Tensor.{name} reads values that depend on x. A pattern holds for all values; pass pattern="
                )
        return func(*args, **(kwargs or {}))


def detached(tree: Any) -> Any:
    """The tree with its tensors detached."""
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, tree)


def detect(f: Callable[..., Any], x: Tensor, args: Sequence[Any], second: bool = False) -> Detected:
    """Run a function and find the pattern of its Jacobian, or with ``second`` that of its Hessian.

    Args:
        f: ``f(x, *args)``, a tensor.
        x: any shape; its values do not matter if ``f`` can be evaluated there.
        args: constants.
        second: whether to find second derivatives; ``f`` then returns one number.

    Returns:
        The pattern (numel of the result, numel of x), or (numel of x, numel of x).

    Raises:
        PatternError: the function branches on values, or returns a tensor that is not dense.
        TypeError: it does not return a tensor.
    """
    x = x.detach()
    inside = x.clone(memory_format=torch.contiguous_format)
    trace = Trace(inside, rule_for, second)
    try:
        with outside_of_compiler(), torch.enable_grad(), _Readings(trace), trace:
            y = f(inside.requires_grad_() if _is_differentiable(inside) else inside, *detached(args))
    except NotImplementedError as error:
        if "HigherOrderOperator" not in str(error):
            raise
        raise PatternError(
            f"f: {str(error).partition(' and mode')[0]}. Control flow such as torch.cond cannot be followed; use torch.where, "
            "or pass pattern="
        ) from error
    check_output(y)
    m, n = y.numel(), x.numel()
    conservative = dict(trace.conservative)
    for name in _autograd_functions(y):
        conservative[name] = conservative.get(name, 0) + 1
    if len(conservative) > len(trace.conservative):
        # its backward is arbitrary, and not in the trace
        rows = n if second else m
        crow = (
            torch.arange(0, rows * n + 1, n, device="cpu")
            if n
            else torch.zeros(rows + 1, dtype=torch.int64, device="cpu")
        )
        pattern = Pattern(crow, torch.arange(n, device="cpu").repeat(rows), (rows, n))
    else:
        crow, col = trace.hessian() if second else trace.jacobian(y)
        pattern = Pattern(crow, col, (n if second else m, n))
    return Detected(pattern, y.detach(), conservative, trace.bytes + n * x.element_size())


def check_output(y: Any) -> None:
    """Raise unless a function has returned a dense tensor that has derivatives."""
    if not isinstance(y, Tensor):
        raise TypeError(f"f: expected a function that returns a tensor, got {described(y)}")
    if y.layout is not torch.strided or y.is_nested or not (y.is_floating_point() or y.is_complex()):
        raise TypeError(f"f: expected a dense floating point or complex tensor, got {described(y)} and {y.layout}")


def _is_differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _autograd_functions(y: Tensor) -> list[str]:
    """The classes of autograd.Function and the rules of functions in the graph of a tensor, without rules of operators."""
    found, seen, waiting = set(), set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = function_of(node)
        static = getattr(node, "static", ())
        for kept in static if isinstance(static, tuple) else (static,):
            if rule := getattr(kept, "rule_of_its_own", ""):
                found.add(rule)
        if function is not None and function.__module__.partition(".")[0] != __name__.partition(".")[0]:
            found.add(f"autograd.Function {function.__name__}")
        waiting += [below for below, _ in node.next_functions]
    return sorted(found)
