"""Each private name of PyTorch that core/internals relies on still does what is said there."""

import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from ops_for_tests import random, same
from torch.func import grad, jvp, vmap
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_manualgrad.core import internals

SOURCES = Path(internals.__file__).resolve().parents[2]


def test_no_private_name_elsewhere():
    """core/internals is the one place for them; operators with an underscore are none, and testing/ has its own."""
    private = re.compile(r"torch(?!\.ops\.)(\.\w+)*\._[a-zA-Z]\w*|from torch(\.\w+)*\._\w+")
    found = {
        f"{path.relative_to(SOURCES)}: {match.group()}"
        for path in SOURCES.rglob("*.py")
        if path.parent.name != "internals" and path.parent.name != "testing"
        for line in path.read_text().splitlines()
        for match in [private.search(line.split("#")[0])]
        if match and '"' not in line.split(match.group())[0]
    }
    assert not found


def inside_kernel(probe, x, schema="(Tensor x) -> Tensor"):
    """The result of ``probe(keyset, x)`` as the kernel at the key Autograd of an operator."""
    with torch.library._scoped_library("mginternals", "FRAGMENT") as library:
        library.define(f"probe{schema}")
        op = torch.ops.mginternals.probe.default
        library.impl("probe", lambda x: x.clone(), "CompositeExplicitAutograd")
        library.impl("probe", lambda keyset, x: probe(op, keyset, x), "Autograd", with_keyset=True)
        return op(x)


def test_below_autograd_and_its_keys():
    x = random(3).requires_grad_()
    with internals.below_autograd():
        assert not x.sin().requires_grad
    assert x.sin().requires_grad

    def redispatch(op, keyset, x):
        with internals.below_autograd():
            return op.redispatch(keyset & internals.below_autograd_keys, x)

    same(inside_kernel(redispatch, x), x.detach())


def test_is_below_autograd():
    assert not internals.is_below_autograd()
    with internals.below_autograd():
        assert internals.is_below_autograd()
    assert not internals.is_below_autograd()


def test_what_is_a_view_below_autograd_is_none_outside():
    x = torch.ones(2, 3)
    with internals.below_autograd():
        y = x.clone().view(3, 2)
    assert not y._is_view() and x.view(3, 2)._is_view()


def test_values_hidden():
    from torch.fx.experimental.proxy_tensor import make_fx

    seen = []

    def f(x):
        seen.append(internals.values_hidden())
        return x * 1

    class Seeing(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x * 1)
        backward = staticmethod(lambda ctx, g: f(g))

    x = torch.ones(2, requires_grad=True)
    f(x)
    make_fx(f, tracing_mode="real")(torch.ones(2))
    y = Seeing.apply(x)
    torch.autograd.grad(y, x, torch.ones(2), retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(3, 2), is_grads_batched=True)
    assert seen == [False, True, False, True]


def test_single_level_function():
    """It runs inside a kernel under torch.func, where a plain autograd.Function raises."""

    class Triple(internals.SingleLevelFunction):
        @staticmethod
        def forward(ctx, x):
            return x * 3

        @staticmethod
        def backward(ctx, g):
            return g * 3

    def kernel(op, keyset, x):
        with internals.enable_single_level_autograd_function():
            return Triple.apply(x)

    same(grad(lambda x: inside_kernel(kernel, x).sum())(random(3)), torch.full((3,), 3.0).double())


def test_in_functorch_and_only_autograd():
    seen = []

    def look(x):
        seen.append((internals.in_functorch(), internals.only_autograd()))
        return x.sum()

    look(random(3))
    grad(look)(random(3))
    vmap(look)(random(2, 3))
    thread = threading.Thread(target=look, args=(random(3),))
    thread.start()
    thread.join()
    assert [functorch for functorch, _ in seen] == [False, True, True, False]
    with fwAD.dual_level():
        look(random(3))
    assert [alone for _, alone in seen[1:3] + seen[4:]] == [False] * 3


def test_tangents():
    x, t = random(3), random(3, seed=1)
    with fwAD.dual_level():
        dual = fwAD.make_dual(x, t)
        assert internals.has_tangent(dual) and not internals.has_tangent(x)
        assert internals.tangents_possible([x])
        assert not internals.has_tangent(internals.primal(dual))
        same(internals.primal(dual), x)
        with internals.forward_ad_enabled(False):
            assert not internals.has_tangent(dual.sin())
            with internals.forward_ad_enabled(True):
                assert internals.has_tangent(dual.sin())
    for x in (torch.nested.nested_tensor([torch.ones(2)]), torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()):
        assert not internals.has_tangent(x)
        with pytest.raises((RuntimeError, NotImplementedError)):
            torch._VF._unpack_dual(x, level=0)


def test_primal_keeps_the_levels_outside():
    def tangent_of_primal(x):
        return jvp(lambda y: internals.primal(y * x), (x,), (x,))

    # the inner level's tangent is gone, the outer level's derivative of the value stays
    x = random(3)
    value, inner = tangent_of_primal(x)
    assert not inner.any()
    same(jvp(lambda x: tangent_of_primal(x)[0], (x,), (x,))[1], 2 * x * x)


