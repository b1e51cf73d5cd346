"""Rules of one line: one derivative of one element, or an operator that is its own tangent."""

import math

import pytest
import torch
from helpers.tensors import random, same

import torch_manualgrad as mg
from torch_manualgrad.core.rule import reached
from torch_manualgrad.testing import check

# -- one derivative of one element ------------------------------------------------------------------------------------


def local(name, derivative, **about):
    return mg.elementwise(name, derivative, register=False, **about)


def test_one_line_is_a_rule():
    rule = local("aten::erf", lambda self: 2 / math.sqrt(math.pi) * (-self * self).exp(), real_only=True)
    assert rule.kind == "elementwise" and rule.residuals == ("self",) and not rule.improves and rule.source
    assert not list(rule.samples(torch.complex128, "cpu"))
    with mg.override(rule):
        check(rule.aten, rule.samples(torch.float64, "cpu"))


MUL = {"self": lambda other: other, "other": lambda self: self}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize(
    "name, derivative",
    [("aten::mul.Tensor", MUL), ("aten::sub.Tensor", {"self": lambda: 1, "other": lambda alpha: -alpha})],
)
def test_several_tensors_are_broadcast(name, derivative, dtype):
    arguments = [{}, {"alpha": 2.5}] if "sub" in name else [{}]
    rule = local(name, derivative, arguments=arguments)
    samples = list(rule.samples(dtype, "cpu"))
    assert len(samples) == 5 * len(arguments)
    with mg.override(rule):
        check(rule.aten, samples)


def gradients(op, *inputs):
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point() or x.is_complex()) for x in inputs]
    output = op(*inputs)
    inputs = [x for x in inputs if x.requires_grad]
    found = torch.autograd.grad(output, inputs, torch.ones_like(output), allow_unused=True)
    return [*[torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found)], output]


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float64),
        (torch.float64, torch.complex128),
        (torch.float32, torch.int64),
        (torch.int32, torch.bfloat16),
        (torch.complex64, torch.float64),
    ],
    ids=str,
)
def test_gradients_have_the_dtypes_of_their_inputs(dtypes):
    inputs = [(3 * random(3, 4)).to(dtypes[0]), (3 * random(4, seed=1)).to(dtypes[1])]
    rule = local("aten::mul.Tensor", MUL)
    expected = gradients(torch.mul, *inputs)
    with mg.override(rule):
        found = gradients(torch.mul, *inputs)
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("exponent", [3, 0.5, 2 + 1j])
def test_a_real_input_of_a_complex_result_has_a_real_gradient(exponent):
    rule = local(
        "aten::pow.Tensor_Scalar",
        lambda self, exponent: exponent * self ** (exponent - 1),
        domain=(0, math.inf),
        arguments=[{"exponent": exponent}],
    )
    samples = list(rule.samples(torch.float64, "cpu"))
    assert samples[0].kwargs == {} and samples[0].args[1] == exponent
    with mg.override(rule):
        check(rule.aten, samples)
        x = random(3).abs().requires_grad_()
        assert torch.autograd.grad((x**exponent).abs().sum(), x)[0].dtype is torch.float64


def test_the_argument_before_the_tensor():
    rule = local(
        "aten::pow.Scalar",
        lambda self, result: result * math.log(self),
        arguments=[{"self": 2.5}],
    )
    with mg.override(rule):
        check(rule.aten, rule.samples(torch.float64, "cpu"))


@pytest.mark.parametrize("zero", [None, 0])
def test_a_derivative_that_is_zero_gives_zeros(zero):
    rule = local("aten::floor", lambda: zero, real_only=True)
    x = torch.tensor([0.5, math.inf]).requires_grad_()
    with mg.override(rule):
        (found,) = torch.autograd.grad(x.floor(), x, torch.ones(2), create_graph=True)
        assert found.tolist() == [0, 0]
        tangent = torch.func.jvp(torch.floor, (x.detach(),), (torch.ones(2),))[1]
    assert tangent.tolist() == [0, 0]


def test_only_one_input_has_a_tangent():
    with mg.override(local("aten::sub.Tensor", {"self": lambda: 1, "other": lambda alpha: -alpha})):
        x, y = random(3), random(2, 3, seed=1)
        same(torch.func.jvp(lambda x: x - y, (x,), (torch.ones(3).double(),))[1], torch.ones(2, 3).double())


@pytest.mark.parametrize("interval", [(-math.inf, math.inf), (0, math.inf), (-math.inf, -1), (-1, 1), (2, 3)], ids=str)
def test_samples_are_inside_of_the_domain(interval):
    rule = local("aten::sin", lambda self: self.cos(), domain=interval)
    low, high = interval
    for dtype in (torch.float64, torch.float32, torch.complex64):
        values = torch.cat([s.args[0].real.flatten() for s in rule.samples(dtype, "cpu")])
        assert ((low < values) & (values < high)).all() and (values != 0).all() and len(values) > 12


