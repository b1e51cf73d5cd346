"""`make gpu` without a GPU: its steps keep their outcomes whatever becomes of others, and what can run here runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "tools").exists():
    pytest.skip("not a source tree", allow_module_level=True)
sys.path.insert(0, str(ROOT))
from tools import gpu  # noqa: E402
from tools.gpu import Step  # noqa: E402

PASSES = Step("passes", [sys.executable, "-c", "print('all is well')"], 20)
STEPS = [
    PASSES,
    Step("fails", [sys.executable, "-c", "print('what is wrong'); raise SystemExit(3)"], 20),
    Step("waits", [sys.executable, "-c", "import time; print('waiting', flush=True); time.sleep(60)"], 2),
    Step("has no tool", ["compute-sanitizer-that-is-not-there"], 20),
    Step(
        "reads", [sys.executable, "-c", "import os; assert os.environ['OF_THIS_STEP']"], 20, (), {"OF_THIS_STEP": "1"}
    ),
]


def test_a_step_that_fails_stops_no_other(tmp_path, capsys):
    assert gpu.run_all(STEPS, has_gpu=True, rehearse=False, out=tmp_path) == 1
    results = json.loads((tmp_path / "results.json").read_text())
    outcomes = {name: result["outcome"] for name, result in results.items()}
    assert outcomes == {
        "passes": gpu.PASSED,
        "fails": gpu.FAILED,
        "waits": gpu.TIMED_OUT,
        "has no tool": gpu.NO_TOOL,
        "reads": gpu.PASSED,
    }
    assert (tmp_path / "passes.log").read_text() == "all is well\n"
    printed = capsys.readouterr().out
    assert "what is wrong" in printed and "waiting" in printed and "all is well" not in printed


def test_the_exit_status_says_whether_there_was_a_gpu(tmp_path):
    assert gpu.run_all([PASSES], has_gpu=True, rehearse=False, out=tmp_path) == 0
    assert gpu.run_all([PASSES], has_gpu=False, rehearse=False, out=tmp_path) == 2
    assert json.loads((tmp_path / "results.json").read_text())["passes"]["outcome"] == gpu.NO_GPU
    rehearsed = Step("rehearsed", STEPS[1].command, 20, PASSES.command)
    assert gpu.run_all([rehearsed], has_gpu=False, rehearse=True, out=tmp_path) == 2
    assert json.loads((tmp_path / "results.json").read_text())["rehearsed"]["outcome"] == gpu.PASSED
    assert gpu.run_all([Step("fails", (), 20, STEPS[1].command)], has_gpu=False, rehearse=True, out=tmp_path) == 1


def test_all_steps_take_less_than_ten_minutes_and_run_files_that_exist():
    assert sum(step.seconds for step in gpu.STEPS) < 600
    for step in gpu.STEPS:
        files = [word for word in (*step.command, *step.rehearsal) if word.endswith(".py") or word.startswith("tests/")]
        assert files and all((ROOT / file).exists() for file in files)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_rehearsal(tmp_path):
    """The steps that have a rehearsal pass it; the others need a GPU."""
    assert gpu.run_all(gpu.STEPS, has_gpu=False, rehearse=True, out=tmp_path) == 2
    results = json.loads((tmp_path / "results.json").read_text())
    passed = {name for name, result in results.items() if result["outcome"] == gpu.PASSED}
    assert passed == {step.name for step in gpu.STEPS if step.rehearsal} == {"kernels", "threads", "timings"}
