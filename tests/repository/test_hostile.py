"""A small part of ``make hostile``: calls with arguments that do not fit, each in a process that has to survive."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "tools").exists():
    pytest.skip("not a source tree", allow_module_level=True)
if sys.platform != "linux":
    pytest.skip("the allocator with guard pages is for Linux", allow_module_level=True)


def hostile(*arguments):
    command = [sys.executable, "tools/hostile", *map(str, arguments)]
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def test_no_call_ends_the_process_or_reads_unwritten_memory():
    found = hostile("--seed", 5, "--calls", 3000, "--every", 8, "--only", "ops.")
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]


def test_it_detects_out_of_bounds_reads_and_unwritten_memory(tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text(
        f"""
import ctypes, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tools")!r}]
import torch
from hostile.__main__ import _guard
_guard()
from hostile.calls import Target
from hostile.process import run

def reads_past_the_end(x):
    return ctypes.string_at(x.data_ptr(), x.numel() * x.element_size() + 16)[:0]

def reads_what_nobody_wrote(x):
    return torch.empty(3)

def leaves_the_argument_out(x):
    raise RuntimeError("something is wrong")

for f in (reads_past_the_end, reads_what_nobody_wrote, leaves_the_argument_out):
    target = Target(f.__name__, f, [([torch.ones(4, dtype=torch.float64)], {{}})], ["x"])
    print(f.__name__, *sorted({{found.kind for found in run([target], 1, range(40))}}), sep=":")
"""
    )
    found = subprocess.run([sys.executable, str(planted)], capture_output=True, text=True, timeout=300)
    lines = dict(line.split(":", 1) for line in found.stdout.splitlines())
    assert "crash" in lines["reads_past_the_end"], found.stderr
    assert "depends on memory" in lines["reads_what_nobody_wrote"]
    assert "unnamed argument" in lines["leaves_the_argument_out"]
