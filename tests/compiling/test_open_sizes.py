"""Functions that Dynamo compiles for open sizes: one graph of each order serves all of them."""

import gc
import itertools
import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import modes
from helpers.tensors import same
from torch import nn

import torch_manualgrad as mg
from torch_manualgrad.compiling import calls, function as functions
from torch_manualgrad.compiling.program import Program
from torch_manualgrad.core.rule import reached

F64 = torch.float64


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    torch.manual_seed(0)


@pytest.fixture
def lowered(monkeypatch):
    """The functions that are lowered, by name, as often as that happens."""
    seen, lower = [], functions.lowerings["eager"]

    def counted(function):
        seen.append(function.name)
        return lower(function)

    monkeypatch.setitem(functions.lowerings, "eager", counted)
    return seen


def compiled(function, **options):
    return mg.compile(function, **{"lowering": "eager", "fullgraph": True, **options})


def points(*shape):
    return torch.randn(*shape, dtype=F64)


net = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.SiLU(), nn.Linear(5, 2)).double()
block = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True).double()
convolution = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(2)).double()


def distances(x):
    r = (x[:, None] - x).pow(2).sum(-1) + torch.eye(len(x), dtype=x.dtype)
    return torch.exp(-r.sqrt()).sum(1)


def attention(q, k):
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, k.sin(), attn_mask=mask)


def in_pieces(x):
    first, second = x.split([x.shape[0] // 2, x.shape[0] - x.shape[0] // 2])
    return torch.cat([second.sin(), first * 2]).reshape(-1, 1) * x.shape[0]


def agree(f, function, values, mode):
    found = modes.derivatives(f, values, mode)
    with mg.override():  # stock's own are not all right
        same(found, modes.derivatives(function, values, mode))


#: Name: a function, and its inputs for a size.
FUNCTIONS = {
    "mlp": (net, lambda n: (points(n, 3),)),
    "transformer": (block, lambda n: (points(2, n, 4),)),
    "convolution": (convolution, lambda n: (points(n, 2, n + 3, 8),)),
    "distances": (distances, lambda n: (points(n, 3),)),
    "attention": (attention, lambda n: (points(2, n, 4), points(2, n + 1, 4))),
    "in pieces": (in_pieces, lambda n: (points(n, 3),)),
    "matrix product": (lambda a, b: (a @ b).tanh() / a.shape[1], lambda n: (points(n, n + 2), points(n + 2, 3))),
    "linear": (lambda x, w: x @ w, lambda n: (points(n, 3), points(3, 4))),
    "sum of a part": (lambda x: x[1:].cumsum(0) * x[:-1].detach(), lambda n: (points(n, 3),)),
    "softmax": (lambda x: F.softmax(x, -1).flatten(), lambda n: (points(3, n),)),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=-1), lambda n: (points(n, n),)),
    "scatter": (
        lambda x: x.new_zeros(len(x), 2).index_add(0, torch.arange(len(x)), x[:, :2]),
        lambda n: (points(n, 3),),
    ),
    "embedding": (lambda w: F.embedding(torch.arange(w.shape[0]) % 3, w).pow(2), lambda n: (points(n, 3),)),
    "sum": (lambda x: x.sum(0) * 2, lambda n: (points(n, 3),)),
    "transposed": (lambda x: x.sin() * 2, lambda n: (points(3, n).t(),)),
}
SIZES = (11, 7, 13, 17)  # which no fixed size equals: Dynamo would take both for one


FAST = {("sum", "revrevrev"), *((name, "revrev") for name in FUNCTIONS if name not in ("transformer", "convolution"))}
CASES = [
    pytest.param(*case, marks=[] if case in FAST else [pytest.mark.slow])
    for case in itertools.product(FUNCTIONS, ["rev", "revrev", "revrevrev"])
]


@pytest.mark.parametrize("name, mode", CASES)
def test_all_sizes_with_one_graph_of_each_order(name, mode, lowered):
    function, inputs = FUNCTIONS[name]
    f = compiled(function, dynamic=True)
    counts = []
    for n in SIZES:
        values = inputs(n)
        agree(f, function, values, mode)
        counts.append(len(lowered))
    # only the first calls: after a call with further derivatives the forward is lowered anew, to keep what they need
    assert counts[-1] == counts[-2], f"{name}: {lowered[counts[-2] :]}"


