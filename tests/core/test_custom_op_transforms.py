"""Custom ops in every mode and transform, under vmap and under autocast, by their numbers."""

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.ops import UNIT, define, unit
from helpers.sine import keep_x, loss_of, sine
from helpers.tensors import random, same
from helpers.transforms import NESTINGS, name_of, nested
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

# -- one op through all transforms -----------------------------------------------------------------------------------

WAYS = {
    **{name_of(c): lambda f, x, rows, t, c=c: nested(c, f)(x) for c in NESTINGS},
    "grad": lambda f, x, rows, t: grad(f)(x),
    "vjp": lambda f, x, rows, t: vjp(f, x)[1](torch.tensor(2.0, dtype=x.dtype)),
    "jvp": lambda f, x, rows, t: jvp(f, (x,), (t,)),
    "linearize": lambda f, x, rows, t: linearize(f, x)[1](t),
    "vmap": lambda f, x, rows, t: vmap(f)(rows),
    "vmap vmap": lambda f, x, rows, t: vmap(vmap(f), in_dims=1)(torch.stack([rows, 2 * rows])),
    "vmap grad": lambda f, x, rows, t: vmap(grad(f))(rows),
    "grad vmap": lambda f, x, rows, t: grad(lambda rows: vmap(f)(rows).sum())(rows),
    "vmap jvp": lambda f, x, rows, t: vmap(lambda x: jvp(f, (x,), (t,))[1])(rows),
    "jvp vmap": lambda f, x, rows, t: jvp(vmap(f), (rows,), (2 * rows,)),
    "vmap hessian": lambda f, x, rows, t: vmap(hessian(f))(rows),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("op", UNIT)
def test_every_transform_equals_the_function(op, way):
    args = random(3), random(4, 3, seed=1), random(3, seed=2)
    same(WAYS[way](loss_of(UNIT[op]), *args), WAYS[way](loss_of(unit), *args))


@pytest.mark.parametrize("op", UNIT)
def test_eager_gradcheck(op):
    x = random(2, 3).requires_grad_()
    torch.autograd.gradcheck(
        UNIT[op], x, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    torch.autograd.gradgradcheck(UNIT[op], x, check_fwd_over_rev=True)


@pytest.mark.parametrize("op", UNIT)
def test_dual_numbers(op):
    x, t = random(3), random(3, seed=1)
    with fwAD.dual_level():
        found = [fwAD.unpack_dual(o).tangent for o in UNIT[op](fwAD.make_dual(x, t))]
    same(found, list(jvp(unit, (x,), (t,))[1]))


@pytest.mark.parametrize("op", UNIT)
def test_dual_numbers_with_a_graph(op):
    """Reverse over a tangent: x both requires grad and is dual."""
    x, t = random(3).requires_grad_(), random(3, seed=1)

    def tangent(f):
        with fwAD.dual_level():
            return fwAD.unpack_dual(f(fwAD.make_dual(x, t))[0]).tangent.square().sum()

    same(torch.autograd.grad(tangent(UNIT[op]), x), torch.autograd.grad(tangent(unit), x))


@pytest.mark.parametrize("op", ["jvp written", "jvp derived"])
def test_opcheck(op):
    results = torch.library.opcheck(UNIT[op].op, (random(2, 3).requires_grad_(),))
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


# -- forward mode ----------------------------------------------------------------------------------------------------


def test_only_a_jvp():
    op = sine(jvp=lambda inputs, output, tangents: tangents.x * inputs.x.cos())
    same(jacfwd(op)(random(3)), torch.diag(random(3).cos()))
    same(jacfwd(jacfwd(lambda x: op(x).sum()))(random(3)), torch.diag(-random(3).sin()))
    for f in (lambda x: grad(lambda x: op(x).sum())(x), jacrev(jacfwd(op)), jacfwd(jacrev(op))):
        with pytest.raises(RuntimeError, match="no derivative in reverse mode"):
            f(random(3))


def test_no_tangent_is_zero():
    op = sine(jvp=lambda inputs, output, tangents: None)
    assert not jvp(op, (random(3),), (random(3),))[1].any()


def test_a_tangent_takes_the_dtype_of_its_output():
    op = sine(jvp=lambda inputs, output, tangents: tangents.x.float())
    assert jvp(op, (random(3),), (random(3),))[1].dtype is torch.float64


@pytest.mark.parametrize("transform", [lambda f: lambda x: jvp(f, (x,), (x,)), jacfwd, hessian])
@pytest.mark.parametrize(
    "backward",
    [
        lambda ctx, x, g: {"x": (g * x.cos()).detach()},
        lambda ctx, x, g: {"x": torch.from_numpy(g.detach().numpy() * x.detach().numpy())},
        lambda ctx, x, g: {"x": torch.from_numpy(g.numpy() * x.numpy())},
        lambda ctx, x, g: {"x": torch.zeros_like(g)},
    ],
    ids=["detach", "numpy of detached", "numpy", "constant"],
)
def test_no_jvp_from_a_backward_that_autograd_cannot_follow(backward, transform):
    op = sine(save_for_backward=keep_x, backward=backward)
    with pytest.raises(RuntimeError, match="no jvp|vmap"):  # jacfwd is a vmap, which refuses numpy by itself
        transform(lambda x: op(x).sum())(random(3))


# -- vmap ------------------------------------------------------------------------------------------------------------


def test_vmap_rule_with_keyword_tensors_and_several_outputs():
    seen = []

    def rule(info, in_dims, x, *, k):
        seen.append((info.batch_size, tuple(in_dims)))
        x, k = (v.unsqueeze(0) if d is None else v.movedim(d, 0) for v, d in zip((x, k), in_dims))
        return op(x, k=k), (0, 0)

    op = define("(Tensor x, *, Tensor k) -> (Tensor, Tensor)", lambda x, *, k: (x * k, x + k), vmap=rule)
    x, k = random(4, 3), random(3, 4, seed=1)
    for in_dims, args in (((0, 1), (x, k)), ((None, 1), (x[0], k)), ((0, None), (x, k[:, 0]))):
        found = vmap(lambda x, k: op(x, k=k), in_dims, out_dims=(1, 0))(*args)
        same(found, vmap(lambda x, k: (x * k, x + k), in_dims, out_dims=(1, 0))(*args))
        assert seen.pop() == (4, in_dims)
    batch = random(2, 4, 3)
    same(vmap(vmap(lambda x, k: op(x, k=k)))(batch, batch), (batch * batch, 2 * batch))


def test_vmap_of_lists_with_and_without_a_rule():
    def double(xs):
        return [2 * x for x in xs]

    ops = (
        define("(Tensor[] xs) -> Tensor[]", double),
        define("(Tensor[] xs) -> Tensor[]", double, vmap=lambda info, in_dims, xs: (double(xs), list(in_dims.xs))),
    )
    for op in ops:
        a, b = vmap(lambda x, y: op([x, y]), in_dims=(0, 1))(random(4, 3), random(2, 4))  # noqa: B023
        same((a, b), (2 * random(4, 3), 2 * random(2, 4).t()))


def test_the_error_of_vmap_over_an_empty_batch_names_the_fix():
    with pytest.raises(RuntimeError, match="no vmap implementation: a batch of size 0"):
        vmap(sine())(torch.zeros(0, 3))


# -- autocast --------------------------------------------------------------------------------------------------------


def test_autocast():
    """The derivative runs without autocast in the dtypes of its residuals; gradients have the dtype of their input."""
    seen = []

    def backward(ctx, saved, g):
        seen.append((torch.is_autocast_enabled("cpu"), g.dtype))
        a, b = saved
        return {"a": g.float() @ b.t().float(), "b": a.t().float() @ g.float()}

    def tangent(inputs, output, tangents):
        seen.append((torch.is_autocast_enabled("cpu"), output.dtype))
        return (tangents.a.float() @ inputs.b.float()).to(output.dtype)

    op = define(
        "(Tensor a, Tensor b) -> Tensor",
        lambda a, b: a @ b,
        save_for_backward=lambda inputs, output: (inputs.a, inputs.b),
        backward=backward,
        jvp=tangent,
    )
    a, b = (random(3, 3, seed=i).float().requires_grad_() for i in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        y = op(a, b)
        ga, gb = torch.autograd.grad(y.sum(), (a, b))
        half = torch.autograd.grad(op(a.bfloat16(), b.bfloat16()).sum(), (a, b))
        t = jvp(lambda a: op(a, b.detach()), (a.detach(),), (a.detach(),))[1]
        assert torch.is_autocast_enabled("cpu")
    assert y.dtype is t.dtype is torch.bfloat16
    assert ga.dtype is gb.dtype is half[0].dtype is torch.float32
    exact = torch.autograd.grad((a @ b).sum(), (a, b))
    same((ga, gb), exact)  # in float32: what autocast would have computed in bfloat16
    same(half, exact, rtol=0.05, atol=0.05)
    assert seen == [(False, torch.bfloat16)] * 3
