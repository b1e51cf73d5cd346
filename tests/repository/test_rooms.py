"""Which part of the package may import which. Imports for types count, and so do those inside of functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torch_manualgrad"

if not (ROOT / "pyproject.toml").exists():
    pytest.skip("not a source tree", allow_module_level=True)

# Each room, and the rooms that it may import from. "core" means the files in core/ itself, "." those of the package.
ALLOWED = {
    "arguments": "",
    "core/internals": "",
    "core": "arguments core/internals",
    "core/engine": "arguments core core/internals",
    "core/op": "arguments core core/internals core/engine",
    "core/rule": "core core/internals core/engine core/op",
    "core/override": "core core/internals core/engine core/op core/rule",
    "derivatives": "core core/engine core/rule",
    "derivatives/samples": "core core/rule derivatives",
    "primal": "core core/internals core/rule derivatives",
    "linalg": "arguments core/internals core/op derivatives primal",
    "nested": "arguments core/internals core/engine core/rule core/override",
    "distributed": "core core/internals core/engine core/rule",
    "programs": "core core/internals core/engine",
    "implicit": "arguments core core/internals core/override linalg programs",
    "custom_rules": "arguments core core/internals programs",
    "checkpointing": "arguments core core/internals core/op programs custom_rules",
    "attention": "arguments core core/internals checkpointing",
    "sparsity": "arguments core/internals core/engine core/override",
    "compiling": "core core/internals core/engine core/override core/rule custom_rules",
    "testing/numerics": "",
    "testing/inputs": "arguments core/internals core/rule",
    "testing/comparison": "core/internals core/rule testing/numerics testing/inputs",
    "testing/checks": "compiling core/internals core/rule core/override testing/numerics testing/inputs testing/comparison",
    "testing/diagnosis": "core/rule testing/numerics testing/inputs testing/comparison testing/checks",
    "testing/checking": "arguments core/rule core/override "
    "testing/numerics testing/inputs testing/comparison testing/checks testing/diagnosis",
    "testing/tracing": "arguments core/internals core/rule core/override testing/inputs testing/comparison",
    "testing/database": "arguments core/internals core/rule core/override "
    "testing/inputs testing/comparison testing/checks testing/checking",
    "testing": "core/rule testing/numerics testing/comparison testing/checks testing/checking testing/tracing testing/database",
    "forward_ad/jets": "arguments core core/internals core/op core/rule core/override",
    "forward_ad/levels": "arguments core core/internals core/engine core/op core/rule core/override forward_ad/jets",
    "forward_ad/decomposition": "arguments core core/internals core/op core/rule core/override derivatives testing/database",
    "forward_ad": "forward_ad/jets forward_ad/levels forward_ad/decomposition",
    "command_line": ". compiling core core/rule core/override testing testing/inputs testing/comparison testing/checks testing/database",
    "typed_ops": "core/rule",
    ".": "core core/engine core/op core/rule core/override derivatives linalg nested distributed implicit sparsity custom_rules checkpointing attention compiling testing forward_ad typed_ops",
}


def files() -> dict[str, Path]:
    """The modules of the package, by their names."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


FILES = files()


@cache
def imported(module: str) -> frozenset[str]:
    """The modules of the package that a module imports, anywhere in it."""
    path = FILES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, (start, node.module)))
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in FILES else base for a in node.names}
    return frozenset(found & FILES.keys()) - {module}


def room(module: str) -> str:
    """The key of ``ALLOWED`` that a module is in."""
    parts = module.split(".")[1:]
    if parts[:1] in (["core"], ["derivatives"], ["forward_ad"], ["testing"]):
        inner = "/".join(parts[:2])
        return inner if inner in ALLOWED else parts[0]
    return "." if parts in ([], ["__main__"]) else parts[0]


def circle(modules: list[str]) -> list[str]:
    """Modules that import each other in a circle; none if there are none."""
    above: list[str] = []
    done: set[str] = set()

    def visit(module: str) -> list[str]:
        if module in above:
            return [*above[above.index(module) :], module]
        if module not in done:
            above.append(module)
            for other in sorted(imported(module)):
                if found := visit(other):
                    return found
            done.add(above.pop())
        return []

    return next((found for module in modules if (found := visit(module))), [])


def forbidden(module: str) -> Iterator[str]:
    here = room(module)
    for other in sorted(imported(module)):
        if room(other) not in (here, *ALLOWED[here].split()):
            yield f"{module} -> {other}"


@pytest.mark.parametrize("name", ALLOWED)
def test_a_room_imports_from_the_rooms_below_it(name):
    inside = [module for module in FILES if room(module) == name]
    assert inside
    found = [line for module in inside for line in forbidden(module)]
    assert not found, f"{name} may import from {ALLOWED[name] or 'nothing'} only (ALLOWED in this file): {found}"


def test_every_module_is_in_a_room():
    assert {room(module) for module in FILES} <= ALLOWED.keys()


def test_rooms_form_no_circle():
    above: dict[str, set[str]] = {name: set(allowed.split()) for name, allowed in ALLOWED.items()}
    while free := [name for name, below in above.items() if not below & above.keys()]:
        for name in free:
            del above[name]
    assert not above


def test_no_files_import_each_other_in_a_circle():
    found = circle(sorted(FILES))
    assert not found, f"these import each other: {' -> '.join(found)}"


def test_the_lint_sees_types_functions_and_circles(tmp_path, monkeypatch):
    made = {}
    for name, text in {
        "torch_manualgrad.core.engine.a": "if TYPE_CHECKING:\n    from ..rule import b\n",
        "torch_manualgrad.core.rule.b": "def f():\n    from ..engine.a import f  # why\n",
    }.items():
        made[name] = tmp_path / f"{name}.py"
        made[name].write_text(text)
    monkeypatch.setitem(globals(), "FILES", made)
    imported.cache_clear()
    first, second = made
    assert list(forbidden(first)) == [f"{first} -> {second}"] and not list(forbidden(second))
    assert circle([first]) == [first, second, first]
    imported.cache_clear()
