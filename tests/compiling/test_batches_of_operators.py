"""The gradients of PyTorch's operators, compiled: a batch of them next to one after another.

PyTorch batches some operators wrongly that a traced graph calls, but the uncompiled function does not.
"""

import warnings

import pytest
import torch
from helpers.thinning import every, label
from torch.func import grad, vmap
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

import torch_manualgrad as mg

F64 = torch.float64


@pytest.fixture(autouse=True)
def compile_anew():
    torch.compiler.reset()


# PyTorch has no fake kernel that takes what the sample of max_pool2d_with_indices_backward passes
OPERATORS = [
    info
    for info in op_db
    if info.supports_autograd and F64 in info.dtypes and info.name != "max_pool2d_with_indices_backward"
]


def small(x):
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and x.is_floating_point() and x.numel() <= 400


def samples_of(info):
    for sample in list(info.sample_inputs("cpu", F64, requires_grad=False))[:40:9][:3]:
        if small(sample.input):
            yield sample, [x.detach() for x in (sample.input, *sample.args) if small(x)]


def called(info, sample, x, others):
    """The results that have a derivative."""
    given = iter(others)
    args = [next(given) if small(a) else a for a in sample.args]
    results = tree_leaves(info.op(x, *args, **sample.kwargs))
    return [y for y in results if isinstance(y, torch.Tensor) and (y.is_floating_point() or y.is_complex())]


def loss_of(info, sample):
    def loss(x, *others):
        total = torch.zeros((), dtype=F64)
        for y in called(info, sample, x, others):
            total = total + (y.abs() if y.is_complex() else y).square().sum()
        return total

    return loss


@pytest.mark.parametrize("info", every(25, OPERATORS), ids=label)
def test_a_batch_of_gradients(info):
    for sample, values in samples_of(info):
        batches = [torch.stack([x, 1.25 * x]) for x in values]
        loss, places = loss_of(info, sample), tuple(range(len(values)))
        with warnings.catch_warnings(), mg.override():
            warnings.simplefilter("ignore")
            try:
                vmap(grad(loss, places))(*batches)
                expected = [grad(loss, places)(*[b[i].clone() for b in batches]) for i in range(2)]
            except (RuntimeError, NotImplementedError, ValueError):  # PyTorch cannot batch it
                continue
            found = vmap(grad(mg.compile(loss, lowering="eager"), places))(*batches)
        for k in places:
            wanted = torch.stack([e[k] for e in expected])
            torch.testing.assert_close(found[k], wanted, rtol=1e-7, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("info", every(25, OPERATORS), ids=label)
def test_gradients_of_a_batch_of_cotangents(info):
    for sample, values in samples_of(info):

        def function(x, *others):
            return [y * 1 for y in called(info, sample, x, others)]  # noqa: B023

        def derivatives(call):
            xs = [x.clone().requires_grad_() for x in values]
            with torch.random.fork_rng():
                torch.manual_seed(0)
                ys = [y for y in call(*xs) if y.requires_grad]
                cotangents = [torch.randn(2, *y.shape, dtype=y.dtype) for y in ys]
            options = {"create_graph": True, "allow_unused": True}
            if not ys:  # such as a power of 0
                first = [None] * len(xs)
            elif call is function:
                rows = [torch.autograd.grad(ys, xs, [c[i] for c in cotangents], **options) for i in range(2)]
                first = [None if g[0] is None else torch.stack(g) for g in zip(*rows)]
            else:
                first = torch.autograd.grad(ys, xs, cotangents, is_grads_batched=True, **options)
            total = sum(g.square().sum() for g in first if g is not None and g.requires_grad)
            smooth = isinstance(total, torch.Tensor)
            second = torch.autograd.grad(total, xs, allow_unused=True) if smooth else [None] * len(xs)
            shapes = [*[(2, *x.shape) for x in xs], *[x.shape for x in xs]]
            return [
                torch.zeros(n, dtype=F64) if g is None else g for n, g in zip(shapes, (*first, *second), strict=True)
            ]

        with warnings.catch_warnings(), mg.override():
            warnings.simplefilter("ignore")
            try:
                expected = derivatives(function)
                derivatives(lambda *xs: function(*xs))
            except (RuntimeError, NotImplementedError, ValueError):  # PyTorch cannot batch it
                continue
            found = derivatives(mg.compile(function, lowering="eager"))
        for f, e in zip(found, expected, strict=True):
            torch.testing.assert_close(f, e, rtol=1e-7, atol=1e-9, equal_nan=True)