def test_own_samples():
    rule = local("aten::sin", lambda self: self.cos(), samples=lambda dtype, device: [mg.Sample(torch.ones(2))])
    assert len(list(rule.samples(torch.float64, "cpu"))) == 1


@pytest.mark.parametrize(
    "name, derivative, message",
    [
        ("aten::mul.Tensor", lambda self: self, "one derivative is given, and the operator takes the tensors"),
        ("aten::frexp.Tensor", lambda self: self, "has 2 outputs"),
        ("aten::sin", lambda x: x, "asks for 'x', which is not one of"),
        ("aten::sin", {"x": lambda self: self}, "given for 'x'"),
        ("aten::no_such_function", lambda self: self, "no such operator"),
        ("aten::sinc_", lambda self: self, "writes to an argument"),
    ],
)
def test_invalid_arguments_raise(name, derivative, message):
    with pytest.raises(ValueError, match=message):
        local(name, derivative)


def test_operators_that_this_torch_lacks_have_no_rule():
    assert local("aten::gone", lambda self: self, until="2.0") is None


def at(rule, x):
    """The rule's samples with other arguments than tensors, each once, and x in place of their floating point tensors."""
    found = {}
    for sample in rule.samples(torch.float64, "cpu"):
        others = repr([a for a in (*sample.args, *sample.kwargs.items()) if not isinstance(a, torch.Tensor)])
        args = [
            torch.full_like(a, x) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in sample.args
        ]
        # enough for a vector of each processor, as PyTorch's kernels may take fewer elements in another way
        args = [a.flatten()[:1].repeat(64) if isinstance(a, torch.Tensor) and a.dim() else a for a in args]
        found.setdefault(others, mg.Sample(*args, **sample.kwargs))
    return found.values()


# Where PyTorch's first derivative is not nan and wrong: the squares in atan2's underflow, i1 of nan had slope 1/2,
# polar takes a negative length for a positive one, and logit has -inf at -0.0 where a vector is computed, else inf.
# nextafter differs from its first argument by rounding alone, and has slope 0 there in PyTorch where both are equal.
WRONG = {("aten::atan2", "1e-310"), ("aten::logit", "-0.0"), *[("aten::polar", x) for x in ("0.0", "-0.0", "-1.0")]}
WRONG |= {("aten::nextafter", x) for x in ("0.0", "-0.0", "1.0", "-1.0", "inf", "-inf", "1e-310", "1e+200")}
if not reached("2.15"):
    WRONG |= {("aten::special_i1", "nan"), ("aten::special_i1e", "nan")}


@pytest.mark.parametrize("x", [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-310, 1e200])
@pytest.mark.parametrize("rule", [r for r in mg.rules.values() if r.kind == "elementwise"], ids=lambda r: r.name)
def test_conventions_at_the_edges_are_pytorchs(rule, x):
    """Where PyTorch's first derivative is infinite, zero or nan, so is ours; a rule that claims values may mend a nan."""
    wrong = []
    for sample in at(rule, x):
        tensors = [a for a in sample.args if isinstance(a, torch.Tensor)]

        def op(*given, sample=sample):
            given = iter(given)
            return rule.probe(
                *[next(given) if isinstance(a, torch.Tensor) else a for a in sample.args], **sample.kwargs
            )

        with mg.override(rule):
            found = gradients(op, *tensors)
        try:
            expected = gradients(op, *tensors)
        except NotImplementedError:  # of PyTorch, which has no derivative in the first argument of zeta
            assert "missing" in rule.claims
            continue
        except RuntimeError as error:  # of a Bessel function, whose result has no history
            assert "does not require grad" in str(error) and "values" in rule.claims
            continue
        if "values" in rule.claims:
            expected = [torch.where(e.isnan(), f, e) for e, f in zip(expected, found)]
        if (rule.name, str(x)) in WRONG:
            wrong.append(not expected[0].isnan().any() and not torch.allclose(found[0], expected[0]))
        else:
            torch.testing.assert_close(found, expected, equal_nan=True)
    assert any(wrong) == ((rule.name, str(x)) in WRONG and "missing" not in rule.improves)


