"""Fourier transforms: every normalization, half spectra of even and odd sizes, several dims, none."""

import pytest
import torch
from helpers.tensors import random

import torch_manualgrad as mg

C128 = torch.complex128


def both(f, *inputs):
    """Gradients of |f|^2 and tangents, PyTorch's and ours."""
    found = []
    for names in (None, ("aten::_fft_c2c", "aten::_fft_r2c", "aten::_fft_c2r")):
        with mg.override(*names) if names else mg.override("aten::linalg_qr"):
            x = [i.clone().requires_grad_() for i in inputs]
            y = f(*x)
            found.append(
                (
                    *torch.autograd.grad((y * y.conj()).sum().real, x),
                    torch.func.jvp(f, inputs, tuple(i * (i.conj() + 1) for i in inputs))[1],
                )
            )
    torch.testing.assert_close(found[1], found[0])
    assert [x.stride() for x in found[1]] == [x.stride() for x in found[0]]


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_half_spectra(n, norm):
    both(lambda x: torch.fft.rfft(x, norm=norm), random(2, n))
    both(lambda x: torch.fft.irfft(x, n, norm=norm), random(2, n // 2 + 1, dtype=C128))
    both(lambda x: torch.fft.hfft(x, n, norm=norm), random(2, n // 2 + 1, dtype=C128))
    both(lambda x: torch.fft.ihfft(x, norm=norm), random(2, n))
    both(lambda x: torch.fft.fft(x, norm=norm), random(2, n))
    both(lambda x: torch.fft.ifft(x, norm=norm), random(2, n, dtype=C128))


@pytest.mark.parametrize("dims", [(0, 1, 2), (2, 0), (-3, -1), (1,)], ids=str)
def test_several_dims(dims):
    x = random(3, 2, 4)
    both(lambda x: torch.fft.rfftn(x, dim=dims), x)
    both(lambda x: torch.fft.fftn(x, dim=dims), x)
    both(lambda x: torch.fft.irfftn(x, dim=dims), x.to(C128) * (1 + 2j))
    both(lambda x: torch.fft.ifftn(x, dim=dims), x.to(C128) * (1 + 2j))
    both(lambda x: torch.fft.irfftn(x, (5,) * len(dims), dims), x.to(C128) * (1 + 2j))


def test_no_dims():
    both(lambda x: torch.fft.fftn(x, dim=()), random(2, 3, dtype=C128))


def test_entries_that_a_real_transform_ignores_have_no_gradient():
    x = random(3, dtype=C128).requires_grad_()
    with mg.override("aten::_fft_c2r"):
        (found,) = torch.autograd.grad(torch.fft.irfft(x, 4).square().sum(), x)
    assert found.imag[0] == found.imag[2] == 0
