"""Rules of other packages: by entry point and by --import; the guide, whose package is made and used here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.interpreters import run_python
from helpers.ops import define

import torch_manualgrad as mg

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "packages.md"
BROKEN = "raise ZeroDivisionError('of its own')\n"

if not GUIDE.exists():
    pytest.skip("not a source tree", allow_module_level=True)


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def hardlib(tmp_path):
    """The package of the guide, and a broken one; `entry` writes what pip would."""
    module, _, test = blocks("python")
    for name, text in (("hardlib", module), ("brokenlib", BROKEN)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("import torch_manualgrad\n")
        (tmp_path / name / "rules.py").write_text(text)
    (tmp_path / "test_rules.py").write_text(test)

    def entry(name):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[torch_manualgrad.derivatives]\n{name} = {name}.rules\n")

    return tmp_path, entry


def python(folder, *arguments):
    path = os.pathsep.join([str(folder), str(Path(mg.__file__).parents[1]), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, check=False, capture_output=True, text=True
    )


def test_entry_points(hardlib):
    folder, entry = hardlib
    entry("brokenlib")
    entry("hardlib")
    code = "import hardlib, torch_manualgrad, sys\nassert 'hardlib.rules' not in sys.modules\n" + blocks("python")[1]
    run = python(folder, "-c", code)
    assert run.returncode == 0, run.stderr
    assert "tensor([0.0556, 0.0556])" in run.stdout and "<Rule hardlib::hardsigmoid" in run.stdout
    warned = (
        "brokenlib: its rules may be missing, as brokenlib.rules could not be imported (ZeroDivisionError: of its own)"
    )
    assert run.stderr.count(warned) == 1
    assert 'hardlib = "hardlib.rules"' in blocks("toml")[0]


def test_the_command_line(hardlib):
    folder, _ = hardlib
    for arguments, printed in (
        (["list", "--import", "hardlib.rules"], "| hardlib::hardsigmoid_backward "),
        (["show", "hardlib::hardsigmoid", "--import", "hardlib.rules"], "rule       hardlib::hardsigmoid"),
        (["check", "hardlib.rules:hardsigmoid", "--modes", "rev-rev", "--checks", "duality"], ", 0 failed"),
    ):
        run = run_python("-m", "torch_manualgrad", *arguments, folder=folder)
        assert run.returncode == 0 and printed in run.stdout, run.stdout + run.stderr
    run = run_python("-m", "torch_manualgrad", "list", "--import", "nolib.rules", folder=folder)
    assert run.returncode == 2 and "there is no module 'nolib.rules'" in run.stderr


def test_the_test_of_the_guide(hardlib):
    plugins = ["-p", "no:cacheprovider", "-p", "torch_manualgrad_pytest"]
    run = run_python("-m", "pytest", "-q", *plugins, "test_rules.py", folder=hardlib[0])
    assert "1 passed" in run.stdout, run.stdout + run.stderr


def test_rules_that_come_later_are_in_an_override_made_before():
    op = define("(Tensor x) -> Tensor", torch.sin)
    block = mg.override("*")
    late = mg.rule(op.name, vjp={"x": lambda grad, x: grad * x.cos()})
    with block as handle:
        assert late in handle.rules
    assert mg.rules.remove(late.name) is late
    with block as handle:
        assert late not in handle.rules


def test_families_can_be_imported_by_their_names():
    import torch_manualgrad.derivatives.linalg.lu as lu
    import torch_manualgrad.derivatives.reduction.norm as norm

    assert (
        lu is sys.modules["torch_manualgrad.derivatives.linalg.lu"]
        and norm.__name__ == "torch_manualgrad.derivatives.reduction.norm"
    )
    assert mg.derivatives.linalg.lu is lu and mg.rules["aten::linalg_lu"].formulas
    assert "norm" not in mg.rules and all("::" in name for name in mg.rules)


def test_a_namespace_of_its_own():
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    made = mg.formula(namespace="packagetest")(doubled)
    assert mg.ops["packagetest::doubled"] is made and "doubled" not in mg.ops
    with pytest.raises(ValueError, match="already defined"):
        mg.formula(namespace="packagetest")(doubled)
    del mg.ops._entries["packagetest::doubled"]
