"""The private names of core/internals that ask for facts of operators, and of where tensors have their memory."""

import torch
from helpers.tensors import random

from torch_manualgrad.core import internals


def test_custom_ops_of_the_library():
    @torch.library.custom_op("mginternals::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    op = torch.ops.mginternals.doubled.default
    for given in (doubled, op, torch.ops.mginternals.doubled):
        assert internals.custom_op_overload(given) is op
    assert internals.custom_op_overload(torch.sin) is None
    assert internals.library_backward(op) is None and op not in internals.custom_ops_with_backward()

    def backward(ctx, grad):
        return 2 * grad

    doubled.register_autograd(backward)
    assert internals.library_backward(op) == (None, backward) and op in internals.custom_ops_with_backward()


def test_parse_schema():
    schema = internals.parse_schema("a::b(Tensor(c!) x, Tensor[] y, *, int n=3) -> Tensor")
    assert schema.name == "a::b" and schema.arguments[0].alias_info.is_write and schema.is_mutable
    assert [str(a.type) for a in schema.arguments] == ["Tensor", "List[Tensor]", "int"]
    assert schema.arguments[2].kwarg_only and schema.arguments[2].default_value == 3


def test_is_composite():
    aten = torch.ops.aten
    assert internals.is_composite(aten.square.default) and internals.is_composite(aten.matmul.default)
    for op in (aten.sin.default, aten.norm.Scalar, aten.dist.default, aten._cdist_forward.default):
        assert not internals.is_composite(op)


def test_shares_memory():
    x = random(3)
    assert internals.shares_memory((x,), {}, (x,)) and internals.shares_memory(([x], 1), {}, (x[1:],))
    assert internals.shares_memory((), {"k": x}, (x.view(-1),)) and internals.shares_memory((), {}, (x, x))
    assert not internals.shares_memory((x, [x], None), {"k": x}, (x.clone(), x.clone()))
    assert not internals.shares_memory((x[:0],), {}, (torch.empty(0),))


def test_is_view():
    x = random(2, 2)
    assert internals.is_view(x[0]) and not internals.is_view(x) and not internals.is_view(x.clone()[:].detach().clone())


def test_register_fake():
    library = torch.library.Library("mginternals", "FRAGMENT")
    library.define("shaped(Tensor x) -> Tensor")
    library.impl("shaped", lambda x: x.clone(), "CPU")
    internals.register_fake(library, "shaped", lambda x: x.new_empty(7), "here:1")
    op = torch.ops.mginternals.shaped
    assert op(torch.empty(2, device="meta")).shape == (7,)
    with internals.FakeTensorMode():
        assert op(torch.empty(2)).shape == (7,)
    internals.release(library)
