"""Batch normalization. The mathematics is in `normalization`.

In training, the statistics are those of the batch and functions of the input; the running statistics are not read. In
evaluation, the running statistics are used. They have tangents in forward mode and are constants in reverse mode: their
gradient raises. The mean and the inverse deviation that the operators return are constants to every derivative, as in PyTorch.

Plain calls in reverse mode are left to PyTorch, whose first order is right; the rules of the backward operators have the
higher orders.

_native_batch_norm_legit and _batch_norm_with_update write to the running statistics, as their schemas say, and have
functional forms that return the new ones. `torch.nn.functional.batch_norm` calls native_batch_norm, which writes to
them although its schema does not say so. The operators for evaluation only, _native_batch_norm_legit_no_training and
_batch_norm_no_update, have no rule: they are affine in each input. The rules of the cuDNN and MIOpen operators are registered
on a machine with such a GPU; elsewhere, these operators are entries of the catalogue.

Args:
    grad_out: $g$, the shape of ``input``.
    input: $x$, (N, C, *), real.
    weight: $w$, (C,), or None for 1.
    running_mean, running_var: the statistics in evaluation, (C,); not read in training, and constants.
    train: whether the statistics are those of the batch.
    eps: added to the variance.
    input_p: $x$, (N, C, *), real.
    weight_p: $w$, (C,), or None for 1.
    grad_out_t, input_t, weight_t, bias_t: tangents; None for zero.
    running_mean_t, running_var_t: tangents of the statistics in evaluation; None for zero. Not read in training.

Note:
    Where not differentiable: with $eps = 0$, where a channel is constant. The result is nan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import ByMetadata, always, bind, formula, rule, rules
from torch_manualgrad.core.rule.catalogue import gap

from .normalization import (
    Standardized,
    gradient_format,
    norm_backward,
    norm_backward_jvp,
    norm_double_backward,
    norm_jvp,
    standardized,
    wide,
)


def _dims(input: Tensor) -> list[int]:
    """All dims except the channels."""
    return [d for d in range(input.dim()) if d != 1]


def _by_channel(x: Tensor | None, input: Tensor) -> Any:
    """One entry for each channel, in at least float32, for broadcasting."""
    return None if x is None else wide(x).reshape(-1, *[1] * (input.dim() - 2))


def _standardized(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, training: bool, eps: float
) -> Standardized:
    if training:
        return standardized(input, _dims(input), eps)
    mean, variance = _by_channel(running_mean, input), _by_channel(running_var, input)
    rstd = (variance + eps).rsqrt()
    return Standardized((wide(input) - mean) * rstd, rstd, None)


def _statistics_fit(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
) -> str:
    """An error message if the statistics do not fit, else "". The kernel does not check them."""
    saved = {"save_mean": save_mean, "save_invstd": save_invstd}
    running = {"running_mean": running_mean, "running_var": running_var}
    for name, x in (saved if train else running).items():
        if x is None or list(x.shape) != [input.shape[1]]:
            got = None if x is None else list(x.shape)
            return f"{name}: expected shape [{input.shape[1]}], as train is {train}, got {got}"
    return ""


@formula(kernel=("default",), requires=_statistics_fit)
def native_batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of input, weight and bias, given that of batch_norm: $P(g w), sum g x^, sum g$; in evaluation $r g w$.

    Args:
        save_mean, save_invstd: as native_batch_norm returns them in training; in further derivatives they are
            functions of ``input``.
        output_mask: which of the three are wanted; the others are returned empty.

    Returns:
        The gradients, of the shapes of ``input``, (C,) and (C,); the first has its layout.

    References:
        ATen native_batch_norm_backward; Ioffe, Szegedy, Batch Normalization, arXiv:1502.03167.
    """
    s = _standardized(input, running_mean, running_var, train, eps)
    found = norm_backward(s, wide(grad_out), _by_channel(weight, input), summed=_dims(input))
    dtype = input.dtype if weight is None else weight.dtype
    of_x, *parameters = [f if yes else input.new_zeros(0) for f, yes in zip(found, output_mask)]
    return (of_x.to(input.dtype), *[p.to(dtype) for p in parameters])  # type: ignore[return-value]


def _zeros(input: Tensor, weight: Tensor | None, output_mask: Sequence[bool]) -> tuple[Tensor, ...]:
    """The results for an input without elements. For other inputs, only their shapes, dtypes and strides are right."""
    of_x = torch.zeros_like(input, memory_format=gradient_format(input))
    of_channels = (input if weight is None else weight).new_zeros(input.shape[1])
    return tuple(
        f if yes else input.new_zeros(0) for f, yes in zip((of_x, of_channels, of_channels.clone()), output_mask)
    )


