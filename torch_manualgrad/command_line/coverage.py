"""`coverage` and `conformance`: PyTorch's table of derivatives and its operator database, compared with ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.rule import rules
from ..core.rule.catalogue import KINDS, catalogue
from ..testing.database import conformance as measurements, derivatives_yaml
from ..testing.database.opinfo import op_db
from .answer import Answer, Fields, Lines, Part, Table
from .targets import Unknown

__all__ = ["conformance", "coverage"]

# Kinds of entries in addition to those of the catalogue.
RULE_KINDS = ("rule", "elementwise", "linear")
NOTHING = "nothing"


def coverage(kind: str | None) -> Answer:
    """Each entry of derivatives.yaml; status 1 if one is in neither the rules nor the catalogue."""
    if not derivatives_yaml.PATH.exists():
        raise Unknown(f"this torch comes without its table of derivatives, {derivatives_yaml.PATH}")
    known = [*RULE_KINDS, *KINDS, "absent", NOTHING]
    if kind is not None and kind not in known:
        raise Unknown(f"there is no kind {kind!r}; expected one of {', '.join(known)}")
    entries = derivatives_yaml.entries()
    kinds = [entry.kind or NOTHING for entry in entries]
    lines = [[e.name, k, _why(e)] for e, k in zip(entries, kinds, strict=True) if kind in (None, k)]
    sums = [(f"{len(entries)} entries", f"of PyTorch's table of derivatives, torch {torch.__version__}")]
    sums += [(k, str(kinds.count(k))) for k in known if k in kinds]
    parts: list[Part] = [Table("entries", ["operator", "kind", "why"], lines), Fields("sums", sums)]
    return Answer(parts, 1 if NOTHING in kinds else 0)


def _why(entry: derivatives_yaml.Entry) -> str:
    for name in (entry.name, entry.functional):
        if name in rules:
            return ", ".join(f.__name__ for f in rules[name].formulas)
        if name in catalogue:
            return catalogue[name].reason or KINDS[catalogue[name].kind]
        if name in rules.absent:
            return rules.absent[name]
    return ""


def conformance(names: Sequence[str], limit: int, workers: int | None) -> Answer:
    """The six modes of each operator of the database; status 1 if something of ours failed."""
    all_names = sorted({op.name for op in op_db() if op.supports_autograd})
    for name in names:
        if name not in all_names:
            raise Unknown(f"the operator database has no differentiable {name!r}")
    columns = list(measurements.COLUMNS)
    found, failures = measurements.measure_all(names or all_names, columns, limit, workers)
    parts: list[Part] = [
        Table("operators", ["operator", "dtype", *columns], measurements.lines_of(found, columns)),
        Table("sums", measurements.header(columns), measurements.totals(found, columns)),
        Lines("failures", "\n".join(failures), failures),
    ]
    return Answer(parts, 1 if failures else 0)
