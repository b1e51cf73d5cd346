"""The compiled cdist_backward and pdist_backward against plain float64 torch operations, on every device that has them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.tensors import rounded
from torch import Tensor

import torch_manualgrad  # noqa: F401  defines the operators
from torch_manualgrad.core import libraries

LIBRARIES = {library.device: library for library in libraries.load()}
INF, NAN = math.inf, math.nan
POWERS = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.5, INF]
RTOL = {torch.float64: 1e-12, torch.float32: 1e-5}
# both directions of the vectors, whole and broken ones, several tiles
SHAPES = [(1, 1, 1), (5, 4, 3), (3, 2, 7), (17, 40, 16), (9, 3, 70), (20, 600, 5), (33, 530, 65), (1, 1200, 2)]


def cdist_backward(grad: Tensor, x1: Tensor, x2: Tensor, p: float, cdist: Tensor) -> Tensor:
    return torch.ops.manualgrad.cdist_backward.default(grad, x1, x2, p, cdist)


def pdist_backward(grad: Tensor, x: Tensor, p: float, pdist: Tensor) -> Tensor:
    return torch.ops.manualgrad.pdist_backward.default(grad, x, p, pdist)


def distance(x1: Tensor, x2: Tensor, p: float) -> Tensor:
    """In float64, rounded to the dtype: of the differences as that dtype has them."""
    d = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).double()
    if not d.shape[-1]:
        return d.sum(-1).to(x1.dtype)
    m = d.abs().amax(-1, keepdim=True)
    m = torch.where((m > 0) & m.isfinite(), m, 1)
    return (torch.linalg.vector_norm(d / m, p, -1) * (1 if p == 0 else m.squeeze(-1))).to(x1.dtype)


def direction(x1: Tensor, x2: Tensor, p: float) -> Tensor:
    d = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).double()
    size, sign = d.abs(), torch.where(d.isnan(), d, d.sgn())
    if p == 0 or not d.shape[-1]:
        return torch.zeros_like(d)
    if p == 1:
        return sign
    m = size.amax(-1, keepdim=True)
    if math.isinf(p):
        ties = (size == m) | size.isnan()
        return sign * ties / ties.sum(-1, keepdim=True)
    r = size / torch.where(m == 0, 1, m)
    n = torch.linalg.vector_norm(r, p, -1, keepdim=True)
    return sign * torch.where(size == 0, 0 * n, (r / torch.where(n == 0, 1, n)) ** (p - 1))


def reference(grad: Tensor, x1: Tensor, x2: Tensor, p: float) -> Tensor:
    return (direction(x1, x2, p) * grad.double().unsqueeze(-1)).sum(-2).sum_to_size(x1.shape)


def pdist_reference(grad: Tensor, x: Tensor, p: float) -> Tensor:
    n = len(x)
    i, j = torch.triu_indices(n, n, 1, device=x.device)
    each = direction(x[i, None], x[j, None], p)[:, 0, 0] * grad.double().unsqueeze(-1)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    return out.index_add(0, i, each).index_add(0, j, -each)


def triangle(square: Tensor) -> Tensor:
    i, j = torch.triu_indices(*square.shape, 1, device=square.device)
    return square[i, j]


def close_to_largest(actual: Tensor, expected: Tensor, rtol: float) -> None:
    scale = expected.nan_to_num(0, 0, 0).abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=rtol * max(scale, 1e-300), equal_nan=True)


def check(x1: Tensor, x2: Tensor, p: float, grad: Tensor | None = None, cdist: Tensor | None = None) -> None:
    cdist = distance(x1, x2, p) if cdist is None else cdist
    grad = rounded(*cdist.shape, dtype=x1.dtype, device=x1.device.type, seed=2) if grad is None else grad
    actual = cdist_backward(grad, x1, x2, p, cdist)
    assert actual.dtype == x1.dtype and actual.shape == x1.shape
    close_to_largest(actual, reference(grad, x1, x2, p), RTOL[x1.dtype])


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("rows, others, columns", SHAPES)
def test_cdist(dtype, p, rows, others, columns, device):
    x1, x2 = (
        rounded(rows, columns, dtype=dtype, device=device),
        rounded(others, columns, dtype=dtype, device=device, seed=1),
    )
    x2[0] = x1[-1]  # a pair of equal points
    check(x1, x2, p)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("rows, columns", [(2, 1), (5, 3), (40, 16), (30, 70), (3, 5), (300, 2)])
def test_pdist(dtype, p, rows, columns, device):
    x = rounded(rows, columns, dtype=dtype, device=device)
    x[-1] = x[0]
    d = triangle(distance(x, x, p))
    g = rounded(len(d), dtype=dtype, device=device, seed=2)
    expected = pdist_reference(g, x, p)
    close_to_largest(pdist_backward(g, x, p, d), expected, RTOL[dtype])
    strided = torch.stack([g, g], -1)[:, 0], torch.stack([d, d], -1)[:, 0]
    close_to_largest(pdist_backward(strided[0], x.mT.contiguous().mT, p, strided[1]), expected, RTOL[dtype])
    close_to_largest(
        pdist_backward(g[:1].expand(g.shape), x, p, d), pdist_reference(g[:1].expand(g.shape), x, p), RTOL[dtype]
    )


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize(
    "batch1, batch2", [((2,), (2,)), ((2, 1), (3,)), ((), (2, 3)), ((4, 1, 2), (3, 1)), ((1,), (1,)), ((2, 3), ())]
)
def test_batches_broadcast(p, batch1, batch2, device):
    for columns in (3, 70):
        check(rounded(*batch1, 5, columns, device=device), rounded(*batch2, 6, columns, device=device, seed=1), p)


LAYOUTS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "offset": lambda x: torch.cat([x[:1], x])[1:],
    "batch inside": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("p", POWERS)
def test_layouts(p, device):
    x1, x2 = rounded(2, 9, 5, device=device), rounded(2, 33, 5, device=device, seed=1)
    grad, cdist = rounded(2, 9, 33, device=device, seed=2), distance(x1, x2, p)
    for a, b in itertools.permutations(LAYOUTS.values(), 2):
        check(a(x1), b(x2), p, b(grad), a(cdist))
        check(x1, x2, p, a(grad), cdist)
    check(x1[:1].expand(2, 9, 5), x2, p)
    check(x1, x2, p, grad[..., :1].expand(grad.shape))
    check(x1, x2, p, grad[:1, :1, :1].expand(grad.shape))
    check(-x1._neg_view(), x2, p)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("a, b", [((0, 3), (2, 3)), ((2, 3), (0, 3)), ((2, 0), (3, 0)), ((0, 2, 3), (0, 4, 3)),
                                  ((1, 2, 3), (0, 4, 3)), ((0, 2, 3), (1, 4, 3)), ((0, 0), (0, 0))])  # fmt: skip
def test_empty(p, a, b, device):
    x1, x2 = torch.zeros(a, device=device), torch.zeros(b, device=device)
    cdist = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).sum(-1)
    actual = cdist_backward(cdist, x1, x2, p, cdist)
    assert actual.shape == x1.shape and not actual.any()


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (3, 0), (0, 0)])
def test_empty_pdist(shape, device):
    x = torch.ones(shape, device=device)
    d = torch.ones(shape[0] * (shape[0] - 1) // 2, device=device)
    for p in POWERS:
        assert torch.equal(pdist_backward(d, x, p, d), torch.zeros(shape, device=device))


@pytest.mark.parametrize("columns", [4, 80])
def test_ties_share_equally(columns, device):
    x1 = torch.randint(-2, 3, (20, columns), generator=torch.Generator().manual_seed(0)).to(device, torch.float64)
    x2 = torch.randint(-2, 3, (30, columns), generator=torch.Generator().manual_seed(1)).to(device, torch.float64)
    check(x1, x2, INF)
    check(x1, x2, INF, cdist=torch.full((20, 30), 9.0, dtype=torch.float64, device=device))  # no norm
    d = triangle(distance(x1, x1, INF))
    g = rounded(len(d), device=device)
    close_to_largest(pdist_backward(g, x1, INF, d), pdist_reference(g, x1, INF), 1e-12)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("columns", [3, 70])
@pytest.mark.parametrize("dtype, scale", [(torch.float64, s) for s in (1e200, 1e-200)] + [(torch.float32, s) for s in (1e30, 1e-30)])  # fmt: skip
def test_scale_does_not_matter(dtype, scale, p, columns, device):
    """Also where the forward's own norm over- or underflowed, and for a few such pairs among ordinary ones."""
    x1, x2 = rounded(9, columns, dtype=dtype, device=device), rounded(20, columns, dtype=dtype, device=device, seed=1)
    mixed = torch.cat([x1, x1[:2] * scale]), torch.cat([x2, x2[:3] * scale])
    for a, b in ((x1 * scale, x2 * scale), mixed):
        check(a, b, p)
        for lost in (0.0, INF):
            if 0 < p < INF:
                check(a, b, p, cdist=torch.full_like(distance(a, b, p), lost))
    d = triangle(distance(mixed[0], mixed[0], p))
    g = rounded(len(d), dtype=dtype, device=device)
    close_to_largest(
        pdist_backward(g, mixed[0], p, 0 * d if 0 < p < INF else d), pdist_reference(g, mixed[0], p), RTOL[dtype]
    )


