"""Rules that write to tensors, under torch.func.linearize, which computes the constants of its graph in advance."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, linearize
from torch.fx.experimental.proxy_tensor import make_fx

import torch_manualgrad as mg
from torch_manualgrad import testing

numbers = itertools.count()


def filled(x: Tensor, t: Tensor) -> Tensor:
    """3 x^2 t, written in parts."""
    made = torch.zeros_like(x)
    made[0] = 3 * x[0] ** 2 * t[0]
    made[1:].copy_(x[1:] ** 2 * t[1:])
    made.narrow(0, 1, 2).mul_(3)
    return made


def with_jvp() -> Callable[..., Any]:
    @mg.custom_jvp
    def cube(x: Tensor) -> Tensor:
        return x**3

    cube.defjvp(lambda primals, tangents: (cube(*primals), filled(*primals, *tangents)))
    return cube


def operator(own_jvp: bool) -> Callable[..., Any]:
    @mg.custom_op(f"linearized::cube{next(numbers)}")
    def cube(x: Tensor) -> Tensor:
        return x**3

    cube.impl_save_for_backward(lambda inputs, output: inputs.x)
    cube.impl_backward(lambda ctx, x, g: {"x": filled(x, g)})
    if own_jvp:
        cube.impl_jvp(lambda inputs, output, tangents: filled(inputs.x, tangents.x))
    return cube


def overridden() -> Callable[..., Any]:
    """A rule of the user's for PyTorch's operator."""
    rule = mg.rule(
        "aten::atan",
        jvp={"result": lambda self, self_t: filled(self, self_t)},
        vjp={"self": lambda grad, self: grad},
        register=False,
    )

    def call(x: Tensor) -> Tensor:
        with mg.override(rule):
            return torch.arctan(x)

    return call


MADE = {
    "custom_jvp": with_jvp,
    "operator": lambda: operator(False),
    "operator with a jvp": lambda: operator(True),
    "rule": overridden,
}


@pytest.mark.parametrize("kind", MADE)
def test_a_rule_that_fills_a_buffer(kind):
    """It is right in other ways; where PyTorch would lose the write, it raises."""
    call = MADE[kind]()
    x, t = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = 3 * x**2 * t
    torch.testing.assert_close(jvp(call, (x,), (t,))[1], expected)
    if kind == "operator":  # its jvp is the transpose of the backward
        torch.testing.assert_close(linearize(call, x)[1](t), expected)
    else:
        with pytest.raises(RuntimeError, match="linearize computes such a tensor once"):
            linearize(call, x)
    torch.testing.assert_close(make_fx(lambda x, t: jvp(call, (x,), (t,))[1])(x, t + 1)(x, t), expected)
    if kind != "rule":  # whose vjp is another
        torch.testing.assert_close(jvp(grad(lambda x: call(x).sum()), (x,), (t,))[1], 6 * x * t)
        testing.check(call, [(x,)])


def into_out(x: Tensor, t: Tensor) -> Tensor:
    return torch.mul(t, 3 * x**2, out=torch.empty_like(x))


def by_foreach(x: Tensor, t: Tensor) -> Tensor:
    made = [torch.ones_like(x), torch.ones_like(x)]
    torch._foreach_mul_(made, [t, t])
    return made[0] * 3 * x**2


@pytest.mark.parametrize("tangent", [into_out, by_foreach])
def test_any_argument_that_is_written_to_counts(tangent):
    @mg.custom_jvp
    def cube(x: Tensor) -> Tensor:
        return x**3

    cube.defjvp(lambda primals, tangents: (cube(*primals), tangent(*primals, *tangents)))
    x, t = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(jvp(cube, (x,), (t,))[1], 3 * x**2 * t)
    with pytest.raises(RuntimeError, match="linearize computes such a tensor once"):
        linearize(cube, x)


def test_a_rule_that_writes_to_tangents_alone():
    @mg.custom_jvp
    def cube(x: Tensor) -> Tensor:
        return x**3

    def rule(primals: tuple[Tensor], tangents: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        (x,), (t,) = primals, tangents
        scaled = t * x
        scaled[0].mul_(3)
        scaled[1:].mul_(3)
        several = [t * x, t + x]
        torch._foreach_mul_(several, 2)
        torch._foreach_div_(several, 2)
        torch.mul(x, t, out=several[0])
        return cube(x), scaled.mul_(x)

    cube.defjvp(rule)
    x, t = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    along = linearize(cube, x)[1]
    for direction in (t, 2 * t, t):
        torch.testing.assert_close(along(direction), 3 * x**2 * direction)
