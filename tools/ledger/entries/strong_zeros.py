"""Values that a mask removed, and whose derivative is nan or infinite."""

from __future__ import annotations

import math
from math import inf, nan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..programs import entry, path
from .samples import gradient

STRONG: dict[str, Any] = {"override": {"strong_zero": True}}


def _where(number: int, title: str, f: Any, points: list[float], expected: list[float]) -> None:
    entry(number, title, expected, **STRONG)(lambda: gradient(lambda x: f(x).sum(), torch.tensor(points))[0])


_where(
    68425,
    "where: exp overflows in the branch that is not taken",
    lambda x: torch.where(x <= 0, x.exp(), 1 + x),
    [100.0],
    [1.0],
)
_where(108618, "where: log2 in the branch that is not taken",
       lambda x: torch.where(x > 2, torch.log2(x), 2 * x), [0.0, 2.0, 3.0], [2.0, 2.0, 1 / (3 * math.log(2))])  # fmt: skip
_where(
    52248,
    "where leads to unexpected gradients",
    lambda x: torch.where(x < 1, x, (x - 1).sqrt()),
    [0.5, 1.25],
    [1.0, 1.0],
)
_where(156212, "where with nan and overflow in the branch that is not taken",
       lambda x: torch.where(x <= 10, x.exp(), 1), [1.0, 1e10], [math.e, 0.0])  # fmt: skip
_where(18287, "where: cos of inf in the branch that is not taken",
       lambda x: torch.where(x < 1, x.cos(), torch.zeros_like(x)), [0.0, inf], [0.0, 0.0])  # fmt: skip
_where(23395, "where: a gradient of inf in the branch that is not taken",
       lambda x: torch.where(x == 0, x / 2, x.sqrt() + 1), [16.0, 0.0], [0.125, 0.5])  # fmt: skip
_where(187297, "where: sqrt of a negative number in the branch that is not taken",
       lambda x: torch.where(x > 0, x.sqrt(), x), [-1.0, -4.0], [1.0, 1.0])  # fmt: skip


def _masked(number: int, title: str, f: Any, point: Any, expected: Any) -> None:
    entry(number, title, expected, **STRONG)(lambda: gradient(f, torch.as_tensor(point))[0])


_EVEN = torch.tensor([False, True])
_masked(
    4132, "x / 0, which a mask removes", lambda x: (x / torch.tensor([0.0, 1.0]))[_EVEN].sum(), [1.0, 1.0], [0.0, 1.0]
)
_masked(9688, "sqrt of 0, which indexing removes", lambda x: x.sqrt()[1], [0.0, 1.0], [0.0, 0.5])
_masked(
    10729, "clamp of an exp that overflows", lambda x: x.exp().clamp(max=1).sum(), [-1.0, 100.0], [math.exp(-1), 0.0]
)
_masked(16317, "0 / 0, which where removes",
        lambda x: torch.where(_EVEN, x / torch.tensor([0.0, 2.0]), torch.zeros(2)).sum(), [0.0, 1.0], [0.0, 0.5])  # fmt: skip
_masked(
    26799, "w / 0, which indexing removes", lambda w: (w / torch.tensor([1.0, 0.0, 1.0]))[0], [1.0] * 3, [1.0, 0.0, 0.0]
)
_masked(36923, "a division by zero, which where removes",
        lambda x: torch.where(x != 0, 2 / x, torch.zeros(2)).sum(), [0.0, 1.0], [0.0, -2.0])  # fmt: skip
_masked(67180, "nansum of a product with nan", lambda b: torch.nansum(torch.tensor([1.0, 2.0, nan]) * b), 1.0, 3.0)
_masked(89543, "squared error where a target is nan, which where removes",
        lambda x: torch.where(_EVEN, (x - torch.tensor([nan, 1.0])) ** 2, 0.0).sum(), [0.0, 3.0], [0.0, 4.0])  # fmt: skip
_masked(94700, "nan_to_num of x * nan", lambda x: (x * nan).nan_to_num(0).sum(), [1.0], [0.0])
_masked(121416, "losses without a reduction where a target is nan, which a mask removes",
        lambda x: sum(loss(x, torch.tensor([1.0, nan]), reduction="none")[~_EVEN].sum() for loss in _LOSSES),
        [3.0, 0.0], [4.0 + 1.0 + 1.0, 0.0])  # fmt: skip
_masked(91567, "third derivative of erf of a number that overflowed to infinity", lambda y: _third_of_erf(y), 70.8, 0.0)

_LOSSES = (F.mse_loss, F.smooth_l1_loss, F.huber_loss)


def _third_of_erf(y: Tensor) -> Tensor:
    f = torch.erf((1 / (y + 100) + 268).exp().log() + y + 100)
    for _ in range(2):
        (f,) = torch.autograd.grad(f, y, create_graph=True)
    return f


def _overwritten(x: Tensor) -> Tensor:
    y = (x.exp() + 1).log()
    y[1] = 0
    return y.sum()


_masked(17455, "an overflow that is overwritten in place", _overwritten, [0.0, 100.0], [0.5, 0.0])


def _linear_with_a_missing_row(weight: Tensor) -> Tensor:
    y = torch.tensor([[1.0, 1.0], [1.0, 1.0], [nan, nan]]) @ weight
    return y.masked_fill(y.isnan(), 0).sum()


_masked(23156, "a linear layer on rows of nan, which masked_fill removes", _linear_with_a_missing_row,
        torch.ones(2, 2), [[2.0, 2.0], [2.0, 2.0]])  # fmt: skip


def _missing_outputs(weight: Tensor) -> Tensor:
    target = torch.tensor([[nan, 0.0]])
    return torch.square(torch.ones(1, 1) @ weight - target)[~target.isnan()].sum()


_masked(
    64305,
    "a squared error where targets are nan, which a mask removes",
    _missing_outputs,
    torch.ones(1, 2),
    [[0.0, 2.0]],
)


def _attention(t: Tensor) -> Tensor:
    layer = torch.nn.MultiheadAttention(2, 1, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.5)
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(4, 1, 2) * t
    padding = torch.tensor([[False, False, True, True]])
    window = torch.tensor([[0, -inf, -inf, -inf], [0, 0, -inf, -inf], [-inf, 0, 0, -inf], [-inf, -inf, 0, 0]])
    return layer(x, x, x, key_padding_mask=padding, attn_mask=window.double())[0][:2].square().sum()


path(41508, "MultiheadAttention where a row is masked completely, and not used", _attention, 1.0, "rev", **STRONG)
