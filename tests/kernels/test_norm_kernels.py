"""The compiled norm_backward against plain float64 torch operations, on every device that has it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.thinning import in_turn, label

from torch_manualgrad.core import libraries

LIBRARIES = {library.device: library for library in libraries.load()}
SCHEMA = "norm_backward(Tensor grad, Tensor self, float p, Tensor norm, int[]? dim=None, bool keepdim=True) -> Tensor"
if not hasattr(torch.ops.manualgrad, "norm_backward"):
    _library = torch.library.Library("manualgrad", "FRAGMENT")
    _library.define(SCHEMA)

INF, NAN = math.inf, math.nan
POWERS = [-INF, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.5, INF]
DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.complex32,
]  # fmt: skip
REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
RTOL = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def kernel(grad, x, p, norm, dim=None, keepdim=True):
    return torch.ops.manualgrad.norm_backward.default(grad, x, p, norm, dim, keepdim)


def wide(x):
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def dims_of(x, dim):
    return tuple(range(x.dim())) if not dim else tuple(d % max(x.dim(), 1) for d in dim)[: x.dim() or None]


def vector_norm(x, p, dim, keepdim):
    """The norm as stored: computed in float64, rounded to the real dtype of x."""
    norm = torch.linalg.vector_norm(wide(x), p, dim=dim, keepdim=keepdim)
    return norm.to(REAL.get(x.dtype, x.dtype))


def reference(grad, x, p, norm, dim=None, keepdim=True):
    """sgn(x) (|x| / n)^(p - 1) g, in float64, with n as given."""
    if not keepdim and x.dim():
        for d in sorted(dims_of(x, dim)):
            grad, norm = grad.unsqueeze(d), norm.unsqueeze(d)
    x, g, n = wide(x), wide(grad), wide(norm)
    sign, size = torch.where(x.isnan(), x, torch.sgn(x)), x.abs()
    if p == 0:
        return torch.zeros_like(x)
    if p == 1:
        return sign * g
    if math.isinf(p):
        ties = (size == n) | size.isnan()
        if x.is_complex():
            ties |= (size - n).abs() <= 1e-13 * n
        share = g / ties.sum(dims_of(x, dim), keepdim=True) if x.dim() else g / ties
        return sign * torch.where(ties, share, 0 * share)
    ratio = torch.where(size == 0, 1.0, size) / torch.where(n == 0, 1.0, n)
    value = torch.where((size == 0) | (n == 0), 0.0 * torch.where(n == 0, 0.0, g * n), ratio ** (p - 1) * g)
    return sign * value


def away_from_zero(shape, dtype, device, seed=0):
    """Values whose moduli are at least 1/4, so that negative powers stay in the range of float16."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = x + 0.25 * torch.sgn(x)
    if dtype.is_complex:
        x = torch.complex(x, torch.randn(shape, generator=generator, dtype=torch.float64))
    return x.to(dtype).to(device)


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1),
    "permuted": lambda x: x.permute(1, 2, 0) if x.dim() == 3 else x,
    "strided": lambda x: x[..., ::2],
    "offset": lambda x: x[1:, ..., 1:],
    "expanded": lambda x: x[..., :1].expand(x.shape),
    "expanded outside": lambda x: x[:1].expand(x.shape),
}


def check(x, p, dim, keepdim, exact_norm=None, expand=False, **tolerance):
    norm = vector_norm(x, p, dim, keepdim) if exact_norm is None else exact_norm
    if x.is_complex() and math.isinf(p) and x.dtype != torch.complex128:
        # The norm must be the modulus of an element of x, as float64 sees it, for the reference to find it.
        limit = (torch.amax if p > 0 else torch.amin)(wide(x).abs(), dims_of(x, dim), keepdim=keepdim)
        stored = limit
    else:
        stored = norm
    grad = away_from_zero(norm.shape, norm.dtype, norm.device, seed=1)
    if expand:
        grad = grad.flatten()[:1].reshape([1] * grad.dim()).expand(grad.shape)
    actual = kernel(grad, x, p, norm, dim, keepdim)
    expected = reference(grad, x, p, stored, dim, keepdim)
    assert actual.dtype == x.dtype
    assert actual.stride() == torch.empty_like(x).stride()
    tolerance = tolerance or {"rtol": RTOL[norm.dtype], "atol": RTOL[norm.dtype] * 1e-2}
    torch.testing.assert_close(wide(actual), expected, equal_nan=True, **tolerance)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dims_and_layouts(dtype, p, device):
    cases = itertools.product([None, [0], [1], [-1], [0, 2], [1, 2], [0, 1], [-1, 0, 1], []], [True, False], LAYOUTS)
    x = away_from_zero((4, 5, 6), dtype, device)
    for dim, keepdim, layout in cases:
        check(LAYOUTS[layout](x), p, dim, keepdim)
    check(x, p, [1], True, expand=True)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("shape, dim", [((70001,), None), ((3, 40001), [1]), ((40001, 3), [0]), ((7, 11, 1301), [1])])
