"""A Ragged used as a tensor: operators, indexing, torch's functions and modules, methods, copies on disk."""

from __future__ import annotations

import copy
import math
import operator
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.ragged import batch, in_every_mode
from helpers.tensors import random
from torch import nn

import torch_manualgrad as mg
from torch_manualgrad import nested
from torch_manualgrad.nested import Ragged
from torch_manualgrad.testing import check
from torch_manualgrad.testing.database.opinfo import nested_entries

F64, C128 = torch.float64, torch.complex128
KINDS = {  # the components' shapes
    "first": [(2, 3), (0, 3), (4, 3)],
    "last": [(3, 2), (3, 1), (3, 3)],
    "both": [(2, 3), (1, 4), (3, 3)],
}


def components(kind="first", dtype=F64, seed=0):
    return [random(*shape, dtype=dtype, seed=seed + i) for i, shape in enumerate(KINDS[kind])]


def ragged(kind="first", dtype=F64, seed=0):
    return Ragged.from_components(components(kind, dtype, seed))


def same_components(found, expected):
    assert isinstance(found, Ragged) and len(found) == len(expected)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0, equal_nan=True)  # 2 / x is 2 * (1 / x) in torch


# -- operators --------------------------------------------------------------------------------------------------------

ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.floordiv, operator.mod]
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
OTHERS = {
    "number": lambda kind: 1.5,
    "integer": lambda kind: 2,
    "0-dim tensor": lambda kind: torch.tensor(0.5, dtype=F64),
    "dense": lambda kind: random(3 if kind == "first" else 1, seed=9),
    "one for each": lambda kind: random(3, 1, 1, seed=9),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("f", ARITHMETIC + COMPARISONS, ids=lambda f: f.__name__)
def test_operators(f, kind):
    r = ragged(kind)
    r = r.abs() if f is operator.pow else r
    for name, make in OTHERS.items():
        other = make(kind)
        parts = list(other) if name == "one for each" else [other] * 3
        if f is operator.pow and isinstance(other, torch.Tensor):
            other, parts = other.abs(), [p.abs() for p in parts]
        same_components(f(r, other), [f(c, p) for c, p in zip(r, parts)])
        same_components(f(other, r), [f(p, c) for c, p in zip(r, parts)])
    second = Ragged(r.values.flip(0), r.offsets, r.shape, r.sizes)
    same_components(f(r, second), [f(a, b) for a, b in zip(r, second)])


@pytest.mark.parametrize("kind", KINDS)
def test_operators_of_one(kind):
    r = ragged(kind)
    same_components(-r, [-c for c in r])
    same_components(+r, list(r))
    same_components(abs(r), [abs(c) for c in r])
    same_components(~(r > 0) & (r < 1) | (r > 2) ^ (r > 3), [~(c > 0) & (c < 1) | (c > 2) ^ (c > 3) for c in r])


def test_products_of_matrices():
    r, w, v = ragged(), random(3, 2), random(4, 3)
    same_components(r @ w, [c @ w for c in r])
    same_components(v @ r.mT, [v @ c.mT for c in r])
    torch.testing.assert_close(r.mT @ r, torch.stack([c.mT @ c for c in r]))
    x = r
    x @= w  # a new one
    same_components(x, [c @ w for c in r])


def test_integers_promote_with_numbers_as_in_torch():
    r = Ragged(torch.arange(3), torch.tensor([0, 1, 3]), (2, None))
    for f in (operator.add, operator.sub, operator.mul, operator.truediv):
        same_components(f(0.5, r + 1), [f(0.5, c + 1) for c in r])
        same_components(f(r + 1, 0.5), [f(c + 1, 0.5) for c in r])
    assert (r + 1).dtype == torch.int64 and (r / 2).dtype == torch.float32


def test_operators_with_a_non_number():
    r = ragged()
    for other in ("a", [1.0], None, object()):
        with pytest.raises(TypeError, match="unsupported operand"):
            r + other
        with pytest.raises(TypeError, match="unsupported operand"):
            other - r
        assert (r == other) is False and (r != other) is True
    np = pytest.importorskip("numpy")
    same_components(np.float64(2) * r, [2 * c for c in r])
    same_components(r / np.float32(2), [c / 2 for c in r])
    with pytest.raises(TypeError, match="unsupported operand"):
        np.ones(3) * r
    with pytest.raises(ValueError, match="other: .*lengths differ"):
        r + Ragged.from_components([random(n, 3) for n in (1, 1, 4)])


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_operators(kind, dtype):
    r = ragged(kind, dtype)
    dense = random(3 if kind == "first" else 1, dtype=dtype, seed=5) + 3
    two = (dtype.is_complex and 2) or 2.5

    def expression(values, dense):
        x = r.like(values)
        return ((2 - x) * dense / (x * x + 5) - (-x) / 3 + (x * x + 2) ** two + dense * x - x / dense).values

    check(expression, [(r.values, dense)])
    if kind == "first":
        check(lambda v, w: (r.like(v) @ w @ w.mT).values, [(r.values, random(3, 2, dtype=dtype))])
        check(lambda v: r.like(v).mT @ r.like(v), [(r.values,)])
    if not dtype.is_complex:
        check(lambda v: (abs(r.like(v)) + r.like(v).exp().softmax(1)).values, [(r.values,)])


# -- transforms -------------------------------------------------------------------------------------------------------


def loss(r):
    x = torch.softmax((2 - r) * 3 + r**2 / 2, 1)
    return (F.gelu(-x) * x.exp()).sum() + abs(r[0]).sum() + (r > 0).sum()


def test_transforms_of_operators():
    r = ragged()
    g = torch.func.grad(lambda v: loss(r.like(v)))(r.values)
    leaf = r.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(leaf.grad.values, g)
    H = torch.func.hessian(lambda v: loss(r.like(v)))(r.values)
    assert H.isfinite().all()
    values = torch.stack([r.values, r.values / 2])
    found = torch.func.vmap(lambda v: loss(r.like(v)))(values)
    torch.testing.assert_close(found, torch.stack([loss(r.like(v)) for v in values]))
    tangent = torch.func.jvp(lambda v: loss(r.like(v)), (r.values,), (torch.ones_like(r.values),))[1]
    torch.testing.assert_close(tangent, g.sum())


@pytest.mark.parametrize("kind", ["first", "last"])
def test_operators_in_a_graph(kind):
    r = ragged(kind)

    def f(values, offsets):
        x = Ragged(values, offsets, r.shape)
        w = torch.eye(3, dtype=F64)
        y = torch.softmax((2 - x) * 3 + x**2 / 2 - torch.matmul(x, w) if kind == "first" else 2 / (x + 9), 1)
        return (F.relu(-y + 0.3) * y.exp() + values.new_ones(1)).sum(), abs(y).values

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    v = r.values.clone().requires_grad_()
    for found, expected in zip(compiled(v, r.offsets), f(v, r.offsets)):
        torch.testing.assert_close(found, expected)
    (a,), (b,) = (torch.autograd.grad(g(v, r.offsets)[0], v) for g in (compiled, f))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("f", ARITHMETIC + COMPARISONS, ids=lambda f: f.__name__)
def test_operators_with_a_tensor_in_a_graph(f):
    """The compiler exchanges the arguments of ``r - tensor``, and calls the reflected method."""
    r, t = ragged().abs() + 0.1, random(3).abs() + 0.1

    def both(values, offsets, t):
        x = Ragged(values, offsets, r.shape)
        return f(x, t).values, f(t, x).values

    torch.compiler.reset()  # one function's graphs are counted, and there are many operators
    compiled = torch.compile(both, fullgraph=True, backend="eager")
    for found, expected in zip(compiled(r.values, r.offsets, t), both(r.values, r.offsets, t)):
        torch.testing.assert_close(found, expected)


def test_products_in_a_graph_are_not_exchanged():
    w, r = random(3, 3), ragged()
    compiled = torch.compile(lambda v, o, w: (Ragged(v, o, r.shape) @ w).values, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"torch.matmul\(a, b\)"):
        compiled(r.values, r.offsets, w)
    torch.compiler.reset()
    broken = torch.compile(lambda x, w: (x @ w).values, backend="eager")
    try:
        found = broken(r, w)
    except TypeError as error:
        assert "torch.matmul(a, b)" in str(error)
    else:
        torch.testing.assert_close(found, (r @ w).values)


def test_a_ragged_as_an_argument_of_a_graph():
    compiled = torch.compile(loss, backend="aot_eager")
    r = ragged()
    torch.testing.assert_close(compiled(r), loss(r))


def test_under_override():
    r = ragged()
    gradient = torch.func.grad(lambda v: loss(r.like(v)))
    expected = gradient(r.values)
    with mg.override("*"):
        torch.testing.assert_close(gradient(r.values), expected)


# -- indexing, length, iteration --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_components_and_slices(kind):
    r, given = ragged(kind), components(kind)
    assert len(r) == 3 and [c.shape for c in r] == [c.shape for c in given]
    for i in range(-3, 3):
        torch.testing.assert_close(r[i], given[i], rtol=0, atol=0)
    for s in (slice(None), slice(1, None), slice(-2, None), slice(0, 0), slice(None, None, 2), slice(5, 9)):
        same_components(r[s], given[s])
    same_components(r[...], given)
    same_components(r[1:][0:1], given[1:2])
    for bad in (3, -4):
        with pytest.raises(IndexError, match=f"index: {bad} is out of range for 3 components"):
            r[bad]


def test_inside_of_components():
    r, given = ragged("last"), components("last")
    torch.testing.assert_close(r[1, 2], given[1][2])
    torch.testing.assert_close(r[-1, :2, -1], given[-1][:2, -1])
    torch.testing.assert_close(r[..., -1], torch.stack([c[:, -1] for c in given]))
    torch.testing.assert_close(r[:, 1, 0], torch.stack([c[1, 0] for c in given]))
    same_components(r[:, 1:], [c[1:] for c in given])
    same_components(r[1:, 1, :2], [c[1, :2] for c in given[1:]])
    same_components(ragged("both")[:, -1], [c[-1] for c in components("both")])
    with pytest.raises(IndexError, match="too many for 3 dims"):
        r[:, 0, 0, 0]
    with pytest.raises(IndexError, match="too many for 3 dims"):
        r[..., ...]
    for bad in (None, True, [0, 1], "a", torch.tensor([0, 1]), 1.0):
        with pytest.raises((TypeError, IndexError), match="index"):
            r[bad]
    with pytest.raises(ValueError, match="step"):
        r[::-1]


def test_gradient_of_components():
    r = ragged().requires_grad_()
    (r[2] * r[0][:1]).sum().backward()
    expected = torch.zeros_like(r.values)
    expected[2:], expected[0] = r[0][:1].detach(), r[2].detach().sum(0)
    torch.testing.assert_close(r.grad.values, expected)
    check(lambda v: r.like(v)[1:, :, 1:].values * r.like(v)[0, 1, 2], [(r.values.detach(),)])


def test_truth():
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(ragged() > 0)
    assert Ragged(torch.ones(1), torch.tensor([0, 1]), (1, None))


# -- dtype, device, history -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_conversions(kind):
    r = ragged(kind)
    assert r.dtype == F64 and r.device == torch.device("cpu") and r.ndim == r.dim() == 3
    assert r.size() == r.shape and r.size(0) == 3 and r.size(-1) == r.shape[2]
    assert r.numel() == sum(c.numel() for c in components(kind)) and r.is_floating_point()
    for found, dtype in (
        (r.float(), torch.float32),
        (r.half(), torch.float16),
        (r.bfloat16(), torch.bfloat16),
        (r.to(torch.float32), torch.float32),
        (r.to(r.float()), torch.float32),
        (r.to("cpu", torch.int32), torch.int32),
        (r.double(), F64),
        (r.long(), torch.int64),
        (r.bool(), torch.bool),
    ):
        assert found.dtype == dtype and found.offsets.dtype == torch.int64 and found.shape == r.shape
    assert r.to(F64) is r and r.cpu() is r
    meta = r.to("meta")
    assert meta.device.type == meta.offsets.device.type == "meta" and (r.sizes is None) == (meta.sizes is None)
    if torch.cuda.is_available():
        assert r.cuda().offsets.is_cuda and r.cuda(0).cpu().device.type == "cpu"


def test_history():
    r = ragged()
    assert not r.requires_grad and r.grad is None and r.is_leaf
    assert r.requires_grad_() is r and r.requires_grad
    y = r * 2
    assert y.requires_grad and not y.is_leaf and y.grad_fn is not None
    y.sum().backward()
    same_components(r.grad, [torch.full_like(c, 2) for c in r])
    assert not y.detach().requires_grad and y.detach().values.data_ptr() == y.values.data_ptr()
    assert y.clone().requires_grad and y.clone().values.data_ptr() != y.values.data_ptr()
    assert r.summary() == "Ragged((3, *, 3), torch.float64, requires_grad=True)"
    assert repr(r.to("meta")) == "Ragged((3, *, 3), torch.float64, device='meta', requires_grad=True)"


def test_round_trip_with_nested_tensors():
    r = ragged("last")
    nt = r.to_nested(torch.jagged)
    assert math.isclose(nested.sum(nt).item(), r.sum().item())
    same_components(nested.add(r, nt), [2 * c for c in r])


# -- elementwise functions, and functions that are missing -------------------------------------------------------------

# operators of numbers on the left, which `ARITHMETIC` has; several tensors; for CUDA; on one tensor only
NOT_BY_ENTRY = ("__r", "frexp", "fill", "nn.functional.prelu", "jiterator", "cdouble", "cfloat", "chalf")


def elementwise_entries():
    kinds = ("UnaryUfuncInfo", "BinaryUfuncInfo")
    return [op for op in nested_entries() if type(op).__name__ in kinds and not op.name.startswith(NOT_BY_ENTRY)]


@pytest.mark.parametrize("op", elementwise_entries(), ids=lambda op: op.full_name)
def test_every_elementwise_function_of_torch(op):
    dtype = next(d for d in (F64, torch.int64, C128) if d in op.dtypes)
    r = Ragged(
        (random(6, 3).abs() / 2 + 0.1).mul(1 if dtype == F64 else 9).to(dtype), torch.tensor([0, 2, 6]), (2, None, 3)
    )
    kwargs = op.sample_kwargs("cpu", dtype, r.values)[0] if type(op).__name__ == "UnaryUfuncInfo" else {}
    count = 1 if type(op).__name__ == "UnaryUfuncInfo" else 2
    found = []
    for x in (r, r.values):
        torch.manual_seed(0)
        found.append(op.op(*[x] * count, **kwargs))
    assert found[0].shape == r.shape
    torch.testing.assert_close(found[0].values, found[1], rtol=0, atol=0, equal_nan=True)


def test_elementwise_functions_of_three():
    r, w = ragged(), random(3)
    same_components(torch.lerp(r, 2 * r, 0.5), [torch.lerp(c, 2 * c, 0.5) for c in r])
    same_components(r.lerp(r.cos(), weight=w), [c.lerp(c.cos(), w) for c in r])
    same_components(torch.addcmul(w, r, r, value=2), [torch.addcmul(w, c, c, value=2) for c in r])
    same_components(torch.addcdiv(r, w, r), [torch.addcdiv(c, w, c) for c in r])
    same_components(torch.bmm(r, random(3, 3, 2)), [torch.bmm(c[None], m[None])[0] for c, m in zip(r, random(3, 3, 2))])


def test_missing_methods_say_what_to_use():
    r = ragged()
    for name in ("mv", "backward", "register_hook"):
        assert not hasattr(r, name)
        with pytest.raises(AttributeError, match=rf"{name}: not a function of a Ragged. Use .* its values"):
            getattr(r, name)
    with pytest.raises(AttributeError, match="add_: in-place functions do not take a Ragged; use add"):
        r.add_(1)
    with pytest.raises(AttributeError, match="'Ragged' object has no attribute 'no_such'"):
        r.no_such  # noqa: B018
    with pytest.raises(AttributeError, match="'object' object has no attribute 'shape'"):
        Ragged.trusted(r.values, object(), r.shape).batch  # noqa: B018
    with pytest.raises(ValueError, match="mask: the lengths differ"):
        r.masked_fill(Ragged.from_components([random(n, 3) for n in (1, 1, 4)]) > 0, 1.0)


# -- functions and modules of torch -----------------------------------------------------------------------------------


def test_every_function_of_the_package_is_one_of_torch_and_a_method():
    missing = []
    for name in nested.__all__:
        if name in ("Ragged", "collate", "to_padded_tensor"):
            continue
        places = [getattr(p, name) for p in (torch, F, torch.linalg, torch.Tensor) if callable(getattr(p, name, None))]
        for function in places:
            try:
                function(ragged())
            except TypeError as error:
                if "not a function of a Ragged" in str(error):
                    missing.append(function)
            except (ValueError, IndexError, RuntimeError):
                pass  # further arguments are needed
        if name != "slice":
            assert places, name
        assert callable(getattr(ragged(), name)), name
    assert not missing


def _of(name, *args):
    function = getattr(nested, name)
    return lambda x: function(x, *args)


IN_EVERY_MODE = {  # of (B, *, 4)
    **{
        name: getattr(nested, name)
        for name in """
            celu elu gelu hardtanh leaky_relu mish relu selu silu softplus glu prod std sum unbind var vector_norm
        """.split()
    },
    **{
        f"{name}, {where} dim": _of(name, dim)
        for name in "cumsum log_softmax logsumexp prod softmax std sum var".split()
        for where, dim in (("ragged", 1), ("dense", 2))
    },
    **{name: _of(name, 2) for name in ("amax", "amin", "mean")},
    "max": lambda x: nested.max(x, 2).values,
    "min": lambda x: nested.min(x, 2).values,
    "add": lambda x: nested.add(x, x.cos()),
    "div": lambda x: nested.div(x, x.cos() + 2),
    "maximum": lambda x: nested.maximum(x, x.cos()),
    "minimum": lambda x: nested.minimum(x, x.cos()),
    "mul": lambda x: nested.mul(x, x.cos()),
    "sub": lambda x: nested.sub(x, x.cos()),
    "pow": lambda x: nested.pow(x * x + 1, x),
    "threshold": _of("threshold", 0.1, 0.2),
    "dropout": _of("dropout", 0.5, False),
    "layer_norm": _of("layer_norm", (4,)),
    "rms_norm": _of("rms_norm", (4,)),
    "linear": _of("linear", random(3, 4), random(3)),
    "matmul": _of("matmul", random(4, 3)),
    "scaled_dot_product_attention": lambda x: nested.scaled_dot_product_attention(x, x, x, is_causal=True),
    "scaled_dot_product_attention, mask": lambda x: nested.scaled_dot_product_attention(
        x, x, x, random(*[max(x.lengths.tolist())] * 2)
    ),
    "narrow": _of("narrow", 2, 1, 2),
    "select": _of("select", 2, 1),
    "slice": _of("slice", 1, 1),
    "chunk": _of("chunk", 2, 2),
    "split": _of("split", 3, 2),
    "split_with_sizes": _of("split_with_sizes", [1, 3], 2),
    "transpose": _of("transpose", 1, 2),
    "to_padded_tensor": _of("to_padded_tensor", 1.0),
}


def test_the_table_of_modes_is_complete():
    assert {name.partition(",")[0] for name in IN_EVERY_MODE} >= {*nested.__all__} - {"Ragged", "collate"}


@pytest.mark.parametrize("lengths", [(3, 0, 2), (0, 0)], ids=["some", "empty"])
@pytest.mark.parametrize("name", IN_EVERY_MODE)
def test_in_every_mode_without_an_override(name, lengths):
    in_every_mode(IN_EVERY_MODE[name], batch(None, 4, lengths=lengths))


CALLS = {
    "softmax": lambda x: [torch.softmax(x, 1), F.softmax(x, dim=1), x.softmax(1), torch.softmax(input=x, dim=1)],
    "log_softmax": lambda x: [torch.log_softmax(x, -1), F.log_softmax(x, -1), x.log_softmax(dim=-1)],
    "sum": lambda x: [torch.sum(x, 1), x.sum(1), x.sum(dim=(1,)), torch.sum(x, dim=1, dtype=F64)],
    "mean": lambda x: [torch.mean(x, 1, True), x.mean(dim=1, keepdim=True)],
    "var": lambda x: [torch.var(x, 1, False), x.var(1, correction=0), x.var(dim=1, unbiased=False)],
    "std": lambda x: [torch.std(x, False), x.std(unbiased=False), x.std(correction=0)],
    "max": lambda x: [torch.max(x, 1).values, x.max(dim=1)[0], torch.amax(x, 1), x.amax(1)],
    "maximum": lambda x: [torch.max(x, x / 2), torch.maximum(x, x / 2), x.maximum(x / 2)],
    "norm": lambda x: [torch.norm(x, dim=1), x.norm(dim=1), torch.linalg.vector_norm(x, dim=1)],
    "relu": lambda x: [torch.relu(x), F.relu(x), x.relu(), nn.ReLU()(x)],
    "gelu": lambda x: [F.gelu(x, approximate="tanh"), nn.GELU("tanh")(x)],
    "threshold": lambda x: [F.threshold(x, 0.1, 2.0), nn.Threshold(0.1, 2.0)(x)],
    "elu": lambda x: [F.elu(x, 0.5), nn.ELU(0.5)(x)],
    "layer_norm": lambda x: [F.layer_norm(x, (3,)), nn.LayerNorm(3, dtype=F64, elementwise_affine=False)(x)],
    "rms_norm": lambda x: [F.rms_norm(x, (3,)), nn.RMSNorm(3, elementwise_affine=False)(x)],
    "add": lambda x: [torch.add(x, x, alpha=2), x.add(x, alpha=2), x + 2 * x],
    "exp": lambda x: [torch.exp(x), x.exp()],
    "clamp": lambda x: [torch.clamp(x, min=-0.5, max=0.5), x.clamp(-0.5, 0.5), x.clip(-0.5, 0.5)],
    "masked_fill": lambda x: [torch.masked_fill(x, x > 0, 0.0), x.masked_fill(x > 0, 0.0)],
    "transpose": lambda x: [torch.transpose(x, 1, 2), x.transpose(1, 2), x.mT, torch.swapaxes(x, -1, -2)],
}


@pytest.mark.parametrize("name", CALLS)
def test_functions_of_torch(name):
    given = [c for c in components() if len(c) or name not in ("max",)]
    found = CALLS[name](Ragged.from_components(given))
    for one in found[1:]:
        if isinstance(one, Ragged):
            same_components(one, found[0])
        else:
            torch.testing.assert_close(one, found[0], rtol=0, atol=0, equal_nan=True)
    if isinstance(found[0], Ragged):
        for c, value in zip(given, found[0]):
            if not len(c):
                continue
            for f in (lambda c: CALLS[name](c.unsqueeze(0)),):
                torch.testing.assert_close(value, f(c)[0].squeeze(0))


def test_pieces_by_torch():
    r = ragged()
    for found in (torch.split(r, 2, 2), r.split(2, dim=2), torch.split(r, [2, 1], -1), nested.split(r, 2, 2)):
        same_components(found[0], [c[:, :2] for c in r])
        same_components(found[1], [c[:, 2:] for c in r])
    same_components(torch.chunk(r, 3, 2)[1], [c[:, 1:2] for c in r])
    assert len(torch.unbind(r)) == 3 and torch.equal(torch.select(r, 0, -1), r[-1])


def test_likes_and_comparisons():
    r = ragged()
    assert torch.zeros_like(r).values.eq(0).all() and torch.ones_like(r, dtype=torch.int64).dtype == torch.int64
    assert torch.full_like(r, 3.0).values.eq(3).all() and torch.rand_like(r).shape == r.shape
    assert torch.equal(r, r.clone()) and not torch.equal(r, r + 1) and torch.allclose(r, r + 1e-12)
    assert not torch.equal(r, Ragged.from_components([random(n, 3) for n in (1, 1, 4)])) and not torch.equal(r, r[0])


def test_a_network():
    net = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.0), nn.Linear(8, 2), nn.Softmax(-1))
    net = net.double()
    r = ragged()
    for found, c in zip(net(r), r):
        torch.testing.assert_close(found, net(c))
    net(r).square().sum().backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    sum(net(c).square().sum() for c in r).backward()
    for a, p in zip(gradients, net.parameters()):
        torch.testing.assert_close(a, p.grad)


