"""Flexible attention: values next to PyTorch's, derivatives next to attention that is written out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

import torch_manualgrad as mg
from torch_manualgrad.attention import flex_attention, flexible, pieces

F64 = torch.float64


def random(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


X = random(1, 2, 9, 3)
SLOPES, TABLE = random(4), random(40, 40, seed=1)
DOCUMENT = torch.arange(40).div(7, rounding_mode="floor").repeat(2, 1) + torch.tensor([[0], [1]])

MODS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "slopes": lambda s, b, h, i, j: s + SLOPES[h] * (i - j),
    "table": lambda s, b, h, i, j: s / 2 + TABLE[i, j],
    "row of a table": lambda s, b, h, i, j: s * TABLE[i].sum().tanh() + TABLE[h, j],
    "cap": lambda s, b, h, i, j: 2 * torch.tanh(s / 2),
    "inf": lambda s, b, h, i, j: torch.where((i + j) % 3 > 0, s, -torch.inf),
}
MASKS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i - j).abs() < 5,
    "documents": lambda b, h, i, j: DOCUMENT[b, i] == DOCUMENT[b, j],
    "heads": lambda b, h, i, j: (i >= j) | (h == 1),
    "some rows": lambda b, h, i, j: (i < 11) & (j >= 3),
}


def block_mask(name: str, queries: int, keys: int, size: int = 8) -> BlockMask | None:
    mask = MASKS[name]
    if mask is None:
        return None
    batch, heads = 2 if name == "documents" else None, 4 if name == "heads" else None
    return create_block_mask(mask, batch, heads, queries, keys, device="cpu", BLOCK_SIZE=size)


@pytest.fixture(params=[8, 128])
def small_pieces(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Several pieces of queries, or one."""
    monkeypatch.setattr(pieces, "_QUERIES", request.param)
    return int(request.param)


def stock(*args: Any, **kwargs: Any) -> Any:
    """PyTorch's, without a compiler."""
    before, torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG, True
    try:
        return torch_flex.flex_attention(*args, **kwargs)
    finally:
        torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mod", MODS)
@pytest.mark.usefixtures("small_pieces")
def test_values_are_those_of_torch(mod, mask):
    q, k, v = random(2, 4, 37, 3), random(2, 4, 21, 3, seed=1), random(2, 4, 21, 5, seed=2)
    options = {"score_mod": MODS[mod], "block_mask": block_mask(mask, 37, 21), "return_aux": AuxRequest(lse=True)}
    expected, found = stock(q, k, v, **options), flex_attention(q, k, v, **options)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1].lse, expected[1].lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    q, k, v = (random(2, 4, 30, 8, seed=i, dtype=dtype) for i in range(3))
    expected, found = (f(q, k, v, MODS["slopes"], block_mask("causal", 30, 30)) for f in (stock, flex_attention))
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)


