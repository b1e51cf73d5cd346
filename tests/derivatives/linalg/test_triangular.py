"""Triangular solves: what is not read, subsets of cotangents, and where PyTorch's own derivative is wrong."""

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.derivatives.samples.drawing import random, random_conditioned
from torch_manualgrad.testing import Sample, check

DTYPES = [torch.float64, torch.complex128]
TRIANGULAR_SOLVES = [mg.rules[f"aten::{name}"] for name in ("linalg_solve_triangular", "triangular_solve")]
pytestmark = pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")


def test_a_gradient_has_the_shape_of_its_input():
    """From the rules themselves, without autograd, which would sum what was broadcast."""
    A, B = random_conditioned(2, 1, 3, 3, dtype=torch.float64), random(4, 3, 2, dtype=torch.float64)
    X = torch.linalg.solve_triangular(A, B, upper=True)
    current, legacy = TRIANGULAR_SOLVES
    for mask in ([True, True], [False, True]):
        gA, gB = current.vjp["self", "B"](X, A, B.shape, X, True, True, False, mask)
        assert gB.shape == B.shape and (gA.shape == A.shape if mask[0] else gA is None)
    gB, gA = legacy.vjp["self", "A"](X, A.expand(2, 4, 3, 3), B, A, X, True, False, False)
    assert (gB.shape, gA.shape) == (B.shape, A.shape)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("columns", [1, 3])
def test_each_subset_of_inputs_that_require_grad(columns, wanted, left):
    """Two ways to the gradient of B, few columns and many, and no work for one that nobody wants."""
    A = random_conditioned(2, 3, 3, dtype=torch.float64)
    B = random(3, columns, dtype=torch.float64)
    B = B if left else B.mT

    def gradients(solve):
        inputs = [x.clone().requires_grad_(w) for x, w in zip((A, B), wanted)]
        return torch.autograd.grad(solve(*inputs).sum(), [x for x, w in zip(inputs, wanted) if w])

    for solve in (
        lambda A, B: torch.linalg.solve_triangular(A, B, upper=True, left=left),
        lambda A, B: torch.triangular_solve(B if left else B.mT, A)[0],
    ):
        expected = gradients(solve)
        with mg.override(*TRIANGULAR_SOLVES):
            torch.testing.assert_close(gradients(solve), expected)


@pytest.mark.parametrize("unitriangular", [True, False])
@pytest.mark.parametrize("upper", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unread_entries_do_not_contribute(dtype, upper, unitriangular):
    """nan in the other triangle, and on a diagonal that counts as ones."""
    A = random_conditioned(3, 3, dtype=dtype)
    read = torch.ones(3, 3).triu(int(unitriangular)) if upper else torch.ones(3, 3).tril(-int(unitriangular))
    A = torch.where(read.bool(), A, torch.nan)
    B = random(3, 2, dtype=dtype)
    keywords = {"upper": upper, "unitriangular": unitriangular}
    clean = A.nan_to_num() + (torch.eye(3, dtype=dtype) if unitriangular else 0)
    for f in (
        lambda A, B: torch.linalg.solve_triangular(A, B, **keywords),
        lambda A, B: torch.triangular_solve(B, A, **keywords)[0],
    ):
        with mg.override(*TRIANGULAR_SOLVES):
            X, pullback = torch.func.vjp(f, A, B)
            gA, gB = pullback(torch.ones_like(X))
            tangent = torch.func.jvp(f, (A, B), (A, torch.zeros_like(B)))[1]  # the tangent has its nan there too
        torch.testing.assert_close(X, torch.linalg.solve(clean, B))
        assert gA[read == 0].eq(0).all()
        inverse = torch.linalg.inv(clean)
        torch.testing.assert_close(gB, inverse.mH @ torch.ones_like(X))
        torch.testing.assert_close(gA, (-gB @ X.mH) * read)
        torch.testing.assert_close(tangent, -inverse @ A.nan_to_num() @ X)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_legacy_jvp_is_wrong_in_pytorch_off_its_triangle_and_right_here(dtype, transpose):
    A, B = random_conditioned(3, 3, dtype=dtype), random(3, 2, dtype=dtype)
    dA = random(3, 3, dtype=dtype, seed=1)

    def f(A):
        return torch.triangular_solve(B, A, transpose=transpose)[0]

    h = 1e-6
    expected = (f(A + h * dA) - f(A - h * dA)) / (2 * h)
    assert not torch.allclose(torch.func.jvp(f, (A,), (dA,))[1], expected, rtol=1e-3)
    with mg.override("aten::triangular_solve"):
        torch.testing.assert_close(torch.func.jvp(f, (A,), (dA,))[1], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_legacy_subsets_of_cotangents(used):
    A = random_conditioned(2, 3, 3, dtype=torch.float64)
    B = random(3, 2, dtype=torch.float64)

    def f(B, A):
        outputs = torch.triangular_solve(B, A)
        return tuple(outputs[i] for i in used)

    with mg.override("aten::triangular_solve"):
        check(f, [Sample(B, A)], checks=("agreement", "duality"))


@pytest.mark.parametrize("n", [0, 1])
def test_smallest_sizes(n):
    A = torch.full((2, n, n), 2.0, requires_grad=True)
    B = torch.ones(2, n, 1, requires_grad=True)
    for f in (
        lambda A, B: torch.linalg.solve_triangular(A, B, upper=True),
        lambda A, B: torch.triangular_solve(B, A)[0],
    ):
        with mg.override(*TRIANGULAR_SOLVES):
            gA, _ = torch.autograd.grad(f(A, B).sum(), (A, B))
        torch.testing.assert_close(gA, torch.full((2, n, n), -0.25))


def test_layouts_and_float32():
    """Contiguous, column-major and strided inputs have one gradient, in the input's dtype."""
    A = 4 * torch.eye(4, dtype=torch.float64) + random(2, 4, 4, dtype=torch.float64)
    B = random(2, 4, 2, dtype=torch.float64, seed=1)

    def gradients(A, B):
        return torch.autograd.grad(torch.linalg.solve_triangular(A, B, upper=False).sin().sum(), (A, B))

    expected = gradients(A.clone().requires_grad_(), B.clone().requires_grad_())
    layouts = [(A, B), (A.mT.contiguous().mT, B.mT.contiguous().mT), (A.repeat_interleave(2, -1)[..., ::2], B)]
    for x, b in layouts:
        with mg.override(*TRIANGULAR_SOLVES):
            torch.testing.assert_close(gradients(x.requires_grad_(), b.requires_grad_()), expected)
            narrow = gradients(x.detach().float().requires_grad_(), b.detach().float().requires_grad_())
        assert all(g.dtype == torch.float32 for g in narrow)
        torch.testing.assert_close([g.double() for g in narrow], list(expected), rtol=1e-4, atol=1e-4)