def test_fresh_variable_in_the_middle_of_a_functorch_call():
    def kernel(op, keyset, x):
        v = internals.fresh_variable(x)
        assert v.requires_grad and v.is_leaf
        return torch.autograd.grad(v * v, v, torch.ones_like(v))[0] * x

    for transform in (lambda f: f, vmap, lambda f: lambda x: jvp(f, (x,), (x,))[0]):
        same(transform(lambda x: inside_kernel(kernel, x))(random(3)), 2 * random(3))


def test_unattached_and_fresh_alias_in_the_middle_of_a_functorch_call():
    def kernel(op, keyset, x):
        plain, leaf = internals.unattached(x), internals.fresh_alias(x)
        assert not plain.requires_grad and leaf.requires_grad and leaf.is_leaf
        return plain * x.detach() + torch.autograd.grad(leaf * leaf, leaf, torch.ones_like(x))[0].detach()

    x = random(3)
    same(inside_kernel(kernel, x.clone().requires_grad_()), x * x + 2 * x)

    def outer(op, keyset, x):
        return internals.unattached(x) * 3

    def f(y):  # the level of the kernel loses its history, the one outside keeps its own
        return grad(lambda z: z * inside_kernel(outer, y * z).sum())(torch.ones((), dtype=x.dtype))

    same(jvp(f, (x,), (x,))[1], 3 * x.sum())


def test_tangent_and_dual():
    x, t = random(3), random(3)
    with fwAD.dual_level():
        made = internals.dual(x, t)
        same(fwAD.unpack_dual(made).tangent, t)
        same(internals.tangent(made), t)
        assert internals.tangent(x) is None


def test_forward_mode_outside():
    seen = []

    def probe(op, keyset, x):
        seen.append(internals.forward_mode_outside())
        return x.clone()

    def f(x):
        return inside_kernel(probe, x)

    def first(transformed, *args):
        seen.clear()
        transformed(*args)
        return seen[0]

    x = random(3)
    assert not first(f, x) and not first(lambda x: jvp(f, (x,), (x,)), x)
    assert not first(grad(lambda x: f(x).sum()), x)
    assert not first(grad(lambda x: jvp(f, (x,), (x,))[0].sum()), x)
    assert first(lambda x: jvp(grad(lambda x: f(x).sum()), (x,), (x,)), x)
    with fwAD.dual_level():
        assert not first(f, x) and first(grad(lambda x: f(x).sum()), x)


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


def test_autocast():
    assert not internals.is_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert internals.is_autocast_enabled()
        with pytest.raises(ZeroDivisionError), internals.set_autocast_off():
            assert not internals.is_autocast_enabled()
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
            1 / 0  # noqa: B018
        assert internals.is_autocast_enabled()


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


def test_unwrap_if_dead():
    kept = []
    grad(lambda x: (kept.append(x * 1), x.sum())[1])(random(3))
    is_dead = torch._C._functorch.is_dead_tensor_wrapper
    assert is_dead(kept[0]) and not is_dead(internals.unwrap_if_dead(kept[0]))
    same(internals.unwrap_if_dead(kept[0]), random(3))
    x = random(3)
    assert internals.unwrap_if_dead(x) is x


def test_release():
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("sinc", lambda x: x * 0 + 7, "CPU")
    assert (torch.sinc(torch.ones(2)) == 7).all()
    internals.release(library)
    assert (torch.sinc(torch.ones(2)) == 0).logical_or(torch.sinc(torch.ones(2)).abs() < 1e-6).all()


def test_vmap_call():
    seen = []

    def rule(info, in_dims, x, n):
        seen.append((info.batch_size, tuple(in_dims), tuple(x.shape)))
        return x * n, 0

    with torch.library._scoped_library("mginternals", "FRAGMENT") as library:
        library.define("batched(Tensor x, int n) -> Tensor")
        op = torch.ops.mginternals.batched.default
        library.impl("batched", lambda x, n: x + n, "CompositeExplicitAutograd")
        library.impl("batched", lambda x, n: internals.vmap_call(rule, op, [x, n]), "FuncTorchBatched")
        same(vmap(lambda x: op(x, 3))(random(4, 2)), 3 * random(4, 2))
        assert seen == [(4, (0, None), (4, 2))]


def test_guard_on_compiled_graphs():
    """Dynamo still takes the ambient guard: without it every change would drop all graphs."""
    import torch._dynamo  # noqa: F401

    from torch_manualgrad.core import compile_cache

    assert internals.guard_compiled_graphs(compile_cache.state) is True


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
    assert not result._is_view() and internals.jagged_result(values[:], found)._is_view()
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
    undo = internals.replace_jagged_attention(lambda own, *args, **kwargs: (own(*args, **kwargs), kwargs))
    found, given = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=False)
    undo()
    same(found.values(), stock.values())
    assert given == {"is_causal": False}
    assert torch.nn.functional.scaled_dot_product_attention(q, q, q).is_nested


def test_known_zeros():
    assert internals.is_known_zero(torch._efficientzerotensor(2)) and not internals.is_known_zero(torch.zeros(2))


def test_a_mode_sees_what_is_called_below_autograd_and_of_which_memory():
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


def test_calls_seen_apart_from_what_is_around():
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
