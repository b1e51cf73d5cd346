"""Every rule of mg.rules: its Taylor series beside nested forward mode, or an error."""

import pytest
import torch
from helpers.jets import largest_error, nested_derivatives
from helpers.rules import RULES, calls, random_like

import torch_manualgrad as mg
from torch_manualgrad.forward_ad import jet
from torch_manualgrad.forward_ad.jets import rules as jet_rules
from torch_manualgrad.forward_ad.jets.tensor import Space

# Those of which no series is known, and that raise. Of the others the test proves that there is one.
NONE = {
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
    return name in NONE or "sparse" in name and name != "_sparse_addmm"


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


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
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
