"""Contenders that share no process: each imports its own libraries only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any


def in_processes(contenders: Sequence[str], measure: Callable[[str], Any]) -> dict[str, Any]:
    """What ``measure`` returns for each contender, in a process of its own, one after the other, on one core.

    A process runs the script with the name of its contender. What it prints last is the result, as JSON. A contender that
    fails is left out, with the last line of its error.
    """
    if len(sys.argv) > 1:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(sys.argv[1])))
        raise SystemExit
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    results = {}
    for contender in contenders:
        command = [sys.executable, sys.argv[0], contender]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            print(f"{contender}: {done.stderr.strip().splitlines()[-1]}")
            continue
        results[contender] = json.loads(done.stdout.splitlines()[-1])
    return results