@native_batch_norm_backward.impl("default")
def _(*given: Any) -> tuple[Tensor, ...]:
    grad, input, weight, *statistics, train, eps, output_mask = given
    if not input.numel():  # PyTorch's kernel would crash
        return _zeros(input, weight, output_mask)
    # PyTorch's kernel assumes that vectors are contiguous
    weight, *statistics = (x if x is None else x.contiguous() for x in (weight, *statistics))
    if _fails_in_stock(input, weight, output_mask[1] or output_mask[2]):
        weight = input.new_ones(input.shape[1])
    found = torch.ops.aten.native_batch_norm_backward(grad, input, weight, *statistics, train, eps, output_mask)
    of_x, *parameters = (f if yes else input.new_zeros(0) for f, yes in zip(found, output_mask))
    if output_mask[0]:  # on CUDA, it is contiguous in evaluation
        of_x = of_x.contiguous(memory_format=gradient_format(input))
    return (of_x, *parameters)


@native_batch_norm_backward.impl_fake
def _(*given: Any) -> tuple[Tensor, ...]:
    _, input, weight, *_, output_mask = given
    return _zeros(input, weight, output_mask)


@formula
def batchnorm_double_backward(
    input: Tensor,
    gamma: Tensor | None,
    ggI: Tensor | None,
    ggG: Tensor | None,
    ggB: Tensor | None,
    gO: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of input, weight and grad_out of the backward, given those of its three results.

    Args:
        gamma: the weight, (C,), or None.
        ggI, ggG, ggB: cotangents of the gradients of input, weight and bias; None for zero.
        gO: the cotangent of batch_norm that the backward was given, the shape of $x$.
        training: whether the statistics are those of the batch.

    Returns:
        The shapes of $x$, (C,), and of $x$.

    References:
        ATen batchnorm_double_backward, which treats the statistics as constants.
    """
    s = _standardized(input, running_mean, running_var, training, eps)
    given = (None if ggI is None else wide(ggI), *[_by_channel(x, input) for x in (ggG, ggB)])
    of_x, of_weight, of_g = norm_double_backward(s, wide(gO), _by_channel(gamma, input), *given, summed=_dims(input))
    return of_x.to(input.dtype), of_weight.to(input.dtype if gamma is None else gamma.dtype), of_g.to(gO.dtype)


def _moved(
    s: Standardized, input: Tensor, input_t: Tensor | None, mean_t: Tensor | None, var_t: Tensor | None
) -> Tensor | None:
    """The tangent of $x$ with the same effect on $x^$ as $dx$ and, in evaluation, $dm$ and $dv$: $dx - dm - x^ r dv / 2$."""
    found = None if input_t is None else wide(input_t)
    if s.dims is None and mean_t is not None:
        found = (torch.zeros_like(s.values) if found is None else found) - _by_channel(mean_t, input)
    if s.dims is None and var_t is not None:
        found = torch.zeros_like(s.values) if found is None else found
        found = found - s.values * s.rstd * _by_channel(var_t, input) / 2
    return found


@formula
def batch_norm_backward_jvp(
    grad_out: Tensor,
    grad_out_t: Tensor | None,
    input: Tensor,
    input_t: Tensor | None,
    weight: Tensor | None,
    weight_t: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    train: bool,
    eps: float,
    running_mean_t: Tensor | None = None,
    running_var_t: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tangents of the three results of the backward of batch_norm.

    Returns:
        The shapes of ``input``, (C,) and (C,).

    References:
        The transpose of ATen batchnorm_double_backward.
    """
    s = _standardized(input, running_mean, running_var, train, eps)
    of_x, *parameters = norm_backward_jvp(
        s,
        wide(grad_out),
        _by_channel(weight, input),
        None if grad_out_t is None else wide(grad_out_t),
        _moved(s, input, input_t, running_mean_t, running_var_t),
        _by_channel(weight_t, input),
        summed=_dims(input),
    )
    if not train and running_var_t is not None:  # the tangent of r in r g w
        g = wide(grad_out) if weight is None else wide(grad_out) * _by_channel(weight, input)
        of_x = of_x - g * s.rstd**3 * _by_channel(running_var_t, input) / 2
    dtype = input.dtype if weight is None else weight.dtype
    return (of_x.to(input.dtype), *[p.to(dtype) for p in parameters])  # type: ignore[return-value]


@formula
def batch_norm_jvp(
    input_p: Tensor,
    input_t: Tensor | None,
    weight_p: Tensor | None,
    weight_t: Tensor | None,
    bias_t: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    train: bool,
    eps: float,
    running_mean_t: Tensor | None = None,
    running_var_t: Tensor | None = None,
) -> Tensor:
    """Tangent of batch_norm: $(P dx) w + x^ dw + db$; in evaluation $r dx w + x^ dw + db$.

    Returns:
        The shape of $x$.

    References:
        ATen batch_norm_jvp, which treats the statistics as constants in evaluation.
    """
    s = _standardized(input_p, running_mean, running_var, train, eps)
    affine = [_by_channel(x, input_p) for x in (weight_p, weight_t, bias_t)]
    return norm_jvp(s, _moved(s, input_p, input_t, running_mean_t, running_var_t), *affine).to(input_p.dtype)


def _fails_in_stock(input: Tensor, weight: Tensor | None, has_bias: bool) -> bool:
    """PyTorch's backward crashes for an empty batch, and on CUDA it creates the bias's gradient like the weight."""
    return not input.numel() or input.is_cuda and weight is None and has_bias


def _vjp(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor,
    save_invstd: Tensor,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    # if no further derivative follows, PyTorch's own backward is called, which the compiler fuses
    ours = torch.is_grad_enabled() or _fails_in_stock(input, weight, output_mask[2])
    backward = native_batch_norm_backward if ours else torch.ops.aten.native_batch_norm_backward
    return backward(grad, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask)


# -- the rules --------------------------------------------------------------------------------------------------------


def _defer_to_stock(input: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any) -> bool:
    return not _fails_in_stock(input, weight, bias is not None)


_SOURCE = "ATen native_batch_norm_backward, batch_norm_jvp; Ioffe, Szegedy, Batch Normalization, arXiv:1502.03167"


def _forward(name: str, bound: dict[str, Any], others: Sequence[str] = (), **about: Any) -> Any:
    """The rule of a batch normalization.

    Args:
        name: the operator, without ``aten::``.
        bound: where the training flag, the running statistics and $eps$ come from, if not from arguments of these
        names.
        others: its outputs after the saved statistics.
        about: arguments of `rule`.
    """
    return rule(
        f"aten::{name}",
        vjp={
            ("input", "weight", "bias"): bind(
                _vjp, grad="grad_result0", save_mean="result1", save_invstd="result2", **bound
            )
        },
        jvp={"result0": batch_norm_jvp.bind(**bound)},
        not_differentiable=("result1", "result2", *others),
        **{"defer_to_stock": ByMetadata(_defer_to_stock), "improves": "values", "source": _SOURCE, **about},
    )


def _backward(name: str, train: str | bool, saved: Sequence[str], *, g: str = "grad_out", **about: Any) -> Any:
    """The rule of the backward of a batch normalization.

    Args:
        name: the operator, without ``aten::``.
        train: its training flag.
        saved: its saved statistics. As functions of the input, they contribute to the derivative of the input.
        g: the name of its cotangent.
        about: other parameters of the formulas, and arguments of `rule`.
    """
    fixed = {n: about.pop(n) for n in ("running_mean", "running_var", "eps") if n in about}
    gradients = {"ggI": "grad_result0", "ggG": "grad_result1", "ggB": "grad_result2"}
    return rule(
        f"aten::{name}",
        vjp={
            ("input", "weight", g): batchnorm_double_backward.bind(
                gamma="weight", **gradients, gO=g, training=train, **fixed
            ),
            **({tuple(saved): lambda: (None, None)} if saved else {}),
        },
        jvp={
            ("result0", "result1", "result2"): batch_norm_backward_jvp.bind(
                grad_out=g, grad_out_t=f"{g}_t", train=train, **fixed
            )
        },
        improves="values",
        source="ATen batchnorm_double_backward",
        **about,
    )


_NO_STATISTICS: dict[str, Any] = {"running_mean": None, "running_var": None}
_STATISTICS = ("running_mean_out", "running_var_out")
_NO_BATCHES = dict.fromkeys(("vmap", "vmap-grad"), "PyTorch has no batching rule of the operator")

_forward("native_batch_norm", {"train": "training"})
_forward("_native_batch_norm_legit", {"train": "training"})
_forward("_native_batch_norm_legit_functional", {"train": "training"}, _STATISTICS)
_forward("_native_batch_norm_legit.no_stats", {"train": True, **_NO_STATISTICS})
_forward("_batch_norm_with_update", {"train": True}, ("result3",), gaps=_NO_BATCHES)
_forward("_batch_norm_with_update_functional", {"train": True}, ("result3", *_STATISTICS))
_backward("native_batch_norm_backward", "train", ("save_mean", "save_invstd"))
_backward("batch_norm_backward", "update", ("save_mean", "save_var"))

# libraries of operators that only GPUs have, and whether they are available
_LIBRARIES = {
    "cudnn": torch.backends.cudnn.is_available() and torch.cuda.is_available(),
    "miopen": torch.version.hip is not None,
}
GPU_RULES = []
for _library, _here in _LIBRARIES.items():
    GPU_RULES += [
        _forward(
            f"{_library}_batch_norm",
            {"train": "training", "eps": "epsilon"},
            ("result3",) if _library == "cudnn" else (),
            defer_to_stock=always,
            source="ATen batch_norm_jvp",
            register=_here,
        ),
        _backward(
            f"{_library}_batch_norm_backward",
            True,
            (),
            g="grad_output",
            eps="epsilon",
            **_NO_STATISTICS,
            register=_here,
        ),
    ]

for _rule in GPU_RULES:
    if _rule not in rules.entered():
        gap(_rule.name, reason="only GPUs have the operator; its rule is registered where such a GPU is available")
