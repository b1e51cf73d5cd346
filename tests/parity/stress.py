"""Threads differentiate while another enters and leaves overrides: `python stress.py SECONDS`, exit status 0 if all is well.

A process of its own, because what it looks for ends a process.
"""

from __future__ import annotations

import _thread
import faulthandler
import sys
import time
import warnings
from typing import Any

import torch
from cells import close
from rows import Call, rows
from ways import first, variables

import torch_manualgrad as mg


def calls() -> list[Call]:
    """One call of each row, of those whose first derivative stock has."""
    found = []
    for row in rows():
        for call in row.calls(torch.float64, 1):
            try:
                first(call)
            except (RuntimeError, NotImplementedError):
                continue
            found.append(call)
    return found


def main(seconds: float, free: bool = False, threads: int = 3) -> int:
    """With `free`, registrations go when an override ends: what must not be done while other threads run."""
    faulthandler.enable()
    sys.setswitchinterval(1e-4)
    warnings.simplefilter("ignore")
    work = calls()
    expected = [[first(call)] for call in work]  # by stock, and by each override: some rules have another convention
    for choice in ((), ("*",)):
        with mg.override(*choice):
            for call, known in zip(work, expected):
                known.append(first(call))
    numbers = torch.rand(3, dtype=torch.float64)
    errors: list[str] = []
    end = time.monotonic() + seconds
    running = [threads]
    lock = _thread.allocate_lock()
    done = [0]

    def compute(start: int) -> None:
        i = start
        try:
            while time.monotonic() < end and not errors:
                i = (i + 1) % len(work)
                if i % 3:
                    found = first(work[i])
                    for name, value in found.items():
                        if not any(close(value, known[name], 1e-7) for known in expected[i]):
                            errors.append(f"{work[i]}: {name} is off")
                else:  # without a gradient, and with numbers in the place of tensors
                    with torch.no_grad():
                        work[i].problem.call(*work[i].problem.primals)
                    (numbers * 2.0).add(1).sum()
                    variables(work[i].problem)
                done[0] += 1
        except BaseException as error:
            errors.append(f"{work[i]}: {type(error).__name__}: {error}")
        finally:
            with lock:
                running[0] -= 1

    for t in range(threads):  # threads that Python's `threading` does not count, as those of C++
        _thread.start_new_thread(compute, (t * len(work) // threads,))
    entries = 0
    choices: list[Any] = [(), ("*",), ("aten::mm",), ("nested",)]
    while running[0] and time.monotonic() < end + 30:
        if time.monotonic() < end:
            with mg.override(*choices[entries % len(choices)]):
                time.sleep(0.0002 * (entries % 5))
            if free:
                mg.unregister()
            entries += 1
        else:
            time.sleep(0.01)
    print(f"{entries} entries, {done[0]} calls, {len(errors)} errors")
    for error in errors[:10]:
        print(error)
    return 1 if errors or running[0] else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), "free" in sys.argv))
