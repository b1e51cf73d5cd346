"""Builds the kernels: one library for each device, found by glob, against torch's stable ABI and nothing else.

Beside them, from csrc/calls, the library that makes calls without Python: with torch's own headers, for the release of
torch that it is built against, whose name it carries. Where another torch runs, Python serves the calls.

Environment:
  MANUALGRAD_BUILD=none              no kernels; the package runs on its Python formulas alone. So it is, unasked, where
                                     the system is not Linux
  MANUALGRAD_CUDA=1 | 0              insist on, or leave out, the CUDA library (default: built where torch itself has CUDA;
                                     nvcc alone is no reason, as compiling takes minutes)
  MANUALGRAD_CUDA_ARCHS="80 90"      compute capabilities compiled ahead of time, "75 80 90 100 120" by default; the code of
                                     the oldest from 80 on is kept as PTX, for all that are between and newer
  MANUALGRAD_SANITIZE=address,undefined
                                     instruments the CPU library. The interpreter is not instrumented, so preload:
                                     LD_PRELOAD=$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libstdc++.so) \
                                     ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 python -m pytest tests/kernels/test_norm_kernels.py
  MANUALGRAD_CALLS="FOLDER ..."      torch's headers (torch/include) of the releases to build the library of calls for, in
                                     place of the torch at hand; `make wheel` has them all
  CXX, CUDA_HOME, LDFLAGS            as everywhere
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

import setuptools
from setuptools import Extension, setup

if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(f"torch_manualgrad: setuptools>=77 is required to build, found {setuptools.__version__}")
from setuptools.command.bdist_wheel import bdist_wheel

try:
    import torch
    from torch.utils import cpp_extension
    from torch.utils.cpp_extension import BuildExtension
except ImportError as error:
    from setuptools.command.build_ext import build_ext as BuildExtension

    torch, torch_missing = None, error

# The flags of the CPU library, here and in tools/release/aarch64.py.
# torch 2.10, the oldest that the kernels must load into: newer stable APIs are then compile errors.
TARGET_VERSION = "0x020a000000000000"
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
# With less than -O3 short loops inside of long ones are vectorised in the place of these: distances take four times as long.
CXX_FLAGS = ["-O3", "-std=c++17", "-g0", "-fPIC", "-fvisibility=hidden"]
# errno and floating-point traps are what nobody reads, and they block vectorisation. Contraction to fused operations
# would make a value depend on the instruction set and on the loop it stands in; equality of two moduli must not.
CXX_FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fopenmp-simd"]
# Hot loops are always inlined. For the rest, of which -O3 makes a quarter of a megabyte more, GCC inlines as at -O2.
GCC_FLAGS = ["-fno-ipa-cp-clone", "--param=max-inline-insns-single=70", "--param=max-inline-insns-auto=15"]
GCC_FLAGS += ["--param=early-inlining-insns=6", "--param=inline-min-speedup=30"]
HEADERS = sorted(glob("csrc/**/*.h", recursive=True))
# What is in csrc/calls has one loop, a sum, and includes templates by the thousand.
CALLS_FLAGS = ["-O3", "-std=c++20", "-g0", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-DAT_PER_OPERATOR_HEADERS"]
SANITIZERS = os.environ.get("MANUALGRAD_SANITIZE", "")


def fail(message: str) -> None:
    raise SystemExit(f"torch_manualgrad: {message}\n(MANUALGRAD_BUILD=none installs the package without kernels.)")


def cuda_home() -> Path | None:
    """The CUDA toolkit, where it is wanted and found; torch's own lookup gives up where torch itself has no CUDA."""
    wanted = os.environ.get("MANUALGRAD_CUDA", "")
    if wanted not in ("", "0", "1"):
        fail(f"MANUALGRAD_CUDA must be 0 or 1, got {wanted!r}")
    if wanted == "0" or (wanted == "" and (torch is None or torch.version.cuda is None)):
        return None
    on_path = shutil.which("nvcc")
    candidates = [
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
        on_path and Path(on_path).resolve().parents[1],
    ]
    for home in [*candidates, "/usr/local/cuda", *sorted(glob("/usr/local/cuda-*"), reverse=True)]:
        if home and Path(home, "bin", "nvcc").exists():
            return Path(home)
    if wanted == "1":
        fail("MANUALGRAD_CUDA=1, but no nvcc was found in CUDA_HOME, on PATH or in /usr/local/cuda*")
    return None


