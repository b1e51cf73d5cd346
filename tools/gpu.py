"""All that a machine with a GPU can tell of this package, in less than ten minutes: `make gpu`.

The steps run in the order in which their results count, each in a process of its own and for a limited time. What a step printed
is in build/gpu/<step>.log, and its outcome in build/gpu/results.json as soon as it ends, so that what ran stays known if a later
step fails, or if the machine is taken away.

    python tools/gpu.py                 (exit status: 0 all passed, 1 some did not, 2 there is no GPU)
    python tools/gpu.py --rehearse      (without a GPU: what can run runs on the simulated device or the CPU, the rest says "no GPU")
    python tools/gpu.py --only graphs   (one step)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "gpu"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
ON_HOST = [sys.executable, "tests/kernels/cuda_on_host/run.py"]
CASES = str(ROOT / "tests/kernels/cuda_on_host/cases.py")  # the simulated device has a folder of its own
PASSED, FAILED, TIMED_OUT, NO_GPU, NO_TOOL = "passed", "failed", "timed out", "no GPU", "no compute-sanitizer"


@dataclass(frozen=True)
class Step:
    """A command, the seconds that it may take, and the command that stands in for it where there is no GPU."""

    name: str
    command: Sequence[str]
    seconds: float
    rehearsal: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def sanitizer(tool: str) -> Step:
    each = [sys.executable, "tests/cuda/each_kernel.py"]
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *each]
    return Step(
        tool, command, 60, variables={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    )  # each tensor in memory of its own


KERNELS = ["tests/cuda/test_kernels_on_cuda.py", "tests/kernels", "tests/primal", "-k", "cuda"]
STEPS = [
    Step(
        "kernels",
        [*PYTEST, *KERNELS, "--ignore", "tests/kernels/test_cuda_on_host.py"],
        110,
        [*ON_HOST, CASES, "-k", "order_of_threads and float64"],
    ),
    *map(sanitizer, ("memcheck", "racecheck", "synccheck")),
    Step("graphs", [*PYTEST, "tests/cuda/test_graphs_on_cuda.py"], 60),
    Step(
        "threads",
        [*PYTEST, "tests/cuda/test_threads_on_cuda.py"],
        30,
        [*ON_HOST, CASES, "-k", "two_threads"],
    ),
    Step(
        "timings",
        [sys.executable, "benchmarks/gpu.py", "--device", "cuda", "--seconds", "2"],
        60,
        [sys.executable, "benchmarks/gpu.py", "--dry", "--seconds", "0", "--smaller", "500"],
    ),
    Step("rules", [*PYTEST, "tests/cuda/test_rules_on_cuda.py"], 140),
]


def environment() -> dict[str, str]:
    """In which the tests on a GPU find their helpers."""
    folders = [ROOT, *(ROOT / "tests" / name for name in ("", "kernels", "nested", "cuda"))]
    return dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, folders)), OMP_NUM_THREADS="1")


def run(step: Step, has_gpu: bool, rehearse: bool, out: Path) -> str:
    """The outcome; what the step prints goes into a file."""
    command = step.command if has_gpu else step.rehearsal if rehearse else ()
    if not command:
        return NO_GPU
    if shutil.which(command[0]) is None:
        return NO_TOOL
    with (out / f"{step.name}.log").open("w") as log:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment() | step.variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=step.seconds if has_gpu else 10 * step.seconds,  # a rehearsal does not hold a GPU
                check=False,
            )
        except subprocess.TimeoutExpired:
            return TIMED_OUT
    return PASSED if done.returncode == 0 else FAILED


def run_all(steps: Sequence[Step], has_gpu: bool, rehearse: bool, out: Path) -> int:
    """Runs the steps, whatever becomes of those before, and reports; the exit status."""
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, object]] = {}
    for step in steps:
        start = time.monotonic()
        outcome = run(step, has_gpu, rehearse, out)
        results[step.name] = {"outcome": outcome, "seconds": round(time.monotonic() - start, 1)}
        (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        print(f"{step.name}: {outcome}, {results[step.name]['seconds']} s", flush=True)
        log = out / f"{step.name}.log"
        if outcome in (FAILED, TIMED_OUT):
            print(*log.read_text().splitlines()[-15:], f"-- all of it: {log}", sep="\n")
    outcomes = {str(result["outcome"]) for result in results.values()}
    if outcomes & {FAILED, TIMED_OUT, NO_TOOL}:
        return 1
    return 0 if has_gpu else 2


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], default=[s.name for s in STEPS])
    given = parser.parse_args(arguments)
    return run_all([s for s in STEPS if s.name in given.only], torch.cuda.is_available(), given.rehearse, OUT)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
