"""Cross entropy of a linear layer, by chunks of rows: two operators of torch.nn.functional.linear_cross_entropy.

With the logits $z = x W^T + b$, $s$ their softmax along a row, and $r_n$ the weight of the class of row $n$, divided by
the sum of all $r$ if the mean is taken, and zero if the class is ignored,

    cotangent of $z$, given that of the losses:  $G = g_n r_n (s - e_y)$,
    from which:                                $G W$ for $x$, $G^T x$ for $W$, and the sum of the rows of $G$ for $b$.

Since torch 2.15, the target may be a probability $p$ of each class instead: with a weight $w_c$ of each class, and
$1 / N$ for the mean,

    $G = g_n (s <w, p_n> - w p_n)$,               and $-g_n w log s$ for $p$.

PyTorch raises if such a target requires grad. Only its operator database has samples with such targets.

PyTorch computes the gradients in the forward and treats them as constants. They are used if no further derivative
follows.

Args:
    grad: cotangent of the loss, a number, or (N,) without reduction.
    input: $x$, (N, F), real.
    linear_weight: $W$, (C, F).
    linear_bias: $b$, (C,), or None.
    weight: the weights of the classes, (C,), or None for 1.
    reduction: "none", "mean" or "sum".
    ignore_index: the class that is ignored; it has no effect for probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import bound_to, exists, formula, parameters, rule

with suppress(ImportError):  # since torch 2.13; it registers the operators
    import torch.nn.modules.linear_cross_entropy

NAME = "torch_nn::_linear_cross_entropy_batch_chunked"


def _logit_gradient(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
) -> Tensor:
    """$r_n (s - e_y)$, or $s <w, p_n> - w p_n$, (N, C)."""
    z = torch.nn.functional.linear(x, linear_weight, linear_bias)
    if target.is_floating_point():
        p = _scaled(target, weight, reduction)
        return p.sum(1, keepdim=True) * z.softmax(1) - p
    counted = target != ignore_index
    y = torch.where(counted, target, 0)
    r = counted.to(z.dtype) if weight is None else torch.where(counted, weight.to(z.dtype)[y], 0)
    if reduction == "mean":
        r = r / r.sum()
    return r[:, None] * (z.softmax(1) - (y[:, None] == torch.arange(z.shape[1], device=z.device)).to(z.dtype))


def _scaled(x: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
    """Entries for classes, (N, C), times the weights of the classes, and times $1 / N$ for the mean."""
    x = x if weight is None else x * weight
    return x / x.shape[0] if reduction == "mean" else x


@formula
def linear_cross_entropy_target_backward(
    grad: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
) -> Tensor:
    """Cotangent of the probabilities $p$ of the classes, given that of the cross entropy: $-g_n w log s$.

    Returns:
        The shape of $p$, (N, C).

    References:
        torch.nn.modules.linear_cross_entropy, which raises.
    """
    losses = torch.nn.functional.linear(input, linear_weight, linear_bias).log_softmax(1)
    return -grad.reshape(-1, 1) * _scaled(losses, weight, reduction)


@formula
def linear_cross_entropy_backward(
    grad: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of $x, W, b$, given that of the cross entropy of $x W^T + b$: $G W$, $G^T x$, the sum of rows of $G$.

    Args:
        target: $y$, (N,), the classes; or $p$, (N, C), their probabilities.

    Returns:
        The shapes of $x$, $W$ and $b$.

    References:
        torch.nn.modules.linear_cross_entropy, whose results have no derivative.
    """
    G = grad.reshape(-1, 1) * _logit_gradient(
        input, linear_weight, target, linear_bias, weight, reduction, ignore_index
    )
    return G @ linear_weight, G.mT @ input, G.sum(0)