def test_autocast():
    q, k, v = (random(2, 4, 30, 8, seed=i, dtype=torch.float32) for i in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = flex_attention(q, k, v)
        in_double = flex_attention(q.double(), k.double(), v.double())
    assert found.dtype == torch.bfloat16 and in_double.dtype == F64
    torch.testing.assert_close(found, stock(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    x = q.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flex_attention(x, k, v, block_mask=block_mask("causal", 30, 30))
    (g,) = torch.autograd.grad(out.float().square().sum(), x)
    assert g.dtype == torch.float32 and g.abs().sum() > 0


def test_heads_and_batches_that_are_shared():
    q, k, v = random(2, 4, 9, 3), random(1, 2, 7, 3, seed=1), random(1, 2, 7, 3, seed=2)
    mask = block_mask("documents", 9, 7)
    expected = stock(q, k, v, block_mask=mask, enable_gqa=True, scale=0.3)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask, enable_gqa=True, scale=0.3), expected)


def test_largest_scores():
    q, k, v = random(2, 4, 9, 3), random(2, 4, 7, 3, seed=1), random(2, 4, 7, 3, seed=2)
    _, found = flex_attention(q, k, v, MODS["slopes"], return_aux=AuxRequest(lse=True, max_scores=True))
    scores = written_out(q, k, SLOPES, None)
    torch.testing.assert_close(found.max_scores, scores.amax(-1))
    torch.testing.assert_close(found.lse, scores.logsumexp(-1))
    assert flex_attention(q, k, v, return_aux=AuxRequest())[1] == (None, None)
    torch.testing.assert_close(flex_attention(q, k, v, MODS["slopes"], return_lse=True)[1], found.lse)


def test_a_block_mask_of_blocks_alone():
    """Blocks that are not listed have no keys, and full ones all, whatever the function says: as in PyTorch's kernels."""
    count, indices = torch.tensor([[[1, 2, 0]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1], [0, 1]]]]).int()
    none, first = torch.zeros_like(count), torch.tensor([[[0, 0, 1]]], dtype=torch.int32)
    odd = lambda b, h, i, j: (i + j) % 2 == 1  # noqa: E731
    q, k, v = random(1, 1, 12, 3), random(1, 1, 8, 3, seed=1), random(1, 1, 8, 3, seed=2)
    i, j = torch.arange(12)[:, None], torch.arange(8)
    allowed = (
        torch.tensor([[False, True], [True, True], [False, False]]).repeat_interleave(4, 0).repeat_interleave(4, 1)
    )
    scores = q @ k.mT / 3**0.5
    for full in (none, first):
        mask = BlockMask.from_kv_blocks(
            count, indices, full, indices, BLOCK_SIZE=(4, 4), mask_mod=odd, seq_lengths=(12, 8)
        )
        expected = allowed & odd(0, 0, i, j)
        if full is first:
            expected[8:, :4] = True
        keep = expected.any(-1, keepdim=True)
        weights = torch.where(keep, scores.masked_fill(keep & ~expected, -torch.inf).softmax(-1), 0)
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), weights @ v)


def test_masks_of_fewer_dims_and_with_short_lists():
    count, indices = (
        torch.tensor([1, 2, 0, 3, 1]).int(),
        torch.tensor([[0, 1, 2], [1, 3, 0], [0, 1, 2], [3, 2, 0], [2, 0, 1]]).int(),
    )
    q, k, v = random(2, 4, 50, 4), random(2, 4, 37, 4, seed=1), random(2, 4, 37, 4, seed=2)
    listed = torch.zeros(5, 4, dtype=torch.bool)
    for row, (n, places) in enumerate(zip(count, indices)):
        listed[row, places[:n].long()] = True
    allowed = listed.repeat_interleave(10, 0).repeat_interleave(10, 1)[:, :37]
    some = allowed.any(-1, keepdim=True)
    scores = (q @ k.mT / 2).masked_fill(some & ~allowed, -torch.inf)
    for given in ((count, indices), (count[None, None], indices[None, None])):
        mask = BlockMask.from_kv_blocks(*given, BLOCK_SIZE=10, seq_lengths=(50, 37), compute_q_blocks=False)
        torch.testing.assert_close(flex_attention(q, k, v, None, mask), torch.where(some, scores.softmax(-1), 0) @ v)
    without = torch_flex._create_empty_block_mask(q, k)
    torch.testing.assert_close(flex_attention(q, k, v, None, without), flex_attention(q, k, v))


def test_precisions_and_scales():
    q, k, v = (
        random(1, 2, 9, 4, dtype=torch.float32),
        *(random(1, 2, 9, 4, seed=i, dtype=torch.bfloat16) for i in (1, 2)),
    )
    assert flex_attention(q, k, v).dtype == torch.float32
    torch.testing.assert_close(flex_attention(q, k, v), stock(q, k.float(), v.float()))
    scale = torch.tensor(0.3, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: flex_attention(X, X, X, scale=s), scale, check_forward_ad=True)


