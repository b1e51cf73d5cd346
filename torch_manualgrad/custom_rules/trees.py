"""Converts between pytrees and the tensors of a program, and checks the results of the user's functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from ..arguments import ArgumentError, described
from ..core.captures import PLAIN, reachable
from ..core.internals import memory_of, pytree, value_of
from ..core.schema import is_differentiable
from ..programs.operator import is_smooth

__all__ = ["Kept", "Tree", "check_leaf", "distinct", "matching_tree", "of_structure", "result_tree"]


class Tree:
    """A pytree whose tensors are stored elsewhere.

    Args:
        tree: the pytree.
    """

    def __init__(self, tree: Any) -> None:
        self.leaves, self.spec = pytree.tree_flatten(tree)
        self.is_tensor = [isinstance(x, Tensor) for x in self.leaves]
        self.tensors: list[Tensor] = [x for x in self.leaves if isinstance(x, Tensor)]
        self._constants = [None if isinstance(x, Tensor) else x for x in self.leaves]

    def release(self) -> None:
        """Keep the tensors no longer."""
        self.leaves, self.tensors = [], []

    def join(self, tensors: Sequence[Any]) -> Any:
        """The pytree with these tensors."""
        return self.filled(tensors, self._constants)

    def filled(self, tensors: Sequence[Any], others: Sequence[Any]) -> Any:
        """The pytree with these tensors; other leaves are taken from ``others``."""
        given = iter(tensors)
        leaves = [next(given) if yes else other for yes, other in zip(self.is_tensor, others)]
        return pytree.tree_unflatten(leaves, self.spec)

    def tangents(self, tensors: Sequence[Tensor | None]) -> Any:
        """Tangents as a pytree: those of floats and complex numbers are zero, of other leaves None."""
        others = [0.0 if type(c) in (float, complex) else None for c in self._constants]
        return self.filled(tensors, others)


class Kept:
    """The residuals of a ``fwd``: a pytree of inputs, results, and other tensors, its own.

    Args:
        tree: the residuals.
        inputs: the tensors of the call.
        results: the first results of ``fwd``.
    """

    def __init__(self, tree: Any, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        self._tree = Tree(tree)
        places = {id(x): ("result", i) for i, x in enumerate(results)}
        places |= {id(x): ("input", i) for i, x in enumerate(inputs)}
        self.own: list[Tensor] = []
        self._where: list[tuple[str, int]] = []
        for x in self._tree.tensors:
            if id(x) not in places:
                places[id(x)] = ("own", len(self.own))
                self.own.append(x)
            self._where.append(places[id(x)])
        self._tree.release()

    def release(self) -> None:
        """Keep the tensors no longer."""
        self.own = []

    def read(self, kind: str) -> list[int]:
        """The places of the inputs, or of the results, that are residuals."""
        return sorted({i for k, i in self._where if k == kind})

    def join(self, inputs: Sequence[Any], results: Sequence[Any], own: Sequence[Any]) -> Any:
        """The residuals, from tensors at their places."""
        found = {"input": inputs, "result": results, "own": own}
        return self._tree.join([found[kind][i] for kind, i in self._where])


def result_tree(out: Any, what: str) -> Tree:
    """The pytree returned by a function of the user.

    Args:
        out: the result.
        what: the function in errors.

    Raises:
        TypeError: a leaf is not a tensor, but has one as an attribute or item, whose derivative would be lost.
    """
    tree = Tree(out)
    for leaf, yes in zip(tree.leaves, tree.is_tensor):
        if yes or isinstance(leaf, PLAIN) or isinstance(leaf, Module):
            continue
        name, x = next(reachable(leaf, type(leaf).__name__), ("", None))
        if x is not None:
            raise TypeError(
                f"the result of {what}: expected tensors, and tuples, lists and dictionaries of these, got {described(leaf)}, "
                f"whose {name} would lose its derivative; return the tensors, or register {type(leaf).__name__} with "
                "torch.utils._pytree.register_pytree_node, or register_dataclass"
            )
    return tree


def distinct(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results, detached. One that shares memory with an input, or with another result, is copied."""
    taken = {memory_of(value_of(x)) for x in inputs}
    made = []
    for x in results:
        x = x.detach().resolve_conj().resolve_neg()
        memory = memory_of(value_of(x))
        if memory is not None and memory in taken:
            x = x.clone()
        taken.add(memory)
        made.append(x)
    return made


def of_structure(tree: Any, spec: Any, what: str) -> list[Any]:
    """The leaves of a tree, which must have the given structure. None instead of a part stands for None leaves.

    Args:
        tree: the result of the user's function.
        spec: the structure.
        what: the tree in errors.

    Raises:
        ArgumentError: it has another structure.
    """
    return _matched(tree, spec, what, spec)


def _matched(tree: Any, spec: Any, what: str, whole: Any) -> list[Any]:
    if tree is None:
        return [None] * spec.num_leaves
    if spec.is_leaf():
        return [tree]
    children, own = pytree.tree_flatten(tree, is_leaf=lambda x: x is not tree)
    if own.type is not spec.type or own.context != spec.context or len(children) != spec.num_children:
        raise ArgumentError(f"{what}: expected the structure {_written(whole)}, got {described(tree)}")
    return [leaf for child, s in zip(children, spec.children()) for leaf in _matched(child, s, what, whole)]


def _written(spec: Any) -> str:
    """A structure with * for each leaf."""

    class Star:
        def __repr__(self) -> str:
            return "*"

    return repr(pytree.tree_unflatten([Star()] * spec.num_leaves, spec))


def matching_tree(tree: Any, expected: Tree, what: str) -> Tree:
    """A tree, which must have the structure of another.

    Raises:
        ArgumentError: it has another structure.
    """
    found = Tree(tree)
    if found.spec != expected.spec:
        raise ArgumentError(f"{what}: expected the structure {_written(expected.spec)}, got {_written(found.spec)}")
    return found


def check_leaf(leaf: Any, like: Any, what: str) -> Tensor | None:
    """A cotangent or tangent, in the dtype of its primal; None is zero.

    Args:
        leaf: a leaf of the result of the user's function.
        like: the primal, or something with its shape and dtype.
        what: the leaf in errors.

    Raises:
        ArgumentError: it is not a tensor, has another shape, or is complex although the primal is real.
    """
    if leaf is None or not is_smooth(like):
        return None
    if isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool) and leaf == 0:
        return None
    if not isinstance(leaf, Tensor) or tuple(leaf.shape) != tuple(like.shape):
        raise ArgumentError(f"{what}: expected None or a tensor of shape {list(like.shape)}, got {described(leaf)}")
    if not is_differentiable(leaf):
        raise ArgumentError(f"{what}: expected a floating point or complex tensor, got {described(leaf)}")
    if leaf.is_complex() and not like.dtype.is_complex:
        raise ArgumentError(f"{what}: expected a real tensor, as the primal is real, got {described(leaf)}")
    return leaf if leaf.dtype == like.dtype else leaf.to(like.dtype)
