"""User code that calls ``torch.func`` inside of an op: its implementation, backward, jvp, residuals, vmap rule, fake."""

import warnings

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.tensors import random, same
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import torch_manualgrad as mg

X, ROWS = random(3), random(2, 3, seed=1)


def cube(x):
    """3 x^2, as a derivative of x^3."""
    return vmap(grad(lambda a: a**3))(x.reshape(-1)).reshape(x.shape)


def _define(name, saved, backward, with_vmap=False):
    op = mg.custom_op(f"inside::{name}(Tensor x) -> Tensor")(cube)
    op.impl_save_for_backward(saved)
    op.impl_backward(backward)
    if with_vmap:
        op.impl_vmap(lambda info, in_dims, x: (vmap(cube)(x.movedim(in_dims[0], 0)), 0))
    return op


@mg.formula(namespace="inside")
def formula(x: Tensor) -> Tensor:
    """3 x^2, given x."""
    return cube(x)


@mg.formula(namespace="inside")
def sine_backward(grad: Tensor, self: Tensor) -> Tensor:
    """Cotangent of x, given that of 3 x^2."""
    return vjp(cube, self)[1](grad)[0]


def _pull_back(ctx, x, grad):
    return {"x": vjp(cube, x)[1](grad)[0]}


with_jvp = mg.custom_op("inside::with_jvp(Tensor x) -> Tensor")(cube)
with_jvp.impl_save_for_backward(lambda inputs, output: inputs.x)
with_jvp.impl_backward(_pull_back)
with_jvp.impl_jvp(lambda inputs, output, tangents: jvp(cube, (inputs.x,), (tangents.x,))[1])

OPS = {
    "backward": _define("backward", lambda inputs, output: inputs.x, _pull_back),
    "residuals": _define(
        "residuals", lambda inputs, output: jacrev(cube)(inputs.x), lambda ctx, jacobian, grad: {"x": grad @ jacobian}
    ),
    "vmap rule": _define("with_vmap", lambda inputs, output: inputs.x, _pull_back, with_vmap=True),
    "jvp": with_jvp,
    "formula": formula,
}


def dual(function, x, tangent):
    with fwAD.dual_level():
        return fwAD.unpack_dual(function(fwAD.make_dual(x, tangent))).tangent


def square(f):
    return lambda x: f(x).pow(2).sum()


WAYS = {
    "value": lambda f: f(X),
    "grad": lambda f: grad(square(f))(X),
    "jvp": lambda f: jvp(f, (X,), (X,))[1],
    "dual numbers": lambda f: dual(f, X, X),
    "dual numbers of a gradient": lambda f: dual(grad(square(f)), X, X),
    "dual numbers of a batch": lambda f: dual(vmap(f), ROWS, ROWS),
    "hessian": lambda f: hessian(square(f))(X),
    "rev-rev": lambda f: jacrev(jacrev(square(f)))(X),
    "rev-fwd": lambda f: jacrev(jacfwd(square(f)))(X),
    "fwd-fwd": lambda f: jacfwd(jacfwd(square(f)))(X),
    "third": lambda f: jacrev(jacfwd(grad(square(f))))(X),
    "without torch.func": lambda f: torch.autograd.functional.hessian(square(f), X),
    "batched gradients": lambda f: torch.autograd.functional.jacobian(f, X, vectorize=True),
    "a graph outside of jvp": lambda f: torch.autograd.functional.jacobian(lambda x: jvp(f, (x,), (X,))[1], X),
    "a graph outside of vmap": lambda f: torch.autograd.functional.hessian(square(vmap(f)), ROWS),
    "vmap": lambda f: vmap(f)(ROWS),
    "vmap vmap": lambda f: vmap(vmap(f))(torch.stack([ROWS, 2 * ROWS])),
    "vmap hessian": lambda f: vmap(hessian(square(f)))(ROWS),
    "grad vmap": lambda f: grad(lambda x: square(vmap(f))(x))(ROWS),
    "jvp vmap": lambda f: jvp(vmap(f), (ROWS,), (ROWS,))[1],
    "vmap jvp": lambda f: vmap(lambda x: jvp(f, (x,), (x,))[1])(ROWS),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("op", OPS)
def test_every_transform_equals_the_function(op, way):
    same(WAYS[way](OPS[op]), WAYS[way](lambda x: 3 * x**2))


@pytest.mark.parametrize("way", [way for way in WAYS if way != "value"])
def test_a_rule_of_another_package(way):
    rule = mg.rule(
        "aten::hardsigmoid",
        vjp={"self": sine_backward.bind(grad="grad")},
        source="this test",
        samples=lambda dtype, device: iter([mg.Sample(X.to(device, dtype))]),
        register=False,
    )

    def function(x):
        y = torch.nn.functional.hardsigmoid(x)
        return y + (3 * x**2 - y).detach()  # the value of 3 x^2, with the derivative of the rule

    with mg.override(rule):
        same(WAYS[way](function), WAYS[way](lambda x: 3 * x**2))


def test_an_operator_of_torch_library_in_forward_mode():
    op = torch.library.custom_op("inside::library", mutates_args=(), schema="(Tensor x) -> Tensor")(cube)
    op.register_autograd(
        lambda ctx, grad: vjp(cube, *ctx.saved_tensors)[1](grad)[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    with mg.forward_ad.enable(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # vmap of an operator without a rule
        for way in ("jvp", "hessian", "fwd-fwd", "rev-fwd", "dual numbers", "vmap jvp"):
            same(WAYS[way](op), WAYS[way](lambda x: 3 * x**2))


@pytest.mark.parametrize("op", OPS)
def test_fake_tensors(op):
    with FakeTensorMode():
        assert OPS[op](torch.rand(2, 3)).shape == (2, 3)


def test_compiled():
    for op in OPS.values():
        compiled = mg.compile(square(op), lowering="eager")
        same(
            WAYS["without torch.func"](lambda x, f=compiled: f(x).sqrt()),
            WAYS["without torch.func"](lambda x: 3 * x**2),
        )
