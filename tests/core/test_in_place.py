"""The in-place form of an operator under a rule: PyTorch's values, and the rule's derivative, or an error."""

import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers.tensors import is_dense_differentiable

import torch_manualgrad as mg
from torch_manualgrad.core import overlap
from torch_manualgrad.core.override.in_place import in_place_kernel, in_place_operator, reading_written
from torch_manualgrad.core.rule.derivative import derivative_of

F64 = torch.float64


def test_operators_with_an_in_place_variant():
    found = {rule.name: in_place_operator(rule) for rule in mg.rules.values()}
    assert found["aten::sin"] is torch.ops.aten.sin_.default
    assert found["aten::renorm"] is torch.ops.aten.renorm_.default
    assert found["aten::addmm"] is torch.ops.aten.addmm_.default
    assert found["aten::mul.Tensor"] is torch.ops.aten.mul_.Tensor
    assert found["aten::mm"] is found["aten::linalg_lu"] is found["aten::_foreach_div.List"] is None


IN_PLACE = [rule for rule in mg.rules.values() if in_place_operator(rule) is not None]


@pytest.mark.parametrize("rule", IN_PLACE, ids=lambda r: r.name)
def test_reverse_over_forward_mode_agrees_with_the_functional_form(rule):
    """What is written to has a tangent, which is written to as well; the derivative may have kept it."""
    sample = next(iter(rule.samples(F64, "cpu")))
    x, *rest = sample.args

    def derivative(op):
        def tangent(x):
            return torch.func.jvp(lambda x: op(x * 1, *rest, **sample.kwargs).sum(), (x,), (torch.ones_like(x),))[1]

        return torch.func.grad(tangent)(x)

    with mg.override(rule):
        if rule.aten(x, *rest, **sample.kwargs).shape != x.shape:
            pytest.skip("the result has another shape")
        torch.testing.assert_close(derivative(in_place_operator(rule)), derivative(rule.aten))


def test_a_tangent_that_an_outer_level_keeps_is_not_written_to():
    x = torch.rand(3, dtype=F64) + 0.5

    def third(root):
        slope = torch.func.grad(lambda x: root((x * x).sum()))
        along = lambda x: torch.func.jvp(lambda x: slope(x).pow(2).prod(), (x,), (x,))[1]  # noqa: E731
        return torch.func.grad(along)(x)

    with mg.override("aten::sqrt"):
        torch.testing.assert_close(third(torch.Tensor.sqrt_), third(torch.sqrt))


def gradient(f, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x).pow(2).sum(), x)[0]


def renormed(x):
    return torch.renorm(x, 2, 0, 0.5)


def renormed_in_place(x):
    return (x * 1).renorm_(2, 0, 0.5)


@pytest.mark.parametrize("x", [torch.randn(3, 4, dtype=F64), torch.zeros(3, 4, dtype=F64)], ids=["random", "zeros"])
def test_renorm_agrees_with_its_functional_form(x):
    x[0] *= 1e-200  # PyTorch's gradient is nan, or zero, there
    with mg.override("renorm"):
        assert torch.equal(renormed_in_place(x), renormed(x))
        expected = gradient(renormed, x)
        torch.testing.assert_close(gradient(renormed_in_place, x), expected)
        torch.testing.assert_close(torch.func.grad(lambda x: renormed_in_place(x).pow(2).sum())(x), expected)
        tangents = [torch.func.jvp(f, (x,), (torch.ones_like(x),))[1] for f in (renormed, renormed_in_place)]
        torch.testing.assert_close(*tangents)
        seconds = [torch.func.hessian(lambda x, f=f: f(x).pow(2).sum())(x) for f in (renormed, renormed_in_place)]
        torch.testing.assert_close(*seconds)
    assert expected.isfinite().all()


def test_only_the_written_argument_is_written():
    with mg.override("renorm"):
        leaf = torch.ones(2, 2, requires_grad=True)
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            leaf.renorm_(2, 0, 0.5)
        with torch.no_grad():
            assert leaf.renorm_(2, 0, 0.5) is leaf
        base = torch.ones(2, 2, requires_grad=True) * 1
        view = base[0].unsqueeze(0)
        assert view.renorm_(2, 0, 0.5) is view
        torch.testing.assert_close(base[0], view[0])  # a view writes to its base
        assert base.requires_grad and view._version == base._version


