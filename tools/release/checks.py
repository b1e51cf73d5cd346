"""Checks of a wheel file: its tag, its size, its libraries, and every symbol that these need."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from .elf import defined, foreign
from .torches import RELEASES, headers, names

TAG = f"manylinux_2_28_{platform.machine()}"
LARGEST = 15_000_000
OLDEST = RELEASES[0]
CALLS = {f"calls_{'_'.join(release.split('.')[:2])}": release for release in RELEASES}


def stable_abi() -> set[str]:
    """The functions in C that the oldest torch declares for libraries built outside of it."""
    folder = headers(OLDEST) / "torch" / "csrc"
    files = [*(folder / "stable" / "c").glob("*.h"), *(folder / "inductor" / "aoti_torch" / "c").glob("*.h")]
    return {name for path in files for name in re.findall(r"\b((?:aoti_)?torch_\w+)\s*\(", path.read_text())}


def faults_of_library(name: str, path: Path) -> Iterator[str]:
    """The faults of a library of the wheel."""
    needed = foreign(path)
    for symbol in sorted(needed | defined(path)):
        if re.match(r"_?Py[A-Z_]", symbol):
            yield f"{name}: {symbol} is of Python"
    if name in CALLS:
        missing = needed - names(CALLS[name])
        yield from (f"{name}: {symbol} is not in torch {CALLS[name]}" for symbol in sorted(missing))
        return
    yield from (f"{name}: {symbol} is not in torch's stable ABI" for symbol in sorted(needed - stable_abi()))
    if name == "cpu":
        for release in RELEASES:
            missing = needed - names(release)
            yield from (f"{name}: {symbol} is not in torch {release}" for symbol in sorted(missing))


def faults(wheel: Path) -> Iterator[str]:
    """The faults of the wheel, one line each."""
    if not wheel.name.endswith(f"-py3-none-{TAG}.whl"):
        yield f"the tag is not py3-none-{TAG}: {wheel.name}"
    if wheel.stat().st_size >= LARGEST:
        yield f"{wheel.stat().st_size} bytes, {LARGEST} are allowed"
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        found = {}
        for name in archive.namelist():
            if ".so" in Path(name).suffixes:
                found[Path(name).stem.removeprefix("libmanualgrad_")] = Path(archive.extract(name, folder))
        expected = {"cpu", "cuda", *CALLS}
        if found.keys() != expected:
            yield f"the libraries are {sorted(found)}, not {sorted(expected)}"
        for name, path in sorted(found.items()):
            yield from faults_of_library(name, path)


def check(wheel: Path) -> None:
    """Print what the wheel is, and stop where a promise is broken."""
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, for torch {', '.join(RELEASES)}", flush=True)
    subprocess.run([sys.executable, "-m", "auditwheel", "show", wheel], check=True)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel], check=True)
    found = list(faults(wheel))
    if found:
        raise SystemExit("\n".join(["torch_manualgrad: the wheel is not as promised", *found]))
    print("tag, size, libraries and symbols are as promised")
