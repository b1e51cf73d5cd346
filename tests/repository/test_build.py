"""What the built libraries promise: torch's stable ABI and no Python, one wheel for every Python, clear failures."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from torch_manualgrad.core import libraries

ROOT = Path(__file__).resolve().parents[2]
BUILT = [library.path for library in libraries.load() if library.path is not None]
SOURCES = ["setup.py", "pyproject.toml", "csrc", "torch_manualgrad", "torch_manualgrad_pytest.py"]


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.parametrize("path", BUILT, ids=lambda path: path.stem)
def test_only_the_stable_abi_is_used(path):
    table = subprocess.run(["nm", "-D", str(path)], check=True, capture_output=True, text=True).stdout
    undefined = {line.split()[-1] for line in table.splitlines() if " U " in line or " w " in line}
    defined = {line.split()[-1] for line in table.splitlines() if " T " in line}
    assert any(name.startswith(("aoti_torch_", "torch_")) for name in undefined)
    python = {name for name in undefined | defined if re.match(r"_?Py[A-Z_]", name)}
    # Mangled names in torch's C++ namespaces, which change from release to release.
    unstable = {name for name in undefined if re.match(r"_ZNK?\d*(2at|3c10|5torch)|_ZN?K?(2at|3c10|5torch)", name)}
    assert not python and not unstable


@pytest.mark.skipif(not BUILT, reason="not built")
def test_loads_into_a_bare_torch():
    """The library finds torch by itself: registered before its schema, and with nothing of the package imported."""
    code = (
        f"import torch; torch.ops.load_library({str(BUILT[0])!r})\n"
        "library = torch.library.Library('manualgrad', 'FRAGMENT')\n"
        "library.define('norm_backward(Tensor grad, Tensor self, float p, Tensor norm, int[]? dim=None, "
        "bool keepdim=True) -> Tensor')\n"
        "one = torch.ones(()); print(torch.ops.manualgrad.norm_backward(one, torch.ones(4), 1.0, one, None, False))"
    )
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd="/")
    assert run.returncode == 0, run.stderr
    assert "tensor([1., 1., 1., 1.])" in run.stdout


def test_a_broken_library_is_accounted_for(tmp_path, monkeypatch):
    broken = tmp_path / "libmanualgrad_cpu.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(libraries, "_FOLDER", tmp_path)
    library = libraries._load("cpu")
    assert not library.loaded and library.path == broken and "libmanualgrad_cpu.so" in library.reason
    broken.unlink()
    library = libraries._load("cpu")
    assert not library.loaded and library.path is None and library.reason.startswith("not built")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources with nothing built in it."""
    for name in SOURCES:
        source = ROOT / name
        if not source.exists():
            pytest.skip("not a source tree")
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("lib", "__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


def setup(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MANUALGRAD_")}
    command = [sys.executable, "setup.py", *arguments]
    environment = {**inherited, **environment}
    return subprocess.run(command, check=False, cwd=tree, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_wheel_without_kernels_is_for_any_platform(tree):
    run = setup(tree, "bdist_wheel", MANUALGRAD_BUILD="none")
    assert run.returncode == 0, run.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith(".so")] and "torch_manualgrad_pytest.py" in names


@pytest.mark.slow
@pytest.mark.skipif(not BUILT, reason="no compiler, or the build is switched off")
def test_wheel_with_kernels_is_for_any_python(tree):
    run = setup(tree, "bdist_wheel", MANUALGRAD_CUDA="0")
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    assert re.search(r"-py3-none-(?!any)\w+\.whl$", wheel.name), wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    release = "_".join(torch.__version__.split(".")[:2])
    built = {f"torch_manualgrad/lib/libmanualgrad_{name}.so" for name in ("cpu", f"calls_{release}")}
    assert {name for name in names if name.endswith(".so")} == built


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment, message",
    [
        ({"MANUALGRAD_BUILD": "some"}, "MANUALGRAD_BUILD must be unset or 'none', got 'some'"),
        ({"MANUALGRAD_CUDA": "yes"}, "MANUALGRAD_CUDA must be 0 or 1, got 'yes'"),
        ({"MANUALGRAD_CUDA": "0", "CXX": "no-such-compiler"}, "no C++ compiler: 'no-such-compiler' is not on PATH"),
    ],
)
def test_a_failed_build_says_what_is_missing(tree, environment, message):
    run = setup(tree, "build_ext", "--inplace", **environment)
    assert run.returncode != 0
    assert message in run.stderr and "MANUALGRAD_BUILD=none" in run.stderr


@pytest.mark.slow
def test_a_build_without_torch_says_so(tree):
    (tree / "hidden").mkdir()
    (tree / "hidden" / "torch.py").write_text("raise ImportError('No module named torch')")
    run = setup(tree, "build_ext", "--inplace", MANUALGRAD_CUDA="0", PYTHONPATH=str(tree / "hidden"))
    assert run.returncode != 0
    assert "torch is required to build" in run.stderr and "pip install --no-build-isolation" in run.stderr


def test_target_version_is_the_oldest_supported():
    text = (ROOT / "setup.py").read_text() if (ROOT / "setup.py").exists() else ""
    if not text:
        pytest.skip("not a source tree")
    assert 'TARGET_VERSION = "0x020a000000000000"' in text
    assert tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)