@pytest.mark.parametrize("p", [2.0, 3.0, 4.0])
def test_a_quotient_that_leaves_the_range(p, device):
    x1, x2 = rounded(5, 3, device=device) * 1e-200, rounded(20, 3, device=device, seed=1) * 1e-200
    grad = rounded(5, 20, device=device, seed=2) * 1e200
    check(x1, x2, p, grad)
    check(x1 * 1e350 * 1e50, x2 * 1e350 * 1e50, p, grad * 1e-300 * 1e-200)


@pytest.mark.parametrize("p", POWERS[1:])
@pytest.mark.parametrize("columns", [4, 70])
def test_nan_stays_in_its_pairs(p, columns, device):
    x1, x2 = rounded(5, columns, device=device), rounded(9, columns, device=device, seed=1)
    x1[1, 2] = NAN
    actual = cdist_backward(torch.ones(5, 9, dtype=x1.dtype, device=device), x1, x2, p, distance(x1, x2, p))
    assert actual[1, 2].isnan() and actual[[0, 2, 3, 4]].isfinite().all()
    assert actual[1].isnan().all() if p not in (1, INF) else actual[1].isnan().sum() == 1
    grad = torch.ones(5, 9, dtype=x1.dtype, device=device)
    grad[3, 0] = NAN
    actual = cdist_backward(grad, x1, x2, p, distance(x1, x2, p))
    assert actual[3].isnan().all() and actual[[0, 2, 4]].isfinite().all()


