"""The compiled operations within segments against their Python bodies, on every device that has them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from helpers.tensors import rounded
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.core import libraries

LIBRARIES = {library.device: library for library in libraries.load()}
INF, NAN = math.inf, math.nan
REAL = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
COMPLEX = [torch.complex128, torch.complex64]
GATHERED = ["segment_sum", "segment_amax"]
MAPPED = ["segment_softmax", "segment_log_softmax"]
BACKWARD = ["nested_softmax_backward", "nested_log_softmax_backward"]
ALL = [*GATHERED, *MAPPED, *BACKWARD, "_nested_sum_backward"]
RTOL = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
# one column, a power of two, other periods, one vector, broken and whole ones, several tiles
INNER = [1, 2, 3, 7, 8, 12, 15, 16, 17, 33, 100, 2050]
LENGTHS = [(3, 1, 0, 4), (0,), (0, 0, 5), (40, 2, 0, 1, 33), (700, 1, 2)]


def offsets_of(lengths: tuple[int, ...], device: str = "cpu", dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)


def arguments(name: str, x: Tensor, offsets: Tensor, dim: int) -> tuple[object, ...]:
    """Of the operator, for values x."""
    grad = rounded(*x.shape, dtype=x.dtype, device=x.device.type, seed=1)
    if name == "_nested_sum_backward":
        shape = [len(offsets) - 1 if d == dim % x.dim() else n for d, n in enumerate(x.shape)]
        return rounded(*shape, dtype=x.dtype, device=x.device.type, seed=1), offsets, x.shape[dim], dim
    if name not in BACKWARD:
        return x, offsets, dim
    forward = name.replace("nested", "segment").removesuffix("_backward")
    return grad, mg.ops[forward].reference(x.double(), offsets, dim).to(x.dtype), offsets, dim


def kernel(name: str, *args: object) -> Tensor:
    return getattr(torch.ops.manualgrad, name).default(*args)


def expected(name: str, *args: object) -> Tensor:
    """The body's, in float64."""
    return mg.ops[name].reference(*(a.to(double(a.dtype)) if is_inexact(a) else a for a in args))


def is_inexact(a: object) -> bool:
    return isinstance(a, Tensor) and (a.is_floating_point() or a.is_complex())


def double(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def close_to_largest(actual: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype and actual.shape == wanted.shape and actual.is_contiguous()
    rtol = RTOL[dtype.to_real()]
    size = wanted.abs().nan_to_num(0, 0, 0)
    atol = rtol * max(size.max().item() if size.numel() else 0.0, 1e-300)
    torch.testing.assert_close(actual.to(wanted.dtype), wanted, rtol=rtol, atol=atol, equal_nan=True)


def check(name: str, x: Tensor, offsets: Tensor, dim: int) -> None:
    args = arguments(name, x, offsets, dim)
    close_to_largest(kernel(name, *args), expected(name, *args), x.dtype)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX], ids=str)
@pytest.mark.parametrize("inner", INNER)
def test_it_is_the_body(name, dtype, inner, device):
    if dtype.is_complex and "sum" not in name:
        return
    for lengths, indices in itertools.product(LENGTHS if inner < 2050 else LENGTHS[:3], (torch.int32, torch.int64)):
        offsets = offsets_of(lengths, device, indices)
        check(name, rounded(sum(lengths), inner, dtype=dtype, device=device), offsets, 0)
    check(name, rounded(3, sum(lengths), inner, dtype=dtype, device=device), offsets, -2)
    check(name, rounded(2, 2, sum(lengths), dtype=dtype, device=device), offsets, -1)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("inner", [1, 3, 16, 33, 2050, 4200])
def test_a_long_segment_is_cut(name, inner, device):
    """So long that it is several tasks, beside short ones; twice, in every outer."""
    length = 140_000 // inner + 3
    for lengths in ((length,), (4, length, 0, 3, 2 * length, 1)):
        offsets = offsets_of(lengths, device)
        check(name, rounded(2, sum(lengths), inner, device=device), offsets, 1)
        check(name, rounded(sum(lengths), inner, dtype=torch.float32, device=device), offsets, 0)


