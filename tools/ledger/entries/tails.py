"""Derivatives that cancel, overflow or underflow where the true one can be represented."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..programs import along, entry
from .samples import gradient

SATURATED = (
    "the derivative is computed from the result, which has rounded or overflowed; in place, nothing else is left"
)


@entry(195527, "first and second derivatives of sigmoid and tanh in their tails are zero",
       [4.248354255291589e-18, -4.248354255291589e-18, 1.6993417021166355e-17], open=SATURATED)  # fmt: skip
def _() -> Tensor:
    sigmoid = [along(torch.sigmoid, 40.0, modes) for modes in ("rev", "rev-rev")]
    return torch.stack([*sigmoid, along(torch.tanh, 20.0, "rev")])


@entry(195681, "gradient of sigmoid at a large number is zero", 5.551115123125775e-17, open=SATURATED)
def _() -> Tensor:
    return along(torch.sigmoid, 37.42994775023705, "rev")


@entry(195685, "gradient of tanh near saturation is zero in float32", [5.9604584379258085e-08], open=SATURATED)
def _() -> Tensor:
    return gradient(lambda x: torch.tanh(x).sum(), torch.tensor([-9.010913848876953]))[0]


@entry(192406, "gradient of expm1 at -40 is zero", 4.248354255291589e-18, open=SATURATED)
def _() -> Tensor:
    return along(torch.expm1, -40.0, "rev")


@entry(192407, "gradient of exp2 at 1024 is infinite", 1.2460659279417838e308, open=SATURATED)
def _() -> Tensor:
    return along(torch.exp2, 1024.0, "rev")


@entry(195680, "a component of the gradient of log_softmax cancels", [5.551115123125776e-17, -5.551115123125776e-17],
       open="its sum over the outputs cancels: 1 - exp of the result")  # fmt: skip
def _() -> Tensor:
    z = torch.tensor([37.42994775023705, 0.0], dtype=torch.float64)
    return gradient(lambda z: torch.log_softmax(z, -1)[0], z)[0]


@entry(195679, "second derivative of logsigmoid at a large number is zero", [-5.551115123125775e-17] * 2)
def _() -> Tensor:
    return torch.stack([along(F.logsigmoid, x, "rev-rev") for x in (37.42994775023705, -37.42994775023705)])


@entry(195529, "gradient of binary_cross_entropy_with_logits is zero in one tail", [-4.248354255291589e-18, 4.248354255291589e-18],
       override={"names": "*"})  # fmt: skip
def _() -> Tensor:
    logits, targets = torch.tensor([40.0, -40.0], dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64)
    return gradient(lambda x: F.binary_cross_entropy_with_logits(x, targets, reduction="sum"), logits)[0]


@entry(193040, "gradient of atan2 in float16 is infinite", [249.875, -249.875], tolerance=1e-3)
def _() -> Tensor:
    x = torch.tensor(2e-3, dtype=torch.float16)
    return torch.stack(gradient(torch.atan2, x, x))


@entry(96543, "gradient of the absolute value of a tiny complex number is nan", [[0.0, 0.0], [-1.0, 0.0]])
def _() -> Tensor:
    return torch.view_as_real(gradient(lambda z: z.abs().sum(), torch.tensor([0j, -1.0568e-23 + 0j]))[0])


@entry(46144, "gradient of the angle of a tiny complex number is nan", [[-5e29, 5e29]])
def _() -> Tensor:
    return torch.view_as_real(gradient(lambda z: z.angle().sum(), torch.tensor([1e-30 + 1e-30j]))[0])
