"""The rows of the table: every rule on its own samples, and public functions that reach several rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import torch_manualgrad as mg
from torch_manualgrad.core.rule import Sample
from torch_manualgrad.testing.comparison.problem import Problem


@dataclass(frozen=True)
class Row:
    """One operator, or one public function.

    Attributes:
        function: what is differentiated; where the operator's output has a free sign or phase, what does not depend on it.
        bare: the operator itself, whose output is its own and can be written to.
        claims: what the rule says that it has over stock; None for a public function.
        turns: the fast tests have one in so many of the ways: with other rows for the next way.
    """

    name: str
    function: Callable[..., Any]
    bare: Callable[..., Any]
    samples: Callable[[torch.dtype], Sequence[Sample]]
    claims: tuple[str, ...] | None = None
    turns: int = 1

    def calls(self, dtype: torch.dtype, limit: int | None = None) -> list[Call]:
        """Its calls in this dtype, those that the operator itself accepts; with a limit, spread over the list."""
        found = []
        for position, sample in enumerate(self.samples(dtype)):
            try:
                call = Call(self, dtype, position, Problem(self.function, sample))
                self.bare(*sample.args, **sample.kwargs)
            except (RuntimeError, NotImplementedError):
                assert dtype not in (torch.float64, torch.float32), f"{self.name} refuses its own sample {sample}"
                continue
            if call.problem.applicable:
                found.append(call)
        if limit is None or len(found) <= limit:
            return found
        full = [c for c in found if all(x.numel() for x in c.problem.primals)] or found
        return [full[i * (len(full) - 1) // max(limit - 1, 1)] for i in range(min(limit, len(full)))]


@dataclass(eq=False)
class Call:
    """One sample of one row: `problem` differentiates the row's function, `bare` the operator itself."""

    row: Row
    dtype: torch.dtype
    position: int
    problem: Problem
    references: dict[Any, Any] = field(default_factory=dict)

    @property
    def bare(self) -> Problem:
        if self.row.bare is self.row.function:
            return self.problem
        with torch.random.fork_rng():
            return Problem(self.row.bare, self.problem.sample)

    def __repr__(self) -> str:
        return f"{self.row.name} {self.problem.sample}"

    def __reduce__(self) -> tuple[Any, ...]:
        """By name, so that what holds a call can be pickled and sent to another process."""
        return _call, (self.row.name, self.dtype, self.position)


def _call(name: str, dtype: torch.dtype, position: int) -> Call:
    row = next(r for r in rows() if r.name == name)
    return Call(row, dtype, position, Problem(row.function, row.samples(dtype)[position]))


@cache
def rows() -> list[Row]:
    """All rows, rules first, in the order of the registry; none where PyTorch has no gradient to keep."""
    without_history = ("bessel", "_polynomial_", "airy")
    return [_rule_row(r) for r in mg.rules.values() if not any(word in r.name for word in without_history)] + [
        _public_row(name, *about) for name, about in PUBLIC.items()
    ]


def _rule_row(rule: Any) -> Row:
    def samples(dtype: torch.dtype) -> list[Sample]:
        if dtype not in (torch.float16, torch.bfloat16):
            return list(rule.samples(dtype, "cpu"))
        return [
            _rounded(s, dtype) for s in rule.samples(torch.float32, "cpu")
        ]  # not all samples are made in every dtype

    # a rule that claims nothing acts where it is named only
    return Row(rule.name, rule.probe, rule.aten, samples, rule.improves, turns=16 if rule.improves else 48)


def _rounded(sample: Sample, dtype: torch.dtype) -> Sample:
    def convert(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    args, kwargs = tree_map(convert, (sample.args, sample.kwargs))
    return Sample(*args, **kwargs)


def _matrix(m: int, n: int, dtype: torch.dtype, *batch: int) -> Tensor:
    """Random, its singular values between 1 and 2 and apart."""
    generator = torch.Generator().manual_seed(m + 10 * n)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    U, _, Vh = torch.linalg.svd(torch.randn(*batch, m, n, dtype=wide, generator=generator), full_matrices=False)
    S = torch.linspace(1, 2, min(m, n), dtype=torch.float64)
    return ((U * S) @ Vh).to(dtype)


def _hermitian(A: Tensor) -> Tensor:
    return (A + A.mH) / 2


def _positive(A: Tensor) -> Tensor:
    return A @ A.mH + torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)


def _square(dtype: torch.dtype) -> list[Tensor]:
    return [_matrix(3, 3, dtype), _matrix(2, 2, dtype, 2)]


def _tall(dtype: torch.dtype) -> list[Tensor]:
    return [_matrix(4, 2, dtype), _matrix(3, 2, dtype, 2)]


# name -> (function, inputs for a dtype: one call each, a tensor or a tuple of them)
PUBLIC: dict[str, tuple[Callable[..., Any], Callable[[torch.dtype], list[Any]]]] = {
    "torch.linalg.svdvals": (torch.linalg.svdvals, _tall),
    "torch.linalg.eigvalsh": (lambda A: torch.linalg.eigvalsh(_hermitian(A)), _square),
    "torch.linalg.eigvals": (lambda A: torch.linalg.eigvals(A).prod(-1), _square),
    "nuclear norm": (lambda A: torch.linalg.matrix_norm(A, "nuc"), _tall),
    "spectral norm": (lambda A: torch.linalg.matrix_norm(A, 2), _tall),
    "Frobenius norm": (torch.linalg.matrix_norm, _tall),
    "torch.norm": (lambda x: torch.norm(x, dim=-1), _tall),
    "torch.linalg.cond": (torch.linalg.cond, _square),
    "torch.linalg.det": (torch.linalg.det, _square),
    "torch.linalg.slogdet": (lambda A: torch.linalg.slogdet(A)[1], _square),
    "torch.linalg.inv": (torch.linalg.inv, _square),
    "torch.linalg.solve": (lambda A: torch.linalg.solve(A, A.mT), _square),
    "torch.linalg.pinv": (torch.linalg.pinv, _tall),
    "torch.linalg.cholesky": (lambda A: torch.linalg.cholesky(_positive(A)), _square),
    "torch.linalg.lstsq": (lambda A: torch.linalg.lstsq(A, A.conj() * 2 + 1).solution, _tall),
    "torch.linalg.qr": (torch.linalg.qr, _tall),
    "torch.linalg.matrix_power": (lambda A: torch.linalg.matrix_power(A, -2), _square),
    "torch.matrix_exp": (torch.matrix_exp, _square),
    "normalize": (torch.nn.functional.normalize, _tall),
    "cosine_similarity": (lambda x: torch.nn.functional.cosine_similarity(x, x.flip(-1) + 0.5), _tall),
    "torch.cdist": (lambda x: torch.cdist(x, x.flip(-1) + 0.5), _tall),
    "torch.pdist": (torch.pdist, lambda dtype: [_matrix(4, 3, dtype)]),
    "triplet_margin_loss": (
        lambda x: torch.nn.functional.triplet_margin_loss(x, x.flip(-1), 2 * x.flip(-2) + 1, margin=9.0),
        _tall,
    ),
}


def _public_row(name: str, function: Callable[..., Any], inputs: Callable[[torch.dtype], list[Any]]) -> Row:
    return Row(name, function, function, lambda dtype: [Sample(x) for x in inputs(dtype)], turns=12)
