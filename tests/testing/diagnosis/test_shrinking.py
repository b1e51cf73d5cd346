"""A failing sample is made smaller as long as the same check fails, and written as Python code."""

from __future__ import annotations

import pytest
import torch
from helpers.planted import COMPLEX, DOUBLE, function
from helpers.tensors import random
from torch import Tensor

from torch_manualgrad.testing import Sample, check
from torch_manualgrad.testing.diagnosis.shrinking import TRIES
from torch_manualgrad.testing.inputs.source import source

TWICE = function(lambda x: x.sin(), lambda g, x: 2 * g * x.cos())


def smallest(fn, sample, checks=(), **options) -> Sample:
    report = check(fn, [sample], modes=("rev",), checks=checks, raise_on_failure=False, **options)
    (code,) = {r.smallest for r in report.failures}
    return eval(code, {"torch": torch, "Sample": Sample})


def shapes(sample: Sample) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in sample.args if isinstance(x, Tensor)]


def test_sizes_dimensions_and_values() -> None:
    (x,) = smallest(TWICE, (random(2, 3, 4),)).args
    assert x.shape == () and x.dtype == DOUBLE and len(f"{x.item():g}") <= 4


def test_shrinking_keeps_the_rows_that_the_failure_needs() -> None:
    # wrong where there are two rows, and none of the columns is needed
    wrong = function(lambda x: x.sin(), lambda g, x: (2 if x.dim() > 1 and x.shape[0] > 1 else 1) * g * x.cos())
    assert shapes(smallest(wrong, (random(5, 3),))) == [(2, 1)]


def test_sizes_that_belong_together() -> None:
    def product(x: Tensor, y: Tensor) -> Tensor:
        return TWICE(x @ y)

    small = smallest(product, (random(2, 3, 4), random(2, 4, 3, seed=1)))
    assert sorted(shapes(small)) in ([(1,), (1,)], [(1,), (1, 1)])


def test_sizes_given_as_numbers_and_default_arguments() -> None:
    def reshaped(x: Tensor, size: list[int], scale: float = 1.0, *, shift: float = 0.0) -> Tensor:
        return TWICE(x.reshape(size)) * scale + shift

    small = smallest(reshaped, Sample(random(6), [6], 2.0, shift=1.0))
    assert len(small.args) == 2 and not small.kwargs
    assert small.args[1] == [small.args[0].numel()]


def test_values_do_not_meet_on_a_kink() -> None:
    """Rounded to one digit, both would be 0.5, and the maximum of equal values has no derivative."""
    x, y = smallest(
        lambda x, y: TWICE(torch.maximum(x, y)), (torch.tensor(0.51).double(), torch.tensor(0.53).double())
    ).args
    assert x != y


def test_zeros_and_complex_values_and_dtypes() -> None:
    (x,) = smallest(function(lambda x: x + x * x, lambda g, x: 3 * g), (torch.zeros(3, dtype=torch.float32),)).args
    assert x == 0 and x.dtype == torch.float32
    (z,) = smallest(function(lambda z: z * z, lambda g, z: 2 * g * z), (random(3, dtype=COMPLEX),)).args
    assert z.dtype == COMPLEX and z.numel() == 1 and z.imag != 0


def test_a_failure_that_needs_strides_keeps_them() -> None:
    def wrong(x: Tensor) -> Tensor:
        return TWICE(x) if not x.is_contiguous() else x.sin()

    x = smallest(wrong, (random(3, 2).mT,)).args[0]
    assert not x.is_contiguous() and torch.equal(x, random(3, 2).mT)


def test_the_same_failure_and_no_other() -> None:
    """A smaller sample that raises does not stand for one that is wrong."""

    def wrong(x: Tensor) -> Tensor:
        if x.numel() < 4:
            raise ValueError("too few")
        return TWICE(x)

    assert shapes(smallest(wrong, (random(7),))) == [(4,)]


def test_calls_are_bounded_and_can_be_switched_off() -> None:
    calls = []

    def counting(x: Tensor) -> Tensor:
        calls.append(tuple(x.shape))
        return TWICE(x)

    sample = (random(7, 5, 6, 3),)
    check(counting, [sample], modes=("rev",), checks=(), raise_on_failure=False)
    assert len(set(calls)) <= TRIES + 1
    calls.clear()
    report = check(counting, [sample], modes=("rev",), checks=(), shrink=False, raise_on_failure=False)
    assert set(calls) == {(7, 5, 6, 3)} and not any(r.smallest for r in report.results)
    report = check(counting, [(random(3),)], modes=("rev",), checks=(), diagnose=False, raise_on_failure=False)
    assert not any(r.smallest or r.causes or r.element for r in report.results)


def test_a_passing_check_runs_no_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_manualgrad.testing.diagnosis.diagnosis.Probe", None)
    assert check(torch.sin, [(random(3),)], modes=("rev",), checks=())


@pytest.mark.parametrize(
    "sample",
    [
        Sample(random(2, 3), 2, "sum", None, [random(1), (random(),)], dim=(1,), eps=1e-5, p=float("inf")),
        Sample(torch.arange(3), torch.tensor([True, False]), torch.empty(0, 2), random(2).half()),
        Sample(
            torch.tensor([float("nan"), -float("inf"), 1 / 3]),
            random(2, dtype=COMPLEX),
            random(2, dtype=torch.complex64),
        ),
        Sample(random(3).requires_grad_(), random(3)),
        Sample(random(2, 3).mT, random(4, 4)[::2, 1::2]),
    ],
    ids=["options", "integers and empty", "special values", "requires_grad", "strides"],
)
def test_source_gives_the_sample_again(sample: Sample) -> None:
    again = eval(source(sample), {"torch": torch, "Sample": Sample})
    assert repr(again) == repr(sample)
    for x, y in zip(
        torch.utils._pytree.tree_leaves(sample.args), torch.utils._pytree.tree_leaves(again.args), strict=True
    ):
        if not isinstance(x, Tensor):
            assert x == y
            continue
        assert (x.dtype, x.stride(), x.requires_grad) == (y.dtype, y.stride(), y.requires_grad)
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def test_a_large_sample_is_named_by_its_shapes() -> None:
    assert source(Sample(random(100), 2)) == "(f64[100], 2)"


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the time is over, the report has the failures and nothing more."""
    monkeypatch.setattr("torch_manualgrad.testing.diagnosis.diagnosis.SECONDS", 0)
    report = check(TWICE, [(random(3),)], modes=("rev",), checks=(), raise_on_failure=False)
    assert report.failures and not any(r.smallest or r.element for r in report.results)
