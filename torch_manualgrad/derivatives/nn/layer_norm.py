"""Layer normalization: native_layer_norm and its backward. The mathematics is in `normalization`.

The mean and the rstd that the operators return are constants to every derivative, as in PyTorch; the formulas
differentiate functions of the input. Plain calls in reverse mode are left to PyTorch, whose first order is right; the
rule of the backward operator has the higher orders.

Args:
    grad_out: $g$, the shape of ``input``.
    input, input_p: $x$, (*rows, *normalized_shape), real.
    normalized_shape: the sizes of the last dims.
    mean, rstd: as native_layer_norm returns them, (*rows, 1, ..., 1); in further derivatives they are functions
        of ``input``.
    weight, weight_p: $w$, of shape ``normalized_shape``, or None for 1.
    grad_out_t, input_t, weight_t, bias_t: tangents; None for zero.

Note:
    Where not differentiable: with $eps = 0$, where all entries are equal. The result is nan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import always, formula, rule

from .normalization import (
    last_dims,
    norm_backward,
    norm_backward_jvp,
    norm_double_backward,
    norm_jvp,
    other_dims,
    standardized,
    standardized_by,
    wide,
    widened,
)


@formula(kernel=("default",), batched=True)
def native_layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of input, weight and bias, given that of layer_norm: $P(g w)$, $sum g x^$, $sum g$.

    Args:
        bias: only its dtype is used; or None.
        output_mask: which of the three are wanted; the others are returned empty.

    Returns:
        The gradients, contiguous, of the shape of ``input`` and twice of ``normalized_shape``.

    References:
        ATen native_layer_norm_backward; Ba, Kiros, Hinton, Layer Normalization, arXiv:1607.06450.
    """
    s = standardized_by(input, last_dims(normalized_shape), rstd)
    found = norm_backward(s, wide(grad_out), *widened(weight), summed=other_dims(input, normalized_shape))
    like = input if weight is None else weight
    dtypes = (input.dtype, like.dtype, like.dtype if bias is None else bias.dtype)
    return tuple(  # type: ignore[return-value]
        f.to(d).contiguous() if yes else input.new_empty(0) for f, d, yes in zip(found, dtypes, output_mask)
    )


@native_layer_norm_backward.impl("default")
def _(*given: Any) -> tuple[Tensor, ...]:
    grad, input, shape, mean, rstd, weight, bias, output_mask = given
    if (weight is None and output_mask[1]) or (bias is None and output_mask[2]):
        return native_layer_norm_backward.reference(*given)  # PyTorch's kernel returns no tensor for these
    # PyTorch's kernel assumes that the statistics are contiguous
    found = torch.ops.aten.native_layer_norm_backward(
        grad, input, shape, mean.contiguous(), rstd.contiguous(), weight, bias, output_mask
    )
    return tuple(f.contiguous() if yes else input.new_empty(0) for f, yes in zip(found, output_mask))


