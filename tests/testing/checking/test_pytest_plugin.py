"""The pytest plugin, in projects that import torch_manualgrad nowhere else."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch

from torch_manualgrad.testing import check

pytest_plugins = "pytester"

WRONG = """
import pytest, torch

class Wrong(torch.autograd.Function):
    generate_vmap_rule = True
    @staticmethod
    def forward(x):
        return x.sin()
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
    @staticmethod
    def backward(ctx, g):
        return -g * ctx.saved_tensors[0].cos()
    @staticmethod
    def jvp(ctx, t):
        return t * ctx.saved_tensors[0].cos()

small, large = (torch.rand(2).double() + 1,), (torch.rand(2, 3).double() + 1,)
"""


@pytest.fixture(scope="module", autouse=True)
def what_torch_imports_late_is_here() -> None:
    """A pytest in this process forgets the modules that its tests import, and torch bears no second import."""
    check(torch.sin, [(torch.ones(2).double(),)])


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(body: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(WRONG + body)
        return pytester.runpytest_inprocess(
            "-p", "torch_manualgrad_pytest", "-p", "no:cacheprovider", "--strict-markers", *options
        )

    return run


def test_a_marked_test_is_one_for_each_sample(project) -> None:
    found = project(
        """
@pytest.mark.derivatives(torch.sin, [small, large], modes=("rev",), checks=())
def test_function():
    pass

@pytest.mark.derivatives(torch.sin, lambda: [small], modes=("rev",), checks=())
class TestClass:
    def test_empty(self):
        pass
    def test_report(self, derivative_report):
        assert {r.check for r in derivative_report.results} == {"rev"}

def test_other():
    pass
""",
        "-v",
        "-m",
        "derivatives",
    )
    found.assert_outcomes(passed=4, deselected=1)
    lines = [
        "*::test_function[[](f64[[]2[]])[]]*",
        "*::test_function[[](f64[[]2, 3[]])[]]*",
        "*::TestClass::test_empty[[](f64*",
    ]
    found.stdout.fnmatch_lines(lines)


def test_a_failure_is_its_report_and_no_traceback(project) -> None:
    found = project(
        """
@pytest.mark.derivatives(Wrong.apply, samples=[small], modes=("rev",), checks=())
def test_marked():
    raise RuntimeError("the body does not run where the check failed")

def test_fixture(derivative_check):
    derivative_check(Wrong.apply, [small], modes=("rev",), checks=())

@pytest.mark.xfail
@pytest.mark.derivatives(Wrong.apply, [small], modes=("rev",), checks=())
def test_expected():
    pass
""",
        "--junitxml=found.xml",
    )
    found.assert_outcomes(failed=2, xfailed=1)
    text = found.stdout.str().split("short test summary")[0]  # which has whole messages where CI is set
    assert text.count("likely cause (rev): the gradient of args[0] is the right one times -1: a sign in the vjp") == 2
    assert "| Wrong    | (f64[2]) | float64 | wrong |" in text and "2 of 2 comparisons failed" in text
    assert "check.py" not in text and "derivative_check(Wrong" not in text
    cases = {c.get("name"): c for c in ElementTree.parse("found.xml").getroot().iter("testcase")}
    failed = cases["test_marked[(f64[2])]"]
    assert {p.get("name"): p.get("value") for p in failed.iter("property")} == {
        "Wrong[(f64[2])]::rev[eager]": "wrong",
        "Wrong[(f64[2])]::rev[func]": "wrong",
    }
    assert "likely cause" in failed.find("failure").text


def test_a_marker_without_samples_is_an_error(project) -> None:
    found = project("@pytest.mark.derivatives(fn=torch.sin)\ndef test_it():\n    pass\n")
    found.assert_outcomes(errors=1)
    assert "missing 1 required positional argument: 'samples'" in found.stdout.str()


def test_a_marked_module_is_an_error(project) -> None:
    """Its tests would pass without a check."""
    found = project("pytestmark = pytest.mark.derivatives(torch.sin, [small])\ndef test_it():\n    pass\n")
    found.assert_outcomes(errors=1)
    found.stdout.fnmatch_lines(["*derivatives(fn, samples) marks a function or a class*"])


def test_the_body_judges(project) -> None:
    project(
        """
