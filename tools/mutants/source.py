"""The modules of formulas as text: one with a node of its syntax tree changed, executed, gives other rules."""

from __future__ import annotations

import ast
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch_manualgrad.derivatives
from torch_manualgrad.core.rule import Formula, Rule, elementwise, linear_in, rule

from . import helpers

ROOT = Path(torch_manualgrad.derivatives.__file__).parent
# arguments of a rule that are not its mathematics
ABOUT = {"samples", "probe", "defer_to_stock", "forward", "domain", "arguments", "compiled_vjp", "from_result"}
# registers something else than rules, once
REGISTERS = {"gap", "composite", "view", "nondifferentiable", "CompiledVjp"}


class PlainFormula(Formula):
    """A formula that is its body, and no operator: without kernels, so that a change in the body acts on every call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.reference = self.run = self._run = self.__wrapped__ = function
        self.__name__, self.name, self.in_python = function.__name__, f"mutants::{function.__name__}", False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reference(*args, **kwargs)

    def _put(self, kind: str, function: Callable[..., Any], marks: Any = None) -> Any:
        return function

    def __repr__(self) -> str:  # unlike any other, as it is in the keys of compiled graphs
        return f"<PlainFormula {self.name} at {id(self):#x}>"


def _formula(function: Callable[..., Any] | None = None, **about: Any) -> Any:
    return PlainFormula if function is None else PlainFormula(function)


@dataclass(frozen=True)
class Site:
    """A node of a module's mathematics: the statement at the top level, and the place in a walk over it."""

    statement: int
    place: int
    node: ast.AST


@dataclass(frozen=True)
class Source:
    """One module of formulas and rules."""

    path: Path
    tree: ast.Module

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT).with_suffix(""))

    @property
    def family(self) -> str:
        return self.name.partition("/")[0]

    @functools.cached_property
    def sites(self) -> tuple[Site, ...]:
        """Every node of every formula that a rule refers to: of functions, and of lambdas in calls that make rules."""
        found = []
        for position in sorted(self.seen_by):
            statement = self.tree.body[position]
            allowed = {id(n) for part in _mathematics(statement) for n in ast.walk(part)}
            walk = enumerate(ast.walk(statement)) if allowed else ()
            found += [Site(position, place, node) for place, node in walk if id(node) in allowed]
        return tuple(found)

    def changed(self, site: Site, node: ast.AST, name: str) -> Rule:
        """The rule of this name with this node at that site."""
        body = list(self.tree.body)
        statement = copy.deepcopy(body[site.statement])
        target = list(ast.walk(statement))[site.place]
        body[site.statement] = _Replace(target, node).visit(statement)
        return self._execute(ast.Module(body, []))[name][0]

    @functools.cached_property
    def seen_by(self) -> dict[int, list[str]]:
        """Statement -> the rules that refer to it, directly or through others."""
        found: dict[int, list[str]] = {}
        for name, (_, line) in self._execute(self.tree).items():
            for statement in self._seen_from(line):
                found.setdefault(statement, []).append(name)
        return found

    def _execute(self, tree: ast.Module) -> dict[str, tuple[Rule, int]]:
        made: dict[str, tuple[Rule, int]] = {}

        def collected(make: Callable[..., Any]) -> Callable[..., Any]:
            def collect(name: str, *args: Any, **about: Any) -> Any:
                about = {k: v for k, v in about.items() if k not in ("register", "compiled_vjp")}
                frame = sys._getframe(1)
                while frame.f_code.co_name != "<module>" and frame.f_back is not None:
                    frame = frame.f_back
                result = make(name, *args, register=False, **about)
                if result is not None:
                    made[result.name] = result, frame.f_lineno
                return result

            return collect

        own = {f.__name__: collected(f) for f in (rule, elementwise, linear_in)}
        own |= dict.fromkeys(REGISTERS, lambda *a, **k: None) | {"formula": _formula, "helpers": helpers}
        module = "torch_manualgrad.derivatives." + self.name.replace("/", ".")
        space = {"__name__": module, "__package__": module.rpartition(".")[0], "__file__": str(self.path), **own}
        stripped = ast.fix_missing_locations(_WithoutImports(set(own)).visit(copy.deepcopy(tree)))
        exec(compile(stripped, str(self.path), "exec"), space)
        return made

    def _seen_from(self, line: int) -> set[int]:
        """The statements that the one at this line refers to, directly or through others, and itself."""
        defined = {n: i for i, s in enumerate(self.tree.body) for n in _defines(s)}
        todo = [i for i, s in enumerate(self.tree.body) if s.lineno <= line <= (s.end_lineno or s.lineno)]
        seen = set(todo)
        while todo:
            names = {n.id for n in ast.walk(self.tree.body[todo.pop()]) if isinstance(n, ast.Name)}
            todo += (new := {defined[n] for n in names if n in defined} - seen)
            seen |= new
        return seen


@functools.cache
def sources() -> tuple[Source, ...]:
    """The modules that can be executed by themselves."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        source = Source(path, ast.parse(path.read_text()))
        try:
            if source.seen_by:
                found.append(source)
        except Exception:  # one that is made together with others
            continue
    return tuple(found)


def _defines(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]


def _mathematics(statement: ast.stmt) -> Iterator[ast.AST]:
    """The parts of a statement that compute derivatives."""
    if isinstance(statement, ast.FunctionDef):
        if "samples" not in statement.name and "sample" not in ast.unparse(statement.args):
            yield from statement.body[1:] if ast.get_docstring(statement) else statement.body
    elif isinstance(statement, (ast.Expr, ast.For)):
        todo: list[ast.AST] = [statement]
        while todo:
            node = todo.pop()
            if isinstance(node, ast.Lambda):
                yield node
            elif not (isinstance(node, ast.keyword) and node.arg in ABOUT):
                todo += ast.iter_child_nodes(node)


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.AST, node: ast.AST) -> None:
        self.target, self.node = target, node

    def visit(self, node: ast.AST) -> Any:
        return ast.copy_location(self.node, node) if node is self.target else self.generic_visit(node)


class _WithoutImports(ast.NodeTransformer):
    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        node.names = [a for a in node.names if a.name not in self.names]
        return node if node.names else None
