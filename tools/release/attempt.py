"""`make test-wheel`: the wheel of dist/ in an environment with one release of torch, and the tests there.

The tests run on a copy, away from the sources, so that what they import is what was installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .old_glibc import BUILD
from .version import ROOT

LOADED = """
import torch, torch_manualgrad as mg
from torch_manualgrad.core import libraries
from torch_manualgrad.core.override import compiled_calls as calls
assert "site-packages" in mg.__file__, mg.__file__
cpu, cuda = libraries.status()
print(f"torch {torch.__version__}, torch_manualgrad {mg.__version__}: CPU kernels {cpu.reason}; "
      f"CUDA kernels: {cuda.reason}; library of calls {'loaded' if calls.loaded() else 'absent'}")
assert cpu.loaded and cuda.path is not None and calls.loaded()
"""


def attempt_with(torch: str, env: Path | None, tests: Sequence[str]) -> None:
    """Install the newest wheel with this torch and run these tests, given relative to the repository."""
    wheel = max((ROOT / "dist").glob("*-manylinux*.whl"), key=lambda path: path.stat().st_mtime)
    folder = (env or ROOT / f".venv-wheel-{torch}").absolute()
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if env is None:
        if not python.exists():
            print(f"making {folder.name} with torch {torch} (about 5 GB)", flush=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([*pip, f"torch=={torch}", f"{wheel}[test]"], check=True)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", wheel], check=True)
    subprocess.run([python, "-m", "pip", "check"], check=True)
    away = BUILD / "away"
    shutil.rmtree(away, ignore_errors=True)
    shutil.copytree(ROOT / "tests", away / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    subprocess.run([python, "-c", LOADED], cwd=away, env=environment, check=True)
    options = ["-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", away, "-m", "not slow"]
    options += ["-n", "auto", "--dist", "worksteal"]
    command = [str(part) for part in [python, "-m", "pytest", *options, *tests]]
    raise SystemExit(subprocess.run(command, cwd=away, env=environment).returncode)
