"""The text of docs/mutants.md, and its list of mutants."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Sequence

import torch

from torch_manualgrad.testing.comparison.report import table

from .candidates import KINDS
from .proof import RAISES, SAME
from .right import NOT_RIGHT
from .run import Results

#: Where a mutant is wrong that is right in first and second order at the samples.
ONLY = {
    "ties": "wrong only where inputs are equal, which they are in no sample: a check has to make them so",
    "precision": "wrong only in a dtype of lower precision than the samples': a check has to convert them",
    "third order": "wrong only from the third order on",
    "fake kernel": "wrong only under fake tensors",
    "vmap rule": "wrong only in a batch",
    "compiled": "wrong only where it is compiled",
}


def table_of(results: Results, kinds: Sequence[str]) -> str:
    """The score by kind."""
    lines = []
    for kind in kinds:
        found = results.wrong(kind)
        lines.append([kind, len(found), *(sum(bool(r[c]) for r in found) for c in ("ours", "theirs"))])
    total = ["**all**", *(sum(int(line[i]) for line in lines) for i in (1, 2, 3))]
    head = ["kind", "mutants", "caught by `check`", "by gradcheck & co"]
    return table([head, *([str(x) for x in line] for line in [total, *lines])])


def survivors(results: Results, kinds: Sequence[str] = KINDS) -> str:
    """The mutants that `check` does not catch, and where they are wrong."""
    lines = []
    for kind in kinds:
        found = [r["name"] + f" `{r['change']}`" * bool(r["change"]) for r in results.wrong(kind) if not r["ours"]]
        if found:
            lines += [f"- {kind}, {ONLY.get(kind, 'wrong in a derivative of first or second order')}:"]
            lines += [f"  - {name}" for name in found]
    return "\n".join(lines)


def _false_alarms(results: Results, checker: str) -> str:
    found = [r for r in results.judged_right() if r[checker]]
    return ", ".join(f"{r['name']} ({', '.join(r[checker])})" for r in sorted(found, key=lambda r: str(r["name"])))


def _ended(results: Results) -> str:
    found = results.ended()
    return f"\nEnded the process, and not counted: {', '.join(found)}.\n" if found else ""


def listed(results: Results) -> str:
    """Every mutant, and who caught it, as comma-separated values."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["kind", "of", "place", "change", "check", "gradcheck & co"])
    for r in sorted(results.wrong(), key=lambda r: (KINDS.index(r["kind"]), r["of"], r["name"])):
        out.writerow([r["kind"], r["of"], r["name"], r["change"], " ".join(r["ours"]), " ".join(r["theirs"])])
    return text.getvalue()


def page(results: Results, left_out: Sequence[str]) -> tuple[str, str]:
    """The text of docs/mutants.md, and of build/measure/mutants.csv."""
    wrong, right = results.wrong(), results.judged_right()
    caught = {c: sum(bool(r[c]) for r in wrong) for c in ("ours", "theirs")}
    alarms = {c: sum(bool(r[c]) for r in right) for c in ("ours", "theirs")}
    missed = survivors(results)
    not_right = "\n".join(f"- {name}: {reason}" for name, reason in NOT_RIGHT.items())
    text = f"""# Mutants

How much does `mg.testing.check` catch? {len(wrong)} wrong derivatives were generated from right ones. `check` reports
{caught["ours"]} of them ({caught["ours"] / len(wrong):.1%}); `gradcheck`, `gradgradcheck` and `torch.library.opcheck` together
{caught["theirs"]} ({caught["theirs"] / len(wrong):.1%}). Of {len(right)} right functions `check` reports {alarms["ours"]}
({alarms["ours"] / len(right):.1%}), they report {alarms["theirs"]} ({alarms["theirs"] / len(right):.1%}).

{table_of(results, KINDS)}

- A mutant is a rule of this package with one node of a formula's syntax tree changed, or a formula that is called with
  other arguments or whose result is changed, activated by `mg.override`; or a custom operator (fake kernels, vmap rules, some
  ties); or a right function, compiled while a part of `torch_manualgrad.compiling` is wrong. `tools/mutants/operators.py`,
  `wrappers.py`, `own.py` and `compiled.py` have the changes of each kind.
- Of {len(results.mutants)} candidates {results.count(SAME)} were excluded because all their derivatives equal the right ones at the samples, in random directions (or at ties, in single precision, in third order, in a batch: `proof.py`);
  {results.count(RAISES)} because they raise in a plain derivative, so any test catches them.
- Both checkers have the same samples: up to two real ones and a complex one of the rule's own. `check` runs with all of its checks except
  {", ".join(left_out)}; gradcheck with `check_forward_ad`, `check_batched_grad` and `check_batched_forward_grad`,
  gradgradcheck with `check_fwd_over_rev` and `check_batched_grad`, both with default tolerances; opcheck where the function is
  an operator. Compiled functions have the check `compiled` alone, and gradcheck and gradgradcheck of the function that `mg.compile` returns.
- Caught: a check fails that does not fail for the right function. A false alarm is any failing check of a right function.
- Right functions: the {len(right) - len(results.of_database())} originals of the mutants, and one call of each of {len(results.of_database())} operators of PyTorch's
  operator database under `mg.override("*")`.

## Survivors

{missed or "None."}

## False alarms

`check`: {_false_alarms(results, "ours") or "none"}.

gradcheck & co: {_false_alarms(results, "theirs") or "none"}.

Not counted as right functions:

{not_right}
{_ended(results)}

`make mutants` measures it again, and writes every mutant to `build/measure/mutants.csv`. Measured on torch {torch.__version__.partition("+")[0]}, CPU, {datetime.date.today()}.
"""
    return text, listed(results)
