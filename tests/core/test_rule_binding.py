"""Rules: how formulas are bound to an operator by names, and what a rule says about itself."""

import functools

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.ops import define
from helpers.rules import local
from helpers.tensors import random, same
from helpers.transforms import NESTINGS, nested
from torch import Tensor
from torch.func import grad, jvp, vmap

import torch_manualgrad as mg
from torch_manualgrad.core.compile_cache import fingerprint
from torch_manualgrad.core.rule import bound_to
from torch_manualgrad.testing import check


def equal_under(rules, f, reference, *args, transforms=NESTINGS):
    for nesting in transforms:
        with mg.override(*rules):
            found = nested(nesting, f)(*args)
        same(found, nested(nesting, reference)(*args))


def gradient_and_tangent(f, x, *rules):
    """The sum of the gradient, and the tangent along ones, under the rules."""
    with mg.override(*rules):
        return grad(lambda x: f(x).sum())(x), jvp(f, (x,), (torch.ones_like(x),))[1]


# -- binding ---------------------------------------------------------------------------------------------------------

# each is wrong by a factor of 3, which shows that it was used
SINE = {
    "grad and input": {"vjp": {"self": lambda grad, self: 3 * grad * self.cos()}},
    "any order": {"vjp": {"self": lambda self, grad: 3 * grad * self.cos()}},
    "output": {"vjp": {"self": lambda grad, self, result: 3 * grad * self.cos() + 0 * result}},
    "mask": {"vjp": {"self": lambda grad, self, output_mask: 3 * grad * self.cos() if output_mask[0] else None}},
    "keyword-only constants": {"vjp": {"self": lambda grad, self, *, factor=3: factor * grad * self.cos()}},
    "partial": {"vjp": {"self": functools.partial(lambda self, grad, factor: factor * grad * self.cos(), factor=3)}},
    "vjp and jvp": {
        "vjp": {"self": lambda grad, self: 3 * grad * self.cos()},
        "jvp": {"result": lambda self_p, self_t: 3 * self_t * self_p.cos()},
    },
    "jvp with plain names": {
        "vjp": {"self": lambda grad, self: 3 * grad * self.cos()},
        "jvp": {"result": lambda self, self_t, result: 3 * self_t * self.cos() + 0 * result},
    },
}


@pytest.mark.parametrize("bindings", SINE)
def test_names(bindings):
    rule = local("aten::sin", **SINE[bindings])
    x = random(3)
    same(gradient_and_tangent(torch.sin, x, rule), (3 * x.cos(), 3 * x.cos()))
    assert grad(torch.sin)(x[0]) == x[0].cos()


def test_tuple_keys_ask_for_several_gradients_at_once():
    seen = []

    def both(grad, self, other, output_mask):
        seen.append(tuple(output_mask))
        return (
            (grad * other).sum_to_size(self.shape) if output_mask[0] else None,
            (grad * self).sum_to_size(other.shape) if output_mask[1] else None,
        )

    rule = local("aten::mul.Tensor", vjp={("self", "other"): both})
    x, y = random(3), random(3, seed=1)
    for over, mask in ((0, (True, False)), (1, (False, True)), ((0, 1), (True, True))):
        with mg.override(rule):
            g = grad(lambda x, y: torch.mul(x, y).sum(), argnums=over)(x, y)
        same(g, grad(lambda x, y: torch.mul(x, y).sum(), argnums=over)(x, y))
        assert seen[0] == mask  # the formula itself multiplies, hence further calls
        seen.clear()
    equal_under([rule], lambda x: torch.mul(x, x.sin()), lambda x: x * x.sin(), x)


