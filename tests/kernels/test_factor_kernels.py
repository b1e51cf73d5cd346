"""The compiled derivatives of LU, Cholesky, QR, determinants, inverses and solves against their references, on every
device that has them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from helpers.factors import (
    BATCH,
    DTYPES,
    IN_CACHE,
    OPERATORS,
    SIZES,
    cases,
    check,
    cholesky,
    kernel,
    lu_arguments,
    lu_tangent,
    matrices,
    moved,
    outputs,
    packed,
    qr,
    regular,
    skip_unless_taken,
    solve,
    solve_tangents,
    triangular,
)
from helpers.tensors import random
from torch import Tensor

import torch_manualgrad as mg

RECTANGLES = [(5, 2), (2, 5), (4, 1), (1, 4), (16, 8), (8, 16), (20, 3), (3, 20), (32, 17), (17, 32), (0, 3), (3, 0)]
LARGER = [33, 48, 100]  # of real square matrices, on the CPU


@pytest.mark.parametrize("name, n, dtype", cases(SIZES, LARGER))
def test_square(name, n, dtype, device):
    skip_unless_taken(n, device, name, dtype)
    for batch in ((), (1,), (BATCH if n <= max(SIZES) else 3,), (2, 3), (0,)):
        check(name, OPERATORS[name](*batch, n=n, dtype=dtype), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m, n", RECTANGLES)
def test_rectangles(m, n, dtype, device):
    for batch in ((), (BATCH,)):
        check("linalg_lu_backward", lu_arguments(*batch, m=m, n=n, dtype=dtype), device)
        check("linalg_lu_jvp", lu_tangent(*batch, m=m, n=n, dtype=dtype), device)
        check("lu_factor_ex_backward", packed(*batch, m=m, n=n, dtype=dtype), device)
        check("lu_factor_ex_jvp", packed(*batch, m=m, n=n, dtype=dtype), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m, n", [(2, 2), (4, 4), (5, 5), (9, 9), (5, 2), (2, 5), (20, 3), (16, 8)])
def test_one_cotangent_of_two(m, n, dtype, device):
    for grad_L in (True, False):
        check(
            "linalg_lu_backward", lu_arguments(BATCH, m=m, n=n, dtype=dtype, grad_L=grad_L, grad_U=not grad_L), device
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_options(n, dtype, device):
    """Without pivoting, an upper factor, other numbers of columns."""
    gL, gU, P, L, U, _ = lu_arguments(BATCH, m=n, n=n, dtype=dtype)
    check("linalg_lu_backward", (gL, gU, P, L, U, False), device)
    check("linalg_lu_jvp", (gL, P, L, U, False), device)
    given, LU, pivots, _ = packed(BATCH, n=n, dtype=dtype)
    check("lu_factor_ex_backward", (given, LU, pivots, False), device)
    check("lu_factor_ex_jvp", (given, LU, pivots, False), device)
    check("cholesky_backward", cholesky(BATCH, n=n, dtype=dtype, upper=True), device)
    check("cholesky_jvp", cholesky(BATCH, n=n, dtype=dtype, upper=True), device)
    for columns in (0, 1, 2, 5, 32):
        check("linalg_solve_backward", solve(BATCH, n=n, dtype=dtype, columns=columns), device)
        dA, dB, *rest = solve_tangents(BATCH, n=n, dtype=dtype, columns=columns)
        for given in ((dA, dB), (dA, None), (None, dB)):
            check("linalg_solve_jvp", (*given, *rest), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_triangles(n, dtype, device):
    """Either triangle, either side, with and without its diagonal, any number of right-hand sides, any strides."""
    op = kernel("linalg_solve_triangular_backward")
    for upper, left, unitriangular in itertools.product((True, False), repeat=3):
        for columns in (0, 1, 2, 5, 32):
            options = {"columns": columns, "upper": upper, "left": left, "unitriangular": unitriangular}
            arguments = triangular(BATCH, n=n, dtype=dtype, **options)
            gA, gB = check("linalg_solve_triangular_backward", arguments, device)
            turned = op(*moved(arguments, lambda x: x.to(device).mT.contiguous().mT))
            assert torch.equal(turned[0], gA) and torch.equal(turned[1], gB)
            # what is not read has no effect and no gradient
            unread = torch.ones(n, n, dtype=torch.bool).triu(int(not unitriangular))
            unread = unread.mT if upper else unread
            for value in (math.nan, math.inf, 0.0):
                grad, A, *rest = moved(arguments, lambda x: x.to(device))
                found = op(grad, A.masked_fill(unread.to(device), value), *rest)
                assert torch.equal(found[0], gA) and torch.equal(found[1], gB)
            assert (gA[..., unread.to(device)] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m, n", [(m, n) for m, n in RECTANGLES if m > n] + [(n, n) for n in (*SIZES, 33, 50)])
def test_qr(m, n, dtype, device):
    """Each of the cotangents alone; garbage below the diagonals of R and its cotangent."""
    skip_unless_taken(m, device, "linalg_qr_backward", dtype)
    if dtype.is_complex and m > max(SIZES):
        pytest.skip("the kernel takes smaller matrices")
    for batch, grad_Q, grad_R in itertools.product(((), (BATCH,)), (True, False), (True, False)):
        if not grad_Q and not grad_R:
            continue
        arguments = qr(*batch, m=m, n=n, dtype=dtype, grad_Q=grad_Q, grad_R=grad_R)
        (found,) = check("linalg_qr_backward", arguments, device)
        below = torch.ones(n, n, dtype=torch.bool).tril(-1)
        gQ, gR, Q, R = moved(arguments, lambda x: x.to(device))
        for value in (math.nan, math.inf):
            spoilt = [x if x is None else x.masked_fill(below.to(device), value) for x in (gR, R)]
            assert torch.equal(kernel("linalg_qr_backward")(gQ, spoilt[0], Q, spoilt[1]), found)
        for layout in ("columns", "gaps"):
            given = moved((gQ, gR, Q, R), LAYOUTS[layout])
            assert torch.equal(kernel("linalg_qr_backward")(*given), found)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda x: x.mT.contiguous().mT if x.dim() > 2 else x,
    "rows": lambda x: x.contiguous(),
    "gaps": lambda x: torch.stack([x, x], -1)[..., 1],
    "reordered batch": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name, n, dtype", cases([2, 3, 4, 7, 12, 20], [50]))
def test_layouts(name, n, dtype, layout, device):
    skip_unless_taken(n, device, name)
    arguments = OPERATORS[name](3, 6, n=n, dtype=dtype)
    expected = check(name, arguments, device)
    found = outputs(kernel(name)(*moved(arguments, lambda x: LAYOUTS[layout](x.to(device)))))
    for one, other in zip(found, expected):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name, n, dtype", cases([3, 9], [40]))
def test_broadcast_batches(name, n, dtype, device):
    skip_unless_taken(n, device, name)
    arguments = moved(OPERATORS[name](n=n, dtype=dtype), lambda x: x.to(device).expand(4, 5, *x.shape))
    expected = outputs(kernel(name)(*moved(arguments, lambda x: x.contiguous())))
    for one, other in zip(outputs(kernel(name)(*arguments)), expected):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name, n, dtype", cases([1, 2, 3, 4, 7, 16, 21], [35]))
def test_bitwise_identical_at_every_position_in_a_batch(name, n, dtype, device):
    """In any place of a batch, and with any number of threads; but few matrices may take another way than many."""
    skip_unless_taken(n, device, name)
    op, arguments = kernel(name), OPERATORS[name](300, n=n, dtype=dtype)
    arguments = moved(arguments, lambda x: x.to(device))
    whole = matrices(op(*arguments))
    few = [(0, 1), (1, 2), (3, 5), (299, 1)] if n <= 4 or dtype.is_complex or name not in IN_CACHE else []
    for start, count in (*few, (7, 16), (250, 50)):
        part = matrices(op(*moved(arguments, lambda x, a=start, c=count: x[a : a + c])))
        for one, other in zip(part, whole):
            assert torch.equal(one, other[start : start + count])
    turned = matrices(op(*moved(moved(arguments, lambda x: x[:7]), lambda x: x.flip(0))))
    for one, other in zip(turned, matrices(op(*moved(arguments, lambda x: x[:7])))):
        assert torch.equal(one.flip(0), other)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for one, other in zip(matrices(op(*arguments)), whole):
                assert torch.equal(one, other)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("name", OPERATORS)
def test_strides_are_known_without_data(name, n, device):
    skip_unless_taken(n, device, name)
    given: list[tuple] = [OPERATORS[name](6, n=n, dtype=torch.float64)]
    if name == "linalg_solve_triangular_backward":
        for left, columns in itertools.product((True, False), (2, 20)):
            given.append(triangular(6, n=n, dtype=torch.float64, left=left, columns=columns))
    if name == "linalg_qr_backward":
        given.append(qr(6, m=7, n=n, dtype=torch.float64))
    for arguments in given:
        found = outputs(kernel(name)(*moved(arguments, lambda x: x.to(device))))
        known = outputs(kernel(name)(*moved(arguments, lambda x: x.to("meta"))))
        assert [(x.shape, x.stride()) for x in found] == [(x.shape, x.stride()) for x in known]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_argument_of_the_wrong_shape_is_named(name, device):
    skip_unless_taken(3, device, name)
    op = kernel(name)
    arguments = OPERATORS[name](2, n=3, dtype=torch.float64)
    names = [a.name for a in op._schema.arguments]
    for i, argument in enumerate(arguments):
        if not isinstance(argument, Tensor):
            continue
        for wrong in (argument[:1], argument.to(torch.float16), argument.unsqueeze(0)):
            given = moved(tuple(wrong if j == i else a for j, a in enumerate(arguments)), lambda x: x.to(device))
            with pytest.raises(RuntimeError, match=rf"manualgrad::{name}(\.kernel)?: .*(expected|float16)") as raised:
                op(*given)
            assert any(f" {n}: " in str(raised.value) for n in names) or "float16" in str(raised.value)
    for n, dtype in ((33, torch.complex128), (257 if device == "cpu" and name in IN_CACHE else 33, torch.float64)):
        too_large = OPERATORS[name](1, n=n, dtype=dtype)
        with pytest.raises(RuntimeError, match="up to 256" if n == 257 else "up to 32"):
            op(*moved(too_large, lambda x: x.to(device)))


@pytest.mark.parametrize("n", [3, 16, 40])
def test_taken_where_nothing_is_recorded(n, device):
    """The public formulas run the kernel, and give what they give without it."""
    skip_unless_taken(n, device)
    gL, gU, P, L, U, _ = moved(lu_arguments(4, m=n, n=n, dtype=torch.float64), lambda x: x.to(device))
    found = mg.ops.linalg_lu_backward(gL, gU, P, L, U, True)
    assert torch.equal(found, kernel("linalg_lu_backward")(gL, gU, P, L, U, True))
    recorded = mg.ops.linalg_lu_backward(gL, gU, P, L.requires_grad_(), U, True)
    assert recorded.requires_grad
    torch.testing.assert_close(recorded, found)


@pytest.mark.parametrize("n", [2, 7, 16])
def test_triangles_are_taken_where_nothing_is_recorded(n, device):
    grad, A, X, *options = moved(triangular(4, n=n, dtype=torch.float64, upper=False), lambda x: x.to(device))
    found = mg.ops.linalg_solve_triangular_backward(grad, A, X, *options)
    for one, other in zip(found, kernel("linalg_solve_triangular_backward")(grad, A, X, *options)):
        assert torch.equal(one, other)
    for one, other in zip(mg.ops.linalg_solve_triangular_backward(grad, A.requires_grad_(), X, *options), found):
        assert one.requires_grad
        torch.testing.assert_close(one, other)
    gQ, gR, Q, R = moved(qr(4, m=n + 1, n=n, dtype=torch.float64), lambda x: x.to(device))
    if device in mg.ops.linalg_qr_backward.kernels:
        found = kernel("linalg_qr_backward")(gQ, gR, Q, R)
        assert torch.equal(mg.ops.linalg_qr_backward(gQ, gR, Q @ R, Q, R, "reduced"), found)


# -- singular matrices, and entries that are not finite, pivots that are none ---------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 16])
def test_triangles_with_a_pivot_of_zero(n, dtype, device):
    """What is not finite stays in its matrix; the last pivot of a real square QR is not divided by."""
    for name, place in (("linalg_solve_triangular_backward", 1), ("linalg_qr_backward", 3)):
        if device not in getattr(mg.ops, name).kernels:
            continue
        arguments = moved(OPERATORS[name](BATCH, n=n, dtype=dtype), lambda x: x.to(device))
        clean = outputs(kernel(name)(*arguments))
        for pivot in {0, n - 1}:
            changed = list(arguments)
            changed[place] = arguments[place].clone()
            changed[place][5, pivot, pivot] = 0
            results = outputs(kernel(name)(*changed))
            for one, other in zip(matrices(results), matrices(clean)):
                smooth = name == "linalg_qr_backward" and not dtype.is_complex and pivot == n - 1
                assert one[5].isfinite().all() == smooth
                keep = torch.arange(BATCH) != 5
                assert torch.equal(one[keep], other[keep])


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("name, n, dtype", cases([1, 3, 9], [34]))
def test_infinities_stay_in_their_matrix(name, n, dtype, value, device):
    skip_unless_taken(n, device, name)
    op, arguments = kernel(name), OPERATORS[name](BATCH, n=n, dtype=dtype)
    arguments = moved(arguments, lambda x: x.to(device))
    clean = matrices(op(*arguments))
    others = [b for b in range(BATCH) if b != 5]
    for place, argument in enumerate(arguments):
        if not isinstance(argument, Tensor) or argument.dtype != dtype:
            continue
        changed = argument.clone()
        changed[5] = value
        found = matrices(op(*arguments[:place], changed, *arguments[place + 1 :]))
        for one, other in zip(found, clean):
            assert torch.equal(one[others], other[others])
        unread = (name, place) in {
            ("linalg_solve_backward", 2),
            ("linalg_solve_jvp", 3),
        }  # A, of which the kernel takes the factors
        if n > 1 and math.isnan(value) and not unread:
            assert any(one[5].isnan().any() for one in found)


def singular(n: int, zeros: int, dtype: torch.dtype) -> Tensor:
    A = regular(6, n=n, dtype=dtype)
    A[1::2] = A[1::2, :, : n - zeros] @ random(n - zeros, n, dtype=dtype, seed=5)
    nilpotent = torch.ones(n, n, dtype=dtype).triu(1)
    return torch.cat((A, nilpotent[None], torch.zeros(1, n, n, dtype=dtype), torch.eye(n, dtype=dtype)[None]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 9, 36])
def test_zero_pivots(n, dtype, device):
    """The adjugate, exact for any number of zeros among the pivots; nan where log|det| has no derivative."""
    if n > max(SIZES) and (dtype.is_complex or device != "cpu"):
        pytest.skip("the kernel takes smaller matrices")
    for zeros in {0, 1, min(2, n), n}:
        LU, pivots, _ = torch.linalg.lu_factor_ex(singular(n, zeros, dtype))
        LU = LU.clone()
        for b, places in enumerate(itertools.islice(itertools.combinations(range(n), zeros), 6)):
            for i in places:
                LU[b, i, i] = 0
        grad = random(*LU.shape[:1], dtype=dtype)
        swaps = (pivots != torch.arange(1, n + 1)).sum(-1)
        value = LU.diagonal(dim1=-2, dim2=-1).prod(-1) * (1 - 2 * (swaps % 2))
        check("linalg_det_backward", (grad, value, LU, pivots), device)
        found = kernel("slogdet_backward")(grad.to(device), LU.to(device), pivots.to(device)).cpu()
        is_singular = (LU.diagonal(dim1=-2, dim2=-1) == 0).any(-1)
        assert found[is_singular].isnan().all()
        assert found[~is_singular].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("n", [1, 2, 4, 9, 33, 130, 300])
def test_last_pivot_of_zero(n, dtype, device):
    """Smooth for the factors of square and wide matrices: nothing is divided by it, in no route."""
    # of large ones one alone: PyTorch's own LU of several at once hangs on more than one thread
    arguments = list(lu_arguments(BATCH if n <= max(SIZES) else 1, m=n, n=n, dtype=dtype))
    arguments[4] = arguments[4].clone()
    arguments[4][..., -1, -1] = 0
    if n > max(SIZES):
        found = mg.ops.linalg_lu_backward(*moved(tuple(arguments), lambda x: x.to(device))).cpu()
        torch.testing.assert_close(found, mg.ops.linalg_lu_backward.reference(*arguments), rtol=0, atol=1e-11)
        return
    for name, given in (("linalg_lu_backward", arguments), ("linalg_lu_jvp", [arguments[0], *arguments[2:]])):
        assert all(x.isfinite().all() for x in check(name, tuple(given), device))


@pytest.mark.parametrize("n", [3, 9, 33])
def test_an_invalid_permutation_gives_nan(n, device):
    skip_unless_taken(n, device)
    arguments = [x.to(device) if isinstance(x, Tensor) else x for x in lu_arguments(4, m=n, n=n, dtype=torch.float64)]
    expected = kernel("linalg_lu_backward")(*arguments)
    for value in (0.0, 1.0, 1e30, -1.0, math.nan, math.inf):
        P = arguments[2].clone()
        P[2] = value
        found = kernel("linalg_lu_backward")(*arguments[:2], P, *arguments[3:])
        assert found[2].isnan().all()
        assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])


@pytest.mark.usefixtures("as_from_rules")
@pytest.mark.parametrize("n", [3, 9, 33])
def test_pivots_out_of_range_do_no_harm(n, device):
    skip_unless_taken(n, device)
    for name in (
        "lu_factor_ex_backward",
        "lu_factor_ex_jvp",
        "linalg_det_backward",
        "slogdet_backward",
        "linalg_solve_backward",
        "linalg_solve_jvp",
    ):
        if n > max(SIZES) and name not in IN_CACHE:
            continue
        arguments = OPERATORS[name](BATCH, n=n, dtype=torch.float64)
        wrong = moved(arguments, lambda x: (torch.full_like(x, 2**31 - 1) if x.dtype == torch.int32 else x).to(device))
        kernel(name)(*wrong)
        wrong = moved(arguments, lambda x: (torch.full_like(x, -(2**31)) if x.dtype == torch.int32 else x).to(device))
        kernel(name)(*wrong)
