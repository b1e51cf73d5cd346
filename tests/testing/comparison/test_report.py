"""A report as text, as JSON and as JUnit, and the element that a failure names."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from xml.etree import ElementTree

import pytest
import torch
from helpers.planted import COMPLEX, DOUBLE, function
from helpers.tensors import random

from torch_manualgrad.testing import Report, Result, Sample, check
from torch_manualgrad.testing.comparison.report import Cause, Element

SIN = (lambda x: x.sin(), lambda g, x: g * x.cos(), lambda t, x: t * x.cos())


def failing(fn, sample, modes=("rev",), checks=(), **options) -> Report:
    return check(fn, [sample], modes=modes, checks=checks, shrink=False, raise_on_failure=False, **options)


@pytest.fixture(scope="module")
def report() -> Report:
    fn = function(SIN[0], lambda g, x: 2 * g * x.cos())
    return check(
        fn,
        [(random(2),), Sample(random(2, seed=1)).named("second"), (random(2, seed=2),)],
        modes=("rev", "fwd"),
        checks=("vmap", "opcheck"),
        name="twice",
        gaps={"vmap": "not written"},
        raise_on_failure=False,
    )


def test_text_says_what_where_why_and_when(report: Report) -> None:
    text = str(report)
    assert text.startswith("| function | sample ") and not report.ok and not report
    assert "twice (f64[2]) float64: rev [eager], rev [func] wrong: found " in text
    assert "    d output[1] / d args[0][1]: found " in text
    assert "likely cause (rev): the gradient of args[0] is the right one times 2: a factor in the vjp" in text
    assert "smallest failing sample (rev, fwd): Sample(torch.tensor(" in text
    # what is the same in many ways is said once, and for samples that look the same too
    assert text.count("You must implement the jvp function") == 2
    assert "twice second (f64[2]) float64: fwd [eager], fwd [func] raises: NotImplementedError" in text


def test_ids_are_stable_and_different(report: Report) -> None:
    ids = report.ids()
    assert ids[:3] == ["twice[(f64[2])]::rev[eager]", "twice[(f64[2])]::rev[func]", "twice[(f64[2])]::fwd[eager]"]
    assert "twice[second (f64[2])]::rev[eager]" in ids and "twice[(f64[2])]::opcheck" in ids
    assert "twice[(f64[2])]::rev[eager]#2" in ids and len(set(ids)) == len(ids)


def test_json_loads_back(report: Report) -> None:
    data = json.loads(report.to_json())
    assert data == report.as_dict() and set(data) == {"ok", "results"} and data["ok"] is False
    assert set(data["results"][0]) == {"id", *(f.name for f in fields(Result))}
    assert data["results"][0]["element"]["at"] == "args[0][1]" and data["results"][0]["causes"][0]["key"] == "factor"
    again = Report.from_json(report.to_json(indent=None))
    # a nan is not equal to itself
    assert again.to_json() == report.to_json() and str(again) == str(report) and again.failures[0] == report.failures[0]


def test_json_has_no_nan_and_no_infinity() -> None:
    given = Report([Result("f", "()", "", "rev", "eager", "wrong", math.inf, -math.inf, math.nan)])
    (data,) = given.as_dict()["results"]
    assert (data["ours"], data["reference"], data["absolute"]) == ("inf", "-inf", None)
    (again,) = Report.from_json(given.to_json()).results
    assert again.ours == math.inf and again.reference == -math.inf and math.isnan(again.absolute)
    found = Result(
        "f", "()", "", "rev", "eager", "wrong", element=Element("a", "", math.nan, 1.0), causes=(Cause("k", "t"),)
    )
    (again,) = Report.from_json(Report([found]).to_json()).results
    assert again.causes == found.causes and again.element is not None and math.isnan(again.element.ours)


def test_junit(report: Report, tmp_path) -> None:
    report.to_junit(tmp_path / "found.xml")
    (suite,) = ElementTree.parse(tmp_path / "found.xml").getroot()
    cases = {case.get("name"): case for case in suite}
    assert list(cases) == report.ids() and suite.get("tests") == str(len(cases))
    kinds = {name: [child.tag for child in case] for name, case in cases.items()}
    assert kinds["twice[(f64[2])]::rev[eager]"] == ["failure"] and kinds["twice[(f64[2])]::fwd[func]"] == ["error"]
    assert kinds["twice[(f64[2])]::opcheck"] == ["skipped"]
    assert suite.get("failures") == str(sum(k == ["failure"] for k in kinds.values()))
    assert suite.get("errors") == "6" and suite.get("skipped") == str(sum(k == ["skipped"] for k in kinds.values()))
    assert "d output[1] / d args[0][1]" in cases["twice[(f64[2])]::rev[eager]"][0].text


def test_junit_of_what_xml_cannot_hold(tmp_path) -> None:
    Report([Result("f", "('\x00',)", "", "rev", "eager", "raises", detail="\x1b[31mred")]).to_junit(tmp_path / "x.xml")
    assert ElementTree.parse(tmp_path / "x.xml").getroot()[0][0].get("classname") == "f"


def test_a_right_function_has_an_empty_list_of_findings() -> None:
    report = check(torch.sin, [(random(2),)], modes=("rev",), checks=())
    assert report.ok and not report.findings() and not report.causes and Report.from_json(report.to_json()).ok


# the element ---------------------------------------------------------------------------------------------------------


def elements(report: Report) -> dict[str, Element]:
    return {f"{r.check} [{r.engine}]": r.element for r in report.failures}


def test_the_element_of_one_input_and_output() -> None:
    fault = torch.zeros(2, 3, dtype=DOUBLE)
    fault[1, 2] = 0.5
    fn = function(lambda x: 2 * x, lambda g, x: 2 * g + fault * g)
    (element,) = set(elements(failing(lambda y, x: (y, fn(x)), (random(2), random(2, 3)))).values())
    assert (element.at, element.of) == ("args[1][1, 2]", "output 1[1, 2]")
    assert (element.ours, element.reference) == (pytest.approx(2.5), pytest.approx(2))
    assert str(element) == "d output 1[1, 2] / d args[1][1, 2]: found 2.5, reference 2"


def test_the_element_of_a_scalar_and_of_large_and_small_values() -> None:
    fn = function(lambda x: x * x, lambda g, x: 3 * g * x)
    for size in (1.0, 1e30, 1e-30):
        element = elements(failing(fn, (torch.tensor(size, dtype=DOUBLE),)))["rev [eager]"]
        assert (element.at, element.of) == ("args[0]", "output")
        assert (element.ours / size, element.reference / size) == (pytest.approx(3), pytest.approx(2))


def test_the_element_of_complex_numbers() -> None:
    fn = function(lambda z: 1j * z, lambda g, z: 1j * g)
    element = elements(failing(fn, (random(2, dtype=COMPLEX),)))["rev [eager]"]
    assert str(element) == "d Im output[1] / d Re args[0][1]: found -1, reference 1"


def test_the_element_of_a_second_derivative() -> None:
    fn = function(lambda x: x**3, lambda g, x: g * 3 * x.detach() ** 2)
    x = torch.tensor([0.5, 2.0], dtype=DOUBLE)
    element = elements(failing(fn, (x,), modes=("rev", "rev-rev")))["rev-rev [eager]"]
    assert str(element) == "d (d output[1] / d args[0][1]) / d args[0][1]: found 0, reference 12"


def test_an_element_that_shows_only_through_the_loss() -> None:
    """The gradient of 2 x does not depend on x, so that no output alone shows that its own derivative is lost."""
    fn = function(lambda x: 2 * x, lambda g, x: 2 * g.detach())
    element = elements(failing(fn, (random(2),), modes=("rev", "rev-rev")))["rev-rev [eager]"]
    assert "the loss" in element.of and element.ours != element.reference


def test_the_element_of_compared_tensors() -> None:
    def fn(x):
        return torch.as_strided(x, x.shape, torch.empty(x.shape).stride()) * 1

    x = torch.tensor([[1.0, 2.0], [10.0, 4.0]], dtype=DOUBLE)
    found = elements(failing(fn, (x,), modes=(), checks=("noncontiguous",)))
    assert str(found["noncontiguous [transposed]"]) == "output 0[0, 1]: found 10, reference 2"


def test_one_input_alone_and_one_output_alone() -> None:
    class Pair(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x, y):
            return x * y, x + y

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g, h):
            x, y = ctx.saved_tensors
            return g * y + h, (g * x + h) if ctx.needs_input_grad[0] else g

    found = elements(failing(Pair.apply, (random(2), random(2, seed=1)), checks=("undefined cotangents",)))
    assert list(found) == ["rev [eager, args[1] alone]"]
    assert found["rev [eager, args[1] alone]"].at.startswith("args[1]")


def test_too_many_elements_are_not_looked_at() -> None:
    fn = function(SIN[0], lambda g, x: 2 * g * x.cos())
    assert elements(failing(fn, (random(65),)))["rev [eager]"] is None
