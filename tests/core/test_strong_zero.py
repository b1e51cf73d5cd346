"""override(strong_zero=True): a cotangent or tangent of exactly zero stays zero, whatever it is multiplied by."""

import itertools
import math
import re

import pytest
import torch
import torch.utils.checkpoint
from helpers.rules import TURNS, dtype_of, has_history, samples, without_tangent
from helpers.tensors import is_dense_differentiable
from helpers.thinning import every, in_turn, label
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, hessian, jvp
from torch.fx.experimental.proxy_tensor import make_fx

import torch_manualgrad as mg
from torch_manualgrad.core.rule import derivative
from torch_manualgrad.core.rule.derivative import derivative_of
from torch_manualgrad.core.schema import is_differentiable, tensors_in
from torch_manualgrad.derivatives.elementwise.strong_times import strong_times
from torch_manualgrad.testing import check

F64 = torch.float64
STRONG = [rule for rule in mg.rules.values() if rule.has_strong_zero]
BAD = (0.0, math.inf, math.nan)
NAN_CRASHES_PYTORCH = {name for name in mg.rules if "grid_sampler" in name} | {"aten::linalg_lstsq"}
# Whose tangent of zero is nan: a column of a QR decomposition that depends on those before it has none.
UNDEFINED_TANGENTS = {"aten::linalg_qr", "aten::geqrf"}
OF_MATRICES = re.compile("linalg|cholesky|triangular|ormqr|lu_solve")
# Which are given a result of others among their inputs, that one wrong number makes wrong; in which one pair of points,
# one sequence, or one matrix whose first columns have numbers of their own, is one thing; and of which PyTorch's sample of one
# component is 1 even where its parameter is nan.
NOT_SEPARATE = {
    "aten::_sample_dirichlet",
    "aten::geqrf",
    "aten::log_sigmoid_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::native_group_norm_backward",
    "aten::native_layer_norm_backward",
    "aten::_cdist_backward",
    "aten::_pdist_backward",
    "aten::_ctc_loss",
    "aten::_ctc_loss.Tensor",
    "aten::multi_margin_loss_backward",
}

# Rules that lose a zero in a derivative of higher order, which docs/limits.md lists. Their derivatives are products of
# matrices with a factor that is no cotangent, such as the inverse of a triangle, or series.
LOST = {
    "aten::_linalg_det",
    "aten::geqrf",
    "aten::linalg_lstsq",
    "aten::linalg_lu",
    "aten::linalg_lu_factor_ex",
    "aten::linalg_matrix_exp",
    "aten::linalg_matrix_sqrth",
    "aten::linalg_polar",
    "aten::special_zeta",
}
# and where one key of several is nan, as a weight of 0 is no cotangent
LOST_IF_MASKED = {
    "aten::_linalg_det",
    "aten::linalg_matrix_exp",
    "aten::linalg_matrix_sqrth",
    "aten::linalg_polar",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
}

# Programs that people reported: what goes in, and the gradient of the sum where the branch not taken is absent.
REPORTED = {
    "sqrt at 0": (lambda x: torch.where(x == 0.0, x / 2, x.sqrt() + 1), [16.0, 0.0], [0.125, 0.5]),
    "cos at inf": (lambda x: torch.where(x < 1.0, torch.cos(x), torch.zeros_like(x)), [0.0, math.inf], [0.0, 0.0]),
    "0 / 0 twice": (lambda x: torch.where(x >= 0, x, 0 * (x / 0)), [1.0], [1.0]),
    "divided by 0": (lambda x: torch.where(torch.tensor(False), x / 0, torch.ones(())), [0.3], [0.0]),
    "exp overflows": (lambda x: torch.where(x <= 0, torch.exp(x), 1 + x), [1000.0], [1.0]),
    "log2 at 0": (lambda x: torch.where(x > 2, torch.log2(x), 2 * x), [0.0, 2.0, 4.0], [2.0, 2.0, 0.25 / math.log(2)]),
    "nan goes in": (
        lambda x: torch.where(x <= 10, torch.exp(x), torch.ones(())),
        [1.0, math.nan, 1e10],
        [math.e, 0.0, 0.0],
    ),
    "sqrt of negative numbers": (lambda x: torch.where(x > 0, torch.sqrt(x), x), [-1.0, -4.0], [1.0, 1.0]),
}


