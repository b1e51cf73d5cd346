"""torch.compile of programs on nested tensors under override: what PyTorch compiles, compiles; graphs follow the override."""

import contextlib
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from helpers.interpreters import run_python
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.nested import Ragged

LENGTHS = (2, 5, 3)
WEIGHT = random(8, 8, seed=9)


@pytest.fixture(autouse=True)
def quiet():
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
    torch._dynamo.reset()


def batch(known):
    """A jagged tensor, of whose lengths the longest is known or not."""
    components = [random(n, 4, 8, seed=n) for n in LENGTHS]
    if known:
        return torch.nested.nested_tensor(components, layout=torch.jagged, requires_grad=True)
    offsets = torch.tensor([0, 2, 7, 10])
    return torch.nested.nested_tensor_from_jagged(torch.cat(components), offsets).requires_grad_()


PROGRAMS = {
    "to_padded_tensor": lambda x: x.to_padded_tensor(0.0),
    "chain": lambda x: F.layer_norm(F.gelu(F.linear(x, WEIGHT)) * 2 + x, (8,)).softmax(-1),
    "sum": lambda x: x.sum(),
    "chunk": lambda x: x.chunk(2, -1),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3).transpose(1, 2),
    "unbind": lambda x: x.unbind(),
    "linear": lambda x: F.linear(x, WEIGHT),
    "gelu": F.gelu,
    "arithmetic": lambda x: x * 2 + x,
    "dense": lambda x: x * WEIGHT[0],
    "mean": lambda x: x.mean(-1),
    "amax": lambda x: x.amax(1),
    "matmul": lambda x: x @ WEIGHT,
    "transpose": lambda x: x.transpose(1, 2) * 3,
    "split": lambda x: x.split(4, -1),
    "values": lambda x: x.values() * 2,
    "size": lambda x: x * x.size(-1),
}
FAST = ("to_padded_tensor", "chain", "sum", "chunk")


def outcome(program, known, tracked, dynamic):
    """(values, gradient), or what was raised."""
    torch._dynamo.reset()
    x = batch(known)
    x = x if tracked else x.detach()
    try:
        found = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=dynamic)(x)
        found = [found] if isinstance(found, torch.Tensor) else list(found)
        values = [y.values() if y.is_nested else y for y in found]
        if not tracked:
            return values, None
        return values, torch.autograd.grad(sum(v.sin().sum() for v in values), x)[0].values()
    except Exception as error:
        return error, None


def check(name, known, tracked, dynamic):
    found = []
    for override in (contextlib.nullcontext(), mg.override("nested")):
        with override:
            found.append(outcome(PROGRAMS[name], known, tracked, dynamic))
    (stocks, stock_gradient), (ours, gradient) = found
    if isinstance(stocks, Exception):
        return
    if isinstance(ours, Exception):
        raise ours
    torch.testing.assert_close(ours, stocks)
    torch.testing.assert_close(gradient, stock_gradient)


@pytest.mark.parametrize("name", FAST)
def test_calls_that_pytorch_compiles_compile(name):
    check(name, True, True, None)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("tracked", [True, False], ids=["gradient", "none"])
