"""A folder of libraries to link against, with a glibc as old as that of manylinux_2_28.

The symbols of glibc are those of stand-ins that zig makes of any version of it. What the compiler's own headers call and
an old libstdc++ lacks is linked statically (old_libstdcxx.cpp). Code is compiled as always: only the link differs.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "release"
GLIBC = "2.28"


def zig(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run zig, which pip has, with its cache in the build folder."""
    cache = str(BUILD / "zig")
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
    return subprocess.run([sys.executable, "-m", "ziglang", *map(str, arguments)], env=environment, **options)  # type: ignore[call-overload, no-any-return]


def _stand_ins(folder: Path) -> None:
    empty = folder / "empty.c"
    empty.write_text("")
    shutil.rmtree(BUILD / "zig", ignore_errors=True)  # the one folder with a libc in it is then that of this target
    target = f"{platform.machine()}-linux-gnu.{GLIBC}"
    zig("cc", "-target", target, "-shared", "-o", folder / "empty.so", empty, check=True)
    for name in ("libc.so.6", "libc_nonshared.a"):
        (found,) = BUILD.glob(f"zig/o/*/{name}")
        for path in found.parent.glob("lib*"):
            shutil.copy(path, folder)
    for path in folder.glob("lib*.so.*"):
        path.with_name(path.name.partition(".so")[0] + ".so").symlink_to(path.name)


def link_flags() -> list[str]:
    """The linker arguments that make g++ or nvcc use the old libraries, which the first call makes."""
    folder = BUILD / f"glibc-{GLIBC}"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _stand_ins(folder)
        (folder / "libc.so").unlink()
        parts = f"{folder}/libc.so.6 {folder}/libc_nonshared.a AS_NEEDED ({folder}/libld.so.2)"
        (folder / "libc.so").write_text(f"GROUP ({parts})\n")
        shim = folder / "old_libstdcxx.o"
        compiler = [os.environ.get("CXX", "c++"), "-O2", "-std=c++20", "-fPIC"]
        subprocess.run([*compiler, "-c", HERE / "old_libstdcxx.cpp", "-o", shim], check=True)
        subprocess.run(["ar", "rcs", folder / "libold.a", shim], check=True)
        (folder / "done").touch()
    # Whole, as torch's libraries, which come before libstdc++, happen to define a part of it; and hidden from others.
    whole = f"-Wl,--whole-archive,{folder}/libold.a,--no-whole-archive"
    return [f"-L{folder}", whole, "-Wl,--exclude-libs,libold.a"]
