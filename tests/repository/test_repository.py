"""The rules of the house, checked on the sources; CONTRIBUTING.md says why they are there."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.utils._device

import torch_manualgrad as mg

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torch_manualgrad"
INTERNALS = {*(PACKAGE / "core" / "internals").glob("*.py"), PACKAGE / "testing" / "database" / "opinfo.py"}

if not (ROOT / "pyproject.toml").exists():
    pytest.skip("not a source tree", allow_module_level=True)


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if "build" not in path.relative_to(ROOT).parts]


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


# -- what git tracks ---------------------------------------------------------------------------------------------------


def test_tracked_files_are_text():
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    files = [ROOT / name for name in listed.split("\0") if name]
    assert not [ids(path) for path in files if path.is_file() and b"\0" in path.read_bytes()]


# -- private names of torch -------------------------------------------------------------------------------------------


def private_torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every import of, and every attribute access to, a private name of torch.

    Operators are exempt: ``torch.ops.aten._cdist_forward`` is a name in a schema.
    """
    roots: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    roots.add(alias.asname or "torch")
                    if any(map(is_private, alias.name.split("."))):
                        yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                roots.add(alias.asname or alias.name)
                name = f"{node.module}.{alias.name}"
                if any(map(is_private, name.split("."))):
                    yield node.lineno, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            chain, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                chain.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in roots and "ops" not in chain:
                yield node.lineno, ".".join([inner.id, *reversed(chain)])


@pytest.mark.parametrize("path", sources("torch_manualgrad", "examples", "benchmarks", "tools"), ids=ids)
def test_private_torch_names_are_in_one_file(path):
    found = [f"{ids(path)}:{line}: {name}" for line, name in private_torch_names(ast.parse(path.read_text()))]
    if path in INTERNALS:
        return
    assert not found, f"use, or add, a name in core/internals: {found}"