def test_of_two_keys_only_the_requested_one_runs():
    seen = []

    def named(name, result):
        return lambda grad, self, other: (seen.append(name), result(grad, self, other))[1]

    rule = local(
        "aten::atan2",
        vjp={
            "self": named("self", lambda g, y, x: g * x / (x * x + y * y)),
            "other": named("other", lambda g, y, x: -g * y / (x * x + y * y)),
        },
    )
    x, y = random(3), random(3, seed=1)
    with mg.override(rule):
        grad(lambda x: torch.atan2(x, y).sum())(x)
        assert seen == ["self"]
        grad(lambda y: torch.atan2(x, y).sum())(y)
        assert seen == ["self", "other"]
    equal_under([rule], lambda x: torch.atan2(x, x * x), lambda x: torch.atan2(x, x * x), x)


def test_a_formula_without_cotangents_or_tangents_is_not_called():
    seen = []

    def named(name, result):
        return lambda *given: (seen.append(name), result(*given))[1]

    hypot = local(
        "aten::hypot",
        vjp={"self": lambda grad, self, result: grad * self / result, "other": lambda grad: None},
        jvp={"result": bound_to(named("tangent", lambda t, x, r: t * x / r), ["self_t", "self_p", "result"])},
    )
    of_mean = bound_to(named("mean", lambda g, n: (g / n[0]).expand(n)), ["grad_result1", "self_sizes"])
    x, y = random(3).abs() + 1, random(3, seed=1)
    with mg.override(hypot):
        same(jvp(lambda y: torch.hypot(x, y), (y,), (y,))[1], torch.zeros(3).double())
        assert not seen
        same(jvp(lambda x: torch.hypot(x, y), (x,), (x,))[1], x * x / torch.hypot(x, y))
        assert seen.pop() == "tangent"
    with mg.override(local("aten::std_mean.correction", vjp={"self": of_mean})):
        assert grad(lambda x: torch.std_mean(x)[0])(x).eq(0).all() and not seen
        same(grad(lambda x: torch.std_mean(x)[1])(x), torch.full((3,), 1 / 3).double())
        assert seen == ["mean"]


def test_gradients_of_inputs_that_need_none_are_dropped():
    rule = local("aten::mul.Tensor", vjp={("self", "other"): lambda grad, self, other: (grad * other, torch.ones(7))})
    x, y = random(3).requires_grad_(), random(3, seed=1)
    with mg.override(rule):
        same(torch.autograd.grad((x * y).sum(), x)[0], y)
        same(grad(lambda x: (x * y).sum())(x.detach()), y)


def test_a_parameter_that_is_named_self_can_be_bound():
    bound = mg.ops.soft_margin_loss_backward.bind(self="result")
    assert bound.parameter_names == ["grad_output", "result", "target", "reduction"]


def std_mean_vjp(grad_result0, grad_result1, self, result0, result1):
    found = 0
    if grad_result0 is not None:
        found = grad_result0 * (self - result1) / (result0 * (self.numel() - 1))
    return found if grad_result1 is None else found + grad_result1 / self.numel() * torch.ones_like(self)


def centred(self):
    return self - self.sum() / self.numel()


std_mean = {
    "vjp": {"self": std_mean_vjp},
    "jvp, one key": {
        "vjp": {"self": std_mean_vjp},
        "jvp": {
            ("result0", "result1"): lambda self, self_t: (
                (centred(self) * self_t).sum() / (centred(self).square().sum() * (self.numel() - 1)).sqrt(),
                self_t.sum() / self_t.numel(),
            )
        },
    },
    "jvp, two keys": {
        "vjp": {"self": std_mean_vjp},
        "jvp": {
            "result0": lambda self, self_t: (
                (centred(self) * self_t).sum() / (centred(self).square().sum() * (self.numel() - 1)).sqrt()
            ),
            "result1": lambda self_t: self_t.sum() / self_t.numel(),
        },
    },
}
std_mean["vjp only"] = {"vjp": std_mean.pop("vjp")}


