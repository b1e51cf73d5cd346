"""What core/internals/nested.py relies on: the private names of nested tensors and their ragged dims."""

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.tensors import random, same
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_manualgrad.core import internals


def test_nested_names():
    """A strided nested tensor as sizes, strides and starts in a buffer, also transposed; a jagged one's ragged dim."""
    buffer = random(6).requires_grad_()
    sizes, strides, starts = torch.tensor([[1, 2], [2, 2]]), torch.tensor([[2, 1], [2, 1]]), torch.tensor([0, 2])
    nested = internals.strided_nested(buffer, sizes, strides, starts)
    assert nested.is_nested and nested.layout is torch.strided and nested.values().data_ptr() == buffer.data_ptr()
    same(nested.unbind()[1], buffer[2:].reshape(2, 2))
    same(torch.autograd.grad((nested.values() * buffer.detach()).sum(), buffer)[0], buffer.detach())
    moved = internals.nested_strides(nested.transpose(1, 2))
    assert [t.tolist() for t in moved] == [[[2, 1], [2, 2]], [[1, 2], [1, 2]], [0, 2]]
    assert all(t.device.type == "cpu" for t in moved)
    for dim in (1, 2):
        values = random(*(6, 2) if dim == 1 else (2, 6))
        jagged = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 6]), jagged_dim=dim)
        assert internals.jagged_dim(jagged) == dim and internals.jagged_dim(jagged.transpose(1, 2)) == 3 - dim


def test_the_size_of_a_ragged_dim_in_a_graph():
    nested = torch.nested.nested_tensor([random(2, 3), random(4, 3)], layout=torch.jagged)
    with internals.FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake = mode.from_tensor(nested)
        assert internals.traced_nested_int(fake.offsets()) == fake.size(1)
    assert internals.traced_nested_int(nested.offsets()) is None


def test_jagged_names():
    """A jagged tensor's view of a buffer; one of a dual buffer, which refuses to compute; attention in another's hands."""
    values, offsets = random(6, 2).requires_grad_(), torch.tensor([0, 2, 6])
    known = internals.known_lengths(torch.empty(2, 0), torch.empty(4, 0))
    made = internals.jagged_nested(values, internals.JaggedStructure(offsets, None, 1, known))
    assert made.is_nested and made.layout is torch.jagged and made.offsets() is offsets
    assert made.values().data_ptr() == values.data_ptr() and internals.dual_jagged(made) is None
    found = internals.jagged_structure(made)
    assert found.offsets is offsets and found.known is known and internals.longest_known(found) == 4
    assert internals.longest_known(found._replace(known={})) is None
    assert made.to_padded_tensor(0.0).shape == (2, 4, 2)  # PyTorch knows it too
    assert internals.is_nested_int(made.size(1)) and not internals.is_nested_int(made.size(2))
    with torch.no_grad():
        made.mul_(1)
    assert values._version == 0
    result = internals.jagged_result(values, found)
    with torch.no_grad():
        result.mul_(1)
    assert values._version == result._version == 1 and internals.jagged_structure(result).known is known
    assert not result._is_view()
    view = internals.jagged_view(values, found)
    assert view._base is values and internals.jagged_structure(view).known is known
    lengths = torch.tensor([1, 2])
    holes = internals.jagged_nested(values, internals.JaggedStructure(offsets, lengths, 1, {}))
    assert holes.lengths() is lengths
    assert [len(c) for c in holes.unbind()] == [1, 2]
    with fwAD.dual_level():
        dual = fwAD.make_dual(values.detach(), torch.ones_like(values))
        made = internals.jagged_of_duals(dual, internals.JaggedStructure(offsets, None, 1, {}))
        assert made.is_nested and internals.jagged_dim(made) == 1 and made.shape[0] == 2
        assert internals.has_tangent(internals.dual_jagged(made))
        with pytest.raises(RuntimeError, match=r"aten\.neg\.default: the tangent of a jagged"):
            -made
    q = internals.jagged_nested(random(6, 2, 4), internals.JaggedStructure(offsets, None, 1, {})).transpose(1, 2)
    stock = torch.nn.functional.scaled_dot_product_attention(q, q, q)

    def ours(own, *args, **kwargs):
        return own(*args, **kwargs), kwargs

    internals.replace_jagged_attention(ours, lambda: True, True)
    found, given = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=False)
    internals.replace_jagged_attention(ours, lambda: True, False)
    same(found.values(), stock.values())
    assert given == {"is_causal": False}
    assert torch.nn.functional.scaled_dot_product_attention(q, q, q).is_nested
