"""A result shares memory with an argument where PyTorch's does, and a write to either is seen in the other, with gradients.

Every operator that the nested rules replace, on tensors of both layouts, contiguous, transposed, with holes, views of a
buffer or not. The truth of a gradient is the central difference of the program, as PyTorch runs it where it does.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.core.override.compiled_nested import differentiates_views
from torch_manualgrad.core.override.replacements import replacements
from torch_manualgrad.nested.backward import BACKWARD

MATRIX, BIAS, LINES = random(4, 4, seed=5), random(4, seed=6), random(2, 4, 3, seed=7)

# by the aten name; the dims of an argument are (2, *, 4), or (2, 4, *) where it is transposed
CALLS = {
    "matmul": lambda x: x @ MATRIX,
    "bmm": lambda x: torch.bmm(x, LINES),
    "linear": lambda x: F.linear(x, MATRIX, BIAS),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(*[heads(x)] * 3),
    "sum": lambda x: x.sum(),
    "sum.dim_IntList": lambda x: x.sum(-1, keepdim=True),
    "nansum": lambda x: x.nansum(),
    "nanmean": lambda x: x.nanmean(),
    "mean": lambda x: x.mean(),
    "mean.dim": lambda x: x.mean(-1, keepdim=True),
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(-1),
    "max": lambda x: x.max(),
    "max.dim": lambda x: x.max(-1)[0],
    "min": lambda x: x.min(),
    "min.dim": lambda x: x.min(-1)[0],
    "prod": lambda x: x.prod(),
    "prod.dim_int": lambda x: x.prod(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "norm.Scalar": lambda x: torch.ops.aten.norm.Scalar(x, 2),
    "norm.ScalarOpt_dim": lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [-1]),
    "var": lambda x: torch.ops.aten.var(x),
    "var.dim": lambda x: torch.ops.aten.var.dim(x, [-1]),
    "var.correction": lambda x: x.var(-1),
    "std": lambda x: torch.ops.aten.std(x),
    "std.dim": lambda x: torch.ops.aten.std.dim(x, [-1]),
    "std.correction": lambda x: x.std(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "softmax.int": lambda x: x.softmax(-1),
    "log_softmax.int": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (4,), BIAS, BIAS),
    "rms_norm": lambda x: F.rms_norm(x, (4,), BIAS),
    "gelu": F.gelu,
    "relu": F.relu,
    "threshold": lambda x: F.threshold(x, 0.1, 0.2),
    "silu": F.silu,
    "leaky_relu": F.leaky_relu,
    "hardtanh": F.hardtanh,
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "softplus": F.softplus,
    "mish": F.mish,
    "glu": F.glu,
    "hardsigmoid": F.hardsigmoid,
    "i0": torch.i0,
    "logit": lambda x: torch.logit(x, 1e-3),
    "sinc": torch.sinc,
    "special_erfcx": torch.special.erfcx,
    "special_i0e": torch.special.i0e,
    "special_i1": torch.special.i1,
    "special_i1e": torch.special.i1e,
    "special_log_ndtr": torch.special.log_ndtr,
    "dropout": lambda x: torch.dropout(x, 0.5, False),
    "add.Tensor": lambda x: x + x,
    "sub.Tensor": lambda x: x - BIAS,
    "mul.Tensor": lambda x: x * BIAS,
    "div.Tensor": lambda x: x / BIAS,
    "div.Tensor_mode": lambda x: torch.div(x, 2.0, rounding_mode="floor") + x,
    "add.Scalar": lambda x: torch.ops.aten.add.Scalar(x, 2.0),
    "sub.Scalar": lambda x: torch.ops.aten.sub.Scalar(x, 2.0),
    "mul.Scalar": lambda x: torch.ops.aten.mul.Scalar(x, 2.0),
    "div.Scalar": lambda x: torch.ops.aten.div.Scalar(x, 2.0),
    "div.Scalar_mode": lambda x: torch.ops.aten.div.Scalar_mode(x, 2.0, rounding_mode=None),
    "reciprocal": lambda x: 1 / x,
    "rsub.Tensor": lambda x: torch.rsub(x, BIAS),
    "rsub.Scalar": lambda x: torch.rsub(x, 2.0),
    "pow.Tensor_Tensor": lambda x: x.abs() ** BIAS,
    "pow.Tensor_Scalar": lambda x: x**2,
    "pow.Scalar": lambda x: 2**x,
    "maximum": lambda x: torch.maximum(x, BIAS),
    "minimum": lambda x: torch.minimum(x, BIAS),
    "max.other": lambda x: torch.max(x, BIAS),
    "min.other": lambda x: torch.min(x, BIAS),
    "select.int": lambda x: x.select(0, 1),
    "select.int, last": lambda x: x.select(0, -1),
    "select.int, dense": lambda x: x.select(-1, 1),
    "slice.Tensor": lambda x: x[..., 1:3],
    "slice.Tensor, batch": lambda x: x[1:],
    "narrow": lambda x: x.narrow(-1, 1, 2),
    "narrow, batch": lambda x: x.narrow(0, 1, 1),
    "split.Tensor": lambda x: x.split(2, -1),
    "split.Tensor, batch": lambda x: x.split(1, 0),
    "split.sizes": lambda x: torch.ops.aten.split.sizes(x, [1, 3], -1),
    "split_with_sizes": lambda x: x.split_with_sizes([1, 3], -1),
    "chunk": lambda x: x.chunk(2, -1),
    "chunk, batch": lambda x: x.chunk(2, 0),
    "unbind.int": lambda x: x.unbind(),
    "unbind.int, dense": lambda x: x.unbind(-1),
    "transpose.int": lambda x: x.transpose(1, 2),
    "contiguous": lambda x: x.contiguous(),
    "clone": lambda x: x.clone(memory_format=torch.contiguous_format),
    "view_as_real": lambda x: torch.view_as_real(x.cdouble()),
    "view": lambda x: x.view(2, x.size(1) if x.layout is torch.jagged else -1, 2, 2),
    "reshape": lambda x: x.reshape(2, x.size(1) if x.layout is torch.jagged else -1, 2, 2),
    "to_padded_tensor": lambda x: x.to_padded_tensor(0.0),
    "values": lambda x: torch.ops.aten.values(x),
    "atan2": lambda x: torch.atan2(x, x + 1),
    "copysign.Scalar": lambda x: torch.ops.aten.copysign.Scalar(x, 2.0),
    "copysign.Tensor": lambda x: torch.copysign(x, x + 1),
    "hypot": lambda x: torch.hypot(x, x + 1),
    "logaddexp": lambda x: torch.logaddexp(x, x + 1),
    "logaddexp2": lambda x: torch.logaddexp2(x, x + 1),
    "nextafter": lambda x: torch.nextafter(x, x + 1),
    "sgn": torch.sgn,
    "special_xlog1py": lambda x: torch.special.xlog1py(x, x.abs() + 1),
    "special_xlog1py.other_scalar": lambda x: torch.special.xlog1py(x, 2.0),
    "special_xlog1py.self_scalar": lambda x: torch.special.xlog1py(2.0, x.abs() + 1),
    "xlogy.Scalar_Other": lambda x: torch.xlogy(x, 2.0),
    "xlogy.Scalar_Self": lambda x: torch.xlogy(2.0, x.abs() + 1),
    "xlogy.Tensor": lambda x: torch.xlogy(x, x.abs() + 1),
    "_nested_get_values": lambda x: x.values(),
    "_nested_view_from_jagged": lambda x: torch.nested.nested_tensor_from_jagged(x.values(), torch.tensor([0, 3, 5])),
}

# PyTorch's own backward of these may end the process, or read memory that is not the tensor's
ABORTS = [
    ("split_with_sizes", "jagged"),
    ("split.sizes", "jagged"),
    ("select.int, last", "strided"),
    ("select.int, dense", "strided"),
]


def heads(x):
    """(2, 1, *, 4), of (2, *, 4)."""
    return x.unsqueeze(-2).transpose(1, 2)


def strided_view(v):
    sizes, strides = torch.tensor([[2, 4], [3, 4]]), torch.tensor([[4, 1], [4, 1]])
    return torch._nested_view_from_buffer(v.reshape(-1)[:20], sizes, strides, torch.tensor([0, 8]))


OFFSETS, LENGTHS = torch.tensor([0, 2, 5]), torch.tensor([1, 2])
# functions of a buffer (5, 4)
INPUTS = {
    "strided": lambda v: torch.nested.as_nested_tensor([v[:2], v[2:]]) * 1,
    "strided, view": strided_view,
    "strided, transposed": lambda v: (torch.nested.as_nested_tensor([v[:2], v[2:]]) * 1).transpose(1, 2),
    "jagged": lambda v: torch.nested.nested_tensor_from_jagged(v * 1, OFFSETS) * 1,
    "jagged, view": lambda v: torch.nested.nested_tensor_from_jagged(v, OFFSETS),
    "jagged, transposed": lambda v: torch.nested.nested_tensor_from_jagged(v, OFFSETS).transpose(1, 2),
    "jagged, holes": lambda v: torch.nested.nested_tensor_from_jagged(v, OFFSETS, LENGTHS),
}


def buffers(tree):
    """The dense tensors of a result, or of components."""
    if isinstance(tree, (list, tuple)):
        return [b for t in tree for b in buffers(t)]
    if not tree.is_nested:
        return [tree]
    return list(tree.unbind())


def number(tree):
    """A number that depends on every entry of every component."""
    total = 0.0
    for i, b in enumerate(buffers(tree)):
        total = total + (b * torch.arange(1.0, b.numel() + 1, dtype=b.dtype).sin().reshape(b.shape)).sum() * (i + 1)
    return total


def first(tree):
    return first(tree[0]) if isinstance(tree, (list, tuple)) else tree


def storage(x):
    return (x._values if x.layout is torch.jagged else x).untyped_storage().data_ptr()


def shared(call, make, tracked):
    """Which results share memory with the argument."""
    x = make(random(5, 4, seed=3).requires_grad_(tracked) * 1)
    with torch.no_grad():
        found = call(x) if not tracked else None
    found = call(x) if tracked else found
    return [storage(y) == storage(x) for y in (found if isinstance(found, (list, tuple)) else [found])]


def write_to_result(x, w, y):
    first(y).mul_(2.0)
    return number(x) + number(y)


def write_to_argument(x, w, y):
    x.mul_(2.0)
    return number(x) + number(y)


def write_after_use(x, w, y):
    z = number(y)
    x.mul_(2.0)
    return number(x) + z


def write_to_buffer(x, w, y):
    w.mul_(2.0)
    return number(x) + number(y)


PROGRAMS = [write_to_result, write_to_argument, write_after_use, write_to_buffer]


def run(call, make, program, v):
    w = v * 1
    x = make(w)
    return program(x, w, call(x))


def aborts(name, kind):
    return any(name == n and kind.startswith(layout) for n, layout in ABORTS)


def attempt(function, *args):
    try:
        return function(*args), None
    except (RuntimeError, AssertionError, ValueError, IndexError, TypeError, AttributeError) as error:
        return None, error


def gradient(call, make, program):
    v = random(5, 4, seed=3).requires_grad_()
    return torch.autograd.grad(run(call, make, program, v), v)[0]


def slope(call, make, program, direction, step=1e-6):
    """The central difference of a program along a direction."""
    v = random(5, 4, seed=3)
    ends = [run(call, make, program, (v + s * direction).requires_grad_()) for s in (step, -step)]
    return float((ends[0] - ends[1]).detach() / (2 * step))


def test_every_operator_is_here():
    served = {name.removeprefix("aten::") for name in replacements["nested"].functions} - {*BACKWARD}
    assert {name.split(",")[0] for name in CALLS} == served


# what PyTorch gives views of, and one of each other kind, in the fast tests; all are in the slow ones
FAST = """
    select.int slice.Tensor narrow split.Tensor split_with_sizes chunk unbind.int transpose.int contiguous clone view values
    _nested_get_values _nested_view_from_jagged dropout reciprocal add.Tensor mul.Tensor linear softmax.int bmm
