"""override on torch's own nested tensors of every structure and dtype, in graphs, and on what is refused."""

import contextlib
import re

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from helpers.interpreters import run_python
from helpers.nested_layouts import both_layouts, nest
from helpers.tensors import random, same

import torch_manualgrad as mg

STRUCTURES = {
    "two ragged dims": ((2, 3), (4, 5), (1, 2)),
    "the last dim": ((3, 2), (3, 4)),
    "one component": ((2, 3),),
    "equal sizes": ((2, 3), (2, 3)),
    "an empty component": ((2, 3), (0, 3), (1, 3)),
}
CALLS = {
    "softmax": lambda x, d: torch.softmax(x, d),
    "sum": lambda x, d: x.sum(d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "var": lambda x, d: x.var(d),
    "cumsum": lambda x, d: x.cumsum(d),
    "gelu": lambda x, d: F.gelu(x),
    "arithmetic": lambda x, d: x * x + x / 2 - 1 / (x * x + 1) + 2.0**x,
    "last": lambda x, d: x.select(-1, -1),
    "transpose": lambda x, d: x.transpose(-1, -2),
}


def ragged_dims(name):
    return {d for d, sizes in enumerate(zip(*STRUCTURES[name]), 1) if len({*sizes}) > 1} or {1}


def like_the_components(call, name, layout, transposed, dtype):
    """Values and gradients; not contiguous too, transposed by PyTorch before."""
    given = [random(*s, seed=i).to(dtype).requires_grad_() for i, s in enumerate(STRUCTURES[name])]

    def with_gradients(parts):
        loss = sum((p * p).sum().real if dtype.is_complex else (p * p).sum() for p in parts)
        grads = torch.autograd.grad(loss, given, allow_unused=True)
        return [*parts, *(torch.zeros_like(c) if g is None else g for g, c in zip(grads, given))]

    for dim in (1, 2):
        with (
            mg.override("nested") if dtype.is_complex else contextlib.nullcontext()
        ):  # stock makes none with a gradient
            x = torch.nested.as_nested_tensor([c.mT if transposed else c for c in given], layout=layout)
            x = x.transpose(1, 2) if transposed else x
        with mg.override("nested"):
            found = with_gradients(CALLS[call](x, dim).unbind())
        tolerance = {torch.bfloat16: 4e-2, torch.float32: 1e-4}.get(dtype, 1e-9)
        for f, e in zip(found, with_gradients([CALLS[call](c, dim - 1) for c in given]), strict=True):
            assert f.dtype is e.dtype
            torch.testing.assert_close(f, e, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("call", CALLS)
def test_structures(call, name):
    for transposed in (False, True):
        like_the_components(call, name, torch.strided, transposed, torch.float64)
        if ragged_dims(name) == {1 + transposed}:  # torch makes a jagged tensor ragged in dim 1
            like_the_components(call, name, torch.jagged, transposed, torch.float64)


@both_layouts
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(call, layout, dtype):
    like_the_components(call, "an empty component", layout, False, dtype)


@pytest.mark.parametrize("call", ["sum", "var", "cumsum", "arithmetic", "last", "transpose"])
def test_complex(call):
    like_the_components(call, "an empty component", torch.jagged, False, torch.complex128)
    with pytest.raises(RuntimeError, match="does not support automatic differentiation for outputs with complex dtype"):
        like_the_components(call, "an empty component", torch.strided, False, torch.complex128)


@both_layouts
def test_bad_input_raises_pytorchs_errors(layout):
    x = nest(layout)
    calls = {
        "index: 5 is out of range": lambda: x.select(0, 5),
        "index: 3 is out of range for dim 2": lambda: x.select(-1, 3),
        "index: 2 is out of range for component 0": lambda: x.select(1, 2),
        "dim: 3 is out of range": lambda: torch.softmax(x, 3),
        "the batch": lambda: torch.softmax(x, 0),
        "do not add up": lambda: x.split_with_sizes([1, 1], -1),
        "a ragged dim of": lambda: x.chunk(2, 1),
        "no matrix product": lambda: x @ random(4, 2),
        "differ": lambda: x + nest(layout, (3, 3), (3, 3)),
    }
    reads_beyond = ["index: 3 is out of range for dim 2", "index: 2 is out of range for component 0"]
    for message, call in calls.items():
        if layout is torch.strided and message in reads_beyond:
            with mg.override("nested"), pytest.raises(IndexError, match=message):
                call()
            continue
        with pytest.raises(Exception) as stocks:
            call()
        with mg.override("nested"), pytest.raises(type(stocks.value)) as error:
            call()
        same_but_for_names = [re.sub(r"j\d+", "j", str(e.value)) for e in (error, stocks)]
        assert same_but_for_names[0] == same_but_for_names[1]
        assert re.search(message, str(error.value.__cause__)), "ours is the cause"


@pytest.mark.parametrize(
    "layout, call, first",
    [
        ("strided", "x.select(-1, 0)", [[1.0, 0.0, 0.0]] * 2),
        ("jagged", "x.split_with_sizes([1, 2], -1)[1]", [[0.0, 1.0, 1.0]] * 2),
    ],
)
def test_nothing_ends_the_process(layout, call, first, tmp_path):
    """As stock's backward of split does on jagged tensors: in a process of its own, or it would be this one."""
    program = f"""
import torch, torch_manualgrad as mg
x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.{layout}, requires_grad=True)
with mg.override():
    sum(c.sum() for c in {call}.unbind()).backward()
print(x.grad.unbind()[0].tolist())
"""
    done = run_python("-c", program, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(first)


def test_in_a_compiled_graph():
    offsets = torch.tensor([0, 2, 6, 7])

    def f(nt, w):
        y = torch.softmax(F.gelu(F.linear(nt, w)) * 2.0, 1)  # over the ragged dim stock's backward is wrong
        return y.sum(1)

    def gradients(function, v, w):
        nt = torch.nested.nested_tensor_from_jagged(v, offsets)
        return torch.autograd.grad((function(nt, w) * w.sum(1)).sin().sum(), (v, w))

    v, w = random(7, 3).requires_grad_(), random(5, 3, seed=1).requires_grad_()
    with mg.override("nested"):
        plain = gradients(f, v, w)
        compiled = gradients(torch.compile(f, backend="aot_eager", fullgraph=True), v, w)
    same(compiled, plain)


def test_heads_in_every_order_that_a_jagged_tensor_has():
    """Attention with split and joined heads, as a model writes it: gradient, second order, tangent."""
    given = [random(n, 8, seed=n).requires_grad_() for n in (2, 4)]

    def joined(x, attend):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(-3, -2) for y in (x, x * 2, x * x))
        return attend(q, k, v).transpose(-3, -2).flatten(-2)

    def plain(components):
        return [joined(c, lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v) for c in components]

    def jagged(components):
        x = torch.nested.as_nested_tensor(list(components), layout=torch.jagged)
        return joined(x, F.scaled_dot_product_attention).unbind()

    def numbers(function):
        def loss(parts):
            return sum(p.sin().sum() for p in parts)

        first = torch.autograd.grad(loss(function(given)), given, create_graph=True)
        second = torch.autograd.grad(sum(g.cos().sum() for g in first), given)
        with fwAD.dual_level():
            tangent = fwAD.unpack_dual(loss(function([fwAD.make_dual(c.detach(), c.detach().cos()) for c in given])))[1]
        return [*first, *second, tangent]

    with mg.override("nested"):
        found = numbers(jagged)
    same(found, numbers(plain))


def test_a_tangent_is_not_reshaped_across_the_ragged_dim():
    x = random(6, 4)
    with mg.override("nested"), fwAD.dual_level():
        nt = torch.nested.nested_tensor_from_jagged(fwAD.make_dual(x, x), torch.tensor([0, 2, 6]))
        with pytest.raises(RuntimeError, match="the tangent of a jagged nested tensor"):
            nt.reshape(2, 2, nt.shape[1], 2)
