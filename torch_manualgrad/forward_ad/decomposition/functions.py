"""The package's decompositions: operators without a formula for forward mode, as differentiable functions.

Each has the parameters of its operator; the normalizations take them by position. The normalizations and the softmax
are bodies of formulas that the rules also use; there the saved mean and inverse deviation are functions of the input,
see `recompute_mean_var`. Outputs that a mask excludes are None, as in the operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...arguments import ArgumentError, checked
from ...derivatives.elementwise.softmax import softmax_differential
from ...derivatives.nn.batch_norm import native_batch_norm_backward as _batch_norm_formula
from ...derivatives.nn.layer_norm import native_layer_norm_backward as _layer_norm_formula
from ...derivatives.nn.normalization import constant, standardized_by, wide

__all__ = [
    "batch_norm_backward",
    "cudnn_batch_norm_backward",
    "log_sigmoid_forward",
    "log_softmax_backward_data",
    "miopen_batch_norm_backward",
    "native_batch_norm_backward",
    "native_layer_norm_backward",
    "nll_loss_backward",
    "recompute_mean_var",
    "softmax_backward_data",
    "trace",
]

_MEAN = 1  # the number of reduction="mean"

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def trace(self: Tensor) -> Tensor:
    """The sum of the diagonal."""
    return self.diagonal().sum()


def log_sigmoid_forward(self: Tensor) -> tuple[Tensor, Tensor]:
    """$x - log(1 + exp(x))$ for $x < 0$, else $-log(1 + exp(-x))$; and the constant $exp(-|x|)$, if it is kept.

    Each branch is smooth beyond its end, so derivatives of every order are right at 0, unlike those of $|x|$.
    """
    negative = self < 0
    low, high = torch.where(negative, self, 0), torch.where(negative, 0, self)
    output = torch.where(negative, low - low.exp().log1p(), -(-high).exp().log1p())
    if self.device.type in ("cuda", "xpu"):
        return output, self.new_zeros(0)
    return output, constant(self).abs().neg().exp()


def nll_loss_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """$-w g$ at the target's class, divided by the total weight for a mean; 0 elsewhere. Any number of dims."""
    classes = 0 if self.dim() == 1 else 1
    kept = target != ignore_index
    index = torch.where(kept, target, 0)
    values = -grad_output
    if weight is not None:
        values = values * weight[index]
    if reduction == _MEAN:
        values = values / torch.where(kept, total_weight, 1)  # total_weight is 0 if every target is ignored
    values = torch.where(kept, values, 0).to(self.dtype)
    return torch.zeros_like(self).scatter(classes, index.unsqueeze(classes), values.unsqueeze(classes))


def softmax_backward_data(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """$y (g - <g, y>)$."""
    return softmax_differential(grad_output, output, dim).to(input_dtype)


def log_softmax_backward_data(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """$g - exp(l) <g, 1>$."""
    return (grad_output - output.exp() * grad_output.sum(dim, keepdim=True)).to(input_dtype)


@checked
def recompute_mean_var(
    input: Tensor, rstd: Tensor, inner_dim_indices: Sequence[int], keepdim: bool
) -> tuple[Tensor, Tensor]:
    """The mean and the inverse deviation of a normalization as functions of its input, so that tangents flow through
    them.

    In forward mode a saved ``rstd`` is a constant. It gives the value, and thereby the $eps$ that a backward does not
    receive; the derivative is that of $(var(x) + eps)^(-1/2)$.

    Args:
        input: $x$, (*), real.
        rstd: saved by the forward, with as many entries as ``input`` has outside the dims.
        inner_dim_indices: the dims of the statistics.
        keepdim: whether these stay, of size 1.

    Returns:
        Mean and inverse deviation, in the precision of PyTorch's normalization: at least float32.

    Note:
        Where not differentiable: where $eps = 0$ and all entries are equal, as ``rstd`` is infinite there.

    References:
        PyTorch's recompute_mean_var, of its decompositions for jvp, which takes $1 / rstd^2 - var$ as $eps$.
    """
    if any(not -input.ndim <= d < input.ndim for d in inner_dim_indices):
        raise ArgumentError(
            f"recompute_mean_var: inner_dim_indices: expected dims of a tensor of shape {list(input.shape)}, got "
            f"{list(inner_dim_indices)}"
        )
    mean = wide(input).mean(list(inner_dim_indices), keepdim=keepdim)
    found = standardized_by(input, inner_dim_indices, rstd).rstd
    return mean, found if keepdim else found.reshape(mean.shape)


def native_layer_norm_backward(*given: Any) -> Gradients:
    """The body of the formula of that name."""
    return _masked(_layer_norm_formula.reference(*given), given[-1])


def native_batch_norm_backward(*given: Any) -> Gradients:
    """The body of the formula of that name."""
    return _masked(_batch_norm_formula.reference(*given), given[-1])


def batch_norm_backward(*given: Any) -> Gradients:
    """`native_batch_norm_backward` without the reserve; statistics updated by the forward are those of the batch."""
    return native_batch_norm_backward(*given[:-1])


def miopen_batch_norm_backward(input: Tensor, grad_output: Tensor, *given: Any) -> Gradients:
    """`native_batch_norm_backward` in training, the only mode that the library differentiates."""
    *known, epsilon = given
    return native_batch_norm_backward(grad_output, input, *known, True, epsilon, [True] * 3)


def cudnn_batch_norm_backward(*given: Any) -> Gradients:
    """`miopen_batch_norm_backward` without the reserve."""
    return miopen_batch_norm_backward(*given[:-1])


def _masked(found: Sequence[Tensor], output_mask: Sequence[bool]) -> Gradients:
    of_x, of_weight, of_bias = (f if yes else None for f, yes in zip(found, output_mask))
    return of_x, of_weight, of_bias
