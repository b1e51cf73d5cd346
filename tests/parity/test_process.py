"""Processes of their own: threads beside an override, and a spawned process."""

import io
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cells import close
from rows import rows
from ways import first

import torch_manualgrad as mg

HERE = Path(__file__).parent


def python(*arguments, timeout):
    """A new interpreter that finds this package and these modules."""
    paths = [str(HERE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=timeout, cwd=HERE
    )


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_threads_compute_while_overrides_come_and_go(seconds):
    found = python("stress.py", str(seconds), timeout=seconds + 120)
    assert found.returncode == 0, f"exit status {found.returncode}\n{found.stdout[-2000:]}\n{found.stderr[-3000:]}"


@pytest.mark.slow
def test_a_registration_that_is_freed_is_found():
    """The planted fault of the test above."""
    statuses = []
    for _ in range(5):
        statuses.append(python("stress.py", "20", "free", timeout=140).returncode)
        if statuses[-1]:
            return
    raise AssertionError(f"exit statuses {statuses}")


def in_a_spawned_process(connection, names):
    """The first derivatives of the rows of these names under both overrides."""
    sys.path.insert(0, str(HERE))
    found = {}
    for mode in ((), ("*",)):
        with mg.override(*mode):
            for row in rows():
                if row.name in names:
                    numbers = first(row.calls(torch.float64, 1)[0])
                    # PyTorch saves no tensor that is zero without memory
                    found[row.name, mode] = {key: value.clone() for key, value in numbers.items()}
    stream = io.BytesIO()
    torch.save(found, stream)
    connection.send_bytes(stream.getvalue())


@pytest.mark.slow
def test_spawned_processes():
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    names = [r.name for r in rows() if r.calls(torch.float64, 1)]  # the inputs of some are sparse, and held constant
    process = context.Process(target=in_a_spawned_process, args=(there, names))
    process.start()
    there.close()
    assert here.poll(300)
    found = torch.load(io.BytesIO(here.recv_bytes()), weights_only=False)
    process.join()
    assert len(found) == 2 * len(names)
    for (name, mode), numbers in found.items():
        row = next(r for r in rows() if r.name == name)
        with mg.override(*mode):
            expected = first(row.calls(torch.float64, 1)[0])
        for key, value in expected.items():
            assert close(numbers[key], value, 1e-10), (name, mode, key)
