"""What makes releases: the version and its tag, the checks of a wheel on planted faults, the build without kernels, aarch64."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import torch_manualgrad as mg
from torch_manualgrad.core.versions import UNTRIED, parse

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "tools" / "release").exists():
    pytest.skip("not a source tree", allow_module_level=True)
sys.path.insert(0, str(ROOT / "tools"))

from release import aarch64, attempt, checks, elf, torches, version  # noqa: E402

PACKED = ["setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "csrc", "torch_manualgrad"]
PACKED += ["torch_manualgrad_pytest.py", "torch_manualgrad_cli.py"]
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or shutil.which("nm") is None, reason="needs g++ and nm"
)
needs_zig = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs ziglang")


def run(*command: object, **options: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The sources, with nothing built in them."""
    for name in PACKED:
        source = ROOT / name
        ignore = shutil.ignore_patterns("lib", "__pycache__")
        (shutil.copytree(source, tmp_path / name, ignore=ignore) if source.is_dir() else shutil.copy(source, tmp_path))
    return tmp_path


# -- the version ------------------------------------------------------------------------------------------------------


def test_only_a_clean_checkout_of_its_tag_has_a_plain_version(tmp_path):
    (tmp_path / "pyproject.toml").write_text('version = "0.1.0"\n')
    assert version.label(tmp_path) == ""  # without git, as in a source distribution
    git = ["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e@x"]
    run(*git, "init", "-q")
    run(*git, "add", "-A")
    run(*git, "commit", "-qm", "first")
    assert re.fullmatch(r"\+g[0-9a-f]{8}", version.label(tmp_path))
    run(*git, "tag", "v0.1.0")
    run(*git, "tag", "other")
    assert version.label(tmp_path) == ""
    (tmp_path / "pyproject.toml").write_text('version = "0.1.0"\n\n')
    assert re.fullmatch(r"\+g[0-9a-f]{8}\.changed", version.label(tmp_path))
    (tmp_path / "pyproject.toml").write_text('version = "0.2.0"\n')
    with pytest.raises(SystemExit, match=r"the tag is v0\.1\.0, and pyproject\.toml says 0\.2\.0"):
        version.label(tmp_path)
    assert version.declared(ROOT) == mg.__version__


def test_there_is_a_library_of_calls_for_each_minor():
    minors = [tuple(map(int, release.split(".")[:2])) for release in torches.RELEASES]
    assert minors == [(2, minor) for minor in range(10, 10 + len(minors))] and len(checks.CALLS) == len(minors)
    assert parse(UNTRIED) == (2, 10 + len(minors))
    assert "torch>=2.10" in (ROOT / "pyproject.toml").read_text()


# -- the checks of a wheel --------------------------------------------------------------------------------------------


def library(folder: Path, name: str, code: str) -> Path:
    path = folder / f"libmanualgrad_{name}.so"
    source = folder / f"{name}.cpp"
    source.write_text(code)
    run("g++", "-shared", "-fPIC", source, "-o", path)
    return path


@needs_compiler
def test_faults_of_libraries_are_found(tmp_path, monkeypatch):
    abi = {"aoti_torch_get_dim", "torch_call_dispatcher"}
    known = {torches.RELEASES[0]: abi | {"of_2_10"}}
    monkeypatch.setattr(checks, "stable_abi", lambda: abi)
    monkeypatch.setattr(checks, "names", lambda release: known.get(release, abi | {"of_later"}))
    code = 'extern "C" {{ void aoti_torch_get_dim(); void {0}(); void f() {{ aoti_torch_get_dim(); {0}(); }} }}'

    def faults(name, symbol):
        return list(checks.faults_of_library(name, library(tmp_path, name, code.format(symbol))))

    assert faults("cpu", "torch_call_dispatcher") == faults("cuda", "strlen") == []
    assert faults("cuda", "of_later") == ["cuda: of_later is not in torch's stable ABI"]
    assert "cpu: of_later is not in torch's stable ABI" in faults("cpu", "of_later")
    assert faults("cuda", "PyErr_Print")[0] == "cuda: PyErr_Print is of Python"
    assert faults("calls_2_10", "of_2_10") == faults("calls_2_11", "of_later") == []
    assert faults("calls_2_10", "of_later") == [f"calls_2_10: of_later is not in torch {torches.RELEASES[0]}"]


