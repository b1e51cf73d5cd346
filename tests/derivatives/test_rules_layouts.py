"""Dtypes, sizes and strides: those that formulas announce are those of their results, and gradients have PyTorch's."""

import contextlib
import itertools
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers.thinning import every, label
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import torch_manualgrad as mg

# -- what an opaque formula announces: the compiler plans by it, and views of results break where strides are others --

OPAQUE = [r for r in mg.rules.values() if any(f.kernels or f.in_python for f in r.formulas)]
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: reversed_in_memory(x, 0),
    "rows": lambda x: reversed_in_memory(x, 1),
}
SAMPLES = 6


def reversed_in_memory(x, kept):
    """The same values, the dimensions in the opposite order in memory, except for so many of the last."""
    n = max(x.dim() - kept, 0)
    order = [*reversed(range(n)), *range(n, x.dim())]
    return x.permute(order).contiguous().permute(order)


def spread(found):
    return found[:: -(-len(found) // SAMPLES)]


def facts(x):
    """The stride of a dimension of size 0 or 1 has no meaning."""
    strides = tuple(n for n, size in zip(x.stride(), x.shape) if size > 1) if x.numel() else ()
    return x.dtype, tuple(x.shape), strides


class Compared(TorchDispatchMode):
    """Runs each of the package's operators on fake tensors, too."""

    def __init__(self):
        super().__init__()
        self.faults = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        real = func(*args, **kwargs)
        dense = all(x.layout is torch.strided for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        if func.namespace == "manualgrad" and dense:
            with FakeTensorMode() as mode:
                fake_args, fake_kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
                fake = func(*fake_args, **fake_kwargs)
            for i, (r, f) in enumerate(zip(tree_leaves(real), tree_leaves(fake), strict=True)):
                if isinstance(r, torch.Tensor) and facts(r) != facts(f):
                    self.faults[str(func), i] = f"says {facts(f)}, gives {facts(r)}"
        return real


def differentiate(probe, args, kwargs, layout):
    """Twice, with cotangents of this layout."""

    def leaf(x):
        return layout(x.detach()).requires_grad_() if x.is_floating_point() or x.is_complex() else x

    args, kwargs = tree_map_only(torch.Tensor, leaf, (args, kwargs))
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
    outputs = tree_leaves(probe(*args, **kwargs))
    for _ in range(2):
        outputs = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
        if not outputs:
            return
        cotangents = [layout(torch.ones_like(o)) for o in outputs]
        outputs = torch.autograd.grad(outputs, inputs, cotangents, create_graph=True, allow_unused=True)


@pytest.mark.parametrize("rule", every(2, OPAQUE), ids=label)
def test_formulas_return_the_declared_shapes(rule):
    faults, ran = {}, 0
    for sample in spread(list(rule.samples(torch.float64, "cpu"))):
        for name, layout in LAYOUTS.items():
            with mg.override(rule), Compared() as mode, suppress(RuntimeError, NotImplementedError):
                # some operators refuse a layout, or have no derivative for each input
                differentiate(rule.probe, sample.args, sample.kwargs, layout)
                ran += 1
            faults |= {(name, *at): fault for at, fault in mode.faults.items()}
    assert ran
    assert not faults, faults


# -- the first gradient has the strides that PyTorch gives it, under every override -----------------------------------

ZEROS, ONES = torch.zeros(4), torch.ones(4)
SHAPES = {torch.channels_last: (2, 4, 6, 6), torch.channels_last_3d: (2, 4, 2, 6, 6)}
FUNCTIONS = {
    "group_norm": lambda x: F.group_norm(x, 2),
    "group_norm, affine": lambda x: F.group_norm(x, 2, ONES, ZEROS),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch_norm, evaluation": lambda x: F.batch_norm(x, ZEROS, ONES),
    "instance_norm": F.instance_norm,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "normalize": F.normalize,
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "gelu": F.gelu,
    "silu": F.silu,
    "elu": F.elu,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "glu": lambda x: F.glu(x, 1),
    "product": lambda x: x * x,
    "pow": lambda x: x.abs() ** 1.5,
    "atan2": lambda x: torch.atan2(x, x + 3),
    "hypot": lambda x: torch.hypot(x, x),
    "where": lambda x: torch.where(x > 0, x, 0),
    "clamp": lambda x: x.clamp(0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0),
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean((2, 3)),
    "amax": lambda x: x.amax(1),
    "max": lambda x: x.max(1)[0],
    "sort": lambda x: x.sort(1)[0],
    "std": lambda x: x.std(1),
    "norm": lambda x: x.norm(dim=1),
    "vector_norm": torch.linalg.vector_norm,
    "cumsum": lambda x: x.cumsum(1),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "index": lambda x: x[:, [0, 1]],
    "flip": lambda x: x.flip(2),
    "roll": lambda x: x.roll(1, 2),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() + 1),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.detach() + 2),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
}
OF_IMAGES = {
    "conv2d": lambda x: F.conv2d(x, torch.ones(4, 4, 3, 3)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, torch.ones(4, 4, 3, 3)),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 3),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 3),
    "lp_pool2d": lambda x: F.lp_pool2d(x, 2, 2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "grid_sample": lambda x: F.grid_sample(x, torch.zeros(2, 5, 5, 2), align_corners=False),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(2, 6, 6, dtype=torch.long)),
}