@formula
def linear_cross_entropy_jvp(
    input_p: Tensor,
    input_t: Tensor | None,
    linear_weight_p: Tensor,
    linear_weight_t: Tensor | None,
    target_p: Tensor,
    target_t: Tensor | None,
    linear_bias_p: Tensor | None,
    linear_bias_t: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
) -> Tensor:
    """Tangent of the cross entropy of $z = x W^T + b$: $<r_n (s - e_y), dz>$, with $dz = dx W^T + x dW^T + db$.

    With probabilities of the classes, $<s <w, p> - w p, dz> - <w log s, dp>$.

    Args:
        input_p, linear_weight_p, linear_bias_p: $x$, (N, F), $W$, (C, F), and $b$, (C,), or None.
        input_t, linear_weight_t, linear_bias_t: their tangents; None for zero.
        target_p: $y$, (N,), the classes; or $p$, (N, C), their probabilities.
        target_t: the tangent of $p$, or None.

    Returns:
        A number, or (N,) without reduction.

    References:
        The transpose of torch.nn.modules.linear_cross_entropy.
    """
    G = _logit_gradient(input_p, linear_weight_p, target_p, linear_bias_p, weight, reduction, ignore_index)
    found = torch.zeros_like(G)
    if input_t is not None:
        found = found + input_t @ linear_weight_p.mT
    if linear_weight_t is not None:
        found = found + input_p @ linear_weight_t.mT
    if linear_bias_t is not None:
        found = found + linear_bias_t
    found = G * found
    if target_t is not None:
        losses = torch.nn.functional.linear(input_p, linear_weight_p, linear_bias_p).log_softmax(1)
        found = found - target_t * _scaled(losses, weight, reduction)
    return found.sum(1) if reduction == "none" else found.sum()


def _vjp(
    grad: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    output_mask: Sequence[bool],
    *known: Tensor,
) -> Any:
    """The gradients that are wanted; ``known`` are those of a loss whose cotangent is 1, or tensors of other shapes."""
    at = (input, linear_weight, linear_bias)
    computed = known and all(x is not None and k.shape == x.shape for k, x, yes in zip(known, at, output_mask) if yes)
    if computed and not torch.is_grad_enabled():
        found: Sequence[Tensor] = [k * grad for k in known]
    else:
        found = linear_cross_entropy_backward(
            grad, input, linear_weight, target, linear_bias, weight, reduction, ignore_index
        )
    return tuple(f.to(x.dtype) if yes and x is not None else None for f, x, yes in zip(found, at, output_mask))


def _target_vjp(target: Tensor, *given: Any) -> Tensor | None:
    return linear_cross_entropy_target_backward(*given) if target.is_floating_point() else None


def _of_each(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """``function`` for the operator without reduction."""
    at = names.index("reduction")
    return bound_to(lambda *given: function(*given[:at], "none", *given[at:]), [*names[:at], *names[at + 1 :]])


if exists(NAME):
    _inputs_of_rule = ("input", "linear_weight", "linear_bias")
    _cotangents = ("result1", "result2", "result3")
    _asked = [*parameters(linear_cross_entropy_backward), "output_mask"]
    _asked_for_target = ["target", *parameters(linear_cross_entropy_target_backward)]
    _about: dict[str, Any] = {
        "improves": ("values", "missing"),
        "source": "torch.nn.modules.linear_cross_entropy; its derivatives are new",
    }
    rule(
        NAME,
        vjp={
            _inputs_of_rule: bound_to(_vjp, ["grad_result0", *_asked[1:], "result1", "result2", "result3"]),
            "target": bound_to(_target_vjp, ["target", "grad_result0", *_asked_for_target[2:]]),
        },
        jvp={"result0": linear_cross_entropy_jvp},
        not_differentiable=("result1", "result2", "result3"),
        **_about,
    )
    rule(
        f"{NAME}_no_reduction",
        vjp={_inputs_of_rule: _of_each(_vjp, _asked), "target": _of_each(_target_vjp, _asked_for_target)},
        jvp={"result": _of_each(linear_cross_entropy_jvp, parameters(linear_cross_entropy_jvp))},
        **_about,
    )
