"""Operators whose derivative is written in terms of the same operators, so that every order is exact.

Such an operator takes a matrix and its decomposition, which is computed once and without history. Its values are
computed from the decomposition, and its derivatives are derivatives with respect to the matrix. No derivative passes
through singular vectors or eigenvectors, which have none at degenerate values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula


def smooth(
    *,
    vjp: Callable[..., dict[str, Tensor]],
    jvp: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    requires: Callable[..., str] | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Make a function an opaque formula with these derivatives; the decorated name is its operator.

    All tensors of a call have the same number of leading batch dims, which broadcast: vmap adds one to each.

    Args:
        vjp: ``(needed, inputs, output, *grads) -> {input: gradient}``; inputs that are missing there are constants.
            ``needed`` tells for each input whether its gradient is needed. A gradient may have the batch dims of the
            output: it is then summed to the shape of its input.
        jvp: ``(inputs, output, tangents) -> tangent``, or a tuple of them; a missing tangent is None.
        fake: computes the outputs' shapes; None to use the function itself.
        requires: as in `formula`.

    Returns:
        The decorator.
    """

    def define(function: Callable[..., Any]) -> Any:
        made = formula(kernel=("default",), requires=requires)(function)
        names = made.signature.tensor_names

        @made.impl_save_for_backward
        def save(inputs: Any, output: Any) -> Any:
            return inputs, output

        @made.impl_backward
        def backward(ctx: Any, saved: Any, *grads: Tensor | None) -> dict[str, Tensor | None]:
            inputs, output = saved
            found = vjp(ctx.needs_input_grad, inputs, output, *grads)
            return {n: found[n].sum_to_size(getattr(inputs, n).shape) if n in found else None for n in names}

        made.impl_jvp(jvp)

        @made.impl_vmap
        def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
            front = [_to_front(x, d) for x, d in zip(args, in_dims)]
            return made.op(*front), 0 if len(made.signature.returns) == 1 else (0,) * len(made.signature.returns)

        if fake is not None:
            made.impl_fake(fake)
        return made.op  # not the formula: the compiler recognizes an operator

    return define


def _to_front(x: Any, dim: int | None) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.unsqueeze(0) if dim is None else x.movedim(dim, 0)


def with_direction(E: Tensor, direction: Tensor) -> Tensor:
    """$E$ with one more direction, after those stacked in dim $-3$."""
    direction = direction.unsqueeze(-3)
    batch = torch.broadcast_shapes(E.shape[:-3], direction.shape[:-3])
    return torch.cat([x.expand(*batch, *x.shape[-3:]) for x in (E, direction)], -3)


def replaced(E: Tensor, slot: int, direction: Tensor) -> Tensor:
    """The directions with one replaced. The new one comes last: the order of directions does not matter."""
    return with_direction(torch.cat([E[..., :slot, :, :], E[..., slot + 1 :, :, :]], -3), direction)


def hermitian(X: Tensor) -> Tensor:
    """$(X + X^H) / 2$."""
    return (X + X.mH) / 2


def svd(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """$W$, $S$ and $V$ with $A = W diag(S) V^H$, reduced and without history."""
    W, S, Vh = torch.linalg.svd(A.detach(), full_matrices=False)
    return W, S, Vh.mH