def test_indices_of_other_kinds():
    """Of a tensor that the modification reads: by masks, by lists, and by numbers and lists."""
    few = torch.tensor([0, 2, 5])
    mods = [
        lambda s, b, h, i, j: s + TABLE[0][TABLE[0] > 0].sum(),
        lambda s, b, h, i, j: s + TABLE[few, few].sum() * TABLE[i, few].sum() * TABLE[:, 0].sum(),
    ]
    added = [
        TABLE[0][TABLE[0] > 0].sum().expand(9, 1),
        TABLE[few, few].sum() * TABLE[:9, few].sum(-1, keepdim=True) * TABLE[:, 0].sum(),
    ]
    for mod, more in zip(mods, added):
        expected = (X @ X.mT / 3**0.5 + more).softmax(-1) @ X
        torch.testing.assert_close(flex_attention(X, X, X, mod), expected)


def test_without_values():
    q, k, v = (torch.empty(1, 2, 300, 8, device="meta") for _ in range(3))
    assert flex_attention(q, k, v, lambda s, b, h, i, j: s + (i - j)).shape == (1, 2, 300, 8)


def test_empty_sizes():
    q, k, v = random(1, 2, 5, 3), random(1, 2, 6, 3), random(1, 2, 6, 4)
    for mod in (None, MODS["slopes"]):
        assert flex_attention(q[:, :, :0], k, v, mod).shape == (1, 2, 0, 4)
        out, lse = flex_attention(q, k[:, :, :0], v[:, :, :0], mod, return_lse=True)
        assert out.eq(0).all() and lse.eq(-torch.inf).all() and out.shape == (1, 2, 5, 4)
        assert flex_attention(q[:0], k[:0], v[:0], mod).shape == (0, 2, 5, 4)
    assert flex_attention(q[..., :0], k[..., :0], v).allclose(v.mean(2, keepdim=True))


# -- derivatives ------------------------------------------------------------------------------------------------------


def written_out(q, k, slopes, allowed):
    """The scores, of capped products with a slope for each head."""
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[-1] ** 0.5
    scores = scores + slopes[: q.shape[1], None, None] * (i - j)
    return scores if allowed is None else torch.where(allowed(0, 0, i, j), scores, -torch.inf)


def admitted(b, h, i, j):
    return (i >= j) & (i != 2)


def ours(q, k, v, slopes):
    mask = create_block_mask(admitted, None, None, q.shape[2], k.shape[2], device="cpu", BLOCK_SIZE=4)
    mod = lambda s, b, h, i, j: torch.tanh(s) + slopes[h] * (i - j)  # noqa: E731
    out, aux = flex_attention(q, k, v, mod, mask, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True))
    return out, *(torch.where(x == -torch.inf, 0, x) for x in aux)


def reference(q, k, v, slopes):
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    repeats = q.shape[1] // k.shape[1]
    scores = torch.tanh(q @ k.repeat_interleave(repeats, 1).mT / q.shape[-1] ** 0.5) + slopes[:, None, None] * (i - j)
    allowed = admitted(0, 0, i, j)
    some = allowed.any(-1, keepdim=True)
    scores = torch.where(allowed | ~some, scores, -torch.inf)
    out = torch.where(some, scores.softmax(-1), 0) @ v.repeat_interleave(repeats, 1)
    return out, *(torch.where(some[:, 0], x, 0) for x in (scores.logsumexp(-1), scores.amax(-1)))


INPUTS = (random(1, 4, 9, 3), random(1, 2, 7, 3, seed=1), random(1, 2, 7, 2, seed=2), random(4, seed=3))
TANGENTS = tuple(random(*x.shape, seed=i + 9) for i, x in enumerate(INPUTS))
ALL = tuple(range(len(INPUTS)))


def loss(f):
    return lambda *xs: sum((y * torch.arange(y.numel()).reshape(y.shape).cos()).sin().sum() for y in f(*xs))


def gradient(f):
    return grad(loss(f), ALL)


def along(f):
    """The derivative along the tangents, as a function."""
    return lambda *xs: jvp(f, xs, TANGENTS)[1]


