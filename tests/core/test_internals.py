"""Each private name of PyTorch that core/internals relies on still does what is said there."""

import re
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.ops import inside_kernel
from helpers.tensors import random, same
from torch._subclasses import FakeTensorMode
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from torch_manualgrad.core import internals

SOURCES = Path(internals.__file__).resolve().parents[2]


def test_no_private_name_elsewhere():
    """core/internals is the one place for them; operators with an underscore are none, and testing/ has its own."""
    private = re.compile(r"torch(?!\.ops\.)(\.\w+)*\._[a-zA-Z]\w*|from torch(\.\w+)*\._\w+")
    found = {
        f"{path.relative_to(SOURCES)}: {match.group()}"
        for path in SOURCES.rglob("*.py")
        if path.parent.name != "internals" and path.relative_to(SOURCES).parts[0] != "testing"
        for line in path.read_text().splitlines()
        for match in [private.search(line.split("#")[0])]
        if match and '"' not in line.split(match.group())[0]
    }
    assert not found


def test_below_autograd_and_its_keys():
    x = random(3).requires_grad_()
    with internals.below_autograd():
        assert not x.sin().requires_grad
    assert x.sin().requires_grad

    def redispatch(op, keyset, x):
        with internals.below_autograd():
            return op.redispatch(keyset & internals.below_autograd_keys, x)

    same(inside_kernel(redispatch, x), x.detach())


def test_keys_below_what_counts_writes():
    counts, cpu = torch._C.DispatchKey.ADInplaceOrView, torch._C.DispatchKey.CPU
    above, below = internals.below_autograd_keys, internals.below_in_place_keys
    assert above.has(counts) and not below.has(counts) and above.has(cpu) and below.has(cpu)


def test_is_below_autograd():
    assert not internals.is_below_autograd()
    with internals.below_autograd():
        assert internals.is_below_autograd()
    assert not internals.is_below_autograd()


def test_a_view_below_autograd_is_not_a_view_outside():
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


def test_backward_is_called_at_once():
    class Triple(internals.SingleLevelFunction):
        @staticmethod
        def forward(ctx, x):
            return x * 3

        @staticmethod
        def backward(ctx, g):
            callers.append(sys._getframe(1).f_code.co_name)
            return g * 3

    callers = []
    x = random(3).requires_grad_()
    for _ in range(2):
        y = Triple.apply(x)
        for found in (torch.autograd.grad(y.sum(), x, retain_graph=True)[0], y.grad_fn.apply(torch.ones_like(x))):
            same(found, torch.full_like(x, 3))
        Triple.call_backward_at_once()
    assert callers == ["apply", "apply", "_engine_run_backward", "test_backward_is_called_at_once"]


def test_transform_depth():
    seen = []
    look = lambda x: (seen.append(internals.transform_depth()), x.sum())[1]  # noqa: E731
    look(random(3))
    grad(look)(random(3))
    vmap(grad(look))(random(2, 3))
    assert seen == [0, 1, 2]


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
        seen = []

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(internals.has_tangent_below_autograd(args[0]))
                return func(*args, **(kwargs or {}))

        with Mode():
            dual.sin()
            x.sin()
        assert seen[0] and not seen[-1]  # the primal's sine, and that of a tensor without tangent
        same(internals.primal(dual), x)
        with internals.forward_ad_enabled(False):
            assert not internals.has_tangent(dual.sin())
            with internals.forward_ad_enabled(True):
                assert internals.has_tangent(dual.sin())
    for x in (torch.nested.nested_tensor([torch.ones(2)]), torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()):
        assert not internals.has_tangent(x)
        with pytest.raises((RuntimeError, NotImplementedError)):
            torch._VF._unpack_dual(x, level=0)


def test_a_tracer_does_not_see_that_a_fake_tensor_is_asked_for_its_tangent():
    with FakeTensorMode() as mode, fwAD.dual_level():
        x = torch.empty(3)
        assert internals.has_tangent(fwAD.make_dual(x, torch.empty(3))) and not internals.has_tangent(x)
    fake = mode.from_tensor(torch.ones(3))
    graph = make_fx(lambda x: (internals.has_tangent(x), x.sin())[1])(fake).graph
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [torch.ops.aten.sin.default]


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


def test_is_followed_outside():
    found = {}

    def see(name):
        def f(x):
            found[name] = internals.is_followed_outside([x])
            return x.sin().sum()

        return f

    x = random(2, 2, 3)
    vmap(vmap(see("batch")))(x)
    vmap(vmap(see("tracked")))(x.requires_grad_())
    x = x.detach()
    grad(lambda x: vmap(see("grad"))(x).sum())(x)
    jvp(vmap(see("jvp")), (x,), (x,))
    with fwAD.dual_level():
        vmap(see("dual"))(fwAD.make_dual(x, x))
    assert found == {"batch": False, "tracked": True, "grad": True, "jvp": True, "dual": True}


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


def test_autocast():
    assert not internals.is_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert internals.is_autocast_enabled()
        with pytest.raises(ZeroDivisionError), internals.set_autocast_off():
            assert not internals.is_autocast_enabled()
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
            1 / 0  # noqa: B018
        assert internals.is_autocast_enabled()


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


def test_recorded_by_jit():
    seen = []

    def f(x):
        seen.append(internals.is_recorded_by_jit())
        return 2 * x

    f(random(2))
    torch.jit.trace(f, (random(2),), check_trace=False)
    assert seen == [False, True]