@pytest.mark.parametrize("name", ALL)
def test_many_short_segments(name, device):
    lengths = tuple(torch.randint(0, 5, (20_000,), generator=torch.Generator().manual_seed(0)).tolist())
    for inner in (1, 4, 17):
        check(name, rounded(sum(lengths), inner, device=device), offsets_of(lengths, device), 0)


@pytest.mark.parametrize("name", ALL)
def test_nothing(name, device):
    for shape, lengths in (((0, 3), ()), ((0, 3), (0, 0)), ((4, 0), (1, 3)), ((0, 0), ()), ((0, 2, 3), (1, 1))):
        dim = len(shape) - 2
        for dtype in (torch.float32, torch.float16):
            x, offsets = torch.zeros(shape, device=device, dtype=dtype), offsets_of(lengths, device)
            kept = [len(lengths) if d == dim else n for d, n in enumerate(shape)]
            args = (x, x, offsets, dim) if name in BACKWARD else (x, offsets, dim)
            if name == "_nested_sum_backward":
                args = torch.zeros(kept, device=device, dtype=dtype), offsets, shape[dim], dim
            actual = kernel(name, *args)
            assert list(actual.shape) == (kept if name in GATHERED else list(shape)) and actual.dtype == dtype
            assert (actual == (-INF if name == "segment_amax" else 0)).all()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "offset": lambda x: torch.cat([x[:1], x])[1:],
    "outer inside": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "expanded": lambda x: x[..., :1].expand(x.shape),
    "negated": lambda x: -x._neg_view(),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(name, layout, device):
    lay = LAYOUTS[layout]
    offsets = torch.stack([offsets_of((3, 0, 6), device)] * 2, -1)[:, 0]
    for dim in (0, 1, 2, -1):
        x = rounded(9, 9, 9, device=device)
        args = [lay(a) if is_inexact(a) else a for a in arguments(name, x, offsets, dim)]
        close_to_largest(kernel(name, *args), expected(name, *args), x.dtype)


