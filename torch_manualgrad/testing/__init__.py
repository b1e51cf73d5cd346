"""A derivative checker: it compares every mode and every transform with finite differences."""

from ..core.rule import Sample
from .checking.check import CheckFailed, check
from .checking.composition import Composition, composition
from .checks.table import ALL_CHECKS, CHECKS
from .comparison.modes import MODES
from .comparison.report import Report, Result
from .database.opinfo import check_op, op_samples
from .numerics.finite_differences import TOLERANCES, Tolerance
from .tracing.audit import AuditReport, Differentiated, audit
from .tracing.trace_nan import NanReport, Origin, trace_nan

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
