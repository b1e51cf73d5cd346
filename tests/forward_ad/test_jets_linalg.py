"""Taylor series through mg.linalg and factorizations, beside finite differences: real and complex, eager and collapsed."""

import pytest
import torch
from helpers.jets import ORDER, compare
from helpers.tensors import seeded_by_shape

from torch_manualgrad import linalg
from torch_manualgrad.forward_ad import directional, hessian_diagonal, laplacian

OTHER = {dtype: seeded_by_shape(4, 3, dtype=dtype).cos() for dtype in (torch.float64, torch.complex128)}
POINTS = seeded_by_shape(4, 3)


def matrix(dtype, n=3):
    """With eigenvalues off the negative axis, and apart."""
    return seeded_by_shape(n, n, dtype=dtype) * 0.2 + torch.diag(torch.arange(1.0, 2 * n, 2)).to(dtype)


def hermitian(x):
    return (x + x.mH) / 2


def phases_apart(U, *others):
    """What does not depend on the phases of singular vectors or eigenvectors."""
    return [U.abs(), *[U[..., :, :1] @ U[..., :, :1].mH], *others]


def in_order(values, vectors):
    """Of eigenvalues by their real parts; LAPACK's order changes with the matrix."""
    order = values.real.detach().argsort()
    return phases_apart(vectors[:, order], values[order])


SQUARE = {
    "sqrtm": linalg.sqrtm,
    "rsqrtm": linalg.rsqrtm,
    "logm": linalg.logm,
    "powm": lambda x: linalg.powm(x, 0.3),
    "powm of a whole number": lambda x: linalg.powm(x, -2),
    "expm": linalg.expm,
    "sqrtm of a Hermitian matrix": lambda x: linalg.sqrtm(x, assume="hermitian"),
    "rsqrtm of a Hermitian matrix": lambda x: linalg.rsqrtm(x, assume="hermitian"),
    "logm of a Hermitian matrix": lambda x: linalg.logm(x, assume="hermitian"),
    "powm of a Hermitian matrix": lambda x: linalg.powm(x, 0.3, assume="hermitian"),
    "funm_hermitian": lambda x: linalg.funm_hermitian(x, torch.sin),
    "solve_sylvester": lambda x: linalg.solve_sylvester(x, x @ x, x.cos()),
    "solve_lyapunov": lambda x: linalg.solve_lyapunov(x, x.cos()),
    "solve_discrete_lyapunov": lambda x: linalg.solve_discrete_lyapunov(0.1 * x, x.cos()),
    "expm_multiply": lambda x: linalg.expm_multiply(x, x.cos()[:, :2], 0.3),
    "schur": lambda x: phases_apart(linalg.schur(x, order="real").Q, linalg.schur(x, order="real").T.diagonal()),
    "eigh_generalized": lambda x: phases_apart(*linalg.eigh_generalized(x + x.mH, x @ x.mH)[::-1]),
    "lu": lambda x: linalg.lu(x)[1:],
    "lu without pivots": lambda x: linalg.lu(x, pivot=False)[1:],
    "eigh": lambda x: phases_apart(linalg.eigh(hermitian(x))[1], linalg.eigh(hermitian(x))[0]),
    "torch.linalg.eigh": lambda x: phases_apart(*torch.linalg.eigh(hermitian(x))[::-1]),
    "torch.linalg.eigvalsh": lambda x: [torch.linalg.eigvalsh(hermitian(x))],
    "torch.linalg.lu": lambda x: torch.linalg.lu(x)[1:],
    "torch.linalg.eig": lambda x: in_order(*torch.linalg.eig(x)),
    "torch.linalg.eigvals": lambda x: in_order(torch.linalg.eigvals(x), x)[2:],
}
RECTANGULAR = {
    "nuclear_norm": linalg.nuclear_norm,
    "spectral_norm": linalg.spectral_norm,
    "polar": linalg.polar,
    "polar from the left": lambda x: linalg.polar(x.mH, side="left"),
    "procrustes": lambda x: linalg.procrustes(x, OTHER[x.dtype]),
    "svd": lambda x: phases_apart(*linalg.svd(x, False)[:2]),
    "svd of some rank": lambda x: phases_apart(*linalg.svd(x, rank=2)[:2]),
    "torch.linalg.svd": lambda x: phases_apart(*torch.linalg.svd(x, False)[:2]),
    "torch.linalg.svdvals": torch.linalg.svdvals,
    "torch.linalg.norm": lambda x: [torch.linalg.norm(x, "nuc"), torch.linalg.norm(x, 2), torch.linalg.cond(x)],
}
REAL = {
    "kabsch": lambda x: linalg.kabsch(x, OTHER[x.dtype]),
    "kabsch in the weights": lambda x: linalg.kabsch(POINTS, OTHER[x.dtype], (x[:, 0] * 0.1).exp()),
    "procrustes with a rotation": lambda x: linalg.procrustes(x, OTHER[x.dtype], rotation=True),
}
CASES = [
    (name, f, make(dtype), dtype)
    for functions, make, dtypes in (
        (SQUARE, matrix, (torch.float64, torch.complex128)),
        (RECTANGULAR, lambda dtype: seeded_by_shape(4, 3, dtype=dtype), (torch.float64, torch.complex128)),
        (REAL, lambda dtype: seeded_by_shape(4, 3), (torch.float64,)),
    )
    for dtype in dtypes
    for name, f in functions.items()
]


