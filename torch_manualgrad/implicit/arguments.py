"""Checks of a problem: the starting point, the function's results, and tensors that it reads by closure."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import ArgumentError, described
from ..core.captures import PLAIN, HiddenTensorError, Watch, suspects
from ..core.forward import is_in_forward_ad
from ..core.internals import (
    in_functorch,
    is_compiled,
    levels_of,
    only_autograd,
    own_levels_are_open,
    pytree,
    run_uncompiled,
    saved_tensors_unhooked,
)
from .vectors import Structure

__all__ = ["Unknown", "check_function", "listed", "watched"]


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
            tree: the result of a function.
            what: the name of the function in errors.
            like: tensors with the required shapes.

        Raises:
            ArgumentError: another structure, other shapes, or real instead of complex.
        """
        leaves, spec = pytree.tree_flatten(tree)
        if spec != self.spec:
            raise ArgumentError(f"{what}: expected a tree like its first argument, {self.spec}, got {spec}")
        for leaf, x in zip(leaves, like):
            if not isinstance(leaf, Tensor) or leaf.shape != x.shape or leaf.is_complex() != x.is_complex():
                kind = "complex" if x.is_complex() else "real"
                raise ArgumentError(f"{what}: expected a {kind} tensor of shape {list(x.shape)}, got {described(leaf)}")
        return leaves


def listed(function: Callable[..., Any], x: Unknown, parameters: Structure, what: str) -> Callable[..., list[Tensor]]:
    """``(xs, tensors) -> tensors`` for a function of pytrees whose result has the structure of ``x``."""

    def call(xs: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        return x.values(function(x.join(xs), *parameters.join(tensors)), what, xs)

    return call


def watched(users: Sequence[tuple[Callable[..., Any], str]], parameters: Sequence[Any]) -> list[Callable[..., Any]]:
    """The functions of the user, which raise if they read a tracked tensor that is not an argument.

    Args:
        users: the functions, with their names in errors.
        parameters: their last arguments. Objects among the leaves may have tensors.
    """
    others = [x for x in pytree.tree_leaves(parameters) if not isinstance(x, (Tensor, PLAIN))]
    reached: dict[int, Any] = {}
    known = suspects([*users, *[(x, type(x).__name__) for x in others]], reached)
    compiled = any(map(is_compiled, reached.values()))
    held = {i: (weakref.ref(x), name) for i, (x, name) in known.items()}  # weak: a derivative keeps the functions
    return [_watched(f, what, held, compiled) if held else f for f, what in users]


def _watched(function: Callable[..., Any], what: str, held: dict[int, Any], compiled: bool) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        given = {
            id(x) for x in pytree.tree_leaves(args)
        }  # the functions may also reach arguments, such as a module's parameters
        known = {i: (x, name) for i, (ref, name) in held.items() if (x := ref()) is not None and i not in given}
        with run_uncompiled(compiled), Watch(what, known, _advice(what), detached=False):
            return function(*args)

    return call


def _advice(what: str) -> str:
    return (
        f"Its derivative would be lost. Pass it as one of the parameters, the last arguments of {what}; for an nn.Module, pass "
        "dict(module.named_parameters()) and call torch.func.functional_call"
    )


def check_function(function: Callable[..., Any], what: str, xs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Call a function once, and raise if its result depends on a tensor that is no argument and that `watched` missed.

    Args:
        function: of lists of tensors.
        what: the name of the user's function in errors.
        xs: its first argument.
        tensors: the others.

    Raises:
        HiddenTensorError: the result is tracked, has a tangent or is batched, and no argument is.
    """
    if not torch.is_grad_enabled() and only_autograd() and not own_levels_are_open():
        return
    inputs = [x.detach() for x in (*xs, *tensors)]
    with saved_tensors_unhooked():  # hooks would prevent torch.func in the function
        results = function(inputs[: len(xs)], inputs[len(xs) :])
    known = {level for x in inputs for level in levels_of(x)[0]} if in_functorch() else set()
    for x in results:
        levels, tracked = levels_of(x)
        if tracked or levels - known or is_in_forward_ad(x):
            raise HiddenTensorError(
                f"{what} reads a tensor that requires grad, or that a transform follows, and that is not an argument. {_advice(what)}"
            )
