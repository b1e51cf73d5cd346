"""No formula is only written down: a rule or a public function reaches each, or a test calls it."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import torch_manualgrad as mg
from torch_manualgrad.core.op.custom_op import CustomOp
from torch_manualgrad.core.rule import Formula, Rule, reached as torch_reached
from torch_manualgrad.core.rule.formulas import called_formulas

TESTS = Path(__file__).resolve().parents[1]


def modules(*packages: Any) -> Iterator[Any]:
    for package in packages:
        yield package
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(found.name)


def rules_of(value: Any) -> Iterator[Rule]:
    """Rules that a module holds, registered on this machine or not."""
    if isinstance(value, Rule):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from rules_of(item)


def all_rules() -> set[Rule]:
    found = {rule for module in modules(mg.derivatives) for value in vars(module).values() for rule in rules_of(value)}
    return found | {*mg.rules.values()}


def functions_of(op: CustomOp) -> list[Callable[..., Any]]:
    """What runs when the op is called or differentiated."""
    parts = [op, *getattr(op, "overloads", {}).values()]
    return [op.reference, *(i.function for part in parts for i in part._current.values())]


def reached(functions: Iterable[Callable[..., Any] | None]) -> set[Formula]:
    """All formulas that functions call, directly or through other formulas."""
    found = {*called_formulas(functions)}
    waiting = [*found]
    while waiting:
        new = {*called_formulas(functions_of(waiting.pop()))} - found
        found |= new
        waiting += new
    return found


@pytest.mark.skipif(not torch_reached("2.13"), reason="formulas of operators that this torch lacks")
def test_each_formula_is_reached_by_a_rule_or_called_by_a_test():
    functions = [f for rule in all_rules() for f in (*rule.vjp.values(), *rule.jvp.values(), rule.forward)]
    functions += [rule.compiled_vjp.operator for rule in all_rules() if rule.compiled_vjp is not None]
    functions += [f for m in modules(mg.linalg, mg.nested) for f in vars(m).values() if callable(f)]
    own = re.compile(r"\b(\w+)(?:\.run)?\(")
    called = {name for path in TESTS.rglob("*.py") for name in own.findall(path.read_text())}
    rest = {*mg.ops.values()} - reached(functions)
    assert not sorted(f.__name__ for f in rest if f.__name__ not in called)


def test_called_formulas_follows_functions_tables_and_closures():
    norm, lu = mg.ops.norm_backward, mg.ops.linalg_lu_backward
    assert called_formulas([norm]) == (norm,)
    assert called_formulas([norm.bind(p=2.0), None]) == (norm,)
    assert called_formulas([_calls_lu]) == (lu,)
    assert called_formulas([lambda grad: [_calls_lu(g) for g in grad]]) == (lu,)
    assert called_formulas([lambda grad: norm(grad)]) == (norm,)  # a closure
    assert called_formulas([lambda grad: _TABLE["lu"](grad)]) == (lu,)
    assert called_formulas([partial(_applied, norm), _default]) == (norm, lu)
    assert called_formulas([len, lambda grad: grad]) == ()


_lu = mg.ops.linalg_lu_backward


def _calls_lu(grad: Any) -> Any:
    return _lu(grad)


def _applied(function: Any, grad: Any) -> Any:
    return function(grad)


def _default(grad: Any, formula: Any = _lu) -> Any:
    return formula(grad)


_TABLE = {"lu": _lu}
