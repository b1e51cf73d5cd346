"""Every rule of mg.rules: its Taylor series beside nested forward mode and beside finite differences, or an error."""

import pytest
import torch
from helpers.jets import ORDER, compare, largest_error, nested_derivatives
from helpers.rules import RULES, calls, random_like
from helpers.thinning import every, label
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import torch_manualgrad as mg
from torch_manualgrad.forward_ad import jet
from torch_manualgrad.forward_ad.jets import rules as jet_rules
from torch_manualgrad.forward_ad.jets.tensor import Space

# -- nested forward mode ----------------------------------------------------------------------------------------------

# Those of which no series is known, and that raise. Of the others the test proves that there is one.
WITHOUT_SERIES = {
    *"_foreach_div.List _foreach_maximum.Scalar _foreach_maximum.ScalarList _foreach_minimum.Scalar".split(),
    *"_foreach_minimum.ScalarList _foreach_pow.List _foreach_pow.ScalarList _foreach_pow.ScalarAndTensor".split(),
    *"_foreach_norm.Scalar _foreach_mm _prelu_kernel_backward".split(),
    *"_embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward".split(),
}
# vmap has no rule for them (for the first before torch 2.15): they raise along many directions
ONE_BY_ONE = ("aten::_grouped_mm", "aten::_pack_padded_sequence", "aten::_sparse_addmm")


def expected_to_raise(rule):
    """Sparse tensors have none, except as constant factors of dense ones."""
    name = rule.name.removeprefix("aten::")
    return name in WITHOUT_SERIES or "sparse" in name and name != "_sparse_addmm"


def series_of(call, order):
    directions = random_like(call.inputs)
    return jet(call, call.inputs, [[v, *[None] * (order - 1)] for v in directions])[1]


def error_of(call, order):
    found = series_of(call, order)
    directions = random_like(call.inputs)
    with mg.override("*"):
        return largest_error(found, nested_derivatives(call, call.inputs, directions, order))


def collapsed_error(call):
    """A sum over three directions with weights, beside the directions one by one."""
    directions = [random_like(call.inputs, seed=s) for s in range(3)]
    weights = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    space = Space(2, 3, weights)

    def run():
        jets = [space.jet([x, torch.stack(v), None]) for x, v in zip(call.inputs, zip(*directions))]
        return [space.coefficients(y) for y in call(*jets)]

    single = [jet(call, call.inputs, [[v, None] for v in vs])[1] for vs in directions]
    found, expected = [], []
    for i, (value, first, second) in enumerate(space.run(run)):
        found.append([value.new_zeros((3, *value.shape)) if first is None else first])
        found[-1].append(torch.zeros_like(value) if second is None else 2 * second)
        expected.append([torch.stack([s[i][0] for s in single]), sum(w * s[i][1] for w, s in zip(weights, single))])
    return largest_error(found, expected)


def tolerance(call):
    return 1e-8 if all(x.dtype is torch.float64 for x in call.inputs) else 1e-5


@pytest.mark.parametrize("rule", every(2, RULES), ids=label)
def test_every_rule_has_a_series_or_raises(rule):
    call = next((c for c in calls(rule, torch.float64) if c.inputs and c.outputs), None)
    if call is None:
        assert "sparse" in rule.name, "no sample"
        return
    if expected_to_raise(rule):
        with pytest.raises((NotImplementedError, RuntimeError)):
            error_of(call, 2)
        return
    recurrence = rule.kind == "elementwise" and rule.name in jet_rules.known_rules()
    assert error_of(call, 4 if recurrence else 2) < tolerance(call)
    try:
        assert collapsed_error(call) < tolerance(call)
    except RuntimeError:
        assert rule.name in ONE_BY_ONE


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_every_sample_to_the_third_order(rule):
    if expected_to_raise(rule):
        return
    for call in calls(rule, torch.float64):
        if call.inputs and call.outputs:
            assert error_of(call, 3) < tolerance(call), call
            assert rule.name in ONE_BY_ONE or collapsed_error(call) < tolerance(call), call


def test_how_many_have_a_recurrence():
    own = [r.name for r in RULES if r.name in jet_rules.known_rules()]
    print(f"\n{len(own)} rules have an entry for jets, {len(RULES) - len(own)} follow from their rule")
    assert len(own) > 80


def in_place_of(rule):
    """The operators that write the rule's result to its first argument, whatever their overload is called."""
    base = rule.name.removeprefix("aten::").partition(".")[0]
    packet = getattr(torch.ops.aten, f"{base}_", None)
    types = [str(a.type) for a in rule.aten._schema.arguments]
    overloads = [getattr(packet, o) for o in packet.overloads()] if packet is not None else []
    return [op for op in overloads if [str(a.type) for a in op._schema.arguments] == types]


