"""Custom ops that write to arguments: values, derivatives, versions, views, and what is refused."""

import re
import warnings

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.ops import define
from helpers.tensors import random, same
from helpers.transforms import NESTINGS, name_of, nested
from torch.func import functional_call, functionalize, grad, jvp, vmap

import torch_manualgrad as mg

# buffer <- buffer^2 + sin x, and a result; the backward reads the old value of the buffer


def update(x, buffer):
    buffer.mul_(buffer).add_(x.sin())
    return (x * x).sum(-1)


def update_save(inputs, output):
    return inputs.x, inputs.buffer


def update_backward(ctx, saved, grad, grad_buffer):
    x, old = saved
    gx = 0 if grad is None else 2 * grad.unsqueeze(-1) * x
    if grad_buffer is not None:
        gx = gx + grad_buffer * x.cos()
    return {"x": gx, "buffer": None if grad_buffer is None else 2 * grad_buffer * old}


def update_jvp(inputs, output, tangents):
    x_t = torch.zeros_like(inputs.x) if tangents.x is None else tangents.x
    old_t = torch.zeros_like(inputs.buffer) if tangents.buffer is None else tangents.buffer
    return 2 * (inputs.x * x_t).sum(-1), 2 * inputs.buffer * old_t + inputs.x.cos() * x_t


def update_vmap(info, in_dims, x, buffer):
    assert in_dims.buffer is not None
    x = x.unsqueeze(0) if in_dims.x is None else x.movedim(in_dims.x, 0)
    return op(x, buffer.movedim(in_dims.buffer, 0)).expand(info.batch_size), 0


SCHEMA = "(Tensor x, Tensor(a!) buffer) -> Tensor"
PAIR = {"save_for_backward": update_save, "backward": update_backward}
OPS = {
    "jvp derived": define(SCHEMA, update, **PAIR),
    "jvp written": define(SCHEMA, update, **PAIR, jvp=update_jvp),
    "vmap rule": define(SCHEMA, update, **PAIR, vmap=update_vmap),
}
op = OPS["jvp derived"]


def pure(x, buffer):
    return (x * x).sum(-1), buffer * buffer + x.sin()


def by(op):
    def run(x, buffer):
        new = buffer.clone()
        return op(x, new), new

    return run


def leaf(*shape, seed=0):
    return random(*shape, seed=seed).requires_grad_()


def loss_of(f):
    return lambda x, b: f(x, b)[0].sin() + (f(x, b)[1] ** 3).sum()


# in-place, and out


def square_(x):
    return x.mul_(x)


square_ = define("(Tensor(a!) x) -> Tensor(a!)", square_, save_for_backward=lambda inputs, output: inputs.x,
                 backward=lambda ctx, x, grad: {"x": 2 * grad * x})  # fmt: skip


def product(x, y, *, out):
    return out.copy_(x * y)


product = define("(Tensor x, Tensor y, *, Tensor(a!) out) -> Tensor(a!)", product,
                 save_for_backward=lambda inputs, output: (inputs.x, inputs.y),
                 backward=lambda ctx, s, grad: {"x": grad * s[1], "y": grad * s[0], "out": None})  # fmt: skip


# lists and optional arguments that are written to


def scale_all(x, buffers, extra=None):
    for b in buffers:
        b.mul_(x)
    if extra is not None:
        extra.add_(x)
    return [x * x, x + 1]


def scale_all_backward(ctx, saved, grads, grad_buffers, grad_extra):
    x, old = saved
    parts = [
        2 * x * grads[0] if grads and grads[0] is not None else 0,
        grads[1] if grads and grads[1] is not None else 0,
    ]
    parts += [g * b for g, b in zip(grad_buffers or (), old) if g is not None]
    parts += [] if grad_extra is None else [grad_extra]
    buffers = [None if g is None else g * x for g in grad_buffers or [None] * len(old)]
    return {"x": sum(parts) + torch.zeros_like(x), "buffers": buffers, "extra": grad_extra}


scale_all = define(
    "(Tensor x, Tensor(a!)[] buffers, Tensor(b!)? extra=None) -> Tensor[]",
    scale_all,
    save_for_backward=lambda inputs, output: (inputs.x, list(inputs.buffers)),
    backward=scale_all_backward,
)