def of_autograd(f, order):
    xs = [x.clone().requires_grad_() for x in INPUTS]
    y = loss(f)(*xs)
    for k in range(order):
        found = torch.autograd.grad(y, xs, create_graph=k + 1 < order)
        y = sum((g * t).sum() for g, t in zip(found, TANGENTS))
    return found


def of_duals(f):
    with torch.autograd.forward_ad.dual_level():
        made = [torch.autograd.forward_ad.make_dual(x, t) for x, t in zip(INPUTS, TANGENTS)]
        return [torch.autograd.forward_ad.unpack_dual(y).tangent for y in f(*made)]


def reverse_of_duals(f):
    xs = [x.clone().requires_grad_() for x in INPUTS]
    with torch.autograd.forward_ad.dual_level():
        made = [torch.autograd.forward_ad.make_dual(x, t) for x, t in zip(xs, TANGENTS)]
        tangents = [torch.autograd.forward_ad.unpack_dual(y).tangent for y in f(*made)]
        return torch.autograd.grad(sum(t.square().sum() for t in tangents), xs)


MODES = {
    "rev": lambda f: gradient(f)(*INPUTS),
    "fwd": lambda f: along(f)(*INPUTS),
    "revrev": lambda f: grad(lambda *xs: sum(g.square().sum() for g in gradient(f)(*xs)), ALL)(*INPUTS),
    "fwdrev": lambda f: along(gradient(f))(*INPUTS),
    "revfwd": lambda f: grad(along(loss(f)), ALL)(*INPUTS),
    "fwdfwd": lambda f: along(along(f))(*INPUTS),
    "third": lambda f: grad(along(along(loss(f))), ALL)(*INPUTS),
    "jacrev": lambda f: jacrev(lambda q: f(q, *INPUTS[1:])[0])(INPUTS[0]),
    "jacfwd": lambda f: jacfwd(lambda s: f(*INPUTS[:3], s)[0])(INPUTS[3]),
    "per example": lambda f: vmap(gradient(f), (0, None, None, 0))(
        torch.stack([INPUTS[0], TANGENTS[0]]), *INPUTS[1:3], torch.stack([INPUTS[3], TANGENTS[3]])
    ),
    "autograd": lambda f: of_autograd(f, 1),
    "autograd, second order": lambda f: of_autograd(f, 2),
    "autograd, third order": lambda f: of_autograd(f, 3),
    "duals": of_duals,
    "reverse of duals": reverse_of_duals,
}


