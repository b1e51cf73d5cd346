"""Nested tensors: their structure, and how to make them from it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "JaggedStructure",
    "dual_jagged",
    "is_nested_int",
    "is_plain_jagged",
    "jagged_dim",
    "jagged_nested",
    "jagged_of_duals",
    "jagged_result",
    "jagged_structure",
    "jagged_view",
    "known_lengths",
    "longest_known",
    "nested_strides",
    "replace_jagged_attention",
    "strided_nested",
    "traced_nested_int",
]


def jagged_dim(nested: Any) -> int:
    """The ragged dim of a jagged nested tensor."""
    return int(nested._ragged_idx)


class JaggedStructure(NamedTuple):
    """The structure of a jagged nested tensor: everything but its buffer.

    PyTorch's size of the ragged dim, a nested int, belongs to the tensor ``lengths``, or else ``offsets``: to the
    object, not its contents. ``known`` is the tensor's own dict, which PyTorch passes on, so that later entries are
    shared.
    """

    offsets: Tensor
    lengths: Tensor | None  # present if some places in the buffer belong to no component
    dim: int  # the ragged dim
    known: dict[str, Tensor]  # the shortest and the longest length, as sizes of empty tensors, once they are known


def jagged_structure(nested: Any) -> JaggedStructure:
    """The structure of a jagged nested tensor."""
    return JaggedStructure(nested._offsets, nested._lengths, int(nested._ragged_idx), nested._metadata_cache)


def is_plain_jagged(x: Any) -> bool:
    """Whether ``x`` has PyTorch's own class of jagged nested tensors, without a tangent or tracer."""
    return type(x) is _classes()[0]


def known_lengths(min_seqlen: Tensor | None, max_seqlen: Tensor | None) -> dict[str, Tensor]:
    """`JaggedStructure.known`, from PyTorch's two arguments."""
    found = {"min_seqlen": min_seqlen, "max_seqlen": max_seqlen}
    return {name: n for name, n in found.items() if n is not None}


def longest_known(structure: JaggedStructure) -> Any:
    """The longest length, a number or, in a graph, a symbol; None if it is not known."""
    found = structure.known.get("max_seqlen")
    return None if found is None else found.shape[0]


def is_nested_int(x: Any) -> bool:
    """Whether ``x`` is the size of a ragged dim, which is not a number."""
    return isinstance(x, torch.SymInt) and x.node.is_nested_int()


def traced_nested_int(offsets: Tensor) -> Any:
    """In a graph, PyTorch's size of the ragged dim of ``offsets``; None if it has none yet."""
    # here: for graphs only
    from torch._subclasses.functional_tensor import mb_unwrap_functional_tensor

    return getattr(mb_unwrap_functional_tensor(offsets), "nested_int_memo", None)


def _with_memory(values: Tensor) -> Tensor:
    """The buffer, allocated if it is one of autograd's zeros without memory: PyTorch's nested tensors would read its memory."""
    return values.clone() if values._is_zerotensor() else values


def jagged_nested(values: Tensor, structure: JaggedStructure) -> Any:
    """The jagged nested tensor with this buffer, without a history; it shares its memory."""
    made: Any = _classes()[0](_with_memory(values.detach()), **_arguments(structure))
    made._metadata_cache = structure.known  # PyTorch's class would replace an empty dict
    return made


def jagged_view(values: Tensor, structure: JaggedStructure) -> Any:
    """The jagged nested tensor as PyTorch's own view of this buffer: autograd sees writes to either in the other.

    PyTorch's backward of the view is differentiable once.
    """
    # here: the module is imported with the first jagged tensor, and takes long
    from torch.nested._internal.nested_tensor import _nt_view_dummy

    known = [structure.known.get(name) for name in ("min_seqlen", "max_seqlen")]
    made: Any = torch._nested_view_from_jagged(
        _with_memory(values), structure.offsets, _nt_view_dummy(), structure.lengths, structure.dim, *known
    )
    made._metadata_cache = structure.known
    return made


def jagged_result(values: Tensor, structure: JaggedStructure) -> Any:
    """`jagged_nested` that also shares the version counter, for a buffer that autograd may have saved."""
    made = jagged_view(values.detach(), structure).detach()
    made._metadata_cache = structure.known
    return made


def dual_jagged(nested: Any) -> Tensor | None:
    """The buffer, with its tangent, of a result of `jagged_of_duals`; None for another nested tensor."""
    return nested._values if hasattr(nested, "carries_tangents") else None


def jagged_of_duals(values: Tensor, structure: JaggedStructure) -> Any:
    """A jagged nested tensor whose buffer is a dual tensor, for functions that read it by `dual_jagged`.

    PyTorch's class computes on its buffer below autograd, where a tangent is silently lost: a call that gets there,
    because no such function intercepts it, raises RuntimeError.
    """
    return _classes()[1](_with_memory(values), **_arguments(structure))


def _arguments(structure: JaggedStructure) -> dict[str, Any]:
    offsets, lengths, dim, known = structure
    return {"offsets": offsets, "lengths": lengths, "_ragged_idx": dim, "_metadata_cache": known}


@functools.cache
def _classes() -> tuple[Any, Any]:
    """PyTorch's class of jagged nested tensors, and our class of those with a tangent."""
    # here: the module is imported with the first jagged tensor, and takes long
    from torch.nested._internal.nested_tensor import NestedTensor

    jagged: Any = NestedTensor

    class DualJagged(jagged):  # type: ignore[misc]
        carries_tangents = True

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any("Tensor" in str(r.type) for r in func._schema.returns):
                raise RuntimeError(
                    f"{func}: the tangent of a jagged nested tensor goes through the operators of torch_manualgrad.nested "
                    "only, and this is not one of them"
                )
            return super().__torch_dispatch__(func, types, args, kwargs)

    return jagged, DualJagged


def nested_strides(nested: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sizes (B, D), strides (B, D) and starts (B,) of a strided nested tensor's components in its ``values()``; on the CPU."""
    return nested._nested_tensor_size(), nested._nested_tensor_strides(), nested._nested_tensor_storage_offsets()


def strided_nested(buffer: Tensor, sizes: Tensor, strides: Tensor, starts: Tensor) -> Tensor:
    """A strided nested tensor as a view of a flat buffer, differentiable; the others are int64 and on the CPU."""
    return torch._nested_view_from_buffer(_with_memory(buffer), sizes, strides, starts)


def replace_jagged_attention(function: Callable[..., Any], acts: Callable[[], bool], yes: bool) -> None:
    """Replace scaled_dot_product_attention on jagged tensors, which never becomes an aten call, by ``function``.

    If ``acts()``, it receives PyTorch's own function as its first argument. ``yes=False`` undoes this.
    """
    # here: the module is imported with the first jagged tensor, and takes long
    from torch.nested._internal import ops as module

    ops: Any = module
    now = ops.jagged_scaled_dot_product_attention
    own = getattr(now, "manualgrad_own", now)
    if not yes:
        ops.jagged_scaled_dot_product_attention = own
        return

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return function(own, *args, **kwargs) if acts() else own(*args, **kwargs)

    chosen.manualgrad_own = own  # type: ignore[attr-defined]
    ops.jagged_scaled_dot_product_attention = chosen