@pytest.mark.skipif(reached("2.15"), reason="Dynamo of this torch takes no dual tensors")
@pytest.mark.parametrize("mode", ["fwd", "fwdrev", "fwdfwd", "revfwd"])
@pytest.mark.parametrize("name", ["in pieces", pytest.param("attention", marks=pytest.mark.slow), "norm"])
def test_forward_mode(name, mode):
    function, inputs = FUNCTIONS[name]
    f = compiled(function, dynamic=True)
    for n in SIZES[:2]:
        values = inputs(n)
        agree(f, function, values, mode)


@pytest.mark.parametrize("name", ["distances", *(pytest.param(n, marks=pytest.mark.slow) for n in FUNCTIONS)])
def test_inductor(name):
    function, inputs = FUNCTIONS[name]
    f = compiled(function, dynamic=True, lowering="inductor")
    for n in SIZES:
        values = inputs(n)
        for mode in ("rev", "revrev"):
            agree(f, function, values, mode)


def test_dropout_and_writes_to_inputs():
    def f(x, total):
        total.add_(x.detach().sum(0))
        kept = F.dropout(x, 0.5) + torch.rand(x.shape[0], 1, dtype=F64)
        return (kept * kept).view(-1)

    g = compiled(f, dynamic=True)

    def run(call, n):
        torch.manual_seed(n)
        x, total = points(n, 3).requires_grad_(), points(3)
        y = call(x, total)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y, first, torch.autograd.grad(first.sin().sum(), x)[0], total

    for n in SIZES:
        same(run(g, n), run(f, n))


def test_views_and_numbers_among_the_outputs():
    def f(x, n):
        y = x.sin()
        return x.reshape(-1, n), y, y[n // 2 :], x.shape[0] * n, n

    g = compiled(f, dynamic=True)
    for n in SIZES:
        x = points(3, n)
        view, y, rest, *numbers = g(x, n)
        assert numbers == [3 * n, n] and view.shape == (3, n)
        view[0, 0] = y[-1, -1] = 7
        assert x[0, 0] == 7 and rest.shape == y[n // 2 :].shape
        same(f(x, n)[1][0], g(x, n)[1][0])


@pytest.mark.parametrize("k", [2, 5, -3])
def test_a_number_that_is_no_tensors_size(k, lowered):
    def f(x, k):
        return (x * k).sum() + torch.ones(abs(k), dtype=x.dtype).sum()

    g, x = compiled(f, dynamic=True), points(3).requires_grad_()
    for n in (k, k + (1 if k > 0 else -1), 3 * k):
        same(torch.autograd.grad(g(x, n), x), torch.autograd.grad(f(x, n), x))
        same(g(x, n), f(x, n))


def test_a_number_that_varies(lowered):
    def f(x, scale):
        return (x * scale).sin() / scale

    g, x = compiled(f), points(3).requires_grad_()
    counts = []
    for k in range(14):
        scale = 1.5 - k
        y, z = g(x, scale), f(x, scale)
        same([y, *torch.autograd.grad(y.sum(), x)], [z, *torch.autograd.grad(z.sum(), x)])
        counts.append(len(lowered))
    assert counts[-1] == counts[-4]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)])
def test_arrays_of_numpy(shape, dynamic):
    def f(x, a):
        return (x.sum() * torch.from_numpy(a)).sin() * a.size, np.cos(a)

    g, x = compiled(f, dynamic=dynamic), points(3).requires_grad_()
    for k in range(10):  # more than the values of a number that are constants
        a = np.full(shape, 0.5 + k)
        (y, b), (z, c) = g(x, a), f(x, a)
        found, expected = (torch.autograd.grad(out.sum(), x, create_graph=True) for out in (y, z))
        same(
            [y, *found, *torch.autograd.grad(found[0].sum(), x)],
            [z, *expected, *torch.autograd.grad(expected[0].sum(), x)],
        )
        np.testing.assert_allclose(b, c, rtol=1e-12)


def test_a_number_that_varies_and_cannot_be_a_tensor(lowered):
    functions_of = [
        lambda x, c: (x.long() * c + x).sin(),  # float32 with a number, float64 with a tensor
        lambda x, c: torch.add(x, x.sin(), alpha=c) + torch.full((3,), c),
    ]
    for f in functions_of:
        g = compiled(f)
        for k in range(14):
            x = torch.randn(5, 3, requires_grad=True)
            same(torch.autograd.grad(g(x, k + 0.5).sum(), x), torch.autograd.grad(f(x, k + 0.5).sum(), x))