@needs_compiler
def test_faults_of_wheels_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "faults_of_library", lambda name, path: [])
    one = library(tmp_path, "cpu", "")
    assert "f" not in elf.defined(one)

    def faults(tag, names):
        wheel = tmp_path / f"torch_manualgrad-0.1.0-py3-none-{tag}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in names:
                archive.write(one, f"torch_manualgrad/lib/libmanualgrad_{name}.so")
        return list(checks.faults(wheel))

    every = ["cpu", "cuda", *checks.CALLS]
    assert faults(checks.TAG, every) == []
    assert [fault.split(":")[0] for fault in faults("linux_x86_64", every)] == [f"the tag is not py3-none-{checks.TAG}"]
    assert faults(checks.TAG, every[1:])[0].startswith("the libraries are")
    monkeypatch.setattr(checks, "LARGEST", 1000)
    assert faults(checks.TAG, every)[0].endswith("bytes, 1000 are allowed")


# -- without kernels --------------------------------------------------------------------------------------------------

AS_PLATFORM = """
import runpy, sys
import setuptools.command.bdist_wheel, torch.utils.cpp_extension  # which know the true platform
sys.platform = sys.argv.pop(1)
runpy.run_path("setup.py", run_name="__main__")
"""
WITHOUT_KERNELS = """
import torch, torch_manualgrad as mg
from torch_manualgrad.core import libraries
from torch_manualgrad.core.override import compiled_calls as calls
assert mg.__file__.startswith({folder!r}), mg.__file__
assert not any(library.loaded for library in libraries.status()) and not calls.loaded()
x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
with mg.override():
    (slope,) = torch.autograd.grad(x.norm(), x, create_graph=True)
    assert torch.autograd.grad(slope.sum(), x)[0].eq(0).all()
    A = torch.eye(3, dtype=torch.float64, requires_grad=True)
    assert torch.func.hessian(lambda A: torch.linalg.svdvals(A).sum())(A + torch.diag(torch.arange(3.0))).isfinite().all()
assert torch.func.hessian(mg.linalg.nuclear_norm)(torch.eye(2, dtype=torch.float64)).isfinite().all()
pair = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([3.0, 1.0], dtype=torch.float64)
with mg.override("*"):
    assert mg.testing.check(torch.dist, [pair], modes=("rev", "fwd"), checks=()).ok
"""


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_the_package_is_pure_python_outside_linux(tree, platform):
    """Without a compiler anywhere: the wheel is for any platform, and differentiates."""
    blocked = {**os.environ, "PATH": str(tree / "no"), "CXX": str(tree / "no" / "c++"), "CC": str(tree / "no" / "cc")}
    blocked = {key: value for key, value in blocked.items() if not key.startswith("MANUALGRAD_")}
    said = run(sys.executable, "-c", AS_PLATFORM, platform, "bdist_wheel", cwd=tree, env=blocked)
    assert f"no kernels on {platform}" in said
    (wheel,) = (tree / "dist").glob("*.whl")
    assert wheel.name == f"torch_manualgrad-{mg.__version__}-py3-none-any.whl"
    installed = tree / "installed"
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(installed)
    environment = {**blocked, "PYTHONPATH": str(installed)}
    if platform == "win32":  # once is enough
        run(sys.executable, "-c", WITHOUT_KERNELS.format(folder=str(installed)), cwd=installed, env=environment)


# -- the source distribution ------------------------------------------------------------------------------------------


def test_the_source_distribution_has_what_is_compiled(tree):
    run(
        sys.executable,
        "setup.py",
        "--quiet",
        "sdist",
        "--formats=zip",
        cwd=tree,
        env={**os.environ, "MANUALGRAD_BUILD": "none"},
    )
    (made,) = (tree / "dist").glob("*.zip")
    packed = {name.partition("/")[2] for name in zipfile.ZipFile(made).namelist()}
    wanted = {str(path.relative_to(tree)) for path in tree.glob("csrc/**/*.*")}
    wanted |= {str(path.relative_to(tree)) for path in tree.glob("torch_manualgrad/**/*.py")}
    assert wanted <= packed and {"LICENSE", "pyproject.toml", "torch_manualgrad/py.typed"} <= packed


def test_no_file_of_the_program_is_taken_for_an_installed_package():
    names = sorted({path.stem for path in (ROOT / "tools" / "release").glob("*.py")} - {"__main__"})
    started = f"""
import runpy, sys
from importlib.util import find_spec
sys.path.insert(0, "tools/release")
runpy.run_path("tools/release/__main__.py", run_name="started")
print([name for name in {names} if (found := find_spec(name)) and "tools" in str(found.origin)])
"""
    assert run(sys.executable, "-c", started).strip() == "[]"