def test_addmm():
    x, a, b = (torch.randn(3, 3, dtype=F64) for _ in range(3))

    def f(x):
        return (x * 1).addmm_(a, x, beta=2, alpha=0.5)

    expected = gradient(lambda x: torch.addmm(x, a, x, beta=2, alpha=0.5), x)
    with mg.override("addmm"):
        torch.testing.assert_close(gradient(f, x), expected)
        with pytest.raises(RuntimeError, match="shape|size|expand"):
            torch.ones(3, dtype=F64, requires_grad=True).mul(1).addmm_(a, b)


def is_floating(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


POINTWISE = [r for r in IN_PLACE if len(r.signature.tensor_like) > 1 and torch.Tag.pointwise in r.aten.tags]


@pytest.mark.parametrize("rule", POINTWISE, ids=lambda r: r.name)
def test_a_number_in_the_place_of_a_tensor(rule):
    """So the dispatcher hands a kernel in Python a wrapped number of C++, such as a constant of a traced graph."""
    sample = next(iter(rule.samples(F64, "cpu")))
    given = rule.signature.bind(sample.args, sample.kwargs)
    values = [torch.rand(3 if x.dim() else (), dtype=F64) if is_floating(x) else x for x in given]
    others = [i for i in rule.signature.tensor_like[1:] if is_floating(values[i])]
    kernel = in_place_kernel(rule.aten, in_place_operator(rule), None, lambda: derivative_of(rule))
    for i in others:
        args, kwargs = rule.signature.split(
            [values[0].clone().requires_grad_() * 1, *values[1:i], 0.5, *values[i + 1 :]]
        )
        with mg.override(rule):
            result = kernel(None, *args, **kwargs)
        args, kwargs = rule.signature.split([*values[:i], torch.tensor(0.5, dtype=F64), *values[i + 1 :]])
        assert torch.equal(result, rule.aten(*args, **kwargs))


def fresh(rule, sample):
    """The arguments, those that require grad which may: PyTorch refuses it of a noise."""
    return [
        x.detach().clone().requires_grad_(name != "noise") if is_floating(x) else x
        for name, x in zip(rule.signature.names, sample.args)
    ]


def samples_to_write_to(rule, number=2):
    """Of several shapes, where the result has that of what it is written to."""
    found = {}
    for sample in rule.samples(F64, "cpu"):
        x = sample.args[0]
        if is_floating(x) and x.layout is torch.strided and x.numel() > 1 and len(found) < number:
            if rule.aten(*sample.args, **sample.kwargs).shape == x.shape:
                found.setdefault(tuple(y.shape for y in sample.args if isinstance(y, torch.Tensor)), sample)
    return list(found.values())


def written_to(rule, inputs, kwargs):
    """The result, and the bytes of what is kept beside it."""
    target, sizes = inputs[0] * 1, {}

    def pack(x):
        if x.layout is torch.strided and x.dim():
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        version = target._version
        result = in_place_operator(rule)(target, *inputs[1:], **kwargs)
    assert result is target and target._version > version
    sizes.pop(target.untyped_storage().data_ptr(), None)
    return result, sum(sizes.values())


def two_orders(result, inputs):
    inputs = [x for x in inputs if is_floating(x) and x.requires_grad]
    how = {"create_graph": True, "materialize_grads": True}
    first = torch.autograd.grad(result.square().sum() + inputs[0].pow(3).sum(), inputs, **how)
    return *first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs, **how)


@pytest.mark.parametrize("rule", IN_PLACE, ids=lambda r: r.name)
def test_it_keeps_no_more_than_pytorch_and_has_the_derivatives_of_the_functional_form(rule):
    missing = rule.name in ("aten::asinh", "aten::acosh", "aten::atanh")  # PyTorch has no derivative in place
    missing |= rule.name == "aten::nextafter" and "missing" in rule.improves  # nor any of it, until torch 2.13
    for sample in samples_to_write_to(rule):
        _, stock = written_to(rule, fresh(rule, sample), sample.kwargs)
        inputs, others = fresh(rule, sample), fresh(rule, sample)
        with mg.override(rule):
            result, kept = written_to(rule, inputs, sample.kwargs)
            torch.manual_seed(0)
            expected = rule.aten(*others, **sample.kwargs)
        assert kept <= stock or missing
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        if result.requires_grad:
            torch.testing.assert_close(two_orders(result, inputs), two_orders(expected, others))


def outcome(rule, sample, context, same=None, later=False):
    """The gradients, or that it raises, with the tensor that is written to in the place ``same``, or written to later."""
    inputs = fresh(rule, sample)
    args = [inputs[0] * 1, *inputs[1:]]
    if same is not None:
        args[same] = args[0]
    torch.manual_seed(0)
    try:
        with context:
            in_place_operator(rule)(*args, **sample.kwargs)
            if later:
                args[0].detach().add_(1)
            inputs = [x for x in inputs if is_floating(x) and x.requires_grad]
            return torch.autograd.grad(args[0].square().sum(), inputs, materialize_grads=True)
    except RuntimeError:
        return "raises"