@pytest.mark.parametrize("p", [1.0, INF])
@pytest.mark.parametrize("columns", [3, 70])
def test_an_infinite_point_does_not_meet_itself(p, columns, device):
    x = rounded(20, columns, device=device)
    x[4, 1] = INF
    d = torch.ops.aten._pdist_forward(x, p)
    g = rounded(len(d), device=device)
    actual = pdist_backward(g, x, p, d)
    assert actual.isfinite().all()
    close_to_largest(actual, pdist_reference(g, x, p), 1e-12)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dtype", RTOL, ids=str)
def test_threads_do_not_change_a_bit(dtype, p):
    if LIBRARIES["cpu"].path is None:
        pytest.skip(LIBRARIES["cpu"].reason)
    threads = torch.get_num_threads()
    try:
        for rows, others, columns in ((700, 600, 3), (3, 5000, 8), (200, 30, 100)):
            x1, x2 = rounded(rows, columns, dtype=dtype), rounded(others, columns, dtype=dtype, seed=1)
            d, pairs = torch.cdist(x1, x2, p), torch.pdist(x1, p)
            results = []
            for count in (1, 2, 3, 8):
                torch.set_num_threads(count)
                results.append((cdist_backward(d, x1, x2, p, d), pdist_backward(pairs, x1, p, pairs)))
            for other in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(other, results[0]))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", POWERS)
