"""Copies of views: operators with the values of a view, in memory of their own.

To PyTorch the tangent of such a copy may be a view of its argument's tangent, or that tangent itself. A write to the copy then
changes the tangent of the argument too. These rules compute a tangent that shares no memory.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_manualgrad.core.rule import always, bind, linear_in, reached, real, rule

from .joining import split_backward, split_with_sizes_backward, unbind_backward
from .rearrangement import slice_backward_wrapper
from .views import permute_backwards

_aten = torch.ops.aten

_COTANGENTS: dict[str, Any] = {
    "alias_copy": lambda grad: grad,
    "view_copy": lambda grad, self_sizes: grad.reshape(self_sizes),
    "squeeze_copy": lambda grad, self_sizes: grad.reshape(self_sizes),
    "squeeze_copy.dim": lambda grad, self_sizes: grad.reshape(self_sizes),
    "squeeze_copy.dims": lambda grad, self_sizes: grad.reshape(self_sizes),
    "unsqueeze_copy": lambda grad, dim: grad.squeeze(dim),
    "expand_copy": lambda grad, self_sizes: grad.sum_to_size(self_sizes),
    "t_copy": lambda grad: grad.t(),
    "transpose_copy.int": lambda grad, dim0, dim1: grad.transpose(dim0, dim1),
    "permute_copy": permute_backwards.bind(fwd_dims="dims"),
    "select_copy.int": bind(_aten.select_backward.default, grad_output="grad", input_sizes="self_sizes"),
    "slice_copy.Tensor": slice_backward_wrapper.bind(input_sizes="self_sizes"),
    "diagonal_copy": bind(_aten.diagonal_backward.default, grad_output="grad", input_sizes="self_sizes"),
    "unfold_copy": bind(_aten.unfold_backward.default, grad_in="grad", input_sizes="self_sizes", dim="dimension"),
}

# which PyTorch differentiates only if they are real
_REAL_IN_PYTORCH = ("select_copy.int", "slice_copy.Tensor")

for _name, _vjp in _COTANGENTS.items():
    _refused = _name in _REAL_IN_PYTORCH
    linear_in(
        f"aten::{_name}",
        {"self": _vjp},
        improves=("missing", "values") if _refused else "values",
        defer_to_stock=real if _refused else always,
    )


# whose tangents alone may be batched, while PyTorch cannot batch the operators then
_PARTS: dict[str, Any] = {
    "unbind_copy.int": (
        unbind_backward.bind(grads="grad"),
        lambda self_t, dim: [t.clone() for t in self_t.unbind(dim)],
    ),
    "split_copy.Tensor": (
        split_backward.bind(grads="grad", sizes="self_sizes"),
        lambda self_t, split_size, dim: [t.clone() for t in self_t.split(split_size, dim)],
    ),
    "split_with_sizes_copy": (
        split_with_sizes_backward.bind(grads="grad", sizes="self_sizes"),
        lambda self_t, split_sizes, dim: [t.clone() for t in self_t.split_with_sizes(split_sizes, dim)],
    ),
}

_NOT_BATCHED = {"split_copy.Tensor"} if reached("2.13") else {"split_copy.Tensor", "unbind_copy.int"}
_GAPS = dict.fromkeys(("vmap", "vmap-grad"), "PyTorch has no batching rule for the operator")

for _name, (_vjp, _jvp) in _PARTS.items():
    rule(
        f"aten::{_name}",
        vjp={"self": _vjp},
        jvp={"result": _jvp},
        kind="linear",
        source="ATen derivatives.yaml",
        improves="values",
        defer_to_stock=always,
        gaps=_GAPS if _name in _NOT_BATCHED else None,
    )
