"""The compiled tangent of attention beside the formula's body, and beside the products and softmax that it is the tangent of."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.tensors import random
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.core import libraries

F64, INF, NAN = torch.float64, math.inf, math.nan
RTOL = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
NAMES = ("query", "query_t", "key", "key_t", "value", "value_t", "attn_mask", "attn_mask_t")
# N, H, heads of keys, L, S, d: one key, fewer than a vector has, several tiles, panels and blocks of columns
SHAPES = [(1, 1, 1, 1, 1, 1), (2, 4, 2, 5, 7, 3), (1, 2, 1, 49, 130, 20), (2, 1, 1, 97, 64, 64), (1, 1, 1, 7, 200, 256)]
TANGENTS = ["query_t", "key_t", "value_t", "attn_mask_t"]


@pytest.fixture(autouse=True)
def compiled():
    (library,) = (library for library in libraries.load() if library.device == "cpu")
    if library.path is None:
        pytest.skip(library.reason)
    assert library.loaded, library.reason


def given(shape, mask=None, dtype=F64) -> dict[str, Tensor | None]:
    """All arguments that are tensors; ``mask`` is its shape."""
    N, H, h, L, S, d = shape
    sizes = [(N, H, L, d)] * 2 + [(N, h, S, d)] * 4
    found = {name: random(*size, seed=i).to(dtype) for i, (name, size) in enumerate(zip(NAMES, sizes))}
    if mask is None:
        return found | {"attn_mask": None, "attn_mask_t": None}
    M = random(*mask, seed=6)
    return found | {"attn_mask": M.masked_fill(M > 1, -INF).to(dtype), "attn_mask_t": random(*mask, seed=7).to(dtype)}


def kernel(arguments, is_causal=False, scale=None) -> Tensor:
    found = torch.ops.manualgrad.attention_jvp.default(*arguments.values(), is_causal, scale)
    assert found.is_contiguous() and found.shape == arguments["query"].shape
    assert found.dtype == arguments["query"].dtype
    return found


def wide(arguments):
    return [None if x is None else x.double() for x in arguments.values()]


def body(arguments, is_causal=False, scale=None) -> Tensor:
    return mg.ops.attention_jvp.reference(*wide(arguments), is_causal, scale)


def attention(q, k, v, mask, is_causal, scale) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + mask
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -INF)
    return scores.softmax(-1) @ v


def math_formula(arguments, is_causal=False, scale=None) -> Tensor:
    q, q_t, k, k_t, v, v_t, mask, mask_t = wide(arguments)
    pairs = [(q, q_t), (k, k_t), (v, v_t), (q.new_zeros(()) if mask is None else mask, mask_t)]
    tangents = tuple(torch.zeros_like(x) if t is None else t for x, t in pairs)
    return torch.func.jvp(lambda *x: attention(*x, is_causal, scale), tuple(x for x, _ in pairs), tangents)[1]


def close_to_largest(found: Tensor, expected: Tensor, rtol: float | None = None) -> None:
    rtol = RTOL[found.dtype] if rtol is None else rtol
    size = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=rtol * size)


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_dtypes(shape, dtype):
    N, H, _, L, S, _ = shape
    for mask, is_causal, scale in (
        (None, False, None),
        (None, True, 0.3),
        ((L, S), False, None),
        ((N, H, 1, S), True, 0.3),
    ):
        arguments = given(shape, mask, dtype)
        expected = body(arguments, is_causal, scale)
        close_to_largest(kernel(arguments, is_causal, scale), expected)
        if mask is None:
            close_to_largest(expected, math_formula(arguments, is_causal, scale), 1e-12)
            close_to_largest(kernel(arguments, is_causal, scale), math_formula(arguments, is_causal, scale))


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
def test_each_tangent_and_each_pair_missing(dtype):
    for mask in (None, (3, 1, 10, 33)):
        arguments = given((3, 2, 1, 10, 33, 9), mask, dtype)
        for kept in range(2 ** len(TANGENTS)):
            some = arguments | {t: None for i, t in enumerate(TANGENTS) if not kept >> i & 1}
            if mask is not None:
                some["attn_mask"] = some["attn_mask"].clamp(
                    min=-3
                )  # no row is masked, as the math formula has nan there
            close_to_largest(kernel(some), math_formula(some))
    assert not kernel(arguments | dict.fromkeys(TANGENTS)).any()


@pytest.mark.parametrize(
    "mask", [(10, 33), (1, 33), (10, 1), (2, 1, 1, 33), (1, 4, 10, 1), (2, 4, 10, 33), (4, 1, 33)], ids=str
)
def test_masks_are_broadcast(mask):
    arguments = given((2, 4, 2, 10, 33, 8), mask)
    close_to_largest(kernel(arguments), body(arguments))
    close_to_largest(kernel(arguments, True), body(arguments, True))


def test_a_mask_in_float32_of_half_precision():
    arguments = given((1, 2, 2, 10, 33, 8), (10, 33), torch.bfloat16)
    arguments |= {n: arguments[n].float() for n in ("attn_mask", "attn_mask_t")}
    close_to_largest(kernel(arguments), body(arguments))


def test_strides():
    """Heads beside each other, every second one, reversed dims, expanded, not on a boundary of a vector."""
    shape = N, H, h, L, S, d = 2, 4, 2, 50, 70, 12
    arguments = given(shape, (L, S), torch.float32)
    expected = kernel(arguments)
    ways = [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.repeat_interleave(2, 1)[:, ::2],
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.cat([x.flatten().new_zeros(1), x.flatten()])[1:].view(x.shape),
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
    ]
    for way in ways:
        assert torch.equal(kernel({n: way(x) if x.dim() == 4 else x for n, x in arguments.items()}), expected)
    for n in NAMES:
        assert torch.equal(kernel(arguments | {n: arguments[n].mT.contiguous().mT}), expected)
    one = arguments | {n: arguments[n][:1].expand_as(arguments[n]) for n in NAMES[:6]}
    assert torch.equal(kernel(one)[:1], kernel(one)[1:])


def test_results_are_as_they_are_without_the_other_heads_and_queries():
    """Tiles, and the groups of heads that are packed at a time, change nothing but rounding."""
    arguments = given((3, 8, 4, 60, 1100, 40))
    found = kernel(arguments)
    one = {n: x if x is None else x[2:, 6:7] if x.shape[1] == 8 else x[2:, 3:] for n, x in arguments.items()}
    close_to_largest(kernel(one), found[2:, 6:7])
    close_to_largest(found[2:, 6:7], body(one))
    few = one | {n: one[n][:, :, 53:55] for n in ("query", "query_t")}
    close_to_largest(kernel(few), found[2:, 6:7, 53:55])


@pytest.mark.parametrize(
    "shape",
    [(0, 2, 2, 3, 4, 5), (2, 0, 0, 3, 4, 5), (2, 2, 1, 0, 4, 5), (2, 2, 1, 3, 0, 5), (2, 2, 1, 3, 4, 0)],
    ids=str,
)
def test_empty(shape):
    arguments = given(shape)
    found = kernel(arguments, scale=1.0)
    assert not found.any()


def test_a_query_without_keys():
    """Its tangent is 0, with a mask that has a tangent too; causal or not."""
    arguments = given((1, 2, 2, 9, 40, 8), (9, 40))
    arguments["attn_mask"][3] = -INF
    arguments["attn_mask"][5, :6] = -INF
    for is_causal in (False, True):
        found = kernel(arguments, is_causal)
        assert not found[:, :, 3].any() and found.isfinite().all()
        assert found[:, :, 5].any() != is_causal
        close_to_largest(found, body(arguments, is_causal))


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
def test_large_scores(dtype):
    """Weights of 0 and 1, exactly, where scores differ by more than the exponential's range."""
    arguments = given((1, 1, 1, 20, 50, 8), None, dtype)
    arguments["query"] = arguments["query"] * 1e4
    found = kernel(arguments)
    assert found.isfinite().all()
    close_to_largest(found, body(arguments), 1e-3 if dtype == torch.float32 else 1e-9)


