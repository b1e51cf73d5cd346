"""The rules of batch normalization; the formulas are in `normalization_batch`.

Plain calls in reverse mode stay with PyTorch, whose first order is right; the rules of the backward operators give the
higher ones. The mean and the inverse deviation that the operators return are constants to every derivative, as in PyTorch;
a gradient of the running statistics raises. In evaluation these may have tangents.

_native_batch_norm_legit and _batch_norm_with_update write to the running statistics by their schema, and have functional
forms that return the new ones. `torch.nn.functional.batch_norm` calls native_batch_norm, which writes to them, and whose
schema says nothing of it. Those that are for evaluation only, _native_batch_norm_legit_no_training and
_batch_norm_no_update, have no rule: they are affine in each input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, rule

from .normalization import first_of, random, uneven
from .normalization_batch import (
    batch_norm_backward_jvp,
    batch_norm_jvp,
    batchnorm_double_backward,
    native_batch_norm_backward,
)

__all__ = ["batch_norm_double_vjp", "batch_norm_vjp"]

_PARAMETERS = ("input", "weight", "bias")
_INPUTS = ("input", "weight", "grad_out")
_GRADIENTS = ("result0", "result1", "result2")
_EPS = 0.1
# Functions of the input, whose derivative they are part of.
_SAVED: Any = lambda: (None, None)  # noqa: E731


def batch_norm_vjp(
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
    # PyTorch's own, which the compiler fuses, where nobody differentiates it again; on empty inputs it ends the process
    ours = torch.is_grad_enabled() or not input.numel()
    backward = native_batch_norm_backward if ours else torch.ops.aten.native_batch_norm_backward
    mask = list(output_mask)
    found = backward(grad, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, mask)
    return tuple(g if yes else None for g, yes in zip(found, mask))


def batch_norm_double_vjp(input: Tensor, weight: Tensor | None, *others: Any) -> tuple[Tensor | None, ...]:
    of_x, of_weight, of_g = batchnorm_double_backward(input, weight, *others)
    return of_x, None if weight is None else of_weight, of_g


# -- samples ----------------------------------------------------------------------------------------------------------


def _running(like: Tensor) -> tuple[Tensor, Tensor]:
    """A mean and a variance for each channel, the same at each call."""

    def between(a: float, b: float) -> Tensor:
        return torch.linspace(a, b, like.shape[1], dtype=like.dtype, device=like.device)

    return between(-0.5, 0.4), between(0.6, 1.7)


def _inputs(dtype: torch.dtype, device: torch.device | str) -> Iterable[tuple[Any, ...]]:
    """Input, weight, bias."""

    def draw(*shape: int, seed: int = 0) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=seed)

    if dtype.is_complex:
        return
    yield draw(5, 3), draw(3, seed=1), draw(3, seed=2)
    yield draw(2, 2, 3), draw(2, seed=1), None
    yield draw(2, 2, 2, 2).contiguous(memory_format=torch.channels_last), None, draw(2, seed=2)
    yield draw(3, 2, 2), None, None


def _samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for train in (True, False):
        for given in _inputs(dtype, device):
            running: tuple[Any, ...] = (None, None) if train else _running(given[0])
            yield Sample(*given, *running, train, 0.1, _EPS)


def _samples_with_statistics(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """With running statistics, which training writes to."""
    for train in (True, False):
        for given in _inputs(dtype, device):
            yield Sample(*given, *_running(given[0]), train, 0.1, _EPS)


def _samples_of_update(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """In training, and with both parameters: PyTorch's fake kernel refuses absent ones."""
    for x, _, bias in _inputs(dtype, device):
        weight = random(x.shape[1], dtype=dtype, device=device, seed=1)
        yield Sample(x, weight, weight if bias is None else bias, *_running(x), 0.1, _EPS)


