"""In place with an operand that shares memory with what is written to: the derivative of the functional form, or an error."""

import itertools
from functools import partial

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.core.override import overlap
from torch_manualgrad.core.override.in_place import in_place_operator, reading_written

F64 = torch.float64
#: The tensor itself, a view of it with the same elements, and one with other strides.
SHARED = {"itself": lambda x: x, "a view": lambda x: x.view_as(x), "transposed": lambda x: x.mT if x.dim() > 1 else x}


def is_differentiable(x):
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and (x.is_floating_point() or x.is_complex())


def square(x):
    return x.reshape(-1)[: int(x.numel() ** 0.5) ** 2].reshape(int(x.numel() ** 0.5), -1) if x.dim() > 1 else x


def shared_calls(rule):
    """(values, places of operands that are to be the first argument), with those for which the functional form runs."""
    found = {}
    for sample in rule.samples(F64, "cpu"):
        given = rule.signature.bind(list(sample.args), sample.kwargs)
        if not is_differentiable(given[0]) or given[0].numel() < 2:
            continue
        others = [i for i in rule.signature.tensor_like if i and is_differentiable(given[i])]
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
