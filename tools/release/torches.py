"""The releases of torch that a wheel is for: their headers, and the names that their libraries have, in build/release/torch.

Of each release's own wheel this is kept and the rest thrown away: it is half a gigabyte and more.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from .elf import defined
from .old_glibc import BUILD

#: The newest release of each minor, from the oldest that is supported. A new minor of torch is one more.
RELEASES = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
LIBRARIES = ("torch/lib/libtorch_cpu.so", "torch/lib/libc10.so")


def headers(release: str) -> Path:
    """The folder of headers of this release; downloaded on the first call."""
    folder = BUILD / "torch" / release
    if not (folder / "names").exists():
        print(f"fetching the headers of torch {release}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as temporary:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*pip, "--dest", temporary, f"torch=={release}"], check=True)
            (wheel,) = Path(temporary).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, [n for n in archive.namelist() if n.startswith("torch/include/")])
                libraries = [Path(archive.extract(name, temporary)) for name in LIBRARIES]
            names = sorted(set().union(*map(defined, libraries)))
        (folder / "names").write_text("\n".join(names))
    return folder / "torch" / "include"


def names(release: str) -> set[str]:
    """The symbols that this release's libraries define and the library of calls may use."""
    headers(release)
    return set((BUILD / "torch" / release / "names").read_text().split("\n"))