def test_calls_above_autograd():
    seen = []

    def note(x=None):
        seen.append(internals.nothing_above_autograd())
        return x

    note()
    grad(lambda x: note(x).sum())(random(2))
    vmap(note)(random(2, 2))
    torch.jit.trace(lambda x: note(x) * 2, (random(2),), check_trace=False)
    for inside in (
        torch.autocast("cpu"),
        torch._C._AutoDispatchBelowAutograd(),
        internals.below_autograd(),
        internals.DispatchMode(),
    ):
        with inside:
            note()
    note()
    assert seen == [True, *[False] * 7, True]


def test_function_modes_and_wrapped_tensors():
    left = []
    grad(lambda x: left.append(x) or x.sum())(random(2))
    assert internals.is_functorch_wrapped(left[0]) and not internals.is_functorch_wrapped(random(2))
    with torch.overrides.TorchFunctionMode():
        assert internals.in_function_mode()
    assert not internals.in_function_mode()


def test_version_of():
    x = random(3)
    with torch.no_grad():
        x.view(3).add_(1)
        x.data.add_(1)  # which autograd does not notice
    assert internals.version_of(x) == 1


def test_saved_hooks():
    own, other = (lambda x: [x], lambda kept: kept[0]), (lambda x: x, lambda x: x)
    x = random(3).requires_grad_()
    assert internals.saved_hooks_here() is None and internals.saved_hooks_allowed()
    internals.put_saved_hooks(own)
    y = x.sin()
    internals.put_saved_hooks(other)
    internals.take_saved_hooks(own)
    assert internals.saved_hooks_here()[0] is other[0]
    internals.take_saved_hooks(other)
    assert internals.saved_hooks_here() is None
    assert type(internals.packed_by(y.grad_fn, "self")) is list and internals.packed_by(x.sin().grad_fn, "self") is x
    y.sum().backward()
    assert internals.packed_by(y.grad_fn, "self") is None
    assert internals.packed_by(y.grad_fn, "other") is internals.HIDDEN


def test_follow_refusals():
    calls = []
    internals.follow_refusals(lambda: calls.append("before"), lambda: calls.append("after"))
    try:
        assert not grad(lambda x: x.sin() + internals.saved_hooks_allowed())(torch.zeros(())) - 1
    finally:
        internals.follow_refusals(None, None)
    assert calls == ["before", "after"]
    grad(torch.sin)(torch.zeros(()))
    assert len(calls) == 2


def test_saved_tensors_unhooked():
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks
    with (
        hooks(lambda x: packed.append("outer") or x, lambda x: x),
        hooks(lambda x: packed.append("inner") or x, lambda x: x),
    ):
        with internals.saved_tensors_unhooked():
            assert not internals.saved_tensors_are_hooked()
            random(2).requires_grad_().sin()
        assert not packed
        random(2).requires_grad_().sin()
        assert packed == ["inner"]
        with pytest.raises(ZeroDivisionError), internals.saved_tensors_unhooked():
            1 / 0  # noqa: B018
        assert internals.saved_tensors_are_hooked()
    assert not internals.saved_tensors_are_hooked()


# -- facts of operators, and of where tensors have their memory -------------------------------------------------------


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


def test_open_sizes():
    sizes = internals.Sizes((5, 7))
    a, b = sizes.numbers
    with sizes.mode:
        x = torch.empty(a * 2, b)
    assert internals.is_symbol(a) and not internals.is_symbol(5) and internals.example_of(x.shape[0]) == 10
    assert sizes.places([x.shape, (a,)]) == [(1, 0), (0, 1)] and sizes.places([(b,)]) == [None, (0, 0)]
    assert sizes.value(x.numel(), (3, 4)) == 24 and sizes.value(3, (3, 4)) == 3
    assert sizes.computed(a + b, [torch.tensor(1), torch.tensor(2)]) == 3
    assert sizes.allow((3, 4)) and not sizes.allow((1, 4))
    assert bool(a < b) and sizes.allow((3, 4)) and not sizes.allow((4, 3))
    assert int(b) == 7 and sizes.allow((3, 7)) and not sizes.allow((3, 8))
    assert internals.Sizes().allow(()) and internals.example_of(3) == 3


def test_what_dynamo_leaves_open():
    seen = []

    def backend(graph, _):
        inputs = graph.graph.find_nodes(op="placeholder")
        seen.append([(internals.symbols_of(n.meta["example_value"]), internals.is_number_in_tensor(n)) for n in inputs])
        return graph

    torch.compiler.reset()
    f = torch.compile(lambda x, n, c: x * n * c, backend=backend, dynamic=True)
    f(torch.ones(3, 1), 5, 0.5)
    (n, _), *_ = [s for s in seen[0] if isinstance(s[0], str) and s[0] != seen[0][0][0]] or [seen[0][0]]
    assert isinstance(n, str) and [is_number for _, is_number in seen[0]].count(True) == 1
    (shape,) = [s for s, is_number in seen[0] if isinstance(s, tuple) and not is_number]
    assert isinstance(shape[0], str) and shape[1] is None and internals.symbols_of(3) is None


def test_function_of_a_node():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    y = Twice.apply(torch.ones(2, requires_grad=True))
    assert internals.function_of(y.grad_fn) is Twice
    assert internals.function_of(y.exp().grad_fn) is None
