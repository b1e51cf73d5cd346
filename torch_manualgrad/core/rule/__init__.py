"""The vocabulary in which derivatives are written: formulas, rules, and what rules are made of."""

from ..engine.sharding import is_sharded
from ..sample import Sample
from ..schema import blocksize
from ..versions import reached
from .declare import Interval, Ratio, elementwise, linear_in, rule
from .definition import (
    IMPROVEMENTS,
    ButManySmall,
    CompiledVjp,
    Formulas,
    FromResult,
    Rule,
    always,
    check_functional,
    exists,
    operator,
    real,
    rules,
    where_finite,
)
from .formulas import Formula, Kernel, bound_to, formula, known_finite, ops, parameters, readable

__all__ = [
    "IMPROVEMENTS",
    "ButManySmall",
    "CompiledVjp",
    "Formula",
    "Formulas",
    "FromResult",
    "Interval",
    "Kernel",
    "Ratio",
    "Rule",
    "Sample",
    "always",
    "blocksize",
    "bound_to",
    "check_functional",
    "elementwise",
    "exists",
    "formula",
    "is_sharded",
    "known_finite",
    "linear_in",
    "operator",
    "ops",
    "parameters",
    "reached",
    "readable",
    "real",
    "rule",
    "rules",
    "where_finite",
]
