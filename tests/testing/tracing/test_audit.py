"""`audit` lists what a program differentiates, in which ways, and what of it is doubtful."""

from __future__ import annotations

import json

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from click.testing import CliRunner
from torch import nn

import torch_manualgrad as mg
from torch_manualgrad_cli import cli


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1))


def named(report):
    return {d.operator: d for d in report.operators}


def test_a_training_step_that_pytorch_has_right(net):
    with mg.audit() as report:
        net(torch.randn(4, 3)).square().mean().backward()
    found = named(report)
    assert found["aten::addmm"].ways == {"reverse": 2} and not report.doubtful
    assert found["aten::native_layer_norm"].cost == "none in plain reverse mode"
    assert "aten::t" not in found and "0 doubtful" in str(report)  # a view


def test_a_gradient_penalty_has_doubtful_derivatives(net):
    x = torch.randn(4, 3, requires_grad=True)
    with mg.audit() as report:
        (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (g.norm(dim=1) - 1).square().mean().backward()
    found = named(report)
    assert [d.operator for d in report.doubtful] == ["aten::linalg_vector_norm", "aten::native_layer_norm_backward"]
    assert found["aten::native_layer_norm_backward"].ways == {"reverse, in a backward": 1}
    assert found["aten::linalg_vector_norm"].served == "a rule" and "nan" in found["aten::linalg_vector_norm"].doubt
    assert str(report).index("linalg_vector_norm") < str(report).index("aten::addmm")  # the doubtful ones first


def test_forward_mode_and_transforms():
    with mg.audit() as report, fwAD.dual_level():
        fwAD.make_dual(torch.ones(2), torch.ones(2)).sin()
    assert named(report)["aten::sin"].ways == {"forward": 1} and "aten::cos" not in named(report)
    with mg.audit() as report:
        torch.func.grad(lambda x: x.norm())(torch.ones(3))
    assert "torch.func" in named(report)["aten::linalg_vector_norm"].ways and report.doubtful


def test_undifferentiated_operators_are_not_listed(net):
    with mg.audit() as report, torch.no_grad():
        net(torch.randn(4, 3))
    assert not report.operators and str(report) == "nothing was differentiated"


def test_operators_of_others_are_to_be_checked():
    @mg.custom_op("audittest::twice(Tensor x) -> Tensor")
    def twice(x):
        return 2 * x

    @twice.impl_save_for_backward
    def _(inputs, output):
        return ()

    @twice.impl_backward
    def _(ctx, saved, grad):
        return {"x": 2 * grad}

    with mg.audit() as report:
        twice(torch.ones(2, requires_grad=True)).sum().backward()
    assert named(report)["audittest::twice"].doubt == "not PyTorch's own: check it"


def test_results_are_those_of_without(net):
    x = torch.randn(4, 3)
    net(x).square().mean().backward()
    plain = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with mg.audit():
        net(x).square().mean().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, net.parameters()))


def test_an_active_override_is_refused():
    with mg.override(), pytest.raises(RuntimeError, match="an override is active"), mg.audit():
        pass


def test_the_command(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\nif __name__ == '__main__':\n    x = torch.ones(3, requires_grad=True)\n"
        "    x.norm(p=float(sys.argv[1])).backward()\n    sys.exit(0)\n"
    )
    ran = CliRunner().invoke(cli, ["audit", str(script), "3", "--json"])
    assert ran.exit_code == 1, ran.output
    (only,) = json.loads(ran.stdout)["operators"]
    assert only["operator"] == "aten::linalg_vector_norm" and only["ways"] == {"reverse": 1}
    for missing, what in (("no_such.py", "no file no_such.py"), ("no_such_module", "no module 'no_such_module'")):
        ran = CliRunner().invoke(cli, ["audit", missing])
        assert ran.exit_code == 2 and what in ran.stderr


def test_the_report_names_the_mode_the_line_and_the_override(net):
    x = torch.randn(4, 3, requires_grad=True)
    with mg.audit() as report:
        (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)  # the forward
        (g.norm(dim=1) - 1).square().mean().backward()
    norm, layer_norm = report.doubtful
    (line,) = norm.lines
    assert line.startswith("test_audit.py:") and line.endswith("(g.norm(dim=1) - 1).square().mean().backward()")
    assert layer_norm.lines[0].endswith("# the forward")
    assert norm.override == 'mg.override("aten::linalg_vector_norm")' and named(report)["aten::addmm"].override == ""
    row = next(row for row in str(report).splitlines() if row.startswith("| aten::native_layer_norm_backward"))
    assert "| rev-rev (1) " in row and layer_norm.override in row and "# the forward" in row
    with mg.override("aten::linalg_vector_norm", "aten::native_layer_norm_backward") as handle:
        assert [f'mg.override("{rule.name}")' for rule in handle.rules] == [norm.override, layer_norm.override]