@pytest.mark.parametrize("rule", IN_PLACE, ids=lambda r: r.name)
def test_overlapping_writes_and_reads_raise_as_in_pytorch(rule):
    for sample in samples_to_write_to(rule):
        x = sample.args[0]
        places = [i for i, y in enumerate(sample.args) if i and is_floating(y) and y.shape == x.shape]
        for how in ({"later": True}, *[{"same": i} for i in places]):
            stock, ours = (outcome(rule, sample, context, **how) for context in (nullcontext(), mg.override(rule)))
            if stock != "raises" or "same" in how:
                assert (ours == "raises") == (stock == "raises"), how
                torch.testing.assert_close(ours, stock) if stock != "raises" else None


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ["leaky_relu", "elu", "celu"])
def test_the_slope_of_a_result_on_an_unknown_side(name, sign):
    """PyTorch refuses the backward of these in place where the number is negative; the rule then keeps the input."""
    x = torch.tensor([-2.0, -0.3, 0.0, 0.4, 1.5], dtype=F64)
    op, functional = getattr(torch.ops.aten, f"{name}_"), getattr(torch.ops.aten, name)
    with mg.override(name):
        torch.testing.assert_close(
            gradient(lambda x: op(x * 1, 0.7 * sign), x), gradient(lambda x: functional(x, 0.7 * sign), x)
        )


# -- an operand that shares memory with what is written to ------------------------------------------------------------

#: The tensor itself, a view of it with the same elements, and one with other strides.
SHARED = {"itself": lambda x: x, "a view": lambda x: x.view_as(x), "transposed": lambda x: x.mT if x.dim() > 1 else x}


def square(x):
    return x.reshape(-1)[: int(x.numel() ** 0.5) ** 2].reshape(int(x.numel() ** 0.5), -1) if x.dim() > 1 else x


def shared_calls(rule):
    """(values, places of operands that are to be the first argument), with those for which the functional form runs."""
    found = {}
    for sample in rule.samples(F64, "cpu"):
        given = rule.signature.bind(list(sample.args), sample.kwargs)
        if not is_dense_differentiable(given[0]) or given[0].numel() < 2:
            continue
        others = [i for i in rule.signature.tensor_like if i and is_dense_differentiable(given[i])]
        same = [i for i in others if given[i].dtype == given[0].dtype]
        for places in [[i] for i in same] + [same] * (len(same) > 1):
            key = (tuple(places), given[0].dtype)
            values = list(given)
            if len(others) > 1 or given[0].dim() > 1:
                values[0] = square(values[0])
            if key not in found and fits(rule, values, places):
                found[key] = (values, places)
    return found.values()


def fits(rule, values, places):
    values = list(values)
    for i in places:
        values[i] = values[0]
    try:
        args, kwargs = rule.signature.split(values)
        return rule.aten(*args, **kwargs).shape == values[0].shape
    except (RuntimeError, IndexError):
        return False


def call(op, signature, values, places, share, x):
    values = [x, *values[1:]]
    for i in places:
        values[i] = share(x)
    args, kwargs = signature.split(values)
    torch.manual_seed(0)
    return op(*args, **kwargs)


def jvp(f, x, t):
    return torch.func.jvp(f, (x,), (t,))[1]


def eager_jvp(f, x, t):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, t)
        return torch.autograd.forward_ad.unpack_dual(f(dual)).tangent


def loss(f, x):
    y = f(x)
    return (y * y.conj()).real.sum()


def rev(f, x, t):
    return torch.func.grad(partial(loss, f))(x)


def eager_rev(f, x, t):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(loss(f, x), x)[0]


def fwd_fwd(f, x, t):
    return jvp(lambda x: jvp(f, x, t), x, t)


def rev_fwd(f, x, t):
    return torch.func.grad(lambda x: loss(lambda x: jvp(f, x, t), x))(x)


def fwd_rev(f, x, t):
    return jvp(lambda x: rev(f, x, t), x, t)