def has_kernels() -> bool:
    """Whether kernels are to be built; where they cannot be, and nobody said so, a line says it."""
    mode = os.environ.get("MANUALGRAD_BUILD", "")
    if mode not in ("", "none"):
        fail(f"MANUALGRAD_BUILD must be unset or 'none', got {mode!r}")
    if mode == "" and sys.platform != "linux":
        print(f"torch_manualgrad: no kernels on {sys.platform}; the derivatives run in Python alone", file=sys.stderr)
    return mode == "" and sys.platform == "linux"


def library(name: str, sources: list[str]) -> Extension:
    depends = [] if name.startswith("calls") else HEADERS
    return Extension(f"torch_manualgrad.lib.libmanualgrad_{name}", sources, depends=depends, language="c++")


def calls_headers() -> dict[str, str]:
    """For each library of calls torch's headers. Its name has torch's release, in whose ABI it is; core/override/compiled_calls.py loads its own."""
    if torch is None:
        return {"calls": ""}
    found = {}
    for folder in os.environ.get("MANUALGRAD_CALLS", "").split() or cpp_extension.include_paths()[:1]:
        text = Path(folder, "torch", "headeronly", "version.h").read_text()
        release = [re.search(rf"define TORCH_VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR")]
        found["_".join(["calls", *release])] = folder
    return found


def extensions() -> list[Extension]:
    if not has_kernels():
        return []
    calls = sorted(glob("csrc/calls/*.cpp"))
    libraries = [library("cpu", sorted({*glob("csrc/**/*.cpp", recursive=True)} - {*calls}))]
    libraries += [library(name, calls) for name in calls_headers()]
    if cuda_home() is not None:
        libraries.append(library("cuda", sorted(glob("csrc/**/*.cu", recursive=True))))
    return libraries


