"""Convolution and its backward operator.

With $x * w$ the convolution of an input and a weight, of any stride, padding, dilation, groups, transposed or not,
$<g, x * w>$ is linear in each of the three tensors. Write $X(g, w)$ and $W(g, x)$ for its gradients in $x$ and $w$, and $B(g)$
for the sum of $g$, the gradient of the bias. One operator, convolution_backward, returns all three. Then

    vjp of the convolution    $X(g, w)$, $W(g, x)$, $B(g)$
    its jvp                   $dx * w + x * dw + db$
    vjp of the backward, for cotangents $a$, $b$, $c$ of its results
                              in $g$: $a * w + x * b + c$,  in $x$: $X(g, b)$,  in $w$: $W(g, a)$
    its jvp                   $X(dg, w) + X(g, dw)$, $W(dg, x) + W(g, dx)$, $B(dg)$.

PyTorch splits a convolution of complex tensors into real ones before autograd sees it.

Operators that are a convolution under another name get their rules from `convolution_like` and `backward_like`. On the CPU,
some convolutions have their own kernel. PyTorch calls most of these below aten::convolution, where autograd does not
see them. Called by their own names, they have no forward mode in PyTorch, and plain calls in reverse mode are left to
PyTorch. The dims of conv_tbc are time, batch, channels.

Args:
    input_p: $x$, (N, C, *).
    input_t: its tangent; None for zero.
    weight_p: $w$, (D, C / groups, *), or (C, D / groups, *) if transposed.
    weight_t: its tangent; None for zero.
    bias_p: (D,), or None; its tangent does not depend on it.
    bias_t: tangent of the bias; None for zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import ByMetadata, Rule, always, bound_to, formula, operator, rule

from ..terms import total

_aten = torch.ops.aten
_ARGUMENTS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


@formula
def convolution_jvp(
    input_p: Tensor,
    input_t: Tensor | None,
    weight_p: Tensor,
    weight_t: Tensor | None,
    bias_p: Tensor | None,
    bias_t: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Tangent of a convolution with a bias: $dx * w + x * dw + db$.

    Args:
        stride, padding, dilation, transposed, output_padding, groups: of aten::convolution.

    Returns:
        The shape of the result.
    """
    rest = (stride, padding, dilation, transposed, output_padding, groups)
    if input_t is None:
        x = torch.zeros_like(input_p) if weight_t is None else input_p
        return _aten.convolution(x, weight_p if weight_t is None else weight_t, bias_t, *rest)
    found = _aten.convolution(input_t, weight_p, bias_t, *rest)
    return found if weight_t is None else found + _aten.convolution(input_p, weight_t, None, *rest)


@formula
def _convolution_jvp(
    input_p: Tensor,
    input_t: Tensor | None,
    weight_p: Tensor,
    weight_t: Tensor | None,
    bias_p: Tensor | None,
    bias_t: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    benchmark: bool,
    deterministic: bool,
    cudnn_enabled: bool,
    allow_tf32: bool,
) -> Tensor:
    """Tangent of a convolution with a bias, with the caller's options for cuDNN.

    Args:
        stride, padding, dilation, transposed, output_padding, groups: of aten::_convolution.
        benchmark, deterministic, cudnn_enabled, allow_tf32: of aten::_convolution. The global settings are used instead, as
            in its backward.

    Returns:
        The shape of the result.
    """
    tensors = (input_p, input_t, weight_p, weight_t, bias_p, bias_t)
    return convolution_jvp(*tensors, stride, padding, dilation, transposed, output_padding, groups)


@formula
def convolution_backward_jvp_grad_bias(grad_out_t: Tensor, grad_bias: Tensor) -> Tensor:
    """Tangent of the gradient of the bias: the sum of $dg$ over all dims except the channels.

    Args:
        grad_out_t: $dg$, (N, D, *).
        grad_bias: the gradient of the bias, (D,); its tangent does not depend on it.

    Returns:
        (D,).
    """
    return _summed(grad_out_t)


def _summed(grad: Tensor) -> Tensor:
    return grad.sum([d for d in range(grad.dim()) if d != 1])


