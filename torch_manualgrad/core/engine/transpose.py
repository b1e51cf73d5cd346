"""The jvp of a vjp, by transposition."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ...arguments import explain
from ..internals import fresh_variable, transforms_usable, unattached
from ..libraries import calls_library
from ..schema import is_differentiable, tensors_in
from .derivative import Derivative

__all__ = ["Transposed", "differentiating_backward", "transposed_jvp", "transposing"]


def transposed_jvp(
    derivative: Derivative, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]
) -> list[Any]:
    """The jvp that is the transpose of a vjp.

    ``v -> vjp(v)`` is linear, so its own vjp, at the tangents, is the jvp: two reverse passes, exact, and
    differentiable again. It uses plain autograd at this level, not torch.func.vjp: functorch is in the middle of this
    call.

    Args:
        derivative: with the vjp.
        inputs: the primals.
        outputs: the results of the operator.
        tangents: of the inputs; None for zero.

    Returns:
        The tangents of the outputs; None for zero.

    Raises:
        RuntimeError: the backward returns a gradient that autograd cannot trace back to the cotangent.
    """
    signature = derivative.signature
    cotangents: list[Any] = []
    for output, yes in zip(outputs, derivative.differentiable):
        one = [fresh_variable(o) if yes and is_differentiable(o) else None for o in tensors_in([output])]
        cotangents.append(one if isinstance(output, (list, tuple)) else one[0] if one else None)
    needed = [[t is not None for t in ts] if isinstance(ts, list) else ts is not None for ts in tangents]
    variables = [v for v in _leaves(cotangents) if v is not None]
    with torch.enable_grad(), _transposing(), transforms_usable() if derivative.foreign else nullcontext():
        tensors, static = derivative.residuals(inputs, outputs)
        try:
            grads = derivative.vjp(needed, tensors, static, cotangents)
        except Exception as error:
            text = f"{signature.name} has no jvp, and this was raised while one was derived from its backward."
            explain(error, f"{text} Register a jvp, or write the backward in differentiable operations.")
            raise
        pairs = []
        for name, grad, tangent in zip(signature.names, grads, tangents):
            grad = [None] * len(tangent) if grad is None and isinstance(tangent, list) else grad
            for g, t in zip(_leaves([grad]), _leaves([tangent])):
                if g is None or t is None:
                    continue
                if not g.requires_grad:
                    raise RuntimeError(
                        f"{signature.name}: no jvp is registered, and none can be derived from its backward: the "
                        f"gradient that it returns for '{name}' does not depend differentiably on the cotangent. "
                        "Register a jvp, write the backward in differentiable operations, or return None for a "
                        "gradient that is zero."
                    )
                if t.is_complex() and not g.is_complex():  # the engine casts a real gradient of a complex input
                    g = g.to(t.dtype)
                # batching broadcasts only some inputs: the engine would sum the gradient to the shape of its input
                pairs.append((g if g.shape == t.shape else g.sum_to_size(t.shape), t))
        if not pairs or not variables:
            return [[None] * len(c) if isinstance(c, list) else None for c in cotangents]
        with differentiating_backward(signature.name):
            found: Sequence[Any] = torch.autograd.grad(
                [g for g, _ in pairs], variables, [t for _, t in pairs], create_graph=True, allow_unused=True
            )
    if not any(x.requires_grad for x in tensors_in((*inputs, *tangents))):
        # no input is tracked at this level, and so no tangent is; the variables that the backward went through are
        found = [None if t is None else unattached(t) for t in found]
    results = iter(found)
    return [
        [None if v is None else next(results) for v in c]
        if isinstance(c, list)
        else None
        if c is None
        else next(results)
        for c in cotangents
    ]


class Transposed(Derivative):
    """A derivative whose jvp is derived from its vjp, unless it has its own."""

    def jvp(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        return transposed_jvp(self, inputs, outputs, tangents)


@contextmanager
def differentiating_backward(name: str) -> Iterator[None]:
    """Explain errors: the backward of the operator ``name`` has no derivative."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        explain(
            error,
            f"{name} has no forward mode of its own, and none can be derived from its backward, which is not differentiable. "
            "Register a jvp, or a decomposition: mg.forward_ad.register_decomposition.",
        )
        raise


_here = threading.local()


@contextmanager
def _transposing() -> Iterator[None]:
    before, _here.transposing = transposing(), True
    if calls_library is not None:
        calls_library.manualgrad_calls_transpose(ctypes.c_int64(1))
    try:
        yield
    finally:
        _here.transposing = before
        if calls_library is not None:
            calls_library.manualgrad_calls_transpose(ctypes.c_int64(-1))


def transposing() -> bool:
    """Whether a backward is tracked by autograd on this thread in order to be transposed."""
    return getattr(_here, "transposing", False)


def _leaves(values: Sequence[Any]) -> list[Any]:
    return [leaf for value in values for leaf in (value if isinstance(value, (list, tuple)) else [value])]
