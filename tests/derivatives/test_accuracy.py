"""Under an override no derivative is less accurate than PyTorch's, up to the third order, by tools/accuracy.py.

It compares with mpmath at points of every size and sign. What is allowed in a region is the larger of PyTorch's largest error and
4 units in the last place.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[2] / "tools"
if not TOOLS.exists():
    pytest.skip("the tools are not beside the tests", allow_module_level=True)
sys.path.insert(0, str(TOOLS))
import accuracy  # noqa: E402

sys.path.remove(str(TOOLS))

_ORDER = "as many roundings as PyTorch's, in another order: {} units next to {}, each the largest of 200 errors"
_BOTH = "PyTorch's derivative cancels at the same place, and both errors are noise: {} units next to {}"
# By how much an error may be larger than what is allowed, and why.
BY_CHANCE = {
    ("log_ndtr", "float64"): (2.0, _ORDER.format(6.7, 2.7)),
    ("log_ndtr", "float32"): (2.0, _ORDER.format(18.8, 10.8)),
    ("exp2", "complex128"): (1.2, _ORDER.format(5.2, 4.5)),
    ("exp2", "complex64"): (1.2, _ORDER.format(5.9, 5.1)),
    ("ndtri", "float64"): (1.2, _ORDER.format(7.1, 6.1)),
    ("mish", "float64"): (1.2, _ORDER.format(4.4, 3.1)),
    ("mish", "float32"): (1.5, _ORDER.format(5.2, 2.2)),
    ("gelu", "float64"): (1.5, "at 38 the density is denormal: 117 units next to 90"),
    ("gelu, tanh", "float64"): (1.1, _ORDER.format(4.1, 3.1)),
    ("silu", "complex128"): (1.1, _BOTH.format("1.07e16", "1.03e16")),
    ("logaddexp2(x, 0)", "float64"): (1.5, _ORDER.format(5.6, 4.6)),
    ("logaddexp2(x, 0)", "float32"): (1.5, _ORDER.format(5.1, 4.0)),
    ("sinc", "complex64"): (1.2, _ORDER.format(4.7, 4.4)),
    ("atan", "bfloat16"): (1.1, _BOTH.format(262.1, 261.6)),
    ("atan2(x, 3)", "float64"): (1.2, "the squares of hypot round twice: 4.2 units, of which 4 are allowed"),
    ("atan2(x, 3)", "float32"): (1.2, "the squares of hypot round twice: 4.5 units, of which 4 are allowed"),
    ("atan2(3, x)", "float64"): (1.2, "the squares of hypot round twice: 4.2 units, of which 4 are allowed"),
    ("atan2(3, x)", "float32"): (1.2, "the squares of hypot round twice: 4.5 units, of which 4 are allowed"),
    ("abs(x + 2i)", "float64"): (1.2, _ORDER.format(4.5, 2.8)),
    ("abs(x + 2i)", "float32"): (1.1, _ORDER.format(4.1, 3.1)),
    ("abs(1 + x i)", "float64"): (1.1, _ORDER.format(4.4, 3.2)),
    ("abs(1 + x i)", "float32"): (1.1, _ORDER.format(4.4, 3.4)),
    ("re sgn(x + 2i)", "float64"): (1.5, _ORDER.format(7.7, 5.7)),
    ("re sgn(x + 2i)", "float32"): (1.5, _ORDER.format(6.4, 4.4)),
    ("i0e", "float64"): (1.2, "at 2 both are differences of nearly equal numbers: 9.9 units next to 8.6"),
    ("i1e", "float64"): (1.5, "at 2 both are differences of nearly equal numbers: 31.5 units next to 24.5"),
    ("i1e", "float32"): (1.1, _BOTH.format(65.0, 64.0)),
    ("softsign", "bfloat16"): (
        6.0,
        "the two parts of the quotient's derivative cancel; PyTorch's are rounded more often, and by chance more alike",
    ),
    ("glu(1/2, x)", "float64"): (1.2, _ORDER.format(4.3, 3.5)),
    ("glu(1/2, x)", "float32"): (1.5, _ORDER.format(4.8, 3.0)),
    ("std(x, 1/2)", "bfloat16"): (1.2, _ORDER.format(6.4, 5.7)),
    ("layer_norm(x, 1/2, -1)", "float64"): (3.0, _BOTH.format("1.4e8", "5e7")),
    ("layer_norm(x, 1/2, -1)", "float32"): (20.0, _BOTH.format(60, 2.9) + ", at one point, -8"),
    ("vector_norm(x, 1/2), p = 3", "float64"): (1.2, _ORDER.format(4.8, 3.8)),
    ("vector_norm(x, 1/2), p = 3", "float32"): (1.1, _ORDER.format(4.2, 3.5)),
} | {
    ("vector_norm(x, 1/2), p = 1.5", dtype): (
        math.inf,
        "the exact third derivative is infinite in float32: nan in forward mode, where PyTorch's is inf. The powers of "
        "|x| / max |x| that would give inf lose the derivative in the largest entry, which is finite",
    )
    for dtype in ("float32", "bfloat16")
}  # fmt: skip


def worse(case, dtype, count):
    chance, _ = BY_CHANCE.get((case.name, str(dtype).removeprefix("torch.")), (1.0, ""))
    measured = accuracy.measure(case, dtype, count)
    return [m for m in measured if m.ours > chance * max(m.stock, accuracy.ALLOWED)]


PAIRS = [pytest.param(c, d, id=f"{c.name}-{str(d)[6:]}") for c in accuracy.CASES for d in accuracy.dtypes(c)]


@pytest.mark.parametrize("case, dtype", PAIRS)
def test_no_derivative_is_less_accurate_than_pytorchs(case, dtype):
    assert not worse(case, dtype, 6)


@pytest.mark.slow
@pytest.mark.parametrize("case, dtype", PAIRS)
def test_no_derivative_is_less_accurate_than_pytorchs_at_200_points(case, dtype):
    assert not worse(case, dtype, 200)


def _times_zero(function, x):
    """First and second derivatives, in both modes, of cotangents and tangents of zero."""
    zero = torch.zeros_like(x)
    first = lambda x: torch.func.jvp(function, (x,), (zero,))[1]  # noqa: E731
    found = [first(x), torch.func.jvp(first, (x,), (zero,))[1]]
    x = x.clone().requires_grad_()
    y = function(x)
    for _ in range(2):
        (y,) = torch.autograd.grad(y, x, zero, create_graph=True, materialize_grads=True)
        found.append(y.detach())
    return found


def test_a_zero_times_a_derivative_of_a_tiny_number_is_nan_only_where_pytorchs_is():
    """Where the derivative overflows, PyTorch multiplies by the zero before it divides by the tiny number."""
    worse = []
    for case in accuracy.CASES:
        low, high = case.domain
        x = torch.tensor([2.0**-140, 2.0**-126, 1e-20, 1e20])
        x = x[(x > low) & (x < high)]
        try:
            stock = _times_zero(case.function, x)
        except (RuntimeError, NotImplementedError):  # PyTorch has no second derivative of it
            continue
        for name, override in accuracy.OVERRIDES.items():
            with override():
                ours = _times_zero(case.function, x)
            if any((a.isnan() & ~b.isnan()).any() for a, b in zip(ours, stock)):
                worse.append((case.name, name))
    assert not worse


def test_every_exception_is_of_a_case():
    assert {name for name, _ in BY_CHANCE} <= {c.name for c in accuracy.CASES}