def _arguments(about: dict[str, Any]) -> tuple[list[str], Callable[[Sequence[Any]], list[Any]]]:
    """The arguments of aten::convolution that an operator has, and a function from their values to those of all six.

    The values of the others are removed from ``about``.
    """
    constants = {a: about.pop(a) for a in _ARGUMENTS if a in about}
    asked = [a for a in _ARGUMENTS if a not in constants]

    def complete(given: Sequence[Any]) -> list[Any]:
        values = {**constants, **dict(zip(asked, given))}
        return [values[a] for a in _ARGUMENTS]

    return asked, complete


def convolution_like(name: str, *, input: str = "self", bias: bool = True, **about: Any) -> Rule:
    """The rule of an operator that is a convolution under another name.

    Args:
        name: the operator.
        input: the name of its input.
        bias: whether it takes a bias.
        about: the value of each argument of aten::convolution that the operator lacks, and arguments of `rule`.
    """
    output = operator(name)._schema.returns[0].name or "result"
    constants = {a: about[a] for a in _ARGUMENTS if a in about} | ({} if bias else {"bias_p": None, "bias_t": None})
    asked, complete = _arguments(about)

    def vjp(grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool], *given: Any) -> tuple[Tensor | None, ...]:
        wanted = [*mask, False][:3]
        *geometry, groups = complete(given)
        channels = weight.shape[1] * groups if geometry[3] else weight.shape[0]  # without input channels, grad has none
        return _aten.convolution_backward(grad, x, weight, [channels], *geometry, groups, wanted)[: len(mask)]

    inputs = (input, "weight", "bias") if bias else (input, "weight")
    return rule(
        name,
        **{
            "vjp": {inputs: bound_to(vjp, ["grad", input, "weight", "output_mask", *asked])},
            "jvp": {output: convolution_jvp.bind(input_p=f"{input}_p", input_t=f"{input}_t", **constants)},
            "source": "ATen convolution_backward, convolution_jvp",
            **about,
        },
    )


def backward_like(name: str, *, input: str = "self", bias: bool = True, **about: Any) -> Rule:
    """The rule of an operator that returns the gradients of a convolution.

    Args:
        name: the operator.
        input: the name of the convolution's input.
        bias: whether the gradient of the bias is among the results.
        about: the value of each argument of aten::convolution that the operator lacks, and arguments of `rule`.
    """
    asked, complete = _arguments(about)
    outputs = [r.name or f"result{i}" for i, r in enumerate(operator(name)._schema.returns)]
    cotangents = [f"grad_{o}" for o in outputs]

    def gradient(
        place: int, g: Tensor | None, x: Tensor | None, w: Tensor | None, given: Sequence[Any]
    ) -> Tensor | None:
        if g is None or x is None or w is None:
            return None
        mask = [place == 0, place == 1, False]
        return _aten.convolution_backward(g, x, w, None, *complete(given), mask)[place]

    def of_grad_output(x: Tensor, w: Tensor, *others: Any) -> Tensor:
        (a, b, *c), given = others[: len(outputs)], others[len(outputs) :]
        return convolution_jvp(x, a, w, b, None, c[0] if c else None, *complete(given))

    def of_input(g: Tensor, x: Tensor, b: Tensor, *given: Any) -> Tensor | None:
        return gradient(0, g, x, b, given)

    def of_weight(g: Tensor, w: Tensor, a: Tensor, *given: Any) -> Tensor | None:
        return gradient(1, g, a, w, given)

    def jvp(*known: Any) -> tuple[Tensor | None, ...]:
        (g, dg, x, dx, w, dw, mask, bias_gradient), given = known[:8], known[8:]
        found: list[Tensor | None] = [None] * len(outputs)
        if mask[0]:
            found[0] = total(gradient(0, dg, x, w, given), gradient(0, g, x, dw, given))
        if mask[1]:
            found[1] = total(gradient(1, dg, x, w, given), gradient(1, g, dx, w, given))
        if bias and mask[2] and dg is not None:
            found[2] = convolution_backward_jvp_grad_bias(dg, bias_gradient)
        return tuple(found)

    primals = [f"{n}_{kind}" for n in ("grad_output", input, "weight") for kind in "pt"]
    return rule(
        name,
        vjp={
            "grad_output": bound_to(of_grad_output, [input, "weight", *cotangents, *asked]),
            input: bound_to(of_input, ["grad_output", input, cotangents[1], *asked]),
            "weight": bound_to(of_weight, ["grad_output", "weight", cotangents[0], *asked]),
        },
        jvp={tuple(outputs): bound_to(jvp, [*primals, "output_mask", outputs[-1], *asked])},
        **{"source": "ATen _convolution_double_backward, convolution_backward_jvp_grad_bias", **about},
    )


