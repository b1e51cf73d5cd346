"""Operators on jets as compositions of others: softmax, normalization, attention, inverses and determinants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import operator, rules

from . import taylor
from .fallback import by_rule, by_series
from .linear import primal_of, term_of
from .tensor import Space, is_jet

__all__ = ["RULES", "composition"]


def composition(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of an operator that computes this function of torch functions."""

    def rule(space: Space, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    rule.composed = True  # type: ignore[attr-defined]
    return rule


def _largest(x: Tensor, dim: Any) -> Tensor:
    """The largest entry, with its series: subtracted before exponentials are taken.

    The exponential of the largest entry is then exactly 1, and its higher coefficients are 0. The higher coefficients of the
    sum come from the small exponentials alone, and none is lost to rounding.
    """
    if not x.numel():
        return x.detach().real.sum(dim, keepdim=True)
    largest = x.detach().real.amax(dim, keepdim=True) if x.is_complex() else x.amax(dim, keepdim=True)
    return torch.where(largest.detach().abs() == math.inf, 0, largest)


def _softmax(self: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    x = self.float() if half_to_float else self
    e = (x - _largest(x, dim)).exp()
    return e / e.sum(dim, keepdim=True)


def _safe_softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    x = self if dtype is None else self.to(dtype)
    e = (x - _largest(x, dim)).exp()
    total = e.sum(dim, keepdim=True)
    return e / torch.where(total == 0, 1, total)


def _log_softmax(self: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    x = self.float() if half_to_float else self
    shifted = x - _largest(x, dim)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def _logsumexp(self: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    if not self.ndim:
        return self + 0
    if not self.numel():
        return torch.logsumexp(self.detach(), tuple(dim), keepdim)
    largest = _largest(self, dim)
    found = (self - largest).exp().sum(tuple(dim), keepdim=True).log() + largest
    return found if keepdim else found.squeeze(tuple(dim) if dim else tuple(range(self.ndim)))


def _normalized(x: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / deviation over some dims; the mean; the inverse of the deviation."""
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    rstd = (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    return centred * rstd, mean, rstd


def _layer_norm(input: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> tuple[Tensor, ...]:
    y, mean, rstd = _normalized(input, list(range(-len(shape), 0)), eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), mean, rstd


def _group_norm(
    input: Tensor, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Tensor, ...]:
    y, mean, rstd = _normalized(input.reshape(N, group, -1), [2], eps)
    y = y.reshape(input.shape)
    shape = (C, *[1] * (input.ndim - 2))
    y = y if weight is None else y * weight.reshape(shape)
    return (y if bias is None else y + bias.reshape(shape)), mean.squeeze(2), rstd.squeeze(2)


def _batch_norm(
    input: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    shape = (-1, *[1] * (input.ndim - 2))
    if training:
        if is_jet(mean) or is_jet(var):
            raise NotImplementedError(
                "aten::native_batch_norm: it writes to running statistics that have a Taylor series"
            )
        if mean is not None:  # the running statistics are updated in place
            operator("aten::native_batch_norm")(input.detach(), None, None, mean, var, True, momentum, eps)
        y, m, rstd = _normalized(input, [0, *range(2, input.ndim)], eps)
        saved = (m.reshape(-1), rstd.reshape(-1))
    else:
        y = (input - mean.reshape(shape)) * (var.reshape(shape) + eps).rsqrt()
        saved = (input.detach().new_empty(0), input.detach().new_empty(0))
    y = y if weight is None else y * weight.reshape(shape)
    return (y if bias is None else y + bias.reshape(shape)), *saved


def _batch_norm_no_stats(
    input: Tensor, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    return _batch_norm(input, weight, bias, None, None, True, momentum, eps)


def _var(self: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    dims = list(range(self.ndim)) if not dim else list(dim)
    size = math.prod(self.shape[d] for d in dims)
    centred = self - self.mean(dims, keepdim=True) if dims else self * 0
    squares = (centred * centred.conj()).real if self.is_complex() else centred.square()
    squares = squares.sum(dims, keepdim=keepdim) if dims else squares
    return squares / max(size - (1 if correction is None else correction), 0)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    if dropout_p:
        raise NotImplementedError("aten::_scaled_dot_product_flash_attention_for_cpu: no Taylor series with dropout")
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        lower = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~lower, -math.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    return _safe_softmax(scores, -1) @ value, torch.logsumexp(scores, -1)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    norm = torch.linalg.vector_norm(v, 2, [d for d in range(v.ndim) if d != dim % v.ndim], True)
    return v * (g / norm), norm


def _softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    product = grad_output * output
    return (product - output * product.sum(dim, keepdim=True)).to(input_dtype)


def _log_softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    return (grad_output - output.exp() * grad_output.sum(dim, keepdim=True)).to(input_dtype)


def _sigmoid_backward(grad_output: Tensor, output: Tensor) -> Tensor:
    return grad_output * ((1 - output) * output).conj()


def _tanh_backward(grad_output: Tensor, output: Tensor) -> Tensor:
    return grad_output * (1 - output * output).conj()


def _index_put(self: Tensor, indices: Any, values: Tensor, accumulate: bool = False, unsafe: bool = False) -> Tensor:
    return operator("aten::index_put")(self, indices, values, accumulate)


# -- matrices: each is given the coefficients of its argument, [0] the value ------------------------------------------------


def _matrix_rule(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The rule of an operator whose first output has these coefficients, and whose other outputs are constant.

    ``function(coefficients of all arguments by their places, values of the outputs) -> coefficients from 1``.
    """

    def run(space: Space, *args: Any, **kwargs: Any) -> Any:
        signature, op = rules[name].signature, operator(name)
        values = signature.bind(args, kwargs)
        primals = [primal_of(space, v) for v in values]
        given, named = signature.split(primals)
        outputs = list(signature.outputs(op(*given, **named)))
        terms = [[term_of(space, v, k) for v in values] for k in range(1, space.order + 1)]
        rows = by_series(space, lambda ins, outs: [[c] for c in function(ins, outs)], primals, terms, outputs[:1])
        first = space.jet([outputs[0], *[row[0] for row in rows]])
        return first if len(outputs) == 1 else (first, *_others(space, signature.output_names[1:], outputs[1:], name))

    return run


def _others(space: Space, names: Sequence[str], outputs: Sequence[Any], name: str) -> list[Any]:
    """The factors, which have no series; indices are unchanged."""
    return [
        space.lost(o, f"{name}: its output {n!r}") if o.dtype.is_floating_point or o.dtype.is_complex else o
        for n, o in zip(names, outputs)
    ]


def _column(inputs: list[list[Any]], place: int) -> list[Any]:
    return [row[place] for row in inputs]


def inverse_series(A: list[Any], first: Tensor) -> list[Any]:
    """Y = A^-1: A Y = 1, so that Y[k] = -Y[0] (A[1] Y[k - 1] + ... + A[k] Y[0])."""
    Y: list[Any] = [first]
    for k in range(1, len(A)):
        rest = taylor.convolve(A, [*Y, None], k, start=1, product=torch.matmul)
        Y.append(None if rest is None else -(first @ rest))
    return Y


def _inverse(inputs: list[list[Any]], outputs: list[Any]) -> list[Any]:
    return inverse_series(_column(inputs, 0), outputs[0])[1:]


def _solve(inputs: list[list[Any]], outputs: list[Any]) -> list[Any]:
    """A X = B: A[0] X[k] = B[k] - (A[1] X[k - 1] + ... + A[k] X[0])."""
    A, B, left = _column(inputs, 0), _column(inputs, 1), inputs[0][2]
    vector = B[0].ndim == 1 or B[0].ndim == A[0].ndim - 1 and B[0].shape == A[0].shape[:-1]
    if vector:
        B = [None if b is None else b.unsqueeze(-1) for b in B]
    factors = torch.linalg.lu_factor(A[0])
    X = [outputs[0].unsqueeze(-1) if vector else outputs[0]]
    for k in range(1, len(A)):
        order = (lambda a, x: a @ x) if left else (lambda a, x: x @ a)
        rest = taylor.convolve(A, [*X, None], k, start=1, product=order)
        right = B[k] if rest is None else -rest if B[k] is None else B[k] - rest
        X.append(None if right is None else torch.linalg.lu_solve(*factors, right.expand(X[0].shape), left=left))
    return [None if x is None else x.squeeze(-1) if vector else x for x in X[1:]]


def _log_det(inputs: list[list[Any]], outputs: list[Any]) -> list[Any]:
    """log |det A|, whose derivative is the trace of A^-1 A'."""
    A = _column(inputs, 0)
    Y = inverse_series([*A[:-1], None], torch.linalg.inv(A[0]))

    def trace(y: Tensor, a: Tensor) -> Tensor:
        return (y.mT * a).sum((-2, -1))

    found = []
    for k in range(1, len(A)):
        weighted = [None if a is None else a * (j / k) for j, a in enumerate(A[: k + 1])]
        found.append(taylor.convolve(weighted, Y, k, start=1, product=lambda a, y: trace(y, a)))
    return found


def _slogdet(space: Space, A: Any) -> Any:
    if A.is_complex():
        return by_rule(rules["aten::_linalg_slogdet"])(space, A)
    primal = operator("aten::_linalg_slogdet")(A.primal)
    terms = [[t] for t in A.terms]
    rows = by_series(space, lambda ins, outs: [[c] for c in _log_det(ins, outs)], [A.primal], terms, [primal[1]])
    others = _others(space, ("LU", "pivots"), primal[2:], "aten::_linalg_slogdet")
    return (primal[0], space.jet([primal[1], *[row[0] for row in rows]]), *others)


# -- losses, for the arguments without a derivative in PyTorch --------------------------------------------------------


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


def _binary_cross_entropy(self: Tensor, target: Tensor, weight: Any = None, reduction: int = 1) -> Tensor:
    return _reduced(operator("aten::binary_cross_entropy")(self, target, None, 0) * weight, reduction)


def _binary_cross_entropy_with_logits(
    self: Tensor, target: Tensor, weight: Any = None, pos_weight: Any = None, reduction: int = 1
) -> Tensor:
    below = -torch.nn.functional.logsigmoid(self)
    loss = (1 - target) * self + (below if pos_weight is None else (1 + (pos_weight - 1) * target) * below)
    return _reduced(loss if weight is None else loss * weight, reduction)


def _nll_loss(self: Tensor, target: Tensor, weight: Any, reduction: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    dim = min(self.ndim - 1, 1)
    counted = target != ignore_index
    place = torch.where(counted, target, 0)
    weights = torch.where(counted, weight[place], 0)
    loss = -self.gather(dim, place.unsqueeze(dim)).squeeze(dim) * weights
    total = weights.sum()
    if reduction == 0:
        return loss, torch.zeros_like(total)
    return (loss.sum() / total if reduction == 1 else loss.sum()), total


def _soft_margin_loss(self: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    return _reduced(-torch.nn.functional.logsigmoid(self * target), reduction)


def _multi_margin_loss(
    self: Tensor, target: Tensor, p: float = 1, margin: float = 1, weight: Any = None, reduction: int = 1
) -> Tensor:
    loss = operator("aten::multi_margin_loss")(self, target, p, margin, None, 0)
    return _reduced(loss * weight[target].reshape(loss.shape), reduction)


def _also_in(arguments: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of an operator: this function if one of the arguments is a jet; else `by_rule`."""
    names = arguments.split()

    def run(space: Space, *args: Any, **kwargs: Any) -> Any:
        signature = rules[name].signature
        values = signature.bind(args, kwargs)
        if any(space.has(v) for n, v in zip(signature.names, values) if n in names):
            return function(*values)
        return by_rule(rules[name])(space, *args, **kwargs)

    return run


_LOSSES: dict[str, tuple[str, Callable[..., Any]]] = {
    "aten::binary_cross_entropy": ("weight", _binary_cross_entropy),
    "aten::binary_cross_entropy_with_logits": ("weight pos_weight", _binary_cross_entropy_with_logits),
    "aten::nll_loss_forward": ("weight", _nll_loss),
    "aten::nll_loss2d_forward": ("weight", _nll_loss),
    "aten::soft_margin_loss": ("target", _soft_margin_loss),
    "aten::multi_margin_loss": ("weight", _multi_margin_loss),
}


RULES: dict[str, Callable[..., Any]] = {
    "aten::_softmax": composition(_softmax),
    "aten::_safe_softmax": composition(_safe_softmax),
    "aten::_log_softmax": composition(_log_softmax),
    "aten::_softmax_backward_data": composition(_softmax_backward),
    "aten::_log_softmax_backward_data": composition(_log_softmax_backward),
    "aten::sigmoid_backward": composition(_sigmoid_backward),
    "aten::tanh_backward": composition(_tanh_backward),
    "aten::logsumexp": composition(_logsumexp),
    "aten::native_layer_norm": composition(_layer_norm),
    "aten::native_group_norm": composition(_group_norm),
    "aten::native_batch_norm": composition(_batch_norm),
    "aten::_native_batch_norm_legit.no_stats": composition(_batch_norm_no_stats),
    "aten::_index_put_impl": composition(_index_put),
    "aten::var.correction": composition(_var),
    "aten::_scaled_dot_product_flash_attention_for_cpu": composition(_attention),
    "aten::linalg_inv_ex": _matrix_rule(_inverse, "aten::linalg_inv_ex"),
    "aten::_linalg_solve_ex": _matrix_rule(_solve, "aten::_linalg_solve_ex"),
    "aten::_linalg_slogdet": _slogdet,
    "aten::_weight_norm_interface": composition(_weight_norm),
    **{name: _also_in(arguments, name, function) for name, (arguments, function) in _LOSSES.items()},
}
