"""Custom ops with every kind of argument and output, by their numbers."""

import pytest
import torch
from helpers.ops import define
from helpers.sine import keep_x, sine, times
from helpers.tensors import random, same
from helpers.transforms import NESTINGS, name_of, nested
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import torch_manualgrad as mg

# -- arguments -------------------------------------------------------------------------------------------------------


def mixed(xs, os, b=None, *, k, s=2.0):
    product = 1
    for o in os:
        product = product if o is None else product * o
    ys = [(x * k * s + (0 if b is None else b)) * product for x in xs]
    return ys, sum(ys) * 1, len(ys)


def mixed_save(inputs, output):
    return {"xs": list(inputs.xs), "os": tuple(inputs.os), "rest": (inputs.b, inputs.k, inputs.s)}


def mixed_backward(ctx, saved, g_list, g_sum, g_len):
    assert g_len is None
    xs, os, (b, k, s) = saved["xs"], saved["os"], saved["rest"]
    g_list = g_list or [None] * len(xs)
    total = [sum(g for g in (gl, g_sum) if g is not None) for gl in g_list]

    def product(but=None):
        found = torch.ones_like(k)
        for i, o in enumerate(os):
            found = found if o is None or i == but else found * o
        return found

    return {
        "xs": [g * k * s * product() for g in total],
        "b": None if b is None else sum(g * product() for g in total),
        "os": [
            None
            if o is None
            else sum(g * (x * k * s + (0 if b is None else b)) * product(i) for g, x in zip(total, xs))
            for i, o in enumerate(os)
        ],
        "k": sum(g * x * s * product() for g, x in zip(total, xs)),
    }


mixed_op = define(
    "(Tensor[] xs, Tensor?[] os, Tensor? b=None, *, Tensor k, float s=2.0) -> (Tensor[], Tensor, int)",
    mixed,
    save_for_backward=mixed_save,
    backward=mixed_backward,
)


def mixed_loss(op, x, z, o, b, k):
    ys, total, n = op([x, z], [None, o], b, k=k, s=3.0)
    return (ys[0].sin() + n * total.exp()).sum()


MIXED = [random(3, seed=i) for i in range(5)]


@pytest.mark.parametrize("transforms", NESTINGS[:6], ids=name_of)
def test_all_kinds_of_arguments(transforms):
    over = tuple(range(5))
    f, g = (nested([lambda f, t=t: t(f, argnums=over) for t in transforms], lambda *a: mixed_loss(op, *a))
            for op in (mixed_op, mixed))  # fmt: skip
    same(f(*MIXED), g(*MIXED))


def test_all_kinds_of_arguments_pass_opcheck():
    x, z, o, b, k = [v.clone().requires_grad_() for v in MIXED]
    assert set(torch.library.opcheck(mixed_op.op, ([x, z], [None, o], b), {"k": k}).values()) == {"SUCCESS"}


def test_defaults_and_absent_optionals():
    x, k = (random(3, seed=i).requires_grad_() for i in range(2))
    ys, total, n = mixed_op([x], [], k=k)
    same(ys[0], x * k * 2)
    assert n == 1
    same(torch.autograd.grad(total.sum(), (x, k)), (2 * k.detach(), 2 * x.detach()))


@pytest.mark.parametrize("which", range(5))
def test_only_some_inputs_have_tangents(which):
    f, g = (
        lambda v, op=op: mixed_loss(op, *[v if i == which else w for i, w in enumerate(MIXED)])
        for op in (mixed_op, mixed)
    )
    same(jvp(f, (MIXED[which],), (random(3, seed=9),)), jvp(g, (MIXED[which],), (random(3, seed=9),)))


