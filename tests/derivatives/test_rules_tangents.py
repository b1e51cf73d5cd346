"""A tangent in each floating argument of each rule: the derivative along it by finite differences, or a clear error.

PyTorch's forward mode takes some arguments for constants, and so would a rule that has no formula for them: a silent zero.
"""

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch.testing import assert_close

import torch_manualgrad as mg
from torch_manualgrad.testing.comparison.problem import seed_generators

F64 = torch.float64
NARROW = (torch.float32, torch.complex64, torch.float16, torch.bfloat16)

# Their derivative is a convention, the identity in part of the range: the function is a staircase.
STRAIGHT_THROUGH = {
    f"aten::{name}"
    for name in (
        "fake_quantize_per_tensor_affine_cachemask",
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
        "fake_quantize_per_channel_affine_cachemask",
        "_fake_quantize_learnable_per_tensor_affine",
        "_fake_quantize_learnable_per_channel_affine",
    )
}
# Inputs on which the operator has a condition, and gauges: the probe sees to both. A backward also has results of the
# forward among its inputs, which the probe computes from the others.
WITH_A_CONDITION = {
    *("aten::cholesky", "aten::linalg_cholesky_ex", "aten::_linalg_eigh", "aten::linalg_eig"),
    "aten::linalg_matrix_sqrth",
}


def is_floating(x):
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def with_tangents(rule, values):
    """(place, index in a list or None, tensor) of what may have a tangent."""
    for i in rule.signature.tensor_like:
        for k, x in [(None, values[i])] if not isinstance(values[i], (list, tuple)) else enumerate(values[i]):
            if is_floating(x) and x.layout is torch.strided and x.numel():
                yield i, k, x


def function_of(rule, values, place, index, positional=0):
    """x -> the differentiable outputs, flat, with ``x`` as that argument; the first ones are given by position."""
    with_condition = rule.name in WITH_A_CONDITION or "backward" in rule.name
    op = rule.probe if with_condition else rule.aten

    def f(x):
        given = list(values)
        if rule.aten._schema.is_mutable:  # it may write to any of them
            given = [v.clone() if is_floating(v) else v for v in given]
            x = x * 1
        given[place] = x if index is None else [x if k == index else v for k, v in enumerate(given[place])]
        seed_generators(0)
        # a probe may take by name alone what the sample gives by name
        named = dict(zip(rule.signature.names[positional:], given[positional:]))
        found = op(*given[:positional], **named)
        found = list(found) if isinstance(found, (list, tuple)) else [found]
        if op is rule.aten and rule.not_differentiable:
            found = [o for o, n in zip(found, rule.signature.output_names) if n not in rule.not_differentiable]
        flat = [y for o in found for y in (o if isinstance(o, (list, tuple)) else [o])]
        return [y if y.layout is torch.strided else y.to_dense() for y in flat if is_floating(y)]

    return f


def tangents(f, x, t):
    with fwAD.dual_level():
        found = [fwAD.unpack_dual(y) for y in f(fwAD.make_dual(x.clone(), t))]
        return [torch.zeros_like(y.primal) if y.tangent is None else y.tangent for y in found]


RULES = [rule for rule in mg.rules.values() if rule.samples and rule.name not in STRAIGHT_THROUGH]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_a_tangent_in_each_argument(rule):
    seen = set()
    for sample in rule.samples(F64, "cpu"):
        values = rule.signature.bind(list(sample.args), dict(sample.kwargs))
        values = [v.detach() if isinstance(v, torch.Tensor) else v for v in values]
        absent = tuple(v is None for v in values)
        for i, k, x in with_tangents(rule, values):
            if (i, k, absent, x.dtype) in seen:
                continue
            seen.add((i, k, absent, x.dtype))
            f, name = function_of(rule, values, i, k, len(sample.args)), rule.signature.names[i]
            t = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
            with torch.no_grad():
                narrow = any(y.dtype in NARROW for y in (x, *f(x)))
                h = (1e-2 if narrow else 1e-5) * max(1, x.abs().max().item())
                expected = [(a - b) / (2 * h) for a, b in zip(f(x + h * t), f(x - h * t))]
            for names in ((), ("*",)):
                with mg.override(*names):
                    try:
                        found = tangents(f, x, t)
                    except NotImplementedError as error:  # noqa: PERF203
                        assert name in str(error) or "layout" in str(error) or "forward AD" in str(error)
                        continue
                for a, b in zip(found, expected, strict=True):
                    size = max(1, b.abs().max().item() if b.numel() else 1)
                    tolerance = 3e-2 if narrow else 1e-4
                    assert_close(
                        a, b, rtol=tolerance, atol=tolerance * size, msg=lambda m: f"{name}, override{names}: {m}"
                    )


@pytest.mark.parametrize("place", [3, 4], ids=["running_mean", "running_var"])
def test_the_backward_of_batch_norm_in_evaluation_has_tangents_of_the_statistics(place):
    g, x = torch.randn(2, 5, 3, dtype=F64).unbind()
    w, mean, var = torch.rand(3, 3, dtype=F64).unbind()
    values = [g, x, w, mean, var, None, None, False, 0.1, [True, True, True]]
    rule = mg.rules["aten::native_batch_norm_backward"]

    def f(y):
        return rule.aten(*values[:place], y, *values[place + 1 :])

    y, t = values[place], torch.rand(3, dtype=F64)
    expected = [(a - b) / 2e-6 for a, b in zip(f(y + 1e-6 * t), f(y - 1e-6 * t))]
    with mg.override():
        assert_close(tangents(f, y, t), expected)


@pytest.mark.parametrize("name", ["aten::fractional_max_pool2d", "torch_nn::_linear_cross_entropy_batch_chunked"])
def test_an_argument_without_a_derivative_is_an_error(name):
    if name not in mg.rules:
        pytest.skip("this torch does not have the operator")
    rule = mg.rules[name]
    argument = "random_samples" if "pool" in name else "weight"
    sample = next(iter(rule.samples(F64, "cpu")))
    values = rule.signature.bind(list(sample.args), dict(sample.kwargs))
    place = rule.signature.names.index(argument)
    with mg.override(rule), pytest.raises(NotImplementedError, match=argument):
        tangents(function_of(rule, values, place, None), values[place], torch.ones_like(values[place]))


def test_higher_orders_in_the_weights_of_a_mean():
    """They are in the denominator, too."""
    x = torch.randn(4, 3, dtype=F64).log_softmax(1)
    y, w = torch.tensor([0, 2, 1, 1]), torch.rand(3, dtype=F64) + 1

    def loss(w):
        of_class = w[y]
        return -(of_class * x.gather(1, y[:, None])[:, 0]).sum() / of_class.sum()

    def op(w):
        return torch.nn.functional.nll_loss(x, y, w)

    def second(f):
        along = lambda w: torch.func.jvp(f, (w,), (torch.ones_like(w),))[1]  # noqa: E731
        return torch.func.jvp(along, (w,), (w * w,))[1]

    with mg.override():
        assert_close(second(op), second(loss))
