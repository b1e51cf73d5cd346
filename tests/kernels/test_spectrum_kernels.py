"""The compiled derivatives of the SVD and of eigh against their references, on every device that has them."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
from helpers.factors import kernel, operator
from helpers.tensors import random
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.linalg import GaugeWarning

DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]
# lanes, one at a time, products of whole batches; whole and broken vectors; tall and wide
SHAPES = [
    *((n, n) for n in (0, 1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 64)),
    *(
        (5, 2),
        (2, 5),
        (4, 1),
        (16, 8),
        (8, 16),
        (20, 3),
        (3, 20),
        (32, 17),
        (17, 32),
        (40, 33),
        (33, 40),
        (70, 4),
        (0, 3),
    ),
]
SPECTRA = ["apart", "equal", "mixed", "null"]


def decomposition(
    *batch: int, m: int, n: int, dtype: torch.dtype, device: str, spectrum: str = "apart", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    k = min(m, n)
    U = torch.linalg.qr(random(*batch, m, k, dtype=dtype, seed=seed))[0]
    Vh = torch.linalg.qr(random(*batch, n, k, dtype=dtype, seed=seed + 1))[0].mH
    S = torch.arange(k, 0, -1, dtype=U.real.dtype).expand(*batch, k).clone()
    if spectrum == "equal":
        S.fill_(2)
    elif k > 1 and spectrum == "mixed":  # a pair within the window, a pair within the tolerance, far ones
        S[..., 1] = S[..., 0] * (1 - 0.3 * torch.finfo(S.dtype).eps ** 0.5)
        S[..., -1] = S[..., -2]
    elif k and spectrum == "null":
        S[..., k // 2 :] = 0
    return U.to(device), S.to(device), Vh.to(device)


def close_to_largest(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], size: int) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape and a.is_contiguous()
        if a.dtype == torch.bool:
            assert a.item() == e.item()
            continue
        scale = e.abs().max().item() if e.numel() else 0.0
        tolerance = 100 * (size + 1) * torch.finfo(a.dtype).eps
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance * max(scale, 1e-30))


def compare(name: str, *args) -> tuple[Tensor, ...]:
    found = kernel(name)(*args)
    close_to_largest(found, operator(name).reference(*args), max(args[-4].shape[-2:]))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m, n", SHAPES)
def test_against_the_reference(m, n, dtype, device):
    small = max(m, n) <= 9
    for spectrum, batch in itertools.product(SPECTRA, ((), (0,), (19,), (2, 1, 2)) if small else ((), (3,))):
        U, S, Vh = decomposition(*batch, m=m, n=n, dtype=dtype, device=device, spectrum=spectrum)
        given = [random(*x.shape, dtype=x.dtype, seed=5 + i, device=device) for i, x in enumerate((U, S, Vh))]
        dA = random(*batch, m, n, dtype=dtype, seed=9, device=device)
        for mask in itertools.product((True, False), repeat=3):
            if not small and mask not in ((True, True, True), (False, True, True), (True, False, False)):
                continue
            cotangents = [g if wanted else None for g, wanted in zip(given, mask)]
            compare("svd_backward", *cotangents, U, S, Vh, None, 0.0, 0.0)
            if m == n and mask[2]:
                compare("linalg_eigh_backward", cotangents[1], cotangents[0], S, U, None, 0.0, 0.0)
        compare("linalg_svd_jvp", dA, U, S, Vh, None, 0.0, 0.0)
        if m == n:
            compare("linalg_eigh_jvp", dA + dA.mH, S, U, None, 0.0, 0.0)


def results(U, S, Vh, gU, gS, gVh, dA, *options) -> list[Tensor]:
    """All of both decompositions."""
    found = [
        *kernel("svd_backward")(gU, gS, gVh, U, S, Vh, *options),
        *kernel("linalg_svd_jvp")(dA, U, S, Vh, *options),
    ]
    if U.shape[-2] == Vh.shape[-1]:
        found += kernel("linalg_eigh_backward")(gS, gU, S, U, *options)
        found += kernel("linalg_eigh_jvp")(dA, S, U, *options)
    return found


def arguments(*batch, m, n, dtype, device, spectrum="apart"):
    U, S, Vh = decomposition(*batch, m=m, n=n, dtype=dtype, device=device, spectrum=spectrum)
    given = [random(*x.shape, dtype=x.dtype, seed=5 + i, device=device) for i, x in enumerate((U, S, Vh))]
    return [U, S, Vh, *given, random(*batch, m, n, dtype=dtype, seed=9, device=device)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [(None, 0.0, 0.1), (1e-2, 0.0, 0.0), (0.0, 0.5, 0.0), (0.0, 0.0, 0.0)])
def test_options(options, dtype, device):
    for m, n in ((4, 4), (16, 5), (3, 6), (20, 20), (40, 35)):
        for spectrum in SPECTRA:
            U, S, Vh, gU, gS, gVh, dA = arguments(3, m=m, n=n, dtype=dtype, device=device, spectrum=spectrum)
            compare("svd_backward", gU, gS, gVh, U, S, Vh, *options)
            compare("linalg_svd_jvp", dA, U, S, Vh, *options)


LAYOUTS = {
    "columns": lambda x: x.mT.contiguous().mT if x.dim() > 2 else x,
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "batch inside": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "conjugate": lambda x: x.conj().resolve_conj().conj() if x.is_complex() else x,
    "expanded": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, device):
    for dtype, (m, n) in itertools.product(
        (torch.float32, torch.complex128), ((3, 3), (8, 8), (16, 16), (9, 5), (20, 30), (40, 36))
    ):
        plain = arguments(20, m=m, n=n, dtype=dtype, device=device, spectrum="mixed")
        strange = [LAYOUTS[layout](x) for x in plain]
        expected = results(*(x.resolve_conj().contiguous() for x in strange), None, 0.0, 0.0)
        for a, e in zip(results(*strange, None, 0.0, 0.0), expected):
            if a.dtype == torch.bool or max(m, n) <= 32:
                assert a.equal(e)
            else:  # products by BLAS, which has its own ways for each layout
                torch.testing.assert_close(a, e, rtol=2e-4, atol=2e-4 * e.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alone_as_in_a_batch(dtype):
    for m, n in ((1, 1), (2, 2), (3, 3), (4, 3), (5, 5), (8, 8), (13, 13), (16, 16), (16, 8), (7, 12), (20, 20)):
        together = arguments(21, m=m, n=n, dtype=dtype, device="cpu")
        together[1][::4] = 1  # these go by the rules
        for options in ((None, 0.0, 0.0), (None, 0.0, 0.1)):
            of_all = results(*together, *options)
            for b in range(21):
                for a, e in zip(results(*(x[b] for x in together), *options), of_all):
                    assert a.dim() == 0 or a.equal(e[b])


def test_threads_do_not_matter():
    threads = torch.get_num_threads()
    try:
        for m, n, batch in ((3, 3, 70000), (16, 16, 300), (16, 11, 200), (24, 24, 60), (33, 33, 30)):
            given = arguments(batch, m=m, n=n, dtype=torch.float32, device="cpu")
            given[1][::7] = 1
            torch.set_num_threads(1)
            alone = results(*given, None, 0.0, 0.0)
            torch.set_num_threads(3)
            for a, e in zip(results(*given, None, 0.0, 0.0), alone):
                assert a.equal(e) if m <= 32 else torch.allclose(a.float(), e.float(), rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_stays_in_its_matrix(bad, dtype, device):
    for m, n in ((2, 2), (4, 4), (12, 5), (20, 20), (36, 36)):
        clean = arguments(18, m=m, n=n, dtype=dtype, device=device)
        expected = results(*clean, None, 0.0, 0.0)
        for place in range(len(clean)):
            dirty = [x.clone() for x in clean]
            dirty[place][3, ..., 0] = bad
            others = torch.arange(18) != 3
            found = results(*dirty, None, 0.0, 0.0)
            touched = [not a[3].isfinite().all() for a in found if a.dim()]
            assert any(touched) or (place == 1 and bad == math.inf)  # quotients by an infinite value are 0
            for a, e in zip(found, expected):
                if a.dim():
                    torch.testing.assert_close(a[others], e[others], rtol=1e-4, atol=1e-4)


def test_rules_look_at_each_matrix_by_itself(device):
    """One matrix of many has a group; what is done there is what is done to it alone."""
    for n, dtype in itertools.product((3, 10, 25, 40), (torch.float32, torch.float64)):
        given = arguments(33, m=n, n=n, dtype=dtype, device=device)
        apart = results(*given, None, 0.0, 0.0)
        given[1][17] = 1
        found, alone = results(*given, None, 0.0, 0.0), results(*(x[17] for x in given), None, 0.0, 0.0)
        others = torch.arange(33) != 17
        for f, a, e in zip(found, apart, alone):
            if f.dim():
                torch.testing.assert_close(f[17], e, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(f[others], a[others], rtol=1e-4, atol=1e-4)
        assert found[1] and not apart[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_size_of_the_gradient_decides_about_equal_values(dtype, device):
    """The quotient of two values that are equal up to rounding is kept if it is not larger than the gradient elsewhere."""
    eps = torch.finfo(dtype).eps
    for n, factor in itertools.product((5, 20, 40), (0.5, 40)):
        U, S, Vh = decomposition(2, m=n, n=n, dtype=dtype, device=device)
        S[0, 1] = S[0, 0] * (1 - 3 * n * eps)  # more than rounding errors of the products
        X = random(2, n, n, dtype=dtype, seed=3, device=device)
        X = (X - X.mH) * (1 - torch.eye(n, dtype=S.dtype, device=device))
        size = (X / (S[..., None, :] - S[..., None] + torch.eye(n, dtype=S.dtype, device=device)))[0].abs()
        size[:2, :2] = 0
        X[0, 0, 1] = factor * size.max() * (S[0, 0] - S[0, 1])
        X[0, 1, 0] = -X[0, 0, 1].conj()
        given = (None, U @ X, S, U, None, 0.0, 0.0)
        found, expected = kernel("linalg_eigh_backward")(*given), operator("linalg_eigh_backward").reference(*given)
        assert found[1].item() == expected[1].item() == (factor > 4), (n, factor)
        # the quotient has the rounding errors of the products, divided by a distance of 3 n eps
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0.1 * expected[0].abs().max().item())


def test_unsorted_values_meet_the_same_rules(device):
    U, S, Vh, gU, gS, gVh, dA = arguments(m=40, n=40, dtype=torch.float64, device=device, spectrum="mixed")
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    plain = kernel("svd_backward")(gU, gS, gVh, U, S, Vh, None, 0.0, 0.0)
    shuffled = kernel("svd_backward")(
        gU[:, order], gS[order], gVh[order], U[:, order], S[order], Vh[order], None, 0.0, 0.0
    )
    torch.testing.assert_close(shuffled[0], plain[0], rtol=1e-11, atol=1e-11 * plain[0].abs().max().item())
    assert shuffled[1] == plain[1]


def test_sizes_where_squares_leave_the_range(device):
    """Rounding errors are told from the rest of a cotangent of 1e-30 too."""
    for n in (3, 20, 40):
        U, S, Vh = decomposition(m=n, n=n, dtype=torch.float32, device=device, spectrum="equal")
        G = 1e-30 * random(n, n, dtype=torch.float32, seed=1, device=device)
        M = U.mT @ G @ Vh.mT  # of <G, U V^H>
        gU, gVh = G @ Vh.mT, U.mT @ G
        gA, doubts = kernel("svd_backward")(gU, None, gVh, U, S, Vh, None, 0.0, 0.0)
        expected = U @ ((M - M.mT) / 4) @ Vh
        assert not doubts
        torch.testing.assert_close(gA, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


def test_arguments_are_checked(device):
    U, S, Vh, gU, gS, gVh, dA = arguments(2, m=4, n=3, dtype=torch.float32, device=device)
    pull, push = kernel("svd_backward"), kernel("linalg_svd_jvp")
    for call, what in [
        (lambda: pull(gU, gS[:1], gVh, U, S, Vh, None, 0.0, 0.0), r"values: expected shape \[2, 3\], got \[1, 3\]"),
        (lambda: pull(gU.double(), gS, gVh, U, S, Vh, None, 0.0, 0.0), "left vectors: expected torch.float32"),
        (lambda: pull(gU, gS, gVh, U, S, Vh[..., :2, :], None, 0.0, 0.0), r"Vh: expected shape \[2, 3, 3\]"),
        (lambda: pull(gU, gS, gVh, U, S.double(), Vh, None, 0.0, 0.0), "S: expected torch.float32"),
        (lambda: push(dA.mT, U, S, Vh, None, 0.0, 0.0), r"dA: expected shape \[2, 4, 3\], got \[2, 3, 4\]"),
        (lambda: push(dA, U[..., :2], S, Vh, None, 0.0, 0.0), "thin factors"),
        (lambda: pull(gU.half(), gS.half(), None, U.half(), S.half(), Vh.half(), None, 0.0, 0.0), "expected float32"),
    ]:
        with pytest.raises(RuntimeError, match=what):
            call()


@pytest.mark.parametrize("n", [3, 24, 40])
def test_warnings_come_through(n, device):
    A = torch.eye(n, dtype=torch.float64, device=device).requires_grad_()
    G = random(n, n, dtype=torch.float64, seed=0, device=device)
    with pytest.warns(GaugeWarning):
        (mg.linalg.eigh(A).eigenvectors * G).sum().backward()
        if device == "cuda":  # the warning comes with a later call, when the flag has arrived
            torch.cuda.synchronize()
            mg.linalg.eigh(A).eigenvalues.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        L, V = mg.linalg.eigh(A)
        torch.autograd.grad(((V * L.exp()) @ V.mT * G).sum(), A)
