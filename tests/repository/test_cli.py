"""The command line, in this process: what it prints, and its exit status."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.__main__ import main
from torch_manualgrad.testing import derivatives_yaml

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


def test_list(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(f"| {name} " in printed for name in (*mg.rules, *mg.catalogue, *mg.ops))


def test_coverage(capsys):
    status = main(["coverage"])
    printed = capsys.readouterr().out
    entries = derivatives_yaml.entries()
    assert all(f"| {entry.name} " in printed for entry in entries)
    assert f"{len(entries)} entries" in printed and (status == 1) == any(not entry.kind for entry in entries)
    assert main(["coverage", "--kind", "gap"]) in (0, 1)
    assert "aten::sin " not in capsys.readouterr().out
    assert main(["coverage", "--kind", "nope"]) == 2


def test_show_every_name(capsys):
    for name, rule in mg.rules.items():
        assert main(["show", name]) == 0
        printed = capsys.readouterr().out
        assert str(rule.aten._schema) in printed and rule.source in printed
        assert all(formula.__name__ in printed for formula in rule.formulas)
        assert all(reason in printed for reason in rule.gaps.values())
    for name, formula in mg.ops.items():
        assert main(["show", name]) == 0
        printed = capsys.readouterr().out
        assert str(formula.signature.schema) in printed and f"def {name}(" in printed


def test_show_takes_short_names(capsys):
    assert main(["show", "norm"]) == 0
    assert capsys.readouterr().out.count("rule  ") == 6  # all overloads, and what torch.norm reaches
    assert main(["show", "manualgrad::norm_jvp"]) == 0


def test_show_an_elementwise_rule_and_what_has_none(capsys):
    assert main(["show", "aten::sin"]) == 0
    assert "derivatives/elementwise/trigonometric.py:" in capsys.readouterr().out
    for name in ("aten::transpose.int", "transpose.int"):
        assert main(["show", name]) == 0
        assert "view  aten::transpose.int: returns a view, which PyTorch differentiates" in capsys.readouterr().out


def test_show_an_unknown_name(capsys):
    assert main(["show", "norm_jpv"]) == 2
    error = capsys.readouterr().err
    assert "there is no formula 'norm_jpv'; did you mean 'norm_jvp'" in error


def test_env(capsys):
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert mg.__version__ in printed and torch.__version__ in printed
    assert "cpu kernels" in printed and "cuda kernels" in printed
    assert printed.count("loaded") >= 2  # loaded, or why not


def test_what_is_absent_and_what_claims_ended_are_said(capsys, monkeypatch):
    rule = mg.rules["aten::dist"]
    monkeypatch.setitem(mg.rules.absent, "aten::gone", "torch 2.15 has no aten::gone")
    monkeypatch.setattr(rule, "claims", {**rule.claims, "missing": "2.3"})
    assert main(["list"]) == 0 and "absent: torch 2.15 has no aten::gone" in capsys.readouterr().out
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert "torch 2.15 has no aten::gone" in printed and "aten::dist: missing, since torch 2.3" in printed
    assert main(["show", "dist"]) == 0 and "missing, since torch 2.3" in capsys.readouterr().out
    assert main(["show", "gone"]) == 2 and "torch 2.15 has no aten::gone" in capsys.readouterr().err


def test_functions_are_names_too(capsys):
    for name in ("linalg.svd", "torch.linalg.svd", "svd"):
        assert main(["show", name]) == 0 and "rule       aten::_linalg_svd" in capsys.readouterr().out


def test_check_a_rule(capsys):
    assert main(["check", "aten::dist", "--modes", "rev,fwd", "--checks", "duality"]) == 0
    printed = capsys.readouterr().out
    assert "aten::dist" in printed and ", 0 failed" in printed
    assert main(["check", "renorm", "--modes", "rev", "--checks", "duality", "--dtype", "complex128"]) == 0
    assert "complex128" in capsys.readouterr().out


def test_check_an_op_in_a_file(module, capsys):
    path = module("cli_right", 1)
    assert main(["check", f"{path}:op", "--checks", "vmap"]) == 0
    assert ", 0 failed" in capsys.readouterr().out


def test_check_finds_a_wrong_derivative(module, capsys):
    path = module("cli_wrong", 2)
    assert main(["check", f"{path}:op", "--modes", "rev", "--checks", "vmap"]) == 1
    assert "wrong" in capsys.readouterr().out


def test_composition(module, capsys):
    path = module("cli_composition", 1)
    command = ["composition", f"{path}:op", "--reference", f"{path}:plain", "--no-compile"]
    assert main(command) == 0
    assert "| rev-fwd-rev " in capsys.readouterr().out


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
        (["check", "math:sin", "--samples", "sys:path"], "sys:path has a str among its samples"),
        (["check", "dist", "--modes", "sideways"], "there is no mode 'sideways'; expected some of rev,fwd"),
        (["check", "dist", "--checks", "all"], "there is no check 'all'"),
        (["check", "dist", "--dtype", "float65"], "there is no dtype 'float65'"),
        (["check", "dist", "--device", "toaster"], "device 'toaster' cannot be used"),
        (["check", "norm.ScalarOpt_dtype", "--dtype", "complex128"], "has no samples of dtype complex128"),
        (["composition", "math:sin", "--reference", "math"], "'math' names nothing"),
    ],
)
def test_what_does_not_exist_is_named(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["show"]])
def test_misuse_prints_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: python -m torch_manualgrad" in capsys.readouterr().err


def test_as_a_program():
    run = subprocess.run([sys.executable, "-m", "torch_manualgrad", "show", "nothing"], capture_output=True, text=True)
    assert run.returncode == 2 and "there is no rule" in run.stderr and not run.stdout