@pytest.mark.parametrize("bindings", std_mean)
def test_several_outputs(bindings):
    rule = local("aten::std_mean.correction", **std_mean[bindings])

    def plain(x):
        mean = x.sum() / x.numel()
        return ((x - mean).square().sum() / (x.numel() - 1)).sqrt(), mean

    def loss(f):
        return lambda x: (lambda s, m: s.sin() * m.exp())(*f(x))

    equal_under([rule], loss(torch.std_mean), loss(plain), random(3))
    x = random(3).requires_grad_()
    with mg.override(rule):
        std, mean = torch.std_mean(x)
    same(torch.autograd.grad(mean, x, retain_graph=True)[0], torch.full((3,), 1 / 3).double())
    same(torch.autograd.grad(std, x), torch.autograd.grad(plain(x)[0], x))


def test_not_differentiable():
    def vjp(grad_values, self, indices, dim):
        return torch.zeros_like(self).scatter(dim, indices, 3 * grad_values)

    rule = local("aten::sort", vjp={"self": vjp}, not_differentiable=["indices"])
    x = random(4).requires_grad_()
    with mg.override(rule):
        values, places = torch.sort(x)
        same(jvp(lambda x: torch.sort(x)[0], (x.detach(),), (x.detach(),))[1], 3 * x.detach().sort()[0])
    assert values.requires_grad and not places.requires_grad
    same(torch.autograd.grad(values.sum(), x)[0], torch.full((4,), 3.0).double())
    plain = local("aten::std_mean.correction", vjp={"self": std_mean_vjp}, not_differentiable="result1")
    with mg.override(plain):
        assert [o.requires_grad for o in torch.std_mean(x)] == [True, False]
        assert not jvp(lambda x: torch.std_mean(x)[1], (x.detach(),), (x.detach(),))[1].any()


def cat_vjp(grad, tensors, dim, output_mask):
    parts = grad.split([t.shape[dim] for t in tensors], dim)
    return [3 * part if wanted else None for part, wanted in zip(parts, output_mask[0])]


def cat_jvp(tensors, tensors_t, dim):
    return torch.cat([torch.zeros_like(p) if t is None else 3 * t for p, t in zip(tensors, tensors_t)], dim)


@pytest.mark.parametrize("jvps", [None, {"result": cat_jvp}], ids=["derived", "written"])
def test_lists_of_tensors(jvps):
    rule = local("aten::cat", vjp={"tensors": cat_vjp}, jvp=jvps)
    constant = random(1, 3)

    def f(x):
        return torch.cat([x, constant, 2 * x]).sin().sum()

    x = random(2, 3)
    with mg.override(rule):
        same(grad(f)(x), 3 * (x.cos() + 2 * (2 * x).cos()))
        same(jvp(f, (x,), (x,))[1], 3 * (x * x.cos() + 2 * x * (2 * x).cos()).sum())
        same(vmap(grad(f))(torch.stack([x, x]))[1], 3 * (x.cos() + 2 * (2 * x).cos()))


def layer_norm_vjp(grad_result0, grad_result1, grad_result2, input, weight, bias, result1, result2, output_mask):
    assert [w for w, v in zip(output_mask, (input, weight, bias)) if v is None] == [False] * (weight is None) * 2
    standard = (input - result1) * result2
    g = grad_result0 if weight is None else grad_result0 * weight
    centred = g - g.mean(-1, keepdim=True) - standard * (g * standard).mean(-1, keepdim=True)
    if weight is None:
        return 3 * centred * result2, None, None
    return 3 * centred * result2, (grad_result0 * standard).sum(0), grad_result0.sum(0)


@pytest.mark.parametrize("affine", [False, True])
def test_optional_tensors(affine):
    rule = local(
        "aten::native_layer_norm",
        vjp={("input", "weight", "bias"): layer_norm_vjp},
        not_differentiable=("result1", "result2"),
    )
    values = (random(2, 3), random(3, seed=1), random(3, seed=2))[: 3 if affine else 1]

    def f(x, *affine):
        return (torch.nn.functional.layer_norm(x, [3], *affine) * random(2, 3, seed=3)).sum()

    over = tuple(range(len(values)))
    stock = grad(f, argnums=over)(*values)
    with mg.override(rule):
        found = grad(f, argnums=over)(*values)
    same(found, (3 * stock[0], *stock[1:]))