@pytest.mark.parametrize("override", [None, (), ("*",)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("small_pieces")
def test_derivatives_of_every_mode(mode, override):
    """Of all arguments and of a tensor that the modification reads by closure. A query has no keys."""
    with mg.override():  # PyTorch cannot differentiate the tangent of a softmax
        expected = MODES[mode](reference)
    if override is None:
        found = MODES[mode](ours)
    else:
        with mg.override(*override):
            found = MODES[mode](ours)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_by_finite_differences():
    xs = [x[:, :, :5].clone().requires_grad_() if x.dim() == 4 else x.clone().requires_grad_() for x in INPUTS]
    assert torch.autograd.gradcheck(ours, xs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda *xs: ours(*xs)[0], xs, check_fwd_over_rev=True)


def test_a_module_with_a_learned_bias(monkeypatch):
    monkeypatch.setattr(pieces, "_QUERIES", 8)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(random(2, 20))

        def biased(self, s, b, h, i, j):
            return s + self.bias[h, (i - j).abs()] * self.bias[0, j]

        def forward(self, q, k, v):
            return flex_attention(q, k, v, self.biased)

    layer, xs = Layer(), [random(1, 2, 20, 3, seed=i) for i in range(3)]
    (found,) = torch.autograd.grad(layer(*xs).square().sum(), layer.bias)
    call = functools.partial(torch.func.functional_call, layer)
    by_transform = grad(lambda p: call(p, tuple(xs)).square().sum())({"bias": layer.bias.detach()})["bias"]
    bias = layer.bias.detach().clone().requires_grad_()
    distance = (torch.arange(20)[:, None] - torch.arange(20)).abs()
    out = (xs[0] @ xs[1].mT / 3**0.5 + bias[:, distance] * bias[0]).softmax(-1) @ xs[2]
    (expected,) = torch.autograd.grad(out.square().sum(), bias)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(by_transform, expected)


def test_a_loop_of_layers(monkeypatch):
    """The backward calls the functions again, with the variables of the loop as they were."""
    monkeypatch.setattr(pieces, "_QUERIES", 8)
    q, k, v = (random(1, 2, 24, 3, seed=i) for i in range(3))
    weights = random(3, 2, seed=3)

    def ours(q, weights):
        for c, w in zip((1, 2, 3), weights):
            mask = create_block_mask(
                lambda b, h, i, j: (i - j).abs() < 4 * c, None, None, 24, 24, device="cpu", BLOCK_SIZE=8
            )  # noqa: B023
            q = flex_attention(q, k, v, lambda s, b, h, i, j: c * s + w[h] * (i - j), mask)  # noqa: B023
        return q.square().sum()

    def written(q, weights):
        i, j = torch.arange(24)[:, None], torch.arange(24)
        for c, w in zip((1, 2, 3), weights):
            scores = c * (q @ k.mT) / 3**0.5 + w[:, None, None] * (i - j)
            q = torch.where((i - j).abs() < 4 * c, scores, -torch.inf).softmax(-1) @ v
        return q.square().sum()

    expected = grad(written, (0, 1))(q, weights)
    torch.testing.assert_close(grad(ours, (0, 1))(q, weights), expected)
    xs = [q.clone().requires_grad_(), weights.clone().requires_grad_()]
    torch.testing.assert_close(torch.autograd.grad(ours(*xs), xs), expected)


class Slots:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w


def test_a_tensor_that_is_not_found(monkeypatch):
    monkeypatch.setattr(pieces, "_QUERIES", 8)
    q = random(1, 2, 24, 3)

    def loss(w):
        held = Slots(w)
        return flex_attention(q * w.sum(), q, q, lambda s, b, h, i, j: s * held.w[h]).square().sum()

    for call in (loss, grad(loss), hessian(loss), lambda w: jvp(grad(loss), (w.detach(),), (w.detach(),))):
        with pytest.raises(mg.implicit.HiddenTensorError, match="score_mod or mask_mod reads a tensor"):
            call(random(2).requires_grad_(call is loss))


# -- costs ------------------------------------------------------------------------------------------------------------


def test_blocks_that_are_not_listed_are_not_computed(monkeypatch):
    attend = flexible._attend
    q, k, v = (random(1, 1, 1024, 8, seed=i).requires_grad_() for i in range(3))
    counts = []
    for mask in (None, lambda b, h, i, j: i >= j, lambda b, h, i, j: (i - j).abs() < 64):
        blocks = None if mask is None else create_block_mask(mask, None, None, 1024, 1024, device="cpu")
        sizes = []
        monkeypatch.setattr(
            flexible, "_attend", lambda q, k, *rest: sizes.append(len(q[0, 0]) * len(k[0, 0])) or attend(q, k, *rest)
        )
        flex_attention(q, k, v, block_mask=blocks).sum().backward()
        counts.append(sum(sizes))
    assert counts == [2 * 1024**2, 2 * 1024**2 * 36 // 64, 2 * 1024**2 * 22 // 64]


def test_the_graph_is_linear_in_the_length():
    def saved(length):
        q, k, v = (random(1, 1, length, 8, seed=i).requires_grad_() for i in range(3))
        sizes = {}
        pack = lambda x: sizes.setdefault(x.untyped_storage()._cdata, x.untyped_storage().nbytes()) and x  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = flex_attention(q, k, v, MODS["cap"])
        assert out.requires_grad
        return sum(sizes.values())

    small, large = saved(512), saved(2048)
    assert large < 4.5 * small and large < 2048 * 2048 * 8 / 8


# -- compilers, levels and bad arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "manualgrad"])
def test_compiled_as_one_graph(backend):
    torch._dynamo.reset()
    mask = block_mask("causal", 37, 37)

    def f(q):
        return flex_attention(q, q, q, MODS["slopes"], mask)

    options = {"lowering": "eager"} if backend == "manualgrad" else None
    compiled = torch.compile(f, backend=backend, fullgraph=True, options=options)
    x = random(2, 4, 37, 3).requires_grad_()
    found, expected = (torch.autograd.grad(g(x).square().sum(), x) for g in (compiled, f))
    torch.testing.assert_close(found, expected)
    if backend == "manualgrad":
        twice = []
        for g in (compiled, f):
            (first,) = torch.autograd.grad(g(x).square().sum(), x, create_graph=True)
            twice.append(torch.autograd.grad(first.square().sum(), x))
        torch.testing.assert_close(*twice)


def test_levels_and_series():
    """A modification is called under vmap, where PyTorch's functions have neither."""
    q, k, v = (random(1, 2, 9, 3, seed=i) for i in range(3))
    mask = block_mask("causal", 9, 9)
    f = lambda q: flex_attention(q, k, v, None, mask)  # noqa: E731
    expected = jvp(f, (q,), (k,))[1]
    with mg.forward_ad.dual_level():
        found = mg.forward_ad.unpack_dual(f(mg.forward_ad.make_dual(q, k))).tangent
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(mg.forward_ad.directional(f, q, k, 2)[0], expected)
    capped = lambda q: flex_attention(q, k, v, MODS["cap"], mask)  # noqa: E731
    with mg.forward_ad.dual_level(), pytest.raises(RuntimeError, match="inside a torch.func transform"):
        capped(mg.forward_ad.make_dual(q, k))
    with pytest.raises(NotImplementedError, match="would be lost"):
        mg.forward_ad.directional(capped, q, k, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flex_attention(X[0], X, X), "query: expected 4 dims"),
        (lambda: flex_attention(X, X[..., :2], X), r"key: expected \(b, h, s, 3\)"),
        (lambda: flex_attention(X, X, X[:, :, :5]), "value: expected the first dims of key"),
        (lambda: flex_attention(X, X[:, :1], X[:, :1]), "key: expected 2 heads, or enable_gqa=True"),
        (lambda: flex_attention(X[:, :1], X, X, enable_gqa=True), "key: expected a number of heads that divides 1"),
        (lambda: flex_attention(X, torch.cat([X, X]), torch.cat([X, X])), "key: expected a batch of 1"),
        (lambda: flex_attention(X.float(), X, X), "key: expected a precision up to torch.float32"),
        (lambda: flex_attention(X, X, X.to("meta")), "value: expected a precision up to torch.float64, on cpu"),
        (lambda: flex_attention(X.long(), X.long(), X.long()), "query: expected real floating point numbers"),
        (lambda: flex_attention(X, X, X, 3), "score_mod: expected a function or None, got 3"),
        (lambda: flex_attention(X, X, X, block_mask=X), "block_mask: expected a BlockMask or None"),
        (
            lambda: flex_attention(X, X, X, block_mask=block_mask("causal", 8, 9)),
            "block_mask: expected one for 9 queries",
        ),
        (
            lambda: flex_attention(X, X, X, block_mask=block_mask("heads", 9, 9)),
            "block_mask: expected a size of the heads",
        ),
        (lambda: flex_attention(X, X, X, scale="1"), "scale: expected a real number"),
        (lambda: flex_attention(X, X, X, return_aux=1), "return_aux: expected an AuxRequest or None, got 1"),
        (lambda: flex_attention(X, X, X, return_lse=True, return_aux=AuxRequest()), "return_lse: expected False"),
        (lambda: flex_attention(X, X, X, lambda s, b: s), "takes 2 positional arguments"),
        (
            lambda: flex_attention(X, X, X, block_mask=block_mask("causal", 9, 9)[:, :, 0]),
            "sliced BlockMask|expected one for",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        call()