def test_vmap_loop_over_all_kinds_of_arguments():
    def f(op):
        return lambda x, b, k: op([x, 2 * x], [None], b, k=k)[:2]

    args = random(4, 3), random(3, seed=1), random(3, 4, seed=2)
    same(vmap(f(mixed_op), (0, None, 1))(*args), tuple(vmap(f(mixed), (0, None, 1))(*args)))
    same(vmap(lambda k: mixed_op([args[1]], [], k=k)[1])(args[0]), 2 * args[0] * args[1])


def test_needs_input_grad():
    seen = []

    def backward(ctx, saved, g):
        seen.append(ctx.needs_input_grad)
        return {"a": g, "bs": [g, g], "c": None}

    op = define(
        "(Tensor a, Tensor[] bs, Tensor? c=None, *, int n=1) -> Tensor",
        lambda a, bs, c=None, *, n=1: a + sum(bs),
        save_for_backward=lambda inputs, output: None,
        backward=backward,
    )
    op(random(3), [random(3).requires_grad_(), random(3)]).sum().backward()
    assert seen == [{"a": False, "bs": [True, False], "c": False}]


def test_schema_from_annotations():
    def scaled(x: torch.Tensor, n: int = 2) -> torch.Tensor:
        return x * n

    op = mg.custom_op("mgtest::annotated")(scaled)
    assert str(op.signature.schema) == "mgtest::annotated(Tensor x, SymInt n=2) -> Tensor"
    same(op(random(3)), 2 * random(3))
    same(torch.ops.mgtest.annotated(random(3), 5), 5 * random(3))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_no_dimensions_and_no_elements(shape):
    op, x = sine(save_for_backward=keep_x, backward=times(1)), random(*shape)
    same(jvp(op, (x,), (x,)), (x.sin(), x * x.cos()))
    same(grad(lambda x: op(x).sum())(x), x.cos())
    same(hessian(lambda x: op(x).sum())(x), hessian(lambda x: x.sin().sum())(x))


def test_no_outputs_and_no_tensor_inputs():
    seen = []
    op = define("(Tensor x) -> ()", seen.append)
    assert op(random(3).requires_grad_()) is None and len(seen) == 1
    same(define("(int n) -> Tensor", lambda n: torch.ones(n))(3), torch.ones(3))


def cube(z):
    return z * z.conj() * z


@pytest.mark.parametrize("transforms", NESTINGS, ids=name_of)
def test_complex(transforms):
    op = define(
        "(Tensor z) -> Tensor",
        cube,
        save_for_backward=lambda inputs, output: inputs.z,
        backward=lambda ctx, z, g: {"z": 2 * z.abs().square() * g + z * z * g.conj()},
    )

    def real(f):
        return lambda x: torch.view_as_real(f(torch.view_as_complex(x))).pow(2).sum()

    same(nested(transforms, real(op))(random(2, 2)), nested(transforms, real(cube))(random(2, 2)))


@pytest.mark.parametrize("transforms", NESTINGS, ids=name_of)
@pytest.mark.parametrize("listed", [False, True])
def test_a_real_gradient_of_a_complex_input(transforms, listed):
    """PyTorch's engine casts it; so does a jvp that is derived from it."""
    if listed:
        op = define(
            "(Tensor[] zs) -> Tensor",
            lambda zs: sum(z.real for z in zs),
            save_for_backward=lambda inputs, output: len(inputs.zs),
            backward=lambda ctx, count, g: {"zs": [g] * count},
        )
    else:
        op = define(
            "(Tensor z) -> Tensor",
            lambda z: z.real.clone(),
            save_for_backward=lambda inputs, output: None,
            backward=lambda ctx, saved, g: {"z": g},
        )

    def program(real):
        return lambda x: real(torch.complex(x.sin(), x)).pow(3).sum()

    found = nested(transforms, program(lambda z: op([z, z]) / 2 if listed else op(z)))(random(2))
    same(found, nested(transforms, program(lambda z: z.real))(random(2)))


# -- outputs ---------------------------------------------------------------------------------------------------------


def two_and_three(x):
    return [x * 2, x * 3], x * 4, 5


