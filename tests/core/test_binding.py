"""Formulas under other names than their own, without a lambda; and which formulas a rule says that it has."""

import pytest
import torch
from helpers.tensors import random
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.core.compile_cache import fingerprint
from torch_manualgrad.testing import check


@mg.formula
def binding_scaled(g: Tensor, y: Tensor, factor: float = 1.0, shift: float = 0.0) -> Tensor:
    """g (factor y + shift). References: none."""
    return g * (factor * y + shift)


def local(name, **about):
    samples = about.pop("samples", lambda dtype, device: [mg.Sample(random(3, dtype=dtype))])
    return mg.rule(name, register=False, samples=samples, **about)


EXP = {"vjp": {"self": binding_scaled.bind(g="grad", y="result")}, "jvp": {"result": binding_scaled.bind(g="self_t", y="result")}}  # fmt: skip


def test_parameters_go_by_other_names():
    rule = local("aten::exp", **EXP)
    assert rule.residuals == ("result",) and rule.formulas == (binding_scaled,)
    assert repr(rule) == "<Rule aten::exp: binding_scaled>"
    assert repr(rule.vjp["self",]) == "binding_scaled(g=grad, y=result)"
    with mg.override(rule):
        check(rule.aten, rule.samples(torch.float64, "cpu"))


def test_a_parameter_may_be_a_constant():
    double = binding_scaled.bind(g="grad", y="self", factor=2.0)
    rule = local("aten::sinh", vjp={"self": double})
    x = random(3).requires_grad_()
    with mg.override(rule):
        torch.testing.assert_close(torch.autograd.grad(x.sinh().sum(), x)[0], 2 * x.detach())


def test_a_default_is_used_if_its_name_is_not_in_the_schema():
    """In the formula itself too, and only there: a lambda asks for what it names."""

    @mg.formula
    def binding_default(grad: Tensor, self: Tensor, scale: float = 3.0) -> Tensor:
        """References: none."""
        return scale * grad * self

    x = random(3).requires_grad_()
    with mg.override(local("aten::sin", vjp={"self": binding_default})):
        torch.testing.assert_close(torch.autograd.grad(x.sin().sum(), x)[0], 3 * x.detach())
    with pytest.raises(ValueError, match="asks for 'scale', which is not one of"):
        local("aten::sin", vjp={"self": lambda grad, self, scale=3.0: grad})


def test_a_schema_name_replaces_a_default():
    @mg.formula
    def binding_alpha(grad: Tensor, alpha: float = 7.0) -> Tensor:
        """References: none."""
        return grad * alpha

    x, y = random(3), random(3).requires_grad_()
    with mg.override(local("aten::add.Tensor", vjp={"self": lambda grad: grad, "other": binding_alpha})):
        assert torch.autograd.grad(torch.add(x, y, alpha=2).sum(), y)[0].tolist() == [2, 2, 2]


def test_several_inputs_at_once():
    @mg.formula
    def binding_product(g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """References: none."""
        return g * b, g * a

    rule = local(
        "aten::mul.Tensor",
        vjp={("self", "other"): binding_product.bind(g="grad", a="self", b="other")},
        samples=lambda dtype, device: [mg.Sample(random(3, dtype=dtype), random(3, dtype=dtype, seed=1))],
    )
    with mg.override(rule):
        check(rule.aten, rule.samples(torch.float64, "cpu"))


@pytest.mark.parametrize(
    "bind, message",
    [
        (
            lambda: binding_scaled.bind(h="grad"),
            r"bind\(\) is given 'h', which is not one of its parameters \['g', 'y'",
        ),
        (lambda: local("aten::exp", vjp={"self": binding_scaled.bind(g="grd", y="self")}), "asks for 'grd'"),
        (lambda: local("aten::exp", vjp={"self": binding_scaled.bind(g="grad")}), "asks for 'y'"),
    ],
)
def test_invalid_arguments_raise(bind, message):
    with pytest.raises(ValueError, match=message):
        bind()


def test_a_binding_can_be_called_in_the_order_of_its_names():
    x, y = random(3), random(3, seed=1)
    bound = binding_scaled.bind(g="grad", factor=2.0, shift=1.0)
    torch.testing.assert_close(bound(x, y), x * (2 * y + 1))


def test_formulas_inside_of_functions_are_found():
    inside = {"self": lambda grad, result: binding_scaled(grad, result)}
    assert local("aten::exp", vjp=inside).formulas == (binding_scaled,)


def test_the_fingerprint_is_of_the_formula_and_of_how_it_is_bound():
    one, other = local("aten::exp", **EXP), local("aten::exp", vjp={"self": binding_scaled.bind(g="grad", y="self")})
    assert one.fingerprint == local("aten::exp", **EXP).fingerprint != other.fingerprint
    assert fingerprint(binding_scaled.reference) in one.fingerprint


def test_under_every_way_of_kernels_and_compiling():
    rule = mg.rule(
        "aten::linalg_vector_norm",
        vjp={"self": mg.ops.norm_backward.bind(p="ord", norm="result")},
        register=False,
    )
    x = random(4).requires_grad_()
    expected = torch.autograd.grad(torch.linalg.vector_norm(x), x)[0]
    with mg.override(rule):
        torch.testing.assert_close(torch.autograd.grad(torch.linalg.vector_norm(x), x)[0], expected)
        compiled = torch.compile(torch.linalg.vector_norm, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], expected)
