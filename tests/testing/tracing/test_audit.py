"""`audit` lists what a program differentiates, in which ways, and what of it is doubtful."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from click.testing import CliRunner
from torch import nn
from torch.utils import _pytree as pytree

import torch_manualgrad as mg
from torch_manualgrad.testing.database.opinfo import op_db
from torch_manualgrad.testing.inputs import tree
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


def test_results_without_a_history_are_counted():
    x, bound = torch.tensor([0.5, 1.0], requires_grad=True), torch.tensor(2.0, requires_grad=True)
    with mg.audit() as report:
        (x.exp() + torch.special.airy_ai(x) + torch.linspace(0.0, bound, 2)).sum().backward()
        (
            torch.zeros_like(x),
            torch.rand_like(x),
            x.detach() * 2,
            torch.histc(x),
            x.data + 1,
        )  # right: their derivative is zero
        with torch.no_grad():
            torch.special.bessel_j0(x)
    assert [d.operator for d in report.doubtful] == ["aten::linspace.Scalar_Tensor", "aten::special_airy_ai"]
    assert {d.doubt for d in report.doubtful} == {"no gradient, and no error"}
    assert "2 doubtful, 2 of them with no gradient, and no error" in str(report)
    linspace, airy = report.doubtful
    assert airy.override == 'mg.override("aten::special_airy_ai")'
    assert (
        not linspace.override and "torch.linspace(0, 1, steps)" in linspace.served and "linspace" in linspace.lines[0]
    )


def with_grad(x):
    return x.clone().requires_grad_() if tree.is_differentiable(x) else x


@pytest.mark.slow  # a minute
@pytest.mark.filterwarnings("ignore")
def test_every_call_without_a_history_is_found():
    """Those of PyTorch's operator database, next to what autograd says of each result."""
    expected, found = set(), set()
    for op in op_db():
        if torch.float64 not in op.dtypes:
            continue
        for sample in itertools.islice(op.sample_inputs("cpu", torch.float64), 3):
            inputs = pytree.tree_map(with_grad, (sample.input, [*sample.args], dict(sample.kwargs)))
            tracked = [x for x in tree.tensors(inputs) if x.requires_grad]
            try:
                with mg.audit() as report:
                    result = op(inputs[0], *inputs[1], **inputs[2])
            except Exception:  # a sample that requires an input without grad
                continue
            results = [x for x in tree.tensors(result) if tree.is_differentiable(x)]
            if tracked and results and not any(x.requires_grad for x in results):
                expected.add(op.name)
            if any(d.doubt == "no gradient, and no error" for d in report.doubtful):
                found.add(op.name)
    zero = {f"{f}_like" for f in ("empty", "zeros", "ones", "randn", "rand", "randint", "full")}
    zero |= {f"new_{f}" for f in ("zeros", "ones", "empty", "empty_strided", "full")} | {"histc"}
    counted = {"masked.argmax", "masked.argmin"}  # places, as numbers
    assert found == expected - zero - counted
    assert len(found) == 25  # airy_ai, 11 Bessel functions, 12 families of polynomials, linspace