def test_attention_by_torch():
    q = Ragged.from_components([random(n, 2, 4, seed=n) for n in (3, 1, 2)]).transpose(1, 2)
    for found, c in zip(F.scaled_dot_product_attention(q, q, q, is_causal=True), q):
        torch.testing.assert_close(found, F.scaled_dot_product_attention(c[None], c[None], c[None], is_causal=True)[0])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda r: torch.cdist(r, r), "^cdist: not a function of a Ragged. .* components"),
        (lambda r: torch.fft.fft(r), "fft: not a function of a Ragged"),
        (lambda r: torch.linalg.svd(r), "svd: not a function of a Ragged"),
        (lambda r: F.relu(r, inplace=True), "relu: inplace: a Ragged cannot be written to, got True"),
        (lambda r: torch.exp(r, out=torch.zeros(1)), "exp: out: a Ragged cannot be written to, got a Tensor of shape"),
        (lambda r: torch.ones(3).add_(r), "add_: in-place functions do not take a Ragged; use add"),
        (
            lambda r: torch.clamp(r, min=torch.ones(3)),
            "clamp: expected numbers as further arguments, got a Tensor of shape",
        ),
        (lambda r: F.softmax(r), "softmax: dim: expected an int, got None"),
    ],
)
def test_functions_that_are_not_covered(call, message):
    with pytest.raises(TypeError, match=message):
        call(ragged())


