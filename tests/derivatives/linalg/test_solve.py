"""Solves at special points, where batches broadcast, and where PyTorch's own derivative is wrong."""

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.derivatives.samples.drawing import random, random_conditioned
from torch_manualgrad.testing import Sample, check

DTYPES = [torch.float64, torch.complex128]
SOLVE = mg.rules["aten::_linalg_solve_ex"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranks_that_differ(dtype):
    """Not in the rule's samples: PyTorch's own vmap of this forward raises."""
    with pytest.raises(RuntimeError):
        torch.vmap(torch.linalg.solve, in_dims=(None, 0))(torch.eye(3), torch.ones(4, 2, 3, 1))

    def A(*shape):
        return random_conditioned(*shape, dtype=dtype)

    def B(*shape):
        return random(*shape, dtype=dtype, seed=1)

    samples = [
        Sample(A(2, 3, 3), B(3)),
        Sample(A(3, 3), B(2, 3, 1)),
        Sample(A(2, 3, 3), B(3, 2)),
        Sample(A(2, 2, 2), B(2, 2)),  # vectors, not matrices
        Sample(A(3, 3), B(2, 2, 3), left=False),
    ]
    with mg.override(SOLVE):
        check(torch.linalg.solve, samples, checks=("agreement", "duality"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_cotangents_where_ranks_differ(dtype):
    """The formula itself composes with vmap there: a Jacobian by a batch of cotangents."""
    A, B = random_conditioned(3, 3, dtype=dtype), random(2, 3, 1, dtype=dtype)
    cotangents = random(4, 2, 3, 1, dtype=dtype)
    with mg.override(SOLVE):
        X, pullback = torch.func.vjp(torch.linalg.solve, A, B)
        batched = torch.vmap(pullback)(cotangents)
        for i, g in enumerate(cotangents):
            torch.testing.assert_close(tuple(b[i] for b in batched), pullback(g))
    without_factors = torch.vmap(lambda g: (mg.ops.solve_backward_A(g, B, A, X), mg.ops.solve_backward_self(g, B, A)))
    torch.testing.assert_close(without_factors(cotangents), batched)


@pytest.mark.parametrize("shape", [(3,), (3, 2), (1, 3, 3)])
def test_many_tangents_where_ranks_differ(shape):
    A, B = random_conditioned(2, 3, 3, dtype=torch.float64), random(*shape, dtype=torch.float64)
    with mg.override(SOLVE):
        for of_A in (A, A[:, None]):
            found = torch.func.jacfwd(torch.linalg.solve, 1)(of_A, B)
            expected = torch.func.jacrev(torch.linalg.solve, 1)(of_A, B)
            torch.testing.assert_close(found, expected)


def test_a_gradient_has_the_shape_of_its_input():
    """From the rules themselves, without autograd, which would sum what was broadcast."""
    A, B = random_conditioned(2, 1, 3, 3, dtype=torch.float64), random(4, 3, 2, dtype=torch.float64)
    X, LU, pivots, _ = torch.ops.aten._linalg_solve_ex(A, B)
    for mask in ([True, True], [False, True]):
        gA, gB = SOLVE.vjp["A", "B"](X, X, A, B.shape, LU, pivots, True, mask)
        assert gB.shape == B.shape and (gA.shape == A.shape if mask[0] else gA is None)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_second_order_forward_modes_where_stock_is_wrong_before_2_15(dtype, left):
    def f(t):
        return torch.linalg.solve(A + t * dA + t**2 * ddA, B, left=left)

    A, dA, ddA, B = (random(3, 3, dtype=dtype, seed=i) for i in range(4))
    A = A + 3 * torch.eye(3, dtype=dtype)

    def second():
        zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
        return torch.func.jvp(lambda t: torch.func.jvp(f, (t,), (one,))[1], (zero,), (one,))[1]

    inverse = torch.linalg.inv(A)
    expected = 2 * (inverse @ dA @ inverse @ dA @ inverse - inverse @ ddA @ inverse)
    expected = expected @ B if left else B @ expected
    assert torch.allclose(second(), expected, rtol=1e-2) == (torch.__version__ >= "2.15")
    with mg.override("aten::_linalg_solve_ex"):
        torch.testing.assert_close(second(), expected)


def test_third_order():
    A, B = random_conditioned(3, 3, dtype=torch.float64), random(3, dtype=torch.float64)
    inverse, E = torch.linalg.inv(A), random(3, 3, dtype=torch.float64, seed=2)

    def f(t):
        return torch.linalg.solve(A + t * E, B)

    expected = -6 * torch.linalg.matrix_power(inverse @ E, 3) @ inverse @ B
    zero = torch.zeros((), dtype=torch.float64)
    forward, reverse = torch.func.jacfwd, torch.func.jacrev
    with mg.override("aten::_linalg_solve_ex"):
        for a, b, c in ((forward, forward, forward), (reverse, forward, reverse), (forward, reverse, reverse)):
            torch.testing.assert_close(a(b(c(f)))(zero), expected)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("adjoint", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_gradients_from_the_factors_equal_those_from_the_matrix(dtype, adjoint, left):
    shapes = [((3, 3), (3, 2)), ((3, 3), (2, 3, 3)), ((2, 1, 3, 3), (2, 4, 3, 1)), ((2, 0, 0), (2, 0, 2))]
    for of_A, of_B in [*shapes, ((3, 3), (3, 0)), ((0, 2, 2), (0, 2, 1))]:
        for A in (random(*of_A, dtype=dtype), random(*of_A, dtype=dtype).mT):
            B = random(*of_B, dtype=dtype, seed=1)
            B = B if left else B.mT
            LU, pivots = torch.linalg.lu_factor(A)
            kernel = mg.ops.solve_again(A, LU, pivots, B, left, adjoint)
            reference = mg.ops.solve_again.reference(A, LU, pivots, B, left, adjoint)
            torch.testing.assert_close(kernel, reference, check_stride=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_singular_matrix_affects_its_own_gradient_only(dtype):
    A = random_conditioned(3, 2, 2, dtype=dtype)
    A[1] = 1.0
    B = random(3, 2, 2, dtype=dtype)

    def gradient(A, B):
        A = A.clone().requires_grad_()
        return torch.autograd.grad(torch.linalg.solve_ex(A, B)[0].abs().square().sum(), A)[0]

    with mg.override(SOLVE):
        whole = gradient(A, B)
        for i in (0, 2):
            torch.testing.assert_close(whole[i], gradient(A[i : i + 1], B[i : i + 1])[0])
        assert whole[[0, 2]].isfinite().all()
        assert not whole[1].isfinite().all()


def test_a_singular_matrix_raises_in_the_forward():
    A = torch.ones(2, 2, requires_grad=True)
    with mg.override(SOLVE), pytest.raises(torch.linalg.LinAlgError, match="singular"):
        torch.linalg.solve(A, torch.ones(2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stale_declarations(dtype):
    """solve_jvp, solve_backward_self and solve_backward_A are those of _linalg_solve_ex without its factors."""
    ops = mg.ops
    for of_A, of_B in (((3, 3), (3, 2)), ((3, 3), (3,)), ((2, 3, 3), (2, 3)), ((2, 3, 3), (3,)), ((3, 3), (2, 3, 1))):
        A, dA = random_conditioned(*of_A, dtype=dtype), random(*of_A, dtype=dtype, seed=1)
        B, dB = random(*of_B, dtype=dtype, seed=2), random(*of_B, dtype=dtype, seed=3)
        X, tangent = torch.func.jvp(torch.linalg.solve, (A, B), (dA, dB))
        torch.testing.assert_close(ops.solve_jvp(X, A, dA, dB), tangent)
        alone = ops.solve_jvp(X, A, dA, None) + ops.solve_jvp(X, A, None, dB)
        torch.testing.assert_close(alone, tangent)
        g = random(*X.shape, dtype=dtype, seed=4)
        gA, gB = torch.func.vjp(torch.linalg.solve, A, B)[1](g)
        torch.testing.assert_close(ops.solve_backward_A(g, B, A, X), gA)
        torch.testing.assert_close(ops.solve_backward_self(g, B, A), gB)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("columns", [1, 3])
def test_each_subset_of_inputs_that_require_grad(columns, wanted, left):
    """Few columns and many, and no work for a gradient that nobody wants."""
    A = random_conditioned(2, 3, 3, dtype=torch.float64)
    B = random(3, columns, dtype=torch.float64)
    B = B if left else B.mT

    def gradients(solve):
        inputs = [x.clone().requires_grad_(w) for x, w in zip((A, B), wanted)]
        return torch.autograd.grad(solve(*inputs).sum(), [x for x, w in zip(inputs, wanted) if w])

    def solve(A, B):
        return torch.linalg.solve(A, B, left=left)

    expected = gradients(solve)
    with mg.override(SOLVE):
        torch.testing.assert_close(gradients(solve), expected)


@pytest.mark.parametrize("n", [0, 1])
def test_smallest_sizes(n):
    A = torch.full((2, n, n), 2.0, requires_grad=True)
    B = torch.ones(2, n, 1, requires_grad=True)
    with mg.override(SOLVE):
        gA, _ = torch.autograd.grad(torch.linalg.solve(A, B).sum(), (A, B))
    torch.testing.assert_close(gA, torch.full((2, n, n), -0.25))


def test_layouts_and_float32():
    """Contiguous, column-major and strided inputs have one gradient, in the input's dtype."""
    A = 4 * torch.eye(4, dtype=torch.float64) + random(2, 4, 4, dtype=torch.float64)
    B = random(2, 4, 2, dtype=torch.float64, seed=1)

    def gradients(A, B):
        return torch.autograd.grad(torch.linalg.solve(A, B).sin().sum(), (A, B))

    expected = gradients(A.clone().requires_grad_(), B.clone().requires_grad_())
    layouts = [(A, B), (A.mT.contiguous().mT, B.mT.contiguous().mT), (A.repeat_interleave(2, -1)[..., ::2], B)]
    for x, b in layouts:
        with mg.override(SOLVE):
            torch.testing.assert_close(gradients(x.requires_grad_(), b.requires_grad_()), expected)
            narrow = gradients(x.detach().float().requires_grad_(), b.detach().float().requires_grad_())
        assert all(g.dtype == torch.float32 for g in narrow)
        torch.testing.assert_close([g.double() for g in narrow], list(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(3,), (3, 2)])
def test_errors_are_those_of_the_forward(shape):
    A, B = torch.eye(2, requires_grad=True), torch.ones(shape)
    with pytest.raises(RuntimeError) as stock:
        torch.linalg.solve(A, B)
    with mg.override(SOLVE), pytest.raises(RuntimeError) as ours:
        torch.linalg.solve(A, B)
    assert str(ours.value) == str(stock.value)
