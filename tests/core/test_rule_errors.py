"""Errors of rules: when a rule is declared, and when its formulas return what does not fit."""

from __future__ import annotations

import pytest
import torch
from helpers.ops import define
from helpers.rules import local

import torch_manualgrad as mg
from torch_manualgrad.core.registry import Registry
from torch_manualgrad.core.rule.derivative import derivative_of
from torch_manualgrad.core.versions import UNTRIED

# -- refusals --------------------------------------------------------------------------------------------------------


def one(grad):
    return grad


@pytest.mark.parametrize(
    "name, about, message",
    [
        ("aten::sinn", {"vjp": {"self": one}}, "rule 'aten::sinn': there is no such operator; did you mean aten::sin"),
        ("nowhere::sin", {"vjp": {"self": one}}, "rule 'nowhere::sin': there is no such operator"),
        ("sin", {"vjp": {"self": one}}, "expected 'namespace::name' or 'namespace::name.overload'"),
        ("aten::add.Tensorr", {"vjp": {"self": one}}, "there is no such operator; expected one of aten::add.Tensor, "),
        ("aten::norm", {"vjp": {"self": one}}, "there is no such operator; expected one of aten::norm.Scalar, "),
        ("aten::sin_", {"vjp": {"self": one}}, "writes to an argument"),
        ("aten::sin.out", {"vjp": {"self": one}}, "writes to an argument"),
        ("aten::view", {"vjp": {"self": one}}, "returns a view"),
        ("aten::square", {"vjp": {"self": one}}, "the operator is composite"),
        ("aten::sin", {}, "neither a vjp nor a jvp is given"),
        ("aten::sin", {"vjp": {"x": one}}, r"vjp is given for 'x', which is not one of \['self'\]"),
        ("aten::add.Tensor", {"vjp": {"alpha": one}}, r"'alpha', which is not one of \['self', 'other'\]"),
        ("aten::sin", {"jvp": {"out": lambda self_t: self_t}}, r"jvp is given for 'out', which is not one of \['result'\]"),
        ("aten::sin", {"vjp": {"self": lambda grd: grd}}, "the vjp formula asks for 'grd', which is not one of"),
        ("aten::sin", {"vjp": {"self": lambda grad_result: 0}}, "asks for 'grad_result'"),
        ("aten::std_mean.correction", {"vjp": {"self": one}}, "asks for 'grad'.*grad_result0"),
        ("aten::sin", {"vjp": {"self": lambda *grads: 0}}, "asks for 'grads'"),
        ("aten::sin", {"jvp": {"result": lambda self_q: self_q}}, "the jvp formula asks for 'self_q'"),
        ("aten::sin", {"jvp": {"result": lambda grad: grad}}, "the jvp formula asks for 'grad'"),
        ("aten::mul.Tensor", {"vjp": {("self", "other"): one, "self": one}}, "vjp is given twice for 'self'"),
        ("aten::mul.Tensor", {"vjp": {("self", "self"): one}}, "vjp is given twice for 'self'"),
        ("aten::sin", {"vjp": {"self": one}, "improves": "bad"}, "improves='bad' is unknown; expected some of"),
        ("aten::sin", {"vjp": {"self": one}, "improves": ("speed", "bad")}, "improves='bad' is unknown"),
        ("aten::sin", {"vjp": {"self": one}, "not_differentiable": "x"}, r"not_differentiable='x' is not one of"),
        ("aten::sin", {"vjp": {"self": 3}}, "the vjp for self must be a function with named parameters, got 3"),
        ("aten::sin", {"vjp": {"self": torch.neg}}, "must be a function with named parameters"),
        ("aten::dist", {"vjp": {"self": one}, "register": True}, "rule 'aten::dist' exists already.*register=False"),
    ],
)  # fmt: skip
def test_refused(name, about, message):
    before = list(mg.rules)
    with pytest.raises(ValueError, match=message):
        mg.rule(name, **{"register": False, **about})
    assert list(mg.rules) == before


def test_a_function_is_not_a_name():
    with pytest.raises(TypeError, match="name: expected a string such as 'aten::sin', got <built-in method sin"):
        mg.rule(torch.sin, vjp={"self": one}, register=False)


def test_a_name_that_means_two_things_is_refused():
    op = define("(Tensor grad_result, Tensor grad) -> Tensor", lambda grad_result, grad: 2 * grad)
    with pytest.raises(ValueError, match="asks for 'grad_result', but two values have this name"):
        local(op.name, vjp={"grad": lambda grad_result: 7 * grad_result})
    local(op.name, vjp={"grad": lambda output_mask: 0})  # not asked for, no conflict


def test_the_cotangent_next_to_an_input_named_grad():
    op = define("(Tensor grad) -> Tensor", lambda grad: grad.square())
    rule = local(op.name, vjp={"grad": lambda grad_result, grad: 2 * grad * grad_result})
    x = torch.tensor(3.0, requires_grad=True)
    with mg.override(rule):
        assert torch.autograd.grad(op(x), x)[0] == 6


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch):
    """As if this torch were 2.14.1, and nothing were registered."""
    monkeypatch.setattr(torch, "__version__", "2.14.1+cpu")
    rules = Registry("rule")
    monkeypatch.setattr("torch_manualgrad.core.rule.declare.rules", rules)
    monkeypatch.setattr("torch_manualgrad.core.override.names.rules", rules)
    return rules


