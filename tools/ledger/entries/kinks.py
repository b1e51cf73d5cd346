"""nan where there is a derivative, and conventions at kinks."""

from __future__ import annotations

import math
from math import inf, nan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..programs import entry, path, total
from .samples import draw, gradient, second, vectors

linalg = torch.linalg


@entry(2421, "gradient of a norm at zero; its second derivative is nan", [0.0, 0.0, 0.0])
def _() -> Tensor:
    return second(lambda x: x.norm(), torch.zeros(3), torch.ones(3))


@entry(
    44452,
    "gradient of a norm with 0 < p < 1 at a zero entry is nan",
    lambda: [0.0, 1.0 + math.sqrt(2), 1 + 1 / math.sqrt(2)],
)
def _() -> Tensor:
    return gradient(lambda x: torch.linalg.vector_norm(x, 0.5), torch.tensor([0.0, 1.0, 2.0]).double())[0]


@entry(3264, "gradient of F.normalize with p = 1 at zeros is nan", [5.0, 5.0, 0.0])
def _() -> Tensor:
    return gradient(lambda x: F.normalize(x, p=1, dim=0).sum(), torch.tensor([0.0, 0.0, 0.2]).double())[0]


@entry(4320, "gradient of std of equal numbers; its second derivative is nan", [0.0, 0.0, 0.0])
def _() -> Tensor:
    return second(lambda x: x.std(), torch.full((3,), 2.0), torch.tensor([1.0, 2.0, 3.0]))


@entry(27134, "second derivative of a ** b at a = 0 in b is nan", 0.0)
def _() -> Tensor:
    b = torch.tensor(1.0, requires_grad=True)
    (g,) = torch.autograd.grad(torch.zeros(()) ** b, b, create_graph=True)
    return torch.autograd.grad(g, b)[0]


@entry(98276, "gradients of atan2 and angle at zero", [0.0, 0.0])
def _() -> Tensor:
    return torch.stack(gradient(lambda y, x: torch.atan2(y, x), torch.zeros(()), torch.zeros(())))


@entry(31829, "gradients of logsumexp, softmax and logsigmoid at -inf", [0.0, 0.0])
def _() -> Tensor:
    return gradient(lambda x: torch.logsumexp(x, 0), torch.full((2,), -inf))[0]


@entry(49724, "gradient of logaddexp of two -inf", [0.5, 0.5])
def _() -> Tensor:
    return torch.stack(gradient(torch.logaddexp, torch.tensor(-inf), torch.tensor(-inf)))


@entry(49886, "backward of SVD with several zero singular values", lambda: torch.ones(4, 4, dtype=torch.float64))
def _() -> Tensor:
    def rebuilt(x: Tensor) -> Tensor:
        u, s, vh = linalg.svd(x)
        return (u * s @ vh).sum()

    return gradient(rebuilt, draw(4, 1) @ draw(1, 4, seed=1))[0]


@entry(
    47599,
    "gradient through degenerate eigenvectors where the loss is well defined",
    lambda: _projector_truth(),
    tolerance=1e-5,
)
def _() -> Tensor:
    return gradient(_projector_loss, torch.diag(torch.tensor([1.0, 1.0, 3.0]).double()))[0]


def _projector_loss(a: Tensor) -> Tensor:
    _, v = linalg.eigh((a + a.mT) / 2)
    return total(v[:, :2] @ v[:, :2].mT)


def _projector_truth() -> Tensor:
    a, h = torch.diag(torch.tensor([1.0, 1.0, 3.0]).double()), 1e-5
    steps = [h * e.reshape(3, 3) for e in torch.eye(9, dtype=torch.float64)]
    return torch.stack([(_projector_loss(a + e) - _projector_loss(a - e)) / (2 * h) for e in steps]).reshape(3, 3)


@entry(
    23133,
    "gradient through symmetric eigenvectors of repeated eigenvalues is nan",
    lambda: torch.eye(3).double() * math.e,
)
def _() -> Tensor:
    def trace_exp(a: Tensor) -> Tensor:
        w, v = linalg.eigh((a + a.mT) / 2)
        return ((v * w.exp()) @ v.mT).trace()

    return gradient(trace_exp, torch.eye(3).double())[0]


@entry(76531, "nan in the backward of eigh at close eigenvalues", lambda: torch.ones(3, 3).double())
def _() -> Tensor:
    def rebuilt(a: Tensor) -> Tensor:
        w, v = linalg.eigh(a)
        return ((v * w) @ v.mT).sum()

    return gradient(lambda a: rebuilt((a + a.mT) / 2), torch.diag(torch.tensor([1.0, 1.0, 2.0]).double()))[0]


path(55676, "eigenvectors of complex Hermitian matrices, by their absolute values",
     lambda t: total(linalg.eigh(_hermitian(t))[1].abs()), 0.3, "rev-rev")  # fmt: skip


