"""The in-place form of an operator under a rule: PyTorch's values, and the rule's derivative."""

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.core.in_place import in_place_kernel, in_place_operator

F64 = torch.float64


def test_which_operators_have_one():
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


def test_what_is_written_to_and_what_is_not():
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
    kernel = in_place_kernel(rule.aten, in_place_operator(rule), None, lambda: rule.derivative)
    for i in others:
        args, kwargs = rule.signature.split(
            [values[0].clone().requires_grad_() * 1, *values[1:i], 0.5, *values[i + 1 :]]
        )
        with mg.override(rule):
            result = kernel(None, *args, **kwargs)
        args, kwargs = rule.signature.split([*values[:i], torch.tensor(0.5, dtype=F64), *values[i + 1 :]])
        assert torch.equal(result, rule.aten(*args, **kwargs))


KEPT_RESULT = [r for r in IN_PLACE if r.signature.names[0] not in r.derivative.saved]


@pytest.mark.parametrize("rule", KEPT_RESULT, ids=lambda r: r.name)
def test_a_result_that_is_kept_is_the_tensor_that_was_written_to(rule):
    """So that it takes no memory of its own; the derivative is that of the functional form, and the version counts."""
    sample = next(iter(rule.samples(F64, "cpu")))
    x, *rest = sample.args
    if not is_floating(x):
        pytest.skip("nothing is differentiated")
    written, functional = (x.clone().requires_grad_() for _ in range(2))
    target, places = written * 1, []

    def pack(kept):
        places.append(kept.untyped_storage().data_ptr() if kept.layout is torch.strided else None)
        return kept

    torch.manual_seed(0)
    with mg.override(rule), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        version = target._version
        result = in_place_operator(rule)(target, *rest, **sample.kwargs)
    torch.manual_seed(0)
    with mg.override(rule):
        expected = rule.aten(functional, *rest, **sample.kwargs)
    if expected.shape != x.shape:
        pytest.skip("the result has another shape")
    assert result is target and target._version > version and torch.equal(result, expected)
    known = {target.untyped_storage().data_ptr(), *(y.untyped_storage().data_ptr() for y in rest if is_floating(y))}
    assert {place for place in places if place} <= known or not {"result"} & set(rule.derivative.saved)
    pairs = ((result, written), (expected, functional))
    losses = [(y.square().sum() + z.pow(3).sum(), z) for y, z in pairs]
    gradients = [torch.autograd.grad(*loss, create_graph=True)[0] for loss in losses]
    torch.testing.assert_close(*gradients)
    second = [torch.autograd.grad(g.square().sum(), z)[0] for g, z in zip(gradients, (written, functional))]
    torch.testing.assert_close(*second)
