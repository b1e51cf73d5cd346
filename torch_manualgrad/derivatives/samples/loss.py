"""Samples of the rules of losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, exists, operator, probe_for, samples_for

from ..loss.common import MEAN, NONE, SUM
from ..loss.linear_cross_entropy import NAME
from .drawing import in_one_precision, leaf, random

# -- binary cross entropy ----------------------------------------------------------------------------------------------


def _binary_cross_entropy_inputs(dtype: torch.dtype, device: torch.device | str) -> Iterable[tuple[Any, ...]]:
    """Logits, targets, weights, reduction."""
    if dtype.is_complex:
        return
    x, t, w = (random(2, 3, dtype=dtype, device=device, seed=k) for k in range(3))
    yield x, t.sigmoid(), None, NONE
    yield x, t.sigmoid(), w.abs(), MEAN
    yield x, t.sigmoid(), w[0].abs(), SUM


def _probability(x: Tensor) -> Tensor:
    """Numbers between 0 and 1 and away from both, for positive numbers of any scale."""
    return (1 + x / (1 + x)) / 3


@samples_for("aten::binary_cross_entropy")
def binary_cross_entropy(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, t, weight, reduction in _binary_cross_entropy_inputs(dtype, device):
        yield Sample(leaf(x.sigmoid()), leaf(t), weight=weight, reduction=reduction)


@samples_for("aten::binary_cross_entropy_backward")
def binary_cross_entropy_backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, t, weight, reduction in _binary_cross_entropy_inputs(dtype, device):
        g = random(2, 3, dtype=dtype, device=device, seed=3)
        g = leaf(g if reduction == NONE else g[0, 0])
        yield Sample(g, leaf(x.sigmoid()), leaf(t), weight=weight, reduction=reduction)


@samples_for("aten::binary_cross_entropy_with_logits")
def with_logits(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, t, weight, reduction in _binary_cross_entropy_inputs(dtype, device):
        p = None if weight is None else random(3, dtype=dtype, device=device, seed=4).abs()
        yield Sample(leaf(x), leaf(t), weight=weight, pos_weight=p, reduction=reduction)


@probe_for("aten::binary_cross_entropy")
def binary_cross_entropy_probe(self: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
    return torch.ops.aten.binary_cross_entropy(_probability(self), _probability(target), **kwargs)


@probe_for("aten::binary_cross_entropy_backward")
def backward_probe(grad_output: Tensor, self: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
    probabilities = _probability(self), _probability(target)
    return torch.ops.aten.binary_cross_entropy_backward(grad_output, *probabilities, **kwargs)


# -- ctc ---------------------------------------------------------------------------------------------------------------


def _ctc_samples(dtype: torch.dtype, device: torch.device | str, as_tensors: bool) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    lp = -random(4, 2, 3, dtype=dtype, device=device).abs()
    padded = torch.tensor([[1, 2], [2, 2]], device=device)
    # all of one length: PyTorch does not initialize the rest of the second output
    for x, targets, blank in (
        (lp - 12, padded.flatten(), 0),  # where exp(lp), which PyTorch adds, is small
        (lp, padded, 0),
        (lp[:2].contiguous(), padded - 1, 2),  # the second has no alignment
    ):
        both = [[len(x)] * 2, [2] * 2]
        given = [torch.tensor(n, device=device) if as_tensors else n for n in both]
        yield Sample(x, targets, *given, blank)


def _loss_alone(operator: Any) -> Any:
    """The loss, for contiguous targets: PyTorch's forward misreads others."""
    return lambda log_probs, targets, *rest: operator(log_probs, targets.contiguous(), *rest)[0]


samples_for("aten::_ctc_loss")(partial(_ctc_samples, as_tensors=False))
samples_for("aten::_ctc_loss.Tensor")(partial(_ctc_samples, as_tensors=True))
probe_for("aten::_ctc_loss")(_loss_alone(torch.ops.aten._ctc_loss.default))
probe_for("aten::_ctc_loss.Tensor")(_loss_alone(torch.ops.aten._ctc_loss.Tensor))


# -- linear cross entropy ----------------------------------------------------------------------------------------------


def _linear_cross_entropy_inputs(dtype: torch.dtype, device: torch.device | str) -> Iterable[Any]:
    """x, W, y, b, weights."""
    if dtype.is_complex:
        return
    x, W, b = (leaf(random(*n, dtype=dtype, device=device, seed=k)) for k, n in enumerate(((3, 2), (4, 2), (4,))))
    y = torch.tensor([2, 0, 3], device=device)
    yield x, W, y, b, random(4, dtype=dtype, device=device, seed=3).abs()
    yield x, W, y, None, None


