"""Where the replacement primals are used: under override(forward=True), as operators, in mg.linalg."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.primal import DTYPES, eigh_jacobi, hermitian, lu_small, same_bits, svd_jacobi
from torch import Tensor
from torch.func import grad, jvp, vmap

import torch_manualgrad as mg
from torch_manualgrad import testing
from torch_manualgrad.derivatives.samples.drawing import random, random_conditioned
from torch_manualgrad.primal import eigh, lu, svd

NAMES = ("aten::_linalg_svd", "aten::_linalg_eigh", "aten::linalg_lu")


def calls(A: Tensor) -> list[tuple[Tensor, ...]]:
    H = hermitian(A)
    return [tuple(torch.linalg.svd(A)), tuple(torch.linalg.eigh(H)), tuple(torch.linalg.lu(A))]


def ours(A: Tensor) -> list[tuple[Tensor, ...]]:
    return [svd_jacobi(A), eigh_jacobi(hermitian(A)), lu_small(A)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_override_uses_them_only_when_told_to(on_cpu, dtype):
    A = random(6, 3, 3, dtype=dtype)
    stock = calls(A)
    assert not same_bits(stock[0], ours(A)[0])
    with mg.override(*NAMES):
        assert all(map(same_bits, calls(A), stock))
        assert all(map(same_bits, [tuple(x.detach() for x in c) for c in calls(A.clone().requires_grad_())], stock))
    with mg.override(*NAMES, forward=True):
        for found in (
            calls(A),
            [tuple(x.detach() for x in c) for c in calls(A.clone().requires_grad_())],
            vmap(calls)(A),
            vmap(vmap(calls, in_dims=1), in_dims=3)(A.reshape(2, 3, 3, 3).permute(2, 1, 3, 0)),
            jvp(lambda A: tuple(calls(A)), (A,), (A,))[0],
        ):
            found = [tuple(x.reshape(y.shape) for x, y in zip(c, d)) for c, d in zip(found, ours(A))]
            assert all(map(same_bits, found, ours(A)))
        assert same_bits((torch.linalg.svdvals(A),), (ours(A)[0][1],))
        assert same_bits((torch.linalg.eigvalsh(hermitian(A)),), (ours(A)[1][0],))
    assert all(map(same_bits, calls(A), stock))


def test_unsupported_sizes_and_dtypes_fall_back_to_pytorch(on_cpu):
    """Other sizes, full factors, half precision."""
    for A in (
        random(2, 17, 17, dtype=torch.float64),
        random(2, 9, 9, dtype=torch.complex128),
        random(2, 40, 3, dtype=torch.float64),
    ):
        stock = torch.linalg.svd(A, full_matrices=False)
        with mg.override("aten::_linalg_svd", forward=True):
            assert same_bits(torch.linalg.svd(A, full_matrices=False), stock)
    A = random(2, 4, 3, dtype=torch.float64)
    stock = torch.linalg.svd(A)
    with mg.override(*NAMES, forward=True):
        assert same_bits(torch.linalg.svd(A), stock)
        assert same_bits(torch.linalg.svd(A, full_matrices=False), svd_jacobi(A))
        with pytest.raises(RuntimeError, match="UPLO"):
            torch.linalg.eigh(A[..., :3, :], UPLO="X")
        with pytest.raises(RuntimeError, match="square"):
            torch.linalg.eigh(A)
        with pytest.raises(RuntimeError, match="pivoting"):
            torch.linalg.lu(A, pivot=False)
        with pytest.raises(RuntimeError):
            torch.linalg.svd(A.half())
        assert same_bits(torch.linalg.eigh(hermitian(A[:, :3]), UPLO="u"), eigh_jacobi(hermitian(A[:, :3]), False))


def pairs(A: Tensor) -> Tensor:
    """Without phases."""
    U, S, Vh = torch.linalg.svd(A, full_matrices=False)
    return U.mT.unsqueeze(-1) * Vh.unsqueeze(-2) * S.sqrt().unsqueeze(-1).unsqueeze(-1)


def projectors(A: Tensor) -> Tensor:
    L, V = torch.linalg.eigh(hermitian(A))
    return V.mT.unsqueeze(-1) * V.mH.unsqueeze(-2) * L.unsqueeze(-1).unsqueeze(-1)


def factors(A: Tensor) -> tuple[Tensor, Tensor]:
    _, L, U = torch.linalg.lu(A)
    return L, U


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 3), (2, 3, 4)])
@pytest.mark.parametrize("name, function", [(NAMES[0], pairs), (NAMES[1], projectors), (NAMES[2], factors)])
def test_derivatives_in_six_modes(on_cpu, name, function, shape, dtype):
    if function is projectors and shape[-1] != shape[-2]:
        return
    A = random_conditioned(*shape, dtype=dtype)
    with mg.override(name, forward=True):
        testing.check(function, [(A,)])


@pytest.mark.parametrize("call", [pairs, projectors, lambda A: torch.linalg.lu(A).U])
def test_transforms(on_cpu, call):
    A = random_conditioned(4, 3, 3, dtype=torch.float64)
    derivative = grad(lambda A: call(A).real.sin().sum())
    with mg.override(*NAMES, forward=True):
        found = vmap(derivative)(A)
        torch.testing.assert_close(found, torch.stack([derivative(a) for a in A]))
        torch.testing.assert_close(found, derivative(A))
    torch.testing.assert_close(found, derivative(A))


def test_compiled(on_cpu):
    A = random_conditioned(4, 3, 3, dtype=torch.float64).requires_grad_()

    def f(A: Tensor) -> Tensor:
        return pairs(A).sin().sum() + torch.linalg.lu(A).U.sum()

    with mg.override(*NAMES, forward=True):
        expected = torch.autograd.grad(f(A), A)[0]
        compiled = torch.compile(f, backend="aot_eager", fullgraph=True)(A)
        torch.testing.assert_close(torch.autograd.grad(compiled, A)[0], expected)


# -- as operators, and in mg.linalg -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op, args",
    [
        (svd.svd_jacobi, ()),
        (eigh.eigh_jacobi, (True,)),
        (eigh.eigh_jacobi, (False,)),
        (eigh.eigh_tridiagonal, (True,)),
        (eigh.eigh_tridiagonal, (False,)),
        (lu.lu_small, ()),
    ],
)
def test_operators_have_derivatives_of_their_own(op, args):
    A = random_conditioned(2, 3, 3, dtype=torch.float64)

    def f(A: Tensor) -> tuple[Tensor, ...]:
        return op(hermitian(A) if op in (eigh.eigh_jacobi, eigh.eigh_tridiagonal) else A, *args)

    testing.check(f, [(A,)])
    torch.library.opcheck(op.op, (A, *args), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_functions_of_the_package(on_cpu, dtype):
    A = random(5, 4, 4, dtype=dtype)
    assert same_bits(mg.linalg.svd(A), svd_jacobi(A))
    assert same_bits(mg.linalg.svd(A[..., :3], full_matrices=False), svd_jacobi(A[..., :3]))
    assert same_bits(mg.linalg.svd(A[..., :3]), torch.linalg.svd(A[..., :3]))
    assert same_bits(mg.linalg.eigh(A, "U"), eigh_jacobi(A, False))
    assert same_bits(mg.linalg.lu(A), lu_small(A))


def outcome(function, A):
    """The error's type and message, or where each result is nan."""
    try:
        found = function(A)
    except RuntimeError as error:
        return type(error), str(error)
    return [x.isnan() for x in ((found,) if isinstance(found, Tensor) else found)]