def test_in_a_compiled_function():
    rule = local("aten::atan2", {"self": lambda self, other: 2 * self, "other": lambda self, other: 3 * other})
    x, y = random(2, 3).requires_grad_(), random(3, seed=1).requires_grad_()
    with mg.override(rule):
        compiled = torch.compile(torch.atan2, backend="aot_eager", fullgraph=True)
        for f in (torch.atan2, compiled):
            found = torch.autograd.grad(f(x, y).sum(), (x, y))
            same(found, (2 * x.detach(), 6 * y.detach()))


@pytest.mark.parametrize("name", ["sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "add"])
def test_numbers_by_every_name_under_transforms(name):
    """Some of the names are composite, and meet torch.func before the operator that has the rule."""
    function, x = getattr(torch, name), torch.tensor([0.5, 1.5], dtype=torch.float64)
    for given in (x, torch.tensor([1, 2])):
        expected = torch.func.grad(lambda x, given=given: (function(given, 3) * x).sum())(x)
        with mg.override("*"):
            found = torch.func.grad(lambda x, given=given: (function(given, 3) * x).sum())(x)
        torch.testing.assert_close(found, expected)


def test_a_tangent_ends_where_numbers_become_integers():
    x, t = torch.tensor([0.3, 2.6]), torch.ones(2)
    with mg.override("*"):
        value, tangent = torch.func.jvp(lambda x: x * x.to(torch.int64), (x,), (t,))
    assert value.tolist() == [0.0, pytest.approx(5.2)] and tangent.tolist() == [0.0, 2.0]


OF_TWO = [
    rule
    for rule in mg.rules.values()
    if rule.kind == "elementwise"
    and len(rule.vjp) == len(rule.aten._schema.arguments) == 2
    and not rule.name.endswith("_backward")
]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("rule", OF_TWO, ids=lambda r: r.name)
def test_an_integer_among_operands_is_taken_in_the_dtype_of_the_result(rule, dtype):
    """As numbers of double precision are, and not of single precision, which is what PyTorch makes of an integer alone."""
    x, whole = torch.tensor([0.37, 0.74], dtype=torch.float64), torch.tensor([3, 1]).to(dtype)
    for order in (slice(None), slice(None, None, -1)):

        def derivatives(y, order=order):
            def f(x):
                return rule.aten(*(x, y)[order])

            try:
                _, tangent = torch.func.jvp(f, (x,), (torch.ones_like(x),))
                return tangent, torch.func.grad(lambda x: f(x).sum())(x)
            except (RuntimeError, NotImplementedError):  # PyTorch refuses the dtypes
                return None

        with mg.override(rule):
            found, expected = derivatives(whole), derivatives(whole.double())
        if found is None:
            try:
                rule.aten(*(x, whole)[order])
            except (RuntimeError, NotImplementedError):
                continue
            assert expected is None
        else:
            torch.testing.assert_close(found, expected, rtol=1e-14, atol=0, equal_nan=True)


# -- linear operators: the tangent is the operator on the tangents ----------------------------------------------------


def samples(*more, count=1):
    return lambda dtype, device: [mg.Sample(*[random(3, 4, dtype=dtype, seed=i) for i in range(count)], *more)]


FLIP = mg.linear_in("aten::flip", {"self": lambda grad, dims: grad.flip(dims)}, samples=samples([0, 1]), register=False)
LERP = mg.linear_in(
    "aten::lerp.Scalar",
    {
        "self": lambda grad, weight: grad * (1 - weight.conjugate()),
        "end": lambda grad, weight: grad * weight.conjugate(),
    },
    samples=samples(0.25, count=2),
    register=False,
)
STACK = mg.linear_in(
    "aten::stack",
    {"tensors": lambda grad, dim: list(grad.unbind(dim))},
    samples=lambda dtype, device: [mg.Sample([random(3, dtype=dtype, seed=i) for i in range(2)], 1)],
    register=False,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("rule", [FLIP, LERP, STACK], ids=lambda r: r.name)
def test_every_mode(rule, dtype):
    assert rule.kind == "linear" and rule.source and not {"self", "end", "tensors"} & {*rule.residuals}
    with mg.override(rule):
        check(rule.aten, rule.samples(dtype, "cpu"))


def test_an_input_without_a_tangent():
    with mg.override(LERP):
        x, y = random(3), random(3, seed=1)
        tangent = torch.func.jvp(lambda y: torch.lerp(x, y, 0.25), (y,), (torch.ones_like(y),))[1]
    assert tangent.tolist() == [0.25] * 3


def test_several_outputs_are_refused():
    with pytest.raises(ValueError, match="linear_in aten::frexp.Tensor: the operator has 2 outputs"):
        mg.linear_in("aten::frexp.Tensor", {"self": lambda grad: grad})
    with pytest.raises(ValueError, match="no such operator"):
        mg.linear_in("aten::no_such_function", {"self": lambda grad: grad})
