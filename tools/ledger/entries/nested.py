"""Nested tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..programs import entry, total
from .samples import draw


def _jagged(*lengths: int, width: int = 4, seed: int = 0) -> tuple[list[Tensor], Any]:
    parts = [draw(n, width, seed=seed + i).requires_grad_() for i, n in enumerate(lengths)]
    return parts, lambda: torch.nested.as_nested_tensor(parts, layout=torch.jagged)


@entry(132695, "backward of a jagged tensor times a tensor of shape (batch, 1, 1)", lambda: _per_batch_truth())
def _() -> Tensor:
    _, make = _jagged(5, 3)
    w = torch.tensor([10.0, 100.0]).double().reshape(2, 1, 1).requires_grad_()
    product = make() * w
    return torch.autograd.grad(product, w, torch.ones_like(product))[0].flatten()


def _per_batch_truth() -> list[float]:
    return [float(draw(5, 4).sum()), float(draw(3, 4, seed=1).sum())]


@entry(145256, "backward of a jagged tensor scaled and shifted for each component", lambda: _modulated_truth())
def _() -> Tensor:
    _, make = _jagged(5, 3)
    scale = torch.ones(2, 1, 4, dtype=torch.float64, requires_grad=True)
    y = make() * (1 + scale)
    return torch.autograd.grad(y, scale, torch.ones_like(y))[0].squeeze(1)


def _modulated_truth() -> Tensor:
    return torch.stack([draw(5, 4).sum(0), draw(3, 4, seed=1).sum(0)])


@entry(118107, "reductions of jagged tensors have no backward", lambda: [1.0] * 12)
def _() -> Tensor:
    parts, make = _jagged(2, 1)
    y = make().sum(1).sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(y, parts)])


@entry(145257, "backward of an embedding of jagged indices", lambda: [2.0, 1.0, 1.0])
def _() -> Tensor:
    weight = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    x = torch.nested.nested_tensor([torch.tensor([0, 1]), torch.tensor([0, 2])], layout=torch.jagged)
    y = F.embedding(x, weight)
    return torch.autograd.grad(y.values().sum(), weight)[0][:, 0]


@entry(146404, "backward of a product of jagged tensors whose result is a dense tensor", lambda: [90.0, 45.0])
def _() -> Tensor:
    a = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)], layout=torch.jagged, requires_grad=True)
    b = torch.nested.nested_tensor_from_jagged(torch.full((5, 3), 2.0), offsets=a.offsets()).requires_grad_()
    y = a.transpose(-2, -1) @ b
    return torch.stack([g.values().sum() for g in torch.autograd.grad(y.sum(), [a, b])])


def _strided(f: Any) -> Any:
    """The gradients of the components of a strided nested tensor, and those of the same function of each."""
    parts = [draw(n, 3, seed=n).requires_grad_() for n in (1, 2)]

    def gradients(outputs: list[Tensor]) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(total(*outputs), parts)])

    def program() -> Tensor:
        padded = torch.nested.to_padded_tensor(f(torch.nested.as_nested_tensor(parts)), 0.0)
        return gradients([padded[0, :1], padded[1]])

    return program, lambda: gradients([f(x) for x in parts])


def _normalized(x: Any) -> Any:
    return F.layer_norm(x, [3], torch.tensor([1.0, 2.0, 3.0]).double(), torch.zeros(3).double())


_program, _truth = _strided(_normalized)
entry(94702, "layer_norm of a strided nested tensor has no backward", _truth)(_program)
_program, _truth = _strided(lambda x: F.relu(F.gelu(x)))
entry(94701, "relu and gelu of a strided nested tensor have no backward", _truth)(_program)


@entry(138831, "backward of the mean of a jagged tensor", lambda: [0.25] * 16)
def _() -> Tensor:
    parts, make = _jagged(1, 3)
    y = make().mean(-1, keepdim=True)
    return torch.cat([g.flatten() for g in torch.autograd.grad(y, parts, torch.ones_like(y))])


@entry(125214, "backward of one component of a linear layer of a jagged tensor", lambda: [8.0, 0.0])
def _() -> Tensor:
    parts, make = _jagged(2, 3)
    first = F.linear(make(), torch.ones(1, 4, dtype=torch.float64)).unbind()[0].sum()
    return torch.stack([g.sum() for g in torch.autograd.grad(first, parts)])


@entry(130538, "layer_norm of a jagged tensor whose ragged dimension is not the second", lambda: _moved_truth())
def _() -> Tensor:
    parts = [draw(2, 2, 4, seed=i).requires_grad_() for i in range(2)]
    x = torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    return torch.cat([g.flatten() for g in torch.autograd.grad(total(*F.layer_norm(x, [4]).unbind()), parts)])


def _moved_truth() -> Tensor:
    parts = [draw(2, 2, 4, seed=i).requires_grad_() for i in range(2)]
    outputs = [F.layer_norm(x.transpose(0, 1), [4]) for x in parts]
    return torch.cat([g.flatten() for g in torch.autograd.grad(total(*outputs), parts)])


def _narrowed() -> Tensor:
    padded = torch.ones(2, 3, 2, dtype=torch.float64, requires_grad=True)
    x = torch.nested.narrow(padded, 1, 0, torch.tensor([1, 3]), layout=torch.jagged).contiguous()
    return torch.autograd.grad(x.values().sum(), padded)[0].sum(-1)


@entry(145837, "backward of nested.narrow, made contiguous", [[2.0, 0.0, 0.0], [2.0, 2.0, 2.0]])
def _() -> Tensor:
    return _narrowed()


@entry(161818, "backward of nested.narrow with anomaly detection", [[2.0, 0.0, 0.0], [2.0, 2.0, 2.0]])
def _() -> Tensor:
    with torch.autograd.set_detect_anomaly(True):
        return _narrowed()