def test_an_operator_that_this_torch_lacks_is_absent(registry):
    about = {"vjp": {"self": one}, "improves": "values"}
    assert mg.rule("aten::not_yet.Tensor", since="2.15", **about) is None
    assert mg.rule("aten::gone", since="2.1", until="2.14", **about) is None
    assert mg.rule("aten::nowhere", until="2.3", register=False, **about) is None
    assert registry.absent == {
        "aten::not_yet.Tensor": "torch 2.14.1+cpu has no aten::not_yet.Tensor, which comes with 2.15",
        "aten::gone": "torch 2.14.1+cpu has no aten::gone, which is gone since 2.14",
    }
    made = mg.rule("aten::sin", until="2.14", **about)  # it is here all the same
    assert list(registry.values()) == [made]
    for names in ((), ("*",)):
        with mg.override(*names) as handle:
            assert handle.rules == (made,)
    for what in ("aten::gone", "gone"):
        with pytest.raises(KeyError, match="torch 2.14.1.cpu has no aten::gone, which is gone since 2.14"):
            mg.override(what)
    with pytest.raises(ValueError, match="exists already"):
        mg.rule("aten::gone", until="2.14", **about)


@pytest.mark.parametrize("versions", [{"until": "2.15"}, {"since": "2.14"}, {"since": "2.1", "until": "3.0"}, {}])
def test_an_operator_that_ought_to_be_here_is_an_error(registry, versions):
    with pytest.raises(ValueError, match="there is no such operator"):
        mg.rule("aten::sinn", vjp={"self": one}, **versions)
    assert not registry.absent


def test_a_torch_that_is_newer_than_all_that_were_tried_may_lack_an_operator(registry, monkeypatch):
    monkeypatch.setattr(torch, "__version__", f"{UNTRIED}.0")
    assert mg.rule("aten::gone", vjp={"self": one}) is None
    assert registry.absent == {"aten::gone": f"torch {UNTRIED}.0 has no aten::gone"}
    with pytest.raises(ValueError, match="there is no such operator"):
        mg.rule("mine::gone", vjp={"self": one})


@pytest.mark.parametrize("version", ["2", "two", "", "2.x", 2.15])
def test_an_invalid_version_raises(version):
    for about in ({"improves": {"values": version}}, {"since": version}, {"until": version}):
        with pytest.raises(ValueError, match=f"{version!r} is no version of torch; expected one such as '2.15'"):
            local("aten::sin", vjp={"self": one}, **about)


def test_a_claim_ends_with_a_version(registry):
    ends = mg.rule("aten::sin", vjp={"self": one}, improves={"values": "2.14", "missing": "2.15", "speed": None})
    ended = mg.rule("aten::cos", vjp={"self": one}, improves={"values": "2.14"})
    assert ends.improves == ("missing", "speed") and ended.improves == ()
    assert ends.claims == {"values": "2.14", "missing": "2.15", "speed": None}
    with mg.override() as handle:
        assert handle.rules == (ends,)
    with mg.override("cos") as handle:
        assert handle.rules == (ended,)


def test_the_registry():
    assert mg.rules["aten::dist"] is getattr(mg.rules, "aten::dist") and mg.ops.norm_jvp is mg.ops["norm_jvp"]
    assert (
        "norm_jvp" in mg.ops
        and "norm_jpv" not in mg.ops
        and "norm_jvp" in dir(mg.ops)
        and len(mg.rules) == len(list(mg.rules))
    )
    with pytest.raises(KeyError, match="there is no rule 'aten::dits'; did you mean 'aten::dist'"):
        mg.rules["aten::dits"]
    with pytest.raises(AttributeError, match="there is no formula 'norm_jpv'; did you mean 'norm_jvp'"):
        mg.ops.norm_jpv  # noqa: B018
    with pytest.raises(TypeError):
        mg.rules["aten::dist"] = None


# -- what formulas return ---------------------------------------------------------------------------------------------

X = torch.ones(2, 3, dtype=torch.float64)
BOTH = ("self", "other")
RULE = "rule aten::atan2: the vjp of "
PAIR = r"\('self', 'other'\): expected a tuple of 2 gradients \(None for zero\), got "
ONE = "'self': expected a floating point or complex Tensor of shape .*, or None, got "


def rev(op):
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    return torch.autograd.grad(op(x, y).sum(), (x, y))


def func(op):
    return torch.func.grad(lambda x, y: op(x, y).sum(), (0, 1))(X, X)


def fwd(op):
    return torch.func.jvp(op, (X, X), (X, X))


def vmap(op):
    return torch.func.vmap(torch.func.grad(lambda x, y: op(x, y).sum(), (0, 1)))(X, X)