# -- values and derivatives -------------------------------------------------------------------------------------------


def test_the_functional_op():
    assert str(op.functional.signature.schema).endswith(
        "_functional(Tensor x, Tensor buffer) -> (Tensor, Tensor buffer)"
    )
    x, b = random(3), random(3, seed=1)
    kept = b.clone()
    same(op.functional(x, b), pure(x, b))
    same(b, kept)
    names = str(scale_all.functional.signature.schema).partition("(")[2]
    assert names == "Tensor x, Tensor[] buffers, Tensor? extra=None) -> (Tensor[], Tensor[] buffers, Tensor? extra)"


@pytest.mark.parametrize("key", OPS)
def test_values(key):
    x, b = random(3), random(3, seed=1)
    same(by(OPS[key])(x, b), pure(x, b))
    same(by(OPS[key])(x.clone().requires_grad_(), b), pure(x, b))


@pytest.mark.parametrize("transforms", NESTINGS, ids=name_of)
@pytest.mark.parametrize("key", ["jvp derived", "jvp written"])
def test_every_nesting_equals_the_function(key, transforms):
    args = random(3), random(3, seed=1)
    f, g = (nested([lambda f, t=t: t(f, argnums=(0, 1)) for t in transforms], loss_of(f)) for f in (by(OPS[key]), pure))
    same(f(*args), g(*args))


@pytest.mark.parametrize("key", OPS)
def test_vmap(key):
    x, b = random(4, 3), random(4, 3, seed=1)
    f = by(OPS[key])
    same(vmap(f)(x, b), vmap(pure)(x, b))
    same(vmap(f, in_dims=(1, 1), out_dims=(0, 1))(x.mT, b.mT), vmap(pure, in_dims=(1, 1), out_dims=(0, 1))(x.mT, b.mT))
    same(vmap(f, (None, 0))(x[0], b), vmap(pure, (None, 0))(x[0], b))
    same(vmap(vmap(f))(x[None], b[None]), vmap(vmap(pure))(x[None], b[None]))
    for transform in (
        lambda f: vmap(grad(loss_of(f), (0, 1))),
        lambda f: grad(lambda *a: vmap(loss_of(f))(*a).sum(), (0, 1)),
    ):
        same(transform(f)(x, b), transform(pure)(x, b))
    same(vmap(lambda *a: jvp(loss_of(f), a, a)[1])(x, b), vmap(lambda *a: jvp(loss_of(pure), a, a)[1])(x, b))


def test_vmap_writes_to_the_whole_batch():
    x, b = random(4, 3), random(4, 3, seed=1)
    expected = pure(x, b)[1]
    vmap(op)(x, b)
    same(b, expected)


def test_dual_numbers():
    x, t, b = random(3), random(3, seed=1), random(3, seed=2)
    with fwAD.dual_level():
        op(fwAD.make_dual(x, t), b)
        same(fwAD.unpack_dual(b).tangent, t * x.cos())


def test_own_levels():
    x, t, b = random(3), random(3, seed=1), random(3, seed=2)
    with mg.forward_ad.dual_level():
        op(mg.forward_ad.make_dual(x, t), b)
        same(mg.forward_ad.unpack_dual(b).tangent, t * x.cos())


@pytest.mark.parametrize(
    ("fn", "sample"),
    [
        (op, (random(3), random(3, seed=1))),
        (square_, (random(3),)),
        (product, mg.Sample(random(3), random(3, seed=1), out=random(3, seed=2))),
        (scale_all, (random(3), [random(3, seed=1), random(3, seed=2)], random(3, seed=3))),
        (scale_all, (random(3), [random(3, seed=1)])),
    ],
    ids=["buffer", "in-place", "out", "lists", "lists, absent"],
)
def test_check_and_opcheck(fn, sample):
    report = mg.testing.check(fn, [sample])
    assert [r.outcome for r in report.results if r.check == "opcheck"] == ["ok"]