@pytest.mark.parametrize("dynamic", [None, True])  # with False, Dynamo takes 0.0 and -0.0 for one
def test_zeros_of_both_signs_and_nan_are_numbers_of_their_own(dynamic, lowered):
    def f(x, k):
        return torch.atan2(x * k, -x.abs()) / (x.abs() + 1)

    g, x = compiled(f, dynamic=dynamic), points(4).requires_grad_()
    for k in (1.0, 2.0, 0.0, -0.0, 0.0, -0.0, float("nan")):
        found, expected = ([call(x, k), *torch.autograd.grad(call(x, k).sum(), x)] for call in (g, f))
        same(found, expected, equal_nan=True)
    count = len(lowered)
    g(x, float("nan"))
    assert len(lowered) == count


@pytest.mark.parametrize("f", [lambda x, k: F.leaky_relu(x, k), lambda x, k: torch.add(x.sin(), x, alpha=k)])
def test_a_number_that_varies_and_has_to_be_a_number(f, monkeypatch):
    g, made, init = compiled(f, dynamic=True), [], Program.__init__
    monkeypatch.setattr(Program, "__init__", lambda *args, **kwargs: made.append(1) or init(*args, **kwargs))
    for k in range(12):
        x = points(5 + k % 3).requires_grad_()
        same(torch.autograd.grad(g(x, 0.1 * k + 0.1).sum(), x), torch.autograd.grad(f(x, 0.1 * k + 0.1).sum(), x))
    count = len(made)
    g(x, 0.1 * k + 0.1)
    assert len(made) == count, "the last value has a program"


def test_comparisons_of_sizes_among_the_outputs():
    def f(x):
        return x * 2, x.shape[0] > 3, x.shape[0] / 2, x.shape[0] == 5

    g = compiled(f, dynamic=True)
    for n in (3, 5, 4, 3):
        for x in (points(n), points(n).requires_grad_()):
            assert g(x)[1:] == f(x)[1:] == (n > 3, n / 2, n == 5)
            same(g(x)[0], f(x)[0])


@pytest.mark.parametrize("name", ["distances", "softmax", "matrix product"])
def test_transforms(name):
    function, inputs = FUNCTIONS[name]
    f = compiled(function, dynamic=True)
    gradient = lambda call: torch.func.grad(lambda *xs: call(*xs).sin().sum())  # noqa: E731
    for n in SIZES[:2]:
        values = inputs(n)
        batch = [torch.stack([v, v + 1, v * 2]) for v in values]
        for transform, given in (
            (torch.func.jacrev, values),
            (torch.func.jacfwd, values),
            (torch.func.vmap, batch),
            (lambda call: torch.func.vmap(gradient(call)), batch),
        ):
            same(transform(f)(*given), transform(function)(*given))


def test_some_cotangents():
    """Zeros that stand for the others have open sizes too."""
    functions_of = [lambda x: (x.cumsum(0), x.sin(), x.sum()), lambda x: (x.sum(), torch.linalg.lu(x @ x.T)[1].sin())]
    for f in functions_of:
        g = compiled(f, dynamic=True)
        for n, k in zip(SIZES, (0, 1, 0, 1)):
            x = points(n, n).requires_grad_()
            gradients = [torch.autograd.grad(call(x)[k].sum(), x, create_graph=True)[0] for call in (g, f)]
            same(*gradients)
            if k:
                same(*[torch.autograd.grad(h.sin().sum(), x)[0] for h in gradients])


def test_a_derivative_that_assumes_something_of_the_size():
    """The assumption is made while calls of other sizes wait for their backward: these have graphs of their own."""

    def f(x):
        y = x.sin()
        return y.reshape(y.shape[0], -1).cumsum(0)

    program_level = compiled(f, dynamic=True)
    waiting = []
    for n in SIZES:
        x = points(n, 2).requires_grad_()
        waiting.append((x, program_level(x)))
    size = _sizes_of_the_only_program().numbers[0]
    assert size > SIZES[1]  # what a trace does where a formula asks
    for x, y in waiting:
        (g,), (h,) = (torch.autograd.grad(o.sin().sum(), x, create_graph=True) for o in (y, f(x)))
        same([g, *torch.autograd.grad(g.sin().sum(), x)], [h, *torch.autograd.grad(h.sin().sum(), x)])


def _sizes_of_the_only_program():
    gc.collect()
    found = {id(f.sizes): f.sizes for f in calls.functions.values() if f.places}
    assert len(found) == 1
    return next(iter(found.values()))