def as_list(found):
    return [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.parametrize(("name", "f", "x", "dtype"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_beside_finite_differences(name, f, x, dtype):
    wrong, agreed = compare(lambda y: as_list(f(y)), x)
    assert not wrong
    assert len(agreed) == ORDER


@pytest.mark.parametrize("name", [*SQUARE, *RECTANGULAR, *REAL])
def test_sums_over_directions_are_those_of_single_directions(name):
    f = {**SQUARE, **RECTANGULAR, **REAL}[name]
    x = matrix(torch.float64) if name in SQUARE else seeded_by_shape(4, 3)

    def g(y):
        found = [z.abs() * torch.arange(1.0, 1.0 + z.numel()).reshape(z.shape).sin() for z in as_list(f(y))]
        return sum(z.sum() for z in found)

    diagonal = hessian_diagonal(g)(x)
    basis = torch.eye(x.numel(), dtype=x.dtype).reshape(-1, *x.shape)
    expected = torch.stack([directional(g, x, v, 2)[1] for v in basis]).reshape(x.shape)
    torch.testing.assert_close(diagonal, expected)
    torch.testing.assert_close(laplacian(g)(x), expected.sum())
    assert expected.abs().max() > 1e-3


def test_at_repeated_singular_values():
    """The functions of mg.linalg are smooth there. At the identity, along V: sqrtm = 1 + t V / 2 - t^2 V^2 / 8 + ..."""
    one, V = torch.eye(3, dtype=torch.float64), seeded_by_shape(3, 3)
    first, second = directional(linalg.sqrtm, one, V, 2)
    torch.testing.assert_close(first, V / 2)
    torch.testing.assert_close(second, -V @ V / 4)
    symmetric = V + V.mT
    norm = directional(linalg.nuclear_norm, one, symmetric, 3)  # the trace
    torch.testing.assert_close(torch.stack(norm), torch.stack([symmetric.trace(), *[torch.zeros(()).double()] * 2]))


@pytest.mark.parametrize(
    "name",
    ["nuclear_norm", "lu", *[pytest.param(n, marks=pytest.mark.slow) for n in ("sqrtm", "svd", "polar", "eigh")]],
)
def test_compiled(name):
    f = {**SQUARE, **RECTANGULAR}[name]
    x, v = (
        (matrix(torch.float64), seeded_by_shape(3, 3))
        if name in SQUARE
        else (seeded_by_shape(4, 3), seeded_by_shape(4, 3).cos())
    )
    derivatives = lambda x: directional(lambda y: as_list(f(y)), x, v, 2)  # noqa: E731
    torch.compiler.reset()
    compiled = torch.compile(derivatives, backend="aot_eager", dynamic=False)
    torch.testing.assert_close(compiled(x), derivatives(x))