def test_sizes_that_cross_blocks_and_threads(dtype, p, shape, dim, device):
    check(away_from_zero(shape, dtype, device), p, dim, False, rtol=2e-5 if dtype != torch.float64 else 1e-11, atol=0.0)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("shape, dim", [((), None), ((), [0]), ((), [-1]), ((1,), [0]), ((1, 1, 1), [1])])
def test_single_elements(p, shape, dim, device):
    for dtype in (torch.float32, torch.complex128):
        check(away_from_zero(shape, dtype, device), p, dim, True)
        check(away_from_zero(shape, dtype, device), p, dim, False)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("shape, dim", [((0,), [0]), ((0, 3), [1]), ((3, 0), [0]), ((2, 0, 3), None), ((2, 0, 3), [1])])
def test_empty(p, shape, dim, device):
    x = torch.empty(shape, device=device)
    kept = [1 if dim is None or d in dim else n for d, n in enumerate(shape)]
    norm = torch.zeros(kept, device=device)
    assert kernel(norm, x, p, norm, dim, True).shape == x.shape


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_slices_get_zeros(dtype, p, device):
    x = away_from_zero((3, 5), dtype, device)
    x[1] = 0
    norm = vector_norm(x, p, [1], True)
    grad = torch.ones_like(norm)
    actual = kernel(grad, x, p, norm, [1], True)
    assert (actual[1] == 0).all()
    assert torch.isfinite(torch.view_as_real(actual) if dtype.is_complex else actual).all()


@pytest.mark.parametrize("p", [-2.0, -1.0, -0.5, 0.5])
def test_a_zero_among_others(p, device):
    x = torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64, device=device)
    norm = torch.linalg.vector_norm(x, p)
    actual = kernel(torch.ones_like(norm), x, p, norm, None, False)
    if p < 0:  # the norm is 0, and stays 0 as the others move
        assert norm == 0 and (actual == 0).all()
    else:
        assert actual[0] == 0 and (actual[1:] != 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [INF, -INF])
@pytest.mark.parametrize("count", [4, 50000])
def test_ties_share_equally(dtype, p, count, device):
    x = torch.full((count,), 2.0, dtype=dtype, device=device)
    x[::2] *= -1
    x[0] = 1.0 if p > 0 else 3.0
    norm = torch.tensor(2.0, dtype=REAL.get(dtype, dtype), device=device)
    actual = kernel(torch.ones_like(norm), x, p, norm, None, False)
    expected = torch.sgn(wide(x)) / (count - 1)
    expected[0] = 0
    torch.testing.assert_close(wide(actual), expected, rtol=RTOL[norm.dtype], atol=1e-7)


@pytest.mark.parametrize("dim", [[0], [1]])
def test_ties_of_many_slices(dim, device):
    x = torch.randint(-3, 4, (300, 400), generator=torch.Generator().manual_seed(0)).to(device, torch.float64)
    for p in (INF, -INF):
        check(x, p, dim, True)
    check(x.t(), INF, dim, True)
    check(torch.complex(x, x.flip(0)), INF, dim, True)


def test_complex_norms_rounded_differently(device):
    x = away_from_zero((5000,), torch.complex64, device)
    norm = x.abs().amax()
    for neighbour in (norm, torch.nextafter(norm, 0 * norm), torch.nextafter(norm, 2 * norm)):
        actual = kernel(torch.ones_like(norm), x, INF, neighbour, None, False)
        assert (actual != 0).sum() == 1 and abs(actual.abs().sum().item() - 1) < 1e-6


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("grad", [1.0, 0.0, INF, NAN])
@pytest.mark.parametrize("values", [[1.0, -2.0], [1.0, NAN], [0.0, 1.0], [1.0, INF], [INF, INF]], ids=str)
def test_non_finite_values_are_stock_s_but_that_nan_stays_nan(values, grad, p, device):
    if grad == 0 and INF in values:
        return  # an infinite norm times no cotangent: 0 or nan, by the order of the factors
    x = torch.tensor(values, dtype=torch.float64, device=device, requires_grad=True)
    norm = torch.linalg.vector_norm(x, p)
    g = torch.tensor(grad, dtype=torch.float64, device=device)
    (expected,) = torch.autograd.grad(norm, x, g, materialize_grads=True)
    if p == 0:
        expected = torch.zeros_like(x)
    if norm.item() == 0:
        expected = torch.zeros_like(x)  # the convention for a zero norm, whatever the cotangent
        if math.isinf(p):
            expected = torch.sgn(x.detach()) * 0 + 0 * g
    if p in (1, INF, -INF):
        expected = torch.where(x.isnan(), x, expected).detach()  # where stock has sgn(nan) = 0
    actual = kernel(g, x.detach(), p, norm.detach(), None, False)
    torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("p", [-2.0, -0.5, 1.5, 2.0, 2.5, 3.0, 4.0])
