"""The command line, in this process: what it prints, and its exit status."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

import torch_manualgrad as mg
from torch_manualgrad.command_line import checking
from torch_manualgrad.testing.database import derivatives_yaml
from torch_manualgrad_cli import cli

RIGHT = """
import torch
import torch_manualgrad as mg

@mg.custom_op("clitest::{name}(Tensor x) -> Tensor")
def op(x):
    return x.sin()

@op.impl_save_for_backward
def save(inputs, output):
    return inputs.x

@op.impl_backward
def backward(ctx, x, grad):
    return {{"x": grad * x.cos() * {factor}}}

def plain(x):
    return x.sin()

def samples():
    return [mg.Sample(torch.linspace(0.1, 1, 3, dtype=torch.float64))]

number = 3
"""


@pytest.fixture
def module(tmp_path, request):
    def write(name, factor):
        path = tmp_path / f"{name}.py"
        path.write_text(RIGHT.format(name=name, factor=factor))
        request.addfinalizer(lambda: sys.modules.pop(name, None))
        return path

    before = list(sys.path)
    yield write
    sys.path[:] = before


def run(*arguments):
    """(exit status, standard output, standard error)"""
    found = CliRunner().invoke(cli, arguments)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.exit_code, found.stdout, found.stderr


def printed(*arguments, status=0):
    """Standard output; where the status is 2, standard error."""
    got, output, error = run(*arguments)
    assert got == status, (output, error)
    return error if status == 2 else output


def names(table):
    return [line.split("|")[1].strip() for line in table.splitlines()[2:]]


def test_help_prints_whole_descriptions():
    text = " ".join(printed("--help").split())
    for name, command in cli.commands.items():
        assert f"{name} {' '.join(command.help.splitlines()[0].split())}" in text


def test_list():
    text = printed("list", "--all")
    assert all(f"| {name} " in text for name in (*mg.rules, *mg.catalogue, *mg.ops))
    folded = printed("list")
    assert all(f"| {name} " in folded for name in (*mg.rules, *mg.ops))
    views = sum(entry.kind == "view" for entry in mg.catalogue.values())
    assert "| view " in folded and f"| {views} " in folded and "| aten::transpose.int " not in folded


def test_list_filters_and_sorts():
    rules, without, formulas = map(names, printed("list", "norm").split("\n\n"))
    assert set(rules) == {n for n in mg.rules if "norm" in n} | {rule.name for rule in mg.rules.find("norm")}
    assert without == sorted(n for n in mg.catalogue if "norm" in n)
    assert rules == sorted(rules) and formulas == sorted(formulas) and {"norm_jvp", "svd_backward"} <= {*formulas}
    assert names(printed("list", "linalg.lu").split("\n\n")[0]) == ["aten::linalg_lu"]
    assert "there is no rule 'aten::nrm'; did you mean" in printed("list", "nrm", status=2)
    assert list(json.loads(printed("list", "linalg.lu", "--json"))) == ["rules", "formulas"]


def test_coverage():
    entries = derivatives_yaml.entries()
    text = printed("coverage", status=1 if any(not entry.kind for entry in entries) else 0)
    assert all(f"| {entry.name} " in text for entry in entries) and f"{len(entries)} entries" in text
    status, text, _ = run("coverage", "--kind", "gap")
    assert status in (0, 1) and "aten::sin " not in text
    assert "there is no kind 'nope'" in printed("coverage", "--kind", "nope", status=2)


def test_show_every_name():
    for name, rule in mg.rules.items():
        text = printed("show", name)
        assert str(rule.aten._schema) in text and rule.source in text
        assert all(formula.__name__ in text for formula in rule.formulas)
        assert all(reason in text for reason in rule.gaps.values())
    for name, formula in mg.ops.items():
        text = printed("show", name)
        assert str(formula.signature.schema) in text and f"def {name.rpartition('::')[2]}(" in text


def test_show_names_the_rules_that_reach_a_formula_through_others():
    assert "aten::linalg_vector_norm, aten::norm.Scalar" in printed("show", "norm_backward")


def test_show_takes_short_names():
    assert printed("show", "norm").count("rule       ") == 6  # all overloads, and what torch.norm reaches
    assert printed("show", "manualgrad::norm_jvp")


def test_show_an_elementwise_rule_and_what_has_none():
    assert "derivatives/elementwise/trigonometric.py:" in printed("show", "aten::sin")
    for name in ("aten::transpose.int", "transpose.int"):
        assert "view  aten::transpose.int: returns a view, which PyTorch differentiates" in printed("show", name)


def test_show_an_unknown_name():
    assert "there is no formula 'norm_jpv'; did you mean 'norm_jvp'" in printed("show", "norm_jpv", status=2)


def test_env():
    text = printed("env")
    assert mg.__version__ in text and torch.__version__ in text
    assert "cpu kernels" in text and "cuda kernels" in text
    assert text.count("loaded") >= 2  # loaded, or why not


def test_absent_operators_and_ended_claims_are_printed(monkeypatch):
    rule = mg.rules["aten::dist"]
    monkeypatch.setitem(mg.rules.absent, "aten::gone", "torch 2.15 has no aten::gone")
    monkeypatch.setitem(vars(rule), "claims", {**rule.claims, "missing": "2.3"})
    assert "absent  torch 2.15 has no aten::gone" in printed("list")
    text = printed("env")
    assert "torch 2.15 has no aten::gone" in text and "aten::dist: missing, since torch 2.3" in text
    assert "missing, since torch 2.3" in printed("show", "dist")
    assert "missing, since torch 2.3" in printed("explain", "dist")
    assert "torch 2.15 has no aten::gone" in printed("show", "gone", status=2)


def test_functions_are_names_too():
    for name in ("linalg.svd", "torch.linalg.svd", "svd"):
        assert "rule       aten::_linalg_svd" in printed("show", name)


def test_explain_says_who_serves_a_call_and_what_is_kept(module):
    text = printed("explain", "linalg.lu")
    assert "linalg_lu_jvp" in text and "values: PyTorch's derivative is wrong" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| (f64[3, 3]) ")]
    assert line.endswith("| 216                    | 216                     |")  # A has none; P, L and U are 3 x 3
    assert "PyTorch keeps the call" in printed("explain", "layer_norm")
    assert "leaves it to PyTorch" in printed("explain", "aten::sin")
    assert "by PyTorch: view" in printed("explain", "transpose.int")
    path = module("cli_explained", 1)
    assert "(f64[3])" in printed("explain", "aten::sin", "--samples", f"{path}:samples")
    assert "there is no rule" in printed("explain", "nothing_at_all", status=2)


def test_explain_folds_equal_lines_and_takes_a_dtype(module):
    path = module("cli_folded", 1)
    path.write_text(path.read_text() + "\n\ndef many():\n    return samples() * 5\n")
    text = printed("explain", "aten::sin", "--samples", f"{path}:many")
    assert text.count("(f64[3])") == text.count("(f64[3]) and 4 more") == 1
    text = printed("explain", "aten::sin", "--dtype", "float32")
    assert "(f32[3, 4])" in text and "f64" not in text
    assert "there is no dtype 'float65'" in printed("explain", "dist", "--dtype", "float65", status=2)


def test_show_prints_the_compiled_vjp():
    text = printed("show", "linalg.lu")
    assert "compiled   of A: linalg_lu_backward, in C++ on cpu" in text
    assert "compiled " not in printed("show", "aten::sin")


def test_explain_prints_no_lines_of_the_profiler(capfd):
    assert printed("explain", "dist")
    assert capfd.readouterr() == ("", "")


def test_explain_says_which_kernels_run():
    found = json.loads(printed("explain", "linalg.lu", "--json"))
    assert found["aten::linalg_lu"]["formula"][0].startswith("linalg_lu_backward (")
    with_kernels = mg.core.libraries.status()[0].loaded
    for sample in found["aten::linalg_lu: samples"]:
        assert sample["kernels"] == ("manualgrad::linalg_lu_backward" if with_kernels else "none")
        assert sample["forward"] in ("C++", "Python")


def test_check_a_rule():
    text = printed("check", "aten::dist", "--modes", "rev,fwd", "--checks", "duality")
    assert "aten::dist" in text and ", 0 failed" in text
    assert "complex128" in printed("check", "renorm", "--modes", "rev", "--checks", "duality", "--dtype", "complex128")


def test_check_an_op_in_a_file(module):
    path = module("cli_right", 1)
    assert ", 0 failed" in printed("check", f"{path}:op", "--checks", "vmap")


def test_check_finds_a_wrong_derivative(module):
    path = module("cli_wrong", 2)
    command = ["check", f"{path}:op", "--modes", "rev", "--checks", "vmap"]
    assert "wrong" in printed(*command, status=1)
    results = json.loads(printed(*command, "--json", status=1))["results"]
    assert {r["outcome"] for r in results if r["check"] == "rev"} == {"wrong"}


def test_check_writes_junit_and_is_fast(module, tmp_path):
    path = module("cli_junit", 2)
    command = ["check", f"{path}:op", "--fast", "--junit", str(tmp_path / "found.xml"), "--json"]
    results = json.loads(printed(*command, status=1))["results"]
    assert {"rev", "rev-rev", "vmap"} <= {r["check"] for r in results}
    assert not {"fwd-rev", "opcheck", "compile"} & {r["check"] for r in results}
    assert any(cause["key"] == "factor" for r in results for cause in r["causes"])
    (suite,) = ElementTree.parse(tmp_path / "found.xml").getroot()
    assert [case.get("name") for case in suite] == [r["id"] for r in results]
    assert {case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None} == {
        r["id"] for r in results if r["outcome"] == "wrong"
    }


def test_check_on_a_terminal(module):
    path = module("cli_terminal", 2)
    answer = checking.check(f"{path}:op", None, dtype="", device="", modes="rev", checks="vmap")
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    console.print(answer.parts[0].shown())
    shown = console.file.getvalue()
    assert "\x1b[31mwrong\x1b[0m: rev" in shown and "\x1b[32mok\x1b[0m: vmap" in shown and "(f64[3])" in shown


def test_composition(module):
    path = module("cli_composition", 1)
    assert "| rev-fwd-rev " in printed("composition", f"{path}:op", "--reference", f"{path}:plain", "--no-compile")


@pytest.mark.slow
def test_conformance():
    # its workers are forked, which PyTorch refuses to differentiate in once its threads for other devices have started
    arguments = ["conformance", "trace", "--limit", "1", "--workers", "1"]
    run = subprocess.run([sys.executable, "-m", "torch_manualgrad", *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "| trace " in run.stdout and "| all " in run.stdout
    assert "the operator database has no differentiable 'trance'" in printed("conformance", "trance", status=2)


@pytest.mark.parametrize("command", ["list", "coverage", "env"])
def test_json(command):
    document = json.loads(run(command, "--json")[1])
    assert document and all(document.values()) or command == "list"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["check", "aten::dits"], "there is no rule 'aten::dits'; did you mean 'aten::dist'"),
        (["check", "no_such_module:op"], "there is no module 'no_such_module'"),
        (["check", "no_such_file.py:op"], "there is no file no_such_file.py"),
        (["check", "math:no_such_name"], "math has no 'no_such_name'"),
        (["check", "math:pi"], "math:pi is a float, not an operator, a function or a rule"),
        (["check", "math:sin"], "math has no `samples`"),
        (["check", "math:sin", "--samples", "math:pi"], "math:pi is a float; expected an iterable of samples"),
        (
            ["check", "math:sin", "--samples", "sys:path"],
            "sys:path[0]: expected a Sample or a tuple of arguments, got '",
        ),
        (["check", "dist", "--modes", "sideways"], "there is no mode 'sideways'; expected some of rev,fwd"),
        (["check", "dist", "--checks", "all"], "there is no check 'all'"),
        (["check", "dist", "--dtype", "float65"], "there is no dtype 'float65'"),
        (["check", "dist", "--device", "toaster"], "device 'toaster' cannot be used"),
        (["check", "norm.ScalarOpt_dtype", "--dtype", "complex128"], "has no samples of dtype complex128"),
        (["composition", "math:sin", "--reference", "math"], "'math' names nothing"),
    ],
)
def test_unknown_names_and_files_are_named_in_errors(arguments, message):
    assert message in printed(*arguments, status=2)


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["show"]])
def test_misuse_prints_the_usage(arguments):
    status, output, error = run(*arguments)
    assert status == 2 and "Usage: " in output + error


def test_as_a_program():
    run = subprocess.run([sys.executable, "-m", "torch_manualgrad", "show", "nothing"], capture_output=True, text=True)
    assert run.returncode == 2 and "there is no rule" in run.stderr and not run.stdout


def test_help_does_without_torch():
    code = "import sys, torch_manualgrad_cli as m\nsys.argv[1:] = ['--help']\ntry: m.main()\nfinally: assert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0 and "explain" in run.stdout, run.stderr
