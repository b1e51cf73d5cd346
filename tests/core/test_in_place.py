"""The in-place form of an operator under a rule: PyTorch's values, and the rule's derivative."""

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.core.in_place import in_place_operator

F64 = torch.float64


def test_which_operators_have_one():
    found = {rule.name: op for rule in mg.rules.values() if (op := in_place_operator(rule)) is not None}
    assert found["aten::sin"] is torch.ops.aten.sin_.default
    found = {name: op for name, op in found.items() if mg.rules[name].kind == "rule"}
    assert found == {
        "aten::renorm": torch.ops.aten.renorm_.default,
        "aten::addmm": torch.ops.aten.addmm_.default,
        "aten::cumprod": torch.ops.aten.cumprod_.default,
    }


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