def test_nan_stays_in_its_row():
    arguments = given((1, 1, 1, 20, 50, 8), (20, 50))
    for name in ("query", "query_t", "attn_mask", "attn_mask_t"):
        spoilt = arguments[name].clone()
        spoilt[..., 7, :1] = NAN
        found = kernel(arguments | {name: spoilt})
        assert found[..., 7, :].isnan().all() and torch.equal(found.isnan().any(-1).sum(), torch.tensor(1))


def test_keys_after_a_causal_query_do_not_matter():
    arguments = given((1, 2, 2, 70, 70, 8))
    changed = dict(arguments)
    for name in ("key", "key_t", "value", "value_t"):
        changed[name] = arguments[name].clone()
        changed[name][:, :, 50:] = 1e9
    assert torch.equal(kernel(arguments, True)[:, :, :50], kernel(changed, True)[:, :, :50])


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
def test_threads_do_not_change_a_bit(dtype):
    arguments = given((2, 6, 3, 150, 300, 24), (150, 300), dtype)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            found.append(kernel(arguments, True))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(x, found[0]) for x in found[1:])


ERRORS = [
    ({"query": random(2, 3, 4)}, r"query: expected 4 dims, got shape \[2, 3, 4\]"),
    ({"query": random(1, 2, 3, 4).cfloat()}, "query: expected a real floating point dtype, got torch.complex64"),
    ({"key": random(1, 3, 5, 4)}, r"key: .* got shape \[1, 3, 5, 4\] for query of shape \[1, 2, 3, 4\]"),
    ({"key": random(1, 0, 5, 4)}, r"key: .* got shape \[1, 0, 5, 4\]"),
    ({"value": random(1, 2, 6, 4)}, r"value: expected shape \[1, 2, 5, 4\], that of key, got \[1, 2, 6, 4\]"),
    ({"value": random(1, 2, 5, 4).float()}, "value: expected torch.float64, the dtype of query, got torch.float32"),
    ({"query_t": random(1, 2, 4, 4)}, r"query_t: expected shape \[1, 2, 3, 4\], that of query"),
    ({"value_t": random(5, 4)}, r"value_t: expected shape \[1, 2, 5, 4\], that of value, got \[5, 4\]"),
    ({"attn_mask": random(3, 6)}, r"attn_mask: expected shape \[1, 2, 3, 5\] or one that is broadcast to it, got \[3, 6\]"),
    ({"attn_mask": torch.ones(3, 5, dtype=torch.bool)}, "attn_mask: expected a real floating point dtype, got Bool"),
    ({"attn_mask_t": random(1, 1, 1, 3, 5)}, r"attn_mask_t: expected shape .* got \[1, 1, 1, 3, 5\]"),
]  # fmt: skip


