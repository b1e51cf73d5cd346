"""A write to a result changes no tangent but its own."""

import itertools

import pytest
import torch
from torch.func import jvp
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import torch_manualgrad as mg

X, T = torch.tensor([1.3, 2.7], dtype=torch.float64), torch.ones(2, dtype=torch.float64)


@mg.custom_jvp
def as_it_is(x):
    return x - 1


@as_it_is.defjvp
def _(primals, tangents):
    return primals[0] - 1, tangents[0]


@mg.custom_jvp
def a_view(x):
    return x.reshape(1, 2) - 1


@a_view.defjvp
def _(primals, tangents):
    return primals[0].reshape(1, 2) - 1, tangents[0].reshape(1, 2)


@mg.custom_vjp
def straight_through(x):
    return x.round()


straight_through.defvjp(lambda x: (x.round(), None), lambda saved, g: (g,))


@mg.custom_op("tangents_apart::copied", mutates_args=())
def copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@copied.impl_jvp
def _(inputs, output, tangents):
    return tangents.x


FUNCTIONS = {
    "custom_jvp": as_it_is,
    "a view": a_view,
    "custom_vjp": straight_through,
    "custom_op": copied,
    "checkpoint": lambda x: mg.checkpoint(torch.frac)(x),
    "frac": torch.frac,
    "sub": lambda x: torch.ops.aten.sub.Scalar(x, 1.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_write_to_a_result_keeps_the_tangent_of_its_argument(name):
    def square(x):
        FUNCTIONS[name](x).mul_(3)
        return x * x

    def slope(x):
        return jvp(square, (x,), (torch.ones_like(x),))[1]

    def change(x):  # whose tangent is itself changing
        return jvp(lambda x: FUNCTIONS[name](x).reshape(2) * x, (x,), (x,))[1]

    with mg.override():
        for _ in range(3):  # a jvp is recorded
            torch.testing.assert_close(jvp(change, (X,), (T,))[1], 3 * X + FUNCTIONS[name](X).reshape(2))
            torch.testing.assert_close(slope(X), 2 * X)
            torch.testing.assert_close(jvp(slope, (X,), (T,))[1], 2 * T)
            torch.testing.assert_close(torch.func.vmap(slope)(torch.stack([X, X]))[1], 2 * X)
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(X, T.clone())
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(square(x)).tangent, 2 * X)


@mg.custom_jvp
def twice(x):
    return x.sin(), x.cos()


@twice.defjvp
def _(primals, tangents):
    (x,), t = primals, tangents[0] * 2
    return (x.sin(), x.cos()), (t, t)


def test_a_write_to_a_result_keeps_the_tangent_of_another_result():
    def f(x):
        y, z = twice(x)
        y.mul_(3)
        return z

    torch.testing.assert_close(jvp(f, (X,), (T,))[1], 2 * T)


COPIES = ("alias", "as_strided", "expand", "permute", "squeeze", "t", "transpose", "unfold", "unsqueeze", "view")


@pytest.mark.slow
@pytest.mark.parametrize(
    "info",
    [
        info
        for info in op_db
        if info.supports_forward_ad
        and torch.float64 in info.dtypes
        and info.name not in [f"{n}_copy" for n in COPIES]  # which no rule differentiates
    ],
    ids=lambda info: info.formatted_name,
)
def test_tangents_of_results_share_no_memory_with_those_of_arguments(info):
    fwAD = torch.autograd.forward_ad
    for sample in itertools.islice(info.sample_inputs("cpu", torch.float64, requires_grad=True), 2):
        values, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        with mg.override(), fwAD.dual_level():
            duals = {}
            for i, x in enumerate(values):
                if isinstance(x, torch.Tensor):
                    values[i] = x.detach()
                    if x.requires_grad and x.layout is torch.strided and x.numel():
                        values[i] = duals[i] = fwAD.make_dual(values[i], torch.rand_like(values[i]))
            x, others, options = tree_unflatten(values, spec)
            try:
                results = tree_leaves(info.op(x, *others, **options))
            except (RuntimeError, NotImplementedError):  # no forward mode for this sample
                continue
            for y in results:
                tangent = fwAD.unpack_dual(y).tangent if isinstance(y, torch.Tensor) else None
                if tangent is None or tangent.layout is not torch.strided or not tangent.numel():
                    continue
                for x in duals.values():
                    if not torch._C._is_alias_of(x, y):
                        assert not torch._C._is_alias_of(fwAD.unpack_dual(x).tangent, tangent), sample
