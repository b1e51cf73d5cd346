"""pytest plugin: the marker `derivatives`, the fixtures `derivative_check` and `derivative_report`, two options.

A module outside of the package: pytest imports it in every run, and importing the package imports torch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch_manualgrad.testing import Report

_MARKER = """derivatives(fn, samples, **options): check the derivatives of fn with torch_manualgrad.testing.check, \
one test for each sample; select with -m derivatives"""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("derivatives", "derivatives (torch_manualgrad)")
    group.addoption("--derivatives-modes", metavar="MODES", help="check only these modes, such as rev,fwd,rev-rev")
    group.addoption(
        "--derivatives-fast",
        action="store_true",
        help="check reverse, forward and rev-rev mode, and only what is cheap",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


def pytest_pycollect_makeitem(obj: object) -> None:
    # a marked function or class need not name the fixture that checks
    if any(mark.name == "derivatives" and _names_a_function(mark) for mark in _marks(obj)):
        pytest.mark.usefixtures("derivative_report")(obj)


def _marks(obj: object) -> Iterable[pytest.Mark]:
    # whatever a test module has imported: pytest.mark makes a mark of any name, and a proxy may raise any error
    given = inspect.getattr_static(obj, "pytestmark", None)
    return [mark for mark in given if isinstance(mark, pytest.Mark)] if isinstance(given, list) else ()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = _marker(metafunc.definition)
    if marker is not None:
        if "derivative_report" not in metafunc.fixturenames:
            pytest.fail("derivatives(fn, samples) marks a function or a class, not a module", pytrace=False)
        from torch_manualgrad.testing import Sample

        _, given, _ = _parsed(*marker.args, **marker.kwargs)
        listed = given() if callable(given) else given
        samples = [sample if isinstance(sample, Sample) else Sample(*sample) for sample in listed]
        names = [sample.name or repr(sample) for sample in samples]
        metafunc.parametrize("derivative_report", samples, indirect=True, ids=names)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "derivative_check" in getattr(item, "fixturenames", ()) and _marker(item) is None:
            item.add_marker("derivatives")


def _names_a_function(mark: pytest.Mark) -> bool:
    return bool(mark.args or mark.kwargs)


def _marker(item: pytest.Item) -> pytest.Mark | None:
    """The closest marker that names a function."""
    return next(filter(_names_a_function, item.iter_markers("derivatives")), None)


def _parsed(fn: Any, samples: Any, **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The arguments of the marker."""
    return fn, samples, options


def _restricted(config: pytest.Config, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a test without the modes and checks that the command line excludes."""
    from torch_manualgrad.testing import CHECKS, MODES
    from torch_manualgrad.testing.checks.table import FAST_CHECKS, FAST_MODES

    modes: Sequence[str] = options.get("modes", MODES)
    checks: Sequence[str] = options.get("checks", CHECKS)
    if given := config.getoption("--derivatives-modes"):
        wanted = given.split(",")
        for name in wanted:
            if name not in MODES:
                pytest.exit(f"--derivatives-modes: there is no mode {name!r}; known: {','.join(MODES)}", 4)
        modes = [mode for mode in modes if mode in wanted]
    if config.getoption("--derivatives-fast"):
        modes = [mode for mode in modes if mode in FAST_MODES]
        checks = [check for check in checks if check in FAST_CHECKS]
    return {**options, "modes": modes, "checks": checks}


@pytest.fixture
def derivative_check(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """`torch_manualgrad.testing.check`: ``derivative_check(fn, samples)`` fails with a table of what does not hold."""
    from torch_manualgrad.testing import check

    @wraps(check)
    def restricted(fn: Callable[..., Any], samples: Iterable[Any], **options: Any) -> Report:
        return check(fn, samples, **_restricted(request.config, options))

    return restricted


@pytest.fixture
def derivative_report(request: pytest.FixtureRequest, derivative_check: Callable[..., Report]) -> Report:
    """The report of the marker `derivatives` for one of its samples; if something failed, so does the test."""
    marker = _marker(request.node)
    if marker is None:
        pytest.fail("derivative_report is for tests that are marked with derivatives(fn, samples)", pytrace=False)
    fn, _, options = _parsed(*marker.args, **marker.kwargs)
    return derivative_check(fn, [request.param], **{**options, "raise_on_failure": False})


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    marker = _marker(pyfuncitem)
    report: Any = pyfuncitem.funcargs.get("derivative_report")
    if marker is not None and report is not None and marker.kwargs.get("raise_on_failure", True) and report.failures:
        from torch_manualgrad.testing import CheckFailed

        raise CheckFailed(report)


# the older kind of wrapper, which every pytest knows
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """A failed check is shown as its report, without the lines of the checker; JUnit has a property for each failure."""
    made = (yield).get_result()
    testing = sys.modules.get("torch_manualgrad.testing")
    if testing is not None and call.excinfo is not None and isinstance(call.excinfo.value, testing.CheckFailed):
        made.longrepr = call.excinfo.getrepr(style="value")
        item.user_properties += [(result.id, result.outcome) for result in call.excinfo.value.report.failures]