def test_complex():
    def multiply(x, z):
        z.mul_(x)

    f = define("(Tensor x, Tensor(a!) z) -> ()", multiply, save_for_backward=lambda inputs, output: (inputs.x, inputs.z),
               backward=lambda ctx, s, g: {"x": g * s[1].conj(), "z": g * s[0].conj()})  # fmt: skip
    z = random(3, dtype=torch.complex128, seed=1)
    mg.testing.check(f, [(random(3, dtype=torch.complex128), z)])
    # lazy conjugates and negatives are written to as what they show
    for view in (lambda z: z.conj(), lambda z: z.conj().imag):
        for tracked in (False, True):
            base = z.clone()
            seen = view(base)
            x = random(3, dtype=seen.dtype).requires_grad_(tracked)
            expected = view(z).clone() * x.detach()
            f(x, seen)
            same(seen.detach().resolve_conj().resolve_neg(), expected)
            same(view(base).detach().resolve_conj().resolve_neg(), expected)


# -- autograd's records -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tracked", [False, True])
def test_a_write_is_counted_once(tracked):
    b = random(3, seed=1)
    before = b._version
    op(random(3).requires_grad_(tracked), b)
    assert b._version == before + 1 and b.requires_grad is tracked


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda f: f.__name__)
def test_a_saved_tensor_that_was_written_raises(around):
    q, b = leaf(3), random(3, seed=1)
    z = b * q
    with around():
        op(random(3), b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda f: f.__name__)
