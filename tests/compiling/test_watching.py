"""Reports of what is compiled, and `manualgrad audit --compiled`."""

import warnings

import pytest
import torch
from click.testing import CliRunner

import torch_manualgrad as mg
from torch_manualgrad.compiling.watching import watch
from torch_manualgrad.core.rule import reached
from torch_manualgrad_cli import cli

SCRIPT = """
import torch, warnings
warnings.simplefilter("ignore")

def energy(x):
    return (x.sin() * x.exp()).sum()

f = torch.compile(energy, backend="manualgrad", options={"lowering": "eager"})
x = torch.ones(5, requires_grad=True)
(g,) = torch.autograd.grad(f(x), x, create_graph=True)
g.pow(2).sum().backward()
"""


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


def audit(path):
    with warnings.catch_warnings():
        return CliRunner().invoke(cli, ["audit", "--compiled", str(path)])


def test_audit_lists_the_graphs_of_a_script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    found = audit(path)
    assert found.exit_code == 0, found.output
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows] == [
        ["train.py:6", "values"],
        ["train.py:6", "backward"],
        ["train.py:6", "backward of backward"],
    ]
    assert rows[0][3] == "20"  # x, float32


def test_audit_says_what_is_not_compiled(tmp_path):
    path = tmp_path / "broken.py"
    broken = "    torch._dynamo.graph_break()\n    return torch.bernoulli(x.sigmoid()).sum() * x.sum()"
    path.write_text(SCRIPT.replace("    return (x.sin() * x.exp()).sum()", broken).partition("(g,)")[0] + "f(x)")
    found = audit(path)
    assert found.exit_code == 1
    assert "broken.py:7: a graph runs uncompiled (Unsupported: aten.bernoulli" in found.stdout
    assert "graph breaks: 1" in found.stdout


def test_nothing_compiled_and_functions_with_derivatives_of_their_own():
    class Double(torch.autograd.Function):
        forward = staticmethod(lambda x: 2 * x)
        setup_context = staticmethod(lambda ctx, inputs, output: None)
        backward = staticmethod(lambda ctx, g: 2 * g)
        jvp = staticmethod(lambda ctx, t: 2 * t)

    with watch() as report:
        torch.ones(2).sin()
    assert str(report) == 'nothing was compiled by the backend "manualgrad"'
    with watch() as report, pytest.warns(RuntimeWarning, match="Double.apply"):
        mg.compile(lambda x: Double.apply(x).sin(), lowering="eager")(torch.ones(2))
    assert report.refused[0] == "Double.apply has derivatives of its own, and runs uncompiled" and not report.breaks


@pytest.mark.skipif(reached("2.15"), reason="Dynamo of this torch takes no dual tensors")
def test_names_of_derivatives():
    f = mg.compile(lambda x: x.sin() * x, lowering="eager", dynamic=False)
    x = torch.ones(2, requires_grad=True)
    with watch() as report, torch.autograd.forward_ad.dual_level():
        y = f(torch.autograd.forward_ad.make_dual(x, torch.ones(2)))
        torch.autograd.grad(y.sum(), x)
        torch.func.vmap(f)(torch.ones(3, 2))
    assert {g.derivative for g in report.graphs} >= {"values", "tangent of values", "batch of values"}
