"""Ways to replace or to define a derivative."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import torch_manualgrad as mg

from ..programs import along, entry


@entry(
    139707,
    "no way to replace the derivative of an operator for a while",
    [7.0, 1.0],
    override=None,
    ours=lambda: _replaced(),
)
def _() -> Tensor:
    raise NotImplementedError("torch.library has no scoped override of a derivative")


def _replaced() -> Tensor:
    rule = mg.elementwise("aten::sin", lambda self: 7.0, register=False)
    x = torch.zeros((), requires_grad=True)
    with mg.override(rule):
        (inside,) = torch.autograd.grad(x.sin(), x)
    return torch.stack([inside, torch.autograd.grad(x.sin(), x)[0]])


@entry(87222, "custom_jvp and custom_vjp", [3.0, 5.0], override=None, ours=lambda: _own_derivatives())
def _() -> Tensor:
    raise NotImplementedError("torch.func has no custom_jvp and no custom_vjp")


def _own_derivatives() -> Tensor:
    op = mg.custom_op("ledger::own(Tensor x) -> Tensor")(lambda x: x.sin())
    op.impl_fake(torch.empty_like)
    op.impl_save_for_backward(lambda inputs, output: inputs.x)
    op.impl_jvp(lambda inputs, output, tangents: 3 * tangents.x)
    op.impl_backward(lambda ctx, saved, grad: {"x": 5 * grad})
    try:
        return torch.stack([along(op, 0.0, "fwd"), along(op, 0.0, "func")])
    finally:
        op.undefine()


@entry(76324, "Bessel functions of any order: none here, but a custom op of one has all derivatives", lambda: _bessel_truth(),
       override=None, ours=lambda: _bessel_second_derivatives(), tolerance=1e-6)  # fmt: skip
def _() -> Tensor:
    return torch.special.bessel_jn(2, torch.tensor(1.5))  # type: ignore[attr-defined, no-any-return]


def _bessel_second_derivatives() -> Tensor:
    op = mg.custom_op("ledger::bessel_j(int n, Tensor x) -> Tensor")(_bessel)
    op.impl_fake(lambda n, x: torch.empty_like(x))
    op.impl_save_for_backward(lambda inputs, output: (inputs.n, inputs.x))
    op.impl_backward(
        lambda ctx, saved, grad: {"x": grad * (op(saved[0] - 1, saved[1]) - op(saved[0] + 1, saved[1])) / 2}
    )
    try:
        return torch.stack([along(lambda x: op(2, x), 1.5, modes) for modes in ("rev-rev", "fwd-fwd", "fwd-func")])
    finally:
        op.undefine()


def _bessel(n: int, x: Tensor) -> Tensor:
    angles = torch.arange(64, dtype=x.dtype) * (2 * math.pi / 64)  # the trapezoidal rule, which is exact here
    return (n * angles - x.unsqueeze(-1) * angles.sin()).cos().mean(-1)


def _bessel_truth() -> list[float]:
    j0, j1 = (
        f(torch.tensor(1.5, dtype=torch.float64)).item() for f in (torch.special.bessel_j0, torch.special.bessel_j1)
    )
    x = 1.5
    j2 = 2 * j1 / x - j0
    j2_prime = j1 - 2 * j2 / x
    return [-j2_prime / x - (1 - 4 / x**2) * j2] * 3  # Bessel's equation


@entry(93270, "derivatives of high order are slow: a Taylor series", [math.exp(0.5)] * 8, override=None, tolerance=1e-10,
       ours=lambda: torch.stack(mg.forward_ad.directional(torch.exp, torch.tensor(0.5).double(), torch.tensor(1.0).double(), 8)))  # fmt: skip
def _() -> Tensor:
    return torch.stack([along(torch.exp, 0.5, "-".join(["rev"] * order)) for order in range(1, 9)])
