"""`make aarch64`: the CPU kernels for aarch64, compiled here by the clang of zig, and a part of them run under qemu.

Torch's stable ABI is the same on every processor, so that any torch's headers do. The library is linked too, against
nothing but libc and libm: what is undefined is torch's.
"""

from __future__ import annotations

import runpy
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .elf import foreign
from .old_glibc import BUILD, GLIBC, zig
from .version import ROOT

TARGET = f"aarch64-linux-gnu.{GLIBC}"
BUILD_SCRIPT = runpy.run_path(str(ROOT / "setup.py"))
FLAGS = [*BUILD_SCRIPT["CXX_FLAGS"], *BUILD_SCRIPT["WARNINGS"]]
# `&` of two conditions is meant: it makes no branch
FLAGS += [f"-DTORCH_TARGET_VERSION={BUILD_SCRIPT['TARGET_VERSION']}", "-Wno-bitwise-instead-of-logical"]
PROGRAM = ROOT / "tests" / "kernels" / "lanes" / "lanes.cpp"


def sources() -> list[Path]:
    """The files of the CPU library."""
    return sorted(path for path in ROOT.glob("csrc/**/*.cpp") if path.parent.name != "calls")


def compile_to(folder: Path, files: Sequence[Path], flags: Sequence[str] = FLAGS) -> list[Path]:
    """Objects for aarch64 of these files."""
    from torch.utils import cpp_extension  # needs torch, which running the program does not

    folder.mkdir(parents=True, exist_ok=True)
    includes = [part for path in cpp_extension.include_paths() for part in ("-isystem", path)]
    objects = [folder / f"{path.stem}.o" for path in files]

    def one(place: int) -> None:
        zig("c++", "-target", TARGET, *flags, *includes, "-c", files[place], "-o", objects[place], check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(len(files))))
    return objects


def compile_program(to: Path, target: str = TARGET.partition("-linux")[0] + "-linux-musl") -> Path:
    """The program that compares lanes with single numbers, linked statically, as qemu has no libraries of aarch64's."""
    to.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-O3", "-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-static", f"-I{ROOT / 'csrc'}"]
    zig("c++", "-target", target, *flags, PROGRAM, "-o", to, check=True)
    return to


def qemu() -> str | None:
    """qemu for programs of aarch64, if it is installed (Debian's qemu-user-static)."""
    return shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


def compile_kernels() -> None:
    """Compile and link the library; run the program where there is qemu."""
    folder = BUILD / "aarch64"
    target = folder / "libmanualgrad_cpu.so"
    zig("c++", "-target", TARGET, "-shared", "-Wl,-z,undefs", "-o", target, *compile_to(folder, sources()), check=True)
    strange = {name for name in foreign(target) if not name.startswith(("aoti_torch_", "torch_"))}
    if strange:
        raise SystemExit(f"torch_manualgrad: not of torch's stable ABI: {sorted(strange)}")
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1e6:.1f} MB, {len(sources())} files")
    program = compile_program(folder / "lanes")
    if qemu() is None:
        print("no qemu-aarch64: compiled, and not run")
    else:
        print(subprocess.run([qemu(), program], check=True, capture_output=True, text=True).stdout, end="")  # type: ignore[list-item]