def test_a_derivative_that_is_another_one_for_short_tensors():
    """A graph that is traced for one size is wrong for others: the first derivative's, and that of the second, which is
    traced while calls of all sizes wait."""

    def factor(x):
        return 2.0 if x.shape[0] > 9 else 3.0

    @mg.custom_op("open_sizes::square(Tensor x) -> Tensor")
    def square(x):
        return x * x  # without the factor, of which Dynamo would see that it depends on the size

    @mg.custom_op("open_sizes::slope(Tensor g, Tensor x) -> Tensor")
    def slope(g, x):
        return 2 * g * x

    for op in (square, slope):
        op.impl_save_for_backward(lambda inputs, output: tuple(inputs))
    square.impl_backward(lambda ctx, saved, grad: {"x": slope(grad, saved[0])})
    slope.impl_backward(
        lambda ctx, saved, grad: {"g": 2 * factor(grad) * grad * saved[1], "x": 2 * factor(grad) * grad * saved[0]}
    )
    f = lambda x: slope(x.sin(), square(x).cos())  # noqa: E731
    for waits in (True, False):
        torch.compiler.reset()
        compiled_square, compiled_f = compiled(square, dynamic=True), compiled(f, dynamic=True)
        compiled_f(points(SIZES[0]))
        inputs = [points(n).requires_grad_() for n in SIZES]
        calls = [(x, compiled_square(x), square(x)) for x in inputs] if waits else []
        for x, found, expected in calls:
            (g,), (h,) = (torch.autograd.grad(y.sum(), x, create_graph=True) for y in (found, expected))
            same([g, *torch.autograd.grad(g.sin().sum(), x)], [h, *torch.autograd.grad(h.sin().sum(), x)])
        for x in inputs:
            same(torch.autograd.grad(compiled_f(x).sum(), x), torch.autograd.grad(f(x).sum(), x))


def test_the_batch_of_a_laplacian():
    """Taylor series take no open sizes: each size is compiled."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh()).to(torch.float64)
    laplacian = mg.forward_ad.laplacian(net, batch_dims=1)
    compiled = mg.compile(lambda x: laplacian(x), lowering="eager", fullgraph=True)
    for n in (5, 6, 7):
        x = torch.linspace(-1, 1, 2 * n, dtype=torch.float64).view(n, 2)
        torch.testing.assert_close(compiled(x), laplacian(x), rtol=1e-12, atol=1e-12)


def test_an_operator_that_takes_no_open_sizes_logs_nothing():
    """PyTorch logs the traceback of an error of a fake kernel, which is handled here."""
    logged = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = logged.append
    of_fakes = logging.getLogger("torch._subclasses.fake_tensor")

    def f(K, y):
        return (y * torch.cholesky_solve(y, torch.linalg.cholesky(K))).sum()

    g = compiled(f, dynamic=True)
    of_fakes.addHandler(handler)
    try:
        for n in (3, 4, 5):
            x = points(n, 2)
            found, expected = (torch.func.grad(h)(x @ x.T + torch.eye(n), x[:, :1]) for h in (g, f))
            same([found], [expected])
    finally:
        of_fakes.removeHandler(handler)
    assert not logged


SIZES_COMPUTED = {
    "factors": (torch.linalg.lu, lambda n: points(n, n + 2)),
    "values": (lambda a: (torch.linalg.svdvals(a),), lambda n: points(n - 5, n + 2, n)),
    "interpolation": (
        lambda x: (F.interpolate(x, scale_factor=1.7, mode="bicubic").sin(),),
        lambda n: points(1, 1, n, n),
    ),
}


@pytest.mark.parametrize("name", SIZES_COMPUTED)
def test_sizes_that_are_a_minimum_of_others(name):
    """Also those of the zeros for cotangents that are left out, and in batches of gradients, which close the sizes."""
    function, inputs = SIZES_COMPUTED[name]

    def derivatives(f, x, cotangents):
        x = x.clone().requires_grad_()
        found, ys = [], [y for y in f(x) if y.requires_grad]
        for y, c in zip(ys, cotangents):
            (first,) = torch.autograd.grad(y, x, c[0], create_graph=True)
            found += [first, *torch.autograd.grad(first.pow(2).sum(), x, retain_graph=True, materialize_grads=True)]
            (batch,) = torch.autograd.grad(y, x, c, is_grads_batched=True, create_graph=True)
            found += [batch, *torch.autograd.grad(batch.pow(2).sum(), x, retain_graph=True, materialize_grads=True)]
        return found

    f = compiled(function, dynamic=True)
    for n in SIZES[:2]:
        x = inputs(n)
        cotangents = [points(2, *y.shape) for y in function(x.clone().requires_grad_()) if y.requires_grad]
        with mg.override():
            expected = derivatives(function, x, cotangents)
        torch.testing.assert_close(derivatives(f, x, cotangents), expected)
