"""Matrix products of nested tensors: all modes, every form, PyTorch's own nested tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.ragged import LENGTHS, OTHERS, batch
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad import nested
from torch_manualgrad.nested import Ragged, products
from torch_manualgrad.nested.products import nested_inner, nested_rows
from torch_manualgrad.testing import CHECKS, Sample, check

BOTH = [torch.float64, torch.complex128]


def flat(*shape, sizes, dtype=torch.float64, seed=0):
    """Several ragged dims."""
    parts = []
    for i, given in enumerate(sizes):
        at = iter(given)
        parts.append(random(*[next(at) if n is None else n for n in shape], dtype=dtype, seed=seed + i))
    return Ragged.from_components(parts, ragged_dims=[d for d, n in enumerate(shape, 1) if n is None])


def components(x):
    return x.components() if isinstance(x, Ragged) else list(x)


def check_product(x, y, **options):
    """In every mode, and against a loop."""

    def of_values(a, b):
        left = x.like(a) if isinstance(x, Ragged) else a
        right = y.like(b) if isinstance(y, Ragged) else b
        found = nested.matmul(left, right)
        return found.values if isinstance(found, Ragged) else found

    given = [x.values if isinstance(x, Ragged) else x, y.values if isinstance(y, Ragged) else y]
    check(of_values, [Sample(*given)], **options)
    found = nested.matmul(x, y)
    count = (x if isinstance(x, Ragged) else y).batch
    left, right = ([z] * count if isinstance(z, torch.Tensor) and z.dim() == 2 else components(z) for z in (x, y))
    for a, b, c in zip(left, right, components(found), strict=True):
        torch.testing.assert_close(c, a @ b)
    return found


# -- products that read no sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", BOTH)
def test_nested_times_one_matrix_for_all(dtype):
    found = check_product(batch(None, 4, dtype=dtype), random(4, 3, dtype=dtype, seed=1))
    assert found.shape == (3, None, 3)
    assert check_product(batch(2, None, 4), random(4, 3)).shape == (3, 2, None, 3)
    assert check_product(batch(None, 2, 4), random(4, 3)).shape == (3, None, 2, 3)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64])
def test_nested_times_one_matrix_a_component(dtype, offsets):
    check_product(batch(None, 4, dtype=dtype, offsets=offsets), random(3, 4, 2, dtype=dtype, seed=1))


def test_nested_times_one_matrix_a_component_with_more_dims():
    check_product(batch(2, None, 4), random(3, 2, 4, 3))
    torch.testing.assert_close(  # one for all of dim 1; one for all components
        nested.matmul(batch(2, None, 4), random(3, 1, 4, 3)).values,
        nested.matmul(batch(2, None, 4), random(3, 1, 4, 3).expand(3, 2, 4, 3)).values,
    )
    x, w = batch(2, None, 4), random(1, 2, 4, 3)
    torch.testing.assert_close(nested.matmul(x, w).values, x.values @ w[0])
    check_product(batch(None, 2, 4), random(3, 1, 4, 3))  # ragged in front of the matrices


@pytest.mark.parametrize("dtype", BOTH)
def test_dense_times_nested(dtype):
    assert check_product(random(3, 2, 4, dtype=dtype), batch(4, None, dtype=dtype, seed=1)).shape == (3, 2, None)
    assert check_product(random(2, 4, dtype=dtype), batch(4, None, dtype=dtype, seed=1)).shape == (3, 2, None)


@pytest.mark.parametrize("dtype", BOTH)
def test_products_along_the_ragged_dim_are_dense(dtype):
    found = check_product(batch(4, None, dtype=dtype), batch(None, 2, dtype=dtype, seed=1))
    assert isinstance(found, torch.Tensor) and found.shape == (3, 4, 2)
    assert not found[1].any()  # the component without rows
    check_product(batch(2, 4, None), batch(2, None, 3, seed=1))


def test_products_with_a_ragged_dim_in_front():
    assert check_product(batch(None, 3, 4), batch(None, 4, 2, seed=1)).shape == (3, None, 3, 2)


def test_a_compiled_product_reads_nothing():
    x, y = batch(None, 4), batch(4, None, seed=1)
    w = random(3, 4, 2)
    check(lambda v, w: nested.matmul(x.like(v), w).values, [Sample(x.values, w)], modes=(), checks=["compile"])
    check(lambda a, b: nested.matmul(y.like(a), x.like(b)), [Sample(y.values, x.values)], modes=(), checks=["compile"])


@pytest.mark.parametrize("lengths", [(), (0, 0), (0,), (7,), (1, 1, 1, 1), (300, 0, 1, 2)])
@pytest.mark.parametrize("lead", [(), (2,), (2, 0)])
def test_the_kernels_agree_with_their_bodies_and_with_tiles(lengths, lead, monkeypatch):
    at = torch.tensor([0, *lengths]).cumsum(0)
    x, y = random(*lead, sum(lengths), 3), random(*lead, sum(lengths), 2, seed=1)
    w = random(*lead, len(lengths), 3, 2, seed=2)
    for op, args in ((nested_rows, (x, w, at)), (nested_inner, (x, y, at))):
        found = op(*args)
        if lengths:
            torch.testing.assert_close(found, op.reference(*args))
    if sum(lengths) and lead != (2, 0):
        tiles = products._Tiles(at, sum(lengths))
        flat_x, flat_w = x.reshape(-1, *x.shape[-2:]), w.reshape(-1, *w.shape[-3:])
        together = tiles.joined(tiles.cut(flat_x) @ flat_w.index_select(1, tiles.which))
        torch.testing.assert_close(together.reshape(y.shape), nested_rows(x, w, at))
        assert tiles.shape[0] * tiles.shape[1] <= 3 * sum(lengths) + 2 * len(lengths)


def test_matmul_backward_is_the_formula():
    x, w = batch(2, None, 4), random(2, 3, 4, 5, seed=1)
    g = random(2, 8, 5, seed=2)
    a, b = x.values.clone().requires_grad_(), w.clone().requires_grad_()
    nested.matmul(x.like(a), b.movedim(-3, 0)).values.backward(g)
    found = mg.ops.matmul_backward_nested(g, x.values, w, x.offsets, [True, True])
    torch.testing.assert_close(found[0], a.grad)
    torch.testing.assert_close(found[1], b.grad)
    alone = mg.ops.matmul_backward_nested(g, x.values, w, x.offsets, [False, True])
    assert alone[0].numel() == 0 and torch.equal(alone[1], found[1])


def test_inf_and_nan_stay_in_their_component():
    x, w = batch(None, 4), random(3, 4, 2)
    values = x.values.clone()
    values[0, 0], values[1, 1] = torch.inf, torch.nan
    found = nested.matmul(x.like(values), w).values
    assert not found[:2].isfinite().any() and found[2:].isfinite().all()


# -- products with several ragged dims --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", BOTH)
def test_a_product_with_two_ragged_dims(dtype):
    x, y = batch(None, 4, dtype=dtype), batch(4, None, lengths=OTHERS, dtype=dtype, seed=1)
    # its size depends on data, which a fake tensor has not
    found = check_product(x, y, checks=[c for c in CHECKS if c != "fake"])
    assert found.shape == (3, None, None)


SIZES = tuple(zip(LENGTHS, OTHERS, strict=True))


@pytest.mark.parametrize(
    "x, y, shape",
    [
        (flat(None, None, sizes=SIZES), batch(None, 3, lengths=OTHERS), (3, None, 3)),
        (batch(3, None), flat(None, None, sizes=SIZES), (3, 3, None)),
        (flat(None, None, sizes=SIZES), flat(None, None, sizes=[s[::-1] for s in SIZES], seed=5), (3, None, None)),
        (flat(2, None, None, sizes=SIZES), batch(2, None, 3, lengths=OTHERS), (3, 2, None, 3)),
        (flat(None, None, 4, sizes=SIZES), random(4, 2), (3, None, None, 2)),
    ],
)
def test_factors_with_several_ragged_dims(x, y, shape):
    assert check_product(x, y, checks=("agreement", "vmap")).shape == shape


def test_components_of_equal_sizes_match_by_size():
    x = batch(None, 4)
    equal = Ragged.from_components([random(4, 2, seed=i) for i in range(3)])  # dim 1 is ragged by default
    assert check_product(x, equal, checks=("agreement",)).shape == (3, None, 2)


def test_products_of_no_components():
    none = batch(None, 4, lengths=())
    assert nested.matmul(none, random(4, 2)).values.shape == (0, 2)
    assert nested.matmul(none, random(0, 4, 2)).values.shape == (0, 2)
    assert nested.matmul(none, batch(4, None, lengths=())).shape == (0, None, None)
    assert nested.matmul(batch(4, None, lengths=()), none).shape == (0, 4, 4)


@pytest.mark.parametrize(
    "x, y",
    [
        (batch(None, 4), random(3, 2)),
        (batch(None, 4), random(2, 4, 2)),
        (batch(None, 4), random(3, 1, 4, 2)),
        (batch(None, 4), random(4)),
        (batch(4, None), random(4, 2)),
        (batch(None), random(4, 2)),
        (batch(None, 4), batch(None, 4)),
        (batch(4, None), batch(None, 4, lengths=(5, 0, 3))),
        (batch(4, None), batch(None, 4, lengths=(5, 3))),
        (batch(4, None), batch(None, 4, lengths=(5, 0, 4))),
        (batch(2, None, 4), batch(3, 4, None)),
        (batch(None, 3, 4), batch(None, 4, 3, lengths=OTHERS)),
        (random(4), batch(4, None)),
        (random(3, 5), batch(4, None)),
        (flat(None, None, 4, sizes=SIZES), random(3, 4, 2)),
    ],
)
def test_matmul_refuses_shapes(x, y):
    with pytest.raises(ValueError, match="self and other: no matrix product"):
        nested.matmul(x, y)


def test_lengths_that_differ_are_named():
    x, y = batch(None, 4, lengths=(2, 1)), batch(None, 4, lengths=(1, 2))
    with pytest.raises(ValueError, match=r"the lengths differ, \[2, 1\] and \[1, 2\]"):
        nested.matmul(x.mT, y)


def test_matmul_requires_a_nested_argument():
    with pytest.raises(TypeError, match="nested"):
        nested.matmul(random(2, 3), random(3, 4))


# -- linear -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("x", [batch(None, 4), batch(2, None, 4), flat(None, None, 4, sizes=SIZES)])
def test_linear_in_every_mode(x, dtype):
    x = Ragged(x.values.to(dtype), x.offsets, x.shape, x.sizes)
    weight, bias = random(3, 4, dtype=dtype, seed=1), random(3, dtype=dtype, seed=2)
    checks = [c for c in (*CHECKS, "compile") if c != "fake" or x.sizes is None]
    check(lambda v, w, b: nested.linear(x.like(v), w, b).values, [Sample(x.values, weight, bias)], checks=checks)
    for b in (None, bias):
        for given, found in zip(x.components(), nested.linear(x, weight, b).components(), strict=True):
            torch.testing.assert_close(found, F.linear(given, weight, b))


@pytest.mark.parametrize("dtype", BOTH)
def test_linear_backward_is_the_formula(dtype):
    given = [random(2, 5, 4, dtype=dtype), random(3, 4, dtype=dtype, seed=1), random(3, dtype=dtype, seed=2)]
    g = random(2, 5, 3, dtype=dtype, seed=3)
    x, w, b = (t.clone().requires_grad_() for t in given)
    nested.linear(Ragged(x, torch.tensor([0, 2, 5]), (2, 2, None, 4)), w, b).values.backward(g)
    found = mg.ops.nested_linear_backward(given[0], g, given[1], [True, True, True])
    for a, c in zip(found, (x, w, b), strict=True):
        torch.testing.assert_close(a, c.grad)
    check(lambda *a: mg.ops.nested_linear_backward(*a, [True] * 3), [Sample(given[0], g, given[1])], checks=("vmap",))


@pytest.mark.parametrize("weight, bias", [(random(3, 5), None), (random(4), None), (random(3, 4), random(4))])
def test_linear_refuses(weight, bias):
    with pytest.raises(ValueError, match="weight|bias"):
        nested.linear(batch(None, 4), weight, bias)


def test_linear_refuses_a_ragged_last_dim():
    with pytest.raises(ValueError, match="not ragged"):
        nested.linear(batch(4, None), random(3, 8))


# -- torch's nested tensors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_matmul_and_linear_on_torch_nested_tensors(layout):
    parts, weight = [random(n, 4, seed=n).requires_grad_() for n in (2, 3)], random(4, 5).requires_grad_()
    copies, w = [p.detach().clone().requires_grad_() for p in parts], weight.detach().clone().requires_grad_()
    x = torch.nested.as_nested_tensor(parts, layout=layout)
    for y in (nested.matmul(x, weight), nested.linear(x, weight.mT)):
        assert y.is_nested and y.layout is layout
        torch.cat([c.flatten() for c in y.unbind()]).square().sum().backward(retain_graph=True)
    for c in copies:
        (2 * (c @ w).square().sum()).backward()
    for a, b in zip([*parts, weight], [*copies, w], strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("lengths", [(2, 3), (3, 3)])
def test_products_of_strided_nested_tensors(lengths):
    parts = [random(n, 4, seed=n) for n in lengths]
    x = torch.nested.nested_tensor(parts)
    y = torch.nested.nested_tensor([p.mT.contiguous() for p in parts])
    for found, given in zip(nested.matmul(x, y).unbind(), parts, strict=True):
        torch.testing.assert_close(found, given @ given.mT)
    for found, given in zip(nested.matmul(y, x), parts, strict=True):
        torch.testing.assert_close(found, given.mT @ given)
