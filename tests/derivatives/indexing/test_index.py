"""Indexing by lists of tensors: masks, absent ones, negative and repeated indices, compiled with sizes that are symbols."""

import pytest
import torch
from helpers.tensors import random
from torch.func import grad, jvp, vmap

import torch_manualgrad as mg

INDICES = {
    "a mask": (slice(None), torch.tensor([True, False, True])),
    "a mask of all": torch.tensor(
        [[True, False, True], [False, False, True], [True, True, True], [False, True, False]]
    ),
    "absent ones": (slice(None), None, torch.tensor([2, 0, 0])),
    "negative and repeated": (torch.tensor([-1, 3, -1, 0]), torch.tensor([0, 0, 0, -2])),
    "no dims": torch.tensor(-2),
    "empty": torch.tensor([], dtype=torch.long),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_reading_and_writing(index, dtype):
    x, t = random(4, 3, dtype=dtype), random(4, 3, dtype=dtype, seed=1)

    def read(x):
        return (x[index] ** 2).sum().abs()

    def added(x):
        return x.clone().index_put(tuple(pair(index)), x.sum(), accumulate=True).pow(2).sum().abs()

    def pair(index):
        return index if isinstance(index, tuple) and not isinstance(index[0], slice) else (index,)

    functions = [read] if isinstance(index, tuple) and isinstance(index[0], slice) else [read, added]
    for f in functions:
        expected = grad(f)(x), jvp(grad(f), (x,), (t,))[1]
        with mg.override("*"):
            torch.testing.assert_close((grad(f)(x), jvp(grad(f), (x,), (t,))[1]), expected)


def test_under_vmap_and_with_sizes_that_are_symbols():
    index = torch.tensor([2, 0, 0])

    def f(x):
        return x[None, :, index].sin().sum()

    with mg.override("*"):
        for n in (3, 4):
            x = random(2, n)
            torch.testing.assert_close(vmap(grad(f))(random(5, 2, n)).shape, torch.Size([5, 2, n]))
            compiled = torch.compile(lambda x: grad(f)(x), backend="aot_eager", dynamic=True)
            torch.testing.assert_close(compiled(x), grad(f)(x))


def test_a_filled_entry_counts_once():
    x, index = random(3, 4), torch.tensor([-1, 3, 0])
    value = torch.tensor(2.0, dtype=torch.float64)

    def f(value):
        return torch.index_fill(x, 1, index, value).pow(3).sum()

    with pytest.raises((IndexError, RuntimeError)):
        grad(f)(value)
    with mg.override():
        assert grad(f)(value) == 6 * 3 * 4 and grad(grad(f))(value) == 6 * 6 * 2


@pytest.mark.parametrize("function", [torch.index_select, torch.index_add, torch.index_copy])
def test_an_index_without_dims(function):
    x, index = random(3, 2), torch.tensor(1)
    more = () if function is torch.index_select else (random(1, 2, seed=1),)

    def f(x):
        return function(x, 0, index, *more).pow(2).sum()

    expected = grad(f)(x)
    with mg.override("*"):
        torch.testing.assert_close(grad(f)(x), expected)


def test_sparse_gradients_stay_sparse():
    x, index = random(4, 2).requires_grad_(), torch.tensor([[0, 1], [0, 3]])
    with mg.override("*"):
        torch.gather(x, 0, index, sparse_grad=True).sum().backward()
        assert x.grad.is_sparse and x.grad.to_dense().sum() == 4
        table = random(4, 2).requires_grad_()
        torch.nn.functional.embedding(index, table, sparse=True).sum().backward()
        assert table.grad.is_sparse and table.grad.to_dense().sum() == 8


def test_a_source_of_another_size_than_the_mask():
    mask, source, t = torch.tensor([True, False, True, True]), random(6), random(6, seed=1)

    def f(source):
        return torch.zeros(4, dtype=torch.float64).masked_scatter(mask, source).pow(3).sum()

    with pytest.raises(RuntimeError, match="different size"):
        jvp(grad(f), (source,), (t,))
    expected = torch.cat([6 * source[:3] * t[:3], torch.zeros(3, dtype=torch.float64)])
    for names in ((), ("*",)):
        with mg.override(*names):
            torch.testing.assert_close(jvp(grad(f), (source,), (t,))[1], expected)


def test_rows_of_embedding_that_are_padding():
    table, indices = random(4, 2), torch.tensor([[0, 2], [2, 3]])
    for options in ({"padding_idx": 2}, {"scale_grad_by_freq": True}):

        def f(table, o=options):
            return torch.nn.functional.embedding(indices, table, **o).pow(2).sum()

        expected = grad(f)(table)
        with mg.override("*"):
            torch.testing.assert_close(grad(f)(table), expected)
