"""Operators that write in place at two levels, against nested torch.func.jvp."""

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.forward_ad import dual_level, make_dual, unpack_dual

ORDER = torch.tensor([0, 2, 1])
MASK = torch.tensor([True, False, True, True])
ROWS = ORDER[:, None].expand(3, 4)

# What is written to b, a copy of x.
WRITES = {
    "mask": lambda b, x: b.__setitem__(MASK, x[MASK] * x[MASK]),
    "index": lambda b, x: b.__setitem__(ORDER, (x[:3] * 2).sin()),
    "index_add_": lambda b, x: b.index_add_(0, ORDER, x[:3] ** 2, alpha=2.0),
    "index_reduce_": lambda b, x: b.index_reduce_(0, ORDER, x[:3] ** 2, "prod"),
    "scatter_": lambda b, x: b.scatter_(0, ROWS, x[1:] ** 2),
    "masked_fill_": lambda b, x: b.masked_fill_(MASK, x[1, 1] ** 2),
    "masked_scatter_": lambda b, x: b.masked_scatter_(MASK, x**2),
    "fill_ by a tensor": lambda b, x: b[1].fill_(x[0, 0] ** 2),
    "fill_ by a number": lambda b, x: b[1].fill_(3.0),
    "zero_": lambda b, x: b.diagonal().zero_(),
    "addmm_": lambda b, x: b.addmm_(x, x),
    "lerp_": lambda b, x: b.lerp_(x**2, x.sigmoid()),
    "t_": lambda b, x: b.t_().mul_(x),
    "an overlapping copy": lambda b, x: b[1:].copy_(b[:-1].clone()),
    "another dtype": lambda b, x: b.copy_((x**2).float()),
    "itself": lambda b, x: b.sub_(b.t() * b),
    "bernoulli_": lambda b, x: (torch.manual_seed(1), b[2].bernoulli_(0.5)),
    "dropout": lambda b, x: (torch.manual_seed(1), torch.nn.functional.dropout(b, 0.5, True, inplace=True)),
    "lists": lambda b, x: torch._foreach_addcmul_([b[0], b[1]], [x[2], x[3]], [x[0], x[2]], 2.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes(name):
    generator = torch.Generator().manual_seed(0)
    x, v, w = torch.randn(3, 4, 4, dtype=torch.float64, generator=generator)

    def function(x):
        b = x.clone()
        WRITES[name](b, x)
        return b

    with mg.override("*"):
        first = torch.func.jvp(function, (x,), (v,))[1]
        second = torch.func.jvp(lambda y: torch.func.jvp(function, (y,), (v,))[1], (x,), (w,))[1]
    with dual_level() as a, dual_level() as b:
        y = function(make_dual(make_dual(x, w, level=a), v, level=b))
        found = unpack_dual(unpack_dual(y, level=b).tangent, level=a)
    assert torch.allclose(y, function(x), rtol=1e-14)  # an ordinary tensor after the levels
    precision = 1e-5 if name == "another dtype" else 1e-11
    assert torch.allclose(found.primal, first.double(), rtol=precision, atol=precision)
    mixed = torch.zeros_like(x) if found.tangent is None else found.tangent
    assert torch.allclose(mixed, second.double(), rtol=precision, atol=precision)


def test_lists_are_copied():
    x = torch.rand(2, 3)
    with dual_level():
        targets = [torch.zeros(3), torch.zeros(3)]
        torch._foreach_copy_(targets, [make_dual(x[0], x[0]), x[1]])
        assert torch.equal(unpack_dual(targets[0]).tangent, x[0]) and unpack_dual(targets[1]).tangent is None


def test_reading_an_unknown_tangent_raises():
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    mean, var = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    with dual_level():
        dual = make_dual(x, torch.ones_like(x))
        y = torch.ops.aten._native_batch_norm_legit(dual, None, None, mean, var, True, 0.1, 1e-5)[0]
        assert unpack_dual(y).tangent is not None
        with pytest.raises(NotImplementedError, match="unknown: the tensor is running_mean_out"):
            unpack_dual(mean)
    assert torch.allclose(mean, 0.1 * x.mean((0, 2)))


def test_a_functional_form_also_returns_written_arguments():
    with torch.library._scoped_library("levels_writes", "DEF") as library:
        library.define("noted(Tensor x, Tensor(a!) note) -> Tensor")
        library.define("noted_functional(Tensor x, Tensor note) -> Tensor")  # another operator, in spite of its name
        library.impl("noted", lambda x, note: (note.fill_(1), 2 * x)[1], "CompositeExplicitAutograd")
        library.impl("noted_functional", lambda x, note: 2 * x, "CompositeExplicitAutograd")
        with dual_level():
            x = make_dual(torch.ones(2), torch.ones(2))
            with pytest.raises(NotImplementedError, match="no functional form"):
                torch.ops.levels_writes.noted(x, torch.zeros(2))


@mg.custom_op("levels_writes::add_sine(Tensor x, Tensor(a!) s, Tensor(b!)? t=None) -> ()")
def add_sine(x, s, t=None):
    s.add_(x.sin())
    if t is not None:
        t.copy_(x * x)


@add_sine.impl_save_for_backward
def _(inputs, output):
    return inputs.x


@add_sine.impl_backward
def _(ctx, x, grad_s, grad_t):
    return {"x": grad_s * x.cos() + (0 if grad_t is None else 2 * x * grad_t), "s": grad_s, "t": None}


@mg.custom_op("levels_writes::sine_(Tensor(a!) x) -> Tensor(a!)")
def sine_(x):
    return x.sin_()


@mg.custom_op("levels_writes::sine_out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
def sine_out(x, *, out):
    return out.copy_(x.sin())


for op in (sine_, sine_out):
    op.impl_save_for_backward(lambda inputs, output: inputs.x)
    op.impl_backward(
        lambda ctx, x, grad, *_: {"x": grad * x.cos(), **({"out": None} if "out" in ctx.needs_input_grad else {})}
    )


@mg.custom_op("levels_writes::crossed(Tensor x, Tensor(a!) s, Tensor(b!) t) -> (Tensor(b!), Tensor, Tensor(a!))")
def crossed(x, s, t):
    return t.mul_(x), x.exp(), s.add_(x.sin())


crossed.impl_save_for_backward(lambda inputs, output: (inputs.x, inputs.t, output[0]))


@crossed.impl_backward
def _(ctx, saved, grad_exp, grad_s, grad_t):
    x, t, exp = saved
    return {"x": grad_exp * exp + grad_s * x.cos() + grad_t * t, "s": grad_s, "t": grad_t * x}


def in_another_order(x):
    t, exp, s = crossed(x, x * 3, x * 2)
    return t * s.sin() + exp


def with_and_without(x):
    s, t = x * 3, torch.zeros_like(x)
    add_sine(x, s)
    add_sine(x * 2, s, t)
    return s * t


CUSTOM = {
    "an optional argument": with_and_without,
    "returned in another order": in_another_order,
    "in place": lambda x: sine_(x * 2),
    "out": lambda x: sine_out(x * 2, out=torch.zeros_like(x)),
}


@pytest.mark.parametrize("name", CUSTOM)
def test_custom_operators_that_write(name):
    f, x = CUSTOM[name], torch.tensor([0.3, -1.2], dtype=torch.float64)
    with dual_level():
        found = unpack_dual(f(make_dual(x, torch.ones_like(x)))).tangent
    torch.testing.assert_close(found, torch.func.jvp(f, (x,), (torch.ones_like(x),))[1])
