"""Every rule at every scale of its input: where PyTorch's derivative is finite and right, so is ours.

What is right in single precision says double precision, whose range is wide enough for every scale of the other; that
ours is right there, other tests show. What is right in double precision says the same derivative at scale one, for
operators that are homogeneous.
"""

import math

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.rules import RULES, calls, has_history, random_like, zero_if_none
from helpers.thinning import every, label

import torch_manualgrad as mg

NARROW = {torch.float64: torch.float32, torch.complex128: torch.complex64}
WIDE = {narrow: wide for wide, narrow in NARROW.items()}
# From the smallest normal numbers to the largest, and where squares, cubes and eighth powers leave this range.
SINGLE = (-122, -110, -80, -64, -44, -18, 0, 17, 43, 64, 85, 110, 124)
DOUBLE = (-1018, -900, -680, -520, -512, -342, -130, 130, 342, 512, 520, 680, 900, 1020)


# A sparse tensor is held constant, in its dtype.
RULES = [rule for rule in RULES if not rule.sparse]
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.complex128, marks=pytest.mark.slow)], ids=str
)


def scaled(call, exponent, wide):
    """The inputs times 2^exponent; ``wide``: as if they were of double precision."""
    found = [x.to(WIDE.get(x.dtype, x.dtype)) if wide else x for x in call.inputs]
    return [x * math.ldexp(1.0, exponent) for x in found]


def reverse(call, exponent, wide=False, create_graph=False):
    """The gradients at 2^exponent times the inputs, of each output by itself."""
    inputs = [x.requires_grad_() for x in scaled(call, exponent, wide)]
    outputs = [o for o in call(*inputs) if o.requires_grad]
    found = []
    for o, g in zip(outputs, random_like(call.outputs)):
        grads = torch.autograd.grad(
            o, inputs, g.to(o.dtype), allow_unused=True, retain_graph=True, create_graph=create_graph
        )
        found += [d.detach() for d in zero_if_none(grads, inputs)]
    return found


def recorded(call, exponent, wide=False):
    """The same, by the steps that autograd records."""
    return reverse(call, exponent, wide, create_graph=True)


def forward(call, exponent, wide=False):
    """The tangents of the outputs at 2^exponent times the inputs, for a tangent of each input by itself."""
    found = []
    for i, tangent in enumerate(random_like(call.inputs, seed=2)):
        with fwAD.dual_level():
            inputs = scaled(call, exponent, wide)
            inputs[i] = fwAD.make_dual(inputs[i], tangent.to(inputs[i].dtype))
            pairs = [fwAD.unpack_dual(o) for o in call(*inputs)]
            found += [torch.zeros_like(p) if t is None else t for p, t in pairs]
    return found


WAYS = (reverse, recorded, forward)


def largest(x):
    return float(x.abs().max()) if x.numel() else 0.0


def is_judged(truth, dtype):
    """Not next to overflow, where the order of a sum decides."""
    return largest(truth) < 2**-8 * torch.finfo(dtype).max


def is_right(found, truth, tolerance):
    """Whether all entries are finite and within a tolerance of the truth, or too small for the dtype."""
    if not found.isfinite().all() or not is_judged(truth, found.dtype):
        return False
    smallest = torch.finfo(found.dtype).smallest_normal
    return largest(found.to(truth.dtype) - truth) <= tolerance * largest(truth) + 4 * smallest


def all_right(found, truths, tolerance):
    """Each that is judged and has a truth."""
    pairs = [(x, truth) for x, truth in zip(found, truths, strict=True) if truth is not None]
    return all(is_right(x, truth, tolerance) for x, truth in pairs if is_judged(truth, x.dtype))


def attempt(way, *args):
    """None where PyTorch has no such derivative."""
    try:
        return way(*args)
    except (RuntimeError, NotImplementedError):
        return None


def by_chance(way, call, exponent, i):
    """Whether PyTorch is right at this scale, and not at half or twice of it: where rounding decides."""
    found = []
    for near in (exponent - 1, exponent + 1):
        with mg.override(call.rule):
            truth = way(call, near, True)
        found.append(is_right(way(call, near)[i], truth[i], 1e-3))
    return not all(found)


@DTYPES
@pytest.mark.parametrize("rule", every(4, RULES, 1), ids=label)
def test_single_precision_against_double_at_every_scale(rule, dtype):
    wrong, tried, stock_has_some = [], 0, False
    for call in calls(rule, NARROW[dtype]):
        for way in WAYS:
            for exponent in SINGLE:
                with mg.override(rule):
                    ours, truth = attempt(way, call, exponent), attempt(way, call, exponent, True)
                right = ours and truth and all_right(ours, truth, 2e-3)
                if right and tried:
                    continue  # whatever PyTorch's are
                stock = attempt(way, call, exponent)
                if not stock:  # it raises, or its result has no history
                    break
                stock_has_some = True
                assert ours is not None and truth is not None, f"{call}, {way.__name__}: only PyTorch's has one"
                for i, (a, b, c) in enumerate(zip(ours, stock, truth, strict=True)):
                    # PyTorch's tangent of a float32 scalar may be float64, whose overflow is elsewhere
                    if is_right(b.to(a.dtype), c, 1e-3):
                        tried += 1
                        if not is_right(a, c, 2e-3) and not by_chance(way, call, exponent, i):
                            wrong.append((call, way.__name__, i, f"2^{exponent}", largest(c), largest(a)))
    assert not wrong, f"{len(wrong)} of {tried} or more: {wrong[:12]}"
    assert tried or dtype.is_complex or (not stock_has_some and "missing" in rule.claims) or not has_history(rule)


def degrees(base, near, step):
    """For each tensor the degree of homogeneity, from its values at scale one and at 2^step; nan where it has none."""
    found = []
    for a, b in zip(base, near, strict=True):
        ratio = largest(b) / largest(a) if largest(a) else 1.0
        degree = round(2 * math.log2(ratio) / step) / 2 if 0 < ratio < math.inf else 0.0
        found.append(degree if is_right(b, a * 2 ** (degree * step), 1e-6) else math.nan)
    return found


@DTYPES
@pytest.mark.parametrize("rule", every(4, RULES, 2), ids=label)
def test_double_precision_at_every_scale_against_scale_one(rule, dtype):
    wrong = []
    for call in calls(rule, dtype):
        for way in WAYS:
            if attempt(way, call, 0) is None:
                continue
            with mg.override(rule):
                base, above, below = way(call, 0), way(call, 8), way(call, -8)
            found = [a if a == b else math.nan for a, b in zip(degrees(base, above, 8), degrees(base, below, -8))]
            for exponent in DOUBLE:
                with mg.override(rule):
                    ours = attempt(way, call, exponent)
                truths = [
                    None if math.isnan(degree) or abs(degree * exponent) > 1020 else one * 2 ** (degree * exponent)
                    for one, degree in zip(base, found, strict=True)
                ]
                if ours and all_right(ours, truths, 2e-9):
                    continue  # whatever PyTorch's are
                stock = attempt(way, call, exponent)
                if not stock:
                    continue
                assert ours is not None, f"{call}, {way.__name__}: only PyTorch's has one"
                for i, (a, b, truth) in enumerate(zip(ours, stock, truths, strict=True)):
                    if truth is not None and is_right(b, truth, 1e-9) and not is_right(a, truth, 2e-9):
                        wrong.append((call, way.__name__, i, f"2^{exponent}", largest(truth), largest(a)))
    assert not wrong, f"{len(wrong)}: {wrong[:12]}"