@pytest.mark.parametrize("name", REPORTED)
def test_reported_programs(name):
    f, at, expected = REPORTED[name]
    x = torch.tensor(at, dtype=F64, requires_grad=True)
    (stock,) = torch.autograd.grad(f(x).sum(), x)
    assert not stock.isfinite().all()
    with mg.override(strong_zero=True):
        (found,) = torch.autograd.grad(f(x).sum(), x)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=F64))
        tangent = jvp(lambda x: f(x).sum(), (x.detach(),), (torch.ones_like(x),))[1]
        torch.testing.assert_close(tangent, found.sum())
        second = hessian(lambda x: f(x).sum())(x.detach())
        assert second.isfinite().all()
        forward = torch.func.jacfwd(torch.func.jacfwd(lambda x: f(x).sum()))(x.detach())
        torch.testing.assert_close(forward, second)
        compiled = torch.compile(lambda x: f(x).sum(), backend="aot_eager")
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], found)


def test_masks_other_than_where():
    x = torch.tensor([0.0, 4.0], dtype=F64)
    masks = {
        "masked_fill": lambda x: x.sqrt().masked_fill(x == 0, 0.0),
        "index": lambda x: x.sqrt()[x > 0],
        "product": lambda x: x.sqrt() * (x > 0),
    }
    with mg.override(strong_zero=True):
        for name, f in masks.items():
            assert grad(lambda x, f=f: f(x).sum())(x).tolist() == [0.0, 0.25], name


def leaves(args):
    """The tensors of a call that have derivatives, those in lists too."""
    return [x for x in tensors_in(args) if is_dense_differentiable(x)]


def call(rule, sample, tensors):
    """The differentiable outputs of a sample's call with other tensors."""
    given = iter(tensors)

    def put(x):
        return [put(y) for y in x] if isinstance(x, (list, tuple)) else next(given) if is_dense_differentiable(x) else x

    outputs = rule.aten(*map(put, sample.args), **sample.kwargs)
    return tuple(o for o in tensors_in([outputs]) if is_dense_differentiable(o))


def tangents_of(rule, sample, tensors, tangents):
    """Of the outputs; the arguments in which the rule has no derivative are constant."""
    constant = without_tangent(rule)
    names = [n for n, x in zip(rule.signature.names, sample.args) for _ in leaves([x])]
    moved = [i for i, n in enumerate(names) if n not in constant]

    def function(*xs):
        given = dict(zip(moved, xs))
        return call(rule, sample, [given.get(i, x) for i, x in enumerate(tensors)])

    return jvp(function, tuple(tensors[i] for i in moved), tuple(tangents[i] for i in moved))[1]


def backward(outputs, inputs, cotangents):
    """Gradients, zeros for None; and the outputs left out that do not require grad."""
    pairs = [(o, c) for o, c in zip(outputs, cotangents) if o.requires_grad]
    outputs, cotangents = zip(*pairs)
    return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True, materialize_grads=True)


def tracked(rule, sample, tensors):
    """Copies of the tensors; those require grad that the rule has a vjp for, and that the operator does not write to."""
    written = {a.name for a in rule.aten._schema.arguments if a.alias_info is not None}
    wanted = {name for key in rule.vjp for name in key} - written
    of_rule = [n in wanted for n, x in zip(rule.signature.names, sample.args) for _ in leaves([x])]
    return [x.detach().clone().requires_grad_(yes) for x, yes in zip(tensors, of_rule)]


@pytest.mark.parametrize("rule", [r for r in mg.rules.values() if not r.sparse], ids=lambda r: r.name)
def test_every_rule_keeps_zeros(rule):
    """At its own samples with every kind of number put in, all cotangents and tangents zero."""
    tried = 0
    for sample, bad in itertools.product(itertools.islice(rule.samples(F64, "cpu"), 3), BAD):
        if rule.name in NAN_CRASHES_PYTORCH and bad != 0:
            continue
        tensors = tracked(rule, sample, [torch.full_like(x, bad) for x in leaves(sample.args)])
        inputs = [x for x in tensors if x.requires_grad]
        with mg.override(strong_zero=True):
            try:
                outputs = call(rule, sample, tensors)
            except RuntimeError:  # a factorization of what is not finite
                continue
            if not any(o.requires_grad for o in outputs):
                continue
            grads = backward(outputs, inputs, [torch.zeros_like(o) for o in outputs])
            assert all((g == 0).all() for g in grads), (sample, bad)
            detached = tuple(x.detach() for x in tensors)
            tangents = tangents_of(rule, sample, detached, [torch.zeros_like(x) for x in detached])
            assert rule.name in UNDEFINED_TANGENTS or all((t == 0).all() for t in tangents), (sample, bad)
        tried += 1
    assert tried or not list(rule.samples(F64, "cpu"))


