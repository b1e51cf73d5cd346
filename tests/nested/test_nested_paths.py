"""The ways of calls on PyTorch's nested tensors under override: its own graph, one node on the buffer, or components.

Whichever a call takes, values and gradients are those of a loop over the components with dense torch, in every order and
for every cotangent, also where the backward runs after the block.
"""

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
from helpers.nested_calls import (
    CALLS,
    EXACT,
    WIDTH,
    calls,
    close,
    components,
    cotangents_of,
    dense_gradients,
    gradients_twice,
    nest,
)
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.core.override import compiled_calls
from torch_manualgrad.core.override.compiled_nested import nested_counts

layouts = pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
LAID_OUT = {
    "in order": nest,
    "transposed": lambda parts: nest([p.mT.contiguous() for p in parts]).transpose(1, 2),
    "columns of a larger one": lambda parts: nest([torch.cat([p, p], -1) for p in parts]).chunk(2, -1)[0],
}


@calls
@pytest.mark.parametrize("after", [False, True], ids=["inside", "after"])
@pytest.mark.parametrize("laid_out", LAID_OUT)
def test_any_cotangent_in_two_orders(name, after, laid_out):
    call, parts = CALLS[name], components()
    cotangents, along = cotangents_of(call, parts), components(seed=90)
    second = dense_gradients(call, parts, cotangents, along)
    x = nest(parts).requires_grad_()
    with contextlib.ExitStack() as block:
        block.enter_context(mg.override("nested"))
        y = call(x)
        if after:
            block.close()
        given = LAID_OUT[laid_out](cotangents)
        close(torch.autograd.grad(y, x, given, retain_graph=True)[0].unbind(), dense_gradients(call, parts, cotangents))
        (g,) = torch.autograd.grad(y, x, given, create_graph=True)
        close(g.unbind(), dense_gradients(call, parts, cotangents))
        if second is not None:
            close(torch.autograd.grad(g, x, LAID_OUT[laid_out](along))[0].unbind(), second)


@pytest.mark.skipif(not compiled_calls.loaded(), reason="no library of calls for this torch")
@pytest.mark.parametrize("name", [name for name in CALLS if name != "layer_norm, no weight"])  # which PyTorch refuses
def test_pytorchs_graph_where_components_lie_in_order(name):
    x = nest(components()).requires_grad_()
    moved = nest([p.mT.contiguous() for p in components()]).requires_grad_().transpose(1, 2)

    def left_to_stock(x):
        before = nested_counts()
        return CALLS[name](x), nested_counts().left_to_stock - before.left_to_stock

    with mg.override("nested"):
        (y, yes), (z, no) = left_to_stock(x), left_to_stock(moved)
        assert "NestedTensorFromTensorList" not in y.grad_fn.name() and yes
        if name not in ("numbers", "itself"):  # whose first result is in order
            assert "NestedTensorFromTensorList" in z.grad_fn.name() and not no
    close(y.unbind(), [CALLS[name](p) for p in components()])
    close(z.unbind(), y.unbind())
    assert not left_to_stock(x)[1]


@calls
def test_the_same_in_python(name):
    """Which serves all calls where there is no library for this torch."""
    call, parts = CALLS[name], components()
    cotangents = cotangents_of(call, parts)
    x = nest(parts).requires_grad_()
    with mg.override("nested"), compiled_calls.in_python():
        y = call(x)
        (g,) = torch.autograd.grad(y, x, nest(cotangents), create_graph=True)
    close(y.unbind(), [call(p) for p in parts])
    close(g.unbind(), dense_gradients(call, parts, cotangents))


