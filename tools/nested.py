"""Writes docs/nested.md: the operators on nested tensors, by PyTorch and by this package, beside one another.

Run it:  python tools/nested.py                    (`make measure` does; a few minutes)
         python tools/nested.py --print softmax    (the rows whose names contain it, with every reason)
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from nested_cases import CASES, Case
from nested_probe import KINDS, MEASURES, measure

import torch_manualgrad as mg
from torch_manualgrad.nested.operators import LIMITS
from torch_manualgrad.testing.report import table

PAGE = Path(__file__).resolve().parents[1] / "docs" / f"{Path(__file__).stem}.md"
LAYOUTS = KINDS[1:]


def apart(case: Case, kind: str, what: str, override: bool) -> tuple[str, str]:
    """`measure` in a process of its own, which may abort."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what an abort says
        with mg.override("nested") if override else nullcontext():
            os.write(writing, json.dumps(measure(case, kind, what))[:60000].encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return tuple(json.loads(text)) if text else ("abort", f"signal {os.WTERMSIG(status)}")


Found = dict[tuple[str, str, str, bool], tuple[str, str]]


def measured(cases: Sequence[Case]) -> Found:
    """(case, kind, measure, whether under override) -> (outcome, why)."""
    found: Found = {}
    for case in cases:
        for kind in KINDS:
            for what in MEASURES:
                for override in (True, False) if kind in LAYOUTS else (True,):
                    outcome, why = apart(case, kind, what, override)
                    if override and outcome == "raises" and case.declared(kind, what):
                        outcome, why = "declared", case.declared(kind, what)
                    found[case.name, kind, what, override] = outcome, why
    return found


UNDER_OVERRIDE = """## Under override

- A call of which nothing is differentiated is PyTorch's own; where that raises, ours computes.
- A call that is tracked by autograd, or that has a tangent, is ours; what ours refuses, PyTorch's own does. What both
  refuse raises PyTorch's error, with ours as its cause.
- Where the library of calls is built, some calls keep PyTorch's graph, and enter no Python in first order: on a strided
  tensor whose components lie one after the other softmax, layer_norm, linear, the sum over the last dim, relu, gelu, silu,
  sums and products; on a jagged one relu, silu, linear, sums and products. Its backward operators are then ours where
  PyTorch's have no derivative, and cotangents are put in order before. What such a graph has saved must not be changed in
  place, as PyTorch says.
- A jagged result keeps its input's structure: the offsets and lengths themselves, and with them the nested int; what is
  known of the shortest and the longest length (what is learnt later only where the call did not keep PyTorch's graph); and
  places of the buffer that belong to no component.
- A view of a jagged tensor (`values()`, chunk, split, select, narrow, unbind, transpose), and a jagged tensor made of
  values, is a view in the sense of autograd, as in PyTorch: writes to either are seen in the other, with their
  gradients. Of strided tensors `values()`, chunk, split, narrow along the batch, unbind and select are such views; a write
  to several views from one call raises, as in PyTorch.
- Holes: positions of a jagged buffer that belong to no component (`lengths`) take part in no gradient of a dense argument,
  and in no reduction that PyTorch refuses for them, such as `nanmean()`, `var()` or a sum over the ragged dim. Where PyTorch
  reduces everything and has a value (`sum()`, `mean()`, `prod()`, `amax()`, `amin()`, `max()`, `min()`), it counts the holes, and
  an override keeps its value.
- A nested int is a size and no number: as an argument it is PyTorch's to take or to refuse.

What stays different on purpose:

| what | PyTorch | under override | why |
| --- | --- | --- | --- |
| stock columns below that say "raises" | raises | computes | the point of the family; a test that pins the refusal changes |
| softmax over the ragged dim of a jagged tensor, gradient | wrong | right | its backward is that of a dense dim |
| mean over everything of a jagged tensor with holes, gradient | divides by the used entries, its forward by all | the derivative of the forward | the two contradict one another |
| gradients that pass a transposed strided tensor | may come in the wrong order | right | PyTorch takes the cotangent's buffer for one in order |
| select from the components of a strided tensor | reads freed memory, may end the process | right; out of range raises IndexError | its strides and offsets are those of tensors that are gone |
| backward of split_with_sizes of a jagged tensor | ends the process | right | |
| select from the components of a strided tensor that autograd tracks | reads freed memory | a copy; a write to it stays there | no node of ours has it as a view |
| without the library of calls, chunk, split and narrow of a strided tensor that autograd tracks | a view, of which chunk and narrow have no gradient | a copy; a write to it stays there | the strided class has no function in Python as its history |
| gradient of a number that is shared by a jagged tensor with holes, where the cotangent is not zero in holes | counts the holes | leaves them out, as any gradient of a dense argument | holes belong to no component |
| a write to a view of a complex jagged tensor that autograd tracks | no such view has a gradient | raises at once | the view is made in an autograd function |

"""

MARKS = {"right": "ok", "wrong": "wrong", "raises": "raises", "declared": "declared", "abort": "abort"}


def cell(found: Found, name: str, kind: str, override: bool) -> str:
    """The four outcomes; one word where they agree."""
    outcomes = [MARKS[found[name, kind, what, override][0]] for what in MEASURES]
    return outcomes[0] if len(set(outcomes)) == 1 else ", ".join(outcomes)


def page(found: Found, cases: Sequence[Case]) -> str:
    columns = [("Ragged", True), *((layout, override) for layout in LAYOUTS for override in (True, False))]
    head = ["operator", *(f"{kind}{'' if kind == 'Ragged' else ', ours' if o else ', stock'}" for kind, o in columns)]
    lines = [head, *([case.name, *(cell(found, case.name, *c) for c in columns)] for case in cases)]
    totals = [["", *MARKS.values()]]
    for kind, override in columns:
        count = Counter(found[case.name, kind, what, override][0] for case in cases for what in MEASURES)
        title = kind if kind == "Ragged" else f"{kind}, {'under override' if override else 'stock'}"
        totals.append([title, *(str(count[outcome]) for outcome in MARKS)])
    limits = "\n".join(f"- {kind}, {what}: {why}." for (kind, what), why in LIMITS.items())
    return f"""# Nested tensors

Every operator on nested tensors, forward, backward, second order (the gradient of a gradient) and jvp, in this order; one
word where all four agree. Each is measured in double precision through a loss on the components of the result, against
a loop over the components with dense PyTorch.

- Ragged: `mg.nested.Ragged` and the functions of `mg.nested`. strided, jagged: PyTorch's own nested tensors with
  PyTorch's own calls, "ours" under `mg.override()`, "stock" without it.
- ok: right. wrong: a wrong value, without a word. raises: an error. abort: it ends the process. declared: an error that
  is declared, with its reason below, and tested.

{table(totals)}

What is declared:
{limits}

On jagged tensors a tangent is carried under dual numbers (`torch.autograd.forward_ad`) and through the operators below;
what is none of them raises. torch.func's transforms do not take PyTorch's nested tensors; they take a `Ragged`.

{UNDER_OVERRIDE}
## Operators

{table(lines)}

Measured on torch {torch.__version__.partition("+")[0]}, CPU. Written by `python tools/nested.py` (`make measure`).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the operators' names (default: all)")
    parser.add_argument("--print", action="store_true", help="print the page and every reason instead of writing it")
    parser.add_argument("--out", type=Path, default=PAGE, help="the file to write")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # what forks must not have started others
    for kind in KINDS:  # what is imported on first use is imported once, before the forks
        with mg.override("nested"):
            measure(CASES[0], kind, "second order")
    cases = [c for c in CASES if not options.names or any(n in c.name for n in options.names)]
    found = measured(cases)
    text = page(found, cases)
    if not options.print:
        options.out.write_text(text)
        print(f"wrote {options.out}")
        return
    print(text)
    for (name, kind, what, override), (outcome, why) in found.items():
        if outcome not in ("right", "declared"):
            print(f"{name}, {kind}, {'ours' if override else 'stock'}, {what}: {outcome}: {why.splitlines()[0]}")


if __name__ == "__main__":
    main()