@pytest.mark.parametrize(
    "code, found",
    [
        ("import torch\ntorch._C.f()", ["torch._C"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("import torch.autograd.forward_ad as f\nf._current_level", ["f._current_level"]),
        ("from torch.utils import _pytree", ["torch.utils._pytree"]),
        ("from torch._functorch import x", ["torch._functorch.x"]),
        ("from torch import Tensor\nTensor._make", ["Tensor._make"]),
        ("import torch\ntorch.ops.aten._softmax(x); torch.nn.__name__; x._own; torch.sum(x)._base", []),
    ],
)
def test_that_lint_finds(code, found):
    assert [name for _, name in private_torch_names(ast.parse(code))] == found


# -- the tree ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sources("torch_manualgrad/core"), ids=ids)
def test_an_import_inside_of_a_function_says_why(path):
    lines = path.read_text().splitlines()
    for function in [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]:
        inside = [n.lineno for n in ast.walk(function) if isinstance(n, (ast.Import, ast.ImportFrom))]
        assert not inside or "#" in lines[inside[0] - 1] + lines[inside[0] - 2], f"{ids(path)}:{inside[0]}"


def saved_tensors_without_node(tree: ast.AST) -> Iterator[int]:
    """Lines that read ``_raw_saved_*`` of a node that nothing keeps alive, as of ``f(x).grad_fn``.

    PyTorch's object for a saved tensor does not keep its node (pytorch/pytorch#63624): what is read of it then is freed
    memory. The garbage collector crashes on such a tensor, much later.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_raw_saved_"):
            if any(isinstance(inner, ast.Call) for inner in ast.walk(node.value)):
                yield node.lineno


@pytest.mark.parametrize("path", sources("torch_manualgrad", "tests", "benchmarks", "examples"), ids=ids)
def test_saved_tensors_are_read_while_a_variable_keeps_their_node(path):
    assert not list(saved_tensors_without_node(ast.parse(path.read_text())))


def test_a_saved_tensor_without_its_node_is_found():
    source = "y = f(x)\ny.grad_fn._raw_saved_self.data\nf(x).grad_fn._raw_saved_self.data\nf(x).grad_fn._saved_self"
    assert list(saved_tensors_without_node(ast.parse(source))) == [3]


def test_the_tree_can_be_drawn_and_every_file_says_what_it_is():
    drawn = subprocess.run(
        [sys.executable, ROOT / "tools" / "layout.py"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    print("\n".join(drawn))
    assert drawn[0].startswith("torch_manualgrad/") and "csrc/" in drawn
    silent = [line.strip() for line in drawn if len(line.split()) == 1 and not line.endswith("/")]
    assert not silent


KERNELS = [path for pattern in ("*.h", "*.cpp", "*.cu") for path in sorted((ROOT / "csrc").rglob(pattern))]


@pytest.mark.parametrize("path", KERNELS, ids=ids)
def test_kernels_use_the_stable_abi_only(path):
    includes = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', path.read_text(), re.MULTILINE)
    stable = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/")
    refused = re.compile(r"(ATen|c10|caffe2|torch|pybind11)/|Python\.h")
    if path.parent.name == "calls":  # built for the torch at hand, and for every Python
        refused = re.compile(r"(torch/csrc/api|torch/csrc/utils|pybind11)/|(torch/extension|Python)\.h")
        if path.name == "block.cpp":  # Python's stable ABI, which is one for every Python too
            assert re.search(r"#define Py_LIMITED_API 0x030A0000.*\n#include <Python\.h>", path.read_text())
            includes.remove("Python.h")
    found = [name for name in includes if refused.match(name) and not name.startswith(stable)]
    assert not found
    if path.parent.name == "math":  # the arithmetic knows no tensor at all
        assert not [name for name in includes if name.startswith("torch/")]


@pytest.mark.parametrize("path", sources("torch_manualgrad"), ids=ids)
def test_autograd_functions_are_built_in_the_engine(path):
    bases = [b for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef) for b in n.bases]
    found = [ast.unparse(b) for b in bases if ast.unparse(b).endswith(("autograd.Function", "SingleLevelFunction"))]
    assert not found or path.parts[-2:] in [("engine", "node.py"), ("internals", "functorch.py")]


# -- tests, names, docstrings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sources("tests"), ids=ids)
def test_no_test_shadows_another(path):
    for scope in ast.walk(ast.parse(path.read_text())):
        if isinstance(scope, (ast.Module, ast.ClassDef)):
            names = Counter(n.name for n in scope.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)))
            assert not [name for name, count in names.items() if count > 1 and name != "_"]


def test_no_two_test_files_have_one_name():
    """pytest imports them by their base names: of two it collects only the first, and says of the other that it cannot."""
    names = Counter(path.name for path in sources("tests") if path.name.startswith("test_"))
    assert not [name for name, count in names.items() if count > 1]


def public_names() -> Iterator[tuple[str, object]]:
    for module in (mg, mg.testing, mg.forward_ad):
        for name in module.__all__:
            yield f"{module.__name__}.{name}", getattr(module, name)


def test_all_is_what_exists():
    for module in (mg, mg.testing, mg.forward_ad):
        assert len(set(module.__all__)) == len(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("name, thing", list(public_names()), ids=lambda x: x if isinstance(x, str) else "")
def test_public_names_have_docstrings(name, thing):
    if not (inspect.isroutine(thing) or inspect.isclass(thing) or inspect.ismodule(thing)):
        return
    assert inspect.getdoc(thing), name
    if inspect.isclass(thing):
        own = [(n, m) for n, m in vars(thing).items() if inspect.isfunction(m) and not n.startswith("_")]
        inherited = {n for base in thing.__mro__[1:] for n in vars(base)}
        missing = [n for n, m in own if not m.__doc__ and n not in inherited]
        assert not missing, f"{name}: {missing}"


@pytest.mark.parametrize("path", sources("torch_manualgrad"), ids=ids)
def test_modules_have_docstrings(path):
    assert ast.get_docstring(ast.parse(path.read_text())) or not path.read_text().strip()


def test_the_version_is_the_same_everywhere():
    declared = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared and declared[1] == mg.__version__
    assert f"## [{mg.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_torch_is_pinned():
    assert re.search(r"^torch==\d+\.\d+\.\d+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


# -- the default device -----------------------------------------------------------------------------------------------


def constructors_without_device(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every call that makes a tensor on the default device, which is not where the arguments are."""
    names = {function.__name__ for function in torch.utils._device._device_constructors()}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names):
            continue
        of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        if of_torch and not any(k.arg in ("device", None) for k in node.keywords):
            yield node.lineno, node.func.attr


@pytest.mark.parametrize("path", sources("torch_manualgrad"), ids=ids)
def test_every_new_tensor_says_where_it_is(path):
    assert not list(constructors_without_device(ast.parse(path.read_text())))


def test_a_tensor_without_a_device_is_found():
    source = (
        "torch.zeros(3)\ntorch.zeros(3, device=x.device)\ntorch.zeros(3, **kind)\nx.new_zeros(3)\ntorch.tensor([1])"
    )
    assert list(constructors_without_device(ast.parse(source))) == [(1, "zeros"), (5, "tensor")]
