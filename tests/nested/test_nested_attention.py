"""Attention of nested tensors: all modes, every form, PyTorch's own nested tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.ragged import batch
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad import nested
from torch_manualgrad.testing import Sample, check


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
def test_one_masked_group_equals_many_groups(causal, monkeypatch):
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
        ({"dropout_p": 1.5}, ValueError, "dropout_p: expected 0 to 1, got 1.5"),
        ({"attn_mask": torch.ones(3, 3), "is_causal": True}, ValueError, "attn_mask: expected None with is_causal"),
        ({"query": batch(None, 2, 4, lengths=(3, 2))}, ValueError, "query: expected shape"),
        ({"key": batch(2, None, 3, lengths=(3, 2))}, ValueError, "key: expected a last dim of 4"),
        ({"value": batch(2, None, 4, lengths=(2, 3))}, ValueError, "value: the lengths differ"),
        ({"value": batch(3, None, 4, lengths=(3, 2))}, ValueError, "key and value"),
        ({"query": batch(2, None, 4, lengths=(3, 2), dtype=torch.complex128)}, TypeError, "query"),
        ({"query": batch(2, None, 4, lengths=(3, 2)).like(torch.zeros(2, 5, 4))}, TypeError, "key: expected the dtype"),
        ({"query": batch(2, None, 4, lengths=(3,))}, ValueError, "key and value"),
        ({"query": batch(None, 4, lengths=(3, 2))}, ValueError, "as many dims as query"),
        ({"query": batch(3, None, 4, lengths=(3, 2)), "enable_gqa": True}, ValueError, "not a multiple"),
    ],
)
def test_attention_refuses(change, error, message):
    q, k, v = sequences((3, 2), (3, 2))
    with pytest.raises(error, match=message):
        nested.scaled_dot_product_attention(**({"query": q, "key": k, "value": v} | change))


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