@pytest.mark.usefixtures("as_from_rules")
@pytest.mark.parametrize("change, message", ERRORS, ids=[str(i) for i in range(len(ERRORS))])
def test_errors_name_the_argument(change, message):
    with pytest.raises(RuntimeError, match="manualgrad::attention_jvp: " + message):
        kernel(given((1, 2, 2, 3, 5, 4)) | change)


def test_forward_mode_runs_the_kernel():
    """Through the function that users call: a mask of bools, and heads beside each other."""
    q, k, v = (random(2, 30, 4, 16, seed=i).transpose(1, 2) for i in range(3))
    mask = random(30, 30, seed=3) < 0.5
    mask[0] = True
    tangents = tuple(random(2, 30, 4, 16, seed=4 + i).transpose(1, 2) for i in range(3))
    added = torch.zeros(30, 30, dtype=F64).masked_fill(~mask, -INF)
    with mg.override():
        found = torch.func.jvp(
            lambda *x: torch.nn.functional.scaled_dot_product_attention(*x, attn_mask=mask), (q, k, v), tangents
        )[1]
    expected = torch.func.jvp(lambda *x: attention(*x, added, False, None), (q, k, v), tangents)[1]
    torch.testing.assert_close(found, expected)
    assert torch.equal(
        found,
        torch.ops.manualgrad.attention_jvp(q, tangents[0], k, tangents[1], v, tangents[2], added, None, False, None),
    )
