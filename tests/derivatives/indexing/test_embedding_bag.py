"""embedding_bag beside a product with a matrix: modes, padding, weights of samples, empty bags, every order."""

import pytest
import torch
from helpers.tensors import random
from helpers.transforms import assert_all_close, third_derivatives
from torch.func import grad, jvp

import torch_manualgrad as mg
from torch_manualgrad.core.rule import reached

INDICES = torch.tensor([0, 2, 3, 2, 1])
BAGS = [[], [0, 1], [2, 3, 4]]
OFFSETS = torch.tensor([0, 0, 2])


def bag(table, weights, mode, padding_idx=None, **options):
    offsets = torch.cat([OFFSETS, torch.tensor([5])]) if options.get("include_last_offset") else OFFSETS
    return torch.nn.functional.embedding_bag(
        INDICES, table, offsets, mode=mode, per_sample_weights=weights, padding_idx=padding_idx, **options
    )


def by_loop(table, weights, mode, padding_idx=None, **options):
    rows = []
    for entries in BAGS:
        kept = [i for i in entries if INDICES[i] != padding_idx]
        found = [table[INDICES[i]] * (1 if weights is None else weights[i]) for i in kept]
        if not found:
            rows.append(torch.zeros_like(table[0]))
        elif mode == "max":
            rows.append(torch.stack(found).amax(0))
        else:
            rows.append(torch.stack(found).sum(0) / (len(found) if mode == "mean" else 1))
    return torch.stack(rows)


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("mode, weighted", [("sum", True), ("sum", False), ("mean", False), ("max", False)])
@pytest.mark.parametrize("last", [True, False], ids=["last offset", ""])
def test_third_order(mode, weighted, padding_idx, last):
    z, directions = random(13), [random(13, seed=k) for k in (1, 2, 3)]

    def f(function, **options):
        return lambda z: (
            function(z[:8].reshape(4, 2), z[8:] if weighted else None, mode, padding_idx, **options).sin().sum()
        )

    expected = third_derivatives(f(by_loop), z, directions)["rrr"]
    with mg.override():
        assert_all_close(third_derivatives(f(bag, include_last_offset=last), z, directions), expected)


def test_eagerly_with_a_graph():
    table, weights = random(4, 2).requires_grad_(), random(5, seed=1).requires_grad_()
    results = []
    for function in (by_loop, bag):
        with mg.override():
            first = torch.autograd.grad(
                function(table, weights, "sum").sin().sum(), (table, weights), create_graph=True
            )
            results.append(torch.autograd.grad(sum(g.square().sum() for g in first), (table, weights)))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def test_gradients_scaled_by_frequency_have_those_of_their_own_rows():
    table = random(4, 2)

    def f(table):
        return bag(table, None, "sum", scale_grad_by_freq=True).sum()

    if not reached("2.15"):  # PyTorch's is wrong until then
        assert not torch.equal(
            grad(f)(table), torch.ones_like(table)
        )  # each row, one over how often it is read, as often
    with mg.override():
        assert torch.equal(grad(f)(table), torch.ones_like(table))


def test_a_sparse_gradient_stays_sparse_and_has_no_derivative():
    table = random(4, 2).requires_grad_()
    with mg.override("*"):
        found = bag(table, None, "sum", sparse=True).sum()
        (gradient,) = torch.autograd.grad(found, table)
    assert gradient.is_sparse and gradient.to_dense().sum() == 10


def test_dual_tensors():
    table, t = random(4, 2), random(4, 2, seed=1)
    with pytest.raises(NotImplementedError):
        jvp(lambda table: bag(table, None, "mean"), (table,), (t,))
    with mg.override():
        tangent = jvp(lambda table: bag(table, None, "mean"), (table,), (t,))[1]
    torch.testing.assert_close(tangent, by_loop(t, None, "mean"))
