"""Entries in other places: what PyTorch has wrong, and the edges of joining, padding, packing and rearranging."""

import pytest
import torch
from helpers.tensors import random
from torch.func import grad, jvp

import torch_manualgrad as mg


def test_a_copy_that_ends_with_the_last_entry():
    x = random(4)

    def f(x):
        return torch.narrow_copy(x, 0, -2, 2).pow(2).sum()

    with pytest.raises(RuntimeError):
        grad(f)(x)
    with mg.override():
        torch.testing.assert_close(grad(f)(x), torch.cat([torch.zeros(2, dtype=x.dtype), 2 * x[2:]]))


@pytest.mark.parametrize("offset", [None, 3])
def test_a_scatter_of_a_strided_view(offset):
    base, src = random(14), random(2, 2, seed=1)
    x = base[2:].reshape(3, 4).detach()

    def f(x):
        return torch.as_strided_scatter(x, src, [2, 2], [4, 1], offset).pow(2).sum()

    x.requires_grad_()
    assert not torch.equal(
        torch.autograd.grad(f(x), x)[0], 2 * x * (torch.as_strided_scatter(x, 0 * src, [2, 2], [4, 1], offset) != 0)
    )
    with mg.override():
        (found,) = torch.autograd.grad(f(x), x)
        tangent = jvp(f, (x.detach(),), (torch.ones_like(x),))[1]
    shows = torch.as_strided_scatter(x.detach(), 0 * src, [2, 2], [4, 1], offset) == 0
    torch.testing.assert_close(found, (2 * x * ~shows).detach())
    torch.testing.assert_close(tangent, found.sum())


@pytest.mark.parametrize("function", ["select_scatter", "slice_scatter"])
def test_complex_scatters_of_views(function):
    x, src = random(3, 2, dtype=torch.complex128), random(3, 2, dtype=torch.complex128, seed=1)

    def f(x, src):
        if function == "select_scatter":
            return torch.select_scatter(x, src[:, 0], 1, 1).abs().square().sum()
        return torch.slice_scatter(x, src[:, :1], 1, 1, 2).abs().square().sum()

    with pytest.raises(RuntimeError, match="complex"):
        torch.autograd.grad(f(x.clone().requires_grad_(), src), x)
    with mg.override():
        of_x, of_src = grad(f, argnums=(0, 1))(x, src)
    torch.testing.assert_close(of_x, torch.stack([2 * x[:, 0], 0 * x[:, 1]], 1))
    torch.testing.assert_close(of_src, torch.stack([2 * src[:, 0], 0 * src[:, 1]], 1))


def test_joined_tensors_may_be_written_to():
    with mg.override("*"):
        x, y = (random(2, seed=k).requires_grad_() for k in range(2))
        parts = [x * 1, y * 1]
        joined = [torch.cat(parts), torch.stack(parts, 1), torch.block_diag(*parts)]
        parts[0].add_(1)
        sum(j.sum() for j in joined).backward()
        assert x.grad.eq(3).all() and y.grad.eq(3).all()


def test_joined_tensors_of_several_dtypes():
    x, y = random(2).float().requires_grad_(), random(2, dtype=torch.complex128).requires_grad_()
    with mg.override("*"):
        (torch.cat([x, y]) * (2 + 1j)).abs().sum().backward()
    assert x.grad.dtype == torch.float32 and y.grad.dtype == torch.complex128


@pytest.mark.parametrize("batch_first", [True, False])
def test_packed_sequences(batch_first):
    lengths = torch.tensor([3, 1])
    x, t = (random(2, 4, 2, seed=k) if batch_first else random(4, 2, 2, seed=k) for k in range(2))

    def f(x):
        return torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first).data.pow(3).sum()

    with pytest.raises(NotImplementedError):
        jvp(f, (x,), (t,))
    real = torch.arange(4)[None, :] < lengths[:, None] if batch_first else torch.arange(4)[:, None] < lengths[None, :]
    with mg.override():
        torch.testing.assert_close(grad(f)(x), 3 * x**2 * real[..., None])
        torch.testing.assert_close(jvp(grad(f), (x,), (t,))[1], 6 * x * t * real[..., None])


def test_formulas_by_hand():
    grads = [random(2, 3), None]
    found = mg.ops.split_with_sizes_backward(grads, [2, 1], 0, [3, 3])
    torch.testing.assert_close(found, torch.cat([grads[0], torch.zeros(1, 3, dtype=torch.float64)]))
    torch.testing.assert_close(mg.ops.split_backward(grads, 2, 0, [3, 3]), found)
    torch.testing.assert_close(mg.ops.repeat_backward(torch.ones(2, 6), [2, 2], [3]), torch.full((3,), 4.0))
    torch.testing.assert_close(
        mg.ops.slice_backward_wrapper(torch.ones(2), [4], 0, None, None, 2), torch.tensor([1.0, 0, 1, 0])
    )
    torch.testing.assert_close(mg.ops.constant_pad_nd_backward(torch.ones(3), [1, -1]), torch.tensor([1.0, 1, 0]))
    torch.testing.assert_close(
        mg.ops.take_backward(torch.ones(3), [2, 2], torch.tensor([0, -1, 0])), torch.tensor([[2.0, 0], [0, 1]])
    )


@pytest.mark.parametrize(
    ("f", "shape"),
    [(torch.pixel_shuffle, (2, 0, 1, 2)), (torch.pixel_unshuffle, (0, 2, 4)), (torch.channel_shuffle, (2, 0, 3, 3))],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_gradients_of_empty_tensors(f, shape):
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    with mg.override("*"):
        y = f(x, 2)
        (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.shape == x.shape