MODES = (eager_jvp, jvp, eager_rev, rev, fwd_fwd, rev_fwd, fwd_rev)
RULES = [
    rule
    for rule in mg.rules.values()
    if rule.samples and len(rule.signature.tensor_like) > 1 and in_place_operator(rule) is not None
]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_an_operand_that_shares_memory(rule):
    """Where PyTorch itself raises, so may ours."""
    op = in_place_operator(rule)
    for values, places in shared_calls(rule):
        x = values[0].clone()
        t = torch.randn_like(x)
        for how, share in SHARED.items():
            if how == "transposed" and (x.dim() < 2 or x.shape[-1] != x.shape[-2]):
                continue
            functional = partial(call, rule.aten, rule.signature, values, places, share)
            in_place = partial(call, op, rule.signature, values, places, share)
            for mode in MODES:
                with mg.override("*"):
                    try:
                        expected = mode(functional, x, t)
                    except (RuntimeError, NotImplementedError):
                        continue
                for names in ((), ("*",)):
                    with mg.override(*names):
                        try:
                            found = mode(lambda x, f=in_place: f(x * 1), x, t)
                        except (RuntimeError, NotImplementedError):
                            continue
                    where = f"{how} at {places}, {mode.__name__} under override{names}"
                    torch.testing.assert_close(
                        found, expected, equal_nan=True, msg=lambda m, where=where: f"{where}: {m}"
                    )


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_a_constant_operand_that_shares_memory(rule):
    """PyTorch refuses none of these in the backward. At zero, too, where its derivatives may be nan and those of the rules not."""
    op = in_place_operator(rule)
    for values, places in shared_calls(rule):
        for x, names in itertools.product((values[0], torch.zeros_like(values[0])), ((), ("*",))):
            if not names and not rule.improves:  # not active
                continue
            functional = partial(call, rule.aten, rule.signature, values, places, torch.Tensor.detach)
            in_place = partial(call, op, rule.signature, values, places, torch.Tensor.detach)
            if functional(x).isnan().any():
                continue
            with mg.override(*names):
                for mode in MODES:
                    try:
                        expected = mode(functional, x, torch.ones_like(x))
                        found = mode(lambda x, f=in_place: f(x * 1), x, torch.ones_like(x))
                    except (RuntimeError, NotImplementedError):
                        continue
                    where = f"{places}, {mode.__name__} under override{names}"
                    torch.testing.assert_close(
                        found, expected, equal_nan=True, msg=lambda m, where=where: f"{where}: {m}"
                    )


def test_operators_that_read_their_output_copy_operands():
    """Also under a plain override that was entered before any other."""
    reads = {in_place_operator(rule) for rule in RULES if any(n in rule.residuals for key in rule.vjp for n in key)}
    assert reads <= {form.op for form in reading_written(mg.rules.values())}


LISTS = list(reading_written([]))


def argument(type_, number):
    if "List[Tensor]" in type_:
        return [number + torch.rand(3, dtype=F64), number + torch.rand(2, 2, dtype=F64)]
    return [1.5, 2.5] if "List" in type_ else 1.5 * torch.ones((), dtype=F64) if type_ == "Tensor" else 1.5


@pytest.mark.parametrize("names", [(), ("*",)], ids=["plain", "star"])
@pytest.mark.parametrize("one", LISTS, ids=lambda one: one.op.name())
def test_lists_that_share_memory(one, names):
    """PyTorch's reverse mode is wrong here, too, and does not raise."""
    arguments = one.functional._schema.arguments
    lists = [i for i, a in enumerate(arguments) if str(a.type) == "List[Tensor]"]
    values = [argument(str(a.type), k + 1) for k, a in enumerate(arguments)]
    for places in [[i] for i in lists[1:]] + [lists[1:]] * (len(lists) > 2):

        def run(op, *xs, places=places):
            given = list(values)
            for i in (0, *places):
                given[i] = list(xs)
            result = op(*[g for g, a in zip(given, arguments) if not a.kwarg_only])
            return torch.cat([x.reshape(-1) for x in (given[0] if result is None or not len(result) else result)])

        xs = [torch.rand_like(x) + 0.5 for x in values[0]]
        flat = torch.cat([x.reshape(-1) for x in xs])
        pieces = lambda z: (z[:3], z[3:].reshape(2, 2))  # noqa: E731
        functional = lambda z: run(one.functional, *pieces(z))  # noqa: E731
        in_place = lambda z: run(one.op, *[x * 1 for x in pieces(z)])  # noqa: E731
        for mode in MODES:
            with mg.override(*names):
                try:
                    expected = mode(functional, flat, torch.ones_like(flat))
                    found = mode(in_place, flat, torch.ones_like(flat))
                except (RuntimeError, NotImplementedError):
                    continue
            torch.testing.assert_close(found, expected, msg=lambda m: f"{places}, {mode.__name__}: {m}")


def columns(x, start, stop):
    return x[..., start:stop]