def strides(f, layout, override):
    """Of the result and of the gradient, for a cotangent in channels last."""
    shape = SHAPES[layout]
    x = torch.linspace(-2, 3, torch.Size(shape).numel()).reshape(shape)
    x = x.contiguous(memory_format=layout).requires_grad_()
    with override():
        y = f(x)
        g = torch.ones(y.shape)
        g = g.contiguous(memory_format=layout) if y.dim() == len(shape) else g
        (of_x,) = torch.autograd.grad(y, x, g)
    return y.stride(), of_x.stride()


CASES = [(name, f, layout) for layout in SHAPES for name, f in FUNCTIONS.items()]
CASES += [(name, f, torch.channels_last) for name, f in OF_IMAGES.items()]


@pytest.mark.parametrize(("name", "f", "layout"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_gradients_keep_channels_last_as_pytorchs_do(name, f, layout):
    stock = strides(f, layout, contextlib.nullcontext)
    assert strides(f, layout, mg.override) == strides(f, layout, lambda: mg.override("*")) == stock


# -- reductions -------------------------------------------------------------------------------------------------------


def reductions():
    """Name -> reduction, along dims and of everything."""
    several = ("sum", "mean", "nansum", "nanmean", "amax", "amin", "std", "var", "std_mean", "var_mean", "logsumexp")
    one = ("prod", "max", "min", "median", "nanmedian", "aminmax")
    scans = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
    for name in (*several, *one):
        for dim in (1, -1, 0, (2, 3)) if name in several else (1, -1, 0):
            for keepdim in (False, True):
                yield f"{name}, {dim}{', kept' * keepdim}", partial(getattr(torch, name), dim=dim, keepdim=keepdim)
        if name not in ("amax", "amin", "logsumexp"):
            yield f"{name} of all", getattr(torch, name)
    for name in scans:
        for dim in (1, -1):
            yield f"{name}, {dim}", partial(getattr(torch, name), dim=dim)
    for p in (1, 2, 3, torch.inf):
        for dim in (1, None):
            yield f"vector_norm {p}, {dim}", partial(torch.linalg.vector_norm, ord=p, dim=dim)
            yield f"norm {p}, {dim}", partial(torch.norm, p=p, dim=dim)
        yield f"dist {p}", lambda x, p=p: torch.dist(x, x.detach() + 1, p)
    yield "renorm", lambda x: x.renorm(2, 1, 1.5)
    yield "mode", lambda x: x.mode(1)[0]
    yield "kthvalue", lambda x: x.kthvalue(2, 1)[0]
    yield "segment_reduce", lambda x: torch.segment_reduce(x, "prod", lengths=torch.tensor([2]))


def inputs():
    """Name -> x."""
    x = torch.linspace(-2, 3, 120).reshape(2, 4, 3, 5)
    image = x.contiguous(memory_format=torch.channels_last)
    yield "contiguous", x
    yield "channels last", image
    yield "channels last, a zero", image * (image > -2)
    yield "transposed", x.mT.contiguous().mT
    yield "first dims transposed", x.transpose(0, 1).contiguous().transpose(0, 1)
    yield "every second", torch.stack([x, x], -1)[..., 0]
    yield "expanded", x[:, :1].expand(-1, 4, -1, -1)


def strides_of_gradient(f, x, override):
    x = x.detach().requires_grad_()
    with override():
        y = f(x)
        tracked = [t for t in ([y] if isinstance(y, torch.Tensor) else y) if t.requires_grad]
        return torch.autograd.grad(tracked, x, [torch.ones(t.shape) for t in tracked])[0].stride()


@pytest.mark.parametrize(("name", "f"), list(reductions()), ids=lambda x: x if isinstance(x, str) else "")
def test_gradients_of_reductions_have_the_strides_of_pytorchs_or_of_the_input(name, f):
    for layout, x in inputs():
        allowed = strides_of_gradient(f, x, contextlib.nullcontext), torch.empty_like(x).stride()
        for override in (mg.override, lambda: mg.override("*")):
            assert strides_of_gradient(f, x, override) in allowed, layout


@pytest.mark.parametrize("rules", [(), ("*",)])
@pytest.mark.parametrize(
    "function",
    [
        torch.prod,
        torch.sin,
        torch.linalg.pinv,
        torch.linalg.det,
        torch.norm,
        lambda x: torch.cumprod(x, 0),
        lambda x: torch.logcumsumexp(x, 0),
        lambda x: torch.nn.functional.layer_norm(x, (3,)),
    ],
)
def test_second_derivatives_at_a_lazy_negation(function, rules):
    """PyTorch cannot take a view of one that has a tangent."""
    x = torch.randn(3, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)).conj().imag
    assert x.is_neg()
    v = torch.ones_like(x.clone())

    def rev(f):
        return torch.func.grad(lambda x: f(x).sin().sum())

    def fwd(f):
        return lambda x: torch.func.jvp(f, (x,), (v,))[1]

    with mg.override(*rules):
        for outer, inner in itertools.product((rev, fwd), repeat=2):
            derivative = outer(inner(function))
            torch.testing.assert_close(derivative(x), derivative(x.clone()))