def test_half_is_computed_in_float32(dtype, p, device):
    x1, x2 = rounded(5, 3, dtype=dtype, device=device), rounded(40, 3, dtype=dtype, device=device, seed=1)
    d, g = distance(x1.float(), x2.float(), p).to(dtype), rounded(40, 5, dtype=dtype, device=device).mT
    expected = cdist_backward(g.float(), x1.float(), x2.float(), p, d.float())
    assert torch.equal(cdist_backward(g, x1, x2, p, d), expected.to(dtype))
    assert pdist_backward(triangle(g @ g.mT), x1, p, triangle(g @ g.mT)).dtype == dtype


ONE = {"grad": (4, 2), "x1": (4, 3), "x2": (2, 3), "cdist": (4, 2)}
ERRORS = [
    ({"p": -1.0}, "p: expected a number, 0 or greater, got -1"),
    ({"p": NAN}, "p: expected a number, 0 or greater, got nan"),
    ({"x1": torch.ones(3)}, r"x1: expected 2 to 32 dims, got shape \[3\]"),
    ({"x2": torch.ones(())}, r"x2: expected 2 to 32 dims, got shape \[\]"),
    ({"x2": torch.ones(2, 4)}, r"x2: expected 3 columns, as in x1, got shape \[2, 4\]"),
    ({"grad": torch.ones(2, 4)}, r"grad: expected shape \[4, 2\] .* got \[2, 4\]"),
    ({"grad": torch.ones(1, 4, 2)}, r"grad: expected shape \[4, 2\] .* got \[1, 4, 2\]"),
    ({"cdist": torch.ones(4, 1)}, r"cdist: expected shape \[4, 2\] .* got \[4, 1\]"),
    ({"x2": torch.ones(2, 3).double()}, "x2: expected torch.float32, the dtype of x1, got torch.float64"),
    ({"grad": torch.ones(4, 2).double()}, "grad: expected torch.float32, the dtype of x1, got torch.float64"),
    ({"x1": torch.ones(4, 3).cfloat()}, "x1: expected a real floating point dtype, got torch.complex64"),
    ({"x1": torch.ones(2, 4, 3), "x2": torch.ones(3, 2, 3)}, r"x2: the batch dims of shape \[3, 2, 3\] do not broadcast"),
]  # fmt: skip


@pytest.mark.usefixtures("as_from_rules")
@pytest.mark.parametrize("change, message", ERRORS)
def test_cdist_errors(change, message, device):
    arguments = {name: torch.ones(shape) for name, shape in ONE.items()} | {"p": 2.0} | change
    arguments = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    with pytest.raises(RuntimeError, match="manualgrad::cdist_backward: " + message):
        cdist_backward(**arguments)


@pytest.mark.usefixtures("as_from_rules")
@pytest.mark.parametrize("change, message", [
    ({"p": -0.5}, "p: expected a number, 0 or greater, got -0.5"),
    ({"x": torch.ones(4)}, r"self: expected 2 dims, got shape \[4\]"),
    ({"x": torch.ones(4, 2, dtype=torch.int64)}, "self: expected a real floating point dtype"),
    ({"grad": torch.ones(5)}, r"grad: expected shape \[6\] for self of shape \[4, 2\], got \[5\]"),
    ({"pdist": torch.ones(6, 1)}, r"pdist: expected shape \[6\] .* got \[6, 1\]"),
    ({"pdist": torch.ones(6).half()}, "pdist: expected torch.float32, the dtype of self, got torch.float16"),
])  # fmt: skip
def test_pdist_errors(change, message, device):
    arguments = {"grad": torch.ones(6), "x": torch.ones(4, 2), "p": 2.0, "pdist": torch.ones(6)} | change
    arguments = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    with pytest.raises(RuntimeError, match="manualgrad::pdist_backward: " + message):
        pdist_backward(**arguments)
