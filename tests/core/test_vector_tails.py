"""Every element has the same derivative, wherever it is among others.

PyTorch's kernels take elements in vectors, and the last few one at a time; the two do not always agree, above all at nan. How
long a vector is depends on the processor: `make test-capabilities` runs these tests with each instruction set.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.tensors import is_dense_differentiable
from helpers.thinning import in_turn, label
from torch.autograd import forward_ad

import torch_manualgrad as mg

# below, at and above the number of elements in one vector, which is from 2 to 32
SIZES = (1, 3, 7, 8, 9, 16, 17, 32, 33, 65)
SPECIAL = (0.0, math.inf, -math.inf, math.nan)
REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex128, torch.complex64)
# how far the functions of PyTorch's vectors may be from those of one number, in units of the dtype
ROUNDING = 64


def elementwise_samples(rule, dtype):
    """Calls whose tensors have one shape, and the first three elements of each tensor."""
    for sample in rule.samples(dtype, "cpu"):
        tensors = [x for x in (*sample.args, *sample.kwargs.values()) if isinstance(x, torch.Tensor)]
        if len({x.shape for x in tensors}) == 1 and all(is_dense_differentiable(x) and x.numel() >= 3 for x in tensors):
            yield sample, [x.detach().flatten()[:3] for x in tensors]


def points(columns):
    """The sample's own elements; then each tensor takes the special values while the others stay. An odd number of rows."""
    rows = [list(row) for row in zip(*(c.tolist() for c in columns))]
    for place, special in itertools.product(range(len(columns)), SPECIAL):
        rows.append([special if i == place else x for i, x in enumerate(rows[0])])
    rows += rows[: 1 - len(rows) % 2]
    return [torch.tensor(column, dtype=like.dtype) for column, like in zip(zip(*rows), columns)]


def is_by_element(rule):
    """The operator works on each element, or takes the sum or mean of such losses."""
    if rule.sparse or rule.samples is None or "fwd" in rule.gaps:
        return False
    return rule.kind == "elementwise" or "_loss" in rule.name or "binary_cross_entropy" in rule.name


# these are losses of rows
OF_ROWS = {"aten::multilabel_margin_loss_forward", "aten::multilabel_margin_loss_backward"}
RULES = [r for r in mg.rules.values() if is_by_element(r) and r.name not in OF_ROWS]
CASES = [*in_turn(RULES, REAL), *in_turn(RULES, COMPLEX)]


class Call:
    """One sample as a function of tensors of any size."""

    def __init__(self, rule, sample):
        self.rule, self.sample = rule, sample
        names = [*itertools.islice(rule.signature.names, len(sample.args)), *sample.kwargs]
        values = (*sample.args, *sample.kwargs.values())
        with_vjp = {name for key in rule.vjp for name in key}
        self.differentiable = [n in with_vjp for n, x in zip(names, values) if isinstance(x, torch.Tensor)]

    def __call__(self, tensors):
        given = iter(tensors)
        args = [next(given) if isinstance(x, torch.Tensor) else x for x in self.sample.args]
        kwargs = {n: next(given) if isinstance(x, torch.Tensor) else x for n, x in self.sample.kwargs.items()}
        found = self.rule.aten(*args, **kwargs)
        return next(o for o in ([found] if isinstance(found, torch.Tensor) else found) if is_dense_differentiable(o))

    def derivatives(self, tensors, scale):
        """Of all orders up to 2, reverse and forward: a tensor of the size of the inputs each."""
        inputs = [x.clone().requires_grad_(yes) for x, yes in zip(tensors, self.differentiable)]
        result = self(inputs)
        if not result.requires_grad:
            return []
        inputs = [x for x in inputs if x.requires_grad]
        cotangent = torch.full_like(result, scale).requires_grad_()
        first = torch.autograd.grad(result, inputs, cotangent, create_graph=True, materialize_grads=True)
        found = [g.detach() for g in first]
        for g in first:
            if g.requires_grad:
                second = torch.autograd.grad(
                    g, [*inputs, cotangent], torch.full_like(g, scale), retain_graph=True, materialize_grads=True
                )
                found += second
        with forward_ad.dual_level():
            for i, x in enumerate(tensors):
                if not self.differentiable[i]:
                    continue
                duals = list(tensors)
                duals[i] = forward_ad.make_dual(x, torch.full_like(x, scale))
                tangent = forward_ad.unpack_dual(self(duals)).tangent
                if tangent is not None:
                    found.append(tangent)
        return found


def tiled(columns, size):
    return [c.repeat(-(-size // len(c)))[:size] for c in columns]


def calls(rule, dtype):
    for sample, columns in itertools.islice(elementwise_samples(rule, dtype), 3):
        call, columns = Call(rule, sample), points(columns)
        try:
            call([x.requires_grad_() for x in columns])
        except RuntimeError:  # the operator does not take this dtype
            continue
        yield call, [x.detach() for x in columns]


@pytest.mark.parametrize("rule, dtype", CASES, ids=label)
def test_a_zero_stays_a_zero_in_every_place(rule, dtype):
    for call, columns in calls(rule, dtype):
        with mg.override(strong_zero=True):
            for size in SIZES:
                found = call.derivatives(tiled(columns, size), 0.0)
                assert all((g == 0).all() for g in found), (call.sample, size, found)


@pytest.mark.parametrize("rule, dtype", CASES, ids=label)
def test_an_element_has_one_derivative_in_every_place(rule, dtype):
    tolerance = ROUNDING * torch.finfo(dtype).eps
    for call, columns in calls(rule, dtype):
        if call(columns).dim() == 0:  # a mean is of more elements than one
            continue
        with mg.override(rule):
            alone = [call.derivatives([c[i : i + 1] for c in columns], 0.75) for i in range(len(columns[0]))]
            expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]
            for size in SIZES[1:]:
                found = call.derivatives(tiled(columns, size), 0.75)
                where = f"{call.sample}, {size} elements"
                torch.testing.assert_close(
                    found,
                    tiled(expected, size),
                    rtol=tolerance,
                    atol=0,
                    equal_nan=True,
                    msg=lambda m, where=where: f"{where}: {m}",
                )