# -- aarch64 ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_zig
def test_kernels_compile_for_aarch64(tmp_path):
    """By another compiler, too: clang, with all warnings being errors.

    Unoptimized and without the sanitizer that zig adds then, as code is not run here.
    """
    quick = ["-O0", "-fno-sanitize=undefined", *[flag for flag in aarch64.FLAGS if not flag.startswith("-O")]]
    objects = aarch64.compile_to(tmp_path, aarch64.sources(), quick)
    assert len(objects) > 15 and all(path.read_bytes()[18:20] == b"\xb7\x00" for path in objects)  # EM_AARCH64


@pytest.mark.slow
@needs_zig
@pytest.mark.skipif(aarch64.qemu() is None, reason="needs qemu-aarch64 (Debian's qemu-user-static)")
def test_lanes_on_aarch64_agree_with_single_numbers(tmp_path):
    said = run(aarch64.qemu(), aarch64.compile_program(tmp_path / "lanes"))
    assert re.search(r"aarch64: \d{5} numbers compared, 0 wrong", said)


@pytest.mark.parametrize(
    "options, tests",
    [
        (["--env", "here", "tests/core", "-k", "x"], ["tests/core", "-k", "x"]),
        (["tests/core"], ["tests/core"]),
        ([], []),
    ],
)
def test_the_tests_that_a_wheel_is_tried_with_are_those_that_are_named(options, tests, monkeypatch):
    given = []
    monkeypatch.setattr(attempt, "attempt_with", lambda torch, env, named: given.append((torch, env, list(named))))
    monkeypatch.setattr(sys, "argv", ["release", "try", "2.15.0", *options])
    runpy.run_path(str(ROOT / "tools" / "release"), run_name="__main__")
    assert given == [("2.15.0", Path("here") if options[:1] == ["--env"] else None, tests)]


# of torch, that the library of calls includes: each is in every release from 2.10 on, which only `make wheel` compiles
HEADERS = """
    ATen/NestedTensorImpl.h
    ATen/PythonTorchFunctionTLS.h
    ATen/SavedTensorHooks.h
    ATen/SequenceNumber.h
    ATen/core/LegacyTypeDispatch.h
    ATen/core/dispatch/Dispatcher.h
    ATen/core/enum_tag.h
    ATen/core/ivalue.h
    ATen/core/stack.h
    ATen/functorch/BatchedTensorImpl.h
    ATen/ops/_nested_tensor_from_tensor_list.h
    ATen/ops/_softmax.h
    ATen/ops/_softmax_backward_data.h
    ATen/ops/alias.h
    ATen/ops/all.h
    ATen/ops/cat.h
    ATen/ops/empty_strided.h
    ATen/ops/isclose.h
    ATen/ops/result_type_native.h
    ATen/ops/sum.h
    ATen/ops/zeros.h
    ATen/record_function.h
    c10/core/AutogradState.h
    c10/core/GradMode.h
    c10/core/impl/LocalDispatchKeySet.h
    c10/core/impl/PyInterpreterHooks.h
    c10/core/SafePyObject.h
    c10/core/ScalarType.h
    c10/util/Exception.h
    c10/util/SmallVector.h
    torch/csrc/autograd/VariableTypeUtils.h
    torch/csrc/autograd/edge.h
    torch/csrc/autograd/function.h
    torch/csrc/autograd/functions/utils.h
    torch/csrc/autograd/graph_task.h
    torch/csrc/autograd/saved_variable.h
    torch/csrc/autograd/saved_variable_hooks.h
    torch/csrc/autograd/variable.h
    torch/csrc/dynamo/compiled_autograd.h
    torch/csrc/inductor/aoti_torch/tensor_converter.h
    torch/library.h
"""


def test_the_library_of_calls_includes_what_every_torch_has():
    included = set()
    for path in [*(ROOT / "csrc" / "calls").glob("*.cpp"), *(ROOT / "csrc" / "calls").glob("*.h")]:
        included |= set(re.findall(r"#include <((?:torch|ATen|c10)/[^>]+)>", path.read_text()))
    assert included == set(HEADERS.split()), "run `make wheel`, then change the list"
