"""PyTorch's hand-written derivatives as operators that can be read, called, swapped and differentiated again."""

# isort: skip_file
from .core.once import refuse_reload as _refuse_reload  # first: nothing is to be defined twice
from .core import kernels as _kernels
from . import derivatives, distributed, forward_ad, linalg, nested, testing
from .core.autograd_function import SingleLevelFunction
from .core.custom_op import custom_op
from .core.op import BackwardContext, CustomOp
from .core.catalogue import catalogue, composite, gap, nondifferentiable, view
from .core.elementwise import elementwise
from .core.formula import Formula, Kernel, formula, ops
from .core.linear import linear_in
from .core.override import Active, Handle, active, install, override, uninstall, unregister
from .core.rule import Rule, rule, rules
from .core.sample import Sample
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
_kernels.load()