@pytest.mark.parametrize("rule", every(2, [r for r in mg.rules.values() if not r.sparse]), ids=label)
def test_every_rule_keeps_zeros_in_higher_orders(rule):
    """A gradient whose cotangents are all zero is zero whatever the arguments, and so are its derivatives in these."""
    if rule.name not in LOST:
        check_higher_orders(rule)
        return
    with pytest.raises((AssertionError, RuntimeError)):
        check_higher_orders(rule)


def check_higher_orders(rule):
    for sample, bad in itertools.product(itertools.islice(rule.samples(F64, "cpu"), 2), BAD):
        if rule.name in NAN_CRASHES_PYTORCH and bad != 0:
            continue
        tensors = tracked(rule, sample, [torch.full_like(x, bad) for x in leaves(sample.args)])
        inputs = [x for x in tensors if x.requires_grad]
        with mg.override(strong_zero=True):
            try:
                outputs = [o for o in call(rule, sample, tensors) if o.requires_grad]
            except RuntimeError:  # a factorization of what is not finite
                continue
            cotangents = [torch.zeros_like(o) for o in outputs]
            for order in (1, 2, 3):
                if not outputs:
                    break
                found = torch.autograd.grad(outputs, inputs, cotangents, create_graph=True, allow_unused=True)
                assert all(g is None or (g == 0).all() for g in found), (sample, bad, order)
                outputs = [g for g in found if g is not None and g.requires_grad]
                cotangents = [torch.ones_like(o) for o in outputs]


@pytest.mark.parametrize("rule, order", in_turn([r for r in STRONG if r.name not in NOT_SEPARATE], [1, 2]), ids=label)
def test_masked_entries_contribute_nothing(rule, order):
    """One number is not finite; the outputs that it reaches have cotangents of zero; all gradients are as if it were finite."""
    if order == 1 or rule.name not in LOST_IF_MASKED:
        check_masked_entries(rule, order)
        return
    with pytest.raises((AssertionError, RuntimeError)):
        check_masked_entries(rule, order)