@pytest.mark.parametrize("known", [True, False], ids=["longest known", "not known"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_that_pytorch_compiles_compile_in_every_way(name, known, tracked, dynamic):
    check(name, known, tracked, dynamic)


FUNCTIONS = {
    "relu": mg.nested.relu,
    "softmax": lambda x: mg.nested.softmax(x, 1),
    "sum": lambda x: mg.nested.sum(x, 1),
    "linear": lambda x: mg.nested.linear(x, WEIGHT),
    "pair": lambda x: mg.nested.mul(x, mg.nested.relu(x)),
    "narrow": lambda x: mg.nested.narrow(x, 2, 0, 2),
    "narrow, ragged": lambda x: mg.nested.narrow(x, 1, 0, 2),
    "select": lambda x: mg.nested.select(x, 2, 0),
    "split": lambda x: mg.nested.split(x, 2, 2)[1],
    "unbind": lambda x: mg.nested.unbind(x)[1],
    "to_padded_tensor": lambda x: mg.nested.to_padded_tensor(x, 0.0),
}


@pytest.mark.parametrize("override", [contextlib.nullcontext, mg.override], ids=["stock", "override"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_our_functions_break_a_graph_at_a_nested_tensor(name, override):
    def program(x):
        y = FUNCTIONS[name](x * 2)
        return (y.values() if isinstance(y, torch.Tensor) and y.is_nested else torch.as_tensor(y)).sin()

    x, found = batch(True), []
    for f in (program, torch.compile(program, backend="eager")):
        with override():
            value = f(x)
            found.append((value, torch.autograd.grad(value.sum(), x)[0].values()))
    torch.testing.assert_close(found[1], found[0])


def test_fullgraph_reports_functions_that_cannot_be_compiled():
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a Ragged can be compiled"):
        torch.compile(lambda x: mg.nested.relu(x * 2), backend="eager", fullgraph=True)(batch(True))


def test_graphs_follow_the_override():
    """Compiled outside first and compiled inside first; the softmax over a ragged dim tells one from the other."""

    def gradient(f):
        x = torch.nested.nested_tensor([random(2, 3), random(4, 3)], layout=torch.jagged, requires_grad=True)
        return torch.autograd.grad(f(x).values().square().sum(), x)[0].values()

    def softmax(x):
        return torch.softmax(x, 1)

    stocks = gradient(softmax)
    with mg.override("nested"):
        ours = gradient(softmax)
    assert not torch.allclose(stocks, ours)  # stock's is wrong
    for inside_first in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(softmax, backend="aot_eager")
        for inside in (inside_first, not inside_first, inside_first, not inside_first):
            with mg.override("nested") if inside else contextlib.nullcontext():
                torch.testing.assert_close(gradient(compiled), ours if inside else stocks)


def test_no_tracer_keeps_a_kernel_that_is_gone(tmp_path):
    """In a process of its own, in which PyTorch's tracer meets the operator before and after the first override."""
    program = """
import torch, torch_manualgrad as mg
def batch():
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged, requires_grad=True)
def padded():
    return torch.compile(lambda x: x.to_padded_tensor(0.0), backend="aot_eager", fullgraph=True)
if {before}:
    padded()(batch()).sum().backward()
f, x = padded(), batch()
with mg.override():
    print(torch.autograd.grad(f(x).sum(), x)[0].values().unique().item())
print(torch.autograd.grad(f(x).sum(), x)[0].values().unique().item())
"""
    for before in (True, False):
        done = run_python("-c", program.format(before=before), folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["1.0", "1.0"]


@pytest.mark.parametrize("tracked", [True, False], ids=["gradient", "none"])
def test_other_lengths_are_not_taken_for_the_same(tracked):
    """Six rows each, cut elsewhere: in a graph no offsets are read, but PyTorch's sizes tell."""

    def made(*lengths):
        components = [torch.ones(n, 3) for n in lengths]
        return torch.nested.nested_tensor(components, layout=torch.jagged, requires_grad=tracked)

    with mg.override("nested"):
        product = torch.compile(torch.mul, backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match="cannot call binary pointwise function"):
            product(made(2, 4), made(4, 2))


def test_no_more_graphs_than_without():
    """What is known of the lengths goes through, so that no call compiles again for its sake."""

    def graphs():
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        f = torch.compile(lambda x: F.gelu(x) * 2, backend=counter, dynamic=True)
        x = F.gelu(batch(True))
        for _ in range(3):
            x = f(x)
        return counter.frame_count

    stocks = graphs()
    with mg.override("nested"):
        assert graphs() == stocks


OF_OTHER_SIZES = {
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "amax": lambda x: x.amax(1),
    "max": lambda x: x.max(1).values,
    "var": lambda x: x.var(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "vector_norm": lambda x: x.norm(dim=1),
    "products": lambda x: torch.matmul(x.mT, x),
    "a matrix for each": lambda x: torch.matmul(x, x.sum(1)[:, :, None] * x.sum(1)[:, None]),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "one for each": lambda x: x * x.mean(1, keepdim=True),
    "select": lambda x: x[:, 0],
    "layers": lambda x: F.layer_norm(F.gelu(F.linear(x, WEIGHT[:4, :4])) + x, (4,)),
}


@pytest.mark.parametrize("name", OF_OTHER_SIZES)
def test_batches_of_other_sizes_share_a_graph(name):
    """Number and lengths of the components change from batch to batch: the first two compile, the others run."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    f = torch.compile(OF_OTHER_SIZES[name], backend=counter, fullgraph=True)
    for i, lengths in enumerate(((3, 2), (2, 2, 2), (4, 1, 4, 5), (7, 1, 1, 1, 2), (2, 9))):
        x = Ragged.from_components([random(n, 4, seed=n + i) for n in lengths]).requires_grad_()
        found, expected = f(x), OF_OTHER_SIZES[name](x)
        assert type(found) is type(expected)
        if isinstance(found, Ragged):
            found, expected = found.values, expected.values
        torch.testing.assert_close(found, expected, equal_nan=True)
        slopes = [torch.autograd.grad(y.sin().sum(), x.values)[0] for y in (found, expected)]
        torch.testing.assert_close(*slopes, equal_nan=True)  # the variance of one entry is nan
    assert counter.frame_count == 2