@pytest.mark.skipif(not compiled_calls.loaded(), reason="no library of calls for this torch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_softmax_and_sum_take_the_whole_buffer_at_once(dtype):
    """And are bitwise identical to PyTorch's, which take the components one by one."""
    x = nest([p.to(dtype) for p in components()]).requires_grad_()
    for name in ("softmax", "sum"):
        stock = CALLS[name](x)
        cotangent = nest([random(*p.shape).to(dtype) for p in stock.unbind()])
        (g,) = torch.autograd.grad(stock, x, cotangent)
        before = nested_counts()
        with mg.override("nested"):
            y = CALLS[name](x)
            (ours,) = torch.autograd.grad(y, x, cotangent)
        assert nested_counts().on_buffers == before.on_buffers + 2
        if dtype is torch.bfloat16 and name == "sum":
            continue  # PyTorch's nested sum rounds more than its dense one
        assert all(map(torch.equal, y.unbind(), stock.unbind())) and all(map(torch.equal, ours.unbind(), g.unbind()))


def views():
    """Strided nested tensors whose buffer is not theirs alone, whose sizes differ in other dims, or that are empty."""
    whole = nest([torch.cat([p, p], -1) for p in components()])
    buffer, like = random(100), nest(components(lengths=(2, 3)))
    sizes, strides = like._nested_tensor_size(), like._nested_tensor_strides()
    yield "columns", whole.chunk(2, -1)[1]
    yield "with an offset", torch._nested_view_from_buffer(buffer, sizes, strides, torch.tensor([20, 60]))
    yield "in a larger buffer", torch._nested_view_from_buffer(buffer, sizes, strides, torch.tensor([0, 8]))
    yield "a buffer that is a slice", torch._nested_view_from_buffer(buffer[:20], sizes, strides, torch.tensor([0, 8]))
    yield "all empty", nest([random(0, WIDTH), random(0, WIDTH)])
    yield "one dim more", nest([random(2, n, WIDTH) for n in (1, 3)])
    yield "two sizes differ", nest([random(n, n + 1, WIDTH) for n in (1, 3)])
    yield "one component", nest([random(3, WIDTH)])


@calls
def test_views_of_buffers(name):
    call = CALLS[name]
    for what, x in views():
        parts = [p.clone() for p in x.unbind()]
        x = x.detach().requires_grad_()
        cotangents = cotangents_of(call, parts)
        with mg.override("nested"):
            y = call(x)
            close(y.unbind(), [call(p) for p in parts])
            (g,) = torch.autograd.grad(y, x, nest(cotangents))
        close(g.unbind(), dense_gradients(call, parts, cotangents)), what


@pytest.mark.parametrize("shapes", [((2, 3), (2, 5)), ((3, 2), (4, 5))], ids=["last", "both"])
def test_rows_of_different_lengths(shapes):
    parts = [random(*s, seed=i) for i, s in enumerate(shapes)]
    for call in (CALLS["softmax"], CALLS["sum"], F.silu, lambda x: x.softmax(1 if x.is_nested else 0)):
        x, cotangents = nest(parts).requires_grad_(), cotangents_of(call, parts)
        with mg.override("nested"):
            (g,) = torch.autograd.grad(call(x), x, nest(cotangents), create_graph=True)
        close(g.unbind(), dense_gradients(call, parts, cotangents))


@layouts
@pytest.mark.parametrize("of", [(0, 1, 2), (1,), (2,), (0,)], ids=str)
def test_gradients_of_parameters(layout, of):
    """In two orders, also where the nested tensor itself has none."""
    for call, shape in ((lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b), (WIDTH,)), (F.linear, (WIDTH, WIDTH))):
        leaves = [components(), random(*shape, seed=3), random(WIDTH, seed=4)]
        parts = [p.clone().requires_grad_(0 in of) for p in leaves[0]]
        dense = [p.clone().requires_grad_(i in of) for i, p in enumerate(leaves) if i]
        x = nest(leaves[0], layout).requires_grad_(0 in of)
        mine = [p.clone().requires_grad_(i in of) for i, p in enumerate(leaves) if i]
        with mg.override("nested"):
            y = call(x, *mine).unbind()
            expected = [call(p, *dense) for p in parts]
            close(y, expected)
            found = gradients_twice(y, [x] * (0 in of) + [mine[i - 1] for i in of if i])
        wanted = gradients_twice(expected, parts * (0 in of) + [dense[i - 1] for i in of if i])
        close(found, wanted)


@layouts
@calls
def test_three_orders(name, layout):
    """The third also after the block, on another thread."""
    call, parts = CALLS[name], components(lengths=(2, 3))
    leaves, mine = ([p.clone().requires_grad_() for p in parts] for _ in range(2))

    def up_to_second(results, inputs):
        g = torch.autograd.grad(sum(r.sin().sum() for r in results), inputs, create_graph=True)
        h = torch.autograd.grad(sum((1 + x).cos().sum() for x in g), inputs, create_graph=True)
        return sum((x * x).sum() for x in h)

    with mg.override("nested"):
        loss = up_to_second(call(torch.nested.as_nested_tensor(mine, layout=layout)).unbind(), mine)
    found = []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(loss, mine)))
    thread.start()
    thread.join()
    dense = EXACT.get(name, call)  # the third derivative of PyTorch's dense layer_norm is wrong
    close(found, torch.autograd.grad(up_to_second([dense(p) for p in leaves], leaves), leaves))


def test_a_sum_is_a_tensor_of_its_own():
    """It may be changed in place, and its operands stay."""
    parts = components()
    x = nest(parts).requires_grad_()
    with mg.override("nested"):
        y = x + x
        assert not y._is_view()
        y.mul_(3).relu_()
        (g,) = torch.autograd.grad(y, x, nest([torch.ones_like(p) for p in parts]))
    close(x.unbind(), parts)
    close(y.unbind(), [(6 * p).relu() for p in parts])
    close(g.unbind(), [6 * (p > 0).to(p.dtype) for p in parts])


def test_an_error_in_a_backward_of_silu_leaves_tracking_on():
    x = nest(components()).requires_grad_()

    def fail(*_):
        raise ValueError("planted")

    with mg.override("nested"):
        y = F.silu(x)
        y.grad_fn.register_prehook(fail)
        with pytest.raises(ValueError, match="planted"):
            torch.autograd.grad(y, x, nest(components()), create_graph=True)
        assert torch.is_grad_enabled()
        (g,) = torch.autograd.grad(F.silu(x), x, nest(components()))
        assert not g.requires_grad
