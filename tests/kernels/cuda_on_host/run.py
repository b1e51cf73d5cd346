"""Runs the tests of the kernels on the CUDA kernels, built for the host, in the place of the CPU's kernels.

    python tests/kernels/cuda_on_host/run.py [--kind races|sanitizers] [--order ORDER] [--every N] [arguments of pytest]
    python tests/kernels/cuda_on_host/run.py --write-traffic

ORDER is that in which threads run: forward, reverse, mixed, or a seed (see machine.cpp). Of the cases of a test one in
N runs. The second command counts how often memory is used, for traffic.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __package__:
    from .build import COMPILER, HERE, ROOT, build
else:
    from build import COMPILER, HERE, ROOT, build

TESTS = [
    *(
        f"kernels/test_{name}_kernels.py"
        for name in ("norm", "distance", "segment", "factor", "qr", "spectrum", "strong_times", "gamma")
    ),
    "primal/test_primal.py",
    "primal/test_replacement.py",
]


def environment(folder: Path, kind: str, order: str) -> dict[str, str]:
    """That of a process which imports the package in this folder."""
    variables = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join(map(str, (folder, HERE, HERE.parent, ROOT / "tests"))),
        CUDA_ON_HOST_ORDER=order,
    )
    variables.setdefault("OMP_NUM_THREADS", "1")
    if kind == "sanitizers":
        runtimes = [
            subprocess.run(
                [COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True
            ).stdout.strip()
            for name in ("libasan.so", "libstdc++.so")
        ]
        variables.update(
            LD_PRELOAD=":".join(runtimes),
            ASAN_OPTIONS="detect_leaks=0",
            UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1",
        )
    return variables


def package(folder: Path, library: Path) -> None:
    """A copy of torch_manualgrad in this folder, with no kernels but these."""
    target = folder / "torch_manualgrad"
    shutil.copytree(ROOT / "torch_manualgrad", target, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    (target / "lib").mkdir()
    (target / "lib" / "libmanualgrad_cpu.so").symlink_to(library)


def run(kind: str = "races", order: str = "mixed", every: int = 1, arguments: Sequence[str] = ()) -> int:
    """The exit status of pytest."""
    library = build(kind)
    files = [str(HERE / "cases.py"), *(str(ROOT / "tests" / name) for name in TESTS)]
    with tempfile.TemporaryDirectory(prefix="cuda_on_host") as name:
        package(Path(name), library)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "plugin", "-p", "no:cacheprovider", "--tb=short"]
        command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
        if not any(argument.split("::")[0].endswith(".py") for argument in arguments):
            command += files
        variables = environment(Path(name), kind, order) | {"CUDA_ON_HOST_EVERY": str(every)}
        return subprocess.run([*command, *arguments], cwd=name, env=variables, check=False).returncode


def write_traffic(path: Path) -> None:
    """Counts, and writes the table."""
    library = build("races")
    with tempfile.TemporaryDirectory(prefix="cuda_on_host") as name:
        package(Path(name), library)
        command = [sys.executable, str(HERE / "count.py"), str(path)]
        subprocess.run(command, cwd=name, env=environment(Path(name), "races", "forward"), check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["races", "sanitizers"], default="races")
    parser.add_argument("--order", default="mixed")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--write-traffic", nargs="?", type=Path, const=HERE.parent / "cuda_traffic.csv")
    given, rest = parser.parse_known_args()
    if given.write_traffic:
        raise SystemExit(write_traffic(given.write_traffic))
    raise SystemExit(run(given.kind, given.order, given.every, rest))
