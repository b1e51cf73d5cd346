"""Under an override no derivative is less accurate than PyTorch's, up to the third order, by tools/accuracy.py.

It compares with mpmath at points of every size and sign. What is allowed in a region is the larger of PyTorch's largest error and
4 units in the last place.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
if not TOOLS.exists():
    pytest.skip("the tools are not beside the tests", allow_module_level=True)
sys.path.insert(0, str(TOOLS))
import accuracy  # noqa: E402

sys.path.remove(str(TOOLS))

_ORDER = "as many roundings as PyTorch's, in another order: the largest of 200 errors differs by chance"
_BOTH = "PyTorch's derivative cancels at the same place, and both errors are noise"
# By how much an error may be larger than what is allowed, and why.
BY_CHANCE = {
    "log_ndtr": (15.0, "near 0 both cancel; in float32 at 14 the density is denormal, and three factors of x follow"),
    "mish": (1.5, _ORDER),
    "gelu": (1.5, "at 38 the density is denormal in float64"),
    "gelu, tanh": (1.1, _ORDER),
    "silu": (1.1, _BOTH),
    "logaddexp2(x, 0)": (1.5, _ORDER),
    "erf": (1.1, "the density is denormal there"),
    "erfc": (1.1, "the density is denormal there"),
    "exp2": (1.5, _ORDER),
    "tan": (1.1, _ORDER),
    "sinc": (1.2, _ORDER),
    "asin": (1.5, _ORDER),
    "acos": (1.5, _ORDER),
    "atan": (2.0, _ORDER),
    "asinh": (2.0, _ORDER),
    "acosh": (2.0, _ORDER),
    "atan2(x, 3)": (1.5, _ORDER),
    "atan2(3, x)": (1.5, _ORDER),
    "hypot(x, 3)": (1.5, _ORDER),
    "sqrt": (
        math.inf,
        "the third derivative overflows in an intermediate, where it is within a factor of 2 of the largest float32",
    ),
    "ndtri": (1.5, _ORDER),
    "i0e": (1.5, "between 2 and 32 both are differences of nearly equal numbers"),
    "i1e": (1.5, "between 2 and 32 both are differences of nearly equal numbers"),
    "softsign": (
        6.0,
        "PyTorch composes it of a quotient and abs, and the two parts of the quotient's derivative cancel",
    ),
    "glu(1/2, x)": (1.5, _ORDER),
    "std(x, 1/2)": (2.0, _ORDER),
    "layer_norm(x, 1/2, -1)": (20.0, _BOTH),
    "vector_norm(x, 1/2), p = 3": (1.5, _ORDER),
    "vector_norm(x, 1/2), p = 1.5": (
        math.inf,
        "the third derivative of the smallest x overflows float32: nan for inf in forward mode, where PyTorch's is inf",
    ),
}


def worse(case, dtype, count):
    chance, _ = BY_CHANCE.get(case.name, (1.0, ""))
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


def test_every_exception_is_of_a_case():
    assert set(BY_CHANCE) <= {c.name for c in accuracy.CASES}
