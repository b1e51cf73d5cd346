"""`make sdist`: the source distribution, and what is built from it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from .version import ROOT, label


def build_source() -> None:
    """Make the source distribution in dist/, and a wheel without kernels from it."""
    distributions = ROOT / "dist"
    command = [sys.executable, "setup.py", "--quiet", "egg_info", f"--tag-build={label()}", "sdist"]
    subprocess.run([*command, f"--dist-dir={distributions}"], cwd=ROOT, check=True)
    newest = max(distributions.glob("*.tar.gz"), key=lambda path: path.stat().st_mtime)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", newest], check=True)
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
        environment = {**os.environ, "MANUALGRAD_BUILD": "none"}
        subprocess.run([*pip, "--no-build-isolation", "--wheel-dir", folder, newest], env=environment, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    missing = {str(path.relative_to(ROOT)) for path in ROOT.glob("torch_manualgrad/**/*.py")} - packed
    if missing:
        raise SystemExit(f"torch_manualgrad: not in {newest.name}: {sorted(missing)}")
    print(f"{newest.name}: {newest.stat().st_size / 1e6:.1f} MB; builds, and has every module")