_CHUNKS = {"batch_chunk_size": 2, "acc_policy": "compact"}


def with_reduction(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for reduction, (x, W, y, b, weight) in zip(("mean", "sum"), _linear_cross_entropy_inputs(dtype, device)):
        rest = {"reduction": reduction, "ignore_index": 3, "label_smoothing": 0.0, **_CHUNKS, "acc_dtype": dtype}
        flags = {"allow_retain_graph": True, "compute_input_grad": True, "compute_linear_weight_grad": True}
        last = {"compute_linear_bias_grad": b is not None}
        yield Sample(x, W, target=y, linear_bias=b, weight=weight, **rest, **flags, **last)


def without_reduction(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, W, y, b, weight in _linear_cross_entropy_inputs(dtype, device):
        yield Sample(x, W, target=y, linear_bias=b, weight=weight, ignore_index=3, **_CHUNKS, acc_dtype=dtype)


if exists(NAME):  # since torch 2.13
    samples_for(NAME)(with_reduction)
    samples_for(f"{NAME}_no_reduction")(without_reduction)
    probe_for(NAME)(in_one_precision(lambda *args, **kwargs: operator(NAME)(*args, **kwargs)[0]))
    probe_for(f"{NAME}_no_reduction")(in_one_precision(operator(f"{NAME}_no_reduction")))


# -- margin ------------------------------------------------------------------------------------------------------------


@samples_for("aten::soft_margin_loss")
def margin(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x, y = (random(2, 3, dtype=dtype, device=device, seed=k) for k in (0, 1))
    for reduction in (NONE, MEAN, SUM):
        yield Sample(leaf(x), target=y.sign(), reduction=reduction)


@samples_for("aten::soft_margin_loss_backward")
def margin_backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for sample in margin(dtype, device):
        g = random(2, 3, dtype=dtype, device=device, seed=2)
        yield Sample(leaf(g if sample.kwargs["reduction"] == NONE else g[0, 0]), *sample.args, **sample.kwargs)


# -- multi margin ------------------------------------------------------------------------------------------------------


aten = torch.ops.aten


def _multi_margin_inputs(dtype: torch.dtype, device: torch.device | str) -> Iterable[Any]:
    """x, y, and further arguments."""
    if dtype.is_complex:
        return
    x = random(3, 4, dtype=dtype, device=device)
    y = torch.tensor([1, 3, 0], device=device)
    weight = random(4, dtype=dtype, device=device, seed=1).abs()
    yield x.sort().values, 0 * y, 1, 1.0, {"weight": weight, "reduction": MEAN}  # the same loss at every scale
    yield x, y, 1, 1.0, {"reduction": SUM}
    yield x, y, 2, 0.6, {"weight": weight, "reduction": NONE}
    yield x[0], y[0], 2, 1.0, {"reduction": SUM}


@samples_for("aten::multi_margin_loss")
def multi_margin(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, y, p, margin, rest in _multi_margin_inputs(dtype, device):
        yield Sample(leaf(x), y, p, margin, **rest)


@samples_for("aten::multi_margin_loss_backward")
def multi_margin_backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, y, p, margin, rest in _multi_margin_inputs(dtype, device):
        g = random(*y.shape, dtype=dtype, device=device, seed=2)
        yield Sample(leaf(g if rest["reduction"] == NONE else g.sum()), leaf(x), y, p, margin, **rest)


def _multilabel_inputs(dtype: torch.dtype, device: torch.device | str) -> Iterable[Any]:
    """x, the labels, the reduction."""
    if dtype.is_complex:
        return
    x = random(3, 4, dtype=dtype, device=device)
    labels = torch.tensor([[1, 3, -1, 0], [0, -1, -1, -1], [2, 2, 1, -1]], device=device)
    yield x.sort().values, labels.new_tensor([[0, 1, -1, -1], [0, -1, 1, 2], [2, 1, 0, -1]]), MEAN  # at every scale
    yield x, labels, MEAN
    yield x, labels, NONE
    yield x[0], labels[0], SUM


@samples_for("aten::multilabel_margin_loss_forward")
def multilabel(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, labels, reduction in _multilabel_inputs(dtype, device):
        yield Sample(x, labels, reduction)


@probe_for("aten::multilabel_margin_loss_backward")
def multilabel_backward_probe(
    grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, is_target: Tensor
) -> Any:
    """The backward with the labels of its own forward, whatever is_target is."""
    _, is_target = aten.multilabel_margin_loss_forward(self.detach(), target, reduction)
    return aten.multilabel_margin_loss_backward(grad_output, self, target, reduction, is_target.detach())


@samples_for("aten::multilabel_margin_loss_backward")
def multilabel_backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, labels, reduction in _multilabel_inputs(dtype, device):
        loss, is_target = aten.multilabel_margin_loss_forward(x, labels, reduction)
        g = leaf(random(*loss.shape, dtype=dtype, device=device, seed=2))
        yield Sample(g, leaf(x), labels, reduction=reduction, is_target=is_target)


probe_for("aten::multi_margin_loss")(in_one_precision(aten.multi_margin_loss))
probe_for("aten::multi_margin_loss_backward")(in_one_precision(aten.multi_margin_loss_backward))
probe_for("aten::multilabel_margin_loss_forward")(lambda *args: aten.multilabel_margin_loss_forward(*args)[0])


# -- nll ---------------------------------------------------------------------------------------------------------------


_IGNORED = 2


def _nll_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Iterable[tuple[Any, ...]]:
    """Log-probabilities, classes, weights, reduction, the class that is ignored."""
    if dtype.is_complex:
        return
    x = random(2, 3, *shape, dtype=dtype, device=device)
    target = torch.arange(x[:, 0].numel(), device=device).reshape(2, *shape) % 3
    weight = random(3, dtype=dtype, device=device, seed=1).abs()
    yield x, target, weight, MEAN, _IGNORED
    yield x, target, weight, NONE, -100
    yield x, target, None, SUM, _IGNORED


def _nll_samples(*shape: int) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for x, target, weight, reduction, ignored in _nll_inputs(shape, dtype, device):
            yield Sample(leaf(x), target=target, weight=weight, reduction=reduction, ignore_index=ignored)

    return samples


def _nll_backward_samples(forward: Callable[..., Any], *shape: int) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for x, target, weight, reduction, ignored in _nll_inputs(shape, dtype, device):
            loss, total = forward(x, target, weight, reduction, ignored)
            g = leaf(random(*loss.shape, dtype=dtype, device=device, seed=2))
            rest = {"weight": weight, "reduction": reduction, "ignore_index": ignored, "total_weight": total}
            yield Sample(g, leaf(x), target=target, **rest)

    return samples


def _loss(forward: Callable[..., Any]) -> Callable[..., Tensor]:
    return in_one_precision(lambda *args, **kwargs: forward(*args, **kwargs)[0])


def _backward_probe(forward: Callable[..., Any], backward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The backward with the sum of its own weights, whatever total_weight is."""

    def probe(grad_output: Tensor, self: Tensor, total_weight: Tensor, **rest: Any) -> Tensor:
        total = forward(self.detach(), **rest)[1]
        return backward(grad_output, self.contiguous(), total_weight=total.detach(), **rest)

    return in_one_precision(probe)


samples_for("aten::nll_loss_forward")(_nll_samples())
samples_for("aten::nll_loss_backward")(_nll_backward_samples(aten.nll_loss_forward))
samples_for("aten::nll_loss2d_forward")(_nll_samples(1, 2))
samples_for("aten::nll_loss2d_backward")(_nll_backward_samples(aten.nll_loss2d_forward, 1, 2))
probe_for("aten::nll_loss_forward")(_loss(aten.nll_loss_forward))
probe_for("aten::nll_loss_backward")(_backward_probe(aten.nll_loss_forward, aten.nll_loss_backward))
probe_for("aten::nll_loss2d_forward")(_loss(aten.nll_loss2d_forward))
probe_for("aten::nll_loss2d_backward")(_backward_probe(aten.nll_loss2d_forward, aten.nll_loss2d_backward))


# -- regression --------------------------------------------------------------------------------------------------------


_LIMIT = 0.7  # some differences of the samples are below it, and none near it


def _regression_samples(*limit: float) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        x, y = (random(2, 3, dtype=dtype, device=device, seed=k) for k in (0, 1))
        for reduction in (NONE, MEAN, SUM):
            yield Sample(x, y, reduction, *limit)

    return samples


def _regression_backward_samples(*limit: float) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for sample in _regression_samples(*limit)(dtype, device):
            x, y, reduction, *rest = sample.args
            g = random(2, 3, dtype=dtype, device=device, seed=2)
            yield Sample(g if reduction == NONE else g[0, 0], x, y, reduction, *rest)

    return samples


samples_for("aten::mse_loss")(_regression_samples())
samples_for("aten::mse_loss_backward")(_regression_backward_samples())
samples_for("aten::smooth_l1_loss", "aten::huber_loss")(_regression_samples(_LIMIT))
samples_for("aten::smooth_l1_loss_backward", "aten::huber_loss_backward")(_regression_backward_samples(_LIMIT))