#: (what is written to, operand), parts of one matrix; the first ones overlap in part
OVERLAPPING = {
    "strided": lambda x: (x[..., ::2], x.reshape(-1)[3:9].reshape(3, 2)),
    "shifted": lambda x: (columns(x, 0, 3), columns(x, 1, 4)),
    "one row for all": lambda x: (x[:, :3], x[1, :3]),
    "one element for all": lambda x: (x[:, :3], x[0, 0]),
}
SEPARATE = {
    "itself": lambda x: (x[:, :3], x[:, :3]),
    "columns": lambda x: (x[:, 0], x[:, 1]),
    "rows": lambda x: (x[0], x[1]),
    "interleaved": lambda x: (x[:, ::2], x[:, 1::2]),
    "blocks": lambda x: (x[:, :2], x[:, 2:]),
}


@pytest.mark.parametrize("mode", [eager_jvp, jvp, eager_rev, rev], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["mul_", "pow_", "atan2_", "copysign_"])
@pytest.mark.parametrize("parts", OVERLAPPING.values(), ids=list(OVERLAPPING))
def test_an_operand_that_overlaps_in_part_is_refused(parts, name, mode):
    """On PyTorch the values depend on the order of the writes, and the derivative is another function's."""

    def f(x):
        y = x * 1
        written, operand = parts(y)
        getattr(written, name)(operand)
        return y

    with mg.override("*"), pytest.raises(RuntimeError, match="'other' and 'self'|'exponent' and 'self'|single memory"):
        mode(f, torch.rand(3, 4, dtype=F64) + 0.5, torch.rand(3, 4, dtype=F64))


@pytest.mark.parametrize("mode", [eager_jvp, jvp, fwd_fwd], ids=lambda f: f.__name__)
@pytest.mark.parametrize("parts", SEPARATE.values(), ids=list(SEPARATE))
def test_an_operand_of_the_same_storage_that_does_not_overlap(parts, mode):
    def f(x, in_place):
        y = x * 1
        written, operand = parts(y)
        return written.mul_(operand) if in_place else written * operand

    x, t = torch.rand(3, 4, dtype=F64) + 0.5, torch.rand(3, 4, dtype=F64)
    with mg.override("*"):
        found, expected = mode(partial(f, in_place=True), x, t), mode(partial(f, in_place=False), x, t)
    torch.testing.assert_close(found, expected)


def test_parts_of_complex_numbers():
    z = torch.randn(3, dtype=torch.complex128)
    with mg.override("*"):
        w = z.clone().requires_grad_() * 1
        w.real.mul_(w.imag.detach())
        torch.testing.assert_close(w.detach().real, z.real * z.imag)
        w = z.clone().requires_grad_() * 1
        with pytest.raises(RuntimeError, match="single memory location"):
            w.real.mul_(torch.view_as_real(w.detach()).reshape(-1)[2:5])


def test_a_result_that_does_not_fit():
    """PyTorch's addbmm_ writes outside of the memory of a view that is too small."""
    x = torch.zeros(4, 3, dtype=F64)
    batches = torch.ones(2, 3, 4, dtype=F64), torch.ones(2, 4, 3, dtype=F64)
    with mg.override("*"):
        y = x.clone().requires_grad_() * 1
        with pytest.raises(
            RuntimeError, match=r"output with shape \[1, 3\] doesn't match the broadcast shape \[3, 3\]"
        ):
            y[:1].addbmm_(*batches)
        assert y.eq(0).all()


@pytest.mark.parametrize("mark", ["", "*"])
@pytest.mark.parametrize("fill", [
    lambda y: y.fill_(y[0, 0]),
    lambda y: y.masked_fill_(torch.tensor([True, False, True]), y[0, 0]),
    lambda y: y.index_fill_(0, torch.tensor([0]), y[1, 1]),
])  # fmt: skip
def test_the_value_of_a_fill_may_be_a_view_of_the_filled_tensor(fill, mark):
    """It is read once, before anything is written."""

    def slope():
        x = (torch.arange(6, dtype=F64) + 1).requires_grad_()
        y = (x * 1).view(2, 3)
        fill(y)
        return torch.autograd.grad(y.sum(), x)[0]

    expected = slope()
    with mg.override(*mark):
        torch.testing.assert_close(slope(), expected)


def test_large_parts_are_not_compared_place_by_place(monkeypatch):
    def fail(*args):
        raise AssertionError("all places were compared")

    monkeypatch.setattr(overlap, "_places", fail)
    x = (torch.zeros(100, 400, requires_grad=True) * 1).view(100, 400)
    with mg.override("*"):
        x[:, :200].add_(x[:, 200:])
        x.T[:50].add_(x.T[50:100])
        with pytest.raises(RuntimeError, match="single memory location"):
            x[:, :200].mul_(x[:, 199:399])