@pytest.mark.parametrize("name", [*GATHERED, *MAPPED])
@pytest.mark.parametrize("inner", [1, 5, 16, 40])
@pytest.mark.parametrize("length", [1, 7, 30, 70_000])
def test_nan_stays_in_its_segment_and_column(name, inner, length, device):
    """Each of nan, inf and -inf in a segment of its own; then nothing but -inf, which a maximum is shifted by."""
    if length * inner > 1_200_000:
        return
    x = rounded(6, length, inner, dtype=torch.float32, device=device)
    x[1, length // 2, 0] = NAN
    x[2, length // 3, inner - 1] = INF
    x[3, 0, 0] = -INF
    x[4, :, inner // 2] = -INF
    actual = kernel(name, x.flatten(0, 1), offsets_of((length,) * 6, device), 0).reshape(6, -1, inner)
    dense = {
        "segment_sum": lambda y: y.sum(1, keepdim=True),
        "segment_amax": lambda y: y.amax(1, keepdim=True),
        "segment_softmax": lambda y: y.softmax(1),
        "segment_log_softmax": lambda y: y.log_softmax(1),
    }
    wanted = dense[name](x.double())
    assert torch.equal(actual.isnan(), wanted.isnan())
    torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-3 if name == "segment_sum" else 1e-6, equal_nan=True)  # fmt: skip


@pytest.mark.parametrize("name", BACKWARD)
def test_a_gradient_that_is_not_finite_stays_in_its_segment(name, device):
    offsets = offsets_of((3, 4, 2), device)
    for value in (NAN, INF):
        grad, output, *rest = arguments(name, rounded(9, 20, device=device), offsets, 0)
        grad[4, 3] = value
        actual = kernel(name, grad, output, *rest)
        assert not actual[3:7, 3].isfinite().any()
        actual[3:7, 3] = 0
        assert actual.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cut", [False, True])
def test_any_exponent(dtype, cut, device):
    """exp to two units in the last place over the whole range, subnormal results included; ln of the sum beside it."""
    least = {torch.float32: 104.0, torch.float64: 746.0}[dtype]
    x = torch.linspace(-least, 0, 100_001 if cut else 20_001, dtype=torch.float64).to(dtype)
    x = x.reshape(-1, 1).expand(-1, 2).contiguous().to(device)
    offsets = offsets_of((len(x),), device)
    actual = kernel("segment_softmax", x, offsets, 0)
    wanted = (x.double() - x.double().logsumexp(0)).exp()
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    scale = 1 if dtype == torch.float32 else 1 + least  # float64 is not known better than its own logarithm
    error = (actual.double() - wanted).abs()
    assert (error <= 5 * scale * eps * wanted + 2 * tiny).all()
    log = kernel("segment_log_softmax", x, offsets, 0).double()
    torch.testing.assert_close(log, x.double() - x.double().logsumexp(0), rtol=3 * eps, atol=10 * eps)
    # and over what overflows: g - exp(y) sum g, with a sum of -1
    y = torch.linspace(-least, least, 4001, dtype=torch.float64).to(dtype).reshape(-1, 1).to(device)
    grad = torch.zeros_like(y)
    grad[0] = -1
    actual = kernel("nested_log_softmax_backward", grad, y, offsets_of((len(y),), device), 0)
    wanted = y.double().exp().to(dtype)
    assert torch.equal(actual[1:].isinf(), wanted[1:].isinf())
    finite = wanted.isfinite()[1:, 0]
    error = (actual[1:][finite].double() - y[1:][finite].double().exp()).abs()
    assert (error <= 2 * eps * wanted[1:][finite].double() + 2 * tiny).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_threads_do_not_change_a_bit(name, dtype):
    if LIBRARIES["cpu"].path is None:
        pytest.skip(LIBRARIES["cpu"].reason)
    threads = torch.get_num_threads()
    try:
        for inner, lengths in (
            (32, (4,) * 500 + (8192,) + (4,) * 500),
            (1, (300_000, 3, 5)),
            (3, (70,) * 900),
            (4200, (9, 70)),
        ):
            x = rounded(sum(lengths), inner, dtype=dtype)
            args = arguments(name, x, offsets_of(lengths), 0)
            results = []
            for count in (1, 2, 3, 8):
                torch.set_num_threads(count)
                results.append(kernel(name, *args))
            assert all(torch.equal(other, results[0]) for other in results[1:])
    finally:
        torch.set_num_threads(threads)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_half_is_computed_in_float32(name, dtype, device):
    offsets = offsets_of((30, 0, 1, 500), device)
    args = arguments(name, rounded(531, 20, dtype=dtype, device=device), offsets, 0)
    wide = kernel(name, *(a.float() if is_inexact(a) else a for a in args))
    assert torch.equal(kernel(name, *args), wide.to(dtype))


BAD_OFFSETS = [
    ([1, 4, 9], "offsets: expected to start at 0, got 1"),
    ([-1, 4, 9], "offsets: expected to start at 0, got -1"),
    ([0, 5, 4, 9], "offsets: they decrease from 5 to 4 at segment 1"),
    ([0, -5, 9], "offsets: they decrease from 0 to -5 at segment 0"),
    ([0, 4, 8], "offsets: expected to end at 9, the size in dim 1, got 8"),
    ([0, 12], "offsets: expected to end at 9, the size in dim 1, got 12 at segment 0"),
    ([0, 2**40, 9], f"offsets: expected to end at 9, the size in dim 1, got {2**40} at segment 0"),
    ([0], "offsets: expected to end at 9, the size in dim 1, got 0"),
    ([], r"offsets: expected one more than there are segments, in one dim, got shape \[0\]"),
    ([[0, 9]], r"offsets: expected one more than there are segments, in one dim, got shape \[1, 2\]"),
    (torch.tensor([0.0, 9.0]), "offsets: expected torch.int32 or torch.int64, got torch.float32"),
]


@pytest.mark.usefixtures("as_from_rules")
@pytest.mark.parametrize("given, message", BAD_OFFSETS, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_bad_offsets(name, given, message):
    if LIBRARIES["cpu"].path is None:
        pytest.skip(LIBRARIES["cpu"].reason)
    offsets = given if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.int64)
    x = rounded(2, 9, 3)
    args = (x, x, offsets, 1) if name in BACKWARD else (x, offsets, 1)
    if name == "_nested_sum_backward":
        args = rounded(2, max(offsets.numel() - 1, 0), 3), offsets, 9, 1
    with pytest.raises(RuntimeError, match=f"manualgrad::{name}: {message}"):
        kernel(name, *args)


def test_a_count_that_does_not_fit():
    if LIBRARIES["cpu"].path is None:
        pytest.skip(LIBRARIES["cpu"].reason)
    with pytest.raises(RuntimeError, match="offsets: expected to end at 5, the size in dim 0, got 4"):
        kernel("_nested_sum_backward", rounded(2, 3), offsets_of((1, 3)), 5, 0)


@pytest.mark.parametrize("given", [g for g, _ in BAD_OFFSETS if isinstance(g, list) and len(g) > 1], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_bad_offsets_on_a_gpu(name, given):
    """It cannot raise without being waited for: nothing else is read, the result is nan, and the device goes on."""
    if not torch.cuda.is_available() or not LIBRARIES["cuda"].loaded:
        pytest.skip("no CUDA device")
    offsets, x = torch.tensor(given, device="cuda"), rounded(2, 9, 3, device="cuda")
    args = (x, x, offsets, 1) if name in BACKWARD else (x, offsets, 1)
    if name == "_nested_sum_backward":
        args = rounded(2, len(given) - 1, 3, device="cuda"), offsets, 9, 1
    assert kernel(name, *args).isnan().all()
    torch.cuda.synchronize()


ERRORS = [
    ("segment_sum", {"dim": 2}, r"dim: expected a value in \[-2, 1\], got 2"),
    ("segment_softmax", {"dim": -3}, r"dim: expected a value in \[-2, 1\], got -3"),
    ("segment_sum", {"values": torch.ones(())}, r"values: expected at least 1 dim, got a tensor of shape \[\]"),
    ("segment_sum", {"values": torch.ones(4, 3).int()}, "values: expected a real floating point dtype, got Int"),
    ("segment_softmax", {"values": torch.ones(4, 3).cfloat()}, "values: expected a real floating point dtype, got torch.complex64"),
    ("segment_amax", {"values": torch.ones(4, 3).cfloat()}, "values: expected a real floating point dtype, got torch.complex64"),
    ("nested_softmax_backward", {"grad": torch.ones(4, 2)}, r"grad: expected shape \[4, 3\], that of output, got \[4, 2\]"),
    ("nested_softmax_backward", {"grad": torch.ones(4, 3, 1)}, r"grad: expected shape \[4, 3\], that of output, got \[4, 3, 1\]"),
    ("nested_log_softmax_backward", {"grad": torch.ones(4, 3).half()}, "grad: expected torch.float32, the dtype of output, got torch.float16"),
    ("_nested_sum_backward", {"values": torch.ones(3, 3)}, r"grad: expected 2 in dim 0, one for each segment of offsets, got shape \[3, 3\]"),
    ("_nested_sum_backward", {"count": -1}, "count: expected 0 or more, got -1"),
    ("_nested_sum_backward", {"values": torch.ones(2, 3).long()}, "grad: expected a floating point or complex dtype, got Long"),
]  # fmt: skip


@pytest.mark.usefixtures("as_from_rules")
@pytest.mark.parametrize("name, change, message", ERRORS)
def test_errors(name, change, message, device):
    rows = 2 if name == "_nested_sum_backward" else 4
    known = {"grad": torch.ones(4, 3), "values": torch.ones(rows, 3), "count": 4, "dim": 0} | change
    known = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in known.items()}
    wanted = {"_nested_sum_backward": ["values", "offsets", "count", "dim"]}.get(name, ["values", "offsets", "dim"])
    known["offsets"] = offsets_of((1, 3), device)
    args = [known[k] for k in (["grad", *wanted] if name in BACKWARD else wanted)]
    with pytest.raises(RuntimeError, match=f"manualgrad::{name}: {message}"):
        kernel(name, *args)
