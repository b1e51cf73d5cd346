"""The in-place form of an operator under a rule: PyTorch's values, and the rule's derivative."""

from contextlib import nullcontext

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.core.override.in_place import in_place_kernel, in_place_operator
from torch_manualgrad.core.rule.derivative import derivative_of

F64 = torch.float64


def test_operators_with_an_in_place_variant():
    found = {rule.name: in_place_operator(rule) for rule in mg.rules.values()}
    assert found["aten::sin"] is torch.ops.aten.sin_.default
    assert found["aten::renorm"] is torch.ops.aten.renorm_.default
    assert found["aten::addmm"] is torch.ops.aten.addmm_.default
    assert found["aten::mul.Tensor"] is torch.ops.aten.mul_.Tensor
    assert found["aten::mm"] is found["aten::linalg_lu"] is found["aten::_foreach_div.List"] is None


IN_PLACE = [rule for rule in mg.rules.values() if in_place_operator(rule) is not None]


@pytest.mark.parametrize("rule", IN_PLACE, ids=lambda r: r.name)
def test_reverse_over_forward_mode_agrees_with_the_functional_form(rule):
    """What is written to has a tangent, which is written to as well; the derivative may have kept it."""
    sample = next(iter(rule.samples(F64, "cpu")))
    x, *rest = sample.args

    def derivative(op):
        def tangent(x):
            return torch.func.jvp(lambda x: op(x * 1, *rest, **sample.kwargs).sum(), (x,), (torch.ones_like(x),))[1]

        return torch.func.grad(tangent)(x)

    with mg.override(rule):
        if rule.aten(x, *rest, **sample.kwargs).shape != x.shape:
            pytest.skip("the result has another shape")
        torch.testing.assert_close(derivative(in_place_operator(rule)), derivative(rule.aten))


def test_a_tangent_that_an_outer_level_keeps_is_not_written_to():
    x = torch.rand(3, dtype=F64) + 0.5

    def third(root):
        slope = torch.func.grad(lambda x: root((x * x).sum()))
        along = lambda x: torch.func.jvp(lambda x: slope(x).pow(2).prod(), (x,), (x,))[1]  # noqa: E731
        return torch.func.grad(along)(x)

    with mg.override("aten::sqrt"):
        torch.testing.assert_close(third(torch.Tensor.sqrt_), third(torch.sqrt))


def gradient(f, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x).pow(2).sum(), x)[0]


def renormed(x):
    return torch.renorm(x, 2, 0, 0.5)


def renormed_in_place(x):
    return (x * 1).renorm_(2, 0, 0.5)


@pytest.mark.parametrize("x", [torch.randn(3, 4, dtype=F64), torch.zeros(3, 4, dtype=F64)], ids=["random", "zeros"])
def test_renorm_agrees_with_its_functional_form(x):
    x[0] *= 1e-200  # PyTorch's gradient is nan, or zero, there
    with mg.override("renorm"):
        assert torch.equal(renormed_in_place(x), renormed(x))
        expected = gradient(renormed, x)
        torch.testing.assert_close(gradient(renormed_in_place, x), expected)
        torch.testing.assert_close(torch.func.grad(lambda x: renormed_in_place(x).pow(2).sum())(x), expected)
        tangents = [torch.func.jvp(f, (x,), (torch.ones_like(x),))[1] for f in (renormed, renormed_in_place)]
        torch.testing.assert_close(*tangents)
        seconds = [torch.func.hessian(lambda x, f=f: f(x).pow(2).sum())(x) for f in (renormed, renormed_in_place)]
        torch.testing.assert_close(*seconds)
    assert expected.isfinite().all()


def test_only_the_written_argument_is_written():
    with mg.override("renorm"):
        leaf = torch.ones(2, 2, requires_grad=True)
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            leaf.renorm_(2, 0, 0.5)
        with torch.no_grad():
            assert leaf.renorm_(2, 0, 0.5) is leaf
        base = torch.ones(2, 2, requires_grad=True) * 1
        view = base[0].unsqueeze(0)
        assert view.renorm_(2, 0, 0.5) is view
        torch.testing.assert_close(base[0], view[0])  # a view writes to its base
        assert base.requires_grad and view._version == base._version


def test_addmm():
    x, a, b = (torch.randn(3, 3, dtype=F64) for _ in range(3))

    def f(x):
        return (x * 1).addmm_(a, x, beta=2, alpha=0.5)

    expected = gradient(lambda x: torch.addmm(x, a, x, beta=2, alpha=0.5), x)
    with mg.override("addmm"):
        torch.testing.assert_close(gradient(f, x), expected)
        with pytest.raises(RuntimeError, match="shape|size|expand"):
            torch.ones(3, dtype=F64, requires_grad=True).mul(1).addmm_(a, b)


