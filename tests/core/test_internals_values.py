"""What core/internals relies on where values are read, or only shapes are: known zeros, modes, tracing."""

import pytest
import torch
from helpers.interpreters import run_python
from helpers.ops import inside_kernel
from helpers.tensors import random, same
from torch.func import grad, vmap

from torch_manualgrad.core import internals


def test_known_zeros():
    assert internals.is_known_zero(torch._efficientzerotensor(2)) and not internals.is_known_zero(torch.zeros(2))


def test_a_mode_sees_calls_below_autograd_and_their_memory():
    class Seen(internals.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append((func, [internals.memory_of(a) for a in args if isinstance(a, torch.Tensor)]))
            return func(*args, **kwargs or {})

    names = []
    x = random(2, 3)
    with Seen(), internals.below_autograd():
        x.T.matmul(x)  # a composite operator comes as it is called
    assert (torch.ops.aten.matmul.default, [internals.memory_of(x)] * 2) in names
    assert internals.memory_of(x.clone()) != internals.memory_of(x)
    assert internals.memory_of(x.to_sparse()) is None


def test_a_mode_imports_no_dynamo_and_is_not_compiled(tmp_path):
    code = """
import sys, torch
from torch_manualgrad.core import internals

class Seen(internals.DispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})

with Seen(), internals.calls_seen(print):
    torch.ones(2).sin()
assert "torch._dynamo" not in sys.modules
graphs = []
dispatch = torch.compile(Seen().__torch_dispatch__, backend=lambda graph, _: graphs.append(graph) or graph.forward)
assert dispatch(torch.sin, (), (torch.zeros(2),)).eq(0).all() and not graphs
"""
    ran = run_python("-c", code, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_modes_see_a_call_at_the_next_level():
    """In the middle of a call of torch.func they see nothing, but there."""

    class Seen(internals.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **kwargs or {})

    def probe(op, keyset, x):
        def inside(x):
            with Seen():
                return x.sin()

        assert inside(x) is not None and not seen
        return internals.at_next_level(inside, internals.primal(x))

    seen = []
    x = random(3)
    same(grad(lambda x: inside_kernel(probe, x).detach().sum() + (x * x).sum())(x), 2 * x)
    assert seen == [torch.ops.aten.sin.default]


def test_values_are_read_where_they_can_be():
    x = random(3)
    assert internals.values_readable([x]) and not internals.values_readable([x.to("meta")])
    with internals.FakeTensorMode() as mode:
        assert not internals.values_readable([x])
        fake = mode.from_tensor(x)
    assert not internals.values_readable([fake])
    assert internals.are_finite([x, x.to(torch.complex64), x.half()])
    for bad in (float("inf"), float("nan")):
        assert not internals.are_finite([x, torch.tensor([1.0, bad])])

    def of_batch(y):
        assert internals.value_of(y) is x2
        assert internals.values_readable([y]) and not internals.are_finite([y])
        return y

    x2 = torch.tensor([[1.0], [float("nan")]])
    vmap(of_batch)(x2)
    assert internals.decompositions[torch.ops.aten.gelu_backward.default] is not None


def test_calls_are_seen_without_surrounding_modes():
    seen = []

    def see(op, args, kwargs, result):
        seen.append((op.name(), type(result).__name__))

    def inside(x):
        with internals.fakes() as fake:
            y = fake((2, 3), torch.float64, torch.device("cpu"))
            assert y.shape == (2, 3) and not y.requires_grad
            with internals.calls_seen(see):
                torch.nn.functional.linear(y, y)
            with pytest.raises(internals.ReadsValues):
                y.sum().item()
        with internals.fakes(real=True):
            assert torch.ones(2).sum().item() == 2
        return x * 2

    vmap(grad(lambda x: inside(x)))(random(3))
    assert [n for n, _ in seen if n.startswith("aten")][:2] == ["aten::t", "aten::mm"] and "FakeTensor" in {
        kind for _, kind in seen
    }


def test_a_tensor_without_memory():
    class Kind(torch.Tensor):
        @staticmethod
        def __new__(cls, like):
            return internals.tensor_without_memory(cls, like)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise TypeError(func.name())

    x = Kind(random(2, 3))
    assert x.shape == (2, 3) and x.dtype is random(1).dtype
    with pytest.raises(TypeError, match="aten::sin"):
        x.sin()


def test_a_function_of_constants_in_a_graph():
    called = []

    @internals.constant_in_graphs
    def length(shape):
        called.append(shape)  # which Dynamo would not trace
        return len(shape)

    f = torch.compile(lambda x: x * length(tuple(x.shape)), backend="eager", fullgraph=True, dynamic=False)
    x = random(2, 3)
    same(f(x), x * 2)
    same(f(x), x * 2)
    assert called == [(2, 3)]


def test_the_value_of_a_constant():
    x = random(2)
    assert internals.value_of_constant(x) is x
    with internals.FakeTensorMode() as mode:
        number, none = internals.value_of_constant(torch.tensor(2.5)), internals.value_of_constant(mode.from_tensor(x))
        several = internals.value_of_constant(torch.tensor([2.5]))
    assert isinstance(number, float) and number == 2.5 and none is None and several.tolist() == [2.5]