def test_nan_norm_reaches_the_whole_slice(p, device):
    x = torch.tensor([[0.0, 1.0, NAN], [1.0, 2.0, 3.0]], device=device)
    norm = torch.linalg.vector_norm(x, p, dim=1, keepdim=True)
    actual = kernel(torch.ones_like(norm), x, p, norm, [1], True)
    assert actual[0].isnan().all() and actual[1].isfinite().all()


SCALES = {
    torch.float64: [1e200, 1e-200, 1e-100, 1e100, 1e-300],
    torch.complex128: [1e200, 1e-200],
    torch.float32: [1e15, 1e-20, 1e30, 1e-30, 1e-36],
    torch.complex64: [1e15, 1e-20],
    torch.bfloat16: [1e15, 1e-20],
    torch.float16: [1e-5, 1e4],
}


@pytest.mark.parametrize("p", [-3.0, -2.0, -0.5, 0.5, 1.5, 2.0, 2.5, 3.0, 4.0, 9.0])
@pytest.mark.parametrize("dtype", SCALES, ids=str)
@pytest.mark.parametrize("forward", ["stock", "exact"])
def test_scale_does_not_matter(dtype, p, forward, device):
    """The derivative is the same at every scale, also where stock's own norm overflowed or underflowed."""
    for scale, dim in itertools.product(SCALES[dtype], ([0], [1], None)):
        x = (away_from_zero((4, 5), torch.complex128 if dtype.is_complex else torch.float64, device) * scale).to(dtype)
        unit = wide(x) / scale
        norm = torch.linalg.vector_norm(unit, p, dim=dim, keepdim=True)
        if norm.max().item() * scale > torch.finfo(dtype).max:
            continue
        expected = reference(torch.ones_like(norm), unit, p, norm, dim)
        stored = norm * scale if forward == "exact" else torch.linalg.vector_norm(x, p, dim=dim, keepdim=True)
        stored = stored.to(REAL.get(dtype, dtype))
        actual = kernel(torch.ones_like(stored), x, p, stored, dim, True)
        rtol = 20 * RTOL[stored.dtype]
        torch.testing.assert_close(wide(actual), expected, rtol=rtol, atol=rtol * 1e-3)


