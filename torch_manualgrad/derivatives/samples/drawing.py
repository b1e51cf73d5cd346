"""Random tensors for samples: the same on every device and in every precision."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, Sampler, samples_for

__all__ = [
    "alike",
    "both",
    "distinct",
    "drawn_by",
    "drawn_for",
    "in_one_precision",
    "index",
    "leaf",
    "random",
    "random_conditioned",
    "random_definite",
    "spread",
]


def random(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """Normal numbers."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, dtype=wide, generator=torch.Generator().manual_seed(seed), device="cpu").to(device, dtype)


def random_conditioned(
    *shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0, least: float = 1.0
) -> Tensor:
    """Random matrices with the well separated singular values least, least + 0.7, ...: away from every kink."""
    X = random(*shape, dtype=dtype, seed=seed)
    U, S, Vh = torch.linalg.svd(X, full_matrices=False)
    S = least + 0.7 * torch.arange(S.shape[-1] - 1, -1, -1, dtype=S.dtype, device="cpu").expand(S.shape)
    return ((U * S.unsqueeze(-2)) @ Vh).to(device)


def random_definite(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """Hermitian positive definite matrices with well separated eigenvalues."""
    X = random_conditioned(*shape, dtype=dtype, seed=seed)
    return (X @ X.mH).to(device)


def leaf(x: Tensor) -> Tensor:
    """An input that is differentiated, in samples with others that are not."""
    return x.requires_grad_()


def _floating(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def in_one_precision(f: Callable[..., Any]) -> Callable[..., Any]:
    """A probe: the function, with its keyword arguments in the dtype of its first tensor."""

    def probe(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        same = {k: first.dtype if isinstance(v, torch.dtype) else _floating(v, first.dtype) for k, v in kwargs.items()}
        return f(first, *args, **same)

    return probe


def spread(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Tensor:
    """Normal numbers, moved away from zero."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    x = torch.randn(shape, dtype=wide, generator=generator, device="cpu")
    return (x + 0.3 * x.sgn()).to(device, dtype)


def alike(*layout: Any, spread: float = 1.0, complex_too: bool = False) -> Sampler:
    """Samples of random tensors of one shape: matrices, and tensors without dims.

    Args:
        layout: the positional arguments; the class ``Tensor`` stands for a tensor.
        spread: the standard deviation.
        complex_too: whether the operator takes complex tensors.

    Returns:
        A sampler, as `samples_for` takes it.
    """

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex and not complex_too:
            return
        wide = torch.complex128 if dtype.is_complex else torch.float64
        for shape in ((3, 4), ()):
            generator = torch.Generator().manual_seed(len(shape))
            yield Sample(
                *[
                    (spread * torch.randn(shape, dtype=wide, generator=generator, device="cpu")).to(device, dtype)
                    if a is Tensor
                    else a
                    for a in layout
                ]
            )

    return samples


def both(*several: Sampler) -> Sampler:
    """The samples of several samplers, one after the other."""
    return lambda dtype, device: [s for samples in several for s in samples(dtype, device)]


def distinct(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """Numbers from a seed, none of them near another or near zero."""
    generator = torch.Generator().manual_seed(seed)
    n = torch.Size(shape).numel()
    points = (torch.randperm(n, generator=generator, device="cpu").double() + 1 + seed % 7 / 10) * (
        2.0 / max(n, 1)
    ) - 0.9
    if dtype.is_complex:
        points = torch.complex(points, torch.rand(n, dtype=torch.float64, generator=generator, device="cpu") + 0.2)
    return points.reshape(shape).to(device, dtype)


def index(values: Any, device: torch.device | str = "cpu") -> Tensor:
    """A tensor of integers, or of booleans."""
    return torch.tensor(values, device=device, dtype=torch.int64 if values == [] else None)


def _drawing(dtype: torch.dtype, device: torch.device | str) -> Callable[..., Tensor]:
    """`distinct` numbers, with another seed at each call."""
    seeds = itertools.count()
    return lambda *shape: distinct(*shape, dtype=dtype, device=device, seed=next(seeds))


def drawn_by(*calls: Callable[..., Sequence[Any]], real_only: bool = False) -> Sampler:
    """Samples from functions ``(draw, index) -> arguments``, whose last may be a dictionary of keywords.

    ``draw(*shape)`` returns random numbers, different at each call; ``index`` a tensor of integers or booleans.
    """

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex and real_only:
            return
        for call in calls:
            arguments = list(call(_drawing(dtype, device), functools.partial(index, device=device)))
            keywords = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
            yield Sample(*arguments, **keywords)

    return samples


def drawn_for(operators: str | tuple[str, ...], *calls: Callable[..., Sequence[Any]], real_only: bool = False) -> None:
    """Register samples by `drawn_by` for one operator, or for several."""
    names = (operators,) if isinstance(operators, str) else operators
    samples_for(*names)(drawn_by(*calls, real_only=real_only))