# -- kernels of the CPU ------------------------------------------------------------------------------------------------


def _is_contiguous(self: Tensor, weight: Tensor, *_: Any) -> bool:
    """Whether tensors are contiguous: PyTorch's backward reads all tensors as if they were."""
    return self.is_contiguous() and weight.is_contiguous()


def _has_no_output_padding(*arguments: Any) -> bool:
    """Whether PyTorch can differentiate the gradients of a convolution twice."""
    transposed, output_padding = arguments[7:9]
    return not (transposed and any(output_padding))


# -- time, batch, channels --------------------------------------------------------------------------------------------


def _to_bct(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0)


def _conv_tbc_vjp(
    grad: Tensor, self: Tensor, weight: Tensor, pad: int, output_mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    tensors = (_to_bct(grad), _to_bct(self), weight.permute(2, 1, 0))
    found = _aten.convolution_backward(*tensors, [grad.shape[2]], [1], [pad], [1], False, [0], 1, output_mask)
    x, w, b = (g if yes else None for g, yes in zip(found, output_mask))
    return None if x is None else x.permute(2, 0, 1), None if w is None else w.permute(2, 1, 0), b


def _conv_tbc_jvp(
    self_p: Tensor,
    self_t: Tensor | None,
    weight_p: Tensor,
    weight_t: Tensor | None,
    bias_p: Tensor,
    bias_t: Tensor | None,
    pad: int,
) -> Tensor:
    x, dx = (None if t is None else _to_bct(t) for t in (self_p, self_t))
    w, dw = (None if t is None else t.permute(2, 1, 0) for t in (weight_p, weight_t))
    return convolution_jvp(x, dx, w, dw, bias_p, bias_t, [1], [pad], [1], False, [0], 1).permute(2, 0, 1)


# -- the rules --------------------------------------------------------------------------------------------------------

_PLAIN: dict[str, Any] = {"transposed": False, "output_padding": [0], "groups": 1}
_SLOW: dict[str, Any] = {"improves": "missing", "defer_to_stock": always}

convolution_like("aten::convolution", input="input")
convolution_like("aten::_convolution", input="input", jvp={"result": _convolution_jvp})
backward_like(
    "aten::convolution_backward",
    input="input",
    improves="missing",  # the third derivative of a transposed convolution with a padded output
    defer_to_stock=ByMetadata(_has_no_output_padding),
)
convolution_like(
    "aten::_slow_conv2d_forward",
    dilation=[1, 1],
    defer_to_stock=ByMetadata(_is_contiguous),
    improves=("values", "missing"),
    **_PLAIN,
)
convolution_like("aten::slow_conv3d_forward", dilation=[1, 1, 1], **_SLOW, **_PLAIN)
for _dims in (2, 3):
    convolution_like(f"aten::slow_conv_dilated{_dims}d", **_SLOW, **_PLAIN)
    convolution_like(f"aten::slow_conv_transpose{_dims}d", transposed=True, groups=1, **_SLOW)
backward_like("aten::_slow_conv2d_backward.output_mask", dilation=[1, 1], improves="missing", **_PLAIN)
rule(
    "aten::conv_tbc",
    vjp={("self", "weight", "bias"): _conv_tbc_vjp},
    jvp={"result": _conv_tbc_jvp},
    source="ATen conv_tbc_backward, which is a convolution of permuted dims; the jvp is new",
    **_SLOW,
)
