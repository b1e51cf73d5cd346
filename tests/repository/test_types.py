"""What type checkers know of the public API."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torch_manualgrad as mg

ROOT = Path(__file__).resolve().parents[2]

if not (ROOT / "pyproject.toml").exists():
    pytest.skip("not a source tree", allow_module_level=True)

PROGRAM = """
import torch
import torch_manualgrad as mg
from torch import Tensor

x = torch.tensor([3.0, 4.0])
reveal_type(mg.ops.norm_backward(torch.tensor(1.0), x, 2.0, x.norm(), keepdim=False))  # Tensor
reveal_type(mg.ops.norm_jvp.kernels)  # tuple[str, ...]
reveal_type(mg.rules["aten::sin"])  # Rule
reveal_type(mg.rules.find("norm"))  # list[Rule]

@mg.custom_op("types::wave(Tensor x) -> Tensor")
def wave(x: Tensor) -> Tensor:
    return x.sin()

reveal_type(wave)  # CustomOp
words = mg.nested.Ragged.from_components([x, x[:1]])
reveal_type(1 - words * 2)  # Ragged
reveal_type(-words > words)  # Ragged
reveal_type(mg.testing.check(wave, [mg.Sample(x)]))  # Report
reveal_type(mg.linalg.svd(x).S)  # Tensor
mg.ops.norm_backward(1, 2)  # error
mg.ops.nrm_backward  # Formula
"""


def expected() -> list[tuple[int, str]]:
    lines = PROGRAM.strip().splitlines()
    return [(n, line.rpartition("  # ")[2]) for n, line in enumerate(lines, 1) if "reveal_type" in line]


def test_the_stub_is_current():
    sys.path.insert(0, str(ROOT))
    try:
        from tools import stubs
    finally:
        sys.path.remove(str(ROOT))
    text = stubs.PATH.read_text()
    assert text == stubs.stub(), "python -m tools.stubs writes the file again"
    ast.parse(text)


@pytest.mark.slow
def test_mypy_sees_the_types(tmp_path):
    pytest.importorskip("mypy")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.strip())
    command = [sys.executable, "-m", "mypy", "--no-pretty", f"--cache-dir={tmp_path / 'cache'}", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    found = [line.split(":", 2) for line in done.stdout.splitlines() if "Revealed type" in line]
    assert len(found) == len(expected()), done.stdout
    for (number, name), (_, line, text) in zip(expected(), found):
        revealed = re.sub(r"[\w.]*\.(?=\w)", "", text.partition('"')[2].rpartition('"')[0])
        assert (int(line), revealed) == (number, name)
    (wrong,) = {line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line}
    assert "mg.ops.norm_backward(1, 2)" in PROGRAM.strip().splitlines()[int(wrong) - 1]


def test_names_are_completed():
    assert mg.rules._ipython_key_completions_() == [*mg.rules]
    assert "norm_backward" in dir(mg.ops)