def check_masked_entries(rule, order):
    for sample, bad in itertools.product(itertools.islice(rule.samples(F64, "cpu"), 2), (math.nan, math.inf)):
        tensors = leaves(sample.args)
        for place, x in enumerate(tensors):
            if not x.numel() or rule.name in NAN_CRASHES_PYTORCH:
                continue
            good, spoilt = tracked(rule, sample, tensors), tracked(rule, sample, tensors)
            at = tuple(torch.unravel_index(torch.tensor(x.numel() // 2), x.shape))
            spoilt[place].data[at] = bad
            with mg.override(strong_zero=True):
                try:
                    expected, outputs = call(rule, sample, good), call(rule, sample, spoilt)
                except RuntimeError:
                    continue
                if [o.shape for o in outputs] != [o.shape for o in expected]:
                    continue
                clean = [(o == e).detach() for o, e in zip(outputs, expected)]
                for c in clean:
                    if c.shape == x.shape:  # with some vectors PyTorch's elu_backward takes nan for a positive number
                        c[at] = False
                if OF_MATRICES.search(rule.name):  # a matrix is one thing
                    clean = [c.all(-1, keepdim=True).all(-2, keepdim=True) if c.dim() > 1 else c for c in clean]
                cotangents = [torch.where(c, torch.linspace(-1, 2, e.numel()).view(e.shape).to(e), 0)
                              for c, e in zip(clean, expected)]  # fmt: skip
                if not any(o.requires_grad for o in outputs):
                    continue
                found = nth_gradients(order, outputs, [t for t in spoilt if t.requires_grad], cotangents)
                wanted = nth_gradients(order, expected, [t for t in good if t.requires_grad], cotangents)
            torch.testing.assert_close(found, wanted, msg=lambda m, s=sample, b=bad, p=place: f"{s}, {b} in {p}: {m}")


def nth_gradients(order, outputs, inputs, cotangents):
    """Gradients of gradients, each of a weighted sum."""
    for _ in range(order - 1):
        pairs = [(o, c) for o, c in zip(outputs, cotangents) if o.requires_grad]
        outputs, cotangents = zip(*pairs)
        outputs = torch.autograd.grad(outputs, inputs, cotangents, create_graph=True, allow_unused=True)
        outputs = [o for o in outputs if o is not None and o.requires_grad]
        if not outputs:
            return []
        cotangents = [torch.linspace(1, 2, o.numel()).view(o.shape).to(o) for o in outputs]
    return backward(outputs, inputs, cotangents)


@pytest.mark.parametrize("dtype", [F64, torch.complex128], ids=label)
@pytest.mark.parametrize("rule", STRONG, ids=label)
def test_strong_arithmetic_is_arithmetic(rule, dtype, monkeypatch):
    """Where there is no zero and all is finite, derivatives with it are the same."""
    if derivative_of(rule, strong_zero=True).bare:
        return
    for sample in itertools.islice(rule.samples(dtype, "cpu"), 2):
        tensors = tracked(rule, sample, leaves(sample.args))
        detached = tuple(x.detach() for x in tensors)
        tangents = tuple(torch.ones_like(x) * 0.7 for x in detached)
        found = []
        for finite in (derivative.are_finite, lambda tensors: False):
            monkeypatch.setattr(derivative, "are_finite", finite)
            with mg.override(rule, strong_zero=True):
                try:
                    outputs = call(rule, sample, tensors)
                except RuntimeError:  # no complex numbers
                    continue
                if not any(o.requires_grad for o in outputs):
                    continue
                inputs = [x for x in tensors if x.requires_grad]
                found.append(backward(outputs, inputs, [torch.ones_like(o) for o in outputs]))
                if "fwd" not in rule.gaps:
                    found[-1] += tangents_of(rule, sample, detached, tangents)
            monkeypatch.undo()
        if found:
            torch.testing.assert_close(found[1], found[0], equal_nan=True)


@TURNS
@pytest.mark.parametrize("rule", [r for r in STRONG if r.kind == "elementwise"], ids=label)
def test_every_rule_is_right_where_zeros_are_strong(rule, turn):
    with mg.override(rule, strong_zero=True):
        check(rule.probe, samples(rule, dtype_of(rule, turn))[:2], checks=(), name=rule.name, gaps=rule.gaps)


def encoded(x, weight, there):
    """Attention between rows, of which some are not there: what they hold is infinite, and goes into every sum."""
    y = torch.nn.functional.layer_norm(x @ weight, (3,))
    y = torch.nn.functional.gelu(y) + torch.cdist(x, x[:2]).sum(-1, keepdim=True) / torch.linalg.norm(
        y, dim=-1, keepdim=True
    )
    loss = torch.nn.functional.cross_entropy(y, torch.arange(len(x)) % 3, reduction="none")
    return torch.where(there, loss + y.softmax(-1).var(-1).sqrt(), 0).sum()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_masked_have_no_part_in_a_model(bad):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, dtype=F64, generator=generator)
    weight = torch.randn(4, 3, dtype=F64, generator=generator)
    there = torch.tensor([True, True, True, False, True])
    spoilt = torch.where(there[:, None], x, bad)
    direction = torch.ones_like(weight)

    def results(x):
        f = lambda w: encoded(x, w, there)  # noqa: E731
        first = grad(f)(weight)
        compiled = torch.compile(f, backend="aot_eager")(w := weight.clone().requires_grad_())
        second = jvp(grad(f), (weight,), (direction,))[1]
        return first, jvp(f, (weight,), (direction,))[1], second, torch.autograd.grad(compiled, w)[0], grad(
            lambda w: (grad(f)(w) * direction).sum()
        )(weight), grad(encoded)(x, weight, there)[there]  # fmt: skip

    with mg.override(strong_zero=True):
        for found, expected in zip(results(spoilt), results(x), strict=True):
            torch.testing.assert_close(found, expected)


def test_around_a_call():
    """Checkpoints, hooks on saved tensors, autocast, vmap, dual numbers and batches of gradients."""
    x = torch.tensor([[1.0, 2.0], [math.nan, math.inf]], dtype=F64)
    weight = torch.tensor([[1.0, 0.5], [2.0, -1.0]], dtype=F64, requires_grad=True)
    there = torch.tensor([[True], [False]])

    def f(w):
        return torch.where(there, (x @ w).softmax(-1), 0)

    def first():
        return torch.autograd.grad(f(weight).square().sum(), weight)[0]

    with mg.override(strong_zero=True):
        expected = first()
        assert expected.isfinite().all()
        kept = torch.utils.checkpoint.checkpoint(f, weight, use_reentrant=False).square().sum()
        torch.testing.assert_close(torch.autograd.grad(kept, weight)[0], expected)
        with torch.autograd.graph.save_on_cpu():
            torch.testing.assert_close(first(), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.autograd.grad(f(weight).float().sum(), weight)[0].isfinite().all()
        assert torch.func.jacrev(f)(weight.detach()).isfinite().all()
        assert torch.func.jacfwd(f)(weight.detach()).isfinite().all()
        outputs = f(weight)  # with the zeros of PyTorch: no error, that is all
        torch.autograd.grad(outputs, weight, torch.ones(2, *outputs.shape, dtype=F64), is_grads_batched=True)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_traced_with_fake_tensors(mode):
    """Fake tensors call operators of TorchScript, such as prim::device, and the strong arithmetic sees these calls."""
    x = torch.randn(3, 3, dtype=F64)

    def f(x):
        return ((x @ x.cos()).softmax(0).norm() + torch.linalg.eigvalsh(x + x.mT).sqrt().nansum()).exp()

    with mg.override("*", strong_zero=True):
        traced = make_fx(grad(f), tracing_mode=mode)(x)
        torch.testing.assert_close(traced(x), grad(f)(x), equal_nan=True)
        with FakeTensorMode():
            y = torch.randn(3, requires_grad=True)
            (first,) = torch.autograd.grad(y.softmax(0).prod().sqrt(), y, create_graph=True)
            assert torch.autograd.grad(first.sum(), y)[0].shape == (3,)


def derivative_in_the_cotangents(rule, sample, scale):
    """Of the sum of all gradients, at cotangents that are all ``scale``; None if it has none."""
    tensors = tracked(rule, sample, leaves(sample.args))
    inputs = [x for x in tensors if x.requires_grad]
    with mg.override(rule, strong_zero=True):
        outputs = [o for o in call(rule, sample, tensors) if o.requires_grad]
        cotangents = [torch.full_like(o, scale).requires_grad_() for o in outputs]
        if not outputs:
            return None
        grads = torch.autograd.grad(outputs, inputs, cotangents, create_graph=True, allow_unused=True)
        tracked_grads = [g.sum() for g in grads if g is not None and g.requires_grad]
        if not tracked_grads:
            return None
        total = torch.stack(tracked_grads).sum()
        return torch.autograd.grad(total, cotangents, allow_unused=True, materialize_grads=True)


def check_derivative_in_the_cotangents(rule, sample):
    """It does not depend on them, as gradients are linear in them: at zero it is what it is elsewhere."""
    torch.testing.assert_close(
        derivative_in_the_cotangents(rule, sample, 0.0), derivative_in_the_cotangents(rule, sample, 1.0)
    )


@pytest.mark.parametrize("rule", STRONG, ids=lambda r: r.name)
def test_the_derivative_in_the_cotangent_is_not_lost_at_zero(rule, monkeypatch):
    """Where a cotangent is zero, its own derivative is the other factor."""
    monkeypatch.setattr(derivative, "are_finite", lambda tensors: False)
    for sample in itertools.islice(rule.samples(F64, "cpu"), 1):
        check_derivative_in_the_cotangents(rule, sample)


def test_where_around_the_product_is_found():
    """Its value is right at a cotangent of zero, and its derivative in the cotangent is zero."""
    rule = mg.elementwise("aten::exp", lambda result: result, register=False)
    sample = mg.Sample(torch.tensor([0.5, 2.0], dtype=F64))
    (vjp,) = rule.vjp.values()
    vjp.strong = lambda grad, self_dtype, result: torch.where(grad == 0, 0, grad * result)
    with pytest.raises(AssertionError, match="not close"):
        check_derivative_in_the_cotangents(rule, sample)


def test_the_product():
    factor = torch.tensor([[0.0], [2.0]], dtype=F64)
    other = torch.tensor([math.inf, 3.0], dtype=F64)
    assert torch.ops.manualgrad.strong_times(factor, other).tolist() == [[0.0, 0.0], [math.inf, 6.0]]
    finite = torch.tensor([1.5, 3.0], dtype=F64)
    check(
        torch.ops.manualgrad.strong_times,
        [(factor + 1, finite), (factor[1], finite), (factor * (1 + 1j) + 1, finite + 0j)],
    )


@pytest.mark.parametrize(
    "name", [r.name for r in STRONG if r.kind == "elementwise" and r.jvp and len(r.signature.tensor_like) > 1]
)
@pytest.mark.parametrize("names", [(), ("*",)], ids=["plain", "star"])
def test_a_tensor_that_no_gradient_reads_may_be_written_to(name, names):
    """Reverse over forward mode of a product saves no more than PyTorch: a write after the call that is allowed there is
    allowed here."""
    rule = mg.rules[name]
    if not has_history(rule):
        return
    sample = next(iter(rule.samples(F64, "cpu")))
    places = [i for i, x in enumerate(sample.args) if isinstance(x, torch.Tensor) and is_differentiable(x)]

    def gradient(place):
        args = [x.clone() if isinstance(x, torch.Tensor) else x for x in sample.args]
        with torch.autograd.forward_ad.dual_level():
            leaf = torch.ones_like(args[place], requires_grad=True)
            args[place] = dual = torch.autograd.forward_ad.make_dual(args[place], leaf.clone())
            tangent = torch.autograd.forward_ad.unpack_dual(rule.aten(*args, **sample.kwargs)).tangent
            dual.mul_(0.5)  # writes to the tangent, too
        if tangent is None or not tangent.requires_grad:
            return torch.zeros_like(leaf)
        return torch.autograd.grad(tangent.abs().sum(), leaf)[0]

    for place in places:
        try:
            expected = gradient(place)
        except (RuntimeError, NotImplementedError):
            continue
        with mg.override(*names, strong_zero=True):
            torch.testing.assert_close(gradient(place), expected)


@pytest.mark.parametrize("shapes", [((3, 4), (3, 4)), ((3, 4), (4,)), ((3, 1), (4,)), ((), (3,))])
@pytest.mark.parametrize("dtypes", [(F64, F64), (F64, torch.complex128), (torch.float32, F64)])
def test_derivatives_of_the_product_in_one_factor(shapes, dtypes):
    """Then only the other factor is saved: shape and dtype of the gradient are those of the factor."""
    for swapped in (False, True):
        x, y = (torch.randn(s, dtype=d) for s, d in zip(shapes, dtypes))
        if swapped:
            x, y = y, x
        for factors in ((x, y), (y, x)):
            leaf = x.clone().requires_grad_()
            ours = [leaf if f is x else f for f in factors]
            product = strong_times(*ours)
            grad_output = torch.randn_like(product).requires_grad_()
            (found,) = torch.autograd.grad(product, leaf, grad_output, create_graph=True)
            (expected,) = torch.autograd.grad(ours[0] * ours[1], leaf, grad_output, create_graph=True)
            torch.testing.assert_close(found, expected)
            seed = torch.randn_like(found)
            torch.testing.assert_close(
                torch.autograd.grad(found, grad_output, seed), torch.autograd.grad(expected, grad_output, seed)
            )
            x_batched = torch.stack([x, 2 * x])
            batched = torch.func.vmap(lambda v: torch.func.grad(lambda v: strong_times(v, y).abs().sum())(v))(x_batched)
            expected = torch.func.vmap(lambda v: torch.func.grad(lambda v: (v * y).abs().sum())(v))(x_batched)
            torch.testing.assert_close(batched, expected)


@pytest.mark.parametrize("function", [torch.log, torch.log2, torch.log10, lambda x: torch.xlogy(2.5, x)])
@pytest.mark.parametrize("dtype, tiny", [(torch.float32, 1e-40), (F64, 1e-310)])
def test_a_slope_that_overflows_times_a_small_cotangent(function, dtype, tiny):
    """A zero next to it does not change it."""
    x, g = torch.tensor([0.0, tiny], dtype=dtype, requires_grad=True), torch.tensor([0.0, 1e-5], dtype=dtype)
    with mg.override("*"):
        expected = torch.autograd.grad(function(x[1]), x, g[1])[0]
    with mg.override(strong_zero=True):
        found = torch.autograd.grad(function(x), x, g)[0]
        tangent = jvp(function, (x.detach(),), (g,))[1]
    assert expected[1].isfinite()
    torch.testing.assert_close((found, tangent), (expected, expected))
