"""The vocabulary for writing derivatives: formulas, rules and their parts."""

from ..engine.sharding import is_sharded
from ..internals import tangents_possible
from ..libraries import refuse_recording
from ..sample import Sample
from ..schema import blocksize
from ..versions import reached
from .declare import Ratio, elementwise, linear_in, rule
from .definition import (
    IMPROVEMENTS,
    ButManySmall,
    ByMetadata,
    CompiledVjp,
    Formulas,
    FromResult,
    Rule,
    always,
    check_functional,
    exists,
    operator,
    primal_for,
    real,
    rules,
    where_finite,
)
from .formulas import (
    ArgumentBinding,
    Formula,
    Kernel,
    bind,
    bound_to,
    formula,
    known_finite,
    meets_nothing,
    ops,
    parameters,
    readable,
)
from .recomputable import Argument, Recomputable, recomputables
from .samples import Interval, Sampler, probe_for, samples_for, samples_in

__all__ = [
    "IMPROVEMENTS",
    "Argument",
    "ArgumentBinding",
    "ButManySmall",
    "ByMetadata",
    "CompiledVjp",
    "Formula",
    "Formulas",
    "FromResult",
    "Interval",
    "Kernel",
    "Ratio",
    "Recomputable",
    "Rule",
    "Sample",
    "Sampler",
    "always",
    "bind",
    "blocksize",
    "bound_to",
    "check_functional",
    "elementwise",
    "exists",
    "formula",
    "is_sharded",
    "known_finite",
    "linear_in",
    "meets_nothing",
    "operator",
    "ops",
    "parameters",
    "primal_for",
    "probe_for",
    "reached",
    "readable",
    "real",
    "recomputables",
    "refuse_recording",
    "rule",
    "rules",
    "samples_for",
    "samples_in",
    "tangents_possible",
    "where_finite",
]
