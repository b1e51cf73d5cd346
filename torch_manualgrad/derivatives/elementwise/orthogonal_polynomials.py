"""Orthogonal polynomials. PyTorch returns no gradient through them: results have no history, and no error is raised.

Each family has a recurrence in the degree,

    P_0 = 1,  P_1 = a x + b,  P_(k+1) = (A_k x + B_k) P_k - C_k P_(k-1),

and so have its derivatives of order $m$: $D^m P_(k+1) = (A_k x + B_k) D^m P_k + m A_k D^(m-1) P_k - C_k D^m P_(k-1)$.
They are finite and accurate at the ends of the interval too, where the closed forms divide by zero. The shifted
families are the others at $2 x - 1$. PyTorch rounds the degree towards zero, so the derivative with respect to it is zero.

Args:
    x: real.
    n: the degree; broadcasts with ``x``.

References:
    DLMF 18.9.1, https://dlmf.nist.gov/18.9.E1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, Sampler, elementwise, formula

from .strong_times import strong_times

MOST = 100_000  # the largest degree, whose recurrence takes a few seconds, and the largest order


class Family(NamedTuple):
    """The recurrence of a family: $P_1 = a x + b$, and $k$ -> (A_k, B_k, C_k)."""

    a: float
    b: float
    step: Callable[[int], tuple[float, float, float]]
    interval: tuple[float, float] = (-0.95, 0.95)


def _chebyshev(k: int) -> tuple[float, float, float]:
    return 2, 0, 1


FAMILIES = {
    "chebyshev_polynomial_t": Family(1, 0, _chebyshev),
    "chebyshev_polynomial_u": Family(2, 0, _chebyshev),
    "chebyshev_polynomial_v": Family(2, -1, _chebyshev),
    "chebyshev_polynomial_w": Family(2, 1, _chebyshev),
    "hermite_polynomial_h": Family(2, 0, lambda k: (2, 0, 2 * k), (-2.0, 2.0)),
    "hermite_polynomial_he": Family(1, 0, lambda k: (1, 0, k), (-2.0, 2.0)),
    "laguerre_polynomial_l": Family(-1, 1, lambda k: (-1 / (k + 1), (2 * k + 1) / (k + 1), k / (k + 1)), (0.1, 3.0)),
    "legendre_polynomial_p": Family(1, 0, lambda k: ((2 * k + 1) / (k + 1), 0, k / (k + 1))),
}


@formula(kernel=("default",))
def orthogonal_polynomial(x: Tensor, n: Tensor, family: str, order: int) -> Tensor:
    """A derivative of $P_n(x)$, of any order.

    Args:
        family: the name of PyTorch's operator, without ``special_``.
        order: $m$.

    Returns:
        The broadcast shape; 0 where $n < 0$.

    Raises:
        ValueError: a degree or an order above 100,000, or a negative order.
    """
    if not 0 <= order <= MOST:
        raise ValueError(f"order: expected 0 to {MOST}, got {order}")
    if x.is_meta or n.is_meta:
        return x.new_empty(torch.broadcast_shapes(x.shape, n.shape))
    a, b, step, _ = FAMILIES[family]
    degree = n.to(x.dtype).trunc()
    zero = torch.zeros_like(x)
    before = [torch.ones_like(x), *[zero] * order]  # D^0, ..., D^order of P_0
    now = [a * x + b, *[torch.full_like(x, a), *[zero] * order][:order]]
    found = torch.where(degree == 0, before[order], torch.where(degree == 1, now[order], 0))
    largest = int(degree.nan_to_num(0, 0, 0).amax()) if degree.numel() else 0
    if largest > MOST:
        raise ValueError(f"n: expected degrees of at most {MOST}, got {largest}")
    for k in range(1, largest):
        A, B, C = step(k)
        line = A * x + B
        after = [line * now[m] - C * before[m] + (m * A * now[m - 1] if m else 0) for m in range(order + 1)]
        before, now = now, after
        found = torch.where(degree == k + 1, now[order], found)
    return found


@orthogonal_polynomial.impl("default")
def _(x: Tensor, n: Tensor, family: str, order: int) -> Tensor:
    found: Tensor = orthogonal_polynomial.reference(x, n, family, order)
    return found.contiguous()


@orthogonal_polynomial.impl_fake
def _(x: Tensor, n: Tensor, family: str, order: int) -> Tensor:
    return x.new_empty(torch.broadcast_shapes(x.shape, n.shape))


@orthogonal_polynomial.impl_vmap
def _(info: Any, in_dims: Any, x: Tensor, n: Tensor, family: str, order: int) -> tuple[Tensor, int]:
    rank = max(t.dim() - (d is not None) for t, d in ((x, in_dims.x), (n, in_dims.n)))

    def aligned(t: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return t
        t = t.movedim(dim, 0)
        return t.reshape(t.shape[0], *[1] * (rank + 1 - t.dim()), *t.shape[1:])

    return orthogonal_polynomial(aligned(x, in_dims.x), aligned(n, in_dims.n), family, order), 0


@orthogonal_polynomial.impl_save_for_backward
def _(inputs: Any, output: Any) -> Any:
    return tuple(inputs)


@orthogonal_polynomial.impl_backward
def _(ctx: Any, saved: Any, grad: Tensor) -> Any:
    x, n, family, order = saved
    product = strong_times(grad, orthogonal_polynomial(x, n, family, order + 1))
    return {"x": product.sum_to_size(x.shape), "n": torch.zeros_like(n) if ctx.needs_input_grad["n"] else None}


@orthogonal_polynomial.impl_jvp
def _(inputs: Any, output: Any, tangents: Any) -> Any:
    x, n, family, order = inputs
    if tangents.x is None:
        return torch.zeros_like(output)
    return strong_times(tangents.x, orthogonal_polynomial(x, n, family, order + 1))


def _slope(family: str) -> Callable[[Tensor, Any], Tensor]:
    """The derivative of an operator in $x$, given $x$ and $n$, a tensor or a number."""

    def slope(x: Tensor, n: Any) -> Tensor:
        degree = n if isinstance(n, Tensor) else x.new_full((), n)
        x = x.to(torch.result_type(x, degree))  # the dtype of the polynomial
        if family.startswith("shifted_"):
            return 2 * orthogonal_polynomial(2 * x - 1, degree, family.removeprefix("shifted_"), 1)
        return orthogonal_polynomial(x, degree, family, 1)

    return slope


def _samples(interval: tuple[float, float]) -> Sampler:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        x = torch.linspace(*interval, 12, dtype=torch.float64, device="cpu").reshape(3, 4).to(device, dtype)
        degrees = torch.tensor([[0, 1, 2, 5], [3, 4, 1, 0], [2, 3, 0, 4]], device="cpu").to(device)
        yield Sample(x, degrees)
        yield Sample(x[:, :1], degrees[0])
        yield Sample(x[0, 1], degrees)

    return samples


_SHIFTED = {f"shifted_{name}": FAMILIES[name]._replace(interval=(0.03, 0.97)) for name in FAMILIES if "cheb" in name}

for _name, _family in (FAMILIES | _SHIFTED).items():
    _slope_of = _slope(_name)
    _about: dict[str, Any] = {"real_only": True, "improves": "values", "source": "DLMF 18.9.1"}
    elementwise(
        f"aten::special_{_name}",
        {"x": _slope_of, "n": None},
        samples=_samples(_family.interval),
        **_about,
    )
    elementwise(
        f"aten::special_{_name}.n_scalar",
        _slope_of,
        domain=_family.interval,
        arguments=[{"n": n} for n in (0, 1, 4)],
        **_about,
    )