@pytest.mark.parametrize("number", [2, 2.1, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_number_in_place_of_a_tensor(number, dtype):
    """The dispatcher gives the kernel a Python number for the tensor that `x * 2.1` passes."""
    # in divisions, or the factor would act on the formula itself
    rule = local("aten::mul.Tensor", vjp={"self": lambda grad, other: grad / (1 / other.to(grad.dtype)) / (1 / 7)})
    for shape in ((3,), ())[: 1 if dtype is torch.bfloat16 else 2]:  # a bfloat16 scalar times 2.1 is off by one ulp
        x = random(*shape).to(dtype).requires_grad_()
        with mg.override(rule):
            y = x * number
            (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert y.dtype is (x.detach() * number).dtype and y.equal(x.detach() * number)
        with fwAD.dual_level():
            with mg.override(rule):
                y = fwAD.make_dual(x.detach(), torch.ones_like(x)) * number
            t = fwAD.unpack_dual(y).tangent
        same((g, t), (torch.full_like(x, 7) * number,) * 2)


def test_only_a_jvp():
    rule = local("aten::sin", jvp={"result": lambda self, self_t: 3 * self_t * self.cos()})
    x = random(3)
    with mg.override(rule):
        same(jvp(torch.sin, (x,), (x,))[1], 3 * x * x.cos())
        assert not torch.sin(x).requires_grad


@pytest.mark.parametrize("library", ["ours", "torch.library"])
def test_any_namespace(library):
    if library == "ours":
        op = define("(Tensor x) -> Tensor", lambda x: 2 * x)
        name, call = op.name, op
    else:
        name = "mgtest::doubled"

        @torch.library.custom_op(name, mutates_args=())
        def call(x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        call.register_autograd(lambda ctx, g: 2 * g)
    rule = local(name, vjp={"x": lambda grad: 7 * grad})
    same(gradient_and_tangent(call, random(3), rule), (torch.full((3,), 7.0).double(),) * 2)
    if library != "ours":
        x = random(3).requires_grad_()
        same(torch.autograd.grad(call(x).sum(), x)[0], torch.full((3,), 2.0).double())


# -- what a rule says about itself -----------------------------------------------------------------------------------


def test_attributes():
    rule = mg.rules["aten::linalg_vector_norm"]
    assert rule.aten is torch.ops.aten.linalg_vector_norm.default
    assert rule.formulas == (mg.ops.linalg_vector_norm_backward, mg.ops.linalg_vector_norm_jvp)
    assert set(rule.residuals) >= {"self", "ord"} and "speed" in rule.improves and rule.source
    assert repr(rule) == "<Rule aten::linalg_vector_norm: linalg_vector_norm_backward, linalg_vector_norm_jvp>"
    assert mg.rules["aten::norm.Scalar"].formulas == (mg.ops.norm_backward, mg.ops.norm_jvp)  # through a lambda
    assert repr(local("aten::sin", **SINE["partial"])) == "<Rule aten::sin>"


def test_residuals_are_the_parameters_of_the_vjp():
    assert local("aten::sin", vjp={"self": lambda grad, result: grad * result}).residuals == ("result",)
    assert local("aten::sin", vjp={"self": lambda grad: grad}, jvp={"result": lambda self: self}).residuals == ()


def test_tensors_that_no_gradient_reads_are_not_saved():
    rule = local(
        "aten::mm",
        vjp={
            "self": lambda grad, mat2, self_sizes, self_dtype: (grad @ mat2.mT).to(self_dtype).reshape(self_sizes),
            "mat2": lambda grad, self, mat2_strides: (self.mT @ grad) * len(mat2_strides) / 2,
        },
    )
    assert rule.residuals == ("self", "mat2")
    for wanted in ((0,), (1,), (0, 1)):
        inputs = [random(3, 3).requires_grad_(i in wanted) for i in range(2)]
        saved = []
        with mg.override(rule), torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            out = torch.mm(*inputs)
        assert [x.data_ptr() for x in saved] == [inputs[i].data_ptr() for i in (0, 1) if 1 - i in wanted]
        ones = torch.ones(3, 3, dtype=out.dtype)
        expected = (ones @ inputs[1].mT, inputs[0].mT @ ones)
        same(torch.autograd.grad(out.sum(), [inputs[i] for i in wanted]), tuple(expected[i] for i in wanted))
    equal_under([rule], lambda a: (a @ a.sin()).sum(), lambda a: (a[:, :, None] * a.sin()).sum(1).sum(), random(3, 3))


# -- formulas under other names than their own ------------------------------------------------------------------------


@mg.formula
def binding_scaled(g: Tensor, y: Tensor, factor: float = 1.0, shift: float = 0.0) -> Tensor:
    """g (factor y + shift). References: none."""
    return g * (factor * y + shift)


def with_samples(name, **about):
    samples = about.pop("samples", lambda dtype, device: [mg.Sample(random(3, dtype=dtype))])
    return mg.rule(name, register=False, samples=samples, **about)


EXP = {"vjp": {"self": binding_scaled.bind(g="grad", y="result")}, "jvp": {"result": binding_scaled.bind(g="self_t", y="result")}}  # fmt: skip


def test_parameters_go_by_other_names():
    rule = with_samples("aten::exp", **EXP)
    assert rule.residuals == ("result",) and rule.formulas == (binding_scaled,)
    assert repr(rule) == "<Rule aten::exp: binding_scaled>"
    assert repr(rule.vjp["self",]) == "binding_scaled(g=grad, y=result)"
    with mg.override(rule):
        check(rule.aten, rule.samples(torch.float64, "cpu"))


def test_a_parameter_may_be_a_constant():
    double = binding_scaled.bind(g="grad", y="self", factor=2.0)
    rule = with_samples("aten::sinh", vjp={"self": double})
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
    with mg.override(with_samples("aten::sin", vjp={"self": binding_default})):
        torch.testing.assert_close(torch.autograd.grad(x.sin().sum(), x)[0], 3 * x.detach())
    with pytest.raises(ValueError, match="asks for 'scale', which is not one of"):
        with_samples("aten::sin", vjp={"self": lambda grad, self, scale=3.0: grad})


def test_a_schema_name_replaces_a_default():
    @mg.formula
    def binding_alpha(grad: Tensor, alpha: float = 7.0) -> Tensor:
        """References: none."""
        return grad * alpha

    x, y = random(3), random(3).requires_grad_()
    with mg.override(with_samples("aten::add.Tensor", vjp={"self": lambda grad: grad, "other": binding_alpha})):
        assert torch.autograd.grad(torch.add(x, y, alpha=2).sum(), y)[0].tolist() == [2, 2, 2]


def test_several_inputs_at_once():
    @mg.formula
    def binding_product(g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """References: none."""
        return g * b, g * a

    rule = with_samples(
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
        (lambda: with_samples("aten::exp", vjp={"self": binding_scaled.bind(g="grd", y="self")}), "asks for 'grd'"),
        (lambda: with_samples("aten::exp", vjp={"self": binding_scaled.bind(g="grad")}), "asks for 'y'"),
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
    assert with_samples("aten::exp", vjp=inside).formulas == (binding_scaled,)


def test_the_fingerprint_is_of_the_formula_and_of_how_it_is_bound():
    one, other = (
        with_samples("aten::exp", **EXP),
        with_samples("aten::exp", vjp={"self": binding_scaled.bind(g="grad", y="self")}),
    )
    assert one.fingerprint == with_samples("aten::exp", **EXP).fingerprint != other.fingerprint
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
