"""Matrix products and attention of nested tensors: all modes, every form, PyTorch's own nested tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch_manualgrad as mg
from torch_manualgrad import nested
from torch_manualgrad.nested import Ragged, products
from torch_manualgrad.nested.products import nested_inner, nested_rows
from torch_manualgrad.testing import ALL_CHECKS, Sample, check

LENGTHS, OTHERS = (3, 0, 5), (2, 1, 4)
BOTH = [torch.float64, torch.complex128]


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def batch(*shape, lengths=LENGTHS, dtype=torch.float64, seed=0, offsets=torch.int64):
    """Components of this shape, None where it is ragged."""
    at = torch.tensor([0, *lengths]).cumsum(0).to(offsets)
    full = [sum(lengths) if n is None else n for n in shape]
    return Ragged(random(*full, dtype=dtype, seed=seed), at, (len(lengths), *shape))


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
    found = check_product(x, y, checks=[c for c in ALL_CHECKS if c not in ("fake", "compile")])
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


def test_components_of_equal_sizes_are_taken_for_what_fits():
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


def test_matmul_wants_something_nested():
    with pytest.raises(TypeError, match="nested"):
        nested.matmul(random(2, 3), random(3, 4))


# -- linear -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("x", [batch(None, 4), batch(2, None, 4), flat(None, None, 4, sizes=SIZES)])
def test_linear_in_every_mode(x, dtype):
    x = Ragged(x.values.to(dtype), x.offsets, x.shape, x.sizes)
    weight, bias = random(3, 4, dtype=dtype, seed=1), random(3, dtype=dtype, seed=2)
    checks = [c for c in ALL_CHECKS if c != "fake"] if x.sizes is not None else ALL_CHECKS
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


# -- attention --------------------------------------------------------------------------------------------------------


def sequences(q_lengths, k_lengths, d=4, m=4, lead=(2,), dtype=torch.float64):
    q = batch(*lead, None, d, lengths=q_lengths)
    k = batch(*lead, None, d, lengths=k_lengths, seed=1)
    v = batch(*lead, None, m, lengths=k_lengths, seed=2)
    return tuple(x.like(x.values.to(dtype)) for x in (q, k, v))


def assert_attends(q, k, v, **options):
    found = nested.scaled_dot_product_attention(q, k, v, **options)
    for y, *parts in zip(*(x.components() for x in (found, q, k, v)), strict=True):
        if parts[1].shape[-2]:
            torch.testing.assert_close(y, F.scaled_dot_product_attention(*parts, **options))
        else:
            assert not y.any()
    return found


CASES = {
    "alike": ((3, 3), (2, 2)),
    "one": ((4,), (4,)),
    "unequal, some empty": ((3, 0, 2, 1, 5, 4), (3, 2, 4, 2, 0, 4)),
    "more queries than keys": ((8, 7), (5, 6)),
    "self": ((5, 6, 0, 1, 3, 2), (5, 6, 0, 1, 3, 2)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
@pytest.mark.parametrize("m", [4, 3])  # the fused kernel, and what takes its place
def test_attention_in_every_mode(lengths, causal, m):
    q, k, v = sequences(*lengths, m=m)

    def of_values(a, b, c):
        return nested.scaled_dot_product_attention(q.like(a), k.like(b), v.like(c), is_causal=causal).values

    check(of_values, [Sample(q.values, k.values, v.values)])
    assert assert_attends(q, k, v, is_causal=causal).shape == (len(lengths[0]), 2, None, m)


@pytest.mark.parametrize("causal", [False, True])
def test_compiled_attention_reads_no_lengths(causal):
    q, k, v = sequences((3, 2, 0, 4), (3, 2, 1, 0))

    def of_values(a, b, c):
        return nested.scaled_dot_product_attention(q.like(a), k.like(b), v.like(c), is_causal=causal).values

    check(of_values, [Sample(q.values, k.values, v.values)], modes=(), checks=["compile"])


@pytest.mark.parametrize("causal", [False, True])
def test_one_masked_group_gives_what_many_groups_do(causal, monkeypatch):
    q, k, v = sequences((3, 2, 0, 4), (3, 2, 1, 0))
    args = (q.values, k.values, v.values, q.offsets, k.offsets, causal, 0.3)
    many = mg.ops.nested_attention.reference(*args)[0]
    monkeypatch.setattr(nested.padded_groups, "_readable", lambda offsets: False)
    torch.testing.assert_close(mg.ops.nested_attention.reference(*args)[0], many)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [1, 4, 8])
def test_attention_over_long_and_short_sequences(causal, d):
    q, k, v = sequences((100, 5, 1, 120, 7), (100, 9, 1, 110, 8), d=d, m=d)
    assert_attends(q, k, v, is_causal=causal)
    assert_attends(*sequences((9, 5), (9, 5), lead=()), is_causal=causal, scale=0.7)
    assert_attends(*sequences((9, 5), (9, 5), lead=(2, 3)), is_causal=causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [4, 3])
def test_attention_in_lower_precision(dtype, m):
    exact = sequences((5, 0, 3, 8), (5, 2, 3, 7), m=m)
    given = [x.values.to(dtype).requires_grad_() for x in exact]
    wide = [x.values.to(dtype).double().requires_grad_() for x in exact]
    weights = random(2, 16, m, seed=9)
    for some, cast in ((given, dtype), (wide, torch.float64)):
        rebuilt = [x.like(s) for x, s in zip(exact, some, strict=True)]
        y = nested.scaled_dot_product_attention(*rebuilt).values
        assert y.dtype == cast
        (y * weights.to(cast)).sum().backward()
    tolerance = 30 * torch.finfo(dtype).eps
    for a, b in zip(given, wide, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=tolerance, atol=tolerance)


def test_attention_with_fewer_heads_of_keys():
    q, _, _ = sequences((3, 4), (3, 4), lead=(4,))
    _, k, v = sequences((3, 4), (3, 4), lead=(2,))
    assert_attends(q, k, v, enable_gqa=True)


def test_third_order_of_attention():
    q, k, v = sequences((2, 3), (2, 3), d=2, m=2, lead=())
    rev, fwd = torch.func.jacrev, torch.func.jacfwd

    def ours(s):
        return nested.scaled_dot_product_attention(q.like(q.values * s), k.like(k.values + s), v).values

    def loop(s):
        parts = zip(*(x.components() for x in (q.like(q.values * s), k.like(k.values + s), v)), strict=True)
        return torch.cat([((a @ b.mT) * 2**-0.5).softmax(-1) @ c for a, b, c in parts])

    s = torch.tensor(0.4, dtype=torch.float64)
    right = rev(rev(rev(loop)))(s)
    for f in (fwd(rev(fwd(ours))), rev(fwd(fwd(ours))), rev(rev(rev(ours)))):
        torch.testing.assert_close(f(s), right)


def test_attention_to_nothing():
    for lengths in ((), (0, 0)):
        q, k, v = sequences(lengths, lengths)
        assert nested.scaled_dot_product_attention(q, k, v).values.shape == (2, 0, 4)
    q, k, v = sequences((2, 0), (0, 3))
    values = q.values.clone().requires_grad_()
    y = nested.scaled_dot_product_attention(q.like(values), k, v).values
    y.sum().backward()
    assert not y.any() and not values.grad.any()


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"attn_mask": torch.ones(1)}, ValueError, "attn_mask"),
        ({"dropout_p": 0.1}, ValueError, "dropout_p: expected 0, got 0.1"),
        ({"query": batch(None, 2, 4, lengths=(3, 2))}, ValueError, "query: expected shape"),
        ({"key": batch(2, None, 3, lengths=(3, 2))}, ValueError, "key: expected a last dim of 4"),
        ({"value": batch(2, None, 4, lengths=(2, 3))}, ValueError, "value: the offsets differ"),
        ({"value": batch(3, None, 4, lengths=(3, 2))}, ValueError, "key and value"),
        ({"query": batch(2, None, 4, lengths=(3, 2), dtype=torch.complex128)}, TypeError, "query"),
        ({"query": batch(2, None, 4, lengths=(3, 2)).like(torch.zeros(2, 5, 4))}, TypeError, "key: expected the dtype"),
        ({"query": batch(2, None, 4, lengths=(3,))}, ValueError, "key and value"),
        ({"query": batch(None, 4, lengths=(3, 2))}, ValueError, "as many dims as query"),
        ({"query": batch(3, None, 4, lengths=(3, 2)), "enable_gqa": True}, ValueError, "no multiple"),
    ],
)
def test_attention_refuses(change, error, message):
    q, k, v = sequences((3, 2), (3, 2))
    with pytest.raises(error, match=message):
        nested.scaled_dot_product_attention(**({"query": q, "key": k, "value": v} | change))


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


@pytest.mark.parametrize("lengths", [(2, 3), (3, 3)])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_attention_on_torch_nested_tensors(layout, lengths):
    parts = [random(n, 2, 4, seed=n).requires_grad_() for n in lengths]
    copies = [p.detach().clone().requires_grad_() for p in parts]
    x = torch.nested.as_nested_tensor(parts, layout=layout).transpose(1, 2)
    y = nested.scaled_dot_product_attention(x, x, x)
    assert y.is_nested and y.layout is layout
    torch.cat([c.flatten() for c in y.unbind()]).square().sum().backward()
    for p, c in zip(parts, copies, strict=True):
        t = c.transpose(0, 1)
        F.scaled_dot_product_attention(t, t, t).square().sum().backward()
        torch.testing.assert_close(p.grad, c.grad)