class build_kernels(BuildExtension):
    """torch's build (ninja, in parallel) for the CPU library and that of calls; nvcc, called directly, for the CUDA library."""

    def __init__(self, *args, **kwargs) -> None:
        if torch is None:
            super().__init__(*args, **kwargs)
        else:
            super().__init__(*args, no_python_abi_suffix=True, use_ninja=shutil.which("ninja") is not None, **kwargs)

    def run(self) -> None:
        if self.extensions and torch is None:
            fail(
                f"torch is required to build the kernels ({torch_missing}). Install torch first, then run\n"
                "  pip install --no-build-isolation ."
            )
        # setuptools copies into the source tree, and does not make a folder that is no package.
        if self.extensions and self.inplace:
            Path("torch_manualgrad", "lib").mkdir(exist_ok=True)
        super().run()

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # no PyInit_*: these are not Python modules

    def build_extensions(self) -> None:
        command = shlex.split(os.environ.get("CXX", "c++"))
        compiler = command[0]
        if shutil.which(compiler) is None:
            fail(f"no C++ compiler: {compiler!r} is not on PATH; install one or set CXX")
        version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
        kernel_flags = [*CXX_FLAGS, *(GCC_FLAGS if "Free Software Foundation" in version else [])]
        includes = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
        defines = [f"-DTORCH_TARGET_VERSION={TARGET_VERSION}"]
        headers_of_calls = calls_headers()
        everything, self.extensions = self.extensions, []
        for ext in everything:
            if ext.name.endswith("_cuda"):
                self._build_cuda(ext, includes, defines)
                continue
            # -O1, the last one given, wins: what is instrumented takes minutes to optimize
            sanitize = [f"-fsanitize={SANITIZERS}", "-fno-omit-frame-pointer", "-g", "-O1"] if SANITIZERS else []
            calls = headers_of_calls.get(ext.name.partition("libmanualgrad_")[2])
            flags = [*CALLS_FLAGS, "-isystem", calls] if calls else [*kernel_flags, *includes, *defines]
            ext.extra_compile_args = [*flags, *WARNINGS, *sanitize]
            if SANITIZERS:
                ext.extra_compile_args.append("-DMANUALGRAD_SANITIZE")
            ext.library_dirs = cpp_extension.library_paths()
            ext.libraries = ["torch", "torch_cpu", *(["c10"] if calls else [])]
            ext.extra_link_args = sanitize or ["-Wl,--strip-all"]  # the names of templates are half a megabyte
            self.extensions.append(ext)
        super().build_extensions()
        self.extensions = everything

    def build_extension(self, ext: Extension) -> None:
        # A folder of objects for each library: those of calls have the same sources, and other headers.
        temp, self.build_temp = self.build_temp, str(Path(self.build_temp, ext.name.rpartition(".")[2]))
        super().build_extension(ext)
        self.build_temp = temp

    def _build_cuda(self, ext: Extension, includes: list[str], defines: list[str]) -> None:
        home = cuda_home()
        target = Path(self.get_ext_fullpath(ext.name))
        build = Path(self.build_temp, "cuda")
        stamp = max(os.path.getmtime(path) for path in [*ext.sources, *ext.depends, "setup.py"])
        if target.exists() and target.stat().st_mtime > stamp:  # `force` is always set where ninja decides
            return
        codes = gencodes(os.environ.get("MANUALGRAD_CUDA_ARCHS", "75 80 90 100 120").split())
        flags = ["-O3", "-std=c++17", "--expt-relaxed-constexpr", "-fmad=false", "-Werror=all-warnings", "-DUSE_CUDA"]
        host = ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Werror"]
        # The runtime is linked statically: the library then serves a torch built with another minor release of CUDA.
        # libtorch_cuda is named as a dependency even where torch has none, through an empty stand-in at link time.
        torch_libraries = Path(cpp_extension.library_paths()[0])
        build.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        search = [f"-L{torch_libraries}"]
        nvcc = str(home / "bin" / "nvcc")
        if not (torch_libraries / "libtorch_cuda.so").exists():
            named = ["-shared", "-cudart", "none", "-Xlinker", "-soname=libtorch_cuda.so", "-x", "c++", os.devnull]
            self._run([nvcc, *named, "-o", str(build / "libtorch_cuda.so")])
            search.append(f"-L{build}")
        objects = {source: str(build / (Path(source).stem + ".o")) for source in ext.sources}
        compile_flags = [*flags, *codes, *host, *includes, *defines]

        def compile_one(source: str) -> None:
            self._run([nvcc, *compile_flags, "-c", source, "-o", objects[source]])

        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", 0)) or os.cpu_count()) as pool:
            list(pool.map(compile_one, ext.sources))
        needed = ["-Xlinker", "--no-as-needed", "-ltorch_cuda", "-ltorch", "-ltorch_cpu"]
        linker = [flag.replace("-Wl,", "-Xlinker=") for flag in shlex.split(os.environ.get("LDFLAGS", ""))]
        inputs = [*linker, *objects.values(), *search, *needed]
        self._run([nvcc, "-shared", "-cudart", "static", *inputs, "-o", str(target)])

    def _run(self, command: list[str]) -> None:
        print(shlex.join(command), flush=True)
        if subprocess.run(command, check=False).returncode != 0:
            fail(f"{command[0]} failed; MANUALGRAD_CUDA=0 leaves the CUDA library out")


def gencodes(archs: list[str]) -> list[str]:
    """nvcc's flags for some compute capabilities. From 80 on all are assembled from one intermediate code: compiling to that
    takes most of the time."""
    ordered = sorted(archs, key=int)
    base = next((a for a in ordered if int(a) >= 80), ordered[-1])
    flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ordered[: ordered.index(base)]]
    codes = ",".join([f"compute_{base}", *[f"sm_{a}" for a in ordered[ordered.index(base) :]]])
    return [*flags, f"-gencode=arch=compute_{base},code=[{codes}]"]


class wheel_for_any_python(bdist_wheel):
    """The libraries know neither Python's version nor its ABI; only the platform counts."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


if __name__ == "__main__":
    setup(ext_modules=extensions(), cmdclass={"build_ext": build_kernels, "bdist_wheel": wheel_for_any_python})
