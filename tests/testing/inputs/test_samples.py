"""How calls are given to the functions of mg.testing: a Sample or a tuple of arguments, and clear errors for anything else."""

from __future__ import annotations

import pytest
import torch

from torch_manualgrad.testing import Sample, check, composition, trace_nan

X = torch.ones(2, dtype=torch.float64)
ZERO = torch.zeros(2, dtype=torch.float64)


@pytest.mark.parametrize(
    "samples, message",
    [
        ([X], r"check: samples\[0\]: expected a Sample or a tuple of arguments, got a Tensor of shape \[2\].*the tuple \(x,\)"),
        ([(X,), X], r"check: samples\[1\]: expected a Sample or a tuple"),
        ((X, X), r"check: samples\[0\]: expected a Sample or a tuple"),
        (X, r"check: samples: expected an iterable of calls, got a Tensor of shape \[2\].*; one call f\(x\) is \[\(x,\)\]"),
        (["x"], r"check: samples\[0\]: expected a Sample or a tuple of arguments, got 'x'$"),
    ],
    ids=["tensor", "second", "one call", "a tensor alone", "text"],
)  # fmt: skip
def test_samples_must_be_a_list_of_calls(samples, message):
    with pytest.raises(TypeError, match=message):
        check(torch.sin, samples, modes=("rev",), checks=())


def test_a_mode_alone_is_an_error():
    for call in (check, trace_nan):
        with pytest.raises(TypeError, match=f"{call.__name__}: modes: expected a list or tuple, .* got 'rev'"):
            call(torch.sin, [(X,)], modes="rev")
    with pytest.raises(TypeError, match="checks: expected a list or tuple, .* got 'duality'"):
        check(torch.sin, [(X,)], checks="duality")
    with pytest.raises(TypeError, match="composition: sample: expected a Sample or a tuple"):
        composition(torch.sin, torch.sin, X)


def root(x, y, *, power=0.5):
    return (x * y).pow(power).sum()


@pytest.mark.parametrize("given", [(ZERO, X), ((ZERO, X),), (Sample(ZERO, X),)], ids=["one by one", "tuple", "Sample"])
def test_trace_nan_takes_a_call_as_check_does(given):
    (origin,) = {str(trace_nan(root, *given, modes=["rev-rev"]).first)}
    assert origin == str(trace_nan(root, ZERO, X, modes=["rev-rev"]).first) and "aten::" in origin


def test_trace_nan_takes_keywords_and_lists():
    assert trace_nan(root, Sample(ZERO, X, power=2.0), modes=["rev"]).ok
    assert not trace_nan(root, Sample(ZERO, X, power=0.5), modes=["rev"]).ok
    assert trace_nan(lambda xs: torch.stack(xs).sin(), [X, X]).ok
    assert trace_nan(lambda pair: pair[0] * pair[1], ((X, X),)).ok
    with pytest.raises(TypeError, match="trace_nan: inputs: expected one call, .* got a list of 2"):
        trace_nan(torch.sin, [(X,), (X,)])
