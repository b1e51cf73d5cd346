"""Average pooling, max pooling, and max unpooling.

Average pooling is linear, and its backward operators read only the sizes of the input.

The operators of max pooling return the places of the maxima, and all their derivatives are gathers and scatters at these
places. The backward operators and max_unpool are linear, and their transposes gather. At a tie, the maximum that PyTorch chose
gets the whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Rule, bind, formula, linear_in, operator, rule

from ..shape.common import zero_of

_aten = torch.ops.aten


def linear_backward(name: str, vjp: Callable[..., Any], **about: Any) -> Rule:
    """The rule of a backward operator that is linear in grad_output and constant in self.

    Args:
        name: the operator.
        vjp: the cotangent of grad_output.
        about: arguments of `rule`.
    """
    return rule(
        name,
        vjp={"grad_output": vjp, "self": zero_of},
        jvp={"result": bind(operator(name), grad_output="grad_output_t", self="self_p")},
        **{"source": "ATen derivatives.yaml", "kind": "linear", **about},
    )


@formula
def max_pool_double_backward(grad: Tensor, indices: Tensor, dim: int) -> Tensor:
    """Cotangent of the cotangent of the maxima, given that of the gradient of the input: the entries at the maxima.

    It is also the tangent of the maxima, given that of the input.

    Args:
        grad: (*, ...), with ``dim`` last dims.
        indices: of the maxima, in these dims flattened, (*, ...), int64.
        dim: the number of dims that are pooled.

    Returns:
        The shape of ``indices``.

    Note:
        Where not differentiable: at ties, where one of the maxima is treated as the only one.
    """
    found = _flat(grad, dim).gather(-1, _flat(indices, dim))
    return found.reshape(indices.shape)


def _flat(x: Tensor, dim: int) -> Tensor:
    """The last dims as one; not by flatten, for which PyTorch's vmap of batched gradients raises."""
    return x.reshape([*x.shape[:-dim], math.prod(x.shape[-dim:])])


# -- the rules --------------------------------------------------------------------------------------------------------


def _average(name: str) -> None:
    """The rules of an average pooling and its backward operator."""
    forward, backward = operator(f"aten::{name}"), operator(f"aten::{name}_backward")
    linear_in(f"aten::{name}", {"self": bind(backward, grad_output="grad")})
    linear_backward(f"aten::{name}_backward", bind(forward, self="grad"))


def _adaptive(dims: int) -> None:
    forward, backward = (operator(f"aten::_adaptive_avg_pool{dims}d{s}") for s in ("", "_backward"))
    linear_in(f"aten::_adaptive_avg_pool{dims}d", {"self": bind(backward, grad_output="grad")})
    linear_backward(
        f"aten::_adaptive_avg_pool{dims}d_backward",
        lambda grad, grad_output_sizes: forward(grad, grad_output_sizes[-dims:]),
    )


def _max(name: str, dims: int) -> None:
    """The rules of a max pooling and its backward operator."""
    rule(
        f"aten::{name}",
        vjp={"self": bind(operator(f"aten::{name}_backward"), grad_output="grad_result0", indices="result1")},
        jvp={"result0": max_pool_double_backward.bind(grad="self_t", indices="result1", dim=dims)},
        not_differentiable="result1",
        source="ATen derivatives.yaml",
        finite=True,
    )
    linear_backward(f"aten::{name}_backward", max_pool_double_backward.bind(dim=dims), kind="rule", finite=True)


for _dims in (2, 3):
    _average(f"avg_pool{_dims}d")
    _adaptive(_dims)
    for _name in ("max_pool{}d_with_indices", "adaptive_max_pool{}d", "fractional_max_pool{}d"):
        _max(_name.format(_dims), _dims)
    linear_in(f"aten::max_unpool{_dims}d", {"self": max_pool_double_backward.bind(dim=_dims)})
