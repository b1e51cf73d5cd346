"""A derivative checker: it compares every mode and every transform with finite differences."""

from ..core.rule import Sample
from .audit import AuditReport, Differentiated, audit
from .check import CheckFailed, check
from .checks import ALL_CHECKS, CHECKS
from .composition import Composition, composition
from .modes import MODES
from .numeric import TOLERANCES, Tolerance
from .opinfo import check_op, op_samples
from .report import Report, Result
from .trace_nan import NanReport, Origin, trace_nan

__all__ = [
    "ALL_CHECKS",
    "CHECKS",
    "MODES",
    "TOLERANCES",
    "AuditReport",
    "CheckFailed",
    "Composition",
    "Differentiated",
    "NanReport",
    "Origin",
    "Report",
    "Result",
    "Sample",
    "Tolerance",
    "audit",
    "check",
    "check_op",
    "composition",
    "op_samples",
    "trace_nan",
]
