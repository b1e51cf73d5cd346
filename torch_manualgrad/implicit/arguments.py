"""Checks of what is solved: the starting point, what the function returns, and tensors that it reads by closure."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import ArgumentError, described
from ..core.internals import (
    in_functorch,
    is_autocast_enabled,
    is_batched,
    levels_of,
    only_autograd,
    pytree,
    saved_tensors_unhooked,
)
from .vectors import Structure

__all__ = ["HiddenTensorError", "Unknown", "check_function", "in_this_autocast", "listed"]


class HiddenTensorError(RuntimeError):
    """A function reads a tensor that is not among its arguments, and the derivative with respect to it would be lost."""


class Unknown(Structure):
    """The pytree of a starting point, or of a right-hand side.

    Args:
        tree: a pytree of tensors.
        argument: its name in errors.

    Raises:
        TypeError: a leaf is not a floating point or complex tensor.
        ArgumentError: there is none.
    """

    def __init__(self, tree: Any, argument: str) -> None:
        super().__init__(tree)
        leaves = pytree.tree_leaves(tree)
        for x in leaves:
            if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
                raise TypeError(f"{argument}: expected floating point or complex tensors, got {described(x)}")
        if not leaves:
            raise ArgumentError(f"{argument}: expected a tensor, or a tree of tensors, got {described(tree)}")

    def values(self, tree: Any, what: str, like: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a tree of this structure.

        Args:
            tree: what a function returned.
            what: the function in errors.
            like: tensors with the shapes that its own have to have.

        Raises:
            ArgumentError: another structure, other shapes, or real where it should be complex.
        """
        leaves, spec = pytree.tree_flatten(tree)
        if spec != self.spec:
            raise ArgumentError(f"{what}: expected a tree like its first argument, {self.spec}, got {spec}")
        for leaf, x in zip(leaves, like):
            if not isinstance(leaf, Tensor) or leaf.shape != x.shape or leaf.is_complex() != x.is_complex():
                kind = "complex" if x.is_complex() else "real"
                raise ArgumentError(f"{what}: expected a {kind} tensor of shape {list(x.shape)}, got {described(leaf)}")
        return leaves


def in_this_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under the autocast that is on now, also where it is called later; solvers run without."""
    if not is_autocast_enabled():
        return function
    types = [d for d in ("cpu", "cuda", "xpu", "mps") if torch.is_autocast_enabled(d)]
    dtypes = {d: torch.get_autocast_dtype(d) for d in types}

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for device, dtype in dtypes.items():
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
            return function(*args)

    return call


def listed(function: Callable[..., Any], x: Unknown, parameters: Structure, what: str) -> Callable[..., list[Tensor]]:
    """``(xs, tensors) -> tensors`` for a function of pytrees whose result has the structure of ``x``."""

    def call(xs: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        return x.values(function(x.join(xs), *parameters.join(tensors)), what, xs)

    return call


def check_function(
    function: Callable[..., Any],
    users: Sequence[tuple[Callable[..., Any], str]],
    xs: Sequence[Tensor],
    tensors: Sequence[Tensor],
) -> None:
    """Call a function once, and raise if its result depends on tensors that are not arguments.

    Args:
        function: of lists of tensors.
        users: the functions of the user that it calls, with their names in errors.
        xs: its first argument.
        tensors: the others.

    Raises:
        HiddenTensorError: the result is tracked, has a tangent or is batched, and no argument is.
    """
    if not torch.is_grad_enabled() and only_autograd():
        return
    inputs = [x.detach() for x in (*xs, *tensors)]
    with saved_tensors_unhooked():  # under which the function could not call torch.func
        results = function(inputs[: len(xs)], inputs[len(xs) :])
    known = {level for x in inputs for level in levels_of(x)[0]} if in_functorch() else set()

    def is_lost(x: Tensor) -> bool:
        levels, tracked = levels_of(x)
        return tracked or bool(levels - known)

    if any(map(is_lost, results)):
        raise _hidden(users, is_lost)
    if in_functorch() and any(is_batched(x) for user, what in users for _, x in _reachable(user, what)):
        raise _hidden(users, is_batched)


def _hidden(users: Sequence[tuple[Callable[..., Any], str]], is_lost: Callable[[Tensor], bool]) -> HiddenTensorError:
    """The error, with the names of what is lost as far as they can be found."""
    reached = [(what, name) for user, what in users for name, x in _reachable(user, what) if is_lost(x)]
    what = reached[0][0] if reached else users[0][1]
    names = f": {', '.join(sorted({name for _, name in reached}))}" if reached else ""
    return HiddenTensorError(
        f"{what} reads a tensor that requires grad, or that a transform follows, and that is not an argument{names}. Its "
        f"derivative would be lost. Pass it as one of the parameters, the last arguments of {what}; for an nn.Module, pass "
        "dict(module.named_parameters()) and call torch.func.functional_call"
    )


def _reachable(function: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a function reads by closure, as a global, as a default or as an attribute, with their names."""
    if depth > 4:
        return
    if isinstance(function, functools.partial):
        for value in (*function.args, *function.keywords.values()):
            yield from _tensors(value, name, depth)
        yield from _reachable(function.func, name, depth + 1)
        return
    owner = getattr(function, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        yield from _tensors(owner, type(owner).__name__, depth)
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is None:
        if not inspect.isbuiltin(function) and not isinstance(function, type):
            yield from _tensors(function, name, depth, call=False)
        return
    for variable, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            yield from _tensors(cell.cell_contents, variable, depth)
        except ValueError:  # not assigned yet
            continue
    for variable in code.co_names:
        if variable in function.__globals__:
            yield from _tensors(function.__globals__[variable], variable, depth)
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield from _tensors(value, name, depth)


def _tensors(value: Any, name: str, depth: int, call: bool = True) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, torch.nn.Module):
        for parameter, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield f"{name}.{parameter}", tensor
    elif isinstance(value, (list, tuple, dict)):
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                yield name, leaf
    elif call and callable(value) and not isinstance(value, type):
        if inspect.isfunction(value) or inspect.ismethod(value) or isinstance(value, functools.partial):
            yield from _reachable(value, name, depth + 1)
    elif hasattr(value, "__dict__") and not inspect.ismodule(value) and not isinstance(value, type):
        for attribute, held in vars(value).items():
            if isinstance(held, Tensor):
                yield f"{name}.{attribute}", held
