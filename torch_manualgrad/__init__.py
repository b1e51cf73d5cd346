"""PyTorch's hand-written derivatives as operators that can be read, called, swapped and differentiated again."""

# isort: skip_file
from .core.once import refuse_reload as _refuse_reload  # first: nothing is to be defined twice
from .core import libraries as _libraries
from . import derivatives, distributed, forward_ad, linalg, nested, testing
from .core.engine.node import SingleLevelFunction
from .core.op.custom_op import CustomOp, custom_op
from .core.op.implementation import BackwardContext
from .core.rule.catalogue import catalogue, composite, gap, nondifferentiable, view
from .core.override.override import Active, Handle, active, install, override, uninstall, unregister
from .core.rule import Formula, Kernel, Rule, Sample, elementwise, formula, linear_in, ops, rule, rules
from .linalg import Degeneracy
from .testing import audit

__all__ = [
    "Active",
    "BackwardContext",
    "CustomOp",
    "Degeneracy",
    "Formula",
    "Handle",
    "Kernel",
    "Rule",
    "Sample",
    "SingleLevelFunction",
    "active",
    "audit",
    "catalogue",
    "composite",
    "custom_op",
    "derivatives",
    "distributed",
    "elementwise",
    "formula",
    "forward_ad",
    "gap",
    "install",
    "linalg",
    "linear_in",
    "nested",
    "nondifferentiable",
    "ops",
    "override",
    "rule",
    "rules",
    "testing",
    "uninstall",
    "unregister",
    "view",
]
__version__ = "0.1.0"
_refuse_reload(globals())
_libraries.load()