STOCK_AND_OURS = [
    (torch.linalg.svd, mg.linalg.svd),
    (lambda A: torch.linalg.svd(A, full_matrices=False), lambda A: mg.linalg.svd(A, False)),
    (torch.linalg.svdvals, lambda A: torch.linalg.svdvals(A)),
    (torch.linalg.eigh, mg.linalg.eigh),
    (lambda A: torch.linalg.eigh(A, UPLO="U"), lambda A: mg.linalg.eigh(A, "U")),
    (torch.linalg.eigvalsh, lambda A: torch.linalg.eigvalsh(A)),
    (torch.linalg.lu, mg.linalg.lu),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("pair", range(len(STOCK_AND_OURS)))
def test_nonfinite_inputs_have_pytorchs_result_or_error(on_cpu, pair, value, dtype):
    """The same error, or nan in the same places, by the functions of the package and by replacement forwards."""
    stock, ours = STOCK_AND_OURS[pair]
    for batch, place in itertools.product([(), (3,)], [(0, 0), (2, 1), (1, 2), (2, 2)]):
        A = random(*batch, 3, 3, dtype=dtype)
        A = A @ A.mH
        A[(1, *place) if batch else place] = value
        expected = outcome(stock, A)
        found = [outcome(ours, A)]
        with mg.override(forward=True):
            found.append(outcome(stock, A))
        for one in found:
            assert type(one) is type(expected)
            if isinstance(expected, tuple):
                named = "\nThe arguments: A=" in one[1] and one is found[0]  # by a function of the package
                assert one[0] is expected[0]
                assert one[1].partition("\n")[0].endswith(f": {expected[1]}") if named else one[1] == expected[1]
            else:
                torch.testing.assert_close(one, expected)


def test_nan_in_a_graph_and_under_vmap(on_cpu):
    A = torch.full((2, 3, 3), torch.nan)
    torch.compiler.reset()
    with mg.override(*NAMES, forward=True):
        compiled = torch.compile(lambda A: torch.linalg.eigh(A).eigenvalues, backend="aot_eager", fullgraph=True)
        for call in (lambda: compiled(A), lambda: vmap(torch.linalg.svdvals)(A), lambda: vmap(mg.linalg.eigh)(A)):
            with pytest.raises(torch.linalg.LinAlgError, match="failed to converge"):
                call()