def test_a_kernel_that_pytorch_does_not_see_is_counted(around):
    def fill(x):
        x.numpy().fill(5)

    f, q, b = define("(Tensor(a!) x) -> ()", fill), leaf(3), random(3)
    z = b * q
    before = b._version
    with around():
        f(b)
    assert b._version == before + 1
    same(b, torch.full((3,), 5.0, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_inference_tensors():
    outside = random(3)
    with torch.inference_mode():
        for x in (random(3), outside):
            b = random(3, seed=1).clone()
            expected = pure(x, b)
            same((op(x, b), b), expected)
    for x in (outside, outside.clone().requires_grad_(), b.clone()):
        with pytest.raises(RuntimeError, match="(?i)inplace update to inference tensor outside InferenceMode"):
            op(x, b)
    fill = define("(Tensor x, Tensor(a!) b) -> ()", lambda x, b: b.numpy().fill(5))
    with pytest.raises(RuntimeError, match="argument 'b' is an inference tensor"):
        fill(outside, b)


def test_a_write_to_a_leaf_raises():
    with pytest.raises(
        RuntimeError, match=r"(?s)a leaf Variable that requires grad.*argument 'buffer' cannot be written"
    ):
        op(random(3), leaf(3))
    with pytest.raises(RuntimeError, match=r"(?s)a view of a leaf Variable that requires grad.*argument 'buffer'"):
        op(random(2), leaf(3)[:2])
    q = leaf(3, seed=1)
    with torch.no_grad():
        expected = pure(random(3), q.detach())[1]
        op(random(3), q)
    same(q.detach(), expected)


def test_a_write_to_a_view_reaches_the_base():
    def program(write):
        x, base = leaf(3), leaf(4, 3, seed=1)
        whole = base * 1
        write(x, whole[1])
        return torch.autograd.grad((whole**3).sum(), (x, base))

    same(program(op), program(lambda x, b: b.copy_(pure(x, b.clone())[1])))


def test_the_result_is_the_argument():
    q = leaf(3)
    y = q * 1
    z = square_(y)
    assert z is y
    same(torch.autograd.grad(z.sum(), q), (2 * q.detach(),))
    x, out = random(3), random(3, seed=1)
    assert product(x, x, out=out) is out and torch.ops.mgtest is not None
    same(out, x * x)


def test_an_input_may_be_written_to():
    q = leaf(3)
    y = 2 * q
    product(y, y, out=y)
    same(torch.autograd.grad(y.sum(), q), (8 * q.detach(),))


def test_hooks_and_checkpoint():
    x, b = leaf(3), leaf(3, seed=1)
    expected = torch.autograd.grad(loss_of(pure)(x, b), (x, b))
    for reentrant in (False, True):
        value = torch.utils.checkpoint.checkpoint(loss_of(by(op)), x, b, use_reentrant=reentrant)
        x.grad = b.grad = None
        value.backward()
        same((x.grad, b.grad), expected)
    seen = []
    new = b * 1
    op(x, new)
    new.register_hook(seen.append)
    new.sum().backward()
    same(seen, [torch.ones(3, dtype=torch.float64)])


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        return op(x, self.total)


def test_functional_call():
    module, x, total = Counter(), random(3), random(3, seed=1)

    def value(x, total):
        new = total.clone()
        result = functional_call(module, {"total": new}, (x,))
        return result + new.sum()

    same(grad(value, (0, 1))(x, total), (2 * x + x.cos(), 2 * total))
    same(module.total, torch.ones(3, dtype=torch.float64))


# -- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("key", ["buffer", "in-place", "out"])
def test_compile(key, backend):
    f = {
        "buffer": lambda x, b: op(x, b),
        "in-place": lambda x, b: (square_(b), b.sum() + x.sum())[1],
        "out": lambda x, b: (product(x, x + 1, out=b), b.sum())[1],
    }[key]
    torch.compiler.reset()
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    for tracked in (False, True):
        x = random(3).requires_grad_(tracked)
        results = []
        for g in (f, compiled):
            b = random(3, seed=1)
            before = b._version
            value = g(x, b)
            assert b._version > before
            total = value + (b**3).sum()
            results.append((value, b, torch.autograd.grad(total, x)[0] if tracked else None))
        same(results[1], results[0])


def test_a_compiled_program_may_write_in_place():
    """PyTorch functionalizes the op itself where no derivative takes part."""
    targets = []

    def backend(graph, inputs):
        from functorch.compile import make_boxed_func  # noqa: PLC0415
        from torch._dynamo.backends.common import aot_autograd  # noqa: PLC0415  private, used in tests only

        def read(graph, inputs):
            targets.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=read)(graph, inputs)

    torch.compiler.reset()
    torch.compile(lambda x, b: op(x, b), fullgraph=True, backend=backend)(random(3), random(3, seed=1))
    assert any("auto_functionalized" in t for t in targets) and not any("_functional.default" in t for t in targets)


def test_export_and_functionalize():
    x, b = random(3), random(3, seed=1)
    same(functionalize(by(op))(x, b), pure(x, b))
    same(functionalize(lambda b: square_(b.clone()))(b), b * b)
    module = Counter()
    exported = torch.export.export(module, (x,)).module()
    same(exported(x), (x * x).sum())
    same(exported.total, 1 + x.sin())


def test_mg_compile():
    x, b = leaf(3), random(3, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a graph that runs uncompiled
        same(mg.compile(by(op))(x, b), pure(x, b))
        same(torch.autograd.grad(mg.compile(loss_of(by(op)))(x, b), x), torch.autograd.grad(loss_of(pure)(x, b), x))


# -- implementations --------------------------------------------------------------------------------------------------


def test_implementations_are_replaced_and_swapped():
    f = define(SCHEMA, update, **PAIR)
    x, b = leaf(3), random(3, seed=1)

    @f.impl("cpu")
    def _(x, buffer):
        buffer.fill_(7)
        return x.new_ones(())

    same(by(f)(x.detach(), b)[1], torch.full_like(b, 7))
    with f.swap(cpu=None, backward=lambda ctx, saved, g, g_b: {"x": g_b * 5, "buffer": None}):
        value = by(f)(x, b)
        same(value[1].detach(), pure(x.detach(), b)[1])
        same(torch.autograd.grad(value[1].sum(), x), (torch.full((3,), 5.0, dtype=torch.float64),))
    same(torch.autograd.grad(by(f)(x, b)[1].sum(), x), (x.detach().cos(),))


def test_a_whole_autograd_kernel():
    f = define("(Tensor(a!) x) -> Tensor(a!)", lambda x: x.mul_(x))

    class Square(mg.SingleLevelFunction):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return f.functional.below_autograd(x)

        @staticmethod
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0]

    f.impl_autograd(Square.apply)
    x = random(3)
    same(grad(lambda x: f(x.clone()).sum())(x), 2 * x)
    q = leaf(3)
    same(torch.autograd.grad(f(q * 1).sum(), q), (2 * x,))


def test_redefine_and_taken_names():
    for schema, body, expected in (
        ("(Tensor(a!) x) -> ()", _double, 4.0),
        ("(Tensor x) -> Tensor", lambda x: x * 1, 2.0),
        ("(Tensor(a!) x) -> ()", _double, 4.0),
    ):
        x = torch.full((), 2.0)
        mg.custom_op(f"mgtest::redefined_mutable{schema}", redefine=True)(body)(x)
        assert x.item() == expected
    mg.custom_op("mgtest::taken_functional(Tensor x) -> Tensor")(lambda x: x * 1)
    with pytest.raises(ValueError, match="mgtest::taken_functional is already defined"):
        mg.custom_op("mgtest::taken(Tensor(a!) x) -> ()")(_double)
    mg.custom_op("mgtest::taken(Tensor x) -> Tensor")(lambda x: x * 1)  # nothing of the other is left
    with pytest.raises(ValueError, match="mgtest::taken is already defined"):
        mg.custom_op("mgtest::taken(Tensor(a!) x) -> ()")(_double)


def _double(x):
    x.mul_(2)


# -- what is refused --------------------------------------------------------------------------------------------------


def refused(pattern, f, *args, error=RuntimeError):
    with pytest.raises(error, match=pattern):
        f(*args)


def test_no_derivative():
    f = define(SCHEMA, update)
    refused("no derivative in reverse mode", f, leaf(3), random(3))
    same(by(f)(random(3), random(3, seed=1)), pure(random(3), random(3, seed=1)))


def test_a_tensor_from_outside_of_a_transform():
    b = random(3, seed=1)
    kept = b.clone()
    for inside in (lambda x: op(x, b), lambda x: (op(x.detach(), b), x.sum())[1], lambda x: (op(x, b), b.sum())[1]):
        refused(r"(?s)mutate a captured Tensor.*argument 'buffer' cannot be written", grad(inside), random(3))
        refused(r"(?s)mutate a captured Tensor.*argument 'buffer'", lambda x: jvp(inside, (x,), (x,)), random(3))  # noqa: B023
    refused(
        r"(?s)vmap: inplace arithmetic.*argument 'buffer' cannot be written", vmap(lambda x: op(x, b)), random(4, 3)
    )
    same(b, kept)


def test_the_shape_stays():
    def resize(x):
        x.resize_(1).fill_(1)

    f = define("(Tensor(a!) x) -> ()", resize, save_for_backward=lambda i, o: (), backward=lambda c, s, g: {"x": g})
    refused(r"makes argument 'x' of shape \[3\] one of shape \[1\]", f, leaf(3) * 1)


def test_what_an_implementation_returns():
    x = random(3)
    f = define("(Tensor(a!) x) -> Tensor(a!)", lambda x: x.clone())
    refused("output 'result' must be the argument 'x' itself", f, x)
    f = define("(Tensor(a!) x) -> Tensor", lambda x: x.mul_(1))
    refused("an output is the input 'x' itself", f, x)
    f = define("(Tensor(a!) x) -> Tensor", lambda x: x.mul_(1)[:1])
    refused("an output shares memory", f, x)


def test_schemas():
    def define_as(schema):
        return mg.custom_op(f"mgtest::bad_mutable{schema}")(lambda *args: None)

    refused(
        "argument 'y' of the schema aliases memory",
        define_as,
        "(Tensor(a!) x, Tensor(b) y) -> Tensor(b)",
        error=ValueError,
    )
    refused("result 0 of the schema aliases no argument", define_as, "(Tensor(a!) x) -> Tensor(b!)", error=ValueError)


def test_jets_name_the_functional_op():
    refused(re.escape("writes to 'buffer'; call its functional op"), lambda: mg.forward_ad.jet(
        lambda x: by(op)(x, x)[1], (random(3),), ((random(3),),)), error=NotImplementedError)  # fmt: skip
    found = mg.forward_ad.jet(lambda x: op.functional(x, x)[1], (random(3),), ((random(3, seed=1),),))
    x, t = random(3), random(3, seed=1)
    same(found[1][0], (2 * x + x.cos()) * t)


def scale_each(x, ss):
    for s in ss:
        s.mul_(x)


scale_each = define("(Tensor x, Tensor(a!)[] ss) -> ()", scale_each,
                    save_for_backward=lambda inputs, output: (inputs.x, inputs.ss),
                    backward=lambda ctx, s, gs: {
                        "x": sum((g * old).sum() for g, old in zip(gs, s[1]) if g is not None),
                        "ss": [None if g is None else g * s[0] for g in gs]})  # fmt: skip

#: two parts of a matrix of shape (4, 6)
SHARED = {
    "one tensor": lambda m: (m, m),
    "the same view": lambda m: (m[0], m[0]),
    "rows": lambda m: (m[:3], m[1:]),
    "columns": lambda m: (m[:, :3], m[:, 2:]),
    "a row and a column": lambda m: (m[1], m[:, 2]),
    "transposed": lambda m: (m[:3, :3], m.t()[1:4]),
}
APART = {
    "rows": lambda m: (m[:1], m[1:]),
    "columns": lambda m: (m[:, :1], m[:, 1:]),
    "interleaved": lambda m: (m[:, ::2], m[:, 1::2]),
    "a row and a column": lambda m: (m[0], m[1:, 2]),
    "transposed": lambda m: (m[:2, :3], m.t()[3:]),
    "empty": lambda m: (m, m[:0]),
}


def written_in_parts(parts, write=scale_each):
    def run(x, m):
        m = m.clone()
        write(x, list(parts(m)))
        return m

    return run


WAYS = {
    "eager": lambda f, x, m: torch.autograd.functional.jacobian(f, (x, m)),
    "jvp": lambda f, x, m: jvp(f, (x, m), (x, m))[1],
    "jacrev": lambda f, x, m: torch.func.jacrev(f, (0, 1))(x, m),
    "vmap": lambda f, x, m: vmap(f, in_dims=(None, 0))(x, m[None]),
    "compiled": lambda f, x, m: torch.autograd.functional.jacobian(
        torch.compile(f, backend="aot_eager", fullgraph=True), (x, m)),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
@pytest.mark.parametrize("parts", SHARED.values(), ids=list(SHARED))
def test_memory_that_is_written_to_twice_is_refused_where_it_is_differentiated(parts, way):
    """The new values, all computed from the old ones, would overwrite each other."""
    x, m = torch.tensor(3.0, dtype=torch.float64), random(4, 6)
    written_in_parts(parts)(x, m)
    torch.compiler.reset()
    with pytest.raises(Exception, match="argument 'ss' has a tensor that shares memory with one of 'ss'"):
        way(written_in_parts(parts), x, m)


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
@pytest.mark.parametrize("parts", APART.values(), ids=list(APART))
def test_parts_of_one_tensor_are_written_to(parts, way):
    def pure(x, m):
        scaled = torch.zeros_like(m)
        for part in parts(scaled):
            part.fill_(1)
        return torch.where(scaled > 0, x * m, m)

    x, m = torch.tensor(3.0, dtype=torch.float64), random(4, 6)
    torch.compiler.reset()
    same(written_in_parts(parts)(x, m), pure(x, m))
    same(way(written_in_parts(parts), x, m), way(pure, x, m))


@pytest.mark.parametrize("around", [lambda f: f, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)])
def test_parts_of_a_buffer_that_autograd_does_not_track(around):
    def step(x, m):
        first, second = m[0], m[1]
        scale_each(x, [first, second])
        return first + second

    x, m = torch.tensor(3.0, dtype=torch.float64, requires_grad=True), random(2, 3)
    old = m.clone()
    torch.compiler.reset()
    value = around(step)(x, m).sum()
    same(torch.autograd.grad(value, x, retain_graph=True), (old.sum(),))
    same(torch.autograd.grad((m**2).sum(), x), (6 * (old**2).sum(),))


def test_a_kernel_that_writes_and_then_raises_counts_as_a_write():
    @mg.custom_op("mutable_raises::write(Tensor(a!) x) -> ()")
    def write(x):
        x.numpy()[:] = 5
        raise ValueError("too late")

    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    y = (x * w).sum()
    with pytest.raises(ValueError, match="too late"):
        write(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