IN_PLACE = {op: rule for rule in RULES for op in in_place_of(rule) if rule.signature.arguments[0].is_tensor}


@pytest.mark.parametrize("op", IN_PLACE, ids=str)
def test_an_operator_in_place_is_the_functional_one(op):
    rule = IN_PLACE[op]
    for sample in list(rule.samples(torch.float64, "cpu"))[:2]:
        x, *rest = sample.args
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            continue
        results = []
        for f in (rule.aten, op):
            call = lambda x, f=f: f(x * 1.0, *rest, **sample.kwargs)  # noqa: E731
            try:
                results.append(jet(call, (x,), [[x.cos(), None, None]])[1])
            except NotImplementedError as error:
                results.append(str(error))
        torch.testing.assert_close(results[1], results[0])


# -- finite differences, to the fourth order, in each argument, real and complex --------------------------------------

# A series in an argument is right, or an error says that there is none: never zero for a derivative that exists. The
# differences are those of the operator itself, which knows nothing of derivatives.

# Arguments without a series, which raise.
WITHOUT_SERIES_IN = {
    "aten::_prelu_kernel_backward": {"grad_output", "self", "weight"},
    "aten::_embedding_bag_backward": {"grad", "per_sample_weights"},
    "aten::_embedding_bag_dense_backward": {"grad", "per_sample_weights"},
    "aten::_embedding_bag_per_sample_weights_backward": {"grad", "weight"},
    "torch_nn::_linear_cross_entropy_batch_chunked": {"weight"},
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": {"weight"},
    **{
        f"aten::_foreach_{name}": {"self", "other", "exponent", "mat2"}
        for name in (
            "div.List maximum.Scalar maximum.ScalarList minimum.Scalar minimum.ScalarList pow.List pow.ScalarList "
            "pow.ScalarAndTensor norm.Scalar mm"
        ).split()
    },
}
# Samples are drawn at random, so that there is no difference to take; or all of them are at kinks.
NOTHING_TO_COMPARE = {"aten::_standard_gamma"}


def is_differentiable(x):
    return isinstance(x, Tensor) and x.dtype in (torch.float64, torch.complex128) and x.layout is torch.strided


def cases(rule, dtype, at_most):
    """For each sample and tensor argument: its name, f of it alone, and its value."""
    if rule.samples is None:
        return
    names = rule.signature.names
    number = 0
    for sample in rule.samples(dtype, "cpu"):
        values, spec = tree_flatten((list(sample.args), dict(sample.kwargs)))
        if any(isinstance(x, Tensor) and not x.numel() for x in values):
            continue
        values = [x.detach() if isinstance(x, Tensor) else x for x in values]
        owners = [n for n, v in zip(names, sample.args) for _ in tree_leaves(v)]
        owners += [n for n, v in sample.kwargs.items() for _ in tree_leaves(v)]

        def call(i, x, values=values, spec=spec):
            args, kwargs = tree_unflatten([*values[:i], x, *values[i + 1 :]], spec)
            return [y for y in tree_leaves(rule.probe(*args, **kwargs)) if is_differentiable(y) and y.numel()]

        try:
            call(0, values[0])
        except (RuntimeError, NotImplementedError):  # not in this dtype
            continue
        number += 1
        if number > at_most:
            return
        for i, (name, x) in enumerate(zip(owners, values)):
            if is_differentiable(x):
                yield name, lambda y, i=i, call=call: call(i, y), x


def check(rule, at_most):
    compared, raised, found = set(), set(), False
    for dtype in (torch.float64, torch.complex128):
        for name, f, x in cases(rule, dtype, at_most):
            found = True
            try:
                wrong, agreed = compare(f, x)
            except NotImplementedError as error:
                assert name in WITHOUT_SERIES_IN.get(rule.name, ()), f"{rule.name}, {name!r}: {error}"
                raised.add(name)
                continue
            assert name not in raised, f"{rule.name}, {name!r}: raises for some samples only"
            assert name not in WITHOUT_SERIES_IN.get(rule.name, ()), f"{rule.name}, {name!r} has a series"
            assert not wrong or rule.name in NOTHING_TO_COMPARE, f"{rule.name}, {name!r}, {dtype}: orders {wrong}"
            if len(agreed) == ORDER:
                compared.add(name)
    if found and rule.name not in NOTHING_TO_COMPARE:
        assert compared | raised, "nothing could be compared"
    return compared, raised


@pytest.mark.parametrize("rule", every(2, [r for r in RULES if "sparse" not in r.name], 1), ids=label)
def test_each_argument_has_its_series_or_raises(rule):
    check(rule, 2)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [r for r in RULES if "sparse" not in r.name], ids=lambda r: r.name)
def test_each_argument_of_all_samples(rule):
    check(rule, 100)