def _samples_without_statistics(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for given in _inputs(dtype, device):
        yield Sample(*given, True, 0.1, _EPS)


def _probe(*args: Any) -> Tensor:
    """The first output, with running statistics that are no inputs: there is no derivative in them."""
    running = args[3:5] if args[3] is None else _running(args[0])
    return first_of("native_batch_norm")(*args[:3], *running, *args[5:])


def _probe_with_statistics(operator_name: str) -> Callable[..., Tensor]:
    """The same for an operator that takes no absent ones, and writes to them; in a batch they are to have one, too."""

    def probe(*args: Any) -> Tensor:
        batched = torch.zeros_like(args[0]).sum()
        running = [x + torch.zeros_like(given) + batched for x, given in zip(_running(args[0]), args[3:5])]
        result: Tensor = getattr(torch.ops.aten, operator_name)(*args[:3], *running, *args[5:])[0]
        return result

    return probe


def _backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for train in (True, False):
        for x, weight, bias in _inputs(dtype, device):
            x = x.contiguous()  # PyTorch's fake kernel knows no other layout
            running: tuple[Any, ...] = (None, None) if train else _running(x)
            g = random(*x.shape, dtype=dtype, device=device, seed=3)
            _, *saved = torch.ops.aten.native_batch_norm(x, weight, bias, *running, train, 0.1, _EPS)
            mask = [True, weight is not None, bias is not None]
            yield Sample(g, x, weight, *running, *saved, train, _EPS, mask)


def _with_reserve(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """For batch_norm_backward, which takes no absent weight."""
    reserve = torch.empty(0, dtype=torch.uint8, device=device)
    for sample in _backward_samples(dtype, device):
        if sample.args[2] is not None:
            yield Sample(*sample.args, reserve)


def _backward_probe(operator: str) -> Callable[..., list[Tensor]]:
    """The backward with the statistics of its input, and running ones that are no inputs."""

    def probe(*args: Any) -> list[Tensor]:
        g, x, weight, running_mean, _, _, _, train, *rest = args
        running = (None, None) if running_mean is None else _running(x)
        _, *saved = torch.ops.aten.native_batch_norm(x, None, None, *running, train, 0.1, _EPS)
        found = getattr(torch.ops.aten, operator)(g, x, weight, *running, *saved, train, *rest)
        return uneven(*[f for f, yes in zip(found, rest[1]) if yes])

    return probe


# -- the rules --------------------------------------------------------------------------------------------------------


def _defer_to_stock(input: Tensor, *_: Any) -> bool:
    """PyTorch's backward of an empty batch ends the process."""
    return input.numel() > 0


_ABOUT: dict[str, Any] = {
    "defer_to_stock": _defer_to_stock,
    "improves": "values",
    "source": "ATen native_batch_norm_backward, batch_norm_jvp; Ioffe, Szegedy, Batch Normalization, arXiv:1502.03167",
}
_STATISTICS = ("running_mean_out", "running_var_out")
_NO_BATCHES = dict.fromkeys(("vmap", "vmap-grad"), "PyTorch has no batching rule of the operator")
_ABOUT_BACKWARD: dict[str, Any] = {
    "improves": "values",
    "source": "ATen batchnorm_double_backward",
}

# fmt: off
rule(
    "aten::native_batch_norm",
    vjp={_PARAMETERS: lambda grad_result0, input, weight, running_mean, running_var, result1, result2, training, eps, output_mask:
         batch_norm_vjp(grad_result0, input, weight, running_mean, running_var, result1, result2, training, eps, output_mask)},
    jvp={"result0": batch_norm_jvp.bind(train="training")},
    not_differentiable=("result1", "result2"),
    samples=_samples,
    probe=_probe,
    **_ABOUT,
)
rule(
    "aten::_native_batch_norm_legit.no_stats",
    vjp={_PARAMETERS: lambda grad_result0, input, weight, result1, result2, eps, output_mask:
         batch_norm_vjp(grad_result0, input, weight, None, None, result1, result2, True, eps, output_mask)},
    jvp={"result0": batch_norm_jvp.bind(running_mean=None, running_var=None, train=True)},
    not_differentiable=("result1", "result2"),
    samples=_samples_without_statistics,
    probe=first_of("_native_batch_norm_legit", "no_stats"),
    **_ABOUT,
)
rule(
    "aten::native_batch_norm_backward",
    vjp={_INPUTS: lambda grad_result0, grad_result1, grad_result2, grad_out, input, weight, running_mean, running_var, train, eps:
         batch_norm_double_vjp(input, weight, grad_result0, grad_result1, grad_result2, grad_out, running_mean, running_var, train, eps),
         ("save_mean", "save_invstd"): _SAVED},
    jvp={_GRADIENTS: batch_norm_backward_jvp},
    samples=_backward_samples,
    probe=_backward_probe("native_batch_norm_backward"),
    **_ABOUT_BACKWARD,
)
rule(
    "aten::batch_norm_backward",
    vjp={_INPUTS: lambda grad_result0, grad_result1, grad_result2, grad_out, input, weight, running_mean, running_var, update, eps:
         batch_norm_double_vjp(input, weight, grad_result0, grad_result1, grad_result2, grad_out, running_mean, running_var, update, eps),
         ("save_mean", "save_var"): _SAVED},
    jvp={_GRADIENTS: batch_norm_backward_jvp.bind(train="update")},
    samples=_with_reserve,
    probe=_backward_probe("batch_norm_backward"),
    **_ABOUT_BACKWARD,
)
for _name, _statistics in (("_native_batch_norm_legit", ()), ("_native_batch_norm_legit_functional", _STATISTICS)):
    rule(
        f"aten::{_name}",
        vjp={_PARAMETERS: lambda grad_result0, input, weight, running_mean, running_var, result1, result2, training, eps, output_mask:
             batch_norm_vjp(grad_result0, input, weight, running_mean, running_var, result1, result2, training, eps, output_mask)},
        jvp={"result0": batch_norm_jvp.bind(train="training")},
        not_differentiable=("result1", "result2", *_statistics),
        samples=_samples_with_statistics,
        probe=_probe_with_statistics(_name),
        **_ABOUT,
    )
for _name, _statistics in (("_batch_norm_with_update", ()), ("_batch_norm_with_update_functional", _STATISTICS)):
    rule(
        f"aten::{_name}",
        vjp={_PARAMETERS: lambda grad_result0, input, weight, running_mean, running_var, result1, result2, eps, output_mask:
             batch_norm_vjp(grad_result0, input, weight, running_mean, running_var, result1, result2, True, eps, output_mask)},
        jvp={"result0": batch_norm_jvp.bind(train=True)},
        not_differentiable=("result1", "result2", "result3", *_statistics),
        gaps={} if _statistics else _NO_BATCHES,
        samples=_samples_of_update,
        probe=_probe_with_statistics(_name),
        **_ABOUT,
    )
# fmt: on
