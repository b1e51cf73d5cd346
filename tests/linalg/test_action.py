"""exp(A) B without exp(A): its accuracy, its derivatives by steps and by the exponential itself, and what it keeps."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.linalg import action, expm_multiply
from torch_manualgrad.testing import CHECKS, check

mp = pytest.importorskip("mpmath")

F64, C128 = torch.float64, torch.complex128
DTYPES = [F64, C128]


@pytest.fixture(params=["steps", "exponential"])
def way(request, monkeypatch):
    """Both ways of computing it, of which the sizes of the matrices decide."""
    if request.param == "exponential":
        monkeypatch.setattr(action, "_steps", lambda A, columns: None)
    else:
        chosen = action._steps
        monkeypatch.setattr(action, "_steps", lambda A, columns: chosen(A, 0))
    return request.param


def dense(A, B):
    return torch.linalg.matrix_exp(A) @ B


# -- values ----------------------------------------------------------------------------------------------------------

MATRICES = {
    "normal": lambda n: random(n, n),
    "large": lambda n: 15 * random(n, n),
    "tiny": lambda n: 1e-9 * random(n, n),
    "zero": lambda n: torch.zeros(n, n, dtype=F64),
    "rotation": lambda n: 10 * (random(n, n) - random(n, n).mT),
    "far from normal": lambda n: 50 * random(n, n).triu(1) - torch.diag(torch.arange(n, dtype=F64)),
    "decay": lambda n: -torch.diag(torch.linspace(0, 40, n, dtype=F64)) + 0.1 * random(n, n),
    "shifted": lambda n: random(n, n) - 300 * torch.eye(n),
    "complex": lambda n: 3 * random(n, n, dtype=C128) + 7j * torch.eye(n),
}


def mp_matrix(A):
    return mp.matrix([[mp.mpc(complex(x)) for x in row] for row in A.tolist()])


def from_mp(A, dtype):
    found = torch.tensor([[complex(A[i, j]) for j in range(A.cols)] for i in range(A.rows)], dtype=C128)
    return found if dtype.is_complex else found.real


@pytest.mark.parametrize("name", MATRICES)
def test_values_and_gradients_in_forty_digits(name, monkeypatch):
    """The exact results for a matrix that differs by rounding would differ by cond eps: measured by the size of exp(|A|)."""
    chosen = action._steps
    monkeypatch.setattr(action, "_steps", lambda A, columns: chosen(A, 0))
    n, k = 4, 2
    A = MATRICES[name](n).requires_grad_()
    B, G = random(n, k, dtype=A.dtype, seed=1).requires_grad_(), random(n, k, dtype=A.dtype, seed=2)
    Y = expm_multiply(A, B)
    of_A, of_B = torch.autograd.grad(Y, (A, B), G)
    with mp.workdps(60):
        a, b, g = (mp_matrix(x.detach()) for x in (A, B, G))
        block = mp.zeros(2 * n)
        block[:n, :n] = block[n:, n:] = a.H
        block[:n, n:] = g * b.H
        exponential = mp.expm(block, method="taylor")
        exact = [exponential[:n, :n].H * b, exponential[:n, n:], exponential[:n, :n] * g]
    eps = torch.finfo(F64).eps
    with torch.no_grad():
        size = torch.linalg.norm(A, 1) if name != "shifted" else 300
        for found, x in zip((Y, of_A, of_B), exact):
            expected = from_mp(x, A.dtype)
            largest = expected.abs().max() if name != "decay" else 1
            assert (found - expected).abs().max() <= 30 * eps * (1 + size) * largest, name


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_bounds(dtype):
    """Each is the largest norm, rounded down to three digits, for which the truncation is half a unit in the last place."""
    unit = torch.finfo(dtype).eps / 2
    with mp.workdps(60):
        for degree, bound in action._BOUNDS[dtype].items():
            count = degree + 50
            p = [
                sum((-1) ** (k - i) / (mp.factorial(k - i) * mp.factorial(i)) for i in range(min(k, degree) + 1))
                for k in range(count)
            ]
            c = [mp.mpf(0)]
            for k in range(1, count):
                c.append(p[k] - sum(mp.mpf(i) / k * c[i] * p[k - i] for i in range(1, k)))

            def error(x, c=c, degree=degree, count=count):
                return sum(k * abs(c[k]) * mp.mpf(x) ** (k - 1) for k in range(degree + 1, count))

            assert error(bound) <= unit < error(bound * 1.01)


def test_the_way_is_the_cheaper_one():
    A = random(60, 60) / 8
    assert action._steps(A, 1) is not None and action._steps(A, 60) is None
    assert action._steps(1e6 * A, 1) is None  # this many steps would never end
    assert action._steps(1e-8 * A, 1)[1] == 4
    torch.testing.assert_close(expm_multiply(-1e12 * torch.eye(60), random(60, 1).float()), torch.zeros(60, 1))


def test_a_time():
    A, B = random(3, 3), random(3, 2, seed=1)
    times = torch.tensor([0.0, 0.5, -2], dtype=F64)
    found = expm_multiply(A, B, times)
    for t, y in zip(times, found):
        torch.testing.assert_close(y, dense(t * A, B))
        torch.testing.assert_close(expm_multiply(A, B, t.item()), y)
        torch.testing.assert_close(expm_multiply(A, B, t), y)
    assert torch.equal(found[0], B)
    torch.testing.assert_close(torch.func.vmap(expm_multiply, in_dims=(None, None, 0))(A, B, times), found)
    torch.testing.assert_close(expm_multiply(A, B, times.expand(2, 3).mT)[:, 1], found)
    torch.testing.assert_close(expm_multiply(A, B, 1), dense(A, B))
    torch.testing.assert_close(expm_multiply(A.float(), B.float(), times), found.float())
    check(expm_multiply, [(A, B, torch.tensor(0.7, dtype=F64)), (A, B, times)])
    (rate,) = torch.func.jvp(lambda t: expm_multiply(A, B, t), (times[1],), (torch.ones((), dtype=F64),))[1:]
    torch.testing.assert_close(rate, A @ expm_multiply(A, B, 0.5))


def test_next_to_scipy():
    scipy = pytest.importorskip("scipy.sparse.linalg")
    A, B = random(40, 40), random(40, 1, seed=1)
    torch.testing.assert_close(expm_multiply(A, B), torch.from_numpy(scipy.expm_multiply(A.numpy(), B.numpy())))


# -- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_six_modes(way, dtype):
    A, B = random(3, 3, dtype=dtype), random(3, 2, dtype=dtype, seed=1)
    check(expm_multiply, [(A, B)], checks=(*CHECKS, "third order"))
    batch = random(2, 1, 2, 2, dtype=dtype, seed=2)
    check(expm_multiply, [(4 * A, B[:, :1]), (batch, random(3, 2, 1, dtype=dtype, seed=3))])
    check(lambda A: expm_multiply(A, B), [(A,)])
    check(lambda B: expm_multiply(A, B), [(B,)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_by_itself(way, dtype):
    given = random(2, 2, dtype=dtype), random(2, 1, dtype=dtype, seed=1), random(2, 1, dtype=dtype, seed=2)
    check(mg.ops.exponential_action_backward, [given], checks=(*CHECKS, "third order"))
    for only in range(3):

        def f(x, only=only):
            return mg.ops.exponential_action_backward(*[x if i == only else y for i, y in enumerate(given)])

        check(f, [(given[only],)])


@pytest.mark.parametrize("scale", [1e-6, 1, 1e6])
def test_directions_of_any_size(way, scale):
    """A large tangent needs no more steps, and a small one loses no digits."""
    A, B, E = random(4, 4), random(4, 1, seed=1), random(4, 4, seed=2)
    found = torch.func.jvp(lambda A: expm_multiply(A, B), (A,), (scale * E,))[1]
    expected = torch.func.jvp(lambda A: dense(A, B), (A,), (E,))[1]
    torch.testing.assert_close(found / scale, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("steps", range(1, 12))
def test_any_number_of_steps(steps, monkeypatch):
    """The steps are kept in segments; here the last is of every length."""
    monkeypatch.setattr(action, "_steps", lambda A, columns: (steps, 20))
    A, B = (x.requires_grad_() for x in (random(3, 3), random(3, 2, seed=1)))
    found, expected = (torch.autograd.grad(f(A, B).sin().sum(), (A, B)) for f in (expm_multiply, dense))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_what_is_kept_does_not_grow_with_the_steps():
    kept = {}
    for scale in (1, 8):
        A, B = (random(50, 50) / 50 * scale).requires_grad_(), random(50, 1, seed=1).requires_grad_()
        assert (action._steps(A.detach(), 1)[0] > 2) == (scale > 1)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            expm_multiply(A, B)
        kept[scale] = sum(sizes)
    assert kept[1] == kept[8] <= 50 * 50 + 2 * 50


@pytest.mark.parametrize("shape", [(0, 0), (0, 2), (3, 0)], ids=str)
def test_empty(shape):
    n, k = shape
    A, B = torch.ones(n, n, dtype=F64, requires_grad=True), torch.ones(n, k, dtype=F64, requires_grad=True)
    Y = expm_multiply(A, B)
    assert Y.shape == (n, k)
    grads = torch.autograd.grad(Y.sum(), (A, B), create_graph=True)
    assert torch.equal(grads[0], torch.zeros_like(A)) and grads[1].shape == B.shape
    assert torch.autograd.grad(grads[0].sum(), A)[0].shape == A.shape
    assert expm_multiply(torch.ones(0, 2, 2), torch.ones(2, 1)).shape == (0, 2, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_single_precision(way, dtype):
    wide = torch.promote_types(dtype, F64)
    given = [x.to(dtype).requires_grad_() for x in (random(4, 4, dtype=wide), random(4, 2, dtype=wide, seed=1))]
    same = [x.detach().to(wide).requires_grad_() for x in given]
    found, expected = (torch.autograd.grad(expm_multiply(*x).abs().sum(), x) for x in (given, same))
    for f, e in zip(found, expected):
        assert f.dtype == dtype
        torch.testing.assert_close(f.to(wide), e, rtol=1e-5, atol=1e-6 * e.abs().max().item())


def test_what_is_not_finite():
    A = torch.eye(2, dtype=F64)
    assert expm_multiply(A * math.nan, A).isnan().all()
    assert expm_multiply(torch.tensor([[math.inf, 0], [0, 1]]), torch.ones(2, 1)).isnan().any()
    assert expm_multiply(800 * A, A[:, :1])[0].isinf()
    assert torch.equal(expm_multiply(-800 * A, A), 0 * A)


def test_compiled_and_under_vmap():
    A, B = random(3, 2, 2), random(2, 1, seed=1)

    def f(A, B):
        return expm_multiply(A, B, 0.5).sin().sum()

    of = torch.func.hessian(f, argnums=(0, 1))
    found = torch.func.vmap(of, in_dims=(0, None))(A, B)
    for k, a in enumerate(A):
        torch.testing.assert_close([x[k] for row in found for x in row], [x for row in of(a, B) for x in row])
    leaves = [A.requires_grad_(), B.requires_grad_()]
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(*[torch.autograd.grad(g(*leaves), leaves) for g in (compiled, f)]):
        torch.testing.assert_close(ours, eager)


EYE = torch.eye(2)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: expm_multiply(torch.ones(2, 3), EYE), ValueError, r"A: expected square matrices, got shape \[2, 3\]"),
        (
            lambda: expm_multiply(EYE, torch.ones(3, 1)),
            ValueError,
            r"B: expected 2 rows, as A is \[2, 2\], got shape \[3, 1\]",
        ),
        (
            lambda: expm_multiply(EYE, torch.ones(())),
            ValueError,
            r"B: expected a matrix or a batch of matrices, got .*\[\]",
        ),
        (
            lambda: expm_multiply(EYE, EYE.double()),
            TypeError,
            "B: expected the dtype of A, torch.float32, got torch.float64",
        ),
        (lambda: expm_multiply(EYE.long(), EYE), TypeError, "A: expected a floating point or complex dtype"),
        (lambda: expm_multiply(EYE, EYE, 1j), TypeError, "t: "),
        (lambda: expm_multiply(EYE, EYE, torch.tensor(1j)), TypeError, "t: expected real numbers, got torch.complex64"),
        (lambda: expm_multiply(EYE, EYE, "1"), TypeError, "t: "),
        (
            lambda: expm_multiply(EYE.expand(3, 2, 2), EYE, torch.ones(2)),
            ValueError,
            r"t: its batch \[2\] does not broadcast with that of A, \[3\]",
        ),
        (
            lambda: expm_multiply(EYE.expand(3, 2, 2), EYE.expand(2, 2, 2)),
            ValueError,
            r"B: its batch \[2\] does not broadcast with that of A, \[3\]",
        ),
        (lambda: expm_multiply(EYE, EYE.to("meta")), ValueError, "B: expected a tensor on cpu, where A is"),
        (lambda: expm_multiply(EYE.to_sparse(), EYE), TypeError, "A: expected a dense tensor, got one of layout"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_vector():
    A, v = random(3, 3), random(3)
    torch.testing.assert_close(expm_multiply(A, v, 0.5), torch.linalg.matrix_exp(0.5 * A) @ v)
    assert expm_multiply(random(2, 3, 3), v).shape == (2, 3)
    check(expm_multiply, [(A, v)])
    batch = torch.vmap(expm_multiply, (None, 0))(A, random(4, 3))
    torch.testing.assert_close(batch, random(4, 3) @ torch.linalg.matrix_exp(A).mT)
    with pytest.raises(ValueError, match="B: expected 3 rows"):
        expm_multiply(A, random(2))
