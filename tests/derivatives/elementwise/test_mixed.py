"""Elementwise operators of several tensors where some are real and some complex, or integers, at points on both sides of zero."""

import itertools

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.core.rule import rules

REAL, COMPLEX = (-1.7, 0.6, 2.3), (-1.2 + 0.4j, 0.7 - 0.9j, 1.6 + 0.3j)
OTHERS = {
    "aten::lerp.Scalar": {"weight": 0.3},
    "aten::div.Tensor_mode": {"rounding_mode": None},
    "aten::where.self": {"condition": torch.tensor([True, False, True])},
}
NUMBERS = {
    "aten::pow.Scalar": [-1.7, 0.6, -1.2 + 0.4j, 2],
    "aten::pow.Tensor_Scalar": [-1.7, 3, 0.7 - 0.9j],
}


def several(name):
    signature = rules[name].signature
    return len(signature.tensor_names) > 1 and not signature.lists


NAMES = [name for name in rules if rules[name].kind == "elementwise" and several(name)]


def points(complex_, shift=0):
    values, dtype = (COMPLEX, torch.complex128) if complex_ else (REAL, torch.float64)
    return torch.tensor(values, dtype=dtype).roll(shift)


def samples(name, make=points):
    """With each choice of complex arguments that the operator takes; the points of an argument meet others of the next."""
    rule = rules[name]
    names = [n for n in rule.signature.tensor_names if n not in OTHERS.get(name, {})]
    for kinds in itertools.product((False, True), repeat=len(names)):
        if len(set(kinds)) == 1:
            continue
        given = {n: make(kind, i) for i, (n, kind) in enumerate(zip(names, kinds))} | OTHERS.get(name, {})
        leading = list(itertools.takewhile(given.__contains__, rule.signature.names[: rule.signature.positional]))
        sample = mg.Sample(*[given.pop(n) for n in leading], **given)
        try:
            result = rule.aten(*sample.args, **sample.kwargs)
        except (RuntimeError, TypeError):  # TypeError: torch 2.15
            continue
        if result.is_complex() or result.is_floating_point() and not result.isnan().any():
            yield sample


def integers(integer, shift=0):
    return torch.tensor([-2, 3, 1]) if integer else torch.tensor([0.45, 1.7, 0.6], dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_mixed_arguments(name):
    found = list(samples(name))
    if found:
        with mg.override("*"):
            mg.testing.check(rules[name].aten, found, checks=())


# the tensors of a backward have one dtype
@pytest.mark.parametrize("name", [name for name in NAMES if not name.partition(".")[0].endswith("_backward")])
def test_integer_arguments(name):
    found = list(samples(name, integers))
    if found:
        with mg.override("*"):
            mg.testing.check(rules[name].aten, found, checks=())


@pytest.mark.skipif("aten::ldexp.Tensor" in rules.absent, reason="PyTorch makes it of other operators")
@pytest.mark.parametrize("exponents", [[200, -140, -2], [0.3, 0.1, -2.0]], ids=["integers", "float32"])
def test_exponents_of_ldexp(exponents):
    """The factor 2^n has the digits and the range of the result, not those of the exponents."""
    x, n = torch.rand(3, dtype=torch.float64).requires_grad_(), torch.tensor(exponents)
    with mg.override("*"):
        (g,) = torch.autograd.grad(torch.ldexp(x, n).sum(), x)
    torch.testing.assert_close(g, torch.exp2(n.double()), rtol=1e-15, atol=0)


def test_some_operators_take_mixed_arguments():
    taken = [name for name in NAMES if any(True for _ in samples(name))]
    assert {"aten::pow.Tensor_Tensor", "aten::mul.Tensor", "aten::addcdiv", "aten::where.self"} <= set(taken)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name):
    op = rules[name].aten
    arguments = [
        (number, x) if op is torch.ops.aten.pow.Scalar else (x, number)
        for number, x in itertools.product(NUMBERS[name], (points(False), points(True)))
    ]
    with mg.override("*"):
        mg.testing.check(op, [mg.Sample(*args) for args in arguments if not op(*args).isnan().any()], checks=())


@pytest.mark.parametrize("base", [0.0, 0j], ids=["real zero", "complex zero"])
@pytest.mark.parametrize("exponent", [0j, 0.5 - 1j, 2 + 1j])
def test_zero_to_a_complex_power_is_constant_in_the_exponent(base, exponent):
    x, y = torch.tensor(base), torch.tensor(exponent, requires_grad=True)
    with mg.override():
        power = torch.pow(x, y)
        (first,) = torch.autograd.grad(power, y, torch.ones_like(power), create_graph=True)
        assert first == 0
        if first.requires_grad:
            assert torch.autograd.grad(first.real, y)[0] == 0
