"""Custom ops: every kind of argument, residual and output, in every mode and transform, by their numbers."""

import contextlib
import dataclasses
import gc
import itertools
import threading
import weakref
from typing import NamedTuple

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from ops_for_tests import UNIT, define, random, same, saved_outputs, unit
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint

import torch_manualgrad as mg

NESTINGS = [c for k in (1, 2, 3) for c in itertools.product((jacrev, jacfwd), repeat=k)]


def nested(transforms, f):
    for transform in transforms:
        f = transform(f)
    return f


def name_of(transforms):
    return "-".join(t.__name__ for t in transforms)


def sine(**implementations):
    """sin with whatever is to be tried; a gradient that is wrong by a factor is told by the factor."""
    return define("(Tensor x) -> Tensor", lambda x: x.sin(), **implementations)


def keep_x(inputs, output):
    return inputs.x


def times(factor):
    return lambda ctx, x, g: {"x": factor * g * x.cos()}


def factor_of(f, x=None):
    """The factor in front of cos in the gradient of a `sine`."""
    x = random(3).requires_grad_() if x is None else x
    ratio = torch.autograd.grad(f(x).sum(), x)[0] / x.detach().cos()
    same(ratio, ratio[0].expand_as(ratio))
    return round(ratio[0].item(), 6)


# -- one op through all transforms -----------------------------------------------------------------------------------


def loss_of(op):
    def loss(x):
        y, n = op(x)
        return (y.sin() * torch.arange(1, x.shape[-1] + 1)).sum() + (n * n * n).sum()

    return loss


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


# -- residuals -------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: object
    second: object


@dataclasses.dataclass
class Box:
    tensor: torch.Tensor
    number: float


torch.utils._pytree.register_dataclass(Box)


@pytest.mark.parametrize(
    "pack, unpack",
    [
        (lambda x: x, lambda r: r),
        (lambda x: {"a": [None, (x, 2.0)], "b": {}}, lambda r: r["a"][1][0] * r["a"][1][1] / 2),
        (lambda x: Pair(3, Pair(x, "text")), lambda r: r.second.first * len(r.second.second) / 4),
        (lambda x: Box(x, 2.0), lambda r: r.tensor * r.number / 2),
        (lambda x: [x, x, x], lambda r: r[2]),
        (lambda x: (x / 2, x), lambda r: r[0] + r[1] / 2),  # computed, so computed again for the next order
    ],
    ids=["tensor", "dict", "named tuple", "dataclass", "twice the same", "computed"],
)
def test_residuals_are_any_tree(pack, unpack):
    op = sine(
        save_for_backward=lambda inputs, output: pack(inputs.x), backward=lambda ctx, r, g: {"x": g * unpack(r).cos()}
    )
    for transforms in NESTINGS:
        f = nested(transforms, lambda x: op(x).square().sum())
        same(f(random(2)), nested(transforms, lambda x: x.sin().square().sum())(random(2)))


@pytest.mark.parametrize("nothing", [None, (), {}, 3.0, "text"])
def test_residuals_without_tensors(nothing):
    seen = []
    op = define(
        "(Tensor x) -> Tensor",
        lambda x: 2 * x,
        save_for_backward=lambda inputs, output: nothing,
        backward=lambda ctx, saved, g: (seen.append(saved), {"x": 2 * g})[1],
    )
    same(grad(lambda x: op(x).sum())(random(3)), torch.full((3,), 2.0).double())
    assert seen == [nothing]


@pytest.mark.parametrize("what", ["input", "output"])
def test_a_changed_residual_is_caught(what):
    op = sine(
        save_for_backward=lambda inputs, output: inputs.x if what == "input" else output,
        backward=lambda ctx, saved, g: {"x": g * saved},
    )
    x = random(3).requires_grad_() * 1
    y = op(x)
    (x if what == "input" else y).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dual", [False, True], ids=["", "dual"])
@pytest.mark.parametrize("op", UNIT)
def test_nothing_leaks(op, dual):
    """Without the garbage collector: no cycle between a graph and what it saved."""
    gc.collect()
    gc.disable()
    try:
        with fwAD.dual_level():
            x = random(3).requires_grad_() * 1
            x = fwAD.make_dual(x, random(3)) if dual else x
            y, n = UNIT[op](x)
            alive = [weakref.ref(o) for o in (x, y, n, y.grad_fn)]
            assert all(r() is not None for r in alive)
            del x, y, n
        assert [r() for r in alive] == [None] * 4
    finally:
        gc.enable()