def test_a_long_slice_with_a_lost_norm(device):
    x = away_from_zero((100003,), torch.float32, device) * 1e-20
    actual = kernel(torch.ones((), device=device), x, 3.0, torch.zeros((), device=device), None, False)
    unit = wide(x) * 1e20
    expected = reference(torch.ones((), device=device), unit, 3.0, torch.linalg.vector_norm(unit, 3.0), None, False)
    torch.testing.assert_close(wide(actual), expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("p", [1.5, 2.0, 2.5, 3.0, 4.0, 0.5, -1.0, -0.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_no_intermediate_leaves_the_range(dtype, p, device):
    """x, g and n at the ends of the range, the result inside it."""
    import mpmath

    span = 250 if dtype == torch.float64 else 32
    ends = [10.0 ** (k * span / 4) for k in range(-4, 5)]
    for small, n, g in itertools.product(ends, ends, ends):
        x = torch.tensor([small], dtype=dtype, device=device)
        norm = torch.tensor(n, dtype=dtype, device=device)
        low, high = (small, n) if p > 0 else (n, small)
        # Only norms that are used as given: those that stock's sum supports.
        log_sum = p * math.log10(n)
        if low > high or abs(log_sum) > (280 if dtype == torch.float64 else 28):
            continue
        grad = torch.tensor(g, dtype=dtype, device=device)
        exact = mpmath.mpf(x.item()) ** (p - 1) * mpmath.mpf(norm.item()) ** (1 - p) * mpmath.mpf(grad.item())
        if not torch.finfo(dtype).tiny * 1e3 < exact < torch.finfo(dtype).max / 2:
            continue
        actual = kernel(grad, x, p, norm, None, False).item()
        assert abs(actual / float(exact) - 1) < (1e-6 if dtype == torch.float32 else 1e-12), (small, n, g)


@pytest.mark.parametrize("p, dtype", in_turn(POWERS + [2.25, 7.0], DTYPES, share=2), ids=label)
def test_threads_do_not_change_a_bit(dtype, p):
    if LIBRARIES["cpu"].path is None:
        pytest.skip(LIBRARIES["cpu"].reason)
    threads = torch.get_num_threads()
    cases = [((100003,), None), ((17, 9001), [1]), ((9001, 17), [0]), ((50021, 3), [1])]
    try:
        for shape, dim in cases:
            x = away_from_zero(shape, dtype, "cpu")
            norm = vector_norm(x, p, dim, True)
            for stored in (norm, torch.zeros_like(norm)):
                results = []
                for count in (1, 2, 3, 8):
                    torch.set_num_threads(count)
                    results.append(kernel(torch.ones_like(norm), x, p, stored, dim))
                for other in results[1:]:
                    assert torch.equal(torch.nan_to_num(other, 7.0) if not dtype.is_complex else torch.view_as_real(other).nan_to_num(7.0),
                                       torch.nan_to_num(results[0], 7.0) if not dtype.is_complex else torch.view_as_real(results[0]).nan_to_num(7.0))  # fmt: skip
    finally:
        torch.set_num_threads(threads)


def test_conjugated_and_negated_views(device):
    x = away_from_zero((6, 7), torch.complex128, device)
    norm = vector_norm(x, 3.0, [1], True)
    grad = torch.ones_like(norm)
    torch.testing.assert_close(kernel(grad, x.conj(), 3.0, norm, [1]), kernel(grad, x, 3.0, norm, [1]).conj())
    imaginary = x.conj().imag
    norm = vector_norm(imaginary, 3.0, [1], True)
    torch.testing.assert_close(kernel(grad, imaginary, 3.0, norm, [1]), kernel(grad, -x.imag, 3.0, norm, [1]))


ERRORS = [
    ({"x": torch.ones(2, 3, dtype=torch.int64)}, "self: expected a floating point or complex dtype, got "),
    ({"grad": torch.ones(2, 1, dtype=torch.float64)}, "grad: expected torch.float32 for self of torch.float32, got torch.float64"),
    ({"norm": torch.ones(2, 1, dtype=torch.complex64)}, "norm: expected torch.float32 for self of torch.float32, got torch.complex64"),
    ({"x": torch.ones(2, 3, dtype=torch.complex128)}, "grad: expected torch.float64 for self of torch.complex128, got torch.float32"),
    ({"grad": torch.ones(2)}, r"grad: expected shape \[2, 1\] for self of shape \[2, 3\] and keepdim=True, got \[2\]"),
    ({"norm": torch.ones(2, 3)}, r"norm: expected shape \[2, 1\] .* got \[2, 3\]"),
    ({"keepdim": False}, r"grad: expected shape \[2\] .* keepdim=False, got \[2, 1\]"),
    ({"dim": None}, r"grad: expected shape \[1, 1\]"),
    ({"dim": [2]}, r"dim: expected values in \[-2, 1\], got 2"),
    ({"dim": [-3]}, r"dim: expected values in \[-2, 1\], got -3"),
    ({"dim": [1, -1]}, r"dim: -1 appears twice in \[1, -1\]"),
    ({"p": NAN}, "p: expected a number, got nan"),
]  # fmt: skip


@pytest.mark.parametrize("change, message", ERRORS)
def test_errors_name_the_argument_and_its_value(change, message, device):
    arguments = {
        "grad": torch.ones(2, 1),
        "x": torch.ones(2, 3),
        "p": 2.0,
        "norm": torch.ones(2, 1),
        "dim": [1],
        "keepdim": True,
    }
    arguments.update(change)
    arguments = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(RuntimeError, match="manualgrad::norm_backward: " + message):
        kernel(**arguments)


def test_status_accounts_for_every_device():
    assert [library.device for library in libraries.status()] == ["cpu", "cuda"]
    for library in libraries.status():
        assert library.reason
        assert library.loaded == (library.reason == "loaded")
    if torch.version.cuda is None and LIBRARIES["cuda"].path is not None:
        assert LIBRARIES["cuda"].reason == "torch has no CUDA"
    assert libraries.load() == libraries.status()
