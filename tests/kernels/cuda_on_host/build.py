"""Builds the CUDA kernels for the host: `python tests/kernels/cuda_on_host/build.py [races|sanitizers]` prints the library's path.

`races` checks each access to memory (see machine.cpp), `sanitizers` has the address and undefined-behaviour sanitizers.
Objects are kept in build/cuda_on_host under the hash of what they are made of.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
BUILD = ROOT / "build" / "cuda_on_host"

COMPILER = "g++"  # whose sanitizer for threads can be told to leave out calls of functions
FLAGS = ["-O1", "-g1", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]
FLAGS += ["-ftrivial-auto-var-init=pattern", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-w"]
KINDS = {
    # calls for each access, which machine.cpp answers; that sanitizer itself is not linked
    "races": ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"],
    # without the checks of every pointer, which the address sanitizer makes, and which take long to compile
    "sanitizers": [
        "-fsanitize=address,undefined",
        "-fno-sanitize=null,alignment,object-size,vptr,returns-nonnull-attribute,nonnull-attribute",
        "-fno-sanitize-recover=undefined",
        "-fno-omit-frame-pointer",
    ],
}
WRAPPED = ("aoti_torch_empty_strided", "torch_call_dispatcher")

Edits = Mapping[str, Sequence[tuple[str, str]]]


def on_host(text: str) -> str:
    """Source of CUDA as C++: shared memory is asked for, the rest is done by the headers in include/."""

    def arrays(match: re.Match[str]) -> str:
        kind, names = match.groups()
        found = re.findall(r"(\w+)\[(\w+)\]", names)
        return " ".join(
            f'auto& {name} = ::cuda_on_host::static_shared_array<{kind}, {count}>("{name}");' for name, count in found
        )

    text = re.sub(
        r"extern __shared__ (\w+) (\w+)\[\];",
        r"auto* const \2 = static_cast<\1*>(::cuda_on_host::dynamic_shared());",
        text,
    )
    text = re.sub(r"__shared__ ([^;]+?) (\w+\[\w+\](?:, \w+\[\w+\])*);", arrays, text)
    if "__shared__" in text:
        raise SystemExit(f"cannot read this declaration: {re.findall('.*__shared__.*', text)[0].strip()}")
    return text


def edited(name: str, text: str, edits: Edits) -> str:
    for old, new in edits.get(name, ()):
        if text.count(old) != 1:
            raise ValueError(f"{name} has {text.count(old)} times: {old}")
        text = text.replace(old, new)
    return text


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr[-8000:]}")


def build(kind: str = "races", only: Sequence[str] | None = None, edits: Edits | None = None) -> Path:
    """The library with the CUDA kernels, or of `only` some operators, after textual edits of their sources by name."""
    import torch
    from torch.utils import cpp_extension

    edits = edits or {}
    csrc = ROOT / "csrc"
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(csrc.rglob("*.h"))}
    kernels = [path for path in sorted(csrc.rglob("*.cu")) if not only or path.stem in {*only, "driver"}]
    names = [path.relative_to(ROOT).as_posix() for path in kernels]
    texts.update({name: path.read_text() for name, path in zip(names, kernels, strict=True)})
    for name, text in texts.items():
        texts[name] = on_host(edited(name, text, edits))
    if unknown := set(edits) - set(texts):
        raise ValueError(f"no such sources: {unknown}")
    headers = [path.read_text() for path in sorted(HERE.rglob("*.h"))]
    headers += [text for name, text in texts.items() if name.endswith(".h")]
    machine = [HERE / "machine.cpp", HERE / "torch_calls.cpp"]

    includes = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    common = [kind, version, torch.__version__, *FLAGS, *KINDS[kind], *headers]

    def key(*parts: str) -> str:
        return hashlib.sha256("\0".join([*common, *parts]).encode()).hexdigest()[:16]

    sources = BUILD / key(*texts.values(), *(path.read_text() for path in machine))
    for name, text in texts.items():
        target = sources / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    objects = BUILD / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    jobs: list[tuple[Path, list[str]]] = []
    for path in [*(sources / name for name in names), *machine]:
        is_kernel = path.suffix == ".cu"
        text = path.read_text()
        flags = [*FLAGS, *(KINDS[kind] if is_kernel or kind == "sanitizers" else ["-DCUDA_ON_HOST_RACES"])]
        made = objects / f"{path.stem}-{key(text)}.o"
        if not made.exists():
            command = [COMPILER, *flags, f"-I{HERE / 'include'}", *includes, "-x", "c++", "-c", str(path)]
            jobs.append((made, command))
        else:
            jobs.append((made, []))

    def compiled(job: tuple[Path, list[str]]) -> str:
        made, command = job
        if command:
            part = made.with_suffix(f".{os.getpid()}.part")
            run([*command, "-o", str(part)])
            part.replace(made)
        return str(made)

    library = sources / "libmanualgrad_cpu.so"
    if not library.exists():
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = list(pool.map(compiled, jobs))
        wraps = [f"-Wl,--wrap={name}" for name in WRAPPED]
        torch_libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        sanitize = KINDS[kind] if kind == "sanitizers" else []
        part = library.with_suffix(f".{os.getpid()}.part")
        run([COMPILER, "-shared", *sanitize, "-Wl,-Bsymbolic", *wraps, *made, *torch_libraries, "-ltorch", "-ltorch_cpu",
             "-ldl", "-o", str(part)])  # fmt: skip
        part.replace(library)
    return library


def build_samples(kind: str = "races") -> Path:
    """The library with the kernels of samples.cu, without torch."""
    texts = [path.read_text() for path in sorted(HERE.rglob("*")) if path.suffix in (".h", ".cpp", ".cu")]
    folder = BUILD / hashlib.sha256("\0".join([kind, *FLAGS, *texts]).encode()).hexdigest()[:16]
    library = folder / "libsamples.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "samples.cu"
    source.write_text(on_host((HERE / "samples.cu").read_text()))
    objects = []
    for path in (source, HERE / "machine.cpp"):
        objects.append(str(folder / f"{path.stem}.{os.getpid()}.o"))
        flags = KINDS[kind] if path == source or kind == "sanitizers" else ["-DCUDA_ON_HOST_RACES"]
        run([COMPILER, *FLAGS, *flags, f"-I{HERE / 'include'}", "-x", "c++", "-c", str(path), "-o", objects[-1]])
    part = library.with_suffix(f".{os.getpid()}.part")
    sanitize = KINDS[kind] if kind == "sanitizers" else []
    run([COMPILER, "-shared", *sanitize, "-Wl,-Bsymbolic", *objects, "-ldl", "-o", str(part)])
    part.replace(library)
    return library


if __name__ == "__main__":
    print(build(*sys.argv[1:]))