@pytest.mark.derivatives(Wrong.apply, [small], modes=("rev", "fwd"), checks=(), raise_on_failure=False)
def test_it(derivative_report):
    assert derivative_report.outcome("rev") == "wrong" and derivative_report.outcome("fwd") == "ok"
"""
    ).assert_outcomes(passed=1)


RUNS = """
def test_all(derivative_check):
    print("run:", *{r.check for r in derivative_check(torch.sin, [small]).results})

def test_some(derivative_check):
    print("run:", *{r.check for r in derivative_check(torch.sin, [small], modes=("fwd", "fwd-fwd"), checks=()).results})

@pytest.mark.derivatives(torch.sin, [small])
def test_marked(derivative_report):
    print("run:", *{r.check for r in derivative_report.results})
"""


def what_ran(result: pytest.RunResult) -> list[set[str]]:
    return [set(line.partition("run:")[2].split()) for line in result.outlines if "run:" in line]


def test_options_restrict_what_a_test_asks_for(project) -> None:
    every, some, marked = what_ran(project(RUNS, "-s"))
    assert {"rev", "fwd", "rev-fwd", "vmap", "opcheck"} <= every == marked and some == {"fwd", "fwd-fwd"}
    every, some, marked = what_ran(project(RUNS, "-s", "--derivatives-modes=rev,fwd"))
    assert {"rev", "fwd", "opcheck"} <= every == marked and some == {"fwd"}
    assert not {name for name in every if "-" in name and name != "vmap-grad"}
    every, some, marked = what_ran(project(RUNS, "-s", "--derivatives-fast"))
    assert {"rev", "fwd", "rev-rev", "duality"} <= every == marked and some == {"fwd"}
    assert not {"opcheck", "compile", "fwd-fwd", "rev-fwd", "fwd-rev"} & every
    every, _, _ = what_ran(project(RUNS, "-s", "--derivatives-fast", "--derivatives-modes=rev"))
    assert "rev" in every and "rev-rev" not in every


def test_an_unknown_mode_is_named(project) -> None:
    found = project(RUNS, "--derivatives-modes=rev,sideways")
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    assert "there is no mode 'sideways'; known: rev,fwd,rev-rev" in found.stdout.str() + found.stderr.str()


def test_the_report_belongs_to_a_marked_test(project) -> None:
    found = project("def test_it(derivative_report):\n    pass\n")
    found.assert_outcomes(errors=1)
    found.stdout.fnmatch_lines(["*derivative_report is for tests that are marked with derivatives(fn, samples)*"])


def test_marks_of_other_kinds_stay_as_they_are(project) -> None:
    project(
        """
pytestmark = pytest.mark.derivatives

@pytest.mark.derivatives
def test_only_named():
    pass

@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.derivatives(torch.exp, [small, large], modes=("rev",), checks=())
def test_with_parameters(p, derivative_report):
    assert derivative_report.ok and p in (2, 3)
""",
    ).assert_outcomes(passed=5)


def test_nothing_is_imported_until_it_is_used(tmp_path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\ndef test_it():\n    assert not {'torch', 'torch_manualgrad', 'numpy', 'rich'} & set(sys.modules)\n"
    )
    code = "import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'torch_manualgrad_pytest', '--derivatives-fast', 'test_it.py']))"
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": ":".join(sys.path), "PATH": ""}
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "1 passed" in found.stdout, found.stdout + found.stderr


def test_whatever_a_module_imports_is_left_alone(project) -> None:
    found = project(
        """
from pytest import mark

class Proxy:  # such as flask.request
    def __getattr__(self, name):
        raise RuntimeError(name)

request = Proxy()

@mark.parametrize("a", [1])
def test(a):
    pass

class TestMethods:
    @mark.parametrize("a", [1, 2])
    def test(self, a):
        pass
""",
        "-W",
        "error",
    )
    found.assert_outcomes(passed=3)