def test_saved_tensors_hooks():
    seen = []
    x = random(3).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t.detach(), lambda t: t * 2):
        y = sine(save_for_backward=keep_x, backward=lambda ctx, s, g: {"x": g * s})(x)
    same(torch.autograd.grad(y.sum(), x)[0], 2 * x.detach())
    assert seen == [(3,)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    x = random(3).requires_grad_()
    checkpoint(lambda x: loss_of(saved_outputs)(x * 1), x, use_reentrant=reentrant).backward()
    same(x.grad, grad(loss_of(unit))(x.detach()))


def test_hooks_retain_graph_and_second_backward():
    op, x, seen = sine(save_for_backward=keep_x, backward=times(1)), random(3).requires_grad_(), []
    y = op(x)
    y.register_hook(lambda g: 2 * g)
    y.grad_fn.register_hook(lambda gi, go: seen.append((len(gi), len(go))))
    for _ in range(2):
        same(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], 2 * x.detach().cos())
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    assert len(seen) == 3


def test_anomaly_mode_finds_the_op():
    op = sine(save_for_backward=keep_x, backward=times(float("nan")))
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="returned nan values"):
        with torch.autograd.detect_anomaly():
            op(random(3).requires_grad_()).sum().backward()


def test_a_backward_may_use_autograd():
    def backward(ctx, x, g):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return {"x": torch.autograd.grad(x.sin(), x, g)[0]}

    assert factor_of(sine(save_for_backward=keep_x, backward=backward)) == 1
    op = sine(save_for_backward=keep_x, backward=lambda ctx, x, g: {"x": vjp(torch.sin, x)[1](g)[0]})
    assert factor_of(op) == 1
    same(jacrev(jacrev(lambda x: op(x).sum()))(random(3)), torch.diag(-random(3).sin()))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("op", UNIT)
def test_without_gradients(op, context):
    with context():
        y, n = UNIT[op](random(3).requires_grad_())
    assert not y.requires_grad and not n.requires_grad
    same((y, n), unit(random(3)))


# -- registration and swapping ---------------------------------------------------------------------------------------


def test_implementations_can_be_replaced():
    op = sine(save_for_backward=keep_x, backward=times(2))
    y = op(x := random(3).requires_grad_())
    op.impl_backward(times(3))
    assert factor_of(op) == 3
    same(torch.autograd.grad(y.sum(), x)[0], 2 * x.detach().cos())  # the call keeps what was active when it ran
    op.impl_autograd(lambda x: op.below_autograd(x) + x)
    same(op(random(3)), random(3).sin() + random(3))


def test_kernels_by_device():
    op = sine()
    op.impl("cpu")(lambda x: x.sin() + 1)
    same(op(random(3)), random(3).sin() + 1)
    assert op(torch.ones(3, device="meta")).shape == (3,)
    with op.swap(cpu=None):
        same(op(random(3)), random(3).sin())
    op.impl("default")(lambda x: x.sin() + 2)
    with op.swap(cpu=None):
        same(op(random(3)), random(3).sin() + 2)
    same(op(random(3)), random(3).sin() + 1)


@pytest.fixture
def op():
    return sine(save_for_backward=keep_x, backward=times(1))


def test_swaps_nest_and_survive_exceptions(op):
    with op.swap(backward=times(2)) as same_op:
        assert same_op is op and factor_of(op) == 2
        with contextlib.suppress(ZeroDivisionError), op.swap(backward=times(3)):
            assert factor_of(op) == 3
            1 / 0  # noqa: B018
        assert factor_of(op) == 2
    assert factor_of(op) == 1


def test_swaps_end_in_any_order(op):
    a, b = op.swap(backward=times(2)), op.swap(backward=times(3))
    a.__enter__()
    b.__enter__()
    a.__exit__(None, None, None)
    assert factor_of(op) == 3
    b.__exit__(None, None, None)
    assert factor_of(op) == 1
    with a, a:
        assert factor_of(op) == 2
    assert factor_of(op) == 1


def test_swap_of_every_kind(op):
    with op.swap(jvp=lambda inputs, output, tangents: 5 * tangents.x):
        same(jvp(op, (random(3),), (random(3),))[1], 5 * random(3))
    with op.swap(save_for_backward=lambda inputs, output: 0 * inputs.x):
        same(grad(lambda x: op(x).sum())(random(3)), torch.ones(3).double())
    with op.swap(autograd=lambda x: 7 * op.below_autograd(x)):
        same(op(random(3)), 7 * random(3).sin())
    with op.swap(vmap=lambda info, in_dims, x: (x, in_dims.x)):
        same(vmap(op)(random(2, 3)), random(2, 3))
    with op.swap(fake=lambda x: x.new_empty(7)):
        assert op(torch.ones(3, device="meta")).shape == (7,)
    with op.swap(default=lambda x: x.cos()):
        same(op(random(3)), random(3).cos())
    with op.swap(backward=None, save_for_backward=None), pytest.raises(RuntimeError, match="no derivative in reverse"):
        op(random(3).requires_grad_())
    assert factor_of(op) == 1