def marked(marks, **more):
    return define(
        "(Tensor x) -> (Tensor[], Tensor, int)",
        two_and_three,
        save_for_backward=lambda inputs, output: (),
        backward=lambda ctx, saved, gs, g, n: {
            "x": sum(f * c for f, c in zip((2, 3, 4), (*(gs or (None, None)), g)) if c is not None)
        },
        output_differentiability=marks,
        **more,
    )


@pytest.mark.parametrize("marks", [None, [True, True, False], [False, True, False], [True, False, False]])
def test_output_differentiability(marks):
    op, x = marked(marks), random(3).requires_grad_()
    ys, y, n = op(x)
    lists, one, _ = marks or (True, True, None)
    assert [v.requires_grad for v in (*ys, y)] == [lists, lists, one] and n == 5
    total = sum(v.sum() for v, yes in ((ys[0], lists), (ys[1], lists), (y, one)) if yes)
    slope = 5 * lists + 4 * one
    same(torch.autograd.grad(total, x)[0], torch.full((3,), slope).double())

    def everything(x):
        ys, y, _ = op(x)
        return (ys[0] + ys[1] + y).square().sum() / 2

    # forward mode, alone and inside and outside reverse mode, sees the same outputs as constants
    x = x.detach()
    same(jacfwd(everything)(x), 9 * slope * x)
    for transforms in NESTINGS[2:6]:
        same(nested(transforms, everything)(x), slope * slope * torch.eye(3).double())


def test_tangent_of_an_output_that_is_not_differentiable_is_dropped():
    op = marked([False, True, False], jvp=lambda i, o, t: ([t.x * 2, t.x * 3], t.x * 4, None))
    same(jvp(lambda x: op(x)[:2], (random(3),), (random(3),))[1][1], 4 * random(3))
    assert not jvp(lambda x: op(x)[0][0], (random(3),), (random(3),))[1].any()


def test_integer_output():
    op = define(
        "(Tensor x) -> (Tensor, Tensor)",
        lambda x: tuple(x.sort()),
        save_for_backward=lambda inputs, output: output[1],
        backward=lambda ctx, places, g, _: {"x": torch.zeros_like(g).scatter(0, places, g)},
    )
    x, t = random(4), random(4, seed=1)
    assert not op(x.requires_grad_())[1].requires_grad
    x = x.detach()
    same(jvp(lambda x: op(x)[0], (x,), (t,)), jvp(lambda x: x.sort()[0], (x,), (t,)))
    same(jacrev(lambda x: op(x)[0])(x), jacfwd(lambda x: op(x)[0])(x))


def test_integer_input():
    op = define(
        "(Tensor x, Tensor at) -> Tensor",
        lambda x, at: x[at],
        save_for_backward=lambda inputs, output: (inputs.at, inputs.x.shape[0]),
        backward=lambda ctx, saved, g: {"x": g.new_zeros(saved[1]).index_add(0, saved[0], g), "at": None},
    )
    x, at = random(3), torch.tensor([0, 0, 2])
    for transform in (jacrev, jacfwd):
        same(transform(op)(x, at), transform(lambda x: x[at])(x))


def test_undefined_cotangents_are_none():
    seen = []

    def backward(ctx, saved, a, b):
        seen.append((a is None, b is None))
        return {"x": (0 if a is None else 2 * a) + (0 if b is None else 3 * b)}

    op = define(
        "(Tensor x) -> (Tensor, Tensor)", lambda x: (2 * x, 3 * x), save_for_backward=lambda i, o: (), backward=backward
    )
    x = random(3).requires_grad_()
    for which, slope in ((0, 2), (1, 3)):
        same(torch.autograd.grad(op(x)[which].sum(), x)[0], torch.full((3,), slope).double())
        same(grad(lambda x: op(x)[which].sum())(random(3)), torch.full((3,), slope).double())  # noqa: B023
    assert seen == [(False, True)] * 2 + [(True, False)] * 2