""".split()
each = pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, id=f"{name}-{kind}", marks=() if name.split(",")[0] in FAST else pytest.mark.slow)
        for name in CALLS
        for kind in INPUTS
        if differentiates_views() or kind.startswith("jagged")  # without the library strided pieces are copies
    ],
)


@each
def test_results_share_what_pytorchs_share(name, kind):
    call, make = CALLS[name], INPUTS[kind]
    for tracked in (False, True):
        stocks, refused = (None, "aborts") if aborts(name, kind) else attempt(shared, call, make, tracked)
        with mg.override("nested"):
            ours, error = attempt(shared, call, make, tracked)
        assert refused is not None or (error is None and ours == stocks), (
            f"tracked {tracked}: {ours}, {error}; {stocks}"
        )


@each
def test_writes_are_seen_with_gradients(name, kind):
    call, make = CALLS[name], INPUTS[kind]
    direction = random(5, 4, seed=4)
    for program in PROGRAMS:
        stocks, refused = (None, "aborts") if aborts(name, kind) else attempt(gradient, call, make, program)
        with mg.override("nested"):
            ours, error = attempt(gradient, call, make, program)
            if ours is None:
                assert refused is not None, f"{program.__name__}: {error}; stock has {stocks}"
                continue
            expected, _ = attempt(slope, call, make, program, direction)
        if refused is None:
            expected = slope(call, make, program, direction)
        found = float((ours * direction).sum())
        assert expected is not None and abs(found - expected) < 1e-6 * (1 + abs(expected)), (
            f"{program.__name__}: gradient {found}, difference {expected}, stock {stocks}, {refused}"
        )


STRIDED_VIEWS = ["values", "chunk", "split_with_sizes", "narrow, batch", "select.int", "select.int, last", "unbind.int"]


@pytest.mark.parametrize("name", STRIDED_VIEWS)
def test_strided_views_differentiate_twice(name):
    """With cotangents that are transposed, and a backward after the override too."""

    def f(v):
        x = strided_view(v)
        y = CALLS[name](x * x)
        turned = [p.transpose(1, 2) if p.is_nested else p for p in (y if isinstance(y, (tuple, list)) else [y])]
        return number([x.transpose(1, 2), *turned])

    def after(v):
        with mg.override("nested"):
            y = f(v)
        return y

    v = random(5, 4, seed=3).requires_grad_()
    for function in (f, after):
        with mg.override("nested") if function is f else contextlib.nullcontext():
            assert torch.autograd.gradcheck(function, v) and torch.autograd.gradgradcheck(function, v)


# A write to a view of a jagged tensor, and the same to each component; the first is the number of the component.
JAGGED_WRITES = {
    "narrow": (lambda y: y.narrow(-1, 1, 2).mul_(3.0), lambda i, y: y.narrow(-1, 1, 2).mul_(3.0)),
    "values": (lambda y: y.values().sin_(), lambda i, y: y.sin_()),
    "select": (lambda y: y.select(2, 1).mul_(2.0), lambda i, y: y.select(1, 1).mul_(2.0)),
    "transpose": (lambda y: y.transpose(1, 2).sin_(), lambda i, y: y.sin_()),
    "a component": (lambda y: y[0].mul_(3.0), lambda i, y: y.mul_(3.0) if i == 0 else y),
}


@pytest.mark.parametrize("name", JAGGED_WRITES)
def test_gradients_through_writes_to_views_of_a_jagged_tensor(name):
    whole, part = JAGGED_WRITES[name]
    components = [torch.randn(n, 4, dtype=torch.float64) for n in (2, 3)]

    def gradients(nested):
        xs = [x.clone().requires_grad_() for x in components]
        if nested:
            y = torch.nested.as_nested_tensor(xs, layout=torch.jagged) * 2
            whole(y)
            ys = y.unbind()
        else:
            ys = [x * 2 for x in xs]
            for i, y in enumerate(ys):
                part(i, y)
        return torch.autograd.grad(sum(y.pow(3).sum() for y in ys), xs)

    with mg.override():
        torch.testing.assert_close(gradients(True), gradients(False))