@pytest.mark.parametrize("way", [rev, func, fwd, vmap], ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    "vjp, message",
    [
        ({BOTH: lambda grad, self: (grad,)}, PAIR + "1"),
        ({BOTH: lambda grad, self: (grad, grad, grad)}, PAIR + "3"),
        ({BOTH: lambda grad, self: grad}, PAIR + "a Tensor of shape"),
        ({BOTH: lambda grad, self: None}, PAIR + "None"),
        ({BOTH: lambda grad, self: (grad[0], grad)}, ONE + "shape"),
        ({"self": lambda grad: (grad,), "other": lambda grad: grad}, ONE + r"\("),
        ({"self": lambda grad: 3.0, "other": lambda grad: grad}, ONE + "3.0"),
        ({"self": lambda grad: grad.long(), "other": lambda grad: grad}, ONE + "a Tensor of shape .* and torch.int64"),
        ({"self": lambda grad: torch.stack([grad, grad]), "other": lambda grad: grad}, ONE + "shape"),  # autograd would sum it
    ],
    ids=["one", "three", "a tensor", "None", "a shape", "a tuple", "a number", "integers", "too large"],
)  # fmt: skip
def test_gradients_that_do_not_fit(vjp, message, way):
    with mg.override(local("aten::atan2", vjp=vjp)), pytest.raises((RuntimeError, TypeError), match=RULE + message):
        way(torch.atan2)


def test_an_operator_of_one_tensor():
    for wrong in (lambda grad: grad[0], lambda grad: torch.stack([grad, grad]), lambda grad: 2):
        x = X.clone().requires_grad_()
        with mg.override(local("aten::sin", vjp={"self": wrong})):
            y = x.sin().sum()
        with pytest.raises(RuntimeError, match="rule aten::sin: the vjp of 'self': expected"):
            y.backward()


def test_gradients_that_fit():
    """Zero, and the shape of the result for an argument that was broadcast."""
    rule = local("aten::atan2", vjp={BOTH: lambda grad, self: (grad * self, None)})
    x, y = X.clone().requires_grad_(), X[0].clone().requires_grad_()
    with mg.override(rule):
        assert torch.autograd.grad(torch.atan2(x, y).sum(), x)[0].equal(X)
        assert torch.autograd.grad(torch.atan2(y, x).sum(), y)[0].equal(2 * X[0])


@pytest.mark.parametrize("fact", ["sizes", "strides", "storage_offset", "dtype", "device", "layout", "blocksize"])
def test_facts_of_a_tensor_that_is_not_given(fact):
    seen: list[object] = []
    formula = eval(f"lambda grad_result0, weight_{fact}: (seen.append(weight_{fact}), grad_result0)[1]", {"seen": seen})
    rule = local("aten::native_layer_norm", vjp={"input": formula})
    for transform in (lambda f: f, torch.func.vmap):
        x = X.clone().requires_grad_()
        with mg.override(rule):
            transform(lambda x: torch.native_layer_norm(x, [3], None, None, 0.1)[0])(x).sum().backward()
        assert x.grad.equal(X)
    assert seen == [None, None]


def test_lists():
    wrong = local("aten::cat", vjp={"tensors": lambda grad: [grad]})
    with mg.override(wrong), pytest.raises(RuntimeError, match="'tensors': expected a list of 2 gradients, got 1"):
        rev(lambda *xs: torch.cat(xs))
    wrong = local("aten::cat", vjp={"tensors": lambda grad: [grad[:2], grad[:1]]})
    with (
        mg.override(wrong),
        pytest.raises(RuntimeError, match=r"'tensors\[1\]': expected .* \[2, 3\], .* got shape \[1, 3\]"),
    ):
        rev(lambda *xs: torch.cat(xs))


@pytest.mark.parametrize(
    "jvp, message",
    [
        (lambda self_t: 3.0, "expected a Tensor or None as the tangent of output 'result', got float"),
        (
            lambda self_t: self_t[0],
            r"the tangent of output 'result' has shape \(3,\), but the output has shape \(2, 3\)",
        ),
        (
            lambda self_t: self_t * 1j,
            "the tangent of output 'result' is torch.complex128, but the output is torch.float64",
        ),
    ],
    ids=["a number", "a shape", "complex"],
)
def test_tangents_that_do_not_fit(jvp, message):
    rule = local("aten::atan2", vjp={"self": lambda grad: grad, "other": lambda grad: grad}, jvp={"result": jvp})
    with mg.override(rule), pytest.raises(RuntimeError, match=f"In the jvp of aten::atan2, written at .*: {message}"):
        fwd(torch.atan2)
    several = local(
        "aten::aminmax", vjp={"self": lambda grad_min: grad_min}, jvp={("min", "max"): lambda self_t: (self_t,)}
    )
    message = (
        r"rule aten::aminmax: the jvp of \('min', 'max'\): expected a tuple of 2 tangents \(None for zero\), got 1"
    )
    with mg.override(several), pytest.raises(RuntimeError, match=message):
        torch.func.jvp(torch.aminmax, (X[0],), (X[0],))


def test_the_packages_own_rules_are_checked_by_its_tests():
    assert not [rule.name for rule in mg.rules.values() if derivative_of(rule).foreign]