@formula
def layer_norm_double_backward(
    input_t: Tensor,
    gamma: Tensor | None,
    ggI: Tensor | None,
    ggG: Tensor | None,
    ggB: Tensor | None,
    gO_t: Tensor,
    save_mean_t: Tensor,
    save_invstd_t: Tensor,
    normalized_shape: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of input, weight and grad_out of the backward, given those of its three results.

    Args:
        input_t: $x$, (*, *normalized_shape), real.
        gamma: the weight, of shape ``normalized_shape``, or None.
        ggI, ggG, ggB: cotangents of the gradients of input, weight and bias; None for zero.
        gO_t: the cotangent of layer_norm that the backward was given, the shape of $x$.
        save_mean_t, save_invstd_t: as native_layer_norm returns them; functions of $x$ here.

    Returns:
        The shapes of $x$, of ``normalized_shape``, and of $x$.

    References:
        ATen layer_norm_double_backward, which treats the statistics as constants.
    """
    s = standardized_by(input_t, last_dims(normalized_shape), save_invstd_t)
    others = other_dims(input_t, normalized_shape)
    of_x, of_weight, of_g = norm_double_backward(s, *widened(gO_t, gamma, ggI, ggG, ggB), summed=others)
    like = input_t if gamma is None else gamma
    return of_x.to(input_t.dtype), of_weight.to(like.dtype), of_g.to(gO_t.dtype)


@formula
def layer_norm_backward_jvp(
    grad_out: Tensor,
    grad_out_t: Tensor | None,
    input: Tensor,
    input_t: Tensor | None,
    weight: Tensor | None,
    weight_t: Tensor | None,
    normalized_shape: Sequence[int],
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tangents of the three results of the backward of layer_norm.

    Returns:
        The shape of ``input``, and twice ``normalized_shape``.

    References:
        The transpose of ATen layer_norm_double_backward.
    """
    s = standardized_by(input, last_dims(normalized_shape), rstd)
    given = widened(grad_out, weight, grad_out_t, input_t, weight_t)
    of_x, of_weight, of_bias = norm_backward_jvp(s, *given, summed=other_dims(input, normalized_shape))
    like = input if weight is None else weight
    return of_x.to(input.dtype), of_weight.to(like.dtype), of_bias.to(like.dtype)


def _wanted(mask: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    return [value if yes else None for value, yes in zip(values, mask)]


@native_layer_norm_backward.impl_backward
def _(ctx: Any, inputs: Any, *grads: Tensor | None) -> dict[str, Tensor | None]:
    x, weight, g, shape = inputs.input, inputs.weight, inputs.grad_out, inputs.normalized_shape
    given = _wanted(inputs.output_mask, grads)
    of: list[Tensor | None] = [None, None, None]
    if any(v is not None for v in given):
        of = [*layer_norm_double_backward(x, weight, *given, g, inputs.mean, inputs.rstd, shape)]
    of_weight = None if weight is None else of[1]
    return {"grad_out": of[2], "input": of[0], "mean": None, "rstd": None, "weight": of_weight, "bias": None}


@native_layer_norm_backward.impl_jvp
def _(inputs: Any, output: Any, tangents: Any) -> list[Tensor | None]:
    given = (inputs.grad_out, tangents.grad_out, inputs.input, tangents.input, inputs.weight, tangents.weight)
    found = layer_norm_backward_jvp(*given, inputs.normalized_shape, inputs.rstd)
    return _wanted(inputs.output_mask, found)


@formula
def layer_norm_jvp(
    input_p: Tensor,
    input_t: Tensor | None,
    weight_p: Tensor | None,
    weight_t: Tensor | None,
    bias_t: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float,
) -> Tensor:
    """Tangent of layer_norm: $(P dx) w + x^ dw + db$.

    Args:
        eps: added to the variance.

    Returns:
        The shape of $x$.

    References:
        ATen layer_norm_jvp, which treats the statistics as constants.
    """
    s = standardized(input_p, last_dims(normalized_shape), eps)
    return norm_jvp(s, *widened(input_t, weight_p, weight_t, bias_t)).to(input_p.dtype)


def _vjp(
    grad_result0: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    result1: Tensor,
    result2: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    # if no further derivative follows, PyTorch's own backward is called, which the compiler fuses
    again = torch.is_grad_enabled()
    backward = native_layer_norm_backward if again else torch.ops.aten.native_layer_norm_backward
    return backward(grad_result0, input, normalized_shape, result1, result2, weight, bias, output_mask)


# -- the rules --------------------------------------------------------------------------------------------------------


rule(
    "aten::native_layer_norm",
    vjp={("input", "weight", "bias"): _vjp},
    jvp={"result0": layer_norm_jvp},
    not_differentiable=("result1", "result2"),
    defer_to_stock=always,
    improves="values",
    source="ATen native_layer_norm_backward, layer_norm_jvp; Ba, Kiros, Hinton, Layer Normalization, arXiv:1607.06450",
)
rule(
    "aten::native_layer_norm_backward",
    vjp={
        ("input", "weight", "grad_out"): layer_norm_double_backward.bind(
            input_t="input",
            gamma="weight",
            ggI="grad_result0",
            ggG="grad_result1",
            ggB="grad_result2",
            gO_t="grad_out",
            save_mean_t="mean",
            save_invstd_t="rstd",
        ),
        ("mean", "rstd", "bias"): lambda: (None, None, None),
    },
    jvp={("result0", "result1", "result2"): layer_norm_backward_jvp},
    improves="values",
    source="ATen layer_norm_double_backward",
)
