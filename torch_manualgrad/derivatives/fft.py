"""Discrete Fourier transforms: _fft_c2c, _fft_r2c, _fft_c2r.

The transform $F$ has the entries $s exp(-2 pi i j k / n)$, where the normalization determines $s$. $F$ is symmetric: its
adjoint is the transform in the other direction with the same $s$. Transforms from or to real signals keep half of the
spectrum in the last of their dims. Dims must not be negative: unlike torch.fft, the operators then write out of bounds.

Args:
    normalization: 0 for $s = 1$, 1 for $1 / sqrt(n)$, 2 for $1 / n$, where $n$ is the number of entries transformed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, linear_in


def _dims_fit(grad: Tensor, dim: Sequence[int]) -> str:
    """An error message if dims do not fit, else "". The operators write out of bounds for dims that do not exist."""
    if not dim or len(set(dim)) < len(dim) or not all(0 <= d < grad.dim() for d in dim):
        return f"dim: expected different dims of grad, from 0 to {grad.dim() - 1}, at least one, got {list(dim)}"
    return ""


def _spectrum_fits(grad: Tensor, dim: Sequence[int], onesided: bool, last_dim_size: int) -> str:
    """An error message if the sizes of a spectrum do not fit, else ""."""
    if wrong := _dims_fit(grad, dim):
        return wrong
    expected = last_dim_size // 2 + 1 if onesided else last_dim_size
    if last_dim_size < 1 or grad.shape[dim[-1]] != expected:
        return f"last_dim_size: expected an n with {grad.shape[dim[-1]]} frequencies, as grad has, got {last_dim_size}"
    return ""


@formula(requires=_spectrum_fits)
def fft_r2c_backward(
    grad: Tensor, dim: Sequence[int], normalization: int, onesided: bool, last_dim_size: int
) -> Tensor:
    """Cotangent of a real signal, given that of its spectrum: $Re F^H G$, with zeros for the missing half of $G$.

    Args:
        grad: $G$, complex, (*, n // 2 + 1, *) if ``onesided``, else (*, n, *). The last of ``dim`` has size $n$.
        dim: the dims that are transformed, at least one.
        onesided: whether the spectrum has only the frequencies from 0 to $n // 2$ in the last of ``dim``.
        last_dim_size: $n$.

    Returns:
        (*, n, *), real.
    """
    if onesided:
        last = dim[-1]
        ends = [0, 0] * (grad.dim() - last - 1)
        grad = torch.constant_pad_nd(grad, [*ends, 0, last_dim_size - grad.shape[last]])
    return torch.ops.aten._fft_c2c(grad, dim, normalization, False).real


@formula(requires=_dims_fit)
def fft_c2r_backward(grad: Tensor, dim: Sequence[int], normalization: int) -> Tensor:
    """Cotangent of half of a spectrum, given that of the real signal: $F g$, doubled where a frequency represents two.

    Args:
        grad: $g$, real, (*, n, *).
        dim: the dims that are transformed, at least one; the spectrum is halved in the last.

    Returns:
        (*, n // 2 + 1, *), complex.
    """
    found = torch.ops.aten._fft_r2c(grad, dim, normalization, True)
    last = dim[-1]
    n, half = grad.shape[last], found.shape[last]
    frequency = torch.arange(half, device=grad.device)
    times = torch.where((frequency > 0) & (frequency <= n - half), 2, 1)  # all but 0, and n / 2 if n is even
    return found * times.reshape([-1] + [1] * (grad.dim() - last - 1))


linear_in(
    "aten::_fft_c2c",
    {"self": lambda grad, dim, normalization, forward: torch.ops.aten._fft_c2c(grad, dim, normalization, not forward)},
)
linear_in(
    "aten::_fft_r2c",
    {
        "self": lambda grad, dim, normalization, onesided, self_sizes: fft_r2c_backward(
            grad, dim, normalization, onesided, self_sizes[dim[-1]]
        )
    },
    source="ATen fft_r2c_backward",
)
linear_in("aten::_fft_c2r", {"self": fft_c2r_backward}, source="ATen fft_c2r_backward")