def test_swap_of_output_differentiability(op):
    x = random(3).requires_grad_()
    with op.swap(backward=times(2), output_differentiability=[False]):
        assert not op(x).requires_grad
    assert op(x).requires_grad


def test_swaps_of_two_threads_interleaved(op):
    """The last one entered wins, in every thread, and leaving it brings back the other."""
    entered, leave = threading.Event(), threading.Event()

    def other():
        with op.swap(backward=times(3)):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with op.swap(backward=times(2)):
        thread.start()
        assert entered.wait(60) and factor_of(op) == 3
    assert factor_of(op) == 3
    leave.set()
    thread.join()
    assert factor_of(op) == 1


def test_swapping_while_other_threads_differentiate(op):
    stop, seen, failures = threading.Event(), set(), []

    def work():
        while not stop.is_set():
            try:
                seen.add(factor_of(op))
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for _ in range(300):
        with op.swap(backward=times(2)):
            pass
    stop.set()
    for t in threads:
        t.join()
    assert not failures and seen <= {1.0, 2.0} and factor_of(op) == 1


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


def test_vmap_loop_over_all_kinds_of_arguments():
    def f(op):
        return lambda x, b, k: op([x, 2 * x], [None], b, k=k)[:2]

    args = random(4, 3), random(3, seed=1), random(3, 4, seed=2)
    same(vmap(f(mixed_op), (0, None, 1))(*args), tuple(vmap(f(mixed), (0, None, 1))(*args)))
    same(vmap(lambda k: mixed_op([args[1]], [], k=k)[1])(args[0]), 2 * args[0] * args[1])


def test_vmap_of_an_empty_batch_says_what_to_do():
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


# -- a whole autograd kernel -----------------------------------------------------------------------------------------


def test_setup_context_style_in_a_whole_kernel():
    class Sine(mg.SingleLevelFunction):
        @staticmethod
        def forward(x):
            return op.below_autograd(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0].cos()

        @staticmethod
        def jvp(ctx, t):
            return t * ctx.saved_tensors[0].cos()

    op = sine(autograd=Sine.apply)
    for transforms in NESTINGS:
        f, g = (nested(transforms, lambda x, s=s: s(x).square().sum())(random(2)) for s in (op, torch.sin))
        same(f, g)


def test_a_whole_kernel_goes_before_the_pair():
    op = sine(save_for_backward=keep_x, backward=times(2), autograd=lambda x: x * 3)
    assert not (op(random(3)) - 3 * random(3)).any()
    with op.swap(autograd=None):
        assert factor_of(op) == 2


# -- defined again ----------------------------------------------------------------------------------------------------


def test_redefine_replaces_the_op_with_all_that_is_registered_for_it():
    def define(schema, factor):
        @mg.custom_op(f"redefined::op{schema}", redefine=True)
        def op(x, y=1.0):
            return factor * y * x

        return op

    first = define("(Tensor x) -> Tensor", 2)
    first.impl_save_for_backward(lambda inputs, output: None)
    first.impl_backward(lambda ctx, saved, grad: {"x": 2 * grad})
    first.impl("cpu")(lambda x: 2 * x)
    compiled = torch.compile(lambda x: torch.ops.redefined.op(x), backend="aot_eager")
    x = random(3).requires_grad_()
    same(torch.autograd.grad(compiled(x).sum(), x)[0], torch.full((3,), 2.0).double())
    with pytest.raises(ValueError, match="already defined; a duplicate name is an error .custom_op.*redefine=True"):
        mg.custom_op("redefined::op(Tensor x) -> Tensor")(lambda x: x)

    second = define("(Tensor x) -> Tensor", 3)
    same(torch.ops.redefined.op(x.detach()), 3 * x.detach())
    with pytest.raises(RuntimeError, match="redefined::op has no derivative in reverse mode"):
        second(x)
    second.impl_save_for_backward(lambda inputs, output: None)
    second.impl_backward(lambda ctx, saved, grad: {"x": 3 * grad})
    same(torch.autograd.grad(compiled(x).sum(), x)[0], torch.full((3,), 3.0).double())

    other = define("(Tensor x, float y=1.0) -> Tensor", 5)
    same(other(x.detach(), 2.0), 10 * x.detach())
    same(compiled(x.detach()), 5 * x.detach())
    with pytest.raises(ValueError, match="already defined"):
        mg.custom_op("aten::sin(Tensor x) -> Tensor", redefine=True)(lambda x: x)