def is_floating(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


POINTWISE = [r for r in IN_PLACE if len(r.signature.tensor_like) > 1 and torch.Tag.pointwise in r.aten.tags]


@pytest.mark.parametrize("rule", POINTWISE, ids=lambda r: r.name)
def test_a_number_in_the_place_of_a_tensor(rule):
    """So the dispatcher hands a kernel in Python a wrapped number of C++, such as a constant of a traced graph."""
    sample = next(iter(rule.samples(F64, "cpu")))
    given = rule.signature.bind(sample.args, sample.kwargs)
    values = [torch.rand(3 if x.dim() else (), dtype=F64) if is_floating(x) else x for x in given]
    others = [i for i in rule.signature.tensor_like[1:] if is_floating(values[i])]
    kernel = in_place_kernel(rule.aten, in_place_operator(rule), None, lambda: derivative_of(rule))
    for i in others:
        args, kwargs = rule.signature.split(
            [values[0].clone().requires_grad_() * 1, *values[1:i], 0.5, *values[i + 1 :]]
        )
        with mg.override(rule):
            result = kernel(None, *args, **kwargs)
        args, kwargs = rule.signature.split([*values[:i], torch.tensor(0.5, dtype=F64), *values[i + 1 :]])
        assert torch.equal(result, rule.aten(*args, **kwargs))


def fresh(rule, sample):
    """The arguments, those that require grad which may: PyTorch refuses it of a noise."""
    return [
        x.detach().clone().requires_grad_(name != "noise") if is_floating(x) else x
        for name, x in zip(rule.signature.names, sample.args)
    ]


def samples_to_write_to(rule, number=2):
    """Of several shapes, where the result has that of what it is written to."""
    found = {}
    for sample in rule.samples(F64, "cpu"):
        x = sample.args[0]
        if is_floating(x) and x.layout is torch.strided and x.numel() > 1 and len(found) < number:
            if rule.aten(*sample.args, **sample.kwargs).shape == x.shape:
                found.setdefault(tuple(y.shape for y in sample.args if isinstance(y, torch.Tensor)), sample)
    return list(found.values())


def written_to(rule, inputs, kwargs):
    """The result, and the bytes of what is kept beside it."""
    target, sizes = inputs[0] * 1, {}

    def pack(x):
        if x.layout is torch.strided and x.dim():
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        version = target._version
        result = in_place_operator(rule)(target, *inputs[1:], **kwargs)
    assert result is target and target._version > version
    sizes.pop(target.untyped_storage().data_ptr(), None)
    return result, sum(sizes.values())


def two_orders(result, inputs):
    inputs = [x for x in inputs if is_floating(x) and x.requires_grad]
    how = {"create_graph": True, "materialize_grads": True}
    first = torch.autograd.grad(result.square().sum() + inputs[0].pow(3).sum(), inputs, **how)
    return *first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs, **how)


@pytest.mark.parametrize("rule", IN_PLACE, ids=lambda r: r.name)
def test_it_keeps_no_more_than_pytorch_and_has_the_derivatives_of_the_functional_form(rule):
    missing = rule.name in ("aten::asinh", "aten::acosh", "aten::atanh")  # PyTorch has no derivative in place
    missing |= rule.name == "aten::nextafter" and "missing" in rule.improves  # nor any of it, until torch 2.13
    for sample in samples_to_write_to(rule):
        _, stock = written_to(rule, fresh(rule, sample), sample.kwargs)
        inputs, others = fresh(rule, sample), fresh(rule, sample)
        with mg.override(rule):
            result, kept = written_to(rule, inputs, sample.kwargs)
            torch.manual_seed(0)
            expected = rule.aten(*others, **sample.kwargs)
        assert kept <= stock or missing
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        if result.requires_grad:
            torch.testing.assert_close(two_orders(result, inputs), two_orders(expected, others))


def outcome(rule, sample, context, same=None, later=False):
    """The gradients, or that it raises, with the tensor that is written to in the place ``same``, or written to later."""
    inputs = fresh(rule, sample)
    args = [inputs[0] * 1, *inputs[1:]]
    if same is not None:
        args[same] = args[0]
    torch.manual_seed(0)
    try:
        with context:
            in_place_operator(rule)(*args, **sample.kwargs)
            if later:
                args[0].detach().add_(1)
            inputs = [x for x in inputs if is_floating(x) and x.requires_grad]
            return torch.autograd.grad(args[0].square().sum(), inputs, materialize_grads=True)
    except RuntimeError:
        return "raises"


@pytest.mark.parametrize("rule", IN_PLACE, ids=lambda r: r.name)
def test_overlapping_writes_and_reads_raise_as_in_pytorch(rule):
    for sample in samples_to_write_to(rule):
        x = sample.args[0]
        places = [i for i, y in enumerate(sample.args) if i and is_floating(y) and y.shape == x.shape]
        for how in ({"later": True}, *[{"same": i} for i in places]):
            stock, ours = (outcome(rule, sample, context, **how) for context in (nullcontext(), mg.override(rule)))
            if stock != "raises" or "same" in how:
                assert (ours == "raises") == (stock == "raises"), how
                torch.testing.assert_close(ours, stock) if stock != "raises" else None


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ["leaky_relu", "elu", "celu"])
def test_the_slope_of_a_result_on_an_unknown_side(name, sign):
    """PyTorch refuses the backward of these in place where the number is negative; the rule then keeps the input."""
    x = torch.tensor([-2.0, -0.3, 0.0, 0.4, 1.5], dtype=F64)
    op, functional = getattr(torch.ops.aten, f"{name}_"), getattr(torch.ops.aten, name)
    with mg.override(name):
        torch.testing.assert_close(
            gradient(lambda x: op(x * 1, 0.7 * sign), x), gradient(lambda x: functional(x, 0.7 * sign), x)
        )
