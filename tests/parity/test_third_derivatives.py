"""Third derivatives of PyTorch's operators: the eight ways to nest reverse and forward mode compute the same number.

PyTorch's own third derivatives differ between the ways for many operators, such as layer_norm and batch_norm.
"""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
from torch.func import jvp, vjp
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import torch_manualgrad as mg

# with two maxima at one place, as in the samples, the last write wins, and the gradient goes to both
UNDEFINED = ("nn.functional.max_unpool1d", "nn.functional.max_unpool2d", "nn.functional.max_unpool3d")
ROUNDED = ("bfloat16", "half", "chalf")  # to half precision, in every way at another place
MODES = list(itertools.product(("rev", "fwd"), repeat=3))


def rev(f):
    """The derivative along the first of some directions."""

    def derivative(xs, directions):
        y, pull = vjp(lambda xs: f(xs, directions[1:]), xs)
        return sum((g * d).sum() for g, d in zip(pull(torch.ones_like(y))[0], directions[0]))

    return derivative


def fwd(f):
    return lambda xs, directions: jvp(lambda xs: f(xs, directions[1:]), (xs,), (directions[0],))[1]


def number_of(info, sample):
    """A function of the differentiable tensors of a sample, whose value is a number, and these tensors."""
    values, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, x in enumerate(values) if isinstance(x, torch.Tensor) and x.requires_grad]
    values = [x.detach() if isinstance(x, torch.Tensor) else x for x in values]

    def f(xs, _):
        given = list(values)
        for i, x in zip(places, xs):
            given[i] = x
        first, others, options = tree_unflatten(given, spec)
        torch.manual_seed(0)
        total = torch.zeros((), dtype=torch.float64)
        for y in tree_leaves(info.op(first, *others, **options)):
            if isinstance(y, torch.Tensor) and (y.is_floating_point() or y.is_complex()):
                weights = torch.arange(y.numel(), dtype=torch.float64).cos().reshape(y.shape) + 1.5
                for part in (y.real, y.imag) if y.is_complex() else (y,):
                    total = total + (weights * part.sin()).sum()
        return total

    return f, [values[i] for i in places]


def thirds(f, xs):
    """The third derivative along three directions, in each way; None where it raises."""
    random = torch.Generator().manual_seed(1)
    directions = [[torch.rand(x.shape, generator=random, dtype=x.dtype) + 0.2 for x in xs] for _ in range(3)]
    found = {}
    for mode in MODES:
        g = f
        for step in mode:
            g = {"rev": rev, "fwd": fwd}[step](g)
        try:
            found["".join(mode)] = float(g(xs, directions))
        except (RuntimeError, NotImplementedError, TypeError, AttributeError):
            found["".join(mode)] = None
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "info",
    [i for i in op_db if torch.float64 in i.dtypes and i.supports_autograd and i.name not in UNDEFINED + ROUNDED],
    ids=lambda info: info.formatted_name,
)
def test_all_ways_compute_the_same_third_derivative(info):
    warnings.simplefilter("ignore")
    tried = 0
    for sample in itertools.islice(info.sample_inputs("cpu", torch.float64, requires_grad=True), 12):
        f, xs = number_of(info, sample)
        if not xs or sum(x.numel() for x in xs) > 300 or any(x.layout is not torch.strided for x in xs):
            continue
        with mg.override():
            found = thirds(f, xs)
        raised = [mode for mode, value in found.items() if value is None]
        if raised:
            stock = thirds(f, xs)
            assert all(stock[mode] is None for mode in raised), f"{raised} raise"
        values = [value for value in found.values() if value is not None]
        for value in values:
            same = math.isclose(value, values[0], rel_tol=1e-7, abs_tol=1e-8)
            assert same or math.isnan(value) and math.isnan(values[0]), found
        tried += 1
        if tried == 2:
            return