def _hermitian(t: Tensor) -> Tensor:
    a = torch.complex(vectors(t, 3, 3), vectors(t, 3, 3, seed=4))
    return a + a.mH


@entry(193006, "gradient of a norm whose square overflows is zero", [1.0, 1e-20])
def _() -> Tensor:
    return gradient(lambda x: linalg.norm(x), torch.tensor([1e20, 1.0]))[0]


@entry(41779, "gradient of the maximum norm at ties", [0.5, 0.0, -0.5])
def _() -> Tensor:
    return gradient(lambda x: x.norm(p=inf), torch.tensor([9.0, 2.0, -9.0]))[0]


@entry(
    194705, "Hessian of singular values at large scales is nan", lambda: _svdvals_hessian(1.0) / 1e19, tolerance=1e-3
)
def _() -> Tensor:
    return _svdvals_hessian(1e19)


def _svdvals_hessian(scale: float) -> Tensor:
    a = torch.tensor([[4.0, 1.0, 0.0], [1.0, 3.0, 1.0], [0.0, 1.0, 2.0]]) * scale
    return torch.func.hessian(lambda x: linalg.svdvals(x)[0])(a)


@entry(194699, "gradient of prod with zeros under torch.func overflows to nan", lambda: torch.zeros(3, 3))
def _() -> Tensor:
    x = torch.tensor([[1e13, 0.0, 0.0], [1e13, 1e13, 0.0], [1e13, 1e13, 1e13]])
    return torch.func.grad(torch.prod)(x)


def _at_nan(f: Any) -> Tensor:
    g = gradient(lambda x: f(x).sum(), torch.full((35,), nan))[0]
    return (g.isnan() != g.isnan()[0]).sum() + ((g != g[0]) & ~g.isnan()).sum()


@entry(
    195075,
    "backward of logit and activations at nan depends on the length of the tensor",
    [0] * 7,
    override={"names": "*"},
)
def _() -> Tensor:
    functions = (lambda x: torch.logit(x, eps=0.1), F.hardtanh, F.hardshrink, F.softshrink, F.elu, F.celu, F.hardswish)
    return torch.stack([_at_nan(f) for f in functions])


@entry(95180, "second derivative of 0 ** x in x is nan", 0.0)
def _() -> Tensor:
    return second(lambda x: torch.zeros(()) ** x, torch.zeros(()), torch.ones(()))


@entry(8940, "gradient of x ** 0 at zero is nan", [0.0, 0.0])
def _() -> Tensor:
    return gradient(lambda x: (x**0).sum(), torch.tensor([0.0, 1.0]))[0]


@entry(82644, "backward of prod of one zero raises", [1.0])
def _() -> Tensor:
    return gradient(lambda x: x.prod(0), torch.zeros(1))[0]


@entry(37154, "gradient of cdist at equal points is nan", lambda: torch.zeros(30, 3))
def _() -> Tensor:
    x = draw(30, 3)
    equal = torch.eye(30, dtype=torch.float64)
    return gradient(lambda y: (torch.cdist(y, x, compute_mode="use_mm_for_euclid_dist") * equal).sum(), x)[0]


@entry(36493, "gradient of cdist with p < 1 where two coordinates are almost equal is nan", lambda: _fractional_truth())
def _() -> Tensor:
    return gradient(lambda x: torch.cdist(x, torch.zeros(1, 2), p=0.5)[0, 0], torch.tensor([[1e-38, 1.0]]))[0]


def _fractional_truth() -> list[list[float]]:
    # (sqrt(a) + sqrt(b))^2 has the derivative (sqrt(a) + sqrt(b)) / sqrt(a)
    root = math.sqrt(1e-38)
    return [[(root + 1) / root, root + 1]]


def _power(number: int, title: str) -> None:
    def program() -> Tensor:
        base = torch.tensor([-1.5, -0.5], dtype=torch.float64)
        exponent = torch.tensor([1.5 + 0.5j, 0.3 - 1.0j], dtype=torch.complex128)
        found = gradient(lambda x, y: torch.pow(x, y).real.sum(), base, exponent)
        return torch.cat([found[0], torch.view_as_real(found[1]).flatten()])

    entry(number, title, lambda: _power_truth())(program)


def _power_truth() -> Tensor:
    base = torch.tensor([-1.5, -0.5], dtype=torch.complex128)
    exponent = torch.tensor([1.5 + 0.5j, 0.3 - 1.0j], dtype=torch.complex128)
    in_base, in_exponent = exponent * base ** (exponent - 1), base**exponent * base.log()
    return torch.cat([in_base.real, torch.view_as_real(in_exponent.conj().resolve_conj()).flatten()])


_power(89903, "gradient of a negative real number to a complex power, in the power")
_power(95111, "Tensor.pow of negative numbers to complex powers has a gradient of nan")