def test_other_classes_come_first():
    class Other:
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "other"

    assert torch.add(ragged(), Other()) == "other"


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_files(kind, tmp_path):
    r = ragged(kind).requires_grad_()
    path = tmp_path / "ragged.pt"
    torch.save({"x": r, "offsets": r.offsets}, path)
    loaded = torch.load(path)
    for found in (copy.deepcopy(r), copy.copy(r), pickle.loads(pickle.dumps(r)), loaded["x"]):
        same_components(found, list(r))
        assert found.requires_grad and found.shape == r.shape and type(found) is Ragged
    assert copy.deepcopy(r).values.data_ptr() != r.values.data_ptr()
    both = copy.deepcopy([r, r * 1 if False else r])
    assert both[0] is both[1]
    assert loaded["x"].offsets.data_ptr() == loaded["offsets"].data_ptr()  # still shared


def test_load_in_another_process(tmp_path):
    path = tmp_path / "ragged.pt"
    torch.save(ragged(), path)
    program = f"""
import torch
try:
    torch.load({str(path)!r})
except Exception as error:
    assert "torch_manualgrad.nested.ragged.Ragged" in str(error), error
else:
    raise AssertionError("loaded before the import")
import torch_manualgrad
r = torch.load({str(path)!r})
assert len(r) == 3 and r.dtype == torch.float64
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(mg.__file__).parents[1]), *sys.path])}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr


def test_a_file_that_lies_is_refused(tmp_path):
    r = ragged()
    object.__setattr__(r, "offsets", torch.tensor([0, 5, 2, 6]))
    torch.save(r, tmp_path / "ragged.pt")
    with pytest.raises(Exception, match="offsets: they decrease"):
        torch.load(tmp_path / "ragged.pt")
