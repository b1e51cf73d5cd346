"""Mutants of derivatives: there are enough of each kind, they are wrong, and the checker catches them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

import torch_manualgrad as mg

TOOLS = Path(__file__).resolve().parents[2] / "tools"
if not TOOLS.exists():
    pytest.skip("not a source tree", allow_module_level=True)
sys.path.append(str(TOOLS))  # at the end: a tool has the name of a package

from mutants.candidates import KINDS, candidates  # noqa: E402
from mutants.compiled import FAULTS  # noqa: E402
from mutants.own import FUNCTIONS, defined, points  # noqa: E402
from mutants.page import page  # noqa: E402
from mutants.proof import DIFFERENT, RAISES, SAME, compared  # noqa: E402
from mutants.run import Results, judge  # noqa: E402
from mutants.score import failing  # noqa: E402
from mutants.subject import Subject  # noqa: E402

# the checks that are not run unless asked for, and the mutants that need them
MEANT = {"ties": "edges", "third order": "third order", "precision": "precision"}


def test_there_are_enough() -> None:
    counts = {kind: len(candidates(kind)) for kind in KINDS}
    assert min(counts.values()) >= 20, counts
    assert len({m.key for kind in KINDS for m in candidates(kind)}) == sum(counts.values()) >= 300


def is_in_single_precision(sample: mg.Sample) -> bool:
    return any(isinstance(x, torch.Tensor) and x.dtype is torch.float32 for x in tree_leaves(sample.args))


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutant_is_wrong_and_is_caught(kind: str) -> None:
    for mutant in candidates(kind)[:30]:
        try:
            # the last sample alone: a complex one, if there are any
            wrong, right = (replace(subject, samples=subject.samples[-1:]) for subject in mutant.pair())
        except Exception:
            continue  # what is written there has no meaning
        if kind == "third order" and is_in_single_precision(wrong.samples[0]):
            continue  # the third derivative may be wrong by less than the rounding of an operator that has no double
        if compared(kind, wrong, right) == DIFFERENT:
            break
    else:
        pytest.fail("none of these is wrong")
    meant = MEANT.get(kind)
    left_out = {*mg.testing.ALL_CHECKS} - {*mg.testing.CHECKS, meant}
    if meant is None or meant in mg.testing.ALL_CHECKS:
        assert failing(wrong, "ours", tuple(left_out), known=()), mutant


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_the_compiler_is_caught(fault: str) -> None:
    """On each function that it makes wrong."""
    tried = 0
    for mutant in candidates("compiled"):
        if mutant.name.endswith(f": {fault}"):
            wrong, right = mutant.pair()
            if compared("compiled", wrong, right) == DIFFERENT:
                tried += 1
                assert failing(wrong, "ours", ()) == ["compiled"], mutant
    assert tried


@pytest.mark.slow
def test_compiled_functions_without_a_fault_pass() -> None:
    right = {m.family: m.pair()[1] for m in candidates("compiled")}
    assert not [name for name, subject in right.items() if failing(subject, "ours", ())]


def _subject(f, vjp) -> Subject:
    return Subject("sine", defined(f, vjp), [mg.Sample(points(2, 2))])


def test_mutants_that_change_nothing_are_excluded() -> None:
    right = _subject(*FUNCTIONS["sin"])
    same = _subject(torch.sin, lambda g, x: g * torch.sin(x + torch.pi / 2))
    raising = _subject(torch.sin, lambda g, x: g @ x.cos()[:1])
    assert compared("sign", same, right) == SAME
    assert compared("sign", raising, right) == RAISES
    assert compared("sign", _subject(torch.sin, lambda g, x: -g * x.cos()), right) == DIFFERENT


def test_a_record_of_a_mutant(tmp_path: Path) -> None:
    everything_else = [c for c in mg.testing.ALL_CHECKS if c not in mg.testing.CHECKS]
    record = judge("fake kernel", "sin: other dtype", everything_else)
    results = Results(tmp_path / "mutants.json")
    results.add(record)
    results.add({"kind": "fake kernel", "name": "sin: nothing", "verdict": SAME})
    results.save()
    again = Results(tmp_path / "mutants.json")
    assert [r["name"] for r in again.wrong("fake kernel")] == ["sin: other dtype"]
    assert again.wrong("sign") == [] and again.count(SAME) == 1
    assert {"fake", "opcheck"} >= set(again.wrong()[0]["ours"]) > set()
    assert again.judged_right() == [{"name": "operator sin", "ours": [], "theirs": []}]
    assert again.of_database() == [] == again.ended()
    text, listed = page(again, ["compile"])
    assert "`check` reports\n1 of them (100.0%)" in text and "None." in text
    assert listed.splitlines()[1].startswith("fake kernel,operator sin,sin: other dtype")
